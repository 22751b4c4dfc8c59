"""Schemas: printing, editing, JSON, and the map between cells and data."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from scipy import stats
from small_tables import mixed

from aevb import Schema
from aevb.runtime.checked_files import DataWarning
from aevb.tables.frames import read_table
from aevb.tables.kinds import (
    facts_of,
    log_normal_gain,
    negative_binomial_likelihood,
    poisson_likelihood,
)


def test_it_prints_a_table():
    text = str(Schema.read(mixed()).without("colour"))
    lines = text.splitlines()
    assert lines[0] == "240 rows, 10 columns, 9 modelled"
    assert lines[1].split() == ["column", "kind", "missing", "likelihood", "values", "reason"]
    assert len(lines) == 13
    assert "with_kind" in lines[-1]
    row = next(line for line in lines if line.startswith("income"))
    assert "LogNormal beats Normal by" in row
    assert next(line for line in lines if line.startswith("colour")).endswith("as asked")


def test_the_nats_in_a_reason_are_a_difference_of_maximised_likelihoods():
    values = np.exp(np.random.default_rng(0).normal(size=500))
    facts = facts_of(read_table({"v": values}).cells("v"))
    shape, _, scale = stats.lognorm.fit(values, floc=0)
    expected = (
        stats.lognorm.logpdf(values, shape, 0, scale)
        - stats.norm.logpdf(values, values.mean(), values.std())
    ).mean()
    assert log_normal_gain(facts) == pytest.approx(expected, abs=1e-6)


def test_the_likelihoods_of_counts_are_maxima():
    values = np.random.default_rng(0).negative_binomial(2.0, 0.2, size=2000).astype(float)
    assert poisson_likelihood(values) == pytest.approx(
        stats.poisson.logpmf(values, values.mean()).mean()
    )
    found, r = negative_binomial_likelihood(values)
    mean = values.mean()

    def at(r):
        return stats.nbinom.logpmf(values, r, r / (r + mean)).mean()

    assert found == pytest.approx(at(r), abs=1e-10)
    assert at(r) >= max(at(r * 1.05), at(r / 1.05))
    assert r == pytest.approx(2.0, rel=0.2)


def test_the_choice_does_not_depend_on_the_unit():
    """Nats per row are a ratio of densities, so a factor cancels."""
    values = np.exp(np.random.default_rng(0).normal(size=300) * 0.3 + 2)
    first, second = Schema.read({"v": values}), Schema.read({"v": values * 1000})
    assert first["v"].reason == second["v"].reason


def test_a_schema_is_the_same_after_json():
    schema = Schema.read(mixed()).without("side").with_kind("visits", "real")
    again = Schema.from_json(schema.to_json())
    assert again == schema
    table = mixed(30)
    for name, value in schema.encode(table).items():
        np.testing.assert_array_equal(again.encode(table)[name], value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("columns"), "'columns'"),
        (lambda r: r.update(format="other"), "format is 'other'"),
        (lambda r: r.update(version=2), "update aevb"),
        (lambda r: r["columns"][0].update(kind="odd"), "'height' is damaged"),
        (lambda r: r["columns"][0].update(scale=0.0), "'height' is damaged"),
        (lambda r: r["columns"][0].update(likelihood="Cauchy"), "likelihood 'Cauchy'"),
        (lambda r: r["columns"][0].update(odd=1), "odd"),
    ],
)
def test_damaged_json_is_refused(change, message):
    record = json.loads(Schema.read(mixed()).to_json())
    change(record)
    with pytest.raises(ValueError, match="This is no schema of a table") as raised:
        Schema.from_json(json.dumps(record))
    assert message in str(raised.value)


@pytest.mark.parametrize("kind", ["real", "count", "category", "ordered", "positive"])
def test_a_kind_can_be_changed_as_if_it_had_been_read_so(kind):
    table = mixed().assign(visits=lambda t: t["visits"] + 1)
    schema = Schema.read(table).with_kind("visits", kind)
    assert schema["visits"].kind == kind
    assert schema["visits"].reason == "as asked"
    assert schema == Schema.read(table, kinds={"visits": kind})
    fitted = schema.fit(schema.mixture(2), table, starts=1)
    assert np.isfinite(fitted.score(table)["log_p"]).all()


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("height", "odd", "The kinds are real, positive, count"),
        ("height", "count", "whole numbers from 0 on"),
        ("balance", "positive", "has no logarithm"),
        ("colour", "real", "no numbers"),
        ("colour", "binary", "4 levels"),
        ("height", "category", "more than 256"),
        ("height", "date", "no dates"),
        ("heihgt", "real", "There is no column 'heihgt'"),
    ],
)
def test_impossible_kinds_are_refused(name, kind, message):
    table = pd.concat([mixed(seed=seed) for seed in range(2)])
    with pytest.raises((ValueError, KeyError)) as raised:
        Schema.read(table).with_kind(name, kind)
    assert message in str(raised.value)


def test_counts_choose_their_likelihood():
    schema = Schema.read(mixed())
    changed = schema.with_kind("clicks", "count", likelihood="Poisson")
    assert [c.name for c in changed.variables["counts"]] == ["visits", "clicks"]
    with pytest.raises(ValueError, match="likelihood is"):
        schema.with_kind("clicks", "count", likelihood="Normal")
    with pytest.raises(ValueError, match="likelihood is"):
        schema.with_kind("clicks", "real", likelihood="Poisson")


def test_columns_can_be_left_out():
    table = mixed()
    schema = Schema.read(table, drop=["height", "colour"])
    assert [c.name for c in schema.used] == [
        name for name in table.columns if name not in ("height", "colour")
    ]
    with pytest.raises(ValueError, match="was dropped"):
        schema.with_kind("height", "real")
    assert Schema.read(table).without("height").with_kind("height", "real")["height"].used
    with pytest.raises(ValueError, match="No column"):
        schema.without(*schema.names)
    with pytest.raises(ValueError, match="no column 'odd'"):
        Schema.read(table, drop=["odd"])


def test_data_are_standardised_and_decoded_again():
    table = mixed()
    schema = Schema.read(table)
    data = schema.encode(table)
    x = data["x"]
    np.testing.assert_allclose(np.nanmean(x, 0), 0, atol=1e-9)
    np.testing.assert_allclose(np.nanstd(x, 0), 1, atol=1e-9)
    cells = schema.decode(data)
    for name in ("height", "balance", "income"):
        np.testing.assert_allclose(cells[name], table[name].to_numpy(float), rtol=1e-12)
    for name in ("colour", "side", "size"):
        known = table[name].notna().to_numpy()
        assert (cells[name][known] == table[name].to_numpy()[known]).all()
        assert all(cell is None for cell in cells[name][~known])


def test_words_for_missing_can_be_chosen():
    table = {"a": ["x", "none", "y", "?"] * 5}
    assert Schema.read(table)["a"].levels == ("?", "none", "x", "y")
    schema = Schema.read(table, missing=["?"])
    assert schema["a"].levels == ("none", "x", "y")
    assert schema["a"].missing == 5
    assert np.isnan(schema.encode(table)["a"]).sum() == 5


def test_declared_categories_are_never_missing():
    cells = ["NA", "none", "x", None] * 5
    frames = {
        "pandas": pd.DataFrame({"a": pd.Categorical(cells)}),
        "polars": pl.DataFrame({"a": pl.Series(cells, dtype=pl.Enum(["NA", "none", "x"]))}),
        "pyarrow": pa.table({"a": pa.array(cells).dictionary_encode()}),
    }
    for library, frame in frames.items():
        schema = Schema.read(frame)
        assert schema["a"].levels == ("NA", "none", "x"), library
        assert schema["a"].missing == 5
        assert "text is" not in schema["a"].reason
        # A level stays a level in a frame of texts, too.
        assert schema.encode({"a": cells})["a"].tolist()[:3] == [0, 1, 2]


def test_the_reason_names_words_that_were_made_missing():
    table = {"a": ["x", "NA", "y", "z"] * 5}
    for schema in (Schema.read(table), Schema.read(table, kinds={"a": "category"})):
        assert schema["a"].reason.endswith("missing where the text is 'NA'")
        assert Schema.from_json(schema.to_json()) == schema


def test_a_frequent_word_for_missing_is_warned_of():
    table = {"a": ["x", "NA", "y", "NA"] * 5}
    with pytest.warns(DataWarning, match="'a' is missing where the text is 'NA': 10 of 20 cells"):
        Schema.read(table)


@pytest.mark.parametrize("kind", ["binary", "category", "ordered"])
def test_whole_numbers_beyond_float64_are_no_levels(kind):
    table = {"a": [2**53 - 1, 2**53, 2**53 + 1] * 5, "b": [0.5, 1.7, 2.1] * 5}
    with pytest.raises(ValueError, match=f"of kind {kind}: its whole numbers lie beyond 2.53"):
        Schema.read(table).with_kind("a", kind)
    with pytest.raises(ValueError, match="convert it to text"):
        Schema.read(table, kinds={"a": kind})


def test_only_units_of_numbers_can_change():
    schema = Schema.read(mixed())
    with pytest.raises(ValueError, match="only real and positive"):
        schema.rescaled("colour", 2.0)
    with pytest.raises(ValueError, match="not 0"):
        schema.rescaled("height", 0.0)
    with pytest.raises(ValueError, match="without an offset"):
        schema.rescaled("income", 2.0, 1.0)


def test_the_jacobian_of_missing_cells_is_zero():
    schema, table = Schema.read(mixed()), mixed(50, missing=0.4)
    expected = np.zeros(50)
    for column in schema.variables["x"]:
        known = table[column.name].notna().to_numpy()
        expected[known] -= np.log(column.scale)
        if column.kind == "positive":
            expected[known] -= np.log(table[column.name].to_numpy(float)[known])
    np.testing.assert_allclose(schema.log_jacobian(table), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: s.mixture(0), "number of clusters is a positive"),
        (lambda s: s.mixture(3, covariance="tied"), 'covariance is "diagonal" or "full"'),
        (lambda s: s.without("height", "balance", "income", "born").mixture(2, covariance="full"),
         "this table has none"),
        (lambda s: s.factors(1.5), "number of factors"),
        (lambda s: s.vae(True), "number of codes"),
        (lambda s: s.gmvae(2, 0), "number of codes"),
        (lambda s: s.fit(s.without("side").mixture(2), mixed()), "but the schema has"),
        (lambda s: s.fit(s.mixture(2), mixed(), starts=0), "starts is a positive"),
    ],
)  # fmt: skip
def test_impossible_models_are_refused(make, message):
    with pytest.raises(ValueError, match="(?s).") as raised:
        make(Schema.read(mixed()))
    assert message in str(raised.value)


# Zeros among positive numbers ---------------------------------------------------------------------


def sales(rows: int = 400) -> np.ndarray:
    """Skewed amounts in cents, of which the first two are zero."""
    draw = np.random.default_rng(0)
    values = (np.exp(3 + 2.5 * draw.normal(size=rows) + draw.normal(size=rows)) + 0.01).round(2)
    values[:2] = 0
    return values


def test_zeros_of_a_skewed_column_are_read_as_half_of_the_smallest_number():
    values = sales()
    schema = Schema.read({"sales": values})
    column, least = schema["sales"], values[values > 0].min()
    assert (column.kind, column.facts.zeros) == ("positive", 2)
    assert column.facts.decimals == 2
    assert column.reason.startswith("all positive but 2 zeros: LogNormal beats Normal by")
    assert column.reason.endswith(
        f"a zero is read as {least / 2:g}, half of the smallest positive number"
    )
    logs = np.log(np.where(values == 0, least / 2, values))
    assert column.location == pytest.approx(logs.mean())
    assert column.scale == pytest.approx(logs.std())
    data = schema.encode({"sales": values})
    np.testing.assert_allclose(schema.decode(data)["sales"], values, rtol=1e-12)
    np.testing.assert_allclose(
        schema.log_jacobian({"sales": values}), -np.log(column.scale) - logs, rtol=1e-12
    )
    doubled = schema.rescaled("sales", 2.0)
    np.testing.assert_allclose(doubled.encode({"sales": 2 * values})["x"], data["x"], atol=1e-12)
    assert Schema.from_json(schema.to_json())["sales"].zero == least / 2
    with pytest.raises(ValueError, match=r"1 cell is negative, so it has no logarithm \(-1 in row"):
        schema.encode({"sales": [1.0, -1.0]})


def rain(zeros: float, least: float | None = None, rows: int = 400) -> dict[str, np.ndarray]:
    """Amounts whose logarithms are normal, with a share of zeros, beside a column that they follow.

    ``least`` replaces one amount.
    """
    draw = np.random.default_rng(0)
    other = draw.normal(size=rows)
    values = np.exp(1.5 + 0.7 * other + draw.normal(size=rows))
    values[draw.random(rows) < zeros] = 0
    if least is not None:
        values[5] = least
    return {"rain": values, "other": other}


@pytest.mark.parametrize(
    ("zeros", "least", "why"),
    [
        (0.4, None, "too many zeros for a LogNormal"),
        (0.3, 1e-12, "too many zeros for a LogNormal"),
        (0.04, 1e-4, "zeros too far below the other logarithms for a LogNormal"),
        (0.0, 1e-12, "the smallest, 1e-12, too far below the other logarithms for a LogNormal"),
        (0.0, 1e-200, "Normal beats LogNormal by"),
        (0.02, 1e-200, "Normal beats LogNormal by"),
    ],
)
def test_zeros_and_tiny_numbers_do_not_make_a_column_positive(zeros, least, why):
    """A LogNormal of such columns has a mean far above that of the cells."""
    table = rain(zeros, least)
    schema, values = Schema.read(table), table["rain"]
    column = schema["rain"]
    assert column.kind == "real"
    assert why in column.reason
    assert "filled and drawn cells are not negative" in column.reason
    assert ("split the column in two" in column.reason) == (zeros > 0.05)
    assert (column.location, column.scale) == pytest.approx((values.mean(), values.std()))
    assert column.bounded(np.array([-1.0, 2.0]), 0.0).tolist() == [0.0, 2.0]


def test_a_column_whose_mean_would_lie_above_its_largest_number_is_real():
    values = np.random.default_rng(0).beta(0.05, 1, size=400)
    column = Schema.read({"share": values})["share"]
    assert column.kind == "real"
    assert "logarithms that differ too much for a LogNormal" in column.reason


def test_amounts_with_many_zeros_are_filled_near_their_mean():
    table = rain(0.45)
    hidden = np.arange(400) % 4 == 0
    known = {**table, "rain": np.where(hidden, np.nan, table["rain"])}
    schema = Schema.read(known)
    fitted = schema.fit(schema.factors(1), known)
    filled = np.asarray(fitted.impute(known)["rain"])[hidden]
    assert filled.min() >= 0
    assert filled.mean() == pytest.approx(known["rain"][~hidden].mean(), rel=0.15)
    at = {"rain": np.array([0.0, 0.005, 5.0]), "other": np.zeros(3)}
    log_p = np.asarray(fitted.score(at)["log_p"])
    assert log_p[0] == pytest.approx(log_p[1], abs=0.01)  # one density for zeros and amounts
    assert log_p[0] < log_p[2] + 1
    assert np.asarray(fitted.sample(1000, seed=0)["rain"]).max() < 2 * table["rain"].max()


def test_few_zeros_count_in_the_moments_but_not_in_the_choice():
    values = rain(0.0)["rain"]
    before = Schema.read({"rain": values})["rain"]
    least = np.sort(values)[4]
    with_zeros = np.where(values < least, 0.0, values)
    column = Schema.read({"rain": with_zeros})["rain"]
    assert column.kind == before.kind == "positive"
    positive = facts_of(read_table({"rain": values[values >= least]}).cells("rain"))
    assert log_normal_gain(column.facts) == pytest.approx(log_normal_gain(positive))
    asked = Schema.read(rain(0.4), kinds={"rain": "positive"})["rain"]
    assert asked.reason.endswith("with so many zeros, filled and drawn cells are far too large")


def test_half_of_the_smallest_number_is_a_number():
    with pytest.raises(ValueError, match=r"half of its smallest positive number, 4.94\S+, is 0"):
        Schema.read({"rain": [0.0, 5e-324, 1.0, 2.5] * 5}, kinds={"rain": "positive"})


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_samples_of_a_column_with_zeros_are_not_negative(share):
    draw = np.random.default_rng(1)
    other = draw.normal(size=100)
    values = (50 + 8 * other + 4 * draw.normal(size=100)).round(1)
    values[draw.random(100) < share] = 0
    frame = {"income": np.where(np.arange(100) < 9, np.nan, values), "other": other}
    schema = Schema.read(frame, kinds={"income": "real"})
    fitted = schema.fit(schema.factors(1), frame)
    drawn = fitted.sample(500, seed=0)["income"].to_numpy()
    assert drawn.min() == 0.0
    assert fitted.score({"income": drawn, "other": drawn * 0})["log_p"].shape
    assert min(one["income"].min() for one in fitted.impute(frame, draws=2)) >= 0


def test_decimals_of_an_older_file_do_not_change_a_schema():
    schema = Schema.read({"sales": sales(), "name": ["a", "b"] * 200})
    record = json.loads(schema.to_json())
    for column in record["columns"]:
        del column["facts"]["decimals"]
    older = Schema.from_json(json.dumps(record))
    assert older["sales"].facts.decimals is None
    assert older == schema


# Columns that repeat others -----------------------------------------------------------------------


def repeating(rows: int = 470) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    amount = np.exp(3 + draw.normal(size=rows)).round(2)
    copy = amount.copy()
    copy[17] += 3.5
    kids = draw.poisson(2.0, rows)
    city = np.array(["Bonn", "Lyon", "Nice"])[draw.integers(3, size=rows)]
    return {
        "amount": amount,
        "kids": kids,
        "city": city,
        "height": draw.normal(175, 8, rows),
        "amount_copy": copy,
        "kids2": 2 * kids + 1,
        "log_amount": np.log(amount),
        "code": np.char.lower(city),
        "near": amount + 0.05 * amount.std() * draw.normal(size=rows),
        "rare": (np.arange(rows) < 2).astype(int),
        "rare too": (np.arange(rows) < 2).astype(int),
    }


def test_columns_that_repeat_others_are_told():
    frame = repeating()
    with pytest.warns(DataWarning) as told:
        schema = Schema.read(frame)
    (warning,) = told
    assert str(warning.message) == (
        "Columns: 'amount_copy' equals 'amount' in 469 of 470 rows; 'kids2' is 2 · 'kids' + 1; "
        "'log_amount' is a function of 'amount'; 'code' says the same as 'city'. Clusters count "
        "them twice, and the density may have no limit. Leave them out: "
        "schema.without('amount_copy', 'kids2', 'log_amount', 'code')."
    )
    assert warning.message.for_commands.endswith(
        "Leave them out: --without amount_copy,kids2,log_amount,code."
    )
    assert len(schema.used) == 11
    Schema.read(frame, drop=["amount_copy", "kids2", "log_amount", "code"])


DRAW = np.random.default_rng(0)
DAYS = np.datetime64("2020-01-01") + DRAW.integers(0, 2000, 60)
SINCE = (DAYS - np.datetime64("2019-12-31")).astype(float)
WAVE = DRAW.normal(size=60).round(2)
YES = np.where(WAVE > 0, "y", "n")


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (WAVE, 1 - WAVE, "is 1 - 'a'"),
        (WAVE, -WAVE, "is -'a'"),
        (WAVE, WAVE - 2, "is 'a' - 2"),
        (DAYS, SINCE, "is the days of 'a' since 2019-12-31"),
        (DAYS, 24 * SINCE, "is 24 · the days of 'a' since 2019-12-31"),
        (SINCE, DAYS, "is 2019-12-31 + 'a' days"),
        (DAYS, DAYS + 3, "is 'a' + 3 days"),
        (YES, (WAVE > 0).astype(int), "says the same as 'a'"),
        (YES, WAVE > 0, "says the same as 'a'"),
        ((WAVE > 0).astype(int), (WAVE <= 0).astype(int), "is 1 - 'a'"),
    ],
)
def test_the_relation_of_a_repeated_column_is_told(first, second, told):
    with pytest.warns(DataWarning) as warned:
        Schema.read({"a": first, "b": second})
    (warning,) = warned
    assert str(warning.message).startswith(f"Column: 'b' {told}. Clusters count it twice")
