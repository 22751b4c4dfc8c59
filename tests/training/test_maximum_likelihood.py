"""mle() by L-BFGS on all rows, and EM for hidden Markov models, against independent optimisers and
a textbook iteration.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, rosen, rosen_der
from scipy.special import logsumexp
from scipy.stats import norm

from aevb import Model, Normal, OneHot, em, fit, linear, mle
from aevb.training.quasi_newton import Point, QuasiNewton, _minimum

# The annual flow of the Nile at Aswan, 1871 to 1970, in 10^8 m³.
NILE = np.array(
    [
        1120,
        1160,
        963,
        1210,
        1160,
        1160,
        813,
        1230,
        1370,
        1140,
        995,
        935,
        1110,
        994,
        1020,
        960,
        1180,
        799,
        958,
        1140,
        1100,
        1210,
        1150,
        1250,
        1260,
        1220,
        1030,
        1100,
        774,
        840,
        874,
        694,
        940,
        833,
        701,
        916,
        692,
        1020,
        1050,
        969,
        831,
        726,
        456,
        824,
        702,
        1120,
        1100,
        832,
        764,
        821,
        768,
        845,
        864,
        862,
        698,
        845,
        744,
        796,
        1040,
        759,
        781,
        865,
        845,
        944,
        984,
        897,
        822,
        1010,
        771,
        676,
        649,
        846,
        812,
        742,
        801,
        1040,
        860,
        874,
        848,
        890,
        744,
        749,
        838,
        1050,
        918,
        986,
        797,
        923,
        975,
        815,
        1020,
        906,
        901,
        1170,
        912,
        746,
        919,
        718,
        714,
        740,
    ],
    dtype=float,
)


def local_level(dtype=torch.float64):
    torch.manual_seed(0)
    walk = Normal(1, linear(bias=False), scale="learned")
    model = Model(
        {"z[0]": Normal(1, learned=True), "z[t] | z[t-1]": walk, "x[t] | z[t]": walk},
        {"z[t] | x[t]": Normal()},
    ).to(dtype)
    with torch.no_grad():
        for factor, parent in (("p(z[t]|z[t-1])", "z[t-1]"), ("p(x[t]|z[t])", "z[t]")):
            weight = model.factors[factor].net.blocks.weights[parent]
            weight.fill_(1.0).requires_grad_(False)
            model.factors[factor].vectors["scale"].fill_(100.0)
        model.factors["p(z[0])"].root.copy_(torch.tensor([0.0, 1000.0])).requires_grad_(False)
    return model


def filtered(scales, y):
    """The textbook's filter of a random walk seen through noise: −log-likelihood."""
    (q, r), mean, variance, total = np.square(scales), 0.0, 1e6, 0.0
    for t, seen in enumerate(y):
        variance = variance + q if t else variance
        if np.isnan(seen):
            continue
        spread = variance + r
        total -= norm.logpdf(seen, mean, np.sqrt(spread))
        mean, variance = mean + variance / spread * (seen - mean), variance * r / spread
    return total


@pytest.mark.parametrize("missing", [False, True])
def test_the_local_level_of_the_nile_reaches_an_independent_optimum(missing):
    y = NILE.copy()
    if missing:
        y[20:40] = y[60:80] = np.nan
    model = local_level()
    run = fit(model, {"x": y[None, :, None]}, schedule=mle())
    found = minimize(
        filtered,
        [100.0, 100.0],
        args=(y,),
        method="Nelder-Mead",
        options={"xatol": 1e-6, "fatol": 1e-10},
    )
    assert run.history["evidence"][-1] == pytest.approx(-found.fun, abs=1e-6)
    scales = [
        float(model.factors[name].vectors["scale"].detach())
        for name in ("p(z[t]|z[t-1])", "p(x[t]|z[t])")
    ]
    np.testing.assert_allclose(scales, found.x, rtol=1e-3)
    if not missing:
        # Durbin and Koopman, with a diffuse first level
        np.testing.assert_allclose(np.square(scales), [1469, 15099], rtol=0.01)
    assert run.step < 20
    assert any("mle() converged after" in row.get("note", "") for row in run.rows)
    assert (np.diff(run.history["evidence"]) >= -1e-9).all()


