"""Training: the loop does what it says, and refuses what it cannot do well."""

import json
import signal
import tomllib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from sklearn.decomposition import FactorAnalysis
from small_runs import across, assert_equal_weights, bits, small_vae, weights
from torch import nn

from aevb import (
    Bernoulli,
    Exact,
    Model,
    Network,
    Normal,
    OneHot,
    Poisson,
    diagnose,
    fit,
    linear,
    mlp,
)
from aevb.data.builtin import factor_analysis
from aevb.data.preparation import Affine
from aevb.data.sources import Mapped, Resident, open_source
from aevb.training import loop
from aevb.training.checkpoint import folders, latest
from aevb.training.evaluation import evaluate
from aevb.training.fit import TrainingError
from aevb.training.row_order import Order, seed_of
from aevb.training.run_folder import Folder
from aevb.training.schedules import alternate, em, joint, mle
from aevb.training.settings import Settings
from aevb.zoo import fa, gmvae, vae

# The loop -----------------------------------------------------------------------------------------


def test_every_epoch_visits_every_row_once_and_batches_have_one_size():
    order = Order(10, 4, seed=3)
    rows = torch.cat([order.rows(step) for step in range(10)])
    assert {len(order.rows(step)) for step in range(10)} == {4}
    for epoch in range(4):
        assert sorted(rows[10 * epoch : 10 * epoch + 10].tolist()) == list(range(10))
    again = Order(10, 4, seed=3)
    assert torch.equal(
        torch.cat([again.rows(step) for step in reversed(range(10))]),
        torch.cat([order.rows(s) for s in reversed(range(10))]),
    )
    assert not torch.equal(Order(10, 4, seed=4).rows(0), order.rows(0))


