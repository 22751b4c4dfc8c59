"""The commands that use a trained model: ``aevb evaluate``, ``sample``, ``encode``, ``impute``."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aevb.cli.array_files import refuse_kind, significant, write
from aevb.cli.data_argument import (
    ROWS,
    batches,
    counted_rows,
    known_rows,
    load_rows,
    recipe_of,
    which_rows,
    whole_of,
    without_latents,
)
from aevb.cli.encode_table import encode_table
from aevb.cli.evaluate_table import evaluate_table
from aevb.cli.impute_table import impute_table
from aevb.cli.latent_means import posterior_means
from aevb.cli.missing_marks import only_numbers
from aevb.cli.model_argument import open_run
from aevb.cli.open_table import File, is_table_run, refuse_options, refuse_without_table
from aevb.cli.options import (
    Gaps,
    Quiet,
    RunData,
    RunDevice,
    RunFolder,
    RunMissing,
    RunPrepare,
    Seed,
    UnknownLevels,
    asked_device,
    check_evidence,
    device_of,
    in_its_words,
    path,
    refuse_input,
)
from aevb.cli.sample_table import sample_table
from aevb.cli.units import Units
from aevb.estimate.keys import LENGTHS, STEPS

if TYPE_CHECKING:
    import numpy as np

    from aevb.data.datasets import Recipe
    from aevb.data.long_tables import Lines
    from aevb.data.sources import Source
    from aevb.declare.graph import Graph
    from aevb.model import Model

SAMPLES = 100  # importance samples of evaluate, unless --samples says otherwise


def evaluate(
    run: RunFolder,
    file: File = None,
    data: RunData = None,
    prepare: RunPrepare = None,
    missing: RunMissing = None,
    gaps: Gaps = None,
    unknown_levels: UnknownLevels = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Importance samples for log p(x), by default 100 (of a table: as --evidence "
            "needs); 0 skips it."
        ),
    ] = None,
    evidence: Annotated[
        str | None,
        typer.Option(
            help="Estimate log p(x) with its error: by importance (also prints the bound for 1 to "
            "1000 samples), ais, particles or prior."
        ),
    ] = None,
    seed: Seed = 0,
    device: RunDevice = "cpu",
    quiet: Quiet = False,
) -> None:
    """Print the bound, its terms and log p(x) in nats per example.

    For the run of a table, it also hides known cells at random and compares their predictions with
    the truth. If the data have labels, print the share of rows whose most probable class is their
    label, or the clustering accuracy if the training had no labels. The command uses the test rows
    if there are any (of a built-in data set, --validation or --hold-out), otherwise the training
    rows.

    Example: aevb evaluate run
    """
    import numpy as np
    import torch

    from aevb.data.datasets import clustering_accuracy
    from aevb.data.repeated_values import note_repeated_rows
    from aevb.data.sources import open_source
    from aevb.posterior import UntaughtError, untrained_gaps_note
    from aevb.training import evaluation

    if evidence is not None:
        check_evidence(evidence)
    data = one_file(file, data)
    if is_table_run(run):
        refuse_options({"--prepare": prepare, "--gaps": gaps, "--device": asked_device(device)})
        evaluate_table(
            run,
            data,
            missing,
            evidence=evidence or "auto",
            samples=samples,
            seed=seed,
            unknown_levels=unknown_levels,
        )
        return
    refuse_without_table({"--unknown-levels": unknown_levels})
    samples = SAMPLES if samples is None else samples
    model = open_run(run).to(device_of(device))
    loaded = load_rows(run, model, data, prepare, seed, missing=missing, gaps=gaps)
    chosen = loaded.test or loaded.train
    source = open_source(model.graph, chosen.data, model._parameter())
    some = source.take(torch.arange(min(source.n, ROWS)))
    model.teaching.warn_of_other_units(model, some)
    values = evaluation.evaluate_precisely(model, source, seed=seed)
    units = Units.of(model, loaded, source)
    print(
        f"{counted_rows(model, loaded, chosen)} of "
        f"{loaded.recipe.validation or loaded.recipe.data}{which_rows(loaded)}, nats per example:"
    )
    n, known = source.n, known_rows(model, chosen.data)
    reasons = list(
        dict.fromkeys(reason for name, reason in model.untaught().items() if known.get(name) != n)
    )
    for name, (value, error) in values.items():
        if not reasons or name == "evidence":
            print(
                f"  {name:<12} {value - units.lower(name):10.3f}"
                + (f" ± {error:.2g}" if error else "")
            )
    for reason in reasons:
        print(
            f"  {reason}: the bound of that q and its terms say nothing about p and are not printed"
        )
    for note in note_repeated_rows(model.graph, source):
        print(f"  {note}")
    if not reasons and any(source.lacking.values()):
        rows = source.take(torch.arange(n))
        loose = untrained_gaps_note(model, model.teaching, rows, source.places)
        if loose is not None:
            print(f"  {in_its_words(loose)}")
    lost = [name for name, (value, _) in values.items() if not math.isfinite(value)]
    if samples and "evidence" not in values and evidence is None:
        found = (
            evaluation.evaluate_evidence(model, source, samples=samples, seed=seed) - units.lower()
        )
        lost += [] if math.isfinite(found) else ["log p"]
        rises = (
            "a lower bound that rises with their number"
            + "; with an untrained q it may be far too low: try --evidence prior or ais"
            * bool(reasons)
        )
        print(
            f"  {_log_p(model, chosen.data):<12} {found:10.3f}   importance sampling, {samples} "
            f"samples: {rises}"
        )
    sampled = not reasons and any(error for _, error in values.values())
    if evidence:
        sampled |= _print_evidence(model, source, evidence, seed, units, quiet=quiet) != "exact"
    if sampled:
        print(
            "  ± is the sampling error: the standard error of the estimate for these rows, not "
            "the variation between rows"
        )
    if units.note:
        print(f"  {units.note}")
    if lost and not reasons:
        raise ValueError(
            f"Not finite: {', '.join(lost)}. The model gives some of these rows no density, or "
            f"numbers overflow. Check that the columns have the order and the units of the "
            f"training rows."
        )
    labels = np.full(n, -1) if chosen.labels is None else chosen.labels
    labelled = labels >= 0
    for name in model.graph.latents:
        if (
            labelled.any()
            and model.graph.rule("p", name).spec.finite
            and not model.graph.timed[name]
        ):
            try:
                probs = posterior_means(model, without_latents(model, chosen.data), seed)[0][name]
            except UntaughtError as error:
                print(f"  clusters {name}: not evaluated. {in_its_words(error)}")
                continue
            most, truth = probs.argmax(-1)[labelled], labels[labelled].astype(int)
            entropy = -(probs * _log(probs)).sum(-1).mean()
            # Classes have the numbers of the labels only if the training had labels.
            if name in (loaded.recipe.known or ()):
                match = f"{name}: the most probable class of {(most == truth).mean():.3f} of the"
                how = "rows with a label is their label"
            else:
                match = f"clusters {name}: {clustering_accuracy(most, truth):.3f} of the"
                how = "rows match their label (best matching)"
            print(f"  {match} {how}, conditional entropy {entropy:.3f}")
    if chosen.labels_of is not None:
        print(
            f"  The training rows had no labels {chosen.labels_of}: labels are only compared with "
            f"the clusters, and log p does not include them"
        )


def _log_p(model: Model, data: Mapping[str, Any]) -> str:
    """Name the evidence, e.g. "log p(x, y where known)".

    The name contains the data and the latents with known values.
    """
    n = len(next(iter(data.values())))
    known = [
        f"{name}{'' if count == n else ' where known'}"
        for name, count in known_rows(model, data).items()
        if count
    ]
    return f"log p({', '.join([*model.graph.observed, *known])})"


def _print_evidence(
    model: Model, source: Source, method: str, seed: int, units: Units, *, quiet: bool
) -> str:
    """Print log p(x) with its diagnostics and return the method that estimated it.

    Importance sampling also prints the bound for a rising number of samples.
    """
    import torch

    from aevb.evidence import curve, log_evidence

    batch = source.take(torch.arange(source.n))
    if method in ("ais", "particles") and sys.stderr.isatty() and not quiet:
        print(
            f"  {method}: this takes many passes through the model for each of {source.n} rows …",
            file=sys.stderr,
        )
    found = log_evidence(model, batch, method=method, seed=seed)
    found = replace(found, value=units.shift(found.value))
    if found.method == "importance":
        bounds = curve(model, batch, seed=seed)
        print(
            *(
                f"  {line}"
                for line in str(replace(bounds, value=units.shift(bounds.value))).splitlines()
            ),
            sep="\n",
        )
    print(*(f"  {line}" for line in in_its_words(str(found)).splitlines()), sep="\n")
    return found.method


def sample(
    run: RunFolder,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="A .png file for images, otherwise .csv or .npz; by default in the run's folder.",
        ),
    ] = None,
    n: Annotated[
        int,
        typer.Option(
            "-n",
            help="Number of samples (per class, if the model has a discrete root latent or a given "
            "class).",
        ),
    ] = 15,
    steps: Annotated[
        int | None,
        typer.Option(help="Length of sequences; by default that of the longest training sequence."),
    ] = None,
    draw: Annotated[
        bool,
        typer.Option(
            "--draw",
            help="Sample the observed variables too. By default their means given the sampled "
            "latents are written.",
        ),
    ] = False,
    reconstruct: Annotated[
        bool,
        typer.Option(
            "--reconstruct",
            help="Of images: draw rows of the data, each above its reconstruction, instead of "
            "samples (held-out rows if there are any).",
        ),
    ] = False,
    seed: Seed = 0,
    device: RunDevice = "cpu",
) -> None:
    """Sample from a trained model, as images or as a table.

    The run of a table gives new rows with its columns, as a .csv, .tsv or .parquet file; without
    --out, it prints some. Otherwise images form a grid with one row per class, and a table has all
    observed variables, in the units of the data.

    Examples: aevb sample run --out samples.png

    aevb sample run --reconstruct -n 10
    """
    import numpy as np

    from aevb.pictures import grid

    for option, number in (("-n", n), ("--steps", steps)):
        if number is not None and number < 1:
            raise ValueError(f"{option} must be at least 1, got {number}.")
    if is_table_run(run):
        refuse_options(
            {
                "--steps": steps,
                "--reconstruct": reconstruct or None,
                "--device": asked_device(device),
            }
        )
        sample_table(run, out, n, seed)
        return
    model, recipe = open_run(run).to(device_of(device)), recipe_of(run)
    if reconstruct:
        _reconstruct(run, model, recipe, out, n, seed)
        return
    graph = model.graph
    first = graph.observed[0]
    timed = [name for name in graph.observed if graph.timed[name]]
    length = steps or (((recipe and recipe.steps) or graph.size(timed[0])) if timed else None)
    shape = _image_shape(graph, first, recipe)
    out = out or run / "samples"
    out = out if out.suffix else out.with_suffix(".csv" if shape is None else ".png")
    if out.suffix != ".png":
        refuse_kind(out)
    if recipe is not None:
        refuse_input(out, recipe.data, recipe.validation)
    classes = next(
        (name for name in (*graph.given, *graph.stochastic) if _classes(graph, name)), None
    )
    count = _classes(graph, classes) if classes else 1
    parts = []
    for c in range(count):
        fixed: dict[str, Any] = {classes: c} if classes else {}
        parts.append(model.sample(n, steps=length, mean=not draw, seed=seed + c, **fixed))
    drawn = {
        name: np.concatenate([part[name].cpu().numpy() for part in parts])
        for name in graph.observed
    }
    what = first
    if out.suffix == ".png":
        if shape is None:
            raise ValueError(
                f"{first} has {graph.size(first)} columns, which do not form an image. Write a "
                f"table: --out samples.csv."
            )
        x, named = drawn[first], [f"{classes} = {c}" for c in range(count)] if classes else []
        if recipe is not None and classes in graph.given and len(recipe.classes or ()) == count:
            named = list(recipe.classes or ())
        form = x.shape[1:] if graph.timed[first] else shape
        grid(_light(recipe, x.reshape(len(x), *form)), n, out, named, ink=_has_ink(recipe))
    else:
        labels = {classes: np.repeat(np.arange(count), n)} if classes else {}
        arrays = {
            name: _as_data(graph, recipe, name, value) for name, value in drawn.items()
        } | labels
        write(
            out,
            arrays,
            (recipe.columns if recipe else None) or {},
            () if _one_line_per_row(recipe, timed, length) else timed,
        )
        what = ", ".join(graph.observed)
    print(
        f"{n * count} samples of "
        f"{what}{f', {n} for each of the {count} values of {classes}' if classes else ''} in {out}"
    )


def _reconstruct(
    run: Path, model: Model, recipe: Recipe | None, out: Path | None, n: int, seed: int
) -> None:
    """Draw rows of the data above their reconstructions."""
    import numpy as np
    import torch

    from aevb.data.sources import open_source
    from aevb.pictures import grid
    from aevb.posterior import posterior_of

    first = model.graph.observed[0]
    shape = None if model.graph.timed[first] else _image_shape(model.graph, first, recipe)
    out = (out or run / "reconstructions").with_suffix(".png")
    if shape is None:
        raise ValueError(
            f"{first} is no image. For the reconstructions of other data: "
            f"aevb.load_run({str(run)!r}).reconstruct(…)."
        )
    loaded = load_rows(run, model, None, None, seed)
    chosen = loaded.test or loaded.train
    source = open_source(model.graph, without_latents(model, chosen.data), model._parameter())
    rows = torch.linspace(0, source.n - 1, min(n, source.n)).long()
    batch = source.take(rows)
    found = posterior_of(model, model.teaching, batch, seed=seed).reconstruct()[first]
    pairs = [batch[first][0].cpu().numpy(), found.cpu().numpy()]
    pictures = np.concatenate([one.reshape(len(rows), *shape) for one in pairs])
    names = ["data", "reconstructed"]
    grid(_light(recipe, pictures), len(rows), out, names, ink=_has_ink(recipe))
    print(f"{len(rows)} rows of {first}{which_rows(loaded)} and their reconstructions in {out}")


def _light(recipe: Recipe | None, pixels: np.ndarray) -> np.ndarray:
    """Pixels from 0 to 1; counts are grey levels."""
    counts = recipe is not None and recipe.prepare == "counts"
    return pixels / ((recipe.levels or 256) - 1) if recipe is not None and counts else pixels


def _has_ink(recipe: Recipe | None) -> bool:
    """Whether large grey levels are ink on paper; those of image files are light."""
    return recipe is None or not recipe.folder


def encode(
    run: RunFolder,
    file: File = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="A .csv or .npz file, or .npy for a single latent. For the run of a table: .csv, "
            ".tsv or .parquet; without it, a part is printed.",
        ),
    ] = None,
    data: RunData = None,
    prepare: RunPrepare = None,
    missing: RunMissing = None,
    unknown_levels: UnknownLevels = None,
    seed: Seed = 0,
    device: RunDevice = "cpu",
) -> None:
    """Write the posterior means of the latents (probabilities for discrete ones).

    There is one line per row of a file, or per test row of a built-in data set. The run of a table
    gives the columns of the table, and the codes and their standard deviations beside them.

    Example: aevb encode run --out codes.csv
    """
    import numpy as np

    data = one_file(file, data)
    if is_table_run(run):
        refuse_options({"--prepare": prepare, "--device": asked_device(device)})
        encode_table(run, data, missing, out, seed, unknown_levels=unknown_levels)
        return
    refuse_without_table({"--unknown-levels": unknown_levels})
    if out is None:
        raise ValueError("Say where to write the codes, e.g. --out codes.csv.")
    refuse_kind(out)
    model = open_run(run).to(device_of(device))
    loaded = load_rows(run, model, data, prepare, seed, missing=missing, whole=True)
    refuse_input(out, loaded.recipe.data)
    chosen = loaded.test or loaded.train
    codes, method = posterior_means(model, without_latents(model, chosen.data), seed)
    timed = [name for name in codes if model.graph.timed[name]]
    lengths = (~np.isnan(codes[timed[0]]).any(-1)).sum(1) if timed else None
    write(out, codes, {}, timed, lengths=lengths, numbers=loaded.lines)
    print(
        f"{counted_rows(model, loaded, chosen)}{which_rows(loaded)}: "
        + ", ".join(f"{name} {list(code.shape)}" for name, code in codes.items())
        + f" in {out} (by {'the exact posterior' if method == 'exact' else 'q'})"
    )


def impute(
    run: RunFolder,
    file: File = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="A .csv or .npz file, or .npy for a single array. For the run of a table: .csv, "
            ".tsv or .parquet; without it, a part is printed.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A file with missing cells; by default the training file.", rich_help_panel="Data"
        ),
    ] = None,
    missing: RunMissing = None,
    gaps: Gaps = None,
    unknown_levels: UnknownLevels = None,
    samples: Annotated[
        int,
        typer.Option(help="Number of draws from q to average over, if the posterior is not exact."),
    ] = 50,
    std: Annotated[
        bool,
        typer.Option(
            "--std",
            help="For the run of a table: also write the standard deviation of each filled cell "
            "(of a level, the probability that it is another one).",
        ),
    ] = False,
    seed: Seed = 0,
    device: RunDevice = "cpu",
) -> None:
    """Fill the missing cells of a file by their posterior mean given the known cells.

    The run of a table fills words with the most probable level. All known cells stay as they are.

    Example: aevb impute run table.csv --out filled.csv
    """
    import numpy as np
    import torch

    from aevb.data.datasets import in_units, load
    from aevb.estimate.batch import pad

    data = one_file(file, data)
    if is_table_run(run):
        refuse_options({"--gaps": gaps, "--device": asked_device(device)})
        impute_table(run, data, missing, out, seed, unknown_levels=unknown_levels, std=std)
        return
    refuse_without_table({"--unknown-levels": unknown_levels, "--std": std or None})
    if out is None:
        raise ValueError("Say where to write the filled table, e.g. --out filled.csv.")
    refuse_kind(out)
    model, recipe = open_run(run).to(device_of(device)), recipe_of(run)
    graph = model.graph
    name = data or (recipe.data if recipe else None)
    if name is None:
        raise ValueError("Say which file to fill, e.g. --data table.csv.")
    refuse_input(out, name)
    loaded = load(name, graph, missing=only_numbers(missing), gaps=gaps, like=whole_of(recipe))
    means, method = _imputed(model, loaded.train.data, samples, seed)
    raw, lengths = pad(
        graph, loaded.train.raw, loaded.train.raw.get(STEPS), loaded.train.raw.get(LENGTHS)
    )
    raw |= {} if lengths is None else {LENGTHS: lengths}
    filled, count = {}, 0
    for variable, value in raw.items():
        array = np.asarray(value)
        if variable in means:
            mean = in_units(recipe, graph, variable, means[variable])
            mean = significant(mean, single=model._parameter().dtype == torch.float32)
            # Labels have fewer entries than the means. An image that is stored flat has as many.
            labels = array.ndim < mean.ndim and array.size < mean.size
            lost = _missing(array, labels) & _inside(raw, array, graph.timed[variable])
            count += int(lost.sum())
            if mean.ndim == 4 and array.shape[1:] == (*mean.shape[2:], mean.shape[1]):
                mean = np.moveaxis(mean, 1, -1)  # channels last, as images are stored
            array = np.where(lost, mean.argmax(-1) if labels else mean.reshape(array.shape), array)
        filled[variable] = array
    _write_filled(out, filled, graph, loaded.recipe, loaded.lines)
    how = {"exact": "by the exact posterior", "q": f"by {samples} draws of q"}.get(
        method, "by weighted draws"
    )
    print(
        f"{count} missing cell{'s' * (count != 1)} of "
        f"{counted_rows(model, loaded, loaded.train)} filled, in {out} ({how})"
    )


def one_file(file: str | None, data: str | None) -> str | None:
    """The file after the run, or that of --data."""
    if file is not None and data is not None:
        raise ValueError(f"Two files are named: {file} and --data {data}. Name one.")
    return file or data


# Computations -------------------------------------------------------------------------------------


def _imputed(
    model: Model, data: Mapping[str, Any], samples: int, seed: int
) -> tuple[dict[str, np.ndarray], str]:
    """Return the observed variables, with posterior means in missing cells, and the posterior."""
    import numpy as np

    from aevb.estimate.places import places_of
    from aevb.posterior import impute, posterior_of

    if samples < 1:
        raise ValueError(f"--samples must be at least 1, got {samples}.")
    found = []
    for i, batch in enumerate(batches(model, data)):
        posterior = posterior_of(
            model,
            model.teaching,
            batch,
            seed=seed + i,
            prefer_exact=True,
            weigh_gaps=True,
            first_row=i * ROWS,
            places=places_of(data),
        )
        found.append(impute(posterior, samples, draws=False))
    return {
        name: np.concatenate([part.mean[name].cpu().numpy() for part in found])
        for name in found[0].mean
    }, found[0].method


def _as_data(graph: Graph, recipe: Recipe | None, name: str, value: np.ndarray) -> np.ndarray:
    """Convert samples of an observed variable to the form of the data.

    Classes become their numbers (the most probable class), other values the units of the data.
    """
    import numpy as np

    from aevb.data.datasets import in_units

    return (
        np.asarray(value.argmax(-1))
        if graph.rule("p", name).spec.categorical
        else in_units(recipe, graph, name, value)
    )


def _one_line_per_row(recipe: Recipe | None, timed: list[str], length: int | None) -> bool:
    """Return whether sequences of this length fit the run's own table (one column per step)."""
    from aevb.data.tables import TABLES

    if recipe is None or recipe.long or Path(recipe.data).suffix not in TABLES:
        return False
    columns = recipe.columns
    return all(
        length == (recipe.steps if columns is None else len(columns.get(name, ())))
        for name in timed
    )