def test_a_model_in_float32_is_ascended_in_float64():
    whole, half = (
        fit(local_level(dtype), {"x": NILE[None, :, None]}, schedule=mle())
        for dtype in (torch.float64, torch.float32)
    )
    assert half.history["evidence"][-1] == pytest.approx(whole.history["evidence"][-1], abs=1e-6)
    assert next(half.model.parameters()).dtype == torch.float32


def test_lbfgs_goes_on_where_it_was_interrupted(tmp_path):
    data = {"x": NILE[None, :, None]}
    whole = fit(local_level(), data, schedule=mle(), steps=6)
    fit(local_level(), data, schedule=mle(), steps=3, out=tmp_path / "run")
    model = local_level()
    rest = fit(model, data, schedule=mle(), steps=6, out=tmp_path / "run", resume=True)
    assert rest.step == whole.step
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_what_ended_or_replaced_lbfgs_is_told():
    data = {"x": NILE[None, :, None]}
    cut = fit(local_level(), data, schedule=mle(), steps=2)
    assert any("as asked, before it converged" in row.get("note", "") for row in cut.rows)
    stepwise = fit(local_level(), data, schedule=mle(), steps=2, lr=0.1)
    assert any(
        "mle() takes Adam's steps on batches instead of L-BFGS on all rows: lr= is a setting of "
        "Adam." in row.get("note", "")
        for row in stepwise.rows
    )
    with pytest.raises(ValueError, match="optimiser is 'auto', 'lbfgs' or 'adam'"):
        mle(optimiser="sgd")
    with pytest.raises(ValueError, match="tol is a gain of the mean evidence"):
        mle(tol=-1)


def test_lbfgs_finds_a_curved_valley_and_turns_back_where_there_is_no_value():
    search = QuasiNewton(lambda x: (float(rosen(x)), rosen_der(x)), np.full(8, -1.2))
    for _ in range(200):
        search.step()
        if search.converged(1e-12):
            break
    np.testing.assert_allclose(search.x, 1.0, atol=1e-5)
    assert search.evaluations < 120

    def barrier(x):
        with np.errstate(all="ignore"):
            return float(np.sum(x - np.log(x))), 1 - 1 / x

    search = QuasiNewton(barrier, np.full(4, 30.0))
    while not search.converged(1e-14):
        search.step()
    np.testing.assert_allclose(search.x, 1.0, atol=1e-6)


# Hidden Markov models -----------------------------------------------------------------------------

START, MOVES = (
    np.array([0.5, 0.3, 0.2]),
    np.array([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.1, 0.2, 0.7]]),
)
MEANS, SCALE = np.array([[0.5, 0.5], [2.0, 1.5], [-0.5, 2.5]]), 1.5


def hidden_markov():
    model = Model(
        {"y[0]": OneHot(3, learned=True), "y[t] | y[t-1]": OneHot(3), "x[t] | y[t]": Normal(2)},
        {"y[t] | x[t]": OneHot()},
    ).double()
    with torch.no_grad():
        moves, seen = (
            model.factors[name].net.blocks for name in ("p(y[t]|y[t-1])", "p(x[t]|y[t])")
        )
        model.factors["p(y[0])"].root.copy_(torch.tensor(np.log(START)))
        for blocks in (moves, seen):
            blocks.bias.zero_()
        moves.weights["y[t-1]"].copy_(torch.tensor(np.log(MOVES).T))
        raw = float(np.log(np.expm1(SCALE)))
        seen.weights["y[t]"].copy_(
            torch.cat([torch.tensor(MEANS.T), torch.full((2, 3), raw, dtype=torch.float64)])
        )
    return model


def sequences(seed=0):
    rng, centres = np.random.default_rng(seed), np.array([[0.0, 0.0], [1.5, 1.0], [-1.0, 2.0]])
    states = np.repeat(rng.integers(0, 3, (4, 10)), 6, 1)
    return centres[states] + rng.normal(size=(4, 60, 2))


