"""Diagrams of p and q as SVG: nodes for variables, arrows from parents, plates for rows and steps.

Time runs from left to right: a variable that is read at the step before stands left of the plate of
steps, one that is read at the step after stands right of it. Many variables with the same parents
and children, such as the columns of a table, stand in one frame with one arrow per parent. All
colours are ``currentColor``, so a diagram follows the text of its page, light or dark; its classes
let the page's CSS change them.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup

from aevb.declare.graph import Entry, Graph
from aevb.notebook.layout import GAP, Box, Curve, Edge, place, route, stack

RADIUS = 23.0
LETTER, WORD, SMALL = 17.0, 13.0, 9.5  # font sizes of one letter, of a word, of sizes and notes
LONGEST = 22  # characters of a name; the middle of a longer one is left out
FRAMED = 5  # variables with the same parents and children that stand in one frame
PLATE = 15.0  # distance of a plate from its nodes
LABEL = 15.0  # height of a plate's label, or of a line of notes
MARGIN = 3.0
SERIF = "'STIX Two Text', 'Times New Roman', serif"
DETERMINISTIC = "deterministic"


@dataclass(frozen=True)
class Node:
    """A variable of the diagram, or its neighbour in time (``lag`` is −1 or +1)."""

    name: str
    kind: str  # "latent", "observed", "given" or "deterministic"
    timed: bool
    size: str
    title: str
    lag: int = 0

    @property
    def id(self) -> str:
        return f"{self.name}{self.lag:+d}" if self.lag else self.name

    @property
    def index(self) -> str:
        return "" if not self.timed else f"t{'−+'[self.lag > 0]}1" if self.lag else "t"

    @property
    def shown(self) -> str:
        """The name, shortened in the middle if it is very long."""
        cut = LONGEST // 2
        long = len(self.name) > LONGEST
        return f"{self.name[:cut]}…{self.name[1 - cut :]}" if long else self.name

    @property
    def font(self) -> float:
        return LETTER if len(self.name) == 1 else WORD

    @property
    def text_width(self) -> float:
        letters = sum(1.0 if unicodedata.east_asian_width(c) in "WF" else 0.58 for c in self.shown)
        return letters * self.font + 0.5 * 0.7 * self.font * len(self.index)

    @property
    def shape(self) -> Box:
        """A circle, or a square if it is given; longer if the name needs it."""
        half = self.text_width / 2 + 8.0
        half = max(RADIUS, half if half <= RADIUS else half + 5.0)
        return Box(0.0, 0.0, half, RADIUS, round=self.kind != "given")


@dataclass(frozen=True)
class Drawing:
    """What the diagram of one side shows."""

    side: str
    nodes: dict[str, Node]
    edges: dict[Edge, str]  # → "first" or "last" if that step of a sequence is read, otherwise ""
    notes: tuple[str, ...]


def diagram(graph: Graph, side: str) -> str:
    """Draw the graph of p or q (``side``) as SVG.

    Latents are white circles, observed variables shaded ones, given variables squares, and
    deterministic nodes have a double border. In the diagram of q, nodes that p computes and q reads
    are drawn with their own parents.

    >>> from aevb.declare.families import Normal
    >>> graph = Graph({"z": Normal(2), "x | z": Normal(3)}, {"z | x": Normal()}, {})
    >>> svg = diagram(graph, "p")
    >>> svg.count("<circle"), svg.count('class="edge"')
    (2, 1)
    """
    return str(_svg(drawing(graph, side)))


def caption(graph: Graph) -> str:
    """Explain the shapes of the two diagrams, in words.

    >>> from aevb.declare.families import Normal
    >>> graph = Graph({"z": Normal(2), "x | z": Normal(3)}, {"z | x": Normal()}, {})
    >>> caption(graph)
    'Shaded: observed.'
    """
    nodes = [node for side in "pq" for node in drawing(graph, side).nodes.values()]
    kinds = {node.kind for node in nodes}
    said = {
        "observed": "shaded: observed",
        "given": "square: given",
        DETERMINISTIC: "double border: deterministic",
    }
    parts = [words for kind, words in said.items() if kind in kinds]
    neighbours = [
        words
        for lag, words in ((-1, "the step before"), (1, "the step after"))
        if any(node.lag == lag for node in nodes)
    ]
    parts += [f"dashed: {' or '.join(neighbours)}"] if neighbours else []
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


# Content ------------------------------------------------------------------------------------------


def drawing(graph: Graph, side: str) -> Drawing:
    """Collect the nodes, edges and notes of one side."""
    if side not in ("p", "q"):
        raise ValueError(f'side is "p" or "q", got {side!r}.')
    entries = list(_entries(graph, side))
    names = dict.fromkeys(
        name
        for entry in entries
        for name in (*(ref.name for ref in entry.key.parents), entry.key.name)
    )
    nodes = {name: _node(graph, side, name) for name in names}
    edges: dict[Edge, str] = {}
    for entry in entries:
        for ref in entry.key.parents:
            node = nodes[ref.name]
            if ref.lag:
                node = _node(graph, side, ref.name, ref.lag)
                nodes[node.id] = node
            # The rule of an end reads its own step, so only a static variable reads an end.
            end = ref.at if ref.at in ("first", "last") and not entry.key.target.timed else ""
            edge = (node.id, entry.key.name)
            edges[edge] = edges.get(edge) or end
    notes = tuple(
        f"{entry.key.at} step: {entry.id}" for entry in entries if entry.key.at in ("first", "last")
    )
    return Drawing(side, nodes, edges, notes)


def _entries(graph: Graph, side: str) -> Iterator[Entry]:
    """The entries of a side, after those of p's deterministic nodes that q reads."""
    own = [entry for entry in graph.entries() if entry.side == side]
    wanted = [ref.name for entry in own for ref in entry.key.parents]
    read: set[str] = set()
    while side == "q" and wanted:
        name = wanted.pop()
        if name in graph.p and graph.is_deterministic(name) and name not in read:
            read.add(name)
            wanted += [ref.name for ref in graph.reads("p", name)]
    yield from (entry for entry in graph.entries() if entry.side == "p" and entry.key.name in read)
    yield from own


