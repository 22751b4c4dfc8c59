"""The checks, curves and comparisons of a page: the numbers are those of the functions they come
from, and a part that fails becomes a sentence.
"""

import json
import shutil
import subprocess
import time
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binom

from aevb import Bernoulli, Exact, Model, Normal, OneHot, compare, em, fit, mle, mlp, zoo
from aevb.diagnostics import diagnose
from aevb.diagnostics.calibration import ranks
from aevb.evidence import Evidence, curve, log_evidence
from aevb.page import checks as page_checks
from aevb.page.checks import GAP_SAMPLES, ITERATIONS, checks
from aevb.page.compared import compared
from aevb.page.curves import curves, merged
from aevb.page.packing import unpack
from aevb.pictures import _limits
from aevb.predictive import predictive_check
from aevb.runtime.checked_files import DataWarning
from aevb.training.events import Event
from aevb.training.run import Run

GENERATOR = np.random.default_rng(0)
LABELS = np.arange(160) % 2
X = (GENERATOR.random((160, 6)) < np.where(LABELS[:, None] == 1, 0.8, 0.2)).astype("float32")
TRAIN, TEST = {"x": X[:100]}, {"x": X[100:]}


def trained(out: Path | None = None, hidden: int = 4) -> Run:
    torch.manual_seed(0)
    model = Model(
        {"z": Normal(2), "x | z": Bernoulli(6, net=mlp(hidden))}, {"z | x": Normal(net=mlp(4))}
    )
    return fit(model, TRAIN, validation=TEST, steps=60, validate_every=20, log_every=5, out=out)


@pytest.fixture(scope="module")
def run() -> Run:
    return trained()


@pytest.fixture(scope="module")
def found(run):
    return checks(run.model, TEST, held_out="held out", run=run, labels=LABELS[100:])


def strict(found) -> str:
    """The document as JSON, which has no NaN and no infinity."""
    return json.dumps(found, allow_nan=False)


# Checks -------------------------------------------------------------------------------------------


def test_checks_are_plain_data_without_problems(found):
    strict(found)
    assert found["problems"] == []
    assert found["rows"] == "60 held-out rows"
    assert list(found["seconds"]) == [
        "rows",
        "diagnosis",
        "calibration",
        "latents",
        "evidence",
        "curve",
        "gap",
        "predictive",
    ]


@pytest.fixture
def brief_trial():
    """The process of a page trains its copy as long as usual."""


def test_the_diagnosis_is_that_of_diagnose(run, found):
    expected = diagnose(run.model, TEST, run=run, labels=LABELS[100:]).to_dict()
    mine = found["diagnosis"]
    assert [
        {key: value for key, value in finding.items() if key != "picture"}
        for finding in mine["findings"]
    ] == json.loads(json.dumps(expected["findings"]))
    assert (mine["worst"], mine["rows"]) == (expected["worst"], 60)
    shown = {finding["kind"]: finding["picture"] for finding in mine["findings"]}
    assert shown["over-fitting"] == "curves"
    assert shown["calibration"] == "calibration"
    assert shown["elbo"] == "evidence"


def test_the_use_of_a_latent_is_that_of_its_finding(run, found):
    (latent,) = found["latents"]
    (finding,) = [one for one in diagnose(run.model, TEST).findings if "activity" in one.figures]
    assert latent["kl"] == finding.figures["kl"]
    entries = {key: unpack(value) for key, value in latent["entries"].items()}
    assert entries["kl"].tolist() == np.float32(finding.figures["kl by entry"]).tolist()
    assert entries["activity"].tolist() == np.float32(finding.figures["activity"]).tolist()
    assert entries["active"].tolist() == [1, 1]


def test_the_calibration_counts_the_ranks(run, found):
    rows = run.model.prepare(**TEST)
    parts = [ranks(run.model, rows, seed=i)["z"] for i in range(4)]  # 60 rows, at least 200 draws
    counts = unpack(found["calibration"]["z"]["ranks"])
    assert found["calibration"]["z"]["n"] == 240
    expected = [np.histogram(np.concatenate(parts)[:, i], 20, (0, 1))[0].tolist() for i in range(2)]
    assert counts.tolist() == expected


