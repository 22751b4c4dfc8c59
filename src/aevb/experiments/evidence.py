"""Measurements of a trained model: log p(x), the gap, the estimators, the diagnosis.

Each function measures a model that a task has just trained. It returns a :class:`Result` or
numbers, which the task adds to its own result, because the report reads only files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from aevb.diagnostics import diagnose
from aevb.evidence import AIS, Evidence, Particles, bidirectional, curve
from aevb.evidence.annealing import CHAINS
from aevb.evidence.weights import suspect
from aevb.experiments.lab import Lab, Result, check
from aevb.laboratory import Figures, compare_estimators
from aevb.model import Model
from aevb.predictive import predictive_check
from aevb.training.run import Run

STATISTICS = ("mean", "sd", "q05", "q50", "q95", "correlation")
PARTS = ("evidence", "approximation", "best", "amortisation", "elbo", "total")  # parts of a gap


def some(lab: Lab, quick: int, cpu: int, gpu: int) -> int:
    """Choose a number of rows, samples or temperatures that suits the machine."""
    return quick if lab.quick else cpu if lab.device == "cpu" else gpu


def beside_exact(found: Evidence, exact: Tensor) -> dict[str, Any]:
    """Compare an estimate of log p(x) with the exact value.

    The result has the errors, the standard error that the estimate reports, the effective sample
    size, and the diagnostics of the weights.
    """
    error, told = (found.value - exact).double(), found.diagnostics
    khat, ess, samples = (told.get(name) for name in ("khat", "ess", "samples"))
    numbers: dict[str, Any] = {
        "error": error.mean(),
        "worst": error.abs().max(),
        "stderr": found.stderr.double().mean(),
    }
    numbers |= {
        "ess": _median(told["ess"]),
        "of": samples or told["chains"],
        "notes": list(found.notes),
    }
    if isinstance(khat, Tensor) and isinstance(ess, Tensor) and isinstance(samples, int):
        numbers |= {
            "khat": _median(khat),
            "flagged": suspect(khat, ess, samples).double().mean(),
        }
    return {
        name: float(value) if isinstance(value, Tensor) else value
        for name, value in numbers.items()
    }


def _median(values: Any) -> float:
    return float(values.double().median())


def tightness(lab: Lab, model: Model, rows: Mapping[str, Any]) -> Result:
    """Measure how tight the bound is.

    The result has the bound as K grows, the two parts of the gap of these rows, with the evidence
    by annealing, and bidirectional annealing on simulated rows.
    """
    n = some(lab, 4, 20, 50)
    ks = (
        (1, 10, 100)
        if lab.quick
        else (1, 10, 100, 1000)
        if lab.device == "cpu"
        else (1, 10, 100, 1000, 10_000)
    )
    settings = AIS(temperatures=some(lab, 20, 100, 5000))
    few = {name: values[:n] for name, values in rows.items()}
    bounds = curve(model, model.prepare(**few), ks, seed=1)
    gap = model.gap(
        iterations=some(lab, 20, 300, 500),
        samples=some(lab, 40, 1000, 2000),
        method=settings,
        seed=2,
        **few,
    )
    both = bidirectional(model, n, settings=settings, chains=CHAINS, seed=3)
    parts = {name: float(getattr(gap, name).double().mean()) for name in PARTS}
    errors = {name: float(gap.stderr[name].double().square().sum().sqrt()) / n for name in PARTS}
    numbers: dict[str, Any] = {
        "rows": n,
        "k": {
            str(k): {"bound": value, "error": error}
            for k, value, error in zip(ks, bounds.mean.tolist(), bounds.error.tolist(), strict=True)
        },
        "annealing": {
            "chains": CHAINS,
            "temperatures": settings.temperatures,
            "leapfrog": settings.leapfrog,
            "method": gap.method,
        },
        "gap": parts,
        "gap errors": errors,
        "notes": list(gap.notes),
        "both sides": {
            "lower": both.lower.mean,
            "upper": both.upper.mean,
            "gap": both.mean,
            "error": both.error,
        },
    }
    if not lab.quick:
        what = "bidirectional annealing on simulated rows: nats between the two bounds"
        numbers["checks"] = [
            check(
                what,
                abs(both.mean),
                most=0.1,
                source="both bounds are log p(x) if annealing is slow enough",
            )
        ]
    return Result(
        numbers,
        {
            name: getattr(gap, name).double().cpu().numpy()
            for name in ("approximation", "amortisation")
        },
    )


def replicated(lab: Lab, model: Model, rows: Mapping[str, Any]) -> Result:
    """Run a posterior predictive check: compare statistics of the data with simulated data.

    The simulated data are drawn from p, with the latents of each row drawn from q.
    """
    found = predictive_check(
        model,
        rows,
        STATISTICS,
        replicates=some(lab, 20, 200, 200),
        rows=some(lab, 50, 300, 1000),
        seed=0,
    )
    return Result(found.to_dict(), {one.label: one.replicates for one in found.comparisons})


def examined(lab: Lab, model: Model, rows: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Return the diagnosis of a run."""
    return diagnose(model, rows, run=run, rows=some(lab, 60, 300, 1000), seed=0).to_dict()


