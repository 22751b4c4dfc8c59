"""The command line: ``aevb train gmvae --data digits --out run``, then evaluate, sample, encode; ``aevb explain gmvae``."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from aevb.model import Model

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Latent variable models by auto-encoding variational Bayes."
)

ModelName = Annotated[str, typer.Argument(help="A name from `aevb models`, file.py:name, or a folder that a model was saved to.")]
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run (`aevb train … --out FOLDER`).")]
Data = Annotated[str, typer.Option(help="digits, mnist, fashion, fa, or a file (.npy, .npz, .csv).")]
How = Annotated[list[str] | None, typer.Option(help="Override the plan for one latent, e.g. --how y=gumbel; may be repeated.")]
BoundName = Annotated[str, typer.Option(help="elbo or iwae.")]
Samples = Annotated[int, typer.Option(help="Samples an example.")]
Gradient = Annotated[str, typer.Option(help="plain, stl or dreg.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Prepare = Annotated[str | None, typer.Option(help="Images: threshold, binarise, dequantise or scale; by default what p's likelihood calls for.")]


@app.command()
def models() -> None:
    """List the models that come with the library."""
    from aevb.zoo import zoo

    for name, build in zoo.items():
        print(f"{name:<8} {inspect.getdoc(build)}")
    print("\nSee one derived: aevb explain gmvae")


@app.command()
def explain(
    model: ModelName,
    how: How = None,
    bound: BoundName = "elbo",
    samples: Samples = 1,
    gradient: Gradient = "plain",
    latex: Annotated[bool, typer.Option("--latex", help="Print the estimator as LaTeX instead.")] = False,
) -> None:
    """Print a model, the estimator derived for it, and the reason for each choice."""
    found = resolve(model)
    explanation = found.explain(how=_overrides(how), bound=bound, samples=samples, gradient=gradient)
    print(explanation.latex if latex else f"{found}\n\n{explanation}")


@app.command()
def train(
    model: ModelName,
    data: Data,
    out: Annotated[Path, typer.Option(help="A new folder for the run's files.")],
    epochs: Annotated[float | None, typer.Option(help="Passes over the data; by default 20 or more.")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows a step; 100 unless the model is best trained otherwise.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate; 0.001 unless the model is best trained otherwise.")] = None,
    seed: Seed = 0,
    how: How = None,
    bound: BoundName = "elbo",
    samples: Samples = 1,
    gradient: Gradient = "plain",
    patience: Annotated[int | None, typer.Option(help="Stop after so many validations without improvement.")] = None,
    prepare: Prepare = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was interrupted.")] = False,
) -> None:
    """Train a model; built-in data bring their test rows as validation."""
    import torch

    from aevb.data.named import load
    from aevb.training.fit import fit
    from aevb.zoo import recipes

    torch.manual_seed(seed)
    found = resolve(model, data)
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    found = found.to(place)
    rows, test = load(data, found.graph, prepare=prepare, seed=seed)
    speaks = os.environ.get("RANK", "0") == "0"  # of several processes, the first
    if speaks:
        print(f"{found}\n\n{found.explain(how=_overrides(how), bound=bound, samples=samples, gradient=gradient)}\n")
    asked = {"epochs": epochs, "batch": batch, "lr": lr, "seed": seed, "patience": patience}
    settings: dict[str, Any] = recipes.get(model, {}) | {name: value for name, value in asked.items() if value is not None}
    choices = {"how": _overrides(how), "bound": bound, "samples": samples, "gradient": gradient}
    validation = None if test is None else test.data
    run = fit(found, rows.data, validation=validation, out=out, resume=resume, progress=True, **settings, **choices)
    if not speaks:
        return
    run.plot(out / "curves.png")
    print(f"\n{run.step} steps in {run.seconds:.1f} s. The run is in {out}: curves.png, metrics.jsonl, checkpoints.")
    print(f"Next: aevb evaluate {out} --data {data}")


@app.command()
def evaluate(
    run: RunFolder,
    data: Data,
    samples: Annotated[int, typer.Option(help="Importance samples for log p(x); 0 leaves it out.")] = 100,
    seed: Seed = 0,
    prepare: Prepare = None,
) -> None:
    """The bound, its terms and log p(x) on test rows, in nats an example; clusters against labels where there are both."""
    import torch

    from aevb.data.named import clustering_accuracy, load
    from aevb.data.sources import open_source
    from aevb.training import evaluation
    from aevb.training.run import load_run

    model = load_run(run)
    rows, test = load(data, model.graph, prepare=prepare, seed=seed)
    chosen = test or rows
    source = open_source(model.graph, chosen.data, model._parameter())
    values = evaluation.evaluate(model, source, seed=seed)
    print(f"{source.n} rows of {data}{' (test)' if test else ''}, nats an example:")
    for name, value in values.items():
        print(f"  {name:<12} {value:10.3f}")
    if samples and "evidence" not in values:
        found = evaluation.evaluate_evidence(model, source, samples=samples, seed=seed)
        print(f"  {'log p(x)':<12} {found:10.3f}   importance sampling, {samples} samples: a bound that rises with their number")
    for name in model.graph.latents:
        spec = model.graph.rule("p", name).spec
        if chosen.labels is not None and spec.finite and not model.graph.timed[name]:
            with torch.no_grad():
                probs = model.posterior(seed=seed, **chosen.data)[name].probs  # type: ignore[attr-defined]
            accuracy = clustering_accuracy(probs.argmax(-1).cpu().numpy(), chosen.labels)
            entropy = -(probs * probs.clamp_min(1e-12).log()).sum(-1).mean().item()
            print(f"  clusters {name}: {accuracy:.3f} of the rows match their label (best matching), conditional entropy {entropy:.3f}")


@app.command()
def sample(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="samples.png for images, samples.csv for tables.")],
    n: Annotated[int, typer.Option("-n", help="How many (for each class of a discrete or given variable, if there is one).")] = 15,
    steps: Annotated[int | None, typer.Option(help="Length of sequences; by default that of the training rows' images.")] = None,
    draw: Annotated[bool, typer.Option("--draw", help="Draw observed variables too, instead of their means.")] = False,
    seed: Seed = 0,
) -> None:
    """Draw from a trained model: a grid of images, a row for each class, or a table."""
    import numpy as np

    from aevb.pictures import grid
    from aevb.training.run import load_run

    model = load_run(run)
    graph = model.graph
    observed = graph.observed[0]
    timed = graph.timed[observed]
    length = steps or (graph.size(observed) if timed else None)
    classes = next((name for name in (*graph.given, *graph.stochastic) if _classes(graph, name)), None)
    parts = []
    for c in range(_classes(graph, classes) if classes else 1):
        fixed: dict[str, Any] = {classes: c} if classes else {}
        parts.append(model.sample(n, steps=length, mean=not draw, seed=seed + c, **fixed)[observed].cpu().numpy())
    x = np.concatenate(parts)
    if out.suffix == ".csv":
        np.savetxt(out, x.reshape(len(x), -1), delimiter=",", fmt="%.6g")
    else:
        side = round(graph.size(observed) ** 0.5)
        if not timed and side * side != graph.size(observed):
            raise ValueError(f"{observed} has {graph.size(observed)} columns, which is no square image. Write a table: --out samples.csv.")
        images = x if timed else x.reshape(len(x), side, side)
        grid(np.clip(images, 0, 1), n, out)
    print(f"{len(x)} samples of {observed}{f', {n} for each of the {len(parts)} values of {classes}' if classes else ''} in {out}")


@app.command()
def encode(
    run: RunFolder,
    data: Data,
    out: Annotated[Path, typer.Option(help="codes.npz, or codes.csv.")],
    prepare: Prepare = None,
    seed: Seed = 0,
) -> None:
    """Write the posterior means of the latents (probabilities for discrete ones) of every row."""
    import numpy as np
    import torch

    from aevb.data.named import load
    from aevb.training.run import load_run

    model = load_run(run)
    rows, test = load(data, model.graph, prepare=prepare, seed=seed)
    chosen = test or rows
    with torch.no_grad():
        posterior = model.posterior(seed=seed, **chosen.data)
        codes = {name: posterior[name].mean.cpu().numpy() for name in model.graph.latents}
    n = len(next(iter(codes.values())))
    if out.suffix == ".csv":
        header = ",".join(f"{name}{i}" for name, code in codes.items() for i in range(code.reshape(n, -1).shape[1]))
        np.savetxt(out, np.concatenate([code.reshape(n, -1) for code in codes.values()], 1), delimiter=",", header=header, comments="", fmt="%.6g")
    else:
        np.savez(out, **codes)  # type: ignore[arg-type]
    print(f"{n} rows{' (test)' if test else ''}: " + ", ".join(f"{name} {list(code.shape)}" for name, code in codes.items()) + f" in {out}")


def _classes(graph: Any, name: str) -> int:
    """How many classes a given or discrete root variable has, if sampling can fix it."""
    if name in graph.given:
        return graph.size(name) if graph.size(name) > 1 and not graph.timed[name] else 0
    spec = graph.rule("p", name).spec
    return graph.size(name) if type(spec).__name__ == "OneHot" and not graph.reads("p", name) and not graph.timed[name] else 0


def _overrides(how: list[str] | None) -> dict[str, str]:
    choices = {}
    for item in how or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--how takes latent=choice, e.g. --how y=gumbel; got {item!r}.")
        choices[name] = value
    return choices


def resolve(text: str, data: str | None = None) -> Model:
    """The model that the command line names; a zoo model takes its sizes from built-in data."""
    from aevb.model import Model, load
    from aevb.zoo import zoo

    if text in zoo:
        from aevb.data.named import sizes

        return zoo[text](**(sizes(data, timed=text == "vrnn") if data else {}))
    path, colon, name = text.rpartition(":")
    if colon and path.endswith(".py"):
        found = _from_file(Path(path), name)
        if not isinstance(found, Model):
            raise ValueError(f"{name!r} in {path} is a {type(found).__name__}, not a Model or a function that returns one.")
        return found
    if (Path(text) / "model.json").is_file():
        return load(text)
    raise ValueError(f"There is no model {text!r}. Name one of {', '.join(zoo)}, a file.py:name, or a saved model's folder.")


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
    found = getattr(module, name)
    return found() if inspect.isfunction(found) else found


def main() -> None:
    """Run the command line. Exit codes: 0, 1 if a run failed, 2 for a mistake in what was asked."""
    code = _run()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # torch's gloo and autograd threads can abort a process that goes the usual way; everything is written by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run() -> int:
    from aevb.training.fit import TrainingError

    try:
        app()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except ValueError as error:
        print(f"aevb: {error}", file=sys.stderr)
        return 2
    except (TrainingError, OSError) as error:
        print(f"aevb: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"aevb: {error or 'interrupted'}", file=sys.stderr)
        return 1
    return 0
