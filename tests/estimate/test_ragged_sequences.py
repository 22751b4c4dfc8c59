"""Sequences of different lengths: what lies beyond the end changes nothing, however the lengths are
said.
"""

import re

import numpy as np
import pytest
import torch
from small_models import INF, LENGTHS, NAN, RAGGED, REAL, SEQUENCE, controlled, state, vae

from aevb import Bernoulli, Model, Normal, OneHot, fit


@pytest.mark.parametrize("padding", [0.0, 7.0, NAN, INF], ids=["zeros", "sevens", "NaN", "inf"])
def test_what_stands_in_the_padding_does_not_matter(padding):
    model = state()
    x = np.where(REAL[..., None], SEQUENCE, padding)
    expected = model.elbo(x=SEQUENCE, lengths=LENGTHS, seed=0).value
    assert torch.isfinite(expected).all()
    for end in (
        {"lengths": LENGTHS},
        {"lengths": torch.tensor(LENGTHS)},
        {"steps": REAL},
        {"steps": REAL.tolist()},
        {"steps": REAL.astype(int)},
    ):
        assert torch.equal(model.elbo(x=x, **end, seed=0).value, expected)


def test_padding_may_lie_outside_the_support():
    torch.manual_seed(0)
    model = Model(
        {"z[t]": Normal(2), "x[t] | z[t]": Bernoulli(4)}, {"z[t] | x[t]": Normal()}
    ).double()
    x = (SEQUENCE > 0).astype(float)
    padded = np.where(REAL[..., None], x, 255.0)
    assert torch.equal(
        model.elbo(x=padded, lengths=LENGTHS, seed=0).value,
        model.elbo(x=x, lengths=LENGTHS, seed=0).value,
    )


def test_a_given_without_time_is_constant_over_it():
    p = {"z[t]": Normal(2), "x[t] | z[t], c": Normal(4)}
    torch.manual_seed(0)
    static = Model(p, {"z[t] | x[t]": Normal()}, given={"c": 2}).double()
    torch.manual_seed(0)
    timed = Model(
        {"z[t]": Normal(2), "x[t] | z[t], c[t]": Normal(4)},
        {"z[t] | x[t]": Normal()},
        given={"c": 2},
    ).double()
    c = np.random.default_rng(3).standard_normal((5, 2))
    repeated = np.repeat(c[:, None], 3, 1)
    assert torch.allclose(
        static.elbo(x=SEQUENCE, c=c, seed=0).value,
        timed.elbo(x=SEQUENCE, c=repeated, seed=0).value,
        rtol=0,
        atol=1e-12,
    )


# Ragged sequences as lists ------------------------------------------------------------------------


def objects(rows):
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        objects,
        lambda rows: [row.tolist() for row in rows],
        lambda rows: [torch.tensor(row) for row in rows],
    ],
)
def test_a_list_of_sequences_is_padded_and_says_its_lengths(form):
    model = state()
    expected = model.elbo(x=SEQUENCE, lengths=LENGTHS, seed=0).value
    assert torch.equal(model.elbo(x=form(RAGGED), seed=0).value, expected)
    assert torch.equal(
        model.prepare(x=form(RAGGED))["steps"], model.prepare(x=SEQUENCE, lengths=LENGTHS)["steps"]
    )


def test_a_list_of_sequences_of_one_length_is_an_array():
    assert "steps" not in state().prepare(x=list(SEQUENCE))


def test_sequences_of_numbers_and_of_labels_may_be_ragged():
    torch.manual_seed(0)
    model = Model({"y[t]": OneHot(3), "x[t] | y[t]": Normal(1)}, {"y[t] | x[t]": OneHot()}).double()
    x, y = [[0.5, 1.0, -1.0], [2.0]], [[0, 2, 1], [1]]
    padded = model.elbo(
        x=[[0.5, 1.0, -1.0], [2.0, 0, 0]], y=[[0, 2, 1], [1, 0, 0]], lengths=[3, 1]
    ).value
    assert torch.equal(model.elbo(x=x, y=y).value, padded)


U = [np.zeros((length, 2)) for length in LENGTHS]
BAD_RAGGED = {
    "lengths besides": (
        state,
        {"x": RAGGED, "lengths": LENGTHS},
        "so the lengths are already known. Leave out lengths=.",
    ),
    "steps besides": (state, {"x": RAGGED, "steps": REAL}, "Leave out steps=."),
    "another sequence disagrees": (
        controlled,
        {"x": RAGGED, "u": [*U[:2], np.zeros((3, 2)), *U[3:]]},
        "Row 2 (from 0) has 2 steps of x but 3 of u.",
    ),
    "another sequence is whole": (
        controlled,
        {"x": RAGGED, "u": np.zeros((5, 3, 2))},
        "Row 1 (from 0) has 1 step of x but 3 of u.",
    ),
    "rows differ": (
        controlled,
        {"x": RAGGED, "u": U[:4]},
        "The data disagree on the number of examples: x 5, u 4.",
    ),
    "no steps": (
        state,
        {"x": [RAGGED[0], np.zeros((0, 4))]},
        "x has no steps in row 1 (from 0). Leave that row out.",
    ),
    "another width": (
        state,
        {"x": [RAGGED[0], np.zeros((1, 3))]},
        "x has shape [1, 3] in row 1 (from 0) but [3, 4] in row 0. Only",
    ),
    "words": (state, {"x": [RAGGED[0], np.array([["a"] * 4])]}, "in row 1 (from 0), not numbers."),
    "no sequence": (
        vae,
        {"x": [[0.0] * 4, [0.0] * 3]},
        "its rows have different lengths, which only a sequence may have (x[t]).",
    ),
}


@pytest.mark.parametrize(("build", "data", "message"), BAD_RAGGED.values(), ids=BAD_RAGGED)
def test_ragged_sequences_that_do_not_fit_are_refused(build, data, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build().elbo(**data)


def test_two_ragged_sequences_agree_row_by_row():
    model = controlled()
    u = np.random.default_rng(2).standard_normal((5, 3, 2))
    expected = model.elbo(x=SEQUENCE, u=u, lengths=LENGTHS, seed=0).value
    assert torch.equal(
        model.elbo(x=RAGGED, u=[row[:n] for row, n in zip(u, LENGTHS)], seed=0).value, expected
    )


def test_fit_takes_ragged_sequences_from_lists_datasets_and_archives(tmp_path):
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, i):
            return RAGGED[i]

    np.savez(tmp_path / "lengths.npz", x=SEQUENCE, lengths=LENGTHS)
    np.savez(tmp_path / "steps.npz", x=SEQUENCE, steps=REAL)
    found = []
    for data in (
        {"x": RAGGED},
        RAGGED,
        Rows(),
        {"x": SEQUENCE, "lengths": LENGTHS},
        tmp_path / "lengths.npz",
        tmp_path / "steps.npz",
    ):
        model = state()
        fit(model, data, steps=3, batch=4)
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert all(torch.equal(found[0], other) for other in found[1:])
