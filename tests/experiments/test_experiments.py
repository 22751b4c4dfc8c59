"""The laboratory: tasks leave files, are not done twice, and one that fails does not stop the
others.
"""

import json
import os
import signal

import numpy as np
import pytest
import torch

from aevb import cli, experiments, zoo
from aevb.declare.families import ContinuousBernoulli
from aevb.experiments import evidence, fa, gmvae, vae
from aevb.experiments.lab import Lab, Result, check, read, write
from aevb.training.fit import fit


@pytest.fixture
def lab(tmp_path) -> Lab:
    return Lab(tmp_path / "lab", "digits", quick=True)


def only(monkeypatch, **tasks) -> None:
    """A laboratory of one section with these tasks."""
    monkeypatch.setattr(
        experiments,
        "tasks",
        lambda lab, section: {f"fa/{name}": task for name, task in tasks.items()},
    )


def test_results_come_back_as_they_were(tmp_path):
    result = Result(
        {"a": [1.5, None], "b": {"c": "Σ"}, "n": np.float64(2)}, {"x y": np.arange(6).reshape(2, 3)}
    )
    write(tmp_path / "one" / "task", result)
    found = read(tmp_path / "one" / "task")
    assert found.numbers == {"a": [1.5, None], "b": {"c": "Σ"}, "n": 2.0}
    np.testing.assert_array_equal(found.arrays["x y"], result.arrays["x y"])
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["task"]


def test_a_finished_task_is_not_done_again_and_a_failed_one_stops_nothing(lab, monkeypatch):
    done = []

    def good(lab):
        done.append(1)
        return Result({"value": 3})

    def bad(lab):
        raise RuntimeError("out of luck")

    only(monkeypatch, bad=bad, good=good)
    first = list(experiments.run(lab, ("fa",)))
    assert [(name, why is None) for name, _, why in first] == [("fa/bad", False), ("fa/good", True)]
    assert "out of luck" in first[0][2]
    only(monkeypatch, bad=lambda lab: Result({}), good=good)
    second = list(experiments.run(lab, ("fa",)))
    assert sorted(name for name, seconds, _ in second if seconds is None) == ["fa/good"]
    assert done == [1]
    assert lab.result("fa/good").numbers["value"] == 3
    assert lab.result("fa/good").numbers["machine"]["torch"] == torch.__version__


def killed_at_data(lab, name):
    """What a process of the next test does: the system kills it at one task, and the other is
    done.
    """
    if name == "fa/data":
        os.kill(os.getpid(), signal.SIGKILL)
    return lab.do(name, lambda lab: Result({"value": 3})), None


@pytest.mark.slow
def test_a_killed_process_takes_its_task_with_it_and_no_other(lab, monkeypatch):
    monkeypatch.setattr(experiments, "_do", killed_at_data)
    found = list(experiments._in_processes(lab, ["fa/data", "fa/naive"], 1))  # one after the other
    assert found[0] == ("fa/data", None, experiments.KILLED)
    assert found[1][0] == "fa/naive"
    assert found[1][2] is None
    assert lab.result("fa/naive").numbers["value"] == 3
    assert not lab.done("fa/data")  # so that the same command does it again


def test_a_folder_of_other_data_is_refused(lab, tmp_path):
    lab.claim()
    lab.claim()
    with pytest.raises(
        ValueError, match=r"has results of digits \(quick\)\. Choose another folder"
    ):
        Lab(lab.out, "mnist").claim()


def test_targets_are_met_or_not():
    assert check("a", 3.0, least=2.0)["ok"]
    assert not check("a", 1.0, least=2.0)["ok"]
    assert not check("a", float("nan"), most=2.0)["ok"]
    assert check("a", 0.0, most=0.0)["ok"]


@pytest.mark.slow
def test_the_truth_is_the_best_that_factor_analysis_can_do(lab):
    found = fa._exact(lab)
    truth = found.numbers["truth"]
    assert found.numbers["checks"][0]["ok"]
    for name in ("em", "mle"):
        assert abs(found.numbers[name]["evidence"] - truth) < 0.02
    assert found.numbers["em"]["reached"] < found.numbers["mle"]["reached"]


def test_averaging_over_the_prior_fails_as_the_latent_grows(lab):
    found = fa._naive(lab).numbers["dimensions"]
    errors = [found[size]["error"] for size in fa.DIMENSIONS]
    assert abs(errors[0]) < 0.05
    assert errors[-1] < -20
    assert np.all(np.diff(errors[1:]) < 0)


def test_the_posterior_is_the_perfect_proposal_and_the_prior_is_flagged(lab):
    found = fa._evidence(lab).numbers["dimensions"]
    assert list(found) == ["10", "50"]
    for ways in found.values():
        assert ways["posterior"]["worst"] < 1e-9  # every weight is p(x)
        assert ways["posterior"]["ess"] == pytest.approx(500)
        assert ways["posterior"]["flagged"] == 0
        assert ways["prior"]["flagged"] == 1
        assert ways["prior"]["error"] < ways["diagonal q"]["error"] - 1
        assert abs(ways["diagonal q, annealed"]["error"]) < abs(ways["prior"]["error"])
    assert all("flagged" not in ways["diagonal q, annealed"] for ways in found.values())


