"""The trackers that a user asks for: by name, as an object, or as what makes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace

from aevb.trackers.mlflow import MLflow
from aevb.trackers.protocol import Tracker
from aevb.trackers.trackio import Trackio
from aevb.trackers.wandb import WandB

TENSORBOARD = "tensorboard"  # the run's own folder holds its files
ADAPTERS: dict[str, Callable[[], Tracker]] = {"wandb": WandB, "mlflow": MLflow, "trackio": Trackio}
NAMES = (*ADAPTERS, TENSORBOARD)

Trackers = Sequence[str | Tracker | Callable[[], Tracker]]


def check_trackers(trackers: Trackers, *, several: bool) -> None:
    """Refuse what is no tracker. ``several`` says that several runs need a tracker each."""
    if isinstance(trackers, str | Tracker) or callable(trackers):
        raise ValueError(f"trackers is a list: trackers=[{trackers!r}].")
    for one in trackers:
        if isinstance(one, str):
            if one not in NAMES:
                raise ValueError(
                    f"There is no tracker {one!r}. Choose {', '.join(NAMES[:-1])} or {NAMES[-1]}, "
                    f"or pass an object of a class derived from aevb.trackers.Tracker."
                )
        elif isinstance(one, Tracker):
            if several and not is_dataclass(one):
                name = type(one).__name__
                raise ValueError(
                    f"Each of several runs needs a tracker of its own. Pass what makes one: "
                    f"trackers=[{name}], or trackers=[lambda: {name}(…)]."
                )
        elif not callable(one):
            raise ValueError(
                f"A tracker is a name, an object of a class derived from aevb.trackers.Tracker, or "
                f"a function that returns one; got {one!r}."
            )


def opened(trackers: Trackers, *, several: bool) -> list[Tracker]:
    """Return the trackers of one run, without TensorBoard.

    One of several runs gets copies of adapters, so that the runs share none.
    """
    return [_tracker(one, several) for one in trackers if one != TENSORBOARD]


def _tracker(one: str | Tracker | Callable[[], Tracker], several: bool) -> Tracker:
    if isinstance(one, str):
        return ADAPTERS[one]()
    if isinstance(one, Tracker):
        return replace(one) if several and is_dataclass(one) else one  # type: ignore[type-var]
    made = one()
    if not isinstance(made, Tracker):
        raise ValueError(
            f"{getattr(one, '__name__', one)!r} in trackers= returned a {type(made).__name__}, "
            f"not an object of a class derived from aevb.trackers.Tracker."
        )
    return made
