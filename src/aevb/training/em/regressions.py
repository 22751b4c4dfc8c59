"""EM for linear-Gaussian models: each factor of p is a regression on expected moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aevb.declare.networks import MLP
from aevb.estimate.keys import mask_of
from aevb.model import Model
from aevb.training.em.columns import Columns
from aevb.training.em.factors import Rows, Statistics
from aevb.training.em.gaussian_parameters import Parameters
from aevb.training.em.moments import Design, Moments
from aevb.training.em.starts import principal_factors


class Regressions(Parameters):
    """E-step: second moments under the Gaussian posterior. M-step: least squares."""

    closed = True

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        for entry in self.graph.entries():
            if entry.side == "p" and not entry.spec.stochastic:
                raise ValueError(
                    f"em(): {entry.where} is deterministic with weights of its own, which has no "
                    f"closed form. Use mle()."
                )

    # The data -------------------------------------------------------------------------------------

    def open(self, rows: Rows) -> None:
        """Read the data; if nothing is missing, they are not read again."""
        graph, device = self.graph, rows.source.like.device
        self.rows = rows
        # The latents that are known in some or all rows.
        codes = [name for name in graph.latents if name in rows.first()]
        places = self._place(Columns(rows, (*graph.given, *graph.observed, *codes)), device)
        entries = {
            name: slice(places[name].start - self.first, places[name].stop - self.first)
            for name in (*graph.observed, *graph.latents)
        }
        self.moments = Moments(rows, self.columns, places, entries, graph.latents)
        for name in self.moments.holes:
            if graph.rule("p", name).spec.full_moments:
                raise ValueError(
                    f"em(): {name} has missing entries and a full covariance, for which em() has "
                    f"no closed form. Use mle()."
                )
        self.log_units = sum(
            (
                (self.columns.count[name] * self.columns.spread[name].log()).sum()
                for name in (*graph.observed, *codes)
            ),
            self.offset.new_zeros(()),
        )
        self.design = {entry.id: self._design(entry, self.moments.holes) for entry in self.entries}
        self.all_rows = {
            entry.id: torch.full(
                (len(self.design[entry.id].own),),
                float(len(rows)),
                dtype=torch.float64,
                device=device,
            )
            for entry in self.entries
        }
        complete = [
            entry
            for entry in self.entries
            if entry.key.name in graph.observed and entry.key.name not in self.moments.holes
        ]
        self.least_of_data = {  # data have variance 1 in these units
            entry.id: self.floor(torch.ones_like(self.all_rows[entry.id]), self.all_rows[entry.id])
            for entry in complete
        }
        self.holed = {
            entry.id: self.design[entry.id]
            for entry in self.entries
            if entry.key.name in self.moments.holes
        }

    # Initial parameters ---------------------------------------------------------------------------

    def centred(self, own: Tensor) -> Tensor:
        """Set the biases such that p has the means of the data, which are 0 after standardising.

        If all entries are known, this maximises the evidence over the biases for any weights. EM
        alone would converge slowly, because each iteration explains most of a common offset by the
        latents.
        """
        vector = own.clone()
        parts = dict(
            zip((entry.key.name for entry in self.entries), self._unpacked(vector), strict=True)
        )
        mean = torch.zeros_like(self.offset)
        for name in (name for stage in self.graph.generation for name in stage.nodes):
            weights, bias, _ = parts.get(name, ([], None, None))
            parents = self.graph.rule("p", name).key.parents
            # Without a bias, parents are measured from their unstandardised origin.
            at = mean if bias is not None else mean + self.offset
            moved = sum(
                (
                    weight @ at[self.places[ref.name]]
                    for ref, weight in zip(parents, weights, strict=True)
                ),
                mean.new_zeros(()),
            )
            if name in self.columns.names and bias is not None:
                bias.copy_(torch.where(self.columns.count[name] > 0, -moved, bias))
            elif name in self.graph.latents:
                mean[self.places[name]] = moved + (
                    bias if bias is not None else -self.offset[self.places[name]]
                )
        return vector

    def from_data(self, own: Tensor, seed: int) -> Tensor:
        """Run an M-step after an E-step that replaces latents by principal factors.

        The factors are those of the variables that read the latent.
        """
        second = self.moments.observed()
        done = {0, *(int(i) for name in self.moments.data for i in self.places[name])}
        gain = torch.zeros_like(second)  # regression of every entry of w on the known ones
        gain[list(done), list(done)] = 1.0
        covariance = torch.zeros_like(second)
        order = [name for stage in self.graph.generation for name in stage.nodes]
        for name in reversed([name for name in order if name in self.graph.latents]):
            place = self.places[name]
            children = [
                other
                for other in order
                if name in (ref.name for ref in self.graph.rule("p", other).key.parents)
            ]
            if not children:
                covariance[place, place] = 1.0
                continue
            co_parents = {
                int(i)
                for other in children
                for ref in self.graph.rule("p", other).key.parents
                for i in self.places[ref.name]
            } & done
            rows, others = (
                gain[torch.cat([self.places[child] for child in children])],
                gain[sorted(co_parents)],
            )
            if len(others):
                rows = (
                    rows
                    - rows
                    @ second
                    @ others.mT
                    @ torch.linalg.pinv(others @ second @ others.mT, hermitian=True)
                    @ others
                )
            found, variances = principal_factors(rows @ second @ rows.mT, len(place))
            gain[place], covariance[place, place] = found @ rows, variances
            done |= set(place.tolist())
        n = float(len(self.rows))
        return self.maximise({"second": n * (gain @ second @ gain.mT + covariance)}, filled=True)

    # An iteration ---------------------------------------------------------------------------------

    def update(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean evidence at these parameters, and the next parameters."""
        everything = len(self.holed) < len(self.entries)
        found = self.moments.expect(self._residuals(vector), self.holed, everything)
        return (found["evidence"] - self.log_units) / len(self.rows), self.maximise(found)

    def maximise(self, found: Statistics, filled: bool = False) -> Tensor:
        """M-step: fit every factor's regression and its residual variance.

        With ``filled``, the second moments are those of rows without missing entries.
        """
        n, parts = float(len(self.rows)), []
        second = found["second"] + found.get("rest", 0.0)
        for entry in self.entries:
            design, name = self.design[entry.id], entry.key.name
            full = entry.spec.full_moments
            if entry.id in self.holed and not filled:  # each column is known in different rows
                count = self.columns.count[name]
                inner, outer, own = (
                    a + found[f"{entry.id} {what}"]
                    for a, what in zip(
                        _about(found["second"], design), ("inner", "outer", "own"), strict=True
                    )
                )
                matrix = _solved(inner, outer.unsqueeze(-2)).squeeze(-2)
                left = torch.diag_embed(own - (outer * matrix).sum(-1)) / count.clamp_min(1.0)
                least = self.floor(torch.ones_like(count), count)
            else:
                count = self.all_rows[entry.id]
                inner, outer, own = _about(second, design, whole=True)
                matrix = _solved(inner, outer)
                left = (own - outer @ matrix.mT) / n
                if entry.id in self.least_of_data:
                    least = self.least_of_data[entry.id]
                else:  # the variance of a latent changes
                    centre = second[design.own, 0] / n
                    least = self.floor(second[design.own, design.own] / n - centre.square(), count)
            heads = entry.spec.most_likely(
                count[None],
                torch.zeros_like(count)[None],
                left[None] if full else left.diagonal()[None],
                least,
            )
            assert heads is not None
            part = self.parts[entry.id]
            sizes = [shape[1] for _, shape in part.weights]
            parts += [
                block.reshape(-1)
                for block in matrix.split([*sizes, 1] if part.bias is not None else sizes, -1)
            ]
            if part.head is not None:
                parts.append(heads[part.head].reshape(-1))
        return torch.cat(parts)

    def tighten(self, batch: Mapping[str, Tensor]) -> str | None:
        """Set q to the exact posterior of complete rows, or to the closest member of its family.

        If that is not possible, q stays unchanged and the reason is returned.
        """
        graph = self.graph
        latents = tuple(name for name in graph.latents if name not in batch)
        if not latents:
            return None  # all latents are known
        if len(latents) > 1:
            return f"a joint posterior of {', '.join(latents)} has no closed form in factors of q"
        if mask_of(latents[0]) in batch:
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
        if factor.net.spec.fixed:
            return f"{entry.id} has fixed weights"
        spec = entry.spec
        if not (spec.gaussian and spec.shared_scale):
            return (
                f"{entry.id} is not a Gaussian with one spread for all rows (scale='learned', "
                f"covariance='shared')"
            )
        r = self._residuals(self.read()).matrix
        unknown, known = (
            torch.cat([self.places[name] for name in names]) for names in (graph.latents, parents)
        )
        # The posterior precision is RᵀR. Its square root is more accurate.
        basis, precision_root = torch.linalg.qr(r[:, unknown])
        place = slice(
            *(
                sum(graph.size(name) for name in names)
                for names in _before(graph.latents, latents[0])
            )
        )
        gain = -torch.linalg.solve_triangular(
            precision_root, basis.mT @ r[:, torch.cat([known.new_zeros(1), known])], upper=True
        )[place]
        covariance_root = torch.linalg.inv(precision_root)[place]
        root = torch.linalg.qr(covariance_root.mT).R.mT
        root = root * root.diagonal().sign()
        offset = gain[:, 0] - gain[:, 1:] @ self.offset[known]
        gain = gain[:, 1:] / self.spread[known]
        blocks = factor.net.blocks
        if blocks.bias is None and bool(offset.abs().max() > 1e-12):
            return f"{entry.id} has no bias, which the posterior's mean needs"
        parts = gain.split([graph.size(name) for name in parents], -1)
        self._set(
            entry,
            spec.spread_vectors(root),
            {str(ref): part for ref, part in zip(entry.key.parents, parts, strict=True)},
            offset,
        )
        return None


