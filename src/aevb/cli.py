"""The command line: ``aevb train gmvae --data digits --out run``, then evaluate, sample, encode, impute; ``aevb explain gmvae``."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from aevb.data.named import Loaded, Recipe
    from aevb.model import Model
    from aevb.training.schedules import Schedule

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Latent variable models by auto-encoding variational Bayes: declare p and q, and the bound is derived.",
    epilog="Begin with: aevb models; aevb train gmvae --data digits --out run",
)

ROWS = 1000  # rows that are taken at a time after training

ModelName = Annotated[str, typer.Argument(help="A name from `aevb models`, file.py:name, or a folder that a model was saved to.")]
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run (`aevb train … --out FOLDER`).")]
Data = Annotated[str, typer.Option(help="digits, mnist, fashion, fa, or a file: .csv, .parquet, .npz, .npy.", rich_help_panel="Data")]
RunData = Annotated[str | None, typer.Option(help="Other data than the run was trained on; prepared as those were.", rich_help_panel="Data")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="An argument of the model, e.g. --set z=5 --set likelihood=Normal.", rich_help_panel="Model"),
]
How = Annotated[
    list[str] | None,
    typer.Option(metavar="LATENT=CHOICE", help="Override the plan for one latent, e.g. --how y=gumbel.", rich_help_panel="Estimator"),
]
BoundName = Annotated[str, typer.Option(help="elbo or iwae.", rich_help_panel="Estimator")]
Samples = Annotated[int, typer.Option(help="Samples an example.", rich_help_panel="Estimator")]
Gradient = Annotated[str, typer.Option(help="plain, stl or dreg.", rich_help_panel="Estimator")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Prepare = Annotated[
    str | None,
    typer.Option(
        help="standardise (tables); threshold, binarise, dequantise, scale, counts (grey levels), binarise-fresh and dequantise-fresh "
        "(drawn anew each epoch); none. Built-in images get what the likelihood calls for.",
        rich_help_panel="Data",
    ),
]
RunPrepare = Annotated[str | None, typer.Option(help="Prepare the rows otherwise than in training.", rich_help_panel="Data")]


def _version(asked: bool) -> None:
    if asked:
        from aevb.version import __version__

        print(f"aevb {__version__}")
        raise typer.Exit


@app.callback()
def _common(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    pass


@app.command(rich_help_panel="Models")
def models() -> None:
    """List the models that come with the library, and their arguments."""
    from aevb.zoo import zoo

    for name, build in zoo.items():
        print(f"{name:<8} {inspect.getdoc(build)}")
        print(f"{'':<8} " + " ".join(f"--set {_argument(parameter)}" for parameter in inspect.signature(build).parameters.values()))
    print("\nSee one derived: aevb explain gmvae")


@app.command(rich_help_panel="Models")
def explain(
    model: ModelName,
    set_: Set = None,
    how: How = None,
    bound: BoundName = "elbo",
    samples: Samples = 1,
    gradient: Gradient = "plain",
    latex: Annotated[bool, typer.Option("--latex", help="Print the estimator as LaTeX instead.")] = False,
) -> None:
    """Print a model, the estimator derived for it, and the reason for each choice.

    Example: aevb explain gmvae --how y=gumbel
    """
    found = resolve(model, settings=_pairs("--set", set_))
    explanation = found.explain(how=_pairs("--how", how), bound=bound, samples=samples, gradient=gradient)
    print(explanation.latex if latex else f"{found}\n\n{explanation}")


@app.command(rich_help_panel="Runs")
def train(
    model: ModelName,
    data: Data,
    out: Annotated[Path, typer.Option(help="A new folder for the run's files.")],
    set_: Set = None,
    prepare: Prepare = None,
    validation: Annotated[str | None, typer.Option(help="A file of validation rows.", rich_help_panel="Data")] = None,
    hold_out: Annotated[float, typer.Option(help="The share of a file's rows to validate on, e.g. 0.1.", rich_help_panel="Data")] = 0.0,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data; by default 20 or more.", rich_help_panel="Training")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.", rich_help_panel="Training")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows a step; 100 unless the model says otherwise.", rich_help_panel="Training")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate; by default what suits the model.", rich_help_panel="Training")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps of rising learning rate.", rich_help_panel="Training")] = None,
    decay: Annotated[str | None, typer.Option(help="cosine or constant.", rich_help_panel="Training")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest norm of the gradient.", rich_help_panel="Training")] = None,
    kl_warmup: Annotated[int | None, typer.Option(help="Steps over which the KL terms get their weight.", rich_help_panel="Training")] = None,
    classify: Annotated[float | None, typer.Option(help="Weight of log q(y|x) where y is known.", rich_help_panel="Training")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="joint (AEVB), alternate:1000,1000 (E- and M-steps), em, mle.", rich_help_panel="Training")
    ] = None,
    patience: Annotated[int | None, typer.Option(help="Stop after so many validations without a better one.", rich_help_panel="Training")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; by default half a minute lies between.", rich_help_panel="Training")
    ] = None,
    skip: Annotated[int | None, typer.Option(help="Steps that may be left out because they are not finite.", rich_help_panel="Training")] = None,
    how: How = None,
    bound: BoundName = "elbo",
    samples: Samples = 1,
    gradient: Gradient = "plain",
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write scalars for TensorBoard into the run's folder.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run: the same command with this added.")] = False,
) -> None:
    """Train a model on data and write everything about the run into a folder.

    A model of the zoo takes its sizes from the data. Built-in data bring test rows, which validate.

    Examples:

    aevb train gmvae --data digits --out run

    aevb train vae --data table.csv --set likelihood=Normal --set z=5 --prepare standardise --hold-out 0.1 --out run

    aevb train vrnn --data sequences.npz --set likelihood=Poisson --schedule alternate:500,500 --out run
    """
    import torch

    from aevb.data.named import load
    from aevb.training.fit import fit
    from aevb.training.folder import refuse_second
    from aevb.zoo import recipes

    torch.manual_seed(seed)
    chosen = _schedule(schedule)
    found = resolve(model, data, _pairs("--set", set_))
    found = found.to(_device(device))
    loaded = load(data, found.graph, prepare=prepare, seed=seed, validation=validation, hold_out=hold_out)
    speaks = os.environ.get("RANK", "0") == "0"  # of several processes, the first
    refuse_second(out, resume)
    choices: dict[str, Any] = {"how": _pairs("--how", how), "bound": bound, "samples": samples, "gradient": gradient}
    if speaks:
        print(f"{found}\n\n{found.explain(**choices)}\n")
        print(_told(loaded) + "\n")
    asked: dict[str, Any] = {
        "epochs": epochs,
        "steps": steps,
        "batch": batch,
        "lr": lr,
        "seed": seed,
        "patience": patience,
        "warmup": warmup,
        "decay": decay,
    }
    asked |= {"clip": clip, "kl_warmup": kl_warmup, "classify": classify, "skip": skip, "schedule": chosen}
    asked |= {"checkpoint_every": checkpoint_every}
    settings: dict[str, Any] = recipes.get(model, {}) | {name: value for name, value in asked.items() if value is not None}
    files: dict[str, Any] = {"out": out, "resume": resume, "progress": True, "tensorboard": tensorboard}
    check = loaded.test.data if loaded.test else None
    try:
        with _recorded(loaded.recipe, out, resume, speaks), _advised(model):
            run = fit(found, loaded.train.data, validation=check, **files, **settings, **choices)
    except KeyboardInterrupt as stop:  # typer would drop the message
        if speaks:
            print(
                f"aevb: {_in_its_words(stop) or 'interrupted'}".replace("--resume continues", "the same command with --resume continues"),
                file=sys.stderr,
            )
        raise typer.Exit(130) from None
    if not speaks:
        return
    run.plot(out / "curves.png")
    print(f"\n{run.step} steps in {run.seconds:.1f} s. The run is in {out}: curves.png, metrics.jsonl, checkpoints.")
    print(f"Next: aevb evaluate {shlex.quote(str(out))}; aevb sample {shlex.quote(str(out))}")


@app.command(rich_help_panel="Runs")
def evaluate(
    run: RunFolder,
    data: RunData = None,
    prepare: RunPrepare = None,
    samples: Annotated[int, typer.Option(help="Importance samples for log p(x); 0 leaves it out.")] = 100,
    seed: Seed = 0,
) -> None:
    """The bound, its terms and log p(x) in nats an example; clusters against labels where there are both.

    On test rows where the data have some: those of a built-in set, or those held out.

    Example: aevb evaluate run
    """
    from aevb.data.named import clustering_accuracy
    from aevb.data.sources import open_source
    from aevb.training import evaluation
    from aevb.training.run import load_run

    model = load_run(run)
    loaded = _load(run, model, data, prepare, seed)
    chosen = loaded.test or loaded.train
    source = open_source(model.graph, chosen.data, model._parameter())
    values = evaluation.evaluate(model, source, seed=seed)
    print(f"{source.n} rows of {loaded.recipe.validation or loaded.recipe.data}{_kind(loaded)}, nats an example:")
    for name, value in values.items():
        print(f"  {name:<12} {value:10.3f}")
    if samples and "evidence" not in values:
        found = evaluation.evaluate_evidence(model, source, samples=samples, seed=seed)
        print(f"  {'log p(x)':<12} {found:10.3f}   importance sampling, {samples} samples: a bound that rises with their number")
    for name in model.graph.latents:
        if chosen.labels is not None and model.graph.rule("p", name).spec.finite and not model.graph.timed[name]:
            probs = _posterior_means(model, _without_latents(model, chosen.data), seed)[name]
            known = chosen.labels >= 0
            accuracy = clustering_accuracy(probs.argmax(-1)[known], chosen.labels[known].astype(int))
            entropy = -(probs * _log(probs)).sum(-1).mean()
            print(f"  clusters {name}: {accuracy:.3f} of the rows match their label (best matching), conditional entropy {entropy:.3f}")


@app.command(rich_help_panel="Runs")
def sample(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="A .png for images, .csv or .npz otherwise; by default in the run's folder.")] = None,
    n: Annotated[int, typer.Option("-n", help="How many (for each class of a discrete or given variable, if there is one).")] = 15,
    steps: Annotated[int | None, typer.Option(help="Length of sequences; by default that of the longest training row.")] = None,
    draw: Annotated[bool, typer.Option("--draw", help="Draw observed variables too, instead of their means.")] = False,
    seed: Seed = 0,
) -> None:
    """Draw from a trained model: a grid of images, a row for each class, or a table in the units of the data.

    Example: aevb sample run --out samples.png
    """
    import numpy as np

    from aevb.data.named import Recipe
    from aevb.pictures import grid
    from aevb.training.run import load_run

    model, recipe = load_run(run), Recipe.read(run)
    graph = model.graph
    observed = graph.observed[0]
    timed = graph.timed[observed]
    length = steps or (((recipe and recipe.steps) or graph.size(observed)) if timed else None)
    shape = _image_shape(graph, observed, recipe)
    out = out or run / "samples"
    out = out if out.suffix else out.with_suffix(".csv" if shape is None else ".png")
    classes = next((name for name in (*graph.given, *graph.stochastic) if _classes(graph, name)), None)
    count = _classes(graph, classes) if classes else 1
    parts = []
    for c in range(count):
        fixed: dict[str, Any] = {classes: c} if classes else {}
        parts.append(model.sample(n, steps=length, mean=not draw, seed=seed + c, **fixed)[observed].cpu().numpy())
    x, labels = np.concatenate(parts), {classes: np.repeat(np.arange(count), n)} if classes else {}
    if out.suffix == ".png":
        if shape is None:
            raise ValueError(f"{observed} has {graph.size(observed)} columns, which are no image. Write a table: --out samples.csv.")
        grid(np.clip(x.reshape(len(x), *(x.shape[1:] if timed else shape)), 0, 1), n, out)
    else:
        x = recipe.undo(x) if recipe else x
        columns = (recipe.columns or {}).get(observed) if recipe else None
        _write(out, {observed: x, **labels}, {observed: columns} if columns else {}, timed={observed} if timed else set())
    print(f"{len(x)} samples of {observed}{f', {n} for each of the {count} values of {classes}' if classes else ''} in {out}")


@app.command(rich_help_panel="Runs")
def encode(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="codes.npz, or codes.csv.")],
    data: RunData = None,
    prepare: RunPrepare = None,
    seed: Seed = 0,
) -> None:
    """Write the posterior means of the latents (probabilities for discrete ones): of every row of a file, of a built-in set's test rows.

    Example: aevb encode run --out codes.csv
    """
    from aevb.training.run import load_run

    model = load_run(run)
    loaded = _load(run, model, data, prepare, seed, whole=True)
    chosen = loaded.test or loaded.train
    codes = _posterior_means(model, _without_latents(model, chosen.data), seed)
    _write(out, codes, {}, timed={name for name in codes if model.graph.timed[name]})
    n = len(next(iter(codes.values())))
    print(f"{n} rows{_kind(loaded)}: " + ", ".join(f"{name} {list(code.shape)}" for name, code in codes.items()) + f" in {out}")


@app.command(rich_help_panel="Runs")
def impute(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="A file of the same kind as the data: .csv, .npz or .npy.")],
    data: Annotated[str | None, typer.Option(help="A file with missing cells; by default the run's own.", rich_help_panel="Data")] = None,
    samples: Annotated[int, typer.Option(help="Samples of the latents to average over.")] = 50,
    seed: Seed = 0,
) -> None:
    """Fill the missing cells of a file: the mean of p under the posterior given the cells that are there.

    Example: aevb impute run --data table.csv --out filled.csv
    """
    import numpy as np

    from aevb.data.files import TABLES
    from aevb.data.named import load
    from aevb.training.run import load_run

    model, recipe = load_run(run), _recipe(run)
    name = data or (recipe.data if recipe else None)
    if name is None:
        raise ValueError("Say which file to fill: --data table.csv.")
    whole = load(name, model.graph, like=_whole(recipe)).train
    means = _reconstructions(model, whole.data, samples, seed)
    filled, count = {}, 0
    for variable, value in whole.raw.items():
        array = np.asarray(value)
        if variable in means:
            mean = means[variable]
            mean = recipe.undo(mean) if recipe and variable == model.graph.observed[0] else mean
            mean = mean.argmax(-1) if array.ndim < mean.ndim and mean.shape[-1] > 1 else mean.reshape(array.shape)
            missing = _missing(array, labels=array.ndim < means[variable].ndim and means[variable].shape[-1] > 1)
            missing &= _inside(whole.raw, array, model.graph.timed[variable])
            count += int(missing.sum())
            array = np.where(missing, mean, array)
        filled[variable] = array
    columns = (recipe.columns if recipe else None) if Path(name).suffix in TABLES else None
    _write(out, filled, dict(columns or {}), timed=set(), exact=True)
    print(f"{count} missing cells of {len(next(iter(filled.values())))} rows filled, in {out}")


# What the commands share ---------------------------------------------------------------------------------------------------------


def _recipe(run: Path) -> Recipe | None:
    from aevb.data.named import Recipe

    return Recipe.read(run)


def _whole(recipe: Recipe | None) -> Recipe | None:
    from dataclasses import replace

    return None if recipe is None else replace(recipe, hold_out=0.0, validation=None)


def _load(run: Path, model: Model, data: str | None, prepare: str | None, seed: int, *, whole: bool = False) -> Loaded:
    """The rows that a command works on: those it names, or the run's own, prepared as in training; ``whole`` holds out none of a file."""
    from aevb.data.named import load

    recipe = _whole(_recipe(run)) if whole else _recipe(run)
    name = data or (recipe.data if recipe else None)
    if name is None:
        raise ValueError(f"{run} does not say which data it was trained on. Name them: --data digits.")
    try:
        return load(name, model.graph, prepare=prepare, seed=seed, like=recipe)
    except ValueError as error:
        if data is None and not Path(name).exists():
            raise ValueError(f"{error} {run} was trained on {name}, as its data.json says: go to the folder where it lies, or say --data.") from None
        raise


