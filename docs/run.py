"""Run the Python of a document, and write the output of each block into it.

python docs/run.py README.md docs/guide.md

Blocks marked ``python`` run in order, in one namespace and an empty folder. A block marked ``text``
right after such a block is its output, and is written again. Python in an HTML comment runs too: it
makes the files that a reader is assumed to have.
"""

import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:```text\n(?P<printed>.*?)^```\n)?", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A piece of Python in a document, its line there, and its shown output (None if none)."""

    code: str
    line: int
    printed: str | None
    place: tuple[int, int]  # span of the output in the document, in characters


def blocks(text: str) -> list[Block]:
    return [
        Block(
            found["code"],
            text.count("\n", 0, found.start()) + 2,
            found["printed"],
            found.span("printed"),
        )
        for found in BLOCK.finditer(text)
    ]


@contextmanager
def empty_folder() -> Iterator[None]:
    """Work in a temporary folder, which is deleted afterwards."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def printed(
    path: Path, change: Callable[[str], str] = lambda code: code
) -> list[tuple[Block, str]]:
    """Return every block of a document with its output; ``change`` may make a block smaller."""
    namespace: dict[str, object] = {}
    found = []
    text = path.read_text(encoding="utf-8")
    with empty_folder():
        for block in blocks(text):
            stream = io.StringIO()
            with redirect_stdout(stream):
                # The code has blank lines above it, so that an error names the document's line.
                exec(
                    compile("\n" * (block.line - 1) + change(block.code), str(path), "exec"),
                    namespace,
                )
            found.append((block, stream.getvalue()))
    return found


def update(path: Path) -> None:
    """Run a document and write the output of its blocks into it."""
    found = printed(path)
    text = path.read_text(encoding="utf-8")
    for block, output in reversed(found):
        if block.printed is not None:
            text = text[: block.place[0]] + output + text[block.place[1] :]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        update(Path(name).resolve())
