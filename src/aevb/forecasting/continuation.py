"""Continue sequences: draw the future from p, given draws of the past's latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aevb.declare.evaluation_order import schedule
from aevb.declare.graph import Entry
from aevb.estimate.ancestral import ancestral_draw
from aevb.estimate.batch import Batch
from aevb.estimate.keys import mask_of
from aevb.estimate.program import Program
from aevb.forecasting.request import Past, at_steps

ROWS = 4096  # largest number of rows per pass, counted once per draw
NUMBERS = 2**26  # largest number of values of p's variables per pass, over all rows and steps


@dataclass(frozen=True)
class Continued:
    """Draws of the future of one variable, [S, steps, N, d].

    ``mean`` and ``variance`` are those of p's factor, given the draws of the latents. They are NaN
    if the family has no formula.
    """

    draws: Tensor
    mean: Tensor
    variance: Tensor

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of each entry, [steps, N, d].

        Averaging p's means and variances has less noise than averaging draws (Rao–Blackwell).
        """
        exact = not bool(self.mean.isnan().any() or self.variance.isnan().any())
        if exact:
            spread = self.variance.mean(0) + self.mean.var(0, correction=0)
            return self.mean.mean(0), spread.sqrt()
        return self.draws.mean(0), self.draws.std(0, correction=0)


def continued(past: Past, latents: Mapping[str, Tensor], samples: int) -> dict[str, Continued]:
    """Draw the future of the observed variables.

    ``latents`` are ``samples`` joint draws of the latents of the past, [S, T or 1, N, d] each.
    """
    n, graph = len(past.lengths), past.model.graph
    steps = past.model._extent(past.batch)[1] + past.steps
    rows = min(ROWS, max(1, NUMBERS // (steps * sum(map(graph.size, graph.p)))))
    if n > rows:
        parts = [
            continued(
                past.rows(start, min(rows, n - start)),
                {
                    name: value.narrow(-2, start, min(rows, n - start))
                    for name, value in latents.items()
                },
                samples,
            )
            for start in range(0, n, rows)
        ]
        return {name: _beside([part[name] for part in parts]) for name in past.names}
    block = rows // n
    found: dict[str, list[Continued]] = {name: [] for name in past.names}
    for start in range(0, samples, block):
        some = {name: value[start : start + block] for name, value in latents.items()}
        for name, part in _continued(past, some, min(block, samples - start)).items():
            found[name].append(part)
    return {
        name: Continued(
            torch.cat([part.draws for part in each]),
            torch.cat([part.mean for part in each]),
            torch.cat([part.variance for part in each]),
        )
        for name, each in found.items()
    }


def _beside(parts: Sequence[Continued]) -> Continued:
    """Concatenate the results of different rows."""
    return Continued(
        torch.cat([part.draws for part in parts], -2),
        torch.cat([part.mean for part in parts], -2),
        torch.cat([part.variance for part in parts], -2),
    )


def _continued(past: Past, latents: Mapping[str, Tensor], count: int) -> dict[str, Continued]:
    """Run p over the past and the future; draws of the past are replaced by the known values."""
    model, graph, n = past.model, past.model.graph, len(past.lengths)
    steps = past.model._extent(past.extended)[1]
    batch = {key: value.repeat(1, count, 1) for key, value in past.extended.items()}
    known = _known(past, batch, latents, count)
    fresh = ancestral_draw(model, count * n, steps)

    def draw(name: str, entry: Entry, raw: Tensor, t: int | None) -> Tensor:
        value = fresh(name, entry, raw, t)
        if name not in known:
            return value
        mask, there = known[name]
        if t is not None:
            mask, there = (part.narrow(0, min(t, len(part) - 1), 1) for part in (mask, there))
        return torch.where(mask, there, value)

    program = Program(graph, model.factors, batch, steps=steps)
    program.values |= {name: batch[name] for name in graph.given if name in batch}
    reads = {name: graph.reads("p", name) for name in graph.p}
    program.run(schedule(reads, "p"), draw)
    found = {}
    for name in past.names:
        _, dist = program.distribution("p", name)
        value = program.values[name]
        try:
            mean, variance = dist.mean, dist.variance
        except NotImplementedError:
            mean = variance = torch.full_like(value, torch.nan)
        parts = (
            at_steps(part.expand(steps, count * n, -1), past.index.repeat(1, count))
            .unflatten(-2, (count, n))
            .movedim(-3, 0)
            for part in (value, mean, variance)
        )
        found[name] = Continued(*parts)
    return found


def _known(
    past: Past, batch: Batch, latents: Mapping[str, Tensor], count: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return, for each variable of p, a mask of the known places and the values there.

    Known are the data, and the latents of the past.
    """
    graph, found = past.model.graph, {}
    whole = past.model._extent(past.extended)[1]
    for name in graph.stochastic:
        if name in latents:
            value = latents[name].transpose(0, 1).flatten(1, 2)  # [T or 1, count · N, d]
            if not graph.timed[name]:
                found[name] = (torch.ones_like(value[..., :1], dtype=torch.bool), value)
                continue
            later = value.new_zeros(past.steps, *value.shape[1:])
            step = torch.arange(whole, device=value.device)[:, None, None]
            before = step < past.lengths.repeat(count)[:, None]
            found[name] = (before, torch.cat([value, later]))
        elif name in batch:
            mask = batch.get(mask_of(name), torch.ones_like(batch[name], dtype=torch.bool))
            found[name] = (mask, batch[name])
    return found
