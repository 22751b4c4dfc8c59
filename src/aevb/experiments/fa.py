"""Factor analysis (5.2): EM and AEVB on a model whose evidence and posterior are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from aevb import zoo
from aevb.data.builtin import FA_LOADINGS, FA_SCALE, factor_analysis
from aevb.data.sources import open_source
from aevb.declare.conditionals import Conditional
from aevb.declare.families import MultivariateNormal, Normal
from aevb.declare.networks import linear, table
from aevb.evidence import AIS
from aevb.evidence.filtering import gaussian_posterior
from aevb.experiments.evidence import beside_exact
from aevb.experiments.lab import Lab, Result, check, curve, declared
from aevb.model import Model
from aevb.training.distributed import World
from aevb.training.em import exact_em
from aevb.training.em.factors import Rows
from aevb.training.evaluation import evaluate
from aevb.training.run import Run
from aevb.training.schedules import alternate, em, mle

SNAPSHOTS = (5, 100, 800)
FIXED = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
SHORT = 50
DIMENSIONS = (1, 2, 5, 10, 20, 50)
LARGE = (10, 50)
# Textbook EM: from the model's own start, for the requested number of iterations.
TEXTBOOK = em(tol=0, start="keep", accelerate=False)
LOADINGS, SCALE = "p(x|z)", "scale"


def rows() -> tuple[dict[str, Any], dict[str, Any]]:
    return {"x": factor_analysis(seed=0)}, {"x": factor_analysis(seed=1)}


def true_model() -> Model:
    """Return factor analysis with the parameters that generated the data."""
    model = zoo.fa().double()
    factor: Any = model.factors[LOADINGS]
    with torch.no_grad():
        factor.net.blocks.weights["z"].copy_(torch.as_tensor(FA_LOADINGS))
        factor.vectors[SCALE].copy_(torch.as_tensor(np.log(np.expm1(FA_SCALE))))
    return model


def true_evidence() -> float:
    """Return the mean log p(x) of the test rows under the true model."""
    return float(true_model().log_evidence(**rows()[1]).value.mean())


def seeded(seed: int, **variant: Any) -> Model:
    torch.manual_seed(seed)
    return zoo.fa(**variant)


def train(
    lab: Lab,
    name: str,
    model: Model,
    data: dict[str, Any],
    validation: dict[str, Any],
    **settings: Any,
) -> Run:
    """Train on the CPU, even if there is a GPU: a step takes less than a millisecond."""
    return lab.train(name, model, data, validation, device="cpu", **settings)


def _data(lab: Lab) -> Result:
    data, test = rows()
    return Result(
        {"truth": true_evidence(), "loadings": FA_LOADINGS.tolist(), "scale": FA_SCALE.tolist()},
        {"train": data["x"], "test": test["x"]},
    )


def _reached(history: dict[str, np.ndarray], truth: float, within: float = 0.02) -> int | None:
    """Return the first recorded step whose test evidence is this close to the truth."""
    near = history["validation evidence.step"][history["validation evidence"] > truth - within]
    return int(near[0]) if len(near) else None


def _joint(lab: Lab) -> Result:
    """Train by AEVB with our settings, from 8 seeds; the first one keeps curves and samples."""
    data, test = rows()
    truth, steps = true_evidence(), 1000
    # The samples are written to disk, so that a task that was stopped can continue with them.
    kept = lab.out / "unfinished" / "fa/joint"

    def look(step: int, model: Model) -> None:
        if step in SNAPSHOTS:
            np.save(kept / f"generated {step}.npy", model.sample(1000, seed=0)["x"].cpu().numpy())

    evidence, gaps, reached, arrays, first = [], [], [], {}, None
    for seed in range(2 if lab.quick else 8):
        model = seeded(seed)
        settings = {
            "steps": steps,
            "batch": 32,
            "lr": 0.1,
            "seed": seed,
            "validate_every": 5 if seed == 0 else 20,
        }
        run = train(
            lab,
            f"fa/joint/{seed}",
            model,
            data,
            test,
            after=look if seed == 0 else None,
            **settings,
        )
        evidence.append(float(run.history["validation evidence"][-1]))
        gaps.append(float(run.history["validation gap"][-1]))
        reached.append(_reached(run.history, truth))
        if first is None:
            first, arrays = (
                model,
                curve(run, "validation elbo", "validation evidence", "validation gap"),
            )
    assert first is not None
    numbers = {
        "truth": truth,
        "evidence": evidence,
        "gap": gaps,
        "reached": reached,
        "steps": steps,
        "lr": 0.1,
        "batch": 32,
        **declared(first),
    }
    numbers |= _closed_form(first, test)
    numbers["checks"] = [
        check(
            f"nats of test evidence below the true model's, worst of {len(evidence)} seeds",
            truth - min(evidence),
            most=0.02,
            source="our defaults",
        )
    ]
    return Result(
        numbers,
        arrays
        | {f"generated {step}": np.load(kept / f"generated {step}.npy") for step in SNAPSHOTS},
    )


def _closed_form(model: Model, test: dict[str, Any]) -> dict[str, Any]:
    """Return V and Σ with the posterior's closed form (footnote 8), and W Wᵀ + Φ with the truth.

    Data identify the covariance W Wᵀ + Φ, but neither W nor Φ.
    """
    factor, q = model.factors[LOADINGS], model.factors["q(z|x)"]
    with torch.no_grad():
        w = factor.net.blocks.weights["z"].double()  # type: ignore[union-attr,index]
        sigma = torch.nn.functional.softplus(factor.vectors[SCALE]).double()  # type: ignore[index]
        exact = gaussian_posterior(model, model.prepare(**test), ["z"])
        covariance = w @ w.T + torch.diag(sigma.square())
        gain = w.T @ torch.linalg.inv(covariance)
        raw: Any = q
        spread = (
            raw.distribution(raw({"x": model.prepare(**test)["x"]}))
            ._unbroadcasted_scale_tril.reshape(2, 2)
            .double()
        )
        v = raw.net.blocks.weights["x"].double()
    truth = FA_LOADINGS @ FA_LOADINGS.T + np.diag(FA_SCALE**2)
    factor_exact = exact._unbroadcasted_scale_tril.reshape(2, 2).double()
    return {
        "V": v.tolist(), "V exact": gain.tolist(),
        "Σ": (spread @ spread.T).tolist(), "Σ exact": (factor_exact @ factor_exact.T).tolist(),
        "covariance": covariance.tolist(), "covariance true": truth.tolist(),
    }  # fmt: skip


def _tutorial(lab: Lab) -> Result:
    """Train with the tutorial's initialisation and its constant learning rate.

    The result has the share of seeds that converge in 1,000 steps.
    """
    data, test = rows()
    truth = true_evidence()
    behind: list[float] = []
    gaps: list[float] = []
    for seed in range(2 if lab.quick else 16):
        for schedule, found, name in (
            (None, behind, "validation evidence"),
            (alternate(1000, 1000), gaps, "validation gap"),
        ):
            model = tutorial_model(seed)
            settings = {
                "steps": 1000,
                "batch": 32,
                "lr": 1e-2,
                "decay": "constant",
                "seed": seed,
                "validate_every": 1000,
            }
            settings |= {} if schedule is None else {"schedule": schedule}
            value = float(
                train(lab, f"fa/tutorial/{name}/{seed}", model, data, test, **settings).history[
                    name
                ][-1]
            )
            found.append(truth - value if schedule is None else value)
    shares = {
        "share within 0.02": float(np.mean(np.array(behind) < 0.02)),
        "share of gaps below 0.01": float(np.mean(np.array(gaps) < 0.01)),
    }
    return Result({"truth": truth, "behind": behind, "gap after an E-phase": gaps, **shares})


def tutorial_model(seed: int) -> Model:
    """Return a model with W, V and raw scales drawn from N(0, 1), as in the tutorial's code."""
    torch.manual_seed(seed)
    normal = linear(bias=False, init="normal")
    model = Model(
        p={"z": Normal(2), "x | z": Normal(3, net=normal, scale="learned")},
        q={"z | x": MultivariateNormal(net=normal, covariance="shared")},
    )
    factor: Any = model.factors[LOADINGS]
    with torch.no_grad():
        factor.vectors[SCALE].normal_()
    return model


