"""CONTRIBUTING.md: each recipe is followed literally in a copy of the tree, and what it says must
pass is run there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = next(
    folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file()
)
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = {
    title: text
    for title, _, text in (part.partition("\n") for part in PAGE.split("\n## ")[1:])
    if title.startswith("Recipe")
}

# A sentence that ends a paragraph, and the block below it, are one step. A long quoted line may
# begin on a line of its own.
STEP = re.compile(
    r"(?:Append to `(?P<end>[^`]+)`:|In `(?P<path>[^`]+)`, (?P<verb>below the line|above the "
    r"line|above the class|replace the line)\s`(?P<line>[^\n]+)`(?:, add| by):|[Tt]hen "
    r"run:)\n\n```(?P<kind>python|sh)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Step:
    verb: str  # "append", "run", or as the page says it: "below the line", …
    path: str
    line: str
    code: str


def steps(text: str) -> list[Step]:
    found = [
        Step(
            "append" if step["end"] else step["verb"] or "run",
            step["end"] or step["path"] or "",
            step["line"] or "",
            step["code"],
        )
        for step in STEP.finditer(text)
    ]
    assert len(found) == len(re.findall(r"^```(?:python|sh)$", text, re.MULTILINE)), (
        "a block of code without a sentence that says where it goes"
    )
    return found


def copy(folder: Path) -> Path:
    """The tree without what is made from it."""
    for name in ("src", "tests", "benchmarks"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def find(tree: Path, path: str) -> Path:
    assert (tree / path).is_file(), f"CONTRIBUTING.md names {path}, which is not there"
    return tree / path


def apply(tree: Path, step: Step) -> None:
    path = find(tree, step.path)
    if step.verb == "append":
        path.write_text(path.read_text(encoding="utf-8") + "\n\n" + step.code, encoding="utf-8")
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if step.verb == "above the class":
        places = [
            i
            for i, line in enumerate(lines)
            if line.startswith((f"class {step.line}(", f"class {step.line}:"))
        ]
        while places and lines[places[0] - 1].startswith("@"):
            places[0] -= 1
    else:
        places = [i for i, line in enumerate(lines) if line.strip() == step.line]
    assert len(places) == 1, (
        f"{step.path} has {len(places)} times what CONTRIBUTING.md quotes: {step.line}"
    )
    (at,) = places
    before, after = {"below": (at + 1, at + 1), "above": (at, at), "replace": (at, at + 1)}[
        step.verb.split()[0]
    ]
    gap = "\n\n" if step.verb == "above the class" else ""
    path.write_text("".join([*lines[:before], step.code + gap, *lines[after:]]), encoding="utf-8")


def run(tree: Path, *command: str) -> None:
    variables = os.environ | {
        "PYTHONPATH": str(tree / "src"),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        command, cwd=tree, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"


def follow(tree: Path, text: str) -> list[Step]:
    """Make every change of a recipe, and return the commands that it ends with."""
    found = steps(text)
    for step in found:
        if step.verb != "run":
            apply(tree, step)
    return [step for step in found if step.verb == "run"]


@pytest.mark.slow
@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_can_be_followed(title: str, tmp_path: Path) -> None:
    tree = copy(tmp_path)
    (last,) = follow(tree, RECIPES[title])
    for line in last.code.splitlines():
        words = re.findall(r'"[^"]*"|\S+', line)
        assert words[:3] == ["python", "-m", "pytest"]
        run(
            tree,
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            *(word.strip('"') for word in words[3:]),
        )


@pytest.mark.slow
def test_all_recipes_together_pass_the_linters(tmp_path: Path) -> None:
    """Lint, format, types and the order of packages, as ``make lint`` checks them."""
    tree = copy(tmp_path)
    for text in RECIPES.values():
        follow(tree, text)
    bin = Path(sys.executable).parent
    run(tree, str(bin / "ruff"), "check", "--no-cache", ".")
    run(tree, str(bin / "ruff"), "format", "--check", "--no-cache", ".")
    run(tree, str(bin / "lint-imports"), "--no-cache")
    if (ROOT / ".mypy_cache").is_dir():  # of `make lint`: what no recipe changes is not read again
        shutil.copytree(ROOT / ".mypy_cache", tree / ".mypy_cache")
    run(tree, str(bin / "mypy"))


def test_the_map_names_every_package_and_the_order_is_import_linters() -> None:
    named = [
        re.findall(r"`(\w+)`", row)
        for row in re.findall(
            r"^\| ((?:`\w+`(?:, )?)+) \|",
            PAGE.partition("## The map")[2].partition("\n## ")[0],
            re.MULTILINE,
        )
    ]
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]["contracts"][0]
    layers = [re.findall(r"aevb\.(\w+)", layer) for layer in contract["layers"]]
    place = {name: i for i, layer in enumerate(layers) for name in layer}
    order = [place[name] for names in named for name in names]
    assert set(place) == {name for names in named for name in names}
    assert order == sorted(order)
    source = ROOT / "src" / "aevb"
    assert set(place) == {
        path.stem
        for path in source.iterdir()
        if path.stem.isidentifier()
        and not path.stem.startswith("__")
        and path.suffix in ("", ".py")
    }


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`((?:src|tests|docs|benchmarks)/[\w/.]+\.\w+)`", PAGE))
    named |= set(re.findall(r"\]\(([^)]+)\)", PAGE)) | set(
        re.findall(r"\b(?:benchmarks|tests)/[\w/]+\.py", PAGE)
    )
    assert len(named) > 15
    for name in named:
        find(ROOT, name)
    for script in re.findall(r"^python (benchmarks/\w+\.py)", PAGE, re.MULTILINE):
        assert "__main__" in (ROOT / script).read_text(encoding="utf-8"), (
            f"{script} is not a command"
        )
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^\| `make ([\w-]+)", PAGE, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.slow
def test_the_profile_of_a_step_runs(tmp_path: Path) -> None:
    code = re.search(r"## Profile a step\n.*?```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    smaller = (
        code[1]
        .replace("steps=200", "steps=5")
        .replace("steps=50,", "steps=5,")
        .replace("784", "16")
        .replace("(500, 500)", "(8,)")
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", smaller],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Self CPU" in done.stdout
