"""EM for linear-Gaussian models: each factor of p is a regression on moments expected under the Gaussian posterior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aevb import distributions as ad
from aevb.evidence.gaussian import LinearGaussian
from aevb.families import SMALLEST_VARIANCE, MultivariateNormal, Normal
from aevb.graph import Entry
from aevb.networks import MLP
from aevb.training.em.columns import Columns
from aevb.training.em.factors import EM, Rows, Statistics, floor
from aevb.training.em.moments import Design, Moments, Residuals
from aevb.training.em.starts import principal_components

if TYPE_CHECKING:
    from aevb.model import Model


class Regressions(EM):
    """Linear-Gaussian models: expected second moments under the Gaussian posterior, then least squares.

    EM's parameters are one vector: for every factor its weights, its bias and the raw numbers of its spread, in units in which the data have
    mean 0 and spread 1.
    """

    closed = True

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        for entry in self.graph.entries():
            if entry.side == "p" and not entry.spec.stochastic:
                raise ValueError(f"em(): {entry.where} is deterministic with weights of its own, which has no closed form. Use mle().")

    # The data --------------------------------------------------------------------------------------------------------------------------

    def open(self, rows: Rows) -> None:
        """Read the data: where nothing is missing, for the only time."""
        graph, start = self.graph, 1
        self.rows, self.columns = rows, Columns(rows, (*graph.given, *graph.observed))
        self.places: dict[str, slice] = {}  # in w
        for name in (*graph.given, *graph.stochastic):
            self.places[name] = slice(start, start := start + graph.size(name))
        first = 1 + sum(graph.size(name) for name in graph.given)
        entries = {name: slice(self.places[name].start - first, self.places[name].stop - first) for name in graph.stochastic}
        self.moments = Moments(rows, self.columns, self.places, entries, graph.latents)
        holes = self.moments.holes
        for name in holes:
            if isinstance(graph.rule("p", name).spec, MultivariateNormal):
                raise ValueError(f"em(): {name} has missing entries and a full covariance, for which no closed form is here. Use mle().")
        self.spread = torch.ones(start, dtype=torch.float64, device=rows.source.like.device)
        self.offset = torch.zeros_like(self.spread)  # a column's mean, in units of its spread
        for name in self.columns.names:
            self.spread[self.places[name]] = self.columns.spread[name]
            self.offset[self.places[name]] = self.columns.mean[name] / self.columns.spread[name]
        self.log_units = sum(
            ((self.columns.count[name] * self.columns.spread[name].log()).sum() for name in graph.observed), self.offset.new_zeros(())
        )
        self.design = {entry.id: self._design(entry, holes) for entry in self.entries}
        self.holed = {entry.id: self.design[entry.id] for entry in self.entries if entry.key.name in holes}

    def _design(self, entry: Entry, holes: list[str]) -> Design:
        """Without a bias, a regression goes through the origin of the data's units."""
        places = torch.cat([torch.zeros(0, dtype=torch.long), *(self._place(ref.name) for ref in entry.key.parents)])
        own, at = self._place(entry.key.name), 0
        for name in holes[: holes.index(entry.key.name)] if entry.key.name in holes else ():
            at += self.graph.size(name)
        columns = slice(at, at + len(own))
        if self._has_bias(entry):
            places = torch.cat([places, torch.zeros(1, dtype=torch.long)])
            return Design(places, torch.zeros_like(self.offset)[places], own, torch.zeros_like(self.offset)[own], columns)
        return Design(places, self.offset[places], own, self.offset[own], columns)

    def _place(self, name: str) -> Tensor:
        return torch.arange(self.places[name].start, self.places[name].stop, device=self.offset.device)

    def _has_bias(self, entry: Entry) -> bool:
        if not entry.key.parents:
            return entry.spec.learned
        return self.model.factors[entry.id].net.blocks.bias is not None  # type: ignore[union-attr]

    # Parameters: of the model, and as a vector ---------------------------------------------------------------------------------------

    def _spread_head(self, entry: Entry) -> str | None:
        """The name of the raw numbers that a factor's spread is learned by, if it is."""
        factor: Any = self.model.factors[entry.id]
        names = (*factor.vectors, *(factor.sizes if not entry.key.parents and entry.spec.learned else ()))
        return next((name for name in names if name != "loc"), None)

    def read(self) -> Tensor:
        """The model's parameters as EM's vector."""
        parts = []
        for entry in self.entries:
            factor: Any = self.model.factors[entry.id]
            d, own = self.graph.size(entry.key.name), self._place(entry.key.name)
            unit, bias = self.spread[own], -self.offset[own]
            for ref in entry.key.parents:
                there = self._place(ref.name)
                weight = factor.net.blocks.weights[str(ref)][:d].detach().double() * self.spread[there] / unit.unsqueeze(1)
                bias = bias + weight @ self.offset[there]
                parts.append(weight)
            if self._has_bias(entry):
                constant = factor.net.blocks.bias if entry.key.parents else factor.root
                parts.append(bias + constant[:d].detach().double() / unit)
            if (name := self._spread_head(entry)) is not None:
                raw = factor.vectors[name] if name in factor.vectors else factor.root[d:]
                parts.append(_in_units(raw.detach().double(), 1 / unit))
        return torch.cat([part.reshape(-1) for part in parts])

    def write(self, vector: Tensor) -> None:
        """Set the model's parameters."""
        for entry, (weights, bias, raw) in zip(self.entries, self._unpacked(vector), strict=True):
            own = self._place(entry.key.name)
            unit, constant = self.spread[own], self.offset[own]
            found = {}
            for ref, weight in zip(entry.key.parents, weights, strict=True):
                there = self._place(ref.name)
                found[str(ref)] = weight / self.spread[there] * unit.unsqueeze(1)
                constant = constant - weight @ self.offset[there]
            heads: dict[str, Tensor] = {}
            if raw is not None:
                heads[str(self._spread_head(entry))] = _in_units(raw, unit)
            if bias is not None:
                heads["loc"] = constant = (bias + constant) * unit
            self._set(entry, heads, found, constant)

    def _unpacked(self, vector: Tensor) -> list[tuple[list[Tensor], Tensor | None, Tensor | None]]:
        """Weights by parent, bias, and raw spread of every factor."""
        found, start = [], 0

        def take(*shape: int) -> Tensor:
            nonlocal start
            size = torch.Size(shape).numel()
            start += size
            return vector[start - size : start].reshape(shape)

        for entry in self.entries:
            d = self.graph.size(entry.key.name)
            weights = [take(d, self.graph.size(ref.name)) for ref in entry.key.parents]
            bias = take(d) if self._has_bias(entry) else None
            name = self._spread_head(entry)
            found.append((weights, bias, None if name is None else take(d if name == "scale" else d * (d + 1) // 2)))
        return found

    def _residuals(self, vector: Tensor) -> Residuals:
        own = {entry.id: part for entry, part in zip(self.entries, self._unpacked(vector), strict=True)}
        rows, logs = [], []
        for name in self.graph.stochastic:
            entry, place = self.graph.rule("p", name), self._place(name)
            weights, bias, raw = own.get(entry.id, ([], None, None))
            row = vector.new_zeros(len(place), len(self.offset))
            row[torch.arange(len(place)), place] = 1.0
            constant = self.offset[place] if bias is None else -bias
            for ref, weight in zip(entry.key.parents, weights, strict=True):
                row[:, self._place(ref.name)] = -weight
                constant = constant - weight @ self.offset[self._place(ref.name)] if bias is None else constant
            row[:, 0] = constant
            root = self._root(entry, raw, self.spread[place])
            rows.append(row / root.unsqueeze(1) if root.dim() == 1 else torch.linalg.solve_triangular(root, row, upper=False))
            logs.append((root if root.dim() == 1 else root.diagonal()).log())
        return Residuals(torch.cat(rows), torch.cat(logs))

    def _root(self, entry: Entry, raw: Tensor | None, unit: Tensor) -> Tensor:
        """The scales of a factor's entries, or its Cholesky factor, in units of the data's spread."""
        if raw is not None:
            return F.softplus(raw) if len(raw) == len(unit) and isinstance(entry.spec, Normal) else ad.tril_from_vector(raw, len(unit))
        return (1.0 if not isinstance(getattr(entry.spec, "scale", None), int | float) else float(entry.spec.scale)) / unit  # type: ignore[attr-defined]

    def within(self, vector: Tensor) -> Tensor:
        vector = vector.clone()
        least = ad.inverse_softplus(vector.new_tensor(SMALLEST_VARIANCE).sqrt())
        for entry, (_, _, raw) in zip(self.entries, self._unpacked(vector), strict=True):
            if raw is not None and isinstance(entry.spec, Normal) and entry.key.name in self.graph.observed:
                raw.clamp_(min=float(least))
        return vector

    # Where it starts ---------------------------------------------------------------------------------------------------------------------

    def centred(self, own: Tensor) -> Tensor:
        """Biases such that p has the data's means, which are 0 in these units.

        Where all is known this is the maximum of the evidence over the biases, whatever the weights. EM itself would go there in small
        steps, since every iteration explains most of a common offset by the latents.
        """
        vector = own.clone()
        parts = dict(zip((entry.key.name for entry in self.entries), self._unpacked(vector), strict=True))
        mean = torch.zeros_like(self.offset)
        for name in (name for stage in self.graph.generation for name in stage.nodes):
            weights, bias, _ = parts.get(name, ([], None, None))
            parents = self.graph.rule("p", name).key.parents
            moved = sum((weight @ mean[self._place(ref.name)] for ref, weight in zip(parents, weights, strict=True)), mean.new_zeros(()))
            if name in self.graph.observed:
                if bias is not None:
                    bias.copy_(torch.where(self.columns.count[name] > 0, -moved, bias))
            elif bias is not None:
                mean[self._place(name)] = moved + bias
            else:
                mean[self._place(name)] = moved
        return vector

    def from_data(self, own: Tensor, seed: int) -> Tensor:
        """The M-step after an E-step that takes latents for principal components of the variables that read them."""
        second = self.moments.observed()
        done = {0, *(int(i) for name in self.columns.names for i in self._place(name))}
        gain = torch.zeros_like(second)  # of every entry of w on the known ones
        gain[list(done), list(done)] = 1.0
        covariance = torch.zeros_like(second)
        order = [name for stage in self.graph.generation for name in stage.nodes]
        for name in reversed([name for name in order if name in self.graph.latents]):
            place = self._place(name)
            children = [other for other in order if name in (ref.name for ref in self.graph.rule("p", other).key.parents)]
            if not children:
                covariance[place, place] = 1.0
                continue
            beside = {int(i) for other in children for ref in self.graph.rule("p", other).key.parents for i in self._place(ref.name)} & done
            rows, others = gain[torch.cat([self._place(child) for child in children])], gain[sorted(beside)]
            if len(others):
                rows = rows - rows @ second @ others.mT @ torch.linalg.pinv(others @ second @ others.mT, hermitian=True) @ others
            found, variances = principal_components(rows @ second @ rows.mT, len(place))
            gain[place], covariance[place, place] = found @ rows, variances
            done |= set(place.tolist())
        n = float(len(self.rows))
        return self.maximise({"second": n * (gain @ second @ gain.mT + covariance)}, filled=True)

    # An iteration ------------------------------------------------------------------------------------------------------------------------

    def update(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The mean evidence at these parameters, and EM's next ones."""
        everything = len(self.holed) < len(self.entries)
        found = self.moments.expect(self._residuals(vector), self.holed, everything)
        return (found["evidence"] - self.log_units) / len(self.rows), self.maximise(found)

    def maximise(self, found: Statistics, filled: bool = False) -> Tensor:
        """The M-step: every factor's regression, and what it leaves over. ``filled``: on second moments of rows without missing entries."""
        n, parts = float(len(self.rows)), []
        second = found["second"] + found.get("rest", 0.0)
        for entry in self.entries:
            design, name = self.design[entry.id], entry.key.name
            full = entry.spec.full_moments
            if entry.id in self.holed and not filled:  # every column has rows of its own
                count = self.columns.count[name]
                inner, outer, own = (
                    a + found[f"{entry.id} {what}"] for a, what in zip(_about(found["second"], design), ("inner", "outer", "own"), strict=True)
                )
                matrix = (outer.unsqueeze(-2) @ torch.linalg.pinv(inner, hermitian=True)).squeeze(-2)
                left = torch.diag_embed(own - (outer * matrix).sum(-1)) / count.clamp_min(1.0)
                least = floor(torch.ones_like(count), count)
            else:
                count = torch.full((len(design.own),), n, dtype=torch.float64, device=second.device)
                inner, outer, own = _about(second, design, whole=True)
                matrix = outer @ torch.linalg.pinv(inner, hermitian=True)
                left = (own - outer @ matrix.mT) / n
                centre = second[design.own, 0] / n
                least = floor(second[design.own, design.own] / n - centre.square(), count)
            heads = entry.spec.most_likely(count[None], torch.zeros_like(count)[None], left[None] if full else left.diagonal()[None], least)
            assert heads is not None
            sizes = [self.graph.size(ref.name) for ref in entry.key.parents]
            parts += [part.reshape(-1) for part in matrix.split([*sizes, 1] if self._has_bias(entry) else sizes, -1)]
            if (spread := self._spread_head(entry)) is not None:
                parts.append(heads[spread].reshape(-1))
        return torch.cat(parts)

    def tighten(self, batch: Mapping[str, Tensor]) -> str | None:
        """Set q to the exact posterior of complete rows, or to the nearest of its family.

        Where that is not possible q stays as it is, and the reason comes back in words.
        """
        graph = self.graph
        latents = tuple(name for name in graph.latents if name not in batch)
        if not latents:
            return None  # all are known: there is nothing that q is asked
        if len(latents) > 1:
            return f"a joint posterior of {', '.join(latents)} has no closed form in factors of q"
        if f"{latents[0]}?" in batch:
            return f"{latents[0]} is known in some rows"
        if graph.given:
            return f"the posterior also depends on what is given ({', '.join(graph.given)})"
        entry = graph.rule("q", latents[0])
        factor: Any = self.model.factors[entry.id]
        parents = [ref.name for ref in entry.key.parents]
        if set(parents) != set(graph.observed):
            return f"{entry.id} does not read all that is observed ({', '.join(graph.observed)})"
        if not isinstance(getattr(factor, "net", None), MLP) or factor.net.spec.hidden:
            return f"{entry.id} is not linear"
        spec = entry.spec
        if not (isinstance(spec, Normal) and spec.scale != "network") and not (isinstance(spec, MultivariateNormal) and spec.covariance == "shared"):
            return f"{entry.id} is no Gaussian with one spread for all rows (scale='learned', covariance='shared')"
        joint = LinearGaussian(self.model, {name: torch.zeros_like(batch[name][:, :1]) for name in graph.observed}, torch.float64)
        names = tuple(parents)
        cross, observed = joint._stack(latents, names), joint._stack(names, names)
        gain = torch.linalg.solve(observed, cross.T).T
        offset = joint.means[latents[0]][0] - gain @ torch.cat([joint.means[name][0] for name in names])
        blocks = factor.net.blocks
        if blocks.bias is None and bool(offset.abs().max() > 1e-12):
            return f"{entry.id} has no bias, which the posterior's mean needs"
        covariance = joint._stack(latents, latents) - gain @ cross.T
        covariance = (covariance + covariance.T) / 2
        heads: dict[str, Tensor] = {}
        if isinstance(spec, MultivariateNormal):
            heads["tril"] = ad.vector_from_tril(torch.linalg.cholesky(covariance))
        elif spec.scale == "learned":  # the nearest independent Gaussian has the precision's diagonal
            heads["scale"] = ad.inverse_softplus(torch.linalg.inv(covariance).diagonal().rsqrt())
        parts = gain.split([graph.size(name) for name in names], -1)
        self._set(entry, heads, {str(ref): part for ref, part in zip(entry.key.parents, parts, strict=True)}, offset)
        return None


def _in_units(raw: Tensor, unit: Tensor) -> Tensor:
    """Raw scales, or a raw Cholesky factor, of a variable that is measured in other units."""
    if raw.shape == unit.shape:
        return ad.inverse_softplus(F.softplus(raw) * unit)
    return ad.vector_from_tril(ad.tril_from_vector(raw, len(unit)) * unit.unsqueeze(1))


def _about(second: Tensor, design: Design, whole: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """What a regression needs of the second moments of w, with the design's offsets added: of the columns, with the variable, of the variable
    itself (of its ``whole`` covariance, or of each entry)."""
    a, b = design.places, design.own
    inner, outer, own = second[a.unsqueeze(1), a], second[b.unsqueeze(1), a], second[b.unsqueeze(1), b]
    first_a, first_b, n = second[a, 0], second[b, 0], second[0, 0]

    def moved(block: Tensor, left: Tensor, left_offset: Tensor, right: Tensor, right_offset: Tensor) -> Tensor:
        return block + left.unsqueeze(1) * right_offset + left_offset.unsqueeze(1) * right + n * left_offset.unsqueeze(1) * right_offset

    inner = moved(inner, first_a, design.offsets, first_a, design.offsets)
    outer = moved(outer, first_b, design.own_offsets, first_a, design.offsets)
    own = moved(own, first_b, design.own_offsets, first_b, design.own_offsets)
    return (inner, outer, own) if whole else (inner.expand(len(b), -1, -1), outer, own.diagonal())
