"""Kalman filter and smoother of a linear-Gaussian chain: log-likelihood, score, moments.

The chain is u_t = F_t u_{t−1} + c_t + N(0, Q_t), y_t = H_t u_t + d_t + N(0, R_t), with u_0 ~
N(m, P) before the first step. Covariances and Kalman gains do not depend on y. Rows with
the same missing entries therefore share them. Where the matrices are constant over time, the
covariance recursion stops as soon as it reaches its steady state. Only a linear recursion for the
mean is then left per row.

The score (the gradient of the log-likelihood by the matrices) comes from the disturbance smoother,
without automatic differentiation. Let λ_t be the derivative of log p(y_t … y_T | y_1 … y_{t−1}) by
the predicted mean of u_t, and −N_t the second derivative. The derivative by the predicted
covariance is ½ (λλᵀ − N), because a Gaussian density solves the heat equation. λ and N follow from
a linear recursion backwards in time. All derivatives and smoothed moments are products of λ, N and
the filter's matrices, so no covariance of u is inverted.

The covariance update P − K H P loses digits if the data are far more precise than the prediction,
for example after a diffuse prior. The first pass measures the loss. If it is too large, a second
pass runs a square-root filter, which replaces the subtraction by QR decompositions.

Arrays are float64 numpy arrays of shape [T, K, N, …]. K counts the joint values of the discrete
latents, N the rows. An axis of size 1 is shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
LOG_2PI = math.log(2 * math.pi)
SETTLED = 1e-14  # relative change per step below which a covariance counts as constant
LONG = 16  # shortest run of steps with constant matrices that is handled as one block
EVERY = 8  # steps between two checks for the steady state
# Largest growth of rounding errors in the first pass. If it is exceeded, the square-root filter
# runs.
LOSS = 1e6


class Chain(NamedTuple):
    """Matrices and data of a chain; ``keep`` is 1 at known entries of y, None if all are known."""

    F: Any  # [T or 1, K or 1, N or 1, D, D]
    c: Any  # [T or 1, K or 1, N or 1, D]
    Q: Any
    H: Any  # [.., M, D]
    d: Any
    R: Any
    mean: Any  # [1, K or 1, N or 1, D], of u before the first step
    covariance: Any
    y: Any  # [T, 1, N, M]
    keep: Any = None


class ChainError(ValueError):
    """An innovation covariance S_t = H P Hᵀ + R is not positive definite."""


class Smoother:
    """Kalman filter forwards, disturbance smoother backwards.

    Matrices are stored per group of rows, [T, K, G, …]; vectors are stored per row, [T, K, N, …].
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.steps, _, self.n, self.m = chain.y.shape
        matrices = (chain.F, chain.Q, chain.H, chain.R, chain.covariance)
        self.k = max(part.shape[1] for part in (*matrices, chain.c, chain.d, chain.mean))
        self.own = max(part.shape[2] for part in matrices) > 1  # matrices differ between rows
        self.group, keep = self._groups()
        self.F, self.Q = chain.F, chain.Q
        self.H, self.R = chain.H, chain.R
        self.known: Array | float = float(self.m)
        self.keep = keep
        # A missing entry gets unit variance, zero covariance and zero residual.
        if keep is not None:
            self.H = chain.H * keep[..., None]
            self.R = (
                chain.R * keep[..., None] * keep[..., None, :]
                + np.eye(self.m) * (1 - keep)[..., None]
            )
            self.known = chain.keep.sum(-1)
        # L⁻¹ with L Lᵀ = S, [T, K, G, M, M]; set by the square-root filter only
        self.whitener: Array | None = None
        accurate = self._accurate_at_start()
        if accurate:
            try:
                self._covariances()
                accurate = self._accurate()
            except ChainError:
                accurate = False
        if not accurate:
            self._square_roots()
        # Φ_t = (I − K_t H_t) F_t maps the filtered mean one step ahead
        self.closed = self.F - self.gain @ (self.H @ self.F)
        self._means()

    def _groups(self) -> tuple[Array | None, Array | None]:
        """Group rows by pattern of missing entries: each row's group, and each group's mask.

        The group is None if there is one group only, or if every row is its own group.
        """
        keep = self.chain.keep
        if self.own or keep is None or self.n == 1:
            return None, keep
        patterns, group = np.unique(
            np.swapaxes(keep[:, 0], 0, 1).reshape(self.n, -1), axis=0, return_inverse=True
        )
        shared = np.swapaxes(patterns.reshape(len(patterns), self.steps, self.m), 0, 1)[:, None]
        if len(patterns) == self.n:
            return None, keep
        return (None if len(patterns) == 1 else group), np.ascontiguousarray(shared)

    # Forward pass ---------------------------------------------------------------------------------

    def _covariances(self) -> None:
        """Compute predicted and filtered covariances, Kalman gains and innovation precisions."""
        lead = np.broadcast_shapes(
            *(part.shape[1:3] for part in (self.F, self.Q, self.H, self.R, self.chain.covariance))
        )
        size, steps = self.Q.shape[-1], self.steps
        single = lead == (1, 1)
        if single and size == self.m == 1:  # scalar recursion
            found = _numbers(
                steps, float(self.chain.covariance.item()), self.F, self.Q, self.H, self.R
            )
            self.predicted, self.filtered, self.gain, self.precision, self.covariance = (
                part.reshape(-1, 1, 1, 1, 1) for part in found
            )
            self.log_det = np.log(self.covariance[..., 0, 0])
            return
        # np.dot of two small matrices is much faster than np.matmul of stacks.
        product, lead = (np.dot, ()) if single else (np.matmul, lead)
        predicted, filtered = (
            np.empty((steps, *lead, size, size)),
            np.empty((steps, *lead, size, size)),
        )
        gains, precisions = (
            np.empty((steps, *lead, size, self.m)),
            np.empty((steps, *lead, self.m, self.m)),
        )
        covariances = np.empty_like(precisions)
        every = [part[:, 0, 0] if single else part for part in (self.F, self.Q, self.H, self.R)]
        F, Q, H, R, back, up = (
            _each(part, steps) for part in (*every, _transposed(every[0]), _transposed(every[2]))
        )
        last = _constant_until(steps, self.F, self.Q, self.H, self.R)
        before, t = self.chain.covariance[0, 0, 0] if single else self.chain.covariance[0], 0
        while t < steps:
            P = product(product(F[t], before), back[t]) + Q[t]
            cross = product(H[t], P)
            S = product(cross, up[t]) + R[t]
            inverse = 1 / S if self.m == 1 else _inverse(S)
            gain = product(_transposed(cross), inverse)
            before = P - product(gain, cross)
            predicted[t], filtered[t], gains[t], precisions[t], covariances[t] = (
                P,
                before,
                gain,
                inverse,
                S,
            )
            if t % EVERY == 1 and last[t - 1] == last[t] > t and _close(P, predicted[t - 1]):
                end = last[t] + 1
                for whole in (predicted, filtered, gains, precisions, covariances):
                    whole[t + 1 : end] = whole[t]
                t = end - 1
            t += 1
        if single:
            predicted, filtered, gains, precisions, covariances = (
                whole[:, None, None]
                for whole in (predicted, filtered, gains, precisions, covariances)
            )
        try:
            factors = np.linalg.cholesky(covariances)
        except np.linalg.LinAlgError:
            raise ChainError("an innovation covariance is not positive definite") from None
        self.log_det = 2 * np.log(np.diagonal(factors, axis1=-2, axis2=-1)).sum(-1)
        self.predicted, self.filtered, self.gain, self.precision, self.covariance = (
            predicted,
            filtered,
            gains,
            precisions,
            covariances,
        )

    def _accurate(self) -> bool:
        """Return whether the covariances of the first pass kept enough digits.

        The rounding error of S = H P Hᵀ + R is about ε (|H| √diag P)², which must be small against
        R. Inverting S multiplies errors by S_ii (S⁻¹)_ii.
        """
        if self._scalar():
            return True  # the scalar recursion subtracts nothing
        # Take the maximum over all steps, so that one product is enough.
        if not self._within_reach(_diagonal(self.predicted).max(0)):
            return False
        return self.m == 1 or bool(
            (_diagonal(self.covariance) * _diagonal(self.precision) <= LOSS).all()
        )

    def _scalar(self) -> bool:
        """Return whether one scalar recursion gives all covariances."""
        matrices = (self.F, self.Q, self.H, self.R, self.chain.covariance)
        return self.Q.shape[-1] == self.m == 1 and all(
            part.shape[1:3] == (1, 1) for part in matrices
        )

    def _accurate_at_start(self) -> bool:
        """Return whether the first step keeps enough digits; a nearly flat prior does not.

        The first pass would then be in vain.
        """
        if self._scalar():
            return True
        F, before = self.F[0], self.chain.covariance[0]
        return self._within_reach(_diagonal(F @ before @ _transposed(F) + self.Q[0]))

    def _within_reach(self, variances: Array) -> bool:
        """Return whether predictions with these variances lose few digits at the data."""
        spread = np.sqrt(variances)[..., None]
        reach = (np.abs(self.H) @ spread)[..., 0] ** 2
        small = _diagonal(self.R)
        if self.m > 1 and np.count_nonzero(self.R - small[..., None] * np.eye(self.m)):
            try:
                small = 1 / _diagonal(np.linalg.inv(self.R))
            except np.linalg.LinAlgError:
                return False
        return bool((reach <= LOSS * small).all())  # written so that NaN fails the test

    def _square_roots(self) -> None:
        """Compute the same quantities by the square-root (array) Kalman filter.

        With P = A Aᵀ, R = B Bᵀ and S = L Lᵀ, the QR decomposition of [[AᵀHᵀ, Aᵀ], [Bᵀ, 0]] has the
        triangular factor [[Lᵀ, L⁻¹HP], [0, Cᵀ]], and C Cᵀ is the filtered covariance.
        """
        lead = np.broadcast_shapes(
            *(part.shape[1:3] for part in (self.F, self.Q, self.H, self.R, self.chain.covariance))
        )
        size, m, steps = self.Q.shape[-1], self.m, self.steps
        F, H, noise, seen = (
            _each(part, steps) for part in (self.F, self.H, _root(self.Q), _root(self.R))
        )
        last = _constant_until(steps, self.F, self.Q, self.H, self.R)
        predicted, arrays = (
            np.empty((steps, *lead, size, size)),
            np.empty((steps, *lead, m + size, m + size)),
        )
        before, t = _root(self.chain.covariance[0]), 0
        # Rows of large norm come first, which is numerically most accurate.
        rows = np.zeros((*lead, 2 * size + m, m + size))
        while t < steps:
            rows[..., :size, m:] = _transposed(F[t] @ before)
            rows[..., size:-m, m:] = _transposed(noise[t])
            rows[..., :-m, :m] = rows[..., :-m, m:] @ _transposed(H[t])
            rows[..., -m:, :m] = _transposed(seen[t])
            predicted[t] = _transposed(rows[..., :-m, m:]) @ rows[..., :-m, m:]
            arrays[t] = _triangular(rows)
            before = _transposed(arrays[t][..., m:, m:])
            if (
                t % EVERY == 1
                and last[t - 1] == last[t] > t
                and _close(predicted[t], predicted[t - 1])
            ):
                end = last[t] + 1
                predicted[t + 1 : end], arrays[t + 1 : end] = predicted[t], arrays[t]
                t = end - 1
            t += 1
        L, after = _transposed(arrays[..., :m, :m]), arrays[..., m:, m:]
        pivots = np.abs(_diagonal(L))
        if not (pivots > SETTLED * np.sqrt((L * L).sum(-1))).all():
            raise ChainError("an innovation covariance is not positive definite")
        self.whitener = _lower_inverse(L)
        self.log_det = 2 * np.log(pivots).sum(-1)
        self.predicted, self.filtered = predicted, _transposed(after) @ after
        self.gain = _transposed(arrays[..., :m, m:]) @ self.whitener
        self.precision = _transposed(self.whitener) @ self.whitener

    def _means(self) -> None:
        """Compute filtered means, innovations and the log-likelihood per row, [K, N]."""
        chain, steps = self.chain, self.steps
        first = chain.y - _apply(self._rows(self.H), chain.c) - chain.d
        if chain.keep is not None:
            first = first * chain.keep
        drive = chain.c + _apply(self._rows(self.gain), first)
        start = np.broadcast_to(chain.mean[0], (self.k, self.n, drive.shape[-1]))
        self.mean = _linear(self._rows(self.closed), drive, start)
        before = np.concatenate([start[None], self.mean[:-1]])
        self.ahead = _apply(self._rows(self.F), before) + chain.c
        self.innovation = chain.y - _apply(self._rows(self.H), self.ahead) - chain.d
        if chain.keep is not None:
            self.innovation = self.innovation * chain.keep
        if self.whitener is None:
            self.white = _apply(self._rows(self.precision), self.innovation)
            squares = (self.white * self.innovation).sum(-1)
        else:  # the product S⁻¹ · innovation would cancel for large innovations
            half = _apply(self._rows(self.whitener), self.innovation)
            self.white = _apply(_transposed(self._rows(self.whitener)), half)
            squares = (half * half).sum(-1)
        total = -0.5 * (
            squares + self._rows(self.log_det[..., None])[..., 0] + self.known * LOG_2PI
        )
        self.before = before
        self.increments = np.broadcast_to(
            total, (steps, self.k, self.n)
        )  # log p(y_t | y_1 … y_{t−1})
        self.log_likelihood = self.increments.sum(0)

    # Backward pass --------------------------------------------------------------------------------

    def backwards(self) -> None:
        """Run the disturbance smoother: λ and N per step, and the same by y (``u`` and ``D``)."""
        drive = _apply(
            _transposed(self._rows(self.F)), _apply(_transposed(self._rows(self.H)), self.white)
        )
        zero = np.zeros(drive.shape[1:])
        closed = _transposed(self._rows(self.closed))
        # ρ_{t−1}: derivative by the filtered mean
        back = _linear(closed[::-1], drive[::-1], zero)[::-1]
        self.after_mean = np.concatenate([back[1:], zero[None]])  # ρ_t
        self.start_mean = back[0]
        seen = self.H @ self.F
        inside = _transposed(seen) @ self.precision @ seen
        curved = _congruent(self.closed, inside)
        self.after_curvature = np.concatenate([curved[1:], np.zeros((1, *curved.shape[1:]))])  # M_t
        self.start_curvature = curved[0]
        self.u = self.white - _apply(_transposed(self._rows(self.gain)), self.after_mean)
        self.score = self.after_mean + _apply(_transposed(self._rows(self.H)), self.u)  # λ_t
        left = self.left = _transposed(self.gain) @ self.after_curvature
        self.D = self.precision + left @ self.gain
        # N = (I − KH)ᵀ M (I − KH) + Hᵀ S⁻¹ H, from products that exist already
        if self.whitener is None:
            self.curvature = (
                self.after_curvature
                - _transposed(left) @ self.H
                - _transposed(self.H) @ (left - self.D @ self.H)
            )
        else:  # as a sum of squares, which does not cancel
            rest, white = np.eye(self.F.shape[-2]) - self.gain @ self.H, self.whitener @ self.H
            self.curvature = (
                _transposed(rest) @ self.after_curvature @ rest + _transposed(white) @ white
            )

    def smoothed(self) -> tuple[Array, Array]:
        """Return E[u_t | y_1 … y_T], [T, K, N, D], and its covariance, [T, K, G, D, D]."""
        self.backwards()
        return (
            self._smoothed_mean(),
            self.filtered - self.filtered @ self.after_curvature @ self.filtered,
        )

    def by_row(self, matrices: Array) -> Array:
        """Expand matrices per group of rows to matrices per row; shared ones keep an axis of 1."""
        return self._rows(matrices)

    def _smoothed_mean(self) -> Array:
        return self.mean + _apply(self._rows(self.filtered), self.after_mean)

    def gradients(self, weight: Array) -> Chain:
        """Return the derivative of Σ weight · log-likelihood by every part of the chain.

        ``weight`` is [K, N]. Each derivative has the shape of its part.
        """
        chain = self.chain
        self.backwards()
        w, share = weight[None, :, :, None], self._sums(weight)[None, :, :, None, None]
        previous = np.concatenate(
            [np.broadcast_to(chain.covariance, (1, *self.filtered.shape[1:])), self.filtered[:-1]]
        )
        smooth_before = self.before + _apply(
            self._rows(previous), np.concatenate([self.start_mean[None], self.after_mean[:-1]])
        )
        D = self.D if self.keep is None else self.D * self.keep[..., None] * self.keep[..., None, :]

        def fitted(a: Array, b: Array, matrices: Array, shape: tuple[int, ...]) -> Array:
            """Sum weight · (a bᵀ + the group's matrix) over rows, in the part's shape."""
            outer, whole = w * a, share * matrices
            if self.own:
                return _fit(outer[..., :, None] * b[..., None, :] + whole, shape)
            return _fit(
                (_transposed(outer) @ b)[..., None, :, :] + whole.sum(2, keepdims=True), shape
            )

        return Chain(
            F=fitted(
                self.score, smooth_before, -self.curvature @ (self.F @ previous), chain.F.shape
            ),
            c=_fit(w * self.score, chain.c.shape),
            Q=fitted(0.5 * self.score, self.score, -0.5 * self.curvature, chain.Q.shape),
            H=fitted(
                self.u,
                self._smoothed_mean(),
                self.left @ self.filtered - _transposed(self.gain),
                chain.H.shape,
            ),
            d=_fit(w * self.u, chain.d.shape),
            R=fitted(0.5 * self.u, self.u, -0.5 * D, chain.R.shape),
            mean=_fit(w * self.start_mean[None], chain.mean.shape),
            covariance=fitted(
                0.5 * self.start_mean[None],
                self.start_mean[None],
                -0.5 * self.start_curvature[None],
                chain.covariance.shape,
            ),
            y=None,
        )

    def _rows(self, matrices: Array) -> Array:
        """Expand matrices per group to matrices per row."""
        return (
            matrices if self.group is None or matrices.shape[2] == 1 else matrices[:, :, self.group]
        )

    def _sums(self, weight: Array) -> Array:
        """Sum the rows' weights within each group, [K, G]."""
        groups = self.predicted.shape[2]
        if groups == 1:
            return weight.sum(1, keepdims=True)
        if self.group is None:
            return weight
        return np.stack([np.bincount(self.group, row, groups) for row in weight])


