"""Read hostile folders: saved models and runs that were made to cause harm.

python benchmarks/hostile_folders.py

The hashes of these folders are correct. The commands that read a folder run on it in a separate
process. Their messages, memory and time are measured. A folder must be read, or refused with a
sentence. Any other outcome is raw.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import resource
import shutil
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import numpy as np
import torch

from aevb.runtime.checked_files import file_sha256, seal

Act = Callable[[Path], None]
DEEP = "[" * 200_000 + "]" * 200_000

# Making them --------------------------------------------------------------------------------------


def reseal(folder: Path) -> None:
    """Write correct hashes into a folder, as if it had been saved in this state."""
    if (folder / "checkpoints").is_dir():
        beside = {}
        for name in ("model.json", "data.json"):
            try:
                beside[name] = seal(json.loads((folder / name).read_text()))
            except (ValueError, OSError, RecursionError):
                beside[name] = "0" * 64
        for place in (folder / "checkpoints").glob("step-*"):
            try:
                manifest = json.loads((place / "manifest.json").read_text())
                manifest["beside"] = beside
                for name, record in manifest["files"].items():
                    record |= {
                        "sha256": file_sha256(place / name),
                        "bytes": (place / name).stat().st_size,
                    }
            except (ValueError, OSError, RecursionError, TypeError, KeyError, AttributeError):
                continue
            del manifest["sha256"]
            (place / "manifest.json").write_text(json.dumps(manifest | {"sha256": seal(manifest)}))
        return
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, record in manifest["files"].items():
            record |= {
                "sha256": file_sha256(folder / name),
                "bytes": (folder / name).stat().st_size,
            }
        (folder / "manifest.json").write_text(json.dumps(manifest))
    except (ValueError, OSError, RecursionError, TypeError, KeyError, AttributeError):
        pass


def edited(name: str, change: Callable[[Any], Any]) -> Act:
    def act(folder: Path) -> None:
        for path in sorted(folder.glob(name)):
            path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return act


def declared(**sides: Any) -> Act:
    """Replace parts of the declaration."""
    return edited("model.json", lambda data: data | sides)


def factor(side: str, key: str, **settings: Any) -> Act:
    return edited(
        "model.json",
        lambda data: data | {side: data[side] | {key: data[side].get(key, {}) | settings}},
    )


def network(**settings: Any) -> Act:
    return factor("q", "z | x", net={"type": "mlp", "hidden": [6]} | settings)


def text(name: str, content: str | bytes) -> Act:
    def act(folder: Path) -> None:
        for path in sorted(folder.glob(name)):
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return act


def header(record: Any, data: bytes = b"0000", name: str = "weights.safetensors") -> Act:
    content = record if isinstance(record, bytes) else json.dumps(record).encode()
    return text(name, len(content).to_bytes(8, "little") + content + data)


def tensor(shape: Any = (1,), dtype: Any = "F32", offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def recipe(**changes: Any) -> Act:
    return edited("data.json", lambda data: data | changes)


def manifest(**changes: Any) -> Act:
    return edited("checkpoints/step-*/manifest.json", lambda data: data | changes)


def in_state(**changes: Any) -> Act:
    return edited(
        "checkpoints/step-*/manifest.json", lambda data: data | {"state": data["state"] | changes}
    )


def in_settings(**changes: Any) -> Act:
    def change(data: dict[str, Any]) -> dict[str, Any]:
        return data | {"state": data["state"] | {"settings": data["state"]["settings"] | changes}}

    return edited("checkpoints/step-*/manifest.json", change)


def sealed_history(content: str) -> Act:
    """Write a history whose hash is in the checkpoints."""
    lines, record = content.count("\n"), hashlib.sha256(content.encode()).hexdigest()

    def act(folder: Path) -> None:
        (folder / "metrics.jsonl").write_text(content)
        in_state(history={"lines": lines, "sha256": record})(folder)

    return act


def fifo(name: str) -> Act:
    def act(folder: Path) -> None:
        for path in sorted(folder.glob(name)):
            path.unlink()
            os.mkfifo(path)

    return act


def linked(name: str, to: str) -> Act:
    def act(folder: Path) -> None:
        for path in sorted(folder.glob(name)):
            path.unlink()
            path.symlink_to(to)

    return act


def sparse(name: str, size: int) -> Act:
    """Write a sparse file of this size, which takes no room on the disk."""

    def act(folder: Path) -> None:
        for path in sorted(folder.glob(name)):
            os.truncate(path, size)

    return act


def bomb(folder: Path) -> None:
    """Replace the run's data by an archive of 20 MB that unpacks to 20 GB."""
    with (
        zipfile.ZipFile(folder / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w", force_zip64=True) as file,
    ):
        head = np.lib.format.header_data_from_array_1_0(np.zeros((1, 5)))
        np.lib.format.write_array_header_1_0(file, head | {"shape": (10**8, 5)})  # type: ignore[arg-type]
        for _ in range(50):
            file.write(bytes(2**20))
    recipe(data=str(folder / "x.npz"), hold_out=0.0, columns=None)(folder)


def chain(n: int, parents: int = 1) -> dict[str, Any]:
    """Return a declaration of n variables, each of which reads those before it."""
    read = [", ".join(f"v{j}" for j in range(max(0, i - parents), i)) for i in range(n)]
    return {
        f"v{i} | {names}" if names else f"v{i}": {"type": "Normal", "size": 1}
        for i, names in enumerate(read)
    }


ROOT = {"type": "Normal", "size": 1}

# Name → the change to a saved model.
MODELS: dict[str, Act] = {
    # Invalid declarations.
    "nested": text("model.json", DEEP),
    "nested in p": text(
        "model.json",
        '{"format": "aevb model", "version": 1, "p": '
        + '{"a":' * 100_000
        + "1"
        + "}" * 100_000
        + "}",
    ),
    "nested in a net": factor(
        "q", "z | x", net=json.loads('{"type":"mlp","hidden":' + "[" * 25 + "]" * 25 + "}")
    ),
    "a file of a terabyte": sparse("model.json", 2**40),
    "weights of a terabyte": sparse("weights.safetensors", 2**40),
    "manifest of a terabyte": sparse("manifest.json", 2**40),
    "a pipe": fifo("model.json"),
    "weights from a pipe": fifo("weights.safetensors"),
    "manifest from a pipe": fifo("manifest.json"),
    "zeros without end": linked("model.json", "/dev/zero"),
    "weights without end": linked("weights.safetensors", "/dev/zero"),
    "manifest without end": linked("manifest.json", "/dev/zero"),
    "NaN": text("model.json", "NaN"),
    "digits": text("model.json", "9" * 2**21),
    "surrogates": text(
        "model.json",
        '{"format": "aevb model", "version": 1, "p": {"\\ud800": {"type": "Normal", "size": 1}}, '
        '"q": {}, "given": {}}',
    ),
    "a key twice": text("model.json", '{"format": "aevb model", "p": {}, "p": {}}'),
    "a pickle": text("weights.safetensors", pickle.dumps({"w": os.system})),
    # Names of functions in place of classes.
    "os.system": factor("p", "z", type="os.system"),
    "a class of torch": factor("p", "z", type="Linear"),
    "a builtin": factor("p", "z", type="eval"),
    "a base class": factor("p", "z", type="Conditional"),
    "a dunder": factor("p", "z", type="__import__"),
    "a setting that is a method": factor("p", "z", heads=1),
    "a private setting": factor("p", "z", __class__="x"),
    "an activation that is code": network(activation="__import__('os').system('true')"),
    # Sizes and counts.
    "a huge size": factor("p", "z", size=10**12),
    "a size of 4000 digits": factor("p", "z", size=10**4000),
    "a size of NaN": factor("p", "z", size=float("nan")),
    "a size of infinity": factor("p", "z", size=float("inf")),
    "a negative size": factor("p", "z", size=-3),
    "a size of truth": factor("p", "z", size=True),
    "a size of a million axes": factor("p", "z", size=[1] * 10**6),
    "a root of half a billion": declared(
        p={"z": {"type": "Normal", "size": 5 * 10**8}, "x": ROOT}, q={"z": {"type": "Normal"}}
    ),
    "a given of a billion": declared(given={"u": [10**9]}),
    "half a million given": declared(given={f"u{i}": [1] for i in range(300_000)}),
    "a reader of all given": declared(
        p={"z": ROOT, "x | " + ", ".join(f"u{i}" for i in range(9000)): ROOT},
        q={"z": ROOT},
        given={f"u{i}": [1] for i in range(9000)},
    ),
    "a million layers": network(hidden=[1] * 10**6),
    "a layer of a billion": network(hidden=[10**9]),
    "two layers of 100,000": network(hidden=[10**5, 10**5]),
    "a billion recurrent layers": declared(
        p={
            "h[t] | h[t-1]": {"type": "LSTM", "size": 1, "layers": 10**9},
            "g[t] | g[t-1]": {"type": "LSTM", "size": 1, "layers": -(10**9)},
        }
    ),
    "a billion components": factor("q", "z | x", type="Mixture", components=10**9),
    "a table of a trillion rows": factor("q", "z | x", net={"type": "table", "rows": 10**12}),
    "9,000 layers": network(hidden=[1] * 9000),
    "a million convolutions": factor("q", "z | x", net={"type": "conv", "channels": [1] * 10**6}),
    "300 bits": declared(
        p={"z": {"type": "Bernoulli", "size": 300}, "x | z": ROOT},
        q={"z | x": {"type": "Bernoulli"}},
    ),
    "28 bits": declared(
        p={"z": {"type": "Bernoulli", "size": 28}, "x": ROOT}, q={"z": {"type": "Bernoulli"}}
    ),
    "100,000 classes": declared(
        p={"z": {"type": "OneHot", "size": 10**5}, "x": ROOT}, q={"z": {"type": "OneHot"}}
    ),
    "a covariance of a million": declared(
        p={"z": {"type": "MultivariateNormal", "size": 10**6}, "x": ROOT},
        q={"z": {"type": "Normal"}},
    ),
    "20,000 factors": declared(p=chain(20_000)),
    "9,900 factors in a row": declared(p=chain(9_900), q={}),
    "1,000 factors that read 300": declared(p=chain(1_000, 300), q={}),
    "a key of a megabyte": declared(p={"x" * 2**20: ROOT}),
    "a key of brackets": declared(p={"x" + "[" * 10**5: ROOT}),
    "a cycle": declared(p={"a | b": ROOT, "b | a": ROOT}, q={}),
    "a reader of itself": declared(p={"a | a": ROOT}, q={}),
    "a parent twice": declared(p={"a": ROOT, "b | " + ", ".join(["a"] * 10**5): ROOT}, q={}),
    # Invalid weights.
    "a header of 2⁶⁴ bytes": text("weights.safetensors", b"\xff" * 8 + b"{}"),
    "a nested header": header(b"[" * 100_000),
    "a header of NaN": header(b"NaN"),
    "a shape of a million axes": header({"w": tensor([9] * 10**6)}),
    "a shape of ones": header({"w": tensor([1] * 10**6)}),
    "a shape of zeros": header({"w": tensor([0, 10**18])}),
    "a negative shape": header({"w": tensor([-1, -4])}),
    "offsets beyond the end": header({"w": tensor((1,), offsets=(0, 10**12))}),
    "offsets that overlap": header({"a": tensor(), "b": tensor()}),
    "a dtype that is none": header({"w": tensor(dtype="PICKLE")}),
    "100,000 tensors": header({f"w{i}": tensor((0,), offsets=(0, 0)) for i in range(100_000)}, b""),
    "teaching that is code": header({"__metadata__": {"aevb teaching": DEEP}, "w": tensor()}),
    # The manifest.
    "a nested manifest": text("manifest.json", DEEP),
    "a manifest of numbers": text("manifest.json", "3"),
    "files a list": edited("manifest.json", lambda data: data | {"files": [1]}),
    "a version of 4000 digits": edited("manifest.json", lambda data: data | {"version": 10**4000}),
}

# Name → the change to a run.
RUNS: dict[str, Act] = {
    "nested declaration": text("model.json", DEEP),
    "nested recipe": text("data.json", DEEP),
    "nested history": text("metrics.jsonl", DEEP + "\n"),
    "a history of lists": sealed_history("[]\n"),
    "a nested history, sealed": sealed_history(DEEP + "\n"),
    "seconds of words": sealed_history('{"step": 1, "seconds": "x"}\n'),
    "nested manifest": text("checkpoints/step-*/manifest.json", DEEP),
    "nested lock": text(".lock", DEEP),
    "a recipe of a terabyte": sparse("data.json", 2**40),
    "a declaration of a terabyte": sparse("model.json", 2**40),
    "checkpoints of a terabyte": sparse("checkpoints/step-*/weights.safetensors", 2**40),
    "a lock of a terabyte": sparse(".lock", 2**40),
    "a history of a terabyte": sparse("metrics.jsonl", 2**40),
    "a recipe from a pipe": fifo("data.json"),
    "a history from a pipe": fifo("metrics.jsonl"),
    "a lock that is a pipe": fifo(".lock"),
    "a manifest from a pipe": fifo("checkpoints/step-*/manifest.json"),
    "weights from a pipe": fifo("checkpoints/step-*/weights.safetensors"),
    "a history without end": linked("metrics.jsonl", "/dev/zero"),
    "a recipe without end": linked("data.json", "/dev/zero"),
    "a lock without end": linked(".lock", "/dev/zero"),
    "data that are a pipe": lambda folder: (
        os.mkfifo(folder / "x.csv"),
        recipe(data=str(folder / "x.csv"))(folder),
    )[0],
    "data without end": lambda folder: (
        (folder / "x.csv").symlink_to("/dev/zero"),
        recipe(data=str(folder / "x.csv"))(folder),
    )[0],
    "data that unpack to gigabytes": bomb,
    "data that are nowhere": recipe(data="nowhere.csv"),
    "data of a sequence": recipe(data=["table.csv"]),
    "a billion steps": recipe(steps=10**9),
    "levels without end": recipe(levels=10**40, prepare="dequantise"),
    "no levels": recipe(levels=0, prepare="scale"),
    "a huge image": recipe(image=[10**9, 10**9]),
    "a negative image": recipe(image=[-1, -5]),
    "a seed of 40 digits": recipe(seed=10**40, split=10**40),
    "a negative split": recipe(split=-1),
    "hold out NaN": recipe(hold_out=float("nan")),
    "hold out all": recipe(hold_out=1e308),
    "hold out less than none": recipe(hold_out=-5),
    "a scale of zero": recipe(scale=[0.0] * 5),
    "a scale of NaN": recipe(scale=[float("nan")] * 5),
    "a mean of other columns": recipe(mean=[0.0], scale=[1.0]),
    "an unknown preparation": recipe(prepare="eval"),
    "columns that are not there": recipe(columns={"x": ["a", "b", "c", "d", "q"]}),
    "columns twice": recipe(columns={"x": ["a"] * 5}),
    "columns of other variables": recipe(columns={"nobody": ["a"]}),
    "others of words": recipe(others={"x": "y"}),
    "an unknown field": recipe(__class__="x"),
    "a schedule of words": in_settings(schedule="joint"),
    "a schedule that is code": in_settings(schedule={"name": "__import__"}),
    "a schedule without end": in_settings(schedule={"name": "alternate", "e": 10**30, "m": -1}),
    "settings of other kinds": in_settings(
        steps="x", batch=[], lr={}, seed=None, how=3, samples="many"
    ),
    "a distortion of words": in_settings(distort={"x": "much"}),
    "a teaching of words": in_state(teaching="q"),
    "a teaching of lists": in_state(teaching={"untaught": [1], "open ends": []}),
    "a teaching of numbers": in_state(teaching={"untaught": {"z": 10**40}}),
    "a best of step −1": in_state(best={"step": -1, "value": 0.0}),
    "a best of NaN": in_state(best={"step": 30, "value": float("nan")}),
    "a history of −1 lines": in_state(history={"lines": -1, "sha256": ""}),
    "a history of 10³⁰ lines": in_state(history={"lines": 10**30, "sha256": ""}),
    "sums of other names": in_state(metrics={"taken": 1, "sums": {"nobody": 1.0}}),
    "taken −1": in_state(metrics={"taken": -1, "sums": {}}),
    "waited for ever": in_state(waited=10**40, skipped=-1),
    "settings none": in_state(settings={}),
    "files elsewhere": manifest(files={"../../../x": {"bytes": 1, "sha256": ""}}),
    "step of another kind": manifest(step=True),
    "a huge size in a run": factor("p", "z", size=10**12),
    "a root of half a billion in a run": declared(
        p={"z": {"type": "Normal", "size": 5 * 10**8}, "x": ROOT}, q={"z": {"type": "Normal"}}
    ),
    "no tensors": header({}, b"", "checkpoints/step-*/weights.safetensors"),
    "an optimiser of other tensors": header(
        {"w/exp_avg": tensor()}, name="checkpoints/step-*/optimizer.safetensors"
    ),
    "a shape of many axes in a run": header(
        {"w": tensor([9] * 10**6)}, name="checkpoints/step-*/weights.safetensors"
    ),
}

KINDS: dict[str, tuple[dict[str, Act], dict[str, Callable[[], faults.Answer]]]] = {
    "saved": (MODELS, faults.ON_A_MODEL),
    "run": (RUNS, faults.ON_A_RUN),
}


def make(kind: str, name: str) -> None:
    """Replace the undamaged folder by the hostile one."""
    faults.restore(kind)
    act = KINDS[kind][0][name]
    act(Path(kind))
    if not any(
        path.is_fifo() or path.is_symlink() or path.stat().st_size > 2**30
        for path in Path(kind).rglob("*")
        if path.name != "x.csv"
    ):
        reseal(Path(kind))


# Asking -------------------------------------------------------------------------------------------


def answers(kind: str, name: str) -> list[tuple[str, str, str]]:
    """Return the outcome (read, refused or raw) and the message of every command."""
    found = []
    for what, ask in KINDS[kind][1].items():
        if what.startswith("train"):
            make(kind, name)
        answer = ask()
        found.append(
            (
                what,
                "raw" if answer.raw else "refused" if answer.result is None else "read",
                answer.words,
            )
        )
    return found


def in_a_child(kind: str, name: str) -> tuple[list[tuple[str, str, str]], float, float]:
    """Run :func:`answers` in a separate process; return also its memory in bytes and its seconds.

    A process that dies has an outcome too.
    """
    reader, writer = os.pipe()
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            found = answers(kind, name)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            os.write(
                writer,
                json.dumps(
                    [[(what, outcome, words[:400]) for what, outcome, words in found], grown * 1024]
                ).encode(),
            )
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        content = file.read()
    os.waitpid(pid, 0)
    seconds = time.perf_counter() - began
    if not content:
        return [("all", "raw", "the process died")], float("nan"), seconds
    found, grown = json.loads(content)
    return [tuple(one) for one in found], grown, seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="only folders whose name contains these words")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    counts = {"read": 0, "refused": 0, "raw": 0}
    most, longest, total = 0.0, 0.0, 0
    with faults.prepared():
        for kind, (folders, _) in KINDS.items():
            for name in folders:
                if chosen.only and chosen.only not in name:
                    continue
                shutil.rmtree(kind, ignore_errors=True)
                make(kind, name)
                found, memory, seconds = in_a_child(kind, name)
                outcomes = [outcome for _, outcome, _ in found]
                total, most, longest = total + 1, max(most, memory), max(longest, seconds)
                for outcome in outcomes:
                    counts[outcome] += 1
                said = next(
                    (words for _, outcome, words in found if outcome == "refused"), ""
                ).strip()
                listed = ", ".join(
                    f"{outcomes.count(outcome)} {outcome}"
                    for outcome in counts
                    if outcome in outcomes
                )
                print(
                    f"{kind:<6} {name:<34} {listed:<24} {memory / 2**20:6.0f} MiB {seconds:5.1f} "
                    f"s  {said[:110]!r}",
                    flush=True,
                )
                for what, outcome, words in found:
                    if outcome == "raw":
                        print(f"       raw: {what}: {words.strip()[-300:]}", flush=True)
    print(
        f"\n{total} folders, {sum(counts.values())} commands: "
        f"{', '.join(f'{n} {what}' for what, n in counts.items())}; ",
        end="",
    )
    print(
        f"at most {most / 2**20:.0f} MiB more than before, and {longest:.0f} s for all commands "
        f"of a folder."
    )
    sys.exit(counts["raw"] > 0)


if __name__ == "__main__":
    main()
