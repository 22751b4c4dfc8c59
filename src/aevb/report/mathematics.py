"""Formulas as inline SVG: matplotlib's mathtext draws the LaTeX, so the page needs no network.

A formula is cut at its outer signs into pieces. The pieces stand in the text like words, so that a
long formula wraps on a narrow screen. Every piece is an outline in the colour of the text.
"""

from __future__ import annotations

import re
from functools import cache

from markupsafe import Markup
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

UNITS = 100  # units of the drawing per em
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
            and (latex[at - 1 : at + 2] in (" - ", " + ", " = ") or latex.startswith(r"\quad ", at))
        ):
            found.append(latex[start:at])
            start = at
    found.append(latex[start:])
    return [re.sub(r"^([-+=]) ", r"\1\\;", piece.removeprefix(r"\quad").strip()) for piece in found]


def factorisation(line: str) -> str:
    """Convert one side of a printed model to LaTeX.

    A side is, for example, ``p(z[t]|h[t]) p(x[t]|h[t], z[t]); h[t] = f(h[t-1])``.

    >>> factorisation("p(z) p(x|z)")
    'p_\\\\theta(z)\\\\; p_\\\\theta(x \\\\mid z)'
    """
    product, _, functions = line.partition("; ")
    tex = (
        re.sub(r"\[([^\]]*)\]", r"_{\1}", product.strip())
        .replace("|", r" \mid ")
        .replace(") ", r")\; ")
    )
    tex = re.sub(r"\b([pq])\(", lambda match: {"p": r"p_\theta(", "q": r"q_\phi("}[match[1]], tex)
    tex = rf"\prod_{{t}} {tex}" if "_{t}" in tex else tex
    rest = re.sub(r"\[([^\]]*)\]", r"_{\1}", functions)
    return tex + (rf",\quad {rest}" if rest else "")


@cache
def _drawn(latex: str) -> Markup:
    """Draw one piece: its outline, with the width and the depth that mathtext computes."""
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
    box = f"0 {below - height:.0f} {width:.0f} {height:.0f}"
    style = (
        f"width:{width / UNITS:.2f}em;height:{height / UNITS:.2f}em;"
        f"vertical-align:{-below / UNITS:.2f}em"
    )
    return Markup(
        '<svg class="math" aria-hidden="true" viewBox="{}" style="{}"><path d="{}"/></svg>'
    ).format(box, style, "".join(path))
