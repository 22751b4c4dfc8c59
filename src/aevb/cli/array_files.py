"""Write arrays to .csv, .npz and .npy files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from aevb.runtime.checked_files import whole_file

if TYPE_CHECKING:
    import numpy as np

    from aevb.data.long_tables import Lines


def refuse_kind(out: Path) -> None:
    """Refuse an output file of an unsupported type, before anything is computed."""
    if out.suffix not in (".csv", ".npz", ".npy"):
        raise ValueError(f"{out}: write a .csv or a .npz file, or a .npy of a single array.")


def write(
    out: Path,
    arrays: Mapping[str, np.ndarray],
    columns: Mapping[str, list[str]],
    timed: Collection[str] = (),
    *,
    exact: bool = False,
    lengths: np.ndarray | None = None,
    numbers: Lines | None = None,
    begins: np.ndarray | None = None,
) -> None:
    """Write one array per variable to a file.

    A .npz or .npy file holds the arrays unchanged. A .csv file has a header; it takes the names
    from ``columns`` if their number fits. It has one line per row, or, with ``timed`` variables,
    one line per step, and ``lengths`` gives the number of steps of each row. Rows and steps are
    counted from 0, or numbered as in the table ``numbers``. A .csv has six digits per number, or
    with ``exact=True`` as many digits as reading the number back exactly needs. ``begins`` holds
    the number of each row's first step, counted from 0.
    """
    import numpy as np

    refuse_kind(out)
    if out.suffix == ".npy" and len(arrays) > 1:
        raise ValueError(
            f"{out}: a .npy file holds a single array, but these are {', '.join(arrays)}. Write a "
            f".npz or a .csv file."
        )
    if out.suffix != ".csv":
        with whole_file(out) as place, place.open("wb") as binary:
            if out.suffix == ".npz":
                np.savez(binary, **arrays)  # type: ignore[arg-type]
            else:
                np.save(binary, next(iter(arrays.values())))
        return
    n = len(next(iter(arrays.values())))
    length = max((arrays[name].shape[1] for name in timed), default=1)
    real = np.arange(length) < (np.full(n, length) if lengths is None else lengths)[:, None]
    names: list[str] = []
    parts = []
    for name, value in arrays.items():
        table = value if name in timed else np.repeat(value[:, None], length, 1)
        table = table.reshape(n, length, -1)[real]
        width = table.shape[1]
        own = columns.get(name) or []
        names += (
            own
            if len(own) == width
            else [name]
            if width == 1
            else [f"{name}{i}" for i in range(width)]
        )
        parts.append(table)
    keys = [""] * len(parts[0])
    if timed:
        names = [*(("row", "step") if numbers is None else numbers.keys.names), *names]
        rows, steps = real.nonzero()
        steps = steps if begins is None else steps + begins[rows]
        counted = (
            f"{row},{step}," for row, step in zip(rows.tolist(), steps.tolist(), strict=True)
        )
        keys = list(counted) if numbers is None else numbers.numbers(rows, steps)
    with whole_file(out) as place, place.open("w", encoding="utf-8", newline="") as file:
        file.write(",".join(names) + "\n")
        for key, line in zip(keys, np.concatenate(parts, 1).tolist(), strict=True):
            file.write(key + ",".join(_digits(value, exact) for value in line) + "\n")


def significant(values: np.ndarray, *, single: bool) -> np.ndarray:
    """Round numbers to the decimal digits that their precision has: 7 of ``single``, else 15.

    >>> import numpy as np
    >>> significant(np.array([913.2068481445312, 0.0, -1234567891.0]), single=True).tolist()
    [913.2068, 0.0, -1234568000.0]
    """
    import numpy as np

    wide = np.asarray(values, dtype=np.float64)
    known = np.isfinite(wide) & (wide != 0)
    size = np.floor(np.log10(np.abs(wide, where=known, out=np.ones_like(wide))))
    places = (7 if single else 15) - 1 - size
    scale = 10.0 ** np.abs(places)
    # A division by a power of ten gives the number that is nearest to the decimal.
    found = np.where(places >= 0, np.rint(wide * scale) / scale, np.rint(wide / scale) * scale)
    return np.where(known & np.isfinite(found), found, wide)


def _digits(value: float, exact: bool) -> str:
    short = f"{value:.6g}"
    return short if not exact or float(short) == value else repr(value)
