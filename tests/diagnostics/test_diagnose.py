"""The doctor: measurements against exact answers, and every finding on a model that has it and on
one that has not.
"""

import json
import math
import sys
import warnings

import numpy as np
import pytest
import torch
from gap_models import CASES, PRECISION, SIGMA, factor_analysis, rows

from aevb import Bernoulli, Exact, Model, MultivariateNormal, Normal, OneHot, cli, fit, linear, zoo
from aevb.data.builtin import digits
from aevb.declare.distributions import inverse_softplus
from aevb.diagnostics import diagnose
from aevb.diagnostics.calibration import judge_ranks, ranks
from aevb.diagnostics.causes import reaching
from aevb.diagnostics.clusters import information
from aevb.diagnostics.history import judge_history
from aevb.diagnostics.measure import Measured
from aevb.runtime.checked_files import DataWarning
from aevb.training.events import SKIPPED
from aevb.training.run import Run
from aevb.training.settings import Settings


def levels(diagnosis, *, least: str = "warning") -> list[tuple[str, str]]:
    grave = {"warning": ("warning", "problem"), "note": ("note", "warning", "problem")}[least]
    return [
        (finding.kind, finding.about) for finding in diagnosis.findings if finding.level in grave
    ]


# Collapse and its causes --------------------------------------------------------------------------


def recurrent(how: dict[str, str]) -> tuple[Run, dict[str, np.ndarray]]:
    """A small VRNN trained on digits, row by row."""
    train, test = ((images.pixels > 7).astype("float32") for images in digits())
    torch.manual_seed(0)
    model = zoo.vrnn(x=8, h=16, hidden=(16,), layers=1)
    return fit(model, {"x": train}, validation={"x": test}, steps=120, lr=1e-2, seed=0, how=how), {
        "x": test
    }


def test_a_vrnn_whose_samples_are_detached_is_dead_for_want_of_a_gradient():
    run, test = recurrent({"z": "detached"})
    found = diagnose(run.model, test, run=run)
    (collapse,) = found.of("collapse", "z")
    assert collapse.level == found.worst == "problem"
    assert collapse.figures["cause"] == "no gradient"
    assert collapse.figures["reaching"] == 0
    assert "z is dead" in collapse.text
    assert "No gradient of the reconstruction reaches q" in collapse.text
    assert "how={'z': 'detached'}" in collapse.text
    assert found.of("biased estimator", "z")
    # The same weights under the model's own plan: the gradient is there, so that this is not the
    # cause.
    (other,) = diagnose(run.model, test, calibrate=False).of("collapse", "z")
    assert other.figures["reaching"] > 0
    assert other.figures["cause"] != "no gradient"


def test_a_healthy_vrnn_is_not():
    run, test = recurrent({})
    found = diagnose(run.model, test, run=run, train=False)
    assert not levels(found)
    (used,) = found.of("used", "z")
    assert used.figures["reaching"] > 0
    assert used.figures["worth"] > 0


def small_vae(decoder: float, encoder: float) -> Model:
    """A VAE whose decoder and encoder read what they are given with these weights; 0 is not at
    all.
    """
    torch.manual_seed(0)
    model = Model(p={"z": Normal(2), "x | z": Bernoulli(6)}, q={"z | x": Normal()})
    with torch.no_grad():
        model.factors["p(x|z)"].net.blocks.weights["z"].copy_(decoder * torch.randn(6, 2))
        blocks = model.factors["q(z|x)"].net.blocks
        blocks.weights["x"].mul_(encoder)
        blocks.bias[:2].zero_()
        blocks.bias[2:].fill_(math.log(math.e - 1))  # softplus⁻¹(1)
    return model


X = torch.rand(150, 6, generator=torch.Generator().manual_seed(0)).round()


def test_a_decoder_that_ignores_the_latent_is_named():
    (collapse,) = diagnose(small_vae(0.0, 0.0), {"x": X}).of("collapse", "z")
    assert collapse.figures["cause"] == "p does not need it"
    assert collapse.figures["offer"] < 1e-5
    assert max(collapse.figures["activity"]) < 1e-9
    assert collapse.figures["reaching"] == 0  # p has no gradient to send; nothing keeps it from q


def test_an_encoder_that_has_not_found_the_latent_is_named():
    (collapse,) = diagnose(small_vae(2.0, 0.0), {"x": X}).of("collapse", "z")
    assert collapse.figures["cause"] == "q has not found it"
    assert collapse.figures["offer"] > 1


