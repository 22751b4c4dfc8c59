"""Trackers: what they are told, what they record, and that their failures cost nothing."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from aevb import Model, Normal, Run, fit
from aevb.cli.options import trackers_of
from aevb.trackers import MLflow, RunInfo, Tracker, TrackerWarning, Trackio, WandB, scalars
from aevb.training.distributed import World
from aevb.training.gradient_steps import GradientSteps
from aevb.training.run_folder import TRACKING
from aevb.training.tracking import Tracking, names_of

X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
SETTINGS = {"steps": 30, "batch": 20, "validate_every": 10, "log_every": 5, "checkpoint_every": 10}


def small() -> Model:
    torch.manual_seed(0)
    return Model({"z": Normal(1), "x | z": Normal(3)}, {"z | x": Normal()})


def train(model: Model | None = None, **changed) -> Run:
    return fit(model or small(), {"x": X}, **({"validation": {"x": X}} | SETTINGS | changed))


class Seen(Tracker):
    """Remember every call."""

    def __init__(self) -> None:
        self.run: RunInfo | None = None
        self.rows, self.files, self.status = [], {}, []

    def start(self, run):
        self.run = run
        return "watch it here"

    def log(self, step, values):
        self.rows.append({"step": step, **values})

    def artifact(self, path, kind):
        self.files[kind] = path.name

    def end(self, status):
        self.status.append(status)


def die_at(monkeypatch, step: int) -> None:
    take = GradientSteps.step

    def dying(self, at, *arguments):
        if at == step:
            raise RuntimeError("killed")
        return take(self, at, *arguments)

    monkeypatch.setattr(GradientSteps, "step", dying)


# The protocol -------------------------------------------------------------------------------------


def test_a_tracker_gets_what_the_history_and_the_folder_have(tmp_path, capsys):
    seen = Seen()
    run = train(out=tmp_path / "first", trackers=[seen], progress=True)
    assert seen.rows == run.rows
    lines = (tmp_path / "first" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert seen.rows == [json.loads(line) for line in lines]
    assert seen.files == {
        "declaration": "model.json",
        "settings": "config.toml",
        "history": "metrics.jsonl",
        "weights": "weights.safetensors",
    }
    assert seen.status == ["finished"]
    assert (seen.run.name, seen.run.group, seen.run.step, seen.run.total) == ("first", None, 0, 30)
    config = seen.run.config
    assert (config["steps"], config["schedule/name"], config["size/z"]) == (30, "joint", 1)
    assert all(isinstance(value, str | int | float) for value in config.values())
    assert capsys.readouterr().out.startswith("watch it here\n")


def test_numbers_are_grouped_by_training_and_validation():
    row = {"epoch": 1.0, "lr": 0.1, "validation kl(z)": 2.0, "phase": "joint", "seconds": 3.0}
    assert scalars(row) == {"training/lr": 0.1, "validation/kl(z)": 2.0}


def test_an_interrupted_run_ends_as_stopped_and_a_failed_one_as_failed(monkeypatch):
    def interrupt(step, model):
        raise KeyboardInterrupt

    seen = Seen()
    with pytest.raises(KeyboardInterrupt):
        train(trackers=[seen], after=interrupt)
    die_at(monkeypatch, 17)
    with pytest.raises(RuntimeError, match="killed"):
        train(trackers=[seen])
    assert seen.status == ["stopped", "failed"]
    assert seen.files == {}


def test_only_the_first_process_has_trackers(monkeypatch):
    monkeypatch.setattr(World, "first", property(lambda self: False))
    seen = Seen()
    train(trackers=[seen])
    assert (seen.run, seen.rows, seen.status) == (None, [], [])


# Names --------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_its_id_and_a_new_one_gets_another(tmp_path, monkeypatch):
    first, second, other = Seen(), Seen(), Seen()
    with monkeypatch.context() as patch:
        die_at(patch, 17)
        with pytest.raises(RuntimeError, match="killed"):
            train(out=tmp_path / "a", trackers=[first])
    resumed = train(out=tmp_path / "a", trackers=[second], resume=True)
    train(out=tmp_path / "b", trackers=[other])
    assert second.run.step == 10
    assert [row["step"] for row in second.run.rows] == [5, 10, 10]
    assert [*second.run.rows, *second.rows] == resumed.rows
    assert first.run.id == second.run.id != other.run.id
    (tmp_path / "a" / TRACKING).write_text('{"id": 3}')  # damaged: a new id, and the run goes on
    again = Seen()
    train(out=tmp_path / "a", trackers=[again], resume=True, steps=40)
    assert re.fullmatch("[0-9a-f]{32}", again.run.id)
    assert again.run.id != first.run.id


def test_runs_of_several_seeds_have_a_tracker_each_and_a_group(tmp_path):
    made = []

    def tracker() -> Seen:
        made.append(Seen())
        return made[-1]

    train(out=tmp_path / "vae", trackers=[tracker], seeds=[3, 5])
    runs = {one.run.name: one for one in made if one.run is not None}
    assert {name: one.run.group for name, one in runs.items()} == {
        "vae/seed-3": "vae",
        "vae/seed-5": "vae",
    }
    assert all(one.rows and one.status == ["finished"] for one in runs.values())
    assert len({one.run.id for one in runs.values()}) == 2
    unsaved = Tracking([tracker], several=True)
    assert unsaved._names(None, 4)[0] == f"{unsaved._names(None, 4)[1]}/seed-4"


def test_runs_of_a_sweep_are_in_its_group(tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    assert names_of(tmp_path / "sweep" / "z=2" / "seed-0") == ("sweep/z=2/seed-0", "sweep")


# Failures -----------------------------------------------------------------------------------------


class Failing(Seen):
    def __init__(self, *methods: str, first: int = 12) -> None:
        super().__init__()
        self.methods, self.first = methods, first

    def start(self, run):
        super().start(run)
        if "start" in self.methods:
            raise ConnectionError("no network\nat all")

    def log(self, step, values):
        if "log" in self.methods and step >= self.first:
            raise ConnectionError("no network")
        super().log(step, values)

    def end(self, status):
        super().end(status)
        if "end" in self.methods:
            raise OSError("not closed")


def test_a_tracker_that_fails_is_reported_twice_and_costs_nothing(tmp_path):
    tracker, whole = Failing("log"), Seen()
    with pytest.warns(TrackerWarning) as told:
        run = train(out=tmp_path / "run", trackers=[tracker, whole])
    first, last = (str(one.message) for one in told)
    assert first == (
        "The tracker Failing failed, and the run goes on without it: log failed at step 15: "
        "ConnectionError: no network"
    )
    assert "Failing: 6 of 9 rows of the run are missing there (log failed at step 15" in last
    assert last.endswith(f"{tmp_path / 'run' / 'metrics.jsonl'} has them all.")
    assert tracker.status == ["finished"]
    plain = train()
    numbers = [row for row in run.rows if "note" not in row]
    assert [set(row) for row in numbers] == [set(row) for row in plain.rows]
    assert run.history["elbo"].tolist() == plain.history["elbo"].tolist()
    (event,) = [row for row in run.rows if "note" in row]
    assert (event["kind"], event["step"]) == ("tracker failed", 15)
    assert whole.rows == numbers  # the event concerns the folder only
    assert Run.load(tmp_path / "run").rows == run.rows


@pytest.mark.parametrize(
    ("method", "missing"), [("start", "9 of 9 rows"), ("end", "all rows of the run were recorded")]
)
def test_a_tracker_that_cannot_start_or_end_is_reported(method, missing):
    tracker = Failing(method)
    with pytest.warns(TrackerWarning, match=f"{method} failed at step") as told:
        assert train(trackers=[tracker]).step == 30
    assert len(told) == 2
    assert missing in str(told[1].message)
    assert (tracker.rows == []) == (method == "start")


def test_a_failing_tracker_does_not_hide_why_the_run_failed(monkeypatch):
    die_at(monkeypatch, 17)
    with (
        pytest.raises(RuntimeError, match="killed"),
        pytest.warns(TrackerWarning, match="end failed"),
    ):
        train(trackers=[Failing("end")])


@pytest.mark.parametrize(
    ("trackers", "several", "message"),
    [
        ("wandb", False, r"trackers is a list: trackers=\['wandb'\]"),
        (["wandbb"], False, "There is no tracker 'wandbb'. Choose wandb, mlflow, trackio or tens"),
        ([3], False, "or a function that returns one; got 3"),
        ([dict], False, "'dict' in trackers= returned a dict, not an object"),
        ([Seen()], True, r"trackers=\[Seen\], or trackers=\[lambda: Seen\(…\)\]"),
        (["tensorboard"], False, "give that folder with out="),
    ],
)
def test_what_is_no_tracker_is_refused_before_the_first_step(trackers, several, message):
    with pytest.raises(ValueError, match=message):
        train(trackers=trackers, **({"seeds": 2} if several else {}))


@pytest.mark.parametrize("adapter", [WandB, MLflow, Trackio])
def test_a_missing_package_is_named_with_the_command(adapter, monkeypatch):
    monkeypatch.setattr("aevb.trackers.packages.find_spec", lambda package: None)
    package = adapter.__name__.lower()
    with pytest.raises(ValueError, match=rf"package {package}: pip install 'aevb\[{package}\]'"):
        train(trackers=[package])


# TensorBoard and the command line -----------------------------------------------------------------


def test_tensorboard_is_a_tracker_by_its_name(tmp_path):
    train(out=tmp_path, trackers=["tensorboard"])
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_the_command_line_takes_several_trackers_once():
    assert trackers_of(["tensorboard", "tensorboard"]) == ("tensorboard",)
    with pytest.raises(ValueError, match="Unknown --track board. Choose wandb, mlflow, trackio"):
        trackers_of(["board"])