def _before(names: Sequence[str], name: str) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names before this one, and the same including it."""
    return names[: names.index(name)], names[: names.index(name) + 1]


def _about(second: Tensor, design: Design, whole: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return the moments of a regression from the second moments of w, with offsets added.

    The moments are those of the regressors, of target and regressors, and of the target itself: its
    ``whole`` second-moment matrix, or the diagonal only.
    """
    a, b = design.places, design.own
    inner, outer, own = (
        second[a.unsqueeze(1), a],
        second[b.unsqueeze(1), a],
        second[b.unsqueeze(1), b],
    )
    if design.offsets is not None and design.own_offsets is not None:
        first_a, first_b, n, to_a, to_b = (
            second[a, 0],
            second[b, 0],
            second[0, 0],
            design.offsets,
            design.own_offsets,
        )
        inner = inner + first_a.unsqueeze(1) * to_a + to_a.unsqueeze(1) * (first_a + n * to_a)
        outer = outer + first_b.unsqueeze(1) * to_a + to_b.unsqueeze(1) * (first_a + n * to_a)
        own = own + first_b.unsqueeze(1) * to_b + to_b.unsqueeze(1) * (first_b + n * to_b)
    return (inner, outer, own) if whole else (inner.expand(len(b), -1, -1), outer, own.diagonal())


def _solved(inner: Tensor, outer: Tensor) -> Tensor:
    """Return outer · inner⁻¹ for symmetric matrices; the pseudo-inverse if nearly singular."""
    root, failed = torch.linalg.cholesky_ex(inner)
    pivots = root.diagonal(dim1=-2, dim2=-1)
    if not inner.shape[-1] or bool(
        ((failed == 0) & (pivots.amin(-1) > 1e-6 * pivots.amax(-1))).all()
    ):
        return torch.cholesky_solve(outer.mT, root).mT
    return outer @ torch.linalg.pinv(inner, hermitian=True)