def test_a_q_that_is_worse_than_none_is_named():
    (found,) = diagnose(small_vae(0.0, 4.0), {"x": X}).of("misleading q", "z")
    # nothing is gained, all of the KL is lost
    assert found.figures["worth"] == pytest.approx(-found.figures["kl"], rel=0.2)


def test_a_latent_that_p_does_not_read_is_named():
    model = Model(
        p={"z": Normal(2), "u": Normal(1), "x | z": Bernoulli(6)},
        q={"z | x": Normal(), "u | x": Normal()},
    )
    with torch.no_grad():
        blocks = model.factors["q(u|x)"].net.blocks
        blocks.weights["x"].zero_()
        blocks.bias.copy_(torch.tensor([0.0, math.log(math.e - 1)]))
    (collapse,) = diagnose(model, {"x": X}, calibrate=False).of("collapse", "u")
    assert "No factor of p but its own reads u" in collapse.text


def test_entries_that_are_not_used_are_counted():
    model, x = factor_analysis(Normal(net=linear(bias=False), scale="learned")), rows(300)
    with torch.no_grad():
        model.factors["p(x|z)"].net.blocks.weights["z"][:, 1] = 0
        model.factors["q(z|x)"].net.blocks.weights["x"][1] = 0
        model.factors["q(z|x)"].vectors["scale"].copy_(inverse_softplus(torch.tensor([0.3, 1.0])))
    (found,) = diagnose(model, {"x": x}, calibrate=False).of("unused entries", "z")
    activity = (x.double() @ model.factors["q(z|x)"].net.blocks.weights["x"].T).var(0, correction=0)
    assert found.figures["activity"] == pytest.approx(activity.tolist())
    assert "1 of its 2 entries is not used (z1; activity below 0.01)" in found.text
    assert found.level == "note"


@pytest.mark.parametrize("case", CASES)
def test_kl_by_entry_adds_up_to_the_kl(case):
    p, q, data = CASES[case]
    torch.manual_seed(0)
    model = Model(p=p, q=q).double().eval()
    batch = model.prepare(
        **{name: value for name, value in data.items() if name not in model.graph.latents}
    )
    partial = frozenset(name[:-1] for name in batch if name.endswith("?"))
    with torch.no_grad():
        for how in (
            {},
            {
                name: "sampled"
                for name, choice in model.plan(samples=3).choices.items()
                if choice.draw == "pathwise"
            },
        ):
            part = Measured(model, model.plan(samples=3, partial=partial, how=how), batch, seed=0)
            for name in model.graph.latents:
                entries = part.kl(name)
                if entries is not None:
                    assert torch.allclose(
                        entries.sum(-1), part.bound.terms[f"kl({name})"], rtol=0, atol=1e-10
                    )
    found = diagnose(model, data)
    assert json.loads(json.dumps(found.to_dict()))["rows"] == 6
    assert "6 rows examined" in str(found)


def test_what_reaches_q_is_the_gradient_of_all_but_its_own_kl():
    model, x = factor_analysis(Normal(net=linear(bias=False), scale=0.5)).double(), rows(20)
    plan, batch = model.plan(samples=4), model.prepare(x=x)
    noise = model.draw_noise(plan, batch, seed=3)
    z = (
        0.5 * noise["z"] + (x @ model.factors["q(z|x)"].net.blocks.weights["x"].T)
    ).detach()  # [4, 1, 20, 2]
    decoder, scale = model.factors["p(x|z)"].net.blocks.weights["z"].detach(), SIGMA
    gradient = (((x - z @ decoder.T) / scale**2) @ decoder).mean(0)[0]  # ∂ log p(x|z)/∂z
    assert reaching(model, plan, batch, 3)["z"] == pytest.approx(
        float(gradient.norm(dim=-1).mean()), rel=1e-9
    )
    assert reaching(model, model.plan(how={"z": "detached"}, samples=4), batch, 3) == {"z": 0.0}
    assert reaching(model, model.plan(how={"z": "score"}, samples=4), batch, 3)["z"] > 0


# Classes ------------------------------------------------------------------------------------------


