"""Maximum likelihood on all rows: L-BFGS on the exact evidence in float64.

The search works on a float64 copy of the model, because float32 would round away small differences
of the evidence. The parameters are copied back to the model after each iteration.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from aevb.data.sources import Source
from aevb.declare.graph import Entry
from aevb.estimate.keys import mask_of
from aevb.estimate.program import Program
from aevb.evidence.exact import exact_evidence
from aevb.evidence.structure import structure_of
from aevb.model import Model
from aevb.training.coordinates import Array, Columns, Coordinates
from aevb.training.distributed import World
from aevb.training.quasi_newton import QuasiNewton
from aevb.training.settings import Settings

# The largest p (in parameters), and the largest product of rows and values of discrete latents, for
# steps on all rows at once.
PARAMETERS, NUMBERS = 10_000, 2**23
PART = 2**20  # numbers of the rows that are taken at a time


class Likelihood:
    """The mean evidence of all rows as a function of p's parameters, and the ascent's state."""

    def __init__(
        self,
        model: Model,
        source: Source,
        world: World,
        moved: Sequence[nn.Parameter],
        kept: Mapping[str, Tensor],
    ) -> None:
        self.world, self.n = world, source.n
        self.twin = copy.deepcopy(model).double().eval()
        # Pairs of a parameter of the model and the same parameter of the copy.
        self.pairs = list(zip(model.theta(), self.twin.theta(), strict=True))
        moving = {id(parameter) for parameter in moved}
        self.free = [theirs for mine, theirs in self.pairs if id(mine) in moving]
        for parameter in self.twin.parameters():
            parameter.requires_grad_(False)
        for parameter in self.free:
            parameter.requires_grad_(True)
        rows = torch.arange(self.n)[world.share(self.n)]
        self.parts = [
            {
                name: value.double() if value.is_floating_point() else value
                for name, value in source.take(part).items()
            }
            for part in rows.split(max(1, PART // _numbers(source)))
        ]
        constants = [constant_functions(self.twin, part) for part in self.parts]
        for part, constant in zip(self.parts, constants, strict=True):
            part |= constant
        self.structure = structure_of(self.twin, self.parts[0]) if self.parts else None
        # Only the names of the constants of the first row matter. The first part has the same ones
        # if both miss entries of the same variables.
        given = source.take(torch.arange(1))
        same = bool(self.parts) and {*given} == {*self.parts[0]} - {*constants[0]}
        given |= constants[0] if same else constant_functions(model, given)
        names = [
            name
            for name, value in given.items()
            if name in model.graph.timed and value.is_floating_point()
        ]
        self.search: QuasiNewton
        self.columns = Columns(self.twin, names, self.parts, world, self.n)
        if kept:
            self._set(kept["origin"].numpy())
            self._search_from(Coordinates(self.twin, self.free, self.columns), kept)
        else:
            self._begin()
        self._write()

    def step(self, tol: float) -> tuple[float, float] | None:
        """Take one iteration; return the mean evidence and the norm of its gradient.

        Return None if the evidence is undefined at the start of the iteration.
        """
        if self._changed():
            self._begin()
        elif self.search.stale(tol):  # in the units of where it is now, with nothing remembered
            self._search_from(
                Coordinates(self.twin, self.free, self.columns), evaluations=self.search.evaluations
            )
        if not math.isfinite(self.search.value):
            return None
        self.search.step()
        self._write()
        return -self.search.value, float(np.linalg.norm(self.search.gradient))

    def ended(self, tol: float) -> bool:
        """Whether the ascent has converged, or no step goes higher any more."""
        return self.search.converged(tol) or (self.search.stuck and not self.search.stale(tol))

    def _changed(self) -> bool:
        """Return whether other code has changed the model's parameters, and copy them if so."""
        changed = False
        with torch.no_grad():
            for mine, theirs in self.pairs:
                if not torch.equal(theirs.to(mine.dtype), mine):
                    theirs.copy_(mine)
                    changed = True
        return changed

    def _begin(self) -> None:
        """Start from the model's parameters.

        If Gaussians with the columns' moments fit better, try other starts.
        """
        own = Coordinates(self.twin, self.free, self.columns)
        found = own, self._search_from(own)
        for start in (
            (own.centred(), own.rescaled()) if -self.search.value < self.columns.evidence else ()
        ):
            self._set(start)
            other = Coordinates(self.twin, self.free, self.columns)
            if self._search_from(other, evaluations=self.search.evaluations).value < found[1].value:
                found = other, self.search
        self.coordinates, self.search = found

    def _search_from(
        self,
        coordinates: Coordinates,
        kept: Mapping[str, Tensor] | None = None,
        evaluations: int = 0,
    ) -> QuasiNewton:
        self.coordinates = coordinates
        start = np.zeros_like(coordinates.origin)
        self.search = QuasiNewton(self._loss, start, kept, evaluations)
        return self.search

    def _write(self) -> None:
        """Give the model the parameters that were found."""
        self._set(self.coordinates.at(self.search.x))
        with torch.no_grad():
            for mine, theirs in self.pairs:
                mine.copy_(theirs)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state that the next iteration needs."""
        return self.search.tensors() | {"origin": torch.from_numpy(self.coordinates.origin)}

    def _loss(self, x: Array) -> tuple[float, Array]:
        """Return the mean of −log p per row and its gradient.

        The mean is infinite if a covariance is not positive definite.
        """
        parameters = self.coordinates.at(x)
        if not np.isfinite(parameters).all():
            return math.inf, np.zeros_like(x)
        self._set(parameters)
        total, gradients = (
            torch.zeros((), dtype=torch.float64),
            [torch.zeros_like(parameter) for parameter in self.free],
        )
        try:
            for part in self.parts:
                value = exact_evidence(self.twin, part, self.structure).sum() / self.n
                found = torch.autograd.grad(value, self.free, allow_unused=True)
                total += value.detach().cpu()
                for gradient, more in zip(gradients, found, strict=True):
                    if more is not None:
                        gradient += more
            failed = False
        except (LinAlgError, ValueError):  # torch refuses parameters that are not numbers
            failed = True
        if self.world.any(failed):
            return math.inf, np.zeros_like(x)
        self.world.sum([total, *gradients])
        slopes = -torch.cat([gradient.reshape(-1) for gradient in gradients]).cpu().numpy()
        return -float(total), self.coordinates.back(x, parameters, slopes)

    def _set(self, parameters: Array) -> None:
        with torch.no_grad():
            for parameter, part in zip(
                self.free,
                torch.from_numpy(parameters).split([p.numel() for p in self.free]),
                strict=True,
            ):
                parameter.copy_(part.reshape(parameter.shape))


def constant_functions(model: Model, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return p's functions of the data that have no free parameters, such as past values of x.

    They are computed once, not at every evaluation.
    """
    graph = model.graph
    known = {
        name
        for name in (*graph.given, *graph.observed)
        if name in part and mask_of(name) not in part
    }
    program = Program(graph, model.factors, part, steps=model._extent(part)[1])
    program.values |= {name: part[name] for name in known}
    found: dict[str, Tensor] = {}
    for stage in graph.function_stages(known):
        entries = [entry for name in stage.nodes for entry in graph.p.get(name, {}).values()]
        read = {ref.name for entry in entries for ref in entry.key.parents}
        constant = bool(entries) and not any(
            parameter.requires_grad
            for entry in entries
            for parameter in model.factors[entry.id].parameters()
        )
        if constant and read <= known | found.keys() | set(stage.nodes):
            with torch.no_grad():
                program.run([stage], _draws_nothing)
            found |= {name: program.values[name] for name in stage.nodes}
    return found


