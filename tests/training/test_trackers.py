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
from aevb.cli import main
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
    runs = {one.run.name: one for one in made}
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


def test_a_tracker_that_changes_the_values_changes_only_its_own(tmp_path):
    class Emptying(Tracker):
        def log(self, step, values):
            values.clear()

    whole = Seen()
    run = train(out=tmp_path / "run", trackers=[Emptying(), whole], progress=True)
    assert whole.rows == [row for row in run.rows if "note" not in row]


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


# Adapters: what they recorded, read back ----------------------------------------------------------


def recorded_by(run: Run) -> dict[tuple[str, int], float]:
    """The numbers of a run's history by name and step, as adapters group them."""
    return {(name, row["step"]): value for row in run.rows for name, value in scalars(row).items()}


def killed_and_resumed(out: Path, monkeypatch, trackers) -> Run:
    """A run that was killed after step 17, resumed from step 10."""
    with monkeypatch.context() as patch:
        die_at(patch, 17)
        with pytest.raises(RuntimeError, match="killed"):
            train(out=out, trackers=trackers)
    return train(out=out, trackers=trackers, resume=True)


def wandb_records(path: Path):
    """Yield the records of a .wandb file: blocks of 32 kB with pieces of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:  # no room for the head of a piece
            at += 2**15 - at % 2**15
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            yield Record.FromString(whole)
            whole = b""


def wandb_runs(folder: Path) -> list[dict]:
    import wandb

    wandb.teardown()  # its process writes the files after the end of a run
    found = []
    for path in sorted(folder.rglob("*.wandb")):
        one = {"rows": {}, "files": []}
        for record in wandb_records(path):
            if record.HasField("run") and record.run.config.update:
                one |= {"id": record.run.run_id, "name": record.run.display_name}
                one |= {"group": record.run.run_group, "project": record.run.project}
                one["config"] = {
                    each.key: json.loads(each.value_json) for each in record.run.config.update
                }
            if record.HasField("history"):
                row = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                step = row.get("_step", record.history.step.num)
                one["rows"] |= {(name, step): value for name, value in row.items()}
            if record.HasField("request") and record.request.HasField("log_artifact"):
                entries = record.request.log_artifact.artifact.manifest.contents
                one["files"] += [entry.path for entry in entries]
            if record.HasField("artifact"):
                one["files"] += [entry.path for entry in record.artifact.manifest.contents]
            if record.HasField("exit"):
                one["exit"] = record.exit.exit_code
        found.append(one)
    return found


@pytest.fixture
def wandb_folder(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    folder = tmp_path / "w"
    folder.mkdir()
    return folder


def test_wandb_recorded_the_history_of_a_run_that_was_resumed(wandb_folder, monkeypatch):
    run = killed_and_resumed(wandb_folder / "birds", monkeypatch, [WandB(folder=wandb_folder)])
    first, second = wandb_runs(wandb_folder)
    identity = json.loads((wandb_folder / "birds" / TRACKING).read_text())["id"]
    assert (first["id"], second["id"]) == (identity, identity)
    assert (second["name"], second["group"], second["project"]) == ("birds", "", "aevb")
    assert second["config"]["batch"] == 20
    assert second["config"]["size/x"] == 3
    assert (first["exit"], second["exit"]) == (1, 0)
    rows = first["rows"] | second["rows"]
    for key, value in recorded_by(run).items():
        assert rows[key] == pytest.approx(value), key
    assert set(second["files"]) == {"model.json", "config.toml", "metrics.jsonl"}


@pytest.fixture(params=["files", "database"])
def mlflow_client(request, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.chdir(tmp_path)  # the database keeps artifacts in the folder mlruns
    if request.param == "files":
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        return mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    pytest.importorskip("alembic", reason="the extra mlflow is not installed")
    return mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")


@pytest.mark.filterwarnings("default")  # MLflow and SQLAlchemy warn of each other
def test_mlflow_recorded_the_history_of_a_run_that_was_resumed(
    mlflow_client, tmp_path, monkeypatch
):
    tracker = MLflow(mlflow_client.tracking_uri, weights=True)
    run = killed_and_resumed(tmp_path / "vae" / "seed-1", monkeypatch, [tracker])
    experiment = mlflow_client.get_experiment_by_name("aevb").experiment_id
    (found,) = mlflow_client.search_runs([experiment])
    assert (found.info.run_name, found.info.status) == ("vae/seed-1", "FINISHED")
    assert found.data.tags["group"] == "vae"
    assert (found.data.params["batch"], found.data.params["size/x"]) == ("20", "3")
    got = {
        (name, one.step): [
            each.value
            for each in mlflow_client.get_metric_history(found.info.run_id, name)
            if each.step == one.step
        ]
        for name in found.data.metrics
        for one in mlflow_client.get_metric_history(found.info.run_id, name)
    }
    for (name, step), value in recorded_by(run).items():
        assert got[name.replace("(", "_").replace(")", ""), step] == [value], name  # none twice
    files = {one.path for one in mlflow_client.list_artifacts(found.info.run_id)}
    assert files == {"model.json", "config.toml", "metrics.jsonl", "weights.safetensors"}


def test_trackio_recorded_the_history_of_a_run_that_was_resumed(tmp_path):
    if find_spec("trackio") is None:
        pytest.skip("the extra trackio is not installed")
    # Its folder is read from the environment when it is imported.
    code = f"""if True:
        import json, pytest, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_trackers import Trackio, killed_and_resumed
        run = killed_and_resumed(Path("birds"), pytest.MonkeyPatch(), [Trackio("tried")])
        print(json.dumps(run.rows))
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"TRACKIO_DIR": str(tmp_path / "t"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    with sqlite3.connect(tmp_path / "t" / "tried.db") as database:
        logs = database.execute("select run_name, step, metrics from metrics").fetchall()
    identity = json.loads((tmp_path / "birds" / TRACKING).read_text())["id"]
    assert {name for name, _, _ in logs} == {f"birds-{identity[:6]}"}
    got: dict[tuple[str, int], list[float]] = {}
    for _, step, text in logs:
        for name, value in json.loads(text).items():
            got.setdefault((name, step), []).append(value)
    for row in rows:
        for name, value in scalars(row).items():
            assert got[name, row["step"]] == [pytest.approx(value)], name  # none twice


# TensorBoard and the command line -----------------------------------------------------------------


@pytest.mark.parametrize("options", [{"tensorboard": True}, {"trackers": ["tensorboard"]}])
def test_a_missing_tensorboard_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, options
):
    monkeypatch.setattr("aevb.trackers.packages.find_spec", lambda name: None)
    seen = Seen()
    trackers = [seen, *options.pop("trackers", [])]
    with pytest.raises(ValueError, match=r"tracker tensorboard .*pip install 'aevb\[tensorboard"):
        train(out=tmp_path / "run", trackers=trackers, **options)
    assert not (tmp_path / "run").exists()
    assert (seen.run, seen.status) == (None, [])


def test_tensorboard_is_a_tracker_by_its_name(tmp_path):
    train(out=tmp_path, trackers=["tensorboard"])
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_the_command_line_tracks_the_run_of_a_table(tmp_path, monkeypatch, capsys):
    lines = ["a,b,c", *(",".join(map(str, row)) for row in X.round(3).tolist())]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    words = ["train", "table.csv", "--model", "factors", "--set", "latent=1"]
    monkeypatch.setattr("sys.argv", ["aevb", *words, "--track", "tensorboard", "--out", "run"])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, capsys.readouterr().err) == (0, "")
    assert list(Path("run/tensorboard").glob("events.*"))
    monkeypatch.setattr("sys.argv", ["aevb", "train", "table.csv", "--track", "tensorboard"])
    with pytest.raises(SystemExit):
        main()
    assert "--tensorboard has no meaning for the default density" in capsys.readouterr().err


def test_the_command_line_takes_several_trackers_once():
    assert trackers_of(["tensorboard", "tensorboard"]) == ("tensorboard",)
    with pytest.raises(ValueError, match="Unknown --track board. Choose wandb, mlflow, trackio"):
        trackers_of(["board"])
