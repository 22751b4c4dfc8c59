"""Anderson acceleration of EM, with a safeguard that the evidence never decreases.

EM is a fixed-point iteration θ ← F(θ) that converges slowly near its end. From the last few points
and their residuals F(θ) − θ, Anderson acceleration takes the linear combination whose residual
would be smallest if F were linear. The new point is accepted only if its evidence is not lower than
before. Otherwise the iteration takes the plain EM step, which never lowers the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

MEMORY, NUMBERS = 10, 2**24  # largest number of stored points, and of elements in all of them
WINDOW = 3  # iterations whose total gain is compared with tol

NO_VALUE = (
    "the exact posterior is undefined: a covariance of p is not positive definite, or a parameter "
    "is not finite"
)
GAINS = "gains"
STATE = ("points", "residuals", GAINS, "pause")  # tensors in a checkpoint
Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
Update = Callable[[Tensor], tuple[Tensor, Tensor]]  # θ → the mean evidence at θ, and F(θ)


def converged(gains: Sequence[float], tol: float) -> bool:
    """Return whether the last WINDOW iterations raised the mean evidence by less than ``tol``."""
    return len(gains) == WINDOW and sum(gains) < tol


class NoEvidenceError(ValueError):
    """The evidence is not finite at the current parameters of p."""


class Ascent:
    """Accelerated EM iterations: ``step`` advances ``point``, whose evidence is ``evidence``."""

    def __init__(
        self,
        update: Update,
        point: Tensor,
        *,
        accelerate: bool = True,
        within: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Start at ``point``; ``within`` projects a point onto the parameters that EM can reach."""
        self.update, self.accelerate, self.within = update, accelerate, within
        self.gains: list[float] = []
        # Iterations without acceleration: those left, and those after the last rejection.
        self.pause, self.last_pause = 0, 0
        self._set_out(point)

    def _set_out(self, point: Tensor) -> None:
        found = self._evaluate(point)
        if found is None:
            raise NoEvidenceError(NO_VALUE)
        self.points: list[Vector] = []
        self.residuals: list[Vector] = []
        self._arrive(point, *found)

    def _arrive(self, point: Tensor, evidence: float, image: Tensor) -> None:
        self.point, self.evidence, self.image = point, evidence, image
        keep = max(1, min(MEMORY, NUMBERS // max(1, 2 * point.numel())))
        here = point.cpu().numpy()
        self.points = [*self.points[-keep:], here]
        self.residuals = [*self.residuals[-keep:], image.cpu().numpy() - here]

    def _evaluate(self, point: Tensor) -> tuple[float, Tensor] | None:
        """Return the evidence and the next EM point; None if either is not finite."""
        try:
            evidence, image = self.update(point)
        except LinAlgError:
            return None
        return (
            (float(evidence), image)
            if math.isfinite(float(evidence) + float(image.sum()))
            else None
        )

    def step(self) -> None:
        """Run one iteration."""
        before = self.evidence
        trial = (
            self._extrapolated()
            if self.accelerate and len(self.points) > 1 and not self.pause
            else None
        )
        self.pause = max(0, self.pause - 1)
        found = None if trial is None else self._evaluate(trial)
        if trial is not None and found is not None and found[0] >= before:
            self._arrive(trial, *found)
            self.last_pause = 0
        else:
            if trial is not None:  # rejected: drop the history, and pause for longer each time
                self.points, self.residuals = self.points[-1:], self.residuals[-1:]
                self.pause = self.last_pause = min(MEMORY, 2 * self.last_pause + 1)
            image = self.image
            if (found := self._evaluate(image)) is None:
                raise NoEvidenceError(NO_VALUE)
            if found[0] >= before:  # otherwise the change is below rounding error: keep the point
                self._arrive(image, *found)
        self.gains = [*self.gains, self.evidence - before][-WINDOW:]

    def _extrapolated(self) -> Tensor:
        """Return the combination of points with the smallest residual.

        Uses numpy, which is faster than torch for small matrices.
        """
        residuals, points = np.array(self.residuals), np.array(self.points)
        moves, changes = points[1:] - points[:-1], residuals[1:] - residuals[:-1]
        size = np.sqrt((changes * changes).sum(1, keepdims=True)) + np.finfo(float).tiny
        unit = changes / size
        share = (
            np.linalg.solve(unit @ unit.T + 1e-10 * np.eye(len(unit)), unit @ residuals[-1])
            / size[:, 0]
        )
        point = self.image - torch.from_numpy(share @ (moves + changes)).to(self.image)
        return point if self.within is None else self.within(point)

    # Checkpoints ----------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        gains, pause = (
            torch.tensor(self.gains, dtype=torch.float64),
            torch.tensor([self.pause, self.last_pause]),
        )
        found = (
            torch.from_numpy(np.array(self.points)),
            torch.from_numpy(np.array(self.residuals)),
            gains,
            pause,
        )
        return dict(zip(STATE, found, strict=True))

    @classmethod
    def restored(cls, update: Update, tensors: Mapping[str, Tensor], **choices: Any) -> Ascent:
        points, residuals, gains, pause = (tensors[name] for name in STATE)
        self = cls(update, points[-1].to(residuals), **choices)
        self.points, self.residuals, self.gains = (
            list(points.cpu().numpy()),
            list(residuals.cpu().numpy()),
            gains.tolist(),
        )
        self.pause, self.last_pause = pause.tolist()
        return self