def mixture() -> tuple[Model, np.ndarray, np.ndarray]:
    """Classes at 0, 0, 5 and 10 in two dimensions: the first two are the same, a fifth is never
    used; q is exact.
    """
    model = Model(
        p={"y": OneHot(5, learned=True), "x | y": Normal(2, net=linear(bias=False), scale=1.0)},
        q={"y | x": Exact()},
    )
    with torch.no_grad():
        model.factors["p(x|y)"].net.blocks.weights["y"].copy_(
            torch.tensor([0.0, 0.0, 5.0, 10.0, 50.0]).expand(2, 5)
        )
    labels = np.random.default_rng(0).integers(3, size=300)
    x = np.random.default_rng(1).normal(size=(300, 2)) + 5.0 * labels[:, None]
    return model, x, labels


def test_dead_and_duplicate_classes_are_found_and_labels_matched():
    model, x, labels = mixture()
    found = diagnose(model, {"x": x}, labels=labels)
    assert found.of("dead classes")[0].figures["dead"] == [4]
    assert [pair[:2] for pair in found.of("same classes")[0].figures["pairs"]] == [(0, 1)]
    usage = found.of("classes")[0].figures["usage"]
    assert sum(usage) == pytest.approx(1)
    assert usage[2] == pytest.approx((labels == 1).mean(), abs=0.01)
    (against,) = found.of("labels")
    assert against.figures["accuracy"] > 0.98
    assert against.figures["nmi"] > 0.95
    assert not found.of("collapse")


def test_classes_that_differ_and_are_used_give_no_alarm():
    _, x, labels = mixture()
    three = Model(
        p={"y": OneHot(3), "x | y": Normal(2, net=linear(bias=False), scale=1.0)},
        q={"y | x": Exact()},
    )
    with torch.no_grad():
        three.factors["p(x|y)"].net.blocks.weights["y"].copy_(
            torch.tensor([0.0, 5.0, 10.0]).expand(2, 3)
        )
    assert not levels(diagnose(three, {"x": x}), least="note")
    # a class's values among the data are labels, not given to the model
    assert diagnose(three, {"x": x, "y": labels}).of("labels")


def test_labels_may_be_one_hot_and_those_of_steps_are_none_of_rows():
    model, x, labels = mixture()
    numbers = diagnose(model, {"x": x, "y": labels}, calibrate=False).of("labels")
    assert (
        diagnose(model, {"x": x, "y": np.eye(5)[labels]}, calibrate=False).of("labels") == numbers
    )
    assert len(numbers) == 1
    chain, states = hidden_markov(), np.zeros((6, 4), int)
    assert not diagnose(
        chain, {"x": np.zeros((6, 4, 2)), "c": np.zeros((6, 1)), "s": states}, calibrate=False
    ).of("labels")


def hidden_markov() -> Model:
    torch.manual_seed(0)
    p = {
        "s[0]": OneHot(3),
        "s[t] | s[t-1]": OneHot(3),
        "x[t] | s[t]": Normal(2),
        "c | s[T]": Normal(1),
    }
    return Model(p, {"s[t] | s[t-1], x[t]": OneHot()}).double()


def test_expectations_over_a_chain_are_those_of_its_marginals():
    """The scale of x[t] and of c, which reads the end, under a chain that is enumerated; rows of
    different lengths.
    """
    model, random = hidden_markov(), torch.Generator().manual_seed(0)
    x, c = (
        torch.randn(5, 4, 2, generator=random).double(),
        torch.randn(5, 1, generator=random).double(),
    )
    batch, lengths = model.prepare(x=x, c=c, lengths=[4, 1, 3, 2, 4]), torch.tensor([4, 1, 3, 2, 4])
    with model._evaluating(0):
        found = Measured(model, model.plan(), batch, 0)
        probs = model.posterior(x=x, c=c, lengths=lengths)["s"].probs  # [N, T, C]
        scales = (
            model.factors["p(x[t]|s[t])"]
            .distribution(model.factors["p(x[t]|s[t])"]({"s[t]": torch.eye(3).double()}))
            .scale
        )
        ends = (
            model.factors["p(c|s[T])"]
            .distribution(model.factors["p(c|s[T])"]({"s[T]": torch.eye(3).double()}))
            .scale
        )
        of_x, of_c = (
            found.of_p("x", lambda dist: dist.scale),
            found.of_p("c", lambda dist: dist.scale),
        )
    real = torch.arange(4)[:, None] < lengths
    torch.testing.assert_close(of_x, (probs.transpose(0, 1) @ scales) * real[..., None])
    torch.testing.assert_close(of_c[0], probs[torch.arange(5), lengths - 1] @ ends)
    diagnose(model, {"x": x, "c": c, "lengths": lengths})


