"""Notice a table that looks like a time series, and say which command trains one."""

from __future__ import annotations

import shlex
from typing import Any

FEWEST = 10  # steps of a series


def series_hint(table: str, frame: Any) -> tuple[str, str] | None:
    """Return a hint and a command if the lines are evenly spaced steps of one column of times."""
    from aevb.data.sequences import sequences

    if frame.num_rows < FEWEST or len(frame.column_names) < 2:
        return None
    try:
        found = sequences(frame)
    except (ValueError, TypeError):  # several columns of times, repeated or uneven ones
        return None
    index = found.index
    numbered = index.time_name not in frame.column_names
    if numbered or index.spacing is None or index.ids is not None:
        return None
    size = len(found.names)
    more = "" if size == 1 else f" --set x={size}"
    return (
        f"{index.time_name!r} has one line per step, {index.clock.distance(index.spacing)} apart, "
        f"so this looks like a time series. A model of tables takes its lines as unrelated. For "
        f"forecasts:",
        f"aevb train local_level{more} --data {shlex.quote(table)} --out series",
    )