def _draws_nothing(name: str, entry: Entry, raw: Tensor, step: int | None) -> Tensor:
    raise RuntimeError(f"{entry.id} is drawn, so {name} is no function of the data.")


def why_in_batches(model: Model, source: Source, settings: Settings) -> str | None:
    """Return why mle() uses Adam on batches; None if it uses L-BFGS on all rows."""
    asked: str | None = getattr(settings.schedule, "optimiser", None)
    if asked == "lbfgs":
        return None
    if asked == "adam":
        return "mle(optimiser='adam') asks for Adam"
    given = next((name for name in ("lr", "warmup", "clip") if getattr(settings, name)), None)
    if given is not None:
        return f"{given}= is a setting of Adam"
    count = sum(parameter.numel() for parameter in model.theta() if parameter.requires_grad)
    if count > PARAMETERS:
        return f"p has {count:,} parameters, more than {PARAMETERS:,}"
    if source.fresh:
        return "some of the data are drawn anew at every step"
    numbers = source.n * _numbers(source) * structure_of(model, source.take(torch.arange(1))).count
    return (
        f"the rows have {numbers:,} numbers, more than {NUMBERS:,}" if numbers > NUMBERS else None
    )


def _numbers(source: Source) -> int:
    """The numbers of one row."""
    first: Mapping[str, Any] = source.take(torch.arange(1))
    return max(1, sum(value.numel() for value in first.values()))
