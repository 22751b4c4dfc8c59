"""Coordinates for the search of mle(): p's parameters, invariant to units and offsets.

The units and offsets are those of the columns. The unit of a location is the standard deviation of
its variable. The unit of a weight is the standard deviation of its variable divided by that of the
parent. A bias is measured with the parents at their means, and a learned scale on the log scale.
All coordinates are 0 at the start of the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from aevb.declare.conditionals import Factor
from aevb.declare.networks import MLP
from aevb.estimate.keys import masks_of
from aevb.model import Model
from aevb.training.distributed import World

Array = np.ndarray[Any, np.dtype[np.float64]]
Places = np.ndarray[Any, np.dtype[np.int64]]
SMALL = 0.1  # share of a scale at the start below which its coordinate is linear
LEAST = 1e-12  # smallest share of a scale at the start
# Kinds of raw numbers. SCALE passes through a softplus. BESIDE is off the diagonal of a Cholesky
# factor.
OTHER, LOCATION, SCALE, BESIDE = range(4)


class Columns:
    """Mean and standard deviation of every column of the continuous data.

    They are over the observed entries. Functions of the data in ``parts`` count as data.
    """

    def __init__(
        self,
        model: Model,
        names: Sequence[str],
        parts: Sequence[Mapping[str, Tensor]],
        world: World,
        rows: int,
    ) -> None:
        finite = {name for name in model.graph.latents if model.graph.rule("p", name).spec.finite}
        names = [name for name in names if name not in finite]
        like = model._parameter()

        def over_rows(of: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
            sums = {
                name: torch.zeros(model.graph.size(name), dtype=torch.float64, device=like.device)
                for name in names
            }
            for part in parts:
                for name in names:
                    sums[name] += torch.where(
                        _known(part, name, model.graph.timed[name]), of(name, part[name]), 0.0
                    ).sum((0, 1))
            world.sum(list(sums.values()))
            return sums

        count = {
            name: found.clamp_min(1.0)
            for name, found in over_rows(lambda _, value: torch.ones_like(value)).items()
        }
        mean = {
            name: found / count[name] for name, found in over_rows(lambda _, value: value).items()
        }
        squares = over_rows(lambda name, value: (value - mean[name]).square())
        self.mean = {name: _array(found) for name, found in mean.items()}
        self.spread = {
            name: _spread(self.mean[name], _array((found / count[name]).sqrt()))
            for name, found in squares.items()
        }
        entropy = {
            name: _array(count[name]) @ (np.log(self.spread[name]) + 0.5 * np.log(2 * np.pi * np.e))
            for name in names
        }
        # The mean evidence under Gaussians with these moments.
        self.evidence = (
            -float(sum(found for name, found in entropy.items() if name in model.graph.stochastic))
            / rows
        )


class Layer(NamedTuple):
    """A layer of a factor: a constant, and weights with their parent.

    The parent is None for an earlier layer.
    """

    variable: str
    kind: Places  # of each number
    column: Places  # of the variable, that each number is about
    constant: Tensor | None
    weights: list[tuple[Tensor, str | None]]


class Coordinates:
    """Map coordinates to parameters, and gradients back. The current parameters are the origin."""

    def __init__(self, model: Model, free: Sequence[nn.Parameter], columns: Columns) -> None:
        self.graph, self.columns = model.graph, columns
        self.layers, start = list(_layers(model)), 0
        self.places: dict[int, Places] = {}  # positions of each parameter in the vector
        for parameter in free:
            self.places[id(parameter)] = np.arange(
                start, start := start + parameter.numel()
            ).reshape(parameter.shape)
        self.origin = np.concatenate([_array(parameter).reshape(-1) for parameter in free])
        self.unit, self.logarithmic = np.ones(start), np.zeros(start, dtype=bool)
        self.shifts: list[
            tuple[Places, Places, Array]
        ] = []  # weights, the biases that make up for what they read, and its mean
        self.sizes = columns.spread | self._sizes_of_latents()
        for layer in self.layers:
            self._measure(layer)
        self.scales = _softplus(self.origin[self.logarithmic])

    def at(self, x: Array) -> Array:
        """Return the parameters at these coordinates."""
        found = self.unit * x
        for weights, biases, mean in self.shifts:
            found[biases] -= found[weights] @ mean
        factor, _ = _scale_factor(x[self.logarithmic])
        found[self.logarithmic] = _raw(self.scales * factor) - _raw(self.scales)
        return self.origin + found

    def back(self, x: Array, parameters: Array, gradient: Array) -> Array:
        """Convert a gradient with respect to the parameters to one for the coordinates ``x``."""
        found = gradient.copy()
        for weights, biases, mean in self.shifts:
            found[weights] -= gradient[biases][:, None] * mean
        found *= self.unit
        _, slope = _scale_factor(x[self.logarithmic])
        found[self.logarithmic] = (
            gradient[self.logarithmic] * _slope(parameters[self.logarithmic]) * slope
        )
        return found

    def centred(self) -> Array:
        """Return parameters with shifted biases.

        A variable then has its data mean if its parents have theirs.
        """
        found = self.origin.copy()
        for layer in self.layers:
            biases = self._place(layer.constant)
            if biases is not None and layer.variable in self.columns.mean:
                chosen = layer.kind == LOCATION
                to = self.columns.mean[layer.variable][layer.column] - self._read(layer, found)
                found[biases[chosen]] = to[chosen]
        return found

    def rescaled(self) -> Array:
        """Convert the origin's parameters from standardised data to the units of the data."""
        found = self.origin.copy()
        units = self.columns.spread | self._units_by_fixed_weights()
        for layer in self.layers:
            kind, biases = layer.kind, self._place(layer.constant)
            mean, spread = (
                default if moments is None else moments[layer.column]
                for moments, default in (
                    (self.columns.mean.get(layer.variable), np.zeros(len(kind))),
                    (units.get(layer.variable), np.ones(len(kind))),
                )
            )
            raw = np.zeros(len(kind)) if layer.constant is None else _array(layer.constant)
            scale = _raw(spread * _softplus(raw))
            gain = np.select(
                [kind == SCALE, kind != OTHER], [_slope(scale) / _slope(raw), spread], 1.0
            )
            for weight, parent in layer.weights:
                if (place := self._place(weight)) is not None:
                    found[place] *= gain[:, None] / units.get(str(parent), np.ones(place.shape[1]))
            if biases is not None:
                to = np.select(
                    [kind == SCALE, kind == LOCATION], [scale, mean + spread * raw], gain * raw
                )
                found[biases] = to - self._read(layer, found)
        return found

    # Units ----------------------------------------------------------------------------------------

    def _sizes_of_latents(self) -> dict[str, Array]:
        """The spreads that p gives its unknowns, as far as they are parameters of their own."""
        found = {}
        for layer in self.layers:
            if (
                layer.constant is not None
                and not layer.weights
                and layer.variable not in self.columns.spread
                and (layer.kind == SCALE).any()
            ):
                sizes = _softplus(_array(layer.constant)[layer.kind == SCALE])
                found[layer.variable] = np.broadcast_to(
                    sizes, max(len(sizes), self.graph.size(layer.variable))
                )
        return found

    def _units_by_fixed_weights(self) -> dict[str, Array]:
        """The units of unknowns that fixed weights tie to the data: a level has the unit of x."""
        known = dict(self.columns.spread)
        waiting = list(self.layers)
        while ready := [layer for layer in waiting if layer.variable in known]:
            waiting = [layer for layer in waiting if layer.variable not in known]
            for layer in ready:
                here = layer.kind == LOCATION
                unit = known[layer.variable][layer.column[here]]
                for weight, parent in layer.weights:
                    if parent is not None and parent not in known and self._place(weight) is None:
                        size = np.abs(_array(weight))[here]
                        ratio = unit[:, None] / np.where(size > 0, size, np.nan)
                        least = np.where(size > 0, ratio, np.inf).min(0)
                        known[parent] = np.where(
                            np.isfinite(least), least, unit.max(initial=1e-150)
                        )
        return {name: unit for name, unit in known.items() if name not in self.columns.spread}

    def _measure(self, layer: Layer) -> None:
        """Find the units of a layer's parameters."""
        size = self.sizes.get(layer.variable)
        raw = self._read(layer, self.origin) + (
            0.0 if layer.constant is None else _array(layer.constant)
        )
        unit = np.ones(len(raw)) if size is None else size[layer.column]
        unit = np.select([layer.kind == SCALE, layer.kind == OTHER], [_slope(raw), 1.0], unit)
        biases = self._place(layer.constant)
        if biases is not None:
            self.unit[biases], self.logarithmic[biases] = (
                unit,
                (layer.kind == SCALE) & (not layer.weights),
            )
        for weight, parent in layer.weights:
            if (place := self._place(weight)) is not None:
                self.unit[place] = unit[:, None] / self.sizes.get(
                    str(parent), np.ones(place.shape[1])
                )
                if biases is not None and parent in self.columns.mean:
                    self.shifts.append((place, biases, self.columns.mean[parent]))

    def _read(self, layer: Layer, parameters: Array) -> Array:
        """Return the contribution of a layer's weights if their data are at their means."""
        total = np.zeros(len(layer.kind))
        for weight, parent in layer.weights:
            if parent in self.columns.mean:
                place = self._place(weight)
                total += (
                    _array(weight) if place is None else parameters[place]
                ) @ self.columns.mean[parent]
        return total

    def _place(self, parameter: Tensor | None) -> Places | None:
        return self.places.get(id(parameter))


