"""Places for the nodes and edges of a small directed graph, drawn in rows from parents to children.

The nodes stand in blocks beside each other, which share their rows. Within a block, the barycentres
of neighbours order the nodes of a row, and an isotonic regression centres each node at its
neighbours without overlaps. An edge is a straight line, or the flattest curve that touches no other
node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

GAP = 24.0  # least distance between neighbours of a row
BETWEEN_ROWS = 32.0  # distance between two rows, for the arrows
WIDEST = 8  # most nodes in a row; further ones stand in a row below
SWEEPS = 12
CLEARANCE = 9.0  # distance of an edge from the nodes it passes, if there is room
TOUCHES = 4.0  # least distance of an edge from the nodes it passes
ARROW = 4.0  # distance between an arrow's tip and its node

Point = tuple[float, float]
Edge = tuple[str, str]


@dataclass(frozen=True)
class Box:
    """A node's place: its centre, half its width and height, and whether its ends are round."""

    x: float
    y: float
    half_width: float
    half_height: float
    round: bool = True

    def distance(self, points: np.ndarray) -> np.ndarray:
        """The distance of points [n, 2] from the node; 0 inside."""
        straight = max(0.0, self.half_width - self.half_height) if self.round else self.half_width
        dx = np.maximum(np.abs(points[:, 0] - self.x) - straight, 0.0)
        dy = np.abs(points[:, 1] - self.y)
        if self.round:
            return np.maximum(np.hypot(dx, dy) - self.half_height, 0.0)
        return np.hypot(dx, np.maximum(dy - self.half_height, 0.0))


@dataclass(frozen=True)
class Curve:
    """A cubic Bézier curve, [4, 2]; ``straight`` if it is a line."""

    points: np.ndarray
    straight: bool

    def at(self, t: np.ndarray) -> np.ndarray:
        """Points of the curve, [n, 2], at the parameters ``t`` between 0 and 1."""
        t = np.asarray(t)[:, None]
        a, b, c, d = self.points
        return (1 - t) ** 3 * a + 3 * (1 - t) ** 2 * t * b + 3 * (1 - t) * t**2 * c + t**3 * d

    def part(self, first: float, last: float) -> Curve:
        """The part of the curve between two parameters (de Casteljau)."""
        after = _split(self.points, first)[1]
        return Curve(_split(after, (last - first) / (1 - first))[0], self.straight)


def _split(points: np.ndarray, t: float) -> tuple[np.ndarray, np.ndarray]:
    left, right = [points[0]], [points[-1]]
    while len(points) > 1:
        points = points[:-1] + (points[1:] - points[:-1]) * t
        left.append(points[0])
        right.append(points[-1])
    return np.array(left), np.array(right[::-1])


# Rows ---------------------------------------------------------------------------------------------


def rows_of(nodes: Sequence[str], edges: Iterable[Edge]) -> dict[str, int]:
    """The row of every node: below all its parents, and roots directly above their first child.

    An edge that closes a cycle is ignored.

    >>> rows_of(["a", "b", "c", "d"], [("a", "b"), ("b", "c"), ("d", "c")])
    {'a': 0, 'b': 1, 'd': 1, 'c': 2}
    """
    parents: dict[str, list[str]] = {node: [] for node in nodes}
    children: dict[str, list[str]] = {node: [] for node in nodes}
    for parent, child in edges:
        if parent != child:
            parents[child].append(parent)
            children[parent].append(child)
    row: dict[str, int] = {}
    entered: set[str] = set()
    for root in nodes:
        path = [root]
        while path:
            node = path[-1]
            entered.add(node)
            waiting = [one for one in parents[node] if one not in entered]
            if waiting:
                path.append(waiting[0])
                continue
            if node not in row:
                row[node] = 1 + max((row[one] for one in parents[node] if one in row), default=-1)
            path.pop()
    for node in nodes:
        if not parents[node] and children[node]:
            row[node] = max(0, min(row[child] for child in children[node]) - 1)
    return row


