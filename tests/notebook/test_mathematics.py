"""Formulas as SVG: every estimator can be drawn, without style attributes, and names are words."""

import inspect
import re
import subprocess
import sys

import pytest

from aevb import zoo
from aevb.experiments.gmvae import WAYS
from aevb.notebook.mathematics import factorisation, formula, pieces, with_names


def estimators():
    found = set()
    for build in zoo.zoo.values():
        takes = inspect.signature(build).parameters
        model = build(**{name: size for name, size in {"x": 6, "z": 2}.items() if name in takes})
        found |= {model.explain().latex, model.explain(bound="iwae", samples=5).latex}
    model = zoo.gmvae(6, 2, 3)
    found |= {model.explain(**choices).latex for choices in WAYS.values()}
    return found | {model.explain(how={"y": "sum"}, bound="iwae", samples=3).latex}


def test_every_estimator_can_be_drawn():
    for latex in estimators():
        drawn = formula(latex)
        assert drawn.count("<svg") == len(pieces(latex))
        assert "".join(pieces(latex)).replace(r"\;", "").replace(" ", "") == latex.replace(" ", "")


def test_a_formula_has_no_style_and_its_box_is_symmetric_about_its_axis():
    """24 units above the baseline, where CSS puts the middle of a box."""
    drawn = formula(r"\log p_\theta(x \mid z) - \frac{1}{2} \sum_{i=1}^{N} a_i")
    assert not re.search(r"\sstyle=", drawn)
    boxes = re.findall(r'viewBox="0 (\S+) (\d+) (\d+)" width="(\S+)em" height="(\S+)em"', drawn)
    assert len(boxes) == drawn.count("<svg") == 2
    for top, width, height, em, high in boxes:
        assert abs(float(top) + float(height) / 2 + 24) <= 1
        assert abs(float(em) * 100 - float(width)) <= 1
        assert abs(float(high) * 100 - float(height)) <= 1


def test_static_factors_stand_before_the_product_over_the_steps():
    line = "p(c) p(z[0]|c) p(z[t]|z[t-1], c) p(x[t]|z[t]); h[t] = f(h[t-1], x[t])"
    assert factorisation(line) == (
        r"p_\theta(c)\; p_\theta(z_{0} \mid c)\; \prod_{t} p_\theta(z_{t} \mid z_{t-1}, c)\; "
        r"p_\theta(x_{t} \mid z_{t}),\quad h_{t} = f(h_{t-1}, x_{t})"
    )


@pytest.mark.parametrize("name", ["x_obs", "_x", "a__b", "z1", "log", "theta", "KL", "sum_t", "p1"])
def test_a_name_of_several_characters_is_one_word(name):
    word = r"\mathit{" + name.replace("_", r"\_") + "}"
    assert factorisation(f"p({name}[t]|z)") == rf"\prod_{{t}} p_\theta({word}_{{t}} \mid z)"
    latex = rf"\sum_{{{name}}} \log p_\theta({name}_{{t}}^{{s}} \mid \tilde{{{name}}}) - q_\phi(z)"
    wanted = rf"\sum_{{{word}}} \log p_\theta({word}_{{t}}^{{s}} \mid \tilde{{{word}}}) - q_\phi(z)"
    assert with_names(latex, ["z", name, name + "x"]) == wanted
    assert formula(wanted).count("<svg") == 2


def test_matplotlib_is_imported_when_a_formula_is_drawn():
    code = (
        "import sys; from aevb import Model, Normal; import aevb.notebook.cards; before = "
        "'matplotlib' in sys.modules; Model({'z': Normal(1), 'x | z': Normal(2)}, {'z | x': "
        "Normal()})._repr_html_(); print(before, 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"
