"""Weights and free bits of KL terms change what is maximised, and never what is reported."""

import math

import numpy as np
import pytest
import torch
from compiled_runs import data, gmvae, trained, vae, vrnn
from small_runs import assert_equal_weights, bits, small_vae, weights
from torch.utils._python_dispatch import TorchDispatchMode

from aevb import Bernoulli, Exact, Model, Normal, OneHot, Settings, em, fit, load_run, mle, mlp
from aevb.estimate.estimators import Estimate, estimate
from aevb.estimate.free_bits import FreeBits
from aevb.training import loop
from aevb.training.events import OBJECTIVE, events
from aevb.training.run import Run
from aevb.training.step import Tally

ONE = {"steps": 1, "batch": 60, "lr": 1e-3, "log_every": 1}


def mixture(*, labels=None, samples=1, how=None):
    """Return a model in float64, its plan, a batch and noise."""
    torch.manual_seed(0)
    model = gmvae().double()
    batch = model.prepare(x=data(20), **({} if labels is None else {"y": labels}))
    partial = () if labels is None else ("y",)
    plan = model.plan(partial=partial, samples=samples, how=how)
    return model, plan, batch, model.draw_noise(plan, batch, seed=1)


def gradients(model, value):
    found = torch.autograd.grad(
        value.sum(), list(model.parameters()), allow_unused=True, retain_graph=True
    )
    return [
        torch.zeros_like(p) if g is None else g
        for g, p in zip(found, model.parameters(), strict=True)
    ]


