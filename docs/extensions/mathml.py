"""Write formulas as MathML, which browsers show by themselves: no script, no font, no network."""

import html
import re
from itertools import pairwise
from xml.etree import ElementTree as ET

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

LOG = logging.getLogger(__name__)
# Words that the converter lacks, as words that it has.
REPLACED = (
    (r"\\(begin|end)\{(?:align|eqnarray|gather|split)\*?\}", r"\\\1{aligned}"),
    (r"\\(?:begin|end)\{equation\*?\}", ""),
    (r"\\middle\s*\|", r"\\mid "),
    (r"\\bm\b", r"\\boldsymbol"),
    (r"\\(big|Big|bigg|Bigg)(?![a-zA-Z])", r"\\\1r"),
    (r"\\stackrel\b", r"\\overset"),
)
BRACES = ("⏟", "⏞")
NAMESPACE = "http://www.w3.org/1998/Math/MathML"
APPLY = "\N{FUNCTION APPLICATION}"


def converted(node: nodes.math | nodes.math_block, *, block: bool) -> str:
    r"""Return a formula as MathML; warn, naming the place, if it cannot be read.

    >>> converted(nodes.math("", r"\bm{x}"), block=False)[:6]
    '<math>'
    """
    tex = node.astext()
    for pattern, replacement in REPLACED:
        tex = re.sub(pattern, replacement, tex)
    try:
        return improved(str(tex2mathml(tex, as_block=block)))
    except MathError as error:
        LOG.warning("the formula %r is not understood: %s", tex, error, location=node)
        return f"<code>{nodes.unescape(tex)}</code>"


def improved(mathml: str) -> str:
    """Put labels below and above braces, and a thin space after the name of a function.

    >>> improved('<math><mi>log</mi><mo>&ApplyFunction;</mo><mi>p</mi></math>')
    '<math><mi>log</mi><mspace width="0.17em" /><mi>p</mi></math>'
    """
    named = r"&(?!(?:amp|lt|gt|quot|apos);)\w+;"
    mathml = mathml.replace(f' xmlns="{NAMESPACE}"', "")  # HTML knows the element without it
    tree = ET.fromstring(re.sub(named, lambda entity: html.unescape(entity[0]), mathml))
    for node in tree.iter():
        if node.tag in ("msub", "msup") and len(node[0]) == 2 and node[0][1].text in BRACES:
            node.tag = node[0].tag
            node[0][1].attrib |= {"stretchy": "true"}
        for mark, after in pairwise(node):
            if mark.text == APPLY and after.text not in ("(", "["):
                mark.tag, mark.text, mark.attrib = "mspace", None, {"width": "0.17em"}
    return ET.tostring(tree, encoding="unicode")


def inline(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(converted(node, block=False))
    raise nodes.SkipNode


def block(self: HTML5Translator, node: nodes.math_block) -> None:
    number = f'<span class="eqno">({node["number"]})</span>' if node["number"] else ""
    opening = self.starttag(node, "div", CLASS="math math-block")
    self.body.append(f"{opening}{number}{converted(node, block=True)}</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
