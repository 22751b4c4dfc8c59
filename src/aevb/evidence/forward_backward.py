"""Forward-backward algorithm with scaling: log-sum over all paths of a chain, and its gradient.

log Z = log Σ over s₀ … s_T of ψ₀(s₀) Π A_t(s_{t−1}, s_t) e_t(s_t). The gradient by a log-factor is
the posterior probability of the factor's states, so one backward pass gives all gradients. Long
chains with few states are cut into blocks that are processed in parallel, which takes √T sequential
steps instead of T.

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
# a chain is cut into blocks if it has at most FEW numbers per step and at least LONG steps
FEW, LONG = 300, 48


class PathsError(ValueError):
    """The sum needs log space: transitions differ too much, or no path has positive probability."""


class ForwardBackward:
    """Scaled forward probabilities; the backward pass runs when gradients are requested."""

    def __init__(self, start: Array, pairs: Array, here: Array, real: Array | None) -> None:
        """Run the forward pass.

        ``start`` [1, K, N, C], ``pairs`` [T or 1, K, N or 1, C, C] (from, to) and ``here`` [T, K,
        N, C] are log-factors. ``real`` [T, 1, N] is the mask of real (not padded) steps.
        """
        steps, count = len(here), here.shape[-1]
        # the best transition into each state is moved into the state's own factor
        top = pairs.max(-2)
        if not (pairs - top[..., None, :]).min() >= -RANGE:  # written so that NaN fails the test
            raise PathsError
        here = here + top
        high, first = here.max(-1, keepdims=True), start.max(-1, keepdims=True)
        self.transition, self.emission = np.exp(pairs - top[..., None, :]), np.exp(here - high)
        self.start, self.steps = np.exp(start - first), steps
        lead = np.broadcast_shapes(
            *(part.shape[1:3] for part in (start, pairs, here, real) if part is not None)
        )
        blocks = (
            max(1, math.isqrt(steps)) if steps >= LONG and math.prod(lead) * count**2 <= FEW else 1
        )
        self.length = -(-steps // blocks)
        self.blocks = -(-steps // self.length)
        shared = len(pairs) == 1
        ones = (
            np.ones((steps, *lead), dtype=bool)
            if real is None
            else np.broadcast_to(real, (steps, *lead))
        )
        self.real = (
            None
            if real is None and self.blocks * self.length == steps
            else self._cut(ones[..., None])
        )
        self.A = self.transition[None] if shared else self._cut(self.transition)
        self.e = self._cut(np.broadcast_to(self.emission, (steps, *lead, count)))
        self.lead, self.count = lead, count
        self._forwards()
        total = np.log(self.scales) + high[..., 0]
        total = total if real is None else np.where(ones, total, 0.0)
        self.log_sum = total.sum(0) + (first[..., 0] + np.log(self.start.sum(-1)))[0]
        if not np.isfinite(self.log_sum).all():
            raise PathsError

    def _cut(self, whole: Array) -> Array:
        """Reshape [T, …] to [steps per block, blocks, …], padded with zeros."""
        more = self.length * self.blocks - len(whole)
        padded = (
            np.concatenate([whole, np.zeros((more, *whole.shape[1:]), whole.dtype)])
            if more
            else whole
        )
        return padded.reshape(self.blocks, self.length, *whole.shape[1:]).swapaxes(0, 1)

    def _joined(self, blocks: Array) -> Array:
        return blocks.swapaxes(0, 1).reshape(-1, *blocks.shape[2:])[: self.steps]

    def _move(self, state: Array, step: int) -> Array:
        """Advance probabilities, [.., C], by one step, without normalising."""
        A = self.A[step if len(self.A) > 1 else 0]
        return (
            state @ A[..., 0, :, :] if A.shape[-3] == 1 else (state[..., None, :] @ A)[..., 0, :]
        ) * self.e[step]

    def _back(self, state: Array, step: int) -> Array:
        A = self.A[step if len(self.A) > 1 else 0].swapaxes(-1, -2)
        seen = self.e[step] * state
        return seen @ A[..., 0, :, :] if A.shape[-3] == 1 else (seen[..., None, :] @ A)[..., 0, :]

    def _forwards(self) -> None:
        shape = (self.blocks, *self.lead, self.count)
        first = np.broadcast_to(self.start[0] / self.start[0].sum(-1, keepdims=True), shape[1:])
        began = np.empty(shape)
        began[0] = first
        if self.blocks > 1:
            self.products = self._products()
            for block in range(1, self.blocks):
                state = (began[block - 1][..., None, :] @ self.products[block - 1])[..., 0, :]
                began[block] = state / state.sum(-1, keepdims=True)
        states, scales = np.empty((self.length, *shape)), np.empty((self.length, *shape[:-1]))
        state = began
        for step in range(self.length):
            moved = self._move(state, step)
            scale = moved.sum(-1, keepdims=True)
            moved /= scale
            state = moved if self.real is None else np.where(self.real[step], moved, state)
            states[step], scales[step] = state, scale[..., 0]
        self.states = self._joined(states)
        self.scales = self._joined(scales)
        self.before = np.concatenate([first[None], self.states[:-1]])

    def _products(self) -> Array:
        """Return the product of each block's transition matrices, up to a factor."""
        found = np.broadcast_to(
            np.eye(self.count), (self.blocks, *self.lead, self.count, self.count)
        )
        for step in range(self.length):
            A = self.A[step if len(self.A) > 1 else 0]
            moved = (found @ A) * self.e[step][..., None, :]
            moved = moved / moved.sum((-1, -2), keepdims=True)
            found = (
                moved if self.real is None else np.where(self.real[step][..., None], moved, found)
            )
        return found

    def gradients(
        self, weight: Array, shapes: tuple[tuple[int, ...], ...]
    ) -> tuple[Array, Array, Array]:
        """Return the derivative of Σ weight · log Z by ``start``, ``pairs`` and ``here``.

        ``weight`` is [K, N]; ``shapes`` are the shapes of the three arguments.
        """
        seen = self._backwards()  # e_t b_t / c_t
        weighted, there = (
            seen * weight[None, :, :, None],
            self.states * self.b * weight[None, :, :, None],
        )
        if self.real is not None:
            real = self._joined(self.real)
            weighted, there = np.where(real, weighted, 0.0), np.where(real, there, 0.0)
        # shared by steps and rows: one product per value of the static latents
        if len(self.transition) == 1 and self.transition.shape[2] == 1:
            flat = [
                part.swapaxes(0, 1).reshape(part.shape[1], -1, self.count)
                for part in (np.broadcast_to(self.before, weighted.shape), weighted)
            ]
            pairs = self.transition * (flat[0].swapaxes(-1, -2) @ flat[1])[None, :, None]
        else:
            pairs = self.transition * (self.before[..., :, None] * weighted[..., None, :])
        first = (self.before[0] * self.b_first * weight[..., None])[None]
        return _fit(first, shapes[0]), _fit(pairs, shapes[1]), _fit(there, shapes[2])

    def _backwards(self) -> Array:
        """Compute the backward variables b_t, scaled so that Σ a_t b_t = 1; return e_t b_t / c_t.

        The posterior of the states at step t is a_t b_t.
        """
        shape = (self.blocks, *self.lead, self.count)
        ended, length = np.empty(shape), self.length
        ended[-1] = 1.0
        for block in range(self.blocks - 1, 0, -1):
            state = (self.products[block] @ ended[block][..., None])[..., 0]
            ended[block - 1] = state / (self.states[block * length - 1] * state).sum(
                -1, keepdims=True
            )
        found, state = np.empty((length, *shape)), ended
        scales = self._cut(self.scales)[..., None]
        if self.real is not None:
            scales = np.where(self.real, scales, 1.0)
        for step in range(length - 1, -1, -1):
            found[step] = state
            moved = self._back(state, step) / scales[step]
            state = moved if self.real is None else np.where(self.real[step], moved, state)
        self.b, self.b_first = self._joined(found), state[0]
        return self.emission * self.b / self.scales[..., None]


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


def _fit(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Sum a gradient over the axes that its factor shares (size 1)."""
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and gradient.shape[axis] > 1)
    whole = gradient.sum(axes, keepdims=True) if axes else gradient
    return whole if whole.shape == shape else np.array(np.broadcast_to(whole, shape))