def _kind(loaded: Loaded) -> str:
    return "" if loaded.test is None else " (held out)" if loaded.recipe.hold_out else " (validation)" if loaded.recipe.validation else " (test)"


def _told(loaded: Loaded) -> str:
    """One line on the data: how many rows, how prepared, what validates."""
    recipe = loaded.recipe
    n = len(next(iter(loaded.train.data.values())))
    parts = [f"{n} rows of {recipe.data}"]
    parts += (
        [f"{recipe.prepare}d" if recipe.prepare in ("standardise", "dequantise", "binarise", "scale") else str(recipe.prepare)]
        if recipe.prepare
        else []
    )
    parts += [f"{len(next(iter(loaded.test.data.values())))} validate"] if loaded.test else []
    return "Data: " + ", ".join(parts) + "."


class _recorded:
    """Keep the recipe of the data beside the run; a folder that a mistake left empty goes again."""

    def __init__(self, recipe: Recipe, out: Path, resume: bool, first: bool) -> None:
        self.recipe, self.out, self.resume, self.first, self.fresh = recipe, out, resume, first, False

    def __enter__(self) -> None:
        there = _recipe(self.out)
        if (self.out / "checkpoints").is_dir():
            if self.resume and there is not None and json.loads(there.text()) != json.loads(self.recipe.text()):
                changed = [key for key, value in vars(there).items() if value != getattr(self.recipe, key)]
                raise ValueError(
                    f"{self.out} was trained with {changed[0]}={getattr(there, changed[0])!r}, not {getattr(self.recipe, changed[0])!r} (data.json). "
                    "Resume with the same data."
                )
            return
        if self.first:
            from aevb.training.checkpoint import TrainingError, replace
            from aevb.training.folder import Folder

            self.fresh = not self.out.exists()
            try:
                with Folder(self.out).writing(self.out, None):
                    self.out.mkdir(parents=True, exist_ok=True)
                    replace(self.out / "data.json", self.recipe.text())
            except TrainingError:
                if self.fresh and self.out.is_dir():
                    self.out.rmdir()
                raise

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is ValueError and self.fresh and {path.name for path in self.out.iterdir()} == {"data.json"}:
            (self.out / "data.json").unlink()
            self.out.rmdir()


