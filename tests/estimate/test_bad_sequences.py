"""Every message for bad sequences says what is wrong, in which row, and what to pass."""

import math
import re

import pytest
import torch

from aevb import GRU, Model, Normal, fit

NAN = math.nan
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 5, 2, generator=GENERATOR)
U = torch.randn(3, 5, 1, generator=GENERATOR)
ALL = torch.ones(3, 5, dtype=torch.bool)
torch.manual_seed(0)
DRIVEN = Model(
    {
        "z[t] | z[t-1], u[t]": Normal(1, scale="learned"),
        "x[t] | z[t]": Normal(2, scale="learned"),
    },
    {"z[t] | x[t]": Normal()},
    given={"u": 1},
)
RECURRENT = Model(
    {
        "h[t] | h[t-1], x[t-1]": GRU(3),
        "z[t] | h[t]": Normal(1),
        "x[t] | z[t], h[t]": Normal(2, scale="learned"),
    },
    {"z[t] | h[t], x[t]": Normal()},
)


def ragged(value):
    return [row[: 3 + i] for i, row in enumerate(value)]


def without(value, row, *steps):
    found = value.clone()
    for step in steps:
        found[row, step] = False if value.dtype == torch.bool else NAN
    return found


LENGTHS = "lengths holds one number for each of the 3 rows, from 1 to 5"
FROM_THE_FIRST = "steps marks each row's real steps from the first on, without gaps; "
BAD = {
    "negative lengths": ({"lengths": [5, -1, 5]}, f"{LENGTHS}; row 1 (from 0) has -1."),
    "lengths of zero": ({"lengths": [0, 5, 5]}, f"{LENGTHS}; row 0 (from 0) has 0."),
    "lengths that are too long": ({"lengths": [5, 5, 6]}, f"{LENGTHS}; row 2 (from 0) has 6."),
    "lengths that are not whole": ({"lengths": [2.5, 5, 5]}, f"{LENGTHS}; row 0 (from 0) has 2.5."),
    "lengths that are missing": ({"lengths": [5, NAN, 5]}, f"{LENGTHS}; row 1 (from 0) has nan."),
    "lengths of other rows": ({"lengths": [5, 5]}, f"{LENGTHS}; it has shape [2]."),
    "lengths in words": ({"lengths": list("abc")}, "lengths holds 'a' in row 0 (from 0), not a"),
    "one length for all": (
        {"lengths": 7},
        "lengths=7, but x has 5 steps. Leave out lengths=, or give a number for each row.",
    ),
    "a hole in steps": (
        {"steps": without(ALL, 1, 2)},
        f"{FROM_THE_FIRST}row 1 (from 0) has step 3, but not the one before. For a step that was "
        f"not observed put NaN into the data.",
    ),
    "a hole at the start of steps": (
        {"steps": without(ALL, 2, 0)},
        f"{FROM_THE_FIRST}row 2 (from 0) has step 1, but not the one before.",
    ),
    "steps without a step": (
        {"steps": without(ALL, 0, *range(5))},
        f"{FROM_THE_FIRST}row 0 (from 0) has no step.",
    ),
    "steps of another shape": ({"steps": ALL[:, :3]}, "steps has shape [3, 3]; expected [N, T] ="),
    "steps and lengths": ({"steps": ALL, "lengths": [5] * 3}, "Pass steps= or lengths=, not both."),
    "lists and lengths": (
        {"x": ragged(X), "u": ragged(U), "lengths": [3, 4, 5]},
        "x is a list of sequences of different lengths, so the lengths are already known. Leave "
        "out lengths=.",
    ),
    "lists of other lengths": (
        {"x": ragged(X), "u": [row[:4] for row in U]},
        "Row 0 (from 0) has 3 steps of x but 4 of u. Sequences of one row have one length",
    ),
    "a row without steps": (
        {"x": [X[0], X[1, :0]], "u": [U[0], U[1, :0]]},
        "x has no steps in row 1 (from 0). Leave that row out.",
    ),
    "no steps": ({"x": X[:, :0], "u": U[:, :0]}, "x has no steps."),
    "no rows": ({"x": X[:0], "u": U[:0]}, "x has no examples."),
    "other numbers of steps": (
        {"u": U[:, :4]},
        "The data disagree on the number of steps: x 5, u 4.",
    ),
    "other numbers of rows": (
        {"u": U[:2]},
        "The data disagree on the number of examples: x 3, u 2.",
    ),
    "a hole in what is given": (
        {"u": without(U, 0, 2)},
        'u has missing entries but p reads it ("z[t] | z[t-1], u[t]"). Fill the entries, or '
        "declare u in p and q.",
    ),
    "a hole at the end of what is given": (
        {"u": without(U, 0, 4)},
        "If the NaN at the end of the rows are only padding, pass the length of each row too, in "
        "an array lengths next to u.",
    ),
    "a sequence without rows": (
        {"x": X[0], "u": U[0]},
        "x has shape [5, 2]; expected [N, T, 2], the examples first. If it is one sequence of 5 "
        "steps, write x.reshape(1, 5, 2).",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_sequences(name):
    data, words = BAD[name]
    data = {"x": X, "u": U} | data
    with pytest.raises(ValueError, match=re.escape(words)):
        DRIVEN.elbo(**data)
    with pytest.raises(ValueError, match=re.escape(words)):
        fit(DRIVEN, data, steps=1, progress=False)


def test_holes_at_the_ends_of_data():
    """They are missing steps: marginalised, or refused by a q that never saw rows end so."""
    gone = without(X, 0, 3, 4)
    shorter = DRIVEN.log_evidence(x=X, u=U, lengths=[3, 5, 5]).value
    torch.testing.assert_close(DRIVEN.log_evidence(x=gone, u=U).value, shorter)
    fit(RECURRENT, {"x": X}, steps=2, seed=0, progress=False)
    with pytest.raises(ValueError, match=re.escape(
        "1 row ends in steps without data (first, from 0: row 0), which q was not trained on, so "
        "it cannot forecast them"
    )):  # fmt: skip
        RECURRENT.posterior(x=gone)
