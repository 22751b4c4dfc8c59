"""Sweeps: what is trained, what a kill leaves, and that resuming gives the same results."""

import csv
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from aevb import Model, Normal, OneHot, fit, load_run, mlp
from aevb.comparison.entrants import identify
from aevb.comparison.sweep import Rows, Sweep, across_seeds, carry_out_here, ranked
from aevb.comparison.sweep_report import sweep_picture, sweep_text, write_table
from aevb.comparison.workers import carry_out_in_parallel

X = np.random.default_rng(0).normal(size=(120, 3)) + 3 * (np.arange(120) % 3)[:, None]


class Mixtures:
    """Small mixtures of factor analysers, with an amortised q; other processes import it."""

    def __init__(self, x: np.ndarray = X, scale: float = 1.0) -> None:
        self.x, self.scale = x, scale

    def model(self, arguments):
        p = {
            "y": OneHot(int(arguments["components"]), learned=True),
            "z": Normal(int(arguments.get("latent", 1))),
            "x | y, z": Normal(3, scale="learned"),
        }
        return Model(p, {"y | x": OneHot(net=mlp(4)), "z | x, y": Normal(net=mlp(4))})

    def rows(self, model):
        train, held_out = {"x": self.x[:80]}, {"x": self.x[80:]}
        return Rows(
            train, held_out, identify(train, ["x"]), identify(held_out, ["x"]), what="40 rows"
        )

    def train(self, model, rows, seeds, out, *, resume, settings, **others):
        return fit(
            model,
            rows.train,
            validation=rows.held_out,
            seeds=seeds,
            out=out,
            resume=resume,
            progress=False,
            **{"lr": 0.01, **settings, **others},
        )


class Failing(Mixtures):
    """Raise while the third model trains."""

    def rows(self, model):
        if model.graph.size("y") == 3:
            raise RuntimeError("the power went off")
        return super().rows(model)


class PowerCutError(BaseException):
    """Like a kill: nothing catches it."""


class Dying(Mixtures):
    """Die at step 15 of the fourth run, between two checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.started = 0

    def train(self, *arguments, **others):
        self.started += 1
        return super().train(*arguments, **others, validate_every=5, after=self._cut)

    def _cut(self, step, model):
        if self.started == 4 and step == 15:
            raise PowerCutError


GRID = {"components": ["1", "2", "3"], "latent": ["1", "2"]}


def sweep(out: Path, builder=None, grid=None, seeds: int = 1, **settings) -> Sweep:
    settings = {"steps": 30, "checkpoint_every": 10, **settings}
    return Sweep(
        builder or Mixtures(),
        grid or GRID,
        seeds,
        out,
        settings,
        {"seed": 0},
        {"settings": settings},
    )


def carried_out(plan: Sweep, **others):
    told = []
    with plan.opened() as rows:
        jobs = plan.open_jobs(together=others.pop("together", False))
        carry_out_here(plan, jobs, lambda *one: told.append(one))
        return told, ranked(plan, rows)


def table(out: Path, found, comparison) -> list[dict]:
    write_table(out / "table.csv", found, comparison)
    with (out / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["folder"] = str(Path(row["folder"]).relative_to(out))
        del row["seconds"]
    return rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sweep that nothing interrupted, and its table."""
    out = tmp_path_factory.mktemp("sweep") / "whole"
    told, (found, comparison) = carried_out(sweep(out))
    assert len(told) == 6
    return out, table(out, found, comparison)


def test_every_run_is_that_of_fit_with_seeds(whole):
    out, _ = whole
    builder = Mixtures()
    model = builder.model({"components": "2", "latent": "1"})
    rows = builder.rows(model)
    (run,) = fit(
        model,
        rows.train,
        validation=rows.held_out,
        seeds=[0],
        lr=0.01,
        steps=30,
        checkpoint_every=10,
    )
    there = load_run(out / "components=2,latent=1" / "seed-0", "last")
    for name, weight in run.model.state_dict().items():
        assert torch.equal(weight, there.state_dict()[name]), name


def test_the_table_ranks_runs_by_their_held_out_evidence(whole):
    out, rows = whole
    values = [float(row["log_p"]) for row in rows]
    assert values == sorted(values, reverse=True)
    assert [row["rank"] for row in rows] == list("123456")
    for row in rows:
        model = load_run(out / row["folder"])
        assert model.log_evidence(x=X[80:]).mean == pytest.approx(float(row["log_p"]), abs=1e-9)
        assert row["method"] == "exact"


