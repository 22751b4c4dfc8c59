"""Small models and a few rows that the tests of data share."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributions as td

from aevb import GRU, Bernoulli, Conditional, Model, Normal, OneHot, conv, deconv, table

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Sphere(Conditional):
    """A family of vectors, N(μ, I), without a rule for missing entries."""

    def heads(self, d):
        return {"loc": d}

    def distribution(self, loc):
        return td.Independent(
            td.Normal(loc, loc.new_ones(()), validate_args=False), 1, validate_args=False
        )


def vae(likelihood=None):
    torch.manual_seed(0)
    return Model({"z": Normal(2), "x | z": likelihood or Normal(4)}, {"z | x": Normal()}).double()


def mixture():
    torch.manual_seed(0)
    return Model({"y": OneHot(3, learned=True), "x | y": Normal(4)}, {"y | x": OneHot()}).double()


def conditional():
    torch.manual_seed(0)
    return Model(
        {"z | y": Normal(2), "x | y, z": Normal(4)}, {"z | x, y": Normal()}, given={"y": 3}
    ).double()


def state():
    """Return a model in which p reads x through a recurrence."""
    p = {"h[t] | h[t-1], x[t-1]": GRU(3), "z[t] | h[t]": Normal(2), "x[t] | h[t], z[t]": Normal(4)}
    torch.manual_seed(0)
    return Model(p, {"z[t] | h[t], x[t]": Normal()}).double()


def controlled():
    """Return a model of two sequences: x and its given input u."""
    torch.manual_seed(0)
    return Model(
        {"z[t]": Normal(2), "x[t] | z[t], u[t]": Normal(4)},
        {"z[t] | x[t]": Normal()},
        given={"u": 2},
    ).double()


def image():
    torch.manual_seed(0)
    return Model(
        {"z": Normal(2), "x | z": Bernoulli((1, 4, 4), net=deconv(4))},
        {"z | x": Normal(net=conv(4, hidden=8))},
    ).double()


def by_row():
    torch.manual_seed(0)
    return Model(
        {"z": Normal(2), "x | z": Normal(4)}, {"z | i": Normal(net=table(3))}, given={"i": 1}
    ).double()


X = np.random.default_rng(0).standard_normal((5, 4))
SEQUENCE = np.random.default_rng(1).standard_normal((5, 3, 4))


def put(array, value, *place):
    array = np.array(array, dtype=float)
    array[place] = value
    return array


LABELS = [0, 2, 1, 1, 0]
LENGTHS = [3, 1, 2, 3, 2]
REAL = np.arange(3) < np.array(LENGTHS)[:, None]
RAGGED = [SEQUENCE[i, :length] for i, length in enumerate(LENGTHS)]
