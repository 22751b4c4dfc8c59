"""The derivation: from two factorizations to an estimator of the bound, with reasons.

For each latent v, the plan chooses how to compute the expectation over v (enumerated, pathwise,
relaxed, score function) and the term E[log p(v|·) − log q(v|·)] (in closed form, or on samples).
A closed form is valid under two conditions. A KL divergence is known for the two families, and no
parent of v in p is a descendant of v in the graph of q's factors and all deterministic nodes,
unrolled over time. Only then are p's parameters constant inside the expectation over v.

Missing entries of an observed variable that p reads are drawn from p; see
:mod:`aevb.derive.completion`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from aevb.declare.evaluation_order import Stage
from aevb.declare.families import Exact
from aevb.declare.graph import Entry, Graph
from aevb.declare.noise_kinds import SEED, NoiseKind, keep
from aevb.derive.axes import FIRST_SLOT
from aevb.derive.completion import Completion, completions, incomplete
from aevb.derive.dependence import Axis, N, S, Sampling, T, conflict, find_axes
from aevb.derive.divergences import closed_form_kl
from aevb.derive.draws import DRAWS, TERMS, Draw, Reduction, Term
from aevb.derive.filtering import why_not_filtered
from aevb.derive.noise_names import RESAMPLING, dropout_name, own_draws_name
from aevb.derive.sample_counts import usual_samples
from aevb.runtime.suggestions import did_you_mean

Layout = dict[str, tuple[NoiseKind, tuple[int, ...]]]  # noise by name: its kind and its shape
BOUNDS = ("elbo", "iwae", "particles")
GRADIENTS = ("plain", "stl", "dreg", "score")
WEIGHTED = ("iwae", "particles")  # the bounds that average weights of samples in a logarithm
# Particles of a row are resampled where their effective sample size is below this share of them.
RESAMPLE = 0.5
LIMIT = 256  # the plan enumerates at most this many joint values unless the user asks for more


@dataclass(frozen=True)
class Choice:
    """How the plan handles one latent: its draw, its term, and the reasons."""

    name: str
    draw: Draw
    term: Term
    why_draw: str
    why_term: str

    @property
    def bias(self) -> str | None:
        """A description of the estimator's bias; None if it is unbiased."""
        return self.draw.bias