def test_training_raises_the_bound_and_records_it(tmp_path):
    model, x = small_vae(), bits()
    run = fit(
        model, {"x": x}, validation={"x": x}, epochs=30, batch=30, lr=1e-2, out=tmp_path / "run"
    )
    history = run.history
    assert history["validation elbo"][-1] > history["validation elbo"][0] + 0.05
    assert run.step == 90
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows == run.rows
    recorded = [row for row in rows if "elbo" in row]
    assert all(abs(row["elbo"] - row["x"] + row["kl(z)"]) < 1e-4 for row in recorded)
    assert (tmp_path / "run" / "model.json").is_file()
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["lr"] == 1e-2
    assert config["schedule"] == {"name": "joint"}
    run.plot(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    found = []
    for seed in (0, 0, 1):
        model = small_vae()
        fit(model, {"x": bits()}, steps=20, seed=seed)
        found.append(weights(model))
    assert_equal_weights(found[0], found[1])
    assert any(not torch.equal(tensor, found[2][name]) for name, tensor in found[0].items())


def test_an_e_phase_moves_only_phi_and_an_m_phase_only_theta():
    model, x = fa(), factor_analysis(200)
    before = weights(model)
    fit(model, {"x": x}, steps=30, batch=32, lr=0.05, schedule=alternate(30, 30))
    middle = weights(model)
    for name in before:
        assert torch.equal(before[name], middle[name]) == name.startswith("factors.p("), name
    fit(model, {"x": x}, steps=60, batch=32, lr=0.05, schedule=alternate(1, 59))
    after = weights(model)
    assert all(
        not torch.equal(middle[name], after[name])
        for name in before
        if name.startswith("factors.p(")
    )


def test_in_an_e_phase_the_evidence_stands_still_while_the_bound_rises_to_it():
    torch.manual_seed(0)
    model, x = fa(), factor_analysis(500)
    run = fit(
        model,
        {"x": x},
        validation={"x": x},
        steps=1000,
        batch=50,
        lr=0.1,
        schedule=alternate(1000, 1000),
        validate_every=100,
    )
    evidence, bound = run.history["validation evidence"], run.history["validation elbo"]
    assert np.ptp(evidence) == 0
    assert bound[0] < bound[-1] <= evidence[-1] + 0.1  # a sampled bound: 0.03 nats of noise
    assert evidence[-1] - bound[-1] < 0.1


def test_direct_ascent_reaches_the_maximum_of_the_evidence():
    torch.manual_seed(0)
    data = factor_analysis(400)
    data -= data.mean(0)  # the model has no bias
    model = fa().double()
    fit(model, {"x": data}, steps=800, batch=400, lr=0.1, schedule=mle())
    best = FactorAnalysis(2, tol=1e-10, max_iter=10_000, svd_method="lapack").fit(data).score(data)
    assert abs(model.log_evidence(x=data).value.mean().item() - best) < 1e-3


def test_labels_known_for_some_rows_train_with_one_plan():
    y = np.where(np.arange(60) % 4 == 0, np.arange(60) % 3, -1)
    model = gmvae(x=6, z=2, y=3, hidden=(8,))
    run = fit(model, {"x": bits(60), "y": y}, steps=20, batch=7, classify=1.0)
    assert run.step == 20
    assert all(np.isfinite(values).all() for values in run.history.values())


def test_early_stopping_gives_back_the_best_weights():
    model = small_vae()
    run = fit(
        model,
        {"x": bits(20)},
        validation={"x": bits(50)[20:]},
        epochs=400,
        batch=20,
        lr=0.05,
        patience=3,
        decay="constant",
    )
    values = run.history["validation elbo"]
    assert run.step < 400
    assert len(values) - 1 - int(values.argmax()) == 3
    found = evaluate(
        model, Resident(model.graph, {"x": bits(50)[20:]}, model._parameter()), seed=0
    )["elbo"]
    assert abs(found - values.max()) < 1e-5


# Trouble ------------------------------------------------------------------------------------------


def test_a_non_finite_loss_takes_no_step_and_names_step_rows_and_factor(tmp_path, monkeypatch):
    model = small_vae()
    take = loop.Training._take_step
    seen = {}

    def poisoned(self, phase):
        if self.step == 12:
            seen["before"] = weights(self.model)
            with torch.no_grad():
                self.model.factors["p(x|z)"].net.heads.bias[2] = float("nan")
        return take(self, phase)

    monkeypatch.setattr(loop.Training, "_take_step", poisoned)
    with pytest.raises(
        TrainingError,
        match=r"Step 12: the term x \(p's factor p\(x\|z\)\) is not finite for rows .*\. The "
        r"parameters of p\(x\|z\) are not finite\. No step was taken\. The last good",
    ) as error:
        fit(model, {"x": bits()}, steps=30, batch=20, checkpoint_every=10, out=tmp_path)
    assert "step-10" in str(error.value)
    changed = [
        name
        for name, tensor in seen["before"].items()
        if not torch.equal(tensor, model.state_dict()[name])
    ]
    assert changed == ["factors.p(x|z).net.heads.bias"]  # only the poison


@pytest.mark.parametrize(
    "settings", [{}, {"skip": 3}, {"schedule": mle()}], ids=["bound", "skip", "evidence"]
)
def test_one_step_that_is_far_too_long_is_no_success(tmp_path, settings):
    model = fa(6, 2) if "schedule" in settings else small_vae()
    with pytest.raises(
        TrainingError,
        match=r"^After step 0, .* The weights are of no use and were not saved\. Use a lower lr "
        r"\(it was 1e\+38\)",
    ):
        fit(model, {"x": bits()}, steps=1, batch=20, lr=1e38, out=tmp_path, **settings)
    assert folders(tmp_path) == []


def test_weights_that_a_step_has_ruined_are_not_saved(tmp_path, monkeypatch):
    take = loop.Training._take_step

    def too_far(self, phase):
        take(self, phase)
        if self.step == 19:
            with torch.no_grad():
                self.model.factors["p(x|z)"].net.heads.bias.fill_(-3e38)  # finite, but no bound is

    with monkeypatch.context() as during:
        during.setattr(loop.Training, "_take_step", too_far)
        with pytest.raises(
            TrainingError,
            match=r"^After step 19, the term x .* not saved\. The last good checkpoint is "
            r".*step-10\.",
        ):
            fit(small_vae(), {"x": bits()}, steps=30, batch=20, checkpoint_every=10, out=tmp_path)
    assert [path.name for path in folders(tmp_path)] == ["step-10"]
    resumed = small_vae()
    fit(resumed, {"x": bits()}, steps=30, batch=20, checkpoint_every=10, out=tmp_path, resume=True)
    whole = small_vae()
    fit(whole, {"x": bits()}, steps=30, batch=20, checkpoint_every=10)
    assert_equal_weights(weights(whole), weights(resumed))
    found = latest(tmp_path)
    assert found is not None
    assert all(tensor.isfinite().all() for tensor in found.weights.values())


def test_some_bad_batches_may_be_skipped(monkeypatch):
    take = loop.Training._take_step
    once = []

    def poisoned(self, phase):
        bias = self.model.factors["p(x|z)"].net.heads.bias
        kept = bias.detach().clone()
        if self.step in (3, 5):
            with torch.no_grad():
                bias[0] = float("inf")
        result = take(self, phase)
        if self.step in (3, 5):
            once.append(result)
            with torch.no_grad():
                bias.copy_(kept)
        return result

    monkeypatch.setattr(loop.Training, "_take_step", poisoned)
    run = fit(small_vae(), {"x": bits()}, steps=10, skip=2)
    assert once == [None, None]
    assert [row["note"][:7] for row in run.rows if "note" in row] == ["Step 3:", "Step 5:"]
    with pytest.raises(TrainingError, match="Step 5"):
        fit(small_vae(), {"x": bits()}, steps=10, skip=1)


WRONG = [
    ({"epochs": 1, "steps": 1}, "Pass epochs= or steps=, not both"),
    ({"steps": 10, "kl_warmup": 10}, "kl_warmup=10 does not end before training does"),
    ({"steps": 10, "warmup": 11}, "warmup=11 does not end before training does"),
    ({"patience": 3}, "pass validation= data"),
    ({"classify": 1.0}, "the data have labels for no discrete latent"),
    ({"schedule": mle()}, r"mle\(\) ascends the exact evidence, which is not known for this model"),
    ({"decay": "linear"}, 'decay is "cosine" or "constant"'),
    ({"batch": 0}, "batch is a whole number, 1 or more"),
    ({"lr": -1.0}, "lr is a positive number"),
    ({"how": {"z": "closed"}, "bound": "iwae", "samples": 2}, "it would be no bound"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[str(s) for s, _ in WRONG])
def test_settings_that_cannot_work_are_refused_before_the_first_step(settings, message):
    with pytest.raises(ValueError, match=message):
        fit(small_vae(), {"x": bits()}, **settings)


def test_unknown_settings_and_untrainable_plans_are_refused():
    with pytest.raises(TypeError, match="fit has no setting 'learning_rate'"):
        fit(small_vae(), {"x": bits()}, learning_rate=1e-3)
    with pytest.raises(
        ValueError, match="cancels q\\(y\\) from the bound, so it cannot be trained"
    ):
        fit(gmvae(x=6, z=2, y=3, hidden=(4,)), {"x": bits()}, bound="iwae", how={"y": "sum"})
    with pytest.raises(ValueError, match="alternate takes positive numbers"):
        alternate(0, 5)


# Data ---------------------------------------------------------------------------------------------


def test_memory_mapped_rows_train_as_rows_in_memory_do(tmp_path):
    x = bits(5000)
    x[7, 2] = np.nan
    np.save(tmp_path / "x.npy", x)
    models = [small_vae(), small_vae()]
    fit(models[0], {"x": x}, steps=10)
    fit(models[1], {"x": tmp_path / "x.npy"}, steps=10)
    assert_equal_weights(weights(models[0]), weights(models[1]))
    source = Mapped(
        models[0].graph, {"x": np.load(tmp_path / "x.npy", mmap_mode="r")}, models[0]._parameter()
    )
    rows = torch.tensor([9, 2, 4000, 2])
    taken = source.take(rows)
    assert torch.equal(taken["x"][0], torch.as_tensor(np.nan_to_num(x[rows])))
    x[4500, 1] = 3.0
    np.save(tmp_path / "bad.npy", x)
    with pytest.raises(ValueError, match=r"first, from 0: row 4500, column 1: 3\.0"):
        fit(small_vae(), {"x": tmp_path / "bad.npy"}, steps=10)


def test_files_and_datasets_give_the_same_rows_as_arrays(tmp_path):
    x = bits(40)
    np.savez(tmp_path / "data.npz", x=x)
    np.savetxt(tmp_path / "data.csv", x, delimiter=",", header="a,b,c,d,e,f", comments="")

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, i):
            return x[i]

    found = []
    for data in (
        {"x": x},
        x,
        tmp_path / "data.npz",
        tmp_path / "data.csv",
        Rows(),
        torch.utils.data.DataLoader(Rows(), batch_size=7),
    ):
        model = small_vae()
        fit(model, data, steps=5)
        found.append(weights(model))
    for other in found[1:]:
        assert_equal_weights(found[0], other)


BAD_FILES = [
    ("missing.csv", None, "There is no file"),
    ("empty.csv", "", "it is empty"),
    ("words.csv", "a,b\n1,2\n3,x\n", "line 3, column 'b' holds 'x', not a number"),
    ("ragged.csv", "1,2\n3\n", "line 2 has 1 cells, the first has 2"),
    ("data.xlsx", "x", "use .npy, .npz, .csv or .parquet"),
    ("broken.npy", "not numpy", "cannot be read"),
]


@pytest.mark.parametrize(
    ("name", "content", "message"), BAD_FILES, ids=[name for name, _, _ in BAD_FILES]
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        fit(small_vae(), tmp_path / name, steps=1)


def test_empty_cells_of_a_table_are_missing_entries(tmp_path):
    (tmp_path / "x.csv").write_text("1,0,,1,0,1\n0,1,1,,0,0\n")
    model = small_vae()
    source = open_source(model.graph, tmp_path / "x.csv", model._parameter())
    assert isinstance(source, Resident)
    assert source.batch["x?"][0].tolist() == [
        [True, True, False, True, True, True],
        [True, True, True, False, True, True],
    ]


def test_data_by_position_need_a_single_variable():
    model = Model(
        p={"z": Normal(2), "x | z, u": Normal(3)}, q={"z | x": Normal(net=linear())}, given={"u": 1}
    )
    with pytest.raises(ValueError, match="Pass the data by name: {'x': …, 'u': …}"):
        fit(model, np.zeros((3, 3)), steps=1)
    with pytest.raises(ValueError, match="The data are empty"):
        fit(small_vae(), {}, steps=1)


def test_one_row_and_a_batch_larger_than_the_data_work():
    run = fit(small_vae(), {"x": bits(1)}, steps=3, batch=100)
    assert run.step == 3
    labels = Model(p={"y": OneHot(2), "x | y": Normal(1)}, q={"y | x": OneHot(net=linear())})
    assert fit(labels, {"x": np.arange(5.0)[:, None]}, epochs=2, batch=100).step == 2


# What was found by looking ------------------------------------------------------------------------


SILLY = [
    {"warmup": -3},
    {"kl_warmup": -3},
    {"clip": 0},
    {"clip": -1.0},
    {"clip": float("nan")},
    {"patience": 0},
    {"epochs": 0},
    {"epochs": -1},
    {"steps": 0},
    {"steps": 10.5},
    {"lr": True},
    {"temperature": -1.0},
    {"skip": -1},
    {"log_every": 1.5},
    {"seed": -1},
    {"seed": 1.5},
    {"schedule": "alternate"},
    {"schedule": alternate},
    {"how": "gumbel"},
    {"how": None},
    {"steps": "10"},
    {"lr": "0.1"},
    {"lr": float("inf")},
    {"classify": -1.0},
    {"validate_every": 0},
    {"samples": 0},
]


@pytest.mark.parametrize("settings", SILLY, ids=str)
def test_settings_that_make_no_sense_are_named(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"^{name} is "):
        Settings(**settings)


def test_numpys_numbers_are_numbers(tmp_path):
    run = fit(
        small_vae(),
        {"x": bits()},
        steps=np.int64(3),
        lr=np.float32(0.01),
        seed=np.int64(3),
        out=tmp_path,
    )
    assert run.step == 3
    assert tomllib.loads((tmp_path / "config.toml").read_text())["steps"] == 3


def test_frozen_parameters_stay_and_a_phase_without_any_is_refused():
    model = small_vae()
    for parameter in model.theta():
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in model.theta()]
    fit(model, {"x": bits()}, steps=5)
    assert all(torch.equal(a, b) for a, b in zip(before, model.theta(), strict=True))
    with pytest.raises(ValueError, match="nothing to train in phase M: p has no free parameters"):
        fit(model, {"x": bits()}, steps=40, schedule=alternate(10, 10))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train in phase joint"):
        fit(model, {"x": bits()}, steps=5)


def test_a_gradient_that_is_not_finite_names_its_parameter(monkeypatch):
    model = small_vae()
    bias = model.factors["p(x|z)"].net.heads.bias
    bias.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(
        TrainingError,
        match=r"Step 0: the gradient of factors\.p\(x\|z\)\.net\.heads\.bias is not finite for "
        r"rows .*\(100 rows\)",
    ):
        fit(model, {"x": bits(100)}, steps=5)


@pytest.mark.parametrize("schedule", [joint(), alternate(2, 2)])
def test_gradients_that_were_there_before_move_nothing(schedule):
    found = []
    for leftover in (False, True):
        model = small_vae()
        model.theta()[0].requires_grad_(False)
        if leftover:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        fit(model, {"x": bits()}, steps=6, schedule=schedule, seed=0)
        found.append(weights(model))
    assert_equal_weights(*found)


def test_a_seed_is_a_number_however_it_is_written():
    assert (
        seed_of(np.int64(3), "noise", torch.tensor(4))
        == seed_of(3, "noise", 4)
        != seed_of(4, "noise", 3)
    )
    assert seed_of(1, "a") != seed_of(1, "b")
    assert 0 <= seed_of(0) < 2**63


def test_weights_that_are_not_finite_are_refused_before_the_first_step():
    model = small_vae()
    with torch.no_grad():
        model.factors["p(x|z)"].net.blocks.bias[3] = torch.nan
    with pytest.raises(
        ValueError,
        match=r"The parameter factors\.p\(x\|z\)\.net\.blocks\.bias holds numbers that are not "
        r"finite",
    ):
        fit(model, {"x": bits()}, steps=3)


class Transposing(nn.Module):
    """A layer of one's own whose gradient does not lie as its weight does."""

    def __init__(self, parents, heads, *, copied):
        super().__init__()
        self.weight, self.copied = (
            nn.Parameter(torch.linspace(-1, 1, parents * heads).reshape(heads, parents)),
            copied,
        )

    def first(self, inputs, *, bias=True, missing=None):
        (x,) = inputs.values()
        y = torch.einsum("...d,kd->...k", x, self.weight)
        if y.requires_grad and self.copied:
            self.weight.register_hook(lambda gradient: gradient.contiguous())
        return y

    def rest(self, h, keep=()):
        return h


@dataclass(frozen=True, repr=False)
class transposing(Network):
    copied: bool

    def build(self, parents, heads, shape, masked):
        return Transposing(
            sum(sum(shape) for shape in parents.values()), sum(heads), copied=self.copied
        )


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_gradient_that_lies_otherwise_than_its_parameter_moves_it_as_any_other(clip):
    found = []
    for copied in (False, True):
        torch.manual_seed(0)
        model = Model(
            {"z": Normal(2), "x | z": Bernoulli(6)}, {"z | x": Normal(net=transposing(copied))}
        )
        fit(model, bits(), steps=12, batch=10, lr=0.05, clip=clip, seed=0)
        found.append(weights(model))
    assert_equal_weights(*found)


def test_the_recorded_bound_is_the_bound_while_the_kl_warms_up():
    run = fit(small_vae(), {"x": bits()}, steps=10, kl_warmup=8, log_every=1)
    history = run.history
    np.testing.assert_allclose(history["elbo"], history["x"] - history["kl(z)"], atol=1e-5)
    np.testing.assert_allclose(history["kl weight"], np.minimum(1, np.arange(1, 11) / 8))


@pytest.mark.parametrize("gradient", ["plain", "dreg"])
def test_the_recorded_iwae_is_the_bound_while_the_kl_warms_up(gradient):
    choices = {
        "steps": 4,
        "bound": "iwae",
        "samples": 3,
        "gradient": gradient,
        "log_every": 1,
        "lr": 1e-12,
    }
    plain, weighted = (
        fit(small_vae(), {"x": bits()}, kl_warmup=warmup, **choices).history["iwae"]
        for warmup in (0, 3)
    )
    np.testing.assert_allclose(plain, weighted, rtol=1e-5)


def test_warm_up_is_over_once_though_phases_are_short():
    run = fit(
        small_vae(),
        {"x": bits()},
        steps=40,
        warmup=20,
        schedule=alternate(5, 5),
        decay="constant",
        lr=1e-3,
        log_every=1,
    )
    np.testing.assert_allclose(run.history["lr"], 1e-3 * np.minimum(1, np.arange(1, 41) / 20))


def test_validation_is_of_the_bound_that_is_trained():
    model = small_vae()
    run = fit(model, {"x": bits()}, validation={"x": bits()}, steps=10, bound="iwae", samples=4)
    assert "validation iwae" in run.history
    assert run.best is not None
    assert run.best.value == pytest.approx(max(run.history["validation iwae"]))
    counts = Model(p={"k": Poisson(1), "x | k": Normal(2)}, q={"k | x": Poisson()})
    fit(
        counts,
        {"x": np.random.default_rng(0).normal(size=(20, 2))},
        validation={"x": np.zeros((4, 2))},
        steps=4,
        samples=2,
        how={"k": "score"},
    )


def test_padding_teaches_nothing():
    random = np.random.default_rng(0)
    x = random.normal(size=(20, 2, 1))
    y = random.integers(2, size=(20, 2, 1)).astype(float)

    def trained(extra):
        torch.manual_seed(0)
        model = Model(
            p={"y[t]": Bernoulli(1), "x[t] | y[t]": Normal(1)}, q={"y[t] | x[t]": Bernoulli()}
        ).double()
        data = {
            name: np.pad(value, ((0, 0), (0, extra), (0, 0)), constant_values=1)
            for name, value in (("x", x), ("y", y))
        }
        fit(model, data | {"lengths": np.full(20, 2)}, steps=20, batch=20, classify=5.0)
        return model

    for a, b in zip(
        trained(0).state_dict().values(), trained(3).state_dict().values(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_the_model_is_left_as_it_was_when_training_stops(tmp_path):
    model = small_vae().eval()

    def stop(step, model):
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt, match="stopped after step"):
        fit(
            model,
            {"x": bits()},
            validation={"x": bits()},
            steps=50,
            validate_every=5,
            after=stop,
            out=tmp_path,
        )
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert latest(tmp_path).step >= 5
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_checkpoints_of_small_data_do_not_take_longer_than_training(tmp_path, monkeypatch):
    written = []
    real = Folder.save
    monkeypatch.setattr(
        Folder,
        "save",
        lambda self, checkpoint, keep: (
            written.append(checkpoint.step),
            real(self, checkpoint, keep),
        ),
    )
    fit(small_vae(), {"x": bits(20)}, validation={"x": bits(20)}, steps=200, batch=20, out=tmp_path)
    assert len(written) <= 4  # the best and the last, however often it was validated
    assert written[-1] == 200


@pytest.mark.parametrize("seed", [0, 1])
def test_the_defaults_alone_give_a_good_model(seed):
    train, test = factor_analysis(seed=0), factor_analysis(seed=1)
    torch.manual_seed(seed)
    model = fa()
    run = fit(model, {"x": train}, seed=seed)
    best = FactorAnalysis(2, tol=1e-10, svd_method="lapack").fit(train).score(test)
    assert run.settings.lr == 0.05
    assert float(model.log_evidence(x=test).value.mean()) > best - 0.02


def test_what_after_returns_is_recorded():
    run = fit(
        small_vae(),
        {"x": bits()},
        validation={"x": bits()},
        steps=20,
        validate_every=5,
        after=lambda step, model: {"twice": 2.0 * step},
    )
    np.testing.assert_array_equal(run.history["twice"], [10, 20, 30, 40])


def test_after_may_change_weights_but_not_how_they_lie():
    def changed(how):
        return fit(
            small_vae(),
            {"x": bits()},
            validation={"x": bits()},
            steps=20,
            validate_every=5,
            after=torch.no_grad()(how),
        ).model

    def scaled(step, model):
        for parameter in model.parameters():
            parameter.mul_(0.9)

    def loaded(step, model):
        model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})

    assert_equal_weights(weights(changed(scaled)), weights(changed(loaded)))
    with pytest.raises(
        TrainingError,
        match=r"after= put another tensor in the place of factors\..*weight.* at step 5",
    ):
        changed(lambda step, model: across(model) and None)
    with pytest.raises(TrainingError, match=r"after= froze factors\.p\(x\|z\)\..* at step 5"):
        changed(lambda step, model: model.factors["p(x|z)"].requires_grad_(False) and None)


