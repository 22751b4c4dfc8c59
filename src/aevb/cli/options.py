"""Arguments and options that several commands share, with their help texts."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from aevb.cli import completion
from aevb.cli.completion import words
from aevb.runtime.suggestions import did_you_mean
from aevb.training.schedules import Schedule, parse_schedule
from aevb.training.settings import Settings, default_of, documentation

SEEDS = {"min": 0, "max": 2**63 - 1}
SETTINGS = {one.name: one for one in fields(Settings)}
FORMS: dict[
    str, dict[str, Any]
] = {  # the syntax of settings whose value is not a single number or word
    "how": {"metavar": "LATENT=CHOICE", "help": "Write --how y=gumbel; may be repeated."},
    "beta": {
        "metavar": "[LATENT=]NUMBER",
        "help": "Write --beta 4, or --beta z=4; the latter may be repeated.",
    },
    "free_bits": {
        "metavar": "[LATENT=]NUMBER",
        "help": "Write --free-bits 0.5, or --free-bits z=0.5; the latter may be repeated.",
    },
    "schedule": {
        "metavar": "NAME[:NUMBERS]",
        "help": "Write e.g. --schedule alternate:1000,1000.",
        "autocompletion": words("joint", "alternate", "em", "mle"),
    },
    "bound": {"autocompletion": words("elbo", "iwae", "particles")},
    "gradient": {"autocompletion": words("plain", "stl", "dreg", "score")},
    "decay": {"autocompletion": words("cosine", "constant")},
    "precision": {"autocompletion": words("float32", "bf16")},
    "seed": SEEDS,
}
ESTIMATOR = ("how", "bound", "samples", "gradient", "resample", "temperature")
FILE_ONLY = ("distort",)  # settings that only a configuration file can give: they have no option


def setting_option(name: str, *, shown: bool = False) -> Any:
    """Return the option of a setting, with its documentation as help text.

    ``shown=True`` adds the setting's default to the help text, for an option whose own default is
    None.
    """
    one, form = SETTINGS[name], FORMS.get(name, {})
    text = f"{documentation(one)} {form.get('help', '')}".strip()
    panel = "Estimator" if name in ESTIMATOR else None if name == "seed" else "Training"
    return typer.Option(
        **form
        | {"help": text, "rich_help_panel": panel, "show_default": _default(one) if shown else True}
    )


def _default(one: Field[Any]) -> str | bool:
    """Return a setting's default as a user would type it; False if there is nothing to show."""
    value = default_of(one)
    if value is None or isinstance(value, bool | Mapping):
        return False
    return type(value).__name__ if isinstance(value, Schedule) else str(value)


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the ``**settings`` of a command by one option per setting.

    An option that the user does not give is None, or an empty list.
    """
    signature = inspect.signature(command, eval_str=True)
    hints = get_type_hints(Settings, localns={"Affine": object})
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[_typed(hint), setting_option(name, shown=True)],
        )
        for name, hint in hints.items()
        if name in SETTINGS and name not in FILE_ONLY
    ]
    own = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return command


def _typed(hint: Any) -> Any:
    """Return the type of a setting's option. It includes None, because every option is optional."""
    repeated = any(get_origin(one) is Mapping for one in (hint, *get_args(hint)))
    return (str if hint is Schedule else list[str] if repeated else hint) | None


