"""Writing arrays as files: .csv, .npz, .npy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def write(out: Path, arrays: Mapping[str, np.ndarray], columns: Mapping[str, list[str]], timed: set[str], *, exact: bool = False) -> None:
    """Arrays by variable: a .npz (or .npy) as they are, a .csv with a header; of sequences a line a step, those missing left out.

    Six digits are written, or with ``exact`` as many as give every number back.
    """
    import numpy as np

    if out.suffix == ".npz":
        np.savez(out, **arrays)  # type: ignore[arg-type]
        return
    if out.suffix == ".npy" and len(arrays) == 1:
        np.save(out, next(iter(arrays.values())))
        return
    if out.suffix != ".csv":
        raise ValueError(f"{out}: write a .csv or a .npz file.")
    names: list[str] = []
    parts = []
    n = len(next(iter(arrays.values())))
    length = max((arrays[name].shape[1] for name in timed), default=1)
    for name, value in arrays.items():
        table = value if name in timed else np.repeat(value[:, None], length, 1)
        table = table.reshape(n * length, -1)
        width = table.shape[1]
        names += columns.get(name) or ([name] if width == 1 else [f"{name}{i}" for i in range(width)])
        parts.append(table)
    if timed:
        names = ["row", "step", *names]
        parts = [np.repeat(np.arange(n), length)[:, None], np.tile(np.arange(length), n)[:, None], *parts]
    whole = np.concatenate(parts, 1)
    if timed:
        whole = whole[~np.isnan(whole).any(1)]
    with out.open("w", encoding="utf-8", newline="") as file:
        file.write(",".join(names) + "\n")
        for row in whole.tolist():
            file.write(",".join(_digits(value, exact) for value in row) + "\n")


def _digits(value: float, exact: bool) -> str:
    short = f"{value:.6g}"
    return short if not exact or float(short) == value else repr(value)
