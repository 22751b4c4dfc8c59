"""Write formulas as MathML, which browsers show by themselves: no script, no font, no network."""

import html
import re
import unicodedata
from itertools import pairwise
from xml.etree import ElementTree as ET

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

LOG = logging.getLogger(__name__)
# One argument: a group without groups in it, a command, or one character.
ARGUMENT = r"(\{[^{}]*\}|\\[a-zA-Z]+|[^\s{}\\])"
# What the converter lacks or reads differently from TeX, as what it reads.
REPLACED = (
    (r"\\(begin|end)\{(?:align|eqnarray|gather|split)\*?\}", r"\\\1{aligned}"),
    (r"\\(?:begin|end)\{equation\*?\}", ""),
    (r"\\middle\s*\|", r"\\mid "),
    (r"\\bm\b", r"\\boldsymbol"),
    (r"\\(big|Big|bigg|Bigg)(?![a-zA-Z])", r"\\\1r"),
    (r"\\stackrel\b", r"\\overset"),
    # \frac12 is a half, x^10 is x¹0: the converter would take all digits as one argument.
    (rf"\\([dt]?frac)\s*{ARGUMENT}\s*{ARGUMENT}", r"\\\1{\2}{\3}"),
    (r"([\^_])(\d)(?=\d)", r"\1{\2}"),
)
BRACES = {"⏟": "line-below", "⏞": "line-above"}
ACCENTS = ("~", "ˆ", "^", "ˉ", "¯", "˙", "→", "\N{COMBINING RIGHT ARROW ABOVE}")
NAMESPACE = "http://www.w3.org/1998/Math/MathML"
THIN = {"width": "0.17em"}  # TeX's space around the name of a function
FUNCTIONS = ("log", "exp", "arg", "tr", "det", "max", "min")
APPLY = "\N{FUNCTION APPLICATION}"


def converted(node: nodes.math | nodes.math_block, *, block: bool) -> str:
    r"""Return a formula as MathML; warn, naming the place, if it cannot be read.

    >>> converted(nodes.math("", r"\frac12 x"), block=False).replace("\n", "").replace("  ", "")
    '<math><mfrac><mn>1</mn><mn>2</mn></mfrac><mi>x</mi></math>'
    """
    tex = node.astext()
    for pattern, replacement in REPLACED:
        tex = re.sub(pattern, replacement, tex)
    tex = re.sub(rf"\\boldsymbol\s*{ARGUMENT}", lambda found: _bold(found[1]), tex)
    try:
        return improved(str(tex2mathml(tex, as_block=block)))
    except MathError as error:
        LOG.warning("the formula %r is not understood: %s", tex, error, location=node)
        return f"<code>{nodes.unescape(tex)}</code>"


def _bold(tex: str) -> str:
    r"""Return letters as bold letters of Unicode; the converter would write all that follows bold.

    >>> _bold(r"\mu"), _bold("{z_i}"), _bold(r"\Sigma")
    ('𝝁', '{𝒛_𝒊}', '𝚺')
    """
    return re.sub(r"\\([a-zA-Z]+)|([a-zA-Z0-9])", _bold_letter, tex)


def _bold_letter(found: re.Match[str]) -> str:
    greek, plain = found.groups()
    style = "ITALIC CAPITAL" if (plain or "a").isupper() else "ITALIC SMALL"
    name = plain or greek.removeprefix("var")
    if plain and plain.isdigit():
        return chr(ord("𝟎") + int(plain))
    if greek and greek[0].isupper():
        style = "CAPITAL"  # capital Greek letters are upright
    try:
        return unicodedata.lookup(f"MATHEMATICAL BOLD {style} {name.upper()}")
    except KeyError:  # not a letter
        return found[0]


def improved(mathml: str) -> str:
    """Put a thin space after the name of a function, and a line in place of a labelled brace.

    A brace is as wide as what it spans only in fonts for mathematics, which few readers have.

    >>> improved('<math><mi>log</mi><mo>&ApplyFunction;</mo><mi>p</mi></math>')
    '<math><mi>log</mi><mspace width="0.17em" /><mi>p</mi></math>'
    """
    named = r"&(?!(?:amp|lt|gt|quot|apos);)\w+;"
    mathml = mathml.replace(f' xmlns="{NAMESPACE}"', "")  # HTML knows the element without it
    tree = ET.fromstring(re.sub(named, lambda entity: html.unescape(entity[0]), mathml))
    for node in list(tree.iter()):
        _put_index_beside_accent(node)
        if node.tag in ("msub", "msup") and len(node[0]) == 2 and node[0][1].text in BRACES:
            braced, label = node
            node.tag = braced.tag
            node[:] = [ET.Element("mrow", {"class": BRACES[str(braced[1].text)]}), label]
            node[0].append(braced[0])
        for mark, after in pairwise(node):
            if mark.text == APPLY and after.text not in ("(", "["):
                mark.tag, mark.text, mark.attrib = "mspace", None, dict(THIN)
        for before, after in pairwise(list(node)):
            if after.text in FUNCTIONS and before.tag not in ("mo", "mspace"):
                node.insert(list(node).index(after), ET.Element("mspace", THIN))
    return ET.tostring(tree, encoding="unicode")


def _put_index_beside_accent(node: ET.Element) -> None:
    """The index of an accented symbol stands beside it; the converter puts it below."""
    if node.tag == "munderover" and node[2].text in ACCENTS:
        symbol, index, accent = node
        accented = ET.Element("mover", {"accent": "true"})
        accented[:] = [symbol, accent]
        node.tag, node[:] = "msub", [accented, index]
    elif node.tag == "msup" and node[0].tag == "munderover" and node[0][2].text in ACCENTS:
        _put_index_beside_accent(node[0])
        node.tag, node[:] = "msubsup", [*node[0], node[1]]


def inline(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(converted(node, block=False))
    raise nodes.SkipNode


def block(self: HTML5Translator, node: nodes.math_block) -> None:
    number = f'<span class="eqno">({node["number"]})</span>' if node["number"] else ""
    opening = self.starttag(node, "div", CLASS="math-block")
    self.body.append(f"{opening}{number}{converted(node, block=True)}</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