class _advised:
    """Where a zoo model's likelihood does not take the data, say how to choose another here."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        from aevb.zoo import zoo

        if (
            kind is ValueError
            and "but p gives x a" in str(error)
            and self.model in zoo
            and "likelihood" in inspect.signature(zoo[self.model]).parameters
        ):
            raise ValueError(f"{error} Here: --set likelihood=Normal (or another family), or --prepare.") from None


def _batches(model: Model, data: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    import torch

    from aevb.data.sources import open_source

    source = open_source(model.graph, dict(data), model._parameter())
    return [source.take(torch.arange(start, min(source.n, start + ROWS))) for start in range(0, source.n, ROWS)]


def _posterior_means(model: Model, data: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """The posterior mean of every latent, [N, size] or [N, T, size]; NaN beyond a row's end."""
    import numpy as np
    import torch

    from aevb.posterior import Posterior

    found: dict[str, list[np.ndarray]] = {name: [] for name in model.graph.latents}
    for i, batch in enumerate(_batches(model, data)):
        posterior = Posterior(model, batch, samples=64, seed=seed + i)
        for name, parts in found.items():
            with torch.no_grad():
                mean = posterior[name].mean
            if "steps" in batch and model.graph.timed[name]:
                mean = torch.where(batch["steps"].transpose(0, 1), mean, torch.nan)
            parts.append(mean.cpu().numpy())
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _reconstructions(model: Model, data: Mapping[str, Any], samples: int, seed: int) -> dict[str, np.ndarray]:
    """p's mean of the observed variables, averaged over samples of the latents given what is known of each row."""
    import numpy as np

    from aevb.posterior import Posterior

    if samples < 1:
        raise ValueError(f"--samples is at least 1, got {samples}.")
    parts: dict[str, list[np.ndarray]] = {}
    for batch in _batches(model, data):
        sums: dict[str, Tensor] = {}
        for s in range(samples):
            for name, value in Posterior(model, batch, samples=1, seed=seed + s).reconstruct().items():
                sums[name] = sums[name] + value if name in sums else value
        for name, total in sums.items():
            parts.setdefault(name, []).append((total / samples).cpu().numpy())
    return {name: np.concatenate(found) for name, found in parts.items()}


