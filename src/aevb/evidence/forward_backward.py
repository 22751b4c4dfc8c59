"""Forward-backward algorithm with scaling: log-sum over all paths of a chain, and its gradient.

log Z = log Σ over s₀ … s_T of ψ₀(s₀) Π A_t(s_{t−1}, s_t) e_t(s_t). The gradient by a log-factor is
the posterior probability of the factor's states, so one backward pass gives all gradients. The
recursions loop over steps and compute all rows at once. For long chains with few states they are
solved as banded systems of equations, without a loop in Python.

The recursion uses probabilities, normalised at each step, instead of logarithms. A state whose
probability underflows (10⁻³⁰⁸) is lost. If the transitions into each state differ by at most
``RANGE`` nats, later factors can raise a state against the best one by at most 10²⁰⁰, and the
result is exact up to rounding. For other chains :class:`PathsError` is raised, and the caller falls
back to the recursion in log space.

Arrays are float64 numpy arrays of shape [T, K, N, …]. K counts the joint values of the static
latents, N the rows. An axis of size 1 is shared.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
RANGE = 230.0  # nats between the largest and the smallest transition: a factor of 10^100
# The loop computes all rows at once, the banded system does not loop. The second is faster for
# at least LONG steps and rows · C · (C + 10) at most FEW.
FEW, LONG = 1000, 24
# In a banded system, scales are measured on runs of RUN steps, and sums of probabilities stay
# between 1 / WITHIN and WITHIN, which leaves room for states of 10⁻²⁰⁰ of the best.
RUN, WITHIN = 32, 1e100


class PathsError(ValueError):
    """The sum needs log space: transitions differ too much, or no path has positive probability."""


class ForwardBackward:
    """Scaled forward probabilities; the backward pass runs when gradients are requested."""

    def __init__(self, start: Array, pairs: Array, here: Array, real: Array | None) -> None:
        """Run the forward pass.

        ``start`` [1, K, N, C], ``pairs`` [T or 1, K, N or 1, C, C] (from, to) and ``here`` [T, K,
        N, C] are log-factors. ``real`` [T, 1, N] is the mask of real (not padded) steps.
        """
        # Move the best transition into each state into the state's own factor.
        top = pairs.max(-2)
        if not (pairs - top[..., None, :]).min() >= -RANGE:  # written so that NaN fails the test
            raise PathsError
        here = here + top
        high, first = here.max(-1, keepdims=True), start.max(-1, keepdims=True)
        self.transition, self.emission = np.exp(pairs - top[..., None, :]), np.exp(here - high)
        begin = np.exp(start - first)
        steps, count = len(here), here.shape[-1]
        lead = np.broadcast_shapes(
            *(part.shape[1:3] for part in (start, pairs, here, real) if part is not None)
        )
        self.real = None if real is None else np.broadcast_to(real, (steps, *lead))[..., None]
        self.first = np.broadcast_to(begin[0] / begin[0].sum(-1, keepdims=True), (*lead, count))
        few = steps >= LONG and math.prod(lead) * count * (count + 10) <= FEW
        self.system = (
            BandedSystem(self.first, self.transition, self.emission, self.real) if few else None
        )
        found = None if self.system is None else self.system.forwards()
        if found is None:
            self.system, found = None, self._forwards()
        self.states, self.scales = found
        self.before = np.concatenate([self.first[None], self.states[:-1]])
        total = np.log(self.scales) + high[..., 0]
        total = total if self.real is None else np.where(self.real[..., 0], total, 0.0)
        self.log_sum = total.sum(0) + (first[..., 0] + np.log(begin.sum(-1)))[0]
        if not np.isfinite(self.log_sum).all():
            raise PathsError

    def _forwards(self) -> tuple[Array, Array]:
        """Return p(s_t | data up to t), and the probability of each step's data given the past."""
        steps, shape = len(self.emission), self.first.shape
        states, scales = np.empty((steps, *shape)), np.empty((steps, *shape[:-1], 1))
        state = self.first
        for step in range(steps):
            A = self.transition[step if len(self.transition) > 1 else 0]
            moved = _times(state, A) * self.emission[step]
            scales[step] = moved.sum(-1, keepdims=True)
            moved /= scales[step]
            state = moved if self.real is None else np.where(self.real[step], moved, state)
            states[step] = state
        return states, scales[..., 0]

    def gradients(
        self, weight: Array, shapes: tuple[tuple[int, ...], ...]
    ) -> tuple[Array, Array, Array]:
        """Return the derivative of Σ weight · log Z by ``start``, ``pairs`` and ``here``.

        ``weight`` is [K, N]; ``shapes`` are the shapes of the three arguments.
        """
        b_first, b = self._backwards() if self.system is None else self.system.backwards()
        weight = weight[..., None]
        weighted, there = self.emission * b / self.scales[..., None] * weight, self.states * b
        there = there * weight
        if self.real is not None:
            weighted, there = np.where(self.real, weighted, 0.0), np.where(self.real, there, 0.0)
        # If steps and rows share the transition, one product per value of the static latents is
        # enough.
        if len(self.transition) == 1 and self.transition.shape[2] == 1:
            flat = [
                part.swapaxes(0, 1).reshape(part.shape[1], -1, part.shape[-1])
                for part in (np.broadcast_to(self.before, weighted.shape), weighted)
            ]
            pairs = self.transition * (flat[0].swapaxes(-1, -2) @ flat[1])[None, :, None]
        else:
            pairs = self.transition * (self.before[..., :, None] * weighted[..., None, :])
        first = (self.first * b_first * weight)[None]
        return _fit(first, shapes[0]), _fit(pairs, shapes[1]), _fit(there, shapes[2])

    def _backwards(self) -> tuple[Array, Array]:
        """Return the backward variables b, scaled so that Σ a_t b_t = 1: before step 0, and after.

        The posterior of the states at step t is a_t b_t.
        """
        found, state = np.empty(self.states.shape), np.ones(self.first.shape)
        for step in range(len(found) - 1, -1, -1):
            found[step] = state
            A = self.transition[step if len(self.transition) > 1 else 0]
            seen = self.emission[step] * state / self.scales[step][..., None]
            moved = _times(seen, A.swapaxes(-1, -2))
            state = moved if self.real is None else np.where(self.real[step], moved, state)
        return state, found


