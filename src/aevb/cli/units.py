"""The units of densities and statistics that commands print, where rows were prepared by a change of units."""

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
    """A sentence on the units of bounds and log p, where they are not those of the data, and what to add for those."""
    from aevb.data.datasets import log_spreads

    graph, recipe = model.graph, loaded.recipe
    spreads = log_spreads(recipe, graph)
    if not spreads:
        return []
    terms = [
        f"{-spread.sum():.3f} nats a {'step' if graph.timed[name] and spread.ndim == 1 else 'row'} ({name}, no cell missing)"
        for name, spread in spreads.items()
    ]
    return [f"Bounds and log p are of {_as_prepared(recipe, list(spreads))}. For the units of the data add {' and '.join(terms)}."]


def statistics_note(model: Model, loaded: Loaded) -> list[str]:
    """A sentence on the units of statistics of observed variables, where they are not those of the data."""
    from aevb.data.datasets import log_spreads

    names = list(log_spreads(loaded.recipe, model.graph))
    return [f"Statistics are of {_as_prepared(loaded.recipe, names)}, not in the units of the data."] if names else []


def _as_prepared(recipe: Recipe, names: list[str]) -> str:
    x = ", ".join(names)
    return f"standardised {x}" if recipe.prepare == "standardise" else f"{x} with grey levels from 0 to 1 ({recipe.prepare})"


@dataclass(frozen=True)
class Units:
    """The units of the densities that ``evaluate`` prints: those of the data where columns were standardised, else the model's.

    ``rows`` is by how much log p of each row is lower there than in the model's units, by variable; ``told`` says which units they are.
    """

    rows: dict[str, Tensor]
    told: str = ""

    @classmethod
    def of(cls, model: Model, loaded: Loaded, source: Source) -> Units:
        import torch

        from aevb.data.datasets import log_jacobian, log_spreads

        recipe, names = loaded.recipe, list(log_spreads(loaded.recipe, model.graph))
        if not names:
            return cls({})
        parts = (source.take(torch.arange(start, min(source.n, start + ROWS))) for start in range(0, source.n, ROWS))
        found = [log_jacobian(recipe, model.graph, part) for part in parts]
        rows = {name: torch.cat([part[name] for part in found]).cpu() for name in names}
        mean = float(torch.stack(list(rows.values())).sum(0).mean())
        prepared, x = _as_prepared(recipe, names), ", ".join(names)
        if recipe.prepare != "standardise":
            return cls({}, f"Bounds and log p are of {prepared}. For grey levels add {-mean:.3f} nats an example.")
        return cls(rows, f"Bounds and log p are of {x} in the units of the data. For {prepared}, as in training, add {mean:.3f} nats an example.")

    def lower(self, name: str | None = None) -> float:
        """What to subtract from the mean log p; or from a mean by name: the bound, the evidence, or the term of a variable."""
        whole = name in (None, "elbo", "evidence")
        return sum(float(value.mean()) for variable, value in self.rows.items() if whole or variable == name)

    def shift(self, value: Tensor) -> Tensor:
        """Values of log p, [..., N], in these units."""
        for row in self.rows.values():
            value = value - row.to(value.device)
        return value
