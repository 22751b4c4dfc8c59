"""README and guide: their Python runs, and what they show is what it prints."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Smaller sizes, so that a page takes seconds. What is printed then has other numbers, except where
# nothing was trained.
SMALLER = {
    r"\bsteps=\d{3,}": "steps=20",
    r"\bepochs=\d+": "steps=2",
    r"\"kl_warmup\": \d+": '"kl_warmup": 4',
    r"\bmlp\(\d{3}(, \d+)?\)": "mlp(16)",
    r"\bsamples=50\b": "samples=5",
    r"x=X_test, seed": "x=X_test[:20], seed",
    r"series\[:10\]": "series[:2]",
    r"sample\(20, steps=200": "sample(2, steps=9",
    r"else 500": "else 20",
    r'"particles", "ais", "prior"': '"particles", "prior"',
    r"\.gap\(": ".gap(iterations=3, samples=20, ",
    r"\bdiagnose\(\w+, \{[^}]*\}": r"\g<0>, calibrate=False, rows=40",
    r"\bpredictive_check\(.*(?=, seed=0)": r"\g<0>, replicates=20",
    r"\bcompare_estimators\(\w+, \{[^}]*\}": r"\g<0>, replicates=16, rounds=1",
}
SMALLER |= {
    r"range\(100\):\n    v = ": "range(10):\n    v = ",
    r"method=\"particles\", seed": 'method="particles", samples=20, seed',
}
# The same for the pages about tables and scikit-learn.
SMALLER |= {
    r"--without species": "--without species --model mixture --set components=2",
    r"mixture\(6\)": "mixture(2)",
    r"\(1, 2, 3, 6, 9\)": "(1, 2)",
    r"\bcv=5\b": "cv=2",
    r"\[1, 2, 4, 8, 12\]": "[1, 2]",
    r"\[0\.1, 1, 10\]": "[1]",
    r"range\(1, 7\)": "range(1, 3)",
    r"\bn_class=5\b": "n_class=2",
    r"\bmax_iter=40\b": "max_iter=2",
}
UNTRAINED = (
    "Schema.read(penguins)\nprint",
    "print(gmvae.explain())",
    "explain(bound=",
    "explain(how=",
    "explain(partial=",
    "draws.shape",
    'given={"rain"',
    "print(zoo[",
    "fit(smoothing, ",
    "print(exported.inputs, exported",
    "exported.difference",
    "step.inputs.items()",
)


def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_documents", ROOT / "docs" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def smaller(code: str) -> str:
    for pattern, replacement in SMALLER.items():
        code = re.sub(pattern, replacement, code)
    return code


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "docs/guide.md",
        "docs/tables.md",
        "docs/scikit_learn.md",
        "docs/series.md",
        "docs/series_models.md",
        "docs/long_sequences.md",
        "docs/howto/export.md",
    ],
)
def test_every_block_runs_and_prints_what_the_page_shows(name):
    found = runner().printed(ROOT / name, smaller)
    assert len(found) >= 3
    compared = 0
    for block, output in found:
        assert (block.printed is not None) == bool(output), f"line {block.line} of {name}"
        if any(word in block.code for word in UNTRAINED):
            assert output == block.printed, (
                f"line {block.line} of {name}; python docs/run.py {name} writes it anew"
            )
            compared += 1
    assert compared


def test_what_a_page_shows_is_written_anew(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "One.\n\n```python\nx = 2\n```\n\n<!--\n```python\nx += "
        "1\n```\n-->\n```python\nprint(x)\n```\n```text\nold\n```\n\n```sh\nls\n```\n"
    )
    before = page.read_text()
    runner().update(page)
    assert page.read_text() == before.replace("old\n", "3\n")
