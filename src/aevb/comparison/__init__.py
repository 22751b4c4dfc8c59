"""Choose a model: compare models on the same rows, and sweep over a grid of their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aevb.comparison.entrants import compare_entrants
from aevb.comparison.result import Compared, Comparison, Difference
from aevb.comparison.runs import Contestant, named, on_arrays, on_file, on_frames, tables_of
from aevb.data.builtin import NAMES
from aevb.evidence import AIS, Particles
from aevb.runtime.contention import sharing_cores

COLUMNS = "log p is of the columns in their own units; missing cells are marginalised out."

__all__ = ["Compared", "Comparison", "Difference", "compare"]


@sharing_cores()
def compare(
    models: Mapping[str, Contestant] | Sequence[Contestant],
    data: Any = None,
    *,
    method: str | AIS | Particles = "auto",
    samples: int | None = None,
    elbo: bool = False,
    criteria: bool | None = None,
    seed: int = 0,
    memory: float | str | None = None,
) -> Comparison:
    """Compare models by their evidence log p(x) on the same rows.

    Differences to the best model are paired: log p − log p' is computed for every row, and its
    standard error is that of the mean over rows. The result prints a table. It says which models
    cannot be told from the best and which estimates must not be trusted.

    Arguments:
        models: Models, runs, models of tables, or folders of runs; as a dictionary, with their
            names.
        data: The rows, as for :func:`fit`, in the units of the models; rows that no model was
            trained on, unless you want to see the fit. For runs of the command line, a file or
            the name of a built-in data set, which each run prepares like its training rows; log p
            is then in the units of the file. By default the held-out rows of these runs. For
            models of tables, a frame; log p is then a density of its columns.
        method: How to compute log p, as in :meth:`Model.log_evidence`: exact if possible, otherwise
            by importance sampling.
        samples: Samples of the method.
        elbo: Add the ELBO of each model.
        criteria: Add AIC and BIC. They need the exact evidence of the training rows. By default
            they are shown if every model is a run that was trained on exactly these rows. True
            takes the rows to be the training rows of models without a record of theirs, and says
            so.
        seed: Seed of estimates.
        memory: Limit of the memory, such as "2 GiB".

    Returns:
        A :class:`Comparison`. ``comparison["name"].evidence`` has log p per row, and
        ``comparison.difference("a", "b")`` the paired difference of two models.

    Raises:
        ValueError: The models give log p of different variables, one gives densities and another
            probabilities of the same variable, or their rows differ.

    >>> import numpy as np
    >>> from aevb import Exact, Model, Normal, OneHot, em, fit
    >>> x = np.random.default_rng(0).normal(size=(400, 1)) + 4 * (np.arange(400) % 2)[:, None]
    >>> runs = {}
    >>> for k in (1, 2, 3):
    ...     model = Model({"y": OneHot(k, learned=True), "x | y": Normal(1)}, q={"y | x": Exact()})
    ...     runs[f"K={k}"] = fit(model, {"x": x[:200]}, schedule=em(), steps=50)
    >>> found = compare(runs, {"x": x[200:]})
    >>> found.best.name, found.verdict("K=3"), found.verdict("K=1")
    ('K=2', 'not told apart', 'worse')
    """
    contestants = named(models)
    if not contestants:
        raise ValueError("There is nothing to compare: pass at least one model.")
    settings: dict[str, Any] = {
        "method": method,
        "samples": samples,
        "elbo": elbo,
        "criteria": criteria,
        "seed": seed,
        "memory": memory,
    }
    tables = tables_of(contestants)
    if tables:
        if data is None or isinstance(data, str | Path):
            raise ValueError("Pass the rows as a frame with the columns of the schema.")
        return compare_entrants(
            on_frames(tables, dict.fromkeys(tables, data)), units=COLUMNS, **settings
        )
    if data is None or isinstance(data, Path) or (isinstance(data, str) and _is_table(data)):
        entrants, what, units = on_file(contestants, None if data is None else str(data))
        return compare_entrants(entrants, what=what, units=units, **settings)
    return compare_entrants(on_arrays(contestants, data), **settings)


def _is_table(text: str) -> bool:
    return text in NAMES or bool(Path(text).suffix)
