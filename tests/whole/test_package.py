"""The package: a wheel has all that a user needs, and its metadata, versions and matrix agree."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import aevb

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the files that a wheel is made of."""
    tree, place = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tree / "src", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    # What `python -m build` calls, without the environment that it makes.
    code = "import sys; from setuptools import build_meta as b; b.build_wheel(sys.argv[1])"
    run([sys.executable, "-c", code, str(place)], cwd=tree)
    (found,) = place.glob("*.whl")
    return found


def run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("aevb/")}
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    source = ROOT / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "aevb").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == wanted
    assert f"\nVersion: {aevb.__version__}\n" in text
    assert {"License-File: LICENSE", "License-Expression: MIT"} <= set(text.splitlines())
    assert wheel.stat().st_size < 2 * 2**20


def test_the_first_recipe_runs_with_the_wheel_alone(wheel, tmp_path):
    """The wheel comes first on the path; what it requires is that of this environment."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    shown = run(
        [sys.executable, "-P", str(ROOT / "tests" / "first_recipe.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert f"aevb {aevb.__version__}: " in shown
    assert "\n[10, 12, 14, 16]\n" in shown


def test_the_versions_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.search(
        r"^## (\S+) — (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert newest is not None
    assert citation["version"] == newest[1] == aevb.__version__
    assert citation["date-released"] == newest[2]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["license"] == PROJECT["license"]


def test_the_matrix_is_what_the_package_says_it_supports():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    pythons = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if ":: 3." in one]
    assert matrix["python"] == pythons
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (newest,) = re.findall(r"^torch==(\S+)$", constraints, re.MULTILINE)
    (oldest,) = (one.partition(">=")[2] for one in PROJECT["dependencies"] if "torch>=" in one)
    assert matrix["torch"] == [f"{oldest}.0", newest]
    commands = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [command.split()[1] for command in commands if command.startswith("make ")]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert f"TORCH ?= {newest}" in makefile


def test_every_hook_before_a_commit_is_local():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in hooks["repos"]] == ["local"]
    tools = {hook["entry"].split()[0] for hook in hooks["repos"][0]["hooks"]}
    lint = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nlint:")[2]
    used = set(re.findall(r"\$\(BIN\)/(\S+)", lint.partition("\n\n")[0]))
    assert {Path(tool).name for tool in tools} <= used


def test_format_versions_are_those_that_the_page_names():
    page = (ROOT / "docs/reference/versions.md").read_text(encoding="utf-8")
    named = dict(re.findall(r'"(aevb [\w ]+)", (\d+)', page))
    source = ROOT / "src/aevb"
    for file, constant, name in (
        ("declare/serialization.py", "FORMAT", "aevb model"),
        ("training/checkpoint.py", "VERSION", "aevb checkpoint"),
        ("page/html.py", "VERSION", "aevb page"),
    ):
        assert assigned(source / file, constant) == int(named[name]), name
    written = {"model_folder.py": "aevb saved model", "tables/schema.py": "aevb schema"}
    for file, name in written.items():
        assert f'"version": {named[name]},' in (source / file).read_text(encoding="utf-8"), name


# model.json leaves out fields with their defaults, so that another default would give the files
# of earlier versions another meaning. More classes and fields may come.
DEFAULTS = {
    "mlp": {"activation": "relu", "dropout": 0.0, "init": "default", "bias": True, "log": False},
    "conv": {"channels": (), "hidden": 256, "activation": "relu", "init": "default"},
    "deconv": {"channels": (), "hidden": 256, "activation": "relu", "init": "default"},
    "switching": {"bias": True, "init": "default"},
    "Normal": {"learned": False, "scale": "network"},
    "Laplace": {"learned": False, "scale": "network"},
    "StudentT": {"learned": False, "scale": "network", "df": 4.0},
    "MultivariateNormal": {"learned": False, "covariance": "network"},
    "Mixture": {"learned": False, "components": 2},
    "ContinuousBernoulli": {"learned": False, "clamped": False},
    "NegativeBinomial": {"learned": False, "dispersion": "learned"},
    "Deterministic": {"activation": "identity"},
    "LSTM": {"layers": 1},
    "GRU": {"layers": 1},
}


def test_defaults_of_format_1_are_kept():
    for name, expected in DEFAULTS.items():
        defaults = {one.name: one.default for one in fields(getattr(aevb, name))}
        assert {key: defaults[key] for key in expected} == expected, name


def assigned(path, constant):
    """The value that a module gives to a constant, alone or in a tuple."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = node.value.elts if isinstance(target, ast.Tuple) else [node.value]
            for one, value in zip(names, values, strict=False):
                if getattr(one, "id", None) == constant:
                    return ast.literal_eval(value)
    raise AssertionError(f"{path} has no {constant}")
