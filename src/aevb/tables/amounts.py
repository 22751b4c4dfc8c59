"""Amounts: numbers written as text, with a currency or percent sign or thousands separators."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from aevb.data.frames import UNIT
from aevb.tables.reading import Cells

MINUS = "[+\u2212-]"
CELL = re.compile(
    rf"(?P<open>\()?(?P<outer>{MINUS})?(?P<before>{UNIT}\s?)?(?P<inner>{MINUS})?"
    rf"(?P<digits>[.,]?[0-9][0-9.,]*)(?P<after>\s?{UNIT})?(?P<close>\))?"
)
# Digits by their decimal sign; the other sign separates groups of three. 00123 is a code.
DIGITS = {
    decimal: re.compile(
        rf"(0|[1-9][0-9]*|[1-9][0-9]{{0,2}}([{group}][0-9]{{3}})+)?([{decimal}][0-9]+)?"
    )
    for decimal, group in ((".", ","), (",", "."))
}
OTHER = {".": ",", ",": "."}
MANY = 20  # different numbers as text are levels up to here
GROUPS = 3  # most groups after the first digits of a number without a unit


@dataclass(frozen=True)
class Amounts:
    """How a column writes its amounts.

    ``positive`` and ``negative`` have "{}" for the digits, such as "${}" and "-${}". ``decimal`` is
    "." or ","; it is "" if no cell has either. ``grouped`` says whether thousands are separated,
    and ``decimals`` is the largest number of digits after the decimal sign.

    >>> found = amounts_of("price", ["$1,234.50", "$7", "($80.00)"])
    >>> found.number("$2,000"), found.text(-1234.567), found.text(80)
    (2000.0, '($1,234.57)', '$80.00')
    """

    example: str
    positive: str
    negative: str
    decimal: str
    grouped: bool
    decimals: int

    @property
    def unit(self) -> str:
        """The currency or percent sign; "" without one."""
        return self.positive.replace("{}", "").strip()

    def number(self, text: str) -> float | None:
        """The number of a text; None if it is no amount of this unit and form."""
        cell, decimal = _parts(text), self.decimal or "."
        if cell is None or _unit(cell) != self.unit:
            return None
        if not DIGITS[decimal].fullmatch(cell["digits"]):
            return None
        number = float(cell["digits"].replace(OTHER[decimal], "").replace(decimal, "."))
        return -number if _minus(cell) else number

    def text(self, number: float) -> str:
        """A number as an amount, rounded to the decimals of the column."""
        digits = f"{abs(number):{',' if self.grouped else ''}.{self.decimals}f}"
        below = number < 0 and float(digits.replace(",", "")) > 0
        if self.decimal == ",":
            digits = digits.translate(str.maketrans(",.", ".,"))
        return (self.negative if below else self.positive).replace("{}", digits)

    def described(self) -> str:
        """The form in words, for the reason of a schema."""
        plain = not (self.unit or self.grouped or self.decimal == ",")
        found = f"{'numbers as text' if plain else 'amounts'} such as {self.example!r}"
        if self.unit == "%":
            found += ", in percent"
        if self.decimal == "," and self.decimals:
            found += ", with a decimal comma"
        elif self.grouped and not self.decimals:
            found += f", {OTHER[self.decimal]!r} separates thousands"
        return found


def _parts(text: Any) -> re.Match[str] | None:
    """The parts of an amount; None if the text is none."""
    cell = CELL.fullmatch(text.strip()) if isinstance(text, str) else None
    if cell is None or (cell["open"] is None) != (cell["close"] is None):
        return None
    signs = [cell[part] for part in ("open", "outer", "inner") if cell[part]]
    if len(signs) > 1 or (cell["before"] and cell["after"]):
        return None
    return cell if any(style.fullmatch(cell["digits"]) for style in DIGITS.values()) else None


def _unit(cell: re.Match[str]) -> str:
    return (cell["before"] or cell["after"] or "").strip()


def _minus(cell: re.Match[str]) -> str:
    """What marks a negative amount; "" if it is positive."""
    return cell["open"] or (cell["outer"] or cell["inner"] or "").replace("+", "")


def is_code(text: str) -> bool:
    """Whether a text is a number with a leading zero (00123)."""
    return re.match(r"[+-]?0\d", text.strip()) is not None


def is_number(text: str) -> bool:
    """Whether a text is a plain number or one with separators: 1.5, 1e3, 2,5, 1,234."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return (cell := _parts(text)) is not None and not _unit(cell)


def is_amount(text: str) -> bool:
    return _parts(text) is not None


def _all_parts(texts: Iterable[str], *, plain: bool = False) -> dict[str, re.Match[str]]:
    """The parts of each text; empty if one is no amount.

    Empty, too, if all are plain numbers, unless ``plain``.
    """
    found: dict[str, re.Match[str]] = {}
    for text in texts:
        if text in found:
            continue
        if (cell := _parts(text)) is None:
            return {}
        found[text] = cell
    return found if plain or _signed(found) else {}


def _signed(found: Mapping[str, re.Match[str]]) -> bool:
    """Whether some amount has a unit, or signs that no plain number has."""
    return any(_unit(cell) or re.search(r",|\..*\.", cell["digits"]) for cell in found.values())


