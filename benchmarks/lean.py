"""Lean steps in torch, written by hand for speed.

They have no distribution objects, formulas in closed form, and fused Adam. In the mixture, the
class's part of the first layer is added, not multiplied. In the recurrent model, all values that
the loop does not need (the prior, the likelihood, all terms) are computed for all steps at once. On
a GPU, the same step can also be captured as a graph and replayed. On any device, torch.compile can
compile its bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from problems import BATCH, Batches, Contender, Problem
from torch import Tensor, nn

AT_ONCE = 10  # steps per graph, as many as the library takes
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
    work, batches = worker(problem, capturable=captured), Batches(problem.rows())
    if not captured:
        return Contender(lambda: work(batches()))
    x = batches().clone()
    replay = replayed(lambda: work(x))

    def step() -> Tensor:
        x.copy_(batches())
        return replay()

    return Contender(step)


def compiled(problem: Problem) -> Contender:
    """Compile the bound and its gradient with torch.compile.

    On a GPU, ten steps are captured as one graph. With ``mode="reduce-overhead"`` instead, the
    optimiser would stay outside the graph.
    """
    on_gpu = problem.device == "cuda"
    work = worker(problem, capturable=on_gpu, compiled=True)
    batches = Batches(problem.rows())
    if not on_gpu:
        return Contender(lambda: work(batches()))
    return Contender(GraphsOfSteps(work, batches).step, lambda steps: -steps.loss())


def worker(
    problem: Problem, *, capturable: bool = False, compiled: bool = False
) -> Callable[[Tensor], Tensor]:
    """Return a step as a function of its batch."""
    parts, bound = BUILDERS[problem.model](problem)
    if compiled:
        bound = torch.compile(bound, dynamic=False)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=problem.lr, fused=True, capturable=capturable)

    def work(x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = -bound(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return work


class GraphsOfSteps:
    """Steps on a GPU that wait until there are ten, and then run as one graph.

    If the caller waits for fewer steps, each of them runs as a graph of one step.
    """

    def __init__(self, work: Callable[[Tensor], Tensor], batches: Batches) -> None:
        self.batches, self.asked = batches, 0
        self.x = batches(AT_ONCE * BATCH).unflatten(0, (AT_ONCE, BATCH)).clone()
        self.one = replayed(lambda: work(self.x[0]))
        # a second warm-up would only move the weights
        self.ten = replayed(lambda: [work(x) for x in self.x][-1], warm_up=0)
        self.last: Tensor | None = None

    def step(self) -> GraphsOfSteps:
        self.asked += 1
        if self.asked == AT_ONCE:
            self.x.copy_(self.batches(AT_ONCE * BATCH).view_as(self.x))
            self.last, self.asked = self.ten(), 0
        return self

    def block_until_ready(self) -> None:
        for _ in range(self.asked):
            self.x[0].copy_(self.batches())
            self.last = self.one()
        self.asked = 0

    def loss(self) -> float:
        """Return the loss of the last step."""
        self.block_until_ready()
        assert self.last is not None
        return float(self.last)


@cache
def side_stream() -> torch.cuda.Stream:
    """Return the stream of all warm-ups and captures."""
    return torch.cuda.Stream()


def replayed(work: Callable[[], Tensor | None], *, warm_up: int = 3) -> Callable[[], Tensor | None]:
    """Capture work on a GPU as a graph, after doing it ``warm_up`` times.

    A call replays it and returns the tensor that it writes, the same one every time.
    """
    side = side_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        result = work()

    def replay() -> Tensor | None:
        graph.replay()
        return result

    replay.work = work  # type: ignore[attr-defined]  # the graph reads memory that only this keeps

    return replay
