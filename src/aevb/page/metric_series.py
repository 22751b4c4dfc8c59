"""What the entries of a run's rows are as curves. This module does not import numpy or torch."""

from __future__ import annotations

from typing import Any

from aevb.estimate.metric_names import BESIDES, BOUNDS, OBJECTIVE, Metric, latent_of
from aevb.training.events import EVENT_FIELDS

CLOCKS = {"seconds": "seconds", "epochs": "epoch"}  # entry of the curves → entry of a row
NO_SERIES = ("step", "phase", *CLOCKS.values(), *EVENT_FIELDS)


def described(key: str) -> dict[str, Any] | None:
    """Return how an entry of a row is shown as a curve; None if it is none.

    ``kind`` says where: with the bounds, as a term of the bound, as a KL, or besides them.

    >>> described("validation x")["title"], described("kl(z)")["kind"], described("step")
    ('log p(x|·)', 'kl', None)
    """
    if key in NO_SERIES:
        return None
    name, validation = Metric.of(key)
    if name in BOUNDS:
        kind = "bound"
    elif name in BESIDES:
        kind = "besides"
    else:
        kind = "term" if latent_of(name) is None else "kl"
    plain = kind != "term" or name in (OBJECTIVE, "gap")
    title = name if plain else f"log p({name}|·)"
    return {"key": key, "name": name, "validation": validation, "kind": kind, "title": title}