@dataclass(frozen=True)
class Plan:
    """A derived estimator.

    It is plain data, and with parameters, batch and noise it determines the estimate.
    """

    graph: Graph = field(repr=False)
    choices: dict[str, Choice]
    bound: str
    samples: int
    gradient: str
    clamped: frozenset[str]  # latents known in every row
    partial: frozenset[str]  # variables known in some rows or entries
    stages: tuple[Stage, ...] = field(repr=False)
    slots: dict[str, tuple[int, int | None]] = field(repr=False)
    axes: dict[str, frozenset[Axis]] = field(repr=False)  # of each entry's raw numbers
    values: dict[str, frozenset[Axis]] = field(repr=False)  # of each variable's value
    # The noise of each entry that is drawn; see ``_noise_keys``.
    noise_keys: dict[str, str] = field(repr=False)
    completed: frozenset[str] = frozenset()  # observed variables whose missing entries p draws
    completions: Mapping[str, Completion] = field(default_factory=dict)  # and how each is drawn
    # Under particles: the share of effective particles below which a row is resampled.
    resample: float = 0.0

    @property
    def drawn(self) -> tuple[str, ...]:
        """The latents whose value is sampled."""
        return tuple(name for name, choice in self.choices.items() if not choice.draw.enumerates)

    @property
    def enumerated(self) -> tuple[str, ...]:
        """The latents whose values are all summed over."""
        return tuple(name for name, choice in self.choices.items() if choice.draw.enumerates)

    def weights_read(self, name: str) -> frozenset[str]:
        """The axes that a latent's weights depend on, directly or through other weights.

        An axis is a latent, or ``S.name`` for samples.
        """
        found: set[str] = set()
        frontier = {name}
        while frontier:
            entries = self.graph.q[frontier.pop()].values()
            new = {
                axis
                for entry in entries
                for axis, _ in self.axes[entry.id]
                if axis in (*self.slots, S.name)
            } - found
            found |= new
            frontier |= new - {S.name}
        return frozenset(found)

    @property
    def inner(self) -> tuple[str, ...]:
        """Static latents with an axis whose weights depend on samples.

        Their expectation precedes the mean over samples.
        """
        return tuple(
            name
            for name in self.slots
            if not self.graph.timed[name] and S.name in self.weights_read(name)
        )

    @property
    def order(self) -> tuple[str, ...]:
        """The order of the expectations, innermost first.

        It holds the latents with an axis, and ``S.name`` for the mean over samples. A latent comes
        before all axes that its weights depend on. A sum inside a logarithm comes before the other
        expectations where possible: log Σ exp E ≤ E log Σ exp, so this order gives the tighter
        bound. Of several such sums, the one that must follow the fewest expectations comes first.
        """
        # Weights depend only on later latents of this list.
        latents = [name for name in reversed(self.slots) if not self.graph.timed[name]]
        read = {name: self.weights_read(name) for name in latents}
        precede = {
            name: [other for other in latents if name in read[other]] for name in (*latents, S.name)
        }
        expected = {name for name in latents if self.reduction(name) is Reduction.EXPECTATION}
        early = [name for name in precede if name not in expected]
        early.sort(key=lambda name: sum(other in expected for other in precede[name]))
        return tuple(
            dict.fromkeys([*(each for name in early for each in (*precede[name], name)), *latents])
        )

    def reduction(self, name: str) -> Reduction:
        """How to reduce an axis of ``order``."""
        inside = self.bound in WEIGHTED
        if name == S.name:
            return Reduction.LOG_MEAN_EXP if inside else Reduction.MEAN
        draw = self.choices[name].draw
        return (
            Reduction.LOG_SUM_EXP
            if draw is Draw.SUM
            else Reduction.LOG_EXPECTATION_EXP
            if draw is Draw.STRATIFY and inside
            else Reduction.EXPECTATION
        )

    @property
    def untrained(self) -> tuple[str, ...]:
        """Latents whose q cancels from this bound, so the bound cannot train it."""
        return tuple(name for name, choice in self.choices.items() if choice.draw is Draw.SUM)

    @property
    def biased(self) -> dict[str, str]:
        """Variables whose estimator is biased, each with a description of the bias."""
        return {name: bias for name, choice in self._ways.items() if (bias := choice.bias)}

    @property
    def scored(self) -> tuple[str, ...]:
        """The variables whose draws have the score function's gradient."""
        return tuple(name for name, choice in self._ways.items() if choice.draw is Draw.SCORE)

    @property
    def _ways(self) -> dict[str, Choice | Completion]:
        """How each latent, and each variable whose missing entries p draws, is drawn."""
        return {**self.choices, **self.completions}

    @property
    def resamples(self) -> bool:
        """Whether particles are resampled."""
        return self.bound == "particles" and self.samples > 1 and self.resample > 0

    @property
    def resampling_bias(self) -> str | None:
        """A description of the gradient's bias by resampling; None if there is no bias."""
        if not self.resamples or self.gradient == "score":
            return None
        return (
            "the gradient leaves out how the chosen ancestors"
            + (" and steps" if self.resample < 1 else "")
            + " depend on the weights, so it is biased; the value is not"
        )

    def undifferentiated(self) -> dict[str, str]:
        """Variables with missing entries that p draws without a gradient, with their families."""
        return {
            name: type(entry.spec).__name__
            for name in sorted(self.completed)
            for entry in self.graph.p[name].values()
            if not entry.spec.pathwise
        }

    def size(self, axis: Axis) -> int:
        """The length of an enumeration axis, or of the sample axis."""
        name = axis[0]
        if axis in (S, T, N):
            return self.samples if axis == S else 1
        strata = self.graph.rule("q", name).spec.strata if name in self.graph.q else None
        return strata or self.graph.rule("p", name).spec.count(self.graph.size(name)) or 1

    def passes(self, name: str) -> int:
        """How often each example passes through p's network for this variable."""
        return math.prod(self.size(axis) for axis in self.axes[self.graph.rule("p", name).id])

    def direction(self, side: str, name: str) -> int:
        """The step of an enumerated latent that log p or log q of a variable depends on.

        −1 means the previous step, +1 the next one, and 0 neither.
        """
        rules = self.graph.p if side == "p" else self.graph.q
        offsets = {
            offset
            for entry in rules[name].values()
            for _, offset in self.axes[entry.id] | self.values[name]
            if offset
        }
        if len(offsets) > 1:
            raise ValueError(
                f"{side}'s factor of {name} depends on an enumerated latent at [t-1] and at "
                f"[t+1]. Draw that latent instead (how=…: 'gumbel')."
            )
        return offsets.pop() if offsets else 0

    def ends(self, entry: Entry) -> list[str]:
        """The ends of the sequence ("first", "last") that a static factor reads.

        Only values that depend on an enumerated sequence count.
        """
        enumerated = {name for name in self.slots if self.graph.timed[name]}
        return sorted(
            {
                ref.at
                for ref in entry.key.parents
                if any(name in enumerated for name, _ in self.values.get(ref.name, ()))
            }
        )

    def layout(self, n: int, steps: int, *, dropout: bool) -> Layout:
        """The noise that one estimate needs: name → (kind, shape)."""
        noise: Layout = {}
        for name in (*self.drawn, *sorted(self.completed)):
            d = self.graph.size(name)
            rules = self.graph.p if name in self.completed else self.graph.q
            for entry in rules[name].values():
                key = self.noise_keys[entry.id]
                if key in noise:
                    continue
                stratified = name in self.choices and self.choices[name].draw is Draw.STRATIFY
                kind, width = ("normal", d) if stratified else entry.spec.noise(d) or (SEED, 0)
                noise[key] = (
                    kind,
                    self._shape(self.values[name], n, steps, width) if width else (),
                )
        if self.resamples:  # one number per row, or per particle if each chooses independently
            apart = self.samples if self.gradient == "score" else 1
            noise[RESAMPLING] = ("uniform", (apart, steps, n, 1))
        if dropout:
            for entry in self.graph.entries():
                if entry.id not in self.axes or (net := entry.spec.network) is None:
                    continue
                parents = {str(ref): self.graph.shapes[ref.name] for ref in entry.key.parents}
                own_shape = self.graph.shapes[entry.key.name]
                dropouts = net.dropouts_of(parents, own_shape)
                for i, (p, width) in enumerate(dropouts):
                    shape = self._shape(self.axes[entry.id], n, steps, width)
                    noise[dropout_name(entry, i)] = (keep(1 - p), shape)
                if net.draws_itself(parents, own_shape):
                    noise[own_draws_name(entry)] = (SEED, ())
        return noise

    def _shape(self, axes: frozenset[Axis], n: int, steps: int, width: int) -> tuple[int, ...]:
        left = max([4, *(-slot for axis in axes for slot in self._slots(axis))])
        shape = [1] * left
        for axis in axes:
            for slot in self._slots(axis):
                shape[slot] = self.size(axis)
        shape[-1], shape[-2] = width, n if N in axes else 1
        shape[-3] = steps if T in axes else 1
        shape[-4] = self.samples if S in axes else 1
        return tuple(shape)

    def _slots(self, axis: Axis) -> tuple[int, ...]:
        name, offset = axis
        if name not in self.slots:
            return ()
        current, neighbour = self.slots[name]
        return (neighbour,) if offset and neighbour else (current,)


