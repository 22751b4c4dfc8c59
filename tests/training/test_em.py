"""Exact EM, the exact evidence and the gap, against closed forms, scikit-learn and identities."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.decomposition import FactorAnalysis
from sklearn.mixture import GaussianMixture

from aevb import (
    Bernoulli,
    Deterministic,
    Exact,
    Model,
    MultivariateNormal,
    Normal,
    OneHot,
    Poisson,
    alternate,
    em,
    fit,
    linear,
    load,
    mle,
    mlp,
    zoo,
)
from aevb.data.builtin import factor_analysis
from aevb.data.sources import open_source
from aevb.evidence.exact import exact_evidence
from aevb.evidence.gap import gap
from aevb.training.distributed import World
from aevb.training.em import Responsibilities, exact_em
from aevb.training.em.factors import Rows
from aevb.training.evaluation import evaluate
from aevb.training.fit import TrainingError
from aevb.training.loop import Training

X = factor_analysis(400, seed=0)
CENTRED = X - X.mean(0)
IRIS = load_iris().data


def fa(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return zoo.fa().double()


def mixture(spec, *, classes: int = 3, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(
        p={"y": OneHot(classes, learned=True), "x | y": spec}, q={"y | x": Exact()}
    ).double()


def climbs(evidence: np.ndarray) -> bool:
    return bool((np.diff(evidence) > -1e-9).all()) and evidence[-1] > evidence[0]


def stationary(model: Model, **data) -> float:
    """The largest gradient of the mean evidence with respect to θ."""
    value = exact_evidence(model, model.prepare(**data)).mean()
    return max(float(g.abs().max()) for g in torch.autograd.grad(value, model.theta()))


# Linear-Gaussian models ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_factor_analysis_reaches_scikit_learn(seed):
    model = fa(seed)
    run = fit(
        model,
        {"x": CENTRED},
        validation={"x": CENTRED},
        schedule=em(),
        steps=800,
        log_every=1,
        validate_every=800,
    )
    reference = (
        FactorAnalysis(2, tol=1e-10, svd_method="lapack", max_iter=10_000)
        .fit(CENTRED)
        .score(CENTRED)
    )
    assert climbs(run.history["evidence"])
    assert abs(run.history["validation evidence"][-1] - reference) < 1e-5
    assert run.history["validation gap"][-1] < 1e-12  # q was set to the exact posterior
    assert run.history["validation elbo"][-1] == pytest.approx(reference, abs=0.2)


def test_missing_entries_are_marginalised():
    missing = CENTRED.copy()
    missing[np.random.default_rng(0).random(missing.shape) < 0.3] = np.nan
    model = fa()
    run = fit(model, {"x": missing}, schedule=em(), steps=800, log_every=1)
    assert climbs(run.history["evidence"])
    assert stationary(model, x=missing) < 2e-4


def test_a_hierarchy_with_biases_and_a_given_variable():
    random = np.random.default_rng(1)
    given = random.normal(size=(300, 2))
    data = {
        "x": random.normal(size=(300, 4)) @ random.normal(size=(4, 4))
        + given @ random.normal(size=(2, 4))
        + 3,
        "c": given,
    }
    torch.manual_seed(0)
    model = Model(
        p={
            "u": Normal(1, learned=True),
            "z | u": Normal(2, scale="learned"),
            "x | z, c": Normal(4, scale="learned"),
        },
        q={"z | x, c": Normal(), "u | z": Normal()},
        given={"c": 2},
    ).double()
    run = fit(model, data, schedule=em(), steps=60, log_every=1)
    assert climbs(run.history["evidence"])
    direct = Model(
        p={"x | c": MultivariateNormal(4, covariance="shared"), "z": Normal(1)},
        q={"z | x": Normal()},
        given={"c": 2},
    ).double()
    # one regression is the maximum
    best = fit(direct, data, schedule=em(), steps=2, log_every=1).history["evidence"][-1]
    assert run.history["evidence"][-1] < best + 1e-9
    assert run.history["evidence"][-1] > best - 1.0


def test_full_noise_covariance_is_the_residuals():
    torch.manual_seed(0)
    model = Model(
        p={"z": Normal(1), "x": MultivariateNormal(3, covariance="shared", learned=True)},
        q={"z | x": Normal()},
    ).double()
    fit(model, {"x": X}, schedule=em(), steps=1)
    exact = torch.distributions.MultivariateNormal(
        torch.as_tensor(X.mean(0)), torch.as_tensor(np.cov(X.T, bias=True))
    )
    torch.testing.assert_close(model.log_evidence(x=X).value, exact.log_prob(torch.as_tensor(X)))


def test_q_of_a_smaller_family_becomes_the_nearest():
    torch.manual_seed(0)
    model = zoo.fa(posterior="diagonal").double()
    run = fit(
        model,
        {"x": CENTRED},
        validation={"x": CENTRED},
        schedule=em(start="keep"),
        steps=200,
        validate_every=200,
    )
    left = run.history["validation gap"][-1]
    assert left > 1e-3
    with torch.no_grad():
        batch = model.prepare(x=CENTRED)
        for parameter in model.phi():
            for sign in (1, -1):
                parameter += sign * 1e-3
                assert gap(model, batch).mean() > left
                parameter -= sign * 1e-3


# Finite latents -----------------------------------------------------------------------------------


KINDS = [
    (Normal(4), "diag"),
    (MultivariateNormal(4), "full"),
    (MultivariateNormal(4, covariance="shared"), "tied"),
]


@pytest.mark.parametrize(("spec", "kind"), KINDS, ids=str)
def test_gaussian_mixtures_reach_scikit_learn(spec, kind):
    reference = GaussianMixture(
        3,
        covariance_type=kind,
        reg_covar=0 if kind == "diag" else 1e-6,
        tol=1e-13,
        max_iter=5000,
        random_state=0,
    ).fit(IRIS)
    model = mixture(spec)
    method = Responsibilities(model)
    method.open(Rows(open_source(model.graph, {"x": IRIS}, model._parameter()), World()))
    with (
        torch.no_grad()
    ):  # begin where the reference ended, a little off: EM finds the same maximum
        table = torch.as_tensor(reference.predict_proba(IRIS)).T * 0.9 + 0.1 / 3
        method.working.posterior = lambda batch: (table, torch.zeros(len(IRIS)))
        method.write(method.update(method.read())[1])
    run = fit(model, {"x": IRIS}, schedule=em(tol=1e-12), steps=600, log_every=1)
    assert climbs(run.history["evidence"])
    found = model.log_evidence(x=IRIS)
    assert found.method == "exact"
    assert float(found.value.mean()) == pytest.approx(reference.score(IRIS), abs=1e-7)
    if kind != "diag":
        return
    np.testing.assert_allclose(
        found.value.detach().numpy(), reference.score_samples(IRIS), atol=1e-4
    )


@pytest.mark.parametrize("family", [Bernoulli, Poisson])
def test_mixtures_of_counts_and_bits(family):
    random = np.random.default_rng(0)
    centres = random.random((3, 6)) * (1 if family is Bernoulli else 5)
    mean = centres[random.integers(3, size=500)]
    data = (
        (random.random(mean.shape) < mean).astype(float)
        if family is Bernoulli
        else random.poisson(mean).astype(float)
    )
    model = mixture(family(6))
    run = fit(model, {"x": data}, schedule=em(), steps=400, log_every=1)
    assert climbs(run.history["evidence"])
    assert stationary(model, x=data) < 1e-3


def test_two_discrete_latents_and_known_labels():
    random = np.random.default_rng(0)
    data = random.normal(size=(200, 2)) + 4 * random.integers(3, size=(200, 1))
    labels = np.where(random.random(200) < 0.3, random.integers(2, size=200), -1)
    torch.manual_seed(0)
    model = Model(
        p={"a": OneHot(2, learned=True), "b | a": OneHot(3), "x | b": Normal(2)},
        q={"a | x": OneHot(), "b | x, a": OneHot()},
    ).double()
    run = fit(model, {"x": data, "a": labels}, schedule=em(), steps=100, log_every=1)
    assert climbs(run.history["evidence"])
    everything = [
        model.log_prob(x=data, a=np.where(labels >= 0, labels, a), b=np.full(200, b))
        for a in range(2)
        for b in range(3)
    ]
    keep = [torch.as_tensor((labels < 0) | (labels == a)) for a in range(2) for _ in range(3)]
    joint = torch.stack(
        [torch.where(k, v, -torch.inf) for k, v in zip(keep, everything, strict=True)]
    )
    torch.testing.assert_close(model.log_evidence(x=data, a=labels).value, joint.logsumexp(0))
    all_known = fit(model, {"x": data, "a": labels.clip(0)}, schedule=em(), steps=20, log_every=1)
    assert climbs(all_known.history["evidence"])


def test_a_class_that_no_row_has_keeps_what_it_had():
    model = mixture(Normal(4), classes=2)
    before = (
        model.factors["p(x|y)"].net.blocks.weights["y"][:, 1]
        + model.factors["p(x|y)"].net.blocks.bias
    )
    fit(model, {"x": IRIS, "y": np.zeros(len(IRIS), dtype=int)}, schedule=em(), steps=1)
    torch.testing.assert_close(
        model.factors["p(x|y)"].net.blocks.weights["y"][:, 1], before.detach()
    )


def networked(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(
        p={"y": OneHot(4), "x | y": Normal(4, net=mlp(8))}, q={"y | x": OneHot(net=mlp(8))}
    ).double()


def test_the_m_steps_gradient_is_the_evidences_where_it_starts():
    model = networked()
    method, batch = exact_em(model), model.prepare(x=IRIS)
    assert isinstance(method, Responsibilities)
    assert not method.closed
    with torch.no_grad():
        frozen, _ = method.posterior(batch)
    expected, evidence = method.expected(batch, frozen)
    of_expected = torch.autograd.grad(expected.sum(), model.theta(), retain_graph=True)
    of_evidence = torch.autograd.grad(evidence.sum(), model.theta())
    for a, b in zip(of_expected, of_evidence, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(
        expected - (frozen * torch.where(frozen > 0, frozen.log(), 0.0)).sum(0), evidence
    )


def test_an_m_step_without_closed_form_climbs_and_leaves_q_alone(tmp_path):
    model = networked()
    phi = [parameter.clone() for parameter in model.phi()]
    settings = {
        "schedule": em(m_steps=20),
        "steps": 100,
        "batch": 50,
        "lr": 1e-2,
        "validate_every": 20,
    }
    run = fit(model, {"x": IRIS}, validation={"x": IRIS}, out=tmp_path / "whole", **settings)
    assert climbs(run.history["validation evidence"])
    assert all(torch.equal(a, b) for a, b in zip(phi, model.phi(), strict=True))
    again = networked()
    with pytest.raises(
        KeyboardInterrupt
    ):  # in the middle of an M-step, whose posterior belongs to older weights
        _interrupted_at(30, again, tmp_path / "part", settings)
    resumed = networked(seed=7)
    fit(
        resumed, {"x": IRIS}, validation={"x": IRIS}, out=tmp_path / "part", resume=True, **settings
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), resumed.state_dict().values(), strict=True)
    )


def _interrupted_at(step, model, out, settings):
    from aevb.training import loop as module

    real = module.Training._take_step

    def counting(self, phase):
        if self.step == step - 1:
            import signal

            signal.raise_signal(signal.SIGINT)
        return real(self, phase)

    module.Training._take_step = counting
    try:
        fit(model, {"x": IRIS}, validation={"x": IRIS}, out=out, **settings)
    finally:
        module.Training._take_step = real


def test_ascent_on_a_mixtures_evidence():
    model = mixture(Normal(4))
    run = fit(model, {"x": IRIS}, schedule=mle(), steps=300, batch=150, lr=0.05, log_every=1)
    assert run.history["evidence"][-1] > run.history["evidence"][0] + 1


# The gap ------------------------------------------------------------------------------------------


def test_the_gap_is_evidence_less_bound():
    model = networked()
    batch = model.prepare(x=IRIS)
    bound = model.elbo(x=IRIS).value  # enumerated: exact
    torch.testing.assert_close(gap(model, batch), model.log_evidence(x=IRIS).value - bound)
    linear_gaussian = fa()
    with torch.no_grad():
        rows = X[:20]
        values = torch.stack(
            [linear_gaussian.elbo(x=rows, seed=seed, samples=100).value for seed in range(100)]
        )
        distance = gap(linear_gaussian, linear_gaussian.prepare(x=rows))
        z = (linear_gaussian.log_evidence(x=rows).value - values.mean(0) - distance) / (
            values.std(0) / 10
        )
    assert z.abs().max() < 4.5


def test_alternating_phases_on_factor_analysis():
    torch.manual_seed(0)
    model = zoo.fa()
    run = fit(
        model, {"x": factor_analysis(seed=0)}, validation={"x": factor_analysis(seed=1)},
        schedule=alternate(1000, 1000), steps=2000, batch=32, lr=1e-2, validate_every=100,
    )  # fmt: skip
    steps, evidence, distance = (
        run.history[name]
        for name in ("validation evidence.step", "validation evidence", "validation gap")
    )
    assert np.ptp(evidence[steps <= 1000]) == 0  # an E-step does not touch θ
    assert distance[steps == 1000][0] < 0.01
    bound = evidence - distance
    assert bound[steps == 2000][0] > bound[steps == 1000][0] + 0.1
    assert evidence[steps == 2000][0] > evidence[steps == 1000][0] + 0.1
    assert distance[steps == 2000][0] > 0.1


# What has none ------------------------------------------------------------------------------------


def test_models_without_exact_posterior_are_refused():
    vae = zoo.vae(4, 2, hidden=(3,))
    with pytest.raises(
        ValueError,
        match=r"em\(\) needs the exact posterior.*is a ContinuousBernoulli.*alternate\(\) or "
        r"joint\(\)",
    ):
        fit(vae, {"x": np.random.default_rng(0).random((10, 4))}, schedule=em(), steps=1)
    torch.manual_seed(0)
    deep = Model(
        p={
            "z": Normal(2),
            "h | z": Deterministic(2, net=linear()),
            "x | h": Normal(3, scale="learned"),
        },
        q={"z | x": Normal()},
    )
    with pytest.raises(ValueError, match=r"deterministic with weights of its own.*Use mle\(\)"):
        fit(deep, {"x": X}, schedule=em(), steps=1)
    with pytest.raises(ValueError, match="positive number of steps"):
        em(m_steps=0)


# What was found by looking ------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1e-4, 1.0, 1e2])
def test_the_maximum_does_not_depend_on_the_units(factor):
    model = fa()
    with torch.no_grad():  # the same start, in the other units
        model.factors["p(x|z)"].net.blocks.weights["z"].mul_(factor)
        model.factors["p(x|z)"].vectors["scale"].fill_(np.log(np.expm1(factor)))
    fit(model, {"x": CENTRED * factor}, schedule=em(), steps=300)
    reference = (
        FactorAnalysis(2, tol=1e-10, svd_method="lapack", max_iter=10_000)
        .fit(CENTRED)
        .score(CENTRED)
    )
    assert float(model.log_evidence(x=CENTRED * factor).value.mean()) + 3 * np.log(
        factor
    ) == pytest.approx(reference, abs=1e-4)


def test_partly_known_codes_are_used_as_known():
    random = np.random.default_rng(0)
    z = random.normal(size=(400, 2))
    x = z @ random.normal(size=(2, 3)) + 0.3 * random.normal(size=(400, 3))
    known = np.where(random.random((400, 1)) < 0.4, z, np.nan)
    model = fa()
    run = fit(model, {"x": x, "z": known}, schedule=em(), steps=200, log_every=1)
    assert climbs(run.history["evidence"])
    assert stationary(model, x=x, z=known) < 1e-3


def test_single_precision_climbs_too():
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 2)) @ random.normal(size=(2, 20)) + 1e-3 * random.normal(
        size=(300, 20)
    )
    run = fit(zoo.fa(20, 2), {"x": x - x.mean(0)}, schedule=em(), steps=60, log_every=1)
    assert bool((np.diff(run.history["evidence"]) > -1e-3).all())


def test_a_missing_cell_does_not_keep_q_from_the_posterior():
    holed = CENTRED.copy()
    holed[3, 1] = np.nan
    run = fit(
        fa(), {"x": holed}, validation={"x": CENTRED}, schedule=em(), steps=200, validate_every=200
    )
    assert run.history["validation gap"][-1] < 1e-10


def test_a_fixed_root_keeps_its_mean(tmp_path):
    torch.manual_seed(0)
    model = Model(
        p={"z": Normal(2, scale="learned"), "x | z": Normal(3, scale="learned")},
        q={"z | x": Normal()},
    ).double()
    fit(model, {"x": X}, schedule=em(), steps=30)
    model.save(tmp_path)
    torch.testing.assert_close(
        load(tmp_path).log_evidence(x=X).value, model.log_evidence(x=X).value
    )


def test_the_best_of_exact_training_is_by_the_evidence():
    run = fit(
        fa(),
        {"x": CENTRED[:60]},
        validation={"x": CENTRED[200:]},
        schedule=mle(),
        steps=60,
        validate_every=5,
        batch=60,
        lr=0.05,
    )
    evidence = run.history["validation evidence"]
    assert run.best == (
        int(run.history["validation evidence.step"][evidence.argmax()]),
        evidence.max(),
    )


def test_a_column_that_a_class_never_shows_does_not_freeze_the_class():
    random = np.random.default_rng(0)
    labels = random.integers(2, size=100)
    x = random.normal(size=(100, 3)) + labels[:, None]
    x[labels == 1, 2] = np.nan
    model = mixture(Normal(3), classes=2)
    fit(model, {"x": x, "y": labels}, schedule=em(), steps=1)
    means = model.factors["p(x|y)"].net.blocks.weights["y"][:2].T.detach().numpy()
    np.testing.assert_allclose(means[1], x[labels == 1, :2].mean(0), atol=1e-9)


# Where EM starts, and what it leaves alone --------------------------------------------------------


def biased(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    p = {"z": Normal(2), "x | z": Normal(3, net=linear(), scale="learned")}
    return Model(p, {"z | x": MultivariateNormal(net=linear(), covariance="shared")}).double()


@pytest.mark.parametrize("offset", [10.0, 1000.0])
def test_an_offset_of_the_data_costs_no_iterations(offset):
    reference = FactorAnalysis(2, tol=1e-10, svd_method="lapack", max_iter=10_000).fit(X).score(X)
    evidence = [
        fit(biased(), {"x": x}, schedule=em(), steps=60, log_every=1).history["evidence"]
        for x in (X, X + offset * np.array([1, -1, 0.5]))
    ]
    # the same at every step
    np.testing.assert_allclose(evidence[1], evidence[0], rtol=0, atol=1e-6)
    assert climbs(evidence[1])
    assert evidence[1][-1] == pytest.approx(reference, abs=1e-3)


def test_em_starts_at_the_means_of_what_is_known_given_what_is_given():
    random = np.random.default_rng(1)
    given = random.normal(3.0, 1.0, size=(200, 2))
    u = random.normal(size=(200, 2)) + 50
    x = (
        u @ random.normal(size=(2, 3))
        + given @ random.normal(size=(2, 3))
        - 20
        + random.normal(size=(200, 3))
    )
    torch.manual_seed(0)
    model = Model(
        p={
            "z": Normal(1),
            "u | z": Normal(2, scale="learned"),
            "x | u, z, c": Normal(3, scale="learned"),
        },
        q={"z | x, u, c": Normal()},
        given={"c": 2},
    ).double()
    before = float(model.log_evidence(x=x, u=u, c=given).value.mean())
    run = fit(model, {"x": x, "u": u, "c": given}, schedule=em(), steps=1, log_every=1)
    # recorded by the E-step: where the iteration started
    assert run.history["evidence"][0] > before + 100
    holes = np.where(random.random(x.shape) < 0.3, np.nan, x)
    run = fit(biased(), {"x": holes}, schedule=em(), steps=30, log_every=1)
    assert climbs(run.history["evidence"])


def test_a_start_that_is_better_than_the_means_is_kept():
    """With entries missing by their value, the means of what is known are not p's; EM goes on from
    where it ended.
    """
    holes = np.where(X > 0.5, np.nan, X)
    model = biased()
    first = fit(model, {"x": holes}, schedule=em(), steps=400, log_every=1).history["evidence"]
    again = fit(model, {"x": holes}, schedule=em(), steps=2, log_every=1).history["evidence"]
    assert again[0] >= first[-1] - 1e-9


def test_a_root_that_is_observed_starts_at_the_data():
    torch.manual_seed(0)
    model = Model(p={"x": Normal(3, learned=True), "z": Normal(1)}, q={"z | x": Normal()}).double()
    run = fit(model, {"x": X + 7}, schedule=em(), steps=1, log_every=1)
    exact = (
        torch.distributions.Normal(torch.as_tensor(X.mean(0)), torch.as_tensor(X.std(0)))
        .log_prob(torch.as_tensor(X))
        .sum(-1)
        .mean()
    )
    # recorded of the parameters that the iteration found
    assert run.history["evidence"][0] == pytest.approx(float(exact), abs=1e-12)
    assert float(model.log_evidence(x=X + 7).value.mean()) == pytest.approx(float(exact), abs=1e-12)


LEFT = {
    "two latents": (
        {"u": Normal(1), "z | u": Normal(2, scale="learned"), "x | z": Normal(3, scale="learned")},
        {"z | x": Normal(), "u | z": Normal()},
        "a joint posterior of z, u has no closed form in factors of q",
    ),
    "a network": (
        {"z": Normal(2), "x | z": Normal(3, scale="learned")},
        {"z | x": Normal(net=mlp(4))},
        "q(z|x) is not linear",
    ),
    "a spread by row": (
        {"z": Normal(2), "x | z": Normal(3, scale="learned")},
        {"z | x": Normal()},
        "q(z|x) is not a Gaussian with one spread for all rows",
    ),
    "no bias": (
        {"z": Normal(2), "x | z": Normal(3, scale="learned")},
        {"z | x": MultivariateNormal(net=linear(bias=False), covariance="shared")},
        "q(z|x) has no bias, which the posterior's mean needs",
    ),
    "finite": (
        {"y": OneHot(3, learned=True), "x | y": Normal(3)},
        {"y | x": OneHot()},
        "q(y|x) has weights of its own",
    ),
    "finite, by gradients": (
        {"y": OneHot(3), "x | y": Normal(3, net=mlp(4))},
        {"y | x": OneHot()},
        "q(y|x) has weights of its own",
    ),
}


@pytest.mark.parametrize(("p", "q", "why"), LEFT.values(), ids=LEFT)
def test_a_q_that_em_cannot_set_is_said_once(tmp_path, p, q, why):
    torch.manual_seed(0)
    model = Model(p, q).double()
    before = [parameter.clone() for parameter in model.phi()]
    fit(model, {"x": X}, schedule=em(), steps=3, out=tmp_path)
    run = fit(model, {"x": X}, schedule=em(), steps=6, out=tmp_path, resume=True)
    (note,) = (row["note"] for row in run.rows if "leaves q" in row.get("note", ""))
    assert note.startswith(f"em() leaves q as it is: {why}")
    assert note.endswith("To train q, fit again with alternate() or joint().")
    assert all(torch.equal(a, b) for a, b in zip(before, model.phi(), strict=True))


def test_a_q_that_em_sets_is_not_spoken_of():
    for model in (biased(), mixture(Normal(3))):
        assert not [
            row for row in fit(model, {"x": X}, schedule=em(tol=0), steps=2).rows if "note" in row
        ]


@pytest.mark.parametrize("schedule", [mle(), em(tol=0)], ids=["mle", "em"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_parameters_that_have_gone_bad_are_named_as_a_loss_is_that_is_not_finite(
    tmp_path, monkeypatch, schedule, poison
):
    take, model = Training._take_step, fa()

    def poisoned(self, phase):
        if self.step == 5:
            with torch.no_grad():
                self.model.factors["p(x|z)"].net.blocks.weights["z"][0, 0] = poison
        return take(self, phase)

    monkeypatch.setattr(Training, "_take_step", poisoned)
    with pytest.raises(
        TrainingError,
        match=r"^Step 5: the exact .*\. No step was taken\. The last good checkpoint is "
        r".*step-3\. ",
    ) as error:
        fit(
            model, {"x": X}, schedule=schedule, steps=9, batch=100, checkpoint_every=3, out=tmp_path
        )
    assert ("The parameters of p(x|z) are not finite." in str(error.value)) == isinstance(
        schedule, mle
    )
    source = open_source(model.graph, {"x": X}, model._parameter())
    assert np.isnan(evaluate(model, source)["evidence"])  # a validation there is no error either
