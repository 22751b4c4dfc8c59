"""Factor analysis with known parameters, and a model for each kind of q.

The tests of the gap and of the diagnostics share them.
"""

import numpy as np
import torch

from aevb import GRU, LSTM, Bernoulli, Exact, Mixture, Model, Normal, OneHot, linear, mlp
from aevb.declare.distributions import inverse_softplus

W = torch.tensor([[-0.5, -1.0], [-1.0, -1.0], [2.0, 0.5]], dtype=torch.float64)
SIGMA = torch.tensor([0.4, 0.2, 0.3], dtype=torch.float64)
PRECISION = torch.eye(2, dtype=torch.float64) + W.T @ torch.diag(SIGMA**-2) @ W
TO_MEAN = torch.linalg.inv(PRECISION) @ W.T @ torch.diag(SIGMA**-2)  # E[z|x] = TO_MEAN x


def factor_analysis(q) -> Model:
    """Return the model p with known W and σ, and a q of this family whose mean is exact."""
    torch.manual_seed(0)
    model = Model(
        p={"z": Normal(2), "x | z": Normal(3, net=linear(bias=False), scale="learned")},
        q={"z | x": q},
    ).double()
    with torch.no_grad():
        model.factors["p(x|z)"].net.blocks.weights["z"].copy_(W)
        model.factors["p(x|z)"].vectors["scale"].copy_(inverse_softplus(SIGMA))
        model.factors["q(z|x)"].net.blocks.weights["x"].copy_(TO_MEAN)
    return model


def rows(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return z @ W.T + SIGMA * torch.randn(n, 3, generator=generator, dtype=torch.float64)


NET = mlp(8)
X, S = (
    torch.rand(6, 5, generator=torch.Generator().manual_seed(0)).round(),
    torch.rand(6, 4, 3, generator=torch.Generator().manual_seed(0)).round(),
)
RECURRENT = {
    "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(6),
    "z[t] | h[t]": Normal(2, net=NET),
    "x[t] | h[t], z[t]": Bernoulli(3, net=NET),
}
SMOOTHING = {"b[t] | b[t+1], x[t]": GRU(6), "z[t] | h[t], b[t]": Normal(net=NET, scale="learned")}
MIXED = {"y": OneHot(3), "z | y": Normal(2), "x | z": Bernoulli(5, net=NET)}
ENDS = {"z[0]": Normal(2, learned=True), "z[t] | z[t-1], x[t]": Normal(net=NET)}
CASES = {
    "enumerated": (MIXED, {"y | x": OneHot(net=NET), "z | x, y": Normal(net=NET)}, {"x": X}),
    "partly known": (
        MIXED,
        {"y | x": OneHot(net=NET), "z | x, y": Normal(net=NET)},
        {"x": X, "y": np.array([0, -1, 2] * 2)},
    ),
    "by Bayes": (MIXED, {"z | x": Normal(net=NET), "y | z": Exact()}, {"x": X}),
    "mixture": (
        {"z": Normal(2), "x | z": Bernoulli(5, net=NET)},
        {"z | x": Mixture(net=NET, components=2)},
        {"x": X},
    ),
    "hierarchy": (
        {"a": Normal(2), "b | a": Normal(3), "x | b": Bernoulli(5, net=NET)},
        {"b | x": Normal(net=mlp(8, dropout=0.2)), "a | b": Normal(net=NET)},
        {"x": torch.where(X * torch.arange(5) == 4, torch.nan, X)},
    ),
    "filtering": (RECURRENT, {"z[t] | h[t], x[t]": Normal(net=NET)}, {"x": S}),
    "smoothing, ragged": (RECURRENT, SMOOTHING, {"x": S, "lengths": np.array([4, 3, 2, 1, 4, 2])}),
    "an end of its own": (
        {"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Bernoulli(3)},
        ENDS,
        {"x": S},
    ),
    "read in the loop": (
        {"z[t] | z[t-1]": Normal(2), "x[t] | z[t]": Bernoulli(3)},
        {"h[t] | h[t-1], z[t-1], x[t]": GRU(5), "z[t] | h[t]": Normal(net=NET)},
        {"x": S},
    ),
    "a chain": (
        {"y[t] | y[t-1]": OneHot(3), "x[t] | y[t]": Bernoulli(3)},
        {"y[t] | y[t-1], x[t]": OneHot(net=NET)},
        {"x": S},
    ),
    "score function": (
        {"b": Bernoulli(9), "x | b": Bernoulli(5, net=NET)},
        {"b | x": Bernoulli(net=NET)},
        {"x": X},
    ),
}
