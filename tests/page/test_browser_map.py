"""The map in a real browser: what is decoded, selected and kept in the address agree."""

import json

import numpy as np
import pytest
import torch
from browser import Made, Sine, Site, contrast, start_browser, write

from aevb import Bernoulli, Beta, Model, Normal, OneHot, fit, mlp
from aevb.cli.page_subjects import _lists
from aevb.page import latent_map
from aevb.page.decoder import decode
from aevb.page.html import to_json
from aevb.page.packing import unpack
from aevb.page.sections import Opened
from aevb.page.subject import Split, Subject

GENERATOR = np.random.default_rng(0)
N = 80
X = GENERATOR.normal(size=(N, 5)).astype(np.float32)
S = GENERATOR.normal(size=(12, 6, 2)).astype(np.float32)
U = GENERATOR.normal(3, 2, size=(N, 1)).astype(np.float32)
K = GENERATOR.integers(3, size=N)

# name → declarations, data and given variables
MODELS = {
    "shares": (
        {"z": Beta(2), "x | z": Normal(5)},
        {"z | x": Beta()},
        {"x": X},
        {},
    ),
    "given": (
        {"z": Normal(3), "x | z, u, k": Normal(5, net=mlp(8))},
        {"z | x": Normal(net=mlp(8))},
        {"x": X, "u": U, "k": K},
        {"u": 1, "k": 3},
    ),
    "grid": (
        {"z": Normal(3), "x | z, u": Normal(5, net=Sine())},
        {"z | x": Normal(net=mlp(8))},
        {"x": X, "u": U},
        {"u": 1},
    ),
    "bits": (
        {"z": Bernoulli(3), "x | z": Normal(5)},
        {"z | x": Bernoulli()},
        {"x": X},
        {},
    ),
    "levels": (
        {"w": Normal(2), "z | w": Normal(3), "x | z": Normal(5)},
        {"z | x": Normal(), "w | z": Normal()},
        {"x": X},
        {},
    ),
    "steps": (
        {"s": Normal(2), "z[t] | s": Normal(2), "x[t] | z[t]": Normal(2)},
        {"s | x[T]": Normal(), "z[t] | x[t], s": Normal()},
        {"x": S},
        {},
    ),
    "classes": (
        {"y": OneHot(25, learned=True), "z | y": Normal(2), "x | z": Normal(5)},
        {"y | x": OneHot(), "z | x, y": Normal()},
        {"x": X},
        {},
    ),
}


def make(name: str, folder) -> Made:
    torch.manual_seed(0)
    p, q, data, given = MODELS[name]
    model = Model(p, q, given=given)
    run = fit(model, data, steps=20)
    labels = np.where(np.arange(len(data["x"])) % 4 == 0, -1, np.arange(len(data["x"])) % 2)
    subject = Subject(name, model, [Split("", data, labels)], run=run)
    return write(name, Opened(name, None, model, run, run.rows, None, subject), folder, None)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    with start_browser() as browser:
        found = Site(browser, folder)
        for name in MODELS:
            found.pages[name] = make(name, folder)
        yield found


@pytest.fixture
def visit(site):
    """Open a page by name in a new tab; at the end, nothing went wrong in it."""
    used = []

    def visit(name, fragment=""):
        used.append(site.open(site.made(name), fragment=fragment))
        used[-1].fresh()
        return used[-1]

    yield visit
    for one in used:
        assert one.trouble == []
        one.page.close()


def text_of(found, selector):
    return found.page.locator(selector).inner_text()


def address(found):
    found.page.wait_for_timeout(200)  # the address is written after a pause
    return found.js("decodeURIComponent(location.hash.slice(1)).replaceAll('+', ' ')")


def pin(found, point, second=False):
    found.js(
        "([point, second]) => { aevb.mapPart.explorer && (aevb.mapPart.explorer.found = null); "
        "aevb.mapPart.pin(point, second); }",
        [point, second],
    )