def assert_close(these, those):
    for one, other in zip(these, those, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


# The estimate -------------------------------------------------------------------------------------


def test_a_weight_by_latent_weights_its_own_term_alone():
    model, plan, batch, noise = mixture()
    plain = estimate(plan, model.factors, batch, noise)
    bound = estimate(plan, model.factors, batch, noise, kl_weight={"z": 4.0})
    x, y, z = (plain.terms[name] for name in ("x", "kl(y)", "kl(z)"))
    torch.testing.assert_close(bound.objective, x - y - 4 * z)
    assert_close(gradients(model, bound.objective), gradients(model, x - y - 4 * z))


def test_the_value_of_a_weighted_estimate_is_the_bound_without_gradient():
    for choices in ({}, {"bound": "iwae", "samples": 3}, {"how": {"y": "score"}, "samples": 2}):
        torch.manual_seed(0)
        model = gmvae()
        plain, weighted = (
            model.elbo(x=data(20), seed=1, **choices, **more)
            for more in ({}, {"kl_weight": {"z": 0.25, "y": 3.0}})
        )
        assert torch.equal(plain.value, weighted.value)
        assert plain.terms.keys() == weighted.terms.keys()
        assert all(torch.equal(plain.terms[name], weighted.terms[name]) for name in plain.terms)
        assert not weighted.value.requires_grad
        assert weighted.objective.requires_grad
        assert plain.objective is plain.value


def test_weights_of_importance_weighted_draws_are_exponents():
    """log 1/K Σ p(x|z) (p(z) / q(z))^β."""
    torch.manual_seed(0)
    model, x = vae().double(), data(5)
    plan = model.plan(bound="iwae", samples=4, how={"z": "sampled"})
    batch = model.prepare(x=x)
    noise = model.draw_noise(plan, batch, seed=2)
    terms, kls = Estimate(plan, model.factors, batch, noise).terms()
    expected = (terms["x"] - 0.3 * kls["kl(z)"])[..., 0].reshape(4, 5).logsumexp(0) - math.log(4)
    found = estimate(plan, model.factors, batch, noise, kl_weight={"z": 0.3})
    torch.testing.assert_close(found.objective, expected)


def test_an_unknown_latent_of_a_weight_is_refused():
    with pytest.raises(ValueError, match="kl_weight= names 'w', which is no latent"):
        vae().elbo(x=data(5), kl_weight={"w": 2.0})


def free(model, plan, batch, noise, nats, weight=1.0):
    return estimate(
        plan, model.factors, batch, noise, kl_weight=weight, free_bits=FreeBits(nats)
    ).objective


@pytest.mark.parametrize("weight", [1.0, 2.5])
@pytest.mark.parametrize("how", [{}, {"y": "score"}, {"z": "sampled"}], ids=str)
def test_free_bits_are_the_maximum_with_the_mean_over_the_batch(weight, how):
    model, plan, batch, noise = mixture(samples=2, how=how)
    plain = estimate(plan, model.factors, batch, noise)
    kl = {name: plain.terms[f"kl({name})"].detach().mean() for name in ("y", "z")}
    # y is above its free bits, z below.
    nats = {"y": 0.5 * float(kl["y"]), "z": 2 * float(kl["z"]) + 0.1}
    assert nats["y"] > 0
    found = free(model, plan, batch, noise, nats, weight)
    torch.testing.assert_close(
        found.mean(),
        plain.terms["x"].mean() - weight * (kl["y"] + nats["z"]),
        rtol=0,
        atol=1e-12,
    )
    # The gradient is that of the objective in which z's term has no weight.
    without = estimate(plan, model.factors, batch, noise, kl_weight={"y": weight, "z": 0.0})
    assert_close(gradients(model, found), gradients(model, without.objective))
    if weight == 1:
        assert found.mean() < plain.value.mean()


def test_free_bits_below_every_term_change_nothing():
    model, plan, batch, noise = mixture()
    plain = estimate(plan, model.factors, batch, noise).value
    found = free(model, plan, batch, noise, {"y": 1e-9, "z": 1e-9})
    assert_close([found, *gradients(model, found)], [plain, *gradients(model, plain)])


def test_free_bits_count_the_rows_in_which_the_latent_is_unknown():
    labels = np.where(np.arange(20) < 15, np.arange(20) % 3, -1)
    model, plan, batch, noise = mixture(labels=labels)
    estimated = Estimate(plan, model.factors, batch, noise)
    sums, rows = estimated.kl_totals(["y", "z"])
    assert rows.tolist() == [5, 20]
    plain = estimate(plan, model.factors, batch, noise).value
    large = free(model, plan, batch, noise, {"y": 100.0})
    torch.testing.assert_close((plain - large).sum(), 5 * 100 - sums[0])
    mean = float(sums[0]) / 5  # over the rows without a label; over all rows it is a quarter
    assert torch.equal(free(model, plan, batch, noise, {"y": 0.9 * mean}).detach(), plain.detach())


def test_free_bits_of_a_sequence_count_rows_not_steps():
    torch.manual_seed(0)
    model = vrnn().double()
    batch = model.prepare(x=data(12).reshape(12, 4, 4), lengths=[1, 2, 3, 4] * 3)
    plan = model.plan()
    noise = model.draw_noise(plan, batch, seed=0)
    plain = estimate(plan, model.factors, batch, noise)
    large = free(model, plan, batch, noise, {"z": 50.0})
    torch.testing.assert_close((plain.value - large).sum(), 12 * 50 - plain.terms["kl(z)"].sum())


def test_other_processes_count_too():
    """Two processes with half of the rows each get the gradient of the whole batch."""
    model, plan, batch, noise = mixture()
    whole = free(model, plan, batch, noise, {"z": 0.02, "y": 0.05})
    halves = [
        (
            {name: value[..., part, :] for name, value in batch.items()},
            {name: value[..., part, :] for name, value in noise.items()},
        )
        for part in (slice(0, 10), slice(10, 20))
    ]
    parts = [Estimate(plan, model.factors, *half).kl_totals(["z", "y"]) for half in halves]

    def add_up(tensors):
        for tensor, total in zip(tensors, map(sum, zip(*parts, strict=True)), strict=True):
            tensor.copy_(total)

    found = [
        estimate(plan, model.factors, *half, free_bits=FreeBits({"z": 0.02, "y": 0.05}, add_up))
        for half in halves
    ]
    torch.testing.assert_close(torch.cat([one.objective for one in found]), whole)
    sums = [a + b for a, b in zip(*(gradients(model, one.objective) for one in found), strict=True)]
    assert_close(sums, gradients(model, whole))


# Training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "idle", [{"beta": 1}, {"beta": {"z": 1.0}}, {"beta": {}}, {"free_bits": 0}, {"kl_cycles": 1}]
)
def test_settings_that_change_nothing_are_not_computed(idle):
    settings = {"steps": 20, "batch": 20, "log_every": 1}
    plain, other = small_vae(), small_vae()
    usual = fit(plain, {"x": bits()}, **settings)
    run = fit(other, {"x": bits()}, **settings, **idle)
    assert_equal_weights(weights(plain), weights(other))
    assert "objective" not in run.history
    assert not events(run.rows, OBJECTIVE)
    assert [row.keys() for row in usual.rows] == [row.keys() for row in run.rows]