def _node(graph: Graph, side: str, name: str, lag: int = 0) -> Node:
    kind = (
        "given"
        if name in graph.given
        else DETERMINISTIC
        if graph.is_deterministic(name)
        else "latent"
        if name in graph.latents
        else "observed"
    )
    size = "×".join(map(str, graph.shapes[name]))
    declared = "q" if side == "q" and name in graph.q else "p"
    spec = "" if kind == "given" else f", {graph.rule(declared, name).spec!r}"
    when = {-1: " at the step before", 0: "", 1: " at the step after"}[lag]
    return Node(
        name, kind, graph.timed[name], size, f"{name}{when}: {kind}, size {size}{spec}", lag
    )


def _described(found: Drawing) -> str:
    """The diagram in words: every variable with its parents, then the kinds."""
    nodes = [node for node in found.nodes.values() if not node.lag]
    parents: dict[str, list[str]] = {node.id: [] for node in nodes}
    for (parent, child), end in found.edges.items():
        node = found.nodes[parent]
        when = {-1: " of the step before", 0: "", 1: " of the step after"}[node.lag]
        when += f" of the {end} step" if end else ""
        parents[child].append(f"{node.name}{when}")
    lines = [f"{name} depends on {', '.join(read)}" for name, read in parents.items() if read]
    for kind in dict.fromkeys(node.kind for node in nodes):
        lines.append(f"{kind}: {', '.join(node.name for node in nodes if node.kind == kind)}")
    steps = any(node.timed for node in nodes)
    lines.append("repeated for every row" + (" and every step of a sequence" if steps else ""))
    return "; ".join([*lines, *found.notes]) + "."


def _frames(found: Drawing) -> dict[str, tuple[str, ...]]:
    """The variables that share a frame, by the name of the frame in the layout."""
    read = {node.name for node in found.nodes.values() if node.lag}
    alike: dict[object, list[str]] = {}
    for node in found.nodes.values():
        if node.name not in read:
            parents = frozenset((a, end) for (a, b), end in found.edges.items() if b == node.id)
            children = frozenset((b, end) for (a, b), end in found.edges.items() if a == node.id)
            alike.setdefault((parents, children, node.kind, node.timed), []).append(node.id)
    return {" ".join(names): tuple(names) for names in alike.values() if len(names) >= FRAMED}