def test_one_row_is_examined_and_none_is_refused():
    model, x, _ = mixture()
    assert "stderr" not in diagnose(model, {"x": x[:1]}).of("elbo")[0].figures
    for none in (0, -5):
        with pytest.raises(ValueError, match="rows is the largest number of rows to use"):
            diagnose(model, {"x": x}, rows=none)


def test_information_is_the_mutual_information():
    told, left = information(torch.eye(4).double().repeat(5, 1))
    assert (told, left) == (pytest.approx(math.log(4)), pytest.approx(0, abs=1e-12))
    told, left = information(torch.full((10, 4), 0.25).double())
    assert (told, left) == (pytest.approx(0, abs=1e-12), pytest.approx(math.log(4)))


# Calibration --------------------------------------------------------------------------------------


def exact_posterior(factor: float, shift: float = 0.0) -> Model:
    """Factor analysis with its exact posterior, its scale multiplied and its mean shifted by so
    many of its standard deviations.
    """
    model = factor_analysis(MultivariateNormal(net=linear(), covariance="shared"))
    tril = torch.linalg.cholesky(torch.linalg.inv(PRECISION))
    with torch.no_grad():
        model.factors["q(z|x)"].net.blocks.bias.copy_(shift * tril.square().sum(-1).sqrt())
        scaled = factor * tril
        model.factors["q(z|x)"].vectors["tril"].copy_(
            torch.stack(
                [inverse_softplus(scaled[0, 0]), scaled[1, 0], inverse_softplus(scaled[1, 1])]
            )
        )
    return model


@pytest.mark.parametrize(
    ("factor", "shift", "level", "words"),
    [
        (1.0, 0.0, "ok", "calibrated"),
        (0.2, 0.0, "warning", "too narrow"),
        (8.0, 0.0, "warning", "too wide"),
        (1.0, -1.5, "warning", "too low"),
    ],
)
def test_ranks_tell_a_q_that_is_too_sure_too_wide_or_beside(factor, shift, level, words):
    model = exact_posterior(factor, shift)
    # the first: 1 % of seeds would be called out, but as a note
    found = judge_ranks("z", ranks(model, model.prepare(x=rows(500)), 0)["z"])
    assert found.level == level
    assert words in found.text


def test_ranks_of_classes_and_sequences_are_uniform_at_the_exact_posterior():
    model, x, _ = mixture()
    rank = ranks(model, model.prepare(x=x), 0)["y"]
    assert rank.shape == (300, 1)
    assert judge_ranks("y", rank).level == "ok"
    chain = Model(p={"y[t]": OneHot(3), "x[t] | y[t]": Normal(2)}, q={"y[t] | x[t]": Exact()})
    rank = ranks(
        chain, chain.prepare(x=torch.zeros(300, 4, 2), lengths=torch.arange(300) % 4 + 1), 0
    )["y"]
    assert judge_ranks("y", rank).level == "ok"


# Scales, numbers, the run's record ----------------------------------------------------------------


def test_scales_that_ran_away_are_found():
    model, x = factor_analysis(Normal(net=linear(bias=False), scale="learned")), rows(100)
    assert not diagnose(model, {"x": x}, calibrate=False).of("sharp likelihood")
    with torch.no_grad():
        model.factors["p(x|z)"].vectors["scale"][1] = -12.0
        model.factors["q(z|x)"].vectors["scale"].fill_(-12.0)
    found = diagnose(model, {"x": x}, calibrate=False)
    assert found.of("sharp likelihood", "x")[0].figures["columns"] == [1]
    assert found.of("sharp likelihood", "x")[0].figures["scale"][1] == pytest.approx(
        math.log1p(math.exp(-12)), rel=1e-6
    )
    assert found.of("point posterior", "z")


def test_numbers_that_are_not_finite_end_the_examination():
    model = small_vae(1.0, 1.0)
    with torch.no_grad():
        model.factors["p(x|z)"].net.blocks.bias[0] = torch.nan
    found = diagnose(model, {"x": X})
    assert [finding.kind for finding in found.findings] == ["not finite"]
    assert "p(x|z)" in found.findings[0].text