class BandedSystem:
    """Both recursions as triangular systems of equations, without a loop over steps.

    a_t = a_{t−1} M_t, with M_t = A_t e_t / c_t, is a linear system in all a_t. Its matrix has ones
    on the diagonal and −M_t below, within a band of 2C. The forward pass solves it, the backward
    pass its transpose. All terms of a sum are positive, so no digits are lost.

    The scales c_t must be roughly known beforehand, to keep all a_t within the range of numbers.
    They are measured on runs of ``RUN`` steps that each start anew.
    """

    def __init__(
        self, first: Array, transition: Array, emission: Array, real: Array | None
    ) -> None:
        """Prepare the system for arrays as in :class:`ForwardBackward`."""
        steps, (*lead, count) = len(emission), first.shape
        moves = transition * emission[..., None, :]
        if real is not None:
            moves = np.where(real[..., None], moves, np.eye(count))
        moves = np.broadcast_to(moves, (steps, *lead, count, count))
        self.lead, self.first = lead, first.reshape(-1, count)
        self.moves = moves.reshape(steps, -1, count, count).swapaxes(0, 1)  # [rows, steps, C, C]
        self.scale = np.ones(self.moves.shape[:2])
        # Element (i, j) of the matrix is band[j, i − j]. The diagonal, band[j, 0], is not read.
        self.band = np.zeros((len(self.first), steps + 1, count, 2 * count))
        for j in range(count):
            self.band[:, :-1, j, count - j : 2 * count - j] = -self.moves[:, :, j]
        self._rescale(self.moves.sum((-1, -2)) / count)

    def forwards(self) -> tuple[Array, Array] | None:
        """Return a_t and c_t; None if probabilities leave the range of numbers."""
        rows, steps, count = self.moves.shape[:3]
        starts = np.arange(RUN, steps, RUN)
        begin = np.full((rows, len(starts), count), 1 / count)
        none = starts[:0]
        for _ in range(3):
            rough = self._solved(starts, begin)
            if rough is None:
                return None
            begin = rough[:, starts]  # a run now starts where the run before it ended
            if (found := self._solved(none, begin[:, none])) is not None:
                return self._by_steps(found[:, 1:]), self._by_steps(self.scale)
        return None

    def backwards(self) -> tuple[Array, Array]:
        """Return the backward variables as :meth:`ForwardBackward._backwards` does."""
        given = np.zeros(self.band.shape[:3])
        given[:, -1] = 1.0
        found = self._solve(given, transposed=True)
        return found[:, 0].reshape(*self.lead, -1), self._by_steps(found[:, 1:])

    def _by_steps(self, rows: Array) -> Array:
        """Reshape [rows, steps, …] to [steps, K, N, …]."""
        return rows.swapaxes(0, 1).reshape(rows.shape[1], *self.lead, *rows.shape[2:])

    def _solved(self, starts: Array, begin: Array) -> Array | None:
        """Return all a_t, where the steps ``starts`` have the values ``begin``, and set the scales.

        Return None if the a_t leave the range of numbers.
        """
        given = np.zeros(self.band.shape[:3])
        given[:, 0] = self.first
        moves = self.moves[:, starts] / self.scale[:, starts, None, None]
        given[:, starts + 1] = (begin[:, :, None] @ moves)[:, :, 0]
        kept = self.band[:, starts]
        self.band[:, starts] = 0.0
        found = self._solve(given)
        self.band[:, starts] = kept
        total = found.sum(-1)
        if not (total.min() > 1 / WITHIN and total.max() < WITHIN):
            return None
        before = total[:, :-1].copy()
        before[:, starts] = 1.0
        self._rescale(total[:, 1:] / before)
        return found / total[..., None]

    def _solve(self, given: Array, *, transposed: bool = False) -> Array:
        from scipy.linalg.blas import dtbsv  # type: ignore[import-untyped]

        width = self.band.shape[-1]
        solution = dtbsv(
            width - 1,
            self.band.reshape(-1, width).T,
            given.reshape(-1),
            lower=1,
            diag=1,
            trans=int(transposed),
            overwrite_x=1,
        )
        return solution.reshape(given.shape)

    def _rescale(self, factor: Array) -> None:
        self.scale *= factor
        self.band[:, :-1] /= factor[..., None, None]


