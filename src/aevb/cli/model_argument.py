"""Find the model that a command names: a zoo model, file.py:name, or a saved model's folder."""

from __future__ import annotations

import importlib.util
import inspect
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from aevb.runtime.suggestions import did_you_mean
from aevb.training.seed_folders import seed_folders

if TYPE_CHECKING:
    from aevb.model import Model


# The text of --code of this command.
_code: ContextVar[str | None] = ContextVar("--code", default=None)


def resolve(
    text: str,
    data: str | None = None,
    settings: Mapping[str, str] | None = None,
    missing: Sequence[float] | None = None,
    size: tuple[int, int] | None = None,
) -> Model:
    """Return the model that the command line names.

    A zoo model takes the sizes that ``settings`` does not give from the data; ``size`` is that of
    resized images.
    """
    from aevb.loading import load
    from aevb.model import Model
    from aevb.zoo import zoo

    if text in zoo:
        given = _arguments(text, zoo[text], settings or {})
        if data:
            from aevb.data.datasets import sizes

            images = given.get("net") == "conv"
            known = sizes(data, zoo[text]().graph, missing or (), images=images, size=size)
            given = {
                name: value
                for name, value in known.items()
                if name in inspect.signature(zoo[text]).parameters
            } | given
        return _built(text, zoo[text], given)
    path, colon, name = text.rpartition(":")
    if colon and path.endswith(".py"):
        found = _named(_executed(Path(path)), Path(path), name)
        if inspect.isfunction(found):
            found = _built(text, found, _arguments(text, found, settings or {}))
        elif settings:
            raise ValueError(
                f"--set gives arguments to a function, but {name!r} in {path} is not a function."
            )
        if not isinstance(found, Model):
            raise ValueError(
                f"{name!r} in {path} is a {type(found).__name__}, not a Model or a function that "
                f"returns one."
            )
        return found
    if is_run(text) or (Path(text) / "model.json").is_file():
        if settings:
            raise ValueError(
                "--set gives arguments to a zoo model; a saved model already has its arguments. "
                "Leave out --set."
            )
        return open_run(Path(text)) if is_run(text) else load(text)
    raise ValueError(
        f"There is no model {text!r}. Name one of {', '.join(zoo)}, a file.py:name, or the folder "
        f"of a run or a saved model.{did_you_mean(text, zoo)}"
    )


def open_run(run: Path) -> Model:
    """Return the model of a run, or a saved model.

    Refuse a folder that holds the runs of several seeds.
    """
    from aevb.loading import load
    from aevb.training.run import load_run

    seeds = [path for path in seed_folders(run) if (path / "model.json").exists()]
    if seeds and not (run / "model.json").is_file():
        shown = ", ".join(map(str, seeds[:8])) + (", …" if len(seeds) > 8 else "")
        raise ValueError(
            f"{run} holds {len(seeds)} runs, one for each seed. Name one of them: {shown}."
        )
    return load(run) if is_density(run) or is_saved(run) else load_run(run)


def is_run(text: str) -> bool:
    """Return whether the text names the folder of a run, or of the runs of several seeds."""
    runs = [Path(text), *seed_folders(Path(text))]
    return is_density(runs[0]) or any((run / "checkpoints").is_dir() for run in runs)


def is_saved(folder: Path) -> bool:
    """Return whether a folder holds a saved model (``model.save``), which has no run."""
    return not (folder / "checkpoints").is_dir() and (folder / "weights.safetensors").is_file()


def is_density(run: Path) -> bool:
    """Return whether a folder holds the default density of a table, which took no steps."""
    return not (run / "checkpoints").is_dir() and (run / "schema.json").is_file()


