"""Diagrams: every variable and edge is there, and nothing overlaps."""

import itertools
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from aevb import GRU, Bernoulli, Deterministic, Model, Normal, OneHot, Poisson, zoo
from aevb.notebook.diagram import FRAMED, arrange, caption, diagram, drawing

SVG = "{http://www.w3.org/2000/svg}"
LONG = "a_variable_whose_name_is_much_longer_than_any_circle"


def hierarchical():
    """Twelve variables: a chain of latents with skips, two discrete ones and several leaves."""
    p = {"z1": Normal(4), "z2 | z1": Normal(4), "z3 | z2, z1": Normal(4)}
    p |= {f"z{i} | z{i - 1}, z{i - 2}": Normal(4) for i in range(4, 7)}
    p |= {
        "y": OneHot(5),
        "h | z6, y": Deterministic(8),
        "x | h": Normal(9),
        "w | h, z3": Poisson(4),
        "label | z6": Bernoulli(1),
        f"{LONG} | z1, z6": Normal(2),
    }
    q = {f"z6 | x, w, label, {LONG}": Normal(), "y | x, z6": OneHot()}
    return Model(p, q | {f"z{i} | z{i + 1}, x": Normal() for i in range(1, 6)})


def ends():
    return Model(
        p={
            "c": Normal(4),
            "z[0] | c": Normal(3),
            "z[t] | z[t-1], c": Normal(3),
            "x[t] | z[t], u[t], c": Normal(5),
        },
        q={
            "b[t] | b[t+1], x[t]": GRU(8),
            "c | b[0]": Normal(),
            "z[t] | z[t-1], b[t], c": Normal(),
            "z[0] | b[0]": Normal(),
        },
        given={"u": 2},
    )


def table(columns):
    names = [f"column_{i}" for i in range(columns)]
    return Model(
        {"part": OneHot(4), "z": Normal(3)} | {f"{name} | z, part": Normal(1) for name in names},
        {f"part | {', '.join(names)}": OneHot(), f"z | part, {', '.join(names)}": Normal()},
    )


MODELS = dict(zoo) | {
    "smoothing": lambda: zoo.vrnn(posterior="smoothing"),
    "hierarchical": hierarchical,
    "ends": ends,
    "columns": lambda: table(FRAMED - 1),
    "table": lambda: table(40),
}


@pytest.fixture(
    scope="module",
    params=[
        (name, side)
        for name in MODELS
        for side in ("p" if name == "ar" else "pq")  # an autoregression has no q
    ],
)
def drawn(request):
    name, side = request.param
    graph = MODELS[name]().graph
    return graph, side, drawing(graph, side), diagram(graph, side)


def test_no_two_nodes_overlap_and_all_are_inside(drawn):
    *_, text = drawn
    svg = ET.fromstring(text)
    left, top, width, height = map(float, svg.get("viewBox").split())
    boxes = []
    for node in svg.iter(f"{SVG}g"):
        if "node" not in node.get("class").split():
            continue
        shape = next(one for one in node if one.tag in (f"{SVG}circle", f"{SVG}rect"))
        get = {key: float(value) for key, value in shape.items() if key in GEOMETRY}
        if shape.tag == f"{SVG}circle":
            x, y, w, h = get["cx"] - get["r"], get["cy"] - get["r"], 2 * get["r"], 2 * get["r"]
        else:
            x, y, w, h = get["x"], get["y"], get["width"], get["height"]
        boxes.append((x, y, x + w, y + h))
        assert x > left
        assert y > top
        assert x + w < left + width
        assert y + h < top + height
    for a, b in itertools.combinations(boxes, 2):
        apart = max(a[0] - b[2], b[0] - a[2], a[1] - b[3], b[1] - a[3])
        assert apart > 5


GEOMETRY = ("cx", "cy", "r", "x", "y", "width", "height")


def test_no_edge_touches_another_node(drawn):
    _, _, found, _ = drawn
    places = arrange(found)
    for edge, curve in places.curves.items():
        members = {name for end in edge for name in end.split()}
        for name, box in places.boxes.items():
            if name not in members:
                assert box.distance(curve.at(np.linspace(0, 1, 65))).min() > 2, (edge, name)


