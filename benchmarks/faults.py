"""Kill runs at random moments, and damage the folders of runs and saved models at random.

python benchmarks/faults.py kills --seed 1 --count 29
python benchmarks/faults.py damage --seed 1 --count 500

A killed run is resumed, and killed again, until it ends. It must then equal the uninterrupted run
to the last bit. Every command that reads a folder reads the damaged one. The outcome is *clear*
(refused, or read with a warning, in a sentence), *harmless* (the result of the undamaged folder),
*raw* (an exception without a sentence of the library, or no end within the time limit) or *silent*
(another result without a warning).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import linecache
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import aevb
from aevb import cli, load, load_run
from aevb.training.checkpoint import CheckpointError, folders, latest, read
from aevb.training.run import Run

SECONDS = 30  # time limit of a command
TRAIN = (
    "train vae --data table.csv --set likelihood=Normal --set z=2 --set hidden=[6] --prepare "
    "standardise --hold-out 0.2 --batch 16 --decay constant --checkpoint-every 10"
)
LENGTHS = {"part": 30, "whole": 40}

# Asking -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """The answer of a command: its result (None if it refused), its messages, and ``raw``.

    ``raw`` is set if an exception did not come from the library.
    """

    result: Any
    words: str
    raw: bool = False


class TooLongError(BaseException):
    pass


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise, inside the context, if the work takes longer than these seconds."""

    def stop(*_: object) -> None:
        raise TooLongError(f"took more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def is_sentence(error: BaseException) -> bool:
    """Return whether an error is a sentence.

    The library raised it itself, or the system's message names a file.
    """
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        return error.filename is not None
    if not isinstance(error, ValueError | RuntimeError):
        return False
    frame = traceback.extract_tb(error.__traceback__)[-1]
    near = "".join(
        linecache.getline(frame.filename, line)
        for line in range((frame.lineno or 1) - 1, (frame.end_lineno or 1) + 1)
    )
    return str(Path(aevb.__file__).parent) in frame.filename and "raise" in near


def asked(act: Callable[[], Any]) -> Answer:
    """Return the answer of a function of the library."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with limited(SECONDS):
                result = act()
        except Exception as error:
            return Answer(None, f"{type(error).__name__}: {error}", not is_sentence(error))
        except TooLongError as error:
            return Answer(None, str(error), True)
    return Answer(result, "\n".join(str(one.message) for one in told))


def command(
    line: str | list[str], result: Callable[[str], Any] = lambda printed: printed
) -> Answer:
    """Run a command in this process and return its answer; ``result`` reads its output."""
    out, error, seen = io.StringIO(), io.StringIO(), []
    words, before = cli.in_its_words, sys.argv

    def noted(found: BaseException | str) -> str:
        seen.append(found)
        return words(found)

    sys.argv, cli.in_its_words = ["aevb", *(line.split() if isinstance(line, str) else line)], noted
    code: Any = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), limited(SECONDS):
            cli.main()
    except SystemExit as stop:
        code = stop.code
    except Exception as found:
        return Answer(None, "".join(traceback.format_exception_only(found)), True)
    except TooLongError as found:
        return Answer(None, str(found), True)
    finally:
        sys.argv, cli.in_its_words = before, words
    said = error.getvalue()
    if code:
        raw = code not in (1, 2) or any(
            isinstance(found, Exception)
            and not isinstance(found, Warning)
            and not is_sentence(found)
            for found in seen
        )
        return Answer(None, said, raw)
    return Answer(result(out.getvalue()), said)


def weights(folder: Path) -> dict[str, bytes]:
    """Return the weights of all checkpoints that a run keeps."""
    return {
        f"{place.name} {name}": tensor.numpy().tobytes()
        for place in folders(folder)
        for name, tensor in read(place).weights.items()
    }


def recorded(folder: Path) -> list[dict[str, Any]]:
    """Return the history of a run without its seconds and notes."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if name != "seconds"}
        for row in rows
        if "note" not in row
    ]


def state(model: aevb.Model) -> tuple[str, dict[str, bytes]]:
    return str(model), {
        name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()
    }


# Every command that reads a folder ----------------------------------------------------------------


def _written(name: str) -> Callable[[str], Any]:
    return lambda printed: (printed, Path(name).read_bytes())