# Arrangement --------------------------------------------------------------------------------------

Rectangle = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Arrangement:
    """A drawing with its places."""

    boxes: dict[str, Box]  # of all nodes
    frames: dict[str, Box]
    curves: dict[Edge, Curve]  # between nodes and frames
    ends: dict[Edge, str]
    plates: tuple[Rectangle, ...]  # of the rows, and of the steps if there are any


def arrange(found: Drawing) -> Arrangement:
    """Find places for all nodes and edges: static variables, step before, steps, step after."""
    frames = _frames(found)
    frame_of = {name: frame for frame, names in frames.items() for name in names}
    nodes = {name: node for name, node in found.nodes.items() if name not in frame_of}
    inside = {
        frame: _grid([found.nodes[name] for name in names]) for frame, names in frames.items()
    }
    shapes = {name: node.shape for name, node in nodes.items()}
    shapes |= {frame: shape for frame, (shape, _) in inside.items()}
    timed = {name: node.timed for name, node in nodes.items()}
    timed |= {frame: found.nodes[names[0]].timed for frame, names in frames.items()}
    ends = {(frame_of.get(a, a), frame_of.get(b, b)): end for (a, b), end in found.edges.items()}
    lags = {name: node.lag for name, node in nodes.items() if node.lag}
    edges = [edge for edge in ends if edge[0] not in lags]
    static = [name for name in shapes if not timed[name]]
    steps = [name for name in shapes if timed[name] and name not in lags]
    placed = place([static, steps], edges, shapes)
    before, after = (
        stack({name: placed[nodes[name].name].y for name in lags if lags[name] == lag}, shapes)
        for lag in (-1, 1)
    )
    boxes: dict[str, Box] = {}
    plate, right = (0.0, 0.0, 0.0, 0.0), 0.0
    for block in (
        {name: placed[name] for name in static},
        before,
        {name: placed[name] for name in steps},
        after,
    ):
        if not block:
            continue
        own = [edge for edge in edges if edge[0] in block and edge[1] in block]
        extent = _extent(block.values(), route(own, block).values())
        beside = PLATE if steps and block.keys() == set(steps) else 0.0
        shift = (right + GAP + beside - extent[0]) if boxes else -extent[0]
        boxes |= {name: replace(box, x=box.x + shift) for name, box in block.items()}
        right = extent[2] + shift + beside
        if beside:
            plate = (extent[0] + shift, extent[1], extent[2] + shift, extent[3])
    curves = route([*edges, *(edge for edge in ends if edge[0] in lags)], boxes)
    plates = [_plate_around(plate)] if steps else []
    whole = _extent(boxes.values(), curves.values())
    if steps:
        (a, b, c, d), (e, f, g, h) = whole, plates[0]
        whole = (min(a, e), min(b, f), max(c, g), max(d, h))
    plates.insert(0, _plate_around(whole))
    for frame, (_, cells) in inside.items():
        box = boxes[frame]
        boxes |= {
            name: replace(cell, x=cell.x + box.x, y=cell.y + box.y) for name, cell in cells.items()
        }
    return Arrangement(
        {name: box for name, box in boxes.items() if name not in frames},
        {frame: boxes[frame] for frame in frames},
        curves,
        ends,
        tuple(plates),
    )