def iteration(start, moves, means, variances, rows):
    """One iteration of Baum and Welch in logarithms, a row and a step at a time; the log-likelihood
    before it, and the next parameters.
    """
    total, first, pairs, counts, sums, squares = 0.0, 0, 0, 0, 0, 0
    for x in rows:
        keep = ~np.isnan(x)
        terms = norm.logpdf(np.nan_to_num(x)[:, None], means, np.sqrt(variances)) * keep[:, None]
        emitted = terms.sum(-1)
        alpha, beta = [np.log(start) + emitted[0]], [np.zeros(3)]
        for t in range(1, len(x)):
            alpha.append(emitted[t] + logsumexp(alpha[-1][:, None] + np.log(moves), 0))
        for t in range(len(x) - 1, 0, -1):
            beta.insert(0, logsumexp(np.log(moves) + emitted[t] + beta[0], 1))
        whole = logsumexp(alpha[-1])
        gamma = np.exp(np.array(alpha) + np.array(beta) - whole)
        total, first = total + whole, first + gamma[0]
        for t in range(1, len(x)):
            pairs = pairs + np.exp(
                alpha[t - 1][:, None] + np.log(moves) + emitted[t] + beta[t] - whole
            )
        counts = counts + gamma.T @ keep
        sums, squares = sums + gamma.T @ np.nan_to_num(x), squares + gamma.T @ np.nan_to_num(x) ** 2
    centre = sums / counts
    return total, (
        first / first.sum(),
        pairs / pairs.sum(1, keepdims=True),
        centre,
        squares / counts - centre**2,
    )


@pytest.mark.parametrize("missing", [False, True])
def test_em_in_time_is_baum_and_welch(missing):
    rows = sequences()
    if missing:
        rows[np.random.default_rng(1).random(rows.shape) < 0.2] = np.nan
    parameters, expected = (START, MOVES, MEANS, np.full((3, 2), SCALE**2)), []
    for _ in range(6):
        value, parameters = iteration(*parameters, rows)
        expected.append(value / len(rows))
    run = fit(
        hidden_markov(), {"x": rows}, schedule=em(accelerate=False, start="keep", tol=0), steps=5
    )
    np.testing.assert_allclose(run.history["evidence"], expected[1:], rtol=1e-9)


def test_em_and_mle_of_a_hidden_markov_model_reach_one_optimum():
    rows = sequences()
    runs = [
        fit(hidden_markov(), {"x": rows}, schedule=schedule)
        for schedule in (em(start="keep", tol=1e-8), mle(tol=1e-8))
    ]
    assert runs[0].history["evidence"][-1] == pytest.approx(
        runs[1].history["evidence"][-1], abs=1e-4
    )
    assert (np.diff(runs[0].history["evidence"]) >= -1e-9).all()


def test_em_in_time_says_what_it_needs():
    model = Model({"y[t] | y[t-1]": OneHot(3), "x[t] | y[t]": Normal(2)}, {"y[t] | x[t]": OneHot()})
    with pytest.raises(
        ValueError,
        match=r"also decides the first step, where y\[t-1\] is zeros \(declare a factor of "
        r"y\[0\]\).*use mle\(\)",
    ):
        fit(model, {"x": sequences()}, schedule=em())


# Units and offsets of the data --------------------------------------------------------------------


def factor_analysis(seed):
    torch.manual_seed(seed)
    return Model(
        {"z": Normal(2), "x | z": Normal(6, scale="learned")}, {"z | x": Normal()}
    ).double()