def derive(
    graph: Graph,
    *,
    how: Mapping[str, str] | None = None,
    bound: str = "elbo",
    samples: int | None = None,
    gradient: str = "plain",
    resample: float | None = None,
    clamped: frozenset[str] = frozenset(),
    partial: frozenset[str] = frozenset(),
    sampling: bool = False,
    completed: frozenset[str] = frozenset(),
) -> Plan:
    """Derive the estimator. Raise ValueError, with the reason, if a request is impossible.

    ``partial`` names the variables that are known in some rows or entries only. If p reads such an
    observed variable, its missing entries are drawn from p; ``completed`` names more variables of
    this kind (a particle filter draws all data that lie in the future). ``how`` may name them too.
    With ``sampling`` the plan only draws every latent from q, for use after training; it cannot
    estimate a bound.
    """
    how = dict(how or {})
    if bound not in BOUNDS:
        raise ValueError(
            f"Unknown bound {bound!r}. Choose one of {', '.join(BOUNDS)}."
            f"{did_you_mean(bound, BOUNDS)}"
        )
    if gradient not in GRADIENTS:
        raise ValueError(
            f"Unknown gradient {gradient!r}. Choose one of {', '.join(GRADIENTS)}."
            f"{did_you_mean(gradient, GRADIENTS)}"
        )
    samples = usual_samples(bound) if samples is None else samples
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples is a positive whole number, got {samples!r}.")
    threshold = _threshold(bound, gradient, resample)
    for name in (*clamped, *partial):
        if name not in graph.shapes:
            raise ValueError(f"{name!r} is not a variable of this model.")
    completed = completed | incomplete(graph, partial)
    for name in how:
        if name not in graph.latents and not (name in graph.observed and graph.is_read_by_p(name)):
            raise ValueError(
                f"how names {name!r}, which is not a latent. The latents are "
                f"{', '.join(graph.latents)}.{did_you_mean(name, graph.latents)}"
            )
    if bound == "particles" and (asked := completed & how.keys()):
        raise ValueError(
            f"how names {min(asked)!r}, but particles draw its missing entries from p in one way "
            f"only. Leave it out of how=."
        )
    latents = [name for name in graph.latents if name not in clamped]
    requests = {name: _words(name, how.get(name, "")) for name in latents}
    draws = _draws(graph, latents, requests, samples, bound, sampling)
    if sampling:
        draws = {
            name: (
                draw
                if isinstance(graph.rule("q", name).spec, Exact) or draw is Draw.PATHWISE
                else Draw.SAMPLE,
                why,
            )
            for name, (draw, why) in draws.items()
        }
    if bound == "particles":
        _check_pathwise(graph, draws)
    drawn = tuple(name for name in latents if not draws[name][0].enumerates)
    filled: dict[str, Completion] = {}
    if bound != "particles":  # a particle is a draw of the missing entries too
        filled = completions(graph, completed, how, samples=samples, sampling=sampling)
    try:
        order = Sampling.of(graph, clamped, completed)
        stages = graph.inference_stages(drawn, completed)
        values, axes = find_axes(graph, draws, stages, clamped, completed)
    except ValueError as error:
        if not completed:
            raise
        raise ValueError(
            f"{', '.join(sorted(completed))} has missing entries that p reads, which cannot be "
            f"drawn: {error} Or fill the entries."
        ) from None
    choices = {}
    for name in latents:
        draw, why = draws[name]
        term, why_term = _term(
            graph, name, draw, requests[name][1], bound, gradient, clamped, axes, order
        )
        choices[name] = Choice(name, draw, term, why, why_term)
    slots = _slots(choices, axes, values)
    plan = Plan(
        graph,
        choices,
        bound,
        samples,
        gradient,
        clamped,
        partial,
        stages,
        slots,
        axes,
        values,
        _noise_keys(graph, drawn, completed),
        completed,
        filled,
        threshold,
    )
    if not sampling:
        _check_combinations(plan)
    return plan


