"""Dropout in a module of the user, with masks from the noise of an estimate.

torch's dropout draws from a global generator. An estimate is a function of its noise instead, so
that a run is a function of its seed, and a step can be recorded. The dropout layers of a wrapped
module are therefore replaced by :class:`Dropout`, which takes the next mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn

# Per thread, because another thread may evaluate the same model without dropout.
_masks: ContextVar[Iterator[Tensor] | None] = ContextVar("masks of dropout", default=None)
_asked: ContextVar[list[tuple[float, int]] | None] = ContextVar("dropout layers", default=None)
ENTRIES = (nn.Dropout,)
CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Dropout(nn.Module):
    """Drop entries, or whole channels, by a mask of the noise; nothing if there is no mask."""

    def __init__(self, p: float, *, channels: bool) -> None:
        super().__init__()
        self.p, self.channels = p, channels

    def forward(self, value: Tensor) -> Tensor:
        if not self.training:  # so that torch.export sees no context variable
            return value
        channels = self.channels and value.dim() > 2
        asked, masks = _asked.get(), _masks.get()
        if asked is not None:
            asked.append((self.p, value.shape[1] if channels else value[0].numel()))
        if masks is None:
            return value
        mask = next(masks)
        shape = (*mask.shape, *[1] * (value.dim() - 2)) if channels else value.shape
        return value * (mask * (1 / (1 - self.p))).reshape(shape).to(value.dtype)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def replace_dropout(module: nn.Module) -> nn.Module:
    """Replace torch's dropout layers in a module, and return it (or its replacement)."""
    if type(module) in (*ENTRIES, *CHANNELS):
        assert isinstance(module, nn.modules.dropout._DropoutNd)
        if module.p >= 1:
            raise ValueError(f"dropout is a probability below 1, got {module.p}.")
        if not module.training or not module.p:
            return nn.Identity()
        return Dropout(module.p, channels=type(module) in CHANNELS)
    for name, child in list(module.named_children()):
        if (new := replace_dropout(child)) is not child:
            setattr(module, name, new)
    return module


@contextmanager
def dropping(masks: Sequence[Tensor]) -> Iterator[None]:
    """Inside the context, the dropout layers take these masks in the order of their calls."""
    token = _masks.set(iter(masks))
    try:
        yield
    finally:
        _masks.reset(token)


@contextmanager
def asking() -> Iterator[list[tuple[float, int]]]:
    """Collect, inside the context, what each dropout layer drops: (probability, width)."""
    found: list[tuple[float, int]] = []
    token = _asked.set(found)
    try:
        yield found
    finally:
        _asked.reset(token)
