"""The README and the pages of the site: the Python runs, and prints what the page shows."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from weakref import WeakSet

import pytest

import aevb
from aevb import Model

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
    r"\bdiagnose\(\w+, \{[^}]*\}": r"\g<0>, calibrate=False, train=False, rows=40",
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
    r"shared_unit=True, random": "shared_unit=True, max_iter=2, random",
}
SMALLER |= {
    r"schema\.fit_clusters\(penguins, seed=0\)": "schema.fit(schema.mixture(2), penguins, seed=0)",
    r"\bdeconv\(64, 32\)": "deconv(4, 4)",
    r"\bconv\(32, 64\)": "conv(4, 4)",
    r'"epochs": \d+': '"epochs": 3',
    r"step >= 300": "step >= 4",
    r'"steps": \d{3,}': '"steps": 20',
}
UNTRAINED = (
    "Schema.read(penguins)\nprint",
    "print(gmvae.explain())",
    "explain(bound=",
    "explain(how=",
    "explain(partial=",
    "draws.shape",
    'given={"rain"',
    "print(zoo.",
    "fit(smoothing, ",
    "vae.cpu()",
    "learning_rate=",
    "draws.groups()",
    "print(scalars(",
    'split("## Model")',
    "hub.contents(",
    "print(vae)",
    'aevb.load("towers")',
    "print(photos.shape)",
    "print(exported.inputs, exported",
    "exported.difference",
    "step.inputs.items()",
)


# The printed summary of a run. Its numbers change with the sizes, its form does not.
SUMMARY = re.compile(r"^Run of (.+)\n((?:  \w+ +.+\n)*)", re.MULTILINE)


def summaries(text: str) -> list[tuple[bool, dict[str, str]]]:
    """What no training changes in the summaries of runs: the names of lines, and some of them."""
    found = []
    for summary in SUMMARY.finditer(text):
        lines = dict(line.split(maxsplit=1) for line in summary[2].splitlines())
        found.append((", seed " in summary[1], lines | dict.fromkeys({"best"} & lines.keys(), "")))
    return found


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


# Every page with Python: the README, and all pages of the site but the tutorial's, which have a
# test of their own.
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if not {"_build", "tutorial"} & {*page.parts}
    and re.search(r"^```(python$|\{code-cell\})", page.read_text(encoding="utf-8"), re.MULTILINE)
)


@pytest.fixture
def unseeded(monkeypatch):
    """Models whose initial weights a reader would not get, and the names of those that are trained.

    They differ in each process, unless the page sets the seed of torch's global generator.
    """
    built: WeakSet[Model] = WeakSet()
    trained: list[str] = []
    build, train = Model.__init__, aevb.fit

    def init(self, *arguments, seed=None, **choices):
        build(self, *arguments, seed=seed, **choices)
        if seed is None:
            built.add(self)

    def fit(model, *arguments, **choices):
        if model in built and choices.get("seeds") is None and model.untouched():
            trained.append(str(model))
        return train(model, *arguments, **choices)

    monkeypatch.setattr(Model, "__init__", init)
    monkeypatch.setattr(aevb, "fit", fit)
    return trained


def shown(page: Path) -> str:
    """A page without its comments: what a reader copies."""
    return re.sub("<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * name.endswith("export.md")) for name in PAGES],
)
def test_every_block_runs_and_prints_what_the_page_shows(name, unseeded):
    run = runner()
    found = run.printed(ROOT / name, smaller)
    assert found
    if "torch.manual_seed(" not in shown(ROOT / name):
        assert not unseeded, f"{name} trains a model whose initial weights have no seed"
    for block, output in found:
        if block.language == run.CELL:
            continue
        assert (block.printed is not None) == bool(output), f"line {block.line} of {name}"
        assert summaries(output) == summaries(block.printed or ""), (
            f"line {block.line} of {name}; python docs/run.py {name} writes it anew"
        )
        if any(word in block.code for word in UNTRAINED):
            assert output == block.printed, (
                f"line {block.line} of {name}; python docs/run.py {name} writes it anew"
            )


def test_pages_have_output_that_is_compared():
    """Outputs that no training changes are compared, in at least one page of each kind."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in PAGES]
    for word in UNTRAINED:
        assert any(word in text for text in texts), f"no page has {word!r} any more"


def test_the_form_of_a_summary_is_compared():
    old = "Run of 1,498 steps, seed 0, best validation 80.7856 at step 1,425, not saved\n"
    new = "Run of 20 steps, seed 0, all steps taken\n  best    1 at 2\n  folder  run\n"
    longer = new.replace("Run of 20", "Run of 1,498").replace("1 at 2", "3 at 4")
    assert summaries(new) == summaries(longer) != summaries(old)
    assert summaries(new) != summaries(new.replace("folder  run", "folder  other"))


def test_what_a_page_shows_is_written_anew(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "One.\n\n```python\nx = 2\n```\n\n<!--\n```python\nx += "
        "1\n```\n-->\n```python\nprint(x)\n```\n```text\nold\n```\n\n```sh\nls\n```\n"
    )
    before = page.read_text()
    runner().update(page)
    assert page.read_text() == before.replace("old\n", "3\n")


def test_cells_of_a_notebook_run_without_their_options(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "---\nkernelspec:\n  name: python3\n---\n# One\n\n"
        "```{code-cell} ipython3\n:tags: [hide]\n\nx = 2\n```\n\n"
        "```{code-cell}\n---\ntags: [b]\n---\nprint(x)\n```\n"
    )
    assert [(block.line, output) for block, output in runner().printed(page)] == [
        (9, ""),
        (17, "2\n"),
    ]