class Counted(TorchDispatchMode):
    """Count torch's operations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_unused_settings_cost_no_operation():
    counts = {}
    for name, settings in {
        "none": {},
        "idle": {"beta": {"z": 1.0}, "free_bits": {"y": 0.0}},
        "used": {"beta": 2.0},
    }.items():
        torch.manual_seed(0)
        with Counted() as counted:
            fit(gmvae(), {"x": data()}, steps=5, compile=False, **settings)
        counts[name] = counted.count
    assert counts["none"] == counts["idle"] < counts["used"]


def stepped(model, **settings):
    """Take a step; return the run, and by parameter whether it stayed the same."""
    before = weights(model)
    run = fit(model, {"x": data()}, **ONE, **settings)
    return run, {name: torch.equal(tensor, before[name]) for name, tensor in weights(model).items()}


@pytest.mark.parametrize("settings", [{"beta": 0.0}, {"free_bits": 1e3}], ids=str)
def test_without_a_kl_term_the_prior_stays_and_the_rest_moves(settings):
    """No parameter of p's prior is in the reconstruction; all others are."""
    torch.manual_seed(0)
    model = Model(
        {"z": Normal(2, learned=True), "x | z": Bernoulli(16, net=mlp(8))},
        {"z | x": Normal(net=mlp(8))},
    )
    _, same = stepped(model, **settings)
    assert {name for name, unchanged in same.items() if unchanged} == {
        name for name in same if "p(z)" in name
    }
    assert any("p(z)" in name for name in same)


def test_the_objective_and_the_bound_are_recorded_by_their_names():
    run = fit(
        small_vae(),
        {"x": bits()},
        validation={"x": bits(40)},
        steps=12,
        batch=90,
        log_every=1,
        validate_every=4,
        beta=4.0,
        kl_warmup=6,
        kl_cycles=1,
    )
    history = run.history
    np.testing.assert_allclose(history["elbo"], history["x"] - history["kl(z)"], atol=1e-5)
    weight = 4 * np.minimum(1, np.arange(1, 13) / 6)
    np.testing.assert_allclose(
        history["objective"], history["x"] - weight * history["kl(z)"], atol=1e-5
    )
    # A validation is of the last weights: it has beta, but no warm-up.
    np.testing.assert_allclose(
        history["validation objective"],
        history["validation x"] - 4 * history["validation kl(z)"],
        atol=1e-5,
    )
    np.testing.assert_allclose(
        history["validation elbo"], history["validation x"] - history["validation kl(z)"], atol=1e-5
    )
    assert run.best.value == max(history["validation objective"])
    (event,) = events(run.rows, OBJECTIVE)
    assert str(event) == (
        "The run maximises the objective, which has beta=4. The elbo and its terms are reported "
        "without them."
    )


@pytest.mark.parametrize("at_a_time", [1000, 7])
def test_free_bits_of_a_validation_are_compared_with_all_its_rows(monkeypatch, at_a_time):
    monkeypatch.setattr("aevb.training.evaluation.ROWS", at_a_time)
    x, y = data(40), np.where(np.arange(40) < 30, np.arange(40) % 3, -1)
    torch.manual_seed(0)
    run = fit(
        gmvae(),
        {"x": x},
        validation={"x": x, "y": y},
        steps=4,
        free_bits={"y": 50.0, "z": 1e-6},
        beta={"y": 2.0},
    )
    history = run.history
    assert "validation free kl y" not in history
    model = run.model
    bound = model.elbo(x=x, y=y, seed=0)
    # kl(y) has −log p(y) of the rows with a label, which has no weight; KL terms are exact here.
    known = -torch.log(torch.tensor(3.0)) * 30
    kl = bound.terms["kl(y)"].detach().sum() + known
    lost = history["validation elbo"][-1] - history["validation objective"][-1]
    assert lost == pytest.approx(float(2 * 50.0 * 10 - kl) / 40, abs=1e-4)


