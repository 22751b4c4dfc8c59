"""Sequences with continuous latents: every bound equals a Kalman filter, or a loop over t written
out here.

All in float64 and, wherever two computations are compared, on the same noise.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributions as td
import torch.nn.functional as F
from scipy.stats import multivariate_normal
from torch import nn

from aevb import (
    GRU,
    LSTM,
    Bernoulli,
    Deterministic,
    Model,
    MultivariateNormal,
    Network,
    Normal,
    linear,
    mlp,
    register,
)

N, T = 3, 5
LENGTHS = [5, 3, 1]
NET = mlp(4, activation="tanh")
SUMMARY = {"b[t] | b[t+1], x[t]": GRU(3)}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(p, q, given=None, seed=0):
    torch.manual_seed(seed)
    return Model(p, q, given).double()


def same(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


# The linear-Gaussian state-space model and its exact smoother -------------------------------------


@register
@dataclass(frozen=True, repr=False)
class per_step(Network):
    """An affine map of its own for each step; the step comes in as the parent k[t]."""

    steps: int = 0

    def build(self, parents, heads, shape, masked):
        return PerStep(self.steps, {name: shape[0] for name, shape in parents.items()}, sum(heads))


class PerStep(nn.Module):
    def __init__(self, steps, sizes, out):
        super().__init__()
        self.sizes = sizes
        self.weights = nn.ParameterDict(
            {
                name: nn.Parameter(torch.zeros(steps, out, size))
                for name, size in sizes.items()
                if name[0] != "k"
            }
        )
        self.bias = nn.Parameter(torch.zeros(steps, out))

    def first(self, inputs, *, bias=True, missing=None):
        # The step is known outside the loop, the state inside: each parent keeps its own columns,
        # and their sum joins them.
        ends = np.cumsum(list(self.sizes.values())).tolist()
        columns = {
            name: (end - size, ends[-1] - end)
            for end, (name, size) in zip(ends, self.sizes.items(), strict=True)
        }
        return sum(F.pad(value, columns[name]) for name, value in inputs.items())

    def rest(self, h, keep=()):
        parents = dict(zip(self.sizes, h.split(list(self.sizes.values()), -1), strict=True))
        k = next(parents.pop(name) for name in self.sizes if name[0] == "k").squeeze(-1).long()
        return self.bias[k] + sum(
            (self.weights[name][k] @ value.unsqueeze(-1)).squeeze(-1)
            for name, value in parents.items()
        )


A = np.array([[0.8, 0.3], [-0.4, 0.7]])
C = np.array([[1.0, -0.5], [0.3, 0.8], [-0.7, 0.6]])
Q_SD, R_SD = np.array([0.6, 0.9]), np.array([0.5, 0.8, 1.1])
Q, R = np.diag(Q_SD**2), np.diag(R_SD**2)


def kalman(x):
    """log p(x) of one sequence [T, 3], and the filter's gains and covariances, step by step."""
    mean, covariance, total, steps = np.zeros(2), np.eye(2), 0.0, []
    for t, value in enumerate(x):
        if t:
            mean, covariance = A @ mean, A @ covariance @ A.T + Q
        S = C @ covariance @ C.T + R
        total += multivariate_normal(C @ mean, S).logpdf(value)
        gain = covariance @ C.T @ np.linalg.inv(S)
        mean, covariance = mean + gain @ (value - C @ mean), covariance - gain @ C @ covariance
        steps.append((gain, covariance))
    return total, steps


def joint(steps):
    """The covariance of (z_0, …, z_{T−1}, x_0, …, x_{T−1}), all means being zero."""
    W = np.zeros((2 * steps, 2 * steps))  # z = W noise
    for t in range(steps):
        for s in range(t + 1):
            W[2 * t : 2 * t + 2, 2 * s : 2 * s + 2] = np.linalg.matrix_power(A, t - s) @ (
                np.diag(Q_SD) if s else np.eye(2)
            )
    emit = np.kron(np.eye(steps), C)
    z = W @ W.T
    return np.block([[z, z @ emit.T], [emit @ z, emit @ z @ emit.T + np.kron(np.eye(steps), R)]])


def inverse_softplus(y):
    return np.log(np.expm1(y))