def dead(diagnosis: Mapping[str, Any]) -> int:
    """Return the number of latents that a diagnosis calls dead."""
    return sum(finding["kind"] == "collapse" for finding in diagnosis["findings"])


def filtered(lab: Lab, model: Model, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Estimate log p(x) of sequences by importance sampling and by a particle filter.

    Both methods use the same number of draws.
    """
    few = {name: values[: some(lab, 4, 20, 100)] for name, values in rows.items()}
    draws, repeats = some(lab, 80, 1600, 8000), 8
    ways: dict[str, Any] = {
        "importance": ("importance", draws),
        "particles": (Particles(repeats=repeats), draws // repeats),
    }
    found = {
        name: model.log_evidence(method=method, samples=samples, seed=1, **few)
        for name, (method, samples) in ways.items()
    }
    numbers = {
        name: {
            "value": one.mean,
            "error": one.error,
            "ess": _median(one.diagnostics["ess"]),
            "notes": list(one.notes),
        }
        for name, one in found.items()
    }
    elbo = curve(model, model.prepare(**few), (1,), seed=2).mean
    return {
        "rows": len(next(iter(few.values()))),
        "draws": draws,
        "repeats": repeats,
        "elbo": float(elbo),
        "ways": numbers,
    }


def measured(lab: Lab, model: Model, rows: Mapping[str, Any], latent: str) -> Result:
    """Measure every way of estimating a model's ELBO, with its trained weights.

    A check requires that drawing ``latent`` increases the variance of the gradient.
    """
    replicates, rounds = some(lab, 16, 32, 64), some(lab, 3, 10, 15)
    found = compare_estimators(
        model,
        rows,
        rows=50,
        replicates=replicates,
        samples=(1, 2),
        bounds=("elbo",),
        temperatures=(0.5,),
        rounds=rounds,
        seed=0,
    )
    summed, drawn = (_plainly(found.figures, how) for how in ({}, {latent: "gumbel"}))
    what = (
        f"variance of the gradient with {latent} drawn (Gumbel-softmax), divided by the variance "
        f"with {latent} summed"
    )
    checks = [check(what, drawn.noise / summed.noise, least=1.0, source="a sum adds no noise")]
    record = found.record()
    record["figures"] = [
        figure | _judged(one) for figure, one in zip(record["figures"], found.figures, strict=True)
    ]
    return Result(record | {"checks": checks})


def _plainly(figures: tuple[Figures, ...], how: Mapping[str, str]) -> Figures:
    return next(
        one
        for one in figures
        if dict(one.how) == dict(how) and one.samples == 1 and one.gradient == "plain"
    )


def _judged(one: Figures) -> dict[str, Any]:
    """Return the further columns of a way in the report's table.

    They are its name, its total variance, whether it has a significant bias, and the squared bias
    of the gradient.
    """
    return {
        "full name": one.full_name,
        "noise": one.noise,
        "bias seen": one.bias_seen,
        "squared bias": one.squared_bias,
    }


def merged(result: Result, name: str, more: Result) -> None:
    """Add the measurements of a model to its task's result, under a name.

    Their checks are added to the task's checks.
    """
    found = dict(more.numbers)
    result.numbers.setdefault("checks", []).extend(found.pop("checks", []))
    result.numbers[name] = found
    result.arrays |= {f"{name} {key}": np.asarray(values) for key, values in more.arrays.items()}