def record(validation: list[float], training: list[float], **settings) -> Run:
    made = [
        {"step": 10 * i, "elbo": value, "validation elbo": held}
        for i, (held, value) in enumerate(zip(validation, training, strict=True), 1)
    ]
    return Run(small_vae(1.0, 1.0), Settings(**settings), made, None, made[-1]["step"], 1.0)


def test_the_record_tells_over_fitting_and_an_unfinished_warm_up():
    fitted = judge_history(record([-90, -80, -75, -74], [-91, -80, -74, -73]))
    assert [(finding.level, finding.kind) for finding in fitted] == [("ok", "over-fitting")]
    ahead = judge_history(record([-90, -20, -17.97, -18], [-91, -20, -15, -14.9]))[0]
    assert ahead.level == "ok"
    assert ahead.text == (
        "Not over-fitted: validation -18.00 nats has hardly fallen (best -17.97 at step 30). "
        "Training is 3.1 nats better: more data or dropout may still help."
    )
    over = judge_history(record([-90, -80, -85, -95], [-91, -80, -70, -60]))
    assert over[0].level == "warning"
    assert over[0].figures["best step"] == 20
    assert "since step 20" in over[0].text
    unfinished = judge_history(record([-90.0, -80.0], [-91.0, -80.0], kl_warmup=80))
    assert [finding.kind for finding in unfinished] == ["over-fitting", "kl warm-up"]
    assert unfinished[1].figures["weight"] == 0.25
    failed = record([-90.0], [-91.0])
    failed.rows.append(
        {"step": 7, "note": "The loss is not finite at step 7. Skipped (1 of 3).", "kind": SKIPPED}
    )
    assert judge_history(failed)[1].kind == "failed steps"


def course(values, **settings) -> Run:
    rows = [{"step": 10 * i, "elbo": float(value)} for i, value in enumerate(values, 1)]
    return Run(small_vae(1.0, 1.0), Settings(**settings), rows, None, rows[-1]["step"], 1.0)


def test_a_bound_that_fell_back_is_told():
    noise = np.random.default_rng(0).normal(size=100)
    rising = -90 + 30 * (1 - np.exp(-np.arange(100) / 20))
    fallen = rising - 0.3 * np.clip(np.arange(100) - 50, 0, None)
    (found,) = judge_history(course(fallen + 0.3 * noise))
    assert (found.level, found.kind) == ("warning", "fell back")
    assert 400 <= found.figures["step"] <= 650
    assert found.figures["best"] - found.figures["last"] == pytest.approx(11, abs=2)
    assert "lower lr=" in found.remedy
    # nothing held out: no more than a note
    assert judge_history(course(rising + noise))[0].kind == "over-fitting"
    # chance alone
    assert judge_history(course(np.full(100, -60.0) + noise))[0].kind == "over-fitting"
    # the bound was not all that was raised
    assert judge_history(course(fallen, classify=5.0))[0].kind == "over-fitting"
    assert judge_history(course([-60, *rising[60:]], kl_warmup=10))[0].kind == "over-fitting"


def test_another_objective_is_told_and_judged():
    rows = [
        {"step": 10 * i, "elbo": -90.0 - i, "objective": value, "validation objective": value}
        for i, value in enumerate([-99.0, -95.0, -94.0], 1)
    ]
    run = Run(small_vae(1.0, 1.0), Settings(beta=4.0, free_bits={"z": 0.5}), rows, None, 30, 1.0)
    fitted, told = judge_history(run)
    assert (fitted.level, fitted.kind) == ("ok", "over-fitting")
    assert fitted.text.startswith("Not over-fitted: validation objective -94.00 nats")
    assert (told.level, told.kind) == ("note", "objective")
    assert "with beta=4 and free_bits={'z': 0.5}, not the bound itself" in told.text
    values = np.concatenate([np.linspace(-90, -60, 50), np.linspace(-60, -75, 50)])
    fallen = [
        {"step": 10 * i, "elbo": -50.0 + i, "objective": value} for i, value in enumerate(values, 1)
    ]
    found = judge_history(Run(small_vae(1.0, 1.0), Settings(beta=4.0), fallen, None, 1000, 1.0))
    assert found[0].kind == "fell back"
    assert found[0].text.startswith("The training objective fell back from -60.")


