"""Explain a plan in words and formulas, as text or LaTeX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aevb.declare.families import Exact
from aevb.declare.graph import Entry, Graph
from aevb.declare.notation import Ref
from aevb.derive.completion import Completion
from aevb.derive.dependence import N, S
from aevb.derive.divergences import closed_form_kl
from aevb.derive.draws import Draw, Term
from aevb.derive.plan import Choice, Plan


class Explanation(str):
    """The explanation as text; ``latex`` holds the estimator in LaTeX."""

    latex: str

    def __new__(cls, text: str, latex: str) -> Explanation:
        self = super().__new__(cls, text)
        self.latex = latex
        return self

    def _repr_latex_(self) -> str:
        return f"$${self.latex}$$"


def describe(graph: Graph, counts: Mapping[str, int]) -> str:
    """The printed form of a model.

    It has the factorizations, then every entry with its size and number of parameters.
    """
    lines = []
    width = max(len(str(entry.key)) for entry in graph.entries())
    for side, symbol in (("p", "θ"), ("q", "φ")):
        entries = [entry for entry in graph.entries() if entry.side == side]
        total = sum(counts[entry.id] for entry in entries)
        if not entries:
            continue  # a model without latents has no q
        product = " ".join(entry.id for entry in entries if entry.spec.stochastic)
        rest = [entry for entry in entries if not entry.spec.stochastic]
        functions = (
            "; "
            + ", ".join(
                f"{entry.key.target} = f({', '.join(map(str, entry.key.parents))})"
                for entry in rest
            )
            if rest
            else ""
        )
        lines.append(f"{side}:  {product}{functions}   ({total:,} parameters {symbol})")
        for entry in entries:
            size = "×".join(map(str, graph.shapes[entry.key.name]))
            lines.append(
                f"    {entry.key!s:<{width}}   {size:>7}   {counts[entry.id]:>9,}   {entry.spec!r}"
            )
    if graph.given:
        lines.append(
            "given: "
            + ", ".join(
                f"{name} ({'×'.join(map(str, shape))})" for name, shape in graph.given.items()
            )
        )
    roles = [f"latent {', '.join(graph.latents)}"] if graph.latents else []
    roles.append(f"observed {', '.join(graph.observed)}")
    return "\n".join([*lines, "; ".join(roles)])


@dataclass(frozen=True)
class Writer:
    """Writes a plan's estimator, as text or as LaTeX."""

    plan: Plan
    tex: bool

    def _pick(self, text: str, tex: str) -> str:
        return tex if self.tex else text

    def symbol(self, ref: Ref, side: str = "p") -> str:
        """The symbol of a variable in the estimator.

        ˢ marks a sample, ᵏ a particle, a tilde a relaxed sample. Only p reads samples of missing
        data.
        """
        choice = self.plan.choices.get(ref.name)
        sampled = (choice is not None and not choice.draw.enumerates) or (
            side == "p" and ref.name in self.plan.completed
        )
        relaxed = choice is not None and choice.draw in (Draw.GUMBEL, Draw.RELAXED)
        index = {
            "static": "",
            "first": "0",
            "last": "T",
            "t": f"t{ref.lag:+d}" if ref.lag else "t",
        }[ref.at]
        if self.tex:
            base = rf"\tilde{{{ref.name}}}" if relaxed else ref.name
            mark = f"^{{{self.mark}}}" if sampled else ""
            return base + (f"_{{{index}}}" if index else "") + mark
        below = {"": "", "0": "₀", "T": "_T", "t": "ₜ", "t-1": "ₜ₋₁", "t+1": "ₜ₊₁"}[index]
        mark = {"s": "ˢ", "k": "ᵏ"}[self.mark] if sampled else ""
        return ref.name + ("\u0303" if relaxed else "") + below + mark

    @property
    def mark(self) -> str:
        """The index of samples: s, or k for particles."""
        return "k" if self.plan.bound == "particles" else "s"

    def bare(self, ref: Ref) -> str:
        """The symbol of a variable as the argument of a density, without a sample mark."""
        return ref.name + (self._pick("ₜ", "_{t}") if ref.timed else "")

    def factor(self, entry: Entry, *, sampled: bool) -> str:
        target = self.symbol(entry.key.target) if sampled else self.bare(entry.key.target)
        parents = self.parents(entry)
        bar = self._pick("|", r" \mid ") + parents if parents else ""
        return f"{self._pick(entry.side, {'p': P_TEX, 'q': Q_TEX}[entry.side])}({target}{bar})"

    def parents(self, entry: Entry) -> str:
        return ", ".join(self.symbol(ref, entry.side) for ref in entry.key.parents)

    def term(self, choice: Choice) -> str:
        """One latent's contribution, with its sign."""
        q, p = (self.plan.graph.rule(side, choice.name) for side in "qp")
        log, minus = self._pick("log ", r"\log "), self._pick(" − ", " - ")
        if choice.term is Term.CLOSED or self.constant(choice):
            name, between = self._pick("KL", r"D_{\mathrm{KL}}"), self._pick(" ‖ ", r" \,\|\, ")
            both = between.join(self.factor(one, sampled=False) for one in (q, p))
            return f"{minus}{name}({both})"
        log_p = f" + {log}{self.factor(p, sampled=True)}"
        if choice.draw is Draw.SUM:
            return log_p
        if choice.term is Term.ENTROPY:
            return f"{log_p} + {self._pick('H', ENTROPY_TEX)}[{self.factor(q, sampled=False)}]"
        return f"{log_p}{minus}{log}{self.factor(q, sampled=True)}"

    def constant(self, choice: Choice) -> bool:
        """Return whether an enumerated latent's term is one KL divergence.

        It is then the same for all of its values and samples.
        """
        q, p = (self.plan.graph.rule(side, choice.name) for side in "qp")
        axes = self.plan.axes[q.id] | self.plan.axes[p.id]
        return (
            choice.draw is Draw.ENUMERATE
            and not q.key.target.timed
            and closed_form_kl(q.spec, p.spec) is not None
            and axes <= {N}
        )

    def expectations(self) -> str:
        """The expectations in front of the braces, outermost first."""
        text = "".join(self._reduction(name) for name in reversed(self.plan.order))
        return text.replace(self._pick("exp log ", r"\exp \log "), "")

    def _reduction(self, name: str) -> str:
        """The symbol of one reduction.

        It is a mean over samples, or a sum over a static latent's values or mixture components.
        """
        plan, k = self.plan, self.plan.samples
        if name == S.name:
            text = (
                self._pick(f"1/{k} Σₛ ", rf"\tfrac{{1}}{{{k}}} \sum_{{s=1}}^{{{k}}} ")
                if k > 1
                else ""
            )
        elif plan.choices[name].draw is Draw.STRATIFY:
            part, of = self.component(name), self.arguments(plan.graph.rule("q", name))
            text = self._pick(
                f"Σ{part} π{part}{of} ",
                rf"\sum_{{{part}}} \pi_{part if len(part) == 1 else f'{{{part}}}'}{of} ",
            )
        elif plan.choices[name].draw is Draw.SUM:
            text = self._pick(f"Σ_{name} ", rf"\sum_{{{name}}} ")
        else:
            text = (
                self._pick(f"Σ_{name} ", rf"\sum_{{{name}}} ")
                + self.factor(plan.graph.rule("q", name), sampled=False)
                + " "
            )
        inside = plan.reduction(name).in_logarithm and text
        return self._pick(f"log {text}exp ", rf"\log {text}\exp ") if inside else text

    def component(self, name: str) -> str:
        """The index of a mixture's components.

        It includes the latent's name if there are several mixtures.
        """
        alone = [choice.draw for choice in self.plan.choices.values()].count(Draw.STRATIFY) < 2
        return self._pick("ₖ", "k") if alone else self._pick(f"_k_{name}", f"k_{name}")

    def arguments(self, entry: Entry) -> str:
        """The arguments of a factor's parameters, such as (x, y); empty for a root."""
        parents = self.parents(entry)
        return f"({parents})" if parents else ""

    def weight(self, names: Iterable[str]) -> str:
        """p / q of these variables: their part of a particle's weight."""
        above, below = [], []
        for name in names:
            drawn = name in self.plan.choices
            above.append(self.factor(self.plan.graph.rule("p", name), sampled=drawn))
            if drawn:
                below.append(self.factor(self.plan.graph.rule("q", name), sampled=True))
        p, q = " ".join(above), " ".join(below)
        if not q:
            return p
        bar = f"({q})" if len(below) > 1 else q
        return self._pick(f"{p} / {bar}", rf"\frac{{{p}}}{{{q}}}")

    def of_particles(self) -> str:
        """The formula of the bound of particles: Σₜ log Σₖ Wₜ₋₁ᵏ p / q."""
        graph, plan = self.plan.graph, self.plan
        known = (*graph.observed, *(name for name in graph.latents if name in plan.clamped))
        names = [*known, *plan.choices]
        text = self._pick(
            "Σₜ log Σₖ Wₜ₋₁ᵏ ",
            rf"\sum_{{t}} \log \sum_{{k=1}}^{{{plan.samples}}} W_{{t-1}}^{{k}} \, ",
        ) + self.weight(name for name in names if graph.timed[name])
        static = [name for name in names if not graph.timed[name]]
        late = [
            name for name in static if any(graph.timed[ref.name] for ref in graph.reads("p", name))
        ]
        for at, there in (("0", [n for n in static if n not in late]), ("T", late)):
            if there:
                part = self.weight(there)
                text += self._pick(
                    f" · [{part}] at t = {at}", rf" \left[ {part} \right]_{{t={at}}}"
                )
        return text

    def estimator(self) -> str:
        """The formula of the whole estimator."""
        graph, plan = self.plan.graph, self.plan
        if plan.bound == "particles":
            return self.of_particles()
        log = self._pick("log ", r"\log ")
        static, timed, after = "", "", ""
        known = (*graph.observed, *(name for name in graph.latents if name in plan.clamped))
        terms = [
            (name, f" + {log}{self.factor(graph.rule('p', name), sampled=False)}") for name in known
        ]
        for name, text in [
            *terms,
            *((choice.name, self.term(choice)) for choice in plan.choices.values()),
        ]:
            if name in plan.choices and self.constant(plan.choices[name]):
                after += text
            elif graph.timed[name]:
                timed += text
            else:
                static += text
        if timed:
            chain = [self.bare(Ref(name, "t")) for name in plan.slots if graph.timed[name]]
            pairs = [name for name, (_, neighbour) in plan.slots.items() if neighbour is not None]
            lags = {
                name: {
                    offset
                    for axes in plan.axes.values()
                    for latent, offset in axes
                    if latent == name and offset
                }
                for name in pairs
            }
            chain += [
                self.symbol(Ref(name, "t", lag)) for name in pairs for lag in sorted(lags[name])
            ]
            names = ", ".join(chain)
            expectation = (
                self._pick(f"E_q({names})", rf"\mathbb{{E}}_{{q({names})}}") if chain else ""
            )
            static += f" + {self._pick('Σₜ', SUM_TEX)} {expectation}[{timed.removeprefix(' + ')}]"
        inside, outside = static.removeprefix(" + ").lstrip(), self.expectations()
        return (
            f"{outside}{self._pick('{ ', OPEN_TEX)}{inside}{self._pick(' }', CLOSE_TEX)}{after}"
            if outside
            else inside + after
        )


