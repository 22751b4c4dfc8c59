"""Grids of model arguments: ``components=2..12``, ``latent=2,4,8``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

MOST = 10_000  # runs of a sweep
RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
EXAMPLE = "--set components=2..12 or --set latent=2,4,8"


def parse_grid(items: Iterable[str]) -> dict[str, list[str]]:
    """Return the values of every argument, as text, from items such as ``latent=2,4,8``.

    ``a..b`` are the whole numbers from a to b, both included. Commas separate values, except inside
    brackets: ``hidden=[64],[64,64]`` has two values.

    >>> parse_grid(["components=2..4", "latent=2,8", "hidden=[64],[64,64]"])
    {'components': ['2', '3', '4'], 'latent': ['2', '8'], 'hidden': ['[64]', '[64,64]']}
    """
    grid: dict[str, list[str]] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not name:
            raise ValueError(f"--set takes NAME=VALUES, e.g. {EXAMPLE}; got {item!r}.")
        if name in grid:
            raise ValueError(
                f"--set {name} is given twice. Give all its values at once: {EXAMPLE}."
            )
        values = [value for part in _split(text) for value in _expanded(item, part.strip())]
        if twice := sorted({value for value in values if values.count(value) > 1}):
            raise ValueError(f"--set {item}: {twice[0]} is there twice.")
        grid[name] = values
    if (runs := _count(grid)) > MOST:
        raise ValueError(
            f"The grid has {runs:,} combinations, more than {MOST:,}. Make it smaller."
        )
    return grid


def _split(text: str) -> list[str]:
    """Split at commas that are not inside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _expanded(item: str, part: str) -> list[str]:
    if not part:
        raise ValueError(f"--set {item}: a value is empty. Write e.g. {EXAMPLE}.")
    found = RANGE.fullmatch(part)
    if found is None:
        if ".." in part:
            raise ValueError(
                f"--set {item}: a..b is a range of whole numbers, such as 2..12; got {part!r}."
            )
        return [part]
    low, high = int(found[1]), int(found[2])
    if high < low:
        raise ValueError(f"--set {item}: the range {part} is empty. Did you mean {high}..{low}?")
    if high - low >= MOST:
        raise ValueError(f"--set {item}: the range {part} has more than {MOST:,} values.")
    return [str(value) for value in range(low, high + 1)]


def _count(grid: Mapping[str, Sequence[str]]) -> int:
    runs = 1
    for values in grid.values():
        runs *= len(values)
    return runs


def combinations(grid: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return every combination of the values, the last argument varying fastest.

    >>> combinations({"a": ["1", "2"], "b": ["x"]})
    [{'a': '1', 'b': 'x'}, {'a': '2', 'b': 'x'}]
    """
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def label(arguments: Mapping[str, str]) -> str:
    """Return a combination as text, e.g. "components=2 latent=4"."""
    return " ".join(f"{name}={value}" for name, value in arguments.items()) or "model"


def folder_name(arguments: Mapping[str, str]) -> str:
    """Return the name of a combination's folder; different combinations have different names.

    >>> folder_name({"components": "2", "latent": "4"})
    'components=2,latent=4'
    """
    text = label(arguments).replace(" ", ",")
    plain = re.sub(r"[^\w.,=+\[\]-]", "_", text)
    if plain == text and len(plain) <= 150:
        return plain
    return f"{plain[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
