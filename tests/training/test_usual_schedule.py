"""Tests of the schedule that a run takes if the user names none."""

import csv
from pathlib import Path

import numpy as np
import pytest

import aevb.training.usual_schedule as usual
from aevb import Model, Normal, diagnose, em, fit, joint, linear, mle, zoo
from aevb.runtime.checked_files import DataWarning
from aevb.training.events import LOOSE, SCHEDULE, events

with (Path(__file__).parents[2] / "docs/data/nile.csv").open() as file:
    NILE = np.array([float(row["volume"]) for row in csv.DictReader(file)]).reshape(1, -1, 1)


def test_a_local_level_in_raw_units_is_trained_by_maximum_likelihood():
    model = zoo.local_level().double()
    run = fit(model, {"x": NILE}, progress=False)
    assert run.settings.schedule == mle()
    assert run.history["evidence"][-1] == pytest.approx(-647.2801, abs=1e-3)
    (event,) = events(run.rows, SCHEDULE)
    assert event.text.startswith("No schedule was given: fit takes mle(), because log p")
    assert event.remedy == "To train the bound instead, use schedule=joint() (--schedule joint)."
    found = diagnose(model, {"x": NILE}, run=run)
    assert found.worst == "note"
    assert "mle() trains p alone" in found.of("q unused")[0].text
    assert found.of("evidence")[0].figures["evidence"] == pytest.approx(-647.2801, abs=1e-3)
    assert not found.of("elbo") + found.of("calibration") + found.of("q behind p")


def test_seeds_take_the_usual_schedule_too():
    one, other = fit(zoo.local_level(), {"x": NILE}, seeds=2, steps=2, progress=False)
    assert one.settings.schedule == other.settings.schedule == mle()
    assert len(events(other.rows, SCHEDULE)) == 1


def test_a_loose_bound_is_noted_and_diagnosed():
    model = zoo.local_level().double()
    with pytest.warns(DataWarning, match="far above the trained bound"):
        run = fit(model, {"x": NILE}, schedule=joint(), steps=100, progress=False)
    assert not events(run.rows, SCHEDULE)
    (event,) = events(run.rows, LOOSE)
    assert "far above the trained bound" in event.text
    assert "schedule=mle()" in event.remedy
    (finding,) = diagnose(model, {"x": NILE}, run=run, calibrate=False).of("loose bound")
    assert finding.level == "warning"
    assert finding.remedy == event.remedy


def test_a_tight_bound_is_not_noted():
    x = np.random.default_rng(0).normal(size=(100, 3))
    run = fit(zoo.fa(x=3, z=1), {"x": x}, steps=200, progress=False)
    assert run.settings.schedule == joint()
    assert not events(run.rows, LOOSE)


@pytest.mark.parametrize(
    ("model", "asked", "expected"),
    [
        (zoo.local_level(), {}, mle()),
        (zoo.local_trend(), {"seed": 1, "steps": 10}, mle()),
        (zoo.seasonal(4), {"lr": 0.1}, mle()),
        (zoo.ar(), {}, mle()),
        (zoo.switching(), {}, mle()),
        (zoo.hmm(), {}, em()),
        (zoo.hmm().fresh(0), {}, em()),
        (zoo.hmm(), {"how": {"y": "gumbel"}}, None),
        (zoo.local_level(), {"samples": 2}, None),
        (zoo.local_level(), {"window": 10}, None),
        (zoo.local_level(), {"schedule": joint()}, None),
        (zoo.vrnn(x=2), {}, None),
        (zoo.volatility(), {}, None),
        (Model({"z": Normal(1), "x | z": Normal(2, net=linear())}, {"z | x": Normal()}), {}, None),
    ],
)
def test_the_usual_schedule(model, asked, expected):
    assert usual.usual_schedule(model, asked) == expected
