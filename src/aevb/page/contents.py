"""What a row is, for people: an image, the cells of a table, or a sequence."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from aevb.data.datasets import in_units
from aevb.estimate.batch import Batch
from aevb.estimate.keys import masks_of
from aevb.page.packing import pack, quantised
from aevb.page.subject import Rows, Subject
from aevb.tables.schema import Schema

BUDGET = 8 * 2**20  # most bytes of all rows, before they are deflated
LEVELS = 5000  # most different texts of a column, if they do not fit into
TEXTS, ALL_TEXTS = 2**21, 2**23  # characters: of one column, and of all columns
GREY_ROWS = 1000  # rows that tell the range of an image's pixels
SINGLE = 1e-6  # largest error of 32 bits, as a share of the range of a column


def kind_of(subject: Subject) -> str:
    """How to show a row: "image", "sequence", "cells" (a table) or "numbers"."""
    graph = subject.model.graph
    if subject.schema is not None:
        return "cells"
    if graph.timed[graph.observed[0]]:
        return "sequence"
    return "image" if subject.image is not None else "numbers"


def pack_contents(rows: Rows, budget: int = BUDGET, seed: int = 0) -> dict[str, Any]:
    """Return the contents of the rows, or of a random choice that the budget allows.

    ``detail`` lists the positions of these rows; None stands for all.
    """
    subject = rows.subject
    size = _bytes_per_row(rows)
    most = max(1, budget // max(1, size))
    detail = None
    if most < len(rows):
        detail = np.sort(np.random.default_rng(seed).permutation(len(rows))[:most])
        rows = rows.some(detail)
    kind = kind_of(subject)
    found = _cells(rows) if kind == "cells" else _arrays(rows, kind)
    return {
        "kind": kind,
        "detail": None if detail is None else pack(detail, "u4"),
        "count": len(rows),
        **found,
    }


def _bytes_per_row(rows: Rows) -> int:
    subject = rows.subject
    if subject.schema is not None:
        return 8 * len(subject.splits[0].cells.column_names)
    graph = subject.model.graph
    batch = next(rows.some(np.arange(min(1, len(rows)))).batches())[1]
    wide = 1 if kind_of(subject) == "image" else 4
    return sum(wide * math.prod(batch[name].shape) for name in graph.observed)


def values_of(subject: Subject, name: str, batch: Batch) -> np.ndarray:
    """A variable of a batch in the units of the data, [N, d] or [N, T, d]; NaN where unknown."""
    return shown(subject, name, known_values(subject, name, batch))


def shown(subject: Subject, name: str, values: np.ndarray) -> np.ndarray:
    """Values of a variable as the page shows them: images from 0 to 1, others in their units."""
    if subject.image is not None and name == subject.model.graph.observed[0]:
        low, high = _grey_range(subject, name)
        return (_pixels(subject, name, values) - low) / (high - low)
    return in_units(subject.recipe, subject.model.graph, name, values)


def _pixels(subject: Subject, name: str, values: np.ndarray) -> np.ndarray:
    """Pixels on one scale: standardised ones in their units, as each has a scale of its own."""
    if not subject.standardised:
        return values
    return in_units(subject.recipe, subject.model.graph, name, values)


def _grey_range(subject: Subject, name: str) -> tuple[float, float]:
    """The values that are shown as 0 and 1: 0 and 1 if all pixels lie there, else the extremes.

    Counts, standardised pixels and pixels from −1 to 1 lie beyond 0 … 1.
    """
    if name not in subject.greys:
        low, high = 0.0, 1.0
        for i in range(len(subject.splits)):
            source = subject.source(i)
            batch = source.take(source.spread(GREY_ROWS))
            values = _pixels(subject, name, known_values(subject, name, batch))
            finite = values[np.isfinite(values)]
            low = min(low, float(finite.min(initial=low)))
            high = max(high, float(finite.max(initial=high)))
        subject.greys[name] = low, high
    return subject.greys[name]


def known_values(subject: Subject, name: str, batch: Batch) -> np.ndarray:
    """A variable of a batch in the units of the model, [N, d] or [N, T, d]; NaN where unknown."""
    graph, value = subject.model.graph, batch[name]
    for mask in masks_of(batch, name, timed=graph.timed[name]):
        value = torch.where(mask, value, torch.nan)
    found = value.transpose(0, 1) if graph.timed[name] else value[0]
    return np.asarray(found.double().cpu().numpy())


def _arrays(rows: Rows, kind: str) -> dict[str, Any]:
    """Images, sequences or numbers: every observed variable as one array."""
    subject, graph = rows.subject, rows.subject.model.graph
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in graph.observed}
    for at, batch in rows.batches():
        for name, parts in found.items():
            parts.append((at, values_of(subject, name, batch)))
    return {"variables": [_variable(rows, name, _stack(found[name], len(rows))) for name in found]}


def _variable(rows: Rows, name: str, values: np.ndarray) -> dict[str, Any]:
    subject, graph = rows.subject, rows.subject.model.graph
    image = subject.image if name == graph.observed[0] else None
    return {
        "name": name,
        "timed": graph.timed[name],
        "image": None if image is None else list(image),
        "light": not subject.ink,
        "classes": graph.rule("p", name).spec.categorical,
        "columns": entry_names(subject, name, values.shape[-1]) if image is None else None,
        "shape": list(values.shape),
        "numbers": pack_numbers(values, unit=image is not None),
    }


def entry_names(subject: Subject, name: str, d: int) -> list[str]:
    """The names of the d entries of a variable: the columns of a file, or x0, x1, …."""
    columns = list(((subject.recipe.columns if subject.recipe else None) or {}).get(name, ()))
    if len(columns) == d:
        return columns
    return [name] if d == 1 else [f"{name}{j}" for j in range(d)]


def pack_numbers(values: np.ndarray, *, unit: bool = False) -> dict[str, Any]:
    """Pack numbers compactly: bytes for grey levels (``unit``), else 32 bits each.

    Grey levels with missing pixels, and numbers of an image beyond 0 … 1, take 16 bits. Numbers of
    a column that differ little, such as times, take 64 bits.
    """
    if unit:
        if np.isfinite(values).all() and values.min(initial=0) >= 0 and values.max(initial=0) <= 1:
            return {"low": 0.0, "high": 1.0, "values": pack(np.round(values * 255), "u1")}
        return quantised(values)
    return {"values": pack(values, "f4" if _fits_single(values) else "f8")}


def _fits_single(values: np.ndarray) -> bool:
    """Whether 32 bits change no number by more than a small share of its column's range."""
    columns = np.where(np.isfinite(values), values, np.nan).reshape(-1, values.shape[-1])
    with np.errstate(over="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without any known number
        error = np.nanmax(np.abs(columns.astype(np.float32) - columns), axis=0, initial=0.0)
        extent = np.nanmax(columns, axis=0) - np.nanmin(columns, axis=0)
    return not bool((error > SINGLE * extent).any())


def _stack(parts: Sequence[tuple[np.ndarray, np.ndarray]], n: int) -> np.ndarray:
    steps = [part.shape[1] for _, part in parts if part.ndim == 3]
    d = parts[0][1].shape[-1]
    found = np.full((n, max(steps), d) if steps else (n, d), np.nan)
    for at, part in parts:
        if steps:
            found[at, : part.shape[1]] = part
        else:
            found[at] = part
    return found


# Tables -------------------------------------------------------------------------------------------


def _cells(rows: Rows) -> dict[str, Any]:
    """The cells of a table, those of columns that the model does not read among them."""
    subject = rows.subject
    assert subject.schema is not None
    whole = whole_table(rows)
    columns, left = [], ALL_TEXTS
    for name in whole.column_names:
        columns.append(_column(subject.schema, name, whole[name], min(left, TEXTS)))
        left -= sum(map(len, columns[-1].get("levels", ())))
    return {"columns": columns}


def whole_table(rows: Rows) -> Any:
    """The cells of the rows as one ``pyarrow.Table``, in the order of the rows.

    A column that holds texts in one split and numbers in another is one of texts.
    """
    import pyarrow as pa  # type: ignore[import-untyped]

    # Rows of a page are in the order of their splits, and so are the parts.
    parts = [
        split.cells.take(rows.index[rows.split == i]) for i, split in enumerate(rows.subject.splits)
    ]
    for name in dict.fromkeys(name for part in parts for name in part.column_names):
        having = [i for i, part in enumerate(parts) if name in part.column_names]
        try:
            pa.concat_tables(
                [parts[i].select([name]) for i in having], promote_options="permissive"
            )
        except pa.ArrowException:
            for i in having:
                place, cells = parts[i].column_names.index(name), parts[i][name].to_pylist()
                texts = [None if _is_missing(cell) else _text(cell) for cell in cells]
                parts[i] = parts[i].set_column(place, name, pa.array(texts, pa.string()))
    return pa.concat_tables(parts, promote_options="permissive")


def _column(schema: Schema, name: str, cells: Any, texts: int) -> dict[str, Any]:
    modelled = name in schema and schema[name].used
    kind = schema[name].kind if modelled else ""
    found: dict[str, Any] = {"name": name, "kind": kind, "modelled": modelled}
    numbers = numbers_of(cells)
    # JavaScript has no integers beyond 2^53: such ids are texts.
    if numbers is not None and _is_whole(cells) and (np.abs(numbers) > 2.0**53).any():
        numbers = None
    if numbers is not None and kind not in ("category", "ordered", "binary"):
        return found | {"numbers": _exact(numbers)}
    codes, levels = levels_of(cells, texts)
    return found | {"levels": levels, "codes": pack(codes, "u4" if len(levels) > 65534 else "u2")}


def numbers_of(cells: Any) -> np.ndarray | None:
    """A column of a ``pyarrow.Table`` as float64 with NaN; None if it holds no numbers."""
    import pyarrow as pa

    kind = cells.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return None
    return np.asarray(cells.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))


