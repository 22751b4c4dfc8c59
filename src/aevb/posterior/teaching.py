"""Whether q was trained for the p that it stands beside, and for rows like those it is asked about.

q may be behind p: p was trained or set by hand and q was not (``mle()``, ``em()`` where q has no closed form, a frozen q, a schedule of M-steps, a
latent that every training row knew). Each latent is on record here, with the numbers that q's factor and p had when q was trained, or when it
turned out not to be. If p has other numbers now and q's factor the same, q is behind. If the factor has other numbers, someone trained it since, and
the record no longer holds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from aevb.model import Model

Digest = tuple[float, ...]


def digest(parameters: Iterable[nn.Parameter]) -> Digest:
    """Numbers that change when the parameters do; not with their device, nor when they are cast to a higher precision and back."""
    values = [parameter.detach().double() for parameter in parameters if not parameter.is_meta]
    sums = [number for value in values for number in (value.sum(), value.square().sum())]
    return tuple(torch.stack(sums).tolist()) if sums else ()


def alike(a: Digest, b: Digest) -> bool:
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class Record:
    """The numbers of q's factor of a latent, and of p, when the factor was trained; or when it was not, for a reason (None: nothing was yet)."""

    trained: bool
    reason: str | None
    q: Digest
    p: Digest


class Teaching:
    """Which latents' factors in q were trained, and on what.

    ``open_ends``: on rows that end in steps without data. ``whole``: the observed variables that no row lacked an entry of; None where that is not
    known.
    """

    def __init__(self, model: Model) -> None:
        self.records: dict[str, Record] = {}
        self.open_ends = False
        self.whole: frozenset[str] | None = None
        self.record(model, dict.fromkeys(with_weights(model)))

    def record(self, model: Model, reasons: Mapping[str, str | None], *, trained: bool = False) -> None:
        """Note that these latents' factors were not trained (or were), as things stand."""
        p = digest(model.theta()) if reasons else ()
        self.records |= {name: Record(trained, reason, digest(_weights(model, name)), p) for name, reason in reasons.items()}

    def taught(self, model: Model, names: Collection[str], *, whole: Collection[str] = (), open_ends: bool = False) -> None:
        """Note that these latents' factors were trained: which variables no row lacked an entry of, and whether rows ended in steps without data."""
        self.open_ends = self.open_ends or open_ends
        self.whole = frozenset(whole) if self.whole is None else self.whole & frozenset(whole)
        self.record(model, dict.fromkeys(names), trained=True)

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
                what = (
                    f"p was trained or set after q({name}|·) was" if record.trained else f"q({name}|·) was never trained, while p was trained or set"
                )
                found[name] = what
        return found

    def unseen(self, model: Model, names: Collection[str]) -> frozenset[str]:
        """The observed variables of which these latents' factors have never seen an entry missing."""
        records = {name: self.records[name] for name in names if self.whole and name in self.records}
        holds = any(record.trained and alike(digest(_weights(model, name)), record.q) for name, record in records.items())
        return self.whole if self.whole and holds else frozenset()

    # As data --------------------------------------------------------------------------------------------------------------------

    def state(self, model: Model) -> dict[str, object]:
        """JSON-ready: the reasons that hold, null for latents of a model that is as it was built; what q was trained on."""
        held = self.untaught(model)
        new = [
            name
            for name, record in self.records.items()
            if not record.trained and name not in held and alike(digest(_weights(model, name)), record.q)
        ]
        whole = None if self.whole is None else sorted(self.whole)
        return {"untaught": held | dict.fromkeys(new), "open ends": self.open_ends, "whole": whole}

    def restore(self, model: Model, state: Mapping[str, object] | None) -> None:
        """Take over what was saved beside the weights that the model now has; where nothing was, q counts as trained."""
        told = state if isinstance(state, Mapping) else {}
        self.records, self.open_ends = {}, bool(told.get("open ends", False))
        saved, whole, names = told.get("untaught"), told.get("whole"), with_weights(model)
        self.whole = frozenset(map(str, whole)) if isinstance(whole, list) else None
        reasons = (
            {name: None if reason is None else str(reason) for name, reason in saved.items() if name in names} if isinstance(saved, Mapping) else {}
        )
        self.record(model, reasons)
        self.record(model, {name: None for name in names if name not in reasons}, trained=True)


def _weights(model: Model, name: str) -> list[nn.Parameter]:
    return [parameter for entry in model.graph.q[name].values() for parameter in model.factors[entry.id].parameters()]


def with_weights(model: Model) -> list[str]:
    """The latents whose factors in q have anything to train."""
    return [name for name in model.graph.latents if _weights(model, name)]


def trainable_latents(model: Model) -> list[str]:
    """Those of them that are not frozen."""
    return [name for name in with_weights(model) if any(parameter.requires_grad for parameter in _weights(model, name))]
