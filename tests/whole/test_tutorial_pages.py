"""The notebooks of the tutorial: every cell runs, and what a page quotes is printed."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "tutorial").glob("[1-9]-*.md"))
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
# Cell options, either as YAML between dashes or as lines that begin with a colon.
OPTIONS = re.compile(r"\A(?:---\n.*?^---\n|(?::[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
# Smaller sizes, so that a page takes seconds.
SMALLER = {
    r"\bsteps=\d{2,}": "steps=12",
    r"alternate\(\d+, \d+\)": "alternate(3, 3)",
    r'\bepochs=\d+|"epochs": \d+': lambda found: re.sub(r"\d+", "1", found[0]),
    r"\bmlp\(\d+(, \d+)?": "mlp(8",
    r"\bLSTM\(64\)|\bGRU\(64\)": lambda found: found[0].replace("64", "8"),
    r"\biterations=\d+": "iterations=2",
    r"\bsamples=\d{3,}": "samples=20",
    r"\breplicates=\d+": "replicates=16",
    r"\brounds=\d+": "rounds=1",
    r"\.gap\(x=x, ": ".gap(x=x[:9], samples=20, ",
    r"x=x_test\[:\d+\], iterations": "x=x_test[:5], iterations",
    r"x_test\[:40\]": "x_test[:5]",
    r"values\[:40\]": "values[:5]",
    r"\brange\(60\)": "range(10)",
    r"\bin range\(6\):": "in range(2):",
    r"\bwarmup=\d+": "warmup=2",
    r"\bperplexity=20": "perplexity=20, max_iter=250",
}


def cells(page: Path) -> list[tuple[int, str]]:
    """Return the code of every cell of a page, with its first line."""
    text, found = page.read_text(encoding="utf-8"), []
    for cell in CELL.finditer(text):
        code = OPTIONS.sub("", cell["code"])
        found.append((text.count("\n", 0, cell.end("code") - len(code)) + 1, code))
    return found


def smaller(code: str) -> str:
    for pattern, replacement in SMALLER.items():
        code = re.sub(pattern, replacement, code)
    return code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_cell_runs(page, monkeypatch, tmp_path, capsys):
    plt.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    printed = ""
    with plt.rc_context():
        for line, code in cells(page):
            exec(compile("\n" * (line - 1) + smaller(code), str(page), "exec"), namespace)
            plt.close("all")
            printed += capsys.readouterr().out
    for quoted in quotations(page):
        assert quoted in printed, f"{page.name} quotes {quoted!r}, which no cell prints"


def quotations(page: Path) -> list[str]:
    """Return the parts of ``explain()`` that the page's tables match with the derivation."""
    text = page.read_text(encoding="utf-8")
    tables = re.findall(r"^\| derivation \|.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    found = []
    for line in "".join(tables).splitlines():
        cell = re.split(r"(?<!\\)\|", line)[2].replace(r"\|", "|")
        found += re.findall(r"`([^`…]+)`", cell) + re.findall(r'"([^"]+)"', cell)
    return found


def test_the_index_lists_every_page():
    index = (PAGES[0].parent / "index.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert f"]({page.name})" in index
        assert f"\n{page.stem}\n" in index  # the table of contents
