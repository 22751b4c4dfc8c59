"""Forecasts of sequences, and beliefs about their latents at each step.

``request.py`` checks a request and lays out the past. ``choice.py`` chooses between exact results,
particles and q. ``forecast.py`` and ``beliefs.py`` hold the results, ``picture.py`` draws them.
"""

from aevb.forecasting.beliefs import Beliefs
from aevb.forecasting.choice import filter_of, forecast_of, smooth_of
from aevb.forecasting.forecast import Forecast

__all__ = ["Beliefs", "Forecast", "filter_of", "forecast_of", "smooth_of"]
