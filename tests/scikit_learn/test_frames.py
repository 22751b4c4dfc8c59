"""Frames with text, categories and missing cells."""

import datetime
import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from aevb import Schema
from aevb.runtime.checked_files import DataWarning
from aevb.sklearn import (
    DensityOutlierDetector,
    FactorAnalysis,
    LatentImputer,
    MixtureClusterer,
    SemiSupervisedClassifier,
    TableDensity,
    VariationalAutoencoder,
)


def flowers(n=200, seed=0):
    """Two kinds of flowers: colour, size and number of petals depend on the kind."""
    random = np.random.default_rng(seed)
    kind = random.integers(0, 2, n)
    colours = np.where(random.random(n) < 0.9, kind, 1 - kind)
    frame = pd.DataFrame(
        {
            "colour": np.array(["red", "blue"], dtype=object)[colours],
            "width": random.normal(3.0 + 2 * kind, 0.5),
            "height": random.normal(10.0 - 4 * kind, 1.0),
            "petals": random.poisson(4 + 8 * kind),
        },
        index=np.arange(n) * 10,
    )
    return frame, kind


def with_holes(frame, seed=1):
    lost = np.random.default_rng(seed).random(frame.shape) < 0.1
    return frame.mask(lost), lost


FRAME, KIND = flowers()
HOLES, LOST = with_holes(FRAME)
NAMES = [f"flower {i}" for i in range(200)]


@pytest.mark.parametrize("kind", ["diag", "full"])
def test_clusters_of_a_frame_read_all_columns(kind):
    found = MixtureClusterer(2, covariance_type=kind, n_init=3, random_state=0).fit(HOLES)
    assert max((found.labels_ == KIND).mean(), (found.labels_ != KIND).mean()) > 0.97
    assert list(found.feature_names_in_) == list(FRAME.columns)
    np.testing.assert_allclose(found.predict_proba(HOLES).sum(1), 1)
    rows, clusters = found.sample(6)
    assert list(rows.columns) == list(FRAME.columns)
    assert set(rows["colour"]) <= {"red", "blue"}
    assert clusters.shape == (6,)
    copy = pickle.loads(pickle.dumps(found))
    np.testing.assert_array_equal(copy.score_samples(HOLES), found.score_samples(HOLES))


def test_log_p_of_a_frame_is_that_of_its_schema():
    found = MixtureClusterer(2, random_state=0).fit(HOLES)
    schema = Schema.read(HOLES)
    data = schema.encode(HOLES)
    expected = found.model_.log_evidence(**data).value.detach().numpy()
    np.testing.assert_allclose(
        found.score_samples(HOLES), expected + schema.log_jacobian(HOLES), atol=1e-12
    )


def test_free_parameters_of_a_frame_are_counted():
    found = MixtureClusterer(2, random_state=0).fit(FRAME)
    # One probability of a cluster; in each cluster two means, two scales, a rate and a colour; and
    # one dispersion of the counts.
    assert found._free_parameters() == 1 + 2 * (2 + 2 + 1 + 1) + 1


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_cells_of_a_frame_are_filled_with_levels_and_numbers(library):
    frame = HOLES
    if library == "polars":
        frame = pytest.importorskip("polars").from_pandas(HOLES)
    imputer = LatentImputer(MixtureClusterer(2, n_init=3), random_state=0).fit(frame)
    filled, deviation = imputer.transform(frame, return_std=True)
    assert type(filled) is type(frame)
    if library == "polars":
        filled, deviation = filled.to_pandas(), deviation.to_pandas()
    else:
        pd.testing.assert_index_equal(filled.index, HOLES.index)
    assert not filled.isna().to_numpy().any()
    known = ~LOST
    np.testing.assert_array_equal(filled.to_numpy()[known], HOLES.to_numpy()[known])
    assert (deviation.to_numpy()[known] == 0).all()
    assert (deviation.to_numpy()[LOST] > 0).all()
    lost = LOST[:, 0]
    assert (filled["colour"].to_numpy() == FRAME["colour"].to_numpy())[lost].mean() > 0.75
    draws = imputer.draw(frame, n_draws=3)
    assert len(draws) == 3
    assert type(draws[0]) is type(frame)


