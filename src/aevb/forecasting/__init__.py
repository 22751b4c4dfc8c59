"""Forecasts of sequences, and beliefs about their latents at each step.

``request.py`` checks a request and lays out the past. ``choice.py`` chooses between exact results,
particles and q. ``forecast.py`` and ``beliefs.py`` hold the results, ``picture.py`` draws them.
"""

from aevb.forecasting.beliefs import Beliefs
from aevb.forecasting.choice import (
    filter_batch,
    filter_of,
    forecast_of,
    forecast_past,
    smooth_batch,
    smooth_of,
)
from aevb.forecasting.forecast import Forecast
from aevb.forecasting.particles import named
from aevb.forecasting.request import check_continuable, past_of_batch

__all__ = [
    "Beliefs",
    "Forecast",
    "check_continuable",
    "filter_batch",
    "filter_of",
    "forecast_of",
    "forecast_past",
    "named",
    "past_of_batch",
    "smooth_batch",
    "smooth_of",
]
