"""The latent map: geometry, numbers per row in the units of the data, rows, colours, sequences."""

import datetime
import warnings
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from aevb import (
    GRU,
    Bernoulli,
    Model,
    Normal,
    OneHot,
    Poisson,
    Schema,
    conv,
    deconv,
    em,
    fit,
    table,
)
from aevb.data.datasets import Recipe
from aevb.page import latent_map, measures
from aevb.page.colours import pack_colours
from aevb.page.contents import known_values, levels_of, pack_contents, pack_units, values_of
from aevb.page.html import to_json
from aevb.page.latent_map import Space, neighbour_embedding, pack_rows, pack_space, principal_axes
from aevb.page.measures import measure
from aevb.page.packing import unpack
from aevb.page.sections import Opened, map_section, section
from aevb.page.sequences import continued, pack_continuations
from aevb.page.subject import Rows, Split, Subject
from aevb.posterior import posterior_of

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(40, 4))
S = GENERATOR.normal(size=(12, 6, 2))
Y = GENERATOR.integers(3, size=40)
QUIET = {"steps": 3, "log_every": 3}


def vae(d=4, z=3):
    torch.manual_seed(0)
    return Model({"z": Normal(z), "x | z": Normal(d)}, {"z | x": Normal()}).double()


def rows_of(model, *splits, most=10**6, **more):
    return Rows.chosen(Subject("run", model, splits, **more), most)


def back(numbers):
    """Quantised numbers as numbers."""
    values = unpack(numbers["values"]).astype(float)
    if "low" not in numbers:
        return values
    values[values == 65535] = np.nan
    return numbers["low"] + (numbers["high"] - numbers["low"]) * values / 65534


def colours_of(rows, found=None):
    return {c["name"]: c for c in pack_colours(rows, found or measure(rows))[0]}


def mapped(model, data, labels=None, **more):
    subject = Subject("run", model, [Split("", data, labels)], **more)
    found = section(Opened("run", model=model, subject=subject), "map")
    to_json(found)
    return found


# Geometry -----------------------------------------------------------------------------------------


def test_principal_axes_are_those_of_the_singular_value_decomposition():
    points = (GENERATOR.normal(size=(200, 6)) * [5, 3, 1, 1, 1, 1]).astype(np.float32)
    mean, axes, shares = principal_axes(points)
    _, s, vectors = np.linalg.svd(points - points.mean(0, dtype=float), full_matrices=False)
    assert np.allclose(mean, points.mean(0, dtype=float))
    assert np.allclose(axes @ axes.T, np.eye(2), atol=1e-12)
    assert np.allclose(np.abs((axes * vectors[:2]).sum(1)), 1, atol=1e-5)
    assert np.allclose(shares, (s**2 / (s**2).sum())[:2], atol=1e-6)
    assert (axes[[0, 1], np.abs(axes).argmax(1)] > 0).all()
    huge = principal_axes(points.astype(float) * 1e200)
    assert np.allclose(huge[1], axes)
    assert np.allclose(huge[2], shares)


@pytest.mark.parametrize("d", [1, 2, 5])
def test_a_point_of_the_plane_is_the_projection_of_its_code(d):
    points = GENERATOR.normal(size=(50, d)).astype(np.float32) + 3
    names = tuple(f"z{j}" for j in range(d))
    packed = pack_space(Space("z", points, names), seed=0, embed=False)
    (view,) = packed["views"]
    across, up = back(view["across"]), back(view["up"])
    origin, axes = np.array(view["origin"]), np.array(view["axes"])
    found = origin + across[:, None] * axes[0] + up[:, None] * axes[1] * (d > 1)
    expected = points if d <= 2 else None
    if expected is None:
        mean, first, _ = principal_axes(points)
        expected = mean + (points - mean) @ first.T @ first
    step = max(view[side]["high"] - view[side]["low"] for side in ("across", "up")) / 65534
    assert np.abs(found - expected).max() <= step  # half a step on each of two axes
    assert (unpack(packed["codes"]) == points).all()
    assert np.allclose(packed["low"], points.min(0))


