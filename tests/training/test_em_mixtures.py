"""EM of mixtures as matrix products: against the table of responsibilities, brute force,
scikit-learn, and an interrupted run.
"""

import copy
import signal

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.mixture import GaussianMixture

from aevb import (
    Bernoulli,
    Exact,
    Model,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    OneHot,
    Poisson,
    em,
    fit,
)
from aevb.data.sources import open_source
from aevb.declare import distributions as ad
from aevb.training.distributed import World
from aevb.training.em import Mixtures, Responsibilities, exact_em, responsibilities
from aevb.training.em.factors import Rows
from aevb.training.em.starts import cluster_centres
from aevb.training.loop import Training

IRIS = load_iris().data
SPECS = {
    "diagonal": Normal(4),
    "one scale": Normal(4, scale="learned"),
    "fixed scale": Normal(4, scale=0.7),
    "full": MultivariateNormal(4),
    "tied": MultivariateNormal(4, covariance="shared"),
    "bits": Bernoulli(4),
    "counts": Poisson(4),
    "counts, dispersion learned": NegativeBinomial(4),
    "counts, dispersion 2.5": NegativeBinomial(4, dispersion=2.5),
    "classes": OneHot(4),
}


def declared(spec, *, learned: bool = True) -> Model:
    torch.manual_seed(0)
    model = Model(
        p={"y": OneHot(3, learned=learned), "x | y": spec, "w": Normal(2, learned=learned)},
        q={"y | x": Exact()},
    ).double()
    with torch.no_grad():
        for parameter in model.theta():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def rows(kind: str, *, holes: bool = False, n: int = 60) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    x = (
        3 * random.normal(size=(3, 4))[random.integers(3, size=n)]
        + random.normal(size=(n, 4)) @ random.normal(size=(4, 4))
        + 50
    )
    if kind == "classes":
        return {"x": random.integers(4, size=n), "w": random.normal(size=(n, 2))}
    if kind == "bits":
        x = (x > 50).astype(float)
    elif kind.startswith("counts"):
        x = random.poisson(np.exp((x - 50).clip(-2, 2))).astype(float)
    return {
        "x": np.where(random.random(x.shape) < 0.2, np.nan, x) if holes else x,
        "w": random.normal(size=(n, 2)),
    }


def opened(kind: type, model: Model, data: dict[str, np.ndarray]):
    method = kind(model)
    method.open(Rows(open_source(model.graph, data, model._parameter()), World()))
    return method


@pytest.mark.parametrize("labels", [False, True], ids=["", "labels"])
@pytest.mark.parametrize("holes", [False, True], ids=["", "missing"])
@pytest.mark.parametrize("kind", SPECS)
def test_an_iteration_is_that_of_the_table_of_responsibilities(kind, holes, labels, monkeypatch):
    if holes and (kind == "classes" or isinstance(SPECS[kind], MultivariateNormal)):
        pytest.skip(
            "classes have no part that is missing; the table has no full covariances with missing "
            "entries"
        )
    model, data = declared(SPECS[kind], learned=kind != "bits"), rows(kind, holes=holes)
    if labels:
        data["y"] = np.where(np.arange(60) % 4 == 0, np.arange(60) % 3, -1)
    other = copy.deepcopy(model)
    with torch.no_grad():
        fast, slow = opened(Mixtures, model, data), opened(Responsibilities, other, data)
        own = fast.read()
        evidence, following = fast.update(own)
        reference, expected = slow.update(slow.read())
        assert float(evidence) == pytest.approx(float(reference), rel=1e-11)
        torch.testing.assert_close(following, expected, rtol=1e-9, atol=1e-9)
        # rows that are read again at every iteration
        monkeypatch.setattr(responsibilities, "KEPT", 0)
        again = opened(Mixtures, model, data)
        assert again.kept is None
        torch.testing.assert_close(again.update(own), (evidence, following), rtol=1e-12, atol=1e-12)