P_TEX, Q_TEX, ENTROPY_TEX, SUM_TEX = r"p_\theta", r"q_\phi", r"\mathbb{H}", r"\sum_{t}"
OPEN_TEX, CLOSE_TEX = r"\Big\{ ", r" \Big\}"

_NOISE = {
    "normal": "N(0, I)",
    "uniform": "U(0, 1)",
    "gumbel": "Gumbel(0, 1)",
    "logistic": "Logistic(0, 1)",
    "laplace": "Laplace(0, 1)",
}


def _sample(choice: Choice, plan: Plan) -> str:
    """The formula that turns noise into a latent's sample."""
    entry = plan.graph.rule("q", choice.name)
    write = Writer(plan, tex=False)
    parents = write.parents(entry)
    name = write.symbol(entry.key.target)
    spec = entry.spec
    family = type(spec).__name__
    kind = str((spec.noise(1) or ("", 0))[0])
    stratified = choice.draw is Draw.STRATIFY
    if stratified or choice.draw.reparametrises:
        symbol, kind = (
            spec.sample_formula(parents, write.component(choice.name) if stratified else ""),
            "normal" if stratified else kind,
        )
        text = (
            f"{name} = {symbol or f'{family}({parents}) at ε'}, ε ~ "
            f"{_NOISE.get(kind, kind or 'torch rsample')}"
        )
        return text + (", held fixed: no gradient" if choice.draw is Draw.DETACHED else "")
    soft, hard = ("softmax", "onehot(argmax") if kind == "gumbel" else ("sigmoid", "step(")
    if choice.draw in (Draw.GUMBEL, Draw.RELAXED):
        return f"{name} = {soft}((logits({parents}) + g)/τ), g ~ {_NOISE[kind]}"
    if choice.draw is Draw.STRAIGHT_THROUGH:
        return (
            f"{name} = {hard}(logits({parents}) + g)), gradient of {soft}((logits + g)/τ), g ~ "
            f"{_NOISE[kind]}"
        )
    return f"{name} ~ {write.factor(entry, sampled=False)}"