def test_the_evidence_its_curve_and_the_gap(run, found):
    rows = run.model.prepare(**TEST)
    expected = log_evidence(run.model, rows, seed=0)
    evidence = found["evidence"]
    assert evidence["mean"] == float(expected.value.double().mean())
    assert evidence["stderr"] == expected.error
    assert (evidence["method"], evidence["rows"]) == ("importance", 60)
    assert unpack(evidence["values"]).tolist() == expected.value.tolist()
    assert sum(evidence["histogram"]["counts"]) == 60
    bounds = curve(run.model, rows, tuple(found["curve"]["ks"]), seed=0)
    assert found["curve"]["mean"] == bounds.value.double().mean(-1).tolist()
    gap = run.model.gap(iterations=ITERATIONS, samples=GAP_SAMPLES, seed=0, **TEST)
    mine = {name: found["gap"][name]["mean"] for name in ("elbo", "best", "evidence")}
    assert mine["elbo"] == pytest.approx(float(gap.elbo.double().mean()), abs=1e-9)
    assert found["gap"]["approximation"]["mean"] == pytest.approx(mine["evidence"] - mine["best"])
    assert found["gap"]["amortisation"]["mean"] == pytest.approx(mine["best"] - mine["elbo"])


def test_rows_whose_evidence_is_too_low_are_counted():
    values, k = torch.zeros(3), torch.tensor([0.1, 5.0, 5.0])
    for khat, count in ((k, 2), (k + 5, 3), (k.clamp(max=0.1), 0)):
        told = {"khat": khat, "ess": torch.full((3,), 20.0), "samples": 1000}
        evidence = Evidence(values, values, "importance", told)
        assert page_checks._evidence(evidence)["untrusted"] == count
        told["ess"] = torch.full((3,), 900.0)  # weights that are nearly equal
        assert page_checks._evidence(evidence)["untrusted"] == 0
    assert page_checks._evidence(Evidence(values, values, "exact"))["untrusted"] == 0


def test_statistics_that_cannot_differ_are_left_out():
    rows = np.eye(3, dtype="float32")[GENERATOR.integers(0, 3, 120)]
    model = Model({"z": Normal(1), "y | z": OneHot(3, net=mlp(4))}, {"z | y": Normal(net=mlp(4))})
    fit(model, {"y": rows}, steps=5)
    labels = {one.label for one in predictive_check(model, {"y": rows}).comparisons}
    shown = checks(model, {"y": rows})["predictive"]["comparisons"]
    assert shown
    for one in shown:
        assert np.ptp([one["observed"], *unpack(one["replicates"])]) > 1e-6
    left = labels - {one["label"] for one in shown}
    assert "mean(y)" in left


def test_the_predictive_check_is_that_of_the_library(run, found):
    expected = predictive_check(run.model, TEST)
    mine = found["predictive"]
    assert (mine["kind"], mine["rows"], mine["replicates"]) == ("posterior", 60, 300)
    assert [one["label"] for one in mine["comparisons"]] == [
        one.label for one in expected.comparisons
    ]
    for one, other in zip(mine["comparisons"], expected.comparisons, strict=True):
        assert (one["observed"], one["p"]) == (other.observed, other.p)
        assert unpack(one["replicates"]).tolist() == np.float32(other.replicates).tolist()
    extreme = {one["label"] for one in mine["comparisons"] if one["extreme"]}
    assert extreme == {one.label for one in expected.extreme()}


def test_quick_checks_leave_out_what_takes_long(run):
    parts: list[str] = []
    found = checks(run.model, TEST, run=run, quick=True, progress=parts.append)
    assert parts == list(found["seconds"]) == ["rows", "diagnosis", "latents", "evidence"]
    assert found["rows"] == "60 rows"
    assert found["evidence"] is not None
    assert all(found[part] is None for part in ("gap", "curve", "calibration", "predictive"))


def test_a_part_that_fails_becomes_a_sentence_and_the_others_go_on(run, monkeypatch):
    def fail(*args, **settings):
        raise RuntimeError("out of <b>luck</b>")

    monkeypatch.setattr(page_checks, "log_evidence", fail)
    found = checks(run.model, TEST, labels=[1, 2], quick=True)
    labels, evidence = found["problems"]
    assert labels.startswith("The diagnosis failed: labels has shape [2]")
    assert evidence == "log p(x) could not be computed: out of <b>luck</b>"
    assert found["diagnosis"] is found["evidence"] is None
    assert len(found["latents"]) == 1


def test_rows_that_do_not_fit_the_model_are_a_problem(run):
    found = checks(run.model, {"x": X[:, :3]})
    (problem,) = found["problems"]
    assert problem.startswith("The rows could not be read: x has shape [160, 3]")


