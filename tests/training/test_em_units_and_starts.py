"""EM does not depend on the units of the data, nor on the weights that a fresh model happens to
have.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import norm
from sklearn.mixture import GaussianMixture

from aevb import Exact, Model, MultivariateNormal, Normal, OneHot, em, fit

CENTRES, MOVES = (
    np.array([[0.0, 3.0], [4.0, -1.0], [-4.0, -2.0]]),
    np.full((3, 3), 0.05) + 0.85 * np.eye(3),
)


def chains(n: int = 8, steps: int = 40, offset: float = 0.0, unit: float = 1.0) -> np.ndarray:
    random, x = np.random.default_rng(0), np.zeros((n, steps, 2))
    for row in x:
        state = random.integers(3)
        for t in range(steps):
            state = random.choice(3, p=MOVES[state]) if t else state
            row[t] = CENTRES[state] + random.normal(size=2)
    return offset + unit * x


def forward(x: np.ndarray) -> float:
    """The mean log-likelihood under the parameters that the chains were drawn with."""
    seen = norm.logpdf(x[:, :, None], CENTRES).sum(-1)
    alpha = seen[:, 0] - math.log(3)
    for t in range(1, x.shape[1]):
        alpha = logsumexp(alpha[:, :, None] + np.log(MOVES), axis=1) + seen[:, t]
    return float(logsumexp(alpha, axis=1).mean())


def hidden_markov(spec, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    p = {"y[0]": OneHot(3, learned=True), "y[t] | y[t-1]": OneHot(3), "x[t] | y[t]": spec}
    return Model(p, {"y[t] | x[t]": OneHot()}).double()


def evidence(model: Model, **data) -> float:
    return float(model.log_evidence(**data).value.mean())


@pytest.mark.parametrize("spec", [Normal(2), MultivariateNormal(2)], ids=str)
@pytest.mark.parametrize(("offset", "unit"), [(0.0, 1.0), (20.0, 1.0), (1e7, 1e-2), (-1e3, 1e3)])
def test_a_hidden_markov_model_finds_its_states_in_any_units(offset, unit, spec):
    x, model = chains(offset=offset, unit=unit), hidden_markov(spec)
    run = fit(model, {"x": x}, schedule=em())
    found = evidence(model, x=x) + 80 * math.log(unit)
    # the maximum of 14 or 17 parameters lies about half as many nats a data set higher
    assert forward(chains()) < found < forward(chains()) + 2.5
    assert found - 80 * math.log(unit) == pytest.approx(run.history["evidence"][-1], abs=1e-5)
    assert found == pytest.approx(_at_home(spec), abs=1e-4)


def _at_home(spec) -> float:
    model = hidden_markov(spec, seed=3)
    fit(model, {"x": chains()}, schedule=em())
    return evidence(model, x=chains())


def test_missing_cells_ends_of_rows_and_labels_do_not_spoil_the_start():
    x = chains(offset=1e4)
    lengths = np.array([40, 1, 12, 40, 7, 40, 25, 40])
    holes = np.where(np.random.default_rng(1).random(x.shape) < 0.2, np.nan, x)
    rows = [row[:length] for row, length in zip(holes, lengths, strict=True)]
    labels = [
        np.where(np.arange(length) == 0, int(np.argmin(((row[0] - 1e4 - CENTRES) ** 2).sum(1))), -1)
        for row, length in zip(x, lengths, strict=True)
    ]
    found = []
    for shift in (0.0, 1e4):
        model = hidden_markov(Normal(2))
        fit(model, {"x": [row - shift for row in rows], "y": labels}, schedule=em(tol=1e-9))
        found.append(evidence(model, x=[row - shift for row in rows], y=labels))
        loc = model.factors["p(x[t]|y[t])"].net.blocks.weights["y[t]"][:2].mT.detach().numpy()
        # labels say which state is which
        np.testing.assert_allclose(loc - 1e4 + shift, CENTRES, atol=0.5)
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_start_data_is_taken_by_a_trained_hidden_markov_model_too():
    model = hidden_markov(Normal(2))
    with torch.no_grad():  # all states alike: EM cannot leave this point
        for parameter in model.theta():
            parameter.zero_()
    stuck = fit(model, {"x": chains()}, schedule=em(start="keep"), steps=5).history["evidence"][-1]
    again = fit(model, {"x": chains()}, schedule=em(start="data")).history["evidence"][-1]
    assert stuck < forward(chains()) - 30
    assert again > forward(chains())


@pytest.mark.parametrize("offset", [0.0, 30.0, 1e8])
def test_two_independent_classes_are_two_mixtures(offset):
    random = np.random.default_rng(0)
    x = offset + 6 * random.integers(2, size=(300, 1)) + random.normal(size=(300, 2))
    v = offset + 5 * random.integers(3, size=(300, 1)) + random.normal(size=(300, 2))
    torch.manual_seed(0)
    p = {
        "y": OneHot(2, learned=True),
        "w": OneHot(3, learned=True),
        "x | y": Normal(2),
        "v | w": Normal(2),
    }
    model = Model(p, q={"y | x": Exact(), "w | v": Exact()}).double()
    fit(model, {"x": x, "v": v}, schedule=em(tol=1e-9))

    def reference(rows: np.ndarray, count: int) -> float:
        return (
            GaussianMixture(
                count,
                covariance_type="diag",
                reg_covar=0,
                tol=1e-12,
                max_iter=1000,
                n_init=3,
                random_state=0,
            )
            .fit(rows)
            .score(rows)
        )

    assert evidence(model, x=x, v=v) == pytest.approx(
        reference(x - offset, 2) + reference(v - offset, 3), abs=1e-5
    )


def test_a_class_that_no_data_read_starts_at_clusters_of_those_that_its_readers_explain():
    """a and b are the same class, which only y can say: without it the evidence is log 2 lower."""
    random = np.random.default_rng(0)
    x, v = (6 * (np.arange(400) % 2)[:, None] + random.normal(size=(400, 2)) for _ in range(2))
    p = {
        "y": OneHot(2, learned=True),
        "a | y": OneHot(2),
        "b | y": OneHot(2),
        "x | a": Normal(2),
        "v | b": Normal(2),
    }
    whole = sum(
        norm.logpdf(part, part.mean(0), part.std(0)).sum()
        for rows in (x, v)
        for part in (rows[::2], rows[1::2])
    ) / 400 - math.log(2)
    for seed in range(3):
        torch.manual_seed(seed)
        model = Model(p, {"y | x": OneHot(), "a | y, x": OneHot(), "b | y, v": OneHot()}).double()
        assert fit(model, {"x": x, "v": v}, schedule=em(), seed=seed).history["evidence"][
            -1
        ] == pytest.approx(whole, abs=1e-3)


@pytest.mark.parametrize("kind", [OneHot, Normal])
def test_weights_that_were_set_are_moved_to_the_data_where_the_data_are_elsewhere(kind):
    """Means that all lie on one side of the data explain none of it: their differences stay, their
    middle moves.
    """
    x = chains()
    model = (
        hidden_markov(Normal(2))
        if kind is OneHot
        else Model({"y": OneHot(3, learned=True), "x | y": Normal(2)}, {"y | x": Exact()}).double()
    )
    rows = (
        (lambda offset: {"x": offset + x})
        if kind is OneHot
        else (lambda offset: {"x": offset + x.reshape(-1, 2)})
    )
    before = fit(model, rows(0.0), schedule=em()).history["evidence"][-1]
    assert fit(model, rows(1e3), schedule=em()).history["evidence"][-1] == pytest.approx(
        before, abs=0.5
    )


# Latents that some rows know ----------------------------------------------------------------------

ONE = {"z": Normal(2, learned=True), "x | z": Normal(3, scale="learned")}
TWO = {
    "u": Normal(1),
    "z | u": Normal(2, scale="learned"),
    "x | z": MultivariateNormal(3, covariance="shared"),
}


@pytest.mark.parametrize(("offset", "unit"), [(500.0, 1.0), (1e8, 1.0), (-1e4, 1e-3)])
@pytest.mark.parametrize("p", [ONE, TWO], ids=["root", "hierarchy"])
def test_the_units_of_a_latent_that_half_the_rows_know_do_not_matter(p, offset, unit):
    random = np.random.default_rng(0)
    codes = random.normal(size=(200, 2))
    x = codes @ random.normal(size=(2, 3)) + 0.5 * random.normal(size=(200, 3))
    codes[100:] = np.nan

    def found(z: np.ndarray) -> float:
        torch.manual_seed(0)
        q = {"z | x": Normal(scale="learned")} | (
            {"u | z": Normal(scale="learned")} if "u" in p else {}
        )
        model = Model(p, q).double()
        run = fit(model, {"x": x, "z": z}, schedule=em(tol=1e-9))
        assert run.history["evidence"][-1] == pytest.approx(evidence(model, x=x, z=z), abs=1e-6)
        return run.history["evidence"][-1]

    # two entries, in half of the rows
    assert found(offset + unit * codes) + math.log(unit) == pytest.approx(found(codes), abs=1e-6)


# The least variance -------------------------------------------------------------------------------


def notes(run) -> list[str]:
    return [row["note"] for row in run.rows if "holds the variance" in row.get("note", "")]


@pytest.mark.parametrize("spec", [Normal(1), MultivariateNormal(1)], ids=str)
@pytest.mark.parametrize("gap", [1e4, 1e6])
def test_clusters_far_apart_keep_their_own_variance(gap, spec):
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 1)) + gap * (np.arange(400) % 2)[:, None]
    model = Model({"y": OneHot(2, learned=True), "x | y": spec}, {"y | x": Exact()}).double()
    run = fit(model, {"x": x}, schedule=em())
    apart = sum(
        norm.logpdf(part, part.mean(), part.std()).sum() for part in (x[::2], x[1::2])
    ) / 400 - math.log(2)
    assert evidence(model, x=x) == pytest.approx(apart, abs=1e-5)
    assert notes(run) == []


def test_an_outlier_does_not_widen_the_others():
    x = np.random.default_rng(0).normal(size=(2000, 2))
    x[0, 0] = 1e5
    torch.manual_seed(0)
    model = Model({"y": OneHot(2, learned=True), "x | y": Normal(2)}, {"y | x": Exact()}).double()
    run = fit(model, {"x": x}, schedule=em())
    theirs = GaussianMixture(2, covariance_type="diag", random_state=0).fit(x)
    assert evidence(model, x=x) > theirs.score(x) - 0.01
    (note,) = notes(run)  # the outlier's own cluster
    assert "x (columns 0, 1, from 0)" in note
    assert "1e-12 of the column's own" in note


@pytest.mark.parametrize("full", [False, True])
def test_a_spike_is_noted(full):
    random = np.random.default_rng(0)
    x = np.where(np.arange(200)[:, None] % 2, random.normal(size=(200, 3)), [[5.0, 6.0, 7.0]])
    x[:, 1] += random.normal(size=200)
    model = Model(
        {"y": OneHot(2, learned=True), "x | y": MultivariateNormal(3) if full else Normal(3)},
        {"y | x": Exact()},
    ).double()
    (note,) = notes(fit(model, {"x": x}, schedule=em()))
    assert "x (columns 0, 2, from 0)" in note


def test_a_column_that_repeats_another_is_noted_in_factor_analysis():
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 2)) @ random.normal(size=(2, 5)) + 0.5 * random.normal(
        size=(200, 5)
    )
    for repeated, expected in ((np.concatenate([x, x[:, 1:2]], 1), 1), (x, 0)):
        size = repeated.shape[1]
        model = Model(
            {"z": Normal(2), "x | z": Normal(size, scale="learned")},
            {"z | x": Normal(scale="learned")},
        )
        found = notes(fit(model, {"x": repeated}, schedule=em()))
        assert len(found) == expected
        assert all("x (columns 1, 5, from 0)" in note for note in found)
