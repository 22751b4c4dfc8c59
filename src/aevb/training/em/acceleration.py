"""Anderson's acceleration of EM, with a guard: the evidence never falls.

EM is a fixed-point iteration θ ← F(θ) whose last digits take long. From the last few points and their residuals F(θ) − θ, Anderson's method
takes the combination whose residual would be least if F were linear. Such a point is kept only if its evidence is no lower than
that of the point before it; otherwise the iteration takes EM's own step, which never lowers it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

MEMORY, NUMBERS = 10, 2**24  # points that are remembered at most, and numbers in all of them
WINDOW = 3  # iterations over which the gain is compared with tol

NO_VALUE = "the exact posterior has no value: a covariance of p is not positive definite, or a number is not finite"
STATE = ("em/points", "em/residuals", "em/gains", "em/pause")  # what a checkpoint keeps
Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
Update = Callable[[Tensor], tuple[Tensor, Tensor]]  # θ → the mean evidence at θ, and F(θ)


def converged(gains: Sequence[float], tol: float) -> bool:
    """Whether the last iterations together raised the mean evidence by less than ``tol``."""
    return len(gains) == WINDOW and sum(gains) < tol


class NoEvidenceError(ValueError):
    """The evidence has no finite value at the parameters of p."""


class Ascent:
    """EM from a point: ``step`` goes on from ``point``, whose evidence is ``evidence``."""

    def __init__(self, update: Update, point: Tensor, *, accelerate: bool = True, within: Callable[[Tensor], Tensor] | None = None) -> None:
        """``within`` moves a point to the nearest that EM's own steps could reach."""
        self.update, self.accelerate, self.within = update, accelerate, within
        self.gains: list[float] = []
        self.pause, self.last_pause = 0, 0  # iterations without acceleration: still to come, and after the last trial that failed
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
        """The evidence and EM's next point; None where either is not finite."""
        try:
            evidence, image = self.update(point)
        except LinAlgError:
            return None
        return (float(evidence), image) if math.isfinite(float(evidence) + float(image.sum())) else None

    def step(self) -> None:
        """One iteration."""
        before = self.evidence
        trial = self._extrapolated() if self.accelerate and len(self.points) > 1 and not self.pause else None
        self.pause = max(0, self.pause - 1)
        found = None if trial is None else self._evaluate(trial)
        if trial is not None and found is not None and found[0] >= before:
            self._arrive(trial, *found)
            self.last_pause = 0
        else:
            if trial is not None:  # what misled it is forgotten, and longer every time
                self.points, self.residuals = self.points[-1:], self.residuals[-1:]
                self.pause = self.last_pause = min(MEMORY, 2 * self.last_pause + 1)
            image = self.image
            if (found := self._evaluate(image)) is None:
                raise NoEvidenceError(NO_VALUE)
            if found[0] >= before:  # where it is not, rounding has the last word: the point stays
                self._arrive(image, *found)
        self.gains = [*self.gains, self.evidence - before][-WINDOW:]

    def _extrapolated(self) -> Tensor:
        """The combination of the points whose residual would be least; a few products of small matrices, for which numpy is the faster."""
        residuals, points = np.array(self.residuals), np.array(self.points)
        moves, changes = points[1:] - points[:-1], residuals[1:] - residuals[:-1]
        size = np.sqrt((changes * changes).sum(1, keepdims=True)) + np.finfo(float).tiny
        unit = changes / size
        share = np.linalg.solve(unit @ unit.T + 1e-10 * np.eye(len(unit)), unit @ residuals[-1]) / size[:, 0]
        point = self.image - torch.from_numpy(share @ (moves + changes)).to(self.image)
        return point if self.within is None else self.within(point)

    # What a checkpoint keeps ---------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        gains, pause = torch.tensor(self.gains, dtype=torch.float64), torch.tensor([self.pause, self.last_pause])
        found = torch.from_numpy(np.array(self.points)), torch.from_numpy(np.array(self.residuals)), gains, pause
        return dict(zip(STATE, found, strict=True))

    @classmethod
    def restored(cls, update: Update, tensors: Mapping[str, Tensor], **choices: Any) -> Ascent:
        points, residuals, gains, pause = (tensors[name] for name in STATE)
        self = cls(update, points[-1].to(residuals), **choices)
        self.points, self.residuals, self.gains = list(points.cpu().numpy()), list(residuals.cpu().numpy()), gains.tolist()
        self.pause, self.last_pause = pause.tolist()
        return self
