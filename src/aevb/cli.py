"""The command line: ``aevb models``, ``aevb explain gmvae``."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Latent variable models by auto-encoding variational Bayes."
)

MODEL = "A model: a name from `aevb models`, file.py:name, or a folder that a model was saved to."
HOW = "Override the plan for one latent, e.g. --how y=gumbel; may be repeated."


@app.command()
def models() -> None:
    """List the models that come with the library."""
    from aevb.zoo import zoo

    for name, build in zoo.items():
        print(f"{name:<8} {inspect.getdoc(build)}")
    print("\nSee one derived: aevb explain gmvae")


@app.command()
def explain(
    model: Annotated[str, typer.Argument(help=MODEL)],
    how: Annotated[list[str] | None, typer.Option(help=HOW)] = None,
    bound: Annotated[str, typer.Option(help="elbo or iwae.")] = "elbo",
    samples: Annotated[int, typer.Option(help="Samples an example.")] = 1,
    gradient: Annotated[str, typer.Option(help="plain, stl or dreg.")] = "plain",
    latex: Annotated[bool, typer.Option("--latex", help="Print the estimator as LaTeX instead.")] = False,
) -> None:
    """Print a model, the estimator derived for it, and the reason for each choice."""
    choices = {}
    for item in how or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--how takes latent=choice, e.g. --how y=gumbel; got {item!r}.")
        choices[name] = value
    found = resolve(model)
    explanation = found.explain(how=choices, bound=bound, samples=samples, gradient=gradient)
    print(explanation.latex if latex else f"{found}\n\n{explanation}")


def resolve(text: str):  # type: ignore[no-untyped-def]
    """The model that the command line names."""
    from aevb.model import Model, load
    from aevb.zoo import zoo

    if text in zoo:
        return zoo[text]()
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
    name_of_module = f"aevb model file {path.stem}"  # no import can have this name, so none is shadowed
    spec = importlib.util.spec_from_file_location(name_of_module, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name_of_module] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        from aevb.model import Model

        models = [key for key, value in vars(module).items() if isinstance(value, Model)]
        raise ValueError(f"{path} has no {name!r}." + (f" Its models are {', '.join(models)}." if models else ""))
    found = getattr(module, name)
    return found() if inspect.isfunction(found) else found


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    try:
        app()
    except ValueError as error:
        print(f"aevb: {error}", file=sys.stderr)
        sys.exit(2)
