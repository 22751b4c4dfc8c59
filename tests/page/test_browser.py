"""Pages in a real browser: what they show is what the data and torch say, and they stay silent.

Every test ends with a check of its tab: no error or warning on the console, no dialog, and no
request.
"""

import csv
import io
import json
import math
import re
import shutil
import socket
import struct
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np
import pytest
import torch
from browser import MARKUP, PENGUINS, SCRIPT, Made, Site, contrast, inside, start_browser, write

from aevb.cli.page_subjects import open_for_page
from aevb.evidence import log_evidence
from aevb.page.decoder import decode
from aevb.page.packing import unpack

PAGES = ("fa", "vae", "images", "cvae", "gmvae", "m2", "vrnn", "ragged", "penguins", "sine")
DECODED = ("fa", "vae", "images", "cvae", "gmvae", "m2", "penguins")
TOLERANCE = 1e-3  # of a mean, relative to max(1, |mean|)
WORDS = ("--ink", "--quiet", "--accent", "--bad", "--warn", "--good", "--note")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with start_browser() as browser:
        yield Site(browser, tmp_path_factory.mktemp("pages"))


@pytest.fixture
def visit(site):
    """Open a page by name; at the end, nothing went wrong in it."""
    used = []

    def visit(name):
        used.append(site.visit(name))
        return used[-1]

    yield visit
    for one in used:
        assert one.trouble == []


def text_of(visit, selector):
    return visit.page.locator(selector).inner_text()


def pick(made: Made, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).choice(len(made.points), count, replace=False).tolist()


def drag(visit, first, last, steps=6):
    """Drag the mouse over the map, between two places given as shares of its size."""
    box = visit.box()
    place = [(box["x"] + u * box["width"], box["y"] + v * box["height"]) for u, v in (first, last)]
    visit.page.mouse.move(*place[0])
    visit.page.mouse.down()
    visit.page.mouse.move(*place[1], steps=steps)
    visit.page.mouse.up()
    return place[1]


def use_tool(visit, tool):
    visit.page.locator(f"button[data-tool={tool}]").click()
    visit.js("aevb.mapPart.canvas.scrollIntoView({ block: 'center', behavior: 'instant' })")


# Curves -------------------------------------------------------------------------------------------


def test_log_p_is_drawn_in_the_units_of_the_curves(visit):
    """The curves of a table are those of standardised columns, and log p is of its own columns."""
    found = visit("penguins")
    evidence = found.made.content["runs"][0]["checks"]["evidence"]
    subject = found.made.opened.subject
    source = subject.source(len(subject.splits) - 1)
    expected = log_evidence(found.made.model, source.take(torch.arange(source.n)), seed=0).mean
    assert evidence["model_mean"] == pytest.approx(expected, rel=1e-6)
    assert evidence["mean"] < expected - 5  # grams and millimetres have small densities
    label = found.page.locator("#curves .line-plot").first.get_attribute("aria-label")
    value = re.search(r"log p\(x\) −?([\d.]+) in the units of the model", label)
    assert float(value[1]) == pytest.approx(abs(expected), rel=1e-3)


# Silence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_its_parts(visit, name):
    found = visit(name)
    run = found.made.content["runs"][0]
    assert run["problems"] == []
    assert text_of(found, "h1") == found.made.opened.name
    assert found.page.locator("p.bad").count() == 0
    links = found.page.locator("nav a").all_inner_texts()
    assert {"Training", "Latent map", "Model"} <= set(links)
    assert ("Evidence" in links) == (run["checks"] is not None)
    assert ("Clusters" in links) == (name in ("gmvae", "m2"))
    assert ("Sequences" in links) == (name in ("vrnn", "ragged"))
    # Every link leads to its part.
    for link in found.page.locator("nav a").all():
        part = link.get_attribute("href").removeprefix("#")
        assert found.page.locator(f"section#{part} h2").count() == 1


def test_the_longest_sequence_is_told_without_padding(visit):
    table = visit("ragged").page.locator("#settings table").first.inner_text()
    assert "steps of the longest sequence\t11\n" in table