def test_one_parameter_under_two_names_is_refused():
    model = Model(
        p={"z": Normal(2), "v | z": Bernoulli(3), "x | z": Bernoulli(3)}, q={"z | x, v": Normal()}
    )
    model.factors["p(v|z)"].net.blocks = model.factors["p(x|z)"].net.blocks
    with pytest.raises(
        ValueError, match=r"factors\.p\(.*bias and factors\.p\(.*bias are one parameter"
    ):
        fit(model, {"x": bits(d=3), "v": bits(d=3)}, steps=2)


def mixture(**choices) -> Model:
    torch.manual_seed(0)
    return Model(p={"y": OneHot(3), "x | y": Bernoulli(6)}, q={"y | x": OneHot(**choices)})


def test_a_latent_that_every_row_knows_leaves_q_untaught_and_the_run_says_so():
    rows = {"x": bits(), "y": np.arange(90) % 3}
    model = mixture()
    before = weights(model)
    run = fit(model, rows, steps=5)
    assert [row["note"].partition(":")[0] for row in run.rows if "note" in row] == [
        "y is known in every row"
    ]
    assert {name for name, value in weights(model).items() if torch.equal(value, before[name])} == {
        n for n in before if "q(y|x)" in n
    }
    found = diagnose(model, rows, run=run, calibrate=False)
    remedy = (
        "To train q(y|·) too, add classify=1 (--classify 1); to infer y without labels, leave y "
        "out of the data."
    )
    assert [(finding.about, finding.remedy) for finding in found.of("untaught q")] == [
        ("y", remedy)
    ]
    assert [(finding.about, finding.remedy) for finding in found.of("collapse")] == [("y", remedy)]
    for taught in ({"classify": 1.0}, {"schedule": alternate(2, 2), "classify": 1.0}):
        assert not [row for row in fit(mixture(), rows, steps=5, **taught).rows if "note" in row]
    some = rows | {"y": np.where(np.arange(90) < 9, -1, rows["y"])}
    (note,) = [row["note"] for row in fit(mixture(), some, steps=5).rows if "note" in row]
    assert note.startswith("y is known in some rows")
    assert "add classify=1" in note


