"""The library's bounds, gradients, evidences and posteriors against an independent interpreter, on random declarations."""

import pytest
from interpreter.compare import Comparer
from interpreter.random_declarations import random_declaration

KINDS = ("complete", "missing", "clamped")


@pytest.mark.parametrize("first", range(0, 150, 15))
def test_random_models_agree_with_the_interpreter(first):
    made = 0
    for seed in range(first, first + 15):
        declaration, _ = random_declaration(seed)
        for comparison in Comparer(declaration, seed).run(kinds=[KINDS[seed % 3]], requests=4):
            made += 1
            assert comparison.agrees, f"seed {seed}, {declaration}: {comparison}"
    assert made >= 75
