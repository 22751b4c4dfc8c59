"""The same steps in JAX, compiled: the VAE in NumPyro, and each model by hand.

NumPyro sums out classes only with funsor, and it has no natural form for a recurrence whose state
depends on its draws. These two models are therefore written by hand only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from problems import BATCH, Contender, LeftOutError, Problem

Weights = dict[str, Any]


def _check_device(problem: Problem) -> None:
    # Otherwise JAX takes three quarters of a GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if problem.device == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    if problem.device == "cuda" and jax.default_backend() != "gpu":
        raise LeftOutError("the installed jax has no GPU")


class _Rows:
    """The row numbers of a batch, in the order of one permutation after another."""

    def __init__(self, n: int) -> None:
        self.n, self.at, self.order, self.generator = n, n, np.arange(n), np.random.default_rng(0)

    def __call__(self) -> np.ndarray:
        if self.at + BATCH > self.n:
            self.at, self.order = 0, self.generator.permutation(self.n)
        self.at += BATCH
        return self.order[self.at - BATCH : self.at]


def numpyro_vae(problem: Problem) -> Contender:
    _check_device(problem)
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, TraceMeanField_ELBO

    first, z_size = _arrays(problem), problem.sizes.z

    def parameters(name: str) -> Weights:
        return {
            key: numpyro.param(key, value) for key, value in first.items() if key.startswith(name)
        }

    def model(x: Any) -> None:
        with numpyro.plate("rows", BATCH):
            z = numpyro.sample("z", dist.Normal(jnp.zeros((BATCH, z_size)), 1.0).to_event(1))
            numpyro.sample(
                "x",
                dist.Bernoulli(logits=_network(parameters("decoder"), "decoder", z)).to_event(1),
                obs=x,
            )

    def guide(x: Any) -> None:
        mean, raw = jnp.split(_network(parameters("encoder"), "encoder", x), 2, -1)
        with numpyro.plate("rows", BATCH):
            numpyro.sample("z", dist.Normal(mean, jax.nn.softplus(raw)).to_event(1))

    svi, data, rows = (
        SVI(model, guide, numpyro.optim.Adam(problem.lr), TraceMeanField_ELBO()),
        _data(problem),
        _Rows(len(problem.rows())),
    )
    state = svi.init(jax.random.PRNGKey(0), data[:BATCH])
    update = jax.jit(lambda state, data, chosen: svi.update(state, data[chosen]))

    def step() -> Any:
        nonlocal state
        state, loss = update(state, data, rows())
        return loss

    return Contender(step, lambda loss: -float(loss) / BATCH)


def by_hand(problem: Problem) -> Contender:
    _check_device(problem)
    import jax
    from jax.example_libraries.optimizers import adam

    bound = BOUNDS[problem.model](problem)
    start, move, value_of = adam(problem.lr)

    @jax.jit
    def update(i: Any, state: Any, key: Any, data: Any, chosen: Any) -> tuple[Any, Any, Any]:
        key, noise = jax.random.split(key)
        loss, gradient = jax.value_and_grad(lambda weights: -bound(weights, data[chosen], noise))(
            value_of(state)
        )
        return move(i, gradient, state), key, loss

    data, rows, i = _data(problem), _Rows(len(problem.rows())), 0
    state, key = start(_arrays(problem)), jax.random.PRNGKey(0)

    def step() -> Any:
        nonlocal state, key, i
        state, key, loss = update(i, state, key, data, rows())
        i += 1
        return loss

    return Contender(step)


Bound = Callable[[Weights, Any, Any], Any]  # from weights, a batch and a key to the mean bound


def _vae(problem: Problem) -> Bound:
    import jax
    import jax.numpy as jnp

    def bound(w: Weights, x: Any, key: Any) -> Any:
        mean, scale = _normal(_network(w, "encoder", x))
        logits = _network(w, "decoder", mean + scale * jax.random.normal(key, mean.shape))
        return (_bits(logits, x) - _kl(mean, scale, jnp.zeros(()), jnp.ones(()))).mean()

    return bound


def _gmvae(problem: Problem) -> Bound:
    import jax

    classes, width = problem.sizes.classes, problem.sizes.x

    def bound(w: Weights, x: Any, key: Any) -> Any:
        log_q = jax.nn.log_softmax(_network(w, "to_y", x)).T  # [classes, batch]
        first = w["encoder.0.weight"]
        hidden = x @ first[:, :width].T + w["encoder.0.bias"] + first[:, width:].T[:, None]
        # [classes, batch, z]
        mean, scale = _normal(_network(w, "encoder", jax.nn.relu(hidden), after=1))
        mean_p, scale_p = _normal((w["prior.0.weight"].T + w["prior.0.bias"])[:, None])
        logits = _network(w, "decoder", mean + scale * jax.random.normal(key, mean.shape))
        total = jax.numpy.exp(log_q) * (
            _bits(logits, x) - _kl(mean, scale, mean_p, scale_p) - log_q - math.log(classes)
        )
        return total.sum() / BATCH

    return bound


def _vrnn(problem: Problem) -> Bound:
    import jax
    import jax.numpy as jnp

    s = problem.sizes

    def cell(w: Weights, layer: int, inputs: Any, hidden: Any, memory: Any) -> tuple[Any, Any]:
        gates = inputs @ w[f"lstm.weight_ih_l{layer}"].T + w[f"lstm.bias_ih_l{layer}"]
        gates = gates + hidden @ w[f"lstm.weight_hh_l{layer}"].T + w[f"lstm.bias_hh_l{layer}"]
        i, f, c, o = jnp.split(gates, 4, -1)
        memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(c)
        return jax.nn.sigmoid(o) * jnp.tanh(memory), memory

    def bound(w: Weights, rows: Any, key: Any) -> Any:
        x = rows.swapaxes(0, 1)  # [steps, batch, x]
        first = w["encoder.0.weight"]
        seen = x @ first[:, s.h :].T + w["encoder.0.bias"]

        def advance(state: Any, at: Any) -> tuple[Any, Any]:
            (a, a_memory), (b, b_memory) = state
            here, known, noise = at
            mean, scale = _normal(
                _network(w, "encoder", jax.nn.relu(known + b @ first[:, : s.h].T), after=1)
            )
            z = mean + scale * noise
            below = cell(w, 0, jnp.concatenate([here, z], -1), a, a_memory)
            return (below, cell(w, 1, below[0], b, b_memory)), (b, mean, scale, z)

        zeros = jnp.zeros((BATCH, s.h))
        noise = jax.random.normal(key, (s.steps, BATCH, s.z))
        _, (h, mean, scale, z) = jax.lax.scan(
            advance, ((zeros, zeros), (zeros, zeros)), (x, seen, noise)
        )
        mean_p, scale_p = _normal(_network(w, "prior", h))
        logits = _network(w, "decoder", jnp.concatenate([h, z], -1))
        return (_bits(logits, x) - _kl(mean, scale, mean_p, scale_p)).sum() / BATCH

    return bound


BOUNDS = {"vae": _vae, "gmvae": _gmvae, "vrnn": _vrnn}


def _arrays(problem: Problem) -> Weights:
    import jax.numpy as jnp

    return {name: jnp.asarray(value.cpu().numpy()) for name, value in problem.weights().items()}


def _data(problem: Problem) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(problem.rows().cpu().numpy())


def _network(w: Weights, name: str, x: Any, after: int = 0) -> Any:
    """Apply a multi-layer perceptron without its first ``after`` layers."""
    import jax

    last = sum(key.startswith(f"{name}.") and key.endswith(".weight") for key in w) - 1
    for i in range(after, last + 1):
        x = x @ w[f"{name}.{i}.weight"].T + w[f"{name}.{i}.bias"]
        x = jax.nn.relu(x) if i < last else x
    return x


def _normal(raw: Any) -> tuple[Any, Any]:
    import jax
    import jax.numpy as jnp

    mean, scale = jnp.split(raw, 2, -1)
    return mean, jax.nn.softplus(scale)


def _bits(logits: Any, x: Any) -> Any:
    import jax

    return (logits * x - jax.nn.softplus(logits)).sum(-1)


def _kl(mean: Any, scale: Any, mean_p: Any, scale_p: Any) -> Any:
    import jax.numpy as jnp

    ratio = scale / scale_p
    return (0.5 * (ratio**2 + ((mean - mean_p) / scale_p) ** 2 - 1) - jnp.log(ratio)).sum(-1)
