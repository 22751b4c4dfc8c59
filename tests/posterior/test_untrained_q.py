"""A q that was not trained for its p is not used without a word: the exact posterior answers where
it is known, otherwise nothing does.
"""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from aevb import (
    Bernoulli,
    Exact,
    Model,
    MultivariateNormal,
    Normal,
    OneHot,
    alternate,
    diagnose,
    em,
    fit,
    joint,
    linear,
    load,
    load_run,
    mle,
    mlp,
    predictive_check,
)
from aevb.estimate.gap_patterns import GapPatterns
from aevb.model import UNTRAINED
from aevb.posterior import training_record
from aevb.predictive.replicate import complete
from aevb.runtime.checked_files import DataWarning
from aevb.training.schedules import Phase, Schedule
from aevb.zoo import zoo

NAN = math.nan


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def factors(q=None) -> Model:
    torch.manual_seed(0)
    q = {"z | x": Normal(scale="learned")} if q is None else q
    return Model(p={"z": Normal(2), "x | z": Normal(4, scale="learned")}, q=q)


def correlated(n: int = 60) -> torch.Tensor:
    return randn(n, 2) @ randn(2, 4, seed=1) + 0.3 * randn(n, 4, seed=2)


def binary() -> Model:
    """A model whose posterior is not known."""
    torch.manual_seed(0)
    return Model(
        p={"z": Normal(1), "x | z": Bernoulli(3, net=mlp(4))}, q={"z | x": Normal(net=mlp(4))}
    )


def by_hand(model: Model, x: torch.Tensor) -> torch.Tensor:
    """E[z | x] of factor analysis by the formula."""
    factor = model.factors["p(x|z)"]
    w, b, s = (
        factor.net.blocks.weights["z"],
        factor.net.blocks.bias,
        torch.nn.functional.softplus(factor.vectors["scale"]),
    )
    precision = torch.eye(2) + w.T @ (w / s[:, None].square())
    return torch.linalg.solve(precision, w.T @ ((x - b) / s.square()).T).T.detach()


@dataclass(frozen=True)
class MSteps(Schedule):
    """p alone, by the bound."""

    def phase(self, step: int, total: int) -> Phase:
        return Phase("M", True, False, step, total)


def own_loop(model: Model, x: torch.Tensor) -> None:
    optimiser = torch.optim.Adam(model.theta(), lr=0.05)
    for _ in range(3):
        optimiser.zero_grad()
        (-model.elbo(x=x, seed=0).value.mean()).backward()
        optimiser.step()


def frozen(model: Model, x: torch.Tensor) -> None:
    for parameter in model.phi():
        parameter.requires_grad_(False)
    fit(model, {"x": x}, steps=5)


def set_by_hand(model: Model) -> None:
    with torch.no_grad():
        model.theta()[0].add_(1)


def trained_then_frozen(model: Model, x: torch.Tensor) -> None:
    fit(model, {"x": x}, steps=5)
    frozen(model, x)