def agrees(shown, model):
    """The means are torch's for the same fixed values."""
    fixed = {name: np.array(shown["values"][name]) for name in shown["fixed"]}
    for name, one in decode(model, fixed)["observed"].items():
        np.testing.assert_allclose(shown["means"][name], one["mean"], rtol=1e-3, atol=1e-3)


# Classes and given variables ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "variable"), [("cvae", "y (given)"), ("gmvae", "y"), ("m2", "y")])
def test_the_menus_say_which_class_is_decoded(visit, name, variable):
    found = visit(name)
    made = found.made
    for point in (3, 11):
        pin(found, point)
        shown = found.decoded()
        menu = found.page.locator(".controls label", has_text=variable).locator("select")
        assert menu.input_value() == str(np.argmax(shown["values"]["y"]))
        agrees(shown, made.model)
    if name == "cvae":
        split, number = made.place(11)
        assert menu.input_value() == str(int(split.data["y"][number]))
    else:
        menu.select_option("")
        assert "y" not in found.decoded()["fixed"]
        assert menu.input_value() == ""
        assert menu.locator("option").first.inner_text().startswith("p chooses")


def test_a_row_is_decoded_with_its_own_given_variables(visit):
    found = visit("given")
    for point in (5, 40):
        pin(found, point)
        shown = found.decoded()
        assert shown["values"]["u"] == pytest.approx(U[point])
        assert np.argmax(shown["values"]["k"]) == K[point]
        agrees(shown, found.made.model)
        slider = found.page.locator(".slider input[aria-label=u]")
        step = float(slider.get_attribute("step"))
        assert float(slider.input_value()) == pytest.approx(float(U[point, 0]), abs=step)
    slider.focus()
    found.js("() => { aevb.mapPart.explorer.found = null; }")
    found.page.keyboard.press("Home")
    again = found.decoded()
    assert again["values"]["u"] == pytest.approx([float(U.min())], rel=1e-5)
    agrees(again, found.made.model)


def test_the_origin_of_decoded_values_is_kept(visit):
    found = visit("cvae")
    pin(found, 5)
    found.decoded()
    made = found.made
    name = found.js("aevb.mapPart.contents.name(5)")
    y = int(np.argmax(found.decoded()["values"]["y"]))
    other = (y + 3) % 10
    height = (
        "document.querySelector('.sliders').getBoundingClientRect().top"
        " - document.querySelector('.explorer').getBoundingClientRect().top"
    )
    before = found.js(height)
    slider = found.page.get_by_label("z1", exact=True)
    slider.focus()
    found.page.keyboard.press("ArrowRight")
    found.decoded()
    assert text_of(found, ".origin") == f"z of {name}, z1 set by hand."
    assert found.js(height) == before
    menu = found.page.locator(".controls label", has_text="y (given)").locator("select")
    menu.select_option(str(other))
    told = text_of(found, ".origin")
    assert f"z of {name} (y = {y}), z1 set by hand, decoded with y = {other}" in told
    reads = "y" in [one.name for one in made.model.graph.reads("p", "z")]
    assert ("so z may still say what y was" in told) == reads


def test_a_draw_of_p_stays_a_draw_when_the_class_is_changed(visit):
    found = visit("gmvae")
    found.page.get_by_role("button", name="from p").click()
    found.decoded()
    assert text_of(found, ".origin") == "A draw of the latents from p."
    menu = found.page.locator(".controls label", has_text="y").locator("select")
    pin(found, 5)
    found.decoded()
    menu.select_option("3")
    found.decoded()
    assert text_of(found, ".origin") == "y = 3 set by hand. z: p's mean or most probable class."
    found.page.get_by_role("button", name="from p").click()
    zs = []
    for k in (3, 7, 3):
        menu.select_option(str(k))
        shown = found.decoded()
        zs.append(shown["values"]["z"])
        assert "z" not in shown["fixed"]
    assert zs[0] == zs[2]
    assert zs[0] != zs[1]
    mean = decode(found.made.model, {"y": np.eye(10)[3]})["latents"]["z"]
    assert np.abs(np.array(zs[0]) - mean).max() > 0.05
    assert text_of(found, ".origin") == "A draw of the latents from p, y = 3 set by hand."


