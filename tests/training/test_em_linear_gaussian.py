"""EM of linear-Gaussian models from second moments: against EM written out row by row,
scikit-learn, and an interrupted run.
"""

import copy
import signal

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.decomposition import FactorAnalysis

from aevb import Model, MultivariateNormal, Normal, em, fit, linear, load_run
from aevb.data.sources import open_source
from aevb.evidence.filtering import gaussian_posterior
from aevb.training.checkpoint import CheckpointError
from aevb.training.distributed import World
from aevb.training.em import Regressions
from aevb.training.em import moments as em_moments
from aevb.training.em.acceleration import Ascent
from aevb.training.em.factors import Rows
from aevb.training.em.starts import principal_factors
from aevb.training.loop import Training


def standardised(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)) / x.std(0)


CANCER, WINE = standardised(load_breast_cancer().data), standardised(load_wine().data)


def factors(d: int, count: int, **net) -> Model:
    torch.manual_seed(0)
    return Model(
        p={"z": Normal(count), "x | z": Normal(d, scale="learned", **net)},
        q={"z | x": MultivariateNormal(net=linear(), covariance="shared")},
    )


def holes(x: np.ndarray, share: float = 0.2, seed: int = 0) -> np.ndarray:
    return np.where(np.random.default_rng(seed).random(x.shape) < share, np.nan, x)


# One iteration, against EM written out ------------------------------------------------------------