class LogLikelihood(torch.autograd.Function):
    """Autograd function: the log-likelihood per row, [K, N], of a chain's tensors."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor | None) -> Tensor:
        with np.errstate(all="ignore"):  # an overflow shows up as inf or NaN in the result
            smoother = Smoother(
                Chain(*(None if part is None else part.detach().numpy() for part in parts))
            )
        ctx.smoother = smoother
        return torch.from_numpy(smoother.log_likelihood)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *weights: Tensor) -> tuple[Tensor | None, ...]:
        with np.errstate(all="ignore"):
            found = ctx.smoother.gradients(weights[0].numpy())
        return tuple(None if part is None else torch.from_numpy(part) for part in found)


# Recursions over time -----------------------------------------------------------------------------


def _each(part: Array, steps: int) -> Any:
    return part if len(part) > 1 else [part[0]] * steps


def _constant_until(steps: int, *parts: Array) -> list[int]:
    """Return, for each step, the last step up to which all matrices stay the same."""
    change = np.zeros(steps, dtype=bool)
    for part in parts:
        if len(part) > 1:
            change[1:] |= (part[1:] != part[:-1]).reshape(steps - 1, -1).any(1)
    ends = np.append(np.flatnonzero(change) - 1, steps - 1)
    return [int(end) for end in ends[np.searchsorted(ends, np.arange(steps))]]


def _close(a: Array, b: Array) -> bool:
    """Return whether a covariance stopped changing.

    The change of each entry is measured relative to the standard deviations of its row and column.
    """
    change = np.abs(a - b)
    # This cheap test nearly always decides. The largest entry is a variance.
    if not change.max() <= SETTLED * a.max():
        return False
    spread = np.sqrt(_diagonal(a))
    return bool((change <= SETTLED * spread[..., :, None] * spread[..., None, :]).all())


def _numbers(steps: int, before: float, *every: Array) -> tuple[Array, ...]:
    """Run the covariance recursion for a scalar state and a scalar observation.

    Returns predicted and filtered variances, gains, innovation precisions and variances.
    """
    F, Q, H, R = (np.broadcast_to(part.ravel(), steps) for part in every)
    predicted = []
    for f, q, h, r in zip(F.tolist(), Q.tolist(), H.tolist(), R.tolist(), strict=True):
        P = f * f * before + q
        S = h * h * P + r
        if not S > 0:
            raise ChainError("an innovation covariance is not positive definite")
        before = P * r / S
        predicted.append(P)
    P = np.array(predicted)
    S = H * H * P + R
    return P, P * R / S, P * H / S, 1 / S, S


def _inverse(S: Array) -> Array:
    if S.ndim == 2:  # numpy's checks take longer than inverting a small matrix
        from scipy.linalg.lapack import dposv  # type: ignore[import-untyped]

        _, found, failed = dposv(S, np.eye(len(S)), lower=1)
    else:
        try:
            found, failed = np.linalg.inv(S), 0
        except np.linalg.LinAlgError:
            failed = 1
    if failed:
        raise ChainError("an innovation covariance is not positive definite")
    whole: Array = found
    return whole


def _root(covariances: Array) -> Array:
    """Cholesky factor L, L Lᵀ = covariance, of a possibly singular covariance.

    A variable that is a linear function of the previous ones gets a column of zeros.
    """
    found = np.zeros_like(covariances)
    for j in range(covariances.shape[-1]):
        rest = covariances[..., j:, j] - (found[..., j:, :j] @ found[..., j, :j, None])[..., 0]
        pivot = rest[..., :1]
        there = pivot > SETTLED * covariances[..., j, j, None]
        found[..., j:, j] = np.where(there, rest / np.sqrt(np.where(there, pivot, 1.0)), 0.0)
    return found


def _triangular(rows: Array) -> Array:
    """Return the triangular factor of the QR decomposition of [.., n, k] with n ≥ k."""
    if rows.ndim == 4 and rows.shape[:2] == (1, 1):  # numpy takes longer than the decomposition
        from scipy.linalg.lapack import dgeqrf

        found = dgeqrf(rows[0, 0])[0]
        size = found.shape[1]
        upper: Any = np.where(np.arange(size)[:, None] <= np.arange(size), found[:size], 0.0)
        return upper[None, None]
    whole: Any = np.linalg.qr(rows, mode="r")
    return whole


def _lower_inverse(L: Array) -> Array:
    """Invert lower triangular matrices, row by row."""
    found = np.zeros_like(L)
    for i in range(L.shape[-1]):
        found[..., i, :] = -(L[..., None, i, :i] @ found[..., :i, :])[..., 0, :]
        found[..., i, i] = 1.0
        found[..., i, :] /= L[..., i, i, None]
    return found


def _diagonal(matrices: Array) -> Array:
    return matrices.diagonal(axis1=-2, axis2=-1)


def _apply(matrix: Array, vectors: Array) -> Array:
    """Multiply [.., N or 1, a, b] by [.., N, b]; one product if all rows share the matrix."""
    if matrix.shape[-3] == 1:
        return vectors @ _transposed(matrix[..., 0, :, :])
    return (matrix @ vectors[..., None])[..., 0]


def _runs(*matrices: Array) -> Iterator[tuple[int, int, bool]]:
    """Split the steps into runs (begin, end, constant).

    A run is constant if the matrices stay the same for at least LONG steps.
    """
    change = np.zeros(len(matrices[0]) - 1, dtype=bool)
    for part in matrices:
        change |= (part[1:] != part[:-1]).any(tuple(range(1, part.ndim)))
    edges = np.concatenate([[0], np.flatnonzero(change) + 1, [len(change) + 1]])
    done = 0
    for place in np.flatnonzero(np.diff(edges) >= LONG):
        begin, end = int(edges[place]), int(edges[place + 1])
        if done < begin:
            yield done, begin, False
        yield begin, end, True
        done = end
    if done <= len(change):
        yield done, len(change) + 1, False


def _linear(matrices: Array, drive: Array, start: Array) -> Array:
    """Solve m_t = A_t m_{t−1} + b_t for all steps, by doubling over runs of constant A."""
    steps = len(matrices)
    found = np.empty((steps, *np.broadcast_shapes(drive.shape[1:], start.shape)))
    last = start
    for begin, end, constant in _runs(matrices):
        if not constant:
            if found[0].size == 1:
                found[begin:end] = _recursion(
                    matrices[begin:end], drive[begin:end], float(last.flat[0])
                )
            # Compute one matrix product per step.
            elif found.shape[1] == matrices.shape[1] == matrices.shape[2] == 1:
                across, alone = _transposed(matrices[:, 0, 0]), last[0]
                for t in range(begin, end):
                    found[t, 0] = alone = np.dot(alone, across[t]) + drive[t, 0]
            else:
                for t in range(begin, end):
                    found[t] = _apply(matrices[t], found[t - 1] if t else start) + drive[t]
            last = found[end - 1]
            continue
        part = found[begin:end]
        part[...] = drive[begin:end]
        part[0] += _apply(matrices[begin], last)
        power, reach = matrices[begin], 1
        while reach < end - begin:
            # The addition in place is safe, because numpy buffers overlapping operands.
            part[reach:] += _apply(power, part[:-reach])
            power, reach = power @ power, 2 * reach
        last = part[-1]
    return found


def _recursion(factors: Array, drive: Array, last: float) -> Array:
    """Solve the scalar linear recursion, [T, 1, 1, 1]."""
    pairs = zip(factors.ravel().tolist(), drive.ravel().tolist(), strict=True)
    return np.array([last := factor * last + more for factor, more in pairs]).reshape(-1, 1, 1, 1)


def _congruent(matrices: Array, inside: Array) -> Array:
    """Solve M_t = A_tᵀ M_{t+1} A_t + W_t from the last step to the first.

    In a run of constant A and W, the recursion stops once M no longer changes.
    """
    whole = np.empty_like(inside)
    single = inside.shape[1:3] == (1, 1)
    found, matrices, inside, product = (
        (whole[:, 0, 0], matrices[:, 0, 0], inside[:, 0, 0], np.dot)
        if single
        else (whole, matrices, inside, np.matmul)
    )
    after = np.zeros_like(inside[0])
    if inside[0].size == 1:
        return _recursion(matrices[::-1] ** 2, inside[::-1], 0.0).reshape(whole.shape)[::-1]
    across = _transposed(matrices)
    for begin, end, constant in reversed(list(_runs(matrices, inside))):
        for t in range(end - 1, begin - 1, -1):
            before, after = after, product(product(across[t], after), matrices[t]) + inside[t]
            found[t] = after
            if constant and t % EVERY == 0 and t < end - 1 and _close(after, before):
                found[begin:t] = after
                break
    return whole


def _transposed(matrices: Array) -> Array:
    return matrices.swapaxes(-1, -2)


def _fit(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Sum a gradient over the axes that its part shares (size 1)."""
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and gradient.shape[axis] > 1)
    whole = gradient.sum(axes, keepdims=True) if axes else gradient
    return whole if whole.shape == shape else np.array(np.broadcast_to(whole, shape))
