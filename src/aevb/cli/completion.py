"""What the shell offers for an argument: models, run folders, files, and names of ``--set``.

Nothing here imports torch, because the shell waits for the answer. The zoo's names and arguments
are therefore read from its source.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import typer

TABLES = (".csv", ".tsv", ".txt", ".parquet")
ARRAYS = (".npz", ".npy")
ZOO = Path(__file__).parent.parent / "zoo"

Completion = Callable[[str], list[str]]


def words(*choices: str) -> Completion:
    """Return a completion by a few words.

    >>> words("digits", "mnist")("d")
    ['digits']
    """

    def complete(incomplete: str) -> list[str]:
        return [word for word in choices if word.startswith(incomplete)]

    return complete


@cache
def zoo_arguments() -> Mapping[str, tuple[str, ...]]:
    """Return the arguments of each model of the zoo, in the order of ``aevb models``.

    Without ``seed``, which ``--seed`` gives.

    >>> zoo_arguments()["fa"]
    ('x', 'z', 'posterior', 'scale')
    """
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in ZOO.glob("*.py")}
    functions = {
        node.name: tuple(
            one.arg for one in (*node.args.args, *node.args.kwonlyargs) if one.arg != "seed"
        )
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    listed = next(
        node.value
        for node in trees["__init__"].body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == "_MODELS"
        and node.value is not None
    )
    names = (node.id for node in ast.walk(listed) if isinstance(node, ast.Name))
    return {name: functions[name] for name in names if name in functions}


def models(incomplete: str) -> list[str]:
    """Complete the model of a command: names of the zoo, Python files, saved models and runs."""
    names = [name for name in zoo_arguments() if name.startswith(incomplete)]
    return [*names, *_paths(incomplete, (".py",), _holds_model)]


def tables_and_models(incomplete: str) -> list[str]:
    """Complete the first argument of ``aevb train``: as :func:`models`, and tables."""
    names = [name for name in zoo_arguments() if name.startswith(incomplete)]
    return [*names, *_paths(incomplete, (".py", *TABLES), _holds_model)]


def runs(incomplete: str) -> list[str]:
    """Complete the folder of a run."""
    return _paths(incomplete, (), _holds_model)


def data(incomplete: str) -> list[str]:
    """Complete ``--data``: built-in data sets and files."""
    built_in = words("digits", "mnist", "fashion", "fa")(incomplete)
    return [*built_in, *_paths(incomplete, (*TABLES, *ARRAYS), lambda folder: False)]


def files(incomplete: str) -> list[str]:
    """Complete a file of rows."""
    return _paths(incomplete, (*TABLES, *ARRAYS), lambda folder: False)


def arguments(context: typer.Context, incomplete: str) -> list[str]:
    """Complete ``--set``: names of the arguments of the model that the command names."""
    from aevb.cli.table_models import ARGUMENTS

    # While an option lacks its value, the arguments are not assigned to parameters yet.
    model = str(context.params.get("model") or next(iter(context.args), ""))
    table = context.params.get("model_") or "mixture"
    known = zoo_arguments().get(model) or tuple(ARGUMENTS.get(table, ()))
    return [f"{name}=" for name in known if name.startswith(incomplete)]


def _holds_model(folder: Path) -> bool:
    return (folder / "model.json").is_file() or next(folder.glob("seed-*"), None) is not None


def _paths(incomplete: str, endings: tuple[str, ...], chosen: Callable[[Path], bool]) -> list[str]:
    """Return the paths that begin as the text: chosen folders, files by ending, other folders.

    Other folders end in a slash, so that the next completion looks into them.
    """
    return sorted(_found(incomplete, endings, chosen))


def _found(
    incomplete: str, endings: tuple[str, ...], chosen: Callable[[Path], bool]
) -> Iterator[str]:
    begun, slash, start = incomplete.rpartition("/")
    folder = Path(begun + slash).expanduser() if slash else Path()
    try:
        inside = list(folder.iterdir())
    except OSError:
        return
    for path in inside:
        hidden = path.name.startswith(".") and not start.startswith(".")
        if hidden or not path.name.startswith(start):
            continue
        text = f"{begun}{slash}{path.name}"
        if path.is_dir():
            yield text if chosen(path) else f"{text}/"
        elif path.suffix in endings:
            yield text