def state_space(steps=T):
    """p, and as q its smoother: the filter's mean m[t], forward; then z[t] given z[t+1] and m[t],
    backward.
    """
    free = MultivariateNormal(net=per_step(steps))
    model = build(
        p={
            "z[0]": Normal(2),
            "z[t] | z[t-1]": Normal(2, net=linear(bias=False), scale="learned"),
            "x[t] | z[t]": Normal(3, net=linear(bias=False), scale="learned"),
        },
        q={
            "m[t] | m[t-1], x[t], k[t]": Deterministic(2, net=per_step(steps)),
            "z[t] | z[t+1], m[t], k[t]": free,
            "z[T] | m[T], k[T]": free,
        },
        given={"k": 1},
    )
    for key, label, weight, sd in (
        ("p(z[t]|z[t-1])", "z[t-1]", A, Q_SD),
        ("p(x[t]|z[t])", "z[t]", C, R_SD),
    ):
        model.factors[key].net.blocks.weights[label].data = torch.as_tensor(weight)
        model.factors[key].vectors["scale"].data = torch.as_tensor(inverse_softplus(sd))
    filtering, backward, last = (
        model.factors[f"q({key})"].net
        for key in ("m[t]|m[t-1], x[t], k[t]", "z[t]|z[t+1], m[t], k[t]", "z[T]|m[T], k[T]")
    )
    eye = np.eye(2)
    with torch.no_grad():
        for t, (gain, P) in enumerate(kalman(np.zeros((steps, 3)))[1]):
            filtering.weights["m[t-1]"][t] = torch.as_tensor((eye - gain @ C) @ A)
            filtering.weights["x[t]"][t] = torch.as_tensor(gain)
            # z[t] | z[t+1], x[..t] ~ N(m + J (z[t+1] − A m), P − J A P)
            J = P @ A.T @ np.linalg.inv(A @ P @ A.T + Q)
            backward.weights["m[t]"][t, :2] = torch.as_tensor(eye - J @ A)
            backward.weights["z[t+1]"][t, :2] = torch.as_tensor(J)
            last.weights["m[T]"][t, :2] = torch.as_tensor(eye)
            for module, covariance in ((backward, P - J @ A @ P), (last, P)):
                L = np.linalg.cholesky(covariance)
                module.bias[t, 2:] = torch.tensor(
                    [inverse_softplus(L[0, 0]), L[1, 0], inverse_softplus(L[1, 1])]
                )
    return model


def observations(steps=T, rows=N):
    k = torch.arange(steps, dtype=torch.float64).expand(rows, steps)
    return {"x": 2 * randn(rows, steps, 3, seed=7), "k": k}


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_every_path_of_the_exact_smoother_weighs_the_kalman_likelihood(lengths):
    """log p(x, z) − log q(z | x) = log p(x) for whatever z is drawn."""
    model, data = state_space(), observations()
    exact = torch.tensor(
        [
            kalman(x[:length])[0]
            for x, length in zip(data["x"].numpy(), lengths or [T] * N, strict=True)
        ]
    )
    paths = model.elbo(**data, lengths=lengths, bound="iwae", samples=4, seed=0).log_weights
    same(paths, exact.expand(4, N), 1e-9)
    same(
        model.elbo(**data, lengths=lengths, how={"z": "sampled"}, samples=4, seed=1).value,
        exact,
        1e-9,
    )


def test_sticking_the_landing_is_still_at_the_exact_posterior():
    model, data = state_space(), observations()
    value = model.elbo(**data, gradient="stl", how={"z": "sampled"}, seed=0).value.sum()
    for gradient in torch.autograd.grad(value, model.phi()):
        same(gradient, torch.zeros_like(gradient), 1e-9)


def test_a_backward_drawn_latent_has_no_closed_kl():
    """Its entropy is still closed, and the mean over paths is the likelihood (4 s.e.)."""
    model = state_space()
    choice = model.plan().choices["z"]
    assert choice.term == "entropy"
    assert "p conditions z[t] on z[t-1], which depends on z[t] under q" in choice.why_term
    with pytest.raises(
        ValueError, match=re.escape("p conditions z[t] on z[t-1], which depends on z[t] under q")
    ):
        model.plan(how={"z": "closed"})
    data = {
        name: value[:1].expand(2000, *value.shape[1:]) for name, value in observations().items()
    }
    value = model.elbo(**data, seed=0).value.detach()
    assert value.std() > 0.1
    assert abs(value.mean() - kalman(data["x"][0].numpy())[0]) < 4 * value.std() / 2000**0.5


def test_samples_have_the_exact_covariance():
    """Each of the 120 entries of the covariance within 4 s.e., and each mean."""
    n, steps = 20_000, 3
    drawn = state_space(steps).sample(n, steps=steps, seed=0)  # only q reads k
    assert drawn["z"].shape == (n, steps, 2)
    assert drawn["x"].shape == (n, steps, 3)
    values = torch.cat([drawn["z"].flatten(1), drawn["x"].flatten(1)], 1).numpy()
    S = joint(steps)
    variance = np.diag(S)
    assert (abs(values.mean(0)) < 4 * np.sqrt(variance / n)).all()
    assert (
        abs(values.T @ values / n - S) < 4 * np.sqrt((np.outer(variance, variance) + S**2) / n)
    ).all()


def test_log_prob_of_a_path_is_the_joint_gaussian():
    model, data, z = state_space(), observations(), randn(N, T, 2, seed=3)
    flat = torch.cat([z.flatten(1), data["x"].flatten(1)], 1).numpy()
    same(
        model.log_prob(**data, z=z).detach(),
        torch.as_tensor(multivariate_normal(np.zeros(5 * T), joint(T)).logpdf(flat)),
        1e-9,
    )


def smoother(x):
    """Mean and covariance of p(z | x), from the joint covariance."""
    S, d = joint(len(x)), 2 * len(x)
    gain = S[:d, d:] @ np.linalg.inv(S[d:, d:])
    return gain @ x.flatten(), S[:d, :d] - gain @ S[d:, :d]


