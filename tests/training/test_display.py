"""Seeing a run: the panel, the lines, TensorBoard's scalars, the history and its picture."""

import io
import json
import os
import pty
import re
import sys
import threading
import time
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch

from aevb import Bernoulli, Model, Normal, OneHot, Run, Settings, alternate, fit, mlp
from aevb.data import sources
from aevb.data.builtin import factor_analysis
from aevb.training import events as event_kinds
from aevb.training import job
from aevb.training.display import Checking, Display, Lines, Live, clock, number
from aevb.training.display_choice import display, in_notebook
from aevb.training.distributed import World
from aevb.training.gradient_steps import GradientSteps as Stepper
from aevb.zoo import fa


def small_gmvae() -> Model:
    torch.manual_seed(0)
    return Model(
        p={"y": OneHot(3), "z | y": Normal(2), "x | z": Bernoulli(6, net=mlp(8))},
        q={"y | x": OneHot(net=mlp(8)), "z | x, y": Normal(net=mlp(8))},
    )


X = (np.random.default_rng(0).random((60, 6)) > 0.5).astype(np.float32)
SETTINGS = {"steps": 30, "batch": 20, "validate_every": 10}


def train(model: Model | None = None, **changed) -> Run:
    return fit(
        small_gmvae() if model is None else model,
        {"x": X},
        **({"validation": {"x": X}} | SETTINGS | changed),
    )


