"""Formulas as inline SVG: matplotlib's mathtext draws the LaTeX, so the page needs no network.

A formula is cut at its outer signs into pieces. The pieces stand in the text like words, so that a
long formula wraps on a narrow screen. Every piece is an outline in the colour of the text.

A piece has no ``style`` attribute, because a strict content-security policy forbids them. Its box
is symmetric about the axis of the formula, so one rule of the page's CSS aligns all pieces with the
text: ``svg.math { vertical-align: middle }``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from markupsafe import Markup

UNITS = 100  # units of the drawing per em
AXIS = 0.24  # em above the baseline; CSS aligns the middle of a box with half the x-height
FONT = {"size": UNITS, "math_fontfamily": "stix"}
REWRITTEN = {  # commands that mathtext does not know, or sets too tightly
    r"\\[Bb]ig\s*\\\{\s*": r"\;\{\,",
    r"\s*\\[Bb]ig\s*\\\}": r"\,\}",
    r"\\[td]frac(?![a-z])": r"\frac",
    r"(\\(?:sum|prod)_\{[^{}]*\}(?:\^\{[^{}]*\})?) ": r"\1\,",
}
COMMANDS = {1: "M", 2: "L", 3: "Q", 4: "C", 79: "Z"}
POINTS = {1: 1, 2: 1, 3: 2, 4: 3, 79: 1}


def formula(latex: str) -> Markup:
    """Return a formula as inline SVG, one piece per term."""
    drawn = Markup(" ").join(_drawn(piece) for piece in pieces(latex))
    return Markup('<span class="formula" role="img" aria-label="{}">{}</span>').format(latex, drawn)


def pieces(latex: str) -> list[str]:
    """Split a formula into its terms, each with the sign before it.

    Signs inside parentheses, fractions and indices do not split it.

    >>> pieces(r"\\log p(x) - D(q \\,\\|\\, p) + a_{t-1}")
    ['\\\\log p(x)', '-\\\\;D(q \\\\,\\\\|\\\\, p)', '+\\\\;a_{t-1}']
    """
    found, depth, start = [], 0, 0
    for at, character in enumerate(latex):
        escaped = at > 0 and latex[at - 1] == "\\"
        if character in "({" and not escaped:
            depth += 1
        elif character in ")}" and not escaped:
            depth -= 1
        elif (
            depth == 0
            and at > start
            and (
                latex[at - 1 : at + 2] in (" - ", " + ", " = ")
                or latex.startswith((r"\quad ", r"\; "), at)
            )
        ):
            found.append(latex[start:at])
            start = at
    found.append(latex[start:])
    bare = (piece.removeprefix(r"\quad").removeprefix(r"\;").strip() for piece in found)
    return [re.sub(r"^([-+=]) ", r"\1\\;", piece) for piece in bare]


def factorisation(line: str) -> str:
    """Convert one side of a printed model to LaTeX.

    A side is, for example, ``p(z[t]|h[t]) p(x[t]|h[t], z[t]); h[t] = f(h[t-1])``. The product over
    the steps comes after the factors of static variables and of the first and last steps.

    >>> factorisation("p(z) p(x|z)")
    'p_\\\\theta(z)\\\\; p_\\\\theta(x \\\\mid z)'
    """
    product, _, functions = line.partition("; ")
    factors = re.findall(r"[pq]\([^)]*\)", product)
    always = [factor for factor in factors if re.match(r"..\w+\[t\]", factor)]
    tex = [_factor(factor) for factor in factors if factor not in always]
    steps = [_factor(factor) for factor in always]
    if steps:
        steps[0] = rf"\prod_{{t}} {steps[0]}"
    rest = re.sub(r"\[([^\]]*)\]", r"_{\1}", _spelled_names(functions))
    return r"\; ".join([*tex, *steps]) + (rf",\quad {rest}" if rest else "")


def _factor(text: str) -> str:
    """The LaTeX of a factor such as ``p(x[t]|z[t-1])``."""
    letter = {"p": r"p_\theta", "q": r"q_\phi"}[text[0]]
    inside = re.sub(r"\[([^\]]*)\]", r"_{\1}", _spelled_names(text[1:]))
    return letter + inside.replace("|", r" \mid ")


def _spelled_names(text: str) -> str:
    return re.sub(r"[^\W\d]\w*", lambda name: spelled(name[0]), text)


def spelled(name: str) -> str:
    """The LaTeX of a variable's name: a word of several characters is set as a word.

    >>> spelled("z"), spelled("x_obs")
    ('z', '\\\\mathit{x\\\\_obs}')
    """
    return name if len(name) == 1 else r"\mathit{" + name.replace("_", r"\_") + "}"


def with_names(latex: str, names: Iterable[str]) -> str:
    """Spell the names of variables in a formula that holds them as they are declared.

    >>> with_names(r"\\log p_\\theta(age_{t} \\mid z)", ["age", "z"])
    '\\\\log p_\\\\theta(\\\\mathit{age}_{t} \\\\mid z)'
    """
    words = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
    if not words:
        return latex
    # A name ends where its index begins; a command, as in \log, is no name.
    pattern = rf"(?<![\\\w])({'|'.join(map(re.escape, words))})(?![^\W_]|_(?!\{{))"
    return re.sub(pattern, lambda name: spelled(name[1]), latex)


@cache
def _drawn(latex: str) -> Markup:
    """Draw one piece: its outline, with the width that mathtext computes.

    Raise ValueError if mathtext cannot read it.
    """
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    for pattern, instead in REWRITTEN.items():
        latex = re.sub(pattern, instead.replace("\\", "\\\\").replace("\\\\1", "\\1"), latex)
    text, font, draw = f"${latex}$", FontProperties(**FONT), TextToPath()  # type: ignore[arg-type]
    width, height, below = draw.get_text_width_height_descent(text, font, ismath=True)
    vertices, codes = draw.get_text_path(font, text, ismath=True)
    path, at = [], 0
    scale = UNITS / draw.FONT_SCALE
    while at < len(codes):
        code = int(codes[at])
        count = POINTS[code]
        numbers = " ".join(
            f"{x * scale:.0f} {-y * scale:.0f}" for x, y in vertices[at : at + count]
        )
        path.append(COMMANDS[code] + ("" if code == 79 else numbers))
        at += count
    half = max(height - below - AXIS * UNITS, below + AXIS * UNITS)
    box = f"0 {-half - AXIS * UNITS:.0f} {width:.0f} {2 * half:.0f}"
    return Markup(
        '<svg class="math" aria-hidden="true" viewBox="{}" width="{}em" height="{}em" '
        'overflow="visible" fill="currentColor"><path d="{}"/></svg>'
    ).format(box, f"{width / UNITS:.2f}", f"{2 * half / UNITS:.2f}", "".join(path))
