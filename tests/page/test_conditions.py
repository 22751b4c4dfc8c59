"""Classes, given variables, labels and supports of the rows, and what a page says of them."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from aevb import Bernoulli, Beta, Model, Normal, OneHot, Poisson, Schema, conv, fit, mlp
from aevb.data.grey_levels import dequantise
from aevb.page import checks, clusters, conditions, sections
from aevb.page.clusters import pack_clusters
from aevb.page.colours import classes, number, pack_colours
from aevb.page.conditions import pack_classes, pack_given
from aevb.page.contents import dates_of, pack_contents, whole_table
from aevb.page.decoder import plane
from aevb.page.latent_map import pack_space, spaces
from aevb.page.measures import SLOWER, Measures, measure, work_of
from aevb.page.packing import unpack
from aevb.page.sections import Opened, map_section, section
from aevb.page.subject import Rows, Split, Subject

GENERATOR = np.random.default_rng(0)
N = 50
X = GENERATOR.normal(size=(N, 4))
U = GENERATOR.normal(3, 2, size=(N, 1))
W = GENERATOR.normal(size=(N, 3))
K = GENERATOR.integers(1, 4, size=N)


def given_model():
    torch.manual_seed(0)
    return Model(
        {"z": Normal(2), "x | z, u, w, k": Normal(4)},
        {"z | x": Normal()},
        given={"u": 1, "w": 3, "k": 4},
    ).double()


def rows_of(model, data, labels=None, **more):
    return Rows.chosen(Subject("run", model, [Split("", data, labels)], **more), 10**6)


# Given variables ----------------------------------------------------------------------------------


def test_given_variables_are_packed_per_row_in_the_units_of_the_model():
    found = pack_given(rows_of(given_model(), {"x": X, "u": U, "w": W, "k": K}))
    assert list(found) == ["u", "w", "k"]
    for name, values in (("u", U), ("w", W)):
        one = found[name]
        assert not one["categorical"]
        np.testing.assert_allclose(unpack(one["values"]), values, rtol=1e-6)
        np.testing.assert_allclose(one["usual"], values.mean(0), rtol=1e-6)
        assert one["low"] == pytest.approx(values.min(0))
        assert one["units"][0] == {"location": 0.0, "scale": 1.0}
    assert found["u"]["names"] == ["u"]
    assert found["w"]["names"] == ["w0", "w1", "w2"]
    assert found["k"]["categorical"]
    assert (unpack(found["k"]["values"]) == K).all()
    assert found["k"]["usual"].index(1.0) == np.bincount(K).argmax()


def test_a_variable_whose_first_rows_look_like_classes_is_judged_by_all_rows(monkeypatch):
    monkeypatch.setattr("aevb.page.subject.Rows.batches.__defaults__", (10,))
    w = np.eye(3)[GENERATOR.integers(3, size=N)]
    w[-1] = [0.2, 0.3, 0.5]
    found = pack_given(rows_of(given_model(), {"x": X, "u": U, "w": w, "k": K}))
    assert not found["w"]["categorical"]


def test_given_values_beyond_the_budget_are_left_out(monkeypatch):
    monkeypatch.setattr(conditions, "BUDGET", 300)
    found = pack_given(rows_of(given_model(), {"x": X, "u": U, "w": W, "k": K}))
    assert found["w"]["values"] is None
    assert found["u"]["values"] is not None


def test_decoded_grids_hold_given_variables_at_their_usual_value(monkeypatch):
    model, held = given_model(), {}

    def watched(*arguments):
        held.update(arguments[-1])
        return plane(*arguments)

    monkeypatch.setattr(sections, "plane", watched)
    monkeypatch.setattr(sections, "export", lambda *_, **__: {"runs": False, "why": "No."})
    subject = Subject("run", model, [Split("", {"x": X, "u": U, "w": W, "k": K})])
    found = map_section(subject, lambda _: None)
    assert held["u"] == pytest.approx(U.mean(0), rel=1e-6)
    assert len(found["decoder"]["planes"]) == 1


# Clusters and classes -----------------------------------------------------------------------------


def mixture(k=3):
    torch.manual_seed(0)
    return Model({"y": OneHot(k, learned=True), "x | y": Normal(4)}, {"y | x": OneHot()})


def test_rows_without_a_finite_posterior_are_in_no_cluster():
    probs = GENERATOR.dirichlet(np.ones(3), size=N).astype(np.float32)
    probs[[4, 8]] = np.nan
    rows = rows_of(mixture(), {"x": X})
    found = Measures({"y": probs}, "q", {})
    assert np.flatnonzero(unpack(pack_classes(rows, found)["y"]["values"]) == 65535).tolist() == [
        4,
        8,
    ]
    (one,) = pack_clusters(rows, found, np.ones(N, bool), 0)
    assert one["undecided"] == 2
    assert sum(cluster["size"] for cluster in one["clusters"]) == N - 2
    members = [row for cluster in one["clusters"] for row in cluster["typical"]]
    assert not {4, 8} & set(members)
    colour = next(c for c in pack_colours(rows, found)[0] if c["name"] == "cluster y")
    assert np.flatnonzero(unpack(colour["values"]) == 3).tolist() == [4, 8]


def test_shares_of_labels_count_the_labelled_rows():
    labels = np.full(N, -1)
    labels[:6] = [0, 0, 0, 0, 1, 1]
    probs = np.tile([0.9, 0.05, 0.05], (N, 1))
    rows = rows_of(mixture(), {"x": X}, labels)
    (one,) = pack_clusters(rows, Measures({"y": probs}, "q", {}), np.ones(N, bool), 0)
    first = one["clusters"][0]
    assert (first["size"], first["labelled"], first["labels"]) == (N, 6, [[0, 4], [1, 2]])


def test_the_largest_clusters_are_listed_with_their_own_draws(monkeypatch):
    monkeypatch.setattr(clusters, "MOST", 2)
    probs = np.zeros((N, 4))
    probs[np.arange(N), np.repeat([3, 1, 0], [30, 15, 5])] = 1
    model = mixture(4)
    rows = rows_of(model, {"x": X})
    (one,) = pack_clusters(rows, Measures({"y": probs}, "q", {}), np.ones(N, bool), 0)
    assert [(c["number"], c["size"]) for c in one["clusters"]] == [(1, 15), (3, 30)]
    assert (one["count"], one["empty"]) == (4, 1)
    drawn = unpack(one["draws"]["numbers"]["values"]).reshape(2, clusters.DRAWN, 4)
    for place, k in enumerate((1, 3)):
        wanted = model.sample(clusters.DRAWN, mean=False, seed=k, y=k)["x"]
        np.testing.assert_allclose(drawn[place], wanted.detach().numpy(), rtol=1e-6)


# Supports -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "support", "whole"),
    [
        (Normal, [None, None], False),
        (Bernoulli, [0.0, 1.0], True),
        (Beta, [0.0, 1.0], False),
        (Poisson, [0.0, None], True),
    ],
)
def test_spaces_know_the_support_of_their_latent(family, support, whole):
    model = Model({"z": family(3), "x | z": Normal(4)}, {"z | x": family()})
    (space,) = spaces(model.graph, {"z": GENERATOR.random((20, 3)).astype(np.float32)}, None)
    packed = pack_space(space, 0)
    assert (packed["support"], packed["whole"]) == (support, whole)


# Colours ------------------------------------------------------------------------------------------


def test_an_outlier_does_not_coarsen_the_numbers_of_the_other_rows():
    values = GENERATOR.normal(size=1000)
    assert "low" in number("a", values)
    values[3] = -1e6
    found = number("a", values)
    assert found["values"]["$"] == "f4"
    np.testing.assert_allclose(unpack(found["values"]), values, rtol=1e-6)
    values[4], values[5] = np.nan, np.inf
    assert np.flatnonzero(np.isnan(unpack(number("a", values)["values"]))).tolist() == [4, 5]
    assert "low" in number("a", np.where(np.arange(1000) == 3, 1e300, 0.0))


def table_of(frame, **kinds):
    schema = Schema.read(frame, **kinds)
    encoded = schema.encode(frame.select([c for c in frame.column_names if c in schema]))
    return schema, Split("", encoded, None, None, frame)


def test_columns_are_coloured_by_their_kind_and_those_without_colours_are_named():
    n = 60
    frame = pa.table(
        {
            "x": GENERATOR.normal(size=n),
            "year": 2000 + np.arange(n) % 5,
            "day": pa.array(np.arange(n).astype("datetime64[D]")),
            "name": pa.array([f"name {i}" for i in range(n)]),
        }
    )
    schema, split = table_of(frame, kinds={"year": "category"})
    model = schema.mixture(2)
    rows = Rows.chosen(Subject("run", model, [split], schema=schema), 10**6)
    found, left = pack_colours(rows, measure(rows))
    colours = {one["name"]: one for one in found}
    assert (colours["year"]["kind"], colours["year"]["levels"]) == (
        "class",
        [str(2000 + k) for k in range(5)],
    )
    assert (unpack(colours["year"]["values"]) == np.arange(n) % 5).all()
    assert colours["day"]["date"]
    assert left == ["The map has no colours for name: more than 40 different texts."]
    assert dates_of(frame["day"]).tolist() == list(range(n))


def test_a_column_of_texts_in_one_split_and_numbers_in_another_is_one_of_texts():
    parts = [
        pa.table({"x": X[:5, 0], "id": pa.array([1, 2, 3, 4, 5])}),
        pa.table({"x": X[5:8, 0], "id": pa.array(["a", None, "7"])}),
    ]
    schema = Schema.read(parts[0].select(["x"]))
    splits = [Split(str(i), schema.encode(one.select(["x"])), None, None, one) for i, one in
              enumerate(parts)]  # fmt: skip
    rows = Rows.chosen(Subject("run", schema.mixture(2), splits, schema=schema), 100)
    assert whole_table(rows)["id"].to_pylist() == ["1", "2", "3", "4", "5", "a", None, "7"]
    assert whole_table(rows)["x"].to_pylist() == X[:8, 0].tolist()
    columns = {one["name"]: one for one in pack_contents(rows)["columns"]}
    assert columns["id"]["levels"] == ["1", "2", "3", "4", "5", "a", "7"]


# Labels and arguments of run.page -----------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    torch.manual_seed(0)
    x = GENERATOR.random((N, 64))
    model = Model({"z": Normal(2), "x | z": Normal(64)}, {"z | x": Normal(net=mlp(4))})
    return fit(model, {"x": x}, steps=5, log_every=1), x


def only_map(monkeypatch):
    monkeypatch.setattr(sections, "checks", lambda *_, **__: {"problems": []})


def test_labels_are_numbers_or_texts(run, monkeypatch):
    only_map(monkeypatch)
    trained, x = run
    words = np.array(["cat", "dog", None], dtype=object)[np.arange(N) % 3]
    (found,) = trained.page({"x": x}, words).content["runs"]
    colour = found["map"]["colours"][0]
    assert (colour["name"], colour["levels"]) == ("label", ["cat", "dog"])
    assert (unpack(colour["values"]) == np.arange(N) % 3).all()
    with pytest.raises(ValueError, match=r"labels\[2\] is .*0.5"):
        trained.page({"x": x}, np.where(np.arange(N) == 2, 0.5, 1.0))


def test_a_wrong_name_in_the_data_is_refused_by_name(run):
    trained, x = run
    with pytest.raises(ValueError, match="X"):
        trained.page({"X": x})


def test_fresh_levels_and_file_names_have_pages(run, monkeypatch, tmp_path):
    only_map(monkeypatch)
    trained, x = run
    np.save(tmp_path / "x.npy", x)
    grey = GENERATOR.integers(256, size=(N, 64))
    for data in (dequantise(grey, fresh=True), np.load(tmp_path / "x.npy", mmap_mode="r")):
        (found,) = trained.page({"x": data}).content["runs"]
        assert found["problems"] == []
        assert found["map"]["contents"]["variables"][0]["image"] == [8, 8]


def test_the_shape_of_images_is_guessed_from_few_rows_of_a_mapped_file(run, tmp_path, monkeypatch):
    from aevb.page import notebook

    trained, x = run
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    monkeypatch.setattr(notebook, "GREY_ROWS", 3)
    subject = Subject("run", trained.model, [Split("", {"x": mapped})])
    source, taken = subject.source(0), []
    take = source.take
    monkeypatch.setattr(source, "take", lambda rows: (taken.append(len(rows)), take(rows))[1])
    assert notebook._image(subject) == (8, 8)
    assert taken == [3]


# Failures -----------------------------------------------------------------------------------------


def test_an_unexpected_error_costs_one_part_only(run, monkeypatch):
    trained, x = run

    def fail(*_, **__):
        raise pa.ArrowTypeError("no such type")

    monkeypatch.setattr(sections, "pack_contents", fail)
    subject = Subject("run", trained.model, [Split("", {"x": x})], run=trained)
    found = section(Opened("run", model=trained.model, subject=subject), "map")
    assert found["problems"] == ["The map could not be made: ArrowTypeError: no such type"]


def test_work_is_estimated_for_a_q_that_cannot_be_reparametrised():
    model = Model({"z": Poisson(2), "x | z": Normal(4)}, {"z | x": Poisson()})
    batch = next(rows_of(model, {"x": X}).batches())[1]
    assert work_of(model, batch) == sum(p.numel() for p in model.parameters())


def test_classes_keep_unknown_levels():
    assert unpack(classes("a", np.array([0, -1, 2, 1]), ["p", "q"])["values"]).tolist() == [
        0,
        2,
        2,
        1,
    ]


# Units --------------------------------------------------------------------------------------------


def test_densities_and_statistics_of_grey_levels_name_their_units(monkeypatch):
    from aevb.data.datasets import Recipe

    found = {"evidence": {"notes": ["a note"]}, "gap": None, "predictive": {}}
    monkeypatch.setattr(sections, "checks", lambda *_, **__: found)
    torch.manual_seed(0)
    model = Model({"z": Normal(2), "x | z": Normal(4)}, {"z | x": Normal()})
    data = {"x": GENERATOR.random((N, 4))}
    recipe = Recipe("digits", prepare="dequantise", levels=17)
    subject = Subject("run", model, [Split("", data)], recipe=recipe)
    sections.checks_section(subject, lambda _: None)
    of = "x with grey levels from 0 to 1 (dequantise)"
    nats = 4 * np.log(17)
    assert found["evidence"]["notes"] == [
        "a note",
        f"Bounds and log p are of {of}. For the units of the data add {-nats:.3f} nats per row "
        f"(x, no cell missing).",
    ]
    assert found["predictive"]["notes"] == [
        f"Statistics are of {of}, not in the units of the data."
    ]
    notes = {c["name"]: c["note"] for c in map_section(subject, lambda _: None)["colours"][:3]}
    assert all(of in notes[name] for name in ("log p", "ELBO"))
    standard = Recipe("x", prepare="standardise", mean=[0.0] * 4, scale=[2.0] * 4)
    found |= {"evidence": {"notes": []}, "predictive": {}}
    sections.checks_section(Subject("run", model, [Split("", data)], recipe=standard), print)
    assert found["evidence"]["notes"] == []  # converted to the units of the data
    assert "standardised x" in found["predictive"]["notes"][0]


def test_the_predictive_check_of_a_table_names_its_columns(monkeypatch):
    for part in ("_examined", "_estimated"):
        monkeypatch.setattr(checks, part, lambda *_, **__: {})
    monkeypatch.setattr(checks, "REPLICATES", 20)
    frame = pa.table(
        {
            "income": np.exp(GENERATOR.normal(size=N)),
            "age": GENERATOR.normal(50, 5, N),
            "visits": GENERATOR.negative_binomial(1, 0.2, N),
            "city": ["Bonn", "Lyon", "Nice", "Kiel", "Graz"] * (N // 5),
        }
    )
    schema, split = table_of(frame)
    subject = Subject("run", schema.mixture(2), [split], schema=schema)
    found = sections.checks_section(subject, lambda _: None)["predictive"]
    labels = {one["label"] for one in found["comparisons"]}
    assert {"max(income)", "sd(age)", "zeros(visits)"} <= labels
    assert not any("(x" in label or "overdispersed" in label for label in labels)


# Devices ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("timed", [False, True])
def test_a_model_on_a_gpu_has_a_whole_page_and_stays_there(timed):
    torch.manual_seed(0)
    step = "[t]" if timed else ""
    model = Model(
        {f"z{step}": Normal(2), f"x{step} | z{step}": Normal(4)}, {f"z{step} | x{step}": Normal()}
    ).to("cuda")
    data = {"x": GENERATOR.normal(size=(N, 6, 4) if timed else (N, 4)).astype(np.float32)}
    found = fit(model, data, steps=5, log_every=5).page(data)
    assert found.problems == []
    assert found.content["runs"][0]["checks"]["gap"] is not None
    assert model._parameter().is_cuda


def test_work_counts_every_place_of_a_convolution():
    model = Model(
        {"z": Normal(2), "x | z": Normal((1, 8, 8), net=mlp(4))},
        {"z | x": Normal(net=conv(3, hidden=5))},
        seed=0,
    )
    batch = model.prepare(x=torch.zeros(6, 1, 8, 8))
    (kernel,) = (one for one in model.parameters() if one.dim() == 4)
    dense = sum(one.numel() for one in model.parameters())
    places = (work_of(model, batch) - dense) / SLOWER / kernel.numel()
    assert places == 4 * 4  # a stride of 2 on 8 × 8 pixels


def test_labels_that_are_numbers_may_have_names(run):
    trained, x = run
    labels = np.arange(len(x)) % 2
    content = trained.page({"x": x}, labels, names=("cross", "ring"), rows=20).content
    (colour,) = [one for one in content["runs"][0]["map"]["colours"] if one["name"] == "label"]
    assert colour["levels"] == ["cross", "ring"]
    for given, said in ((labels + 1, "2 names, but labels has the class 2"), (None, "not given")):
        with pytest.raises(ValueError, match=said):
            trained.page({"x": x}, given, names=("cross", "ring"))