def test_the_policy_of_a_page_forbids_requests(site):
    """The listening socket would see a connection, and the browser names the broken rule."""
    found = site.open(site.made("fa"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/"
        broken = found.js(
            """async (address) => {
                const broken = [];
                document.addEventListener("securitypolicyviolation",
                    (event) => broken.push(event.effectiveDirective));
                const refused = await fetch(address).then(() => false, () => true);
                const picture = new Image();
                await new Promise((done) => { picture.onerror = done; picture.src = address; });
                const script = document.createElement("script");
                await new Promise((done) => {
                    script.onerror = done;
                    script.src = address;
                    document.head.append(script);
                });
                try { (0, eval)("1"); } catch { broken.push("eval"); }
                return [refused, ...broken];
            }""",
            address,
        )
        with pytest.raises(TimeoutError):
            server.accept()
    assert broken[0] is True
    assert {"connect-src", "img-src", "script-src-elem", "eval"} <= set(broken[1:])
    found.page.close()


# The point under the cursor -----------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_the_row_under_the_cursor_is_the_nearest_one(visit, name):
    found = visit(name)
    made, places = found.made, found.pixels()
    for point in pick(made, 5):
        mouse = places[point] + (0.3, -0.2)
        found.page.mouse.move(*mouse)
        found.wait("aevb.mapPart.hovered >= 0")
        shown = found.page.locator(".inspector")
        at = int(shown.get_attribute("data-point"))
        distance = np.hypot(*(places - mouse).T)
        assert distance[at] <= distance.min() + 0.02
        row = int(shown.get_attribute("data-row"))
        assert row == made.row_of[at]
        check_content(found, row, at)
        found.page.mouse.move(*(found.box()[key] + 2 for key in ("x", "y")))


def check_content(found, row, point):
    """Compare what the inspector shows of a row with the data."""
    made, panel = found.made, found.page.locator(".inspector")
    split, number = made.place(row)
    title = f"{split.name} row {number}".strip()
    step = made.map["spaces"][0]["step"]
    step = None if step is None else int(unpack(step)[point])
    assert panel.locator("h3").inner_text() == (title if step is None else f"{title}, step {step}")
    if made.name == "penguins":
        return check_cells(panel, PENGUINS, number)
    if split.numbers is not None:
        number = split.numbers.tolist().index(number)
    data = np.asarray(split.data["x"][number], float)
    kind = made.map["contents"]["kind"]
    if kind == "numbers":
        cells = panel.locator("table.cells").first.locator("td").all_inner_texts()
        assert [float(cell.replace("−", "-")) for cell in cells] == pytest.approx(data, rel=1e-4)
    elif panel.locator("canvas").count():
        image = data.reshape(*made.map["contents"]["variables"][0]["shape"][1:])
        check_pixels(found, image.reshape(-1))
    else:
        length = int(split.data["lengths"][number])
        check_lines(panel, data[:length])
    return None


def check_cells(panel, file, number):
    with file.open(newline="") as lines:
        row = list(csv.DictReader(lines))[number]
    shown = panel.locator("table.cells").first
    names = shown.locator("th").all_inner_texts()
    cells = [cell.split(" (not in")[0] for cell in shown.locator("td").all_inner_texts()]
    assert sorted(names) == sorted(row)
    for name, cell in zip(names, cells, strict=True):
        wanted = row[name]
        if name.endswith(("mm", "_g")) and wanted:
            assert float(cell.replace("−", "-")) == float(wanted)
        else:
            assert cell == (wanted or "–")


def check_pixels(found, values):
    """The colours lie between paper (0) and ink (1), to the nearest of 256 levels."""
    pixels, ink, paper = found.js(
        """() => {
            const canvas = document.querySelector(".inspector canvas");
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            const style = getComputedStyle(document.documentElement);
            const colours = ["--ink", "--paper"].map((name) => style.getPropertyValue(name));
            return [Array.from(data), ...colours];
        }"""
    )
    ink, paper = (
        np.array([int(c.strip()[i : i + 2], 16) for i in (1, 3, 5)]) for c in (ink, paper)
    )
    shown = np.array(pixels).reshape(-1, 4)
    assert (shown[:, 3] == 255).all()
    np.testing.assert_allclose(shown[:, :3], paper + (ink - paper) * values[:, None], atol=1)


def check_lines(panel, values):
    """Read the curves of a sequence back from their paths, which have a tenth of a pixel."""
    paths = [path.get_attribute("d") for path in panel.locator("svg.lines > path").all()]
    places = np.array(
        [[one.split() for one in path.replace("M", "L").split("L")[1:]] for path in paths], float
    )
    assert places.shape[:2] == values.T.shape
    x, y = places[..., 0], places[..., 1]
    steps = np.linspace(x[0, 0], x[0, -1], len(values))
    np.testing.assert_allclose(x, np.broadcast_to(steps, x.shape), atol=0.11)
    # The largest value is the highest place, and the smallest one the lowest.
    low, high = values.min(), values.max()
    height = y.min() + (high - values.T) / (high - low) * np.ptp(y)
    np.testing.assert_allclose(y, height, atol=0.16)


# Decoding -----------------------------------------------------------------------------------------


def check_decoded(found):
    """The means of the page are those of torch for the same latents and given variables."""
    shown = found.decoded()
    model = found.made.model
    fixed = {name: np.array(shown["values"][name]) for name in shown["fixed"]}
    wanted = decode(model, fixed)["observed"]
    assert set(shown["means"]) == set(wanted)
    for name, means in shown["means"].items():
        mean = wanted[name]["mean"]
        assert np.max(np.abs(means - mean) / np.maximum(1, np.abs(mean))) < TOLERANCE, name
    return shown


def latent_at(found, mouse):
    """The latent at a place of the window, from the ends and axes of the view."""
    view, box = found.made.view, found.box()
    camera = found.js("(({ x, y, scale, aspect }) => [x, y, scale, aspect])(aevb.mapPart.camera)")
    x, y, scale, aspect = camera
    place = (
        x + (mouse[0] - box["x"] - box["width"] / 2) / scale,
        y - (mouse[1] - box["y"] - box["height"] / 2) / (scale * aspect),
    )
    ends = [view["across"], view["up"]]
    a, b = (
        end["low"] + (end["high"] - end["low"]) * at / 65534
        for end, at in zip(ends, place, strict=True)
    )
    return np.array(view["origin"]) + a * np.array(view["axes"][0]) + b * np.array(view["axes"][1])


@pytest.mark.parametrize("name", DECODED)
def test_dragging_decodes_as_torch_does(visit, name):
    found = visit(name)
    use_tool(found, "decode")
    mouse = drag(found, (0.5, 0.5), (0.61, 0.42))
    shown = check_decoded(found)
    latent = found.made.map["spaces"][0]["latent"]
    spread = np.ptp([found.made.view["across"]["low"], found.made.view["across"]["high"]])
    # The box of the canvas may lie between two pixels.
    np.testing.assert_allclose(
        shown["values"][latent], latent_at(found, mouse), atol=0.005 * max(1, spread)
    )
    # The keys move the point, too.
    found.page.locator("canvas.map").focus()
    found.page.keyboard.press("ArrowLeft")
    again = check_decoded(found)
    assert again["values"][latent] != shown["values"][latent]


@pytest.mark.parametrize("name", DECODED)
def test_sliders_decode_as_torch_does(visit, name):
    found = visit(name)
    slider = found.page.locator(".slider input").first
    slider.focus()
    before = float(slider.input_value())
    for _ in range(7):
        found.page.keyboard.press("ArrowRight")
    shown = check_decoded(found)
    label = slider.get_attribute("aria-label")
    latent = label.rstrip("0123456789")
    entry = int(label.removeprefix(latent) or 0)  # a latent with one entry has no number
    step = float(slider.get_attribute("step"))
    assert shown["values"][latent][entry] == pytest.approx(before + 7 * step, abs=0.6 * step)


@pytest.mark.parametrize(("name", "variable"), [("cvae", "y (given)"), ("gmvae", "y"), ("m2", "y")])
def test_a_class_can_be_chosen(visit, name, variable):
    found = visit(name)
    choice = found.page.locator(".controls label", has_text=variable).locator("select")
    means = []
    for k in (3, 7):
        choice.select_option(str(k))
        shown = check_decoded(found)
        assert shown["values"]["y"] == [float(i == k) for i in range(10)]
        means.append(shown["means"]["x"])
    assert means[0] != means[1]


def test_a_row_is_decoded_from_its_code(visit):
    found = visit("cvae")
    point = pick(found.made, 1, seed=1)[0]
    found.js("(point) => aevb.mapPart.pin(point)", point)
    shown = check_decoded(found)
    codes = unpack(found.made.map["spaces"][0]["codes"])
    np.testing.assert_allclose(shown["values"]["z"], codes[point], rtol=1e-6)
    split, number = found.made.place(point)
    assert shown["values"]["y"] == [float(k == split.data["y"][number]) for k in range(10)]


def test_a_decoder_that_a_page_cannot_run_shows_decoded_points(visit):
    found = visit("sine")
    assert "Sine cannot run in a page" in text_of(found, ".explorer figcaption")
    use_tool(found, "decode")
    mouse = drag(found, (0.5, 0.5), (0.58, 0.45))
    shown = found.decoded()
    view, steps = found.made.view, found.made.map["decoder"]["planes"][0]["steps"]
    z = latent_at(found, mouse)
    nearest = []
    for side, value in zip(("across", "up"), z, strict=True):
        grid = np.linspace(view[side]["low"], view[side]["high"], steps)
        nearest.append(grid[np.abs(grid - value).argmin()])
    wanted = decode(found.made.model, {"z": np.array(nearest)})["observed"]["x"]["mean"]
    np.testing.assert_allclose(shown["means"]["x"], wanted, atol=1e-5)


# Selections ---------------------------------------------------------------------------------------

CORNERS = [(0.3, 0.25), (0.72, 0.31), (0.45, 0.5), (0.78, 0.71), (0.35, 0.66), (0.52, 0.4)]


@pytest.mark.parametrize("name", PAGES)
def test_a_lasso_selects_the_points_inside(visit, site, name):
    found = visit(name)
    use_tool(found, "lasso")
    box = found.box()
    places = [(box["x"] + u * box["width"], box["y"] + v * box["height"]) for u, v in CORNERS]
    found.page.mouse.move(*places[0])
    found.page.mouse.down()
    for place in places[1:]:
        found.page.mouse.move(*place, steps=5)
    found.page.mouse.up()
    found.wait("location.hash.includes('lasso=')")
    fragment = found.js("location.hash.slice(1)")
    numbers = list(map(int, parse_qs(fragment)["lasso"][0].split(",")))
    polygon = list(zip(numbers[::2], numbers[1::2], strict=True))
    assert 6 <= len(polygon) <= 12  # the six corners, and those where a pixel was rounded
    chosen = inside(polygon, found.made.points)
    count, rows = int(chosen.sum()), len(set(found.made.row_of[chosen].tolist()))
    assert 0 < count < len(chosen)

    def check(one):
        assert one.page.locator(".selection").get_attribute("data-count") == str(count)
        words = text_of(one, ".selection .count")
        assert words.split()[0].replace(",", "") == str(count)
        assert int(words.split()[-2].replace(",", "")) == rows

    check(found)
    found.page.reload()
    found.ready()
    check(found)


def test_a_legend_selects_a_class(visit):
    found = visit("vae")
    label = unpack(found.made.map["colours"][0]["values"])
    found.page.locator(".legend .chip", has_text="3 (").click()
    assert text_of(found, ".selection .count") == f"{(label == 3).sum()} rows"
    found.page.locator(".selection button", has_text="clear").click()
    assert found.page.locator(".selection .count").count() == 0


@pytest.mark.parametrize(
    ("name", "text", "rows"), [("vae", "17", None), ("penguins", "Biscoe", 168), ("vae", "x", 0)]
)
def test_search_finds_rows(visit, name, text, rows):
    found = visit(name)
    field = found.page.get_by_label("Find rows")
    field.fill(text)
    field.press("Enter")
    if rows == 0:
        assert "No row matches" in text_of(found, ".selection")
    elif rows is None:  # the row of this number in each split
        numbers = unpack(found.made.map["rows"]["numbers"])
        assert text_of(found, ".selection .count") == f"{(numbers == 17).sum()} rows"
        assert "row 17" in text_of(found, ".inspector h3")
    else:
        assert text_of(found, ".selection .count") == f"{rows} rows"
        assert "Biscoe" in text_of(found, ".inspector")


def find(found, text):
    field = found.page.get_by_label("Find rows")
    field.fill(text)
    field.press("Enter")
    return text_of(found, ".selection p")


def test_search_knows_names_of_rows_and_columns(visit):
    found = visit("vae")
    rows, label = found.made.map["rows"], found.made.map["colours"][0]
    numbers, split = unpack(rows["numbers"]), unpack(rows["split"])
    values = unpack(label["values"])
    assert find(found, "row 17").startswith(f"{(numbers == 17).sum()} row")
    name = rows["splits"][1]
    count = ((numbers == 17) & (split == 1)).sum()
    assert find(found, f"{name} row 17").startswith(f"{count} row" if count else "No row matches")
    for text in ("label 3", "label=3"):
        assert find(found, text).startswith(f"{(values == 3).sum()} rows")
    shared = found.page.locator(".selection caption").count()
    if shared:
        assert "label" not in found.page.locator(".selection tbody th").all_inner_texts()
    assert "No row matches" in find(found, "label 33")
    assert "No row matches" in text_of(found, ".hint")


def test_a_cluster_on_the_map_sets_the_colour(visit):
    found = visit("gmvae")
    found.page.get_by_role("button", name="show on the map").first.click()
    chosen = found.page.get_by_label("Colour by").input_value()
    assert chosen == found.made.map["clusters"][0]["colour"]
    assert found.js("aevb.mapPart.colour.name") == chosen
    # The column that defines the selection says nothing about it.
    names = found.page.locator(".selection tbody th").all_inner_texts()
    assert not any(name.startswith(f"{chosen} = ") for name in names)


def test_sequences_say_which_picture_is_the_data(visit):
    found = visit("vrnn")
    tiles = found.page.locator("#sequences figure").first.locator(".tile.wide").first
    assert tiles.locator(".tile .quiet").all_inner_texts() == [
        "data", "draw 0", "draw 1", "draw 2", "draw 3",
    ]  # fmt: skip
    told = found.page.locator("#sequences figcaption").first.inner_text()
    assert "4 of each row (the CSV has 6); the first picture is the data" in told
    ragged = visit("ragged")
    legend = ragged.page.locator("#sequences .named-lines .legend").first
    assert legend.locator(".entry").all_inner_texts() == ["x0", "x1"]


def test_the_keyboard_moves_the_map(visit):
    found = visit("vae")
    canvas = found.page.locator("canvas.map")
    canvas.focus()
    camera = "(({ x, y, scale }) => [x, y, scale])(aevb.mapPart.camera)"
    x, y, scale = found.js(camera)
    found.page.keyboard.press("ArrowRight")
    found.page.keyboard.press("ArrowUp")
    right, up, same = found.js(camera)
    assert right > x
    assert up > y
    assert same == scale
    found.page.keyboard.press("+")
    assert found.js(camera)[2] == pytest.approx(1.5 * scale)
    found.page.keyboard.press("-")
    found.page.keyboard.press("-")
    assert found.js(camera)[2] == pytest.approx(scale / 1.5)
    found.page.keyboard.press("0")
    assert found.js(camera) == [32768, 32768, scale]
    found.page.keyboard.press("n")
    first = found.js("aevb.mapPart.pinned")
    found.page.keyboard.press("n")
    assert found.js("aevb.mapPart.pinned") == (first + 1) % len(found.made.points)
    assert found.page.locator(".inspector").get_attribute("data-point") == str(first + 1)
    found.page.keyboard.press("p")
    assert found.js("aevb.mapPart.pinned") == first


@pytest.mark.parametrize(
    "fragment",
    [
        "row=-5&x=a&y=b&zoom=2&lasso=1,2&colour=none&view=9.9&entries=7&run=-3&theme=x",
        "row=1.5&zoom=1e99&x=1e99&y=-1e99&lasso=1,2,3,4,5,6,7&run=99&view=0.e&entries=-1,99",
        "%E0%A4%A&row=1e9&zoom=-1&run=x&entries=a,b&lasso=,,,",
    ],
)
def test_a_damaged_address_still_opens(site, fragment):
    found = site.open(site.made("gmvae"), fragment=fragment)
    try:
        assert found.trouble == []
        assert text_of(found, "h1") == "gmvae"
        zoom, x, y = found.js(
            "(({ scale, base, x, y }) => [scale / base, x, y])(aevb.mapPart.camera)"
        )
        assert 0.4 <= zoom <= 4000 * (1 + 1e-12)
        assert np.isfinite([x, y]).all()
    finally:
        found.page.close()


# Files --------------------------------------------------------------------------------------------


def test_the_map_is_saved(visit):
    found = visit("vae")
    name, content = found.downloaded(found.page.get_by_label("Save map as PNG"))
    size = struct.unpack(">II", content[16:24])
    assert (name, content[:8]) == ("map.png", b"\x89PNG\r\n\x1a\n")
    width, height = found.js("[aevb.mapPart.canvas.width, aevb.mapPart.canvas.height]")
    assert size[0] == width
    assert size[1] > height  # the key of the colours stands below
    name, content = found.downloaded(found.page.get_by_label("Save the data of map as CSV"))
    made = found.made
    table = csv.reader(io.StringIO(content.decode()))
    names, *lines = table
    columns = dict(zip(names, zip(*lines, strict=True), strict=True))
    assert name == "map.csv"
    assert set(names) == {"split", "row", "z0", "z1", *(one["name"] for one in made.map["colours"])}
    assert len(names) == len(columns)
    assert len(lines) == len(made.points)
    codes = unpack(made.map["spaces"][0]["codes"])
    saved = np.array([columns["z0"], columns["z1"]], float).T
    np.testing.assert_allclose(saved, codes, atol=np.ptp(codes) / 65534)
    rows = made.map["rows"]
    assert list(map(int, columns["row"])) == unpack(rows["numbers"]).tolist()
    assert list(columns["split"]) == [rows["splits"][k] for k in unpack(rows["split"])]
    labels = unpack(made.map["colours"][0]["values"])
    assert list(columns["label"]) == [str(label) for label in labels]


def test_a_selection_and_a_decoded_point_are_saved(visit):
    found = visit("penguins")
    field = found.page.get_by_label("Find rows")
    field.fill("Torgersen")
    field.press("Enter")
    button = found.page.locator(".selection button", has_text="save as CSV")
    name, content = found.downloaded(button)
    lines = list(csv.DictReader(io.StringIO(content.decode())))
    assert (name, len(lines)) == ("selection.csv", 52)
    assert {line["island"] for line in lines} == {"Torgersen"}
    shown = found.decoded()  # of the first row found
    name, content = found.downloaded(found.page.get_by_label("Save the data of decoded as CSV"))
    lines = list(csv.reader(io.StringIO(content.decode())))
    assert (name, lines[0]) == ("decoded.csv", ["variable", "entry", "kind", "value"])
    check_saved_cells(found, shown, lines[1:])


def check_saved_cells(found, shown, lines):
    """Means and standard deviations of a table's columns are in the units of the table."""
    sds = found.js(
        "Object.fromEntries(Object.entries(aevb.mapPart.explorer.found.observed)"
        ".map(([name, { sd }]) => [name, sd && Array.from(sd)]))"
    )
    saved = {(variable, entry, kind): value for variable, entry, kind, value in lines}
    checked = 0
    for name, units in found.made.map["units"].items():
        for j, unit in enumerate(units):
            if unit["kind"] not in ("real", "positive") or "scale" not in unit:
                continue
            mean = unit["location"] + unit["scale"] * shown["means"][name][j]
            sd = unit["scale"] * sds[name][j]
            if unit["kind"] == "positive":
                wanted = {"median": np.exp(mean), "factor of one sd": np.exp(sd)}
            else:
                wanted = {"mean": mean, "sd": sd}
            for kind, value in wanted.items():
                assert float(saved[name, unit["column"], kind]) == pytest.approx(value, rel=1e-6)
                checked += 1
    assert checked >= 4


@pytest.mark.parametrize("name", ["fa", "penguins", "gmvae", "ragged"])
def test_every_picture_is_saved(visit, name):
    """The buttons that save give a file with something in it."""
    found = visit(name)
    buttons = [one for one in found.page.locator(".tools button").all() if one.is_visible()]
    assert len(buttons) >= 4
    # Chromium refuses more than ten files a second.
    for button in buttons[:: math.ceil(len(buttons) / 8)]:
        file, content = found.downloaded(button)
        assert file.rpartition(".")[2] == button.inner_text().lower()
        if file.endswith("svg"):
            assert content.startswith(b"<svg")
        elif file.endswith("csv"):
            lines = list(csv.reader(io.StringIO(content.decode())))
            assert len({len(line) for line in lines}) == 1
            assert len(lines) > 1 or "decoded" in file
        else:
            assert content.startswith(b"\x89PNG")


# Looks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast(site, scheme):
    context = site.browser.new_context(color_scheme=scheme)
    found = site.open(site.made("fa"), context)
    read = """(names) => {
        const probe = document.createElement("canvas")
            .getContext("2d", { willReadFrequently: true });
        const style = getComputedStyle(document.documentElement);
        return names.map((name) => {
            probe.fillStyle = style.getPropertyValue(name).trim();
            probe.fillRect(0, 0, 1, 1);
            return Array.from(probe.getImageData(0, 0, 1, 1).data.slice(0, 3));
        });
    }"""
    *texts, paper, panel = found.js(read, [*WORDS, "--paper", "--panel"])
    assert (sum(paper) < 300) == (scheme == "dark")
    poor = {
        (name, ground): ratio
        for name, text in zip(WORDS, texts, strict=True)
        for ground, colour in (("--paper", paper), ("--panel", panel))
        if (ratio := contrast(text, colour)) < 4.5
    }
    assert poor == {}
    # The button turns to the other scheme, whatever the system's.
    found.page.get_by_text("light / dark").click()
    turned = found.js(read, ["--paper"])[0]
    assert (sum(turned) < 300) == (scheme == "light")
    assert found.trouble == []
    context.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_a_telephone(site, name):
    """In the dark, 360 pixels wide: nothing makes the whole page scroll sideways."""
    context = site.browser.new_context(
        viewport={"width": 360, "height": 740}, color_scheme="dark", has_touch=True
    )
    found = site.open(site.made(name), context)
    wide, window = found.js("[document.documentElement.scrollWidth, innerWidth]")
    assert window == 360
    assert wide <= window, found.js(
        """() => [...document.querySelectorAll("main *")].filter((one) =>
            one.getBoundingClientRect().right > innerWidth + 1).slice(0, 5)
            .map((one) => `${one.tagName}.${one.getAttribute("class")}`)"""
    )
    assert found.trouble == []
    context.close()


NAMELESS = """() => {
    const named = (one) => one.getAttribute("aria-label")?.trim()
        || (one.labels && [...one.labels].some((label) => label.textContent.trim()))
        || (one.tagName === "BUTTON" && one.textContent.trim());
    return [...document.querySelectorAll("button, input, select, textarea")]
        .filter((one) => !named(one)).map((one) => one.outerHTML.slice(0, 200));
}"""


@pytest.mark.parametrize("name", PAGES)
def test_every_control_has_a_name(visit, name):
    found = visit(name)
    assert found.js(NAMELESS) == []
    assert found.page.locator("button").count() > 10
    unnamed = """[...document.querySelectorAll("svg[role=img], canvas[role], [role=group]")]
        .filter((one) => !one.getAttribute("aria-label") && !one.querySelector("title")).length"""
    assert found.js(unnamed) == 0
    identities = found.js("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(identities) == len(set(identities))


# Hostile and damaged runs -------------------------------------------------------------------------


def test_markup_in_names_and_cells_is_text(visit):
    found = visit("hostile")
    folder = found.made.folder.name
    assert text_of(found, "h1") == folder
    assert found.page.title() == f"{folder} – aevb"
    found.js("() => aevb.mapPart.pin(0)")
    cells = found.page.locator(".inspector table.cells").first
    assert {MARKUP, SCRIPT, "=1+1"} == set(cells.locator("th").all_inner_texts())
    assert SCRIPT in cells.locator("td").all_inner_texts()
    found.decoded()
    shown = text_of(found, ".explorer")
    assert SCRIPT in shown
    assert MARKUP in shown
    field = found.page.get_by_label("Find rows")
    field.fill(MARKUP)
    field.press("Enter")
    assert text_of(found, ".selection .count") == "20 rows"
    assert found.js("document.querySelectorAll('#page img, #page script').length") == 0
    name, content = found.downloaded(found.page.locator(".selection button", has_text="save"))
    lines = list(csv.DictReader(io.StringIO(content.decode())))
    assert name == "selection.csv"
    assert {line[SCRIPT] for line in lines} == {MARKUP}
    assert "'=1+1" in lines[0]  # no formula of a spreadsheet


@pytest.fixture(scope="module")
def damaged(site):
    """Open the page of a run after an accident to its folder."""

    def open_damaged(name, accident):
        folder = site.folder / f"damaged-{name}"
        shutil.copytree(site.made("fa").folder, folder)
        accident(folder)
        opened = open_for_page(folder)
        made = write(folder.name, opened, site.folder, folder)
        return site.open(made)

    return open_damaged


def test_a_damaged_history_is_a_remark(damaged):
    def accident(folder: Path):
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(lines[:5]) + "\x00{garbage\n")

    found = damaged("history", accident)
    assert found.page.locator(".problems li").count() >= 1
    assert "metrics.jsonl" in text_of(found, ".problems")
    assert found.page.locator("section#map").count() == 1
    assert found.trouble == []


def test_a_damaged_checkpoint_leaves_curves_and_declaration(damaged):
    def accident(folder: Path):
        for path in (folder / "checkpoints").rglob("*.safetensors"):
            path.write_bytes(b"\xff" * 100)

    found = damaged("checkpoint", accident)
    assert "The trained model cannot be read" in text_of(found, ".problems")
    assert found.page.locator("section#map").count() == 0
    assert found.page.locator("section#curves").count() == 1
    assert "Declaration" in text_of(found, "section#model")
    assert found.trouble == []


def test_a_file_of_another_kind_says_so(site, tmp_path):
    """A document that cannot be shown is a sentence on the page, and no empty window."""
    made = site.made("fa")
    text = made.file.read_text()
    start = text.index('<script type="application/json" id="data">')
    end = text.index("</script>", start)
    (tmp_path / "cut.html").write_text(text[:start] + text[end - 100 :].replace("\x00", ""))
    page = site.context.new_page()
    page.goto((tmp_path / "cut.html").as_uri())
    page.wait_for_selector("#page p.bad")
    assert page.locator("#page").get_attribute("data-ready") == "failed"
    page.close()


def test_the_document_in_the_file_is_the_one_that_was_written(site):
    """What the tests compare with is what the page reads."""
    made = site.made("hostile")
    text = made.file.read_text()
    start = text.index('id="data">') + len('id="data">')
    read = json.loads(text[start : text.index("</script>", start)])
    assert read["runs"][0]["map"]["spaces"] == json.loads(json.dumps(made.map["spaces"]))