def _archive(name: str) -> Callable[[str], Any]:
    def read_arrays(printed: str) -> Any:
        with np.load(name) as found:
            return printed, {key: found[key].tobytes() for key in found.files}

    return read_arrays


def _resumed(printed: str) -> Any:
    return (
        weights(Path("run")),
        recorded(Path("run")),
        json.loads(Path("run/data.json").read_text()),
        Path("run/model.json").read_text(),
    )


def _trained(printed: str) -> Any:
    return weights(Path("further")), recorded(Path("further"))


def _loaded_run() -> Any:
    run = Run.load("run")
    return (
        state(run.model),
        [{name: value for name, value in row.items() if name != "seconds"} for row in run.rows],
        str(run.settings),
        run.step,
    )


ON_A_RUN: dict[str, Callable[[], Answer]] = {
    "evaluate": lambda: command("evaluate run"),
    "encode": lambda: command("encode run --out codes.npz", _archive("codes.npz")),
    "sample": lambda: command("sample run --out samples.csv -n 5", _written("samples.csv")),
    "impute": lambda: command("impute run --out filled.csv --samples 5", _written("filled.csv")),
    "doctor": lambda: command("doctor run --json --no-calibrate --rows 50"),
    "check": lambda: command("check run --json --replicates 20 --out check.png"),
    "explain": lambda: command("explain run"),
    "load_run": lambda: asked(lambda: state(load_run("run"))),
    "load_run, last": lambda: asked(lambda: state(load_run("run", which="last"))),
    "Run.load": lambda: asked(_loaded_run),
    "load": lambda: asked(lambda: state(load("run"))),
    "train RUN": lambda: command("train run --steps 3 --out further", _trained),
    "train --resume": lambda: command(
        f"{TRAIN} --steps {LENGTHS['whole']} --out run --resume", _resumed
    ),
}

ON_A_MODEL: dict[str, Callable[[], Answer]] = {
    "load": lambda: asked(lambda: state(load("saved"))),
    "explain": lambda: command("explain saved"),
    "train MODEL": lambda: command(
        "train saved --data table.csv --prepare standardise --steps 3 --out further", _trained
    ),
    "load_run": lambda: asked(lambda: state(load_run("saved"))),
    "evaluate": lambda: command("evaluate saved --data table.csv"),
    "train --out": lambda: command(f"{TRAIN} --steps 3 --out saved"),
}