def test_the_embedding_is_reproducible_and_places_all_points(monkeypatch):
    groups = np.repeat(np.eye(3) * 20, 40, axis=0) + GENERATOR.normal(size=(120, 3))
    first, _ = neighbour_embedding(groups, 1)
    again, _ = neighbour_embedding(groups, 1)
    assert (first == again).all()
    monkeypatch.setattr(latent_map, "EMBEDDED", 60)
    placed, note = neighbour_embedding(groups, 1)
    assert "60 of the 120 points" in note
    assert np.isfinite(placed).all()
    # Every point lies nearer to the centre of its own group than to the others.
    centres = placed.reshape(3, 40, 2).mean(1)
    near = ((placed[:, None] - centres) ** 2).sum(-1).argmin(1)
    assert (near == np.repeat(np.arange(3), 40)).all()
    assert neighbour_embedding(np.ones((20, 3)), 0)[1] == "All codes are equal."


def test_points_of_sequences_know_their_row_and_step(monkeypatch):
    code = GENERATOR.normal(size=(4, 3, 2)).astype(np.float32)
    code[1, 2:] = np.nan
    code[3, 1:] = np.nan
    space = latent_map._timed("z", code, seed=0)
    assert list(zip(space.row, space.step, strict=True)) == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 0)
    ]  # fmt: skip
    assert (space.points == code[space.row, space.step]).all()
    monkeypatch.setattr(latent_map, "MOST_STEPS", 5)
    few = latent_map._timed("z", code, seed=0)
    # Whole sequences, at random: as many of the permuted ones as the map can hold.
    order = np.random.default_rng(0).permutation(4)
    lengths = np.array([3, 2, 3, 1])
    kept = sorted(order[: (lengths[order].cumsum() <= 5).sum()])
    assert [(row, (few.row == row).sum()) for row in kept] == [(k, lengths[k]) for k in kept]
    assert set(few.row) == set(kept)
    assert (few.points == code[few.row, few.step]).all()
    assert few.note == f"The map holds {len(kept)} random sequences of 4."
    named = replace(few, names=("z0", "z1"))
    assert few.note in pack_space(named, 0)["views"][0]["note"]
    long = Space("z", np.zeros((2, 1)), ("z",), np.zeros(2, int), np.array([0, 70_000]))
    assert unpack(pack_space(long, 0)["step"]).tolist() == [0, 70_000]


def test_points_that_are_not_finite_are_said_to_have_no_place():
    points = GENERATOR.normal(size=(30, 3))
    points[4, 1], points[7] = np.inf, np.nan
    packed = pack_space(Space("z", points, ("z0", "z1", "z2")), 0)
    for view in packed["views"]:
        assert "2 of the points are not finite" in view["note"]
        assert np.flatnonzero(unpack(view["across"]["values"]) == 65535).tolist() == [4, 7]
    assert np.isnan(unpack(packed["codes"])[[4, 7]]).all()
    assert np.allclose(packed["mean"], np.delete(points, [4, 7], 0).mean(0))


def test_codes_in_half_precision_never_become_infinite(monkeypatch):
    monkeypatch.setattr(latent_map, "CODES", 100)
    assert pack_space(Space("z", X[:10] * 1e6, tuple("abcd")), 0)["codes"] is None
    assert pack_space(Space("z", X[:10], tuple("abcd")), 0)["codes"]["$"] == "f2"


# Numbers per row, and their units -----------------------------------------------------------------

MEAN, SCALE = [5.0, -3.0, 0.0, 100.0], [2.0, 0.5, 1.0, 40.0]
STANDARD = Recipe(
    "x.csv", prepare="standardise", mean=MEAN, scale=SCALE, columns={"x": list("abcd")}
)


@pytest.fixture(scope="module")
def trained():
    model = vae()
    fit(model, {"x": X}, **QUIET)
    return model


@pytest.mark.parametrize("most", [7, 100])
def test_numbers_of_standardised_rows_are_in_the_units_of_the_data(trained, monkeypatch, most):
    monkeypatch.setattr(measures, "SAMPLED_ROWS", most)
    monkeypatch.setattr(measures, "WORK", 1e20)
    plain, scaled = (
        measure(
            rows_of(trained, Split("", {"x": X[:25]}), Split("held out", {"x": X[25:]}), **kind)
        )
        for kind in ({}, {"recipe": STANDARD})
    )
    shift = np.log(SCALE).sum()
    for name in ("log p", "ELBO", "log p(x|·)"):
        known = ~np.isnan(plain.numbers[name])
        assert known.sum() == (most if name == "log p" and most < 40 else 40)
        assert np.allclose(scaled.numbers[name][known], plain.numbers[name][known] - shift)
        assert (np.isnan(scaled.numbers[name]) == ~known).all()
    for name in ("gap", "KL(z)", "reconstruction error"):
        assert np.allclose(scaled.numbers[name], plain.numbers[name], equal_nan=True)
    found = scaled.numbers
    assert np.allclose(found["ELBO"], found["log p(x|·)"] - found["KL(z)"])
    assert (found["log p"] - found["ELBO"] == found["gap"])[~np.isnan(found["gap"])].all()
    assert ("random ones" in scaled.notes["log p"]) == (most < 40)