ModelName = Annotated[
    str,
    typer.Argument(
        help="A name from `aevb models`; file.py:name (Python executes the file); or the folder of "
        "a saved model or run.",
        autocompletion=completion.models,
    ),
]
RunFolder = Annotated[
    Path,
    typer.Argument(
        help="The folder of a run (`aevb train … --out FOLDER`).", autocompletion=completion.runs
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="A built-in data set (digits, mnist, fashion, fa), a file (.csv, .tsv, .txt, "
        ".parquet or a folder of them, .npz, .npy), or a folder of images (.png, .jpg), whose "
        "subfolders are classes.",
        rich_help_panel="Data",
        autocompletion=completion.data,
    ),
]
RunData = Annotated[
    str | None,
    typer.Option(
        help="Other data than the training data. They are prepared like the training data.",
        rich_help_panel="Data",
        autocompletion=completion.data,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set an argument of the model, e.g. --set z=5 --set likelihood=Normal, or --set "
        "net=conv for convolutions on images. May be repeated.",
        rich_help_panel="Model",
        autocompletion=completion.arguments,
    ),
]
How = Annotated[list[str] | None, setting_option("how")]
BoundName = Annotated[str, setting_option("bound")]
Samples = Annotated[int | None, setting_option("samples")]
Gradient = Annotated[str, setting_option("gradient")]
Resample = Annotated[float | None, setting_option("resample")]
Seed = Annotated[int, setting_option("seed")]
Prepare = Annotated[
    str | None,
    typer.Option(
        help="How to transform the data. Tables: standardise. Grey levels: threshold, binarise, "
        "dequantise, scale, counts; binarise-fresh and dequantise-fresh draw again in each "
        "epoch. none: no change. Images of bytes are prepared as the likelihood requires.",
        rich_help_panel="Data",
        autocompletion=words(
            "standardise", "threshold", "binarise", "dequantise", "scale", "counts", "none"
        ),
    ),
]
Size = Annotated[
    str | None,
    typer.Option(
        metavar="SIDE|HEIGHT,WIDTH",
        help="Crop the files of a folder of images to the centre, and resize them, e.g. --size 64.",
        rich_help_panel="Data",
    ),
]
Missing = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NUMBER|WORD",
        help="A number that marks missing cells of a table, e.g. --missing -999; for `aevb train "
        "table.csv` also a word, e.g. --missing unknown (in any case). May be repeated.",
        rich_help_panel="Data",
    ),
]
Kind = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN=KIND",
        help="The kind of a column: real, positive, count, binary, category, ordered or date. May "
        "be repeated.",
        rich_help_panel="Table",
    ),
]
Without = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMNS",
        help="Columns to leave out, between commas, e.g. --without id,species.",
        rich_help_panel="Table",
    ),
]
Validation = Annotated[
    str | None,
    typer.Option(
        help="A file of held-out rows.", rich_help_panel="Data", autocompletion=completion.files
    ),
]
SplitSeed = Annotated[
    int,
    typer.Option(
        help="Seed that chooses the rows of --hold-out. The seeds of training do not change them.",
        rich_help_panel="Data",
        **SEEDS,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help="cpu, cuda, cuda:1, mps, or auto (a GPU if there is one on which the model trains, "
        "otherwise the CPU).",
        autocompletion=words("auto", "cpu", "cuda", "mps"),
    ),
]
RunDevice = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help="Compute there: cpu, cuda, cuda:1, mps, or auto (a CUDA GPU if there is one).",
        autocompletion=words("auto", "cpu", "cuda", "mps"),
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print no progress: only the result, warnings and errors."),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="NAME",
        help="Record the run elsewhere too: wandb, mlflow, trackio or tensorboard. May be "
        "repeated.",
        autocompletion=words("wandb", "mlflow", "trackio", "tensorboard"),
    ),
]
RunMissing = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NUMBER|WORD",
        help="A number that marks missing cells, or a word for the run of a table; by default the "
        "same as in training. May be repeated.",
        rich_help_panel="Data",
    ),
]
Gaps = Annotated[
    str | None,
    typer.Option(
        metavar="missing",
        help="Steps that a series of a table lacks between two of its times are missing ones "
        "(--gaps missing); without it they are an error. A run keeps it.",
        rich_help_panel="Data",
        autocompletion=words("missing"),
    ),
]
UnknownLevels = Annotated[
    str | None,
    typer.Option(
        metavar="error|missing",
        help="For the run of a table: whether a level that the table of the training does not have "
        "is an error (the default) or a missing cell.",
        rich_help_panel="Data",
    ),
]
RunPrepare = Annotated[
    str | None,
    typer.Option(
        help="Prepare the rows differently from training (see aevb train --help).",
        rich_help_panel="Data",
    ),
]


@contextmanager
def silent(quiet: bool) -> Iterator[None]:
    """Discard what is printed inside the context if ``quiet``; warnings and errors still appear.

    >>> with silent(True):
    ...     print("progress")
    """
    with ExitStack() as closing:
        if quiet:
            nothing = closing.enter_context(open(os.devnull, "w", encoding="utf-8"))
            closing.enter_context(redirect_stdout(nothing))
        yield


def side_lengths(text: str | None) -> tuple[int, int] | None:
    """Parse --size: one number, or height and width.

    >>> side_lengths("24,32"), side_lengths("32")
    ((24, 32), (32, 32))
    """
    if text is None:
        return None
    parts = text.replace("x", ",").split(",")
    if len(parts) not in (1, 2) or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--size {text} is not a side length. Write --size 64 or --size 48,64.")
    return int(parts[0]), int(parts[-1])


def path(text: str) -> Path:
    """Parse the path of ``--out``. Refuse an empty one, which would mean the current folder."""
    if not text:
        raise typer.BadParameter("the path is empty; say where to write, e.g. --out run")
    return Path(text)


def refuse_input(out: Path, *inputs: str | None) -> None:
    """Refuse an output path that is one of the input files: writing would overwrite the data."""
    for name in inputs:
        if name is not None and out.exists() and Path(name).exists() and out.samefile(name):
            raise ValueError(
                f"--out {out} is the file that the data are read from. Write to another file."
            )
        inside = name is not None and out.resolve().is_relative_to(Path(name).resolve())
        if inside and out.suffix == ".parquet":
            raise ValueError(
                f"--out {out} lies in the folder that the data are read from, {name}. Write to "
                f"another folder."
            )