def test_a_full_covariance_with_missing_entries_is_bayes_rule_by_hand():
    """Each row's known entries have a Gaussian of their own in each cluster; the missing ones are
    filled by regression on them.
    """
    x = rows("full", holes=True)["x"]
    model = declared(SPECS["full"])
    blocks = model.factors["p(x|y)"].net.blocks
    with torch.no_grad():
        raw = (blocks.weights["y"].mT + blocks.bias).numpy()
    logits = model.factors["p(y)"].root.detach().numpy()
    position = [(i, j) for i in range(4) for j in range(i + 1)]
    loc, roots = raw[:, :4] + 50, np.zeros((3, 4, 4))  # near the data, so that no cluster is empty
    for k in range(3):
        for (i, j), value in zip(position, raw[k, 4:], strict=True):
            roots[k, i, j] = np.log1p(np.exp(value)) * 5 if i == j else value
    with torch.no_grad():
        new = np.concatenate(
            [
                loc,
                [
                    [
                        np.log(np.expm1(roots[k, i, j])) if i == j else roots[k, i, j]
                        for i, j in position
                    ]
                    for k in range(3)
                ],
            ],
            1,
        )
        blocks.weights["y"].copy_(torch.as_tensor(new.T))
        blocks.bias.zero_()
    covariance, table = roots @ roots.transpose(0, 2, 1), np.zeros((len(x), 3))
    filled, spread = np.zeros((len(x), 3, 4)), np.zeros((len(x), 3, 4, 4))
    for i, row in enumerate(x):
        here, gone = ~np.isnan(row), np.isnan(row)
        for k in range(3):
            c, off = covariance[k], row[here] - loc[k, here]
            inverse = np.linalg.inv(c[np.ix_(here, here)])
            table[i, k] = logits[k] - 0.5 * (
                off @ inverse @ off + np.linalg.slogdet(2 * np.pi * c[np.ix_(here, here)])[1]
            )
            filled[i, k, here], filled[i, k, gone] = (
                row[here],
                loc[k, gone] + c[np.ix_(gone, here)] @ inverse @ off,
            )
            spread[i, k][np.ix_(gone, gone)] = (
                c[np.ix_(gone, gone)] - c[np.ix_(gone, here)] @ inverse @ c[np.ix_(here, gone)]
            )
    table -= np.log(np.exp(logits).sum())
    evidence = np.logaddexp.reduce(table, 1)
    weight = np.exp(table - evidence[:, None])
    mean = np.einsum("nk,nkd->kd", weight, filled) / weight.sum(0)[:, None]
    off = filled - mean
    expected = (
        np.einsum("nk,nki,nkj->kij", weight, off, off) + np.einsum("nk,nkij->kij", weight, spread)
    ) / weight.sum(0)[:, None, None]
    data = {"x": x, "w": rows("full")["w"]}
    with torch.no_grad():
        method = opened(Mixtures, model, data)
        method.write(method.update(method.read())[1])
    found = blocks.weights["y"].mT.detach().numpy()
    np.testing.assert_allclose(found[:, :4], mean, rtol=1e-9)
    root = np.zeros((3, 4, 4))
    for k in range(3):
        for (i, j), value in zip(position, found[k, 4:], strict=True):
            root[k, i, j] = np.log1p(np.exp(value)) if i == j else value
    np.testing.assert_allclose(root @ root.transpose(0, 2, 1), expected, rtol=1e-8)
    run = fit(model, data, schedule=em(start="keep"), steps=40)
    assert (np.diff(run.history["evidence"]) >= 0).all()
    assert run.history["evidence"][-1] == pytest.approx(
        float(model.log_evidence(**data).value.mean()), abs=1e-9
    )


# Whole runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["diag", "full"])
def test_from_the_same_start_the_evidence_is_no_lower_than_scikit_learns(kind):
    random = np.random.default_rng(0)
    x = (
        1.5 * random.normal(size=(4, 5))[random.integers(4, size=2000)]
        + random.normal(size=(2000, 5)) @ random.normal(size=(5, 5)) / 2
        + 100
    )
    means, scale = x[:4], x.std(0)
    precision = np.stack([np.diag(scale**-2.0) if kind == "full" else scale**-2.0] * 4)
    theirs = GaussianMixture(
        4,
        covariance_type=kind,
        weights_init=np.full(4, 0.25),
        means_init=means,
        precisions_init=precision,
        max_iter=1000,
        random_state=0,
    ).fit(x)
    model = Model(
        p={
            "y": OneHot(4, learned=True),
            "x | y": MultivariateNormal(5) if kind == "full" else Normal(5),
        },
        q={"y | x": Exact()},
    )
    raw = torch.as_tensor(np.log(np.expm1(scale)))
    rows, columns = torch.tril_indices(5, 5)
    head = torch.where(rows == columns, raw[rows], 0.0) if kind == "full" else raw
    with torch.no_grad():
        model.factors["p(x|y)"].net.blocks.weights["y"].copy_(
            torch.cat([torch.as_tensor(means), head.expand(4, -1)], 1).T
        )
        model.factors["p(x|y)"].net.blocks.bias.zero_()
    run = fit(model, {"x": x}, schedule=em())  # weights that were set are kept
    assert run.history["evidence"][-1] > theirs.lower_bound_ - 1e-3
    assert (np.diff(run.history["evidence"]) >= 0).all()
    assert any("em() converged after" in row.get("note", "") for row in run.rows)
    # single precision
    assert float(model.log_evidence(x=x).value.mean()) == pytest.approx(
        run.history["evidence"][-1], abs=1e-3
    )