# How each latent is drawn -------------------------------------------------------------------------


def _words(name: str, text: str) -> tuple[Draw | None, Term | None]:
    """Parse a request such as ``"pathwise sampled"`` into a draw and a term.

    None leaves the choice to the plan.
    """
    draw = term = None
    for word in text.replace(",", " ").split():
        if word in DRAWS and draw is None:
            draw = Draw(word)
        elif word in TERMS and term is None:
            term = Term(word)
        elif word in DRAWS or word in TERMS:
            raise ValueError(
                f"how={{{name!r}: {text!r}}} asks for two things at once. Give one word for the "
                f"draw, one for the term."
            )
        else:
            raise ValueError(
                f"how={{{name!r}: {text!r}}}: unknown word {word!r}. Draws: {', '.join(DRAWS)}. "
                f"Terms: {', '.join(TERMS)}.{did_you_mean(word, (*DRAWS, *TERMS))}"
            )
    return draw, term


def _draws(
    graph: Graph, latents: list[str], requests: dict, samples: int, bound: str, sampling: bool
) -> dict[str, tuple[Draw, str]]:
    draws: dict[str, tuple[Draw, str]] = {}
    budget = LIMIT
    for name in latents:
        asked = requests[name][0]
        q, p = graph.rule("q", name).spec, graph.rule("p", name).spec
        family, count = type(q).__name__, p.count(graph.size(name)) if p.finite else None
        if asked is not None:
            for entry in graph.q[name].values():
                asked.check(name, entry.spec, p, samples, bound)
            draws[name] = (asked, "as asked")
            if asked.enumerates:
                budget //= count or 1
            continue
        if isinstance(q, Exact):
            draws[name] = (Draw.ENUMERATE, f"p's own conditional by Bayes, over {count} values")
        elif count is not None and count <= budget:
            budget //= count
            draws[name] = (
                Draw.ENUMERATE,
                f"{count} values: the expectation is a sum, without variance",
            )
        elif count is not None:
            kind = Draw.SCORE if samples > 1 else Draw.RELAXED if bound == "iwae" else Draw.GUMBEL
            draws[name] = (kind, f"{count} values are too many to enumerate (over {LIMIT} jointly)")
        elif q.strata is not None:
            draws[name] = (
                Draw.STRATIFY,
                f"each of the {q.strata} components is drawn once and weighted by its probability"
                if q.strata > 1
                else "the only component is drawn",
            )
        elif all(entry.spec.pathwise for entry in graph.q[name].values()):
            draws[name] = (
                Draw.PATHWISE,
                f"a {family} sample is a differentiable function of its parameters and of noise",
            )
        elif samples > 1 or sampling or bound == "particles":
            draws[name] = (
                Draw.SCORE,
                f"a {family} sample is not a differentiable function of its parameters: score "
                f"function with a leave-one-out baseline",
            )
        else:
            raise ValueError(
                f"q draws {name!r} from a {family}, which is neither finite nor reparametrisable: "
                f"it needs the score function, samples=2 or more."
            )
    return draws


