"""Compare the library's numbers with the interpreter's, for one declaration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .bounds import Recipe, bound, evidence_on_nodes, expected_bound
from .data import Rows, random_noise, random_rows, values
from .declaration import Declaration
from .exact import joint
from .families import gauss_hermite
from .marginals import marginal
from .nesting import Nesting, nestings
from .printed import Formula, from_latex
from .unroll import ON_AXES, World

KINDS = ("complete", "missing", "clamped")
TOLERANCE = 1e-8
MOST_POINTS = 3000  # maximum number of joint values of all unknowns of one row
MOST_PLACES = 5  # maximum number of entries of the noise, which get three nodes each

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Comparison:
    """One quantity from both implementations, and its origin."""

    what: str
    difference: float
    detail: str

    @property
    def agrees(self) -> bool:
        return self.difference <= TOLERANCE  # False for NaN


@dataclass(frozen=True)
class Request:
    """The arguments of a call of the library besides the data."""

    how: Mapping[str, str]
    bound: str = "elbo"
    samples: int = 1
    gradient: str = "plain"
    kl_weight: float = 1.0
    temperature: float = 0.5

    def choices(self) -> dict[str, Any]:
        return {
            "how": dict(self.how),
            "bound": self.bound,
            "samples": self.samples,
            "gradient": self.gradient,
        }


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to numbers larger than 1."""
    if ours.shape != theirs.shape:
        return math.inf
    if not ours.numel():
        return 0.0
    gap = (ours - theirs).abs() / theirs.abs().clamp_min(1.0)
    return float(gap.max()) if not bool(gap.isnan().any()) else math.nan


def gradients(value: Tensor, weights: Weights) -> Tensor:
    """Return all gradients in one vector; zeros for weights that do not affect the value."""
    found = (
        torch.autograd.grad(value, list(weights.values()), allow_unused=True)
        if value.requires_grad
        else [None] * len(weights)
    )
    parts = [
        torch.zeros_like(weight) if each is None else each
        for weight, each in zip(weights.values(), found, strict=True)
    ]
    return (
        torch.cat([part.reshape(-1) for part in parts])
        if parts
        else torch.zeros(0, dtype=torch.float64)
    )