WAYS = {
    "mle": lambda model, x: fit(model, {"x": x}, schedule=mle(), steps=5),
    "a frozen q": frozen,
    "M-steps alone": lambda model, x: fit(model, {"x": x}, schedule=MSteps(), steps=5),
    "an optimiser of p alone": own_loop,
    "p set by hand": lambda model, x: set_by_hand(model),
    "trained, then p set by hand": lambda model, x: (
        fit(model, {"x": x}, steps=5),
        set_by_hand(model),
    ),
    "trained, then a frozen q": trained_then_frozen,
    "trained, then M-steps": lambda model, x: (
        fit(model, {"x": x}, steps=5),
        fit(model, {"x": x}, schedule=MSteps(), steps=5),
    ),
    "hardly any E-steps": lambda model, x: fit(
        model, {"x": x}, schedule=alternate(1, 20), steps=21
    ),
    "q trained, then mle": lambda model, x: (
        fit(model, {"x": x}, steps=5),
        fit(model, {"x": x}, schedule=mle(), steps=5),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_exact_posterior_stands_in(way):
    model, x = factors(), correlated()
    WAYS[way](model, x)
    assert list(model.untaught()) == ["z"]
    posterior = model.posterior(x=x)
    assert posterior.method == "exact"
    assert repr(posterior) == f"exact posterior of z for 60 rows ({model.untaught()['z']})"
    assert torch.allclose(posterior["z"].mean, by_hand(model, x), atol=1e-4)
    assert model.posterior(x=x, method="q").method == "q"
    again = model.reconstruct(x=x, seed=0)["x"]
    drawn = model.posterior(x=x, seed=0, method="exact").sample()["z"][0]
    assert torch.allclose(again, model.factors["p(x|z)"]({"z": drawn}), atol=1e-5)
    batch = model.prepare(x=x)
    with model._evaluating(0):
        assert torch.equal(
            complete(model, batch, seed=3)["z"][0], model.posterior(x=x, seed=3).sample()["z"][0]
        )
    fit(model, {"x": x}, steps=5, schedule=joint())
    assert (model.untaught() == {}) == ("frozen" not in way)


def test_em_that_sets_q_keeps_it_and_em_that_cannot_does_not():
    x = correlated()
    model = factors({"z | x": MultivariateNormal(covariance="shared")})
    fit(model, {"x": x}, schedule=em(), steps=3)
    assert model.posterior(x=x).method == "q"
    assert torch.allclose(
        model.posterior(x=x)["z"].mean, model.posterior(x=x, method="exact")["z"].mean, atol=1e-4
    )
    model = factors({"z | x": Normal(net=mlp(4))})
    fit(model, {"x": x}, schedule=em(), steps=3)
    assert "em() left q as it is" in model.untaught()["z"]
    assert torch.allclose(model.posterior(x=x)["z"].mean, by_hand(model, x), atol=1e-4)


def test_q_that_saw_gaps_in_one_column_does_not_answer_for_gaps_in_another(tmp_path):
    """Whether q saw missing entries is on record for each column, in memory, in a run, in a saved
    model and in a state_dict.
    """
    x = (randn(40, 3) > 0).float()
    first, second, both = x.clone(), x.clone(), x.clone()
    first[4, 0], second[3, 1], second[7, 1] = NAN, NAN, NAN
    both[5, 0] = both[6, 1] = NAN
    model = binary()
    fit(model, {"x": first}, steps=3, out=tmp_path / "run")
    model.save(tmp_path / "saved")
    given = binary()
    given.load_state_dict(model.state_dict())
    for found in (
        model,
        load_run(tmp_path / "run"),
        load(tmp_path / "saved"),
        copy.deepcopy(model),
        given,
    ):
        assert found.posterior(x=first).method == "q"
        with pytest.raises(
            ValueError,
            match=r"2 rows lack entries of x \(first, from 0: row 3\), which q was not trained on: "
            r".* every entry of column 1",
        ):
            found.posterior(x=second)
        with pytest.raises(ValueError, match=r"1 row lacks entries of x \(first, from 0: row 6\)"):
            found.posterior(x=both)
    fit(model, {"x": second}, steps=3)
    assert model.posterior(x=both).method == "q"
    linear = factors()
    x = correlated()
    first, second = x.clone(), x.clone()
    first[0, 0], second[0, 1] = NAN, NAN
    fit(linear, {"x": first}, steps=3)
    assert (linear.posterior(x=first).method, linear.posterior(x=second).method) == ("q", "exact")


def test_bounds_on_gaps_that_q_was_not_trained_on_say_so():
    """They are bounds all the same, so that they warn where a posterior is refused."""
    x = (randn(40, 3) > 0).float()
    gaps = x.clone()
    gaps[3, 1] = NAN
    model = binary()
    model.elbo(x=gaps)  # q was never trained, or is trained by the user's own loop
    fit(model, {"x": x}, steps=3)
    lacks = r"1 row lacks entries of x \(first, from 0: row 3\), which q was not trained on"
    with pytest.warns(DataWarning, match=f"{lacks}.*may be far too low. Train on rows with missi"):
        model.elbo(x=gaps)
    assert re.match(lacks, model.log_evidence(x=gaps, samples=4, seed=0).notes[-1])
    assert not any(
        "not trained on" in note
        for found in (
            model.log_evidence(x=gaps, method="prior", samples=4),
            model.log_evidence(x=x, samples=4),
        )
        for note in found.notes
    )
    linear = factors()
    fit(linear, {"x": correlated()}, steps=3)
    lacking = correlated()
    lacking[0, 0] = NAN
    assert linear.log_evidence(x=lacking).notes == ()  # exact


def whole_steps(model: Model) -> Tensor:
    """Train on rows with whole steps missing; return complete rows."""
    x = randn(20, 6, 2)
    gaps = x.clone()
    gaps[::3, 2] = NAN
    fit(model, {"x": gaps}, steps=3)
    model.impute(x=gaps)
    return x


def test_q_warns_of_a_pattern_of_gaps_that_it_was_not_trained_on(tmp_path):
    """q that saw whole steps missing has seen every column missing, but none beside a known one."""
    model = deep(columns=2)
    x = whole_steps(model)
    model.save(tmp_path / "saved")
    given = deep(columns=2)
    given.load_state_dict(model.state_dict())
    one, all_steps = x.clone(), x.clone()
    one[4:6, 3, 1], all_steps[7, :, 0] = NAN, NAN
    for found in (model, load(tmp_path / "saved"), given):
        beside = r"2 rows lack column 1 of x where column 0 of x is known \(first, from 0: row 4\)"
        for ask in (found.posterior, found.impute, found.elbo):
            with pytest.warns(DataWarning, match=f"{beside}, a pattern that no training row of q"):
                ask(x=one)
        with pytest.warns(DataWarning, match=r"1 row lacks column 0 of x in every step"):
            found.impute(x=all_steps)
        assert re.match(beside, found.log_evidence(x=one, samples=4).notes[-1])
    fit(model, {"x": one}, steps=3)
    model.impute(x=one)  # now it has
    single = deep(columns=2)
    apart = x.clone()
    apart[::4, 1, 0] = apart[1::4, 2, 1] = NAN
    fit(single, {"x": apart}, steps=3)
    both = x.clone()
    both[:, 2] = NAN
    with pytest.warns(DataWarning, match=r"20 rows lack 2 columns at once \(first"):
        single.posterior(x=both)


@pytest.mark.parametrize(("columns", "n"), [(4, 100), (10, 200), (20, 1000), (50, 1000)])
def test_many_rows_may_miss_more_columns_than_a_few_training_rows_did(columns, n):
    """The largest count of n rows is exceeded by a few of 2,000 rows of the same kind."""
    model = Model({"z": Normal(1), "x | z": Normal(columns)}, {"z | x": Normal()}, seed=0)
    exceeded = 0
    for seed in range(20):
        gone = torch.rand(n + 2000, columns, generator=torch.Generator().manual_seed(seed)) < 0.05
        x = torch.zeros(n + 2000, columns).masked_fill(gone, NAN)
        seen = GapPatterns.of(model.graph, model.prepare(x=x[:n]))
        counts = gone[n:].sum(-1)
        assert not seen.too_many(counts).any()
        exceeded += bool((counts > seen.most).any())
    assert exceeded >= 5


def test_clearly_more_missing_columns_than_in_training_are_named(tmp_path):
    model = Model({"z": Normal(1), "x | z": Normal(10)}, {"z | x": Normal()}, seed=0)
    one = randn(200, 10)
    one[torch.arange(200), torch.arange(200) % 10] = NAN
    fit(model, {"x": one}, steps=2, progress=False)
    model.save(tmp_path)
    half, two = randn(1, 10), randn(20, 10)
    half[0, ::2], two[:, 1:3] = NAN, NAN
    for found in (model, load(tmp_path)):
        assert (found.teaching.patterns.most, found.teaching.patterns.rows) == (1, 200)
        with pytest.warns(DataWarning, match="^1 row lacks 5 columns at once"):
            found.posterior(x=half)
        with pytest.warns(DataWarning, match="^20 rows lack 2 columns at once"):
            found.posterior(x=two)
    fit(model, {"x": one}, steps=2, progress=False)
    assert model.teaching.patterns.rows == 200


def test_an_estimate_reads_the_weights_of_q_for_a_warning_alone(monkeypatch):
    model = binary()
    x = (randn(40, 3) > 0).float()
    gaps = x.clone()
    gaps[::2, 0] = gaps[1::2, 1] = NAN
    fit(model, {"x": gaps}, steps=2, progress=False)
    read = []
    digest = training_record.digest

    def counted(parameters):
        read.append(1)
        return digest(parameters)

    monkeypatch.setattr(training_record, "digest", counted)
    for rows in (x, gaps):
        model.elbo(x=rows)
        model.log_evidence(x=rows, samples=2)
    assert read == []
    other = x.clone()
    other[0, 2] = NAN
    with pytest.warns(DataWarning, match=r"1 row lacks entries of x .*, which q was not"):
        model.elbo(x=other)
    assert read
    linear = factors()
    fit(linear, {"x": correlated()}, steps=2, progress=False)
    lacking = correlated()
    lacking[0, 0] = NAN
    read.clear()
    assert linear.log_evidence(x=lacking).method == "exact"
    assert read == []


def test_warnings_name_the_line_that_asked():
    model = deep(columns=2)
    x = whole_steps(model)
    x[4:6, 3, 1] = NAN
    for ask in (
        model.posterior,
        model.reconstruct,
        model.impute,
        model.elbo,
        lambda x: predictive_check(model, {"x": x}, ["mean"], replicates=20),
        lambda x: model.log_evidence(x=100 + x, samples=2),  # other units than in training
    ):
        with pytest.warns(DataWarning) as found:
            ask(x=x)
        assert [one.filename for one in found] == [__file__] * len(found)


def test_patterns_of_gaps_of_a_file_in_parts_and_of_damaged_records(tmp_path, monkeypatch):
    x = (randn(40, 3) > 0).float().numpy()
    x[2, 0] = x[39, 1] = x[39, 2] = NAN
    np.save(tmp_path / "x.npy", x)
    monkeypatch.setattr("aevb.data.sources.CHUNK", 12)
    model = binary()
    fit(model, {"x": tmp_path / "x.npy"}, steps=3)
    patterns = model.teaching.patterns
    assert patterns.apart.int().tolist() == [[0, 1, 1], [1, 0, 0], [1, 0, 0]]
    assert (patterns.throughout.tolist(), patterns.most) == ([True] * 3, 2)
    state = model.teaching.state(model)
    assert state["patterns"]["apart"] == ["011", "100", "100"]
    for damaged in (None, 3, {}, {"apart": ["011"]}, {**state["patterns"], "throughout": 3}):
        model.teaching.restore(model, {**state, "patterns": damaged})
        assert model.teaching.patterns is None


def test_gaps_that_only_a_later_part_of_a_file_has_are_on_record(tmp_path, monkeypatch):
    x = (randn(40, 3) > 0).float().numpy()
    x[39, 1] = NAN
    np.save(tmp_path / "x.npy", x)
    monkeypatch.setattr("aevb.data.sources.CHUNK", 12)
    model = binary()
    fit(model, {"x": tmp_path / "x.npy"}, steps=3)
    assert model.teaching.lacked == {"x": frozenset({1})}


def test_what_an_earlier_version_recorded_of_gaps_is_read():
    """It named the variables of which no training row lacked an entry."""
    model = binary()
    state = model.teaching.state(model)
    model.teaching.restore(model, {"untaught": {}, "open ends": False, "whole": ["x"]})
    assert model.teaching.lacked == {"x": frozenset()}
    model.teaching.restore(model, {"untaught": {}, "open ends": False, "whole": []})
    assert model.teaching.lacked == {"x": frozenset(range(3))}
    assert state["lacked"] is None
    for damaged in ({"x": 3}, {"x": {}}, {"x": {"a": 1}}, {"x": [[1]]}, {"x": [["a", "b"]]}, [1]):
        model.teaching.restore(model, {"lacked": damaged})
        assert model.teaching.lacked is None


def test_q_that_saw_complete_rows_alone_does_not_read_missing_cells_as_zeros(tmp_path):
    """Such a q imputed data around 10 by 3.8 spreads where the column's mean is off by 1.0."""
    x = (randn(40, 3) > 0).float()
    gaps = x.clone()
    gaps[3, 1] = gaps[7, 0] = NAN
    model = binary()
    fit(model, {"x": x}, steps=3, out=tmp_path / "run")
    model.save(tmp_path / "saved")
    for found in (
        model,
        load_run(tmp_path / "run"),
        load(tmp_path / "saved"),
        copy.deepcopy(model),
    ):
        assert found.posterior(x=x).method == "q"
        for ask in (found.posterior, found.reconstruct, found.impute):
            with pytest.raises(
                ValueError,
                match=r"2 rows lack entries of x \(first, from 0: row 3\), which q was not trained "
                r"on.*read a missing entry as 0",
            ):
                ask(x=gaps)
            ask(x=gaps, method="q")
    fit(model, {"x": gaps}, steps=3)
    assert model.impute(x=gaps).method == "q"
    fit(model, {"x": x}, steps=3)  # it has seen them before
    assert model.impute(x=gaps).method == "q"
    linear = factors()
    fit(linear, {"x": correlated()}, steps=3)
    lacking = correlated()
    lacking[0, 0] = NAN
    assert (linear.posterior(x=correlated()).method, linear.posterior(x=lacking).method) == (
        "q",
        "exact",
    )
    by_formula = factors({"z | x": MultivariateNormal(covariance="shared")})
    fit(by_formula, {"x": correlated()}, schedule=em(), steps=3)
    assert (
        by_formula.posterior(x=correlated()).method,
        by_formula.posterior(x=lacking).method,
    ) == ("q", "exact")


def test_after_may_ask_for_a_posterior_in_an_m_phase():
    model, x = binary(), (randn(40, 3) > 0).float()
    asked = []
    after = lambda step, model: asked.append(model.posterior(x=x).method)  # noqa: E731
    fit(
        model,
        {"x": x},
        validation={"x": x},
        steps=16,
        schedule=alternate(4, 4),
        validate_every=1,
        after=after,
    )
    assert asked == ["q"] * 16


def test_the_record_goes_with_a_state_dict(tmp_path):
    model = factors()
    fit(model, {"x": correlated()}, schedule=mle(), steps=3)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    for weights in (model.state_dict(), torch.load(tmp_path / "weights.pt")):
        other = factors().fresh(seed=1)
        other.load_state_dict(weights)
        assert other.untaught() == {"z": "mle() trains p alone"}


def test_exact_q_of_a_mixture_is_never_behind():
    model = Model(p={"y": OneHot(2, learned=True), "x | y": Normal(4)}, q={"y | x": Exact()})
    fit(model, {"x": correlated()}, schedule=mle(), steps=3)
    assert model.untaught() == {}
    assert model.posterior(x=correlated()).method == "q"


REFUSED = {
    "a frozen q": r"q\(z\|·\) was never trained",
    "M-steps alone": r"q\(z\|·\) was never trained",
    "an optimiser of p alone": r"q\(z\|·\) was never trained",
    "trained, then p set by hand": r"p was trained or set after q\(z\|·\) was",
    "hardly any E-steps": "q was trained in 1 of 21 steps",
}


@pytest.mark.parametrize("way", REFUSED)
def test_without_an_exact_posterior_it_is_refused(way):
    model, x = binary(), (randn(40, 3) > 0).float()
    WAYS[way](model, x)
    for ask in (model.posterior, model.reconstruct, model.impute):
        with pytest.raises(
            ValueError,
            match=rf"{REFUSED[way]}.*the exact posterior is not known.*schedule=joint\(\)",
        ):
            ask(x=x)
        ask(x=x, method="q")
    for parameter in model.phi():
        parameter.requires_grad_(True)
    fit(model, {"x": x}, steps=5, schedule=alternate(2, 2))
    assert model.posterior(x=x).method == "q"


def test_a_model_as_it_was_built_has_its_own_q():
    for model in (factors(), binary(), copy.deepcopy(factors()), factors().double()):
        assert model.untaught() == {}
        assert model.posterior(x=torch.zeros(2, model.graph.size("x"))).method == "q"


def test_a_latent_that_every_row_knew_has_no_trained_q():
    torch.manual_seed(0)
    model = Model(
        p={"y": OneHot(2, learned=True), "z": Normal(1), "x | y, z": Normal(4, scale="learned")},
        q={"y | x": OneHot(), "z | x, y": Normal(scale="learned")},
    )
    x, y = correlated(), torch.arange(60) % 2
    fit(model, {"x": x, "y": y}, steps=5)
    assert model.untaught() == {
        "y": "y was known in every training row, so that q(y|·) was not trained"
    }
    assert model.posterior(x=x, y=y).method == "q"
    assert model.posterior(x=x).method == "exact"
    fit(model, {"x": x, "y": y}, steps=5, classify=1)
    assert model.posterior(x=x).method == "q"


def gaussian_latent(x: torch.Tensor) -> tuple[Model, torch.Tensor]:
    return factors(), randn(len(x), 2)


def class_latent(x: torch.Tensor) -> tuple[Model, torch.Tensor]:
    return Model(
        p={"z": OneHot(2, learned=True), "x | z": Normal(4)}, q={"z | x": OneHot()}
    ), torch.arange(len(x)) % 2


def class_without_closed_form(x: torch.Tensor) -> tuple[Model, torch.Tensor]:
    return Model(
        p={"z": OneHot(2, learned=True), "x | z": Normal(4, net=mlp(4))}, q={"z | x": OneHot()}
    ), torch.arange(len(x)) % 2


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("declared", [gaussian_latent, class_latent, class_without_closed_form])
def test_em_on_rows_that_all_know_the_latent_does_not_train_q(declared, frozen):
    torch.manual_seed(0)
    x = correlated()
    model, z = declared(x)
    for parameter in model.phi():
        parameter.requires_grad_(not frozen)
    run = fit(model, {"x": x, "z": z}, schedule=em(), steps=3)
    assert set(model.untaught()) == {"z"}
    assert model.posterior(x=x).method == "exact"
    assert frozen or any(
        "z is known in every row: nothing teaches q(z|·)" in row.get("note", "") for row in run.rows
    )
    assert not any("classify" in row.get("note", "") for row in run.rows)  # which em() would refuse


def test_the_record_survives_saving_copying_and_casting(tmp_path):
    x = correlated()
    model = factors()
    run = fit(model, {"x": x}, schedule=mle(), steps=4, out=tmp_path / "run")
    reason = {"z": "mle() trains p alone"}
    assert run.model.untaught() == load_run(tmp_path / "run").untaught() == reason
    model.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    for other in (again, copy.deepcopy(model), copy.deepcopy(model).double(), again.double()):
        assert other.untaught() == reason
        assert other.posterior(x=x).method == "exact"
    trained = factors()
    fit(trained, {"x": x}, steps=4, out=tmp_path / "trained")
    trained.save(tmp_path / "saved again")
    assert (
        load_run(tmp_path / "trained").untaught() == load(tmp_path / "saved again").untaught() == {}
    )
    factors().save(tmp_path / "new")
    new = load(tmp_path / "new")
    assert new.untaught() == {}
    own_loop(new, x)
    assert list(new.untaught()) == ["z"]


def test_a_resumed_run_says_what_the_whole_run_did(tmp_path):
    x = correlated()
    fit(factors(), {"x": x}, schedule=mle(), steps=4, out=tmp_path)
    run = fit(factors(), {"x": x}, schedule=mle(), steps=8, out=tmp_path, resume=True)
    assert run.model.untaught() == {"z": "mle() trains p alone"}


def test_the_doctor_says_so():
    model, x = factors(), correlated()
    fit(model, {"x": x}, schedule=mle(), steps=4)
    findings = diagnose(model, {"x": x}, calibrate=False)
    (found,) = findings.of("q unused")
    assert found.level == "note"
    assert "mle() trains p alone" in found.text
    assert not findings.of("q behind p")  # nothing uses q: the posterior is exact


def test_an_exact_posterior_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="not known in closed form: p\\(x\\|z\\) is a Bernoulli"):
        binary().posterior(x=torch.zeros(2, 3), method="exact")
    with pytest.raises(ValueError, match='method is "auto", "q" or "exact"'):
        binary().posterior(x=torch.zeros(2, 3), method="bayes")


# The end of a sequence ----------------------------------------------------------------------------


def deep(q_reads: str = "x[t]", columns: int = 1) -> Model:
    torch.manual_seed(0)
    return Model(
        p={"z[t] | z[t-1]": Normal(1, net=mlp(4)), "x[t] | z[t]": Normal(columns)},
        q={f"z[t] | z[t-1], {q_reads}": Normal(net=mlp(4))},
    )


def test_q_does_not_forecast():
    model, x = deep(), randn(6, 5, 1)
    fit(model, {"x": x}, steps=3)
    ends, gaps = x.clone(), x.clone()
    ends[1, 3:], gaps[1, 2] = NAN, NAN
    for ask in (model.posterior, model.reconstruct, model.impute):
        with pytest.raises(
            ValueError,
            match=r"1 row ends in steps without data \(first, from 0: row 1\).*cannot "
            r"forecast.*not linear.*lengths=",
        ):
            ask(x=ends)
        ask(x=ends, lengths=[5, 3, 5, 5, 5, 5])
        ask(x=ends, method="q")
        with pytest.raises(ValueError, match=r"1 row lacks entries of x \(first, from 0: row 1\)"):
            ask(x=gaps)
    ends[2, 1] = NAN
    both = (
        r"1 row ends in steps without data \(first, from 0: row 1\).*; 1 row lacks entries of x "
        r"\(first, from 0: row 2\).*lengths=…\. Train on rows with missing entries too \(NaN\)"
    )
    forecast = partial(model.forecast, steps=2)
    for ask in (model.impute, model.filter, model.smooth, forecast):
        with pytest.raises(ValueError, match=both):
            ask(x=ends)
    ends[2, 1] = 0.0
    fit(model, {"x": gaps}, steps=3)
    assert model.posterior(x=gaps).method == "q"
    with pytest.raises(ValueError, match="cannot forecast"):
        model.posterior(x=ends)
    trained = deep()
    fit(trained, {"x": ends}, steps=3)  # q has learned from such rows
    assert trained.posterior(x=ends).method == "q"


def test_a_linear_model_forecasts_exactly_though_its_q_is_trained():
    torch.manual_seed(0)
    p = {
        "z[0]": Normal(1, learned=True),
        "z[t] | z[t-1]": Normal(1, scale=0.5),
        "x[t] | z[t]": Normal(1, scale=0.3),
    }
    model = Model(p, q={"z[t] | z[t-1], x[t]": Normal(scale="learned")})
    fit(model, {"x": randn(20, 6, 1)}, steps=3)
    x = randn(3, 6, 1)
    assert model.posterior(x=x).method == "q"
    x[:, 4:] = NAN
    found = model.impute(x=x)
    assert found.method == model.posterior(x=x).method == "exact"
    with torch.no_grad():
        blocks = {
            name: model.factors[name].net.blocks for name in ("p(z[t]|z[t-1])", "p(x[t]|z[t])")
        }
        a, c = (next(iter(part.weights.values())).squeeze() for part in blocks.values())
        b, d = (part.bias.squeeze() for part in blocks.values())
        last = model.posterior(x=x[:, :4], method="exact")["z"]
        mean, variance = last.mean[:, 3, 0], last.variance[:, 3, 0]
        for t in (4, 5):
            mean, variance = a * mean + b, a**2 * variance + 0.25
            assert torch.allclose(found.mean["x"][:, t, 0], c * mean + d, atol=1e-5)
            assert torch.allclose(
                found.sd["x"][:, t, 0], (c**2 * variance + 0.09).sqrt(), atol=1e-5
            )
    assert (found.sd["x"][:, 5] > found.sd["x"][:, 4]).all() or float(a.abs()) < 1


RESULTS = {
    "forecast": lambda model, x: model.forecast(steps=1, x=x, seed=0),
    "filter": lambda model, x: model.filter(x=x, seed=0),
    "smooth": lambda model, x: model.smooth(x=x, seed=0),
    "impute": lambda model, x: model.impute(x=x, seed=0),
    "log_evidence": lambda model, x: model.log_evidence(x=x, seed=0),
}


@pytest.mark.parametrize("call", RESULTS)
def test_results_of_initial_weights_say_so(call):
    x = torch.randn(1, 20, 1, generator=torch.Generator().manual_seed(0)).double()
    x[0, 3] = torch.nan
    model = zoo.local_level(seed=0).double()
    assert RESULTS[call](model, x).notes == (UNTRAINED,)
    assert repr(RESULTS[call](model, x)).endswith("\n" + UNTRAINED)
    with torch.no_grad():
        model.factors["p(x[t]|level[t])"].vectors["scale"].fill_(0.3)
    assert RESULTS[call](model, x).notes == ()
    fitted = zoo.local_level(seed=0).double()
    fit(fitted, {"x": x}, steps=2, progress=False)
    assert RESULTS[call](fitted, x).notes == ()


def test_a_model_without_parameters_needs_no_training():
    walk = Normal(1, net=linear(bias=False, fixed={"level[t-1]": 1}), scale=1.0)
    seen = Normal(1, net=linear(bias=False, fixed={"level[t]": 1}), scale=1.0)
    p = {"level[t] | level[t-1]": walk, "x[t] | level[t]": seen}
    model = Model(p, {"level[t] | x[t]": Normal()})
    assert model.forecast(steps=1, x=torch.zeros(1, 5, 1)).notes == ()
