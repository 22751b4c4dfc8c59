"""Random declarations, static and in time, usual and unusual ones."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .declaration import Declaration, Line, Read

REAL_P = (
    ("Normal", 60),
    ("MultivariateNormal", 15),
    ("Laplace", 8),
    ("StudentT", 7),
    ("Mixture", 10),
)
REAL_Q = (
    ("Normal", 55),
    ("MultivariateNormal", 20),
    ("Mixture", 10),
    ("Laplace", 10),
    ("StudentT", 5),
)
DATA = (
    ("Normal", 40),
    ("MultivariateNormal", 12),
    ("Bernoulli", 12),
    ("OneHot", 8),
    ("Poisson", 8),
    ("NegativeBinomial", 5),
    ("Laplace", 5),
    ("StudentT", 5),
    ("Mixture", 8),
    ("Beta", 3),
    ("ContinuousBernoulli", 4),
)
SUPPORTS = {
    "Normal": "real",
    "MultivariateNormal": "real",
    "Laplace": "real",
    "StudentT": "real",
    "Mixture": "real",
    "Bernoulli": "binary",
    "OneHot": "class",
    "Poisson": "count",
    "NegativeBinomial": "count",
    "Beta": "unit",
    "ContinuousBernoulli": "unit",
}


def pick(rng: random.Random, weighted: Sequence[tuple[str, int]]) -> str:
    return rng.choices([name for name, _ in weighted], [weight for _, weight in weighted])[0]


class Author:
    """Writer of one declaration.

    ``gaussian`` restricts it to linear-Gaussian and finite variables, whose evidence is exact.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.gaussian = rng.random() < 0.4
        self.in_time = rng.random() < 0.55
        self.kinds: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.timed: set[str] = set()
        self.lines: list[Line] = []
        self.given: list[str] = []
        self.direction = rng.choice([-1, -1, 1, 0])

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # Families -------------------------------------------------------------------------------------

    def options(self, family: str, reads: Sequence[Read], side: str) -> dict[str, Any]:
        rng, options = self.rng, {}
        # The scale must not depend on a Gaussian.
        smooth = self.gaussian and any(self.kinds.get(read.name) == "real" for read in reads)
        if family in ("Normal", "Laplace", "StudentT"):
            options["scale"] = rng.choice(
                ["learned", 0.7] if smooth else ["network", "network", "learned", 0.7]
            )
        if family == "StudentT":
            options["df"] = rng.choice([3.0, 5.5])
        if family == "MultivariateNormal" and (smooth or self.chance(0.4)):
            options["covariance"] = "shared"
        if family == "Mixture":
            options["components"] = rng.choice([2, 2, 3])
        if family == "NegativeBinomial":
            options["dispersion"] = rng.choice(["learned", "network", 1.5])
        if not reads and (family == "ContinuousBernoulli" or self.chance(0.6)):
            options["learned"] = True
        return options

    def line(self, side: str, target: Read, reads: Sequence[Read], family: str) -> Line:
        reads = tuple(dict.fromkeys(reads))
        hidden = (3,) if reads and not self.gaussian and self.chance(0.25) else ()
        return Line(
            side,
            target,
            reads,
            family,
            self.options(family, reads, side),
            hidden,
            self.rng.choice(["tanh", "softplus"]),
        )

    def family(self, name: str, side: str) -> str:
        kind = self.kinds[name]
        if kind == "class":
            return "OneHot"
        if kind == "binary":
            return "Bernoulli"
        if kind == "unit":
            return (
                "ContinuousBernoulli"
                if side == "q"
                else self.rng.choice(["Beta", "ContinuousBernoulli"])
            )
        if kind == "count":
            return self.rng.choice(["Poisson", "NegativeBinomial"])
        if self.gaussian:
            return self.rng.choice(["Normal", "Normal", "MultivariateNormal"])
        family = pick(self.rng, REAL_P if side == "p" else REAL_Q)
        return "Normal" if side == "q" and family == "Mixture" and name in self.timed else family

    # p --------------------------------------------------------------------------------------------

    def latent_kinds(self) -> list[str]:
        rng = self.rng
        return rng.choices(
            ["real", "class", "binary", "unit"],
            [50, 25, 20, 0 if self.gaussian else 4],
            k=rng.choice([1, 1, 2, 2, 2, 3]),
        )

    def write(self) -> Declaration:
        rng = self.rng
        pool = {
            "real": ["z", "u", "w"],
            "class": ["y", "k", "j"],
            "binary": ["b", "a", "d"],
            "unit": ["m", "n_", "o"],
        }
        kinds = self.latent_kinds()
        latents = [pool[kind].pop(0) for kind in kinds]
        self.kinds |= dict(zip(latents, kinds, strict=True))
        observed = ["x", "l"][: rng.choice([1, 1, 1, 2])]
        for name in observed:
            family = (
                rng.choice(["Normal", "Normal", "MultivariateNormal", "Bernoulli"])
                if self.gaussian
                else pick(rng, DATA)
            )
            if self.gaussian and "real" in kinds and family == "Bernoulli":
                family = "Normal"
            self.kinds[name] = SUPPORTS[family]
        for name, kind in self.kinds.items():
            self.sizes[name] = {"class": rng.choice([2, 3])}.get(kind, rng.choice([1, 1, 2]))
        if self.in_time:
            self.timed = {name for name in self.kinds if self.chance(0.75)} or {observed[0]}
            if not self.timed & set(observed):
                self.timed.add(observed[0])
        if self.chance(0.2):
            self.given = ["c"]
            self.sizes["c"], self.kinds["c"] = 2, "given"
            if self.in_time and self.chance(0.5):
                self.timed.add("c")
        order = [*latents, *observed]
        if self.chance(0.15):
            rng.shuffle(order)
        node = (self.in_time and self.chance(0.35)) or (not self.in_time and self.chance(0.25))
        place = rng.randrange(1, len(order)) if node and len(order) > 1 else None
        done: list[str] = []
        for position, name in enumerate(order):
            if position == place:
                self.deterministic("h", "p", done, order)
                done.append("h")
            self.factor("p", name, done, order, name in observed)
            done.append(name)
        self.posterior(latents, observed)
        self.drop_unread_given()
        missing = "mask" if self.chance(0.2) else "zeros"
        return Declaration(
            tuple(self.lines), self.sizes, tuple(self.given), frozenset(self.timed), missing
        )

    def drop_unread_given(self) -> None:
        if not any(read.name == "c" for line in self.lines for read in line.reads):
            self.given = []

    def sources(
        self,
        done: Sequence[str],
        later: Sequence[str],
        *,
        timed: bool,
        direction: int,
        near: float = 0.5,
        far: float = 0.2,
    ) -> list[Read]:
        """Draw the parents of a rule for every step, or of a static variable."""
        reads = []
        for name in [*done, *self.given]:
            if name in self.timed and timed and self.chance(near):
                reads.append(Read(name, "t"))
            elif name in self.timed and not timed and self.chance(0.25):
                reads.append(Read(name, self.rng.choice("0T")))
            elif name not in self.timed and self.chance(near):
                reads.append(Read(name))
        if timed and direction:
            reads += [
                Read(name, "t", direction)
                for name in dict.fromkeys([*done, *later])
                if name in self.timed and self.chance(far)
            ]
        return reads

    def factor(
        self, side: str, name: str, done: list[str], order: Sequence[str], observed: bool
    ) -> None:
        timed, later = (
            name in self.timed,
            [other for other in order if other not in done and other != name and not observed],
        )
        reads = self.sources(done, later, timed=timed, direction=-1)
        if timed and self.chance(0.2 if observed else 0.6):
            reads.append(Read(name, "t", -1))
        if observed and done and not any(read.name in done for read in reads):
            other = self.rng.choice(done)
            if timed or other not in self.timed:
                reads.append(Read(other, "t" if other in self.timed else ""))
            else:
                reads.append(Read(other, self.rng.choice("0T")))
        family = self.observed_family(name) if observed else self.family(name, side)
        self.lines.append(self.line(side, Read(name, "t" if timed else ""), reads, family))
        self.ends(side, name, done, 0.3, 0.15, observed=observed)

    def observed_family(self, name: str) -> str:
        kind = self.kinds[name]
        if self.gaussian and kind == "real":
            return self.rng.choice(["Normal", "MultivariateNormal"])
        return pick(
            self.rng, [(family, weight) for family, weight in DATA if SUPPORTS[family] == kind]
        )

    def ends(
        self,
        side: str,
        name: str,
        done: Sequence[str],
        first: float,
        last: float,
        *,
        observed: bool = False,
    ) -> None:
        for at, probability in (("0", first), ("T", last)):
            if name in self.timed and self.chance(probability):
                candidates = [
                    Read(other, at if other in self.timed else "") for other in [*done, *self.given]
                ]
                reads = [read for read in candidates if self.chance(0.5)]
                family = self.observed_family(name) if observed else self.family(name, side)
                self.lines.append(self.line(side, Read(name, at), reads, family))

    def deterministic(self, name: str, side: str, done: list[str], order: Sequence[str]) -> None:
        """Add a function of some of the variables; in time it may be a recurrence."""
        rng = self.rng
        self.kinds[name], self.sizes[name] = "real", 2
        direction = -1 if side == "p" else rng.choice([-1, 1])
        timed = self.in_time and self.chance(0.8)
        options: dict[str, Any] = {}
        if timed:
            self.timed.add(name)
            reads = self.sources(
                done,
                order if side == "p" else (),
                timed=True,
                direction=direction,
                near=0.4,
                far=0.4,
            )
            family = (
                rng.choice(["GRU", "LSTM", "Deterministic"])
                if not self.gaussian
                else "Deterministic"
            )
            reads = (
                reads or [Read(other, "t", direction) for other in order if other in self.timed][:1]
            )
            if family != "Deterministic" or self.chance(0.3):
                reads = [Read(name, "t", direction), *reads]
            if family != "Deterministic" and self.chance(0.3):
                options["layers"] = 2
        else:
            family, reads = "Deterministic", self.sources(done, (), timed=False, direction=0)
            if not reads and done:
                reads = [Read(done[0], "0" if done[0] in self.timed else "")]
        if family == "Deterministic" and not self.gaussian:
            options["activation"] = rng.choice(["identity", "tanh"])
        self.lines.append(
            Line(
                side, Read(name, "t" if timed else ""), tuple(dict.fromkeys(reads)), family, options
            )
        )

    # q --------------------------------------------------------------------------------------------

    def posterior(self, latents: list[str], observed: list[str]) -> None:
        order = latents[:]
        self.rng.shuffle(order)
        done = [*observed]
        if any(line.name == "h" for line in self.lines) and self.chance(0.3):
            done.append("h")
        if self.chance(0.2):
            self.deterministic("g", "q", [*observed], observed)
            done.append("g")
        for name in order:
            timed = name in self.timed
            if self.kinds[name] in ("class", "binary") and self.chance(0.15):
                self.lines.append(Line("q", Read(name, "t" if timed else ""), (), "Exact"))
                done.append(name)
                continue
            reads = self.sources(done, [], timed=timed, direction=self.direction, near=0.6)
            if timed and self.direction and self.chance(0.5):
                reads.append(Read(name, "t", self.direction))
            self.lines.append(
                self.line("q", Read(name, "t" if timed else ""), reads, self.family(name, "q"))
            )
            self.ends("q", name, done, 0.2, 0.2)
            done.append(name)


