"""Read a text table or Parquet as a frame: columns of numbers, words, dates and missing cells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aevb.data.arrow_text import normalised, null_words, parse_options, stream
from aevb.data.text_tables import (
    MISSING,
    MISSING_TEXT,
    Layout,
    check_lines,
    check_quotes,
    opened,
    read_layout,
)

_PLAIN = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_LEADING_ZERO = r"^[+-]?0\d"
_COMMA = r"^[+-]?\d+,\d+([eE][+-]?\d+)?$"
_TEXT = (".csv", ".tsv", ".txt")
SCANNED = 2**17  # bytes at a time, which fit into the cache of a processor
UNIT = "[%$¢£¤¥฿\u20a0-\u20cf]"  # percent, and the signs of currencies
_MINUS, _SPACE = "[+\u2212-]?", "[ \u00a0\u202f]?"
_BEFORE, _AFTER = rf"^\(?{_MINUS}({UNIT}{_SPACE})?{_MINUS}", rf"({_SPACE}{UNIT})?\)?$"
_AMOUNT = rf"{_BEFORE}[\d.,]*\d{_AFTER}"
_DATE = r"^\d{1,2}[./]\d{1,2}[./]\d{4}([ T]\d{1,2}:\d\d(:\d\d)?)?$"
_ONE_COMMA = rf"{_BEFORE}([1-9]\d{{0,2}},\d{{3}}|\d+){_AFTER}"  # of thousands or decimals


def read_frame(path: str | Path, *, missing: Sequence[str] = ()) -> Any:
    r"""Read a table whole, as a ``pyarrow.Table`` with the types of its columns.

    The separator, the encoding, the header and decimal commas of a text table are found as for a
    table of numbers. Its columns hold integers, numbers, truth values, ISO dates or times, or
    words; a cell that is empty or holds one of ``NA``, ``N/A``, ``n/a``, ``NaN``, ``nan`` is
    missing (null). ``null``, ``None`` and ``?`` are missing too, except in columns of words, where
    they may be levels. Amounts such as ``$1,234.50`` and ``12 %``, and dates such as
    ``01.03.2024``, stay words. Whole numbers are words if some have leading zeros (00123). Blanks
    around words are removed. The metadata of a column of words count its cells that a word made
    missing: ``missing words`` is JSON such as ``{"NA": 2}``. Without a header the columns are named
    1, 2, ….

    Arguments:
        path: A text table (.csv, .tsv, .txt), a Parquet file, or a folder of Parquet files.
        missing: Further texts that mark missing cells of a text table, as it writes them, except in
            columns of words.

    Returns:
        The ``pyarrow.Table``.

    Raises:
        ValueError: The table cannot be read. The message names the file, and the line where there
            is one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "plants.csv"
    ...     _ = path.write_text("kind,height\npea,12.5\nbean,\n")
    ...     read_frame(path).to_pydict()
    {'kind': ['pea', 'bean'], 'height': [12.5, None]}
    """
    path = Path(path)
    try:
        if path.suffix in _TEXT:
            return _read_text(path, missing)
        if path.suffix == ".parquet" or path.is_dir():
            return _read_parquet(path)
        raise ValueError(
            f"files of kind {path.suffix or 'no suffix'} are not known; use .csv, .tsv, .txt or "
            f".parquet"
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).rstrip('.')}.") from None


def read_columns(path: Path, names: Sequence[str]) -> Any:
    """Read some columns of a table as :func:`read_frame` does."""
    return _read_text(path, (), names) if path.suffix in _TEXT else _read_parquet(path, names)


def _read_parquet(path: Path, only: Sequence[str] | None = None) -> Any:
    import pyarrow as pa  # type: ignore[import-untyped]

    from aevb.data.parquet import open_dataset
    from aevb.data.text_tables import distinct

    found = open_dataset(path)
    distinct(found.schema.names)
    try:
        return found.to_table(columns=None if only is None else list(only))
    except pa.ArrowException as error:
        raise ValueError(str(error).splitlines()[0]) from None


def _read_text(path: Path, missing: Sequence[str], only: Sequence[str] | None = None) -> Any:
    import pyarrow as pa
    from pyarrow import csv

    layout = read_layout(path)
    quoted = check_quotes(path)
    names = list(layout.names or (str(j + 1) for j in range(layout.width)))
    parsing = parse_options(layout, quoted=quoted, blank_rows=layout.width == 1)
    read_options = csv.ReadOptions(
        column_names=names,
        skip_rows=layout.header,
        block_size=2**22 if layout.width < 1000 else 2**25,
    )
    try:
        with _source(path, layout) as source:
            found = csv.read_csv(
                source,
                read_options=read_options,
                parse_options=parsing,
                convert_options=csv.ConvertOptions(
                    null_values=null_words(missing),
                    strings_can_be_null=False,
                    include_columns=None if only is None else list(only),
                ),
            )
        whole = [name for name, kind in _fields(found) if pa.types.is_integer(kind)]
        if whole and _may_have_codes(path, layout):
            with _source(path, layout) as source:
                written = csv.read_csv(
                    source,
                    read_options=read_options,
                    parse_options=parsing,
                    convert_options=csv.ConvertOptions(
                        include_columns=whole, column_types=dict.fromkeys(whole, pa.string())
                    ),
                )
            found = _codes(found, _trimmed(written))
    except (pa.ArrowException, UnicodeDecodeError) as error:
        check_lines(path)
        raise ValueError(str(error).splitlines()[0]) from None
    if any(pa.types.is_binary(kind) for kind in found.schema.types):
        check_lines(path)
        raise ValueError("it holds bytes that are not text")
    if layout.width == 1:
        found = found.slice(0, found.num_rows - _blank_end(path))
    if not found.num_rows:
        raise ValueError("it has a header but no rows" if layout.names else "it is empty")
    return _without_words(_numbers_with_commas(_trimmed(found), layout, missing))


def _source(path: Path, layout: Layout) -> Any:
    """Open the file for pyarrow, which reads UTF-8 with one separator between two cells."""
    import pyarrow as pa

    with opened(path) as text:
        if text.encoding != "utf-16" and layout.separator is not None:
            return pa.OSFile(str(path))
        content = text.read().encode()
    return stream(normalised(content) if layout.separator is None else content)


def _blank_end(path: Path) -> int:
    """Return the number of blank lines at the end."""
    count = 0
    with opened(path) as text:
        for line in text:
            count = 0 if line.strip() else count + 1
    return count


def _trimmed(found: Any) -> Any:
    """Remove blanks around words."""
    import pyarrow as pa
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    for j, (name, kind) in enumerate(_fields(found)):
        if pa.types.is_string(kind):
            found = found.set_column(j, name, pc.utf8_trim_whitespace(found.column(j)))
    return found


def _may_have_codes(path: Path, layout: Layout) -> bool:
    """Whether a cell may be a whole number with leading zeros: a zero at its start, then a digit.

    A scan of the bytes, which is faster than parsing the whole numbers as words.
    """
    with opened(path) as text:
        if text.encoding == "utf-16" or layout.separator is None:
            return True
    # A cell begins after one of these; 0xBF ends a byte order mark.
    starts = np.zeros(256, dtype=bool)
    starts[list(b'\r\n" \xbf' + layout.separator.encode())] = True
    with path.open("rb") as file:
        end = b"\n\n"
        while block := file.read(SCANNED):
            cells = np.frombuffer(end + block, np.uint8)
            end = (end + block)[-3:]
            before = cells[1:-2]
            pair = (cells[2:-1] == ord("0")) & (cells[3:] - ord("0") < 10)  # below "0" it wraps
            if (pair & starts[before]).any():
                return True
            signed = np.flatnonzero(pair & ((before == ord("-")) | (before == ord("+"))))
            if starts[cells[signed]].any():
                return True
    return False


def _codes(found: Any, written: Any) -> Any:
    """Keep whole numbers with leading zeros (00123) as they are written: they are codes."""
    import pyarrow.compute as pc

    for name in written.column_names:
        zeros = pc.match_substring_regex(written[name], _LEADING_ZERO)
        if pc.any(zeros).as_py():
            position = found.column_names.index(name)
            found = found.set_column(position, name, written[name])
    return found


def _without_words(found: Any) -> Any:
    """Make cells of words that mark a missing cell missing, and count them in the metadata."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for j, (name, kind) in enumerate(_fields(found)):
        if not pa.types.is_string(kind):
            continue
        column = found.column(j)
        words = column.unique()
        known = words.filter(pc.invert(pc.is_in(words, value_set=pa.array(MISSING))))
        numeric = any(
            pc.all(pc.match_substring_regex(known, form)).as_py()
            for form in (_PLAIN, _AMOUNT, _DATE)
        )
        marks = MISSING if numeric else MISSING_TEXT
        if pc.any(pc.is_in(words, value_set=pa.array(marks))).as_py():
            column = _null(column, marks)
        gone = found.column(j).filter(pc.is_null(column))
        times = {one["values"]: one["counts"] for one in gone.value_counts().to_pylist()}
        times.pop("", None)
        metadata = {"missing words": json.dumps(times)} if times else None
        found = found.set_column(j, pa.field(name, kind, metadata=metadata), column)
    return found


