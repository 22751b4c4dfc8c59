"""One row of data, with p and q unrolled over its steps, and one axis per unknown.

A value is a tensor […, d]. It has one axis for the samples, then one for each enumerated unknown,
which is a pair of a name and a step. The components of a mixture are such an unknown too. An axis
that a value does not depend on has size 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .declaration import Declaration, Line, Read
from .families import FAMILIES, Distribution, Family, Finite, MixtureOf, sigmoid, softplus

Node = tuple[str, int | None]  # a variable and its step (None for a static variable)
ON_AXES = ("enumerate", "sum", "stratify")

ACTIVATIONS = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": lambda x: x * (x > 0),
    "sigmoid": sigmoid,
    "softplus": softplus,
}


@dataclass(frozen=True)
class Row:
    """One example: its number of steps, its data, and which entries are known.

    The data are [d] or [T, d], with zeros at missing entries.
    """

    steps: int
    data: Mapping[str, Tensor]
    present: Mapping[str, Tensor] = field(default_factory=dict)

    def known(self, node: Node) -> bool:
        name, t = node
        if name not in self.data:
            return False
        return name not in self.present or bool(
            (self.present[name] if t is None else self.present[name][t]).all()
        )


class World:
    """The values and log-probabilities of all nodes for one row.

    ``ways`` says how each latent is drawn. ``noise`` holds its noise ([S, T or 1, d]). ``fixed``
    latents have given values ([S, d] or [S, T, d]).
    """

    def __init__(
        self,
        declaration: Declaration,
        weights: Mapping[str, Tensor],
        row: Row,
        *,
        ways: Mapping[str, str],
        noise: Mapping[str, Tensor] | None = None,
        fixed: Mapping[str, Tensor] | None = None,
        temperature: float = 0.5,
    ) -> None:
        self.declaration, self.weights, self.row = declaration, weights, row
        self.ways, self.noise, self.fixed, self.temperature = (
            ways,
            noise or {},
            fixed or {},
            temperature,
        )
        self.axes: list[Node | str] = ["samples"]
        for name in declaration.latents:
            if ways.get(name) in ON_AXES and name not in self.fixed:
                self.axes += [node for node in self.nodes(name) if not row.known(node)]
        self._values: dict[Node, Tensor] = {}
        self._states: dict[Node, tuple[Tensor, ...]] = {}
        self._log_q: dict[Node, Tensor] = {}
        self._log_p: dict[Node, Tensor] = {}

    # The unrolled graph ---------------------------------------------------------------------------

    def nodes(self, name: str) -> list[Node]:
        return (
            [(name, t) for t in range(self.row.steps)]
            if name in self.declaration.timed
            else [(name, None)]
        )

    def line(self, side: str, node: Node) -> Line:
        """Return the entry for this step: the last step's, else the first's, else the rule's."""
        rules, (_, t) = self.declaration.rules(side, node[0]), node
        if t is None:
            return rules[""]
        if t == self.row.steps - 1 and "T" in rules:
            return rules["T"]
        return rules["0"] if t == 0 and "0" in rules else rules["t"]

    def parent(self, read: Read, node: Node) -> Node | None:
        """Return the node that a read refers to; None outside the sequence."""
        if read.at == "":
            return read.name, None
        step = {"0": 0, "T": self.row.steps - 1}.get(read.at, (node[1] or 0) + read.lag)
        return (read.name, step) if 0 <= step < self.row.steps else None

    def owner(self, name: str) -> str:
        """Return the side whose entries give the variable its value here."""
        return "q" if name in self.declaration.names("q") else "p"

    def contains(self, factor: Node, node: Node) -> bool:
        """Return whether p's factor contains the node.

        It is the variable of the factor, or a parent, directly or through deterministic nodes.
        """
        frontier, seen = [factor], {factor}
        if factor == node:
            return True
        while frontier:
            current = frontier.pop()
            for read in self.line("p", current).reads:
                above = self.parent(read, current)
                if above == node:
                    return True
                if (
                    above
                    and above not in seen
                    and not self.declaration.stochastic(above[0])
                    and above[0] not in self.declaration.given
                ):
                    seen.add(above)
                    frontier.append(above)
        return False

    # Values ---------------------------------------------------------------------------------------

    def shaped(self, value: Tensor) -> Tensor:
        """Return [d] with all axes, of size 1."""
        return value.reshape(*[1] * len(self.axes), -1)

    def on_axis(self, table: Tensor, axis: Node | str) -> Tensor:
        """Put a table of values, one per row, on an axis."""
        shape = [1] * len(self.axes)
        shape[self.axes.index(axis)] = table.shape[0]
        return table.reshape(*shape, table.shape[-1])

    def value(self, node: Node) -> Tensor:
        if node not in self._values:
            self._values[node] = self._evaluate(node)
        return self._values[node]

    def _evaluate(self, node: Node) -> Tensor:
        name, t = node
        if name in self.fixed:
            values = self.fixed[name]
            return self.on_axis(values if t is None else values[:, t], "samples")
        if name in self.row.data and (name not in self.declaration.latents or self.row.known(node)):
            return self.shaped(self.row.data[name] if t is None else self.row.data[name][t])
        if not self.declaration.stochastic(name):
            return self._function(node)
        way = self.ways[name]
        if way in ("enumerate", "sum"):
            values = self.family(self.line("p", node)).values
            assert values is not None
            return self.on_axis(values, node)
        return self._draw(node, way)

    def _noise(self, node: Node) -> Tensor:
        line, (name, t) = self.line("q", node), node
        key = str(line.target) if str(line.target) in self.noise else name
        noise = self.noise[key]
        return self.on_axis(noise[:, 0 if t is None or noise.shape[1] == 1 else t], "samples")

    def _draw(self, node: Node, way: str) -> Tensor:
        q, noise = self.density("q", node), self._noise(node)
        if way == "stratify":
            assert isinstance(q, MixtureOf)
            axis = self.axes.index(node)
            return torch.cat(torch.broadcast_tensors(*(part.draw(noise) for part in q.parts)), axis)
        if way in ("score", "detached"):
            return q.draw(noise).detach()
        if way in ("gumbel", "relaxed", "straight-through"):
            assert isinstance(q, Finite)
            soft = q.soft(q.relax(noise, self.temperature))
            return (
                soft if way != "straight-through" else q.draw(noise).detach() + soft - soft.detach()
            )
        return q.draw(noise)

    def _function(self, node: Node) -> Tensor:
        line = self.line(self.owner(node[0]), node)
        if line.family == "Deterministic":
            if line.target.at in ("t", "") and all(
                self.parent(read, node) is None for read in line.reads
            ):
                return self.shaped(
                    torch.zeros(self.declaration.sizes[line.name], dtype=torch.float64)
                )
            return ACTIVATIONS[line.options.get("activation", "identity")](self.raw(line, node))
        return self.state(node)[line.options.get("layers", 1) - 1]

    def state(self, node: Node) -> tuple[Tensor, ...]:
        """Return the hidden states of a recurrence's layers, then an LSTM's cells."""
        if node not in self._states:
            line = self.line(self.owner(node[0]), node)
            main = self.declaration.rules(self.owner(node[0]), node[0])["t"]
            layers = main.options.get("layers", 1)
            zero = self.shaped(torch.zeros(self.declaration.sizes[line.name], dtype=torch.float64))
            initial = (zero,) * (layers * (2 if main.family == "LSTM" else 1))
            if line.family == "Deterministic":
                state = list(initial)
                state[layers - 1] = self._function(node)
                self._states[node] = tuple(state)
            elif all(self.parent(read, node) is None for read in line.reads):
                self._states[node] = initial
            else:
                own = next(self.parent(read, node) for read in line.reads if read.name == line.name)
                self._states[node] = self._cell(
                    line, node, initial if own is None else self.state(own)
                )
        return self._states[node]

    def _cell(self, line: Line, node: Node, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        layers = line.options.get("layers", 1)
        hidden, cells = list(state[:layers]), list(state[layers:])
        gates = self.first(line, node, f"factors.{line.id}.blocks", own=line.name)
        for i in range(layers):
            if i:
                gates = self._linear(hidden[i - 1], f"factors.{line.id}.upper.{i - 1}")
            again = self._linear(hidden[i], f"factors.{line.id}.recurrent.{i}")
            if line.family == "LSTM":
                a, f, g, o = (gates + again).chunk(4, -1)
                cells[i] = sigmoid(f) * cells[i] + sigmoid(a) * torch.tanh(g)
                hidden[i] = sigmoid(o) * torch.tanh(cells[i])
            else:
                r, u, n = gates.chunk(3, -1)
                r2, u2, n2 = again.chunk(3, -1)
                update = sigmoid(u + u2)
                hidden[i] = (1 - update) * torch.tanh(n + sigmoid(r + r2) * n2) + update * hidden[i]
        return (*hidden, *cells)

    # Networks -------------------------------------------------------------------------------------

    def read(self, read: Read, node: Node) -> Tensor:
        above = self.parent(read, node)
        return (
            self.shaped(torch.zeros(self.declaration.sizes[read.name], dtype=torch.float64))
            if above is None
            else self.value(above)
        )

    def _linear(self, value: Tensor, prefix: str) -> Tensor:
        return value @ self.weights[f"{prefix}.weight"].T + self.weights[f"{prefix}.bias"]

    def first(self, line: Line, node: Node, prefix: str, own: str | None = None) -> Tensor:
        total = self.shaped(self.weights[f"{prefix}.bias"])
        for read in line.reads:
            if read.name == own:
                continue
            total = total + self.read(read, node) @ self.weights[f"{prefix}.weights.{read}"].T
            above = self.parent(read, node)
            if (
                f"{prefix}.missing.{read}" in self.weights
                and above is not None
                and read.name in self.row.present
            ):
                present = self.row.present[read.name]
                absent = (~(present if above[1] is None else present[above[1]])).double()
                total = total + self.shaped(absent) @ self.weights[f"{prefix}.missing.{read}"].T
        return total

    def raw(self, line: Line, node: Node) -> Tensor:
        """Return the output of an entry's network for this node, or the numbers of its root."""
        prefix = f"factors.{line.id}"
        if not line.reads:
            return self.shaped(
                self.weights[f"{prefix}.root"]
                if f"{prefix}.root" in self.weights
                else self.family(line).standard()
            )
        h = self.first(line, node, f"{prefix}.net.blocks")
        if not line.hidden:
            return h
        h = ACTIVATIONS[line.activation](h)
        for i in range(len(line.hidden) - 1):
            h = ACTIVATIONS[line.activation](self._linear(h, f"{prefix}.net.hidden.{i}"))
        return self._linear(h, f"{prefix}.net.heads")

    def family(self, line: Line) -> Family:
        return FAMILIES[line.family](self.declaration.sizes[line.name], line.options)

    def density(self, side: str, node: Node) -> Distribution:
        line = self.line(side, node)
        prefix = f"factors.{line.id}.vectors."
        vectors = {
            name.removeprefix(prefix): value
            for name, value in self.weights.items()
            if name.startswith(prefix)
        }
        return self.family(line).density(self.raw(line, node), vectors)

    # Log-probabilities ----------------------------------------------------------------------------

    def log_p(self, node: Node) -> Tensor:
        """Return log p(v | ·) at v's value, on all axes, without the event axis.

        Missing entries are marginalised out.
        """
        if node not in self._log_p:
            name, t = node
            present = None
            if name in self.row.present and name in self.declaration.observed:
                present = self.row.present[name] if t is None else self.row.present[name][t]
            line = self.line("p", node)
            value = self.value(node)
            if present is not None and line.family == "Beta":
                value = torch.where(present, value, torch.full_like(value, 0.5))
            self._log_p[node] = self.density("p", node).log_prob(value, present)
        return self._log_p[node]

    def log_q(self, node: Node) -> Tensor:
        """Return log q(v | ·) at v's value; for a stratified mixture, that of the whole mixture."""
        if node not in self._log_q:
            exact = self.line("q", node).family == "Exact"
            self._log_q[node] = (
                self._bayes(node) if exact else self.density("q", node).log_prob(self.value(node))
            )
        return self._log_q[node]

    def _bayes(self, node: Node) -> Tensor:
        factors = [
            other
            for name in self.declaration.names("p")
            if self.declaration.stochastic(name)
            for other in self.nodes(name)
        ]
        total = sum(self.log_p(factor) for factor in factors if self.contains(factor, node))
        if node in self.axes:
            return total - torch.logsumexp(total, self.axes.index(node), keepdim=True)
        return total - self._evidence_of_values(node)

    def _evidence_of_values(self, node: Node) -> Tensor:
        """Return log Σ, over the values of a fixed node, of p's factors that contain it."""
        parts = []
        for value in self.family(self.line("p", node)).values:  # type: ignore[union-attr]
            other = World(
                self.declaration,
                self.weights,
                self.row,
                ways=self.ways,
                noise=self.noise,
                fixed=self.fixed,
            )
            other._values = {
                key: known
                for key, known in self._values.items()
                if self.declaration.stochastic(key[0]) or key[0] in self.declaration.given
            }
            other._values[node] = self.shaped(value)
            factors = [
                each
                for name in self.declaration.names("p")
                if self.declaration.stochastic(name)
                for each in self.nodes(name)
            ]
            parts.append(
                sum(other.log_p(factor) for factor in factors if self.contains(factor, node))
            )
        return torch.logsumexp(torch.stack(torch.broadcast_tensors(*parts)), 0)

    def log_weight(self, node: Node) -> Tensor:
        """Return log q of each value of an enumerated node, or log π of each component."""
        if self.ways[node[0]] != "stratify":
            return self.log_q(node)
        q = self.density("q", node)
        assert isinstance(q, MixtureOf)
        return q.log_weights.transpose(-1, self.axes.index(node)).squeeze(-1)