def test_a_point_of_the_map_has_the_usual_given_values(visit):
    found = visit("given")
    found.js("() => { aevb.mapPart.useTool('decode'); aevb.mapPart.moveCross([200, 200]); }")
    shown = found.decoded()
    assert shown["values"]["u"] == pytest.approx(U.mean(0), rel=1e-5)
    assert np.argmax(shown["values"]["k"]) == np.bincount(K).argmax()


def test_the_mean_code_of_a_selection_is_decoded_with_its_own_classes(visit):
    found = visit("given")
    pin(found, int(np.flatnonzero(K == 0)[0]))
    found.decoded()
    found.js(
        """() => {
            window.decoded = [];
            const { decoding } = aevb.mapPart, run = decoding.run.bind(decoding);
            decoding.run = async (values, options) => {
                const result = await run(values, options);
                if (options.purpose === "selection") window.decoded.push([Object.fromEntries(
                    Object.entries(values).map(([name, value]) => [name, Array.from(value)])),
                    Array.from(result.observed.x.mean)]);
                return result;
            };
        }"""
    )
    rows = np.flatnonzero(K == 2)[:7].tolist()
    found.js("(rows) => aevb.mapPart.selectRows(rows, 'some')", rows)
    found.wait("document.querySelector('.mean-decoded')?.textContent.includes('mean code')")
    values, mean = found.js("window.decoded.at(-1)")
    codes = unpack(found.made.map["spaces"][0]["codes"])
    np.testing.assert_allclose(values["z"], codes[rows].mean(0), rtol=1e-5)
    np.testing.assert_allclose(values["u"], U[rows].mean(0), rtol=1e-5)
    assert np.argmax(values["k"]) == 2
    wanted = decode(found.made.model, {key: np.array(one) for key, one in values.items()})
    np.testing.assert_allclose(mean, wanted["observed"]["x"]["mean"], atol=1e-3)
    text = text_of(found, ".mean-decoded")
    assert "k = 2" in text
    assert "mean u = " in text


def test_a_line_between_rows_holds_the_classes_of_the_first(visit):
    found = visit("given")
    pin(found, 4)
    pin(found, 9, second=True)
    found.wait("document.querySelectorAll('.frames .tile').length === 9")
    caption = text_of(found, ".between figcaption")
    assert f"k = {K[4]}" in caption
    assert "held as in row 4" in caption


def test_a_line_of_a_latent_frees_what_p_draws_from_it(visit):
    found = visit("levels")
    found.js("() => aevb.mapPart.showView(Object.keys(aevb.mapPart.map.spaces).find("
             "(i) => aevb.mapPart.map.spaces[i].latent === 'w') + '.0')")  # fmt: skip
    pin(found, 4)
    pin(found, 9, second=True)
    found.wait("document.querySelectorAll('.frames .tile').length === 9")
    lines = [
        line.locator("td").all_inner_texts() for line in found.page.locator(".frames tr").all()[1:]
    ]
    # From the code of the first row to that of the second, with z as p expects it.
    for point, line in ((4, lines[0]), (9, lines[-1])):
        space = next(one for one in found.made.map["spaces"] if one["latent"] == "w")
        wanted = decode(found.made.model, {"w": unpack(space["codes"])[point]})["observed"]["x"]
        shown = [float(cell.replace("−", "-")) for cell in line]
        np.testing.assert_allclose(shown, wanted["mean"], atol=2e-3)
    assert lines[0] != lines[-1]


# Decoded beforehand, or by a server ---------------------------------------------------------------


