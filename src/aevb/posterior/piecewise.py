"""Distributions whose family differs along the batch, and point masses for known values."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributions as td
from torch import Tensor

from aevb.runtime.shapes import broadcast_shapes


class Point(td.Distribution):
    """Point mass on one vector: the log-probability is 0 at that vector and −∞ elsewhere."""

    arg_constraints: ClassVar[dict] = {}

    def __init__(self, value: Tensor) -> None:
        self.value = value
        super().__init__(value.shape[:-1], value.shape[-1:], validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.value

    @property
    def variance(self) -> Tensor:
        return torch.zeros_like(self.value)

    def sample(self, sample_shape=torch.Size()) -> Tensor:  # type: ignore[no-untyped-def]  # noqa: B008
        return self.value.expand(self._extended_shape(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        return torch.where((value == self.value).all(-1), 0.0, -torch.inf).to(self.value.dtype)

    def entropy(self) -> Tensor:
        return self.value.new_zeros(self.batch_shape)


class Pieces(td.Distribution):
    """The distribution ``there`` where the mask is True, ``elsewhere`` in the rest of the batch.

    Both are distributions of vectors of the same size.
    """

    arg_constraints: ClassVar[dict] = {}

    def __init__(self, mask: Tensor, there: td.Distribution, elsewhere: td.Distribution) -> None:
        self.mask, self.there, self.elsewhere = mask, there, elsewhere
        super().__init__(
            torch.Size(broadcast_shapes(mask.shape, there.batch_shape, elsewhere.batch_shape)),
            there.event_shape,
            validate_args=False,
        )

    @property
    def mean(self) -> Tensor:
        return torch.where(self.mask.unsqueeze(-1), self.there.mean, self.elsewhere.mean)

    @property
    def variance(self) -> Tensor:
        return torch.where(self.mask.unsqueeze(-1), self.there.variance, self.elsewhere.variance)

    def sample(self, sample_shape=torch.Size()) -> Tensor:  # type: ignore[no-untyped-def]  # noqa: B008
        return torch.where(
            self.mask.unsqueeze(-1),
            self.there.sample(sample_shape),
            self.elsewhere.sample(sample_shape),
        )

    def log_prob(self, value: Tensor) -> Tensor:
        return torch.where(self.mask, self.there.log_prob(value), self.elsewhere.log_prob(value))

    def entropy(self) -> Tensor:
        return torch.where(self.mask, self.there.entropy(), self.elsewhere.entropy())

    def __repr__(self) -> str:
        return (
            f"Pieces({self.there} at {int(self.mask.sum())} of {self.mask.numel()} places, "
            f"elsewhere {self.elsewhere})"
        )