def test_cycles_repeat_the_rising_part():
    settings = Settings(kl_warmup=3, kl_cycles=4)
    found = [settings.kl_weight(step, 22) for step in range(22)]
    rising = [1 / 3, 2 / 3, 1.0]
    # 22 steps in four cycles: they begin at steps 0, 6, 11 and 17.
    assert found == pytest.approx(
        [*rising, 1, 1, 1, *rising, 1, 1, *rising, 1, 1, 1, *rising, 1, 1]
    )
    once = Settings(kl_warmup=3)
    assert [once.kl_weight(step, 5) for step in range(5)] == pytest.approx([*rising, 1, 1])
    assert Settings().kl_weight(0, 5) == 1
    run = fit(small_vae(), {"x": bits()}, steps=22, kl_warmup=3, kl_cycles=4, log_every=1)
    np.testing.assert_allclose(run.history["kl weight"], found)
    np.testing.assert_allclose(
        run.history["objective"],
        run.history["x"] - np.array(found) * run.history["kl(z)"],
        atol=1e-5,
    )


WEIGHTED = [
    {"beta": {"z": 3.0, "y": 0.5}, "kl_warmup": 4, "kl_cycles": 2},
    {"beta": 2.0, "free_bits": {"z": 0.05}},
    {"beta": {"z": 0.3}, "bound": "iwae", "samples": 2, "gradient": "dreg"},
]


@pytest.mark.parametrize("settings", WEIGHTED, ids=str)
def test_seeds_together_give_what_each_gives_alone(settings):
    torch.manual_seed(0)
    model = gmvae()
    together = fit(model, {"x": data()}, seeds=2, steps=15, batch=20, **settings)
    for seed, run in enumerate(together):
        alone = model.fresh(seed)
        own = fit(alone, {"x": data()}, seed=seed, steps=15, batch=20, **settings)
        assert_equal_weights(weights(alone), weights(run.model))
        np.testing.assert_array_equal(own.history["objective"], run.history["objective"])


class KilledError(Exception):
    pass


@pytest.mark.parametrize("settings", WEIGHTED, ids=str)
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, monkeypatch, settings):
    settings = {"steps": 20, "batch": 20, "checkpoint_every": 3, "log_every": 4, **settings}
    x = data()

    def built(seed=0):
        torch.manual_seed(seed)
        return gmvae()

    whole, part, resumed = built(), built(), built(9)
    reference = fit(whole, {"x": x}, validation={"x": x}, **settings)
    take = loop.Training._take_step

    def dying(self, phase):
        if self.step == 11:
            raise KilledError
        return take(self, phase)

    monkeypatch.setattr(loop.Training, "_take_step", dying)
    with pytest.raises(KilledError):
        fit(part, {"x": x}, validation={"x": x}, out=tmp_path, **settings)
    monkeypatch.undo()
    run = fit(resumed, {"x": x}, validation={"x": x}, out=tmp_path, resume=True, **settings)
    assert_equal_weights(weights(whole), weights(resumed))

    def timeless(rows):
        return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]

    assert timeless(run.rows) == timeless(reference.rows)
    assert Run.load(tmp_path).settings == run.settings
    assert load_run(tmp_path) is not None
    with pytest.raises(ValueError, match="was trained with beta=.*, not 7.0"):
        fit(built(), {"x": x}, out=tmp_path, resume=True, **(settings | {"beta": 7.0}))


