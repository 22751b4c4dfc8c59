"""The commands ``aevb models`` and ``aevb explain``: show a model before training."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from aevb.cli.model_argument import argument, parameters_of, resolve
from aevb.cli.options import BoundName, Gradient, How, ModelName, Resample, Samples, Set, pairs
from aevb.training.settings import Settings


def models() -> None:
    """List the models that come with the library (the zoo), with their arguments."""
    from aevb.zoo import zoo

    width = max(map(len, zoo))
    for name, build in zoo.items():
        summary = (inspect.getdoc(build) or "").partition("\n\n")[0].replace("\n", " ")
        print(f"{name:<{width}} {summary}")
        print(
            f"{'':<{width}} "
            + " ".join(
                f"--set {argument(parameter)}" for parameter in parameters_of(build).values()
            )
        )
    print("\nShow one model and its estimator: aevb explain gmvae")


def explain(
    model: ModelName,
    set_: Set = None,
    how: How = None,
    bound: BoundName = Settings.bound,
    samples: Samples = Settings.samples,
    gradient: Gradient = Settings.gradient,
    resample: Resample = Settings.resample,
    latex: Annotated[
        bool, typer.Option("--latex", help="Print only the estimator, as LaTeX.")
    ] = False,
) -> None:
    """Print a model, the estimator derived for it, and the reason for each choice.

    file.py:name executes that file with Python. Read a file from someone else before you name it
    here.

    Example: aevb explain gmvae --how y=gumbel
    """
    found = resolve(model, settings=pairs("--set", set_))
    explanation = found.explain(
        how=pairs("--how", how),
        bound=bound,
        samples=samples,
        gradient=gradient,
        resample=resample,
    )
    print(explanation.latex if latex else f"{found}\n\n{explanation}")