def test_posterior_of_the_smoother():
    """log_prob exactly; samples and the mixture over them within 4 s.e. of the smoothed moments."""
    model, data, count = state_space(), observations(), 4000
    posterior, z = model.posterior(**data, samples=count, seed=0), randn(N, T, 2, seed=3)
    log_q, drawn, marginal = posterior.log_prob(z=z), posterior.sample(count)["z"], posterior["z"]
    assert drawn.shape == (count, N, T, 2)
    assert marginal.batch_shape == (N, T)
    assert marginal.event_shape == (2,)
    for i, x in enumerate(data["x"].numpy()):
        mean, covariance = smoother(x)
        assert abs(log_q[i] - multivariate_normal(mean, covariance).logpdf(z[i].flatten())) < 1e-9
        se = np.sqrt(np.diag(covariance) / count)
        assert (abs(drawn[:, i].flatten(1).mean(0).numpy() - mean) < 4 * se).all()
        assert (abs(marginal.mean[i].flatten().numpy() - mean) < 4 * se).all()
        variance = np.diag(covariance).reshape(T, 2)
        assert (abs(marginal.variance[i].numpy() / variance - 1) < 4 * np.sqrt(2 / count)).all()


def test_posterior_of_ragged_rows_is_each_rows_own():
    model, data, z = state_space(), observations(), randn(N, T, 2, seed=3)
    log_q = model.posterior(**data, lengths=LENGTHS).log_prob(z=z)
    for i, length in enumerate(LENGTHS):
        mean, covariance = smoother(data["x"][i, :length].numpy())
        assert (
            abs(log_q[i] - multivariate_normal(mean, covariance).logpdf(z[i, :length].flatten()))
            < 1e-9
        )
    drawn = model.posterior(**data, lengths=LENGTHS, seed=0).sample(2)["z"]
    real = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    assert (drawn != 0).all(-1).equal(real.expand(2, N, T))


def test_reconstruction_is_the_mean_at_a_posterior_sample():
    model, data = state_space(), observations()
    z = model.posterior(**data, seed=5).sample()["z"][0]
    same(model.reconstruct(**data, seed=5)["x"], z @ torch.as_tensor(C).T)
    assert model.reconstruct(**data, seed=5, mean=False)["x"].shape == (N, T, 3)


# Recurrent models against a loop over t -----------------------------------------------------------


def raw(factor, inputs):
    """A factor's raw numbers by one first layer over all parents side by side."""
    net = factor.net
    weight = torch.cat([net.blocks.weights[label] for label in inputs], -1)
    h = F.linear(torch.cat(list(inputs.values()), -1), weight, net.blocks.bias)
    return h if net.heads is None else net.heads(torch.tanh(h))


def normal(factor, inputs):
    loc, scale = raw(factor, inputs).chunk(2, -1)
    return td.Independent(td.Normal(loc, F.softplus(scale)), 1)


def bernoulli(factor, inputs):
    return td.Independent(td.Bernoulli(logits=raw(factor, inputs)), 1)


def draw(q, noise):
    return q.base_dist.loc + q.base_dist.scale * noise


def cell(factor, inputs, state):
    """One step of torch's own cells on the factor's weights; ``state`` holds one entry a layer."""
    h, new = torch.cat(list(inputs.values()), -1), []
    for i, (own, recurrent) in enumerate(zip(state, factor.recurrent, strict=True)):
        first = (
            torch.cat([factor.blocks.weights[label] for label in inputs], -1),
            factor.blocks.bias,
        )
        weight, bias = (factor.upper[i - 1].weight, factor.upper[i - 1].bias) if i else first
        kind = nn.LSTMCell if isinstance(factor.spec, LSTM) else nn.GRUCell
        weights = {
            "weight_ih": weight,
            "bias_ih": bias,
            "weight_hh": recurrent.weight,
            "bias_hh": recurrent.bias,
        }
        new.append(
            torch.func.functional_call(
                kind(h.shape[-1], factor.d, dtype=h.dtype), weights, (h, own)
            )
        )
        h = new[-1][0] if kind is nn.LSTMCell else new[-1]
    return h, new


def zeros(x, size):
    return x.new_zeros(len(x), size)


def backward_states(model, x):
    """b[t] of a backward GRU over x, from zeros or from a declared last state."""
    factor, end, states = model.factors["q(b[t]|b[t+1], x[t])"], x.shape[1] - 1, {}
    states[end + 1] = zeros(x, 3)
    for t in reversed(range(end + 1)):
        states[t], _ = cell(factor, {"x[t]": x[:, t]}, [states[t + 1]])
        if t == end and "q(b[T]|x[T])" in model.factors:
            states[t] = raw(model.factors["q(b[T]|x[T])"], {"x[T]": x[:, t]})
    return states


@dataclass
class Path:
    """Sums over a path: the likelihood, the KL by each of the three ways."""

    x: torch.Tensor
    closed: torch.Tensor
    entropy: torch.Tensor
    sampled: torch.Tensor

    @staticmethod
    def of(steps: Sequence[tuple]):
        """From (x, p(x|·), z, p(z|·), q(z|·)) at each step."""
        log_p = [p.log_prob(z) for _, _, z, p, _ in steps]
        return Path(
            sum(px.log_prob(x) for x, px, *_ in steps),
            sum(td.kl_divergence(q, p) for *_, p, q in steps),
            sum(-q.entropy() - lp for lp, (*_, q) in zip(log_p, steps, strict=True)),
            sum(q.log_prob(z) - lp for lp, (_, _, z, _, q) in zip(log_p, steps, strict=True)),
        )


