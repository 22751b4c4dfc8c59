"""A declaration as plain data, for the library's model and the interpreter's equations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

import aevb


@dataclass(frozen=True)
class Read:
    """A parent: ``at`` is "" (static), "t" (with a lag), "0" or "T"."""

    name: str
    at: str = ""
    lag: int = 0

    def __str__(self) -> str:
        return (
            self.name
            + {"": "", "0": "[0]", "T": "[T]", "t": f"[t{self.lag:+d}]" if self.lag else "[t]"}[
                self.at
            ]
        )


@dataclass(frozen=True)
class Line:
    """One entry of p or q: a variable, its parents, its family with options, and its network.

    The network is given by the widths of its hidden layers.
    """

    side: str
    target: Read
    reads: tuple[Read, ...]
    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    hidden: tuple[int, ...] = ()
    activation: str = "tanh"

    @property
    def name(self) -> str:
        return self.target.name

    @cached_property
    def key(self) -> str:
        return str(self.target) + (" | " + ", ".join(map(str, self.reads)) if self.reads else "")

    @cached_property
    def id(self) -> str:
        """Return the name of its module in a model."""
        return f"{self.side}({self.key.replace(' | ', '|')})"

    @property
    def stochastic(self) -> bool:
        return self.family not in ("Deterministic", "GRU", "LSTM")

    def conditional(self, size: int | None) -> Any:
        settings = dict(self.options)
        if self.hidden:
            settings["net"] = aevb.mlp(*self.hidden, activation=self.activation)
        return getattr(aevb, self.family)(*([] if size is None else [size]), **settings)


@dataclass(frozen=True)
class Declaration:
    """p, q and the given variables; ``sizes`` holds the number of entries of every variable."""

    lines: tuple[Line, ...]
    sizes: Mapping[str, int]
    given: tuple[str, ...] = ()
    timed: frozenset[str] = frozenset()
    missing: str = "zeros"

    def rules(self, side: str, name: str) -> dict[str, Line]:
        """Return the variable's entries on one side, by place: "" or "t", "0", "T"."""
        return self._rules[side, name]

    @cached_property
    def _rules(self) -> dict[tuple[str, str], dict[str, Line]]:
        found: dict[tuple[str, str], dict[str, Line]] = {}
        for line in self.lines:
            found.setdefault((line.side, line.name), {})[line.target.at] = line
        return found

    def names(self, side: str) -> list[str]:
        return self._names[side]

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        return {
            side: list(dict.fromkeys(line.name for line in self.lines if line.side == side))
            for side in "pq"
        }

    def stochastic(self, name: str) -> bool:
        return name in self._stochastic

    @cached_property
    def _stochastic(self) -> frozenset[str]:
        return frozenset(line.name for line in self.lines if line.stochastic)

    def finite(self, name: str) -> bool:
        return all(
            line.family in ("OneHot", "Bernoulli") for line in self.rules("p", name).values()
        )

    @cached_property
    def latents(self) -> list[str]:
        return [
            name for name in self.names("q") if name in self.names("p") and self.stochastic(name)
        ]

    @cached_property
    def observed(self) -> list[str]:
        return [
            name
            for name in self.names("p")
            if self.stochastic(name) and name not in self.names("q")
        ]

    def model(self, seed: int) -> Any:
        """Return the library's model in double precision, with all weights drawn at random.

        No weight then has a special value.
        """
        sides: dict[str, dict[str, Any]] = {"p": {}, "q": {}}
        for line in self.lines:
            owner = "p" if line.name in self.names("p") else "q"
            sides[line.side][line.key] = line.conditional(
                self.sizes[line.name] if line.side == owner else None
            )
        given = {name: self.sizes[name] for name in self.given}
        model = aevb.Model(sides["p"], sides["q"], given, missing=self.missing).double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(
                    0.6 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                )
        return model

    def __str__(self) -> str:
        parts = [
            f"{side} = {{"
            + ", ".join(
                f'"{line.key}": {self._shown(line)}' for line in self.lines if line.side == side
            )
            + "}"
            for side in ("p", "q")
        ]
        given = (
            f", given = {{{', '.join(f'{name!r}: {self.sizes[name]}' for name in self.given)}}}"
            if self.given
            else ""
        )
        return ", ".join(parts) + given + (', missing = "mask"' if self.missing == "mask" else "")

    def _shown(self, line: Line) -> str:
        owner = "p" if line.name in self.names("p") else "q"
        return repr(line.conditional(self.sizes[line.name] if line.side == owner else None))
