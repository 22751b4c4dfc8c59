"""Whether q was trained for the p that it stands beside.

q may be behind p: p was trained or set by hand and q was not (``mle()``, ``em()`` where q has no closed form, a frozen q, a schedule of M-steps, a
latent that every training row knew). Each such latent is on record here, with the numbers that q's factor had then. If the factor has other
numbers now, someone trained it since, and the record no longer holds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from aevb.model import Model

Digest = tuple[float, ...]


def digest(parameters: Iterable[nn.Parameter]) -> Digest:
    """Numbers that change when the parameters do; not with their device, nor when they are cast to a higher precision and back."""
    found: list[float] = []
    for parameter in parameters:
        if not parameter.is_meta:
            values = parameter.detach().double()
            found += [float(values.sum()), float(values.square().sum())]
    return tuple(found)


def alike(a: Digest, b: Digest) -> bool:
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class Record:
    """Why q's factor of a latent was not trained (None: nothing was yet), with the numbers of that factor, and of p, at the time."""

    reason: str | None
    q: Digest
    p: Digest


class Teaching:
    """The latents whose factors in q were not trained. ``open_ends``: q was trained on rows that end in steps without data."""

    def __init__(self, model: Model) -> None:
        self.records: dict[str, Record] = {}
        self.open_ends = False
        self.record(model, dict.fromkeys(with_weights(model)))

    def record(self, model: Model, reasons: Mapping[str, str | None]) -> None:
        """Note that these latents' factors were not trained, as things stand."""
        p = digest(model.theta())
        self.records |= {name: Record(reason, digest(_weights(model, name)), p) for name, reason in reasons.items()}

    def taught(self, names: Collection[str], *, open_ends: bool = False) -> None:
        """Note that these latents' factors were trained, and whether on rows that end in steps without data."""
        self.open_ends = self.open_ends or open_ends
        self.records = {name: record for name, record in self.records.items() if name not in names}

    def untaught(self, model: Model) -> dict[str, str]:
        """The latents whose factors in q are behind p, and why."""
        found, p = {}, None
        for name, record in self.records.items():
            if not alike(digest(_weights(model, name)), record.q):
                continue
            if record.reason is not None:
                found[name] = record.reason
                continue
            p = digest(model.theta()) if p is None else p
            if not alike(p, record.p):
                found[name] = f"q({name}|·) was never trained, while p was trained or set"
        return found

    # As data --------------------------------------------------------------------------------------------------------------------

    def state(self, model: Model) -> dict[str, object]:
        """JSON-ready: the reasons that hold, null for latents of a model that is as it was built."""
        held = self.untaught(model)
        new = [name for name, record in self.records.items() if name not in held and alike(digest(_weights(model, name)), record.q)]
        return {"untaught": held | dict.fromkeys(new), "open ends": self.open_ends}

    def restore(self, model: Model, state: Mapping[str, object] | None) -> None:
        """Take over what was saved beside the weights that the model now has; where nothing was, q counts as trained."""
        told = state if isinstance(state, Mapping) else {}
        self.records, self.open_ends = {}, bool(told.get("open ends", False))
        saved = told.get("untaught")
        if isinstance(saved, Mapping):
            names = with_weights(model)
            self.record(model, {name: None if reason is None else str(reason) for name, reason in saved.items() if name in names})


def _weights(model: Model, name: str) -> list[nn.Parameter]:
    return [parameter for entry in model.graph.q[name].values() for parameter in model.factors[entry.id].parameters()]


def with_weights(model: Model) -> list[str]:
    """The latents whose factors in q have anything to train."""
    return [name for name in model.graph.latents if _weights(model, name)]


def trainable_latents(model: Model) -> list[str]:
    """Those of them that are not frozen."""
    return [name for name in with_weights(model) if any(parameter.requires_grad for parameter in _weights(model, name))]
