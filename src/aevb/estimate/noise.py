"""Draw all random numbers of an estimate (its noise) before the estimate.

An estimate is then a pure function of (parameters, batch, noise). Two ways of computing it can be
compared on the same noise. In distributed training each example gets the same noise as in a run
with one process, because the noise depends only on its position in the global batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aevb.declare.noise_kinds import KEEP, SEED, STUDENT, NoiseKind, WithParameter
from aevb.derive.plan import Layout
from aevb.runtime import private_torch, seeding


def draw(
    layout: Layout, *, generator: torch.Generator | None, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Draw the noise of a layout, by name.

    All dropout masks with the same probability are drawn in one call, because on a GPU each call
    launches a kernel.
    """
    found: dict[str, Tensor] = {}
    for name, (kind, shape) in layout.items():
        if name in found:
            continue
        same_kind = (
            {other: form for other, (sort, form) in layout.items() if sort == kind}
            if isinstance(kind, WithParameter) and kind.name == KEEP
            else {name: shape}
        )
        if len(same_kind) == 1:
            found[name] = draw_one(kind, shape, generator, device, dtype)
            continue
        sizes = [math.prod(form) for form in same_kind.values()]
        parts = draw_one(kind, (sum(sizes),), generator, device, dtype).split(sizes)
        found |= {
            other: part.view(form)
            for (other, form), part in zip(same_kind.items(), parts, strict=True)
        }
    return found


def fork(seed: Tensor, position: int) -> Tensor:
    """The seed for the rows from a position of the batch on; position 0 keeps the batch's seed."""
    return (seed + position) % 2**62


def draw_one(
    kind: NoiseKind,
    shape: tuple[int, ...],
    generator: torch.Generator | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Draw one tensor of a kind of noise."""
    generator = seeding.generator(device) if generator is None else generator
    name, parameter = (kind, math.nan) if isinstance(kind, str) else kind
    if name == "normal":
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)
    empty = torch.empty(shape, device=device, dtype=dtype)
    tiny = torch.finfo(dtype).tiny
    if name == "gumbel":
        return empty.exponential_(generator=generator).clamp_min_(tiny).log_().neg_()
    if name == "laplace":
        return empty.exponential_(generator=generator) - torch.empty_like(empty).exponential_(
            generator=generator
        )
    if name == "logistic":
        return torch.logit(empty.uniform_(generator=generator), eps=torch.finfo(dtype).eps)
    if name == "uniform":
        return empty.uniform_(generator=generator)
    if name == KEEP:
        return empty.bernoulli_(parameter, generator=generator)
    if name == STUDENT:
        normal = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        gamma = private_torch.gamma(
            torch.full(shape, parameter / 2, device=device, dtype=dtype), generator
        )
        return normal * torch.rsqrt(gamma.clamp_min(tiny) * (2 / parameter))
    if name == SEED:
        return torch.randint(2**62, (), generator=generator, device=device)
    raise ValueError(f"unknown noise {kind!r}")