def prepare() -> None:
    """Write the files to damage into the current folder.

    They are a table, two runs and their saved models.
    """
    generator = np.random.default_rng(0)
    x = (
        generator.normal(size=(60, 2)) @ generator.normal(size=(2, 5))
        + 0.3 * generator.normal(size=(60, 5))
        + 2.0
    )
    # Every column of the training rows has missing entries, so that q is trained for all of them.
    x[generator.random(x.shape) < 0.12] = np.nan
    Path("table.csv").write_text(
        "a,b,c,d,e\n"
        + "".join(",".join("" if np.isnan(v) else f"{v:.5f}" for v in row) + "\n" for row in x)
    )
    for name, more in (("whole-run", ""), ("whole-other", "--seed 3")):
        answer = command(f"{TRAIN} --steps {LENGTHS['part']} --out {name} {more}")
        assert answer.result is not None, answer.words
        shutil.rmtree(Path(name, "curves.png"), ignore_errors=True)
    for name, source in (("whole-saved", "whole-run"), ("other-saved", "whole-other")):
        load_run(source, which="last").save(name)


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Work in a temporary folder with these files, without drawing curves, which takes longest."""
    before, plot = os.getcwd(), Run.plot
    Run.plot = lambda self, path=None: None  # type: ignore[assignment, method-assign, return-value]
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                prepare()
                yield
            finally:
                os.chdir(before)
    finally:
        Run.plot = plot  # type: ignore[method-assign]


# Damage -------------------------------------------------------------------------------------------


def _random_file(
    folder: Path, generator: np.random.Generator, suffixes: tuple[str, ...] = ()
) -> Path:
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and (not suffixes or path.suffix in suffixes)
    )
    return found[generator.integers(len(found))]


def _in_bytes(path: Path, generator: np.random.Generator) -> str:
    """Change some bytes of a file."""
    content = bytearray(path.read_bytes())
    n = len(content)
    at, length = int(generator.integers(n + 1)), int(generator.integers(1, 65))
    kind = str(
        generator.choice(
            ["flip", "overwrite", "zero", "cut", "grow", "insert", "repeat", "empty", "lines"]
        )
    )
    if kind == "flip" and n:
        content[min(at, n - 1)] ^= 1 << int(generator.integers(8))
    elif kind in ("overwrite", "zero"):
        content[at : at + length] = bytes(length) if kind == "zero" else generator.bytes(length)
    elif kind == "cut":
        del content[at:]
    elif kind == "grow":
        content += generator.bytes(length)
    elif kind == "insert":
        content[at:at] = generator.bytes(length)
    elif kind == "repeat":
        content[at:at] = content[at : at + length]
    elif kind == "empty":
        content.clear()
    else:
        content = bytearray(bytes(content).replace(b"\n", b"\r\n"))
    path.write_bytes(bytes(content))
    return f"{kind} {path}"


def _in_lines(path: Path, generator: np.random.Generator) -> str:
    """Drop, repeat or exchange lines of a text, or change a digit."""
    lines = path.read_bytes().split(b"\n")
    i, j = (int(k) for k in generator.integers(len(lines), size=2))
    kind = str(generator.choice(["drop line", "repeat line", "exchange lines", "digit"]))
    if kind == "drop line":
        del lines[i]
    elif kind == "repeat line":
        lines.insert(i, lines[i])
    elif kind == "exchange lines":
        lines[i], lines[j] = lines[j], lines[i]
    else:
        digits = [
            (k, match.start())
            for k, line in enumerate(lines)
            for match in re.finditer(rb"\d", line)
        ]
        if digits:
            k, at = digits[generator.integers(len(digits))]
            lines[k] = (
                lines[k][:at] + str(int(generator.integers(10))).encode() + lines[k][at + 1 :]
            )
    path.write_bytes(b"\n".join(lines))
    return f"{kind} {path}"


STRANGE = (
    None,
    True,
    -1,
    0,
    10**30,
    1e308,
    float("nan"),
    "",
    "x",
    [],
    {},
    [[]],
    {"type": "Normal"},
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every entry of JSON data."""
    for key, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield (*at, key)
        yield from places(inner, (*at, key))


def _in_json(path: Path, generator: np.random.Generator) -> str:
    """Change, rename or drop an entry of a JSON file, which stays valid JSON."""
    data = json.loads(path.read_text(encoding="utf-8"))
    found = list(places(data))
    at = found[generator.integers(len(found))]
    inner = data
    for key in at[:-1]:
        inner = inner[key]
    kind, key = str(generator.choice(["drop", "rename", "change", "nudge"])), at[-1]
    if kind == "drop":
        del inner[key]
    elif kind == "rename" and isinstance(inner, dict):
        inner[f"{key}x"] = inner.pop(key)
    elif kind == "nudge" and isinstance(inner[key], int | float):
        inner[key] = inner[key] + 1
    else:
        inner[key] = STRANGE[generator.integers(len(STRANGE))]
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return f"{kind} {'/'.join(map(str, at))} in {path}"


def _in_place(path: Path, generator: np.random.Generator, other: Path) -> str:
    """Replace a file by nothing, a folder, a link, or another file."""
    kind = str(
        generator.choice(
            [
                "delete",
                "folder",
                "dangling link",
                "link to itself",
                "of another run",
                "of this folder",
                "rename",
            ]
        )
    )
    if kind == "rename":
        path.rename(path.with_name(path.name + ".old"))
        return f"{kind} {path}"
    there = _random_file(path.parents[-2], generator)
    content = (
        there.read_bytes()
        if kind == "of this folder"
        else (other / path.relative_to(path.parents[-2])).read_bytes()
    )
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind.startswith("of"):
        path.write_bytes(content)
    return f"{kind} {path}" + (f" ({there})" if kind == "of this folder" else "")


