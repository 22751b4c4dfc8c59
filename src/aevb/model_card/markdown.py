"""Markdown of a card: tables, code and front matter, with texts that cannot break out of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence


def plain(text: object) -> str:
    """Return a text as Markdown that shows it as it is, on one line.

    >>> plain("x | z <b>*2*</b>")
    'x | z &lt;b&gt;\\\\*2\\\\*&lt;/b&gt;'
    """
    line = " ".join(str(text).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]#$~])", r"\\\1", line)


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table. Its cells are plain text.

    >>> print(table(["name", "size"], [["x | z", 3]]))
    | name | size |
    |---|---|
    | x \\| z | 3 |
    """
    lines = [list(headings), ["---"] * len(headings)]
    cells = [[plain(cell).replace("|", "\\|") for cell in row] for row in rows]
    found = [f"| {' | '.join(line)} |" for line in [lines[0], *cells]]
    return "\n".join([found[0], f"|{'|'.join(lines[1])}|", *found[1:]])


def block(text: str, language: str = "text") -> str:
    """Return a block of code, with a fence longer than any in the text."""
    longest = max((len(run) for run in re.findall("`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def bullets(texts: Iterable[object]) -> str:
    return "\n".join(f"- {plain(text)}" for text in texts)


def front_matter(tags: Sequence[str], license: str | None) -> str:
    """Return the YAML that hubs read: the library, the tags and the licence.

    Strings are written as JSON, which is YAML.
    """
    lines = ["library_name: aevb"]
    if license is not None:
        lines.append(f"license: {json.dumps(license)}")
    return "\n".join(["---", *lines, "tags:", *(f"- {json.dumps(tag)}" for tag in tags), "---"])