def _grid(nodes: Sequence[Node]) -> tuple[Box, dict[str, Box]]:
    """A frame around many nodes: its shape, and the nodes relative to its centre."""
    width = 2 * max(node.shape.half_width for node in nodes) + GAP / 2
    height = 2 * RADIUS + GAP / 2
    columns = min(len(nodes), max(3, round(math.sqrt(len(nodes) * 2 * height / width))))
    rows = math.ceil(len(nodes) / columns)
    cells = {
        node.id: replace(
            node.shape,
            x=(i % columns - (columns - 1) / 2) * width,
            y=(i // columns - (rows - 1) / 2) * height,
        )
        for i, node in enumerate(nodes)
    }
    half = (columns * width / 2 + 4, rows * height / 2 + 4)
    return Box(0.0, 0.0, *half, round=False), cells


def _extent(boxes: Iterable[Box], curves: Iterable[Curve]) -> Rectangle:
    corners = [
        (box.x + sign * box.half_width, box.y + sign * box.half_height)
        for box in boxes
        for sign in (-1, 1)
    ]
    points = [np.array(corners), *(curve.at(np.linspace(0, 1, 17)) for curve in curves)]
    both = np.concatenate(points)
    (left, top), (right, bottom) = both.min(0), both.max(0)
    return float(left), float(top), float(right), float(bottom)


def _plate_around(inner: Rectangle) -> Rectangle:
    """The rectangle of a plate, with a line for its label below the nodes."""
    left, top, right, bottom = inner
    return left - PLATE, top - PLATE, right + PLATE, bottom + PLATE + LABEL - 5


# Drawing ------------------------------------------------------------------------------------------


def _svg(found: Drawing) -> Markup:
    places = arrange(found)
    left, top, right, bottom = places.plates[0]
    written = max((len(note) for note in found.notes), default=0) * (SMALL + 1) * 0.58
    width = max(right - left, written) + 2 * MARGIN
    height = bottom - top + 2 * MARGIN + LABEL * len(found.notes)
    plates = zip(places.plates, ("n = 1 … N", "t = 1 … T"), ("rows", "steps"), strict=False)
    parts = [_plate(plate, label, kind) for plate, label, kind in plates]
    lagged = {node.id for node in found.nodes.values() if node.lag}
    parts += [_frame(box) for box in places.frames.values()]
    parts += [
        _edge(edge, curve, places.ends[edge], lagged=edge[0] in lagged)
        for edge, curve in places.curves.items()
    ]
    parts += [_shape(node, places.boxes[node.id]) for node in found.nodes.values()]
    parts += [
        _text(note, left, bottom + LABEL * (i + 1) - 2, SMALL + 1, quiet=True, anchor="start")
        for i, note in enumerate(found.notes)
    ]
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" class="graph" role="img" '
        'viewBox="{} {} {} {}" width="{}" height="{}" font-family="system-ui, sans-serif" '
        'fill="none"><title>Graph of {}</title><desc>{}</desc>{}</svg>'
    ).format(
        *map(_n, (left - MARGIN, top - MARGIN, width, height, width, height)),
        found.side,
        _described(found),
        Markup("").join(parts),
    )


def _plate(plate: Rectangle, label: str, kind: str) -> Markup:
    left, top, right, bottom = plate
    rectangle = Markup(
        '<rect class="plate {}" x="{}" y="{}" width="{}" height="{}" rx="7" '
        'stroke="currentColor" stroke-opacity=".4"/>'
    ).format(kind, *map(_n, (left, top, right - left, bottom - top)))
    return rectangle + _text(label, right - 7, bottom - 6, SMALL + 1, quiet=True, anchor="end")


def _frame(box: Box) -> Markup:
    return Markup(
        '<rect class="frame" x="{}" y="{}" width="{}" height="{}" rx="14" stroke="currentColor" '
        'stroke-opacity=".6" stroke-dasharray="1 3" stroke-linecap="round"/>'
    ).format(
        _n(box.x - box.half_width),
        _n(box.y - box.half_height),
        _n(2 * box.half_width),
        _n(2 * box.half_height),
    )


def _shape(node: Node, box: Box) -> Markup:
    """A node: its shape, its name with the index, and its size."""
    fill = Markup('fill="currentColor" fill-opacity=".16"' if node.kind == "observed" else "")
    dash = Markup(' stroke-dasharray="3 3"' if node.lag else "")
    shapes = _outline(box, 0, Markup('stroke-width="1.3"{} {}').format(dash, fill))
    if node.kind == DETERMINISTIC:
        shapes += _outline(box, 3.5, Markup('stroke-width=".8"{}').format(dash))
    # The width of a long word is fixed, because the reader's font may be wider than expected.
    fixed = node.text_width if len(node.shown) > 8 else None
    name = _text(node.shown, box.x, box.y + 2.5, node.font, index=node.index, length=fixed)
    size = "" if node.lag else _text(node.size, box.x, box.y + 14.5, SMALL, quiet=True)
    return Markup('<g class="node {}{}" data-name="{}"><title>{}</title>{}{}{}</g>').format(
        node.kind, " neighbour" if node.lag else "", node.id, node.title, shapes, name, size
    )