def _wrapped(blocks: Sequence[Sequence[str]], rows: Mapping[str, int]) -> dict[str, int]:
    """Split rows of more than WIDEST nodes of a block into several rows.

    They have n and n − 1 nodes in turn, so that edges pass between the nodes of the row above.
    """
    parts: dict[str, int] = {}
    most: dict[int, int] = {}
    for block in blocks:
        for row in set(rows.values()):
            left, part = [node for node in block if rows[node] == row], 0
            while left:
                size = len(left) if len(left) <= WIDEST else WIDEST - part % 2
                parts |= dict.fromkeys(left[:size], part)
                left, part = left[size:], part + 1
            most[row] = max(most.get(row, 0), part)
    first, top = {}, 0
    for row in sorted(most):
        first[row], top = top, top + most[row]
    return {node: first[rows[node]] + part for node, part in parts.items()}


# Nodes --------------------------------------------------------------------------------------------


def place(
    blocks: Sequence[Sequence[str]], edges: Sequence[Edge], shapes: Mapping[str, Box]
) -> dict[str, Box]:
    """Place the nodes of blocks that share their rows; every block begins at x = 0.

    ``shapes`` are the nodes at any place.
    """
    nodes = [node for block in blocks for node in block]
    rows = _wrapped(blocks, rows_of(nodes, edges))
    height: dict[int, float] = {}
    for node in nodes:
        height[rows[node]] = max(height.get(rows[node], 0.0), shapes[node].half_height)
    middle, bottom = {}, -BETWEEN_ROWS
    for row in sorted(height):
        middle[row] = bottom + BETWEEN_ROWS + height[row]
        bottom = middle[row] + height[row]
    neighbours: dict[str, list[str]] = {node: [] for node in nodes}
    for a, b in edges:
        neighbours[a].append(b)
        neighbours[b].append(a)
    found: dict[str, Box] = {}
    for block in filter(None, blocks):
        x = _columns(block, rows, neighbours, shapes)
        left = min(x[node] - shapes[node].half_width for node in block)
        for node in block:
            found[node] = replace(shapes[node], x=x[node] - left, y=middle[rows[node]])
    return found


def stack(targets: Mapping[str, float], shapes: Mapping[str, Box]) -> dict[str, Box]:
    """Place nodes in one column that begins at x = 0, each as near to its target in y as fits."""
    column = sorted(targets, key=lambda node: targets[node])
    halves = [shapes[node].half_height for node in column]
    y = spread([targets[node] for node in column], halves, GAP / 2)
    width = max((shapes[node].half_width for node in column), default=0.0)
    return {
        node: replace(shapes[node], x=width, y=place) for node, place in zip(column, y, strict=True)
    }


def _columns(
    block: Sequence[str],
    rows: Mapping[str, int],
    neighbours: Mapping[str, Sequence[str]],
    shapes: Mapping[str, Box],
) -> dict[str, float]:
    """The centres of a block's nodes in x: ordered by barycentres, then moved to them."""
    layers: dict[int, list[str]] = {}
    for node in block:
        layers.setdefault(rows[node], []).append(node)
    x = dict.fromkeys(block, 0.0)
    for sweep in range(-1, SWEEPS):
        for row in sorted(layers, reverse=bool(sweep % 2)):
            layer, wanted = layers[row], {}
            for node in layer:
                near = [x[other] for other in neighbours[node] if other in x]
                wanted[node] = sum(near) / len(near) if near and sweep >= 0 else x[node]
            if 0 <= sweep < SWEEPS // 2:
                layer.sort(key=lambda node: round(wanted[node], 6))
            halves = [shapes[node].half_width for node in layer]
            centres = spread([wanted[node] for node in layer], halves, GAP)
            x |= dict(zip(layer, centres, strict=True))
    return x


def spread(targets: Sequence[float], halves: Sequence[float], gap: float) -> list[float]:
    """Centres of intervals that keep their order and a gap, as near to their targets as possible.

    This is the isotonic regression of the targets less the lengths before each.

    >>> spread([0.0, 0.0, 9.0], [1.0, 1.0, 1.0], 2.0)
    [-2.0, 2.0, 9.0]
    """
    before, total = [], 0.0
    for i, half in enumerate(halves):
        total += halves[i - 1] + gap + half if i else 0.0
        before.append(total)
    pools: list[tuple[float, int]] = []  # mean and number of intervals that move together
    for target, by in zip(targets, before, strict=True):
        mean, count = target - by, 1
        while pools and pools[-1][0] >= mean:
            other, n = pools.pop()
            mean, count = (mean * count + other * n) / (count + n), count + n
        pools.append((mean, count))
    means = [mean for mean, count in pools for _ in range(count)]
    return [mean + by for mean, by in zip(means, before, strict=True)]


# Edges --------------------------------------------------------------------------------------------