def _in_folders(folder: Path, generator: np.random.Generator, other: Path) -> str:
    """Remove, rename, exchange or add checkpoints or other files of the folder."""
    kept = folders(folder)
    kind = str(
        generator.choice(
            [
                "drop checkpoint",
                "drop all",
                "number checkpoint",
                "of another run",
                "strange checkpoint",
                "strange file",
                "drop lock",
            ]
        )
    )
    place = kept[generator.integers(len(kept))] if kept else folder
    if kind == "drop checkpoint" and kept:
        shutil.rmtree(place)
    elif kind == "drop all" and kept:
        shutil.rmtree(folder / "checkpoints")
    elif kind == "number checkpoint" and kept:
        place.rename(place.with_name(f"step-{int(generator.integers(1, 99))}0"))
    elif kind == "of another run" and kept:
        shutil.rmtree(place)
        shutil.copytree(other / place.relative_to(folder), place)
    elif kind == "drop lock" and kept:
        (folder / ".lock").unlink()
    else:
        root = folder / "checkpoints" if kept and kind == "strange checkpoint" else folder
        name = str(
            generator.choice(
                [
                    "step-²",
                    "step-",
                    "step-99",
                    "step--1",
                    "step-007",
                    "writing-1",
                    ".DS_Store",
                    "seed-0",
                    "model.json~",
                    "notes.txt",
                ]
            )
        )
        if generator.random() < 0.5:
            (root / name).mkdir(exist_ok=True)
        else:
            (root / name).write_bytes(generator.bytes(20))
        kind, place = "add", root / name
    return f"{kind} {place}"


def damaged(folder: Path, other: Path, generator: np.random.Generator) -> str:
    """Damage a folder at random, and return a description."""
    kind = int(generator.choice(5, p=(0.4, 0.1, 0.2, 0.15, 0.15)))
    if kind == 0:
        return _in_bytes(_random_file(folder, generator), generator)
    if kind == 1:
        return _in_lines(_random_file(folder, generator, (".json", ".jsonl", ".toml")), generator)
    if kind == 2:
        return _in_json(_random_file(folder, generator, (".json",)), generator)
    if kind == 3:
        return _in_place(_random_file(folder, generator), generator, other)
    return _in_folders(folder, generator, other)


def judge(answer: Answer, undamaged: Answer) -> str:
    """Return the outcome: clear, harmless, raw or silent."""
    if answer.raw:
        return "raw"
    if answer.result is not None and answer.result == undamaged.result:
        return "harmless" if answer.words == undamaged.words else "clear"
    if answer.result is None and undamaged.result is None:
        return "harmless" if answer.words == undamaged.words else "clear"
    return (
        "clear" if answer.result is None or len(answer.words) > len(undamaged.words) else "silent"
    )


def restore(name: str) -> None:
    for gone in (name, "further"):
        shutil.rmtree(gone, ignore_errors=True)
    shutil.copytree(f"whole-{name}", name)


def notes_of(name: str) -> str:
    """Return the notes of a run that continued."""
    try:
        rows = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return ""
    return "\n".join(row["note"] for row in rows if "note" in row)


def answers(name: str, commands: dict[str, Callable[[], Answer]]) -> Iterator[tuple[str, Answer]]:
    for what, ask in commands.items():
        shutil.rmtree("further", ignore_errors=True)
        found = ask()
        if what == "train --resume" and found.result is not None:
            found = Answer(found.result, "\n".join(filter(None, [found.words, notes_of(name)])))
        yield what, found


FOLDERS = {"run": ("whole-other", ON_A_RUN), "saved": ("other-saved", ON_A_MODEL)}


def damage(
    name: str, count: int, seed: int, only: tuple[str, ...] = ()
) -> Iterator[tuple[int, str, str, str, str]]:
    """Damage a folder ``count`` times; ``only`` selects commands.

    Yield the number, the damage, the command, the outcome and the message.
    """
    other, commands = FOLDERS[name]
    commands = {what: ask for what, ask in commands.items() if not only or what in only}
    restore(name)
    undamaged = dict(answers(name, commands))
    for i in range(count):
        generator = np.random.default_rng([seed, i])
        restore(name)
        done = damaged(Path(name), Path(other), generator)
        for what, answer in answers(name, commands):
            yield i, done, what, judge(answer, undamaged[what]), answer.words


