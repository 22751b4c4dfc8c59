"""Train on a folder of Parquet files that is larger than the memory, kill the run, and resume it.

    python benchmarks/parquet.py --gigabytes 20 --steps 4000 --batch 1024

The folder holds a few files of normal numbers and hard links to them, so that it is read like a
folder of the asked size but takes the disk space of ``--files`` files. Each run is a process of its
own. It reports the seconds to open the folder (every row is read, checked and hashed once), the
seconds per step, and the peak of its resident memory above that of its imports. A run on the rows
of one file in memory is the comparison. A third run is killed (SIGKILL) in the middle and resumed;
its weights must equal those of the uninterrupted run bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

GROUP = 131_072  # rows of a row group
GROUPS = 8  # row groups of a file


def make(folder: Path, gigabytes: float, columns: int, files: int) -> int:
    """Write ``files`` files and link them until the folder has the size; return its bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    random, size = np.random.default_rng(0), 0
    weights = random.normal(size=(3, columns))
    for i in range(files):
        rows = GROUP * GROUPS
        x = random.normal(size=(rows, 3)) @ weights + random.normal(size=(rows, columns))
        table = pa.table({f"x{j}": x[:, j] for j in range(columns)})
        parquet.write_table(table, folder / f"{i:05}.parquet", row_group_size=GROUP)
        size += (folder / f"{i:05}.parquet").stat().st_size
    count = files
    while size < gigabytes * 1e9:
        source = folder / f"{count % files:05}.parquet"
        os.link(source, folder / f"{count:05}.parquet")
        size, count = size + source.stat().st_size, count + 1
    return size


def memory(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS now, or VmHWM, its highest value."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def train(asked: argparse.Namespace) -> None:
    """Train once, in this process; print a line of JSON."""
    import torch

    from aevb import Model, Normal, fit, mlp
    from aevb.data.sources import open_source

    torch.manual_seed(0)
    model = Model(
        {"z": Normal(3), "x | z": Normal(asked.columns, net=mlp(32))},
        {"z | x": Normal(net=mlp(32))},
    )
    fit(model, {"x": torch.randn(64, asked.columns)}, steps=20, batch=32, progress=False)
    before, done = memory("VmRSS"), newest_checkpoint(asked.out) if asked.resume else 0
    start = time.perf_counter()
    data = {"x": np.load(asked.data)} if asked.data.suffix == ".npy" else asked.data
    source = open_source(model.graph, data, model._parameter())
    opened = time.perf_counter()
    fit(
        model,
        source,
        steps=asked.steps,
        batch=asked.batch,
        seed=1,
        lr=1e-3,
        out=asked.out,
        resume=asked.resume,
        checkpoint_every=max(1, asked.steps // 20),
        compile=False,
        progress=False,
    )
    figures = {
        "source": type(source).__name__,
        "rows": source.n,
        "open_s": opened - start,
        "step_ms": 1e3 * (time.perf_counter() - opened) / (asked.steps - done),
        "before_bytes": before,
        "peak_bytes": memory("VmHWM") - before,
        "after_bytes": memory("VmRSS") - before,
    }
    torch.save(model.state_dict(), asked.out / "weights.pt")
    print(json.dumps(figures))


def start(asked: argparse.Namespace, data: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    shared = [f"--{key}={getattr(asked, key)}" for key in ("columns", "steps", "batch")]
    command = [sys.executable, __file__, *shared, f"--data={data}", f"--out={out}", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"A run failed with {process.returncode}.")
    return json.loads(output.splitlines()[-1])


def same(a: Path, b: Path) -> bool:
    import torch

    first, second = (torch.load(path / "weights.pt") for path in (a, b))
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def kill_in_the_middle(asked: argparse.Namespace, data: Path, out: Path) -> int:
    """Kill a run after half of its steps; return the step of its newest checkpoint."""
    process = start(asked, data, out)
    while process.poll() is None:
        time.sleep(0.05)
        if newest_checkpoint(out) >= asked.steps // 2:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return newest_checkpoint(out)
    raise SystemExit("The run ended before it could be killed. Ask for more --steps.")


def newest_checkpoint(out: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    found = [path.name.partition("-")[2] for path in out.glob("checkpoints/step-*")]
    return max((int(step) for step in found if step.isdigit()), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--files", type=int, default=4, help="files that are not links")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--where", type=Path, help="folder for the files, instead of a new one")
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.data is not None:
        train(asked)
        return
    place = Path(tempfile.mkdtemp(dir=asked.where))
    try:
        folder = place / "data"
        folder.mkdir()
        size = make(folder, asked.gigabytes, asked.columns, asked.files)
        real = sum(file.stat().st_size for file in list(folder.iterdir())[:1]) * asked.files
        print(f"{size / 1e9:.1f} GB in {len(list(folder.iterdir()))} files ({real / 1e9:.1f} GB)")
        one = place / "one.npy"
        from aevb.data import read_frame

        frame = read_frame(folder / "00000.parquet")
        np.save(one, np.stack([column.to_numpy() for column in frame.columns], 1)[: GROUP * 2])
        runs = {
            "in memory": result(start(asked, one, place / "memory")),
            "Parquet": result(start(asked, folder, place / "whole")),
        }
        killed = kill_in_the_middle(asked, folder, place / "killed")
        runs["Parquet, resumed"] = result(start(asked, folder, place / "killed", "--resume"))
        print(f"{'run':18} {'rows':>12} {'open s':>8} {'ms/step':>8} {'peak MB':>8} {'end MB':>7}")
        for name, run in runs.items():
            print(
                f"{name:18} {run['rows']:12,} {run['open_s']:8.1f} {run['step_ms']:8.2f} "
                f"{run['peak_bytes'] / 1e6:8.0f} {run['after_bytes'] / 1e6:7.0f}"
            )
        equal = same(place / "whole", place / "killed")
        print(f"killed after step {killed} of {asked.steps} and resumed; weights equal: {equal}")
        if not equal:
            raise SystemExit("The resumed run has other weights.")
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
