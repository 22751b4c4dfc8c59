"""Check an installed aevb: its files, the time of its import, and a first recipe on a table.

Run it with the interpreter of the environment, in any folder:

    .venv-wheel/bin/python -P tests/first_recipe.py --times
"""

import csv
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Files that are no Python, without which something is missing: types, pages, the report, licences.
SHIPPED = (
    "aevb/py.typed",
    "aevb/__init__.pyi",
    "aevb/page/static/app.js",
    "aevb/page/static/app.css",
    "aevb/page/static/LICENSES.txt",
    "aevb/report/templates/page.html",
    "aevb/report/templates/page.css",
    "licenses/LICENSE",
    "licenses/src/aevb/page/static/LICENSES.txt",
    "entry_points.txt",
)
RECIPE = """
import aevb

table = aevb.data.read_frame("trees.csv")
schema = aevb.Schema.read(table)              # the kind of every column, and why
density = schema.fit_default(table, seed=0)   # needs no choice
print(schema)
print([round(height) for height in density.impute(table)["height"].to_pylist()[:4]])
print(round(density.score(table)["log_p"].to_pylist()[0], 1))
"""
HEIGHTS = {0: 10, 2: 14}  # of the rows whose height is missing


def write_table(path: Path) -> None:
    """Trees whose height is about half of their width plus 5, some heights missing."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["width", "height", "kind"])
        for i in range(60):
            width = 10 + 4 * i % 37 + 0.1 * (i % 7)
            height = "" if i in HEIGHTS else round(5 + width / 2 + 0.3 * ((i * 7) % 5 - 2), 2)
            rows.writerow([round(width, 2), height, "oak" if i % 3 else "elm"])


def python(*arguments: str, folder: Path | None = None) -> str:
    """Run this interpreter without the folder of the script on its path."""
    done = subprocess.run(
        [sys.executable, "-P", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)[:80]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def seconds(code: str) -> float:
    start = time.perf_counter()
    python("-c", code)
    return time.perf_counter() - start


def main() -> None:
    here = importlib.metadata.distribution("aevb")
    files = [str(path) for path in here.files or ()]
    missing = [name for name in SHIPPED if not any(file.endswith(name) for file in files)]
    if missing:
        sys.exit(f"The installed package lacks {', '.join(missing)}.")
    own = [file for file in files if not file.endswith(".pyc") and not file.startswith("..")]
    size = sum(os.path.getsize(here.locate_file(file)) for file in own)
    place = python("-c", "import aevb; print(aevb.__file__, aevb.__version__)").split()
    if place[1] != here.version or not Path(place[0]).is_relative_to(Path(here.locate_file("."))):
        sys.exit(f"Python imports {place}, not the installed {here.version}.")
    print(f"aevb {here.version}: {len(own)} files, {size / 2**20:.1f} MiB")
    if "--times" in sys.argv:
        empty = seconds("")
        for code in ("import aevb", "from aevb import Model, Normal, fit"):
            print(f"{code}: {seconds(code) - empty:.2f} s")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder / "trees.csv")
        start = time.perf_counter()
        print(python("-c", RECIPE, folder=folder).rstrip())
        print(f"recipe in Python: {time.perf_counter() - start:.1f} s")
        start = time.perf_counter()
        python("-m", "aevb", "train", "trees.csv", "--out", "run", folder=folder)
        python("-m", "aevb", "impute", "run", "--out", "filled.csv", folder=folder)
        with (folder / "filled.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        for row, height in HEIGHTS.items():
            if abs(float(rows[row]["height"]) - height) > 1:
                sys.exit(f"filled.csv has {rows[row]} in row {row}, expected about {height}.")
        print(f"recipe on the command line: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