def nearest(made: Made, code):
    """The grid's mean nearest to the projection of a code."""
    view, grid = made.view, made.map["decoder"]["planes"][0]
    place = []
    for side, axis in zip(("across", "up"), view["axes"], strict=True):
        ends = np.linspace(view[side]["low"], view[side]["high"], grid["steps"])
        along = np.dot(axis, code - np.array(view["origin"]))
        place.append(int(np.abs(ends - along).argmin()))
    return unpack(grid["values"])[place[1] * grid["steps"] + place[0]]


def test_a_grid_shows_what_lies_nearest_to_a_row_in_every_view(visit):
    found = visit("grid")
    made = found.made
    codes = unpack(made.map["spaces"][0]["codes"])
    views = [key for key, _ in found.js(
        "[...aevb.mapPart.toolbar.querySelector('select').options].map((o) => [o.value, o.text])"
    )]  # fmt: skip
    assert len(views) == 3
    for view in views:
        found.js("(view) => aevb.mapPart.showView(view)", view)
        for point in (2, 33):
            pin(found, point)
            shown = found.decoded()
            np.testing.assert_allclose(shown["means"]["x"], nearest(made, codes[point]), atol=1e-6)
    caption = text_of(found, ".explorer figcaption")
    assert "plane of the first two principal components" in caption
    assert "with u = " in caption
    # What only the network could do is not offered.
    assert found.page.locator(".slider").count() == 0
    assert found.page.locator(".explorer .controls select").count() == 0
    assert not found.page.locator(".between").is_visible()


def test_a_grid_of_two_entries_follows_sliders_and_lines(visit):
    found = visit("sine")
    slider = found.page.locator(".slider input").first
    slider.focus()
    found.page.keyboard.press("End")
    shown = found.decoded()
    code = np.array(shown["values"]["z"])
    np.testing.assert_allclose(shown["means"]["x"], nearest(found.made, code), atol=1e-6)
    pin(found, 4)
    pin(found, 9, second=True)
    found.wait("document.querySelectorAll('.frames .tile').length === 9")


def test_a_server_decodes_what_the_page_cannot(visit):
    """The requests are JSON, as over HTTP, and an answer that is an error is said."""
    found = visit("grid")
    model, asked = found.made.model, []

    def answer(text: str) -> str:
        request = json.loads(text)
        asked.append(request)
        values = {name: np.array(value) for name, value in request["values"].items()}
        return to_json(_lists(decode(model, values, draw=request["draw"], seed=request["seed"])))

    found.page.expose_function("answer", answer)
    found.js(
        """() => {
            const { decoding, explorer } = aevb.mapPart;
            decoding.live = async (request) => JSON.parse(await answer(JSON.stringify(request)));
            explorer.buildControls();
            explorer.buildSliders();
        }"""
    )
    pin(found, 7)
    shown = found.decoded()
    assert shown["values"]["u"] == pytest.approx(U[7])
    agrees(shown, model)
    assert all(isinstance(value, list) for value in asked[-1]["values"].values())
    found.js("() => { aevb.mapPart.decoding.live = async () => { throw new Error('Gone.'); }; }")
    found.js("() => aevb.mapPart.pin(8)")
    found.wait("document.querySelector('.decoded .bad')")
    assert text_of(found, ".decoded") == "This could not be decoded: Gone."


def test_sequences_have_nothing_to_decode(visit):
    found = visit("steps")
    assert found.page.locator(".explorer").count() == 0
    assert "without time steps" in text_of(found, ".side")


def test_codes_that_the_page_does_not_hold_are_said_to_be_projections(site, tmp_path, monkeypatch):
    monkeypatch.setattr(latent_map, "CODES", 100)
    found = site.open(make("given", tmp_path))
    pin(found, 6)
    found.decoded()
    assert "Only the first two principal components of z of row 6" in text_of(found, ".explorer")
    found.js("aevb.mapPart.selectRows([1, 2, 3], 'some')")
    found.wait("document.querySelector('.mean-decoded')?.textContent.includes('mean code')")
    assert "of two principal components only" in text_of(found, ".mean-decoded")
    assert found.trouble == []
    found.page.close()