def test_warnings_about_the_data_are_collected_and_others_are_not():
    found: list[str] = []
    with page_checks._collected_warnings(found):
        warnings.warn(DataWarning("Column 3 is constant."), stacklevel=1)
    assert found == ["Column 3 is constant."]
    with (
        pytest.warns(RuntimeWarning, match="elsewhere"),
        page_checks._collected_warnings(found),
    ):
        warnings.warn("elsewhere", RuntimeWarning, stacklevel=1)
    assert len(found) == 1


def test_a_model_that_is_not_finite_is_diagnosed():
    model = trained().model
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    found = checks(model, TEST, quick=True)
    strict(found)
    assert found["diagnosis"]["worst"] == "problem"
    assert found["diagnosis"]["findings"][0]["picture"] is None
    assert found["latents"] is None
    assert found["evidence"]["mean"] is None
    assert found["evidence"]["histogram"] is None


def test_a_mixture_by_em_has_classes_an_exact_evidence_and_no_gap():
    torch.manual_seed(0)
    p = {"y": OneHot(2, learned=True), "x | y": Bernoulli(6)}
    model = Model(p, {"y | x": OneHot(net=mlp(4))})
    run = fit(model, TRAIN, schedule=em(), steps=20)
    found = checks(run.model, {**TEST, "y": LABELS[100:]}, run=run)
    strict(found)
    (problem,) = found["problems"]
    assert problem.startswith("The gap between log p(x) and the ELBO could not be split: em()")
    assert found["evidence"]["method"] == "exact"
    assert found["curve"] is None
    (latent,) = found["latents"]
    assert latent["class"]
    assert latent["entries"]["activity"] is None
    assert sum(latent["classes"]) == pytest.approx(1)
    pictures = {one["kind"]: one["picture"] for one in found["diagnosis"]["findings"]}
    assert pictures["collapse"] == "clusters"  # that of q, which em() does not train


def test_values_of_a_class_in_the_data_are_its_labels():
    torch.manual_seed(0)
    p = {"y": OneHot(2, learned=True), "x | y": Bernoulli(6)}
    run = fit(Model(p, {"y | x": Exact()}), TRAIN, schedule=em(), steps=20)
    found = checks(run.model, {**TEST, "y": LABELS[100:]}, run=run, quick=True)
    pictures = {one["kind"]: one["picture"] for one in found["diagnosis"]["findings"]}
    assert pictures["labels"] == pictures["classes"] == "clusters"
    expected = log_evidence(run.model, run.model.prepare(**TEST))
    assert found["evidence"]["mean"] == expected.mean


def test_sequences_of_different_lengths_with_missing_entries_can_be_checked():
    torch.manual_seed(0)
    model = Model({"z[t]": Normal(1), "x[t] | z[t]": Normal(2)}, {"z[t] | x[t]": Normal()})
    rows = [GENERATOR.normal(size=(3 + i % 3, 2)) for i in range(30)]
    rows[4][1, 0] = np.nan
    found = checks(model, {"x": rows})
    strict(found)
    assert found["problems"] == []
    assert found["gap"]["rows"] == found["evidence"]["rows"] == 30


# Curves -------------------------------------------------------------------------------------------


def test_curves_hold_the_history_of_the_run(run):
    found = curves(run.rows, run.phases, judge=run.settings.judge)
    strict(found)
    for series in found["series"]:
        assert unpack(series["value"]).tolist() == np.float32(run.history[series["key"]]).tolist()
        assert unpack(series["step"]).tolist() == run.history[f"{series['key']}.step"].tolist()
    kinds = {(one["key"], one["kind"], one["title"]) for one in found["series"]}
    assert ("elbo", "bound", "elbo") in kinds
    assert ("validation kl(z)", "kl", "kl(z)") in kinds
    assert ("x", "term", "log p(x|·)") in kinds
    assert ("lr", "besides", "lr") in kinds
    assert run.best is not None
    assert found["best"] == {"step": run.best.step, "value": run.best.value}
    assert curves(run.rows, run.phases)["best"] == found["best"]
    assert found["phases"] == [["joint", 0, 60]]
    assert unpack(found["seconds"]["value"]).tolist() == run.history["seconds"].tolist()
    assert unpack(found["epochs"]["value"]).tolist() == run.history["epoch"].tolist()