# Axes and noise -----------------------------------------------------------------------------------


def _noise_keys(
    graph: Graph, drawn: tuple[str, ...], completed: frozenset[str] = frozenset()
) -> dict[str, str]:
    """The key of each drawn entry's noise: the variable's name.

    An entry for the first or last step whose family needs another kind of noise has the key
    ``z[0]`` or ``z[T]``. Latents are drawn by their entries in q, ``completed`` variables by those
    in p.
    """
    keys = {}
    for name in (*drawn, *completed):
        side = "p" if name in completed else "q"
        d = graph.size(name)
        usual = graph.rule(side, name).spec.noise(d)
        for entry in (graph.p if side == "p" else graph.q)[name].values():
            keys[entry.id] = name if entry.spec.noise(d) == usual else entry.key.target.label
    return keys


def _slots(
    choices: dict[str, Choice], axes: dict, values: dict
) -> dict[str, tuple[int, int | None]]:
    """Assign each latent with an axis its position.

    A latent whose neighbour in time is read gets a second position for the neighbour.
    """
    slots: dict[str, tuple[int, int | None]] = {}
    position = FIRST_SLOT
    used = frozenset().union(*axes.values(), *values.values())
    for name, choice in choices.items():
        if choice.draw.has_axis:
            if Axis(name, -1) in used or Axis(name, 1) in used:
                slots[name], position = (position - 1, position), position - 2
            else:
                slots[name], position = (position, None), position - 1
    return slots


