"""``aevb forecast`` and ``aevb smooth``: what comes next, and the states of a series."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aevb.cli.array_files import refuse_kind, write
from aevb.cli.data_argument import batches, counted_rows, load_rows, without_latents
from aevb.cli.model_argument import open_run
from aevb.cli.open_table import File, is_table_run
from aevb.cli.options import Gaps, RunData, RunFolder, RunMissing, Seed, path, refuse_input
from aevb.cli.use import one_file

if TYPE_CHECKING:
    import numpy as np

    from aevb.data.datasets import Loaded, Recipe
    from aevb.forecasting import Beliefs, Forecast
    from aevb.model import Model

INTERVALS = (0.8, 0.95)
Samples = Annotated[
    int, typer.Option(help="Draws of the future, and particles, where nothing is exact.")
]
Out = Annotated[
    Path | None, typer.Option(parser=path, help="A .csv file, or a .npz file of arrays.")
]


def forecast(
    run: RunFolder,
    file: File = None,
    steps: Annotated[int, typer.Option(help="How many steps to forecast.")] = 12,
    out: Out = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="A picture of the past and of the 50, 80 and 95 % intervals: .png, .svg or .pdf.",
        ),
    ] = None,
    given: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="The future of given variables with time: a table whose lines go on where the "
            "series end, or a .npz file of arrays by name.",
        ),
    ] = None,
    data: RunData = None,
    missing: RunMissing = None,
    gaps: Gaps = None,
    samples: Samples = 500,
    seed: Seed = 0,
) -> None:
    """Forecast what comes after the end of each series, in the units of the data.

    Writes the mean, the standard deviation and the ends of the 80 and 95 % intervals of each step,
    one line per step, numbered as in the file: after the year 1970 comes 1971.

    Example: aevb forecast run --steps 12 --out forecast.csv --plot forecast.png
    """
    import numpy as np

    from aevb.cli.given_future import future_of_given
    from aevb.forecasting import check_continuable, forecast_past, past_of_batch
    from aevb.forecasting.request import Past

    if steps < 1:
        raise ValueError(f"--steps must be at least 1, got {steps}.")
    if out is None and plot is None:
        raise ValueError(
            "Say where to write the forecast: --out forecast.csv, --plot forecast.png, or both."
        )
    if plot is not None:
        from aevb.forecasting.picture import check_kind

        check_kind(plot)
    model, loaded = _open(run, one_file(file, data), missing, gaps, samples, seed, out, plot)
    check_continuable(model.graph)
    for place in (out, plot):
        if place is not None and given is not None:
            refuse_input(place, str(given))
    rows, parts = batches(model, without_latents(model, loaded.train.data)), []
    pasts = [Past(model, batch, steps, {}) for batch in rows]
    every = np.concatenate([past.lengths.cpu().numpy() for past in pasts])
    future, start = future_of_given(model, loaded, given, every, steps), 0
    for i, batch in enumerate(rows):
        n = len(pasts[i].lengths)
        # A single row, [steps, …], holds for all rows.
        own = {
            name: value[start : start + n] if len(value) == len(every) else value
            for name, value in future.items()
        }
        start += n
        past = past_of_batch(model, batch, steps, own)
        parts.append(
            forecast_past(
                model,
                model.teaching,
                past,
                samples=samples,
                method="auto",
                seed=seed + i,
                draws=False,
            )
        )
    columns = {name: _columns(model, loaded.recipe, name) for name in parts[0].mean}
    if out is not None:
        arrays: dict[str, np.ndarray] = {}
        for name in columns:
            arrays |= _described(model, loaded.recipe, name, columns[name], parts)
        write(out, arrays, {}, tuple(arrays), numbers=loaded.lines, begins=every)
    if plot is not None:
        _draw(model, loaded, parts[0], columns, plot)
    first = parts[0]
    draws = "" if first.method == "exact" else f", {samples} draws"
    print(
        f"{steps} step{'s' * (steps != 1)} after {counted_rows(model, loaded, loaded.train)}, in "
        f"{' and '.join(str(place) for place in (out, plot) if place is not None)} "
        f"({first.method}{draws}: {first.why})"
    )
    for note in _notes(parts, loaded):
        print(f"  {note}")


def smooth(
    run: RunFolder,
    file: File = None,
    out: Out = None,
    filtered: Annotated[
        bool,
        typer.Option(
            "--filter",
            help="Beliefs about each step given the data up to it, instead of all data.",
        ),
    ] = False,
    data: RunData = None,
    missing: RunMissing = None,
    gaps: Gaps = None,
    samples: Samples = 500,
    seed: Seed = 0,
) -> None:
    """Write what the data say about the latents at each step: mean and standard deviation.

    Finite latents get the probabilities of their values. Steps are numbered as in the file.

    Example: aevb smooth run --out states.csv
    """
    import numpy as np

    from aevb.forecasting import filter_batch, smooth_batch

    if out is None:
        raise ValueError("Say where to write the states, e.g. --out states.csv.")
    model, loaded = _open(run, one_file(file, data), missing, gaps, samples, seed, out, None)
    graph, beliefs = model.graph, filter_batch if filtered else smooth_batch
    rows = without_latents(model, loaded.train.data)
    parts = [
        beliefs(model, model.teaching, batch, samples=samples, method="auto", seed=seed + i)
        for i, batch in enumerate(batches(model, rows))
    ]
    arrays: dict[str, np.ndarray] = {}
    for name in parts[0].mean:
        if name in parts[0].probs:
            found = _joined([part.probs[name] for part in parts])
            arrays |= {f"{name}_p{i}": found[..., i] for i in range(found.shape[-1])}
            continue
        mean, sd = (
            _joined([getattr(part, kind)[name] for part in parts]) for kind in ("mean", "sd")
        )
        for i in range(mean.shape[-1]):
            entry = name + (str(i) if mean.shape[-1] > 1 else "")
            arrays |= {f"{entry}_mean": mean[..., i], f"{entry}_sd": sd[..., i]}
    timed = [name for name, value in arrays.items() if value.ndim > 1]
    lengths = np.concatenate([part.lengths.cpu().numpy() for part in parts])
    write(out, arrays, {}, timed, lengths=lengths if timed else None, numbers=loaded.lines)
    print(
        f"{', '.join(name for name in graph.latents if name in parts[0].mean)} of "
        f"{counted_rows(model, loaded, loaded.train)}, given "
        f"{'the data up to each step' if filtered else 'all data'}, in {out} "
        f"({parts[0].method}: {parts[0].why})"
    )
    for note in _notes(parts, loaded):
        print(f"  {note}")


def _notes(parts: Sequence[Forecast | Beliefs], loaded: Loaded) -> list[str]:
    """Return the notes of all batches, which call the rows by their ids in the file."""
    from aevb.forecasting import named

    lines, start, found = loaded.lines, 0, list[str]()
    for part in parts:
        end = start + len(part.lengths)
        ids = range(end) if lines is None or lines.keys.row is None else lines.rows
        found += named(part.notes, ids[start:end])
        start = end
    return list(dict.fromkeys(found))


def _open(
    run: Path,
    data: str | None,
    missing: Sequence[str] | None,
    gaps: str | None,
    samples: int,
    seed: int,
    *outs: Path | None,
) -> tuple[Model, Loaded]:
    """Open a run of sequences and the series to work on, which are all rows of a file."""
    if samples < 1:
        raise ValueError(f"--samples must be at least 1, got {samples}.")
    if is_table_run(run):
        raise ValueError(
            f"{run} is the run of a table, whose rows are no series. Declare a model with [t] "
            f"(aevb train file.py:model)."
        )
    if outs[0] is not None:
        refuse_kind(outs[0])
    model = open_run(run)
    if not any(model.graph.timed[name] for name in model.graph.observed):
        raise ValueError(f"The model of {run} has no sequences: no observed variable has [t].")
    loaded = load_rows(run, model, data, None, seed, missing=missing, gaps=gaps, whole=True)
    for out in outs:
        if out is not None:
            refuse_input(out, loaded.recipe.data)
    return model, loaded


def _columns(model: Model, recipe: Recipe, name: str) -> list[str]:
    """Return the names of a variable's entries: those of its columns, else numbered."""
    size, named = model.graph.size(name), (recipe.columns or {}).get(name) or []
    # With one line per row, the columns are steps.
    if len(named) == size and recipe.long is not False:
        return list(named)
    return [name] if size == 1 else [f"{name}{i}" for i in range(size)]