def test_every_variable_and_every_parent_is_drawn(drawn):
    graph, side, _, text = drawn
    svg = ET.fromstring(text)
    groups = list(svg.iter(f"{SVG}g"))
    names = {one.get("data-name") for one in groups if one.get("data-name")}
    edges = {
        (a, b)
        for one in groups
        if one.get("data-to")
        for a in one.get("data-from").split()
        for b in one.get("data-to").split()
    }
    entries = [entry for entry in graph.entries() if entry.side == side]
    assert {entry.key.name for entry in entries} <= names
    expected = {
        (f"{ref.name}{ref.lag:+d}" if ref.lag else ref.name, entry.key.name)
        for entry in entries
        for ref in entry.key.parents
    }
    assert expected <= edges
    # Beyond these, only p's deterministic nodes that q reads have edges.
    assert {child for _, child in edges - expected} <= set(graph.deterministic)
    assert svg.get("role") == "img"
    assert svg.find(f"{SVG}title").text == f"Graph of {side}"
    described = svg.find(f"{SVG}desc").text
    assert all(name.rstrip("+-1") in described or name in described for name in names)


def test_a_diagram_takes_its_colours_from_the_page(drawn):
    *_, text = drawn
    assert not re.search(r"\sstyle=|#[0-9a-fA-F]{3}|<style|<script|\sid=", text)
    assert set(re.findall(r'(?:fill|stroke)="([^"]*)"', text)) <= {"currentColor", "none"}


def test_time_runs_from_left_to_right():
    graph = zoo.vrnn(posterior="smoothing").graph
    found = drawing(graph, "q")
    boxes = arrange(found).boxes
    rows, steps = arrange(found).plates
    for name in ("h-1", "x-1", "z-1"):
        assert boxes[name].x + boxes[name].half_width < steps[0]
    assert boxes["b+1"].x - boxes["b+1"].half_width > steps[2]
    for name in ("h", "b", "z", "x"):
        assert steps[0] < boxes[name].x < steps[2]
    assert rows[0] < steps[0] < steps[2] < rows[2]
    text = diagram(graph, "q")
    assert "n = 1 … N" in text
    assert "t = 1 … T" in text
    assert text.count('class="edge lagged"') == 4
    assert "t = 1" not in diagram(zoo.vae().graph, "p")


def test_rules_of_the_first_step_are_noted():
    graph = ends().graph
    assert "first step: p(z[0]|c)" in diagram(graph, "p")
    text = diagram(graph, "q")
    assert "first step: q(z[0]|b[0])" in text
    assert ">t = 1<" in text  # c reads the first b
    assert "c depends on b of the first step" in text
    assert caption(graph) == (
        "Shaded: observed; square: given; double border: deterministic; dashed: the step before or "
        "the step after."
    )


def test_many_alike_stand_in_one_frame_with_one_arrow_per_parent():
    framed, single = (diagram(table(n).graph, "p") for n in (FRAMED, FRAMED - 1))
    assert (framed.count('class="frame"'), framed.count('class="edge"')) == (1, 2)
    assert (single.count('class="frame"'), single.count('class="edge"')) == (0, 2 * (FRAMED - 1))


def test_a_long_name_is_shortened_and_told_in_full():
    text = diagram(hierarchical().graph, "p")
    assert f"<title>{LONG}: observed, size 2" in text
    assert f">{LONG[:11]}…{LONG[-10:]}<" in text


def test_names_and_specifications_are_escaped():
    """A name is an identifier, of any letters; the text of a conditional may be anything."""

    class Hostile(Normal):
        def __repr__(self):
            return "<script>alert('&')</script>"

    name = "x変数の名前は長い"
    graph = Model({"z": Normal(2), f"{name} | z": Hostile(3)}, {f"z | {name}": Normal()}).graph
    text = diagram(graph, "p")
    ET.fromstring(text)
    assert "<script" not in text
    assert "&lt;script&gt;alert(&#39;&amp;&#39;)" in text
    assert name in text


def test_there_are_two_sides():
    with pytest.raises(ValueError, match='side is "p" or "q", got "r"'.replace('"r"', "'r'")):
        diagram(zoo.vae(4, 2).graph, "r")
