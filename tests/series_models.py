"""Models of series with given parameters, and their exact answers by joint Gaussians and by paths.

The references know no filter: all variables of a linear-Gaussian model are one Gaussian, and
conditioning it gives every belief and forecast.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from exact_models import MODELS

from aevb import Model, Normal, OneHot, linear
from aevb.evidence.forward_pass import why_not_forward


@dataclass(frozen=True)
class StateSpace:
    """z[0] ~ N(0, P), z[t] = F z[t−1] + N(0, Q), x[t] = H z[t] + N(0, R)."""

    F: np.ndarray
    Q: np.ndarray
    H: np.ndarray
    R: np.ndarray
    P: np.ndarray

    def joint(self, steps):
        """The covariance of all states [T · D] followed by all observations [T · M]."""
        d, m = len(self.F), len(self.H)
        states = np.zeros((steps * d, steps * d))
        variance = self.P
        for t in range(steps):
            variance = variance if t == 0 else self.F @ variance @ self.F.T + self.Q
            block = variance
            for s in range(t, steps):
                block = block if s == t else self.F @ block
                states[s * d : (s + 1) * d, t * d : (t + 1) * d] = block
                states[t * d : (t + 1) * d, s * d : (s + 1) * d] = block.T
        H = np.kron(np.eye(steps), self.H)
        cross = H @ states
        whole = np.block([[states, cross.T], [cross, cross @ H.T + np.kron(np.eye(steps), self.R)]])
        assert whole.shape == (steps * (d + m),) * 2
        return whole

    def given(self, x, wanted, steps):
        """Mean and covariance of some places of the joint vector, given the known values of x."""
        flat = np.full(steps * len(self.H), np.nan)
        flat[: x.size] = x.ravel()
        known = steps * len(self.F) + np.flatnonzero(~np.isnan(flat))
        whole = self.joint(steps)
        gain = np.linalg.solve(whole[np.ix_(known, known)], whole[np.ix_(known, wanted)]).T
        mean = gain @ flat[~np.isnan(flat)]
        return mean, whole[np.ix_(wanted, wanted)] - gain @ whole[np.ix_(known, wanted)]

    def states(self, x, t, steps):
        """Mean and covariance of z[t] given x."""
        d = len(self.F)
        return self.given(x, np.arange(t * d, (t + 1) * d), steps)

    def future(self, x, ahead):
        """Mean and covariance of the next ``ahead`` observations."""
        steps, m = len(x) + ahead, len(self.H)
        start = steps * len(self.F) + len(x) * m
        return self.given(x, np.arange(start, start + ahead * m), steps)


FORWARD = [
    name
    for name, build in MODELS.items()
    if any(build().graph.timed.values()) and why_not_forward(build().graph) is None
]
EXACT = [name for name in FORWARD if name != "linear memory, and a network of the past"]


def gain(prior, noise):
    """The weight of an observation against a prior, both given by standard deviations."""
    return prior**2 / (prior**2 + noise**2)


def spread(prior, noise):
    """The standard deviation of the posterior that combines them."""
    return prior * (1 - gain(prior, noise)) ** 0.5


def local_level(level=1.3, noise=2.0, start=3.0):
    """A random walk with noise: its model, with p's posterior of one step as q, and matrices."""
    model = Model(
        {
            "z[0]": Normal(1, scale=start, learned=True),
            "z[t] | z[t-1]": Normal(1, scale=level, net=linear(bias=False)),
            "x[t] | z[t]": Normal(1, scale=noise, net=linear(bias=False)),
        },
        {
            "z[0] | x[0]": Normal(scale=spread(start, noise), net=linear(bias=False)),
            "z[t] | z[t-1], x[t]": Normal(scale=spread(level, noise), net=linear(bias=False)),
        },
    ).double()
    at_first, after = gain(start, noise), gain(level, noise)
    fill(
        model,
        {
            "z[t] | z[t-1]": [[1.0]],
            "x[t] | z[t]": [[1.0]],
            "z[0] | x[0]": [[at_first]],
            "z[t] | z[t-1], x[t]": [[1 - after], [after]],
        },
    )
    one = np.eye(1)
    return model, StateSpace(one, one * level**2, one, one * noise**2, one * start**2)


def local_trend(level=1.0, slope=0.4, noise=1.5, start=2.0):
    """A level with a slope that drifts."""
    model = Model(
        {
            "l[0]": Normal(1, scale=start, learned=True),
            "b[0]": Normal(1, scale=start, learned=True),
            "l[t] | l[t-1], b[t-1]": Normal(1, scale=level, net=linear(bias=False)),
            "b[t] | b[t-1]": Normal(1, scale=slope, net=linear(bias=False)),
            "x[t] | l[t]": Normal(1, scale=noise, net=linear(bias=False)),
        },
        {
            "l[0] | x[0]": Normal(scale=spread(start, noise), net=linear(bias=False)),
            "b[0]": Normal(scale=start, learned=True),
            "l[t] | l[t-1], b[t-1], x[t]": Normal(
                scale=spread(level, noise), net=linear(bias=False)
            ),
            "b[t] | b[t-1]": Normal(scale=slope, net=linear(bias=False)),
        },
    ).double()
    after = gain(level, noise)
    fill(
        model,
        {
            "l[t] | l[t-1], b[t-1]": [[1.0], [1.0]],
            "b[t] | b[t-1]": [[1.0]],
            "x[t] | l[t]": [[1.0]],
            "l[0] | x[0]": [[gain(start, noise)]],
            "l[t] | l[t-1], b[t-1], x[t]": [[1 - after], [1 - after], [after]],
        },
    )
    return model, StateSpace(
        np.array([[1.0, 1.0], [0.0, 1.0]]),
        np.diag([level**2, slope**2]),
        np.array([[1.0, 0.0]]),
        np.eye(1) * noise**2,
        np.eye(2) * start**2,
    )