def test_a_checkpoint_without_the_objective_is_continued():
    """Earlier versions recorded the bound and its terms only."""
    from aevb.training.distributed import World

    tally = Tally(torch.device("cpu"), torch.float32, World())
    tally.restore({"sums": {"elbo": -8.0, "gradient": 2.0}, "taken": 4}, torch.float32)
    tally.rename(["elbo", "objective", "gradient"])
    tally.make_room()
    tally.add([-1.0, -3.0, 0.5])
    assert tally.read() == {"elbo": -1.0, "objective": -3.0, "gradient": 0.5}


@pytest.mark.parametrize("settings", WEIGHTED, ids=str)
def test_recorded_steps_take_other_weights_at_every_step(monkeypatch, settings):
    settings = settings | {"kl_warmup": 8, "kl_cycles": 2}
    eager, run, none = trained(monkeypatch, gmvae, {}, settings, after=10**9)
    recorded, other, made = trained(monkeypatch, gmvae, {}, settings, after=2)
    assert (none, made) == (0, 1)
    assert_equal_weights(weights(eager), weights(recorded))
    np.testing.assert_array_equal(run.history["objective"], other.history["objective"])


# What has no meaning ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": -1.0}, r"beta is a number, 0 or more, or numbers by latent, e\.g\. 4\.0 or"),
        ({"beta": math.inf}, "beta is a number, 0 or more"),
        ({"beta": math.nan}, "beta is a number, 0 or more"),
        ({"beta": True}, "beta is a number, 0 or more"),
        ({"beta": "4"}, "beta is a number, 0 or more"),
        ({"beta": {"z": -2}}, "beta is a number, 0 or more"),
        ({"free_bits": -0.1}, r"free_bits is a number, .* e\.g\. 0\.5 or"),
        ({"free_bits": {0: 1.0}}, "free_bits is a number"),
        ({"beta": {"w": 2.0}}, "beta= names 'w', which is no latent. The latents are y, z"),
        ({"free_bits": {"x": 2.0}}, "free_bits= names 'x', which is no latent"),
        (
            {"free_bits": 1.0, "bound": "iwae", "samples": 3},
            'has no KL terms: they are inside its logarithm. Use bound="elbo"',
        ),
        ({"kl_cycles": 4}, "kl_cycles=4 repeats the warm-up of the KL terms, but kl_warmup is 0"),
        ({"kl_cycles": 0, "kl_warmup": 1}, "kl_cycles is a whole number, 1 or more"),
        (
            {"kl_cycles": 4, "kl_warmup": 2},
            "kl_warmup=2 does not end within a cycle: kl_cycles=4 divides 10 steps into cycles of "
            "2. Shorten it, or use fewer cycles",
        ),
    ],
)
def test_wrong_settings_are_refused_with_the_fix(settings, message):
    with pytest.raises(ValueError, match=message):
        fit(gmvae(), {"x": data()}, steps=10, **settings)


def test_latents_without_a_kl_term_are_refused():
    known = {"x": data(), "y": np.arange(60) % 3}
    with pytest.raises(ValueError, match="beta= names 'y', which is known in every row"):
        fit(gmvae(), known, steps=2, beta={"y": 2.0})
    fit(gmvae(), known, steps=2, beta={"z": 2.0})
    model = Model({"y": OneHot(3), "x | y": Bernoulli(16)}, {"y | x": OneHot()})
    for settings in ({"beta": 2.0}, {"free_bits": 0.1}):
        with pytest.raises(ValueError, match="changes KL terms, but the bound has none"):
            fit(model, known, steps=2, **settings)


@pytest.mark.parametrize("schedule", [em(), mle()], ids=str)
@pytest.mark.parametrize("settings", [{"beta": 2.0}, {"free_bits": {"y": 0.1}}], ids=str)
def test_exact_schedules_have_no_kl_terms_to_weight(schedule, settings):
    model = Model({"y": OneHot(3, learned=True), "x | y": Bernoulli(16)}, {"y | x": Exact()})
    (name,) = settings
    with pytest.raises(ValueError, match=rf"{name}= configures q .* Leave {name}= out, or use"):
        fit(model, {"x": data()}, steps=2, schedule=schedule, **settings)
