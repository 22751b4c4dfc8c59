"""Findings on whether each latent is used, and if not, why.

A latent is *collapsed* if q(v | x) equals p(v | ·) for every x: it then carries no information.
Three causes are distinguished by measurement: no gradient of the other terms reached q's factor in
training; p's other factors hardly depend on v; or they do, but q has not learned to infer v.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from aevb.diagnostics.causes import Dependence, Reach
from aevb.diagnostics.finding import Finding
from aevb.diagnostics.usage import ACTIVE, CARRIES, Usage
from aevb.model import Model

OFFERS = 0.1  # p needs a latent if knowing it could add this many nats per example to the rest

MOST = 0.9  # share of unused entries from which on a latent with a small KL has collapsed
NAMED = 10  # most entries that are listed by name


def judge(
    model: Model,
    name: str,
    usage: Usage,
    reach: Reach | None,
    relies: Dependence,
    how: Mapping[str, str],
) -> list[Finding]:
    """Return the findings about a latent that is not a class.

    It is used, partly used, or collapsed, and then they say why.
    """
    figures: dict[str, Any] = {"kl": usage.kl, **reached(reach), **asdict(relies)}
    if usage.activity is not None:
        figures["activity"] = usage.activity.tolist()
    if usage.kl_by_entry is not None:
        figures["kl by entry"] = usage.kl_by_entry.tolist()
    inactive, d = usage.inactive, model.graph.size(name)
    unused = 0 if inactive is None else int(inactive.sum())
    little = usage.kl / usage.steps < CARRIES * d
    dead = little if inactive is None else unused == d or (unused >= MOST * d and little)
    each = f", {usage.kl / usage.steps:.3f} a step" if model.graph.timed[name] else ""
    if dead:
        rest = f"; {unused} of its {d} entries are not used" * (0 < unused < d)
        return [
            collapsed(
                model,
                name,
                f"KL {usage.kl:.3f} nats per example{each}{rest}",
                figures,
                reach,
                relies,
                how,
            )
        ]
    carried = (
        f"{name} carries {usage.kl:.2f} nats per example{each}; draws of p in place of q's would "
        f"cost {relies.gain:.2f} nats of the rest"
    )
    findings = misled(name, relies, figures)
    if reach is not None and reach.cut:
        findings.append(_unreached(name, figures, how))
    if unused:
        text = (
            f"{carried}; {unused} of its {d} entries {'are' if unused > 1 else 'is'} not used "
            f"({_which(name, inactive)}activity below {ACTIVE})."
        )
        them = "they carry" if unused > 1 else "it carries"
        remedy = (
            f"In this model {them} nothing. This does not tell whether a model that used "
            f"{'them' if unused > 1 else 'it'} would be better. To find out, train longer, with "
            f"kl_warmup=… or free_bits=…, and compare() with {name} of size {d - unused}."
        )
        findings.append(Finding("note", "unused entries", name, text, figures, remedy))
    elif not findings:
        findings.append(
            Finding(
                "ok",
                "used",
                name,
                f"{carried}." if d == 1 else f"{carried}; all {d} entries are active.",
                figures,
            )
        )
    return findings


def _which(name: str, inactive: Tensor | None) -> str:
    """The names of the unused entries, or of the used ones if those are few."""
    if inactive is None:
        return ""
    off, on = (
        [f"{name}{j}" for j in mask.nonzero()[:, 0].tolist()] for mask in (inactive, ~inactive)
    )
    if len(off) <= NAMED:
        return f"{', '.join(off)}; "
    return f"all but {', '.join(on)}; " if len(on) <= NAMED else ""


def misled(name: str, relies: Dependence, figures: Mapping[str, Any]) -> list[Finding]:
    """Report a q that is worse than p's factor in its place, that is, than no inference."""
    if relies.worth > -max(0.1, 3 * relies.error):
        return []
    text = (
        f"q({name}|·) misleads: its draws gain {relies.gain:.2f} nats of the rest over p's own, "
        f"for a KL of {relies.gain - relies.worth:.2f}. "
    )
    text += (
        f"The bound would be {-relies.worth:.2f} nats higher (standard error over the rows "
        f"{relies.error:.2f}) with p's factor in its place."
    )
    return [
        Finding(
            "warning",
            "misleading q",
            name,
            text,
            figures,
            "Train q further, with a lower lr, or an E-phase: schedule=alternate(…).",
        )
    ]


def collapsed(
    model: Model,
    name: str,
    what: str,
    figures: Mapping[str, Any],
    reach: Reach | None,
    relies: Dependence,
    how: Mapping[str, str],
) -> Finding:
    graph = model.graph
    head = f"{name} is dead: q has collapsed onto p ({what}), so it says nothing about the data."
    if len(graph.factors_containing(name)) == 1:
        text, remedy = (
            f"No factor of p but its own reads {name}, directly or through a function.",
            f"Let p read {name}, or drop it.",
        )
    elif reach is not None and reach.cut:
        return Finding(
            "problem",
            "collapse",
            name,
            f"{head} {_NO_GRADIENT}{_under(name, how)}.",
            {**figures, "cause": "no gradient"},
            _attach(name),
        )
    elif relies.offer < OFFERS:
        text = (
            f"p does without it: knowing {name} could add only some {relies.offer:.3f} nats to "
            f"log p of the rest."
        )
        past = [
            other for other in graph.observed if (other, True) in graph._stochastic_reads(other)
        ]
        if past:
            text += f" It reads {past[0]}'s own past and can tell the next step from that."
            remedy = f"Let p see less of {past[0]}'s past (a smaller state, dropout), "
        else:
            rivals = [other for other in graph.latents if other != name]
            remedy = (
                f"Leave less to {rivals[0]} (a smaller one), "
                if rivals
                else "Use a smaller decoder, "
            )
        remedy += (
            "let the KL's weight rise slowly (kl_warmup=…), give it free bits (free_bits=…), or "
            "train with bound='iwae', samples=8."
        )
        figures = {**figures, "cause": "p does not need it"}
    elif reach is None:
        text = "q is exact there, by Bayes' rule: p itself hardly distinguishes its values."
        remedy, figures = (
            "Train p further, or from another seed.",
            {**figures, "cause": "p does not tell it"},
        )
    else:
        text = (
            f"p needs it (knowing {name} could add {relies.offer:.2f} nats or more to log p of "
            f"the rest), but q does not infer its value."
        )
        remedy = (
            f"Train q further (schedule=alternate(1000, 1000)), with a larger network, or look at "
            f"what q({name}|·) reads."
        )
        figures = {**figures, "cause": "q has not found it"}
    return Finding("problem", "collapse", name, f"{head} {text}", figures, remedy)


def reached(reach: Reach | None) -> dict[str, Any]:
    return (
        {} if reach is None else {"reaching": reach.trained, "reaching by its own plan": reach.own}
    )


_NO_GRADIENT = "No gradient of the reconstruction reaches q's factor of it (measured: exactly 0)"


def _under(name: str, how: Mapping[str, str]) -> str:
    return f", under how={{{name!r}: {how[name]!r}}} as the run was trained" if name in how else ""


def _attach(name: str) -> str:
    return f"Train it with a draw that gradients pass through: leave {name!r} out of how=."


def _unreached(name: str, figures: Mapping[str, Any], how: Mapping[str, str]) -> Finding:
    text = (
        f"{_NO_GRADIENT}{_under(name, how)}: q({name}|·) learns from its KL alone, which pulls it "
        f"onto p."
    )
    return Finding("problem", "no gradient", name, text, figures, _attach(name))