def _described(
    model: Model, recipe: Recipe, name: str, columns: list[str], parts: list[Forecast]
) -> dict[str, np.ndarray]:
    """Return the arrays to write for one variable, [N, steps] each, in the units of the data."""
    spec = model.graph.rule("p", name).spec
    mean = _joined([part.mean[name] for part in parts])
    if spec.categorical:
        return {f"{column}_p": mean[..., i] for i, column in enumerate(columns)}
    levels = [end for level in INTERVALS for end in ((1 - level) / 2, (1 + level) / 2)]
    sd = _joined([part.sd[name] for part in parts])
    ends = [_joined([part.quantile(level)[name][0] for part in parts]) for level in levels]
    undone = [_in_units(model, recipe, name, value) for value in (mean, *ends)]
    # A linear change of units scales the standard deviation.
    scaled = _in_units(model, recipe, name, sd) - _in_units(model, recipe, name, 0 * sd)
    kinds = [f"{side}_{level:.0%}"[:-1] for level in INTERVALS for side in ("lower", "upper")]
    found: dict[str, np.ndarray] = {}
    for i, column in enumerate(columns):
        found |= {f"{column}_mean": undone[0][..., i], f"{column}_sd": scaled[..., i]}
        found |= {
            f"{column}_{kind}": value[..., i] for kind, value in zip(kinds, undone[1:], strict=True)
        }
    return found


