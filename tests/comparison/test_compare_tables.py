"""Comparison of models of tables: log p is a density of the columns."""

import numpy as np
import pytest

from aevb import Schema, compare

GENERATOR = np.random.default_rng(0)
KIND = GENERATOR.integers(2, size=400)
FRAME = {
    "mass": np.exp(GENERATOR.normal(3 + KIND, 0.8)),
    "length": GENERATOR.normal(10 * KIND, 1.0),
    "sex": np.array(["f", "m"])[GENERATOR.integers(2, size=400)],
    "eggs": GENERATOR.poisson(3 + 4 * KIND),
}
FRAME["length"][::17] = np.nan


def part(rows: slice) -> dict:
    return {name: values[rows] for name, values in FRAME.items()}


TRAIN, TEST = part(slice(300)), part(slice(300, None))


@pytest.fixture(scope="module")
def schema():
    return Schema.read(TRAIN)


def test_the_evidence_is_the_score_of_the_table(schema):
    tables = {f"{k} clusters": schema.fit(schema.mixture(k), TRAIN) for k in (1, 2)}
    found = compare(tables, TEST)
    for name, table in tables.items():
        score = np.asarray(table.score(TEST)["log_p"], dtype=float)
        assert found[name].evidence == pytest.approx(score, abs=1e-9)
        assert found[name].method == "exact"
    assert found.best.name == "2 clusters"
    assert found.verdict("1 clusters") == "worse"
    assert "of the columns in their own units" in str(found)


def test_kinds_with_a_density_compare_in_the_units_of_the_column(schema):
    """A density of mass and a density of log mass are both densities of mass."""
    real = schema.with_kind("mass", "real")
    assert schema["mass"].kind == "positive"
    found = compare(
        {
            "log-normal": schema.fit(schema.mixture(2), TRAIN),
            "normal": real.fit(real.mixture(2), TRAIN),
        },
        TEST,
    )
    assert found.best.name == "log-normal"
    assert found.difference("normal").told is True


def test_other_columns_and_other_quantities_are_refused(schema):
    full = schema.fit(schema.mixture(1), TRAIN)
    less = schema.without("eggs")
    with pytest.raises(ValueError, match=r"log p\(eggs, length, mass, sex\) and less gives"):
        compare({"full": full, "less": less.fit(less.mixture(1), TRAIN)}, TEST)
    real = schema.with_kind("eggs", "real")
    with pytest.raises(ValueError, match="eggs: full gives probabilities, real gives densities"):
        compare({"full": full, "real": real.fit(real.mixture(1), TRAIN)}, TEST)
    with pytest.raises(ValueError, match="full is a model of a table and plain is not"):
        compare({"full": full, "plain": full.model}, TEST)


def test_schemas_with_other_missing_cells_are_refused():
    """A cell that one model reads and another marginalises out would favour the second."""
    texts = np.where(np.arange(400) % 10 == 0, "none", FRAME["sex"])
    frame = {"length": FRAME["length"], "sex": texts}
    tables = {}
    for name, words in (("missing", ("none",)), ("level", ())):
        schema = Schema.read(frame, missing=words)
        tables[name] = schema.fit(schema.mixture(2), frame)
    message = "Column 'sex': missing reads 360 of 400 cells and level 400"
    with pytest.raises(ValueError, match=message):
        compare(tables, frame)
    with pytest.raises(ValueError, match="Column 'sex': level reads 400 of 400 cells"):
        compare(dict(reversed(tables.items())), frame)
    known = {name: cells[texts != "none"] for name, cells in frame.items()}
    assert compare(tables, known).rows == 360


def test_runs_of_tables_are_read_from_their_folders(schema, tmp_path):
    table = schema.fit(schema.mixture(2), TRAIN, out=tmp_path / "run")
    found = compare({"memory": table, "folder": tmp_path / "run"}, TRAIN)
    assert np.array_equal(found["memory"].evidence, found["folder"].evidence)
    # The rows are the training rows, so that AIC and BIC have a meaning: 1 for the clusters, for
    # each cluster two means, two scales, one probability and one rate, and 1 dispersion for all.
    assert schema["eggs"].likelihood == "NegativeBinomial"
    assert found["folder"].free == 1 + 2 * (2 + 2 + 1 + 1) + 1


def test_numbers_are_names_too():
    schema = Schema.read(FRAME)
    models = {k: schema.fit(schema.mixture(k), FRAME, seed=0) for k in (1, 2)}
    assert {"1", "2"} <= set(str(compare(models, FRAME)).split())


def test_a_joined_mixture_has_no_aic_and_bic(schema):
    rows = part(slice(0, 60))
    models = {
        "joined": schema.fit_default(rows),
        "mixture": schema.fit(schema.mixture(1), rows, progress=False),
    }
    found = compare(models, rows, criteria=True)
    assert (found["joined"].aic, found["joined"].bic, found["joined"].free) == (None, None, None)
    assert found["mixture"].bic is not None
    line = next(line for line in str(found).splitlines() if " joined " in line)
    assert line.split().count("–") == 4  # AIC, BIC, free parameters and seconds
    assert any("training rows of mixture, of which" in note for note in found.notes)
    assert (
        "AIC and BIC are not computed for joined: mixtures joined into one do not maximise the "
        "likelihood."
    ) in found.notes
