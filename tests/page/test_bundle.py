"""The built front end: it belongs to its source, is shipped, and asks nothing of the network."""

import hashlib
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STATIC, WEB = ROOT / "src/aevb/page/static", ROOT / "web"
FILES = {"app.js", "app.css", "LICENSES.txt", "source.sha256"}
# Names of vocabularies, which nobody opens.
NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml"}


def test_the_bundle_is_that_of_the_source():
    digest = hashlib.sha256()
    for path in sorted((WEB / "src").iterdir(), key=lambda path: path.name):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    assert (STATIC / "source.sha256").read_text().strip() == digest.hexdigest(), (
        "src/aevb/page/static is not built from web/src. Run: make web"
    )


@pytest.mark.skipif(
    shutil.which("node") is None or not (WEB / "node_modules/esbuild").is_dir(),
    reason="node or web/node_modules is not here; `make web` installs what the bundle needs",
)
def test_a_new_build_gives_the_same_files():
    check = ["node", str(WEB / "build.mjs"), "--check"]
    found = subprocess.run(check, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_the_wheel_carries_the_bundle():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["aevb"]
    found = {path.name for path in STATIC.iterdir()}
    assert found == FILES
    for name in FILES:
        assert any(fnmatch(f"page/static/{name}", pattern) for pattern in patterns), name


def test_the_licences_name_what_the_bundle_contains():
    text = (STATIC / "LICENSES.txt").read_text()
    assert "uPlot (MIT)" in text
    assert "Permission is hereby granted" in text


def test_the_script_has_no_addresses_and_evaluates_no_text():
    script = (STATIC / "app.js").read_text()
    assert set(re.findall(r"https?://[^\s\"'`)]*", script)) <= NAMESPACES
    assert not re.search(r"\beval\s*\(|\bnew\s+Function\b|\bimport\s*\(|document\.write", script)
    # Data become text nodes. The only parser of markup is for what the library has drawn.
    assert not re.search(r"\.(inner|outer)HTML\s*=|insertAdjacentHTML", script)


def test_the_style_loads_nothing():
    style = (STATIC / "app.css").read_text()
    assert "@import" not in style
    assert all(one.startswith("data:") for one in re.findall(r"url\([\"']?([^)\"']+)", style))