def test_finished_runs_are_not_repeated_and_the_grid_may_grow(whole):
    out, _ = whole
    told, _ = carried_out(sweep(out))
    assert told == []
    told, (found, _) = carried_out(sweep(out, grid={**GRID, "components": ["1", "2", "3", "4"]}))
    assert [name for name, _, _ in told] == [
        "components=4 latent=1 seed 0",
        "components=4 latent=2 seed 0",
    ]
    assert len(found) == 8


def test_a_sweep_that_died_in_the_middle_goes_on_to_the_same_table(whole, tmp_path, monkeypatch):
    """Die in the middle of the steps of the fourth run, then again while its result is written."""
    _, expected = whole
    out = tmp_path / "sweep"

    with pytest.raises(PowerCutError):
        carried_out(sweep(out, Dying()))
    assert len(list((out / "results").iterdir())) == 3
    half = out / "components=2,latent=2" / "seed-0"
    assert sorted(path.name for path in (half / "checkpoints").iterdir()) == ["step-10"]

    def full(*arguments, **others):
        raise PowerCutError

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(PowerCutError):
        carried_out(sweep(out))
    monkeypatch.undo()
    assert len(list((out / "results").iterdir())) == 3
    told, (found, comparison) = carried_out(sweep(out))
    assert [name for name, _, _ in told] == [
        "components=2 latent=2 seed 0",
        "components=3 latent=1 seed 0",
        "components=3 latent=2 seed 0",
    ]
    assert table(out, found, comparison) == expected


def test_processes_give_the_same_table(whole, tmp_path):
    _, expected = whole
    plan, told = sweep(tmp_path / "sweep"), []
    with plan.opened() as rows:
        carry_out_in_parallel(
            plan, plan.open_jobs(together=False), 2, lambda *one: told.append(one)
        )
        found, comparison = ranked(plan, rows)
    assert len(told) == 6
    assert table(plan.out, found, comparison) == expected


@pytest.mark.slow
def test_seeds_together_are_the_seeds_alone(tmp_path):
    grid = {"components": ["1", "2"]}
    tables = []
    for together in (False, True):
        plan = sweep(tmp_path / str(together), grid=grid, seeds=3)
        told, (found, comparison) = carried_out(plan, together=together)
        assert len(told) == (2 if together else 6)
        tables.append(table(plan.out, found, comparison))
    assert tables[0] == tables[1]
    groups = across_seeds(found)
    assert [len(one.runs) for one in groups] == [3, 3]
    assert groups[0].difference == 0
    means = [one.compared.mean for one in groups[0].runs]
    assert groups[0].mean == pytest.approx(np.mean(means))
    assert groups[0].spread == pytest.approx(np.std(means, ddof=1))
    text = sweep_text(found, comparison)
    assert "Averages over seeds:" in text
    assert f"Chosen: {comparison.best.name} ({found[0].folder})" in " ".join(text.split())


def test_a_run_that_fails_is_reported_and_tried_again(tmp_path):
    out = tmp_path / "sweep"
    told, (found, _) = carried_out(sweep(out, Failing()))
    failures = {name: outcome for name, outcome, _ in told if isinstance(outcome, str)}
    assert list(failures) == ["components=3 latent=1 seed 0", "components=3 latent=2 seed 0"]
    assert all("the power went off" in reason for reason in failures.values())
    assert len(found) == 4
    told, (found, _) = carried_out(sweep(out))
    assert [name for name, _, _ in told] == list(failures)
    assert len(found) == 6


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"steps": 40}, "holds a sweep with steps = 30, but this command has 40"),
        ({"lr": 0.1}, "holds a sweep with lr = none, but this command has 0.1"),
        ({"builder": Mixtures(X + 1)}, "over other rows: the data have changed"),
    ],
)
def test_another_sweep_in_the_same_folder_is_refused(whole, other, message):
    with pytest.raises(ValueError, match=message):
        carried_out(sweep(whole[0], **other))


def test_a_changed_model_is_refused(whole):
    class Changed(Mixtures):
        def model(self, arguments):
            return super().model({**arguments, "latent": "3"})

    with pytest.raises(ValueError, match="components=1 latent=1 is another model now"):
        carried_out(sweep(whole[0], Changed()))


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "letter.txt").write_text("Dear")
    with pytest.raises(ValueError, match="holds files that are not a sweep's \\(letter.txt\\)"):
        carried_out(sweep(tmp_path))