def _without_latents(model: Model, data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in model.graph.latents}


def _missing(array: np.ndarray, labels: bool) -> np.ndarray:
    import numpy as np

    unknown = np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, bool)
    return unknown | (array < 0) if labels else unknown


def _inside(data: Mapping[str, Any], array: np.ndarray, timed: bool) -> np.ndarray:
    """Which entries are real steps."""
    import numpy as np

    if not timed or not ("lengths" in data or "steps" in data):
        return np.ones(array.shape, bool)
    real = np.asarray(data["steps"]).astype(bool) if "steps" in data else np.arange(array.shape[1]) < np.asarray(data["lengths"])[:, None]
    return np.broadcast_to(real.reshape(*real.shape, *[1] * (array.ndim - 2)), array.shape)


def _log(probs: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.asarray(np.log(np.maximum(probs, 1e-12)))


def _write(out: Path, arrays: Mapping[str, np.ndarray], columns: Mapping[str, list[str]], timed: set[str], *, exact: bool = False) -> None:
    """Arrays by variable: a .npz (or .npy) as they are, a .csv with a header; of sequences a line a step, those missing left out.

    Six digits are written, or with ``exact`` as many as give every number back.
    """
    import numpy as np

    if out.suffix == ".npz":
        np.savez(out, **arrays)  # type: ignore[arg-type]
        return
    if out.suffix == ".npy" and len(arrays) == 1:
        np.save(out, next(iter(arrays.values())))
        return
    if out.suffix != ".csv":
        raise ValueError(f"{out}: write a .csv or a .npz file.")
    names: list[str] = []
    parts = []
    n = len(next(iter(arrays.values())))
    length = max((arrays[name].shape[1] for name in timed), default=1)
    for name, value in arrays.items():
        table = value if name in timed else np.repeat(value[:, None], length, 1)
        table = table.reshape(n * length, -1)
        width = table.shape[1]
        names += columns.get(name) or ([name] if width == 1 else [f"{name}{i}" for i in range(width)])
        parts.append(table)
    if timed:
        names = ["row", "step", *names]
        parts = [np.repeat(np.arange(n), length)[:, None], np.tile(np.arange(length), n)[:, None], *parts]
    whole = np.concatenate(parts, 1)
    if timed:
        whole = whole[~np.isnan(whole).any(1)]
    with out.open("w", encoding="utf-8", newline="") as file:
        file.write(",".join(names) + "\n")
        for row in whole.tolist():
            file.write(",".join(_digits(value, exact) for value in row) + "\n")


def _digits(value: float, exact: bool) -> str:
    short = f"{value:.6g}"
    return short if not exact or float(short) == value else repr(value)


def _image_shape(graph: Any, name: str, recipe: Recipe | None) -> tuple[int, int] | None:
    """Height and width, if the variable is an image: as the data were, or a square where that is not known."""
    if recipe is not None:
        return None if recipe.image is None else (recipe.image[0], recipe.image[1])
    if graph.timed[name]:
        return (graph.size(name), graph.size(name))
    side = round(graph.size(name) ** 0.5)
    return (side, side) if side > 1 and side * side == graph.size(name) else None


def _classes(graph: Any, name: str) -> int:
    """How many classes a given or discrete root variable has, if sampling can fix it."""
    if name in graph.given:
        return graph.size(name) if graph.size(name) > 1 and not graph.timed[name] else 0
    spec = graph.rule("p", name).spec
    return graph.size(name) if type(spec).__name__ == "OneHot" and not graph.reads("p", name) and not graph.timed[name] else 0


def _pairs(option: str, items: list[str] | None) -> dict[str, str]:
    example = {"--how": "latent=choice, e.g. --how y=gumbel", "--set": "NAME=VALUE, e.g. --set z=5"}[option]
    choices = {}
    for item in items or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{option} takes {example}; got {item!r}.")
        choices[name] = value
    return choices


def _schedule(text: str | None) -> Schedule | None:
    from aevb.training.schedules import Schedule

    if text is None:
        return None
    known = {kind.__name__: kind for kind in Schedule.__subclasses__()}
    name, _, numbers = text.partition(":")
    if name not in known:
        raise ValueError(f"Unknown schedule {name!r}. Choose one of {', '.join(known)}; alternate:1000,1000 says how many steps.")
    try:
        return known[name](*(int(number) for number in numbers.split(",") if number))
    except (TypeError, ValueError) as error:
        detail = str(error) if "takes positive" in str(error) or "positive number" in str(error) else f"{name} takes other numbers"
        raise ValueError(f"--schedule {text}: {detail}. Write e.g. joint, alternate:1000,1000, em or mle.") from None


# From words to a model -------------------------------------------------------------------------------------------------------------


def resolve(text: str, data: str | None = None, settings: Mapping[str, str] | None = None) -> Model:
    """The model that the command line names; a zoo model takes its sizes from the data, where it is not told them."""
    from aevb.model import Model, load
    from aevb.zoo import zoo

    if text in zoo:
        told = _arguments(text, zoo[text], settings or {})
        if data:
            from aevb.data.named import sizes

            told = {name: value for name, value in sizes(data, zoo[text]().graph).items() if name in inspect.signature(zoo[text]).parameters} | told
        return zoo[text](**told)
    path, colon, name = text.rpartition(":")
    if colon and path.endswith(".py"):
        found = _from_file(Path(path), name)
        if inspect.isfunction(found):
            found = found(**_arguments(text, found, settings or {}))
        elif settings:
            raise ValueError(f"--set gives arguments to a function, but {name!r} in {path} is none.")
        if not isinstance(found, Model):
            raise ValueError(f"{name!r} in {path} is a {type(found).__name__}, not a Model or a function that returns one.")
        return found
    if (Path(text) / "model.json").is_file():
        if settings:
            raise ValueError("--set gives arguments to a model of the zoo; a saved model has its own.")
        return load(text)
    raise ValueError(f"There is no model {text!r}. Name one of {', '.join(zoo)}, a file.py:name, or a saved model's folder.")


def _arguments(name: str, build: Callable[..., Any], settings: Mapping[str, str]) -> dict[str, Any]:
    parameters = inspect.signature(build).parameters
    for key in settings:
        if key not in parameters:
            raise ValueError(f"{name} has no argument {key!r}. Its arguments are {', '.join(map(_argument, parameters.values())) or 'none'}.")
    values = {key: _value(text) for key, text in settings.items()}
    lists = {key for key in values if isinstance(parameters[key].default, tuple)}
    return {key: (value,) if key in lists and not isinstance(value, tuple) else value for key, value in values.items()}


def _argument(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is inspect.Parameter.empty:
        return parameter.name
    return f"{parameter.name}={json.dumps(default) if isinstance(default, tuple) else default}"


def _value(text: str) -> Any:
    """A number, a list, true or false as JSON; anything else is a word."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return tuple(value) if isinstance(value, list) else value


def _from_file(path: Path, name: str) -> object:
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    module_name = f"aevb model file {path.stem}"  # no import can have this name, so none is shadowed
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        from aevb.model import Model

        models = [key for key, value in vars(module).items() if isinstance(value, Model)]
        raise ValueError(f"{path} has no {name!r}." + (f" Its models are {', '.join(models)}." if models else ""))
    found: object = getattr(module, name)
    return found


@app.command(rich_help_panel="Runs")
def reproduce(
    sections: Annotated[list[str] | None, typer.Argument(help="fa, vae, cvae, gmvae, vrnn, or all.")] = None,
    data: Annotated[str, typer.Option(help="digits (8×8, embedded: minutes on a laptop) or mnist (28×28, the tutorial's sizes: a GPU).")] = "digits",
    out: Annotated[Path, typer.Option(help="A folder for results and report.")] = Path("reproduction"),
    jobs: Annotated[int | None, typer.Option(help="Experiments at a time, each in a process of its own; by default as suits the machine.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A few epochs of everything, to see it run.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Build the report from results that are there; train nothing.")] = False,
) -> None:
    """Train the tutorial's five models, with every experiment and figure, and write one report.

    What was finished is not done again: the same command continues an interrupted reproduction.

    Example: aevb reproduce --out reproduction
    """
    import time

    from aevb import experiments
    from aevb.experiments.lab import Lab
    from aevb.report.page import build

    chosen = experiments.SECTIONS if not sections or "all" in sections else tuple(sections)
    for section in chosen:
        if section not in experiments.SECTIONS:
            raise ValueError(f"There is no section {section!r}. Choose of {', '.join(experiments.SECTIONS)}, or all.")
    if data not in ("digits", "mnist"):
        raise ValueError(f"The experiments are on digits or mnist, not on {data!r}.")
    lab = Lab(out, data, _device(device), quick)
    failed = []
    if not report_only:
        lab.claim()
        began = time.perf_counter()
        count = sum(len(experiments.tasks(lab, section)) for section in chosen)
        at_once = jobs or (8 if lab.device.startswith("cuda") else max(1, min(4, os.cpu_count() or 1)))
        print(f"{count} experiments on {data}, {at_once} at a time, into {out}")
        for number, (name, seconds, why) in enumerate(experiments.run(lab, chosen, jobs=at_once), 1):
            state = "failed" if why else "done before" if seconds is None else f"{seconds:.1f} s"
            print(f"{number:>3} of {count}  {name:<22} {state:>12}   {time.perf_counter() - began:6.0f} s in all", flush=True)
            if why:
                failed.append(name)
                print(why, file=sys.stderr)
            lab.took(time.perf_counter() - began)
    print(f"The report: {build(out)}")
    if failed:
        print(f"aevb: {len(failed)} of the experiments failed: {', '.join(failed)}. The same command tries them again.", file=sys.stderr)
        raise typer.Exit(1)


def _device(name: str) -> str:
    """Where to train; of several processes each has a GPU of its own."""
    import torch

    if name not in ("auto", "cpu") and not (name.startswith("cuda") and torch.cuda.is_available()):
        raise ValueError(f"There is no device {name!r} here. Use --device cpu.")
    if name in ("auto", "cuda"):
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    return name


def main() -> None:
    """Run the command line. Exit codes: 0, 1 if a run failed, 2 for a mistake in what was asked."""
    code = _run()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # torch's gloo and autograd threads can abort a process that goes the usual way; everything is written by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _in_its_words(error: BaseException) -> str:
    """A message of the library, with the command line's words for what to do."""
    words = {
        "resume=True": "--resume",
        "pass validation= data": "add --validation FILE, or --hold-out 0.1",
        "clip=": "--clip",
        "patience=": "--patience",
    }
    text = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
    for ours, theirs in words.items():
        text = text.replace(ours, theirs)
    return text


def _run() -> int:
    from aevb.training.fit import TrainingError

    try:
        app()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except ValueError as error:
        print(f"aevb: {_in_its_words(error)}", file=sys.stderr)
        return 2
    except (TrainingError, OSError) as error:
        print(f"aevb: {_in_its_words(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"aevb: {error or 'interrupted'}", file=sys.stderr)
        return 1
    return 0