def _layers(model: Model) -> Iterator[Layer]:
    """Yield p's layers.

    Other kinds of networks have none: their parameters are used as coordinates directly.
    """
    for entry in model.graph.entries():
        factor = model.factors[entry.id]
        if entry.side != "p" or not isinstance(factor, Factor):
            continue
        name, d = entry.key.name, factor.d
        for head, vector in factor.vectors.items():
            yield Layer(name, *_about({head: len(vector)}, d), vector, [])
        about = _about(factor.sizes, d)
        net = getattr(factor, "net", None)
        if net is None:
            yield Layer(name, *about, factor.root, [])
        elif isinstance(net, MLP):
            parents = {str(ref): None if net.spec.log else ref.name for ref in entry.key.parents}
            weights = [(weight, parents[label]) for label, weight in net.blocks.weights.items()]
            if net.heads is None:
                yield Layer(name, *about, net.blocks.bias, weights)
            else:
                yield Layer(name, *_about({"": net.spec.hidden[0]}, d), net.blocks.bias, weights)
                yield Layer(name, *about, net.heads.bias, [(net.heads.weight, None)])


def _about(heads: Mapping[str, int], d: int) -> tuple[Places, Places]:
    """The kind of each raw number, and the column it is about."""
    kinds: list[Places] = []
    columns: list[Places] = []
    for name, size in heads.items():
        if name == "tril":
            row, column = np.tril_indices(d)
            kinds.append(np.where(row == column, SCALE, BESIDE))
            columns.append(row)
        else:
            kinds.append(np.full(size, {"loc": LOCATION, "scale": SCALE}.get(name, OTHER)))
            columns.append(np.arange(size) % d)
    return np.concatenate(kinds), np.concatenate(columns)


