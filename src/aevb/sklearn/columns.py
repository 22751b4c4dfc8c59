"""The columns of a table: their units, and those that a model can learn.

:class:`Columns` reads arrays of numbers, and :class:`MixedColumns` frames with other columns too.
Both encode rows as the data of a model, and decode data as rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from aevb.runtime.checked_files import DataWarning
from aevb.tables.cells import frame_of, typed
from aevb.tables.columns import Column
from aevb.tables.frames import read_table
from aevb.tables.schema import Schema


@dataclass(frozen=True, eq=False)
class Columns:
    """Location and scale of every column [d], and which columns vary in the training rows.

    A model of the table reads (x − location) / scale of the columns that vary. A constant column
    has no density, so it is left out of the model: it contributes nothing to log p, and
    :meth:`restore` returns its constant. A column without any value is left out too; its location
    is NaN.
    """

    location: np.ndarray
    scale: np.ndarray
    varies: np.ndarray
    told: set[str] = field(default_factory=set, repr=False)  # columns that a warning named already

    @classmethod
    def read(cls, X: np.ndarray, *, shared_unit: bool = False) -> Columns:
        """Read means and standard deviations of the known cells of every column of X [n, d].

        With ``shared_unit`` all columns get one scale, the root of their mean variance.

        >>> Columns.read(np.array([[1.0, 5.0], [3.0, 5.0], [np.nan, 5.0]]))
        Columns(location=array([2., 5.]), scale=array([1., 1.]), varies=array([ True, False]))
        """
        known = ~np.isnan(X)
        count = known.sum(0)
        # The sums are over differences from one value, in units of the largest difference, so that
        # they neither overflow nor lose a small spread around a large mean.
        first = X[known.argmax(0), np.arange(X.shape[1])]
        with np.errstate(over="ignore"):
            difference = np.where(known, X - first, 0.0)
        largest = np.abs(difference).max(0)
        if not np.isfinite(largest).all():
            wide = int(np.argmax(~np.isfinite(largest)))
            raise ValueError(
                f"Column {wide} (from 0) spans more than the range of float64. Rescale it."
            )
        varies = largest > 0
        unit = np.where(varies, largest, 1.0)
        relative = difference / unit
        mean = relative.sum(0) / np.maximum(count, 1)
        spread = np.sqrt((np.where(known, relative - mean, 0.0) ** 2).sum(0) / np.maximum(count, 1))
        location = np.where(count > 0, first + mean * unit, np.nan)
        scale = np.where(varies, spread * unit, 1.0)
        if shared_unit and varies.any():
            scale = np.where(varies, np.sqrt((scale[varies] ** 2).mean()), 1.0)
        return cls(location, scale, varies)

    def encode(self, X: np.ndarray) -> dict[str, np.ndarray]:
        """Return the data of a model of these columns: its only variable is ``x``."""
        return {"x": self.standardise(X)}

    def decode(self, data: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return rows [n, d] in their own units."""
        return self.restore(data["x"])

    def standardise(self, X: np.ndarray) -> np.ndarray:
        """Return the columns that vary, in standard deviations from their means."""
        here = self.varies
        return (X[:, here] - self.location[here]) / self.scale[here]

    def restore(self, x: np.ndarray) -> np.ndarray:
        """Return all columns [n, d] in their own units, from the standardised ones that vary."""
        X = np.broadcast_to(self.location, (len(x), len(self.location))).copy()
        X[:, self.varies] = x * self.scale[self.varies] + self.location[self.varies]
        return X

    def log_jacobian(self, X: np.ndarray) -> np.ndarray:
        """log |dx/dX| of the known cells of each row: log p(X) = log p(x) + this."""
        here = self.varies
        return -np.where(np.isnan(X[:, here]), 0.0, np.log(self.scale[here])).sum(1)

    def warn_of_changes(self, X: np.ndarray, names: Sequence[str] | None = None) -> None:
        """Warn of new values in columns that were constant or empty in the training rows."""
        changed = ~np.isnan(X) & (self.location != X) & ~self.varies
        found = []
        for j in np.flatnonzero(changed.any(0)).tolist():
            name = f"{j} (from 0)" if names is None else repr(str(names[j]))
            constant = None if np.isnan(self.location[j]) else f"{self.location[j]:g}"
            found.append(Changed(name, constant, changed[:, j]))
        _warn_of_changes(found, self.told)

    def relative_log_jacobian(self, data: Mapping[str, np.ndarray]) -> np.ndarray:
        """log |dx/dX| of encoded rows, less its value at x = 0: 0, as the units are constants."""
        return np.zeros(len(data["x"]))