def _alternate(lab: Lab) -> Result:
    """Train by approximate EM, from 8 seeds: 1,000 steps of φ, then 1,000 of θ, and repeat."""
    data, test = rows()
    truth, length = true_evidence(), 200 if lab.quick else 1000
    gaps, moved, rose, opened, reached = [], [], [], [], []
    arrays: dict[str, np.ndarray] = {}
    for seed in range(2 if lab.quick else 8):
        settings = {
            "steps": length * (4 if lab.quick else 8 if seed == 0 else 4),
            "batch": 32,
            "lr": 1e-2,
            "seed": seed,
            "validate_every": length // 20,
        }
        run = train(
            lab,
            f"fa/alternate/{seed}",
            seeded(seed),
            data,
            test,
            schedule=alternate(length, length),
            **settings,
        )
        history = run.history
        step, evidence, gap = (
            history["validation evidence.step"],
            history["validation evidence"],
            history["validation gap"],
        )
        in_e = ((step - 1) // length) % 2 == 0
        moved.append(
            max(
                float(np.ptp(evidence[in_e & ((step - 1) // length == k)]))
                for k in range(0, int(step[-1]) // length, 2)
            )
        )
        gaps.append(float(gap[step == length][0]))
        opened.append(float(gap[step == 2 * length][0]))
        rose.append(float(evidence[step == 2 * length][0] - evidence[step == length][0]))
        reached.append(_reached(history, truth))
        arrays = arrays or curve(run, "validation elbo", "validation evidence", "validation gap")
    numbers: dict[str, Any] = {
        "truth": truth,
        "length": length,
        "gap": gaps,
        "gap after M": opened,
        "rise in M": rose,
        "moved": moved,
        "reached": reached,
        "short length": SHORT,
        "reached short": _short_turns(lab, data, test, truth),
    }
    numbers["checks"] = [
        check(
            f"gap after the first E-phase, largest of {len(gaps)} seeds",
            max(gaps),
            most=0.01,
            source="tutorial, Figure 3",
        ),
        check(
            "largest change of the evidence inside an E-phase",
            max(moved),
            most=0.0,
            source="tutorial, Figure 3",
        ),
        check(
            "smallest rise of the evidence in the first M-phase",
            min(rose),
            least=0.0,
            source="tutorial, Figure 3",
        ),
    ]
    return Result(numbers, arrays)


def _short_turns(
    lab: Lab, data: dict[str, Any], test: dict[str, Any], truth: float
) -> list[int | None]:
    """Return, per seed, the steps until the evidence is near the truth, with short phases."""
    found = []
    for seed in range(2 if lab.quick else 8):
        settings = {
            "steps": 400 if lab.quick else 3000,
            "batch": 32,
            "lr": 0.03,
            "seed": seed,
            "validate_every": 20,
        }
        run = train(
            lab,
            f"fa/alternate/short/{seed}",
            seeded(seed),
            data,
            test,
            schedule=alternate(SHORT, SHORT),
            **settings,
        )
        found.append(_reached(run.history, truth))
    return found


def _exact(lab: Lab) -> Result:
    """Train by exact EM and by gradient ascent on the exact evidence (Eq. 1), from one start."""
    data, test = rows()
    truth, numbers = true_evidence(), {}
    arrays: dict[str, np.ndarray] = {}
    choices: dict[str, dict[str, Any]] = {
        "em": {"schedule": TEXTBOOK, "steps": 300},
        "mle": {"schedule": mle(), "steps": 1000, "batch": 32, "lr": 0.1},
    }
    for name, settings in choices.items():
        run = train(
            lab,
            f"fa/exact/{name}",
            seeded(0),
            data,
            test,
            seed=0,
            validate_every=2 if name == "em" else 5,
            **settings,
        )
        arrays |= {
            f"{name} {key}": value
            for key, value in curve(run, "validation evidence", "validation elbo").items()
        }
        numbers[name] = {
            "evidence": float(run.history["validation evidence"][-1]),
            "reached": _reached(run.history, truth),
        }
    centred = data["x"] - data["x"].mean(0)
    model = seeded(0).double()
    run = train(
        lab,
        "fa/exact/centred",
        model,
        {"x": centred},
        {"x": centred},
        schedule=TEXTBOOK,
        steps=1000,
        validate_every=1000,
    )
    from sklearn.decomposition import FactorAnalysis  # type: ignore[import-untyped]

    reference = float(
        FactorAnalysis(2, tol=1e-10, svd_method="lapack", max_iter=10_000)
        .fit(centred)
        .score(centred)
    )
    found = float(run.history["validation evidence"][-1])
    checks = [
        check(
            "difference between exact EM and scikit-learn's FactorAnalysis",
            abs(found - reference),
            most=1e-4,
            source="scikit-learn",
        )
    ]
    return Result(
        {"truth": truth, **numbers, "centred": found, "scikit-learn": reference, "checks": checks},
        arrays,
    )


def _posteriors(lab: Lab) -> Result:
    """Measure evidence and gap for families of q (footnote 13) and for free q_i (3.2)."""
    data, test = rows()
    variants: dict[str, Model] = {
        "full covariance": seeded(0),
        "diagonal": seeded(0, posterior="diagonal"),
    }
    variants |= {
        f"diagonal, fixed at {scale:g}": seeded(0, posterior="fixed", scale=scale)
        for scale in (FIXED[1::3] if lab.quick else FIXED)
    }
    torch.manual_seed(0)
    n = len(data["x"])
    free = Model(
        p={
            "z": Normal(2),
            "x | z": Normal(3, net=linear(bias=False, init="normal"), scale="learned"),
        },
        q={"z | i": MultivariateNormal(net=table(n))},
        given={"i": 1},
    )
    found = {}
    for name, model in variants.items():
        run = train(
            lab,
            f"fa/posteriors/{name}",
            model,
            data,
            test,
            steps=1000,
            batch=32,
            lr=0.1,
            validate_every=1000,
        )
        found[name] = {
            "evidence": float(run.history["validation evidence"][-1]),
            "gap": float(run.history["validation gap"][-1]),
        }
    index = {"i": np.arange(n)}
    train(
        lab,
        "fa/posteriors/free",
        free,
        data | index,
        data | index,
        steps=3000,
        batch=100,
        lr=0.1,
        validate_every=3000,
    )
    judge = seeded(0)
    # The evidence of new rows depends on θ only.
    judge.factors[LOADINGS].load_state_dict(free.factors[LOADINGS].state_dict())
    on_train = evaluate(free, open_source(free.graph, data | index, free._parameter()))
    on_test = float(judge.log_evidence(**test).value.mean())
    found["free qᵢ, no network"] = {"evidence": on_test, "gap": on_train["gap"]}
    return Result({"truth": true_evidence(), "variants": found})


PROPOSALS: dict[str, Conditional] = {
    "prior": Normal(net=linear(bias=False, init="zeros"), scale=1.0),
    # This is the diagonal Gaussian nearest to the posterior.
    "diagonal q": Normal(net=linear(bias=False, init="zeros"), scale="learned"),
    "posterior": MultivariateNormal(net=linear(bias=False, init="zeros"), covariance="shared"),
}
PRIOR, DIAGONAL, POSTERIOR = PROPOSALS
ANNEALED = "diagonal q, annealed"


def _known(size: int, q: Conditional) -> Model:
    """Return a linear-Gaussian model with ``size`` latent dimensions, whose evidence is known.

    p does not depend on q.
    """
    torch.manual_seed(size)
    return Model(
        p={
            "z": Normal(size),
            "x | z": Normal(2 * size, net=linear(bias=False, init="normal"), scale=0.5),
        },
        q={"z | x": q},
    ).double()


def _evidence(lab: Lab) -> Result:
    """Compare estimates of log p(x) with the exact value, for several proposals.

    The last estimate anneals from a poor proposal.
    """
    samples, temperatures, n = (500, 40, 5) if lab.quick else (5000, 300, 20)
    found: dict[str, dict[str, Any]] = {}
    for size in LARGE:
        ways = found[str(size)] = {}
        for words, q in PROPOSALS.items():
            model = _known(size, q)
            x = model.sample(n, seed=0)["x"]
            exact = model.log_evidence(x=x).value
            if words != PRIOR:
                with torch.no_grad():
                    method, source = exact_em(model), open_source(model.graph, {"x": x}, x)
                    method.open(Rows(source, World()))
                    method.tighten(model.prepare(x=x))  # an exact E-step: q's nearest member
            ways[words] = beside_exact(
                model.log_evidence(x=x, method="importance", samples=samples, seed=1), exact
            )
            if words == DIAGONAL:
                annealed = model.log_evidence(x=x, method=AIS(temperatures=temperatures), seed=1)
        ways[ANNEALED] = beside_exact(annealed, exact)
    numbers: dict[str, Any] = {
        "samples": samples,
        "temperatures": temperatures,
        "rows": n,
        "dimensions": found,
    }
    return Result(
        numbers
        | {
            "checks": []
            if lab.quick
            else _evidence_checks(found[str(LARGE[-1])], f"{LARGE[-1]} dimensions")
        }
    )


def _evidence_checks(ways: dict[str, Any], where: str) -> list[dict[str, Any]]:
    return [
        check(
            f"share of rows that are flagged with the prior as proposal, {where}",
            ways[PRIOR]["flagged"],
            least=1.0,
            source="the estimate is wrong on all rows",
        ),
        check(
            f"importance sampling from the posterior, {where}: largest error",
            ways[POSTERIOR]["worst"],
            most=1e-6,
            source="every weight is p(x)",
        ),
        check(
            f"annealing from a diagonal q, {where}: mean error",
            abs(ways[ANNEALED]["error"]),
            most=0.1,
            source="the exact evidence",
        ),
    ]


def _naive(lab: Lab) -> Result:
    """Estimate log p(x) by averaging p(x|z) over the prior, and compare with the exact value.

    The error grows with the latent dimension.
    """
    samples = 2000 if lab.quick else 20_000
    found = {}
    for size in DIMENSIONS:
        model = _known(size, PROPOSALS[PRIOR])
        x = model.sample(50, seed=0)["x"]
        exact = model.log_evidence(x=x).value
        estimate = model.log_evidence(x=x, method="importance", samples=samples, seed=1)
        error = estimate.value - exact
        found[size] = {
            "error": float(error.mean()),
            "worst": float(error.abs().max()),
            "exact": float(exact.mean()),
            "stderr": float(estimate.stderr.mean()),
        }
    return Result({"samples": samples, "dimensions": found})


TASKS: dict[str, Callable[[Lab], Result]] = {
    "fa/data": _data,
    "fa/joint": _joint,
    "fa/tutorial": _tutorial,
    "fa/alternate": _alternate,
    "fa/exact": _exact,
    "fa/posteriors": _posteriors,
    "fa/naive": _naive,
    "fa/evidence": _evidence,
}
