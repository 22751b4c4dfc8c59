"""The graph of a declaration: its variables, their parents, and all checks. It holds no weights.

All checks run here, when the model is declared. Each message names the entry and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from aevb.declare.conditionals import Conditional
from aevb.declare.deterministic import Cell, Deterministic
from aevb.declare.evaluation_order import Stage, schedule
from aevb.declare.families import Exact
from aevb.declare.networks import Shape
from aevb.declare.notation import At, Key, Ref, parse_key
from aevb.runtime.suggestions import did_you_mean


@dataclass(frozen=True)
class Entry:
    """One entry of a declaration: a key and its conditional, in p or q."""

    side: str
    key: Key
    spec: Conditional
    # The entry's name in printed models, error messages and the weights file.
    id: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.side}({str(self.key).replace(' | ', '|')})")

    @property
    def where(self) -> str:
        return f'{self.side} has "{self.key}": {self.spec!r}'


Rules = dict[str, dict[At, Entry]]  # variable → time index → entry


class Graph:
    """The parsed and checked p, q and given."""

    def __init__(
        self,
        p: Mapping[str, Conditional],
        q: Mapping[str, Conditional],
        given: Mapping[str, int | Shape],
    ) -> None:
        self.p, self.q = _read("p", p), _read("q", q)
        if not isinstance(given, Mapping):
            raise ValueError(
                f"given is a dictionary from a variable to its size, got {type(given).__name__}."
            )
        # If p and q both declare a name, p decides whether it is deterministic; the checks below
        # refuse a contradiction.
        self.functions = frozenset(
            name
            for name, ats in (self.q | self.p).items()
            if not next(iter(ats.values())).spec.stochastic
        )
        self.timed: dict[str, bool] = {}
        self.shapes: dict[str, Shape] = {}
        self.given = {name: _shape(f"given {name!r}", size) for name, size in given.items()}
        self._check_names()
        self._check_time()
        self._check_sizes()
        self._check_deterministic()
        self._check_families()
        self.generation = schedule({name: self.reads("p", name) for name in self.p}, "p")
        schedule({name: self.reads("q", name) for name in self.q}, "q")
        self.inference = self.inference_stages(tuple(self.latents_declared()))
        for name in self.latents:
            if isinstance(self.q[name][self.main(name)].spec, Exact):
                self._check_exact(name)

    def __deepcopy__(self, memo: dict[int, object]) -> Graph:
        """Return the same graph: it is immutable, so copies of a model share it."""
        return self

    # Contents -------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        return [
            entry for rules in (self.p, self.q) for ats in rules.values() for entry in ats.values()
        ]

    def main(self, name: str) -> At:
        """The time index of a variable's main rule: "t" for sequences, otherwise "static"."""
        return "t" if self.timed[name] else "static"

    def rule(self, side: str, name: str) -> Entry:
        """The main rule of a variable in p or q (not that of its first or last step)."""
        return (self.p if side == "p" else self.q)[name][self.main(name)]

    def reads(self, side: str, name: str) -> list[Ref]:
        """All parents of a variable in p or q, at any step.

        In the rule for [0] or [T], a parent at that step counts as [t].
        """
        rules = self.p if side == "p" else self.q
        refs: dict[Ref, None] = {}
        for at, entry in rules.get(name, {}).items():
            for ref in entry.key.parents:
                refs[Ref(ref.name, "t") if at in ("first", "last") and ref.timed else ref] = None
        return list(refs)

    def is_deterministic(self, name: str) -> bool:
        return name in self.functions

    @cached_property
    def stochastic(self) -> tuple[str, ...]:
        return tuple(name for name in self.p if not self.is_deterministic(name))

    @cached_property
    def latents(self) -> tuple[str, ...]:
        """The latents, in the order in which q draws them."""
        return tuple(
            node
            for stage in self.inference
            for node in stage.nodes
            if not self.is_deterministic(node)
        )

    @cached_property
    def observed(self) -> tuple[str, ...]:
        return tuple(name for name in self.stochastic if name not in self.q)

    @cached_property
    def deterministic(self) -> tuple[str, ...]:
        return tuple(
            name for rules in (self.p, self.q) for name in rules if self.is_deterministic(name)
        )

    def size(self, name: str) -> int:
        return math.prod(self.shapes[name])

    # Checks ---------------------------------------------------------------------------------------

    def _check_names(self) -> None:
        if not self.p:
            raise ValueError(
                'p is empty. Declare the generative model, e.g. p={"z": Normal(20), "x | z": '
                "Bernoulli(784, net=mlp(500, 500))}."
            )
        for name in self.given:
            if name in self.p or name in self.q:
                raise ValueError(
                    f"{name!r} is given, but {'p' if name in self.p else 'q'} also declares it. "
                    f"Take it out of given=, or out of the declaration."
                )
        read: set[str] = set()
        for entry in self.entries():
            for ref in entry.key.parents:
                if ref.name != entry.key.name:
                    read.add(ref.name)
                if ref.name in self.p or ref.name in self.given:
                    continue
                if ref.name not in self.q:
                    declared = {*self.p, *self.q, *self.given} - {entry.key.name}
                    raise ValueError(
                        f"{entry.where}, but {ref.name!r} is declared nowhere. Add it to p, or "
                        f'give its size: given={{"{ref.name}": 10}}.'
                        f"{did_you_mean(ref.name, sorted(declared))}"
                    )
                if entry.side == "p":
                    raise ValueError(
                        f"{entry.where} reads {ref.name!r}, which only q declares. Move "
                        f"{ref.name!r} to p, or drop the parent."
                    )
        for name in self.given:
            if name not in read:
                raise ValueError(
                    f"given names {name!r}, but nothing reads it. Drop it, or name it right of a "
                    f"bar.{did_you_mean(name, sorted(read - self.given.keys()))}"
                )
        for name in self.q:
            if name not in self.p and not self.is_deterministic(name):
                raise ValueError(
                    f"q draws {name!r}, but p has no factor for it. Add one to p, or make it "
                    f"Deterministic.{did_you_mean(name, self.p)}"
                )
            if name in self.p and self.is_deterministic(name):
                raise ValueError(
                    f"Both p and q declare the deterministic {name!r}. Declare it once; q may "
                    f"read p's."
                )
            if name in self.p and not next(iter(self.q[name].values())).spec.stochastic:
                raise ValueError(
                    f"q makes {name!r} deterministic, but p gives it a distribution. Give q a "
                    f"distribution for it too."
                )
        stochastic = [name for name in self.p if not self.is_deterministic(name)]
        latent = [name for name in stochastic if name in self.q]
        # A single variable is the data: a model without latents, such as an autoregression.
        if not latent and len(stochastic) != 1:
            roots = [
                name
                for name in stochastic
                if not any(self.p[name][at].key.parents for at in self.p[name])
            ]
            name = (roots or stochastic or list(self.p))[0]
            leaf = next((other for other in reversed(stochastic) if other != name), "x")
            family = type(next(iter(self.p[name].values())).spec).__name__
            raise ValueError(
                f'q has no factor for latent {name!r}. Add one, e.g. "{name} | {leaf}": '
                f"{family}(net=mlp(500, 500))."
            )
        if latent and len(latent) == len(stochastic):
            raise ValueError(
                f"q has a factor for every variable of p ({', '.join(latent)}), so nothing is "
                f"observed. Take the data's variable out of q."
            )
        for name in [*self.p, *self.q]:
            if self.is_deterministic(name) and name not in read:
                raise ValueError(
                    f"Nothing reads the deterministic {name!r}: its weights would never learn. "
                    f"Drop it, or name it right of a bar."
                )

    def _check_time(self) -> None:
        seen: dict[str, tuple[bool, Entry]] = {}
        for entry in self.entries():
            for ref in (entry.key.target, *entry.key.parents):
                timed, first = seen.setdefault(ref.name, (ref.timed, entry))
                if timed != ref.timed:
                    indexed, bare = (first, entry) if timed else (entry, first)
                    raise ValueError(
                        f'{ref.name!r} has a time index in "{indexed.key}" but none in '
                        f'"{bare.key}". Write it with [t] everywhere, or nowhere.'
                    )
        self.timed = {name: timed for name, (timed, _) in seen.items()}
        for side, rules in (("p", self.p), ("q", self.q)):
            for name, ats in rules.items():
                if self.timed[name] and "t" not in ats:
                    raise ValueError(
                        f"{side} declares an end of {name!r} but no rule for every step. Add "
                        f'"{name}[t] | …".'
                    )

    def _check_sizes(self) -> None:
        self.shapes |= self.given
        for entry in sorted(self.entries(), key=lambda entry: entry.side):
            # p comes first, because it states the sizes.
            name, size = entry.key.name, entry.spec.size
            if size is None:
                if name not in self.shapes and not any(
                    e.spec.size is not None for e in (self.p.get(name) or self.q[name]).values()
                ):
                    side = "p" if name in self.p else "q"
                    raise ValueError(
                        f"{entry.where}, but {name!r} has no size. State it once, in {side}: "
                        f"{type(entry.spec).__name__}(20)."
                    )
                continue
            shape = _shape(entry.id, size)
            known = self.shapes.setdefault(name, shape)
            if known != shape:
                raise ValueError(
                    f"{entry.where} gives {name!r} the size {size}, but it is {_text(known)} "
                    f"already. State the size once, in p."
                )
        for entry in self.entries():
            if not entry.key.parents and entry.spec.net is not None:
                raise ValueError(
                    f"{entry.where} has a network but no parents. Name the parents right of a "
                    f"bar, or use learned=True instead of net=."
                )
            if entry.key.parents and entry.spec.learned:
                raise ValueError(
                    f"{entry.where}: learned=True is for a variable without parents; this one's "
                    f"network is learned anyway. Drop it."
                )

    def _check_deterministic(self) -> None:
        for entry in self.entries():
            name, spec = entry.key.name, entry.spec
            if isinstance(spec, Cell):
                own = [ref for ref in entry.key.parents if ref.name == name]
                if not own or own[0].lag == 0:
                    example = f'"{name}[t] | {name}[t-1], …"'
                    raise ValueError(
                        f"{entry.where}: a recurrence reads its own past (or future). Write "
                        f"{example}: {type(spec).__name__}({spec.size})."
                    )
                if len(entry.key.parents) == len(own):
                    raise ValueError(
                        f"{entry.where} reads nothing but itself. Give it an input, e.g. x[t-1]."
                    )
                if len(self.shapes[name]) != 1:
                    raise ValueError(
                        f"{entry.where}: a recurrence has a single size, not the shape "
                        f"{self.shapes[name]}."
                    )
            elif isinstance(spec, Deterministic) and not entry.key.parents:
                raise ValueError(f"{entry.where} reads nothing. Name its parents right of a bar.")
            ats = (self.p.get(name) or {}) if entry.side == "p" else self.q[name]
            if any(other.spec.stochastic != spec.stochastic for other in ats.values()):
                raise ValueError(
                    f"{entry.where}: {name!r} is stochastic at one step and deterministic at "
                    f"another. Make it one of the two."
                )

    def _check_families(self) -> None:
        for name in self.latents_declared():
            for at, entry in self.q[name].items():
                spec = entry.spec
                for other in self.p[name].values():
                    if isinstance(other.spec, Exact):
                        raise ValueError(
                            f"{other.where}: Exact() is q's answer by Bayes' rule; p needs a "
                            f"distribution of its own."
                        )
                    if isinstance(spec, Exact):
                        if not other.spec.finite:
                            raise ValueError(
                                f"{entry.where}, but p gives {name!r} a "
                                f"{type(other.spec).__name__}, which cannot be enumerated. Use "
                                f"Normal(net=…)."
                            )
                    elif spec.finite != other.spec.finite or str(spec.support) != str(
                        other.spec.support
                    ):
                        raise ValueError(
                            f"{entry.where}, but p gives {name!r} a {type(other.spec).__name__}: "
                            f"their values differ. Use {type(other.spec).__name__}(net=…) in q."
                        )
                if isinstance(spec, Exact) and at in ("first", "last"):
                    raise ValueError(
                        f"{entry.where}: Exact() stands for every step; drop the entry for this "
                        f"one."
                    )
        for ats in self.p.values():
            for entry in ats.values():
                if isinstance(entry.spec, Exact):
                    raise ValueError(
                        f"{entry.where}: Exact() is q's answer by Bayes' rule; p needs a "
                        f"distribution of its own."
                    )

    def latents_declared(self) -> list[str]:
        return [name for name in self.q if name in self.p]

    def value_reads(
        self, drawn: tuple[str, ...], completed: Collection[str] = ()
    ) -> dict[str, list[Ref]]:
        """The parents of all nodes that are computed when q draws these latents.

        The nodes are the latents and every deterministic node. ``completed`` names observed
        variables whose missing entries p draws; they are nodes too. q reads them as data, so its
        nodes do not wait for them.
        """
        reads = {
            name: self.reads("p" if name in self.p else "q", name) for name in self.deterministic
        }
        reads |= {name: self.reads("q", name) for name in drawn}
        if completed:
            of_q = {*drawn, *(name for name in self.deterministic if name not in self.p)}
            reads = {
                name: [ref for ref in refs if name not in of_q or ref.name not in completed]
                for name, refs in reads.items()
            }
        return reads | {name: self.reads("p", name) for name in completed}

    @cached_property
    def reads_of_values(self) -> dict[str, list[Ref]]:
        """The parents of every deterministic node, and of every latent under q."""
        return self.value_reads(tuple(self.latents_declared()))

    @cached_property
    def place(self) -> dict[str, int]:
        """The number of the inference stage that computes each node.

        A node depends on no node of a later stage.
        """
        return {node: i for i, stage in enumerate(self.inference) for node in stage.nodes}

    @cached_property
    def _readers(self) -> dict[str, list[str]]:
        """The children of each variable in p."""
        found: dict[str, list[str]] = {}
        for name in self.p:
            for ref in self.reads("p", name):
                found.setdefault(ref.name, []).append(name)
        return found

    def is_read_by_p(self, name: str) -> bool:
        """Whether a factor or a deterministic node of p has this variable as a parent."""
        return bool(self._readers.get(name))

    def inference_stages(
        self, drawn: tuple[str, ...], completed: Collection[str] = ()
    ) -> tuple[Stage, ...]:
        return schedule(self.value_reads(drawn, completed), "p and q together")

    def function_stages(self, known: Collection[str]) -> tuple[Stage, ...]:
        """The stages of the deterministic nodes that depend only on these variables."""
        reads = self.value_reads(())
        readers: dict[str, list[str]] = {}
        for name, refs in reads.items():
            for ref in refs:
                readers.setdefault(ref.name, []).append(name)
        unknown = [name for name in readers if name not in reads and name not in known]
        while unknown:
            for name in readers.get(unknown.pop(), ()):
                if reads.pop(name, None) is not None:
                    unknown.append(name)
        return schedule(reads, "p and q together")

    def latent_behind(self, name: str) -> str | None:
        """A latent that q's factor of a variable reads, directly or through deterministic nodes.

        None if it reads only data.
        """
        frontier, seen = [ref.name for ref in self.reads("q", name)], set()
        while frontier:
            parent = frontier.pop()
            if parent in self.latents:
                return parent
            if parent not in seen and self.is_deterministic(parent):
                seen.add(parent)
                frontier += [
                    ref.name for ref in self.reads("q" if parent in self.q else "p", parent)
                ]
        return None

    def factors_containing(self, name: str) -> list[str]:
        """The stochastic variables whose factor in p contains ``name``; ``name`` comes first.

        A factor contains it directly or through deterministic nodes.
        """
        reached, frontier = {name}, [name]
        while frontier:
            node = frontier.pop()
            for other in self._readers.get(node, ()):
                if other not in reached:
                    reached.add(other)
                    if self.is_deterministic(other):
                        frontier.append(other)
        return [name] + [other for other in self.stochastic if other in reached and other != name]

    def _stochastic_reads(self, factor: str) -> list[tuple[str, bool]]:
        """The stochastic and given variables that p's factor reads.

        It reads them directly or through deterministic nodes. Each comes with a flag: whether the
        factor reads it at another step.
        """
        found: dict[tuple[str, bool], None] = {}
        frontier = [(ref.name, ref.lag != 0) for ref in self.reads("p", factor)]
        while frontier:
            node, elsewhere = frontier.pop(0)
            if (node, elsewhere) not in found:
                found[node, elsewhere] = None
                if self.is_deterministic(node):
                    frontier += [
                        (ref.name, elsewhere or ref.lag != 0) for ref in self.reads("p", node)
                    ]
        return [(node, elsewhere) for node, elsewhere in found if not self.is_deterministic(node)]

    def _check_exact(self, name: str) -> None:
        """Raise ValueError if Bayes' rule cannot give q's factor of ``name``.

        It is also an error if the key of the factor has other parents.
        """
        entry = self.rule("q", name)
        family = type(self.rule("p", name).spec).__name__
        needed: dict[str, None] = {}
        for factor in self.factors_containing(name):
            if self.timed[factor] and not self.timed[name]:
                raise ValueError(
                    f"{entry.where}: by Bayes it depends on every step of {factor!r}, which no "
                    f"key can name. Use {family}(net=…)."
                )
            ties = self._stochastic_reads(factor)
            needed |= {node: None for node in (factor, *(node for node, _ in ties)) if node != name}
            lagged = [
                node for node, elsewhere in ties if elsewhere and (node == name or factor == name)
            ]
            if lagged:
                raise ValueError(
                    f"{entry.where}: p({factor}) ties {name!r} to another step of {lagged[0]!r}, "
                    f"so Bayes' rule has no answer step by step. Use {family}(net=…)."
                )
        before = set(self.latents[: self.latents.index(name)])
        for other in needed:
            if other in self.latents and other not in before:
                raise ValueError(
                    f"{entry.where}: p's factor over {name!r} and {other!r} needs {other!r} drawn "
                    f"first. "
                    f'Let {name!r} come after it: "{name} | {other}": Exact().'
                )
        listed = {ref.name for ref in entry.key.parents}
        if listed != set(needed):
            names = ", ".join(f"{other}[t]" if self.timed[other] else other for other in needed)
            what = names or f"nothing: no other factor of p has {name!r} in it"
            raise ValueError(
                f"{entry.where}, but by Bayes it depends on {what}. Write "
                f'"{entry.key.target}{names and " | "}{names}": Exact().'
            )