def test_advice_on_what_nothing_teaches_is_advice_that_works():
    """classify= is for classes that q reads off the data; agree= has the labels among its targets,
    and so teaches them.
    """

    def notes(model, **more):
        choices = {name: more.pop(name) for name in ("agree", "distort") if name in more}
        return [
            row["note"].partition("|·). ")[2]
            for row in fit(model, {"x": bits(), **more}, steps=3, **choices).rows
            if "note" in row
        ]

    code = Model(p={"z": Normal(2), "x | z": Bernoulli(6)}, q={"z | x": Normal()})
    assert notes(code, z=np.zeros((90, 2))) == [
        "To infer z without labels, leave z out of the data."
    ]
    after = Model(
        p={"z": Normal(2), "y": OneHot(3), "x | y, z": Bernoulli(6)},
        q={"z | x": Normal(), "y | x, z": OneHot()},
    )
    assert notes(after, y=np.arange(90) % 3) == [
        "To infer y without labels, leave y out of the data."
    ]
    assert notes(mixture(), y=np.arange(90) % 3, agree=1.0, distort={"x": Affine((2, 3))}) == []


def test_seeds_are_refused_where_a_fresh_model_would_lack_something():
    model = small_vae()
    model.factors["p(x|z)"].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"seeds= trains fresh models .*p\(x\|z\) has a hook"):
        fit(model, {"x": bits()}, steps=2, seeds=2)
    model = small_vae()
    nn.utils.parametrizations.weight_norm(model.factors["p(x|z)"].net.heads)
    with pytest.raises(
        ValueError, match=r"seeds= trains fresh models .*(parametrization|ParametrizedLinear)"
    ):
        fit(model, {"x": bits()}, steps=2, seeds=2)
    with pytest.raises(
        ValueError,
        match=r"has a parameter .*parametrizations.* that its declaration does not create",
    ):
        model.fresh(0)