def test_the_jacobian_counts_known_cells_only():
    x = X.copy()
    x[3, 1] = x[5] = np.nan
    model = vae()
    fit(model, {"x": x}, **QUIET)
    plain, scaled = (
        measure(rows_of(model, Split("", {"x": x}), **kind), evidence=False).numbers["ELBO"]
        for kind in ({}, {"recipe": STANDARD})
    )
    shift = np.where(np.isnan(x), 0.0, np.log(SCALE)).sum(1)
    assert np.allclose(plain - scaled, shift)


def frame(n=60):
    k = np.arange(n) % 2
    return pa.table(
        {
            "split": pa.array(np.where(k, "a", "b")),
            "log p": pa.array(np.where(np.arange(n) % 7 == 0, np.nan, 3.0 * k + X[:1, 0] + k)),
            "income": np.exp(GENERATOR.normal(7, 0.4, size=n)),
            "label": k,
        }
    )


def test_log_p_of_a_sampled_choice_of_a_tables_rows_is_its_score(monkeypatch):
    cells = frame()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schema = Schema.read(cells)
        fitted = schema.fit(schema.mixture(2), cells)
    order = np.random.default_rng(1).permutation(60)
    splits = [
        Split(name, schema.encode(cells.take(at)), None, at, cells.take(at))
        for name, at in (("training", order[:40]), ("held out", order[40:]))
    ]
    rows = rows_of(fitted.model, *splits, schema=schema, most=33)
    found = measure(rows)
    score = np.asarray(fitted.score(cells)["log_p"])
    assert np.allclose(found.numbers["log p"], score[rows.numbers()])
    # Cells, colours and rows have one order.
    contents = {c["name"]: c for c in pack_contents(rows)["columns"]}
    income = np.asarray(cells["income"])[rows.numbers()]
    assert (unpack(contents["income"]["numbers"]["values"]) == income).all()
    colours = colours_of(rows, found)
    step = (income.max() - income.min()) / 65534
    assert np.abs(back(colours["income"]) - income).max() <= step
    assert (unpack(colours["split"]["values"]) == rows.split).all()
    words = np.array([*colours["split (column)"]["levels"], None], dtype=object)
    expected = np.asarray(cells["split"].to_pylist(), dtype=object)[rows.numbers()]
    assert (words[unpack(colours["split (column)"]["values"])] == expected).all()
    assert "log p (column)" in colours
    packed = pack_rows(rows)
    assert (packed["count"], packed["total"]) == (33, 60)
    assert (unpack(packed["numbers"]) == rows.numbers()).all()


def test_the_posterior_does_not_read_the_known_values_of_latents():
    torch.manual_seed(0)
    model = Model(
        {"y": OneHot(3), "z": Normal(2), "x | y, z": Normal(4)},
        {"y | x": OneHot(), "z | x, y": Normal()},
    ).double()
    known = np.where(np.arange(40) < 20, Y, -1)
    fit(model, {"x": X, "y": known}, **QUIET)
    with_labels, without = (
        measure(rows_of(model, Split("", data, known)), evidence=False)
        for data in ({"x": X, "y": known}, {"x": X})
    )
    for name in ("y", "z"):
        assert (with_labels.codes[name] == without.codes[name]).all()
    rows = rows_of(model, Split("", {"x": X, "y": known}, known))
    assert (rows.labels() == known).all()
    label = colours_of(rows)["label"]
    assert (unpack(label["values"]) == np.where(known < 0, len(label["levels"]), known)).all()


