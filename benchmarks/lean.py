"""Lean steps in torch, written by hand for speed.

They have no distribution objects, formulas in closed form, and fused Adam. In the mixture, the
class's part of the first layer is added, not multiplied. In the recurrent model, all values that
the loop does not need (the prior, the likelihood, all terms) are computed for all steps at once. On
a GPU, the same step can also be captured as a graph and replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from problems import BATCH, Batches, Contender, Problem
from torch import Tensor, nn

Bound = Callable[[Tensor], Tensor]  # from a batch to the mean bound


def vae(problem: Problem) -> tuple[list[nn.Module], Bound]:
    encoder, decoder = problem.network("encoder"), problem.network("decoder")

    def bound(x: Tensor) -> Tensor:
        mean, raw = encoder(x).chunk(2, -1)
        scale = F.softplus(raw)
        logits = decoder(torch.addcmul(mean, scale, torch.randn_like(mean)))
        kl = 0.5 * (mean.square() + scale.square() - 1).sum() - scale.log().sum()
        return -(F.binary_cross_entropy_with_logits(logits, x, reduction="sum") + kl) / BATCH

    return [encoder, decoder], bound


def gmvae(problem: Problem) -> tuple[list[nn.Module], Bound]:
    classes = problem.sizes.classes
    to_y, decoder, encoder, prior = (
        problem.network(name) for name in ("to_y", "decoder", "encoder", "prior")
    )
    first, rest, of_y = encoder[0], encoder[1:], prior[0]

    def bound(x: Tensor) -> Tensor:
        log_q = to_y(x).log_softmax(-1).T  # [classes, batch]
        of_x, of_class = first.weight.split([x.shape[1], classes], 1)
        # [classes, batch, z]
        mean, raw = rest(F.linear(x, of_x, first.bias) + of_class.T.unsqueeze(1)).chunk(2, -1)
        scale = F.softplus(raw)
        mean_p, raw_p = (of_y.weight.T + of_y.bias).unsqueeze(1).chunk(2, -1)
        scale_p = F.softplus(raw_p)
        logits = decoder(torch.addcmul(mean, scale, torch.randn_like(mean)))
        reconstruction = (logits * x - F.softplus(logits)).sum(-1)
        total = log_q.exp() * (
            reconstruction - _kl(mean, scale, mean_p, scale_p) - log_q - math.log(classes)
        )
        return total.sum() / BATCH

    return [to_y, decoder, encoder, prior], bound


def vrnn(problem: Problem) -> tuple[list[nn.Module], Bound]:
    s, lstm = problem.sizes, problem.lstm()
    prior, encoder, decoder = (problem.network(name) for name in ("prior", "encoder", "decoder"))
    first, rest = encoder[0], encoder[1:]
    lower, upper = (
        [
            getattr(lstm, f"{name}_l{layer}")
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        ]
        for layer in (0, 1)
    )

    def bound(rows: Tensor) -> Tensor:
        x = rows.transpose(0, 1)  # [steps, batch, x]
        of_h, of_x = first.weight.split([s.h, s.x], 1)
        seen = F.linear(x, of_x, first.bias)
        noise = torch.randn(s.steps, BATCH, s.z, device=x.device)
        zeros = x.new_zeros(BATCH, s.h)
        a = b = (zeros, zeros)
        hs, means, scales, zs = [], [], [], []
        for t in range(s.steps):
            if t:
                a = torch.lstm_cell(torch.cat([x[t - 1], zs[-1]], -1), a, *lower)
                b = torch.lstm_cell(a[0], b, *upper)
            mean, raw = rest(torch.addmm(seen[t], b[0], of_h.T)).chunk(2, -1)
            scale = F.softplus(raw)
            for kept, value in (
                (hs, b[0]),
                (means, mean),
                (scales, scale),
                (zs, torch.addcmul(mean, scale, noise[t])),
            ):
                kept.append(value)
        h, mean, scale, z = (torch.stack(kept) for kept in (hs, means, scales, zs))
        mean_p, raw_p = prior(h).chunk(2, -1)
        logits = decoder(torch.cat([h, z], -1))
        reconstruction = -F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
        return (reconstruction - _kl(mean, scale, mean_p, F.softplus(raw_p)).sum()) / BATCH

    return [lstm, prior, encoder, decoder], bound


BUILDERS = {"vae": vae, "gmvae": gmvae, "vrnn": vrnn}


def _kl(mean: Tensor, scale: Tensor, mean_p: Tensor, scale_p: Tensor) -> Tensor:
    """Return KL(N(μ, σ²) ‖ N(μₚ, σₚ²)), summed over the last axis."""
    ratio = scale / scale_p
    return (0.5 * (ratio.square() + ((mean - mean_p) / scale_p).square() - 1) - ratio.log()).sum(-1)


def lean(problem: Problem, *, captured: bool = False) -> Contender:
    parts, bound = BUILDERS[problem.model](problem)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=problem.lr, fused=True, capturable=captured)
    batches = Batches(problem.rows())

    def work(x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = -bound(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if not captured:
        return Contender(lambda: work(batches()))
    x = batches().clone()
    replay = replayed(lambda: work(x))

    def step() -> Tensor:
        x.copy_(batches())
        return replay()

    return Contender(step)


def replayed(work: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
    """Capture work on a GPU as a graph.

    A call replays it and returns the tensor that it writes, the same one every time.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()

    def replay() -> Tensor | None:
        graph.replay()
        return result

    replay.work = work  # type: ignore[attr-defined]  # the graph reads memory that only this keeps

    return replay
