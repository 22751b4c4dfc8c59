"""EM iterations on data: initial parameters, updates of the model, and convergence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from aevb.model import Model
from aevb.training.checkpoint import CheckpointError
from aevb.training.em.acceleration import STATE, Ascent, NoEvidenceError
from aevb.training.em.factors import Rows
from aevb.training.schedules import em


class Method(Protocol):
    """Interface of EM for one kind of model, with its parameters as one vector."""

    model: Model

    def open(self, rows: Rows) -> None:
        """Read the data that the iterations need."""

    def read(self) -> Tensor:
        """Return the model's parameters as a float64 vector."""

    def write(self, vector: Tensor) -> None:
        """Set the model's parameters."""

    def update(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean evidence of all rows at these parameters, and the next parameters."""

    def from_data(self, own: Tensor, seed: int) -> Tensor:
        """Return initial parameters computed from the data; ``own`` are the model's parameters."""

    def within(self, vector: Tensor) -> Tensor:
        """Return the nearest parameters whose variances are not below the M-step's lower limit."""

    def told_floor(self, vector: Tensor) -> str | None:
        """Return a warning on observed columns at the lower limit of the variance, or None."""

    def centred(self, own: Tensor) -> Tensor:
        """Return the same parameters, shifted to the means of the data."""


class Iterations:
    """EM iterations on a model.

    Between iterations the parameters are kept in float64. The model receives them in its own
    precision.
    """

    def __init__(
        self,
        method: Method,
        rows: Rows,
        schedule: em,
        seed: int,
        *,
        fresh: bool,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.method, self.schedule, self.world = method, schedule, rows.world
        self.theta = method.model.theta()
        self.choices: dict[str, Any] = {"accelerate": schedule.accelerate, "within": method.within}
        method.open(rows)
        if tensors:
            self._check(tensors)
            self.ascent = Ascent.restored(self._update, tensors, **self.choices)
        else:
            self._start(fresh, seed)
        self.written = self._weights()

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise if a checkpoint's EM state does not match this model."""
        points, residuals, gains, pause = (tensors.get(name, torch.zeros(0)) for name in STATE)
        width = len(self.method.read())
        fits = (
            points.dim() == 2
            and points.shape == residuals.shape
            and len(points) > 0
            and points.shape[1] == width
        )
        if not fits or gains.dim() != 1 or pause.shape != (2,):
            raise CheckpointError(
                "The checkpoint's EM state does not fit this model. Resume with the model it was "
                "trained with, or start a new run."
            )

    def _start(self, fresh: bool, seed: int) -> None:
        """Start from the candidate parameters with the highest evidence.

        Candidates are the model's own parameters (unless they are random), the same shifted to the
        means of the data, and, if the schedule allows, parameters computed from the data.
        """
        own = self.method.read()
        starts = [self.method.centred(own)] if fresh else [own, self.method.centred(own)]
        if self.schedule.start == "data" or (self.schedule.start == "auto" and fresh):
            starts.append(self.method.from_data(own, seed))
        found: list[Ascent] = []
        for start in starts:
            self.world.copy_first([start])
            if not any(torch.equal(start, other.point) for other in found):
                try:
                    found.append(Ascent(self._update, start, **self.choices))
                except NoEvidenceError as error:
                    refusal = error
        if not found:
            raise refusal
        self.ascent = max(found, key=lambda ascent: ascent.evidence)

    def _update(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        evidence, image = self.method.update(vector)
        self.world.copy_first([evidence, image])  # identical in every process, to the last bit
        return evidence, image

    def _weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.theta]

    def step(self) -> float:
        """Run one iteration and return the new mean evidence; ``write`` updates the model."""
        if self._changed_elsewhere():
            self.ascent = Ascent(self._update, self.method.read(), **self.choices)
            self.written = self._weights()
        self.ascent.step()
        return self.ascent.evidence

    def _changed_elsewhere(self) -> bool:
        """Return whether other code changed the model's weights since they were last written."""
        return not all(
            torch.equal(parameter, before)
            for parameter, before in zip(self.theta, self.written, strict=True)
        )

    def write(self) -> None:
        """Write the latest parameters to the model, unless other code changed its weights."""
        if not self._changed_elsewhere():
            self.method.write(self.ascent.point)
            self.written = self._weights()