def _null(words: Any, missing: Sequence[str]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.if_else(pc.is_in(words, value_set=pa.array(missing)), None, words)


def _numbers_with_commas(found: Any, layout: Layout, missing: Sequence[str]) -> Any:
    """Convert columns of decimal commas to numbers, if the cells are separated by semicolons.

    A table with both 2,5 and 1.5 is refused, because one sign may separate thousands. A column of
    amounts such as € 1,234 is refused, because its comma may separate thousands or decimals.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not layout.decimal:
        return found
    points = [name for name, kind in _fields(found) if pa.types.is_floating(kind)]
    commas = []
    for j, (name, kind) in enumerate(_fields(found)):
        if not pa.types.is_string(kind):
            continue
        column = _null(found.column(j), (*MISSING, *missing))
        comma = pc.match_substring_regex(column, _COMMA)
        plain = pc.match_substring_regex(column, _PLAIN)
        if pc.any(comma).as_py() and pc.all(pc.or_(comma, plain)).as_py():
            dots = pc.match_substring(column, ".")
            points += [name] if pc.any(dots).as_py() else []
            commas.append(name)
            numbers = pc.cast(pc.replace_substring(column, ",", "."), pa.float64())
            found = found.set_column(j, name, numbers)
        elif pc.all(pc.match_substring_regex(column, _ONE_COMMA)).as_py():
            shown = column.filter(pc.match_substring(column, ","))
            if len(shown):
                raise ValueError(
                    f"column {name!r} holds amounts such as {shown[0].as_py()!r}, whose comma may "
                    f"separate thousands or decimals, because semicolons separate the cells. "
                    f"Remove thousands separators, or write decimals as in 1234,50"
                )
    if commas and points:
        raise ValueError(
            f"it has decimal commas (column {commas[0]!r}) and points (column {points[0]!r}). Use "
            f"one decimal sign and no thousands separators"
        )
    return found


def _fields(found: Any) -> list[tuple[str, Any]]:
    return [(field.name, field.type) for field in found.schema]