def test_a_bounds_tightness_adds_up(lab, tmp_path):
    """The parts of the gap lie between evidence and ELBO, the bound rises with K (Jensen, the same
    weights), and all of it survives its files.
    """
    model = vae.build(lab, ContinuousBernoulli)
    rows = {"x": torch.rand(30, 64, generator=torch.Generator().manual_seed(0))}
    result = Result({"checks": [check("before", 1.0, most=2.0)]})
    evidence.merged(result, "tight", evidence.tightness(lab, model, rows))
    evidence.merged(result, "predictive", evidence.replicated(lab, model, rows))
    write(tmp_path / "vae" / "exact", result)
    found = read(tmp_path / "vae" / "exact")
    tight, gap = found.numbers["tight"], found.numbers["tight"]["gap"]
    assert gap["evidence"] == pytest.approx(
        gap["elbo"] + gap["approximation"] + gap["amortisation"], abs=1e-4
    )
    assert gap["total"] == pytest.approx(gap["approximation"] + gap["amortisation"], abs=1e-4)
    assert found.arrays["tight approximation"].mean() == pytest.approx(
        gap["approximation"], abs=1e-6
    )
    bounds = [row["bound"] for row in tight["k"].values()]
    assert list(tight["k"]) == ["1", "10", "100"]
    assert np.all(np.diff(bounds) > 0)
    assert tight["both sides"]["gap"] == pytest.approx(
        tight["both sides"]["upper"] - tight["both sides"]["lower"], abs=1e-4
    )
    # a rehearsal has no targets of its own
    assert [one["what"] for one in found.numbers["checks"]] == ["before"]
    statistics = [one["statistic"] for one in found.numbers["predictive"]["comparisons"]]
    assert tuple(statistics) == evidence.STATISTICS
    assert found.arrays["predictive sd(x)"].shape == (20,)


def test_a_drawn_class_costs_variance(lab):
    torch.manual_seed(0)
    model = zoo.gmvae(x=8, z=2, y=3, hidden=(4,))
    found = evidence.measured(lab, model, {"x": torch.rand(60, 8).round()}, "y").numbers
    assert found["checks"][0]["ok"]
    # plain numbers, as files hold them
    assert json.loads(json.dumps(found))["figures"] == found["figures"]
    by_name = {one["full name"]: one for one in found["figures"]}
    assert by_name["elbo K=1: y enumerate, z pathwise closed"]["squared bias"] == 0
    assert set(found["best"].values()) <= set(by_name)
    assert "elbo: " in found["advice"]


def test_the_doctor_and_the_filter_look_at_sequences(lab):
    """Trained with samples detached no gradient reaches q, which the doctor says whether or not the
    latent is dead yet.
    """
    torch.manual_seed(0)
    model = zoo.vrnn(x=4, h=6, hidden=(8,), layers=1)
    rows = {"x": torch.rand(40, 5, 4).round()}
    run = fit(model, rows, how={"z": "detached"}, steps=5, batch=20, seed=0, progress=False)
    diagnosis = evidence.examined(lab, model, rows, run)
    assert diagnosis["worst"] == "problem"
    assert any("exactly 0" in finding["text"] for finding in diagnosis["findings"])
    assert evidence.dead(diagnosis) == sum(
        finding["kind"] == "collapse" for finding in diagnosis["findings"]
    )
    found = evidence.filtered(lab, model, rows)
    values = [found["ways"][name]["value"] for name in ("importance", "particles")]
    errors = [found["ways"][name]["error"] for name in ("importance", "particles")]
    assert abs(values[0] - values[1]) < 5 * (errors[0] + errors[1])  # fails one time in a million
    assert found["draws"] == 80
    assert found["repeats"] == 8


def test_the_true_models_evidence_is_the_gaussians():
    covariance = fa.FA_LOADINGS @ fa.FA_LOADINGS.T + np.diag(fa.FA_SCALE**2)
    exact = torch.distributions.MultivariateNormal(
        torch.zeros(3, dtype=torch.float64), torch.as_tensor(covariance)
    )
    assert fa.true_evidence() == pytest.approx(
        float(exact.log_prob(torch.as_tensor(fa.rows()[1]["x"])).mean()), abs=1e-9
    )


def test_generated_clusters_are_in_the_order_of_their_digits(lab):
    model = gmvae.build(lab, 0)
    _, test, _, labels = lab.rows(model)
    probs = gmvae.clusters(model, test)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)
    assert 0 <= gmvae.entropy(probs) <= np.log(10) + 1e-6
    assert gmvae.generated(lab, model, test, labels).shape == (150, 8, 8)


@pytest.mark.slow
def test_the_command_runs_tasks_in_processes_and_builds_a_report(tmp_path, monkeypatch, capsys):
    out = tmp_path / "reproduction"
    monkeypatch.setattr(
        experiments,
        "tasks",
        lambda lab, section: {"fa/data": fa.TASKS["fa/data"], "fa/naive": fa.TASKS["fa/naive"]},
    )
    arguments = [
        "aevb",
        "reproduce",
        "fa",
        "--quick",
        "--jobs",
        "2",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "2 experiments on digits, 2 at a time" in text
    assert f"The report: {out / 'report.html'}" in text
    assert json.loads((out / "lab.json").read_text())["seconds"] > 0
    before = (out / "report.html").read_bytes()
    monkeypatch.setattr("sys.argv", [*arguments, "--report-only"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    assert (out / "report.html").read_bytes() == before


def test_bad_requests_are_answered(monkeypatch, capsys, tmp_path):
    for arguments, message in (
        (["rnn"], "no section 'rnn'"),
        (["--data", "cifar"], "digits or mnist, not 'cifar'"),
        (["--device", "tpu"], "--device tpu is not a device"),
    ):
        monkeypatch.setattr(
            "sys.argv", ["aevb", "reproduce", *arguments, "--out", str(tmp_path / "none")]
        )
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