def declared(kind: str) -> tuple[Model, dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    n = 40
    c, z = random.normal(2, 3, (n, 2)), random.normal(size=(n, 2))
    y = z @ random.normal(size=(2, 3)) + c @ random.normal(size=(2, 3)) + 5
    x = 100 * (
        y @ random.normal(size=(3, 4)) + z @ random.normal(size=(2, 4)) + random.normal(size=(n, 4))
    )
    torch.manual_seed(1)
    if kind == "hierarchy":
        p = {
            "u": Normal(1, learned=True),
            "z | u": Normal(2, scale="learned"),
            "y | z, c": Normal(3, net=linear(bias=False), scale=0.5),
        }
        p |= {"x | y, z": MultivariateNormal(4, covariance="shared")}
        model = Model(p, {"z | x, y, c": Normal(), "u | z": Normal()}, given={"c": 2})
    elif kind == "no bias":
        model = factors(4, 2, net=linear(bias=False))
    elif kind == "observed roots":
        model = Model(
            {
                "y": Normal(3),
                "z | y": Normal(2, scale="learned"),
                "x | z": Normal(4, scale="learned"),
            },
            {"z | x, y": Normal()},
        )
    else:
        model = factors(4, 2)
    model = model.double()
    with torch.no_grad():
        for parameter in model.theta():
            parameter.add_(0.3 * torch.randn_like(parameter))
    data = {"c": c, "x": x, "y": y, "z": z}
    return model, {name: data[name] for name in (*model.graph.observed, *model.graph.given)}


def by_rows(model: Model, data: dict[str, np.ndarray]) -> None:
    """One iteration of EM, an example at a time, by the joint Gaussian's posterior and weighted
    least squares.
    """
    graph, everything = model.graph, model.prepare(**data)
    sums: dict[tuple[str, int], list] = {}
    for row in range(len(next(iter(data.values())))):
        batch = {name: value[:, row : row + 1] for name, value in everything.items()}
        unknown = [
            name
            for name in graph.latents
            if name not in batch or (f"{name}?" in batch and not bool(batch[f"{name}?"].all()))
        ]
        batch = {
            name: value
            for name, value in batch.items()
            if name.rstrip("?") not in unknown
            and not (name.rstrip("?") in graph.latents and "?" in name)
        }
        mean = {name: value[0, 0] for name, value in batch.items() if not name.endswith("?")}
        posterior = gaussian_posterior(model, batch, unknown) if unknown else None
        covariance, at = {}, {}
        if posterior is not None:
            start = 0
            for name in unknown:
                at[name] = range(start, start := start + graph.size(name))
                mean[name] = posterior.loc[0, list(at[name])]
            covariance = (posterior.scale_tril @ posterior.scale_tril.mT)[0]
        for entry in graph.entries():
            if entry.side != "p" or not any(True for _ in model.factors[entry.id].parameters()):
                continue
            name, parents = entry.key.name, [ref.name for ref in entry.key.parents]
            bias = (
                entry.spec.learned
                if not parents
                else model.factors[entry.id].net.blocks.bias is not None
            )
            design = torch.cat(
                [mean[parent] for parent in parents]
                + ([torch.ones(1, dtype=torch.float64)] if bias else [])
            )
            places = [(parent, i) for parent in parents for i in range(graph.size(parent))] + (
                [None] if bias else []
            )

            def shared(a, b, covariance=covariance, at=at):
                return (
                    covariance[at[a[0]][a[1]], at[b[0]][b[1]]]
                    if a and b and a[0] in at and b[0] in at
                    else 0.0
                )

            inner = torch.outer(design, design) + torch.tensor(
                [[shared(a, b) for b in places] for a in places]
            ).reshape(len(places), len(places))
            for d in range(graph.size(name)):
                if f"{name}?" in batch and not bool(batch[f"{name}?"][0, 0, d]):
                    continue
                outer = mean[name][d] * design + torch.tensor(
                    [shared((name, d), b) for b in places]
                )
                own = mean[name] * mean[name][d] + torch.tensor(
                    [shared((name, d), (name, e)) for e in range(graph.size(name))]
                )
                all_outer = torch.stack(
                    [
                        mean[name][e] * design
                        + torch.tensor([shared((name, e), b) for b in places])
                        for e in range(graph.size(name))
                    ]
                )
                total = sums.setdefault((entry.id, d), [0.0, 0.0, 0.0, 0.0, 0])
                for i, term in enumerate((inner, outer, own, all_outer, 1)):
                    total[i] = total[i] + term
    with torch.no_grad():
        for entry in graph.entries():
            d = graph.size(entry.key.name)
            if (entry.id, 0) not in sums:
                continue
            solved = [
                torch.linalg.solve(sums[entry.id, i][0], sums[entry.id, i][1]) for i in range(d)
            ]
            matrix = torch.stack(solved)
            left = torch.stack(
                [
                    (sums[entry.id, i][2] - solved[i] @ sums[entry.id, i][3].mT)
                    / sums[entry.id, i][4]
                    for i in range(d)
                ]
            )
            factor = model.factors[entry.id]
            start = 0
            for ref in entry.key.parents:
                size = graph.size(ref.name)
                factor.net.blocks.weights[str(ref)].copy_(matrix[:, start : start + size])
                start += size
            if entry.key.parents and factor.net.blocks.bias is not None:
                factor.net.blocks.bias.copy_(matrix[:, -1])
            if "scale" in factor.vectors:
                factor.vectors["scale"].copy_(torch.log(torch.expm1(left.diagonal().sqrt())))
            if "tril" in factor.vectors:
                root = torch.linalg.cholesky((left + left.mT) / 2)
                rows, columns = torch.tril_indices(d, d)
                entries = root[rows, columns]
                factor.vectors["tril"].copy_(
                    torch.where(rows == columns, torch.log(torch.expm1(entries.abs())), entries)
                )
            if not entry.key.parents and entry.spec.learned:
                factor.root.copy_(
                    torch.cat([matrix[:, -1], torch.log(torch.expm1(left.diagonal().sqrt()))])
                )


CASES = [
    "plain",
    "no bias",
    "hierarchy",
    "observed roots",
    "missing",
    "missing, no bias",
    "known codes",
    "missing, known codes",
]


@pytest.mark.parametrize("kind", CASES)
def test_an_iteration_is_the_one_written_out_row_by_row(kind, monkeypatch):
    model, data = declared(
        kind.removeprefix("missing, ").replace("missing", "plain").replace("known codes", "plain")
    )
    random = np.random.default_rng(2)
    if kind.startswith("missing"):
        data["x"] = holes(data["x"])
        data["x"][:5] = declared("plain")[1]["x"][:5]  # some rows are complete
    if kind.endswith("known codes"):
        data["z"] = np.where(random.random((40, 1)) < 0.4, random.normal(size=(40, 2)), np.nan)
    other = copy.deepcopy(model)
    method = Regressions(model)
    with torch.no_grad():
        method.open(Rows(open_source(model.graph, data, model._parameter()), World()))
        own = method.read()
        evidence, following = method.update(own)
        assert float(evidence) == pytest.approx(
            float(model.log_evidence(**data).value.mean()), rel=1e-12
        )
        before = {name: value.clone() for name, value in model.state_dict().items()}
        method.write(own)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, before[name], rtol=1e-9, atol=1e-9)
        method.write(following)
        by_rows(other, data)
    for name, value in model.state_dict().items():
        if "p(" in name:
            torch.testing.assert_close(
                value,
                other.state_dict()[name],
                rtol=1e-7,
                atol=1e-7,
                msg=lambda text, name=name: f"{name}: {text}",
            )
    if kind.startswith("missing"):  # rows that are read again at every iteration
        monkeypatch.setattr(em_moments, "KEPT", 0)
        with torch.no_grad():
            method.open(Rows(open_source(model.graph, data, model._parameter()), World()))
            assert method.moments.streams
            torch.testing.assert_close(
                method.update(own), (evidence, following), rtol=1e-12, atol=1e-12
            )