VRNN = {
    "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(3, layers=2),
    "z[t] | h[t]": Normal(2, net=NET),
    "x[t] | h[t], z[t]": Bernoulli(4, net=NET),
}
FILTERING = {"z[t] | h[t], x[t]": Normal(net=NET)}
SMOOTHING = SUMMARY | {"z[t] | h[t], b[t]": Normal(net=NET)}


def vrnn_by_hand(model, x, noise):
    f, smoothing = model.factors, "b" in model.graph.q
    h, z, state, steps = zeros(x, 3), zeros(x, 2), [(zeros(x, 3), zeros(x, 3))] * 2, []
    b = backward_states(model, x) if smoothing else {}
    for t in range(x.shape[1]):
        if t:  # the first state is zeros, not a step of the cell
            h, state = cell(
                f["p(h[t]|h[t-1], x[t-1], z[t-1])"], {"x[t-1]": x[:, t - 1], "z[t-1]": z}, state
            )
        prior = normal(f["p(z[t]|h[t])"], {"h[t]": h})
        if smoothing:
            q = normal(f["q(z[t]|h[t], b[t])"], {"h[t]": h, "b[t]": b[t]})
        else:
            q = normal(f["q(z[t]|h[t], x[t])"], {"h[t]": h, "x[t]": x[:, t]})
        z = draw(q, noise[t])
        steps.append(
            (x[:, t], bernoulli(f["p(x[t]|h[t], z[t])"], {"h[t]": h, "z[t]": z}), z, prior, q)
        )
    return Path.of(steps)


CHAIN = {"z[t] | z[t-1]": Normal(2, net=NET), "x[t] | z[t]": Bernoulli(4, net=NET)}
FORWARD = SUMMARY | {"z[t] | z[t-1], b[t]": Normal(net=NET)}
BACKWARD = SUMMARY | {"z[t] | z[t+1], b[t]": Normal(net=NET)}


def markov_by_hand(model, x, noise, frozen=None):
    """The deep Markov model, q drawn forward or backward; log q with the parameters of a ``frozen``
    copy, if there is one.
    """
    f, steps = model.factors, x.shape[1]
    b = backward_states(model, x)
    lag = -1 if "q(z[t]|z[t-1], b[t])" in f else 1
    z, q, label = {-1: zeros(x, 2), steps: zeros(x, 2)}, {}, f"z[t{lag:+d}]"
    for t in range(steps) if lag < 0 else reversed(range(steps)):
        q[t] = normal(f[f"q(z[t]|{label}, b[t])"], {label: z[t + lag], "b[t]": b[t]})
        z[t] = draw(q[t], noise[t])
    if frozen:
        q = {
            t: normal(
                frozen.factors[f"q(z[t]|{label}, b[t])"], {label: z[t + lag], "b[t]": b[t].detach()}
            )
            for t in range(steps)
        }
    prior = [normal(f["p(z[t]|z[t-1])"], {"z[t-1]": z[t - 1]}) for t in range(steps)]
    return Path.of(
        [
            (x[:, t], bernoulli(f["p(x[t]|z[t])"], {"z[t]": z[t]}), z[t], prior[t], q[t])
            for t in range(steps)
        ]
    )


SRNN_P = {
    "d[t] | d[t-1], x[t-1]": GRU(3),
    "z[t] | z[t-1], d[t]": Normal(2, net=NET),
    "x[t] | z[t], d[t]": Bernoulli(4, net=NET),
}
SRNN_Q = {"a[t] | a[t+1], d[t], x[t]": GRU(3), "z[t] | z[t-1], a[t]": Normal(net=NET)}


def srnn_by_hand(model, x, noise):
    """Deterministic states forward over data, a smoother backward over them, then z."""
    f, steps, path = model.factors, x.shape[1], []
    d, a, z, smoothed = [zeros(x, 3)], zeros(x, 3), zeros(x, 2), {}
    for t in range(1, steps):
        d.append(cell(f["p(d[t]|d[t-1], x[t-1])"], {"x[t-1]": x[:, t - 1]}, [d[-1]])[0])
    for t in reversed(range(steps)):
        a, _ = cell(f["q(a[t]|a[t+1], d[t], x[t])"], {"d[t]": d[t], "x[t]": x[:, t]}, [a])
        smoothed[t] = a
    for t in range(steps):
        prior = normal(f["p(z[t]|z[t-1], d[t])"], {"z[t-1]": z, "d[t]": d[t]})
        q = normal(f["q(z[t]|z[t-1], a[t])"], {"z[t-1]": z, "a[t]": smoothed[t]})
        z = draw(q, noise[t])
        path.append(
            (x[:, t], bernoulli(f["p(x[t]|z[t], d[t])"], {"z[t]": z, "d[t]": d[t]}), z, prior, q)
        )
    return Path.of(path)


ENDS_P = CHAIN | {
    "z[0]": Normal(2, learned=True),
    "x[0] | z[0]": Bernoulli(4),
    "x[T] | z[T]": Bernoulli(4),
}
ENDS_Q = {"z[0] | x[0]": Normal(), "z[t] | z[t-1], x[t]": Normal(net=NET), "z[T] | x[T]": Normal()}


