"""A mistyped name is answered with its place, the names that there are, and the one that is near.

A new message about unknown names costs a line in ``PLACES``.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import aevb
from aevb import Bernoulli, Model, Normal, OneHot, Schema, Settings, fit, to_arviz, zoo
from aevb.cli import app
from aevb.cli.model_argument import resolve
from aevb.cli.options import check_evidence, fit_device
from aevb.cli.table_models import read_arguments
from aevb.cli.train_table import _check_column
from aevb.runtime.suggestions import did_you_mean, nearest
from aevb.training.schedules import parse_schedule, schedule_from

X = torch.zeros(4, 3)
STATES = torch.zeros(1, 5, 1)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model(
        p={"label": OneHot(2), "z | label": Normal(1), "x | z, size": Bernoulli(3)},
        q={"label | x": OneHot(), "z | x, label": Normal()},
        given={"size": 1},
    )


@pytest.fixture(scope="module")
def series() -> Model:
    return Model(
        p={
            "level[t] | level[t-1], price[t]": Normal(1, scale=1.0),
            "x[t] | level[t]": Normal(1, scale=1.0),
        },
        q={"level[t] | x[t]": Normal()},
        given={"price": 1},
    )


def rows(**changed: object) -> dict[str, object]:
    return {"x": X, "size": torch.ones(4, 1)} | changed


def toml(tmp_path, text: str):
    (tmp_path / "config.toml").write_text(text)
    return tmp_path / "config.toml"


def table() -> Schema:
    return Schema.read({"height": np.arange(9) / 4, "weight": np.arange(9) % 4 / 3})


# The call, the place that the message names, another name that it lists or the fix, the suggestion.
PLACES: dict[str, tuple[Callable[..., object], str, str, str]] = {
    "names of the package": (
        lambda **_: aevb.Norml,
        "module 'aevb' has no attribute 'Norml'",
        "",
        "Normal",
    ),
    "parent in p": (
        lambda **_: Model({"latent": Normal(1), "x | laten": Normal(2)}, {"latent | x": Normal()}),
        "p has \"x | laten\": Normal(2), but 'laten' is declared nowhere",
        'given={"laten": 10}',
        "latent",
    ),
    "factor in q": (
        lambda **_: Model({"latent": Normal(1), "x | latent": Normal(2)}, {"laten | x": Normal()}),
        "q draws 'laten', but p has no factor for it",
        "Add one to p",
        "latent",
    ),
    "data of fit": (
        lambda m, **_: fit(m, rows(lable=torch.ones(4).long()), steps=1),
        "The data have 'lable'",
        "label, z, x, size",
        "label",
    ),
    "data of elbo": (lambda m, **_: m.elbo(**rows(Z=X)), "data have 'Z'", "not a variable", "z"),
    "how=": (
        lambda m, **_: m.elbo(**rows(), how={"lable": "gumbel"}),
        "how names 'lable'",
        "The latents are label, z",
        "label",
    ),
    "word of how=": (
        lambda m, **_: m.elbo(**rows(), how={"label": "gumble"}),
        "how={'label': 'gumble'}",
        "straight-through",
        "gumbel",
    ),
    "bound=": (lambda m, **_: m.elbo(**rows(), bound="iwe"), "bound 'iwe'", "particles", "iwae"),
    "gradient=": (lambda m, **_: m.plan(gradient="sti"), "gradient 'sti'", "dreg", "stl"),
    "kl_weight=": (
        lambda m, **_: m.elbo(**rows(), kl_weight={"labell": 2.0}),
        "kl_weight= names 'labell'",
        "label, z",
        "label",
    ),
    "beta=": (
        lambda m, **_: fit(m, rows(), steps=1, beta={"labell": 2.0}),
        "beta= names 'labell'",
        "label, z",
        "label",
    ),
    "posterior": (
        lambda m, **_: m.posterior(**rows(), method="q")["lable"],
        "'lable' is not a latent",
        "label, z",
        "label",
    ),
    "sample": (
        lambda m, **_: m.sample(2, size=torch.ones(2, 1), lable=1),
        "'lable' is not a variable that can be fixed",
        "z, x, size",
        "label",
    ),
    "given= of forecast": (
        lambda series, **_: series.forecast(
            steps=2, x=STATES, price=STATES, given={"pirce": STATES}
        ),
        "given= holds the future of given variables, but 'pirce'",
        "Those are price",
        "price",
    ),
    "beliefs": (
        lambda series, **_: series.smooth(x=STATES, price=STATES)["levle"],
        "'levle' is not a latent",
        "level",
        "level",
    ),
    "method of the evidence": (
        lambda m, **_: m.log_evidence(**rows(), method="importanc"),
        "method 'importanc'",
        "ais",
        "importance",
    ),
    "groups= of to_arviz": (
        lambda m, **_: to_arviz(m, rows(), groups=["priors"]),
        "groups= names 'priors'",
        "log_likelihood",
        "prior",
    ),
    "coords= of to_arviz": (
        lambda m, **_: to_arviz(m, rows(), method="q", coords={"rows": range(4)}),
        "coords= names the dimension 'rows'",
        "x_dim",
        "row",
    ),
    "settings of fit": (
        lambda m, **_: fit(m, rows(), step=3),
        "fit has no setting 'step'",
        "epochs, steps, batch",
        "steps",
    ),
    "settings by other names": (
        lambda m, **_: fit(m, rows(), learning_rate=1e-3),
        "fit has no setting 'learning_rate'",
        "Its settings are",
        "lr",
    ),
    "settings of a file": (
        lambda tmp_path, **_: Settings.from_toml(toml(tmp_path, "batchsize = 3")),
        "config.toml has unknown settings: batchsize",
        "The settings are",
        "batch",
    ),
    "schedule": (lambda **_: parse_schedule("alternat:5,5"), "'alternat'", "em, mle", "alternate"),
    "argument of a schedule": (
        lambda **_: schedule_from({"name": "alternate", "e_step": 3}),
        "alternate has no e_step",
        "m_steps",
        "e_steps",
    ),
    "device=": (lambda m, **_: fit(m, rows(), device="gpu"), "device='gpu'", "cpu", "cuda"),
    "--device": (lambda **_: fit_device("cdua"), "--device cdua", "mps", "cuda"),
    "columns of a schema": (
        lambda **_: table().without("wieght"),
        "no column 'wieght'",
        "'height'",
        "weight",
    ),
    "columns of an option": (
        lambda **_: _check_column("--without", "wieght", ["height", "weight"]),
        "--without names the column 'wieght'",
        "which the table does not have",
        "weight",
    ),
    "models": (lambda **_: resolve("gmvea"), "no model 'gmvea'", "file.py:name", "gmvae"),
    "zoo": (lambda **_: zoo.zoo["gmvea"], "no model 'gmvea'", "local_level", "gmvae"),
    "--set": (
        lambda **_: resolve("vae", settings={"hiden": "3"}),
        "vae has no argument 'hiden'",
        "likelihood=",
        "hidden",
    ),
    "likelihood=": (
        lambda **_: zoo.vae(likelihood="Poison"),
        "likelihood 'Poison'",
        "Bernoulli",
        "Poisson",
    ),
    "--model": (lambda **_: read_arguments("mixtures", {}), "--model mixtures", "vae", "mixture"),
    "--set of a table": (
        lambda **_: read_arguments("vae", {"latents": "2"}),
        "--model vae has no argument 'latents'",
        "hidden",
        "latent",
    ),
    "--evidence": (lambda **_: check_evidence("exakt"), "--evidence exakt", "ais", "exact"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_mistyped_name_is_answered_with_the_near_one(place, model, series, tmp_path):
    call, where, others, near = PLACES[place]
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)) as error:
        call(m=model, series=series, tmp_path=tmp_path)
    text = str(error.value)
    assert where in text
    assert others in text
    assert f"Did you mean {near!r}?" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "vae"], "No such command 'trian'. Did you mean 'train'?"),
        (["train", "vae", "--epoch", "3"], "--epochs"),
    ],
)
def test_commands_and_options_are_suggested(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        app(arguments, prog_name="aevb")
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_suggestion_is_near_and_nothing_is_made_up():
    assert nearest("X", ["x", "y"]) == "x"
    assert nearest("kl-warmup", ["warmup", "kl_warmup"]) == "kl_warmup"
    assert nearest("cov", ["components", "covariance"]) == "covariance"
    assert nearest("co", ["components", "covariance"]) is None  # both begin so
    assert nearest("zzz", ["x", "label"]) is None
    assert nearest("x", []) is None
    assert did_you_mean("q", ["label"]) == ""
