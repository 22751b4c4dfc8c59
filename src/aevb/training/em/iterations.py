"""EM on data, an iteration at a time: where it starts, what it writes into the model, and when it has converged."""

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
    """EM of one kind of model: its parameters as a vector, and what an iteration makes of it."""

    model: Model

    def open(self, rows: Rows) -> None:
        """Read what the iterations need of the data."""

    def read(self) -> Tensor:
        """The model's parameters as a vector in float64."""

    def write(self, vector: Tensor) -> None:
        """Set the model's parameters."""

    def update(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The mean evidence of all rows at these parameters, and EM's next ones."""

    def from_data(self, own: Tensor, seed: int) -> Tensor:
        """Parameters to start with, found from the data; ``own`` are the model's."""

    def within(self, vector: Tensor) -> Tensor:
        """The nearest parameters whose variances are not below the least that an M-step gives."""

    def told_floor(self, vector: Tensor) -> str | None:
        """What is to be said of observed columns whose variance is that least; None where there are none."""

    def centred(self, own: Tensor) -> Tensor:
        """The same parameters with the data's means."""


class Iterations:
    """EM's iterations on a model. Between them its parameters are kept in float64; the model gets them in its own precision."""

    def __init__(self, method: Method, rows: Rows, schedule: em, seed: int, *, fresh: bool, tensors: Mapping[str, Tensor] | None = None) -> None:
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
        """Refuse what a checkpoint knows of other iterations than these."""
        points, residuals, gains, pause = (tensors.get(name, torch.zeros(0)) for name in STATE)
        width = len(self.method.read())
        fits = points.dim() == 2 and points.shape == residuals.shape and len(points) > 0 and points.shape[1] == width
        if not fits or gains.dim() != 1 or pause.shape != (2,):
            raise CheckpointError("The checkpoint's iterations of EM are not this model's. Resume with the model it was trained with, or start anew.")

    def _start(self, fresh: bool, seed: int) -> None:
        """From the best of the model's own parameters (unless they are random), those with the data's means, and, unless they are to be kept, some
        made from the data."""
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
        self.world.copy_first([evidence, image])  # the same in every process, to the last bit
        return evidence, image

    def _weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.theta]

    def step(self) -> float:
        """One iteration; the mean evidence of the parameters that it found. The model gets them by ``write``."""
        if self._set_by_someone():
            self.ascent = Ascent(self._update, self.method.read(), **self.choices)
            self.written = self._weights()
        self.ascent.step()
        return self.ascent.evidence

    def _set_by_someone(self) -> bool:
        """Whether the model has other weights than were last written, or found."""
        return not all(torch.equal(parameter, before) for parameter, before in zip(self.theta, self.written, strict=True))

    def write(self) -> None:
        """Give the model the parameters that were found last, unless someone has set others since."""
        if not self._set_by_someone():
            self.method.write(self.ascent.point)
            self.written = self._weights()