@dataclass(frozen=True, eq=False)
class MixedColumns:
    """The columns of a frame of which some are not numbers: text, categories, truth values.

    ``constants`` are the cells of the columns that are constant in the training rows, as
    :class:`aevb.tables.reading.Cells` has them. The schema leaves these columns out.
    """

    schema: Schema
    constants: Mapping[str, Any]
    told: set[str] = field(default_factory=set, repr=False)  # columns that a warning named already

    @classmethod
    def read(cls, X: Any) -> MixedColumns:
        """Read the kinds of the columns of a frame, and the constants among them."""
        schema, table, constants = Schema.read(X), read_table(X), {}
        for column in schema.columns:
            if not column.used and column.facts.constant:
                cells = table.cells(column.name, schema.missing_words, form=column.facts.form)
                constants[column.name] = cells.values[~cells.missing].tolist()[0]
        return cls(schema, constants)

    def encode(self, X: Any) -> dict[str, np.ndarray]:
        """Return the data of a model of these columns, one variable per kind."""
        return self.schema._encoded(read_table(X))  # warn_of_changes speaks of constants

    def decode(self, data: Mapping[str, np.ndarray]) -> Any:
        """Return a frame with the names, levels and units of the columns."""
        found = {name: data[name] for name in self.schema.variables}
        return frame_of(self.schema, self.schema.decode(found))

    def log_jacobian(self, X: Any) -> np.ndarray:
        """log |dx/dX| of the known cells of each row."""
        return self.schema.log_jacobian(X)

    def warn_of_changes(self, X: Any, names: Sequence[str] | None = None) -> None:
        """Warn of new values in columns that were constant or empty in the training rows."""
        table, found = read_table(X), []
        for column in self.schema.columns:
            facts = column.facts
            if column.used or not (facts.constant or not facts.distinct):
                continue
            cells = table.cells(column.name, self.schema.missing_words, form=facts.form)
            rows = np.flatnonzero(~cells.missing)
            known = cells.values[rows]
            numeric = known.dtype != object
            if facts.distinct and numeric == (facts.low is not None):
                same = (
                    (known >= facts.low) & (known <= facts.high)
                    if numeric
                    else known == self.constants[column.name]
                )
                rows = rows[~same]
            if len(rows):
                constant = str(self.constant(column, column.dtype)) if facts.distinct else None
                changed = np.isin(np.arange(len(cells.missing)), rows)
                found.append(Changed(repr(column.name), constant, changed))
        _warn_of_changes(found, self.told)

    def with_constants(self, X: Any) -> Any:
        """Return the frame with the missing cells of constant columns filled.

        Raise ValueError if another column that is left out has missing cells.
        """
        table, filled = read_table(X), {}
        for column in self.schema.columns:
            if column.used:
                continue
            cells = table.cells(column.name, self.schema.missing_words)
            rows = np.flatnonzero(cells.missing)
            if len(rows) and column.name not in self.constants:
                raise ValueError(
                    f"Column {column.name!r} has {len(rows)} missing "
                    f"cell{'s' * (len(rows) > 1)}, which cannot be filled, because the model "
                    f"leaves it out ({column.reason}). Drop the column, or fill it before."
                )
            if len(rows):
                filled[column.name] = rows, [self.constant(column, cells.dtype)] * len(rows)
        return table.replaced(filled) if filled else X

    def constant(self, column: Column, dtype: str) -> Any:
        """The constant of a column as a Python object of a type."""
        kinds = {"number": "real", "boolean": "binary", "date": "date", "datetime": "date"}
        kind = kinds.get(column.facts.type, "category")
        return typed(replace(column, kind=kind), np.array([self.constants[column.name]]), dtype)[0]

    def relative_log_jacobian(self, data: Mapping[str, np.ndarray]) -> np.ndarray:
        """log |dx/dX| of encoded rows, less its value at x = 0 with the same missing cells.

        No unit of a column changes it. x of a positive column is (log X − location) / scale.
        """
        rows = len(next(iter(data.values())))
        slope = [
            -column.scale if column.kind == "positive" else 0.0
            for column in self.schema.variables.get("x", ())
        ]
        return np.nan_to_num(data["x"]) @ np.array(slope) if slope else np.zeros(rows)


class Changed(NamedTuple):
    """A column that the model leaves out, its constant (None if it had no cell), and a mask of the
    rows with other values."""

    name: str
    constant: str | None
    rows: np.ndarray


def _warn_of_changes(found: Sequence[Changed], told: set[str]) -> None:
    """Warn once of columns that the model leaves out and that have new values in some rows."""
    new = [one for one in found if one.name not in told]
    if not new:
        return
    told.update(one.name for one in new)
    rows = int(np.any([one.rows for one in new], 0).sum())
    if len(new) == 1:
        constant = new[0].constant
        was = "had no known cell" if constant is None else f"was always {constant}"
        text = f"Column {new[0].name} {was} in the training rows, so the model leaves it out: its"
    else:
        names = ", ".join(one.name for one in new[:5]) + ", …" * (len(new) > 5)
        text = (
            f"{len(new)} columns did not vary in the training rows ({names}), so the model leaves "
            f"them out: their"
        )
    warnings.warn(
        f"{text} other values in {rows} of these rows have no influence on the result. To use "
        f"them, fit with rows in which they vary. This is said once.",
        DataWarning,
        stacklevel=5,
    )


def is_mixed(X: Any) -> bool:
    """Return whether X is a frame of pandas or polars with a column that is not a number."""
    import narwhals as nw

    frame = nw.from_native(X, eager_only=True, pass_through=True)
    return isinstance(frame, nw.DataFrame) and not all(
        kind.is_numeric() for kind in frame.schema.values()
    )


def first_text(X: Any) -> tuple[str, str] | None:
    """The name and a cell of the first column of a frame with text that is no number, or None."""
    import narwhals as nw

    frame = nw.from_native(X, eager_only=True, pass_through=True)
    if isinstance(frame, nw.DataFrame):
        for name in frame.columns:
            for cell in frame[name].to_list():
                if isinstance(cell, str) and not _is_number(cell):
                    return name, cell
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
