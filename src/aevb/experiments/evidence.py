"""How tight a bound is and what a training left wrong: log p(x) by every way, the gap split, the
estimators measured, the model examined.

Each function looks at a model that a section's task has just trained and returns what it found as a
:class:`Result`, which the task keeps beside its own: the report reads files alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from aevb.diagnostics import diagnose
from aevb.evidence import AIS, Evidence, Particles, bidirectional, curve
from aevb.evidence.annealing import CHAINS
from aevb.evidence.weights import reliable_shape
from aevb.experiments.lab import Lab, Result, check
from aevb.laboratory import Figures, compare_estimators
from aevb.model import Model
from aevb.predictive import predictive_check
from aevb.training.run import Run

STATISTICS = ("mean", "sd", "q05", "q50", "q95", "correlation")
PARTS = ("evidence", "approximation", "best", "amortisation", "elbo", "total")  # of a gap


def some(lab: Lab, quick: int, cpu: int, gpu: int) -> int:
    """A number of rows, samples or temperatures, as large as the machine has time for."""
    return quick if lab.quick else cpu if lab.device == "cpu" else gpu


def beside_exact(found: Evidence, exact: Tensor) -> dict[str, Any]:
    """An estimate of log p(x) against the exact value: its errors, what it says of them, and what
    it rests on.
    """
    error, told = (found.value - exact).double(), found.diagnostics
    khat, samples = told.get("khat"), told.get("samples")
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
    if isinstance(khat, Tensor) and isinstance(samples, int):
        numbers |= {
            "khat": _median(khat),
            "flagged": (khat > reliable_shape(samples)).double().mean(),
        }
    return {
        name: float(value) if isinstance(value, Tensor) else value
        for name, value in numbers.items()
    }


def _median(values: Any) -> float:
    return float(values.double().median())


def tightness(lab: Lab, model: Model, rows: Mapping[str, Any]) -> Result:
    """The bound as K grows, with annealing beside it; the gap of these rows, split; and annealing
    from both sides on simulated ones.
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
        what = "annealing from both sides on simulated rows: nats between them"
        numbers["checks"] = [
            check(
                what,
                abs(both.mean),
                most=0.1,
                source="both are log p(x) where annealing is slow enough",
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
    """Statistics of the data against those of data drawn anew from the model, given what q says of
    each row.
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
    """What the doctor says of a run."""
    return diagnose(model, rows, run=run, rows=some(lab, 60, 300, 1000), seed=0).to_dict()


def dead(diagnosis: Mapping[str, Any]) -> int:
    """How many latents a diagnosis calls dead."""
    return sum(finding["kind"] == "collapse" for finding in diagnosis["findings"])


def filtered(lab: Lab, model: Model, rows: Mapping[str, Any]) -> dict[str, Any]:
    """log p(x) of sequences by importance sampling and by a particle filter, from as many draws."""
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
    """Every way of estimating a model's ELBO, measured at its trained weights; a draw of ``latent``
    must cost variance.
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
        f"variance of the gradient when {latent} is drawn (Gumbel-softmax), in units of that when "
        f"it is summed"
    )
    checks = [
        check(what, drawn.noise / summed.noise, least=1.0, source="a sum has no noise of its own")
    ]
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
    """What a table shows of a way beside its figures: its name, its whole variance, whether a bias
    was seen, and the gradient's square of it.
    """
    return {
        "full name": one.full_name,
        "noise": one.noise,
        "bias seen": one.bias_seen,
        "squared bias": one.squared_bias,
    }


def merged(result: Result, name: str, more: Result) -> None:
    """Put what was found of a model into its task's result, under a name; its targets join the
    task's.
    """
    found = dict(more.numbers)
    result.numbers.setdefault("checks", []).extend(found.pop("checks", []))
    result.numbers[name] = found
    result.arrays |= {f"{name} {key}": np.asarray(values) for key, values in more.arrays.items()}
