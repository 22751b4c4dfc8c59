"""Draws as an ArviZ object: named axes, the right numbers, and read back from a file."""

import sys

import numpy as np
import pytest
import torch
import xarray as xr

from aevb import Bernoulli, Exact, Model, Normal, OneHot, fit, to_arviz, zoo
from aevb.arviz import GROUPS

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # ArviZ announces its next version
    pytest.mark.filterwarnings("ignore::UserWarning:arviz"),
]
NAMES = ["height", "weight"]
X = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
X[0, 1] = np.nan


@pytest.fixture(scope="module")
def gaussian() -> Model:
    """A model whose posterior is exact: p(z | x) is a Gaussian."""
    torch.manual_seed(0)
    return Model(
        p={"z": Normal(1), "x | z": Normal(2, scale=1.0)}, q={"z | x": Normal(scale="learned")}
    )


@pytest.fixture(scope="module")
def draws(gaussian):
    coords = {"x_dim": NAMES, "row": list("abcde")}
    return to_arviz(gaussian, {"x": X}, samples=2000, method="exact", seed=0, coords=coords)


def test_groups_have_named_axes(draws):
    assert draws.groups() == [*GROUPS[:2], "log_likelihood", *GROUPS[2:4], "observed_data"]
    for group, name, dims in (
        ("posterior", "z", ("chain", "draw", "row", "z_dim")),
        ("prior", "z", ("chain", "draw", "row", "z_dim")),
        ("posterior_predictive", "x", ("chain", "draw", "row", "x_dim")),
        ("prior_predictive", "x", ("chain", "draw", "row", "x_dim")),
        ("log_likelihood", "x", ("chain", "draw", "row")),
        ("observed_data", "x", ("row", "x_dim")),
    ):
        values = draws[group][name]
        assert values.dims == dims, group
        assert list(values.row.values) == list("abcde")
        assert draws[group].attrs["inference_library"] == "aevb"
        if "chain" in dims:
            assert (values.sizes["chain"], values.sizes["draw"]) == (1, 2000)
    assert list(draws.posterior_predictive.x_dim.values) == NAMES
    np.testing.assert_array_equal(draws.observed_data.x, X)


def test_draws_are_those_of_the_exact_posterior_and_of_p(gaussian, draws):
    """2000 draws: 5 standard errors fail for one of 22 numbers with probability 1e-5."""
    assert draws.posterior.attrs["draws"] == "independent draws of the exact posterior"
    exact = gaussian.posterior(x=X, method="exact")["z"]
    for drawn, mean, sd in (
        (draws.posterior.z, exact.mean, exact.stddev),
        (draws.prior.z, torch.zeros(5, 1), torch.ones(5, 1)),
    ):
        mean, sd = (value.detach().numpy() for value in (mean, sd))
        assert (abs(drawn.mean(["chain", "draw"]) - mean) < 5 * sd / 2000**0.5).all()
        assert np.allclose(drawn.std(["chain", "draw"]), sd, rtol=0.08)
    z = torch.from_numpy(draws.posterior.z.values[0])
    loc = gaussian.posterior(x=X, method="exact").generated({"z": z[:1]}).mean("x")[0].detach()
    first = draws.log_likelihood.x.values[0, 0]
    density = torch.distributions.Normal(loc, 1.0, validate_args=False).log_prob(torch.tensor(X))
    np.testing.assert_allclose(first, density.nansum(-1).numpy(), rtol=1e-5)


def test_it_is_read_back_and_arviz_uses_it(gaussian, draws, tmp_path):
    import arviz as az

    draws.to_netcdf(str(tmp_path / "draws.nc"))
    found = az.from_netcdf(str(tmp_path / "draws.nc"))
    assert found.groups() == draws.groups()
    for group in GROUPS:
        xr.testing.assert_equal(found[group].load(), draws[group])
    assert found.posterior.attrs["posterior"] == "exact"
    summary = az.summary(found, var_names=["z"], kind="stats")
    exact = gaussian.posterior(x=X, method="exact")["z"]
    np.testing.assert_allclose(summary["mean"], exact.mean.detach().flatten(), atol=0.1)
    # Rows have latents of their own, so the leave-one-out density of a row is its evidence. The
    # standard error of the estimate is about 0.05.
    loo = az.loo(found, pointwise=True)
    evidence = gaussian.log_evidence(x=X).value.detach().numpy()
    assert float(loo.pareto_k.max()) < 0.7
    np.testing.assert_allclose(loo.loo_i.values, evidence, atol=0.15)
    found.close()


def test_draws_of_q_say_so_and_depend_on_the_seed_alone(gaussian):
    one, two, other = (
        to_arviz(gaussian, {"x": X}, samples=4, method="q", seed=seed, groups=["posterior"])
        for seed in (1, 1, 2)
    )
    assert one.groups() == ["posterior", "observed_data"]
    assert one.posterior.attrs["draws"].endswith("they are not weighted")
    assert one.posterior.attrs["why"] == "as asked"
    xr.testing.assert_equal(one.posterior, two.posterior)
    assert not one.posterior.equals(other.posterior)


