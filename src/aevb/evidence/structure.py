"""Decide whether a model's evidence is exact, and classify its unknowns.

Given the data, each variable of p is *known* (data, or a function of data), *discrete* (a finite
latent, or a function of finite latents), or *Gaussian* (a continuous latent, or a linear function
of some). The evidence is exact if

- every factor that reads a Gaussian unknown is Gaussian, is linear in it (with weights that a known
  or discrete parent may choose), and has a scale that does not depend on it. The integral then has
  a closed form for each value of the discrete latents. The factor may depend on its other parents
  in any way;
- over time, discrete latents depend on neighbouring steps only. The forward algorithm then computes
  the sum over paths;
- no Gaussian unknown that is carried from step to step depends on a discrete latent of a step.
  Otherwise each path of discrete values would have its own Gaussian.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from aevb.declare.conditionals import Factor
from aevb.declare.deterministic import Function
from aevb.declare.graph import Entry
from aevb.declare.networks import MLP, Named
from aevb.declare.notation import Ref
from aevb.declare.switching import Switching
from aevb.derive.plan import LIMIT
from aevb.estimate.batch import split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.keys import mask_of

if TYPE_CHECKING:
    from torch import Tensor, nn


# The step at which a discrete latent is read: an offset (0 for a static one), "first" or "last".
Place = int | str
Axes = frozenset[tuple[str, Place]]
NONE: Axes = frozenset()


class NotExactError(ValueError):
    """The evidence is not exact; the message gives the reason."""


def is_affine(factor: nn.Module) -> bool:
    """Return whether a factor's network is an affine function of its parents."""
    net = getattr(factor, "net", None)
    return isinstance(net, MLP) and not net.spec.hidden


def chooses_weights(factor: nn.Module) -> str | None:
    """Return the label of the parent that chooses among affine maps of the others; None if none."""
    net = getattr(factor, "net", None)
    return net.by if isinstance(net, Switching) else None


def moves_spread(factor: Factor, ref: Ref) -> bool:
    """Return whether the scale of an affine Gaussian factor depends on this parent."""
    if not factor.spec.stochastic or len(factor.sizes) == 1:
        return False
    if chooses_weights(factor) is not None:
        return True
    weights: Named = factor.net.blocks.weights  # type: ignore[union-attr,assignment]
    constant = weights.constants.get(ref.label)
    return constant is None or bool(constant[factor.d :].any())


