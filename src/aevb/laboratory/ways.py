"""Find all valid ways of estimating a bound: every accepted plan, with every temperature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from aevb.declare.graph import Graph
from aevb.derive.draws import DRAWS, TERMS, Draw, Term
from aevb.derive.plan import GRADIENTS, WEIGHTED, Plan
from aevb.estimate.batch import split_latents
from aevb.model import Model

How = Mapping[str, str]


@dataclass(frozen=True)
class Way:
    """One way of estimating a bound: a plan, the request that led to it, and the temperature.

    The temperature is None if the plan relaxes no latent.
    """

    plan: Plan = field(repr=False)
    how: How
    temperature: float | None = None

    @property
    def name(self) -> str:
        """Name: draw and term of every latent, e.g. ``y gumbel τ=0.5, z pathwise closed``.

        The gradient follows unless it is plain.
        """
        parts = []
        for name, choice in self.plan.choices.items():
            relaxed = f" τ={self.temperature:g}" if choice.draw.relaxes else ""
            term = "" if choice.term in (Term.SUMMED, Term.RELAXED) else f" {choice.term}"
            parts.append(f"{name} {choice.draw}{relaxed}{term}")
        return ", ".join(parts if self.plan.gradient == "plain" else [*parts, self.plan.gradient])

    @property
    def full_name(self) -> str:
        return f"{self.plan.bound} K={self.plan.samples}: {self.name}"

    @property
    def target(self) -> str:
        """Name of the estimated quantity.

        Two ways share it exactly if their expectations should agree. The ELBO is the same quantity
        for every way. An importance-weighted bound depends on K, and on which latents are summed
        outside the logarithm (enumerate), inside it (stratify), or drawn.
        """
        if self.plan.bound == "elbo":
            return "elbo"
        if self.plan.bound == "particles":  # how they are resampled changes the expectation
            scheme = "independently" if self.plan.gradient == "score" else "systematically"
            when = (
                f", resampled {scheme} below {self.plan.resample:g}" if self.plan.resamples else ""
            )
            return f"particles K={self.plan.samples}{when}"
        taken = {Draw.ENUMERATE: "enumerated", Draw.SUM: "summed", Draw.STRATIFY: "stratified"}
        placed = {
            name: taken.get(choice.draw, "drawn") for name, choice in self.plan.choices.items()
        }
        parts = [
            f"{name} {place}"
            for name, place in placed.items()
            if place != "drawn" or self.plan.graph.rule("p", name).spec.finite
        ]
        return f"iwae K={self.plan.samples}" + (f" ({', '.join(parts)})" if parts else "")

    @property
    def unbiased(self) -> bool:
        """Whether value and gradient are unbiased by derivation."""
        return not self.plan.biased and self.plan.resampling_bias is None


def find_ways(
    model: Model,
    batch: Mapping[str, Tensor],
    *,
    bounds: Sequence[str],
    samples: Sequence[int],
    temperatures: Sequence[float],
    how: How | Sequence[How] | None = None,
) -> tuple[list[Way], dict[str, str]]:
    """Return every valid way once, and the refused requests with their reasons.

    ``how`` is a request or a list of requests, each tried with every kind of gradient. The default
    is the plan's own choices with every kind of gradient; and, with the plain gradient, every word
    for each latent alone, for all finite latents, and for all other latents.
    """
    clamped, partial = split_latents(model.graph, batch)
    latents = [name for name in model.graph.latents if name not in clamped]
    if not model.graph.latents:
        raise ValueError("The model has no latents, so its bound is log p: nothing is estimated.")
    if not latents:
        raise ValueError(
            "Every latent is known in all rows, so there is nothing to estimate. Leave a latent "
            "out of the data."
        )
    how = [how] if isinstance(how, Mapping | str) else how
    if (
        wrong := next((one for one in how or () if not isinstance(one, Mapping)), None)
    ) is not None:
        raise ValueError(
            f'how is a request such as {{"{latents[0]}": "{DRAWS[0]}"}}, or a list of them. Got '
            f"{wrong!r} as one."
        )
    requests = [(one, gradient) for one in ([{}] if how is None else how) for gradient in GRADIENTS]
    requests += (
        [(one, "plain") for one in _single_words(model.graph, latents)] if how is None else []
    )
    found: dict[tuple, Way] = {}
    refused: dict[str, str] = {}
    accepted: list[How] = []
    for bound, k in ((bound, k) for bound in bounds for k in samples):
        if bound in WEIGHTED and k == 1:  # this is the ELBO with sampled terms
            continue
        for one, gradient in requests:
            if gradient == "score" and bound != "particles":  # it is that of resampling
                continue
            asked = (
                f"{bound} K={k}: "
                f"{', '.join(f'{name} {word}' for name, word in one.items()) or 'as derived'}, "
                f"{gradient}"
            )
            try:
                plan = model.plan(
                    how=one,
                    bound=bound,
                    samples=k,
                    gradient=gradient,
                    clamped=clamped,
                    partial=partial,
                )
            except ValueError as error:
                refused[asked] = str(error)
                continue
            if plan.untrained:
                refused[asked] = (
                    f"q's factor of {plan.untrained[0]} cancels from this bound, so this bound "
                    f"cannot train it."
                )
                continue
            accepted.append(one)
            relaxes = any(choice.draw.relaxes for choice in plan.choices.values())
            for temperature in temperatures if relaxes else (None,):
                choices = tuple(
                    (choice.name, choice.draw, choice.term) for choice in plan.choices.values()
                )
                found.setdefault(
                    (choices, bound, k, gradient, temperature), Way(plan, dict(one), temperature)
                )
    if not found:
        raise ValueError(
            f"No way of estimating the bound is left. "
            f"{next(iter(refused.values()), 'Ask for bound iwae with samples=2 or more.')}"
        )
    if lost := next((one for one in how or () if one and one not in accepted), None):
        # An explicit request is never dropped silently.
        asked = ", ".join(f"{name} {word}" for name, word in lost.items())
        raise ValueError(next(why for name, why in refused.items() if f": {asked}, " in name))
    return list(found.values()), refused


def _single_words(graph: Graph, latents: Sequence[str]) -> Iterator[How]:
    """Yield requests of one word: per latent, for all finite latents, and for all others."""
    finite = [name for name in latents if graph.rule("p", name).spec.finite]
    groups = [[name] for name in latents] + [
        finite,
        [name for name in latents if name not in finite],
    ]
    for word in (*TERMS, *DRAWS):
        for group in groups:
            if group:
                yield dict.fromkeys(group, word)
