"""What the commands take: arguments and options that several share, and the words for them."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from aevb.training.schedules import Schedule
from aevb.training.settings import Settings, default_of, documentation

SEEDS = {"min": 0, "max": 2**63 - 1}
SETTINGS = {one.name: one for one in fields(Settings)}
FORMS: dict[str, dict[str, Any]] = {  # how the command line writes the value of a setting that is no number or word
    "how": {"metavar": "LATENT=CHOICE", "help": "Write --how y=gumbel; may be repeated."},
    "schedule": {"metavar": "NAME[:NUMBERS]", "help": "Write e.g. --schedule alternate:1000,1000."},
    "seed": SEEDS,
}
ESTIMATOR = ("how", "bound", "samples", "gradient", "temperature")
FILE_ONLY = ("distort",)  # settings that a file gives and no option


def setting_option(name: str, *, shown: bool = False) -> Any:
    """The option of a setting, with its documentation; ``shown`` says its default too, where the option itself has none."""
    one, form = SETTINGS[name], FORMS.get(name, {})
    told = f"{documentation(one)} {form.get('help', '')}".strip()
    panel = "Estimator" if name in ESTIMATOR else None if name == "seed" else "Training"
    return typer.Option(**form | {"help": told, "rich_help_panel": panel, "show_default": _default(one) if shown else True})


def _default(one: Field[Any]) -> str | bool:
    """The default of a setting as it would be typed; False: there is nothing to show."""
    value = default_of(one)
    if value is None or isinstance(value, bool | Mapping):
        return False
    return type(value).__name__ if isinstance(value, Schedule) else str(value)


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every setting, in the place of its ``**settings``; an option that is not given is None, or empty."""
    signature = inspect.signature(command, eval_str=True)
    hints = get_type_hints(Settings, localns={"Affine": object})
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[_typed(hint), setting_option(name, shown=True)])
        for name, hint in hints.items()
        if name in SETTINGS and name not in FILE_ONLY
    ]
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return command


def _typed(hint: Any) -> Any:
    """The type of a setting's option, which may be left out."""
    return (str if hint is Schedule else list[str] if get_origin(hint) is Mapping else hint) | None


ModelName = Annotated[str, typer.Argument(help="A name from `aevb models`, file.py:name (the file is run), or the folder of a saved model or run.")]
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run (`aevb train … --out FOLDER`).")]
Data = Annotated[str | None, typer.Option(help="digits, mnist, fashion, fa, or a file: .csv, .parquet, .npz, .npy.", rich_help_panel="Data")]
RunData = Annotated[str | None, typer.Option(help="Other data than the run was trained on; prepared as those were.", rich_help_panel="Data")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="An argument of the model, e.g. --set z=5 --set likelihood=Normal.", rich_help_panel="Model"),
]
How = Annotated[list[str] | None, setting_option("how")]
BoundName = Annotated[str, setting_option("bound")]
Samples = Annotated[int, setting_option("samples")]
Gradient = Annotated[str, setting_option("gradient")]
Seed = Annotated[int, setting_option("seed")]
Prepare = Annotated[
    str | None,
    typer.Option(
        help="standardise (tables); threshold, binarise, dequantise, scale, counts (grey levels), binarise-fresh and dequantise-fresh "
        "(drawn anew each epoch); none. Built-in images get what the likelihood calls for.",
        rich_help_panel="Data",
    ),
]
Missing = Annotated[
    list[float] | None,
    typer.Option(
        metavar="NUMBER", help="A number that marks missing cells of a table, e.g. --missing -999; may be repeated.", rich_help_panel="Data"
    ),
]
RunMissing = Annotated[
    list[float] | None,
    typer.Option(metavar="NUMBER", help="A number that marks missing cells; by default those of training. May be repeated.", rich_help_panel="Data"),
]
RunPrepare = Annotated[str | None, typer.Option(help="Prepare the rows otherwise than in training.", rich_help_panel="Data")]


def path(text: str) -> Path:
    """The path of an ``--out``; an empty one would be the current folder."""
    if not text:
        raise typer.BadParameter("an empty path names nothing; say where to write, e.g. --out run")
    return Path(text)


def refuse_input(out: Path, *inputs: str | None) -> None:
    """Refuse to write over a file that is read: a result would take the place of the data."""
    for name in inputs:
        if name is not None and out.exists() and Path(name).exists() and out.samefile(name):
            raise ValueError(f"--out {out} is the file that the data are read from. Write to another one.")


def pairs(option: str, items: list[str] | None) -> dict[str, str]:
    """``NAME=VALUE`` of an option that may be repeated, by name."""
    example = {"--how": "latent=choice, e.g. --how y=gumbel", "--set": "NAME=VALUE, e.g. --set z=5"}[option]
    choices = {}
    for item in items or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{option} takes {example}; got {item!r}.")
        choices[name] = value
    return choices


def device_of(name: str) -> str:
    """Where to train; of several processes each has a GPU of its own."""
    import torch

    if name not in ("auto", "cpu") and not (name.startswith("cuda") and torch.cuda.is_available()):
        raise ValueError(f"There is no device {name!r} here. Use --device cpu.")
    if name in ("auto", "cuda"):
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    return name


def in_its_words(error: BaseException | str) -> str:
    """A message of the library, with the command line's words for what to do."""
    words = {
        "resume=True": "--resume",
        "clip=": "--clip",
        "patience=": "--patience",
        "schedule=joint()": "--schedule joint",
        "classify=1": "--classify 1",
    }
    text = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else getattr(error, "for_commands", str(error))
    text = re.sub(r'method="(\w+)"( or "(\w+)")?', lambda found: f"--evidence {found[1]}" + (f" or {found[3]}" if found[3] else ""), text)
    for ours, theirs in words.items():
        text = text.replace(ours, theirs)
    return text
