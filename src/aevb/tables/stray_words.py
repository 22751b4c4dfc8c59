"""Refuse text columns of numbers or dates with a few words among them, such as "k.A."."""

from __future__ import annotations

import shlex
from collections import Counter

from aevb.tables.amounts import is_amount, is_code, is_number
from aevb.tables.date_texts import is_date_like
from aevb.tables.reading import Cells

LEAST = 20  # known cells of a column that is checked
SHARE = 0.8  # of its known cells are numbers or dates
MOST = 3  # different words among them


def refuse_stray_words(cells: Cells) -> None:
    """Raise ValueError if few words turn a column of numbers, amounts or dates into text.

    The words may mark missing cells. As levels, they would make every number a level.
    """
    texts = cells.values[~cells.missing].tolist() if cells.type == "text" else []
    if len(texts) < LEAST:
        return
    times, words = Counter(texts), []
    found: Counter[str] = Counter()
    for text, count in times.items():
        what = _what(text)
        if what == "numbers" and is_code(text):
            return
        if what is None:
            words.append(text)
            if len(words) > MOST or any(character.isdigit() for character in text):
                return  # levels, such as "0", "1", "2" and "3+"
        else:
            found[what] += count
    dates = found.pop("dates", 0)
    most = max(dates, found.total())
    if not words or (dates and found) or most < SHARE * len(texts):
        return
    what = "dates" if dates else "amounts" if found["amounts"] else "numbers"
    one, name = len(words) == 1, cells.name
    marks = [
        f"--missing={w}" if w.startswith("-") else f"--missing {shlex.quote(w)}" for w in words
    ]
    raise ValueError(
        f"Column {name!r} is text because of {'one word' if one else f'{len(words)} words'}: "
        f"{most} of {len(texts)} cells are {what}, and the other{'s' * (most < len(texts) - 1)} "
        f"{'holds' if most == len(texts) - 1 else 'hold'} {', '.join(map(repr, words))}. If "
        f"{'it marks' if one else 'they mark'} missing cells, declare {'it' if one else 'them'}: "
        f"Schema.read(frame, missing={['', 'NA', *words]}) (aevb train: {' '.join(marks)}). "
        f'Otherwise read the column with kinds={{{name!r}: "category"}} (aevb train: --kind '
        f"{shlex.quote(f'{name}=category')})."
    )


def _what(text: str) -> str | None:
    """What a text is; None if it is a word."""
    if is_number(text):
        return "numbers"
    if is_amount(text):
        return "amounts"
    return "dates" if is_date_like(text) else None