@pytest.mark.parametrize(
    ("idle", "value"), [("bound", "iwae"), ("samples", 3), ("kl_warmup", 2), ("temperature", 0.7)]
)
@pytest.mark.parametrize("schedule", [em(), mle()], ids=str)
def test_what_exact_answers_would_not_use_is_refused(schedule, idle, value):
    with pytest.raises(
        ValueError,
        match=rf"^{idle}= configures q or the estimate of the bound, but "
        rf"{type(schedule).__name__}\(",
    ):
        fit(
            fa(),
            {"x": np.random.default_rng(0).normal(size=(20, 3))},
            steps=5,
            schedule=schedule,
            **{idle: value},
        )


@pytest.mark.parametrize("schedule", [em(), mle()], ids=str)
def test_exact_answers_teach_no_q(schedule):
    with pytest.raises(ValueError, match=r"^classify= configures q"):
        fit(
            mixture(),
            {"x": bits(), "y": np.arange(90) % 3},
            steps=2,
            schedule=schedule,
            classify=1.0,
        )


def test_what_is_exact_is_not_trained_to_classify():
    model = Model(p={"y": OneHot(3, learned=True), "x | y": Bernoulli(6)}, q={"y | x": Exact()})
    with pytest.raises(ValueError, match=r"classify= trains q\(y\|·\), but q\(y\|·\) is Exact\(\)"):
        fit(model, {"x": bits(), "y": np.arange(90) % 3}, steps=2, classify=1.0)