def _outline(box: Box, inset: float, paint: Markup) -> Markup:
    half_width, half_height = box.half_width - inset, box.half_height - inset
    if box.round and half_width == half_height:
        return Markup('<circle cx="{}" cy="{}" r="{}" stroke="currentColor" {}/>').format(
            _n(box.x), _n(box.y), _n(half_width), paint
        )
    return Markup(
        '<rect x="{}" y="{}" width="{}" height="{}" rx="{}" stroke="currentColor" {}/>'
    ).format(
        _n(box.x - half_width),
        _n(box.y - half_height),
        _n(2 * half_width),
        _n(2 * half_height),
        _n(half_height if box.round else 4.0),
        paint,
    )


def _edge(edge: Edge, curve: Curve, end: str, *, lagged: bool) -> Markup:
    """An arrow: its line, its head, and a label if it reads an end of a sequence."""
    (x1, y1), (x2, y2), (x3, y3), (x, y) = curve.points
    near = (x1, y1) if curve.straight else (x3, y3)
    length = math.hypot(x - near[0], y - near[1]) or 1.0
    ux, uy = (x - near[0]) / length, (y - near[1]) / length
    bends = "L" if curve.straight else f"C{_n(x2)} {_n(y2)} {_n(x3)} {_n(y3)} "
    line = Markup('<path d="M{} {}{}{} {}" stroke="currentColor" stroke-width="1.2"{}/>').format(
        _n(x1),
        _n(y1),
        bends,
        _n(x - 6 * ux),
        _n(y - 6 * uy),
        Markup(' stroke-dasharray="4 3"' if lagged else ""),
    )
    foot = (x - 9 * ux, y - 9 * uy)
    head = Markup('<path d="M{} {}L{} {}L{} {}Z" fill="currentColor"/>').format(
        *map(_n, (x, y, foot[0] - 3.8 * uy, foot[1] + 3.8 * ux)),
        *map(_n, (foot[0] + 3.8 * uy, foot[1] - 3.8 * ux)),
    )
    label = Markup("")
    if end:
        (middle,) = curve.at(np.array([0.5]))
        across = 1 if y > y1 else -1  # above a line that falls to the right, below one that rises
        text = {"first": "t = 1", "last": "t = T"}[end]
        anchor = "start" if across * uy > 0.2 else "middle"
        label = _text(
            text,
            float(middle[0]) + 9 * across * uy,
            float(middle[1]) - 9 * across * ux + 3,
            SMALL,
            quiet=True,
            anchor=anchor,
        )
    return Markup('<g class="edge{}" data-from="{}" data-to="{}">{}{}{}</g>').format(
        " lagged" if lagged else "", *edge, line, head, label
    )


def _text(
    text: str,
    x: float,
    y: float,
    size: float,
    *,
    quiet: bool = False,
    anchor: str = "middle",
    index: str = "",
    length: float | None = None,
) -> Markup:
    """A line of text. One letter with its index is set like a formula."""
    look = Markup(' class="label" fill-opacity=".7"' if quiet else "")
    if size == LETTER:
        look += Markup(' font-style="italic" font-family="{}"').format(SERIF)
    if length is not None:
        look += Markup(' textLength="{}" lengthAdjust="spacingAndGlyphs"').format(_n(length))
    below = Markup('<tspan font-size="{}" font-style="normal" dy="3.5">{}</tspan>')
    return Markup(
        '<text x="{}" y="{}" font-size="{}" text-anchor="{}" fill="currentColor"{}>{}{}</text>'
    ).format(
        _n(x),
        _n(y),
        _n(size),
        anchor,
        look,
        text,
        below.format(_n(0.7 * size), index) if index else "",
    )


def _n(value: float) -> str:
    """A coordinate, to a tenth.

    >>> _n(3.0), _n(-0.04), _n(2.25)
    ('3', '0', '2.2')
    """
    return f"{round(float(value), 1) + 0.0:g}"
