"""Parameters of a linear-Gaussian model as one vector, for standardised data.

Also builds the residual matrix R (see :mod:`aevb.training.em.moments`) from this vector.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aevb.declare import distributions as ad
from aevb.declare.graph import Entry
from aevb.training.em.columns import Columns
from aevb.training.em.factors import EM
from aevb.training.em.moments import Design, Residuals


class Part(NamedTuple):
    """Slices and shapes of a factor's parameters in the vector, and the name of its scale head."""

    weights: list[tuple[slice, tuple[int, ...]]]
    bias: tuple[slice, tuple[int, ...]] | None
    head: str | None
    spread: tuple[slice, tuple[int, ...]] | None


class Form(NamedTuple):
    """Template of R and its scales, and the positions at which the parameters are filled in.

    ``cells`` and ``numbers`` are positions in R and in the vector; ``scales`` and ``raw`` are the
    same for scales. ``through`` are the rows without a bias, ``blocks`` those with a full
    covariance.
    """

    template: Tensor
    scale: Tensor
    cells: Tensor
    numbers: Tensor
    scales: Tensor
    raw: Tensor
    through: Tensor
    blocks: list[tuple[Tensor, slice]]


class Parameters(EM):
    """Weights, bias and raw scale of every factor.

    The vector w holds 1, then the given, observed and latent variables.
    """

    columns: Columns
    # With less noise, the posterior covariance would lose its digits by cancellation.
    least = 1e-6

    def _place(self, columns: Columns, device: torch.device) -> dict[str, slice]:
        """Assign every variable its slice of w and its units, and every parameter its slice."""
        graph, start = self.graph, 1
        slices = {}
        for name in (*graph.given, *graph.observed, *graph.latents):
            slices[name] = slice(start, start := start + graph.size(name))
        self.columns = columns
        self.places = {
            name: torch.arange(place.start, place.stop, device=device)
            for name, place in slices.items()
        }
        # The first stochastic entry of w.
        self.first = 1 + sum(graph.size(name) for name in graph.given)
        # The first row of R that belongs to a latent.
        self.first_latent = sum(graph.size(name) for name in graph.observed)
        self.spread = torch.ones(start, dtype=torch.float64, device=device)
        # The mean of each column divided by its standard deviation.
        self.offset = torch.zeros_like(self.spread)
        for name in columns.names:
            self.spread[self.places[name]] = columns.spread[name]
            self.offset[self.places[name]] = columns.mean[name] / columns.spread[name]
        self.parts = self._lay_out()
        self.form = self._form()
        return slices

    def _design(self, entry: Entry, holes: list[str]) -> Design:
        """Return the regression of an entry.

        Without a bias, the regression passes through the origin of the original (unstandardised)
        data.
        """
        nowhere = torch.zeros(0, dtype=torch.long, device=self.offset.device)
        places = torch.cat([nowhere, *(self.places[ref.name] for ref in entry.key.parents)])
        own, name = self.places[entry.key.name], entry.key.name
        at = (
            sum(self.graph.size(other) for other in holes[: holes.index(name)])
            if name in holes
            else 0
        )
        columns = slice(at, at + len(own))
        if not self._has_bias(entry):
            return Design(places, own, columns, self.offset[places], self.offset[own])
        return Design(torch.cat([places, nowhere.new_zeros(1)]), own, columns)

    def _has_bias(self, entry: Entry) -> bool:
        if not entry.key.parents:
            return entry.spec.learned
        return self.model.factors[entry.id].net.blocks.bias is not None  # type: ignore[union-attr]

    # Parameters: of the model, and as a vector ----------------------------------------------------

    def _lay_out(self) -> dict[str, Part]:
        """Return the slices of every factor's parameters in the vector."""
        found, start = {}, 0

        def take(*shape: int) -> tuple[slice, tuple[int, ...]]:
            nonlocal start
            start += torch.Size(shape).numel()
            return slice(start - torch.Size(shape).numel(), start), shape

        for entry in self.entries:
            factor: Any = self.model.factors[entry.id]
            d = self.graph.size(entry.key.name)
            names = (
                *factor.vectors,
                *(factor.sizes if not entry.key.parents and entry.spec.learned else ()),
            )
            # The name of the raw scale, if the scale is learned.
            head = next((name for name in names if name != "loc"), None)
            weights = [take(d, self.graph.size(ref.name)) for ref in entry.key.parents]
            bias = take(d) if self._has_bias(entry) else None
            found[entry.id] = Part(
                weights,
                bias,
                head,
                None if head is None else take(d if head == "scale" else d * (d + 1) // 2),
            )
        return found

    def _unpacked(self, vector: Tensor) -> list[tuple[list[Tensor], Tensor | None, Tensor | None]]:
        """Return weights by parent, bias and raw scale of every factor."""

        def at(place: tuple[slice, tuple[int, ...]] | None) -> Any:
            return None if place is None else vector[place[0]].reshape(place[1])

        parts = [self.parts[entry.id] for entry in self.entries]
        return [
            ([at(weight) for weight in part.weights], at(part.bias), at(part.spread))
            for part in parts
        ]

    def _form(self) -> Form:
        """Build the template of R into which the vector's numbers are written."""
        count, width = len(self.offset) - self.first, len(self.offset)
        template = torch.eye(width, dtype=torch.float64, device=self.offset.device)[
            self.first :
        ].clone()
        scale, through = torch.ones_like(self.offset[self.first :]), []
        cells: list[Tensor] = []
        numbers: list[Tensor] = []
        scales: list[Tensor] = []
        raw: list[Tensor] = []
        blocks: list[tuple[Tensor, slice]] = []
        flat = torch.arange(count * width, device=template.device).reshape(count, width)
        for name in (*self.graph.observed, *self.graph.latents):
            entry, rows = self.graph.rule("p", name), self.places[name] - self.first
            part = self.parts.get(entry.id, Part([], None, None, None))
            for ref, (place, _) in zip(entry.key.parents, part.weights, strict=True):
                cells.append(flat[rows.unsqueeze(1), self.places[ref.name]].reshape(-1))
                numbers.append(torch.arange(place.start, place.stop, device=template.device))
            if part.bias is None:
                through.append(rows)
            else:
                cells.append(flat[rows, 0])
                numbers.append(
                    torch.arange(part.bias[0].start, part.bias[0].stop, device=template.device)
                )
            if part.spread is None:
                fixed = getattr(entry.spec, "scale", None)
                scale[rows] = (
                    float(fixed) if isinstance(fixed, int | float) else 1.0
                ) / self.spread[self.places[name]]
            elif part.head == "scale":
                scales.append(rows)
                raw.append(
                    torch.arange(part.spread[0].start, part.spread[0].stop, device=template.device)
                )
            else:
                blocks.append((rows, part.spread[0]))
        nothing = torch.zeros(0, dtype=torch.long, device=template.device)
        joined = {
            name: torch.cat([nothing, *found])
            for name, found in (
                ("cells", cells),
                ("numbers", numbers),
                ("scales", scales),
                ("raw", raw),
            )
        }
        return Form(
            template, scale, **joined, through=torch.cat([nothing, *through]), blocks=blocks
        )

    def _residuals(self, vector: Tensor) -> Residuals:
        form = self.form
        matrix = (
            form.template.flatten()
            .index_copy(0, form.cells, -vector[form.numbers])
            .reshape(form.template.shape)
        )
        if len(form.through):  # pass through the origin of the unstandardised data
            matrix[form.through, 0] = matrix[form.through] @ self.offset
        scale = (
            form.scale.index_copy(0, form.scales, F.softplus(vector[form.raw]))
            if len(form.scales)
            else form.scale
        )
        matrix = matrix / scale.unsqueeze(1)
        for rows, place in form.blocks:
            root = ad.tril_from_vector(vector[place], len(rows))
            matrix[rows] = torch.linalg.solve_triangular(root, matrix[rows], upper=False)
            scale = scale.index_copy(0, rows, root.diagonal())
        return Residuals(matrix, scale.log())

    def read(self) -> Tensor:
        """Return the model's parameters as EM's vector."""
        parts = []
        for entry in self.entries:
            factor: Any = self.model.factors[entry.id]
            d, own, head = (
                self.graph.size(entry.key.name),
                self.places[entry.key.name],
                self.parts[entry.id].head,
            )
            unit, bias = self.spread[own], -self.offset[own]
            for ref in entry.key.parents:
                there = self.places[ref.name]
                weight = (
                    factor.net.blocks.weights[str(ref)][:d].detach().double()
                    * self.spread[there]
                    / unit.unsqueeze(1)
                )
                bias = bias + weight @ self.offset[there]
                parts.append(weight)
            if self._has_bias(entry):
                constant = factor.net.blocks.bias if entry.key.parents else factor.root
                parts.append(bias + constant[:d].detach().double() / unit)
            if head is not None:
                raw = factor.vectors[head] if head in factor.vectors else factor.root[d:]
                parts.append(_in_units(raw.detach().double(), 1 / unit))
        return torch.cat([part.reshape(-1) for part in parts])

    def write(self, vector: Tensor) -> None:
        """Set the model's parameters."""
        for entry, (weights, bias, raw) in zip(self.entries, self._unpacked(vector), strict=True):
            own = self.places[entry.key.name]
            unit, constant = self.spread[own], self.offset[own]
            found = {}
            for ref, weight in zip(entry.key.parents, weights, strict=True):
                there = self.places[ref.name]
                found[str(ref)] = weight / self.spread[there] * unit.unsqueeze(1)
                constant = constant - weight @ self.offset[there]
            heads: dict[str, Tensor] = {}
            if raw is not None:
                heads[str(self.parts[entry.id].head)] = _in_units(raw, unit)
            if bias is not None:
                heads["loc"] = constant = (bias + constant) * unit
            self._set(entry, heads, found, constant)

    def within(self, vector: Tensor) -> Tensor:
        seen = self.form.raw[self.form.scales < self.first_latent]
        return (
            vector.index_copy(0, seen, vector[seen].clamp_min(self.raw_least.to(vector)))
            if len(seen)
            else vector
        )

    def floored(self, vector: Tensor) -> dict[str, list[int]]:
        raw = zip(self.entries, self._unpacked(vector), strict=True)
        return {
            entry.key.name: self.at_floor({self.parts[entry.id].head or "": spread})
            for entry, (_, _, spread) in raw
        }


def _in_units(raw: Tensor, unit: Tensor) -> Tensor:
    """Convert raw scales, or a raw Cholesky factor, to other units."""
    if raw.shape == unit.shape:
        return ad.inverse_softplus(F.softplus(raw) * unit)
    return ad.vector_from_tril(ad.tril_from_vector(raw, len(unit)) * unit.unsqueeze(1))
