"""EM for mixtures: one class, and data that are independent given it. The E-step and the M-step are matrix products."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aevb import distributions as ad
from aevb.conditionals import Conditional
from aevb.families import SMALLEST_VARIANCE, MultivariateNormal, Normal, OneHot
from aevb.graph import Entry
from aevb.training.em.columns import Columns, known
from aevb.training.em.emissions import ColumnsEmission, FullEmission, IncompleteFullEmission, Sums
from aevb.training.em.factors import KEPT, Rows
from aevb.training.em.responsibilities import Responsibilities
from aevb.training.em.starts import SAMPLE, cluster_centres
from aevb.training.order import seed_of

if TYPE_CHECKING:
    from aevb.model import Model

Part = dict[str, tuple[Tensor, ...]]  # rows as every variable's emission reads them; "known": 0 or −∞ for every cluster
SURE = 0.95  # of a row's responsibility that the nearest centre has at the start


def is_mixture(model: Model) -> bool:
    """Whether the only latent is one class, which every observed variable reads, or reads nothing."""
    graph = model.graph
    if len(graph.latents) != 1 or any(graph.timed[name] for name in graph.stochastic):
        return False
    (latent,) = graph.latents
    rule = graph.rule("p", latent)
    if not isinstance(rule.spec, OneHot) or rule.key.parents:
        return False
    rules = [graph.rule("p", name) for name in graph.observed]
    plain = all([ref.name for ref in entry.key.parents] in ([], [latent]) for entry in rules)
    return plain and all(isinstance(entry.spec, MultivariateNormal) or type(entry.spec).polynomial is not Conditional.polynomial for entry in rules)


class Mixtures(Responsibilities):
    """Mixtures of independent columns or of Gaussians with a covariance each, in units in which real columns have mean 0 and spread 1."""

    def open(self, rows: Rows) -> None:
        graph, first = self.graph, rows.first()
        (self.latent,) = graph.latents
        self.clusters = graph.size(self.latent)
        self.rows, self.columns = rows, Columns(rows, graph.observed)
        self.rules = {name: graph.rule("p", name) for name in graph.observed}
        self.holed = {name for name in graph.observed if f"{name}?" in first}
        self.centre, self.unit = {}, {}
        for name, entry in self.rules.items():
            located = isinstance(entry.spec, Normal | MultivariateNormal) and (bool(entry.key.parents) or entry.spec.learned)
            sized = located and not isinstance(getattr(entry.spec, "scale", None), int | float)
            self.centre[name] = self.columns.mean[name] if located else torch.zeros_like(self.columns.mean[name])
            self.unit[name] = self.columns.spread[name] if sized else torch.ones_like(self.columns.spread[name])
        width = sum(graph.size(name) * 2 for name in graph.observed)
        self.kept = None
        self.kept = list(self._parts()) if len(rows) * width <= KEPT else None
        self.constant = self._constant()

    def _parts(self) -> Iterable[Part]:
        return self._read() if self.kept is None else self.kept

    def _read(self) -> Iterator[Part]:
        for batch in self.rows.parts():
            part: Part = {}
            for name, entry in self.rules.items():
                value = (batch[name][0] - self.centre[name]) / self.unit[name]
                part[name] = self._kind(entry).prepare(value, batch[f"{name}?"][0] if name in self.holed else None)
            if self.latent in batch:
                here = known(batch, self.latent)[:, :1]
                part["known"] = (torch.where((here > 0) & (batch[self.latent][0] == 0), -torch.inf, 0.0),)
            yield part

    def _kind(self, entry: Entry) -> type[ColumnsEmission] | type[FullEmission]:
        if not isinstance(entry.spec, MultivariateNormal):
            return ColumnsEmission
        return IncompleteFullEmission if entry.key.name in self.holed else FullEmission

    def _constant(self) -> Tensor:
        """What the parameters have no part in: the change of units, and terms of the data alone, as log x! of counts."""
        total = torch.zeros((), dtype=torch.float64, device=self.rows.source.like.device)
        for batch in self.rows.parts():
            for name, entry in self.rules.items():
                if not isinstance(entry.spec, Normal | MultivariateNormal):
                    factor: Any = self.model.factors[entry.id]
                    value, keep = batch[name][0], batch[f"{name}?"][0] if name in self.holed else None
                    heads = {head: value.new_zeros(1, size) for head, size in factor.sizes.items()}
                    rows = ColumnsEmission.prepare(value, keep)
                    bare = ColumnsEmission(entry.spec, heads).log_likelihood(*rows)[:, 0]
                    total += (entry.spec.log_prob(entry.spec.distribution(**heads), value, keep) - bare).sum()
        self.rows.world.sum([total])
        return total - sum(((self.columns.count[name] * self.unit[name].log()).sum() for name in self.rules), total.new_zeros(()))

    # Parameters: of the model, and as a vector -----------------------------------------------------------------------------------------

    def _shapes(self, entry: Entry) -> dict[str, tuple[int, ...]]:
        """The heads, a row for each cluster, and the vectors of a factor that has parameters."""
        factor: Any = self.model.factors[entry.id]
        cells = self.clusters if entry.key.parents else 1
        heads = {name: (cells, size) for name, size in factor.sizes.items()} if entry.key.parents or entry.spec.learned else {}
        return heads | {name: (len(vector),) for name, vector in factor.vectors.items()}

    def read(self) -> Tensor:
        parts = []
        for entry in self.entries:
            factor: Any = self.model.factors[entry.id]
            shapes = self._shapes(entry)
            heads = {name: vector.detach().double() for name, vector in factor.vectors.items()}
            if len(heads) < len(shapes):
                if entry.key.parents:
                    blocks = factor.net.blocks
                    raw = blocks.weights[str(entry.key.parents[0])].mT + (0.0 if blocks.bias is None else blocks.bias)
                else:
                    raw = factor.root.unsqueeze(0)
                heads |= dict(zip(factor.sizes, raw.detach().double().split(list(factor.sizes.values()), -1), strict=True))
            heads = self._in_units(entry, heads, inward=True)
            parts += [heads[name].reshape(-1) for name in shapes]
        return torch.cat(parts)

    def _heads(self, vector: Tensor) -> dict[str, dict[str, Tensor]]:
        """The heads and vectors of every factor that has parameters, by its id."""
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
        for entry in self.entries:
            factor: Any = self.model.factors[entry.id]
            heads = self._in_units(entry, found[entry.id], inward=False)
            weights = {str(ref): torch.cat([heads[name] for name in factor.sizes], -1).mT for ref in entry.key.parents}
            self._set(entry, heads, weights, None)

    def _in_units(self, entry: Entry, heads: dict[str, Tensor], *, inward: bool) -> dict[str, Tensor]:
        """Heads of a Gaussian from the data's units into those in which its columns have mean 0 and spread 1, or back."""
        if not isinstance(entry.spec, Normal | MultivariateNormal):
            return heads
        centre, unit = self.centre[entry.key.name], self.unit[entry.key.name]
        factor, found = 1 / unit if inward else unit, dict(heads)
        if "loc" in heads:
            found["loc"] = (heads["loc"] - centre) / unit if inward else heads["loc"] * unit + centre
        if "scale" in heads:
            found["scale"] = ad.inverse_softplus(F.softplus(heads["scale"]) * factor)
        if "tril" in heads:
            found["tril"] = ad.vector_from_tril(ad.tril_from_vector(heads["tril"], len(unit)) * factor.unsqueeze(-1))
        return found

    def within(self, vector: Tensor) -> Tensor:
        vector = vector.clone()
        least = math.log(math.expm1(math.sqrt(SMALLEST_VARIANCE)))
        found = self._heads(vector)
        for entry in self.entries:
            if isinstance(entry.spec, Normal) and "scale" in found[entry.id]:
                found[entry.id]["scale"].clamp_(min=least)  # a view of the vector
        return vector

    # An iteration ------------------------------------------------------------------------------------------------------------------------

    def _emissions(self, heads: dict[str, dict[str, Tensor]]) -> dict[str, ColumnsEmission | FullEmission]:
        found: dict[str, ColumnsEmission | FullEmission] = {}
        for name, entry in self.rules.items():
            factor: Any = self.model.factors[entry.id]
            own = dict(heads.get(entry.id, {}))
            if "loc" not in own and not any(head in own for head in factor.sizes):  # a fixed root
                raw = factor.root.detach().double().unsqueeze(0)
                own = dict(zip(factor.sizes, raw.split(list(factor.sizes.values()), -1), strict=True)) | own
            kind = self._kind(entry)
            found[name] = ColumnsEmission(entry.spec, own) if kind is ColumnsEmission else kind(**own)  # type: ignore[arg-type]
        return found

    def update(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        heads = self._heads(vector)
        logits = heads.get(self.graph.rule("p", self.latent).id, {}).get("logits")
        prior = vector.new_zeros(1, self.clusters) if logits is None else logits
        prior = prior.log_softmax(-1)
        emissions = self._emissions(heads)

        def posterior(part: Part) -> tuple[Tensor, Tensor]:
            table = prior
            for name, emission in emissions.items():
                table = table + emission.log_likelihood(*part[name])
            if "known" in part:
                table = table + part["known"][0]
            highest = table.amax(1, keepdim=True)
            weights = (table - highest).exp_()
            total = weights.sum(1, keepdim=True)
            return weights.div_(total), highest.sum() + total.log().sum()

        evidence, sums = self._sums(posterior, emissions)
        return (evidence + self.constant) / len(self.rows), self._maximised(sums, heads)

    def _sums(self, posterior: Any, emissions: dict[str, ColumnsEmission | FullEmission]) -> tuple[Tensor, dict[str, Sums]]:
        """The evidence and every variable's sums over all rows of all processes."""
        evidence = torch.zeros((), dtype=torch.float64, device=self.rows.source.like.device)
        sums: dict[str, Sums] = {}
        for part in self._parts():
            weights, found = posterior(part)
            evidence = evidence + found
            for name, emission in emissions.items():
                mine = weights if self.rules[name].key.parents else torch.ones_like(weights[:, :1])
                sums[name] = emission.sums(mine, *part[name]).plus(sums.get(name))
            counts = weights.sum(0, keepdim=True)
            sums[self.latent] = Sums(counts.sum(1, keepdim=True).expand_as(counts), counts, counts).plus(sums.get(self.latent))
        sums = {name: Sums(*(value.clone() for value in found)) for name, found in sums.items()}  # some are views, which no sum may write to
        self.rows.world.sum([evidence, *(value for found in sums.values() for value in found)])
        return evidence, sums

    def _maximised(self, sums: dict[str, Sums], before: dict[str, dict[str, Tensor]]) -> Tensor:
        parts = []
        for entry in self.entries:
            heads, seen = self.most_likely(entry, *sums[entry.key.name])
            for name, shape in self._shapes(entry).items():
                value = heads[name].reshape(shape)
                parts.append(torch.where(seen[name], value, before[entry.id][name]) if entry.key.parents and len(shape) > 1 else value)
        return torch.cat([part.reshape(-1) for part in parts])

    # Where it starts ---------------------------------------------------------------------------------------------------------------------

    def from_data(self, own: Tensor, seed: int) -> Tensor:
        """The M-step after giving every row, almost, to the nearest of centres that k-means finds."""
        n = len(self.rows)
        generator = torch.Generator().manual_seed(seed_of(seed, "clusters"))
        rows = torch.arange(n) if n <= SAMPLE else torch.randperm(n, generator=generator)[:SAMPLE].sort().values
        batch = {name: value if value.dtype == torch.bool else value.double() for name, value in self.rows.source.take(rows).items()}
        centres = cluster_centres(self._standard(batch), self.clusters, seed_of(seed, "clusters"), self._labels(batch))
        chosen = (self._soft(batch, centres) for batch in self.rows.parts())

        def nearest(part: Part) -> tuple[Tensor, Tensor]:
            weights = next(chosen)
            return weights, weights.new_zeros(())

        heads = self._heads(own)
        return self._maximised(self._sums(nearest, self._emissions(heads))[1], heads)

    def _standard(self, batch: dict[str, Tensor]) -> Tensor:
        """All observed columns that clusters differ in, standardised; missing entries at their column's mean."""
        names = [name for name, entry in self.rules.items() if entry.key.parents]
        return torch.cat([known(batch, name) * self.columns.standard(name, batch[name][0]) for name in names], 1)

    def _labels(self, batch: dict[str, Tensor]) -> Tensor | None:
        if self.latent not in batch:
            return None
        return torch.where(known(batch, self.latent)[:, 0] > 0, batch[self.latent][0].argmax(-1), -1)

    def _soft(self, batch: dict[str, Tensor], centres: Tensor) -> Tensor:
        rows, labels = self._standard(batch), self._labels(batch)
        which = (centres.square().sum(1) - 2 * rows @ centres.mT).argmin(1)
        member = F.one_hot(which, self.clusters).double() * SURE + (1 - SURE) / self.clusters
        if labels is None:
            return member
        return torch.where((labels >= 0).unsqueeze(1), F.one_hot(labels.clamp_min(0), self.clusters).double(), member)
