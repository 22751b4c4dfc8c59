"""Trackers: where the numbers of a run go besides its folder.

``fit(…, trackers=["wandb"])`` or ``aevb train … --track wandb``. :class:`Tracker` is the protocol
that adapters and your own trackers follow.
"""

from aevb.trackers.mlflow import MLflow
from aevb.trackers.opening import NAMES, Trackers
from aevb.trackers.protocol import RunInfo, Tracker, TrackerWarning, scalars
from aevb.trackers.trackio import Trackio
from aevb.trackers.wandb import WandB

__all__ = [
    "NAMES",
    "MLflow",
    "RunInfo",
    "Tracker",
    "TrackerWarning",
    "Trackers",
    "Trackio",
    "WandB",
    "scalars",
]