def test_sliders_stay_in_the_support_of_their_latent(visit):
    found = visit("bits")
    ends = found.js(
        "[...document.querySelectorAll('.slider input')].map((o) => [o.min, o.max, o.step])"
    )
    assert ends == [["0", "1", "1"]] * 3
    other = visit("shares")
    other.js("() => { aevb.mapPart.useTool('decode'); aevb.mapPart.moveCross([-500, -500]); }")
    shown = other.decoded()
    assert 0 <= min(shown["values"]["z"]) <= max(shown["values"]["z"]) <= 1
    agrees(shown, other.made.model)
    found.page.bring_to_front()
    options = found.js("[...aevb.mapPart.toolbar.querySelector('select').options].length")
    assert options == 2  # no entries of zeros and ones against each other


# Rows and views -----------------------------------------------------------------------------------


def test_a_marked_row_stays_the_same_row_in_another_space(visit):
    found = visit("steps")
    spaces = found.js("aevb.mapPart.map.spaces.map((s) => [s.latent, Boolean(s.step)])")
    (plain,) = [i for i, (_, step) in enumerate(spaces) if not step]
    (timed,) = [i for i, (_, step) in enumerate(spaces) if step]
    found.js("(view) => aevb.mapPart.showView(view)", f"{plain}.0")
    pin(found, 7)
    found.js("(view) => aevb.mapPart.showView(view)", f"{timed}.0")
    assert found.js("aevb.mapPart.rowOf(aevb.mapPart.pinned)") == 7
    found.js("aevb.mapPart.pin(aevb.mapPart.pinned + 2)")
    assert found.js("aevb.mapPart.space.step.array[aevb.mapPart.pinned]") == 2
    assert "row=0.7.2" in address(found)
    found.page.reload()
    found.ready()
    found.wait("aevb.mapPart.pinned >= 0")
    assert found.js("aevb.mapPart.identity(aevb.mapPart.pinned)") == {"row": 7, "step": 2}
    found.js("(view) => aevb.mapPart.showView(view)", f"{plain}.0")
    assert found.js("aevb.mapPart.pinned") == 7


def test_the_same_entry_never_stands_on_both_axes(visit):
    found = visit("given", fragment="view=0.e&entries=1,1")
    assert found.js("aevb.mapPart.entries") == [0, 1]
    choices = found.page.locator(".entries select")
    choices.first.select_option("1")
    assert found.js("aevb.mapPart.entries") == [1, 0]


# Selections and the address -----------------------------------------------------------------------


def same_selection(found, count):
    """What is drawn, listed and counted, after a reload too."""
    for _ in range(2):
        assert found.js("aevb.mapPart.selection.mask.reduce((a, b) => a + b)") == count
        assert found.page.locator(".selection").get_attribute("data-count") == str(count)
        address(found)
        found.page.reload()
        found.ready()


def test_the_address_keeps_every_kind_of_selection(visit):
    found = visit("vae")
    labels = unpack(found.made.map["colours"][0]["values"])
    found.page.locator(".legend .chip", has_text="3 (").click()
    assert "select=class:label:3" in address(found)
    same_selection(found, int((labels == 3).sum()))
    field = found.page.get_by_label("Find rows")
    field.fill("17")
    field.press("Enter")
    assert "select=find:17" in address(found)
    assert "class" not in address(found)
    same_selection(found, int((unpack(found.made.map["rows"]["numbers"]) == 17).sum()))
    field = found.page.get_by_label("Find rows")
    field.fill("no such row")
    field.press("Enter")
    assert "select" not in address(found)
    assert found.js("aevb.mapPart.selection") is None
    assert "No row matches" in text_of(found, ".selection")


