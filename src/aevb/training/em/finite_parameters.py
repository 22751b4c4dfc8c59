"""Parameters of a model with finite latents as one vector, for standardised data.

The vector holds the distribution parameters ("heads") of every factor for each value of its parent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aevb.declare import distributions as ad
from aevb.declare.conditionals import Occurrences
from aevb.declare.graph import Entry
from aevb.training.em.columns import Columns
from aevb.training.em.emissions import Sums
from aevb.training.em.factors import EM, Rows


class Heads(EM):
    """Parameters of factors that read at most one class.

    A Gaussian column is standardised to mean 0 and standard deviation 1 if its factor learns a mean
    and a scale.
    """

    least: float | Tensor = 1e-12
    occurrences: Mapping[str, Occurrences]  # of the variable of each factor that needs them

    def set_shares(self, least: Sequence[float]) -> None:
        sizes = {self.graph.size(e.key.name) for e in self.entries if e.spec.gaussian}
        if sizes - {len(least)}:
            raise ValueError(
                f"em: least has {len(least)} shares, and the Gaussian variables have "
                f"{', '.join(map(str, sorted(sizes)))} columns. Give one share for each column."
            )
        self.least = torch.tensor(least, dtype=torch.float64)

    def _measure(self, rows: Rows) -> None:
        """Compute the units (mean and standard deviation) of every observed variable."""
        graph = self.graph
        self.columns = Columns(rows, graph.observed)
        self.centre, self.unit = {}, {}
        for name in graph.observed:
            entries = graph.p[name].values()
            located = all(
                entry.spec.gaussian and (entry.key.parents or entry.spec.learned)
                for entry in entries
            )
            sized = located and all(entry.spec.learns_scale for entry in entries)
            self.centre[name] = (
                self.columns.mean[name] if located else torch.zeros_like(self.columns.mean[name])
            )
            self.unit[name] = (
                self.columns.spread[name] if sized else torch.ones_like(self.columns.spread[name])
            )

    def _log_units(self) -> Tensor:
        """Return the log-Jacobian of standardising, summed over all rows."""
        return -torch.stack(
            [
                (self.columns.count[name] * self.unit[name].log()).sum()
                for name in self.graph.observed
            ]
        ).sum()

    def _shapes(self, entry: Entry) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a factor's heads (one row per value of the parent) and vectors."""
        factor: Any = self.model.factors[entry.id]
        cells = self.graph.size(entry.key.parents[0].name) if entry.key.parents else 1
        heads = (
            {name: (cells, size) for name, size in factor.sizes.items()}
            if entry.key.parents or entry.spec.learned
            else {}
        )
        return heads | {name: (len(vector),) for name, vector in factor.vectors.items()}

    def get(self) -> dict[str, dict[str, Tensor]]:
        """Return the model's heads and vectors, by the factor's id, without converting units."""
        found: dict[str, dict[str, Tensor]] = {}
        for entry in self.entries:
            factor: Any = self.model.factors[entry.id]
            heads = {name: vector.detach().double() for name, vector in factor.vectors.items()}
            if entry.key.parents:
                blocks = factor.net.blocks
                raw = blocks.weights[str(entry.key.parents[0])].mT + (
                    0.0 if blocks.bias is None else blocks.bias
                )
                parts = raw.detach().double().split(list(factor.sizes.values()), -1)
                heads |= dict(zip(factor.sizes, parts, strict=True))
            elif entry.spec.learned:
                heads |= self._root(entry)
            found[entry.id] = heads
        return found

    def read(self) -> Tensor:
        found, parts = self.get(), []
        for entry in self.entries:
            heads = self._in_units(entry, found[entry.id], inward=True)
            parts += [heads[name].reshape(-1) for name in self._shapes(entry)]
        return torch.cat(parts)

    def _root(self, entry: Entry) -> dict[str, Tensor]:
        """Return the heads of a variable without parents, [1, …]."""
        factor: Any = self.model.factors[entry.id]
        raw = factor.root.detach().double().unsqueeze(0)
        return dict(zip(factor.sizes, raw.split(list(factor.sizes.values()), -1), strict=True))

    def _heads(self, vector: Tensor) -> dict[str, dict[str, Tensor]]:
        """Return the heads and vectors of every factor, by its id, as views of the vector."""
        found: dict[str, dict[str, Tensor]] = {}
        start = 0
        for entry in self.entries:
            own = found[entry.id] = {}
            for name, shape in self._shapes(entry).items():
                size = torch.Size(shape).numel()
                own[name] = vector[start : start + size].reshape(shape)
                start += size
        return found

    def write(self, vector: Tensor) -> None:
        found = self._heads(vector)
        self.put(
            {
                entry.id: self._in_units(entry, found[entry.id], inward=False)
                for entry in self.entries
            }
        )

    def put(self, found: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Set the model's parameters to these heads without converting units."""
        for entry in self.entries:
            factor: Any = self.model.factors[entry.id]
            heads = found[entry.id]
            weights = {
                str(ref): torch.cat([heads[name] for name in factor.sizes], -1).mT
                for ref in entry.key.parents
            }
            self._set(entry, heads, weights, None)

    def _in_units(
        self, entry: Entry, heads: dict[str, Tensor], *, inward: bool
    ) -> dict[str, Tensor]:
        """Convert heads of a Gaussian to standardised units, or back."""
        if entry.key.name not in self.centre or not entry.spec.gaussian:
            return heads
        centre, unit = self.centre[entry.key.name], self.unit[entry.key.name]
        factor, found = 1 / unit if inward else unit, dict(heads)
        if "loc" in heads:
            found["loc"] = (
                (heads["loc"] - centre) / unit if inward else heads["loc"] * unit + centre
            )
        if "scale" in heads:
            found["scale"] = ad.inverse_softplus(F.softplus(heads["scale"]) * factor)
        if "tril" in heads:
            found["tril"] = ad.vector_from_tril(
                ad.tril_from_vector(heads["tril"], len(unit)) * factor.unsqueeze(-1)
            )
        return found

    def within(self, vector: Tensor) -> Tensor:
        vector = vector.clone()
        found = self._heads(vector)
        for entry in self.entries:
            heads = found[entry.id]  # views of the vector
            if entry.spec.gaussian and "scale" in heads:
                heads["scale"].clamp_(min=self.raw_least.to(vector))
            if entry.spec.gaussian and "tril" in heads:
                heads["tril"].copy_(self._raised(heads["tril"]))
        return vector

    def _raised(self, tril: Tensor) -> Tensor:
        """Raise the standard deviations of raw Cholesky factors to the lower limit.

        A factor has a standard deviation in each of its principal directions. Factors above the
        limit keep their values, bit for bit.
        """
        size = (math.isqrt(8 * tril.shape[-1] + 1) - 1) // 2
        least = torch.as_tensor(self.least).to(tril).sqrt().unsqueeze(-1)
        # In units of the lower limit.
        directions, values, _ = torch.linalg.svd(ad.tril_from_vector(tril, size) / least)
        root = directions * values.clamp_min(1.0).unsqueeze(-2) * least
        raised = ad.vector_from_tril(torch.linalg.cholesky(root @ root.mT))
        return torch.where(values[..., -1:] < 1, raised, tril)

    def floored(self, vector: Tensor) -> dict[str, list[int]]:
        heads = self._heads(vector)
        return {entry.key.name: self.at_floor(heads[entry.id]) for entry in self.entries}

    def centred(self, own: Tensor) -> Tensor:
        """Shift the means of Gaussian columns to the data's mean if all lie on one side of it."""
        vector = own.clone()
        for entry in self.entries:
            loc = self._heads(vector)[entry.id].get("loc")
            if loc is not None and entry.key.name in self.centre:
                middle = (
                    self.columns.mean[entry.key.name] - self.centre[entry.key.name]
                ) / self.unit[entry.key.name]
                aside = (loc.amin(0) > middle) | (loc.amax(0) < middle)
                loc += torch.where(aside, middle - loc.mean(0), 0.0)
        return vector

    def maximise(
        self, sums: Mapping[str, Sums], before: Mapping[str, Mapping[str, Tensor]]
    ) -> Tensor:
        """M-step: compute every factor's heads from its sums over rows.

        A factor without sums, and parameters that no row determines, keep their previous values.
        """
        parts = []
        for entry in self.entries:
            heads, seen = (
                self.most_likely(entry, *sums[entry.id])
                if entry.id in sums
                else (before[entry.id], {})
            )
            for name, shape in self._shapes(entry).items():
                value = heads[name].reshape(shape)
                parts.append(
                    torch.where(seen[name], value, before[entry.id][name])
                    if name in seen and entry.key.parents
                    else value
                )
        return torch.cat([part.reshape(-1) for part in parts])

    def most_likely(
        self, entry: Entry, count: Tensor, first: Tensor, second: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return a factor's maximum-likelihood heads and vectors for these sums over rows.

        Heads have one row per value of the parent. Also returns masks of the numbers that any row
        determines.
        """
        full = entry.spec.full_moments
        some = count.clamp_min(torch.finfo(count.dtype).tiny)
        mean, square = first / some, second / (some.unsqueeze(-1) if full else some)
        if not entry.key.parents and not entry.spec.learned:
            mean = torch.zeros_like(mean)  # a fixed root has mean 0
        total, squares = count.sum(0), second.diagonal(dim1=-2, dim2=-1) if full else second
        n = total.clamp_min(torch.finfo(count.dtype).tiny)
        whole = squares.sum(0) / n - (first.sum(0) / n).square()
        floor = self.floor(whole, total) if entry.spec.gaussian else torch.zeros_like(total)
        heads = entry.spec.most_likely(count, mean, square, floor)
        assert heads is not None
        if entry.spec.needs_occurrences:
            fixed = {} if entry.key.parents or entry.spec.learned else self._root(entry)
            heads |= entry.spec.most_likely_vectors(
                count, first / some, heads | fixed, self.occurrences[entry.id]
            )
        seen = count > 1e-9  # parameters that no row determines keep their values
        whole = seen.all(-1, keepdim=True)
        return heads, {
            name: seen if value.shape == seen.shape else whole.expand_as(value)
            for name, value in heads.items()
            if value.dim() > 1
        }