@pytest.mark.parametrize("touched", [False, True])
def test_lbfgs_reaches_one_optimum_whatever_the_units_and_offsets(touched):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(300, 2)) @ rng.normal(size=(2, 6)) + 0.5 * rng.normal(size=(300, 6))
    for scale, offset in (
        (1.0, 0.0),
        (np.array([100, 0.01, 1, 10, 0.1, 1]), 0.0),
        (1e-4, 0.0),
        (1.0, 1e4),
        (1.0, 1e6),
        (1e-8, 0.0),
    ):
        model = factor_analysis(0)
        if touched:  # parameters that someone set
            model.factors["p(x|z)"].net.blocks.bias.data.add_(0.01)
        run = fit(model, {"x": x * scale + offset}, schedule=mle())
        value = run.history["evidence"][-1] + np.log(np.broadcast_to(scale, 6)).sum()
        assert value == pytest.approx(-7.743406, abs=1e-4), (scale, offset)
        assert any("mle() converged after" in row.get("note", "") for row in run.rows)


def test_lbfgs_in_time_does_not_depend_on_units():
    values = []
    for unit in (1.0, 1e6):
        torch.manual_seed(0)
        p = {
            "u[0]": Normal(1, learned=True),
            "u[t] | u[t-1]": Normal(1, scale="learned"),
            "x[t] | u[t]": Normal(1, scale="learned"),
        }
        run = fit(
            Model(p, {"u[t] | x[t]": Normal()}).double(),
            {"x": unit * NILE[None, :, None]},
            schedule=mle(),
        )
        values.append(run.history["evidence"][-1] + len(NILE) * np.log(unit))
    np.testing.assert_allclose(values, -635.0998, atol=1e-3)


def test_a_search_that_is_stuck_is_not_called_converged():
    search = QuasiNewton(
        lambda x: (0.0 if abs(x[0]) < 1e-30 else 1.0, np.array([-1.0])), np.zeros(1)
    )
    search.step()
    assert search.stuck
    assert not search.converged(1e-5)


def test_a_maximum_that_others_may_exceed_is_called_local():
    """Of state-space models and mixtures, whose likelihoods have several maxima; one of a Gaussian
    latent without time has none that is worse.
    """
    x = torch.randn(1, 30, 1, generator=torch.Generator().manual_seed(0)).cumsum(1)
    walk = Model(
        {
            "u[t] | u[t-1]": Normal(1, linear(bias=False), scale="learned"),
            "x[t] | u[t]": Normal(1, linear(bias=False), scale=0.5),
        },
        {"u[t] | x[t]": Normal()},
    )
    factors = Model(
        {"z": Normal(1), "x | z": Normal(2, linear(), scale="learned")}, {"z | x": Normal()}
    )
    rows = torch.randn(50, 1, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [1.0, -0.5]
    )
    rows = rows + 0.3 * torch.randn(50, 2, generator=torch.Generator().manual_seed(2))
    for model, data, local in ((walk, x, True), (factors, rows, False)):
        notes = [
            row["note"]
            for row in fit(model, {"x": data}, schedule=mle()).rows
            if "mle() converged" in row.get("note", "")
        ]
        assert len(notes) == 1
        assert ("This is a local maximum" in notes[0]) == local


def test_the_best_of_several_seeds_is_found_as_the_note_says():
    """The last evidence on record is that of the run's model, so that the runs can be compared by
    it.
    """
    x = torch.randn(2, 30, 2, generator=torch.Generator().manual_seed(0)).cumsum(1)
    model = Model(
        {
            "u[t] | u[t-1]": Normal(2, linear(), scale="learned"),
            "x[t] | u[t]": Normal(2, linear(), scale="learned"),
        },
        {"u[t] | x[t]": Normal()},
    ).double()
    runs = fit(model, {"x": x}, schedule=mle(), seeds=4, steps=40)
    found = [float(run.model.log_evidence(x=x).value.mean()) for run in runs]
    assert [run.history["evidence"][-1] for run in runs] == pytest.approx(found, rel=1e-6)
    assert len({round(value, 3) for value in found}) > 1
    best = max(runs, key=lambda run: run.history["evidence"][-1])
    assert float(best.model.log_evidence(x=x).value.mean()) == max(found)


def test_a_steep_line_does_not_overflow_the_search():
    """Slopes whose squares exceed float64 leave no cubic to minimise."""
    assert math.isnan(
        _minimum(Point(0.0, 1e300, -1e200, np.zeros(1)), Point(1e-3, 0.0, 1e200, np.zeros(1)))
    )
