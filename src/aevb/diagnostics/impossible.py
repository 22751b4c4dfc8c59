"""A bound above the evidence is impossible: a density or a divergence of a family is wrong."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from aevb.derive.divergences import closed_form_kl
from aevb.derive.plan import Plan
from aevb.diagnostics.finding import Finding
from aevb.diagnostics.further_training import bound_of
from aevb.diagnostics.paired import observed_numbers, paired
from aevb.estimate.batch import Batch
from aevb.evidence import unnoted_evidence
from aevb.evidence.exact import exact_evidence, why_not_exact
from aevb.model import Model

REPEATS = 4  # draws of the noise
ROWS, SAMPLES = 100, 300  # of the evidence that is sampled
SHARE = 0.2  # of the samples; rows with a smaller effective sample size are left out


def judge_bound(model: Model, batch: Batch, plan: Plan, seed: int) -> list[Finding]:
    """Report a bound that is clearly above the evidence of the rows.

    The evidence is exact if it has a closed form. Otherwise it is sampled, with draws from q and
    from p, but only for models with a family or a divergence of the user's own.
    """
    own = own_parts(model)
    evidences: list[tuple[str, Tensor, Tensor | None]]
    if why_not_exact(model, batch) is None:
        try:
            evidences = [("exact", exact_evidence(model, batch).double(), None)]
        except LinAlgError:
            return []
    elif own:
        batch = {
            name: value.narrow(-2, 0, min(ROWS, value.shape[-2])) for name, value in batch.items()
        }
        evidences = [
            (f"{SAMPLES} draws from {side}", *_sampled(model, batch, method, seed))
            for side, method in (("p", "prior"), ("q", "importance"))
        ]
    else:
        return []
    value = bound_of(plan)
    bounds = torch.stack([value(model, batch, seed + i).double() for i in range(REPEATS)])
    for how, evidence, kept in evidences:
        rows = torch.ones_like(evidence, dtype=torch.bool) if kept is None else kept
        if not bool(rows.any()):
            continue
        above = paired((bounds - evidence)[:, rows], observed_numbers(model, batch), trimmed=False)
        if above.clear:
            return [
                _impossible(float(bounds[:, rows].mean()), float(evidence[rows].mean()), how, own)
            ]
    return []


def _sampled(model: Model, batch: Batch, method: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return an estimate of log p per row, and the mask of the rows where it is precise."""
    found = unnoted_evidence(model, batch, method=method, samples=SAMPLES, seed=seed)
    ess = found.diagnostics["ess"]
    assert isinstance(ess, Tensor)
    good = found.value.isfinite() & (ess > SHARE * SAMPLES)
    return found.value.double(), good


def _impossible(bound: float, evidence: float, how: str, own: list[str]) -> Finding:
    text = (
        f"The ELBO is {bound:.2f} nats per example, above log p, which is {evidence:.2f} ({how}). "
        f"That is impossible, because the ELBO is a lower bound: a log_prob, rsample, entropy or "
        f"registered KL of a family is wrong, and so is everything computed with it."
    )
    remedy = (
        "The mean of log q − log p over draws of rsample() must equal the registered KL, and the "
        "mean of −log_prob() the entropy()."
    )
    if own:
        remedy = f"Check your own parts: {'; '.join(own)}. {remedy}"
    figures = {"elbo": bound, "evidence": evidence}
    return Finding("problem", "impossible bound", "run", text, figures, remedy)


def own_parts(model: Model) -> list[str]:
    """Return the latents with families or divergences of the user's own, and what these are."""
    found = []
    for name in model.graph.latents:
        specs = {
            side: [entry.spec for entry in group[name].values()]
            for side, group in (("q", model.graph.q), ("p", model.graph.p))
        }
        parts = [
            type(spec).__name__
            for spec in (*specs["q"], *specs["p"])
            if not type(spec).__module__.startswith("aevb.")
        ]
        for q in specs["q"]:
            for p in specs["p"]:
                kl = closed_form_kl(q, p)
                if kl is not None and not kl.__module__.startswith("aevb."):
                    parts.append(f"the registered KL of {type(q).__name__} and {type(p).__name__}")
        if parts:
            found.append(f"{name} ({', '.join(dict.fromkeys(parts))})")
    return found
