"""The notation: parse ``"z[t] | h[t], x[t-1]"`` into a :class:`Key`.

Left of the bar is one variable, right of it are its parents. A variable is static (``z``) or a
sequence. ``z[t]`` declares the rule for every step, ``z[0]`` and ``z[T]`` those for the first and
the last step.

>>> parse_key("z[t] | h[t], x[t-1]")
Key('z[t] | h[t], x[t-1]')
>>> parse_key("z[t] | h[t], x[t-1]").parents[1].lag
-1
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

At = Literal["static", "t", "first", "last"]

_TERM = re.compile(r"^\s*([A-Za-z_]\w*)\s*(?:\[\s*([^\]]*?)\s*\])?\s*$")
_LAG = re.compile(r"^t\s*(?:([+-])\s*(\d+))?$")


@dataclass(frozen=True)
class Ref:
    """A variable at a time index: ``x``, ``x[t]``, ``x[t-1]``, ``x[0]`` or ``x[T]``."""

    name: str
    at: At = "static"
    lag: int = 0
    label: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        index = {
            "static": "",
            "first": "[0]",
            "last": "[T]",
            "t": f"[t{self.lag:+d}]" if self.lag else "[t]",
        }[self.at]
        object.__setattr__(self, "label", self.name + index)

    @property
    def timed(self) -> bool:
        return self.at != "static"

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True)
class Key:
    """The key of an entry in a declaration: ``variable | parents``."""

    target: Ref
    parents: tuple[Ref, ...] = ()

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def at(self) -> At:
        return self.target.at

    def __str__(self) -> str:
        bar = " | " + ", ".join(map(str, self.parents)) if self.parents else ""
        return f"{self.target}{bar}"

    def __repr__(self) -> str:
        return f"Key({str(self)!r})"


def parse_key(text: str) -> Key:
    """Parse one key. Raise ValueError, with the key and the problem, if it is malformed."""
    if not isinstance(text, str) or text.count("|") > 1:
        raise ValueError(f'{text!r} is not a key. Write "variable | parent, parent", e.g. "x | z".')
    left, bar, right = text.partition("|")
    if bar and not right.strip():
        raise ValueError(
            f"{text!r} has a bar but no parents. Drop the bar, or name the parents right of it."
        )
    target = _parse_term(left, text)
    parents = tuple(_parse_term(part, text) for part in right.split(",")) if bar else ()
    if target.lag:
        raise ValueError(
            f"{text!r} declares {target}. Declare the rule for [t] and shift its parents instead."
        )
    if len(set(parents)) < len(parents):
        repeated = min(str(ref) for ref, count in Counter(parents).items() if count > 1)
        raise ValueError(f"{text!r} names the parent {repeated} twice. Name it once.")
    for parent in parents:
        _check_time(target, parent, text)
    return Key(target, parents)


def _parse_term(term: str, text: str) -> Ref:
    match = _TERM.match(term)
    if not match:
        raise ValueError(
            f"Cannot read {term.strip()!r} in {text!r}. A variable is a name such as z, z[t], "
            f"z[t-1], z[0] or z[T]."
        )
    name, index = match.groups()
    if index is None:
        return Ref(name)
    if index == "0":
        return Ref(name, "first")
    if index == "T":
        return Ref(name, "last")
    lag = _LAG.match(index)
    if not lag:
        raise ValueError(
            f"Cannot read the time index [{index}] in {text!r}. Use [t], [t-1], [t+1], [0] or [T]."
        )
    shift = int(lag[2] or 0) * (-1 if lag[1] == "-" else 1)
    if abs(shift) > 1:
        raise ValueError(
            f"{text!r} reads {name}[{index}]; only the neighbours [t-1] and [t+1] can be read. "
            f'Carry older steps in a state, e.g. "h[t] | h[t-1], {name}[t-1]": GRU(64).'
        )
    return Ref(name, "t", shift)


def _check_time(target: Ref, parent: Ref, text: str) -> None:
    if target.at == "static" and parent.at == "t":
        raise ValueError(
            f"{text!r}: {target.name} has no [t] but reads {parent}. Summarise the sequence first: "
            f'"b[t] | b[t+1], {parent.name}[t]": GRU(256), then "{target.name} | b[0]".'
        )
    if target.at == "t" and parent.at in ("first", "last"):
        raise ValueError(
            f"{text!r} reads {parent} at every t. Read an end of the sequence from a static "
            f"variable "
            f'("c | {parent}", then {target} | c) or in the entry for that step.'
        )
    if target.at in ("first", "last") and parent.at not in (target.at, "static"):
        index = "0" if target.at == "first" else "T"
        raise ValueError(
            f"{text!r}: the entry for step [{index}] reads {parent}. It may read static variables "
            f"and {parent.name}[{index}]."
        )
