"""Steps in the style of the tutorial.

They have modules that return torch distributions, classes repeated in memory, and a loop over
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributions as td
import torch.nn.functional as F
from problems import BATCH, DROPOUT, LEVELS, Batches, Contender, Problem
from torch import Tensor, nn


class _Gaussian(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *parents: Tensor) -> td.Distribution:
        mean, raw = self.body(torch.cat(parents, -1)).chunk(2, -1)
        return td.Independent(td.Normal(mean, F.softplus(raw)), 1)


class _Pixels(nn.Module):
    """The Bernoulli by its logits, the continuous Bernoulli by its λ.

    torch clamps λ. If logits are given, it clamps the normaliser only, and the result is no
    density.
    """

    def __init__(self, body: nn.Module, *, continuous: bool = False) -> None:
        super().__init__()
        self.body, self.continuous = body, continuous

    def forward(self, *parents: Tensor) -> td.Distribution:
        logits = self.body(torch.cat(parents, -1))
        return td.Independent(
            td.ContinuousBernoulli(torch.sigmoid(logits))
            if self.continuous
            else td.Bernoulli(logits=logits),
            1,
        )


def _trained(
    problem: Problem, parts: tuple[nn.Module, ...], bound: Callable[[Tensor], Tensor]
) -> Contender:
    optimizer = torch.optim.Adam(
        [parameter for part in parts for parameter in part.parameters()], lr=problem.lr
    )
    batches = Batches(problem.rows())

    def step() -> Tensor:
        loss = -bound(batches()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Contender(step)


def _standard(problem: Problem) -> td.Distribution:
    shape = BATCH, problem.sizes.z
    return td.Independent(
        td.Normal(
            torch.zeros(shape, device=problem.device), torch.ones(shape, device=problem.device)
        ),
        1,
    )


def vae(problem: Problem) -> Contender:
    p, q = _Pixels(problem.network("decoder")), _Gaussian(problem.network("encoder"))

    def bound(x: Tensor) -> Tensor:
        posterior = q(x)
        return p(posterior.rsample()).log_prob(x) - td.kl_divergence(posterior, _standard(problem))

    return _trained(problem, (p, q), bound)


def tutorial_vae(problem: Problem) -> Contender:
    p, q = (
        _Pixels(problem.network("decoder", DROPOUT), continuous=True),
        _Gaussian(problem.network("encoder", DROPOUT)),
    )

    def bound(levels: Tensor) -> Tensor:
        x = (levels + torch.rand(levels.shape, device=problem.device)) / LEVELS
        posterior = q(x)
        return p(posterior.rsample()).log_prob(x) - td.kl_divergence(posterior, _standard(problem))

    return _trained(problem, (p, q), bound)


def gmvae(problem: Problem) -> Contender:
    classes, device = problem.sizes.classes, problem.device
    p_x, p_z = _Pixels(problem.network("decoder")), _Gaussian(problem.network("prior"))
    q_y, q_z = problem.network("to_y"), _Gaussian(problem.network("encoder"))

    def bound(x: Tensor) -> Tensor:
        posterior_y = td.OneHotCategorical(logits=q_y(x))
        y = torch.eye(classes, device=device)[
            torch.arange(classes, device=device).repeat_interleave(BATCH)
        ]
        repeated = x.repeat(classes, 1)
        posterior_z = q_z(repeated, y)
        other = p_x(posterior_z.rsample()).log_prob(repeated) - td.kl_divergence(
            posterior_z, p_z(y)
        )
        return (
            (posterior_y.probs * other.reshape(classes, BATCH).T).sum(1)
            + posterior_y.entropy()
            - math.log(classes)
        )

    return _trained(problem, (p_x, p_z, q_y, q_z), bound)


def vrnn(problem: Problem) -> Contender:
    s, device, lstm = problem.sizes, problem.device, problem.lstm()
    prior, posterior = (_Gaussian(problem.network(name)) for name in ("prior", "encoder"))
    likelihood = _Pixels(problem.network("decoder"))

    def bound(x: Tensor) -> Tensor:
        total: Any = 0.0
        state, before = None, torch.zeros(BATCH, s.x + s.z, device=device)
        for t in range(s.steps):
            here = x[:, t]
            if t == 0:
                h = torch.zeros(BATCH, s.h, device=device)
            else:
                output, state = lstm(before.unsqueeze(0), state)
                h = output.squeeze(0)
            over_z, guess = prior(h), posterior(h, here)
            z = guess.rsample()
            total = total + likelihood(h, z).log_prob(here) - td.kl_divergence(guess, over_z)
            before = torch.cat([here, z], -1)
        return total

    return _trained(problem, (lstm, prior, posterior, likelihood), bound)


BUILDERS = {"vae": vae, "vae-tutorial": tutorial_vae, "gmvae": gmvae, "vrnn": vrnn}