def test_a_wrong_argument_is_found_before_the_first_run(tmp_path):
    grid = {"components": ["1", "two"]}
    with pytest.raises(ValueError, match="two"):
        carried_out(sweep(tmp_path / "sweep", grid=grid))
    assert not (tmp_path / "sweep").exists()


def test_a_damaged_result_is_reported(tmp_path):
    out = tmp_path / "sweep"
    grid = {"components": ["1"]}
    carried_out(sweep(out, grid=grid))
    (path,) = (out / "results").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is damaged"):
        carried_out(sweep(out, grid=grid))
    path.unlink()
    assert len(carried_out(sweep(out, grid=grid))[0]) == 1


def test_the_picture_shows_every_run(whole, tmp_path):
    plan = sweep(whole[0])
    with plan.opened() as rows:
        found, comparison = ranked(plan, rows)
    figure = sweep_picture(found, comparison, GRID, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    axes = figure.axes[0]
    assert axes.get_xlabel() == "components"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    best, close = comparison.best, comparison.close()
    smallest = min((best, *close), key=lambda one: one.parameters)
    stars = [f"chosen: {best.name} (log p {best.mean:.3f})"]
    stars += [f"smallest, not told from it: {smallest.name}"] * (smallest is not best)
    assert labels == ["latent = 1", "latent = 2", *stars]
    drawn = [line for line in axes.lines if line.get_marker() == "*"]
    marked = [comparison.difference(one.name).mean for one in (best, smallest)][: len(stars)]
    assert [line.get_ydata()[0] for line in drawn] == marked
    assert "± one standard error" in axes.get_ylabel()
    assert not axes.child_axes
    averages = [line for line in axes.lines if line.get_label().startswith("latent")]
    for i, line in enumerate(averages, 1):
        expected = [
            comparison[f"components={k} latent={i}"].mean - comparison.best.mean for k in (1, 2, 3)
        ]
        assert line.get_ydata() == pytest.approx(expected, abs=1e-9)


def test_a_result_that_is_not_trusted_says_so_in_the_text(whole):
    plan = sweep(whole[0])
    with plan.opened() as rows:
        found, comparison = ranked(plan, rows)
    best = replace(comparison.best, flags=("3 of 40 examples have Pareto k above 0.70.",))
    doubtful = replace(comparison, models=(best, *comparison.models[1:]))
    assert "must not be trusted: 3 of 40" in " ".join(sweep_text(found, doubtful).split())


# Signals ------------------------------------------------------------------------------------------

LONGER = {"grid": {"components": ["1", "2"]}, "seeds": 2, "steps": 100, "checkpoint_every": 25}
PROGRAM = """
import sys
from pathlib import Path
from test_sweep import LONGER, sweep
from aevb.comparison.workers import carry_out_in_parallel

if __name__ == "__main__":
    plan = sweep(Path(sys.argv[1]), **LONGER)
    with plan.opened():
        carry_out_in_parallel(plan, plan.open_jobs(together=False), 2, lambda *one: None)
"""


def workers_of(pid: int) -> list[int]:
    """Return the processes whose parent is this one, apart from multiprocessing's own."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command = (path / "cmdline").read_text()
        except (OSError, ValueError, IndexError):
            continue
        if parent == pid and "spawn_main" in command:
            found.append(int(path.name))
    return found


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    """The table of longer runs that nothing interrupted."""
    out = tmp_path_factory.mktemp("sweep") / "longer"
    _, (found, comparison) = carried_out(sweep(out, **LONGER))
    return table(out, found, comparison)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="kill", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, id="terminate", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_sweep_leaves_no_process_and_goes_on(tmp_path, number, longer):
    script, out = tmp_path / "program.py", tmp_path / "sweep"
    script.write_text(PROGRAM)
    place = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    started = subprocess.Popen(
        [sys.executable, str(script), str(out)],
        env=os.environ | {"PYTHONPATH": place},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    wait_for(lambda: any(out.glob("*/seed-*/checkpoints/step-*")), started)
    workers = workers_of(started.pid)
    assert len(workers) == 2
    started.send_signal(number)
    started.communicate(timeout=60)
    assert started.returncode != 0
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    assert len(list(out.glob("results/*"))) < 4
    told, (found, comparison) = carried_out(sweep(out, **LONGER))
    assert told
    assert table(out, found, comparison) == longer


def wait_for(done, process=None, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert process is None or process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < end
        time.sleep(0.05)