def _joined(parts: list[Any]) -> np.ndarray:
    import numpy as np

    whole = np.concatenate([part.double().cpu().numpy() for part in parts])
    return whole.reshape(*whole.shape[:2], -1) if whole.ndim > 3 else whole


def _in_units(model: Model, recipe: Recipe, name: str, value: np.ndarray) -> np.ndarray:
    """Convert [N, steps, d] to the units of the data."""
    from aevb.data.datasets import in_units

    spread = recipe.spread(None if name == model.graph.observed[0] else name)
    if spread is not None and spread.size not in (1, model.graph.size(name)):
        raise ValueError(
            f"The run standardised each step of {name} by its own mean and scale, which later "
            f"steps do not have. Train on a table with one line per step, or without --prepare."
        )
    return in_units(recipe, model.graph, name, value)


def _draw(
    model: Model, loaded: Loaded, forecast: Forecast, columns: dict[str, list[str]], out: Path
) -> None:
    """Draw the first rows in the units of the data, at the times of the file."""
    from dataclasses import replace

    import numpy as np

    from aevb.forecasting.picture import PANELS, fan, panels_of, save

    recipe, lines = loaded.recipe, loaded.lines
    names = [column for each in columns.values() for column in each]
    variables = [name for name, each in columns.items() for _ in each]
    entries = [i for each in columns.values() for i in range(len(each))]
    shown = []
    for i, panel in enumerate(panels_of(forecast, names, 0.0, 1.0)):
        if i >= PANELS:
            shown.append(panel)  # counted, but not drawn
            continue
        row, place = divmod(i, len(names))
        name, entry = variables[place], entries[place]

        def undone(value: Any, name: str = name, entry: int = entry) -> np.ndarray:
            whole = np.zeros((*np.shape(value), model.graph.size(name)))
            whole[..., entry] = value
            return np.asarray(_in_units(model, recipe, name, whole)[..., entry])

        numbered = lines is not None and lines.keys.step is not None
        times, times_ahead = (
            lines.times(row, steps.astype(int)) if numbered and lines is not None else steps
            for steps in (panel.times, panel.times_ahead)
        )
        title = names[place]
        if len(forecast.lengths) > 1:
            number = row if lines is None or lines.keys.row is None else lines.rows[row]
            title += f", {'row' if lines is None or lines.keys.row is None else lines.keys.row} "
            title += str(number)
        shown.append(
            replace(
                panel,
                title=title,
                times=times,
                times_ahead=times_ahead,
                past=undone(panel.past),
                median=undone(panel.median),
                bands=undone(panel.bands),
            )
        )
    time = "step" if lines is None or lines.keys.step is None else lines.keys.step
    save(fan(shown, time=time), out)