def test_a_fresh_mixture_starts_at_clusters_of_the_data():
    """Ten clusters far apart: every seed finds them all, where random weights merge some."""
    random = np.random.default_rng(0)
    x = 100 * random.normal(size=(10, 3))[np.arange(600) % 10] + random.normal(size=(600, 3))
    truth = (
        GaussianMixture(
            10, covariance_type="diag", means_init=[x[k::10].mean(0) for k in range(10)]
        )
        .fit(x)
        .score(x)
    )

    def found(seed: int, **choices) -> float:
        torch.manual_seed(seed)
        model = Model(p={"y": OneHot(10, learned=True), "x | y": Normal(3)}, q={"y | x": Exact()})
        return fit(model, {"x": x}, schedule=em(**choices), steps=60, seed=seed).history[
            "evidence"
        ][-1]

    assert all(found(seed) > truth - 1e-3 for seed in range(5))
    assert max(found(seed, start="keep") for seed in range(5)) < truth - 0.5
    assert found(3) == found(3)


@pytest.mark.parametrize("least", [1e-2, 1e-4])
def test_a_cluster_of_equal_rows_has_the_least_variance(least):
    """``least`` is a share of the variance of the whole column."""
    x = np.concatenate([np.zeros((20, 1)), 10 + np.random.default_rng(0).normal(size=(40, 1))])
    model = Model({"y": OneHot(2, learned=True), "x | y": Normal(1)}, {"y | x": Exact()}).double()
    fit(model, {"x": x}, schedule=em(least=least), progress=False)
    factor = model.factors["p(x|y)"]
    scale = torch.nn.functional.softplus(factor.net.blocks.weights["y"][1]).min()
    assert scale.item() ** 2 == pytest.approx(least * x.var(), rel=1e-6)


@pytest.mark.parametrize("family", [Normal, MultivariateNormal])
def test_each_column_has_its_own_least_variance(family):
    draw = np.random.default_rng(0)
    x = np.concatenate([np.zeros((20, 2)), 10 + draw.normal(size=(40, 2))])
    model = Model({"y": OneHot(2, learned=True), "x | y": family(2)}, {"y | x": Exact()}).double()
    fit(model, {"x": x}, schedule=em(least=(1e-2, 1e-4)), progress=False)
    spreads = (
        model.sample(20_000, y=0, seed=0)["x"].std(0),
        model.sample(20_000, y=1, seed=0)["x"].std(0),
    )
    low = torch.stack(spreads).amin(0).numpy()
    np.testing.assert_allclose(low, x.std(0) * [0.1, 0.01], rtol=0.02)
    with pytest.raises(ValueError, match="least has 3 shares, and the Gaussian variables have 2"):
        fit(model, {"x": x}, schedule=em(least=[0.1, 0.1, 0.1]), progress=False)


@pytest.mark.parametrize("kind", ["full", "tied"])
def test_an_extrapolated_covariance_is_raised_to_the_least_variance(kind):
    """Acceleration may leave the parameters that an M-step can reach; ``within`` returns there."""
    method = opened(Mixtures, declared(SPECS[kind]), rows(kind))
    method.least = 1e-4
    point = method.read()
    heads = method._heads(point)["p(x|y)"]
    kept = heads["tril"].clone()
    root = torch.diag(torch.tensor([300.0, 1.0, 1e-3, 1e-9], dtype=torch.float64))
    mixing = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    narrow = torch.linalg.qr((mixing @ root).mT)[1].mT
    narrow = narrow * narrow.diagonal().sign()
    one = heads["tril"] if kind == "tied" else heads["tril"][1]
    one.copy_(ad.vector_from_tril(narrow))
    raised = method._heads(method.within(point))["p(x|y)"]["tril"]
    found = ad.tril_from_vector(raised if kind == "tied" else raised[1], 4)
    assert torch.linalg.svdvals(found).tolist() == pytest.approx([300, 1, 1e-2, 1e-2], rel=1e-6)
    if kind == "full":
        assert torch.equal(raised[[0, 2]], kept[[0, 2]])


