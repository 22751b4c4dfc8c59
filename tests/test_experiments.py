"""The laboratory: tasks leave files, are not done twice, and one that fails does not stop the others."""

import json
import os
import signal

import numpy as np
import pytest
import torch

from aevb import cli, experiments
from aevb.experiments import fa, gmvae
from aevb.experiments.lab import Lab, Result, check, read, write


@pytest.fixture
def lab(tmp_path) -> Lab:
    return Lab(tmp_path / "lab", "digits", quick=True)


def only(monkeypatch, **tasks) -> None:
    """A laboratory of one section with these tasks."""
    monkeypatch.setattr(experiments, "tasks", lambda lab, section: {f"fa/{name}": task for name, task in tasks.items()})


def test_results_come_back_as_they_were(tmp_path):
    result = Result({"a": [1.5, None], "b": {"c": "Σ"}, "n": np.float64(2)}, {"x y": np.arange(6).reshape(2, 3)})
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
    """What a process of the next test does: the system kills it at one task, and the other is done."""
    if name == "fa/data":
        os.kill(os.getpid(), signal.SIGKILL)
    return lab.do(name, lambda lab: Result({"value": 3})), None


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
    with pytest.raises(ValueError, match=r"holds results on digits \(quick\)\. Choose another folder"):
        Lab(lab.out, "mnist").claim()


def test_targets_are_met_or_not():
    assert check("a", 3.0, least=2.0)["ok"]
    assert not check("a", 1.0, least=2.0)["ok"]
    assert not check("a", float("nan"), most=2.0)["ok"]
    assert check("a", 0.0, most=0.0)["ok"]


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


def test_the_true_models_evidence_is_the_gaussians():
    covariance = fa.FA_LOADINGS @ fa.FA_LOADINGS.T + np.diag(fa.FA_SCALE**2)
    exact = torch.distributions.MultivariateNormal(torch.zeros(3, dtype=torch.float64), torch.as_tensor(covariance))
    assert fa.true_evidence() == pytest.approx(float(exact.log_prob(torch.as_tensor(fa.rows()[1]["x"])).mean()), abs=1e-9)


def test_generated_clusters_are_in_the_order_of_their_digits(lab):
    model = gmvae.build(lab, 0)
    _, test, _, labels = lab.rows(model)
    probs = gmvae.clusters(model, test)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)
    assert 0 <= gmvae.entropy(probs) <= np.log(10) + 1e-6
    assert gmvae.generated(lab, model, test, labels).shape == (150, 8, 8)


def test_the_command_runs_tasks_in_processes_and_builds_a_report(tmp_path, monkeypatch, capsys):
    out = tmp_path / "reproduction"
    monkeypatch.setattr(experiments, "tasks", lambda lab, section: {"fa/data": fa.TASKS["fa/data"], "fa/naive": fa.TASKS["fa/naive"]})
    arguments = ["aevb", "reproduce", "fa", "--quick", "--jobs", "2", "--device", "cpu", "--out", str(out)]
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
        (["--data", "cifar"], "digits or mnist, not on 'cifar'"),
        (["--device", "tpu"], "no device 'tpu'"),
    ):
        monkeypatch.setattr("sys.argv", ["aevb", "reproduce", *arguments, "--out", str(tmp_path / "none")])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