# How each term is computed ------------------------------------------------------------------------


def _term(
    graph: Graph,
    name: str,
    draw: Draw,
    asked: Term | None,
    bound: str,
    gradient: str,
    clamped: frozenset[str],
    axes: dict,
    order: Sampling,
) -> tuple[Term, str]:
    where = f"how={{{name!r}: {asked!r}}}"
    if asked:
        asked.check(name, draw)
    if draw.enumerates:
        return Term.SUMMED, "summed over all values, exactly"
    if draw is Draw.RELAXED:
        return Term.RELAXED, "both log-probabilities on the relaxed sample, with relaxed heads"
    pairs = [(q, p) for q in graph.q[name].values() for p in graph.p[name].values()]
    unknown = next(((q, p) for q, p in pairs if closed_form_kl(q.spec, p.spec) is None), None)
    depends = conflict(graph, order, name, clamped)
    reason = None
    if bound in WEIGHTED:
        reason = {
            "iwae": "the importance-weighted bound averages log-weights of samples",
            "particles": "particles are weighted by p/q at their samples",
        }[bound] + "; with a closed-form KL it would be no bound"
    elif gradient == "stl" and draw is Draw.PATHWISE:
        reason = "sticking the landing differentiates −log q at the sample"
    elif unknown:
        reason = (
            f"no closed form is known for KL({type(unknown[0].spec).__name__} ‖ "
            f"{type(unknown[1].spec).__name__})"
        )
    elif depends:
        reason = depends
    elif (
        offsets := {
            offset
            for entry in (*graph.q[name].values(), *graph.p[name].values())
            for _, offset in axes[entry.id]
        }
    ) >= {-1, 1}:
        reason = (
            f"p and q depend on different neighbours in time of an enumerated latent "
            f"({sorted(offsets)})"
        )
    if asked is Term.CLOSED and reason:
        raise ValueError(f"{where}: {reason}.")
    if asked in (None, Term.CLOSED) and reason is None:
        q, p = pairs[0]
        parents = ", ".join(map(str, graph.reads("p", name)))
        fixed = (
            f"no parent of {name} in p ({parents}) depends on {name} under q"
            if parents
            else f"{name} has no parents in p"
        )
        return (
            Term.CLOSED,
            f"KL({type(q.spec).__name__} ‖ {type(p.spec).__name__}) is known, and {fixed}",
        )
    entropy = (
        all(q.spec.has_entropy for q in graph.q[name].values())
        and bound == "elbo"
        and (gradient == "plain" or draw is not Draw.PATHWISE)
    )
    if asked is Term.ENTROPY and not entropy:
        raise ValueError(
            f"{where}: "
            + (
                f"no closed-form entropy is known for {type(pairs[0][0].spec).__name__}."
                if bound == "elbo" and gradient == "plain"
                else f"{reason}."
            )
        )
    if asked is Term.ENTROPY or (asked is None and entropy):
        return Term.ENTROPY, (
            f"{reason}; " if reason else ""
        ) + "so log p is taken at the sample, q's entropy in closed form"
    return Term.SAMPLED, (f"{reason}; " if reason and asked is None else "") + (
        "as asked, " if asked else ""
    ) + "log p and log q at the sample"


# Which choices can be combined --------------------------------------------------------------------


