"""One training step of the same model, written in several ways. Each function builds everything and returns the step.

The models are the tutorial's: a Bernoulli VAE (784-500-500-20), a Gaussian-mixture VAE of ten classes (784-512-512-64, marginalised) and a
variational RNN (28 steps of 28, LSTM of two layers of 256). A batch is a hundred binary rows, resident in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import Tensor, nn

from aevb import zoo
from aevb.families import Bernoulli
from aevb.networks import mlp
from aevb.training.fit import Training
from aevb.training.settings import Settings

Step = Callable[[], Any]
BATCH = 100
LR = 1e-3


def rows(model: str, device: str, count: int = 1000) -> Tensor:
    """Binary rows, as sparse as digits are."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, 28, 28) if model == "vrnn" else (count, 784)
    return (torch.rand(shape, generator=generator) < 0.13).float().to(device)


def _network(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes[:-1]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


class _Loop:
    """Batches in the order of one permutation after another."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.at, self.order = data, 0, torch.randperm(len(data), device=data.device)

    def __call__(self) -> Tensor:
        if self.at + BATCH > len(self.data):
            self.at, self.order = 0, torch.randperm(len(self.data), device=self.data.device)
        self.at += BATCH
        return self.data[self.order[self.at - BATCH : self.at]]


# The tutorial's way of writing: modules that return torch distributions, classes repeated in memory, a loop over steps ----------------------


class _Gaussian(nn.Module):
    def __init__(self, inputs: int, hidden: tuple[int, ...], z: int) -> None:
        super().__init__()
        self.body = _network(inputs, *hidden, 2 * z) if hidden else nn.Linear(inputs, 2 * z)

    def forward(self, *parents: Tensor) -> td.Distribution:
        mean, raw = self.body(torch.cat(parents, -1)).chunk(2, -1)
        return td.Independent(td.Normal(mean, F.softplus(raw)), 1)


class _Bits(nn.Module):
    def __init__(self, inputs: int, hidden: tuple[int, ...], x: int) -> None:
        super().__init__()
        self.body = _network(inputs, *hidden, x)

    def forward(self, *parents: Tensor) -> td.Distribution:
        return td.Independent(td.Bernoulli(logits=self.body(torch.cat(parents, -1))), 1)


def tutorial_vae(device: str) -> Step:
    p, q = _Bits(20, (500, 500), 784).to(device), _Gaussian(784, (500, 500), 20).to(device)
    optimizer = torch.optim.Adam([*p.parameters(), *q.parameters()], lr=LR)
    batch = _Loop(rows("vae", device))

    def step() -> None:
        x = batch()
        posterior = q(x)
        z = posterior.rsample()
        prior = td.Independent(td.Normal(torch.zeros(BATCH, 20, device=device), torch.ones(BATCH, 20, device=device)), 1)
        loss = -(p(z).log_prob(x) - td.kl_divergence(posterior, prior)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def tutorial_gmvae(device: str) -> Step:
    classes, z = 10, 64
    p_x, p_z = _Bits(z, (512, 512), 784).to(device), _Gaussian(classes, (), z).to(device)
    q_y, q_z = _network(784, 512, 512, classes).to(device), _Gaussian(784 + classes, (512, 512), z).to(device)
    optimizer = torch.optim.Adam([parameter for part in (p_x, p_z, q_y, q_z) for parameter in part.parameters()], lr=LR)
    batch = _Loop(rows("gmvae", device))

    def step() -> None:
        x = batch()
        posterior_y = td.OneHotCategorical(logits=q_y(x))
        entropy = posterior_y.entropy()
        y = torch.eye(classes, device=device)[torch.arange(classes, device=device).repeat_interleave(BATCH)]
        repeated = x.repeat(classes, 1)
        posterior_z = q_z(repeated, y)
        other = p_x(posterior_z.rsample()).log_prob(repeated) - td.kl_divergence(posterior_z, p_z(y))
        bound = (posterior_y.probs * other.reshape(classes, BATCH).T).sum(1) + entropy
        optimizer.zero_grad()
        (-bound.mean()).backward()
        optimizer.step()

    return step


def tutorial_vrnn(device: str) -> Step:
    h, z, hidden = 256, 2, (500, 500)
    lstm = nn.LSTM(28 + z, h, 2).to(device)
    prior, posterior, likelihood = (part.to(device) for part in (_Gaussian(h, hidden, z), _Gaussian(h + 28, hidden, z), _Bits(h + z, hidden, 28)))
    optimizer = torch.optim.Adam([parameter for part in (lstm, prior, posterior, likelihood) for parameter in part.parameters()], lr=LR)
    batch = _Loop(rows("vrnn", device))

    def step() -> None:
        x = batch()
        bound: Any = 0.0
        state, before = None, torch.zeros(BATCH, 28 + z, device=device)
        for t in range(28):
            here = x[:, t]
            if t == 0:
                ht = torch.zeros(BATCH, h, device=device)
            else:
                output, state = lstm(before.unsqueeze(0), state)
                ht = output.squeeze(0)
            over_z, guess = prior(ht), posterior(ht, here)
            zt = guess.rsample()
            bound = bound + (likelihood(ht, zt).log_prob(here) - td.kl_divergence(guess, over_z)).mean()
            before = torch.cat([here, zt], -1)
        optimizer.zero_grad()
        (-bound).backward()
        optimizer.step()

    return step


# Lean: what one writes by hand when a step must be fast ---------------------------------------------------------------------------------


def lean_vae(device: str) -> Step:
    encoder, decoder = _network(784, 500, 500, 40).to(device), _network(20, 500, 500, 784).to(device)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=LR, fused=True)
    batch = _Loop(rows("vae", device))

    def step() -> None:
        x = batch()
        mean, raw = encoder(x).chunk(2, -1)
        scale = F.softplus(raw)
        logits = decoder(torch.addcmul(mean, scale, torch.randn_like(mean)))
        kl = 0.5 * (mean.square() + scale.square() - 1).sum() - scale.log().sum()
        loss = (F.binary_cross_entropy_with_logits(logits, x, reduction="sum") + kl) / BATCH
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def lean_gmvae(device: str) -> Step:
    classes, z = 10, 64
    to_y, decoder = _network(784, 512, 512, classes).to(device), _network(z, 512, 512, 784).to(device)
    from_x, from_y = nn.Linear(784, 512).to(device), nn.Linear(classes, 512, bias=False).to(device)
    rest = nn.Sequential(nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2 * z)).to(device)
    prior = nn.Linear(classes, 2 * z).to(device)
    parts = (to_y, decoder, from_x, from_y, rest, prior)
    optimizer = torch.optim.Adam([parameter for part in parts for parameter in part.parameters()], lr=LR, fused=True)
    batch = _Loop(rows("gmvae", device))

    def step() -> None:
        x = batch()
        log_q = to_y(x).log_softmax(-1).T
        mean, raw = rest(from_x(x) + from_y.weight.T.unsqueeze(1)).chunk(2, -1)  # [classes, batch, z]
        scale = F.softplus(raw)
        mean_p, raw_p = (prior.weight.T + prior.bias).unsqueeze(1).chunk(2, -1)
        scale_p = F.softplus(raw_p)
        logits = decoder(torch.addcmul(mean, scale, torch.randn_like(mean)))
        reconstruction = (logits * x - F.softplus(logits)).sum(-1)
        ratio = scale / scale_p
        kl = (0.5 * (ratio.square() + ((mean - mean_p) / scale_p).square() - 1) - ratio.log()).sum(-1)
        bound = (log_q.exp() * (reconstruction - kl - log_q - math.log(classes))).sum(0)
        optimizer.zero_grad(set_to_none=True)
        (-bound.mean()).backward()
        optimizer.step()

    return step


# This library, as ``fit`` runs it -------------------------------------------------------------------------------------------------------


def aevb(model: str, device: str, **choices: Any) -> Step:
    from contextlib import ExitStack

    torch.manual_seed(0)
    build = {
        "vae": lambda: zoo.vae(hidden=(500, 500), dropout=0.0, likelihood=Bernoulli(784, net=mlp(500, 500))),
        "gmvae": zoo.gmvae,
        "vrnn": zoo.vrnn,
    }
    built = build[model]().to(device)
    settings = Settings(steps=10**9, batch=BATCH, lr=LR, decay="constant", **choices)
    training = Training(built, {"x": rows(model, device)}, None, settings, None, False, ExitStack())
    built.train()
    phase = settings.schedule.phase(0, 10**9)

    def step() -> None:
        training._take_step(phase)
        training.step += 1
        if training.step % 100 == 0:
            assert not training.stepper.failed()
            training.stepper.read()

    return step


# The floor: the matrix products of forward and backward alone ---------------------------------------------------------------------------


def floor(model: str, device: str) -> Step:
    layers = {
        "vae": [(BATCH, a, b) for a, b in ((784, 500), (500, 500), (500, 40), (20, 500), (500, 500), (500, 784))],
        "gmvae": [(BATCH, a, b) for a, b in ((784, 512), (512, 512), (512, 10), (784, 512))]
        + [(10 * BATCH, a, b) for a, b in ((512, 512), (512, 128), (64, 512), (512, 512), (512, 784))],
    }[model]
    work = [tuple(torch.randn(shape, device=device) for shape in ((n, a), (a, b), (n, b))) for n, a, b in layers]
    needs_input = [i not in (0,) for i in range(len(layers))]

    def step() -> None:
        for (x, w, g), wanted in zip(work, needs_input, strict=True):
            x @ w
            x.T @ g
            if wanted:
                g @ w.T

    return step


def contenders(model: str, device: str) -> dict[str, Callable[[], Step]]:
    """Builders by name; peers only where they are installed."""
    found: dict[str, Callable[[], Step]] = {}
    own: dict[str, dict[str, Callable[[str], Step]]] = {
        "the tutorial's way": {"vae": tutorial_vae, "gmvae": tutorial_gmvae, "vrnn": tutorial_vrnn},
        "lean, by hand": {"vae": lean_vae, "gmvae": lean_gmvae},
    }
    for name, builders in own.items():
        if model in builders:
            found[name] = lambda build=builders[model]: build(device)  # type: ignore[misc]
    found["aevb"] = lambda: aevb(model, device)
    found["aevb, bfloat16"] = lambda: aevb(model, device, precision="bf16")
    if model != "vrnn":  # unrolled over its steps it takes minutes to compile
        found["aevb, compiled"] = lambda: aevb(model, device, compile=True)
    if model != "vrnn":
        found["matrix products alone"] = lambda: floor(model, device)
    from peers import peers

    return found | peers(model, device)
