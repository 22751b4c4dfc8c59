"""Units of the printed densities and statistics, if the preparation changed the units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aevb.cli.data_argument import ROWS

if TYPE_CHECKING:
    from torch import Tensor

    from aevb.data.datasets import Loaded
    from aevb.data.sources import Source
    from aevb.model import Model


def units_note(model: Model, loaded: Loaded) -> list[str]:
    """Say in which units bounds and log p are, and what to add for the units of the data.

    Without such a sentence, the list holds the notes on the rows.
    """
    from aevb.data.units import densities_note

    note = densities_note(loaded.recipe, model.graph)
    return [note] if note else list(loaded.notes)


def statistics_note(model: Model, loaded: Loaded) -> list[str]:
    """Say in which units statistics of observed variables are, if not in those of the data."""
    from aevb.data.units import statistics_note as note_on

    note = note_on(loaded.recipe, model.graph)
    return [note] if note else list(loaded.notes)


@dataclass(frozen=True)
class Units:
    """Units of the densities that ``evaluate`` prints.

    They are the units of the data if columns were standardised. Otherwise they are the units of the
    model. ``rows`` holds, per variable and row, what to subtract from log p in the model's units.
    ``note`` is a sentence that names the units.
    """

    rows: dict[str, Tensor]
    note: str = ""

    @classmethod
    def of(cls, model: Model, loaded: Loaded, source: Source) -> Units:
        import torch

        from aevb.data.datasets import log_jacobian, log_spreads
        from aevb.data.units import as_prepared

        recipe, names = loaded.recipe, list(log_spreads(loaded.recipe, model.graph))
        if not names:
            return cls({})
        parts = (
            source.take(torch.arange(start, min(source.n, start + ROWS)))
            for start in range(0, source.n, ROWS)
        )
        found = [log_jacobian(recipe, model.graph, part) for part in parts]
        rows = {name: torch.cat([part[name] for part in found]).cpu() for name in names}
        mean = float(torch.stack(list(rows.values())).sum(0).mean())
        prepared, x = as_prepared(recipe, names), ", ".join(names)
        if recipe.prepare != "standardise":
            return cls(
                {},
                f"Bounds and log p are of {prepared}. For grey levels add {-mean:.3f} nats per "
                f"example.",
            )
        return cls(
            rows,
            f"Bounds and log p are of {x} in the units of the data. For {prepared}, as in "
            f"training, add {mean:.3f} nats per example.",
        )

    def lower(self, name: str | None = None) -> float:
        """Return what to subtract from the mean log p, or from the mean of one named term.

        ``name`` is "elbo", "evidence" or a variable.
        """
        whole = name in (None, "elbo", "evidence")
        return sum(
            float(value.mean())
            for variable, value in self.rows.items()
            if whole or variable == name
        )

    def shift(self, value: Tensor) -> Tensor:
        """Convert values of log p, [..., N], to these units."""
        for row in self.rows.values():
            value = value - row.to(value.device)
        return value
