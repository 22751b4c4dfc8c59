"""The schedule of a run for which the user names none; ``fit`` and the command line share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aevb.model import Model
from aevb.training.checks import ESTIMATES
from aevb.training.events import SCHEDULE, Event
from aevb.training.schedules import Schedule, schedule_from

# Settings that only a run on the bound has a use for. With one of them, the run takes joint().
OF_THE_BOUND = (*ESTIMATES, "how", "resample", "window", "distort")


def usual_schedule(model: Model, asked: Mapping[str, Any]) -> Schedule | None:
    """Return the schedule that suits a model, e.g. ``mle()`` for a local level.

    None stands for ``joint()``: the model has no usual schedule, or the settings ``asked`` for name
    a schedule or configure the bound.

    >>> from aevb import zoo
    >>> usual_schedule(zoo.local_level(), {"seed": 1})
    mle(tol=1e-05, optimiser='auto')
    >>> usual_schedule(zoo.local_level(), {"samples": 4}) is None
    True
    """
    if model.usual_schedule is None or any(name in asked for name in ("schedule", *OF_THE_BOUND)):
        return None
    return schedule_from(model.usual_schedule)


def chose(schedule: Schedule) -> Event:
    """Return the note on a schedule that the user did not name."""
    name = type(schedule).__name__
    text = (
        f"No schedule was given: fit takes {name}(), because log p of this model is exact and a "
        f"bound would only approximate it."
    )
    remedy = "To train the bound instead, use schedule=joint() (--schedule joint)."
    return Event(SCHEDULE, "run", text, remedy)
