"""Numbers such as -999 that other programs write for a missing measurement."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from aevb.data.preparation import Standardised
from aevb.estimate.batch import holds_bytes, unmasked
from aevb.runtime.checked_files import DataWarning

USUAL = tuple(float(sign * (10**k - 1)) for k in range(2, 7) for sign in (-1, 1))  # ∓99, ∓999, …
FAR = 2  # standard deviations of the other values between a marker and the nearest of them
LOOK = 2000  # rows of an array that are examined
SHOWN = 4  # columns that a warning names


def mark_missing(x: Any, *markers: float) -> np.ndarray:
    """Replace every marker in the array by NaN (a missing value).

    Arguments:
        x: The array.
        *markers: The numbers that mark a missing value.

    Returns:
        A copy of the array.

    >>> mark_missing([[1, -999], [3, 4]], -999).tolist()
    [[1.0, nan], [3.0, 4.0]]
    """
    array = np.asarray(unmasked(x))
    precision = array.dtype if array.dtype.kind == "f" else np.float64
    return np.where(np.isin(array, markers), np.nan, array).astype(precision)


def find_markers(values: np.ndarray) -> dict[float, dict[int, int]]:
    """Find the usual markers that repeat in a column of [N, C], far outside its other values.

    Returns the count by marker and column.
    """
    found: dict[float, dict[int, int]] = {}
    held = np.isin(values, USUAL)
    for j in np.flatnonzero(held.sum(0) > 1).tolist():
        column = values[:, j].astype(float)
        rest = column[~held[:, j] & np.isfinite(column)]
        for marker in np.unique(column[held[:, j]]).tolist() if rest.size else ():
            count = int((column == marker).sum())
            with np.errstate(over="ignore", invalid="ignore"):
                # The squares of very large numbers overflow.
                far = max(rest.min() - marker, marker - rest.max()) > FAR * rest.std()
            if count > 1 and far:
                found.setdefault(marker, {})[j] = count
    return found


def marker_warnings(
    values: np.ndarray, names: Sequence[str], where: str, fix: str, for_commands: str | None = None
) -> list[DataWarning]:
    """Return one warning per marker in the columns.

    ``{marker}`` in ``fix`` is replaced by the number.
    """
    found = []
    for marker, columns in find_markers(values).items():
        shown = ", ".join(
            f"{names[j]} ({count} times)" for j, count in list(columns.items())[:SHOWN]
        ) + ", …" * (len(columns) > SHOWN)
        many = "s" * (len(columns) > 1)
        text = (
            f"{where}the value {marker:g} repeats far outside the others of its column: "
            f"column{many} {shown}. If it marks missing entries, "
        )
        warning = DataWarning(text + fix.format(marker=f"{marker:g}"))
        if for_commands is not None:
            warning.for_commands = text + for_commands.format(marker=f"{marker:g}")
        found.append(warning)
    return found


def array_warnings(arrays: Any, observed: Collection[str], where: str = "") -> list[DataWarning]:
    """Return marker warnings for arrays by variable, from a subset of their rows.

    Columns are indices.
    """
    found = []
    for name, value in arrays.items():
        raw = value.raw if isinstance(value, Standardised) else value
        if (
            name not in observed
            or not isinstance(raw, np.ndarray | Tensor)
            or raw.ndim < 1
            or not len(raw)
            or (raw.ndim > 2 and holds_bytes(raw))  # pixels
        ):
            continue
        some = raw[np.linspace(0, len(raw) - 1, min(LOOK, len(raw))).astype(int)]
        columns = (
            some.detach().cpu().double().numpy()
            if isinstance(some, Tensor)
            else np.asarray(unmasked(some))
        )
        if not columns.size or columns.dtype.kind not in "iuf":
            continue
        columns = columns.reshape(-1, columns.shape[-1] if columns.ndim > 1 else 1)
        fix = f"write NaN there: aevb.data.mark_missing({name}, {{marker}})."
        found += marker_warnings(
            columns,
            [f"{j} of {name} (from 0)" for j in range(columns.shape[1])],
            where,
            fix,
            "write NaN there.",
        )
    return found