class NestingAuthor(Author):
    """Writer of several finite latents and a continuous one, all static.

    Their bounds have many sums, whose order matters.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.in_time = False

    def latent_kinds(self) -> list[str]:
        rng = self.rng
        kinds = [
            "real",
            *rng.choices(["class", "binary"], k=2),
            *rng.choices(["class", "binary", "real"], k=rng.choice([0, 1])),
        ]
        rng.shuffle(kinds)
        return kinds


def random_declaration(seed: int) -> tuple[Declaration, int]:
    """Return a declaration that the library accepts, and the number of refused ones before it.

    One seed in ten is for nested sums.
    """
    rng, refused = random.Random(seed), 0
    while True:
        declaration = (NestingAuthor if seed % 10 == 9 else Author)(rng).write()
        for _ in range(3):
            try:
                declaration.model(seed)
            except ValueError as error:
                suggested = re.search(r'Write "([^"]*)": Exact\(\)', str(error))
                if suggested is None:
                    break
                declaration = _with_exact(declaration, suggested[1])
            else:
                return declaration, refused
        refused += 1


def _with_exact(declaration: Declaration, key: str) -> Declaration:
    """Give an Exact() factor of q the parents that Bayes' rule requires, from the key."""
    target, _, parents = key.partition(" | ")
    reads = tuple(_read(text.strip()) for text in parents.split(",") if text.strip())
    lines = [
        replace(line, reads=reads) if line.side == "q" and str(line.target) == target else line
        for line in declaration.lines
    ]
    return replace(declaration, lines=tuple(lines))


def _read(text: str) -> Read:
    name, _, index = text.partition("[")
    index = index.removesuffix("]")
    return (
        Read(name, "", 0)
        if not index
        else Read(name, index)
        if index in "0T"
        else Read(name, "t", int(index.removeprefix("t") or 0))
    )