def test_curves_of_rows_with_an_evidence_have_the_gap():
    rows = [
        {"step": 1, "elbo": -5.0, "evidence": -4.5},
        {"step": 2, "elbo": -4.0},
        {"step": 3, "elbo": -3.0, "evidence": -2.0},
    ]
    (gap,) = [one for one in curves(rows, [])["series"] if one["name"] == "gap"]
    assert unpack(gap["step"]).tolist() == [1, 3]
    assert unpack(gap["value"]).tolist() == [0.5, 1.0]


def test_hostile_rows_stay_data():
    script = "</script><script>alert(1)</script>"
    rows = [
        {"step": 0} | Event("kind", "z", script, "Click <a href=javascript:0>here</a>.").row(0),
        {"step": 5, "elbo": float("nan"), "mine": [1, [2]], "word": script, script: 2.0},
        {"step": 3, "elbo": 10**400, "mine": 1.5, "note": "old", "kind": 7},
        {"step": 2**40, "elbo": -1},
    ]
    found = curves(rows, [])
    strict(found)
    first, second = found["events"]
    assert first == {
        "step": 0,
        "kind": "kind",
        "about": "z",
        "text": script,
        "remedy": "Click <a href=javascript:0>here</a>.",
    }
    assert second["kind"] == "7"
    series = {one["key"]: one for one in found["series"]}
    assert set(series) == {"elbo", "mine", script}
    assert unpack(series["elbo"]["step"]).tolist() == [3, 5, 2**40]
    assert unpack(series["elbo"]["value"])[[0, 2]].tolist() == [np.inf, -1]
    assert unpack(series["mine"]["value"]).tolist() == [1.5]
    assert found["best"] is found["seconds"] is None


def test_no_rows_have_no_curves():
    assert curves([], [])["series"] == []


def test_many_phases_are_merged_without_a_gap():
    phases = [("EM"[i % 2], 10 * i, 10 * i + 10) for i in range(1000)]
    found = merged(phases)
    assert len(found) <= 400
    assert (found[0][1], found[-1][2]) == (0, 10000)
    assert all(one[2] == other[1] for one, other in pairwise(found))
    assert {name for name, _, _ in found} <= {"E", "M", "E/M", "M/E"}
    assert merged(phases[:400]) == phases[:400]


def test_a_hundred_thousand_rows_are_packed_in_a_moment():
    numbers = GENERATOR.normal(size=(100_000, 6))
    names = ("elbo", "x", "kl(z)", "gradient", "lr", "seconds")
    rows = [
        {"step": i, "phase": "joint", **dict(zip(names, one, strict=True))}
        for i, one in enumerate(numbers.tolist())
    ]
    start = time.process_time()
    found = curves(rows, [("joint", 0, 100_000)])
    assert time.process_time() - start < 2  # 0.4 s on an idle core
    assert all(one["value"]["shape"] == [100_000] for one in found["series"])


# Comparison ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    name: str
    folder: Path | None
    model: Model
    run: Run | None


def subject(name: str, run: Run) -> Subject:
    return Subject(name, run.out, run.model, run)


def test_one_run_is_not_compared(run):
    assert compared([subject("a", run)], ValueError()) is None


def test_a_comparison_is_that_of_the_library(run):
    other = trained(hidden=2)
    expected = compare({"a": run, "b": other}, TEST)
    found = compared([subject("a", run), subject("b", other)], expected)
    strict(found)
    assert found["problem"] is None
    assert [one["name"] for one in found["models"]] == [one.name for one in expected.models]
    best, worse = found["models"]
    assert (best["mean"], best["verdict"]) == (expected.best.mean, "best")
    assert best["difference"] is None
    difference = expected.difference(worse["name"])
    rows = expected[worse["name"]].evidence - expected.best.evidence
    counts, edges = np.histogram(rows, 30)
    assert worse["difference"] == {
        "mean": difference.mean,
        "stderr": difference.stderr,
        "told": difference.told,
        "histogram": {"counts": counts.tolist(), "low": edges[0], "high": edges[-1]},
    }
    assert sum(counts) == len(TEST["x"])
    assert worse["verdict"] == expected.verdict(worse["name"])
    assert [one["samples"] for one in found["models"]] == [1000, 1000]
    assert found["settings"] == [
        {
            "name": "p(x|z)",
            "values": ["Bernoulli(6, net=mlp(4))", "Bernoulli(6, net=mlp(2))"],
        }
    ]


