"""``aevb sweep table.csv``: a grid of models of one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.cli.table_models import ARGUMENTS, DENSITY, read_arguments
from aevb.cli.table_text import schema_text
from aevb.cli.train_table import HIDE, TableOptions, read_named_table, rows_of

if TYPE_CHECKING:
    from aevb.comparison.sweep import Rows
    from aevb.data.datasets import Recipe
    from aevb.model import Model
    from aevb.tables.schema import Schema
    from aevb.training.run import Run


@dataclass(frozen=True)
class ModelOfTable:
    """Models of one table, for every combination of arguments."""

    table: str
    options: TableOptions
    starts: int | None  # of a mixture; None for several
    device: str
    track: tuple[str, ...] = ()

    def model(self, arguments: Mapping[str, str]) -> Model:
        from aevb.tables.selection import declare

        name, chosen = read_arguments(self.options.model, arguments)
        chosen = {key: _closed(key, value) for key, value in chosen.items()}
        return declare(_opened(self)[0], name, chosen).to(self.device)

    def described(self) -> str:
        """Return the columns of the table with their kinds, as text."""
        return schema_text(_opened(self)[0])

    def rows(self, model: Model) -> Rows:
        from aevb.comparison import COLUMNS
        from aevb.comparison.entrants import describe_rows, identify
        from aevb.comparison.sweep import Rows

        schema, train, held_out, recipe = _opened(self)
        data, rest = schema.encode(train), schema.encode(held_out)
        which = "held out" if recipe.hold_out else "validation"
        return Rows(
            data,
            rest,
            identify(data, list(data)),
            identify(rest, list(rest)),
            recipe,
            -schema.log_jacobian(held_out),
            describe_rows(held_out.num_rows, which, recipe.validation or self.table),
            COLUMNS,
        )

    def train(
        self,
        model: Model,
        rows: Rows,
        seeds: Sequence[int],
        out: Path,
        *,
        resume: bool,
        settings: Mapping[str, Any],
    ) -> list[Run]:
        from aevb.evidence.exact import why_not_exact
        from aevb.training.seed_folders import seed_folder

        schema, train, held_out, recipe = _opened(self)
        runs = []
        for seed in seeds:
            fitted = schema.fit(
                model.fresh(seed),
                train,
                validation=held_out,
                seed=seed,
                starts=self.starts,
                hide=HIDE if why_not_exact(model) is not None else 0.0,
                out=seed_folder(out, seed),
                resume=resume,
                recipe=recipe,
                progress=False,
                trackers=self.track,
                **settings,
            )
            assert fitted.run is not None
            runs.append(fitted.run)
        return runs


def _closed(name: str, value: Any) -> Any:
    """Return an argument, with a value for one that ``aevb train`` would choose by BIC."""
    if value is None and name == "covariance":
        return "diagonal"
    if value is None:
        raise ValueError(f"Give --set {name}=…, e.g. --set {name}=1..8.")
    return value


@lru_cache(maxsize=1)
def _opened(builder: ModelOfTable) -> tuple[Schema, Any, Any, Recipe]:
    """Read the table once per process: its schema, the rows to train on and those held out.

    A sweep trains on random rows of a large table.
    """
    from aevb.data.large_tables import in_memory

    file, schema, recipe = read_named_table(builder.table, builder.options)
    train, held_out = rows_of(file, schema, recipe)
    if held_out is None:
        raise ValueError("A sweep compares held-out rows: give --hold-out or --validation.")
    return schema, in_memory(train), held_out, recipe


def model_of(grid: Mapping[str, Sequence[str]], asked: str | None) -> str:
    """Return the model that a grid of arguments belongs to, unless ``--model`` names one.

    >>> model_of({"components": ["2", "3"]}, None), model_of({"latent": ["2"]}, None)
    ('mixture', 'factors')
    """
    if asked == DENSITY:
        raise ValueError(
            "The default density has no arguments to vary, so there is no sweep of it. Train it by "
            "aevb train TABLE, and compare it with the runs of a sweep: aevb compare RUN SWEEP. "
            "For a sweep choose --model mixture, factors, vae or gmvae."
        )
    if asked is not None:
        return asked
    sizes = set(grid) & {"components", "latent"}
    found = {
        frozenset({"components"}): "mixture",
        frozenset({"latent"}): "factors",
        frozenset({"components", "latent"}): "gmvae",
    }.get(frozenset(sizes))
    if found is not None and set(grid) <= set(ARGUMENTS[found]):
        return found
    raise ValueError(
        "Say which model of the table to train: --model mixture --set components=1..8, --model "
        "factors --set latent=1..4, --model vae or --model gmvae."
    )