def dates_of(cells: Any) -> np.ndarray | None:
    """A column of dates or times as days since 1970 with NaN; None if it holds none."""
    import pyarrow as pa

    kind = cells.type
    if not (pa.types.is_date(kind) or pa.types.is_timestamp(kind)):
        return None
    times = cells.cast(pa.timestamp("us")) if pa.types.is_date(kind) else cells
    found = times.to_numpy().astype("datetime64[us]")
    days = found.astype(np.int64) / 86_400e6
    return np.where(np.isnat(found), np.nan, days)


def texts_of(levels: Sequence[Any]) -> list[str]:
    """The texts by which a page shows the levels of a column."""
    return [_text(level) for level in levels]


def _is_whole(cells: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(cells.type))


def levels_of(cells: Any, most: int = 0) -> tuple[np.ndarray, list[str]]:
    """Cells as positions among their texts; the position after the last is a missing cell.

    If there are more than ``LEVELS`` different texts, and more than ``most`` characters in them,
    rare ones share the text "…".
    """
    texts = [None if _is_missing(cell) else _text(cell) for cell in cells.to_pylist()]
    counts: dict[str, int] = {}
    for text in texts:
        if text is not None:
            counts[text] = counts.get(text, 0) + 1
    levels = list(counts)
    if len(levels) > LEVELS and sum(map(len, levels)) > most:
        levels = [*sorted(levels, key=lambda text: -counts[text])[: LEVELS - 1], "…"]
    at = {text: i for i, text in enumerate(levels)}
    other = len(levels) - 1
    missing = len(levels)
    return np.array([missing if t is None else at.get(t, other) for t in texts]), levels


