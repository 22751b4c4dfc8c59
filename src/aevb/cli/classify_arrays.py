"""``aevb cluster`` for runs of arrays: the most probable class of each row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aevb.cli.array_files import refuse_kind, write
from aevb.cli.data_argument import counted_rows, load_rows, which_rows, without_latents
from aevb.cli.latent_means import posterior_means
from aevb.cli.model_argument import open_run
from aevb.cli.options import refuse_input

if TYPE_CHECKING:
    import numpy as np

    from aevb.model import Model


def classify_arrays(
    run: Path, file: str | None, out: Path | None, missing: Sequence[str] | None, seed: int
) -> None:
    """Print how many rows are in each class, and write the class of each row."""
    import numpy as np

    if out is not None:
        refuse_kind(out)
    model = open_run(run)
    latents = _discrete(model, run)
    loaded = load_rows(run, model, file, None, seed, missing=missing, whole=True)
    if out is not None:
        refuse_input(out, loaded.recipe.data)
    chosen = loaded.test or loaded.train
    means, _ = posterior_means(model, without_latents(model, chosen.data), seed)
    columns: dict[str, np.ndarray] = {}
    print(f"{counted_rows(model, loaded, chosen)}{which_rows(loaded)}:")
    for name in latents:
        most, size = means[name].argmax(-1), means[name].shape[-1]
        columns[name] = most
        columns["p" if len(latents) == 1 else f"p_{name}"] = means[name]
        sure = means[name].max(-1).mean()
        print(
            f"  rows by most probable {name} (mean probability {sure:.3f}): "
            + ", ".join(f"{i}: {n}" for i, n in enumerate(np.bincount(most, minlength=size)))
        )
        if name not in (loaded.recipe.known or ()):
            print(f"  the training had no labels {name}: the numbers of its classes are arbitrary")
    if out is None:
        own = "" if file is None else f" {file}"
        print(f"Write all rows: aevb cluster {run}{own} --out classes.csv")
        return
    write(out, columns, {})
    print(f"{', '.join(columns)} of each row in {out}")


def _discrete(model: Model, run: Path) -> list[str]:
    """Return the finite latents without time; raise ValueError if there is none."""
    graph = model.graph
    found = [
        name
        for name in graph.latents
        if graph.rule("p", name).spec.finite and not graph.timed[name]
    ]
    if found:
        return found
    fix = f"For the codes of its rows: aevb encode {run}."
    if any(graph.rule("p", name).spec.finite for name in graph.latents):
        fix = f"For the classes of its steps: aevb smooth {run}."
    elif graph.given:
        fix = (
            f"It reads {', '.join(graph.given)} as given and cannot predict it: to predict a class "
            f"train m2."
        )
    raise ValueError(f"The model of {run} has no discrete latent of a row, so no classes. {fix}")