def _threshold(bound: str, gradient: str, resample: float | None) -> float:
    """The share of effective particles below which a row is resampled; 0 for other bounds."""
    if bound != "particles":
        if resample is not None:
            raise ValueError(
                f'resample= is for bound="particles"; bound={bound!r} has no particles. Leave it '
                f"out."
            )
        if gradient == "score":
            raise ValueError(
                'gradient="score" adds the term of resampling to the gradient of '
                f'bound="particles"; bound={bound!r} resamples nothing. Use gradient="plain".'
            )
        return 0.0
    if gradient in ("stl", "dreg"):
        raise ValueError(
            f'gradient={gradient!r} is derived for weights of whole samples, but bound="particles" '
            f'resamples between steps, where it is biased. Use gradient="plain" or "score".'
        )
    if resample is None:
        return 1.0 if gradient == "score" else RESAMPLE
    if (
        isinstance(resample, bool)
        or not isinstance(resample, int | float)
        or not 0 <= resample <= 1
    ):
        raise ValueError(
            f"resample= is the share of effective particles below which a row is resampled, from 0 "
            f"(never) to 1 (after every step), got {resample!r}."
        )
    if gradient == "score" and resample < 1:
        why = (
            "the weights also decide after which steps a row is resampled. Use resample=1, or "
            "leave it out."
            if resample
            else 'no row is ever resampled. Use gradient="plain".'
        )
        raise ValueError(
            f'gradient="score" differentiates the choice of ancestors, but with '
            f"resample={resample:g} {why}"
        )
    return float(resample)


def _check_pathwise(graph: Graph, draws: Mapping[str, tuple[Draw, str]]) -> None:
    """Raise ValueError for latents that particles cannot draw with a pathwise gradient."""
    for name, (draw, why) in draws.items():
        if draw is Draw.PATHWISE:
            continue
        q, p = graph.rule("q", name).spec, graph.rule("p", name).spec
        fix = 'use bound="elbo"; log_evidence(method="particles") evaluates the model by particles.'
        if why == "as asked" and q.pathwise:
            what, fix = f"but how= asks to draw {name} by {str(draw)!r}", "leave it out of how=."
        elif p.finite:
            count = p.count(graph.size(name))
            what = f"but {name} is a {type(p).__name__} with {count} values"
        else:
            what = f"but q draws {name} from a {type(q).__name__}, which has no such gradient"
            fix = f"give {name} a Normal in q, or {fix}" if draw is Draw.STRATIFY else fix
        raise ValueError(
            f'bound="particles" needs draws with a pathwise gradient at every step, {what}. '
            f"{fix[0].upper()}{fix[1:]}"
        )