def _filling(completion: Completion, plan: Plan) -> list[str]:
    """Say how the missing entries of a variable are drawn, why, and with which gradient."""
    graph, name = plan.graph, completion.name
    reader = next(
        entry
        for entry in graph.entries()
        if entry.side == "p" and any(ref.name == name for ref in entry.key.parents)
    )
    factors = " or ".join(entry.id for entry in graph.p[name].values())
    lines = [
        f'{name}: "{reader.key}" reads it, so its missing entries are drawn from {factors}, given '
        f"the known entries of the step.",
        "log p − log q of the drawn entries is zero: the bound has log p of the known ones only. "
        "q reads the data.",
    ]
    if completion.draw is not Draw.SAMPLE:
        lines.append(f"gradient of the draws {completion.draw}: {completion.why}.")
    return [lines[0], *(f"{' ' * len(name)}  {line}" for line in lines[1:])]


def _resampling(plan: Plan) -> list[str]:
    """How particles are resampled, and what the gradient makes of it."""
    k, lines = plan.samples, []
    for name in sorted(plan.completed):
        lines.append(
            f"{name}: its missing entries are drawn from p for every particle; the weight has the "
            f"known ones only."
        )
    for name, family in plan.undifferentiated().items():
        lines.append(
            f"{name}: biased: a {family} draw has no gradient, so the gradient leaves out how the "
            f"draws of missing entries depend on θ."
        )
    if not plan.resamples:
        same = f"iwae with {k} samples" if k > 1 else "the ELBO of one sample"
        return [*lines, f"W is never resampled, so this is the same as {same}."]
    when = (
        "After every step"
        if plan.resample == 1
        else f"After a step that leaves an effective sample size 1/Σ W² below "
        f"{plan.resample * k:g} ({plan.resample:g} of {k}),"
    )
    if plan.gradient == "score":
        unbiased = "" if plan.undifferentiated() else " It is unbiased."
        return [
            *lines,
            f"resampling: W are the normalised weights after a step, 1/{k} at first. {when} each "
            f"particle continues an ancestor drawn independently with probabilities W, and W is "
            f"1/{k} again.",
            "gradient: pathwise, plus Σₜ Σₖ ∇log W(ancestor of k) · (later increments − baseline). "
            "The baseline of the next increment is the same without particle k, that of each later "
            f"one the increment of a second filter with the same noise.{unbiased}",
        ]
    return [
        *lines,
        f"resampling: W are the normalised weights after a step, 1/{k} at first. {when} the row's "
        f"particles are drawn anew in proportion to W (systematic resampling), and W is 1/{k} "
        f"again.",
        f"gradient: pathwise; {plan.resampling_bias}. "
        f'gradient="score" includes the missing term, at the cost of a second filter.',
    ]