def report_damage(names: list[str], count: int, seed: int, verbose: bool) -> bool:
    fine = True
    with prepared():
        for name in names:
            counts: Counter[tuple[str, str]] = Counter()
            sentences: Counter[str] = Counter()
            for i, done, what, outcome, words in damage(name, count, seed):
                counts[what, outcome] += 1
                sentences[re.sub(r"\d+", "#", words.strip())[:170]] += outcome == "clear"
                if outcome in ("raw", "silent"):
                    fine = False
                    print(
                        f"{outcome}: {name} {i}: {done}: {what}: {words.strip()[-300:]}", flush=True
                    )
            kinds = ("clear", "harmless", "raw", "silent")
            print(
                f"\n{count} times damaged: {name}\n{'':<16}"
                + "".join(f"{kind:>10}" for kind in kinds)
            )
            for what in FOLDERS[name][1]:
                print(f"{what:<16}" + "".join(f"{counts[what, kind]:>10}" for kind in kinds))
            print(
                f"{'together':<16}"
                + "".join(
                    f"{sum(counts[what, kind] for what in FOLDERS[name][1]):>10}" for kind in kinds
                )
                + "\n"
            )
            if verbose:
                for sentence, times in sentences.most_common():
                    print(f"{times:6} {sentence!r}")
    return fine


# Kills --------------------------------------------------------------------------------------------

LONG = f"{TRAIN.replace('--checkpoint-every 10', '--checkpoint-every 7')} --steps 400"


def _child(line: str) -> int:
    """Start a process that runs a command without output, and return its id."""
    pid = os.fork()
    if pid == 0:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        code = 1
        try:
            sys.argv = ["aevb", *line.split()]
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            os._exit(code)
    return pid


def kill(count: int, seed: int) -> Iterator[tuple[int, float, str, bool]]:
    """Kill runs ``count`` times.

    Yield the number, the moment in seconds, the state of the run at that moment, and whether this
    state and the final run are correct.
    """
    generator = np.random.default_rng(seed)
    began = time.perf_counter()
    os.waitpid(_child(f"{LONG} --out whole"), 0)
    seconds = time.perf_counter() - began
    expected = weights(Path("whole")), recorded(Path("whole"))
    killed, run = 0, 0
    while killed < count:
        run += 1
        out, ended, moments = Path(f"killed-{run}"), False, []
        while not ended:
            # A run that was killed before it made its folder has left nothing to resume.
            line = f"{LONG} --out {out}" + (" --resume" if out.exists() else "")
            pid = _child(line)
            if killed < count and len(moments) < 6:
                moment = float(generator.uniform(0.0, 0.7 * seconds))
                time.sleep(moment)
                os.kill(pid, signal.SIGKILL)
                ended = os.waitpid(pid, 0)[1] == 0
                if ended:
                    break
                killed += 1
                moments.append(moment)
                yield killed, moment, *_left(out)
            else:
                code = os.waitpid(pid, 0)[1]
                ended = True
                if code:
                    yield killed, 0.0, f"run {run} could not be resumed (exit status {code})", False
        found = weights(out), recorded(out)
        yield killed, 0.0, f"run {run}, killed {len(moments)} times, ended", found == expected


def _left(out: Path) -> tuple[str, bool]:
    """Describe the state of a run after a kill, and return whether it is correct.

    Its last checkpoint must be complete and at most one interval behind the history.
    """
    try:
        found = latest(out)
    except CheckpointError as error:
        return str(error), False
    step = found.step if found else 0
    metrics = out / "metrics.jsonl"
    whole = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
    last = max((json.loads(line)["step"] for line in whole), default=0)
    writing = [path.name for path in (out / "checkpoints").glob("writing-*")]
    return f"checkpoint of step {step}, history to step {last}" + (
        ", a half-written checkpoint" if writing else ""
    ), last - step <= 14


def report_kills(count: int, seed: int) -> bool:
    fine = True
    with prepared():
        for number, moment, what, right in kill(count, seed):
            fine = fine and right
            print(
                f"{number:3} {f'{moment:6.2f} s' if moment else '        '}  "
                f"{'right' if right else 'WRONG'}  {what}",
                flush=True,
            )
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("kills", "damage"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=29)
    parser.add_argument(
        "--folder", choices=tuple(FOLDERS), help="one of the damaged folders; both by default"
    )
    parser.add_argument("--sentences", action="store_true", help="list the messages")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.what == "kills":
        sys.exit(not report_kills(chosen.count, chosen.seed))
    sys.exit(
        not report_damage(
            [chosen.folder] if chosen.folder else list(FOLDERS),
            chosen.count,
            chosen.seed,
            chosen.sentences,
        )
    )


if __name__ == "__main__":
    main()