def test_a_lasso_belongs_to_the_view_in_which_it_was_drawn(visit):
    found = visit("given")
    found.page.get_by_label("Zoom in").click()
    found.page.get_by_role("button", name="Select shown").click()
    count = int(found.page.locator(".selection").get_attribute("data-count"))
    assert 0 < count < N
    assert found.page.locator(".over .lasso").count() == 1
    found.js("aevb.mapPart.showView('0.e')")
    found.wait("!aevb.mapPart.waiting")
    assert found.page.locator(".over .lasso").count() == 0
    assert "in=0.0" in address(found)
    same_selection(found, count)


def test_no_colour_and_a_changed_address_are_kept(visit):
    found = visit("given")
    found.page.get_by_label("Colour by").select_option("")
    assert "colour=-" in address(found)
    found.page.reload()
    found.ready()
    assert found.js("aevb.mapPart.colour") is None
    with found.page.expect_navigation():
        found.js("() => { location.hash = 'colour=label&row=0.5'; }")
    found.ready()
    found.wait("aevb.mapPart.pinned === 5")
    assert found.js("aevb.mapPart.colour.name") == "label"
    # A link within the page moves the focus, and the address stays.
    found.page.locator("a.skip").focus()
    found.page.keyboard.press("Enter")
    found.wait("document.activeElement.id === 'map'")
    assert "row=0.5" in address(found)


# Hands --------------------------------------------------------------------------------------------


def fingers(found, *events):
    """Send pointer events (kind, finger, x, y) to the map."""
    found.js(
        """(events) => {
            const { canvas } = aevb.mapPart, box = canvas.getBoundingClientRect();
            canvas.setPointerCapture = () => {};
            for (const [kind, pointerId, x, y] of events) {
                canvas.dispatchEvent(new PointerEvent(`pointer${kind}`, {
                    pointerId, pointerType: "touch",
                    clientX: box.left + x, clientY: box.top + y,
                }));
            }
        }""",
        [list(one) for one in events],
    )


@pytest.mark.parametrize("tool", ["move", "lasso"])
def test_two_fingers_zoom_and_do_nothing_else(visit, tool):
    found = visit("given")
    found.js("aevb.mapPart.selectRows([1, 2], 'two')")
    found.js("(tool) => aevb.mapPart.useTool(tool)", tool)
    zoom = "aevb.mapPart.camera.scale / aevb.mapPart.camera.base"
    point = found.js("aevb.mapPart.camera.toPixel(aevb.mapPart.points.across[3], "
                     "aevb.mapPart.points.up[3])")  # fmt: skip
    x, y = point
    fingers(found, ("down", 1, x, y), ("down", 2, x + 50, y), ("move", 2, x + 100, y),
            ("up", 2, x + 100, y), ("up", 1, x, y))  # fmt: skip
    assert found.js(zoom) == pytest.approx(2)
    assert found.js("aevb.mapPart.pinned") == -1
    assert found.js("aevb.mapPart.selection.count") == 2
    # A finger that the browser takes away to scroll pins nothing.
    x, y = found.js("aevb.mapPart.camera.toPixel(aevb.mapPart.points.across[3], "
                    "aevb.mapPart.points.up[3])")  # fmt: skip
    fingers(found, ("down", 1, x, y), ("cancel", 1, x, y))
    assert found.js("aevb.mapPart.pinned") == -1


def test_the_wheel_scrolls_the_page_until_the_map_is_chosen(visit):
    found = visit("given")
    zoom = "aevb.mapPart.camera.scale / aevb.mapPart.camera.base"
    box = found.box()
    found.page.mouse.move(box["x"] + 100, box["y"] + 100)
    found.page.mouse.wheel(0, -300)
    found.wait("!aevb.mapPart.hint.hidden")
    assert found.js(zoom) == 1
    assert "Ctrl" in text_of(found, ".hint")
    found.page.locator("canvas.map").focus()
    box = found.box()
    found.page.mouse.move(box["x"] + 100, box["y"] + 100)
    found.page.mouse.wheel(0, -300)
    found.wait(f"{zoom} > 1.1")