def _built(name: str, build: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a model function with arguments from the command line; a wrong type is a ValueError."""
    try:
        return build(**arguments)
    except (TypeError, AttributeError) as error:
        given = " ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
        raise ValueError(
            f"{name} cannot be built with {given or 'no arguments'}: {str(error).rstrip('.')}."
        ) from error


def _arguments(name: str, build: Callable[..., Any], settings: Mapping[str, str]) -> dict[str, Any]:
    parameters = parameters_of(build)
    for key in settings:
        if key not in parameters:
            raise ValueError(
                f"{name} has no argument {key!r}. Its arguments are "
                f"{', '.join(map(argument, parameters.values())) or 'none'}."
                f"{did_you_mean(key, parameters)}"
            )
    values = {key: value_of(text) for key, text in settings.items()}
    lists = {key for key in values if isinstance(parameters[key].default, tuple)}
    return {
        key: (value,) if key in lists and not isinstance(value, tuple) else value
        for key, value in values.items()
    }


def parameters_of(build: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the arguments that ``--set`` may give: of the zoo's models all but ``seed``.

    ``--seed`` decides the initial weights.
    """
    from aevb.zoo import zoo

    hidden = {"seed"} if build in zoo.values() else set()
    return {
        name: one for name, one in inspect.signature(build).parameters.items() if name not in hidden
    }


def argument(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is inspect.Parameter.empty:
        return parameter.name
    return f"{parameter.name}={json.dumps(default) if isinstance(default, tuple) else default}"


def value_of(text: str) -> Any:
    """Parse a value as JSON (number, list, true, false); return anything else as a string."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return tuple(value) if isinstance(value, list) else value


def use_code(text: str | None) -> None:
    """Execute a file of the user, so that runs of the models in it can be read.

    The networks and families that it registers are then known by their names, and those of its
    models by their declarations. A function that returns a model is called if it is named,
    ``file.py:name``.
    """
    _code.set(text)
    if text is None:
        return
    from aevb.declare.serialization import offer
    from aevb.model import Model

    path, colon, name = text.rpartition(":")
    if not (colon and path.endswith(".py")):
        path, name = text, ""
    if not path.endswith(".py"):
        raise ValueError(f"--code {text} is no Python file. Name one: --code models.py.")
    module = _executed(Path(path))
    found = list(vars(module).values())
    if name:
        named = _named(module, Path(path), name)
        found.append(_built(name, named, {}) if inspect.isfunction(named) else named)
    for model in found:
        if isinstance(model, Model):
            offer(model.graph, model.missing)


def code_of(text: str, model: Model, settings: Sequence[str] | None = None) -> str | None:
    """Return the argument of ``--code`` with which others read runs of this model.

    None if the model has no networks or families of the user, or is not declared in a file. A
    function that took ``settings`` is not named, because it would be called without them.
    """
    from aevb.declare.serialization import own_classes, own_parts

    path, colon, name = text.rpartition(":")
    path, name = (path, name) if colon and path.endswith(".py") else (text, "")
    own = own_parts(model.graph) or own_classes(model.graph)
    if not path.endswith(".py") or not own:
        return None
    module = sys.modules.get(_module_name(Path(path)))
    # Only models of the file are found by themselves; a function must be named.
    made = inspect.isfunction(getattr(module, name, None)) if name else False
    return text if made and not settings else path


def program(text: str = "", model: Model | None = None) -> str:
    """Return how later commands begin: ``aevb``, with ``--code FILE`` if they need the file.

    They need the file of ``--code`` of this command, or that of the model ``file.py:name`` if the
    model has parts of the user.
    """
    code = _code.get()
    if code is None and model is not None:
        code = code_of(text, model)
    return "aevb" if code is None else f"aevb --code {shlex.quote(code)}"


def _named(module: ModuleType, path: Path, name: str) -> object:
    if not hasattr(module, name):
        from aevb.model import Model

        models = [key for key, value in vars(module).items() if isinstance(value, Model)]
        raise ValueError(
            f"{path} has no {name!r}."
            + (f" Its models are {', '.join(models)}." if models else "")
            + did_you_mean(name, models)
        )
    found: object = getattr(module, name)
    return found


def _module_name(path: Path) -> str:
    # No importable module has such a name, so this shadows none.
    return f"aevb model file {path.stem}"


def _executed(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    module_name = _module_name(path)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look up their module in sys.modules
    spec.loader.exec_module(module)
    return module