@pytest.mark.parametrize("library", ["pandas", "polars"])
@pytest.mark.parametrize(
    "constant",
    ["north", 7, 1.5, True, datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3, 4)],
)
def test_holes_of_a_constant_column_are_filled_with_the_constant(library, constant):
    cells = [constant, None] * 100
    frame = HOLES.assign(place=pd.Series(cells, dtype=object, index=HOLES.index), name=NAMES)
    if library == "polars":
        polars = pytest.importorskip("polars")
        frame = polars.from_pandas(HOLES).with_columns(
            place=polars.Series(cells), name=polars.Series(NAMES)
        )
    imputer = LatentImputer(MixtureClusterer(2), random_state=0).fit(frame)
    filled, deviation = imputer.transform(frame, return_std=True)
    for one in (filled, *imputer.draw(frame, n_draws=2)):
        assert list(one["place"]) == [constant] * 200
        assert list(one["name"]) == NAMES
    assert list(deviation.columns) == list(frame.columns)
    assert not np.asarray(deviation[["place", "name"]]).any()


@pytest.mark.filterwarnings("ignore:.*price. is 1000 · .width.[.]")
def test_holes_of_amounts_are_filled_in_their_form():
    price = [f"${1000 * width:,.2f}" for width in FRAME["width"]]
    almost = ["$10,000,000,000,000.01", "$10,000,000,000,000.02"] * 100  # equal up to rounding
    frame = HOLES.assign(price=price, fee="$5", almost=almost)
    frame.iloc[::9, -3:] = None
    filled = LatentImputer(MixtureClusterer(2), random_state=0).fit_transform(frame)
    assert filled["price"].str.fullmatch(r"\$\d,\d{3}\.\d\d|\$\d{3}\.\d\d").all()
    known = frame["price"].notna()
    assert (filled["price"][known] == frame["price"][known]).all()
    assert (filled["fee"] == "$5").all()
    assert set(filled["almost"]) == set(almost)


def test_categories_with_one_level_in_use_are_filled():
    place = pd.Categorical(["north", None] * 100, categories=["north", "south"])
    frame = HOLES.assign(place=place)
    filled = LatentImputer(MixtureClusterer(2), random_state=0).fit_transform(frame)
    assert list(filled["place"]) == ["north"] * 200
    assert filled["place"].dtype == frame["place"].dtype


def test_holes_of_a_column_that_is_left_out_are_refused():
    whole = HOLES.assign(name=NAMES)
    holes = whole.assign(name=[None, *NAMES[1:]])
    refused = pytest.raises(ValueError, match="Column 'name' has 1 missing cell, .*identifier.*Dro")
    imputer = LatentImputer(MixtureClusterer(2), random_state=0)
    with refused:
        imputer.fit(holes)
    imputer.fit(whole)
    for method in (imputer.transform, imputer.draw):
        with refused:
            method(holes)
    with pytest.raises(ValueError, match="Column 'name' has 200 missing cells, .*every cell"):
        imputer.fit(whole.assign(name=np.nan))


def test_outliers_of_a_frame_break_its_pattern():
    odd = pd.DataFrame(
        {"colour": ["red"], "width": [5.0], "height": [10.0], "petals": [12]}, index=[1]
    )
    detector = DensityOutlierDetector(
        MixtureClusterer(2, n_init=3), contamination=0.02, random_state=0
    ).fit(FRAME)
    assert detector.predict(odd).tolist() == [-1]
    assert (detector.predict(FRAME) == -1).sum() == 4


def test_units_of_a_frame_do_not_change_its_outliers():
    random = np.random.default_rng(0)
    frame = HOLES.assign(mass=np.exp(random.normal(KIND, 1.5))).astype({"colour": "category"})
    frame.loc[random.random(200) < 0.2, "mass"] = np.nan
    assert Schema.read(frame)["mass"].kind == "positive"
    detector = DensityOutlierDetector(MixtureClusterer(2, n_init=2), random_state=0)
    scores = detector.fit(frame).score_samples(frame)
    whole = frame.notna().all(axis=1)
    log_p = detector.estimator_.score_samples(frame)
    np.testing.assert_array_equal(np.argsort(scores[whole]), np.argsort(log_p[whole]))
    other = frame.assign(mass=frame["mass"] * 1e3, width=frame["width"] * 1e-3)
    np.testing.assert_allclose(detector.fit(other).score_samples(other), scores, atol=1e-4)