def check_resume(out: Path, places: Sequence[Path]) -> None:
    """Refuse ``--resume`` if none of the folders of ``--out`` holds a run."""
    if not any(place.is_dir() and any(place.iterdir()) for place in places):
        raise ValueError(
            f"There is no run in {out} that --resume could continue. Name its folder by --out, or "
            f"leave out --resume to start a new run."
        )


def pairs(option: str, items: list[str] | None) -> dict[str, str]:
    """Parse the ``NAME=VALUE`` items of a repeated option into a dictionary."""
    example = {
        "--how": "latent=choice, e.g. --how y=gumbel",
        "--set": "NAME=VALUE, e.g. --set z=5",
    }[option]
    choices = {}
    for item in items or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{option} takes {example}; got {item!r}.")
        choices[name] = value
    return choices


def numbers(option: str, items: list[str]) -> float | dict[str, float]:
    """Parse a repeated option that takes one number, or ``LATENT=NUMBER`` for several latents."""
    named = [item.partition("=") for item in items]
    try:
        if len(items) == 1 and "=" not in items[0]:
            return float(items[0])
        if all(equals for _, equals, _ in named):
            return {name: float(value) for name, _, value in named}
    except ValueError:
        pass
    raise ValueError(
        f"{option} takes one number, e.g. {option} 0.5, or LATENT=NUMBER for each latent, e.g. "
        f"{option} z=0.5; got {' '.join(items)!r}."
    )


def given_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the user gave as options, as :class:`Settings` takes them."""
    given = {name: value for name, value in options.items() if value is not None and value != []}
    if "how" in given:
        given["how"] = pairs("--how", given["how"])
    for name, option in (("beta", "--beta"), ("free_bits", "--free-bits")):
        if name in given:
            given[name] = numbers(option, given[name])
    if "schedule" in given:
        try:
            given["schedule"] = parse_schedule(given["schedule"])
        except ValueError as error:
            raise ValueError(f"--schedule {given['schedule']}: {error}") from None
    return given


def record_command(*folders: Path) -> None:
    """Write the command line into the folders of the runs that it trained, for their model cards.

    A resumed run keeps the command that began it.
    """
    import shlex

    from aevb.model_card.parts import COMMAND

    program = Path(sys.argv[0])
    if program.stem != "aevb" and program.parent.name != "aevb":
        return  # called from Python
    for folder in folders:
        if not (folder / COMMAND).exists():
            text = shlex.join(["aevb", *sys.argv[1:]]) + "\n"
            (folder / COMMAND).write_text(text, encoding="utf-8")


def trackers_of(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of ``--track``. Refuse a wrong one, and one whose package is missing."""
    from aevb.trackers.opening import NAMES, opened

    for name in names or ():
        if name not in NAMES:
            raise ValueError(
                f"Unknown --track {name}. Choose {', '.join(NAMES[:-1])} or {NAMES[-1]}."
            )
    opened(names or (), several=False)
    return tuple(dict.fromkeys(names or ()))


def check_evidence(name: str) -> None:
    """Refuse an unknown ``--evidence`` before anything is computed."""
    from aevb.evidence import METHODS

    if name not in METHODS:
        raise ValueError(
            f"Unknown --evidence {name}. Choose {', '.join(METHODS[:-1])} or {METHODS[-1]}."
            f"{did_you_mean(name, METHODS)}"
        )


def device_of(name: str) -> str:
    """Return the torch device for ``--device``. Of several processes, each gets its own GPU.

    "auto" is a CUDA device or the CPU: whether a model trains on MPS is found out by ``fit``.
    """
    from aevb.runtime.devices import cuda_count, device_named

    if name == "auto":
        name = "cuda" if cuda_count() else "cpu"
    return str(device_named(name, argument="--device {}"))


def asked_device(name: str) -> str | None:
    """Return the device of a command that usually computes on the CPU, if the user asks for one."""
    return None if name == "cpu" else name


def fit_device(name: str) -> str:
    """Check ``--device`` before anything is computed, and return it as ``fit(device=…)`` takes it.

    >>> fit_device("auto")
    'auto'
    """
    return name if name == "auto" else device_of(name)


def in_its_words(error: BaseException | str) -> str:
    """Return a message of the library with Python arguments replaced by command-line options."""
    words = {
        "resume=True": "--resume",
        "clip=": "--clip",
        "patience=": "--patience",
        "schedule=joint()": "--schedule joint",
        "classify=1": "--classify 1",
    }
    text = (
        f"{error.strerror}: {error.filename}"
        if isinstance(error, OSError) and error.filename
        else getattr(error, "for_commands", str(error))
    )
    text = re.sub(
        r'method="(\w+)"( or "(\w+)")?',
        lambda found: f"--evidence {found[1]}" + (f" or {found[3]}" if found[3] else ""),
        text,
    )
    for ours, theirs in words.items():
        text = text.replace(ours, theirs)
    return text