def _is_missing(cell: Any) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def _text(cell: Any) -> str:
    # Different numbers have different texts.
    whole = isinstance(cell, float) and cell.is_integer() and abs(cell) < 2**53
    text = str(int(cell) if whole else cell)
    return text if len(text) <= 200 else f"{text[:199]}…"


def _exact(values: np.ndarray) -> dict[str, Any]:
    """Pack numbers without loss: in 32 bits if these suffice, otherwise in 64."""
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    same = bool((np.isnan(values) | (single == values)).all())
    return {"values": pack(values, "f4" if same else "f8")}


def pack_units(subject: Subject) -> dict[str, Any]:
    """How the browser turns p's means back into the units of the data, by variable."""
    graph, found = subject.model.graph, {}
    if subject.schema is not None:
        for name, columns in subject.schema.variables.items():
            found[name] = [_units(column) for column in columns]
        return found
    for name in graph.observed:
        if graph.timed[name]:
            continue  # a page decodes no sequences
        zero = shown(subject, name, np.zeros((1, graph.size(name))))[0]
        one = shown(subject, name, np.ones((1, graph.size(name))))[0]
        if not (np.allclose(zero, 0) and np.allclose(one, 1)):
            found[name] = [
                {"location": float(low), "scale": float(high - low)}
                for low, high in zip(zero, one, strict=True)
            ]
    return found


def _units(column: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"column": column.name, "kind": column.kind}
    if column.listed:
        return found | {"levels": texts_of(column.levels)}
    if column.dense:
        return found | {"location": float(column.location), "scale": float(column.scale)}
    return found
