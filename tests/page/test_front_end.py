"""Functions of the front end that need no browser, run by node."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

WEB = Path(__file__).parents[2] / "web" / "src"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """Run JavaScript with the modules of the front end; it prints JSON."""
    folder = tmp_path_factory.mktemp("front") / "src"
    shutil.copytree(WEB, folder)
    (folder / "package.json").write_text('{"type": "module"}')

    def run(script: str):
        (folder / "test.js").write_text(script)
        found = subprocess.run(
            [NODE, "test.js"], cwd=folder, check=True, timeout=60, capture_output=True, text=True
        )
        return json.loads(found.stdout)

    return run


def test_numbers_are_saved_as_numbers_and_formulas_as_texts(node):
    found = node("""
        import { toCsv } from "./export.js";
        const numbers = ["-1", "+2.5", "-1e-3", "-.5", -4];
        const cells = [...numbers, "=1+1", "-1+1", "@a", "-", 'say "so"', null];
        console.log(JSON.stringify(toCsv(["a"], cells.map((cell) => [cell]))));
    """)
    assert found.split("\n")[1:-1] == [
        "-1", "+2.5", "-1e-3", "-.5", "-4", "'=1+1", "'-1+1", "'@a", "'-", '"say ""so"""', "",
    ]  # fmt: skip


def test_requests_to_decode_replace_only_those_of_the_same_purpose(node):
    """While the first is under way, a later one of its purpose replaces the one that waits."""
    found = node("""
        const sent = [], answers = [];
        globalThis.fetch = (address) => {
            sent.push(JSON.parse(decodeURIComponent(address.split("request=")[1])).id);
            return new Promise((resolve) => answers.push(() => resolve({
                ok: true, json: async () => sent.at(-1), headers: { get: () => null } })));
        };
        const { decode } = await import("./live.js");
        const slider = [1, 2, 3].map((id) => decode(0, { id }));
        const frames = [11, 12].map((id) => decode(0, { id }, `frame ${id}`));
        const other = decode(1, { id: 21 });
        const first = [...sent];
        while (answers.length) { answers.shift()(); await new Promise((next) => setTimeout(next)); }
        const found = await Promise.all([...slider, ...frames, other]);
        console.log(JSON.stringify([first, found.map((one) => one !== null)]));
    """)
    assert found == [[1, 11, 12, 21], [True, False, True, True, True, True]]


def test_a_lasso_with_fewer_corners_moves_by_at_most_a_pixel(node):
    t = np.linspace(0, 2 * np.pi, 400)
    polygon = np.stack([300 + 200 * np.cos(t), 300 + (200 + 9 * np.sin(9 * t)) * np.sin(t)], 1)
    found = np.array(
        node(f"""
        import {{ simplified }} from "./gestures.js";
        const camera = {{ toPixel: (x, y) => [x, y] }};
        console.log(JSON.stringify(simplified({polygon.tolist()}, camera)));
    """)
    )
    assert 20 < len(found) < 120
    assert (found[[0, -1]] == polygon[[0, -1]]).all()
    # Every corner that was left out lies within a pixel of the new outline.
    a, b = found[:-1], found[1:]
    along = ((polygon[:, None] - a) * (b - a)).sum(-1) / ((b - a) ** 2).sum(-1)
    nearest = a + np.clip(along, 0, 1)[..., None] * (b - a)
    assert np.linalg.norm(polygon[:, None] - nearest, axis=-1).min(1).max() <= 1
    square = [[0, 0], [50, 0], [100, 0], [100, 100], [0, 100]]
    kept = node(f"""
        import {{ simplified }} from "./gestures.js";
        console.log(JSON.stringify(simplified({square}, {{ toPixel: (x, y) => [x, y] }})));
    """)
    assert kept == [square[0], *square[2:]]


def test_numbers_of_colours_have_no_more_digits_than_are_stored(node):
    found = node("""
        import { colourNumber } from "./colours.js";
        const coarse = { low: -1e6, high: 0 }, fine = { low: 0, high: 1 }, exact = {};
        console.log(JSON.stringify([
            colourNumber(coarse, -123.456), colourNumber(coarse, -3), colourNumber(fine, 0.123456),
            colourNumber(exact, 0.123456), colourNumber(exact, NaN),
            colourNumber({ date: true }, 1), colourNumber({ date: true }, 1.5),
        ]));
    """)
    # One step of the first is 15.26.
    assert found == ["−100", "0", "0.1235", "0.12346", "–", "1970-01-02", "1970-01-02 12:00"]


def test_texts_name_rows_and_values(node):
    found = node("""
        import { cellNamed, rowNamed } from "./selecting.js";
        const splits = ["training", "held out"], names = ["y", "label", "label 2"];
        console.log(JSON.stringify([
            ["row 8", "Held out row 8", "training row  0", "test row 8", "row", "8 row 8x"]
                .map((text) => rowNamed(text, splits)),
            ["label 8", "LABEL=8", "label 2 = a b", "y: −3", "label", "yes 3", "no 8"]
                .map((text) => cellNamed(text, names)),
        ]));
    """)
    row = {"split": None, "number": 8}
    assert found[0] == [row, row | {"split": 1}, {"split": 0, "number": 0}, None, None, None]
    pairs = [("label", "8"), ("label", "8"), ("label 2", "a b"), ("y", "−3")]
    named = [{"name": name, "value": value} for name, value in pairs]
    assert found[1] == [*named, None, None, None]


def test_zero_has_no_sign(node):
    found = node("""
        import { number } from "./dom.js";
        console.log(JSON.stringify([-0, 0, -1e-5, -2.5].map((value) => number(value, 2))));
    """)
    assert found == ["0", "0", "−1.0e-5".replace("-", "−"), "−2.5"]