class LogSum(torch.autograd.Function):
    """Autograd function: log Z per row, [K, N], of a chain's log-factors."""

    @staticmethod
    def forward(
        ctx: Any, start: Tensor, pairs: Tensor, here: Tensor, real: Tensor | None
    ) -> Tensor:
        with np.errstate(all="ignore"):
            found = ForwardBackward(
                start.detach().numpy(),
                pairs.detach().numpy(),
                here.detach().numpy(),
                None if real is None else real.numpy(),
            )
        ctx.found, ctx.shapes = found, tuple(tuple(part.shape) for part in (start, pairs, here))
        return torch.from_numpy(found.log_sum)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *weights: Tensor) -> tuple[Tensor | None, ...]:
        with np.errstate(all="ignore"):
            found = ctx.found.gradients(weights[0].numpy(), ctx.shapes)
        return (*(torch.from_numpy(part) for part in found), None)


def _times(state: Array, A: Array) -> Array:
    """Return the product of each row of states, [K, N, C], with its matrix, [K, N or 1, C, C]."""
    return state @ A[..., 0, :, :] if A.shape[-3] == 1 else (state[..., None, :] @ A)[..., 0, :]


def _fit(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Sum a gradient over the axes that its factor shares (size 1)."""
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and gradient.shape[axis] > 1)
    whole = gradient.sum(axes, keepdims=True) if axes else gradient
    return whole if whole.shape == shape else np.array(np.broadcast_to(whole, shape))
