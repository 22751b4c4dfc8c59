"""The library's bounds, gradients, evidences and posteriors against an independent interpreter, on
random declarations.
"""

import pytest
from interpreter.compare import KINDS, Comparer
from interpreter.faults import FAULTS, noticed
from interpreter.random_declarations import random_declaration


@pytest.mark.parametrize(
    "first",
    [*range(0, 75, 15), *(pytest.param(k, marks=pytest.mark.slow) for k in range(75, 150, 15))],
)
def test_random_models_agree_with_the_interpreter(first):
    made = 0
    for seed in range(first, first + 15):
        declaration, _ = random_declaration(seed)
        for comparison in Comparer(declaration, seed).run(kinds=[KINDS[seed % 3]], requests=4):
            made += 1
            assert comparison.agrees, f"seed {seed}, {declaration}: {comparison}"
    assert made >= 75


NOTICED = {  # a random declaration, and the kind of rows, whose comparisons notice the fault
    "pairwise marginals of a chain are transposed": (0, "missing"),
    "a known latent pays − log q": (0, "missing"),
    "the sum over finite latents forgets their prior": (0, "missing"),
    "missing entries of a Normal count": (1, "missing"),
    "iwae lacks − log K": (1, "missing"),
    "q's entropy has the wrong sign": (2, "missing"),
    "dreg weights samples by w² whatever the KL weight": (3, "missing"),
    "KL between Normals has its arguments exchanged": (5, "missing"),
    "a Gaussian belief forgets the noise of a rule": (14, "complete"),
    "densities of q ignore its ends": (7, "missing"),
    "the last step of a padded row is read at the padding": (7, "missing"),
    "a function of nothing but the outside is not zeros": (16, "missing"),
    "a KL in closed form though p's parent depends on the latent": (30008, "complete"),
    "the mean over samples is planned before every sum": (63, "missing"),
    "the mean over samples is taken before every sum": (63, "missing"),
    "every sum is planned before the mean over samples": (69, "missing"),
    "every sum is taken before the mean over samples": (69, "missing"),
    "an expectation is planned inside a logarithm that its weights do not depend on": (
        79,
        "complete",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_library_is_noticed(fault):
    seed, kind = NOTICED[fault]
    assert noticed(fault, [seed], kinds=[kind], requests=4)["noticed"] > 0
    assert noticed(None, [seed], kinds=[kind], requests=4)["noticed"] == 0