def _write_filled(
    out: Path, filled: dict[str, np.ndarray], graph: Graph, recipe: Recipe, numbers: Lines | None
) -> None:
    """Write filled arrays in the layout of their file.

    A .csv has one line per row if that can hold the sequences, otherwise one line per step.
    """
    import numpy as np

    from aevb.data.tables import TABLES

    lengths = None
    timed = [name for name in filled if graph.timed.get(name)]
    if out.suffix == ".csv":
        lengths, steps = filled.pop(LENGTHS, None), filled.pop(STEPS, None)
        lengths = lengths if steps is None else steps.astype(bool).sum(1)
        wide = numbers is None and lengths is None and all(filled[name].ndim == 2 for name in timed)
        timed = [] if wide else timed
    columns = dict(recipe.columns or {}) if Path(recipe.data).suffix in TABLES else {}
    write(
        out,
        filled,
        columns,
        timed,
        exact=True,
        lengths=None if lengths is None else np.asarray(lengths),
        numbers=numbers,
    )


def _missing(array: np.ndarray, labels: bool) -> np.ndarray:
    import numpy as np

    unknown = np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, bool)
    return unknown | (array < 0) if labels else unknown


def _inside(data: Mapping[str, Any], array: np.ndarray, timed: bool) -> np.ndarray:
    """Return a mask of the entries at real steps, not padding."""
    import numpy as np

    if not timed or not (LENGTHS in data or STEPS in data):
        return np.ones(array.shape, bool)
    real = (
        np.asarray(data[STEPS]).astype(bool)
        if STEPS in data
        else np.arange(array.shape[1]) < np.asarray(data[LENGTHS])[:, None]
    )
    return np.broadcast_to(real.reshape(*real.shape, *[1] * (array.ndim - 2)), array.shape)