def explain(plan: Plan) -> Explanation:
    """Explain a plan: the estimator, its draws and terms, the reasons, biases and cost.

    The draws say how each latent is drawn, the terms how each term is computed.
    """
    graph = plan.graph
    data = ", ".join(
        f"{n}" for n in (*graph.observed, *(n for n in graph.latents if n in plan.clamped))
    )
    given = " | " + ", ".join(graph.given) if graph.given else ""
    draws = {choice.draw for choice in plan.choices.values()}
    relation = (
        "≈" if Draw.GUMBEL in draws else "of the relaxed model ≥" if Draw.RELAXED in draws else "≥"
    )
    bound = {
        "elbo": "ELBO",
        "iwae": f"importance-weighted bound, K = {plan.samples}",
        "particles": f"particle bound, K = {plan.samples}",
    }[plan.bound]
    lines = [
        f"log p({data}{given}) {relation} E of this estimator ({bound}):"
        if plan.choices
        else f"log p({data}{given}) =",
        "",
        f"  {Writer(plan, tex=False).estimator()}",
        "",
    ]
    samples = [
        _sample(choice, plan) for choice in plan.choices.values() if not choice.draw.enumerates
    ]
    write = Writer(plan, tex=False)
    for name in plan.completions:
        entry = graph.rule("p", name)
        target = write.symbol(entry.key.target)
        samples.append(
            f"{target} = {write.bare(entry.key.target)} where it is known, "
            f"elsewhere {target} ~ {write.factor(entry, sampled=False)}"
        )
    lines += [f"  {text}" for text in samples] + ([""] if samples else [])
    for choice in plan.choices.values():
        exact = isinstance(graph.rule("q", choice.name).spec, Exact)
        lines.append(
            f"{choice.name}: {'enumerated by Bayes' if exact else choice.draw}: {choice.why_draw}."
        )
        lines.append(f"{' ' * len(choice.name)}  term {choice.term}: {choice.why_term}.")
    for completion in plan.completions.values():
        lines += _filling(completion, plan)
    for entry in graph.entries():
        if entry.key.at in ("first", "last") and entry.spec.stochastic:
            lines.append(
                f"at the {entry.key.at} step {entry.id} replaces "
                f"{graph.rule(entry.side, entry.key.name).id}."
            )
    for latent in sorted(plan.partial & set(graph.latents)):
        lines.append(
            f"{latent}: clamped in rows where it is known: these have log p({latent}) and no −log "
            f"q({latent})."
        )
    relaxed = {name for name, choice in plan.choices.items() if choice.draw is Draw.RELAXED}
    for name, note in plan.biased.items():
        lines.append(f"{name}: {note}." if name in relaxed else f"{name}: biased: {note}.")
    for latent in plan.untrained:
        lines.append(
            f"{latent}: q({latent}) cancels from this bound, so the bound cannot train q({latent})."
        )
    if plan.bound == "particles":
        lines += _resampling(plan)
    elif plan.gradient != "plain":
        lines.append(
            {
                "stl": "gradient: sticking the landing; −log q is differentiated through the "
                "sample only.",
                "dreg": "gradient: doubly reparametrised for φ, plain for θ.",
            }[plan.gradient]
        )
    shared = [
        n
        for n in graph.deterministic
        if n in graph.p
        and any(ref.name == n for e in graph.entries() if e.side == "q" for ref in e.key.parents)
    ]
    for node in shared:
        lines.append(f"q reads {node}, a node of p: an M-step on θ also changes q.")
    for choice in plan.choices.values():
        if isinstance(graph.rule("q", choice.name).spec, Exact):
            lines.append(f"q({choice.name}) is computed from θ: an M-step on θ also changes q.")
    costs = [f"{name}'s network {plan.passes(name)}×" for name in graph.observed]
    per_step = " per step" if any(graph.timed[name] for name in graph.observed) else ""
    lines.append(f"cost: each example passes through {', '.join(costs)}{per_step}.")
    return Explanation("\n".join(lines), Writer(plan, tex=True).estimator())
