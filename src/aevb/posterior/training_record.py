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

import torch
from torch import nn

from aevb.estimate.declared_model import DeclaredModel

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

    ``open_ends``: on rows that end in steps without data. ``lacked``: the columns of each observed variable in which a row lacked an entry; None
    where that is not known.
    """

    def __init__(self, model: DeclaredModel) -> None:
        self.records: dict[str, Record] = {}
        self.open_ends = False
        self.lacked: dict[str, frozenset[int]] | None = None
        self.record(model, dict.fromkeys(with_weights(model)))

    def record(self, model: DeclaredModel, reasons: Mapping[str, str | None], *, trained: bool = False) -> None:
        """Note that these latents' factors were not trained (or were), as things stand."""
        p = digest(model.theta()) if reasons else ()
        self.records |= {name: Record(trained, reason, digest(_weights(model, name)), p) for name, reason in reasons.items()}

    def taught(self, model: DeclaredModel, names: Collection[str], *, lacked: Mapping[str, Collection[int]], open_ends: bool = False) -> None:
        """Note that these latents' factors were trained: on rows that lacked entries in these columns, or ended in steps without data."""
        self.open_ends = self.open_ends or open_ends
        before = self.lacked or {}
        self.lacked = {name: before.get(name, frozenset()) | frozenset(lacked.get(name, ())) for name in model.graph.observed}
        self.record(model, dict.fromkeys(names), trained=True)

    def untaught(self, model: DeclaredModel) -> dict[str, str]:
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

    def unseen(self, model: DeclaredModel, names: Collection[str]) -> dict[str, frozenset[int]]:
        """The columns of the observed variables in which these latents' factors have never seen an entry missing, where there are any."""
        if self.lacked is None:
            return {}
        found = {name: frozenset(range(model.graph.size(name))) - self.lacked.get(name, frozenset()) for name in model.graph.observed}
        records = {name: self.records[name] for name in names if name in self.records} if any(found.values()) else {}
        holds = any(record.trained and alike(digest(_weights(model, name)), record.q) for name, record in records.items())
        return {name: columns for name, columns in found.items() if columns} if holds else {}

    # As data --------------------------------------------------------------------------------------------------------------------

    def state(self, model: DeclaredModel) -> dict[str, object]:
        """JSON-ready: the reasons that hold, null for latents of a model that is as it was built; what q was trained on."""
        held = self.untaught(model)
        new = [
            name
            for name, record in self.records.items()
            if not record.trained and name not in held and alike(digest(_weights(model, name)), record.q)
        ]
        lacked = None if self.lacked is None else {name: _runs(columns) for name, columns in self.lacked.items() if columns}
        return {"untaught": held | dict.fromkeys(new), "open ends": self.open_ends, "lacked": lacked}

    def restore(self, model: DeclaredModel, state: Mapping[str, object] | None) -> None:
        """Take over what was saved beside the weights that the model now has; where nothing was, q counts as trained."""
        told = state if isinstance(state, Mapping) else {}
        self.records, self.open_ends = {}, bool(told.get("open ends", False))
        saved, names = told.get("untaught"), with_weights(model)
        self.lacked = _columns(model, told)
        reasons = (
            {name: None if reason is None else str(reason) for name, reason in saved.items() if name in names} if isinstance(saved, Mapping) else {}
        )
        self.record(model, reasons)
        self.record(model, {name: None for name in names if name not in reasons}, trained=True)


def _runs(columns: Collection[int]) -> list[list[int]]:
    """Columns as runs [first, last], which are few even where columns are many."""
    found: list[list[int]] = []
    for column in sorted(columns):
        if found and column == found[-1][1] + 1:
            found[-1][1] = column
        else:
            found.append([column, column])
    return found


def _columns(model: DeclaredModel, told: Mapping[str, object]) -> dict[str, frozenset[int]] | None:
    """The columns that saved runs stand for. An earlier version wrote the variables of which no row lacked an entry."""
    observed = {name: range(model.graph.size(name)) for name in model.graph.observed}
    whole, lacked = told.get("whole"), told.get("lacked")
    if isinstance(lacked, Mapping):
        try:
            ends = {name: [(int(first), int(last)) for first, last in lacked.get(name, ())[: len(columns)]] for name, columns in observed.items()}
        except (KeyError, TypeError, ValueError):
            return None
        return {name: frozenset(i for i in columns if any(a <= i <= b for a, b in ends[name])) for name, columns in observed.items()}
    if isinstance(whole, list):
        return {name: frozenset() if name in whole else frozenset(columns) for name, columns in observed.items()}
    return None


def _weights(model: DeclaredModel, name: str) -> list[nn.Parameter]:
    return [parameter for entry in model.graph.q[name].values() for parameter in model.factors[entry.id].parameters()]


def with_weights(model: DeclaredModel) -> list[str]:
    """The latents whose factors in q have anything to train."""
    return [name for name in model.graph.latents if _weights(model, name)]


def trainable_latents(model: DeclaredModel) -> list[str]:
    """Those of them that are not frozen."""
    return [name for name in with_weights(model) if any(parameter.requires_grad for parameter in _weights(model, name))]