def test_runs_that_cannot_be_compared_still_show_their_settings(run, tmp_path):
    saved = fit(run.model.fresh(1), TRAIN, steps=5, lr=0.5, out=tmp_path / "run")
    reason = ValueError("Pass the rows.")
    found = compared([subject("a", saved), subject("b", run)], reason, ["c is left out."])
    strict(found)
    assert found["names"] == ["a", "b"]
    assert found["problem"] == "The runs cannot be compared: Pass the rows."
    assert found["notes"] == ["c is left out."]
    assert {"name": "lr", "values": ["0.5", "0.002"]} in found["settings"]
    assert compared([subject("a", run), subject("b", run)], reason)["settings"] == []


# The browser --------------------------------------------------------------------------------------

SOURCES = Path(__file__).parents[2] / "web" / "src"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def node(*arguments: str, text: str = "") -> str:
    done = subprocess.run(
        ["node", *arguments], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def evaluated(expression: str):
    """The value of an expression of the functions in series.js."""
    source = (SOURCES / "series.js").read_text(encoding="utf-8")
    code = f"{source}\nconsole.log(JSON.stringify({expression}));\n"
    return json.loads(node("--input-type=module", text=code))


@needs_node
@pytest.mark.parametrize("name", ["series", "histogram", "curves", "checks", "compare"])
def test_the_scripts_are_valid(name, tmp_path):
    shutil.copy(SOURCES / f"{name}.js", tmp_path / f"{name}.mjs")
    node("--check", str(tmp_path / f"{name}.mjs"))


@needs_node
def test_decimation_keeps_the_extremes_the_ends_and_the_order():
    generator = np.random.default_rng(0)
    y = generator.normal(size=20_000)
    y[1234], y[15_001], y[7000] = 50, -40, np.nan
    written = json.dumps([None if np.isnan(value) else value for value in y.tolist()])
    whole, part = evaluated(
        "((y) => { const x = y.map((_, i) => i); return ["
        "decimated(x, y, 0, 19999, 300), decimated(x, y, 5000, 5100, 300)]; })"
        f"({written}.map((one) => one ?? NaN))"
    )
    x, kept = np.array(whole[0]), np.array(whole[1])
    assert len(x) <= 4 * 301
    assert (np.diff(x) > 0).all()
    assert kept.tolist() == y[x].tolist()
    assert (x[0], x[-1]) == (0, 19_999)
    assert (kept.max(), kept.min()) == (50, -40)
    for start in range(0, 20_000, 2000):  # a line of the extremes hides no other extreme
        here = (x >= start) & (x < start + 2000)
        assert kept[here].max() == np.nanmax(y[start : start + 2000])
    assert part[0] == list(range(4999, 5102))  # one point beyond each end


@needs_node
def test_the_limits_are_those_of_the_pictures():
    generator = np.random.default_rng(1)
    several = [
        [generator.normal(size=500).tolist(), (-40 - generator.random(50)).tolist()],
        [[-1e6, *np.linspace(-50, -20, 99).tolist()]],
        [[3.0]],
        [[]],
    ]
    for one in several:
        assert evaluated(f"limits({json.dumps(one)})") == pytest.approx(_limits(one))
    assert evaluated("limits([[1, 2, 1000]], {skipped: 0, outliers: true})")[1] > 1000


@needs_node
def test_bins_ticks_and_the_band_of_uniform_ranks():
    values = np.random.default_rng(2).normal(size=300)
    found = evaluated(f"binned({json.dumps(values.tolist())}, 30)")
    assert found["counts"] == np.histogram(values, 30)[0].tolist()
    assert evaluated("binned([2, 2], 4)")["counts"] == [0, 0, 2, 0]
    assert evaluated("ticks(-0.3, 2.2, 4)") == [0, 1, 2]
    low, high = evaluated("uniformBand(1000, 20)")
    assert (low, high) == tuple(binom.ppf([0.005, 0.995], 1000, 1 / 20))
    # Of the normal approximation, where the probabilities underflow.
    assert evaluated("uniformBand(1e6, 20)") == pytest.approx(
        binom.ppf([0.005, 0.995], 10**6, 1 / 20), rel=1e-3
    )


def test_nothing_of_a_q_that_is_not_used_is_shown():
    random = torch.Generator().manual_seed(0)
    walk, noise = torch.randn(2, 1, 60, 1, dtype=torch.float64, generator=random)
    x = walk.cumsum(1) + noise
    model = zoo.local_level(seed=0).double()
    run = fit(model, {"x": x}, schedule=mle(), progress=False)
    found = checks(model, {"x": x}, run=run)
    assert found["calibration"] is found["latents"] is None
    assert found["diagnosis"]["worst"] == "note"
    assert found["evidence"]["method"] == "exact"