def _log(probs: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.asarray(np.log(np.maximum(probs, 1e-12)))


def _image_shape(graph: Graph, name: str, recipe: Recipe | None) -> tuple[int, ...] | None:
    """Return the image shape of a variable: (height, width) or (3, height, width), or None.

    It is the declared shape, else the shape of the data, else a square if the size allows one.
    """
    declared = graph.shapes[name]
    if len(declared) > 1 and not graph.timed[name]:
        shape = declared[1:] if len(declared) == 3 and declared[0] == 1 else declared
        return shape if len(shape) == 2 or (len(shape) == 3 and shape[0] == 3) else None
    if recipe is not None:
        return None if recipe.image is None else (recipe.image[0], recipe.image[1])
    if graph.timed[name]:
        return (graph.size(name), graph.size(name))
    side = round(graph.size(name) ** 0.5)
    return (side, side) if side > 1 and side * side == graph.size(name) else None


def _classes(graph: Any, name: str) -> int:
    """Return the number of classes of a given or discrete root that sampling can fix, else 0."""
    if name in graph.given:
        return graph.size(name) if graph.size(name) > 1 and not graph.timed[name] else 0
    spec = graph.rule("p", name).spec
    return (
        graph.size(name)
        if spec.categorical and not graph.reads("p", name) and not graph.timed[name]
        else 0
    )