@contextmanager
def terminal(monkeypatch, columns: int = 100):
    """Standard output as a terminal; called, it gives back what was written there so far."""
    primary, secondary = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "40")
    seen = io.BytesIO()

    def drain() -> None:
        while True:
            try:
                part = os.read(primary, 65536)
            except OSError:
                return
            if not part:
                return
            seen.write(part)

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    screen = os.fdopen(secondary, "w", encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", screen)

    def shown() -> str:
        screen.flush()
        time.sleep(0.05)
        return seen.getvalue().decode()

    try:
        yield shown
    finally:
        monkeypatch.undo()
        screen.close()
        reader.join()
        os.close(primary)


def last_frame(text: str) -> list[str]:
    """The panel as it was left: what follows the last erasure, without colours."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\x00", text)
    frame = plain[plain.rindex("step 30 of 30") - 60 :].replace("\x00", "")
    return [line.rstrip() for line in frame.split("\r\n") if line.strip()]


def test_a_terminal_shows_a_panel_with_everything_in_it(monkeypatch):
    with terminal(monkeypatch) as shown:
        run = train()
        lines = last_frame(shown())
    assert re.search(r"step 30 of 30  epoch 10\.00 of 10  done$", lines[0])
    assert lines[1].split() == ["training", "validation"]
    assert [line.split()[0] for line in lines[2:6]] == ["elbo", "x", "kl(y)", "kl(z)"]
    history = run.history
    assert lines[2].endswith(f"best {number(run.best.value)} at step {run.best.step}")
    for line in lines[2:6]:
        name, _, validation = line.split()[:3]
        assert validation == number(history[f"validation {name}"][-1])
    assert re.search(r"^ lr \d\.\de-\d\d   gradient \d+\.\d+   [\d,]+ steps/s$", lines[6])


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_the_terminal_is_left_as_it_was(monkeypatch, error):
    take = Stepper.step

    def failing(self, step, *arguments):
        if step == 7 and error is not None:
            raise error
        return take(self, step, *arguments)

    with terminal(monkeypatch) as shown:
        screen = sys.stdout
        monkeypatch.setattr(Stepper, "step", failing)
        with nullcontext() if error is None else pytest.raises(error):
            train()
        assert sys.stdout is screen  # not rich's stand-in
        text = shown()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back
    assert text.index("\x1b[?25l") < text.index("\x1b[?25h")
    assert "step 30 of 30" in text if error is None else "step 7 of 30" in text
    assert text.endswith(("\r\n", "\x1b[?25h"))


def test_steps_redraw_the_panel_at_most_five_times_a_second(monkeypatch):
    with terminal(monkeypatch):
        panel = Live(0, 10**6, 1.0)
        drawn = []
        monkeypatch.setattr(panel.panel, "update", lambda *_, **__: drawn.append(1))
        began = time.perf_counter()
        while time.perf_counter() - began < 0.5:
            panel.step(panel.at + 1)
        panel.panel.stop()
    assert panel.at > 1000
    assert len(drawn) <= 2


def test_many_terms_and_long_names_fit_a_narrow_terminal(monkeypatch):
    with terminal(monkeypatch, columns=60):
        panel = Live(0, 10**6, 1234.5)
        row = {"elbo": -1e7, "lr": 1e-3, "gradient": 1e9} | {
            f"kl(latent_{i})": float("nan") if i else 1e-9 for i in range(40)
        }
        panel.row({"step": 3, "phase": "E", **row} | {"validation elbo": -3.0})
        panel.close()
        with panel.console.capture() as captured:
            panel.console.print(panel.frame())
    lines = re.sub(r"\x1b\[[0-9;]*m", "", captured.get()).splitlines()
    assert len(lines) == 4 + panel.MOST
    assert all(len(line) <= 60 for line in lines)
    assert "step 0 of 1,000,000  – left" in lines[0]
    assert "… and 29 more" in lines[-2]
    assert "phase E   epoch 0.00 of" in lines[-1]


def test_elsewhere_lines_are_a_table_of_the_first_step_and_the_validations(capsys):
    run = train(progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "step",
        "epoch",
        "elbo",
        "x",
        "kl(y)",
        "kl(z)",
        "validation",
        "best",
        "lr",
        "steps/s",
        "left",
    ]
    assert [line.split()[0] for line in lines[1:]] == ["1", "10", "20", "30"]
    assert len({len(line) for line in lines}) == 1  # aligned
    assert [line.split()[6] for line in lines[2:]] == [
        number(value) for value in run.history["validation elbo"]
    ]
    assert lines[-1].split()[-1] == "0:00"


def test_between_validations_a_line_comes_at_most_every_five_seconds(capsys, monkeypatch):
    lines = Lines(0, 1000, 10.0)
    now = [time.perf_counter()]
    monkeypatch.setattr("aevb.training.display.time.perf_counter", lambda: now[0])
    for step in range(1, 101):
        now[0] += 0.24
        lines.step(step)
        lines.row({"step": step, "elbo": -1.0, "lr": 1e-3})
    printed = capsys.readouterr().out.splitlines()[1:]
    assert len(printed) == 5  # the first step, and 24 seconds
    assert printed[-1].split()[-1] == "3:40"  # 916 steps left, 25 in six seconds


@pytest.mark.parametrize("validates", [True, False])
def test_a_short_run_has_twenty_lines_the_first_and_the_last_among_them(capsys, validates):
    lines = Lines(0, 1000, 1000.0, validates=validates)
    for step in range(1, 1001):
        lines.step(step)
        lines.row({"step": step, "elbo": -1.0, "lr": 1e-3})
        if validates:
            lines.row({"step": step, "validation elbo": -2.0})
    lines.close()
    printed = [
        int(line.split()[0].replace(",", "")) for line in capsys.readouterr().out.splitlines()[1:]
    ]
    assert printed == [1, *range(51, 1000, 50), 1000]


def test_a_run_that_ends_early_has_a_line_of_its_last_step(capsys):
    lines = Lines(0, 1000, 1.0)
    for step in (1, 2, 3):
        lines.step(step)
        lines.row({"step": step, "elbo": -float(step), "lr": 1e-3})
    lines.close()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["1", "3"]


def test_a_step_that_is_logged_and_validated_has_one_line(capsys, monkeypatch):
    now = [time.perf_counter()]
    monkeypatch.setattr("aevb.training.display.time.perf_counter", lambda: now[0])
    lines = Lines(0, 30, 3.0)
    for step in range(1, 31):
        now[0] += 6  # a line is always due
        lines.step(step)
        lines.row({"step": step, "elbo": -float(step), "lr": 1e-3})
        if step % 10 == 0:
            lines.row({"step": step, "validation elbo": -2.0 * step})
    lines.note("a note")
    lines.close()
    header, *printed, note = capsys.readouterr().out.splitlines()
    assert note == "a note"
    assert [int(line.split()[0]) for line in printed] == list(range(1, 31))
    assert printed[9].split()[header.split().index("validation")] == number(-20.0)


def test_the_check_of_a_large_file_is_seen_if_it_takes_long(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("aevb.training.display.time.perf_counter", lambda: now[0])
    told, quiet = Checking(True), Checking(None)
    for rows in range(100, 2001, 100):
        now[0] += 1.0
        told(rows, 2000)
        quiet(rows, 2000)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "checking the training data: 200 of 2,000 rows, 0:18 left"
    assert len(printed) == 4  # after 2, 7, 12 and 17 seconds
    for rows in (1000, 2000):
        Checking(True)(rows, 2000)
    assert capsys.readouterr().out == ""


def test_the_check_of_a_mapped_file_is_told_of(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 40)
    monkeypatch.setattr(Checking, "PATIENCE", -1.0)
    np.save(tmp_path / "x.npy", X)
    train(progress=True, validation={"x": tmp_path / "x.npy"}, steps=1, validate_every=1)
    assert "checking the validation data: 1 of 60 rows" in capsys.readouterr().out


def test_the_best_is_that_of_the_bound_which_is_trained(capsys):
    run = train(bound="iwae", samples=3, progress=True)
    lines = capsys.readouterr().out.splitlines()
    values = run.history["validation iwae"]
    assert [line.split()[lines[0].split().index("validation")] for line in lines[2:]] == [
        number(value) for value in values
    ]
    assert run.best == ((values.argmax() + 1) * 10, values.max())


def test_the_objective_is_shown_and_judged_where_it_is_not_the_bound(capsys):
    run = train(beta={"z": 3.0}, progress=True)
    note, *lines = capsys.readouterr().out.splitlines()
    assert note.startswith("The run maximises the objective, which has beta={'z': 3.0}.")
    assert lines[0].replace("valid. objective", "valid.objective").split() == [
        "step",
        "epoch",
        "elbo",
        "objective",
        "x",
        "kl(y)",
        "kl(z)",
        "valid.objective",
        "best",
        "lr",
        "steps/s",
        "left",
    ]
    assert len({len(line) for line in lines}) == 1  # aligned
    values = run.history["validation objective"]
    assert [line.split()[7] for line in lines[2:]] == [number(value) for value in values]
    assert run.best == ((values.argmax() + 1) * 10, values.max())
    titles = [axes.get_title(loc="left") for axes in run.plot().axes[1:]]
    assert titles == ["log p(x|·)", "kl(y)", "kl(z)", "objective"]


def test_by_default_only_a_terminal_is_spoken_to(monkeypatch, capsys):
    train()
    assert capsys.readouterr().out == ""
    with terminal(monkeypatch) as shown:
        train(progress=False)
        assert shown() == ""
        panel = display(None, 0, 1, 1.0)
        assert isinstance(panel, Live)
        panel.close()
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(display(True, 0, 1, 1.0), Lines)


class Kernel:
    """A notebook: it records what is displayed."""

    def __init__(self):
        self.kernel, self.shown, self.updates = object(), [], []

    def get_ipython(self):
        return self

    def display(self, shown, *, display_id):
        assert display_id is True
        self.shown.append(shown)
        return self

    def update(self, shown):
        self.updates.append(shown)


@pytest.fixture
def notebook(monkeypatch):
    kernel = Kernel()
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", kernel)
    return kernel


def test_a_notebook_has_one_line_that_is_updated(notebook, capsys):
    began = time.perf_counter()
    run = train()
    took = time.perf_counter() - began
    assert capsys.readouterr().out == ""
    assert [repr(one) for one in notebook.shown] == ["step 0 of 30 · – left"]
    assert len(notebook.updates) <= 2 + 5 * took  # at most five times per second, and at the end
    last = notebook.updates[-1]
    bound, validation = run.history["elbo"], run.history["validation elbo"]
    assert np.isfinite(bound).all()
    assert re.fullmatch(
        rf"step 30 of 30 · elbo -\d\.\d+ · validation {number(validation[-1])} "
        rf"\(best {number(run.best.value)}\) · \d+\.\d s",
        repr(last),
    )
    html = last._repr_html_()
    assert html.startswith('<div><progress value="1.000" max="1"')
    assert repr(last) in html
    notebook.shown.clear()
    train(progress=False)
    assert notebook.shown == []


def test_a_shell_of_ipython_is_no_notebook(notebook, monkeypatch):
    assert in_notebook()
    del notebook.kernel
    assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()


def test_an_early_stop_is_announced_everywhere(capsys, tmp_path):
    asked = {"patience": 2, "steps": 400, "validate_every": 5, "lr": 0.5, "out": tmp_path}
    run = train(progress=True, **asked)
    assert run.step < 400
    (event,) = event_kinds.events(run.rows, event_kinds.STOPPED_EARLY)
    assert run.step == run.best.step + 2 * 5
    assert str(event) == (
        f"Stopped early, after step {run.step} of 400: the validation elbo has not risen above "
        f"{run.best.value:.4f}, its value at step {run.best.step}, in 2 validations (patience 2). "
        f"The model has the weights of step {run.best.step}."
    )
    printed = capsys.readouterr().out.splitlines()
    assert str(event) in printed
    assert printed[-1].split()[0] == str(run.step)
    assert run.ended == "stopped early (patience 2)"
    assert repr(run).splitlines() == [
        f"Run of {run.step} steps, seed 0, stopped early (patience 2)",
        "  model   p(y) p(z|y) p(x|z), q(y|x) q(z|x, y)",
        f"  best    validation elbo {run.best.value:.4f} at step {run.best.step}",
        f"  folder  {tmp_path}",
    ]
    again = train(resume=True, **asked)  # there is nothing to do, and nothing new to say
    assert again.rows == run.rows
    assert Run.load(tmp_path).ended == run.ended
    whole = train(patience=30)
    assert whole.ended == "all steps taken"
    assert event_kinds.events(whole.rows, event_kinds.STOPPED_EARLY) == []


def test_of_several_processes_only_the_first_speaks(capsys, monkeypatch):
    class Other(World):
        first = False

    monkeypatch.setattr(job, "join", lambda device: Other())
    train(progress=True)
    assert capsys.readouterr().out == ""


def test_numbers_and_times_are_short():
    assert [number(v) for v in (None, 0.0, -98.3125, 1234.5678, 3e-7, float("nan"), 2.5e9)] == [
        "·",
        "0.0000",
        "-98.312",
        "1,234.6",
        "3.00e-07",
        "nan",
        "2.50e+09",
    ]
    assert [clock(s) for s in (7, 754, 3723, 273600, float("inf"))] == [
        "0:07",
        "12:34",
        "1:02:03",
        "3 d 4 h",
        "–",
    ]


def test_the_bound_shown_is_smoothed_and_forgets_what_is_not_finite():
    shown = Display(0, 10, 1.0)
    for value in (float("nan"), -10.0, -20.0):
        shown.row({"step": 1, "elbo": value})
    assert shown.train["elbo"] == pytest.approx(-13.0)


# TensorBoard --------------------------------------------------------------------------------------


def events(folder) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of every event file, as it is on disk."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))
    return found


def test_tensorboard_reads_what_the_history_says_and_no_step_twice(tmp_path, monkeypatch):
    class KilledError(Exception):
        pass

    take = Stepper.step

    def dying(self, step, *arguments):
        if step == 17:
            raise KilledError
        return take(self, step, *arguments)

    monkeypatch.setattr(Stepper, "step", dying)
    with pytest.raises(KilledError):
        train(out=tmp_path, tensorboard=True)
    assert [step for step, _ in events(tmp_path / "tensorboard")["training/elbo"]] == list(
        range(1, 18)
    )
    monkeypatch.undo()
    run = train(out=tmp_path, tensorboard=True, resume=True)
    found = events(tmp_path / "tensorboard")
    names = {"elbo", "x", "kl(y)", "kl(z)"}
    assert set(found) == {f"training/{name}" for name in names | {"lr", "gradient"}} | {
        f"validation/{name}" for name in names
    }
    for tag, pairs in found.items():
        name = tag.removeprefix("training/").replace("/", " ")
        assert [step for step, _ in pairs] == run.history[f"{name}.step"].tolist(), tag
        assert np.allclose([value for _, value in pairs], run.history[name], rtol=1e-6), tag


def test_tensorboard_is_refused_where_it_cannot_work(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError,
        match="TensorBoard's files are in the run's folder; give that folder with out=",
    ):
        train(tensorboard=True)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install 'aevb\[tensorboard\]'"):
        train(out=tmp_path, tensorboard=True)
    monkeypatch.undo()
    assert train(out=tmp_path, tensorboard=True).step == 30


# The history and its picture ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def alternating(tmp_path_factory):
    torch.manual_seed(0)
    out, x = tmp_path_factory.mktemp("alternating"), factor_analysis(100)
    settings = {
        "steps": 250,
        "batch": 50,
        "lr": 0.05,
        "schedule": alternate(60, 40),
        "validate_every": 10,
        "log_every": 7,
    }
    return fit(fa(), {"x": x}, validation={"x": x}, out=out, **settings)


def test_the_history_has_the_evidence_and_the_gap(alternating):
    history = alternating.history
    assert (
        len(history["validation gap"])
        == len(history["validation evidence"])
        == len(history["validation elbo"])
        == 25
    )
    assert (history["validation gap"] > 0).all()
    computed = history["validation evidence"] - history["validation elbo"]
    # the ELBO is sampled, the gap is not
    assert np.allclose(history["validation gap"], computed, atol=1.0)
    bare = Run(
        alternating.model,
        alternating.settings,
        [{"step": 1, "elbo": -3.0, "evidence": -2.5}],
        None,
        1,
        0.0,
    )
    assert bare.history["gap"].tolist() == [0.5]


def test_the_phases_are_the_schedules(alternating):
    assert alternating.phases == [
        ("E", 0, 60),
        ("M", 60, 100),
        ("E", 100, 160),
        ("M", 160, 200),
        ("E", 200, 250),
    ]
    assert [row["phase"] for row in alternating.rows if "phase" in row][:15] == ["E"] * 8 + [
        "M"
    ] * 6 + ["E"]
    assert train(steps=3).phases == [("joint", 0, 3)]


def test_a_run_is_read_back_from_its_folder(alternating):
    found = Run.load(alternating.out)
    assert found.rows == alternating.rows
    assert found.settings == alternating.settings
    assert (found.step, found.best, found.phases) == (
        alternating.step,
        alternating.best,
        alternating.phases,
    )
    assert 0 < found.seconds <= alternating.seconds
    for name, tensor in alternating.model.state_dict().items():
        assert torch.equal(tensor, found.model.state_dict()[name])
    values = alternating.history["validation elbo"]
    assert found.best == ((values.argmax() + 1) * 10, values.max())


def test_the_seconds_of_a_resumed_run_go_on(tmp_path):
    train(out=tmp_path, steps=20, decay="constant")
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["seconds"]
    (tmp_path / "metrics.jsonl").write_text(
        (tmp_path / "metrics.jsonl").read_text().replace(f'"seconds": {last}', '"seconds": 1000.0')
    )
    run = train(out=tmp_path, decay="constant", resume=True)
    assert run.rows[-1]["seconds"] > 1000


def test_the_picture_has_the_bound_above_and_each_term_below(alternating, tmp_path):
    figure = alternating.plot(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    top, *below = figure.axes
    assert [text.get_text() for text in top.get_legend().get_texts()] == [
        "E-steps",
        "elbo, training",
        "elbo, validation",
        "evidence, validation",
    ]
    assert [axes.get_title(loc="left") for axes in below] == ["log p(x|·)", "kl(z)", "gap"]
    assert all(len(axes.patches) == 3 for axes in figure.axes)
    drawn = {line.get_label(): line for line in top.lines}
    assert np.array_equal(
        drawn["elbo, validation"].get_ydata(), alternating.history["validation elbo"]
    )


def test_a_burst_and_a_wild_start_do_not_flatten_the_curve():
    values = np.concatenate([-np.logspace(8, 2, 10), np.linspace(-100, -80, 190)])
    values[150] = -1e12
    values[160] = np.nan
    rows = [{"step": i, "elbo": value} for i, value in enumerate(values)]
    figure = Run(small_gmvae(), Settings(), rows, None, 200, 0.0).plot()
    low, high = figure.axes[0].get_ylim()
    assert -105 < low < -90
    assert -80 < high < -75


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 1, "elbo": -1.0}],
        [{"step": 1, "elbo": float("nan")}],
        [{"step": 0, "note": "skipped"}],
    ],
)
def test_a_short_run_has_a_picture_too(rows, tmp_path):
    Run(small_gmvae(), Settings(), rows, None, 1, 0.0).plot(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_what_a_run_prepares_in_its_first_steps_says_nothing_of_its_pace(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    shown = Display(100, 1100, 1.0)
    now = 40.0  # it compiled
    for step in range(101, 121):
        shown.step(step)
    for step in range(121, 201):
        now += 0.125
        shown.step(step)
    assert shown.pace() == (8.0, 900 / 8)


def test_of_several_runs_it_is_said_which_one_is_shown(capsys):
    fit(small_gmvae(), {"x": X}, validation={"x": X}, seeds=[4, 7], progress=True, **SETTINGS)
    assert "2 runs together; the display shows seed 4." in capsys.readouterr().out
    fit(small_gmvae(), {"x": X}, validation={"x": X}, seeds=[4], progress=True, **SETTINGS)
    assert "runs together" not in capsys.readouterr().out


def test_iterations_over_all_rows_are_shown_as_they_are():
    shown = Display(0, 3, 3.0)
    for step, evidence in enumerate((-700.0, -650.0, -647.28)):
        shown.row({"step": step, "evidence": evidence, "phase": "mle"})
    assert shown.train["evidence"] == -647.28