class Comparer:
    """All comparisons of one declaration."""

    def __init__(self, declaration: Declaration, seed: int) -> None:
        self.declaration, self.seed = declaration, seed
        self.rng = np.random.default_rng(seed)
        self.model = declaration.model(seed)
        self.weights: dict[str, Tensor] = dict(self.model.named_parameters())
        self.refused = 0

    def run(self, kinds: Sequence[str] = KINDS, requests: int = 7) -> Iterator[Comparison]:
        """Yield comparisons of all quantities for each kind of data, with ``requests`` bounds."""
        for kind in kinds:
            rows = random_rows(self.declaration, self.rng, kind)
            try:
                self.model.prepare(**rows.arguments())
            except ValueError:
                self.refused += 1
                continue
            if self.points(rows) > MOST_POINTS:
                self.refused += 1
                continue
            yield from self.bounds(rows, kind, requests)
            yield from self.expectations(rows, kind)
            yield from self.evidence(rows, kind)
            yield from self.log_probabilities(rows, kind)
            yield from self.marginals(rows, kind)

    def points(self, rows: Rows) -> int:
        """Return the largest number of joint values of an unrolled row."""
        most = 1
        for n in range(len(rows)):
            row, count = rows.row(self.declaration, n), 1
            world = World(self.declaration, self.weights, row, ways={})
            for name in self.declaration.latents:
                for node in world.nodes(name):
                    line = world.line("q", node)
                    values = None if line.family == "Exact" else world.family(line).values
                    values = (
                        world.family(world.line("p", node)).values
                        if line.family == "Exact"
                        else values
                    )
                    each = (
                        line.options.get("components", 2)
                        if line.family == "Mixture"
                        else len(values)
                        if values is not None
                        else 1
                    )
                    count *= 1 if row.known(node) else each
            most = max(most, count)
        return most

    # Bounds ---------------------------------------------------------------------------------------

    def requests(self, count: int) -> list[Request]:
        """Return the plan's own choices, then some at random."""
        rng, found = self.rng, [Request({})]
        draws = [
            "",
            "",
            "enumerate",
            "sum",
            "stratify",
            "pathwise",
            "gumbel",
            "relaxed",
            "straight-through",
            "score",
            "detached",
        ]
        terms = ["", "", "closed", "entropy", "sampled"]
        found.append(Request({}, "iwae", int(rng.choice([1, 2, 3]))))
        while len(found) < count:
            how = {
                name: f"{rng.choice(draws)} {rng.choice(terms)}".strip()
                for name in self.declaration.latents
                if rng.random() < 0.6
            }
            how = {name: text for name, text in how.items() if text}
            which = str(rng.choice(["elbo", "iwae"]))
            gradient = str(rng.choice(["plain", "plain", "stl", "dreg"]))
            if gradient == "dreg":
                which, how = "iwae", {}
            samples = int(rng.choice([1, 2, 3]))
            beta = float(rng.choice([1.0, 1.0, 0.3]))
            found.append(
                Request(
                    how,
                    which,
                    max(samples, 2) if gradient == "dreg" else samples,
                    gradient,
                    beta,
                    float(rng.choice([0.5, 0.8])),
                )
            )
        return found

    def bounds(self, rows: Rows, kind: str, count: int) -> Iterator[Comparison]:
        tried = []
        for request in self.requests(count):
            if request in tried:
                continue
            tried.append(request)
            yield from self.one_bound(rows, request, kind)

    def plan(self, rows: Rows, request: Request) -> Any:
        batch = self.model.prepare(**rows.arguments())
        known = {name for name in self.declaration.latents if name in rows.arrays}
        partial = {name[:-1] for name in batch if name.endswith("?")}
        return self.model.plan(**request.choices(), clamped=known - partial, partial=partial)

    def one_bound(self, rows: Rows, request: Request, kind: str) -> Iterator[Comparison]:
        try:
            plan = self.plan(rows, request)
        except ValueError:
            self.refused += 1
            return
        layout = plan.layout(len(rows), rows.steps, dropout=False)
        if any(sort == "seed" for sort, _ in layout.values()):
            self.refused += 1
            return
        noise, injected = {}, {}
        for key, (sort, shape) in layout.items():
            noise[key] = random_noise(self.rng, sort, (request.samples, *shape[-3:]))
            injected[key] = noise[key].expand(shape)
        ways = {name: choice.draw for name, choice in plan.choices.items()}
        known = {"clamped": plan.clamped, "partial": plan.partial}
        explanation = self.model.explain(**request.choices(), **known)
        formula = Formula(explanation)
        same = from_latex(explanation.latex) == formula.text
        yield Comparison(
            "printed LaTeX", 0.0 if same else math.inf, f"{explanation.latex} for {formula.text}"
        )
        terms = {name: formula.term(name, way) for name, way in ways.items()}
        for name in (*self.declaration.observed, *plan.clamped):
            assert formula.count("log p", name) == 1, formula.text
        settings = (
            request.bound,
            request.samples,
            request.gradient,
            request.kl_weight,
            request.temperature,
        )
        nesting, follows = self.nesting(formula, ways, request)
        yield Comparison(
            "printed nesting",
            0.0 if follows else math.inf,
            f"{formula.text} should be nested as {nesting}",
        )
        recipe = Recipe(ways, terms, nesting, *settings)
        where = f"{kind}, {request}"
        weight = {"kl_weight": request.kl_weight, "temperature": request.temperature}
        ours = self.model.elbo(
            **request.choices(), **weight, noise=injected, **rows.arguments()
        ).objective
        parts = []
        for n in range(len(rows)):
            own = {key: value[:, :, n if value.shape[2] > 1 else 0] for key, value in noise.items()}
            parts.append(
                bound(self.declaration, self.weights, rows.row(self.declaration, n), own, recipe)
            )
        theirs = torch.stack(parts)
        yield Comparison(f"{request.bound} value", relative(ours.detach(), theirs.detach()), where)
        if request.gradient != "plain" and self.sampled_functions(ways):
            return
        share = torch.linspace(0.5, 1.5, len(rows), dtype=torch.float64)
        mine, other = (
            gradients((share * ours).sum(), self.weights),
            gradients((share * theirs).sum(), self.weights),
        )
        # Rounding errors are relative to the largest entry of the vector.
        size = float(other.abs().max().clamp_min(1.0)) if len(other) else 1.0
        yield Comparison(
            f"{request.bound} gradient, {request.gradient}",
            relative(mine / size, other / size),
            where,
        )

    def nesting(
        self, formula: Formula, ways: Mapping[str, str], request: Request
    ) -> tuple[Nesting, bool]:
        """Return an order of the sums that follows the rules, and whether the printed one does."""
        orders = nestings(self.declaration, ways, request.bound)
        if request.samples == 1:  # there is no mean over samples
            orders = [tuple(step for step in order if step[1] != "samples") for order in orders]
        printed = formula.nesting([name for name, way in ways.items() if way == "stratify"])
        return (printed, True) if printed in orders else (orders[0], False)

    # Expectations over the noise ------------------------------------------------------------------

    def expectations(self, rows: Rows, kind: str) -> Iterator[Comparison]:
        """Compare the mean of the estimate over its noise, by quadrature, with the bound.

        The mean and its gradient do not depend on how the terms are computed. Each row is repeated
        once for every node. Three Gauss–Hermite nodes are exact for a term in closed form, which is
        quadratic in its own noise, so both sides agree for any nodes of the other noise. They do
        not agree if a closed form is used although it is not valid. Two samples have every pair of
        nodes.
        """
        finite = [
            name
            for name in self.declaration.latents
            if name not in self.declaration.timed and self.declaration.finite(name)
        ]
        for n in range(len(rows)):
            for gradient in ("plain", "stl"):
                yield from self.one_expectation(rows, n, Request({}, gradient=gradient), kind)
            for how in ({}, *({name: "sum"} for name in finite)):
                yield from self.one_expectation(rows, n, Request(how, "iwae", 2), kind)

    def one_expectation(
        self, rows: Rows, n: int, request: Request, kind: str
    ) -> Iterator[Comparison]:
        try:
            plan = self.plan(rows.repeated(n, 2), request)
        except ValueError:
            return
        ways, samples = (
            {name: choice.draw for name, choice in plan.choices.items()},
            request.samples,
        )
        shapes = {
            key: shape
            for key, (sort, shape) in plan.layout(2, rows.steps, dropout=False).items()
            if sort == "normal" and shape[-2] == 2
        }
        if len(shapes) < len(plan.layout(2, rows.steps, dropout=False)) or not set(
            ways.values()
        ) <= {"pathwise", *ON_AXES}:
            return  # the noise is not Gaussian, or of a root of q, which is drawn once for all rows
        places = [
            (key, t, i)
            for key, shape in shapes.items()
            for t in range(min(shape[-3], rows.lengths[n]))
            for i in range(shape[-1])
        ]
        if not 0 < len(places) <= MOST_PLACES // samples:
            return
        nodes, node_weights = gauss_hermite(len(places), 3)
        noise = {
            key: torch.zeros(len(nodes), shape[-3], shape[-1], dtype=torch.float64)
            for key, shape in shapes.items()
        }
        for position, (key, t, i) in enumerate(places):
            noise[key][:, t, i] = nodes[:, position]
        # The nodes of the samples, one tuple per row.
        tuples = torch.cartesian_prod(*[torch.arange(len(nodes))] * samples).reshape(-1, samples)
        many = rows.repeated(n, len(tuples))
        layout = plan.layout(len(tuples), many.steps, dropout=False)
        formula = Formula(
            self.model.explain(**request.choices(), clamped=plan.clamped, partial=plan.partial)
        )
        nesting, follows = self.nesting(formula, ways, request)
        yield Comparison(
            "printed nesting",
            0.0 if follows else math.inf,
            f"{formula.text} should be nested as {nesting}",
        )
        recipe = Recipe(ways, {}, nesting, request.bound, samples, request.gradient)
        injected = {
            key: noise[key][tuples].permute(1, 2, 0, 3).expand(shape)
            for key, (_, shape) in layout.items()
        }
        each = self.model.elbo(**request.choices(), noise=injected, **many.arguments()).value
        ours = (node_weights[tuples].prod(1) * each).sum()
        drawn = (
            self.declaration,
            self.weights,
            rows.row(self.declaration, n),
            noise,
            node_weights,
            recipe,
        )
        theirs = expected_bound(*drawn)
        where = f"{kind}, row {n}, {request}"
        yield Comparison(
            f"expected {request.bound}", relative(ours.detach(), theirs.detach()), where
        )
        mine, other = gradients(ours, self.weights), gradients(theirs, self.weights)
        size = float(other.abs().max().clamp_min(1.0)) if len(other) else 1.0
        yield Comparison(
            f"expected gradient, {request.gradient}", relative(mine / size, other / size), where
        )
        if request.bound == "iwae":
            single = expected_bound(*drawn[:-1], replace(recipe, samples=1))
            rising = torch.stack([single, ours, evidence_on_nodes(*drawn)]).detach()
            yield Comparison(
                "one sample ≤ two ≤ evidence",
                float((rising[:-1] - rising[1:]).max().clamp_min(0.0)),
                f"{where}: {rising.tolist()}",
            )

    def sampled_functions(self, ways: Mapping[str, str]) -> bool:
        """Return whether q reads a deterministic node that depends on a sample.

        The treatment of the node's weights by stl and dreg is then a choice.
        """
        return any(
            line.side == "q"
            and line.stochastic
            and any(
                not self.declaration.stochastic(read.name)
                and read.name not in self.declaration.given
                for read in line.reads
            )
            for line in self.declaration.lines
        )

    # Evidence and log-probabilities ---------------------------------------------------------------

    def evidence(self, rows: Rows, kind: str) -> Iterator[Comparison]:
        try:
            ours = self.model.log_evidence(method="exact", **rows.arguments()).value
        except ValueError:
            self.refused += 1
            return
        joints = [
            joint(self.declaration, self.weights, rows.row(self.declaration, n))
            for n in range(len(rows))
        ]
        if any(each is None for each in joints):
            yield Comparison(
                "evidence",
                math.inf,
                f"{kind}: the library calls this evidence exact, but log p is not quadratic",
            )
            return
        theirs = torch.stack([each.log_evidence() for each in joints if each is not None])
        yield Comparison("evidence", relative(ours, theirs.detach()), kind)

    def log_probabilities(self, rows: Rows, kind: str) -> Iterator[Comparison]:
        """Compare log p of a complete assignment and log q of latents, at the library's samples."""
        declaration, model = self.declaration, self.model
        posterior = model.posterior(seed=self.seed, method="q", **rows.arguments())
        drawn = {name: value[0] for name, value in posterior.sample(1).items()}
        latents = {
            name: value.reshape(len(rows), *([rows.steps] if name in declaration.timed else []), -1)
            for name, value in drawn.items()
        }
        try:
            ours = (
                posterior.log_prob(**latents)
                if latents
                else torch.zeros(len(rows), dtype=torch.float64)
            )
        except ValueError:  # Bayes' rule in time has no density if a static node reads an end
            self.refused += 1
            return
        theirs, joint_p = [], []
        for n in range(len(rows)):
            row = rows.row(declaration, n)
            full = {
                name: value[n : n + 1, : row.steps]
                if name in declaration.timed
                else value[n : n + 1]
                for name, value in latents.items()
            }
            world = World(declaration, self.weights, row, ways={}, fixed=full)
            unknown = [
                node for name in latents for node in world.nodes(name) if not row.known(node)
            ]
            theirs.append(
                sum(
                    (world.log_q(node) for node in unknown), torch.zeros(1, dtype=torch.float64)
                ).reshape(())
            )
            if not any(name in row.present for name in declaration.observed):
                names = [name for name in declaration.names("p") if declaration.stochastic(name)]
                joint_p.append(
                    sum(world.log_p(node) for name in names for node in world.nodes(name)).reshape(
                        ()
                    )
                )
        yield Comparison("log q", relative(ours.detach(), torch.stack(theirs).detach()), kind)
        if len(joint_p) == len(rows):
            arguments = rows.arguments() | latents
            yield Comparison(
                "log p",
                relative(model.log_prob(**arguments).detach(), torch.stack(joint_p).detach()),
                kind,
            )

    def marginals(self, rows: Rows, kind: str) -> Iterator[Comparison]:
        """Compare ``posterior(...)[v]``: log-probabilities of all values, or of a few points.

        A known value must be certain.
        """
        declaration = self.declaration
        try:
            self.plan(rows, Request({}))
        except ValueError:  # the library's marginals are then averages over draws
            self.refused += 1
            return
        posterior = self.model.posterior(seed=self.seed, method="q", **rows.arguments())
        for name in declaration.latents:
            if rows.knows(declaration, name):
                continue
            family = declaration.rules("p", name)["t" if name in declaration.timed else ""]
            table = (
                World(declaration, self.weights, rows.row(declaration, 0), ways={})
                .family(family)
                .values
            )
            points = (
                torch.from_numpy(values(self.rng, family.family, (3, declaration.sizes[name])))
                if table is None
                else table
            )
            theirs = self._marginals(rows, name, points)
            if theirs is None:
                continue
            shape = (len(points), *[1] * (2 if name in declaration.timed else 1), points.shape[-1])
            ours = posterior[name].log_prob(points.reshape(shape)).detach()
            real = [
                (n, t)
                for n in range(len(rows))
                for t in (range(rows.lengths[n]) if name in declaration.timed else [None])
            ]
            found = torch.stack([ours[:, n] if t is None else ours[:, n, t] for n, t in real])
            expected = torch.stack([theirs[place] for place in real]).detach()
            yield Comparison("posterior", relative(found.exp(), expected.exp()), f"{kind}, {name}")

    def _marginals(
        self, rows: Rows, name: str, points: Tensor
    ) -> dict[tuple[int, int | None], Tensor] | None:
        found: dict[tuple[int, int | None], Tensor] = {}
        for n in range(len(rows)):
            row = rows.row(self.declaration, n)
            for t in range(row.steps) if name in self.declaration.timed else [None]:
                if row.known((name, t)):
                    known = row.data[name] if t is None else row.data[name][t]
                    here = torch.where((points == known).all(-1), 0.0, -math.inf).double()
                else:
                    one = marginal(self.declaration, self.weights, row, (name, t), points)
                    if one is None:
                        return None
                    here = one
                found[n, t] = here
        return found