def amounts_of(
    name: str, texts: Iterable[str] | Mapping[str, int], *, plain: bool = False
) -> Amounts | None:
    """How a column writes its amounts; None if its texts are not all amounts in one unit.

    ``texts`` are its cells, or how often each text occurs. Raise ValueError if their point may
    separate thousands or decimals. A comma before exactly three digits, in all cells that have one,
    separates thousands. Texts without a unit are amounts if their separators are certain. With
    ``plain``, a column of plain numbers is one of amounts without a unit.
    """
    times = Counter(texts)
    found = _all_parts(times, plain=plain)
    if len({_unit(cell) for cell in found.values()}) != 1:
        return None
    digits = {cell["digits"] for cell in found.values()}
    fits = [d for d, style in DIGITS.items() if all(map(style.fullmatch, digits))]
    points = [text for text, cell in found.items() if "." in cell["digits"]]
    if len(fits) == 2 and points and _signed(found):
        raise ValueError(
            f"Column {name!r} holds amounts such as {points[0]!r}, whose point may separate "
            f"thousands or decimals. Convert them to numbers, or read the schema with "
            f'drop=[{name!r}] or kinds={{{name!r}: "category"}} (aevb train: --kind '
            f"{name}=category)."
        )
    if not fits:
        return None
    decimal = fits[0] if any(sign in one for one in digits for sign in OTHER) else ""
    if _signed(found) and not any(map(_unit, found.values())):
        cells: Counter[str] = Counter()
        for text, cell in found.items():
            cells[cell["digits"]] += times[text]
        if not _are_certain(cells, decimal):
            return None
    example = max(found, key=len)
    before, after = (found[example][part] or "" for part in ("before", "after"))
    below = next((cell for cell in found.values() if _minus(cell)), None)
    minus = "-" if below is None else _minus(below)
    if minus == "(":
        negative = f"({before}{{}}{after})"
    elif below is not None and below["inner"]:
        negative = f"{before}{minus}{{}}{after}"
    else:
        negative = f"{minus}{before}{{}}{after}"
    return Amounts(
        example.strip(),
        f"{before}{{}}{after}",
        negative,
        decimal,
        grouped=bool(decimal) and any(OTHER[decimal] in one for one in digits),
        decimals=max(len(one.partition(decimal)[2]) for one in digits) if decimal else 0,
    )


def _are_certain(times: Counter[str], decimal: str) -> bool:
    """Whether digits without a unit, and how often each occurs, are numbers with separators.

    Answers such as 1,4 and 2,5 (several of a list), IP addresses and versions are none.
    """
    group = OTHER[decimal]
    split = [one.partition(decimal) for one in times]  # whole part, sign, decimals
    groups = max(whole.count(group) for whole, _, _ in split)
    if groups > GROUPS:
        return False
    if decimal == ".":
        return any(
            whole.count(group) > 1 or (group in whole and sign) for whole, sign, _ in split
        ) or all(group in whole or len(whole) <= 3 for whole, _, _ in split)
    if groups:
        return any(sign for _, sign, _ in split)
    commas = sum(count for one, count in times.items() if decimal in one)
    return 2 * commas > times.total() and any(
        sign and (len(whole) != 1 or len(rest) != 1) for whole, sign, rest in split
    )


def form_of(text: str) -> str | None:
    """The form of an amount: texts of one form differ in digits alone; None if it is no amount.

    The texts of a column are amounts, in one unit, exactly if one text of each form is.
    """
    cell = _parts(text)
    if cell is None:
        return None
    start, end = cell.span("digits")
    bare = text.strip()
    digits = re.sub("[1-9]", "1", bare[start]) + re.sub("[0-9]", "1", bare[start + 1 : end])
    return bare[:start] + digits + bare[end:]  # with a first 0, because 00123 is a code


def mixed_units(texts: Iterable[str]) -> str:
    """Say that amounts have different signs; "" if they have not."""
    examples: dict[str, str] = {}
    for text, cell in _all_parts(texts).items():
        examples.setdefault(_unit(cell), text)
    if len(examples) < 2:
        return ""
    what = "with and without a sign" if "" in examples else "with different signs"
    first = " and ".join(map(repr, list(examples.values())[:2]))
    return f"amounts {what} ({first}), which have no common unit"


def read_amounts(cells: Cells) -> tuple[Cells, Amounts | None]:
    """A text column of different amounts as numbers, and their form; else the column, and None.

    Many plain numbers are amounts if words that mark missing cells made them text.
    """
    if cells.type != "text":
        return cells, None
    texts = cells.values[~cells.missing].tolist()
    plain = any(word.strip() for word in cells.words) and len(set(texts)) > MANY
    amounts = amounts_of(cells.name, texts, plain=plain)
    if amounts is None:
        return cells, None
    found = with_amounts(cells, amounts)
    if len(np.unique(found.values[~found.missing])) < 2:
        return cells, None
    return found, amounts


def with_amounts(cells: Cells, amounts: Amounts) -> Cells:
    """The same column, with numbers for its texts. A column of numbers is returned as it is.

    Raise ValueError for a text that is no amount in the unit and the form of ``amounts``.
    """
    if cells.type != "text":
        return cells
    texts = dict.fromkeys(cells.values[~cells.missing].tolist())
    form = amounts
    if not amounts.decimal and (here := amounts_of(cells.name, texts)) is not None:
        form = replace(amounts, decimal=here.decimal)
    numbers = {text: form.number(text) for text in texts}
    wrong = next((text for text, number in numbers.items() if number is None), None)
    if wrong is not None:
        row = int(np.flatnonzero((cells.values == wrong) & ~cells.missing)[0])
        raise ValueError(
            f"Column {cells.name!r} had amounts such as {amounts.example!r} when the schema was "
            f"read, and now holds {wrong!r} in row {row}. Write all its amounts in the same unit "
            f"and form, or make the cell missing. A frame and a Parquet file may have a column of "
            f"numbers instead."
        )
    values = np.full(len(cells.values), np.nan)
    values[~cells.missing] = [numbers[text] for text in cells.values[~cells.missing].tolist()]
    return replace(cells, type="number", values=values)
