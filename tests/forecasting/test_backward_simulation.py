"""Tests of backward simulation: log-densities of pairs, and draws by weights."""

import torch

from aevb import Deterministic, Model, Normal, Poisson, mlp
from aevb.forecasting.backward_simulation import _drawn_by, _Pairs, why_not_markov


def test_pairs_of_particles_and_paths_equal_a_network_for_each_pair():
    """Parameters for each particle give the log-densities of the joint evaluation."""
    torch.manual_seed(0)
    model = Model(
        {
            "z[0]": Normal(2),
            "z[t] | z[t-1], u[t]": Normal(2, net=mlp(4)),
            "h[t] | z[t-1]": Deterministic(3, net=mlp(4)),
            "c[t] | h[t], c[t-1]": Poisson(2),
            "x[t] | z[t], c[t-1]": Normal(2),
        },
        {"z[t] | x[t], c[t]": Normal()},
        given={"u": 1},
    ).double()
    data = model.sample(3, steps=6, u=torch.randn(3, 6, 1).double(), seed=0)
    x = data["x"].clone()
    x[0, 3, 1] = torch.nan
    batch = model.prepare(x=x, c=data["c"], u=torch.randn(3, 6, 1).double(), lengths=[6, 4, 6])
    assert why_not_markov(model, batch) is None
    pairs = _Pairs(model, batch, ["z"])
    assert (pairs.alone, pairs.joint) == (["z", "c"], [])
    every = {"z": torch.randn(7, 1, 3, 2).double()}
    current = {"z": torch.randn(5, 3, 2).double()}
    with model._evaluating(None):
        fast = pairs._log_p(1, every, current, pairs._parameters(1, every))
        pairs.alone, pairs.joint = [], ["z", "c"]
        slow = pairs._log_p(1, every, current, {})
    assert fast.shape == (7, 5, 3)
    assert torch.allclose(fast, slow)


def test_draws_by_weights_have_the_frequencies_of_the_weights():
    weights = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64)
    torch.manual_seed(0)
    found = _drawn_by(weights.log()[:, None, None].expand(4, 20_000, 2))
    share = torch.bincount(found.flatten(), minlength=4).double() / found.numel()
    # The standard error of a share is at most 0.0025.
    assert torch.allclose(share, weights, atol=0.0125)
    assert share[1] == 0