def _check_combinations(plan: Plan) -> None:
    graph, choices = plan.graph, plan.choices
    if plan.bound == "particles":
        carried = {name for name, axes in plan.values.items() if S in axes}
        reason = why_not_filtered(graph, carried, plan.completed)
        if reason is not None:
            raise ValueError(
                f'bound="particles" filters sequences, but {reason}. Use bound="iwae".'
            )
        if plan.gradient == "score" and plan.samples < 2:
            raise ValueError(
                'gradient="score" is the gradient of resampling, which needs samples=2 or more. '
                'Use gradient="plain".'
            )
    drawn = {name: choices[name].draw for name in plan.drawn}
    filled = {name: completion.draw for name, completion in plan.completions.items()}
    for name in graph.stochastic:
        plan.direction("p", name)
        if name in choices:
            plan.direction("q", name)
    timed_axes = {name for name in plan.slots if graph.timed[name]}
    for entry in graph.entries():
        chain = next((axis for axis, _ in plan.axes.get(entry.id, ()) if axis in timed_axes), None)
        if chain is None or entry.key.target.timed:
            continue
        if entry.side == "q" or not entry.spec.stochastic or len(plan.ends(entry)) > 1:
            raise ValueError(
                f"{entry.id} reads an end of {chain}, which is enumerated at every step: its "
                f"other steps would have to remember that end. how={{{chain!r}: 'gumbel'}} draws "
                f"it (or 'score', with samples=2 or more)."
            )
    late = next(
        (
            name
            for name in plan.order[plan.order.index(S.name) + 1 :]
            if choices[name].draw is Draw.SUM
        ),
        None,
    )
    # The log of that sum is not linear in the samples' bounds, so the score function is biased.
    if late and plan.scored:
        waiting = next(
            name for name in plan.enumerated if (late, 0) in plan.axes[graph.rule("q", name).id]
        )
        raise ValueError(
            f'how={{{late!r}: "sum"}}: q({waiting}|·) reads {late}, which is therefore summed '
            f'after the samples, where the score function is biased. Use "sum" for {waiting} too, '
            f'or "enumerate" for {late}.'
        )
    if plan.gradient == "stl":
        if plan.bound == "iwae" and plan.samples > 1:
            raise ValueError(
                'gradient="stl" is biased for iwae with samples > 1. Use gradient="dreg", or '
                'bound="elbo".'
            )
        if Draw.PATHWISE not in drawn.values():
            raise ValueError(
                'gradient="stl" needs a pathwise latent; this plan has none. Use gradient="plain".'
            )
        # If the weight of −log q(v) depends on v, the mean of its gradient at fixed v is not zero.
        for name in plan.drawn:
            own = {axis for axis, _ in plan.values[name] if axis in plan.slots}
            own = own.union(*(plan.weights_read(axis) for axis in own)) - {S.name}
            inside = sorted(axis for axis in own if choices[axis].draw in (Draw.SUM, Draw.STRATIFY))
            if plan.bound == "iwae" and drawn[name] is Draw.PATHWISE and inside:
                raise ValueError(
                    f'gradient="stl" is biased for iwae here: the weights of {name}\'s draws '
                    f"depend on {inside[0]}, "
                    'which is summed inside the logarithm. Use gradient="plain", or bound="elbo".'
                )
    if plan.gradient == "dreg":
        if plan.bound != "iwae" or plan.samples < 2:
            raise ValueError('gradient="dreg" is for bound="iwae" with samples=2 or more.')
        every = drawn | filled
        other = next((name for name, draw in every.items() if draw is not Draw.PATHWISE), None)
        if other or not drawn:
            what = f"{other} is drawn by {every[other]!r}" if other else "this plan draws nothing"
            raise ValueError(
                f'gradient="dreg" needs every latent that is not enumerated, and missing entries '
                f"that p draws, to be pathwise, but {what}."
                if other in filled
                else f'gradient="dreg" needs every latent that is not enumerated to be pathwise, '
                f"but {what}."
            )
        if plan.untrained:
            raise ValueError(
                f'gradient="dreg" is not defined with how={{{plan.untrained[0]!r}: "sum"}}, which '
                f'sums inside the logarithm. Use "enumerate".'
            )
    for name, draw in (drawn | filled).items():
        mixed = {axis for axis, _ in plan.values[name] if axis in timed_axes and axis != name}
        inner = {axis for axis in plan.inner if axis != name and (axis, 0) in plan.values[name]}
        if plan.bound == "iwae" and plan.samples > 1 and mixed:
            raise ValueError(
                f"{name} is drawn for each value of the enumerated {sorted(mixed)[0]}[t]: their "
                f"weights do not factor over time under iwae. "
                f'Use bound="elbo", or draw {sorted(mixed)[0]} too.'
            )
        if plan.gradient == "dreg" and inner:
            raise ValueError(
                f"{name} is drawn for each value of {sorted(inner)[0]}, whose weights depend on "
                f'samples: gradient="dreg" has no weights for it. '
                'Use gradient="plain".'
            )
        if draw is Draw.SCORE and (mixed or inner):
            other = sorted(mixed | inner)[0]
            raise ValueError(
                f"{name} is drawn by the score function for each value of the enumerated {other}. "
                f"Draw {other} by it too."
            )
        if draw is Draw.STRATIFY and graph.timed[name]:
            raise ValueError(
                f"{name} is a mixture at every step, so drawing each of its components once would "
                f"take K^T paths. "
                f'how={{{name!r}: "score"}} draws it, with samples=2 or more.'
            )
    directions = {plan.direction("q", name): name for name in plan.enumerated if graph.timed[name]}
    if {-1, 1} <= directions.keys():
        raise ValueError(
            f"q runs {directions[-1]} forward and {directions[1]} backward in time; they cannot "
            f"be enumerated together. Draw one of them: how={{{directions[1]!r}: 'gumbel'}}."
        )
    for name, choice in choices.items():
        if choice.draw is Draw.SUM and graph.timed[name]:
            raise ValueError(
                f'how={{{name!r}: "sum"}}: {name}[t] is a sequence, over which the sum does not '
                f'factor. Use "enumerate".'
            )
