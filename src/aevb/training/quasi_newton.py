"""Limited-memory BFGS, one iteration at a time, for functions that may not be finite everywhere.

The functions are smooth and have many variables. An iteration searches along −H g. Here g is the
gradient, and H approximates the inverse Hessian from the last steps and the changes of the
gradient. The search ends at a point that satisfies the strong Wolfe conditions: the function is
lower, and the slope along the line is smaller. A point where the function is not finite has the
value infinity, so the search turns back before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[np.float64]]
MEMORY = 30  # last steps that approximate the inverse Hessian
# Constants of the Wolfe conditions: sufficient decrease, and reduction of the slope.
LOWER, FLATTER = (1e-4, 0.9)
TRIES = 30  # maximum number of evaluations per search


class Point(NamedTuple):
    """A point on the line: its position, the function, the slope along the line, the gradient."""

    at: float
    value: float
    slope: float
    gradient: Array


class QuasiNewton:
    """The state of a minimisation; ``evaluate`` returns the function and its gradient."""

    def __init__(
        self,
        evaluate: Callable[[Array], tuple[float, Array]],
        start: Array,
        kept: Mapping[str, Tensor] | None = None,
        evaluations: int = 0,
    ) -> None:
        """Start a search; ``evaluations`` is the number of evaluations of earlier searches."""
        self.evaluate, self.x = evaluate, start.copy()
        self.steps: list[Array] = []
        self.changes: list[Array] = []  # of the gradient
        self.evaluations, self.gain, self.stuck = evaluations, math.inf, False
        self.reach = 1.0  # length of the last step, as a share of its direction
        self.taken = 0  # number of iterations
        if kept:
            self.x, self.steps, self.changes = (
                kept["x"].numpy().copy(),
                [*kept["steps"].numpy()],
                [*kept["changes"].numpy()],
            )
            self.gain, self.stuck, self.reach = (
                float(kept["gain"]),
                bool(kept["stuck"]),
                float(kept["reach"]),
            )
            self.taken = int(kept["taken"])
        self.value, self.gradient = self._at(self.x)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state that the next iteration needs."""
        numbers = {
            "x": self.x,
            "steps": np.array(self.steps).reshape(-1, len(self.x)),
            "changes": np.array(self.changes).reshape(-1, len(self.x)),
        }
        state = {"gain": self.gain, "stuck": self.stuck, "reach": self.reach, "taken": self.taken}
        return {
            name: torch.tensor(part, dtype=torch.float64)
            for name, part in (numbers | state).items()
        }

    def step(self) -> float:
        """Take one iteration and return the new value, which is never above the old one."""
        before = self.value
        direction = -self._towards(self.gradient)
        if not self._go(direction) and not (self.steps and self._go(self._afresh())):
            self.stuck = True
        self.gain = before - self.value
        self.taken += 1
        return self.value

    def converged(self, tol: float) -> bool:
        """Return whether the last iteration gained less than ``tol``, and the next one will.

        Two curvatures predict the gain of the next iteration: the approximated one, and 1.
        """
        return self._slow(tol) and 0.5 * float(self.gradient @ self.gradient) < tol

    def stale(self, tol: float) -> bool:
        """Return whether a new search from here may find a lower value.

        This search has stopped, or nearly so, but the gradient is still large.
        """
        return (
            self.taken > 1
            if self.stuck
            else self.taken > MEMORY and self._slow(tol) and not self.converged(tol)
        )

    def _slow(self, tol: float) -> bool:
        return self.gain < tol and 0.5 * float(self.gradient @ self._towards(self.gradient)) < tol

    # An iteration ---------------------------------------------------------------------------------

    def _afresh(self) -> Array:
        """Forget all earlier steps, and return the direction of steepest descent."""
        self.steps, self.changes, self.reach = [], [], 1.0
        return -self._towards(self.gradient)

    def _towards(self, gradient: Array) -> Array:
        """Return H g, by the two-loop recursion over the stored steps."""
        found, shares = gradient.copy(), []
        for step, change in zip(reversed(self.steps), reversed(self.changes), strict=True):
            share = (step @ found) / (change @ step)
            shares.append(share)
            found -= share * change
        if self.steps:
            found *= (self.steps[-1] @ self.changes[-1]) / (self.changes[-1] @ self.changes[-1])
        else:
            # The curvature is unknown. The step has length at most 1, or a twentieth of the norm
            # of x if that is longer.
            norm = float(np.linalg.norm(gradient))
            found *= max(
                1 / max(1.0, float(np.abs(gradient).sum())),
                0.05 * float(np.linalg.norm(self.x)) / max(norm, 1e-300),
            )
        for step, change, share in zip(self.steps, self.changes, reversed(shares), strict=True):
            found += (share - (change @ found) / (change @ step)) * step
        return found

    def _go(self, direction: Array) -> bool:
        """Search along a direction and move to the result; False if no point is lower."""
        slope = float(self.gradient @ direction)
        if not slope < 0:
            return False
        found = self._search(direction, Point(0.0, self.value, slope, self.gradient))
        if found is None:
            return False
        self.reach = found.at
        step, change = found.at * direction, found.gradient - self.gradient
        if step @ change > 1e-10 * float(np.linalg.norm(step) * np.linalg.norm(change)):
            self.steps, self.changes = (
                [*self.steps, step][-MEMORY:],
                [*self.changes, change][-MEMORY:],
            )
        self.x, self.value, self.gradient = self.x + step, found.value, found.gradient
        return True

    def _search(self, direction: Array, start: Point) -> Point | None:
        """Return a point that satisfies the strong Wolfe conditions.

        If the search finds none, return the lowest point seen, or None if that is the start.
        """
        low, high, best = start, None, start
        # After a short step, this search begins with a shorter one too.
        at = min(1.0, 4.0 * self.reach)
        for _ in range(TRIES):
            value, gradient = self._at(self.x + at * direction)
            point = Point(
                at,
                value,
                float(gradient @ direction) if math.isfinite(value) else math.inf,
                gradient,
            )
            previous = low
            if value < best.value:
                best = point
            if not value <= start.value + LOWER * at * start.slope or (
                low is not start and value >= low.value
            ):
                high = point
            elif abs(point.slope) <= -FLATTER * start.slope:
                return point
            elif point.slope * ((math.inf if high is None else high.at) - low.at) >= 0:
                high, low = low, point
            else:
                low = point
            if high is None:
                at = min(4.0 * at, max(2.0 * at, _minimum(previous, point)))
            else:
                if abs(high.at - low.at) * max(1.0, float(np.abs(direction).max())) < 1e-14 * max(
                    1.0, float(np.abs(self.x).max())
                ):
                    break
                at = _between(low, high)
        return best if best.value < start.value else None

    def _at(self, x: Array) -> tuple[float, Array]:
        self.evaluations += 1
        value, gradient = self.evaluate(x)
        return (
            (value, gradient)
            if math.isfinite(value) and bool(np.isfinite(gradient).all())
            else (math.inf, gradient)
        )


def _minimum(a: Point, b: Point) -> float:
    """Return the position of the minimum of the cubic through two points with their slopes.

    Return NaN if the cubic has no minimum.
    """
    if not math.isfinite(b.value) or a.at == b.at:
        return math.nan
    first = a.slope + b.slope - 3 * (a.value - b.value) / (a.at - b.at)
    # The product may be infinite. first**2 would raise an OverflowError instead.
    square = first * first - a.slope * b.slope
    if square < 0:
        return math.nan
    second = math.copysign(math.sqrt(square), b.at - a.at)
    below = b.slope - a.slope + 2 * second
    return b.at - (b.at - a.at) * (b.slope + second - first) / below if below else math.nan


def _between(low: Point, high: Point) -> float:
    """Return the position of the cubic's minimum between two points, away from both.

    If the function is infinite at ``high``, return a tenth of the way from ``low``.
    """
    width = high.at - low.at
    if not math.isfinite(high.value):
        return low.at + 0.1 * width
    found = (_minimum(low, high) - low.at) / width
    return low.at + width * (min(0.9, max(0.1, found)) if math.isfinite(found) else 0.5)
