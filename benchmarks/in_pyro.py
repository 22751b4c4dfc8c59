"""The same steps in Pyro, in the style of its own examples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from problems import BATCH, Batches, Contender, Problem
from torch import Tensor


def _trained(problem: Problem, model: Any, guide: Any, elbo: Any) -> Contender:
    import pyro

    pyro.clear_param_store()
    pyro.enable_validation(False)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": problem.lr}), elbo)
    batches = Batches(problem.rows())
    return Contender(lambda: svi.step(batches()) / BATCH)


def vae(problem: Problem) -> Contender:
    import pyro
    import pyro.distributions as dist

    encoder, decoder = problem.network("encoder"), problem.network("decoder")
    zeros = torch.zeros(BATCH, problem.sizes.z, device=problem.device)

    def model(x: Tensor) -> None:
        pyro.module("decoder", decoder)
        with pyro.plate("rows", BATCH):
            z = pyro.sample("z", dist.Normal(zeros, zeros + 1).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=decoder(z)).to_event(1), obs=x)

    def guide(x: Tensor) -> None:
        pyro.module("encoder", encoder)
        with pyro.plate("rows", BATCH):
            pyro.sample("z", _normal(encoder(x)))

    return _trained(problem, model, guide, pyro.infer.TraceMeanField_ELBO())


def gmvae(problem: Problem) -> Contender:
    """Build the mixture, with classes enumerated in parallel.

    The terms of z are evaluated at the sample, where the other contenders have KL divergences. The
    bound is the same in expectation.
    """
    import pyro
    import pyro.distributions as dist

    classes = problem.sizes.classes
    to_y, encoder, prior, decoder = (
        problem.network(name) for name in ("to_y", "encoder", "prior", "decoder")
    )
    flat = torch.zeros(BATCH, classes, device=problem.device)

    def model(x: Tensor) -> None:
        pyro.module("prior", prior)
        pyro.module("decoder", decoder)
        with pyro.plate("rows", BATCH):
            y = pyro.sample("y", dist.OneHotCategorical(logits=flat))
            z = pyro.sample("z", _normal(prior(y)))
            pyro.sample("x", dist.Bernoulli(logits=decoder(z)).to_event(1), obs=x)

    def guide(x: Tensor) -> None:
        pyro.module("to_y", to_y)
        pyro.module("encoder", encoder)
        with pyro.plate("rows", BATCH):
            # If enumerated, the shape is [classes, 1, classes].
            y = pyro.sample("y", dist.OneHotCategorical(logits=to_y(x)))
            leading = torch.broadcast_shapes(x.shape[:-1], y.shape[:-1])
            pyro.sample(
                "z",
                _normal(encoder(torch.cat([x.expand(*leading, -1), y.expand(*leading, -1)], -1))),
            )

    enumerated = pyro.infer.config_enumerate(guide, "parallel")
    return _trained(problem, model, enumerated, pyro.infer.TraceEnum_ELBO(max_plate_nesting=1))


def vrnn(problem: Problem) -> Contender:
    """Build the recurrent model; its recurrence runs twice, in the model and in the guide.

    Neither can read the values that the other computes.
    """
    import pyro
    import pyro.distributions as dist

    s, lstm = problem.sizes, problem.lstm()
    prior, encoder, decoder = (problem.network(name) for name in ("prior", "encoder", "decoder"))
    start = torch.zeros(BATCH, s.h, device=problem.device)

    def advanced(x: Tensor, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, state = lstm(torch.cat([x, z], -1).unsqueeze(0), state)
        return output.squeeze(0), state

    def model(x: Tensor) -> None:
        for name, part in (("lstm", lstm), ("prior", prior), ("decoder", decoder)):
            pyro.module(name, part)
        h, state = start, None
        with pyro.plate("rows", BATCH):
            for t in range(s.steps):
                z = pyro.sample(f"z_{t}", _normal(prior(h)))
                pyro.sample(
                    f"x_{t}",
                    dist.Bernoulli(logits=decoder(torch.cat([h, z], -1))).to_event(1),
                    obs=x[:, t],
                )
                if t < s.steps - 1:
                    h, state = advanced(x[:, t], z, state)

    def guide(x: Tensor) -> None:
        pyro.module("lstm", lstm)
        pyro.module("encoder", encoder)
        h, state = start, None
        with pyro.plate("rows", BATCH):
            for t in range(s.steps):
                z = pyro.sample(f"z_{t}", _normal(encoder(torch.cat([h, x[:, t]], -1))))
                if t < s.steps - 1:
                    h, state = advanced(x[:, t], z, state)

    return _trained(problem, model, guide, pyro.infer.TraceMeanField_ELBO())


def _normal(raw: Tensor) -> Any:
    import pyro.distributions as dist

    mean, scale = raw.chunk(2, -1)
    return dist.Normal(mean, F.softplus(scale)).to_event(1)


BUILDERS = {"vae": vae, "gmvae": gmvae, "vrnn": vrnn}