# Whole runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "count", "best", "most"),
    [(CANCER, 5, -16.5464, 120), (WINE, 3, -15.08025, 35)],
    ids=["cancer", "wine"],
)
def test_the_defaults_reach_the_maximum_in_few_iterations(x, count, best, most):
    run = fit(factors(x.shape[1], count), {"x": x}, schedule=em())
    evidence = run.history["evidence"]
    assert evidence[-1] > max(best - 5e-4, FactorAnalysis(count).fit(x).score(x) - 1e-3)
    assert (np.diff(evidence) >= 0).all()
    assert run.step <= most
    assert run.history["evidence.step"][-1] == run.step
    assert (
        run.rows[-2]["note"]
        == f"em() converged after {run.step} iterations: the last ones raised the mean evidence "
        f"by less than tol=1e-05 nats."
    )
    assert float(run.model.log_evidence(x=x).value.double().mean()) == pytest.approx(
        evidence[-1], abs=1e-5
    )


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_acceleration_saves_iterations_and_never_lowers_the_evidence(share):
    x = holes(WINE, share) if share else WINE
    runs = [
        fit(
            factors(13, 3).double(),
            {"x": x},
            schedule=em(start="keep", accelerate=accelerate, tol=1e-4),
        )
        for accelerate in (True, False)
    ]
    evidence = [run.history["evidence"] for run in runs]
    assert all((np.diff(found) >= -1e-12).all() for found in evidence)
    assert 1.5 * runs[0].step < runs[1].step
    assert evidence[0][-1] > evidence[1][-1]


def test_a_trial_that_lowers_the_evidence_is_not_taken():
    """A fixed-point iteration whose extrapolation is misled: the evidence falls where plain EM goes
    on.
    """
    path = torch.tensor([0.0, 1.0, 1.5, 1.75, 1.9], dtype=torch.float64)

    def update(point):
        at = float(point)
        evidence = at if at <= 1.9 else -1.0
        later = path[path > at + 1e-9]
        return torch.tensor(evidence, dtype=torch.float64), later[:1] if len(later) else point

    ascent = Ascent(update, path[:1])
    found = []
    for _ in range(6):
        ascent.step()
        found.append(ascent.evidence)
    assert found == sorted(found)
    assert found[-1] == pytest.approx(1.9)