def test_rows_that_q_cannot_answer_for_get_the_exact_posterior_together(monkeypatch):
    """Only a later batch has missing entries; codes of all rows are by one method."""
    torch.manual_seed(0)
    model = Model({"y": OneHot(2, learned=True), "x | y": Normal(4)}, {"y | x": OneHot()}).double()
    fit(model, {"x": X}, **QUIET)
    x = X.copy()
    x[39, 0] = np.nan
    monkeypatch.setattr("aevb.page.subject.Rows.batches.__defaults__", (10,))
    rows = rows_of(model, Split("", {"x": x}))
    found = measure(rows)
    assert found.method == "exact"
    exact = model.posterior(method="exact", x=x)["y"].probs.detach().numpy()
    assert np.allclose(found.codes["y"], exact, atol=1e-6)


def test_a_map_that_q_cannot_make_is_a_sentence(trained):
    x = X.copy()
    x[0, 0] = np.nan
    found = mapped(trained, {"x": x})
    assert found["failed"]
    (text,) = found["problems"]
    assert "1 row lacks entries of x" in text
    assert "method=" not in text


def test_log_p_that_cannot_be_computed_costs_nothing_else(trained, monkeypatch):
    def fail(*_, **__):
        raise ValueError("no.")

    monkeypatch.setattr(measures, "unnoted_evidence", fail)
    found = mapped(trained, {"x": X})
    assert found["problems"] == ["log p of the rows could not be computed: no."]
    assert "ELBO" in [c["name"] for c in found["colours"]]


# Models of all kinds ------------------------------------------------------------------------------

