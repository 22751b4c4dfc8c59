"""Run the Python and the commands of a document, and write the output of each block into it.

python docs/run.py README.md docs/howto/table.md

Blocks marked ``python`` run in order, in one namespace and an empty folder. A block marked ``text``
right after such a block is its output, and is written again. A block marked ``sh`` runs only if its
output follows it. Python in an HTML comment runs too: it makes the files that a reader is assumed
to have. ``DOCS`` is the folder of the documents. A picture that the code writes and the page shows
(``figures/NAME.png``) is copied to ``docs/figures``.

Cells of a notebook, ```` ```{code-cell} ````, run too; Sphinx writes their output.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

# A cell may begin with options, as lines ":tags: [hide-input]" or between lines "---".
BLOCK = re.compile(
    r"^```(?:(?P<language>python|sh)|(?P<cell>\{code-cell\}[^\n]*))\n"
    r"(?(cell)(?:---\n.*?^---\n|(?::[\w-]+:[^\n]*\n)*))"
    r"(?P<code>.*?)^```$(?:\n```text\n(?P<printed>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
PICTURE = re.compile(r"\(\S*?figures/(?P<name>[\w-]+\.png)\)")
CELL = "cell"  # the language of a notebook's cell
DOCS = Path(__file__).resolve().parent
WIDTH = 100  # columns of the terminal that commands see


@dataclass(frozen=True)
class Block:
    """A piece of code in a document, its line there, and its shown output (None if none)."""

    language: str
    code: str
    line: int
    printed: str | None
    place: tuple[int, int]  # span of the output in the document, in characters


def blocks(text: str) -> list[Block]:
    return [
        Block(
            found["language"] or CELL,
            found["code"],
            text.count("\n", 0, found.start("code")) + 1,
            found["printed"],
            found.span("printed"),
        )
        for found in BLOCK.finditer(text)
        if found["language"] != "sh" or found["printed"] is not None
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
    path: Path, change: Callable[[str], str] = lambda code: code, *, figures: Path | None = None
) -> list[tuple[Block, str]]:
    """Return every block of a document with its output; ``change`` may make a block smaller.

    Pictures that the document shows and its code wrote are copied into ``figures``.
    """
    os.environ.setdefault("MPLBACKEND", "agg")
    namespace: dict[str, object] = {"DOCS": DOCS}
    found = []
    text = path.read_text(encoding="utf-8")
    with empty_folder():
        for block in blocks(text):
            if block.language == "sh":
                found.append((block, command_output(change(block.code))))
                continue
            stream = io.StringIO()
            with redirect_stdout(stream):
                # The code has blank lines above it, so that an error names the document's line.
                exec(
                    compile("\n" * (block.line - 1) + change(block.code), str(path), "exec"),
                    namespace,
                )
            found.append((block, stream.getvalue()))
        for picture in PICTURE.finditer(text):
            if figures is not None and Path(picture["name"]).is_file():
                shutil.copy(picture["name"], figures)
    return found


def command_output(commands: str) -> str:
    """Run commands in a shell; return what they print. ``aevb`` is this environment's."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euc", commands],
        env=os.environ | {"PATH": folders, "COLUMNS": str(WIDTH)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"


def update(path: Path) -> None:
    """Run a document and write the output of its blocks into it."""
    found = printed(path, figures=DOCS / "figures")
    text = path.read_text(encoding="utf-8")
    for block, output in reversed(found):
        if block.printed is not None:
            text = text[: block.place[0]] + output + text[block.place[1] :]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        update(Path(name).resolve())