def test_codes_of_a_frame_predict_in_a_pipeline():
    pipeline = make_pipeline(
        VariationalAutoencoder(2, max_iter=60, random_state=0), LogisticRegression()
    )
    assert cross_val_score(pipeline, HOLES, KIND, cv=2).mean() > 0.9
    codes = pipeline.fit(HOLES, KIND)[0]
    back = codes.inverse_transform(codes.transform(HOLES))
    assert list(back.columns) == list(FRAME.columns)
    assert (back["colour"].to_numpy() == FRAME["colour"].to_numpy()).mean() > 0.8


@pytest.mark.parametrize(("rows", "parts"), [(4, 1), (30, 1), (70, 9)])
def test_the_default_density_has_few_parts_for_few_rows(rows, parts):
    frame = HOLES[:rows]
    imputer = LatentImputer(random_state=0).fit(frame)
    assert imputer.estimator_.model_.graph.size("part") == parts
    assert not imputer.transform(frame).isna().to_numpy().any()
    detector = DensityOutlierDetector(random_state=0).fit(frame)
    assert detector.estimator_.model_.graph.size("part") == parts
    assert set(detector.predict(frame)) == {-1, 1}


def test_the_default_density_is_that_of_the_schema():
    schema = Schema.read(HOLES)
    expected = schema.fit_default(HOLES, seed=TableDensity(random_state=3)._seed())
    found = TableDensity(random_state=3).fit(HOLES)
    np.testing.assert_array_equal(found.score_samples(HOLES), expected.score(HOLES)["log_p"])


@pytest.mark.parametrize("library", ["pandas", "polars"])
@pytest.mark.parametrize(
    ("training", "new", "was"),
    [
        ("north", "south", "was always north"),
        (7, 8, "was always 7"),
        (1.5, 2.5, "was always 1.5"),
        (True, False, "was always True"),
        (datetime.date(2020, 1, 2), datetime.date(2021, 1, 2), "was always 2020-01-02"),
        (None, "south", "had no known cell"),
    ],
)
def test_other_values_of_a_constant_column_warn(library, training, new, was):
    def read(value):
        frame = FRAME.assign(place=[value] * 200)
        return frame if library == "pandas" else polars.from_pandas(frame)

    if library == "polars":
        polars = pytest.importorskip("polars")
    found = MixtureClusterer(2, random_state=0).fit(read(training))
    before = found.score_samples(read(training))
    with pytest.warns(DataWarning, match=f"Column 'place' {was} in the training rows.*200 of"):
        np.testing.assert_array_equal(found.score_samples(read(new)), before)
    detector = DensityOutlierDetector(MixtureClusterer(2), random_state=0).fit(read(training))
    with pytest.warns(DataWarning, match="Column 'place'"):
        detector.predict(read(new))


def test_a_frame_of_numbers_is_read_as_an_array():
    numbers = FRAME[["width", "height"]]
    by_frame = MixtureClusterer(2, random_state=0).fit(numbers)
    by_array = MixtureClusterer(2, random_state=0).fit(numbers.to_numpy())
    np.testing.assert_array_equal(
        by_frame.score_samples(numbers), by_array.score_samples(numbers.to_numpy())
    )


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_text_in_the_place_of_a_number_is_named(library):
    frame, numbers = FRAME, FRAME.assign(colour=FRAME["colour"] == "red")
    if library == "polars":
        polars = pytest.importorskip("polars")
        frame, numbers = polars.from_pandas(frame), polars.from_pandas(numbers)
    classifier = SemiSupervisedClassifier(max_iter=2, random_state=0)
    wanted = "SemiSupervisedClassifier reads numbers, but column 'colour' .*OneHotEncoder"
    with pytest.raises(ValueError, match=wanted):
        classifier.fit(frame, KIND)
    classifier.fit(numbers, KIND)
    with pytest.raises(ValueError, match=wanted):
        classifier.predict(frame)
    encode = ColumnTransformer(
        [("levels", OneHotEncoder(sparse_output=False), ["colour"])], remainder="passthrough"
    )
    assert make_pipeline(encode, classifier).fit(frame, KIND).predict(frame).shape == (200,)


def test_frames_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="FactorAnalysis reads numbers"):
        FactorAnalysis(1).fit(FRAME)
    with pytest.raises(ValueError, match="needs columns of numbers"):
        MixtureClusterer(2, covariance_type="tied").fit(FRAME)
    found = MixtureClusterer(2, random_state=0).fit(FRAME)
    with pytest.raises(ValueError, match="feature names should match"):
        found.predict(FRAME.drop(columns="colour"))
    with pytest.raises(ValueError, match="green"):
        found.predict(FRAME.assign(colour="green"))