def test_cycles_are_judged_by_their_last_rise():
    weight = np.tile([0.25, 0.5, 0.75, *[1.0] * 22], 4)
    values = -60 - 5 * weight  # higher while the weight is low
    rows = [
        {"step": 10 * i, "elbo": value, "kl weight": one}
        for i, (value, one) in enumerate(zip(values, weight, strict=True), 1)
    ]
    settings = Settings(kl_warmup=40, kl_cycles=4)
    model = small_vae(1.0, 1.0)
    whole = judge_history(Run(model, settings, rows, None, 1000, 1.0))
    assert [finding.kind for finding in whole] == ["over-fitting"]
    part = judge_history(Run(model, settings, rows[:27], None, 270, 1.0))
    assert [finding.kind for finding in part] == ["over-fitting", "kl warm-up"]
    assert part[1].figures["weight"] == 0.5


def test_a_run_says_that_its_bound_fell_back():
    model = small_vae(1.0, 1.0)

    def spoil(step: int, model: Model) -> None:
        if step > 60:
            with torch.no_grad():
                model.factors["p(x|z)"].net.blocks.bias.add_(0.5)

    with pytest.warns(DataWarning, match="^The training bound fell back from "):
        run = fit(
            model,
            {"x": X},
            validation={"x": X},
            steps=100,
            validate_every=10,
            log_every=5,
            after=spoil,
            seed=0,
        )
    assert any(
        row.get("note", "").startswith("The training bound fell back from ") for row in run.rows
    )


def test_importance_weights_that_rest_on_one_sample_are_told():
    torch.manual_seed(0)
    for scale, expected in (
        (0.02, True),
        (1.0, False),
    ):  # a posterior much narrower than q, or nearly as wide
        model = Model(
            {"z": Normal(3), "x | z": Normal(3, scale=scale)}, {"z | x": Normal(scale=1.0)}
        )
        with torch.no_grad():
            model.factors["q(z|x)"].net.blocks.bias.zero_()
        x = model.sample(60, seed=0)["x"]
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            run = fit(model, {"x": x}, steps=2, lr=1e-6, bound="iwae", samples=30, seed=0)
        notes = [row["note"] for row in run.rows if "note" in row]
        assert (
            any(
                note.startswith(
                    "The importance weights rest on one sample: the effective sample size is 1."
                )
                for note in notes
            )
            == expected
        )
        found = diagnose(model, {"x": x}, run=run, calibrate=False)
        assert bool(found.of("one weight")) == expected


def test_a_healthy_model_gives_no_alarm_and_labels_of_the_wrong_number_are_refused():
    train, test = (
        (images.pixels.reshape(len(images.pixels), -1) > 7).astype("float32") for images in digits()
    )
    torch.manual_seed(0)
    model = zoo.vae(x=64, z=4, hidden=(64,), likelihood="Bernoulli", dropout=0.0)
    run = fit(model, {"x": train}, validation={"x": test}, steps=600, lr=3e-3, seed=0)
    found = diagnose(model, {"x": test}, run=run, rows=200)
    assert found.rows == 200
    assert not levels(found)
    assert found.of("used", "z")[0].figures["worth"] > 5
    with pytest.raises(ValueError, match="labels has shape"):
        diagnose(model, {"x": test}, labels=[0, 1])


# The command line ---------------------------------------------------------------------------------


def test_the_command_line_examines_and_checks_a_run(tmp_path, monkeypatch, capsys):
    def aevb(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["aevb", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        return capsys.readouterr().out

    sizes = ("--set", "h=8", "--set", "hidden=[8]", "--set", "layers=1")
    aevb(
        "train",
        "vrnn",
        "--data",
        "digits",
        *sizes,
        "--steps",
        20,
        "--how",
        "z=detached",
        "--out",
        tmp_path / "run",
    )
    assert "z was trained with how='detached'" in aevb("doctor", tmp_path / "run", "--rows", 100)
    found = json.loads(aevb("doctor", tmp_path / "run", "--rows", 100, "--json", "--no-calibrate"))
    assert found["rows"] == 100
    assert {finding["kind"] for finding in found["findings"]} >= {
        "elbo",
        "biased estimator",
        "over-fitting",
    }
    printed = aevb(
        "check",
        tmp_path / "run",
        "--statistic",
        "mean",
        "--statistic",
        "autocorrelation",
        "--replicates",
        20,
        "--rows",
        100,
    )
    assert "autocorrelation(x)" in printed
    assert (tmp_path / "run" / "check.png").stat().st_size > 1000