def test_counts_in_the_thousands_are_read_by_their_logarithms():
    random = np.random.default_rng(0)
    counts = random.poisson(random.gamma(1, 1, (200, 3)) @ random.gamma(0.5, 3, (3, 12)) * 60)
    assert counts.max() > 1000
    net = mlp(32)
    model = Model(p={"z": Normal(3), "x | z": Poisson(12, net=net)}, q={"z | x": Normal(net=net)})
    with pytest.raises(
        TrainingError, match=r"Nothing has been learned yet.*x is large.*mlp\(…, log=True\)"
    ):
        fit(model, {"x": counts}, steps=5)
    torch.manual_seed(0)
    run = fit(vae(12, 3, hidden=(32,), likelihood="Poisson", dropout=0.0), {"x": counts}, steps=300)
    assert run.history["elbo"][-1] > 0.1 * run.history["elbo"][0]


def test_half_precision_of_a_model_in_double_is_refused():
    with pytest.raises(ValueError, match='precision="bf16" .* the model is in float64'):
        fit(small_vae().double(), {"x": bits()}, steps=2, precision="bf16")


def test_a_skipped_last_step_still_ends_the_run_properly(tmp_path, monkeypatch):
    take = loop.Training._take_step

    def poisoned(self, phase):
        bias = self.model.factors["p(x|z)"].net.heads.bias
        kept = bias.detach().clone()
        with torch.no_grad():
            bias[0] = float("inf") if self.step == 9 else bias[0]
        take(self, phase)
        with torch.no_grad():
            bias.copy_(kept) if self.step == 9 else None

    monkeypatch.setattr(loop.Training, "_take_step", poisoned)
    run = fit(small_vae(), {"x": bits()}, validation={"x": bits()}, steps=10, skip=1, out=tmp_path)
    assert run.history["validation elbo.step"][-1] == 10
    assert latest(tmp_path).step == 10