def _read(side: str, declaration: Mapping[str, Conditional]) -> Rules:
    rules: Rules = {}
    if not isinstance(declaration, Mapping):
        raise ValueError(
            f'{side} is a dictionary from "variable | parents" to a conditional, got '
            f"{type(declaration).__name__}."
        )
    for text, spec in declaration.items():
        key = parse_key(text)
        if not isinstance(spec, Conditional):
            hint = "()" if isinstance(spec, type) else ""
            raise ValueError(
                f"{side} gives {text!r} the value {spec!r}{hint and ', a class'}, which is not a "
                f"conditional. Use e.g. Normal(20, net=mlp(500, 500))."
            )
        entry = Entry(side, key, spec)
        ats = rules.setdefault(key.name, {})
        if key.at in ats:
            raise ValueError(
                f'{side} declares {key.target} twice: "{ats[key.at].key}" and "{key}". Keep one.'
            )
        ats[key.at] = entry
    return rules


def _shape(what: str, size: int | Shape) -> Shape:
    shape = tuple(size) if isinstance(size, list | tuple) else (size,)
    if not shape or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in shape):
        raise ValueError(
            f"{what}: a size is a positive whole number or a tuple of them, got {size!r}."
        )
    return shape


def _text(shape: Shape) -> str:
    return str(shape[0]) if len(shape) == 1 else str(shape)