STATE = {
    "h[t] | h[t-1], x[t-1]": GRU(3),
    "z[t] | h[t]": Normal(2),
    "x[t] | h[t], z[t]": Normal(2),
}
CHAIN = {"y[t] | y[t-1]": OneHot(3), "x[t] | y[t]": Normal(2)}
RAGGED = [S[i, :n] for i, n in enumerate([6, 5, 4, 3, 2, 1, 6, 6, 6, 6, 6, 6])]
BITS = (X > 0).astype(float)
PLAIN = ({"z": Normal(3), "x | z": Normal(4)}, {"z | x": Normal()})
KINDS = {
    "two latents": (
        {"w": Normal(2), "z | w": Normal(3), "x | z": Normal(4)},
        {"z | x": Normal(), "w | z": Normal()},
        {"x": X},
        {},
        {"spaces": {"z": 3, "w": 2}},
    ),
    "a number": (
        {"z": Normal(1), "x | z": Normal(4)},
        {"z | x": Normal()},
        {"x": X},
        {},
        {"spaces": {"z": 1}},
    ),
    "bits": (
        {"z": Bernoulli(3), "x | z": Normal(4)},
        {"z | x": Bernoulli()},
        {"x": X},
        {},
        {"spaces": {"z": 3}, "note": "z is 0 or 1"},
    ),
    "a class": (
        {"y": OneHot(2, learned=True), "x | y": Normal(1)},
        {"y | x": OneHot()},
        {"x": X[:, :1]},
        {},
        {"spaces": {None: 1}, "colours": ["cluster y", "certainty of y"]},
    ),
    "many classes": (
        {"y": OneHot(300, learned=True), "x | y": Normal(4)},
        {"y | x": OneHot()},
        {"x": X},
        {},
        {"spaces": {None: 4}, "colours": ["certainty of y"]},
    ),
    "a discrete chain": (
        CHAIN,
        {"y[t] | y[t-1], x[t]": OneHot()},
        {"x": S},
        {},
        {"spaces": {None: 12}, "colours": ["most frequent y", "last y"], "kind": "sequence"},
    ),
    "rows of different lengths": (
        STATE,
        {"z[t] | h[t], x[t]": Normal()},
        {"x": RAGGED},
        {},
        {"spaces": {"z": 2}, "kind": "sequence"},
    ),
    "a table of posteriors": (
        {"z": Normal(2), "x | z": Normal(4)},
        {"z | i": Normal(net=table(40))},
        {"x": X, "i": np.arange(40)},
        {"i": 1},
        {"spaces": {"z": 2}, "colours": ["i"]},
    ),
    "a given class": (
        {"z": Normal(2), "x | label, z": Normal(4)},
        {"z | x, label": Normal()},
        {"x": X, "label": Y},
        {"label": 3},
        {"spaces": {"z": 2}, "colours": ["label", "label of the row"]},
    ),
    "one row": (*PLAIN, {"x": X[:1]}, {}, {}),
    "two rows": (*PLAIN, {"x": X[:2]}, {}, {}),
    "equal rows": (*PLAIN, {"x": X[:1].repeat(12, 0)}, {}, {}),
    "missing entries": (
        {"z": Normal(3), "x | z": Normal(4)},
        {"z | x": Normal()},
        {"x": np.where(GENERATOR.random(X.shape) < 0.3, np.nan, X)},
        {},
        {},
    ),
    "missing labels": (
        {"z": Normal(2), "y | z": OneHot(3), "x | z": Normal(4)},
        {"z | x": Normal()},
        {"x": X, "y": np.where(Y == 0, -1, Y)},
        {},
        {"colours": ["y"]},
    ),
    "huge numbers": (*PLAIN, {"x": X * 1e150}, {}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_has_a_map(kind):
    p, q, data, given, expected = KINDS[kind]
    torch.manual_seed(0)
    model = Model(p, q, given=given).double()
    if kind not in ("huge numbers", "equal rows", "one row", "two rows"):
        fit(model, data, **QUIET)
    labels = Y if "label" in given else None
    found = mapped(model, data, labels)
    assert not found.get("failed"), found["problems"]
    assert found["problems"] == []
    spaces = {space["latent"]: space["size"] for space in found["spaces"]}
    assert spaces == expected.get("spaces", spaces)
    names = [colour["name"] for colour in found["colours"]]
    assert len(set(names)) == len(names)
    assert set(expected.get("colours", [])) <= set(names)
    assert found["contents"]["kind"] == expected.get("kind", "numbers")
    if "note" in expected:
        view = found["spaces"][0]["views"][0]
        assert expected["note"] in view["note"]
        assert view["axes"] is None
        assert set(unpack(found["spaces"][0]["codes"]).ravel()) <= {0.0, 1.0}


def test_exact_posteriors_of_em_make_a_map():
    torch.manual_seed(0)
    model = Model({"y": OneHot(3, learned=True), "x | y": Normal(4)}, {"y | x": OneHot()})
    fit(model, {"x": X}, schedule=em(), **QUIET)
    found = mapped(model, {"x": X})
    assert found["posterior"] == "exact"
    exact = model.posterior(method="exact", x=X)["y"].probs
    best = next(c for c in found["colours"] if c["name"] == "cluster y")
    assert (unpack(best["values"]) == exact.argmax(-1).numpy()).all()
    (clusters,) = found["clusters"]
    assert sum(c["size"] for c in clusters["clusters"]) == 40
    assert (clusters["undecided"], clusters["among"]) == (0, 40)


def test_a_map_is_reproducible(trained):
    first, second = (mapped(trained, {"x": X}) for _ in range(2))
    assert first.pop("seconds") >= 0
    assert second.pop("seconds") >= 0
    assert to_json(first) == to_json(second)


# Contents -----------------------------------------------------------------------------------------


def test_colour_images_and_counts_are_shown_from_zero_to_one():
    torch.manual_seed(0)
    model = Model(
        {"z": Normal(2), "x | z": Normal((3, 4, 4), net=deconv(4))},
        {"z | x": Normal(net=conv(4, hidden=8))},
    )
    x = GENERATOR.random((6, 3, 4, 4))
    rows = rows_of(model, Split("", {"x": x}), image=(3, 4, 4))
    (variable,) = pack_contents(rows)["variables"]
    assert variable["image"] == [3, 4, 4]
    assert np.abs(unpack(variable["numbers"]["values"]) / 255 - x.reshape(6, -1)).max() <= 0.5 / 255
    assert pack_units(rows.subject) == {}
    counts = GENERATOR.poisson(5, size=(6, 16))
    other = Model({"z": Normal(2), "x | z": Poisson(16)}, {"z | x": Normal()})
    rows = rows_of(other, Split("", {"x": counts}), image=(4, 4))
    (variable,) = pack_contents(rows)["variables"]
    found = unpack(variable["numbers"]["values"]) / 255
    assert np.abs(found - counts / counts.max()).max() <= 0.5 / 255
    unit = pack_units(rows.subject)["x"][0]
    assert unit["location"] == 0
    assert np.isclose(unit["scale"], 1 / counts.max())


def test_standardised_images_and_numbers_are_shown_in_their_units():
    model = vae()
    raw = X * SCALE + MEAN
    for image in (None, (2, 2)):
        rows = rows_of(model, Split("", {"x": X}), recipe=STANDARD, image=image)
        _, batch = next(rows.batches())
        shown = values_of(rows.subject, "x", batch)
        low, high = min(0, raw.min()), max(1, raw.max())
        assert np.allclose(shown, raw if image is None else (raw - low) / (high - low))
        units = pack_units(rows.subject)["x"]
        again = [unit["location"] + unit["scale"] * X[:, j] for j, unit in enumerate(units)]
        assert np.allclose(np.column_stack(again), shown)
        assert np.allclose(known_values(rows.subject, "x", batch), X)


def test_contents_beyond_the_budget_are_those_of_a_random_choice(trained):
    rows = rows_of(trained, Split("", {"x": X}))
    found = pack_contents(rows, budget=16 * 10)
    detail = unpack(found["detail"])
    assert found["count"] == len(detail) == 10
    values = unpack(found["variables"][0]["numbers"]["values"])
    assert np.allclose(values, X[detail], atol=1e-6)


def test_cells_of_all_types_have_their_texts_and_numbers():
    n = 50
    cells = pa.table(
        {
            "x": GENERATOR.normal(size=n),
            "id": pa.array([2**53 + 1 + i for i in range(n)]),
            "small": pa.array([2**31 + i for i in range(n)]),
            "name": pa.array([f"name {i}" for i in range(n)]),
            "day": pa.array([datetime.date(2020, 1, 1) + datetime.timedelta(i) for i in range(n)]),
            "yes": pa.array([None if i == 3 else i % 2 == 0 for i in range(n)]),
            "code": pa.array([None if i == 4 else 1234567.0 + i % 3 for i in range(n)]),
        }
        | {f"c{j}": GENERATOR.normal(size=n) for j in range(200)}
    )
    schema = Schema.read(cells.select(["x"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = schema.mixture(2)
    rows = rows_of(
        model, Split("", schema.encode(cells.select(["x"])), None, None, cells), schema=schema
    )
    found = {column["name"]: column for column in pack_contents(rows)["columns"]}
    assert len(found) == 207

    def texts(name):
        levels = [*found[name]["levels"], None]
        return [levels[code] for code in unpack(found[name]["codes"])]

    assert texts("id") == [str(2**53 + 1 + i) for i in range(n)]
    assert unpack(found["small"]["numbers"]["values"]).tolist() == [2**31 + i for i in range(n)]
    assert texts("name") == [f"name {i}" for i in range(n)]
    assert texts("day")[:2] == ["2020-01-01", "2020-01-02"]
    assert texts("yes")[:4] == ["True", "False", "True", None]
    assert [found[name]["modelled"] for name in ("x", "name")] == [True, False]
    names = [c["name"] for c in pack_colours(rows, measure(rows))[0]]
    assert "name" not in names  # a colour for each row would say nothing
    codes, levels = levels_of(cells["code"])
    assert levels == ["1234567", "1234568", "1234569"]
    assert codes[4] == 3
    assert levels_of(pa.chunked_array([pa.array([0.5, np.nan])]))[1] == ["0.5"]


# Sequences ----------------------------------------------------------------------------------------


def factor_at(model, name, t="t", **values):
    """p's distribution of a variable at given values of its parents, by their labels."""
    entry = model.graph.p[name][t]
    labels = {ref.label: values[ref.name] for ref in entry.key.parents}
    factor = model.factors[entry.id]
    return factor.distribution(factor(labels, [], {}))


def step_after(model, data, start, draws=3000, **given):
    """Draws of the step after the past, of one row repeated; also checks the past itself."""
    many = {name: np.repeat(value, draws, 0) for name, value in (data | given).items()}
    batch = (
        Rows.chosen(Subject("run", model, [Split("", many)]), 10**6)
        .subject.source(0)
        .take(torch.arange(draws))
    )
    found = continued(model, batch, start, seed=5)["x"]
    assert torch.equal(found[:start], batch["x"][:start])
    return found[start]


def assert_moments(drawn, mean, variance):
    """Within 5 standard errors: fails by chance in fewer than 1 of 10⁵ runs."""
    n, spread = len(drawn), variance.sqrt()
    assert ((drawn.mean(0) - mean).abs() < 5 * spread / n**0.5).all()
    error = ((drawn - mean) ** 2).std(0) / n**0.5
    assert ((((drawn - mean) ** 2).mean(0) - variance).abs() < 5 * error).all()


def test_a_continuation_of_an_autoregression_is_its_exact_prediction():
    torch.manual_seed(3)
    p = {"z[t]": Normal(1), "x[t] | x[t-1], z[t], u[t]": Normal(1, scale=0.5)}
    model = Model(p, {"z[t] | x[t]": Normal()}, given={"u": 1}).double()
    start, x, u = 3, S[:1, :, :1], S[1:2, :, :1]
    drawn = step_after(model, {"x": x}, start, u=u)
    at = {"x": torch.tensor(x[:, start - 1 : start]), "u": torch.tensor(u[:, start : start + 1])}
    zero, one = (
        factor_at(model, "x", z=torch.full((1, 1, 1), value).double(), **at) for value in (0, 1)
    )
    slope = (one.mean - zero.mean).detach()[0]
    variance = (slope**2 + zero.variance.detach()[0])[0]
    assert_moments(drawn.detach(), zero.mean.detach()[0, 0], variance)


def test_a_continuation_of_a_discrete_chain_follows_the_posterior_of_the_past():
    """Emissions are computed outside the loop over the steps."""
    torch.manual_seed(4)
    model = Model(CHAIN | {"y[0]": OneHot(3)}, {"y[t] | y[t-1], x[t]": OneHot()}).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    start, x = 3, S[:1]
    drawn = step_after(model, {"x": x}, start)
    past = Rows.chosen(Subject("run", model, [Split("", {"x": x[:, :start]})]), 1)
    _, batch = next(past.batches())
    here = posterior_of(model, model.teaching, batch, seed=0)["y"].probs[0, -1].detach()
    states = torch.eye(3).double().unsqueeze(0)
    ahead = here @ factor_at(model, "y", y=states).probs.detach()[0]
    emission = factor_at(model, "x", y=states)
    means, variances = emission.mean.detach()[0], emission.variance.detach()[0]
    mean = ahead @ means
    assert_moments(drawn.detach(), mean, ahead @ (variances + means**2) - mean**2)
    future = x.copy()
    future[:, start:] += 100.0
    assert torch.equal(drawn, step_after(model, {"x": future}, start))  # the future is not read


def test_static_latents_and_first_steps_of_a_continuation():
    torch.manual_seed(5)
    p = {
        "s": Normal(1),
        "z[0] | s": Normal(1),
        "z[t] | z[t-1], s": Normal(1),
        "x[t] | z[t], s": Normal(2),
    }
    model = Model(p, {"s | x[T]": Normal(), "z[t] | x[t]": Normal()}).double()
    drawn = step_after(model, {"x": S[:1]}, 2, draws=50)
    assert drawn.std() > 0
    rows = Rows.chosen(Subject("run", model, [Split("", {"x": RAGGED})]), 100)
    found = pack_continuations(rows, 0)
    lengths = np.array([len(row) for row in RAGGED])
    assert (lengths[found["rows"]] >= found["shape"][2]).all()
    values = unpack(found["numbers"]["values"])
    for i, row in enumerate(found["rows"]):
        past = np.broadcast_to(RAGGED[row][: found["start"]], values[i, :, : found["start"]].shape)
        assert np.allclose(values[i, :, : found["start"]], past, atol=1e-6)
        ahead = values[i, :, found["start"] :]
        assert len(np.unique(ahead.round(6), axis=0)) == len(ahead)
    assert to_json(found) == to_json(pack_continuations(rows, 0))


def test_sequences_with_missing_entries_have_a_map():
    model = Model(CHAIN, {"y[t] | y[t-1], x[t]": OneHot()}).double()
    x = S.copy()
    x[0, 2] = x[1, 3, 0] = np.nan
    fit(model, {"x": x}, **QUIET)
    found = mapped(model, {"x": x})
    assert found["problems"] == []
    values = unpack(found["contents"]["variables"][0]["numbers"]["values"])
    assert (np.isnan(values) == np.isnan(x)).all()
    assert not {0, 1} & set(found["continuations"]["rows"])


def test_a_live_map_is_small_and_has_no_slow_parts(trained, monkeypatch):
    monkeypatch.setattr("aevb.page.sections.LIVE_ROWS", 15)
    subject = Subject("run", trained, [Split("", {"x": X})])
    found = map_section(subject, lambda _: None, live=True)
    assert found["rows"]["count"] == 15
    assert [view["kind"] for view in found["spaces"][0]["views"]] == ["principal"]
    assert "log p" not in [colour["name"] for colour in found["colours"]]
