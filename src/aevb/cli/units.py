"""Units of the printed densities and statistics, if the preparation changed the units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aevb.cli.data_argument import ROWS

if TYPE_CHECKING:
    from torch import Tensor

    from aevb.data.datasets import Loaded, Recipe
    from aevb.data.sources import Source
    from aevb.model import Model


def units_note(model: Model, loaded: Loaded) -> list[str]:
    """Say in which units bounds and log p are, and what to add for the units of the data.

    The list is empty if they are in the units of the data already.
    """
    from aevb.data.datasets import log_spreads

    graph, recipe = model.graph, loaded.recipe
    spreads = log_spreads(recipe, graph)
    if not spreads:
        return list(loaded.notes)
    terms = [
        f"{-spread.sum():.3f} nats per "
        f"{'step' if graph.timed[name] and spread.ndim == 1 else 'row'} ({name}, no cell missing)"
        for name, spread in spreads.items()
    ]
    return [
        f"Bounds and log p are of {_as_prepared(recipe, list(spreads))}. For the units of the "
        f"data add {' and '.join(terms)}."
    ]


def statistics_note(model: Model, loaded: Loaded) -> list[str]:
    """Say in which units statistics of observed variables are, if not in those of the data."""
    from aevb.data.datasets import log_spreads

    names = list(log_spreads(loaded.recipe, model.graph))
    return (
        [f"Statistics are of {_as_prepared(loaded.recipe, names)}, not in the units of the data."]
        if names
        else list(loaded.notes)
    )


def _as_prepared(recipe: Recipe, names: list[str]) -> str:
    x = ", ".join(names)
    return (
        f"standardised {x}"
        if recipe.prepare == "standardise"
        else f"{x} with grey levels from 0 to 1 ({recipe.prepare})"
    )


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
        prepared, x = _as_prepared(recipe, names), ", ".join(names)
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