# Looks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_scales_and_unknown_classes_stand_out(site, scheme):
    context = site.browser.new_context(color_scheme=scheme)
    found = site.open(site.made("given"), context)
    read = """(name) => {
        aevb.mapPart.showColour(name);
        const word = (w) => [w & 255, (w >> 8) & 255, (w >> 16) & 255];
        const { palette, hollow } = aevb.mapPart.paintIndex;
        const root = getComputedStyle(document.documentElement);
        const style = root.getPropertyValue("--paper").trim();
        const paper = [1, 3, 5].map((i) => parseInt(style.slice(i, i + 2), 16));
        return [[...palette].map(word), hollow, paper];
    }"""
    palette, hollow, paper = found.js(read, "ELBO")
    scale = palette[:hollow]
    assert all(contrast(colour, paper) >= 1.9 for colour in scale)
    palette, hollow, paper = found.js(read, "label")
    assert hollow == 2
    assert contrast(palette[hollow], paper) >= 1.5
    # The unknown class can be selected, and is a ring in the legend.
    found.page.locator(".legend .chip", has_text="unknown").click()
    assert text_of(found, ".selection .count") == f"{N // 4} rows"
    assert found.page.locator(".legend .dot.hollow").count() == 1
    assert found.trouble == []
    context.close()


def test_many_classes_are_said_to_look_alike(visit):
    found = visit("classes")
    found.page.get_by_label("Colour by").select_option("cluster y")
    assert "more than 20 classes" in text_of(found, ".legend")


def test_a_dark_page_is_printed_light(site):
    found = site.open(site.made("given"), fragment="theme=dark")
    corner = "[...aevb.mapPart.image.data.slice(0, 3)]"
    assert sum(found.js(corner)) < 200
    found.js("() => { dispatchEvent(new Event('beforeprint')); }")
    assert sum(found.js(corner)) == 765
    found.js("() => { dispatchEvent(new Event('afterprint')); }")
    assert sum(found.js(corner)) < 200
    assert found.js("document.documentElement.dataset.theme") == "dark"
    assert found.trouble == []
    found.page.close()


def test_pictures_of_parts_hold_what_is_shown(visit):
    """Saved rows, selections and lines are not blank, and drawings have a ground."""
    found = visit("given")
    pin(found, 4)
    pin(found, 9, second=True)
    found.js("aevb.mapPart.selectRows([1, 2, 3], 'some')")
    found.wait("document.querySelectorAll('.frames .tile').length === 9")
    for name in ("row", "selection", "interpolation", "decoded"):
        file, content = found.downloaded(found.page.get_by_label(f"Save {name} as PNG"))
        assert file == f"{name}.png"
        assert len(content) > 1500
    ground = found.page.locator("figure .tools button", has_text="SVG").first
    _, content = found.downloaded(ground)
    assert b"<rect" in content


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_classes_stand_out_from_the_paper(site, scheme):
    """The colours of the legend, in both schemes, against the paper (WCAG asks 3 of a picture)."""
    context = site.browser.new_context(color_scheme=scheme)
    found = site.open(site.made("vae"), context)
    colours, paper = found.js(
        """() => {
            const numbers = (text) => text.match(/[0-9]+/g).map(Number);
            const chips = [...document.querySelectorAll(".legend .chip")];
            const dots = chips.map((one) => one.querySelector("*"));
            return [dots.map((one) => numbers(getComputedStyle(one).backgroundColor)),
                numbers(getComputedStyle(document.body).backgroundColor)];
        }"""
    )
    drawn = "() => aevb.mapPart.paintIndex.palette[0]"
    before = found.js(drawn)
    found.page.get_by_text("light / dark").click()
    assert found.js(drawn) != before
    context.close()
    assert len(colours) >= 10
    poor = [colour for colour in colours[:10] if contrast(colour[:3], paper[:3]) < 2]
    assert poor == []
    assert len({tuple(colour) for colour in colours[:10]}) == 10