def test_sequences_classes_images_and_given_variables_have_their_axes(monkeypatch):
    torch.manual_seed(0)
    model = Model(
        p={
            "k": OneHot(3),
            "z[t] | z[t-1], k": Normal(2),
            "x[t] | z[t], u": Bernoulli((2, 3)),
            "y | k": OneHot(4),
        },
        q={"k | y": OneHot(), "z[t] | x[t], k": Normal()},
        given={"u": 2},
    )
    x = (np.random.default_rng(0).random((3, 4, 2, 3)) > 0.5).astype(np.float32)
    y = np.array([0, 3, -1])
    data = {"x": x, "y": y, "u": np.ones((3, 2), np.float32), "lengths": [4, 2, 3]}
    dims = {"x": ["high", "wide"]}
    whole = to_arviz(model, data, samples=6, method="q", seed=0, dims=dims)
    assert whole.posterior.z.dims == ("chain", "draw", "row", "time", "z_dim")
    assert whole.posterior.k.dims == ("chain", "draw", "row")
    assert whole.posterior_predictive.x.dims == ("chain", "draw", "row", "time", "high", "wide")
    assert whole.posterior_predictive.y.dims == ("chain", "draw", "row")
    assert whole.constant_data.u.dims == ("row", "u_dim")
    assert set(np.unique(whole.prior.k)) <= {0, 1, 2}
    assert whole.posterior.k.dtype.kind == "i"
    assert whole.observed_data.y.values.tolist() == [0, 3, -1]
    for values in (whole.posterior.z, whole.prior_predictive.x, whole.observed_data.x):
        ended = values.isel(row=1, time=slice(2, None))
        assert bool(ended.isnull().all())
        assert not bool(values.isel(row=1, time=slice(None, 2)).isnull().any())
    # The sum of all terms is log p of a complete assignment.
    z, k = (torch.from_numpy(whole.posterior[name].values[0, 2]) for name in ("z", "k"))
    known = {**data, "y": np.array([0, 3, 0]), "z": z.nan_to_num(), "k": k}
    total = model.log_prob(**known) - model.log_prob(**known | {"x": x * np.nan})
    density = whole.log_likelihood.x.values[0, 2]
    np.testing.assert_allclose(density, total.detach(), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr("aevb.arviz.AT_ONCE", 1)  # one draw at a time
    parts = to_arviz(model, data, samples=6, method="q", seed=0, dims=dims)
    xr.testing.assert_equal(parts.posterior, whole.posterior)
    xr.testing.assert_allclose(parts.log_likelihood, whole.log_likelihood, rtol=1e-5)


def test_a_known_latent_is_no_draw():
    model = Model({"k": OneHot(2), "x | k": Normal(1)}, {"k | x": OneHot()})
    fit(model, {"x": X[:, :1]}, steps=1)
    found = to_arviz(model, {"x": X[:, :1], "k": np.array([0, 1, -1, 1, 0])}, samples=5, seed=0)
    assert (found.posterior.k.values[0][:, [0, 1, 3, 4]] == [0, 1, 1, 0]).all()
    known = to_arviz(model, {"x": X[:, :1], "k": np.array([0, 1, 1, 1, 0])}, samples=5, seed=0)
    assert "posterior" not in known.groups()
    assert known.posterior_predictive.x.shape == (1, 5, 5, 1)


def test_models_without_latents_and_with_bayes_rule_have_their_groups():
    none = to_arviz(zoo.ar(), {"x": torch.randn(2, 5, 1)}, samples=3, seed=0)
    assert none.groups() == [
        "posterior_predictive", "log_likelihood", "prior_predictive", "observed_data",
    ]  # fmt: skip
    model = Model(
        {"y": OneHot(3), "z | y": Normal(2), "x | z": Normal(2)},
        {"z | x": Normal(), "y | z": Exact()},
    )
    found = to_arviz(model, {"x": np.nan_to_num(X)}, samples=3, method="q", seed=0)
    assert {name: value.dims for name, value in found.posterior.data_vars.items()} == {
        "y": ("chain", "draw", "row"),
        "z": ("chain", "draw", "row", "z_dim"),
    }


def test_missing_entries_that_p_reads_have_no_density():
    torch.manual_seed(0)
    p = {"z": Normal(1), "x[t] | x[t-1], z": Normal(1, scale=1.0)}
    model = Model(p, {"z | x[0]": Normal()})
    x = torch.randn(2, 4, 1)
    x[1, 2] = torch.nan
    found = to_arviz(model, {"x": x}, samples=3, method="q", seed=0)
    assert "log_likelihood" not in found.groups()
    assert found.posterior_predictive.x.notnull().all()


def test_arviz_1_gets_a_tree(gaussian, monkeypatch):
    """ArviZ 1 has no InferenceData, and stores groups in xarray's DataTree."""
    import arviz

    monkeypatch.delattr(arviz, "InferenceData")
    tree = to_arviz(gaussian, {"x": X}, samples=3, method="q", groups=["posterior"], seed=0)
    assert isinstance(tree, xr.DataTree)
    assert set(tree.children) == {"posterior", "observed_data"}
    assert tree["posterior/z"].dims == ("chain", "draw", "row", "z_dim")
    assert tree["posterior"].attrs["posterior"] == "q"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"samples": 0}, "samples is the number of draws"),
        ({"groups": "posterior"}, r"groups is a list of names, such as \['posterior'\]"),
        ({"coords": {"row": [1, 2]}}, "coords= has 2 labels of row, which has 5 entries"),
        ({"dims": {"x": ["a", "b"]}}, "dims= gives x the dimensions a, b, but it has 1 after row"),
        ({"dims": {"y": ["a"]}}, "dims= names 'y', which is not a variable"),
        ({"samples": 10**8}, "of x. Take fewer samples, or groups="),
        ({"data": X}, "data are arrays by variable, such as {'x': X}; got a ndarray"),
    ],
)
def test_wrong_arguments_are_refused(gaussian, changed, message):
    arguments = {"data": {"x": X}, "samples": 2, "method": "q"} | changed
    with pytest.raises(ValueError, match=message):
        to_arviz(gaussian, arguments.pop("data"), **arguments)


def test_without_arviz_the_command_is_named(gaussian, monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ValueError, match=r"pip install 'aevb\[arviz\]'"):
        to_arviz(gaussian, {"x": X})