def autoregression(a=0.6, b=0.3, shock=1.0, noise=0.5, start=1.5):
    """AR(2) with noise: the state is z[t] = a z[t−1] + b z[t−2] + shock, w[t] = z[t−1]."""
    model = Model(
        {
            "z[0]": Normal(1, scale=start, learned=True),
            "w[0]": Normal(1, scale=start, learned=True),
            "z[t] | z[t-1], w[t-1]": Normal(1, scale=shock, net=linear(bias=False)),
            "w[t] | z[t-1]": Normal(1, scale=1e-6, net=linear(bias=False)),
            "x[t] | z[t]": Normal(1, scale=noise, net=linear(bias=False)),
        },
        {"z[t] | x[t]": Normal(), "w[t] | x[t]": Normal()},
    ).double()
    fill(
        model,
        {
            "z[t] | z[t-1], w[t-1]": [[a], [b]],
            "w[t] | z[t-1]": [[1.0]],
            "x[t] | z[t]": [[1.0]],
        },
    )
    return model, StateSpace(
        np.array([[a, b], [1.0, 0.0]]),
        np.diag([shock**2, 1e-12]),
        np.array([[1.0, 0.0]]),
        np.eye(1) * noise**2,
        np.eye(2) * start**2,
    )


def fill(model, weights):
    """Set the weights of linear factors, one number per parent, by their keys."""
    with torch.no_grad():
        for entry in model.graph.entries():
            for ref, row in zip(entry.key.parents, weights.get(str(entry.key), ())):
                value = torch.tensor([row], dtype=torch.float64)
                model.factors[entry.id].net.blocks.weights[str(ref)].copy_(value)


def hidden_markov():
    """Two states of one normal observation each, with weights drawn from a seed."""
    torch.manual_seed(0)
    model = Model(
        {
            "s[0]": OneHot(3, learned=True),
            "s[t] | s[t-1]": OneHot(3),
            "x[t] | s[t]": Normal(1, scale="learned"),
        },
        {"s[0]": OneHot(learned=True), "s[t] | s[t-1]": OneHot()},
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 1)
    for entry in model.graph.entries():
        if entry.side == "q":  # q is p's own transition
            twin = model.graph.p[entry.key.name][entry.key.at]
            model.factors[entry.id].load_state_dict(model.factors[twin.id].state_dict())
    return model


@dataclass(frozen=True)
class Paths:
    """A hidden Markov model as tables, and its answers by a sum over all paths."""

    start: np.ndarray
    move: np.ndarray
    mean: np.ndarray
    sd: np.ndarray

    @classmethod
    def of(cls, model):
        eye, factors, graph = torch.eye(3).double(), model.factors, model.graph
        with torch.no_grad():
            rules = {
                str(entry.key): factors[entry.id] for entry in graph.entries() if entry.side == "p"
            }
            start = rules["s[0]"].distribution(rules["s[0]"]({})).probs.reshape(-1)
            move = rules["s[t] | s[t-1]"]
            move = move.distribution(move({"s[t-1]": eye})).probs
            emit = rules["x[t] | s[t]"]
            emit = emit.distribution(emit({"s[t]": eye}))
        sd = emit.scale.expand_as(emit.loc)
        return cls(start.numpy(), move.numpy(), emit.loc[:, 0].numpy(), sd[:, 0].numpy())

    def weights(self, x, steps):
        """All paths of ``steps`` states, and their posterior probabilities given x (NaN: none)."""
        paths = np.array(list(itertools.product(range(len(self.start)), repeat=steps)))
        logs = np.log(self.start[paths[:, 0]])
        for t in range(1, steps):
            logs = logs + np.log(self.move[paths[:, t - 1], paths[:, t]])
        for t, value in enumerate(x):
            if not np.isnan(value):
                z = (value - self.mean[paths[:, t]]) / self.sd[paths[:, t]]
                logs = logs - 0.5 * z**2 - np.log(self.sd[paths[:, t]] * math.sqrt(2 * math.pi))
        evidence = np.logaddexp.reduce(logs)
        return paths, np.exp(logs - evidence), evidence


def series(steps=9, holes=True):
    """A random walk, [steps, 1], with two missing steps."""
    x = np.random.default_rng(0).normal(size=(steps, 1)).cumsum(0)
    if holes:
        x[[0, 4]] = np.nan
    return x


def close(a, b, **tolerance):
    """Assert that numbers are equal up to rounding."""
    np.testing.assert_allclose(np.asarray(a), b, **({"rtol": 1e-9, "atol": 1e-9} | tolerance))