def _known(part: Mapping[str, Tensor], name: str, timed: bool) -> Tensor:
    """Which entries are there: not missing, and not after a sequence's end."""
    known = torch.ones((), dtype=torch.bool, device=part[name].device)
    for mask in masks_of(part, name, timed=timed):
        known = known & mask
    return known


def _spread(mean: Array, spread: Array) -> Array:
    """1 for a column that is constant, but for rounding."""
    return np.where(spread > 1e-12 * np.abs(mean), spread, 1.0).clip(1e-150)


def _array(tensor: Tensor) -> Array:
    return tensor.detach().double().cpu().numpy()


def _softplus(raw: Array) -> Array:
    return np.logaddexp(0.0, raw)


def _scale_factor(x: Array) -> tuple[Array, Array]:
    """Return the factor of a scale at its coordinate, and the slope of the factor's logarithm.

    The factor is exp(x), but a straight line below SMALL, and the coordinate may pass through the
    scale 0 to the same scales on the other side. The evidence is smooth in the variance. If it is
    highest at the variance 0, it is therefore a parabola on the line, whose top a few steps find;
    on a logarithmic axis the top would be infinitely far away.
    """
    line = SMALL * (1.0 + x - math.log(SMALL))
    inside = x >= math.log(SMALL)
    factor = np.where(inside, np.exp(np.maximum(x, math.log(SMALL))), np.abs(line))
    slope = np.where(inside, 1.0, SMALL * np.sign(line) / np.maximum(factor, LEAST))
    return np.maximum(factor, LEAST), slope


def _raw(scale: Array) -> Array:
    """Return the inverse of softplus."""
    return scale + np.log(-np.expm1(-scale))


def _slope(raw: Array) -> Array:
    """Return the derivative of the raw scale with respect to the logarithm of the scale."""
    raw = np.maximum(raw, -30.0)  # below, the scale is exp(raw), and the derivative 1
    return _softplus(raw) * (1 + np.exp(-raw))