class Structure:
    """The discrete and Gaussian unknowns of a model whose evidence is exact.

    ``clamped`` names the latents that are known in every row. ``hidden`` names observed variables
    with missing entries that p reads: they are unknowns like the latents.

    Raises :class:`NotExactError` with the reason if the evidence is not exact.
    """

    def __init__(
        self,
        model: DeclaredModel,
        clamped: frozenset[str] = frozenset(),
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self.model, self.graph = model, model.graph
        unknown = [name for name in self.graph.latents if name not in clamped] + [
            name for name in self.graph.observed if name in hidden
        ]
        self.discrete = tuple(
            name
            for name in unknown
            if all(entry.spec.finite for entry in self.graph.p[name].values())
        )
        self.gaussian = self._gaussian([name for name in unknown if name not in self.discrete])
        order = [name for stage in self.graph.generation for name in stage.nodes]
        self.linked = tuple(
            name for name in order if name in self.gaussian or self._gaussian_parents(name)
        )
        for name in self.linked:
            for entry in self.graph.p[name].values():
                self._check_gaussian(entry)
        # The number of joint values of the discrete latents (per step, if they have a time axis).
        self.count = self._count()
        self.values = self._values()  # discrete latents that each function depends on
        self.axes = {
            name: self._axes(name) for name in self.graph.stochastic if name not in self.linked
        }
        self.linked_axes = NONE.union(*(self._axes(name) for name in self.linked))
        self._check_linked()
        for name, axes in self.axes.items():
            self._check_axes(f"p's factor of {name}", axes)

    # Gaussian unknowns ----------------------------------------------------------------------------

    def _gaussian(self, latents: list[str]) -> frozenset[str]:
        """Return the continuous latents and all functions of them."""
        found: set[str] = set()
        more = set(latents)
        while more:
            found |= more
            functions = (name for name in self.graph.p if self.graph.is_deterministic(name))
            more = {
                name
                for name in functions
                if name not in found
                and any(ref.name in found for ref in self.graph.reads("p", name))
            }
        return frozenset(found)

    def _gaussian_parents(self, name: str) -> list[Ref]:
        return [ref for ref in self.graph.reads("p", name) if ref.name in self.gaussian]

    def _check_gaussian(self, entry: Entry) -> None:
        """Raise unless the factor is Gaussian and linear in the Gaussian unknowns that it reads."""
        spec, name, factor = entry.spec, entry.key.name, self.model.factors[entry.id]
        parents = [ref for ref in entry.key.parents if ref.name in self.gaussian]
        if name in self.discrete and parents:
            raise NotExactError(
                f"{entry.id} gives the discrete {name} probabilities that depend on the "
                f"continuous {parents[0]}"
            )
        if spec.stochastic and not spec.gaussian:
            raise NotExactError(f"{entry.id} is a {type(spec).__name__}")
        if not parents:
            return
        by = chooses_weights(factor)
        if not (is_affine(factor) or (by is not None and by not in map(str, parents))) or (
            isinstance(factor, Function) and spec.activation != "identity"  # type: ignore[attr-defined]
        ):
            raise NotExactError(f"{entry.id} is not linear in {parents[0]}")
        assert isinstance(factor, Factor)
        if spread := next((ref for ref in parents if moves_spread(factor, ref)), None):
            raise NotExactError(f"the spread of {entry.id} depends on {spread}")
        end = next(
            (ref for ref in parents if ref.at in ("first", "last") and not entry.key.target.timed),
            None,
        )
        if end is not None:
            raise NotExactError(
                f"{entry.id} lets a static variable depend on {end}, an end of a sequence of "
                f"continuous latents"
            )

    @cached_property
    def lags(self) -> dict[int, str]:
        """Lags at which Gaussian unknowns are read, each with a text that names the reader."""
        return {
            ref.lag: f"{name}[t] reads {ref}"
            for name in self.linked
            for ref in self._gaussian_parents(name)
            if ref.lag
        }

    @property
    def direction(self) -> int:
        """+1 if the filter runs from the first step to the last, −1 if backwards."""
        return -next(iter(self.lags), -1)

    @property
    def carried(self) -> bool:
        """Whether a Gaussian unknown couples steps (read at a neighbour, or by all steps)."""
        timed = [self.graph.timed[name] for name in self.linked]
        return bool(self.lags) or (any(timed) and not all(timed))

    def _check_linked(self) -> None:
        if len(self.lags) > 1:
            raise NotExactError(
                f"{self.lags[-1]} and {self.lags[1]}, so a filter cannot run through time in one "
                f"direction"
            )
        if not self.linked_axes:
            return
        gaussian = next(name for name in self.linked if name in self.gaussian)
        timed = next(
            (name for name, _ in sorted(self.linked_axes, key=str) if self.graph.timed[name]), None
        )
        if self.carried and timed is not None:
            raise NotExactError(
                f"the continuous {gaussian} is carried through time by rules that depend on the "
                f"discrete {timed}[t]: each path of {timed} has its own Gaussian, and there are "
                f"too many to sum over"
            )
        if any(isinstance(place, str) for _, place in self.linked_axes):
            raise NotExactError(
                f"the continuous {gaussian} depends on an end of the discrete {timed}"
            )
        self._check_axes(f"the integral over {gaussian}", self.linked_axes)

    # Discrete unknowns ----------------------------------------------------------------------------

    def _count(self) -> int:
        count = 1
        for name in self.discrete:
            count *= self.graph.rule("p", name).spec.count(self.graph.size(name)) or 1
        if count > LIMIT:
            raise NotExactError(
                f"the discrete latents have {count} joint values, more than {LIMIT}"
            )
        return count

    def _values(self) -> dict[str, Axes]:
        """Return the discrete latents, with offsets, that each variable's value depends on.

        Computed as a fixed point over p's deterministic functions.
        """
        values: dict[str, Axes] = {name: frozenset({(name, 0)}) for name in self.discrete}
        functions = [
            name
            for name in self.graph.p
            if self.graph.is_deterministic(name) and name not in self.gaussian
        ]
        changed = True
        while changed:
            changed = False
            for name in functions:
                found = NONE.union(
                    *(self._reads(entry, values) for entry in self.graph.p[name].values())
                )
                end = next((latent for latent, place in found if isinstance(place, str)), None)
                if end is not None:
                    raise NotExactError(
                        f"{self.graph.rule('p', name).id} remembers an end of {end}, so that the "
                        f"sum over paths does not factor"
                    )
                if found != values.get(name, NONE):
                    values[name], changed = found, True
        return values

    def _reads(self, entry: Entry, values: dict[str, Axes]) -> Axes:
        found: set[tuple[str, Place]] = set()
        for ref in entry.key.parents:
            # In an entry for an end, that end is the current step.
            within = entry.key.at in ("first", "last")
            for latent, place in values.get(ref.name, NONE):
                if not self.graph.timed[latent] or not ref.timed or (ref.at != "t" and within):
                    found.add((latent, place))
                elif ref.at != "t":
                    if place != 0:
                        raise NotExactError(
                            f"{entry.id} depends on {latent} before or after an end of the sequence"
                        )
                    found.add((latent, ref.at))
                else:
                    assert isinstance(place, int)
                    if abs(place + ref.lag) > 1:
                        count = self.graph.rule("p", latent).spec.count(self.graph.size(latent))
                        raise NotExactError(
                            f"{entry.id} remembers {latent}, so that all its {count}^T paths "
                            f"would have to be summed over"
                        )
                    found.add((latent, place + ref.lag))
        return frozenset(found)

    def _axes(self, name: str) -> Axes:
        """Return the discrete latents, with offsets, that p's factor of a variable depends on."""
        own = frozenset({(name, 0)}) if name in self.discrete else NONE
        return own.union(
            *(self._reads(entry, self.values) for entry in self.graph.p[name].values())
        )

    def _check_axes(self, what: str, axes: Axes) -> None:
        places = {place: latent for latent, place in axes if self.graph.timed[latent] and place}
        if len(places) > 1:
            a, b = places
            raise NotExactError(
                f"{what} depends on two steps of the discrete {places[a]} at once that are not "
                f"adjacent ({_text(a)} and {_text(b)})"
            )

    def place(self, axes: Axes) -> Place:
        """Return the step, other than the current one, at which these axes read discrete latents.

        −1, +1, "first" or "last"; 0 if there is none.
        """
        return next((place for latent, place in axes if self.graph.timed[latent] and place), 0)


def structure_of(model: DeclaredModel, batch: Mapping[str, Tensor]) -> Structure:
    """Return the unknowns of a batch: latents, and observed variables with gaps that p reads.

    Raises :class:`NotExactError` with the reason if the evidence is not exact.
    """
    graph = model.graph
    hidden = frozenset(
        name for name in graph.observed if mask_of(name) in batch and graph.is_read_by_p(name)
    )
    return Structure(model, split_latents(graph, batch)[0], hidden)


def _text(place: Place) -> str:
    return {"first": "[0]", "last": "[T]", -1: "[t-1]", 1: "[t+1]"}[place]