def ends_by_hand(model, x, noise):
    """Entries of their own for the first and the last step, in p and in q."""
    f, end, path, z = model.factors, x.shape[1] - 1, [], None
    for t in range(end + 1):
        if t == 0:
            loc, scale = f["p(z[0])"].root.chunk(2)
            prior = td.Independent(td.Normal(loc, F.softplus(scale)), 1)
            q = normal(f["q(z[0]|x[0])"], {"x[0]": x[:, 0]})
        else:
            prior = normal(f["p(z[t]|z[t-1])"], {"z[t-1]": z})
            q = (
                normal(f["q(z[t]|z[t-1], x[t])"], {"z[t-1]": z, "x[t]": x[:, t]})
                if t < end
                else normal(f["q(z[T]|x[T])"], {"x[T]": x[:, t]})
            )
        z, at = draw(q, noise[t]), {0: "0", end: "T"}.get(t, "t")
        path.append((x[:, t], bernoulli(f[f"p(x[{at}]|z[{at}])"], {f"z[{at}]": z}), z, prior, q))
    return Path.of(path)


STATES_Q = SUMMARY | {"b[T] | x[T]": Deterministic(3), "z[t] | z[t-1], b[t]": Normal(net=NET)}
BESIDE_P = {
    "z[t]": Normal(2),
    "u[t] | z[t-1], z[t+1]": Deterministic(3, net=NET),
    "x[t] | u[t], z[t+1]": Bernoulli(4),
}
BESIDE_Q = {"v[t] | x[t-1], x[t+1]": Deterministic(3, net=NET), "z[t] | v[t], x[t]": Normal()}


def beside_by_hand(model, x, noise):
    """Nodes that read both neighbours, without any recurrence."""
    f, steps, standard = model.factors, x.shape[1], td.Independent(td.Normal(zeros(x, 2), 1.0), 1)
    at = {t: x[:, t] for t in range(steps)} | {-1: zeros(x, 4), steps: zeros(x, 4)}
    v = {
        t: raw(f["q(v[t]|x[t-1], x[t+1])"], {"x[t-1]": at[t - 1], "x[t+1]": at[t + 1]})
        for t in range(steps)
    }
    q = {t: normal(f["q(z[t]|v[t], x[t])"], {"v[t]": v[t], "x[t]": at[t]}) for t in range(steps)}
    z = {t: draw(q[t], noise[t]) for t in range(steps)} | {-1: zeros(x, 2), steps: zeros(x, 2)}
    u = {
        t: raw(f["p(u[t]|z[t-1], z[t+1])"], {"z[t-1]": z[t - 1], "z[t+1]": z[t + 1]})
        for t in range(steps)
    }
    px = {
        t: bernoulli(f["p(x[t]|u[t], z[t+1])"], {"u[t]": u[t], "z[t+1]": z[t + 1]})
        for t in range(steps)
    }
    return Path.of([(at[t], px[t], z[t], standard, q[t]) for t in range(steps)])


MODELS = {
    "filtering VRNN": (VRNN, FILTERING, vrnn_by_hand, "closed"),
    "smoothing VRNN": (VRNN, SMOOTHING, vrnn_by_hand, "closed"),
    "deep Markov model": (CHAIN, FORWARD, markov_by_hand, "closed"),
    "drawn backward": (CHAIN, BACKWARD, markov_by_hand, "entropy"),
    "SRNN": (SRNN_P, SRNN_Q, srnn_by_hand, "closed"),
    "ends": (ENDS_P, ENDS_Q, ends_by_hand, "closed"),
    "declared last state": (CHAIN, STATES_Q, markov_by_hand, "closed"),
    "both neighbours": (BESIDE_P, BESIDE_Q, beside_by_hand, "closed"),
}
BINARY = (randn(N, T, 4, seed=9) > 0).double()


def on_noise(model, x, how=None, **choices):
    """The bound and the noise it was taken on."""
    plan, batch = model.plan(how=how, **choices), model.prepare(x=x)
    noise = model.draw_noise(plan, batch, seed=2)
    return model.elbo(x=x, how=how, noise=noise, **choices), noise


