"""The exact posterior against brute force: every joint value of the discrete latents, and for each
the Gaussian of all continuous unknowns.

The reference knows no filter: log p(x, z) is quadratic in the continuous unknowns, so its first two
derivatives at zero give mean and covariance. All in float64.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import mpmath
import numpy as np
import pytest
import torch
from exact_models import LENGTHS, MODELS, N, T, data_of, holed, laid_out, log_p

from aevb import Model, Normal, OneHot, linear
from aevb.evidence.exact_posterior import Unknowns
from aevb.evidence.structure import Structure


@dataclass
class Row:
    """The posterior of one row: log-weights of the configurations; for each the discrete values,
    and the mean and covariance of the rest.
    """

    weights: torch.Tensor
    discrete: list[dict[tuple[str, int], torch.Tensor]]
    free: dict[tuple[str, int], slice]
    means: list[torch.Tensor]
    covariances: list[torch.Tensor]

    def probs(self, model, name, t):
        table = model.factors[model.graph.rule("p", name).id].table()
        here = torch.stack(
            [(values[name, t] == table).all(-1).double() for values in self.discrete]
        )
        return self.weights @ here

    def moments(self, place):
        """The mean and the covariance of an unknown, all configurations taken together."""
        where = self.free[place]
        means = torch.stack([mean[where] for mean in self.means])
        mean = self.weights @ means
        within = sum(
            w * c[where, where] for w, c in zip(self.weights, self.covariances, strict=True)
        )
        apart = means - mean
        return mean, within + torch.einsum("k,ki,kj->ij", self.weights, apart, apart)


def quadratic(model, values, free, holes, steps):
    """log ∫ p over continuous unknowns, their mean and covariance; ``holes`` are missing entries of
    observed variables, (name, t, entry).
    """
    graph = model.graph
    width = sum(graph.size(name) for name, _ in free)
    batch = laid_out(
        model,
        values
        | {place: torch.zeros(1, graph.size(place[0]), dtype=torch.float64) for place in free},
        steps,
    )

    def f(flat):
        filled = {name: [value[t] for t in range(len(value))] for name, value in batch.items()}
        for (name, t), part in zip(
            free, flat[:width].split([graph.size(name) for name, _ in free]), strict=True
        ):
            filled[name][t] = part[None]
        for (name, t, entry), number in zip(holes, flat[width:], strict=True):
            row = filled[name][t]
            filled[name][t] = torch.where(torch.arange(row.shape[-1]) == entry, number, row)
        return log_p(model, {name: torch.stack(parts) for name, parts in filled.items()}).sum()

    zero = torch.zeros(width + len(holes), dtype=torch.float64, requires_grad=True)
    value = f(zero)
    (gradient,) = torch.autograd.grad(value, zero, create_graph=True)
    precision = -torch.stack(
        [torch.autograd.grad(entry, zero, retain_graph=True)[0] for entry in gradient]
    )
    covariance = torch.linalg.inv(precision)
    log_integral = value + 0.5 * (
        gradient @ covariance @ gradient
        + len(zero) * math.log(2 * math.pi)
        - torch.logdet(precision)
    )
    return log_integral.item(), (covariance @ gradient).detach(), covariance


def brute(model, data, i, steps):
    """The posterior of row i."""
    graph, values, discrete, free, holes = model.graph, {}, [], [], []
    for name in (*graph.stochastic, *graph.given):
        for t in range(steps if graph.timed[name] else 1):
            value = (
                None
                if name not in data
                else data[name][i : i + 1, t]
                if graph.timed[name]
                else data[name][i : i + 1]
            )
            if name not in graph.latents:
                holes += [(name, t, int(entry)) for entry in value[0].isnan().nonzero()[:, 0]]
                values[name, t] = value.nan_to_num(0.0)
            elif value is not None and not value.isnan().any():
                values[name, t] = value
            else:
                (discrete if graph.rule("p", name).spec.finite else free).append((name, t))
    tables = [model.factors[graph.rule("p", name).id].table() for name, _ in discrete]
    indices = list(itertools.product(*(range(len(table)) for table in tables)))
    every = [
        {place: table[k : k + 1] for place, table, k in zip(discrete, tables, index, strict=True)}
        for index in indices
    ]
    if free or holes:
        found = [
            (chosen, *quadratic(model, values | chosen, free, holes, steps)) for chosen in every
        ]
    else:  # all configurations at once
        whole = {place: torch.cat([chosen[place] for chosen in every]) for place in discrete}
        nothing = torch.zeros(0, dtype=torch.float64), torch.zeros(0, 0, dtype=torch.float64)
        found = [
            (chosen, log, *nothing)
            for chosen, log in zip(
                every, log_p(model, laid_out(model, values | whole, steps)).tolist(), strict=True
            )
        ]
    start, places = 0, {}
    for name, t in free:
        places[name, t] = slice(start, start := start + graph.size(name))
    for name, t, entry in holes:
        places[name, t, entry] = slice(start, start := start + 1)
    logs = torch.tensor([log for _, log, _, _ in found], dtype=torch.float64)
    return Row(
        logs.softmax(0),
        [one[0] for one in found],
        places,
        [one[2] for one in found],
        [one[3] for one in found],
    )


def same(a, b):
    torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-7, atol=1e-8)


def compare(model, data, lengths):
    """Every marginal of every row."""
    graph = model.graph
    posterior = model.posterior(**data, method="exact", **({"lengths": lengths} if lengths else {}))
    imputed = model.impute(
        **data, method="exact", samples=1, **({"lengths": lengths} if lengths else {})
    )
    marginals = {name: posterior[name] for name in graph.latents if name not in posterior.clamped}
    compared = 0
    for i in range(N):
        steps = lengths[i] if lengths else T
        row = brute(model, data, i, steps)
        for name, t in {place for config in row.discrete for place in config}:
            probs = marginals[name].probs[i]
            same(probs[t] if graph.timed[name] else probs, row.probs(model, name, t))
            compared += 1
        for place in row.free:
            mean, covariance = row.moments(place)
            name, t = place[:2]
            at = (i, t) if graph.timed[name] else (i,)
            if len(place) == 3:
                same(imputed.mean[name][at][place[2]], mean[0])
                same(imputed.sd[name][at][place[2]], covariance[0, 0].sqrt())
            else:
                same(marginals[name].mean[at], mean)
                same(marginals[name].variance[at], covariance.diagonal())
                if isinstance(marginals[name], torch.distributions.MultivariateNormal):
                    same(marginals[name].covariance_matrix[at], covariance)
            compared += 1
    assert compared


TIMED = {name for name, build in MODELS.items() if any(build().graph.timed.values())}


@pytest.mark.parametrize("name", MODELS)
def test_marginals_are_brute_forces(name):
    model = MODELS[name]()
    compare(model, data_of(model), LENGTHS if name in TIMED else None)


HOLED = [
    "mixture of factor analysers",
    "full covariances by class",
    "state space",
    "state space with a static latent",
    "mixture of state spaces",
    "hidden Markov over factor analysers",
    "factor analysis at every step",
    "state space backwards, with ends",
]


@pytest.mark.parametrize("name", HOLED)
def test_missing_entries_have_their_mean_and_spread(name):
    model = MODELS[name]()
    compare(model, holed(data_of(model), "x"), LENGTHS if name in TIMED else None)


@pytest.mark.parametrize(
    "name",
    [
        "state space",
        "mixture of state spaces",
        "hidden Markov over factor analysers",
        "factor analysis at every step",
    ],
)
def test_a_missing_end_is_a_forecast(name):
    model = MODELS[name]()
    data = data_of(model)
    data["x"] = data["x"].clone()
    data["x"][0, 1:], data["x"][1, 3:], data["x"][2, 0] = math.nan, math.nan, math.nan
    compare(model, data, None)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("mixture of factor analysers", "y"),
        ("mixture of factor analysers", "z"),
        ("two layers, two discrete, given", "c"),
        ("state space", "z"),
        ("state space with inputs and lags", "a"),
        ("state space with a static latent", "w"),
        ("hidden Markov", "s"),
        ("two chains", "b"),
        ("hidden Markov over factor analysers", "z"),
    ],
)
def test_latents_known_in_some_rows_or_steps(name, known):
    model = MODELS[name]()
    given = {u: data_of(model)[u] for u in model.graph.given}
    drawn = model.sample(N, seed=2, **({"steps": T} if name in TIMED else {}), **given)
    data = {key: drawn[key] for key in model.graph.observed} | given
    data[known] = drawn[known].clone()
    data[known][(0, slice(1, 3)) if model.graph.timed[known] else 0] = math.nan
    compare(model, data, LENGTHS if name in TIMED else None)


DRAWN = [
    "two layers, two discrete, given",
    "state space backwards, with ends",
    "state space with a static latent",
    "mixture of state spaces",
    "two chains",
    "mixture of hidden Markovs",
    "hidden Markov over factor analysers",
]


@pytest.mark.parametrize("name", DRAWN)
def test_draws_have_the_posteriors_joint_moments(name):
    """Means and covariances over all unknowns of one row at once, against those of 20,000 draws:
    5.5 standard errors, some 100 numbers a model.

    Of an event too rare to be drawn the standard error would be 0; 5e-4 allows for it.
    """
    model = MODELS[name]()
    data = {key: value[:1] for key, value in data_of(model).items()}
    row = brute(model, data, 0, T)
    count = 20000
    drawn = model.posterior(**data, method="exact", seed=0).sample(count)
    places = [*row.discrete[0], *row.free]
    stacked = torch.cat(
        [
            (drawn[name][:, 0, t] if model.graph.timed[name] else drawn[name][:, 0])
            for name, t in places
        ],
        -1,
    )
    parts = []
    for values, mean, covariance in zip(row.discrete, row.means, row.covariances, strict=True):
        fixed = (
            torch.cat([values[place][0] for place in row.discrete[0]])
            if row.discrete[0]
            else torch.zeros(0, dtype=torch.float64)
        )
        second = torch.zeros(len(fixed) + len(mean), len(fixed) + len(mean), dtype=torch.float64)
        second[len(fixed) :, len(fixed) :] = covariance
        whole = torch.cat([fixed, mean])
        parts.append((whole, second + torch.outer(whole, whole)))
    mean = sum(w * part[0] for w, part in zip(row.weights, parts, strict=True))
    second = sum(w * part[1] for w, part in zip(row.weights, parts, strict=True))
    error = stacked.std(0) / count**0.5
    assert ((stacked.mean(0) - mean).abs() <= 5.5 * error + 5e-4).all()
    products = torch.einsum("si,sj->sij", stacked, stacked)
    assert ((products.mean(0) - second).abs() <= 5.5 * products.std(0) / count**0.5 + 5e-4).all()


@pytest.mark.parametrize("name", MODELS)
def test_its_log_probability_is_bayes_rule(name):
    model = MODELS[name]()
    data = data_of(model)
    posterior = model.posterior(**data, method="exact", seed=0)
    drawn = {key: value[0] for key, value in posterior.sample(1).items()}
    expected = model.log_prob(**data, **drawn) - model.log_evidence(**data).value
    torch.testing.assert_close(posterior.log_prob(**drawn), expected)


def test_rows_taken_in_parts_are_the_same_rows(monkeypatch):
    for name in ("hidden Markov over factor analysers", "state space with a static latent"):
        model = MODELS[name]()
        batch = model.prepare(**holed(data_of(model), "x"))
        with torch.no_grad():
            whole = Unknowns(model, Structure(model), batch).marginals()
            monkeypatch.setattr("aevb.evidence.exact_posterior.AT_ONCE", 1)
            parts = Unknowns(model, Structure(model), batch).marginals()
            monkeypatch.undo()
        for key, value in whole.probs.items():
            same(parts.probs[key], value)
        for key, value in whole.components.items():
            same(parts.components[key].mean, value.mean)
            same(parts.components[key].covariance, value.covariance)


def test_a_row_without_probability_is_named():
    """Its discrete latents have no posterior: neither equal probabilities nor torch's error about a
    distribution.
    """
    model = Model(
        {"y[t] | y[t-1]": OneHot(2), "x[t] | y[t]": Normal(1)}, {"y[t] | x[t]": OneHot()}
    ).double()
    x = torch.zeros(3, 4, 1, dtype=torch.float64)
    x[1, 2] = 1e200
    posterior = model.posterior(x=x, method="exact")
    for ask in (lambda: posterior["y"], lambda: posterior.sample(2)):
        with pytest.raises(
            ValueError,
            match=r"Row 1 \(from 0\) has no exact posterior: p gives its data the log-probability "
            r"-inf\. Check",
        ):
            ask()


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-5, 1e-7, 1e-9, 1e-12])
def test_a_small_variance_is_not_what_rounding_leaves_of_the_prior(scale):
    """Two latents that each have a measurement and share a third, against the precision matrix in
    300 digits.
    """
    model = Model(
        {"z": Normal(2), "x | z": Normal(3, linear(bias=False), scale=scale)}, {"z | x": Normal()}
    ).double()
    seen = torch.tensor([[1.5, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    with torch.no_grad():
        model.factors["p(x|z)"].net.blocks.weights["z"].copy_(seen)
    found = model.posterior(x=torch.tensor([[0.75, 1.0, 1.0]]), method="exact")["z"]
    with mpmath.workdps(300):
        A = mpmath.matrix(seen.tolist())
        covariance = (mpmath.eye(2) + A.T * A / mpmath.mpf(scale) ** 2) ** -1
        exact = [
            [float(covariance[i, j] / mpmath.mpf(scale) ** 2) for j in range(2)] for i in range(2)
        ]
    np.testing.assert_allclose(found.covariance_matrix[0].detach() / scale**2, exact, rtol=1e-9)
