"""Rows in another form than the training rows: other columns, or grey levels, are refused."""

import re

import numpy as np
import pytest
import torch

import aevb
from aevb import Model, Normal, fit, predictive_check
from aevb.cli.data_argument import batches
from aevb.data.datasets import load
from aevb.runtime.checked_files import DataWarning

pd = pytest.importorskip("pandas")
RNG = np.random.default_rng(0)
ORDER = (
    "x has the columns 'c', 'b', 'a', but the model was trained on 'a', 'b', 'c', in this order. "
    "Select these columns: frame[['a', 'b', 'c']]. An array is read by position: frame.to_numpy()."
)


def table(**columns):
    return pd.DataFrame(columns or {name: RNG.normal(size=20) for name in "abc"})


def trained(data, x, **settings):
    model = Model({"z": Normal(1), "x | z": Normal(x)}, {"z | x": Normal()}, seed=0)
    fit(model, data, steps=2, progress=False, **settings)
    return model


def series(frame):
    p = {"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(3)}
    model = Model(p, {"z[t] | x[t]": Normal()}, seed=0)
    fit(model, {"x": frame}, steps=2, progress=False)
    return model


@pytest.mark.parametrize("make", [lambda x: trained(x, 3), series], ids=["rows", "sequences"])
def test_columns_in_another_order_are_refused(make, tmp_path):
    frame = table()
    model, other = make(frame), frame[["c", "b", "a"]]
    model.save(tmp_path)
    for one in (model, aevb.load(tmp_path)):
        for call in (one.elbo, one.log_evidence, one.posterior, one.impute):
            with pytest.raises(ValueError, match=f"^{re.escape(ORDER)}$"):
                call(x=other)
    assert model.elbo(x=frame, seed=0).value.equal(model.elbo(x=other[list("abc")], seed=0).value)


def test_other_names_are_refused_and_arrays_are_not():
    frame = table()
    model = trained({"x": frame}, 3)
    with pytest.raises(ValueError, match=r"^x has the columns 'q', 'b', 'c', but .* 'c'\. Select"):
        model.elbo(x=frame.rename(columns={"a": "q"}))
    values = frame[["c", "b", "a"]].to_numpy()
    assert model.elbo(x=values).value.shape == (20,)
    assert trained({"x": values}, 3).elbo(x=frame).value.shape == (20,)


def test_validation_and_checks_need_the_columns_of_training():
    frame = table()
    other = frame[["c", "b", "a"]]
    with pytest.raises(ValueError, match=re.escape(ORDER)):
        trained({"x": frame}, 3, validation={"x": other})
    with pytest.raises(ValueError, match=re.escape(ORDER)):
        predictive_check(trained({"x": frame}, 3), {"x": other}, ["mean"], replicates=20)


def test_a_second_fit_needs_the_columns_of_the_first():
    frame = table()
    model = trained({"x": frame}, 3)
    weights = [value.clone() for value in model.parameters()]
    with pytest.raises(ValueError, match=re.escape(ORDER)):
        fit(model, {"x": frame[["c", "b", "a"]]}, steps=2, progress=False)
    assert all(a.equal(b) for a, b in zip(weights, model.parameters(), strict=True))
    fit(model, {"x": frame}, steps=2, progress=False)


def test_a_standardised_frame_keeps_its_columns():
    frame = table()
    other, rows = frame[["c", "b", "a"]], aevb.data.standardise(frame)
    model = trained({"x": rows}, 3)
    with pytest.raises(
        ValueError, match=r"^The frame has the columns 'c', 'b', 'a', but like= has"
    ):
        aevb.data.standardise(other, like=rows)
    with pytest.raises(ValueError, match=re.escape(ORDER)):
        model.elbo(x=aevb.data.standardise(other))
    again = aevb.data.standardise(frame[list("abc")], like=rows)
    assert model.elbo(x=again, seed=0).value.equal(model.elbo(x=rows, seed=0).value)


def test_future_columns_follow_the_past():
    days = pd.date_range("2024-01-01", periods=12)
    frame = pd.DataFrame(RNG.normal(size=(12, 3)), columns=list("abc"), index=days)
    p = {"z[t] | z[t-1], u[t]": Normal(1), "x[t] | z[t]": Normal(1)}
    model = Model(p, {"z[t] | x[t]": Normal()}, given={"u": 2}, seed=0)
    past, future = frame[:10], frame[10:]
    found = model.forecast(
        steps=2, x=past[["a"]], u=past[["b", "c"]], given={"u": future[["b", "c"]]}
    )
    assert found.mean["x"].shape == (1, 2, 1)
    with pytest.raises(ValueError, match=r"given: u has the columns 'c', 'b', but the past has"):
        model.forecast(steps=2, x=past[["a"]], u=past[["b", "c"]], given={"u": future[["c", "b"]]})


BYTES = RNG.integers(0, 256, (12, 4, 4, 3), dtype=np.uint8)
WHOLE = (
    "x holds whole numbers up to 255. They look like grey levels 0 … 255: pass the images as "
    'bytes (x.astype("uint8")), or spread them over (0, 1) (aevb.data.dequantise(x, 256)). '
    "If they count or measure something else, standardise them (aevb.data.standardise(x))."
)
LEVELS = "but training prepared its images of bytes as numbers in (0, 1). They look like grey"


def test_grey_levels_of_images_are_refused_by_a_density_of_real_numbers(tmp_path):
    BYTES[0, 0, 0, 0] = 255
    trained({"x": BYTES}, (3, 4, 4)).save(tmp_path)
    model = aevb.load(tmp_path)
    for values in (BYTES.astype("f4"), BYTES.astype(int), torch.as_tensor(BYTES).double()):
        for call in (model.reconstruct, model.elbo, model.log_evidence, model.posterior):
            with pytest.raises(ValueError, match=f"^{re.escape(WHOLE)}$"):
                call(x=values)
        with pytest.raises(ValueError, match=re.escape(WHOLE)):
            trained({"x": values}, (3, 4, 4))
    resized = BYTES * 0.99
    with pytest.raises(ValueError, match=re.escape(LEVELS)):
        model.reconstruct(x=resized)
    with pytest.raises(ValueError, match=re.escape(LEVELS)):
        trained({"x": BYTES}, (3, 4, 4), validation={"x": resized})
    assert model.reconstruct(x=BYTES / 255)["x"].shape == (12, 3, 4, 4)


def test_the_form_of_the_rows_is_that_of_the_last_fit():
    model = trained({"x": BYTES[..., 0]}, 16)
    rows = torch.full((12, 16), 9.6)
    rows[0] = -torch.arange(16.0)
    with pytest.raises(ValueError, match=re.escape(LEVELS)):
        model.elbo(x=rows)
    fit(model, {"x": rows}, steps=2, progress=False)
    assert model.teaching.pixels == {}
    assert model.elbo(x=rows).value.shape == (12,)
    named = trained({"x": table()}, 3)
    fit(named, {"x": torch.randn(20, 3)}, steps=2, progress=False)
    assert named.teaching.columns == {}


@pytest.mark.parametrize("most", [59, 128])
def test_grids_of_smaller_whole_numbers_are_data(most):
    counts = BYTES[..., :1].astype("f4") % (most + 1)
    counts[0, 0, 0, 0] = most
    p = {"z": Normal(2), "x | z": Normal((1, 4, 4), scale=40.0)}
    model = Model(p, {"z | x": Normal(scale=1.0)}, seed=0)
    fit(model, {"x": counts}, steps=2)
    assert bool(model.elbo(x=counts).value.isfinite().all())
    large = counts.copy()
    large[0, 0, 0, 0] = 200
    with pytest.raises(ValueError, match="x holds whole numbers up to 200"):
        model.elbo(x=large)
    model.elbo(x=aevb.data.standardise(large))


def test_flat_images_are_refused_as_grey_levels_too():
    pixels = BYTES[..., 0]
    model = trained({"x": pixels}, 16)
    for flat in (pixels.reshape(12, -1), pixels.reshape(12, -1).astype("f4")):
        with pytest.raises(ValueError, match=re.escape(LEVELS)):
            model.elbo(x=flat)
    assert model.elbo(x=pixels).value.shape == (12,)


def test_a_single_column_of_another_name_is_refused(tmp_path):
    volume = pd.Series(RNG.normal(size=20), name="volume")
    message = re.escape(
        "x has the column 'price', but the model was trained on 'volume'. Rename it if it holds "
        "the same quantity: frame.rename('volume') of a series, or "
        "frame.rename(columns={'price': 'volume'})."
    )
    for data in ({"x": volume}, volume.to_frame(), {"x": aevb.sequences(volume.to_frame())}):
        p = {"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(1)}
        model = Model(p, {"z[t] | x[t]": Normal()}, seed=0)
        fit(model, data, steps=1, progress=False)
        model.save(tmp_path)
        for one in (model, aevb.load(tmp_path)):
            for other in (volume.rename("price"), volume.rename("price").to_frame()):
                with pytest.raises(ValueError, match=f"^{message}$"):
                    one.log_evidence(x=other)
            for same in (volume, volume.to_frame(), volume.rename(None), volume.to_numpy()[None]):
                rows = same.reshape(1, 20, 1) if isinstance(same, np.ndarray) else same
                assert one.log_evidence(x=rows).value.shape == (1,)


def test_steps_of_another_length_are_warned_of(tmp_path):
    def sales(frequency):
        times = pd.date_range("2020-01-31", periods=24, freq=frequency)
        return pd.Series(np.sin(np.arange(24.0)), times, name="sales")

    p = {"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(1, scale="learned")}
    model = Model(p, {"z[t] | x[t]": Normal()}, seed=0)
    fit(model, {"x": sales("ME")}, steps=1, progress=False)
    model.save(tmp_path)
    message = re.escape(
        "The steps are 1 day apart, but those that the model was trained on are 1 month apart. A "
        "step of the model has the length of the training steps: aggregate the data to it, or "
        "train a model on them."
    )
    for one in (model, aevb.load(tmp_path)):
        with pytest.warns(DataWarning, match=f"^{message}$"):
            one.forecast(steps=1, x=sales("D"))
        for same in (sales("MS"), sales("ME").to_period("M"), sales("ME").reset_index(drop=True)):
            one.forecast(steps=1, x=same)
    fit(model, sales("D").to_frame(), steps=1, progress=False)
    model.forecast(steps=1, x=sales("B"))  # days, without those of weekends


def test_files_with_steps_of_another_length_are_warned_of(tmp_path):
    lines = [f"{i},{value:.3f}" for i, value in enumerate(np.sin(np.arange(24.0)))]
    for name, frequency in (("monthly", "ME"), ("daily", "D")):
        times = pd.date_range("2020-01-31", periods=24, freq=frequency)
        rows = [f"{time:%Y-%m-%d},{line.split(',')[1]}" for time, line in zip(times, lines)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["date,sales", *rows]) + "\n")
    p = {"z[t] | z[t-1]": Normal(1), "x[t] | z[t]": Normal(1, scale="learned")}
    model = Model(p, {"z[t] | x[t]": Normal()}, seed=0)
    fit(model, tmp_path / "monthly.csv", steps=1, progress=False)
    assert model.teaching.pace.text == "1 month"
    data = load(str(tmp_path / "daily.csv"), model.graph).train.data
    with pytest.warns(DataWarning, match="^The steps are 1 day apart, but .* 1 month apart"):
        batches(model, data)