def test_the_limit_is_said_and_tol_0_goes_to_it():
    run = fit(factors(13, 3), {"x": WINE}, schedule=em(), steps=5)
    assert run.step == 5
    assert (
        run.rows[-2]["note"]
        == "em() ended after 5 iterations, as asked, before it converged (tol=1e-05); more "
        "steps= would raise the evidence."
    )
    run = fit(factors(13, 3), {"x": WINE}, schedule=em(tol=0), steps=60)
    assert run.step == 60
    assert not [row for row in run.rows if "note" in row]


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch, share):
    x = holes(WINE, share) if share else WINE
    whole = factors(13, 3)
    run = fit(whole, {"x": x}, schedule=em(), out=tmp_path / "whole")
    take = Training._take_step

    def interrupted(self, phase):
        if self.step == 8:
            signal.raise_signal(signal.SIGINT)
        return take(self, phase)

    monkeypatch.setattr(Training, "_take_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(factors(13, 3), {"x": x}, schedule=em(), out=tmp_path / "part")
    monkeypatch.setattr(Training, "_take_step", take)
    torch.manual_seed(5)
    part = Model(
        p={"z": Normal(3), "x | z": Normal(13, scale="learned")},
        q={"z | x": MultivariateNormal(net=linear(), covariance="shared")},
    )
    resumed = fit(part, {"x": x}, schedule=em(), out=tmp_path / "part", resume=True)
    assert resumed.step == run.step
    np.testing.assert_array_equal(resumed.history["evidence"], run.history["evidence"])
    for a, b in zip(whole.state_dict().values(), part.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    # it has converged: nothing is left to do
    again = fit(part, {"x": x}, schedule=em(), out=tmp_path / "part", resume=True)
    assert again.step == run.step
    assert [row.get("note") for row in again.rows].count(run.rows[-2]["note"]) == 1


def test_iterations_of_another_model_are_refused(tmp_path, monkeypatch):
    fit(factors(13, 3), {"x": WINE}, schedule=em(), steps=5, out=tmp_path)
    monkeypatch.setattr(Ascent, "tensors", lambda self: {})
    from aevb.training import checkpoint

    real = checkpoint.read

    def other(folder):
        found = real(folder)
        found.optimizer["em"]["points"] = found.optimizer["em"]["points"][:, 1:]
        return found

    monkeypatch.setattr(checkpoint, "read", other)
    with pytest.raises(CheckpointError, match=r"EM state does not fit this model"):
        fit(factors(13, 3), {"x": WINE}, schedule=em(), steps=9, out=tmp_path, resume=True)


# Where it starts ----------------------------------------------------------------------------------


def test_a_fresh_model_starts_from_the_data_and_another_from_its_own_weights(tmp_path):
    def started(model, **choices):
        return fit(model, {"x": CANCER}, schedule=em(**choices), steps=1).history["evidence"][0]

    from_data, kept = started(factors(30, 5)), started(factors(30, 5), start="keep")
    assert from_data > kept + 1
    touched = factors(30, 5)
    assert touched.untouched()
    assert touched.double().untouched()
    with torch.no_grad():
        touched.factors["p(x|z)"].net.blocks.weights["z"][0, 0] += 1e-3
    assert not touched.untouched()
    assert started(touched) == pytest.approx(kept, abs=1e-2)
    assert started(touched.float(), start="data") > started(factors(30, 5)) - 1e-3
    model = factors(30, 5)
    run = fit(model, {"x": CANCER}, schedule=em(), steps=20, out=tmp_path)
    on = fit(model, {"x": CANCER}, schedule=em(), steps=1).history["evidence"][0]
    assert on >= run.history["evidence"][-1] - 1e-6
    loaded = load_run(tmp_path)
    assert not loaded.untouched()
    assert started(loaded) >= run.history["evidence"][-1] - 1e-6
    assert model.fresh(3).untouched()


def test_principal_factors_are_the_posterior_of_factor_analysis():
    loadings = torch.tensor([2.0, 1.0, -1.0, 0.5, 3.0], dtype=torch.float64)
    noise = torch.tensor([1.0, 0.5, 2.0, 0.3, 4.0], dtype=torch.float64)
    gain, variances = principal_factors(torch.outer(loadings, loadings) + noise.diag(), 1)
    expected = 1 / (1 + (loadings.square() / noise).sum())
    torch.testing.assert_close(variances[0], expected, rtol=1e-3, atol=0)
    expected = expected * loadings / noise
    torch.testing.assert_close(gain[0] * gain[0, 0].sign(), expected, rtol=0, atol=1e-3)
    # more latents than columns
    gain, variances = principal_factors(torch.eye(2, dtype=torch.float64), 3)
    assert gain.shape == (3, 2)
    assert float(variances[2]) == 1.0
    assert bool((gain[:2].norm(dim=1) > 0).all())


def test_of_wide_data_they_are_the_posterior_of_probabilistic_pca(monkeypatch):
    monkeypatch.setattr("aevb.training.em.starts.WIDE", 3)
    values = torch.tensor([5.0, 3.0, 1.0, 1.0], dtype=torch.float64)
    gain, variances = principal_factors(values.diag(), 2)
    torch.testing.assert_close(variances, 1 / values[:2])
    torch.testing.assert_close(
        gain.abs(), torch.eye(2, 4, dtype=torch.float64) * ((values - 1).sqrt() / values)
    )


def test_a_hierarchy_starts_above_a_random_one():
    random = np.random.default_rng(3)
    u, c = random.normal(size=(500, 1)), random.normal(size=(500, 2))
    z = u @ random.normal(size=(1, 3)) + 0.5 * random.normal(size=(500, 3))
    x = (
        z @ random.normal(size=(3, 8))
        + c @ random.normal(size=(2, 8))
        + 0.3 * random.normal(size=(500, 8))
        + 4
    )
    p = {
        "u": Normal(1),
        "z | u": Normal(3, scale="learned"),
        "x | z, c": Normal(8, scale="learned"),
    }
    runs = {}
    for start in ("data", "keep"):
        torch.manual_seed(0)
        model = Model(p, {"z | x, c": Normal(), "u | z": Normal()}, given={"c": 2}).double()
        runs[start] = fit(model, {"x": x, "c": c}, schedule=em(start=start))
    first, last = (
        {start: run.history["evidence"][i] for start, run in runs.items()} for i in (0, -1)
    )
    assert first["data"] > first["keep"] + 1
    assert last["data"] > last["keep"] - 1e-3
    assert runs["data"].step < 300


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"tol": -1}, "tol is a gain"),
        ({"start": "k"}, "start is 'auto', 'data' or 'keep'"),
        ({"accelerate": 1}, "True or False"),
        ({"least": 0}, "between 0 and 1"),
    ],
)
def test_settings_of_em_are_checked(choice, message):
    with pytest.raises(ValueError, match=message):
        em(**choice)


def test_what_is_frozen_is_not_overwritten():
    model = factors(13, 3)
    model.factors["p(x|z)"].net.blocks.weights["z"].requires_grad_(False)
    with pytest.raises(
        ValueError,
        match=r"em\(\) sets all of p's parameters in closed form, but .*weights\.z is frozen\. Use "
        r"mle\(\) or joint\(\)\.",
    ):
        fit(model, {"x": WINE}, schedule=em(), steps=2)
