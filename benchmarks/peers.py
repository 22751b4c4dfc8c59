"""The same VAE's training step in other libraries, where they are installed (the extra ``bench``)."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import nn

Step = Callable[[], Any]


def peers(model: str, device: str) -> dict[str, Callable[[], Step]]:
    if model != "vae":
        return {}
    known = {"Pyro": ("pyro", pyro_vae), "NumPyro (jit)": ("numpyro", numpyro_vae)}
    return {name: lambda build=build: build(device) for name, (module, build) in known.items() if find_spec(module)}  # type: ignore[misc]


def pyro_vae(device: str) -> Step:
    import pyro
    import pyro.distributions as dist
    from contenders import BATCH, LR, _Loop, _network, rows
    from pyro.infer import SVI, TraceMeanField_ELBO

    pyro.clear_param_store()
    pyro.enable_validation(False)
    encoder, decoder = _network(784, 500, 500, 40).to(device), _network(20, 500, 500, 784).to(device)
    zeros, ones = torch.zeros(BATCH, 20, device=device), torch.ones(BATCH, 20, device=device)

    def model(x: torch.Tensor) -> None:
        pyro.module("decoder", decoder)
        with pyro.plate("rows", BATCH):
            z = pyro.sample("z", dist.Normal(zeros, ones).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=decoder(z)).to_event(1), obs=x)

    def guide(x: torch.Tensor) -> None:
        pyro.module("encoder", encoder)
        with pyro.plate("rows", BATCH):
            mean, raw = encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(mean, nn.functional.softplus(raw)).to_event(1))

    svi = SVI(model, guide, pyro.optim.Adam({"lr": LR}), TraceMeanField_ELBO())
    batch = _Loop(rows("vae", device))
    return lambda: svi.step(batch())


def numpyro_vae(device: str) -> Step:
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from contenders import BATCH, LR, rows
    from numpyro.infer import SVI, TraceMeanField_ELBO

    def network(name: str, sizes: tuple[int, ...], x: Any) -> Any:
        for i, (a, b) in enumerate(pairwise(sizes)):
            w = numpyro.param(f"{name}.w{i}", lambda key, a=a, b=b: jax.random.uniform(key, (a, b), minval=-1, maxval=1) / a**0.5)
            x = x @ w + numpyro.param(f"{name}.b{i}", jnp.zeros(b))
            x = jax.nn.relu(x) if i < len(sizes) - 2 else x
        return x

    def model(x: Any) -> None:
        with numpyro.plate("rows", BATCH):
            z = numpyro.sample("z", dist.Normal(jnp.zeros((BATCH, 20)), 1.0).to_event(1))
            numpyro.sample("x", dist.Bernoulli(logits=network("decoder", (20, 500, 500, 784), z)).to_event(1), obs=x)

    def guide(x: Any) -> None:
        raw = network("encoder", (784, 500, 500, 40), x)
        with numpyro.plate("rows", BATCH):
            numpyro.sample("z", dist.Normal(raw[:, :20], jax.nn.softplus(raw[:, 20:])).to_event(1))

    svi = SVI(model, guide, numpyro.optim.Adam(LR), TraceMeanField_ELBO())
    data = jnp.asarray(rows("vae", "cpu").numpy())
    state = {"svi": svi.init(jax.random.PRNGKey(0), data[:BATCH]), "at": 0}
    update = jax.jit(svi.update)

    def step() -> None:
        start = state["at"] % (len(data) - BATCH)
        state["svi"], loss = update(state["svi"], jax.lax.dynamic_slice_in_dim(data, start, BATCH))
        state["at"] += BATCH
        loss.block_until_ready()

    return step