def test_labels_say_which_cluster_is_which():
    x, labels = IRIS, np.where(np.arange(150) % 10 == 0, load_iris().target, -1)
    model = Model(
        p={"y": OneHot(3, learned=True), "x | y": MultivariateNormal(4)}, q={"y | x": Exact()}
    )
    fit(model, {"x": x, "y": labels}, schedule=em())
    clusters = model.posterior(x=x)["y"].probs.argmax(-1).numpy()
    assert (clusters == load_iris().target).mean() > 0.95


def test_centres_are_those_of_clusters_far_apart():
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    rows = centres.repeat(25, 1) + 0.1 * torch.randn(
        100, 2, generator=torch.Generator().manual_seed(0)
    )
    found = cluster_centres(rows, 4, 0)
    assert float(torch.cdist(centres, found).amin(1).max()) < 0.1
    known = torch.full((100,), -1)
    known[:4] = torch.tensor([3, 2, 1, 0])
    assert float((cluster_centres(rows, 4, 0, known) - centres.flip(0)).abs().max()) < 0.2
    # fewer different rows than clusters
    assert cluster_centres(rows[:1].repeat(5, 1), 3, 0).isfinite().all()


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch, kind):
    def model(seed: int) -> Model:
        torch.manual_seed(seed)
        return Model(p={"y": OneHot(3, learned=True), "x | y": SPECS[kind]}, q={"y | x": Exact()})

    whole, part = model(0), model(7)
    run = fit(whole, {"x": IRIS}, schedule=em(tol=1e-9), steps=30)
    take = Training._take_step

    def interrupted(self, phase):
        if self.step == 6:
            signal.raise_signal(signal.SIGINT)
        return take(self, phase)

    monkeypatch.setattr(Training, "_take_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(model(0), {"x": IRIS}, schedule=em(tol=1e-9), steps=30, out=tmp_path)
    monkeypatch.setattr(Training, "_take_step", take)
    resumed = fit(part, {"x": IRIS}, schedule=em(tol=1e-9), steps=30, out=tmp_path, resume=True)
    np.testing.assert_array_equal(resumed.history["evidence"], run.history["evidence"])
    assert all(torch.equal(a, b) for a, b in zip(whole.theta(), part.theta(), strict=True))


def test_other_finite_models_take_the_table():
    two = Model(
        p={"a": OneHot(2, learned=True), "b | a": OneHot(3), "x | b": Normal(2)},
        q={"a | x": OneHot(), "b | x, a": OneHot()},
    )
    bits = Model(
        p={"b": Bernoulli(2, learned=True), "x": Normal(2, learned=True)}, q={"b | x": Bernoulli()}
    )
    for model in (two, bits):
        method = exact_em(model)
        assert type(method) is Responsibilities
        assert method.closed
    assert type(exact_em(declared(SPECS["full"]))) is Mixtures


@pytest.mark.parametrize("kind", SPECS)
def test_a_polynomial_is_the_log_likelihood_but_for_a_term_of_the_data(kind):
    spec = SPECS[kind]
    if isinstance(spec, MultivariateNormal):
        assert spec.polynomial() is None
        return
    torch.manual_seed(0)
    value = torch.eye(4) if kind == "classes" else torch.randint(0, 2, (6, 4)).float()
    names = [*spec.heads(4), *spec.vectors(4)]
    differences = []
    fixed = {name: torch.randn(4) for name in spec.vectors(4) if spec.needs_occurrences}
    for _ in range(3):
        heads = {name: torch.randn(4) for name in names} | fixed
        constant, first, second = spec.polynomial(**heads)
        mine = (constant + first * value + second * value.square()).sum(-1)
        differences.append(spec.log_prob(spec.distribution(**heads), value) - mine)
    for difference in differences[1:]:
        torch.testing.assert_close(difference, differences[0], rtol=0, atol=1e-5)
