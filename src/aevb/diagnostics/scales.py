"""Findings on scales: an ever sharper likelihood, a posterior near a point or too wide."""

from __future__ import annotations

import torch
from torch import Tensor

from aevb.diagnostics.finding import Finding
from aevb.diagnostics.measure import Measured, spread
from aevb.estimate.keys import mask_of, real_steps
from aevb.model import Model

# Limits of ratios: likelihood scale / data sd, and q's scale / p's scale (twice).
SHARP, POINT, WIDE = (1e-3, 1e-4, 3.0)


class ScaleSums:
    """Accumulate mean log scales over rows, steps and q.

    The scales are p's scale of each observed column, and q's scale relative to p's of each latent
    entry.
    """

    def __init__(self) -> None:
        self.logs: dict[str, Tensor] = {}
        self.values: dict[str, tuple[Tensor, Tensor]] = {}  # Σ and Σ of squares of the known data
        self.count: dict[str, Tensor] = {}

    def add(self, part: Measured) -> None:
        graph = part.model.graph
        for name in graph.observed:
            if graph.rule("p", name).spec.learns_scale:
                self._sum(part, name, part.of_p(name, lambda dist: spread(dist).log()))
                there = self._there(part, name, part.batch[name])
                value = torch.where(there, part.batch[name].double(), 0.0)
                added = torch.stack(
                    [value.sum((0, 1)), value.square().sum((0, 1)), there.double().sum((0, 1))]
                )
                old = self.values.get(name)
                self.values[name] = (
                    added[:2] if old is None else old[0] + added[:2],
                    added[2] if old is None else old[1] + added[2],
                )
        for name in part.plan.choices:
            if graph.rule("q", name).spec.learns_scale and hasattr(
                graph.rule("p", name).spec, "heads"
            ):
                self._sum(
                    part, name, part.compare(name, lambda q, p: spread(q).log() - spread(p).log())
                )

    def _there(self, part: Measured, name: str, like: Tensor) -> Tensor:
        there = torch.ones_like(like, dtype=torch.bool)
        for mask in (
            part.batch.get(mask_of(name)) if name in part.model.graph.observed else None,
            real_steps(part.batch),
        ):
            if mask is not None and (mask.shape[0] == 1 or part.model.graph.timed[name]):
                there = there & mask
        return there

    def _sum(self, part: Measured, name: str, logs: Tensor) -> None:
        real = real_steps(part.batch, timed=part.model.graph.timed[name])
        rows = logs.shape[0] * logs.shape[1] if real is None else real.sum()
        self.logs[name] = self.logs.get(name, torch.zeros(())) + logs.double().sum((0, 1)).cpu()
        self.count[name] = (
            self.count.get(name, torch.zeros(())) + torch.as_tensor(rows).double().cpu()
        )

    def findings(self, model: Model) -> list[Finding]:
        found = []
        for name, logs in self.logs.items():
            scale = (logs / self.count[name]).exp()
            if name in model.graph.observed:
                found += self._likelihood(name, scale)
            else:
                found += _posterior(name, scale)
        return found

    def _likelihood(self, name: str, scale: Tensor) -> list[Finding]:
        sums, count = self.values[name]
        mean, second = (sums / count.clamp_min(1)).cpu()
        ratio = scale / (second - mean.square()).clamp_min(0).sqrt().clamp_min(1e-12)
        sharp = (ratio < SHARP).nonzero()[:, 0].tolist()
        if not sharp:
            return []
        text = (
            f"p's scale of {name} has shrunk to almost 0 in {len(sharp)} of {len(scale)} columns: "
            f"{float(ratio.min()):.1e} of the data's sd. "
        )
        text += (
            "The density, and with it the ELBO, grows without bound there, and training neglects "
            "everything else."
        )
        remedy = (
            f"Fix the scale (Normal(…, scale=0.1)), drop columns that hardly vary, or add noise "
            f"to them; look at column {sharp[0]} (from 0) first."
        )
        return [
            Finding(
                "warning",
                "sharp likelihood",
                name,
                text,
                {"columns": sharp, "scale": scale.tolist(), "ratio": ratio.tolist()},
                remedy,
            )
        ]


def _posterior(name: str, ratio: Tensor) -> list[Finding]:
    figures = {"ratio": ratio.tolist()}
    if bool((ratio < POINT).any()):
        text = (
            f"q's scale of {name} has shrunk to almost 0 ({float(ratio.min()):.1e} of p's): q is "
            f"a point, and the model a plain auto-encoder."
        )
        return [
            Finding(
                "warning",
                "point posterior",
                name,
                text,
                figures,
                "Look at the scale of the likelihood: fix it, or use the full weight of the KL.",
            )
        ]
    if bool((ratio > WIDE).any()):
        text = (
            f"q's scale of {name} is {float(ratio.max()):.1f} times p's in its widest entry; a "
            f"posterior is seldom wider than its prior."
        )
        return [
            Finding(
                "note",
                "wide posterior",
                name,
                text,
                figures,
                "Train q further, or look for unusual rows.",
            )
        ]
    return []