def flatness(first: float, second: float) -> float:
    """The cost of a curve's two offsets: their mean size, and how much they differ."""
    return (abs(first) + abs(second)) / 2 + abs(first - second) / 4


_OFFSETS = (0, 18, -18, 30, -30, 44, -44, 62, -62, 85, -85, 115, -115, 150, -150, 190, -190)
# How far a curve's two control points lie beside the straight line, the flattest first.
BENDS = sorted(
    ((a, b) for a in _OFFSETS for b in _OFFSETS),
    key=lambda bend: flatness(*bend),
)
SAMPLES = np.linspace(0.0, 1.0, 33)
FEW = 60  # edges; of more, only symmetric curves are tried


def route(edges: Sequence[Edge], boxes: Mapping[str, Box]) -> dict[Edge, Curve]:
    """Draw every edge from border to border, as flat as possible, and past all other nodes."""
    found: dict[Edge, Curve] = {}
    drawn: list[np.ndarray] = []
    length = {
        (a, b): math.hypot(boxes[a].x - boxes[b].x, boxes[a].y - boxes[b].y) for a, b in edges
    }
    bends = [bend for bend in BENDS if len(edges) <= FEW or bend[0] == bend[1]]
    for a, b in sorted(edges, key=lambda edge: length[edge]):  # the short ones first
        others = [box for name, box in boxes.items() if name not in (a, b)]
        best = (math.inf, _curve(boxes[a], boxes[b], (0, 0)))
        for bend in bends:
            cost = flatness(*bend)
            if cost >= best[0]:
                break
            curve = _curve(boxes[a], boxes[b], bend)
            points = curve.at(SAMPLES)
            for box in others:
                distance = float(box.distance(points).min())
                cost += 1000.0 if distance < TOUCHES else 40.0 if distance < CLEARANCE else 0.0
            if cost < best[0] and drawn:
                cost += 60.0 * _alongside(points, drawn) + 25.0 * _crossings(points, drawn)
            if cost < best[0]:
                best = (cost, curve)
        drawn.append(best[1].at(SAMPLES[::2]))
        found[a, b] = _clipped(best[1], boxes[a], boxes[b])
    return {edge: found[edge] for edge in edges}


def _alongside(points: np.ndarray, drawn: Sequence[np.ndarray]) -> int:
    """How many curves run within a few units of this one for a third of its length."""
    away = np.square(points[::2, None] - np.stack(drawn)[:, None]).sum(-1).min(-1)
    return int(((away < 25.0).mean(-1) > 0.34).sum())


def _crossings(points: np.ndarray, drawn: Sequence[np.ndarray]) -> int:
    """How often a curve crosses others, apart from the ends, where they may share a node."""
    mine, others = points[::2][2:-2], np.stack(drawn)[:, 2:-2]
    a, b = mine[:-1, None, None], mine[1:, None, None]
    c, d = others[None, :, :-1], others[None, :, 1:]
    apart = _turn(a, b, c) * _turn(a, b, d) < 0
    return int((apart & (_turn(c, d, a) * _turn(c, d, b) < 0)).sum())


def _turn(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Positive if the way from a through b to c turns left, negative if it turns right."""
    u, v = b - a, c - a
    return u[..., 0] * v[..., 1] - u[..., 1] * v[..., 0]


def _curve(a: Box, b: Box, bend: tuple[float, float]) -> Curve:
    start, end = np.array([a.x, a.y]), np.array([b.x, b.y])
    along = end - start
    length = math.hypot(*along) or 1.0
    # 4/3: a curve with equal offsets then passes at their distance from the line.
    normal = np.array([along[1], -along[0]]) / length * 4 / 3
    inner = [start + along * (i + 1) / 3 + normal * offset for i, offset in enumerate(bend)]
    return Curve(np.array([start, *inner, end]), bend == (0, 0))


def _clipped(curve: Curve, a: Box, b: Box) -> Curve:
    """The part of a curve between the borders of its two nodes."""
    t = np.linspace(0.0, 1.0, 401)
    points = curve.at(t)
    leaves = t[np.flatnonzero(a.distance(points) > 1.0)[:1]]
    enters = t[np.flatnonzero(b.distance(points) > ARROW)[-1:]]
    if not (len(leaves) and len(enters) and leaves[0] < enters[0]):
        return curve
    return curve.part(float(leaves[0]), float(enters[0]))
