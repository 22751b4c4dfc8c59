"""Read a CSV file of a million rows and twenty columns: aevb, pandas and pyarrow, in turns.

    python benchmarks/read_csv.py --rows 1000000 --columns 20 --rounds 3

The times are of reading alone, in one process, after the file is in the page cache. The peak of the
memory is measured in a process of its own for each reader, above that of a process which has only
imported the same packages. Every reader must find the same numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def write(path: Path, rows: int, columns: int, words: bool) -> None:
    """Write normal numbers with all their digits; one cell in a hundred is empty."""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        file.write(",".join(f"c{j}" for j in range(columns)) + ",kind" * words + "\n")
        for start in range(0, rows, 10_000):
            x = random.normal(size=(min(10_000, rows - start), columns))
            empty = random.random(x.shape) < 0.01
            for row, holes in zip(x.tolist(), empty.tolist(), strict=True):
                cells = ["" if hole else repr(cell) for cell, hole in zip(row, holes, strict=True)]
                file.write(",".join(cells) + ",word" * words + "\n")


def ours(path: Path) -> np.ndarray:
    from aevb.data.text_tables import read_text

    return read_text(path)[0]


def by_lines(path: Path) -> np.ndarray:
    from aevb.data.text_tables import read_lines

    return read_lines(path)[0]


def frame(path: Path) -> Any:
    from aevb.data import read_frame

    return read_frame(path)


def pandas_c(path: Path) -> Any:
    import pandas

    return pandas.read_csv(path)


def arrow(path: Path) -> Any:
    from pyarrow import csv

    return csv.read_csv(path)


READERS: dict[str, Callable[[Path], Any]] = {
    "pandas.read_csv": pandas_c,
    "pyarrow.csv": arrow,
    "aevb, numbers": ours,
    "aevb, read_frame": frame,
    "aevb, by lines": by_lines,
}


def numbers(found: Any) -> np.ndarray:
    if isinstance(found, np.ndarray):
        return found
    return found.to_pandas().to_numpy() if hasattr(found, "to_pandas") else found.to_numpy()


def peak(path: Path, name: str | None) -> int:
    """Return the peak of the resident memory, in bytes, of a process that reads the file once.

    It is read from /proc, because ``getrusage`` counts the memory of the parent, too.
    """
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import read_csv, pathlib; "
        "import pandas, pyarrow.csv, aevb.data.text_tables; "
        "name = sys.argv[3]; found = read_csv.READERS[name](pathlib.Path(sys.argv[2])) "
        "if name else None; status = open('/proc/self/status').read(); "
        "print(status.partition('VmHWM:')[2].split()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(path), name or ""],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--by-lines", action="store_true", help="time the reader of lines, too")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    asked = parser.parse_args()
    names = [name for name in READERS if asked.by_lines or "lines" not in name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        write(path, asked.rows, asked.columns, words=False)
        size = path.stat().st_size
        print(f"{asked.rows:,} rows × {asked.columns} columns, {size / 1e6:.0f} MB of text")
        expected = numbers(READERS[names[0]](path))
        for name in names[1:]:
            found = numbers(READERS[name](path))
            # pandas rounds a few numbers in their last digit, unless float_precision="round_trip".
            assert np.allclose(found, expected, rtol=1e-15, atol=0, equal_nan=True), name
        del expected, found
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(asked.rounds):
            for name in names:
                start = time.perf_counter()
                READERS[name](path)
                seconds[name].append(time.perf_counter() - start)
        base = peak(path, None)
        peaks = {name: peak(path, name) - base for name in names}
    usual = statistics.median(seconds["pandas.read_csv"])
    print(f"{'reader':18} {'median s':>9} {'best s':>7} {'of pandas':>9} {'peak MB':>8}")
    for name in names:
        median = statistics.median(seconds[name])
        print(
            f"{name:18} {median:9.2f} {min(seconds[name]):7.2f} {median / usual:9.2f} "
            f"{peaks[name] / 1e6:8.0f}"
        )
    if asked.out:
        figures = {"rows": asked.rows, "columns": asked.columns, "bytes": size}
        asked.out.write_text(
            json.dumps(figures | {"seconds": seconds, "peak_bytes": peaks}, indent=2)
        )


if __name__ == "__main__":
    main()