def gradients(value, model):
    found = torch.autograd.grad(value.sum(), list(model.parameters()), allow_unused=True)
    return dict(zip([name for name, _ in model.named_parameters()], found, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_bound_equals_a_loop_over_time(name):
    """Value, terms and every parameter's gradient, for the KL as planned, with q's entropy, and
    sampled.
    """
    p, q, by_hand, term = MODELS[name]
    model = build(p, q)
    assert model.plan().choices["z"].term == term
    for way in {term, "entropy", "sampled"}:
        bound, noise = on_noise(model, BINARY, {"z": way})
        path = by_hand(model, BINARY, noise["z"][0])
        kl = getattr(path, way)
        same(bound.terms["x"], path.x)
        same(bound.terms["kl(z)"], kl)
        same(bound.value, path.x - kl)
        expected = gradients(path.x - kl, model)
        for parameter, gradient in gradients(bound.value, model).items():
            assert gradient is not None, parameter
            same(gradient, expected[parameter])


@pytest.mark.parametrize("name", MODELS)
def test_importance_weights_equal_a_loop_over_time(name):
    p, q, by_hand, _ = MODELS[name]
    model = build(p, q)
    bound, noise = on_noise(model, BINARY, bound="iwae", samples=3)
    paths = [by_hand(model, BINARY, noise["z"][s]) for s in range(3)]
    log_weights = torch.stack([path.x - path.sampled for path in paths])
    same(bound.log_weights, log_weights)
    same(bound.value, log_weights.exp().mean(0).log())


@pytest.mark.parametrize("name", MODELS)
def test_all_ways_to_take_the_kl_have_one_mean(name):
    """The difference to the sampled KL, on 2000 draws of the same noise, is zero within 4 s.e."""
    p, q, _, term = MODELS[name]
    model, x = build(p, q), BINARY[:1].expand(2000, T, 4)
    sampled = on_noise(model, x, {"z": "sampled"})[0].terms["kl(z)"]
    for way in {term, "entropy"}:
        difference = (on_noise(model, x, {"z": way})[0].terms["kl(z)"] - sampled).detach()
        assert difference.std() > 1e-3
        assert abs(difference.mean()) < 4 * difference.std() / 2000**0.5


@pytest.mark.parametrize("q", [FILTERING, SMOOTHING], ids=["filtering", "smoothing"])
def test_reconstruction_reaches_q_unless_detached(q):
    model = build(VRNN, q)
    for how, reaches in ((None, True), ({"z": "detached"}, False)):
        likelihood = model.elbo(x=BINARY, how=how, seed=0).terms["x"].sum()
        found = torch.autograd.grad(likelihood, model.phi(), allow_unused=True)
        assert all(
            (gradient is not None and bool((gradient != 0).any())) == reaches for gradient in found
        )


@pytest.mark.parametrize("q", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_gradients_that_hold_qs_parameters_fixed(q):
    """STL: ∂ through the samples of log p − log q. DReG: the same, each sample weighted by its
    squared weight; θ as ever.
    """
    model = build(CHAIN, q)
    frozen = copy.deepcopy(model).requires_grad_(False)
    bound, noise = on_noise(model, BINARY, gradient="stl")
    path = markov_by_hand(model, BINARY, noise["z"][0], frozen)
    for found, wanted in zip(
        *(torch.autograd.grad(v.sum(), model.phi()) for v in (bound.value, path.x - path.sampled)),
        strict=True,
    ):
        same(found, wanted)
    bound, noise = on_noise(model, BINARY, bound="iwae", samples=3, gradient="dreg")
    log_weights = torch.stack(
        [
            (path := markov_by_hand(model, BINARY, noise["z"][k], frozen)).x - path.sampled
            for k in range(3)
        ]
    )
    share = log_weights.softmax(0).detach()
    same(bound.value, log_weights.logsumexp(0) - math.log(3))
    for parameters, power in ((model.phi(), 2), (model.theta(), 1)):
        wanted = torch.autograd.grad(
            (share**power * log_weights).sum(), parameters, retain_graph=True
        )
        for a, b in zip(
            torch.autograd.grad(bound.value.sum(), parameters, retain_graph=True),
            wanted,
            strict=True,
        ):
            same(a, b)


STATIC_P = {
    "c": Normal(2),
    "h[t] | h[t-1], x[t-1]": GRU(3),
    "x[t] | c, h[t]": Bernoulli(4, net=NET),
}
FIRST_Q = SUMMARY | {"c | b[0]": Normal()}
LAST_Q = {"f[t] | f[t-1], x[t]": GRU(3), "c | f[T], x[0], x[T]": Normal()}
FIRST_STATE = {"h[0] | c": Deterministic(3)}


@pytest.mark.parametrize(
    ("start", "q"),
    [({}, FIRST_Q), ({}, LAST_Q), (FIRST_STATE, FIRST_Q)],
    ids=["first step", "last step", "first state"],
)
def test_a_static_latent_reads_an_end_and_is_read_at_every_step(start, q):
    model = build(STATIC_P | start, q)
    bound, noise = on_noise(model, BINARY)
    f, h, total = model.factors, zeros(BINARY, 3), 0
    if q is FIRST_Q:
        q_c = normal(f["q(c|b[0])"], {"b[0]": backward_states(model, BINARY)[0]})
    else:
        summary = zeros(BINARY, 3)
        for t in range(T):
            summary, _ = cell(f["q(f[t]|f[t-1], x[t])"], {"x[t]": BINARY[:, t]}, [summary])
        q_c = normal(
            f["q(c|f[T], x[0], x[T])"],
            {"f[T]": summary, "x[0]": BINARY[:, 0], "x[T]": BINARY[:, -1]},
        )
    c = draw(q_c, noise["c"][0, 0])
    for t in range(T):
        if t:
            h, _ = cell(f["p(h[t]|h[t-1], x[t-1])"], {"x[t-1]": BINARY[:, t - 1]}, [h])
        elif start:
            h = raw(f["p(h[0]|c)"], {"c": c})
        total = total + bernoulli(f["p(x[t]|c, h[t])"], {"c": c, "h[t]": h}).log_prob(BINARY[:, t])
    same(bound.terms["x"], total)
    same(
        bound.terms["kl(c)"],
        td.kl_divergence(q_c, td.Independent(td.Normal(torch.zeros_like(c), 1.0), 1)),
    )


def test_givens_in_time_and_constant_over_it():
    model = build(
        p={"z[t] | z[t-1], u[t], y": Normal(2, net=NET), "x[t] | z[t], y": Bernoulli(4, net=NET)},
        q={"z[t] | z[t-1], x[t], u[t-1], y": Normal(net=NET)},
        given={"u": 2, "y": 3},
    )
    u, y, f, z, path = (
        randn(N, T, 2, seed=1),
        torch.tensor([2, 0, 1]),
        model.factors,
        zeros(BINARY, 2),
        [],
    )
    noise = model.draw_noise(model.plan(), model.prepare(x=BINARY, u=u, y=y), seed=2)
    bound, y_hot = model.elbo(x=BINARY, u=u, y=y, noise=noise), F.one_hot(y, 3).double()
    for t in range(T):
        before = u[:, t - 1] if t else torch.zeros_like(u[:, 0])
        prior = normal(f["p(z[t]|z[t-1], u[t], y)"], {"z[t-1]": z, "u[t]": u[:, t], "y": y_hot})
        q = normal(
            f["q(z[t]|z[t-1], x[t], u[t-1], y)"],
            {"z[t-1]": z, "x[t]": BINARY[:, t], "u[t-1]": before, "y": y_hot},
        )
        z = draw(q, noise["z"][0, t])
        path.append(
            (BINARY[:, t], bernoulli(f["p(x[t]|z[t], y)"], {"z[t]": z, "y": y_hot}), z, prior, q)
        )
    same(bound.value, Path.of(path).x - Path.of(path).closed)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_a_latent_known_at_some_steps_is_clamped_there(lengths):
    """Where z is known it keeps its value, log p(z) stays and −log q(z) goes."""
    model, known = build(CHAIN, FORWARD), randn(N, T, 2, seed=6)
    known[0, 1:3] = known[1, 0] = known[2] = torch.nan
    choices = {"how": {"z": "sampled"}, "lengths": lengths}
    batch = model.prepare(x=BINARY, z=known, lengths=lengths)
    noise = model.draw_noise(model.plan(how=choices["how"], partial=["z"]), batch, seed=2)
    value = model.elbo(x=BINARY, z=known, noise=noise, **choices).value
    f = model.factors
    for i, length in enumerate(lengths or [T] * N):
        x, z, total = BINARY[i : i + 1, :length], zeros(BINARY[:1], 2), 0
        b = backward_states(model, x)
        for t in range(length):
            prior, q = (
                normal(f["p(z[t]|z[t-1])"], {"z[t-1]": z}),
                normal(f["q(z[t]|z[t-1], b[t])"], {"z[t-1]": z, "b[t]": b[t]}),
            )
            free = bool(known[i, t].isnan().any())
            z = draw(q, noise["z"][0, t, i]) if free else known[i : i + 1, t]
            total = (
                total
                + bernoulli(f["p(x[t]|z[t])"], {"z[t]": z}).log_prob(x[:, t])
                + prior.log_prob(z)
                - free * q.log_prob(z)
            )
        same(value[i], total[0])


def test_missing_entries_leave_the_likelihood():
    model, x = build(CHAIN, FORWARD), BINARY.clone()
    x[0, 2], x[1, 0, 1:], x[2, 4, 3] = torch.nan, torch.nan, torch.nan
    bound, noise = on_noise(model, x)
    f, filled, z, total = model.factors, x.nan_to_num(0.0), zeros(x, 2), 0
    b = backward_states(model, filled)
    for t in range(T):
        z = draw(normal(f["q(z[t]|z[t-1], b[t])"], {"z[t-1]": z, "b[t]": b[t]}), noise["z"][0, t])
        each = bernoulli(f["p(x[t]|z[t])"], {"z[t]": z}).base_dist.log_prob(filled[:, t])
        total = total + (each * ~x[:, t].isnan()).sum(-1)
    same(bound.terms["x"], total)


# Ragged rows --------------------------------------------------------------------------------------

RAGGED = {name: (p, q) for name, (p, q, *_) in MODELS.items()} | {
    "q only at the ends": (CHAIN, BACKWARD | {"z[0] | b[0]": Normal(), "z[T] | b[T]": Normal()}),
    "p only at the ends": (
        CHAIN | {"z[0]": Normal(2, learned=True), "z[T]": Normal(2, learned=True)},
        FORWARD,
    ),
    "static from the first step": (STATIC_P, FIRST_Q),
    "static from the last step": (STATIC_P, LAST_Q),
    "static and timed": (
        {"c": Normal(2), "z[t] | z[t-1], c": Normal(2), "x[t] | z[t], c": Bernoulli(4)},
        SUMMARY | {"c | b[0]": Normal(), "z[t] | z[t+1], b[t], c": Normal()},
    ),
    "declared first state": (STATIC_P | FIRST_STATE, FIRST_Q),
    "dropout": (CHAIN, SUMMARY | {"z[t] | z[t-1], b[t]": Normal(net=mlp(4, dropout=0.5))}),
}


def cut(noise, rows, steps):
    return {
        name: value[..., : steps if value.shape[-3] > 1 else 1, rows, :]
        for name, value in noise.items()
    }


def equal(one, other, rows=slice(None)):
    same(one.value, other.value[rows], 1e-11)
    for term, value in one.terms.items():
        same(value, other.terms[term][rows], 1e-11)


@pytest.mark.parametrize("name", RAGGED)
def test_padding_changes_nothing_and_rows_stand_alone(name):
    """Whatever lies beyond a row's end, and however far the batch is padded: values, terms and
    gradients are the row's own.
    """
    p, q = RAGGED[name]
    model = build(p, q)
    long = model.prepare(x=torch.zeros(N, 2 * T, 4))
    noise = model.draw_noise(model.plan(), long, seed=4)
    ragged = model.elbo(x=BINARY, lengths=LENGTHS, noise=cut(noise, slice(None), T))
    expected = gradients(ragged.value, model)
    real = torch.arange(2 * T) < torch.tensor(LENGTHS)[:, None]
    padded = torch.cat([BINARY, BINARY], 1)
    for garbage in (
        100 * randn(N, 2 * T, 4, seed=5),
        torch.full((N, 2 * T, 4), torch.nan, dtype=torch.float64),
    ):
        x = torch.where(real[..., None], padded, garbage)
        for marked in ({"lengths": LENGTHS}, {"steps": real}):
            bound = model.elbo(x=x, noise=noise, **marked)
            equal(bound, ragged)
        for parameter, gradient in gradients(bound.value, model).items():
            same(gradient, expected[parameter])
    for i, length in enumerate(LENGTHS):
        alone = model.elbo(x=BINARY[i : i + 1, :length], noise=cut(noise, slice(i, i + 1), length))
        equal(alone, ragged, slice(i, i + 1))


# Sampling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["filtering VRNN", "SRNN", "ends", "drawn backward"])
def test_the_score_of_samples_has_mean_zero(name):
    """E_p[∂ log p(x, z) / ∂θ] = 0 if and only if samples come from p: one direction a parameter, 4
    s.e. of 100 batches.
    """
    p, q, *_ = MODELS[name]
    model, batches = build(p, q), 100
    drawn = model.sample(batches * 50, steps=4, seed=0)
    directions = [torch.randn_like(parameter) for parameter in model.theta()]
    scores = []
    for i in range(batches):
        rows = slice(50 * i, 50 * (i + 1))
        log_p = model.log_prob(**{name: value[rows] for name, value in drawn.items()}).mean()
        found = torch.autograd.grad(log_p, model.theta())
        scores.append(
            [
                float((gradient * direction).sum())
                for gradient, direction in zip(found, directions, strict=True)
            ]
        )
    scores = torch.tensor(scores)
    assert (scores.std(0) > 0).all()
    assert (abs(scores.mean(0)) < 4 * scores.std(0) / math.sqrt(batches)).all()


def test_the_mean_of_x_follows_the_entry_of_each_step():
    model = build(ENDS_P, ENDS_Q)
    drawn = model.sample(6, steps=T, mean=True, seed=0)
    for t, at in enumerate(["0", "t", "t", "t", "T"]):
        same(
            drawn["x"][:, t],
            bernoulli(
                model.factors[f"p(x[{at}]|z[{at}])"], {f"z[{at}]": drawn["z"][:, t]}
            ).mean.detach(),
        )


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        (
            {"h[t] | h[t-1], z[t-1]": GRU(3), "z[t]": Normal(2), "x[t] | h[t]": Normal(2)},
            {"b[t] | b[t+1], h[t]": GRU(3), "z[t] | b[t], x[t]": Normal()},
            "p and q together: h[t] reads h[t-1] and b[t] reads b[t+1], and each needs the other: "
            "no order in time computes both. Use one direction.",
        ),
        (
            {"z[t] | z[t-1], z[t+1]": Normal(2), "x[t] | z[t]": Normal(2)},
            FORWARD,
            "p: z[t] reads z[t-1] and z[t] reads z[t+1], and each needs the other: no order in "
            "time computes both. Use one direction.",
        ),
        (
            {"z[t] | x[t]": Normal(2), "x[t] | z[t]": Normal(2)},
            FORWARD,
            "p: z[t] → x[t] → z[t] read each other at the same t. Drop one of the arrows, or "
            "shift it to [t-1].",
        ),
        (
            {"z[t] | z[t-1], x[t+1]": Normal(2), "x[t] | z[t]": Normal(2)},
            FORWARD,
            "no order in time computes both",
        ),
        (
            {"c": Normal(2), "x[t] | c": Normal(2)},
            {"c | x[t]": Normal()},
            "c has no [t] but reads x[t]",
        ),
        (CHAIN, SUMMARY | {"z[t] | b[0], x[t]": Normal()}, "reads b[0] at every t"),
        (CHAIN, FORWARD | {"z[0] | x[t]": Normal()}, "the entry for step [0] reads x[t]"),
        (CHAIN, {"z[0] | x[0]": Normal()}, "declares an end of 'z' but no rule for every step"),
        (CHAIN, {"z[t] | z[t], x[t]": Normal()}, "z is its own parent. Read z[t-1] instead"),
        (CHAIN, {"z | x[0]": Normal()}, "Write it with [t] everywhere, or nowhere"),
    ],
)
def test_declarations_without_an_order_in_time_are_refused(p, q, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Model(p, q)
