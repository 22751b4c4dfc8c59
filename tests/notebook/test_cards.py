"""HTML of models and results: the right numbers, well formed, and everything escaped."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import aevb
from aevb import Exact, Model, Normal, OneHot, Schema, fit, mlp, zoo
from aevb.comparison.result import Compared, Comparison
from aevb.diagnostics.finding import Diagnosis, Finding
from aevb.evidence import Evidence
from aevb.evidence.amortisation import Gap
from aevb.laboratory.result import Laboratory
from aevb.notebook.cards import model_parts
from aevb.page.notebook import Page
from aevb.posterior import Imputation
from aevb.predictive.check import Comparison as Statistic
from aevb.predictive.check import PredictiveCheck

VOID = ("br", "hr", "img", "input", "meta")
HOSTILE = "<script>alert(1)</script> & \"quoted\" 'x'"


class Balance(HTMLParser):
    """Check that every tag is closed in order, and collect the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.scripts = [], [], 0

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script" or any(name.startswith("on") for name, _ in attrs)
        assert not any(name == "style" for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


def text_of(shown):
    html = shown if isinstance(shown, str) else shown._repr_html_()
    assert html.startswith('<div class="aevb">')
    assert html.endswith("</div>")
    assert "<pre>" not in html
    parser = Balance()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert parser.scripts == 0
    return " ".join(" ".join(parser.text).split())


@pytest.mark.parametrize("name", zoo.zoo)
def test_a_model_shows_its_declaration_its_graphs_and_its_estimator(name):
    model = zoo.zoo[name]()
    html, text = model._repr_html_(), text_of(model)
    sides = 2 if model.graph.q else 1
    assert html.count('class="graph"') == sides
    assert html.count('class="formula"') == sides + 1
    assert f"{sum(p.numel() for p in model.theta()):,} parameters θ" in text
    if model.graph.q:
        assert f"{sum(p.numel() for p in model.phi()):,} parameters φ" in text
    for entry in model.graph.entries():
        assert repr(entry.spec) in text
    for choice in model.plan().choices.values():
        assert choice.why_draw in text
        assert choice.why_term in text


def test_parts_of_a_model():
    model = Model(
        p={"y": OneHot(3), "z_1 | y, u": Normal(2), "x | z_1": Normal((2, 3))},
        q={"y | z_1, u": Exact(), "z_1 | x": Normal(net=mlp(4))},
        given={"u": 5},
    )
    parts = model_parts(model, bound="iwae", samples=3)
    assert json.loads(json.dumps(parts)) == parts
    assert [(one["side"], one["parameters"]) for one in parts["factorisations"]] == [
        ("p", sum(p.numel() for p in model.theta())),
        ("q", sum(p.numel() for p in model.phi())),
    ]
    word = r"\mathit{z\_1}"
    assert parts["factorisations"][0]["latex"] == (
        rf"p_\theta(y)\; p_\theta({word} \mid y, u)\; p_\theta(x \mid {word})"
    )
    explanation = model.explain(bound="iwae", samples=3)
    assert parts["estimator"]["explanation"] == explanation
    assert parts["estimator"]["text"] in explanation
    assert parts["estimator"]["latex"].replace(word, "z_1") == explanation.latex
    assert explanation._repr_latex_() == f"$${explanation.latex}$$"
    assert parts["entries"][2] == {
        "side": "p",
        "key": "x | z_1",
        "size": "2×3",
        "parameters": sum(p.numel() for p in model.factors["p(x|z_1)"].parameters()),
        "spec": repr(model.graph.rule("p", "x").spec),
    }
    drawn = {one["name"]: one for one in parts["latents"]}
    assert f"y: {drawn['y']['draw']}: {drawn['y']['why_draw']}." in explanation
    assert drawn["y"]["draw"] == "enumerated by Bayes"
    assert f"z_1: {drawn['z_1']['draw']}: {drawn['z_1']['why_draw']}." in explanation
    assert f"term {drawn['z_1']['term']}: {drawn['z_1']['why_term']}." in explanation
    assert parts["given"] == {"u": "5"}
    for markup in (*parts["diagrams"].values(), parts["estimator"]["html"]):
        assert not re.search(r"\sstyle=", markup)


def test_the_plans_choices_change_the_estimator_alone():
    model = zoo.gmvae(6, 2, 3)
    one, other = model_parts(model), model_parts(model, how={"y": "gumbel"})
    assert one["estimator"] != other["estimator"]
    assert other["latents"][0]["draw"] == "gumbel"
    assert {**one, "estimator": 0, "latents": 0} == {**other, "estimator": 0, "latents": 0}


def test_a_formula_that_cannot_be_drawn_is_text(monkeypatch):
    def fail(latex):
        raise ValueError("mathtext cannot read this")

    letters = Model({"z": Normal(1), "xλ変 | z": Normal(2)}, {"z | xλ変": Normal()})
    assert "p(z) p(xλ変|z)" in text_of(letters)
    monkeypatch.setattr("aevb.notebook.cards.formula", fail)
    assert "p(z) p(x|z)" in text_of(zoo.vae(4, 2))


def test_a_run_shows_its_numbers_and_its_curves(tmp_path):
    torch.manual_seed(0)
    model = Model({"z": Normal(1), "x | z": Normal(2)}, {"z | x": Normal()})
    x = torch.randn(40, 2)
    run = fit(
        model, {"x": x}, validation={"x": x[:9]}, steps=30, seed=7, out=tmp_path / "a&b",
        progress=False,
    )  # fmt: skip
    text, html = text_of(run), run._repr_html_()
    best = run.best
    assert "Run of 30 steps" in text
    assert f"{best.value:.4f} at step {best.step}".replace("-", "−") in text
    assert f"{run.history['validation elbo'][-1]:.4f}".replace("-", "−") in text
    assert "seed 7" in text
    assert "a&b" in text
    assert html.count("<polyline") == 2
    alone = fit(model, {"x": x}, steps=1, progress=False)
    assert "not saved" in text_of(alone)
    assert "<polyline" not in alone._repr_html_()


def test_evidence_shows_mean_error_method_and_notes():
    evidence = Evidence(
        torch.tensor([-1.0, -2.0, -6.0]),
        torch.tensor([0.3, 0.0, 0.0]),
        "importance",
        {"samples": 1000, "ess": torch.tensor([5.0, 9.0, 8.0])},
        (HOSTILE,),
    )
    text = text_of(evidence)
    assert "log p = −3.0000 ± 0.1 nats" in text
    assert "mean of 3 examples, importance, samples 1000, lowest ess 5" in text
    assert HOSTILE in text
    bars = re.findall(r'<rect [^>]* height="([\d.]+)"', evidence._repr_html_())
    assert bars == ["110.0"] * 3
    exact = Evidence(torch.tensor([-1.0]), torch.zeros(1), "exact")
    assert "±" not in text_of(exact)
    assert "<rect" not in exact._repr_html_()
    text_of(Evidence(torch.tensor([-1.0, -torch.inf, torch.nan]), torch.zeros(3), "exact"))


def test_gap_shows_all_five_means():
    zeros, ones = torch.zeros(4), torch.ones(4)
    names = ("evidence", "approximation", "best", "amortisation", "elbo")
    gap = Gap(
        -ones, -3.5 * ones, -1.25 * ones, "exact", dict.fromkeys(names, zeros) | {"elbo": ones}
    )
    text = text_of(gap)
    for words in (
        "Mean over 4 examples",
        "log p(x) −1.0000 exact",
        "approximation gap 0.2500",
        "best q per example −1.2500",
        "amortisation gap 2.2500",
        "ELBO −3.5000 ± 0.5000",
    ):
        assert words in text


def test_diagnosis_shows_findings_escaped_the_gravest_first():
    findings = (
        Finding("problem", "collapse", "z", HOSTILE, remedy=f"Try {HOSTILE}"),
        Finding("ok", "fit", "run", "All is well."),
    )
    diagnosis = Diagnosis(findings, 12)
    text, html = text_of(diagnosis), diagnosis._repr_html_()
    assert text == (
        f"12 rows examined: 1 problem. problem {HOSTILE} → Try {HOSTILE} ok All is well."
    )
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 2
    assert '<span class="level problem">problem</span>' in html
    assert "nothing is wrong" in text_of(Diagnosis((), 3))


def test_a_predictive_check_marks_what_is_not_reproduced():
    draws = np.linspace(0, 1, 300)
    check = PredictiveCheck(
        (Statistic("x", "sd", None, 9.0, draws), Statistic("x", "mean", None, 0.5, draws)),
        "posterior", 50, 300,
    )  # fmt: skip
    text = text_of(check)
    assert "50 rows against 300 replicates" in text
    assert "sd(x) 9 0.05 … 0.95 0.007 not reproduced" in text
    assert "mean(x) 0.5 0.05 … 0.95 1.000" in text
    assert text.count("not reproduced") == 1


def test_a_comparison_has_the_printed_columns():
    rows = np.linspace(-3, -1, 30)
    models = [
        Compared(HOSTILE, rows, np.zeros(30), "exact", 10, 4),
        Compared("worse", rows - 2 - 0.1 * rows, np.zeros(30), "exact", 3, 0),
    ]
    comparison = Comparison.of(models, notes=("A note.",))
    text = text_of(comparison)
    assert comparison.title() in text
    assert f"* {HOSTILE} −2.000 10 4" in text
    assert "worse −3.800 −1.800" in text
    assert "A note." in text
    for sentence in comparison.sentences():
        assert sentence in text
    printed = repr(comparison)
    assert all(cell.strip() in printed for cells in comparison.columns().values() for cell in cells)


def test_an_object_that_cannot_be_shown_is_printed():
    evidence = Evidence(torch.zeros(3, device="meta"), torch.zeros(3, device="meta"), "exact")
    html = evidence._repr_html_()
    assert html.startswith('<div class="aevb"><pre>')
    assert "&lt;aevb.evidence.result.Evidence object" in html
    broken = Diagnosis((HOSTILE,), 3)
    assert "<script" not in broken._repr_html_()


def test_a_model_on_the_meta_device_has_a_card():
    with torch.device("meta"):
        model = zoo.vae(4, 2)
    assert "parameters θ" in text_of(model)


# The other results --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def level():
    """A local level model, which is exact, and two rows of which one has a gap."""
    x = torch.linspace(0, 2, 10).reshape(1, 10, 1).repeat(2, 1, 1)
    x[1, 4] = torch.nan
    return zoo.local_level(), x


def test_a_bound_shows_its_terms(level):
    bound = zoo.vae(4, 2, hidden=(4,)).elbo(x=torch.rand(6, 4), seed=0)
    means = {name: f"{float(term.detach().mean()):.4f}" for name, term in bound.terms.items()}
    mean = f"{float(bound.value.detach().mean()):.4f}"
    assert repr(bound) == (
        f"Bound of 6 examples, mean {mean} nats: x {means['x']}, kl(z) {means['kl(z)']}"
    )
    text = text_of(bound)
    assert f"bound = {mean} nats mean of 6 examples".replace("-", "−") in text
    assert f"kl(z) {means['kl(z)']}" in text


def test_a_posterior_shows_where_each_latent_comes_from():
    model = zoo.gmvae(4, 2, 3)
    text = text_of(model.posterior(x=torch.ones(2, 4), method="q"))
    assert "posterior by q of y, z for 2 rows (as asked)" in text
    assert "y OneHot 3 q(y|x) z Normal 2 q(z|x, y)" in text
    assert 'posterior["y"]' in text
    known = model.posterior(x=torch.ones(2, 4), y=torch.tensor([0, 1]), method="q")
    assert "y OneHot 3 known in every row" in text_of(known)
    assert 'posterior["z"]' in text_of(known)


def test_an_imputation_shows_filled_cells(level):
    model, x = level
    found = model.impute(x=x)
    text = text_of(found)
    assert "1 missing cell of x filled by the exact posterior" in text
    value = f"{float(found.mean['x'][1, 4, 0]):.4g}"
    assert f"x[1, 4, 0] {value} ± {float(found.sd['x'][1, 4, 0]):.4g}" in text


def test_a_forecast_shows_steps_and_its_fan(level):
    model, x = level
    forecast = model.forecast(steps=3, x=x, seed=0)
    text, html = text_of(forecast), forecast._repr_html_()
    low, high = (f"{float(end[0, 2, 0]):.4g}" for end in forecast.interval(0.95)["x"])
    mean = f"{float(forecast.mean['x'][0, 2, 0]):.4g}"
    assert "Forecast of x, 3 steps after the end of 2 rows" in text
    assert f"x 0 3 {mean}" in text
    assert f"{low} … {high}".replace("-", "−") in text
    assert html.count("<polyline") == 4  # past, mean and the two ends


def test_beliefs_show_rows_and_curves(level):
    model, x = level
    text, html = text_of(model.smooth(x=x)), model.smooth(x=x)._repr_html_()
    assert "Beliefs about level at each step given all data, 2 rows" in text
    assert "level, row 1 step 1 " in text
    assert html.count("<polyline") == 1
    classes = zoo.hmm()
    size = classes.graph.size("x")
    found = classes.filter(x=torch.zeros(1, 6, size))
    (name,) = classes.graph.latents
    assert f"P({name} = 1)" in text_of(found)


def test_a_schema_and_a_model_of_a_table_show_their_columns():
    rng = np.random.default_rng(0)
    frame = {"a<b": rng.normal(size=40), "k": rng.integers(0, 9, 40), "s": ["u", "v"] * 20}
    schema = Schema.read(frame)
    text = text_of(schema)
    assert "40 rows, 3 columns, 3 modelled" in text
    assert "a<b real" in text
    fitted = schema.fit(schema.mixture(1), frame, steps=2, starts=1, progress=False)
    shown = text_of(fitted)
    assert repr(fitted) in shown
    assert "x Normal a<b" in shown
    assert "Run of 2 steps, seed 0" in shown


def test_every_public_result_is_shown_in_notebooks_and_printed_shortly():
    """A dataclass's own repr would print all its numbers."""
    results = (
        aevb.Beliefs,
        aevb.Bound,
        aevb.Comparison,
        aevb.Diagnosis,
        aevb.Evidence,
        aevb.Forecast,
        aevb.Gap,
        aevb.Posterior,
        aevb.PredictiveCheck,
        aevb.Run,
        aevb.Schema,
        aevb.TableModel,
        Imputation,
        Page,
    )
    for cls in results:
        assert callable(getattr(cls, "_repr_html_", None)), cls
        assert not hasattr(cls.__repr__, "__wrapped__"), cls  # as that of a dataclass
        assert cls.__repr__ is not object.__repr__, cls
    assert Laboratory.__repr__ is Laboratory.__str__
