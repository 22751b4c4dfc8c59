"""The fan of a forecast: its numbers, its panels and its files."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from exact_models import MODELS
from PIL import Image
from series_models import local_level, series

from aevb.forecasting.picture import LEVELS, PANELS, fan, panels_of


def panels(forecast, columns=None, start=1.0, spacing=1.0):
    return list(panels_of(forecast, columns, start, spacing))


def test_a_panel_has_the_past_the_median_and_the_intervals():
    model, _ = local_level()
    x = series(9)
    forecast = model.forecast(steps=3, x=x[None], samples=5, seed=0)
    (panel,) = panels(forecast, start=1871, spacing=0.25)
    np.testing.assert_array_equal(panel.past, x[:, 0])
    np.testing.assert_allclose(panel.times, 1871 + 0.25 * np.arange(9))
    np.testing.assert_allclose(panel.times_ahead, 1871 + 0.25 * np.arange(9, 12))
    np.testing.assert_allclose(panel.median, forecast.quantile(0.5)["x"].reshape(-1))
    for level, band in zip(LEVELS, panel.bands, strict=True):
        np.testing.assert_allclose(band, forecast.interval(level)["x"][:, 0, :, 0])


def test_the_fan_starts_at_the_last_known_value():
    model, _ = local_level()
    x = series(9)
    joined = fan(panels(model.forecast(steps=3, x=x[None], samples=1, seed=0)))
    lines = joined.axes[0].lines
    assert lines[1].get_xdata().tolist() == [9, 10, 11, 12]
    assert lines[1].get_ydata()[0] == x[-1, 0]
    x[-1] = np.nan
    apart = fan(panels(model.forecast(steps=3, x=x[None], samples=1, seed=0)))
    assert apart.axes[0].lines[1].get_xdata().tolist() == [10, 11, 12]


def test_rows_end_where_they_end():
    model, _ = local_level()
    x = np.stack([series(9, holes=False)] * 2)
    forecast = model.forecast(steps=2, x=x, lengths=[9, 4], samples=1, seed=0)
    a, b = panels(forecast)
    assert (len(a.past), len(b.past)) == (9, 4)
    assert b.times_ahead.tolist() == [5, 6]
    assert (a.title, b.title) == ("x, row 0", "x, row 1")


def test_many_panels_are_limited_and_the_picture_says_so(tmp_path):
    model = MODELS["state space"]()
    forecast = model.forecast(steps=4, x=torch.zeros(6, 8, 3), samples=1, seed=0)
    figure = fan(panels(forecast))
    assert len(figure.axes) == PANELS == 12
    assert figure._suptitle.get_text() == "12 of 18 series are shown"
    assert figure.axes[0].get_title(loc="left") == "x[0], row 0"
    forecast.plot(tmp_path / "few.png", panels=1, time="month", columns=["a", "b", "c"])
    with Image.open(tmp_path / "few.png") as picture:
        assert picture.size == (1050, 585)


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_files(tmp_path, kind):
    model, _ = local_level()
    out = tmp_path / f"forecast.{kind}"
    model.forecast(steps=1, x=series(9)[None], samples=1, seed=0).plot(out, past=4)
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind]
    assert out.read_bytes().startswith(start)


def test_axes_have_labels_and_the_shades_differ_in_brightness():
    model, _ = local_level()
    figure = fan(panels(model.forecast(steps=3, x=series(9)[None], samples=1, seed=0)), time="year")
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("year", "value")
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["past", "95% interval", "80% interval", "50% interval", "median"]
    light = [
        np.dot(area.get_facecolor()[0][:3], [0.2126, 0.7152, 0.0722]) for area in axes.collections
    ]
    assert all(a - b > 0.1 for a, b in pairwise(light))
