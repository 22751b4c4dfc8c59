"""Schema: the columns of a table, their kinds, and the map between cells and a model's data."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aevb.data.large_tables import LargeTable
from aevb.runtime.suggestions import did_you_mean, nearest
from aevb.tables.amounts import read_amounts
from aevb.tables.columns import (
    COUNTS,
    UNKNOWN,
    Column,
    asked_choice,
    checked_cells,
    column_from,
    column_of,
    dropped,
    levels_at,
    range_text,
    rescaled_facts,
    warn_of_markers,
    warn_of_words,
)
from aevb.tables.date_texts import read_dates
from aevb.tables.doubtful import warn_of_doubtful
from aevb.tables.frames import Table, read_table
from aevb.tables.kinds import choose, facts_of, levels_text
from aevb.tables.large_columns import EncodedRows, read_columns
from aevb.tables.left_out import warn_of_changed_constants
from aevb.tables.reading import MISSING_WORDS
from aevb.tables.redundant import some_rows, warn_of_repeated
from aevb.tables.stray_words import refuse_stray_words
from aevb.tables.units import warn_of_unit
from aevb.tables.unknown_levels import (
    checked_choice,
    describe_unknown_levels,
    unknown_levels_error,
    warn_of_unknown_levels,
)

if TYPE_CHECKING:
    from aevb.model import Model
    from aevb.tables.fitted import TableModel

__all__ = ["Column", "Schema"]

FORMAT = "aevb schema"
# Names of variables that are no columns: latents of the declarations, and shared variables.
SHARED = ("x", "counts", "overdispersed", "flags")
RESERVED = (
    *SHARED,
    "z",
    "cluster",
    "part",
    "t",
    "T",
    "steps",
    "lengths",
    "seed",
    "how",
    "bound",
    "samples",
    "gradient",
    "temperature",
    "kl_weight",
    "noise",
    "method",
    "memory",
    "mean",
    "n",
    "iterations",
    "self",
)


@dataclass(frozen=True)
class Schema:
    """The columns of a table, and the map between its cells and the data of a model.

    :meth:`read` makes it from a frame. ``schema["mass"]`` is a column.

    Arguments:
        columns: The columns, each with its kind, likelihood, scale and levels.
        library: The library of the frame: "pandas", "polars", "pyarrow" or "dict".
        integer_names: Whether the frame names its columns by integers.
        missing_words: The words that mark a missing cell of a text column.
        unknown_levels: "error" or "missing", as in :meth:`with_unknown_levels`.

    >>> frame = {"mass": [3.1, 4.7, 3.9, 5.2], "island": ["A", "B", "A", None]}
    >>> schema = Schema.read(frame)
    >>> schema["island"].kind, schema["island"].levels, schema["island"].missing
    ('binary', ('A', 'B'), 1)

    The cells as data of a model, and back:

    >>> data = schema.encode(frame)
    >>> data["flags"].ravel().tolist()
    [0.0, 1.0, 0.0, nan]
    >>> schema.decode(data)["mass"].round(1).tolist()
    [3.1, 4.7, 3.9, 5.2]
    >>> schema.cells(frame)["island"].tolist()
    [0.0, 1.0, 0.0, nan]
    >>> schema.missing_cells(frame)["island"].tolist()
    [False, False, False, True]
    >>> schema.log_jacobian(frame).shape
    (4,)
    >>> schema.variables_text()
    ['x holds mass, standardised.', 'flags holds island.']

    A schema is a value, which methods copy with a change:

    >>> schema.without("island").encode(frame).keys()
    dict_keys(['x'])
    >>> schema.with_kind("mass", "positive")["mass"].kind
    'positive'
    >>> round(schema.rescaled("mass", 1000.0)["mass"].location)  # grams instead of kilograms
    4225
    >>> lenient = schema.with_unknown_levels("missing")
    >>> lenient.missing_cells({"mass": [4.0], "island": ["C"]})["island"].tolist()
    [True]
    >>> Schema.from_json(schema.to_json()) == schema
    True

    Models of the table:

    >>> for model in (schema.mixture(2), schema.factors(2), schema.vae(2), schema.gmvae(3, 2)):
    ...     print(model.graph.latents)
    ('cluster',)
    ('z',)
    ('z',)
    ('z', 'cluster')
    """

    columns: tuple[Column, ...]
    library: str = "dict"
    integer_names: bool = False
    missing_words: tuple[str, ...] = field(default=MISSING_WORDS)
    unknown_levels: str = "error"

    # Reading and editing --------------------------------------------------------------------------

    @classmethod
    def read(
        cls,
        frame: Any,
        *,
        kinds: Mapping[str, str] | None = None,
        drop: Sequence[str] = (),
        missing: Sequence[str] = MISSING_WORDS,
    ) -> Schema:
        """Read the schema of a frame: choose a kind for every column, with the reason.

        A text column of amounts in one unit ("$1,234.50", "12 %", "(1,200)") is read as numbers,
        unless ``kinds`` makes it a category. So is a text column of dates ("2024-03-01 10:00",
        "01.03.2024", "13/01/2024"). Filled and drawn cells are texts in the same form.

        Arguments:
            frame: A frame of pandas, polars or pyarrow, or a dictionary of columns. A
                :class:`~aevb.data.large_tables.LargeTable` is read part by part.
            kinds: The kinds of some columns, by name.
            drop: Columns to leave out.
            missing: The words that mark a missing cell of a text column, compared without case: by
                default empty cells, "NA", "N/A", "#N/A", "<NA>" and "NaN". The levels of a
                categorical type are never missing.

        Returns:
            The schema.

        >>> frame = {"mass": [3.1, 4.7, 3.9], "sex": ["f", "m", "f"]}
        >>> schema = Schema.read(frame, kinds={"mass": "positive"})
        >>> schema["mass"].kind, schema["mass"].reason, schema["sex"].kind
        ('positive', 'as asked', 'binary')
        """
        if isinstance(frame, LargeTable):
            _check_names([*(kinds or {}), *drop], frame.names)
            words = tuple(word.strip().lower() for word in missing)
            found = read_columns(frame, kinds or {}, drop, words)
            schema = cls(tuple(found), "pyarrow", missing_words=words)._with_variables()._checked()
            few = read_table(frame.sample.take(some_rows(frame.sample.num_rows)))
            compared = list(schema._read(few, warn=False).values())
            warn_of_repeated(schema.used, compared)
            warn_of_doubtful(schema.used, compared, rows=False)
            return schema
        table = read_table(frame)
        if not table.rows:
            raise ValueError("The table has no rows.")
        _check_names([*(kinds or {}), *drop], table.names)
        words = tuple(word.strip().lower() for word in missing)
        columns, rows = [], some_rows(table.rows)
        compared = []
        for name in table:
            if name in drop:
                columns.append(dropped(name))
                continue
            wanted, amounts, dates = (kinds or {}).get(name), None, None
            cells = table.cells(name, words)
            if wanted not in ("binary", "category", "ordered"):  # whose levels are texts
                cells, amounts = read_amounts(cells)
                cells, dates = read_dates(cells)
                refuse_stray_words(cells)
            facts = facts_of(cells, amounts or dates)
            warn_of_markers(cells)
            warn_of_words(name, cells.words, table.rows)
            choice = choose(cells, facts) if wanted is None else asked_choice(name, facts, wanted)
            column = column_of(name, cells.dtype, facts, choice)
            columns.append(column)
            if column.used:
                compared.append(checked_cells(column, cells))
        if table.rows == 1:
            raise ValueError(
                "The table has one row, from which no kinds and scales can be read. Read the "
                "schema from all rows."
            )
        schema = (
            cls(tuple(columns), table.library, _integer_names(table), words)
            ._with_variables()
            ._checked()
        )
        warn_of_repeated(schema.used, [values[rows] for values in compared])
        warn_of_doubtful(schema.used, compared)
        return schema

    def _checked(self) -> Schema:
        if not any(column.used for column in self.columns):
            reasons = "; ".join(f"{c.name!r}: {c.reason}" for c in self.columns[:5])
            raise ValueError(f"No column of the table can be modelled ({reasons}).")
        return self

    def _with_variables(self) -> Schema:
        taken, columns = set(RESERVED), []
        for column in self.columns:
            variable = ""
            if column.dense:
                variable = "x"
            elif column.kind == "count":
                variable = COUNTS[column.likelihood]
            elif column.kind == "binary":
                variable = "flags"
            elif column.used:
                variable = re.sub(r"\W", "_", column.name)
                if not re.match("[A-Za-z_]", variable):
                    variable = f"_{variable}"
                while variable in taken:
                    variable += "_"
                taken.add(variable)
            columns.append(replace(column, variable=variable))
        return replace(self, columns=tuple(columns))

    def with_kind(self, name: str, kind: str, *, likelihood: str | None = None) -> Schema:
        """Return a schema in which a column has another kind.

        Arguments:
            name: The column.
            kind: "real", "positive", "count", "binary", "category", "ordered" or "date".
            likelihood: "Poisson" or "NegativeBinomial" for a count.
        """
        old = self[name]
        if old.dtype == "":
            raise ValueError(
                f"Column {name!r} was dropped when the schema was read. Read the schema again "
                f"without drop."
            )
        choice = asked_choice(name, old.facts, kind, likelihood)
        return self._replaced(name, column_of(name, old.dtype, old.facts, choice))

    def without(self, *names: str) -> Schema:
        """Return a schema that leaves some columns out; frames may still have them.

        Arguments:
            *names: The columns.
        """
        found = self
        for name in names:
            found = found._replaced(
                name, replace(dropped(name), dtype=self[name].dtype, facts=self[name].facts)
            )
        return found._checked()

    def rescaled(self, name: str, factor: float, offset: float = 0.0) -> Schema:
        """Return the schema of the same table with a column in another unit.

        The new cells are factor · old + offset. A fitted model stays valid with this schema: its
        log p changes by the Jacobian, ``−log |factor|`` per known cell.

        Arguments:
            name: The column, real or positive.
            factor: The factor, not 0.
            offset: The offset, 0 for a positive column.
        """
        old = self[name]
        if old.kind not in ("real", "positive"):
            raise ValueError(
                f"Column {name!r} is of kind {old.kind}; only real and positive columns have a "
                f"unit to change."
            )
        positive = old.kind == "positive"
        if not (math.isfinite(factor) and math.isfinite(offset)) or factor == 0:
            raise ValueError(f"factor is a finite number that is not 0, got {factor}.")
        if positive and (factor < 0 or offset != 0):
            raise ValueError(
                f"Column {name!r} is positive, so its unit changes by a positive factor without "
                f"an offset."
            )
        new = replace(
            old,
            location=old.location + math.log(factor)
            if positive
            else factor * old.location + offset,
            scale=old.scale if positive else factor * old.scale,
            reason=f"{old.reason}; rescaled",
            dtype=old.dtype if old.dtype == "Float32" else "Float64",
            facts=rescaled_facts(old.facts, factor, offset),
        )
        return self._replaced(name, new)

    def with_unknown_levels(self, choice: str) -> Schema:
        """Return a schema that treats levels which it does not know in another way.

        Arguments:
            choice: "error", the default, refuses a table with such a level. "missing" treats the
                cell as missing: it is marginalised out, and a warning counts such cells. ``impute``
                does not replace them.
        """
        return replace(self, unknown_levels=checked_choice(choice))

    def _replaced(self, name: str, new: Column) -> Schema:
        columns = tuple(new if column.name == name else column for column in self.columns)
        return replace(self, columns=columns)._with_variables()

    # Looking --------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all columns."""
        return tuple(column.name for column in self.columns)

    @property
    def used(self) -> tuple[Column, ...]:
        """The columns that are modelled."""
        return tuple(column for column in self.columns if column.used)

    @property
    def rows(self) -> int:
        """The number of rows of the table that the schema was read from."""
        return max(column.facts.rows for column in self.columns)

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(_unknown_name(name, self.names))

    def __contains__(self, name: object) -> bool:
        return name in self.names

    @property
    def variables(self) -> dict[str, tuple[Column, ...]]:
        """The observed variables of a model of this table, each with its columns in order."""
        found: dict[str, list[Column]] = {}
        for column in self.used:
            found.setdefault(column.variable, []).append(column)
        order = [
            *(name for name in SHARED if name in found),
            *(name for name in found if name not in SHARED),
        ]
        return {name: tuple(found[name]) for name in order}

    def variables_text(self) -> list[str]:
        """Return sentences that say which columns each variable of the model holds."""
        found = []
        for name, columns in self.variables.items():
            shown = ", ".join(column.name for column in columns[:8]) + ", …" * (len(columns) > 8)
            scaled = ", standardised" if columns[0].dense else ""
            if shown != name:
                found.append(f"{name} holds {shown}{scaled}.")
        return found

    def __str__(self) -> str:
        lines = [("column", "kind", "missing", "likelihood", "values", "reason")]
        for column in self.columns:
            values = levels_text(column.levels, 28) if column.listed else range_text(column)
            missing = str(column.missing) if column.missing else ""
            lines.append(
                (column.name, column.kind, missing, column.likelihood or "—", values, column.reason)
            )
        widths = [max(len(line[j]) for line in lines) for j in range(5)]
        widths = [min(width, most) for width, most in zip(widths, (24, 8, 9, 16, 34), strict=True)]
        told = [
            "  ".join(
                _padded(cell, width, right=j == 2)
                for j, (cell, width) in enumerate(zip(line, widths, strict=False))
            )
            + "  "
            + line[5]
            for line in lines
        ]
        used, rows = len(self.used), self.rows
        head = f"{rows:,} rows, {len(self.columns)} columns, {used} modelled"
        foot = "schema.with_kind(name, kind) changes a kind, schema.without(name) leaves one out."
        return "\n".join([head, *(line.rstrip() for line in told), foot])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from aevb.notebook import result_cards

        return result_cards.schema_card(self)

    # Cells to data and back -----------------------------------------------------------------------

    def encode(self, frame: Any) -> dict[str, np.ndarray]:
        """Return the data dictionary of ``fit`` for a frame, NaN where a cell is missing.

        ``x``, ``counts``, ``overdispersed`` and ``flags`` are [rows, columns]; a category is
        [rows], the position of the level. The data of a :class:`~aevb.data.large_tables.LargeTable`
        are encoded when they are indexed.

        Arguments:
            frame: The rows. Columns are found by name, in any order.

        Raises:
            ValueError: A column is missing or unknown, a level is unknown (see
                :meth:`with_unknown_levels`), or a cell is not allowed by its kind.
        """
        if isinstance(frame, LargeTable):
            self._check_columns(frame.names)
            return {name: self._lazy(frame, name) for name in self.variables}
        table = read_table(frame)
        warn_of_changed_constants(self.columns, table, self.missing_words, stacklevel=4)
        return self._encoded(table)

    def _lazy(self, table: LargeTable, variable: str) -> Any:
        columns = self.variables[variable]
        part = replace(self, columns=columns)
        return EncodedRows(
            table,
            [column.name for column in columns],
            lambda frame: part._encoded(read_table(frame), warn=False)[variable],
            flat=columns[0].kind in ("category", "ordered"),
        )

    def _encoded(self, table: Table, *, warn: bool = True) -> dict[str, np.ndarray]:
        raw = self._read(table, warn=warn)
        return {
            variable: (
                raw[columns[0].name]
                if columns[0].kind in ("category", "ordered")
                else np.column_stack([c.standardise(raw[c.name]) for c in columns])
            )
            for variable, columns in self.variables.items()
        }

    def log_jacobian(self, frame: Any) -> np.ndarray:
        """``log |d data / d cells|`` per row: what turns the model's log p into that of the cells.

        A missing cell contributes 0. For counts and levels, log p is a probability and needs no
        Jacobian.

        Arguments:
            frame: The rows.

        Returns:
            One number per row.
        """
        table = read_table(frame)
        raw = self._read(table, warn=False)
        return sum(
            (column.log_jacobian(raw[column.name]) for column in self.used), np.zeros(table.rows)
        )

    def missing_cells(self, frame: Any, *, unknown_levels: bool = True) -> dict[str, np.ndarray]:
        """Find which cells of the modelled columns are missing.

        Arguments:
            frame: The rows.
            unknown_levels: Whether to include cells that are treated as missing because the schema
                does not know their level.

        Returns:
            A mask of the rows, by column.
        """
        raw = self._read(read_table(frame), warn=False, keep_unknown=not unknown_levels)
        return {name: np.isnan(values) for name, values in raw.items()}

    def cells(self, frame: Any) -> dict[str, np.ndarray]:
        """Return the cells of the modelled columns as float64, by column.

        A missing cell is NaN. A level is its position among the levels.

        Arguments:
            frame: The rows.
        """
        return self._read(read_table(frame), warn=False)

    def decode(self, data: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the cells of a data dictionary, by column, in the units of the table.

        Levels come back as levels, dates as days since 1970-01-01, counts as whole numbers; NaN
        (None for levels) marks a missing cell.

        Arguments:
            data: Values by variable, as :meth:`encode` returns them or a model draws them. One-hot
                rows are accepted for categories.
        """
        found: dict[str, np.ndarray] = {}
        for variable, columns in self.variables.items():
            value = np.asarray(data[variable], dtype=float)
            for j, column in enumerate(columns):
                if column.kind in ("category", "ordered"):
                    if value.ndim == 2:
                        value = np.where(np.isnan(value).any(1), np.nan, value.argmax(1))
                    found[column.name] = levels_at(column, value)
                elif column.kind == "binary":
                    found[column.name] = levels_at(column, value[:, j])
                else:
                    found[column.name] = column.restore(value[:, j])
        return {column.name: found[column.name] for column in self.used}

    def _check_columns(self, names: Sequence[str]) -> None:
        """Refuse a table that lacks a modelled column, or has an unknown one."""
        absent = [column.name for column in self.used if column.name not in names]
        if absent:
            new = [name for name in names if name not in self.names]
            near = {name: nearest(name, new) for name in absent}
            renamed = "".join(
                f" Rename {other!r} to {name!r}." for name, other in near.items() if other
            )
            raise ValueError(
                f"The table lacks {_columns(absent)}. Its columns are "
                f"{_listed(names)}.{renamed} Add {'it' if len(absent) == 1 else 'them'} (a column "
                f"of missing cells is marginalised out), or fit a schema without "
                f"{'it' if len(absent) == 1 else 'them'}: schema.without({absent[0]!r})."
            )
        extra = [name for name in names if name not in self.names]
        if extra:
            raise ValueError(
                f"The table has {_columns(extra)}, which the schema does not know. Its columns "
                f"are {_listed(self.names)}. Drop {'it' if len(extra) == 1 else 'them'} from the "
                f"table, or read the schema from a table that has "
                f"{'it' if len(extra) == 1 else 'them'} (drop=[…] leaves a column out)."
            )

    def _read(
        self, table: Table, *, warn: bool = True, keep_unknown: bool = False
    ) -> dict[str, np.ndarray]:
        """The cells of every modelled column as float64: numbers, days, or positions of levels.

        A level that is treated as missing is NaN, or UNKNOWN with ``keep_unknown``.
        """
        if not table.rows:
            raise ValueError("The table has no rows.")
        self._check_columns(table.names)
        found, told = {}, []
        for column in self.used:
            cells = table.cells(column.name, self.missing_words, column.levels, column.facts.form)
            values = found[column.name] = checked_cells(column, cells)
            if column.listed and (unknown := values == UNKNOWN).any():
                if self.unknown_levels == "error":
                    raise unknown_levels_error(column, cells, unknown)
                told.append(describe_unknown_levels(column, cells, unknown))
                if not keep_unknown:
                    values[unknown] = np.nan
            if warn:
                warn_of_unit(column, values, cells.dtype)
        if warn:
            warn_of_unknown_levels(told)
        return found

    # JSON -----------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the schema as JSON text."""
        record = {
            "format": FORMAT,
            "version": 1,
            "library": self.library,
            "integer names": self.integer_names,
            "missing words": list(self.missing_words),
            "unknown levels": self.unknown_levels,
            "columns": [asdict(column) for column in self.columns],
        }
        return json.dumps(record, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """Read a schema from JSON text.

        Arguments:
            text: The text of :meth:`to_json`.

        Returns:
            The schema.
        """
        try:
            record = json.loads(text)
            if record["format"] != FORMAT:
                raise ValueError(f"its format is {record['format']!r}")
            if record["version"] != 1:
                raise ValueError(f"its version is {record['version']}; update aevb")
            columns = tuple(column_from(one) for one in record["columns"])
            return cls(
                columns,
                str(record["library"]),
                bool(record["integer names"]),
                tuple(map(str, record["missing words"])),
                checked_choice(record.get("unknown levels", "error")),  # older files lack it
            )._checked()
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"This is no schema of a table: {error}.") from None

    # Models ---------------------------------------------------------------------------------------

    def mixture(self, clusters: int, *, covariance: str = "diagonal") -> Model:
        """Declare a mixture: a cluster, and all columns given the cluster.

        The posterior and log p are exact.

        Arguments:
            clusters: The number of clusters.
            covariance: "diagonal": columns are independent within a cluster. "full" gives the
                columns of ``x`` a full covariance.

        Returns:
            The model.
        """
        from aevb.tables import declarations

        return declarations.mixture(self.specs, clusters, covariance=covariance)

    def factors(self, factors: int) -> Model:
        """Declare factor analysis: columns are linear in Gaussian factors, plus noise.

        If all columns are real, positive or dates, the posterior and log p are exact. Otherwise
        counts and levels read the factors through their link functions, and a network approximates
        the posterior.

        Arguments:
            factors: The number of factors.

        Returns:
            The model.
        """
        from aevb.tables import declarations

        return declarations.factors(self.specs, factors)

    def vae(self, codes: int, *, hidden: Sequence[int] = (64, 64)) -> Model:
        """Declare a variational auto-encoder.

        Arguments:
            codes: The number of Gaussian codes.
            hidden: The sizes of the hidden layers of encoder and decoder.

        Returns:
            The model.
        """
        from aevb.tables import declarations

        return declarations.vae(self.specs, codes, hidden=tuple(hidden))

    def gmvae(self, clusters: int, codes: int, *, hidden: Sequence[int] = (64, 64)) -> Model:
        """Declare a VAE whose prior of the codes is a mixture of Gaussians.

        Arguments:
            clusters: The number of Gaussians.
            codes: The number of codes.
            hidden: The sizes of the hidden layers of the networks.

        Returns:
            The model.
        """
        from aevb.tables import declarations

        return declarations.gmvae(self.specs, clusters, codes, hidden=tuple(hidden))

    @property
    def specs(self) -> dict[str, tuple[str, int]]:
        """The family and the size of every observed variable."""
        found = {}
        for variable, columns in self.variables.items():
            if columns[0].kind in ("category", "ordered"):
                found[variable] = ("OneHot", len(columns[0].levels))
            else:
                family = "Normal" if variable == "x" else columns[0].likelihood
                found[variable] = (family, len(columns))
        return found

    def fit_default(self, frame: Any, *, seed: int = 0) -> TableModel:
        """Fit a density that needs no choice, for filling cells, scoring rows and drawing new ones.

        It is a mixture: several fits with different numbers of clusters, each with full covariances
        that are pulled towards the whole table, joined into one. The parts of a density have no
        meaning of their own; :meth:`fit_clusters` finds groups of rows.

        Arguments:
            frame: The rows.
            seed: Decides the starts of the fits.

        Returns:
            The fitted :class:`TableModel`.

        >>> random = np.random.default_rng(0)
        >>> frame = {"height": random.normal(170, 9, 60), "mass": random.normal(70, 8, 60)}
        >>> Schema.read(frame).fit_default(frame).score(frame)["log_p"].shape
        (60,)
        """
        from aevb.tables.choosing import fit_default

        return fit_default(self, frame, seed=seed)

    def fit_clusters(self, frame: Any, *, seed: int = 0, **settings: Any) -> TableModel:
        """Fit a mixture whose number of clusters and covariance BIC chooses.

        Mixtures of 1, 2, 3, … clusters are compared, with independent columns and with full
        covariances, until more clusters do not help.

        Arguments:
            frame: The rows.
            seed: Decides the starts of the fits.
            **settings: Those of :meth:`fit`.

        Returns:
            The fitted :class:`TableModel`.

        >>> random = np.random.default_rng(0)
        >>> frame = {"height": random.normal(170, 5, 60) + 40 * (np.arange(60) % 2)}
        >>> Schema.read(frame).fit_clusters(frame, starts=1, steps=20).model.graph.size("cluster")
        2
        """
        from aevb.tables.selection import fit_clusters

        return fit_clusters(self, frame, seed=seed, **settings)

    def fit(self, model: Model, frame: Any, **settings: Any) -> TableModel:
        """Fit a model to a frame, and return it with its schema.

        A mixture is fitted by exact EM from several starts, and exact factor analysis by exact EM;
        other models by gradient steps. Models with networks read all rows of a
        :class:`~aevb.data.large_tables.LargeTable`, batch by batch; other models are fitted to its
        random rows. The history of the run is in units of the standardised data;
        :meth:`TableModel.score` is a density of the original columns.

        Arguments:
            model: A model of this table, such as ``schema.mixture(3)``.
            frame: The rows.
            **settings: Those of :func:`aevb.fit`, which override these choices; ``validation`` is a
                frame. ``starts`` is the number of starts of a mixture. ``hide`` is for models with
                networks: it adds a copy of the rows with this share of the cells removed at random.
                The model can then read rows with missing cells although its own table has none.

        Returns:
            The fitted :class:`TableModel`.

        >>> random = np.random.default_rng(0)
        >>> frame = {"height": random.normal(170, 5, 60) + 40 * (np.arange(60) % 2)}
        >>> schema = Schema.read(frame)
        >>> fitted = schema.fit(schema.mixture(2), frame, seed=0, progress=False)
        >>> np.bincount(fitted.clusters(frame)["cluster"]).tolist()
        [30, 30]
        """
        from aevb.tables.fitted import fit_table

        return fit_table(self, model, frame, **settings)


def _integer_names(table: Table) -> bool:
    return table.library == "pandas" and all(
        isinstance(name, int | np.integer) for name in table.native.columns
    )


# Words --------------------------------------------------------------------------------------------


def _check_names(asked_for: Sequence[str], names: Sequence[str]) -> None:
    for name in asked_for:
        if name not in names:
            raise ValueError(_unknown_name(name, names))


def _unknown_name(name: str, names: Sequence[str]) -> str:
    near = did_you_mean(name, names)
    return f"There is no column {name!r}. The columns are {_listed(names)}.{near}"


def _listed(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return shown + (f", … ({len(names)} in all)" if len(names) > most else "")


def _columns(names: Sequence[str]) -> str:
    return f"column{'s' * (len(names) > 1)} {_listed(names, 5)}"


def _padded(text: str, width: int, *, right: bool = False) -> str:
    text = text if len(text) <= width else text[: width - 1] + "…"
    return text.rjust(width) if right else text.ljust(width)
