"""From words to a model: a name of the zoo, file.py:name, or the folder of a saved model."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aevb.model import Model


def resolve(text: str, data: str | None = None, settings: Mapping[str, str] | None = None, missing: Sequence[float] | None = None) -> Model:
    """The model that the command line names; a zoo model takes its sizes from the data, where it is not told them."""
    from aevb.loading import load
    from aevb.model import Model
    from aevb.zoo import zoo

    if text in zoo:
        told = _arguments(text, zoo[text], settings or {})
        if data:
            from aevb.data.datasets import sizes

            known = sizes(data, zoo[text]().graph, missing or ())
            told = {name: value for name, value in known.items() if name in inspect.signature(zoo[text]).parameters} | told
        return _built(text, zoo[text], told)
    path, colon, name = text.rpartition(":")
    if colon and path.endswith(".py"):
        found = _from_file(Path(path), name)
        if inspect.isfunction(found):
            found = _built(text, found, _arguments(text, found, settings or {}))
        elif settings:
            raise ValueError(f"--set gives arguments to a function, but {name!r} in {path} is none.")
        if not isinstance(found, Model):
            raise ValueError(f"{name!r} in {path} is a {type(found).__name__}, not a Model or a function that returns one.")
        return found
    if is_run(text) or (Path(text) / "model.json").is_file():
        if settings:
            raise ValueError("--set gives arguments to a model of the zoo; a saved model has its own.")
        return open_run(Path(text)) if is_run(text) else load(text)
    raise ValueError(f"There is no model {text!r}. Name one of {', '.join(zoo)}, a file.py:name, or the folder of a run or a saved model.")


def open_run(run: Path) -> Model:
    """The model of a run; of a folder that holds the runs of several seeds one is to be named."""
    from aevb.training.run import load_run

    seeds = sorted((path.parent for path in run.glob("seed-*/model.json")), key=lambda path: (len(path.name), path.name))
    if seeds and not (run / "model.json").is_file():
        shown = ", ".join(map(str, seeds[:8])) + (", …" if len(seeds) > 8 else "")
        raise ValueError(f"{run} holds {len(seeds)} runs, one for each seed. Name one of them: {shown}.")
    return load_run(run)


def is_run(text: str) -> bool:
    """Whether a text names the folder of a run, or of the runs of several seeds."""
    return (Path(text) / "checkpoints").is_dir() or any(Path(text).glob("seed-*/checkpoints"))


def _built(name: str, build: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """What a function makes of arguments from the command line, which may be of another kind than it expects."""
    try:
        return build(**arguments)
    except (TypeError, AttributeError) as error:
        told = " ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
        raise ValueError(f"{name} cannot be built with {told or 'no arguments'}: {str(error).rstrip('.')}.") from error


def _arguments(name: str, build: Callable[..., Any], settings: Mapping[str, str]) -> dict[str, Any]:
    parameters = inspect.signature(build).parameters
    for key in settings:
        if key not in parameters:
            raise ValueError(f"{name} has no argument {key!r}. Its arguments are {', '.join(map(argument, parameters.values())) or 'none'}.")
    values = {key: _value(text) for key, text in settings.items()}
    lists = {key for key in values if isinstance(parameters[key].default, tuple)}
    return {key: (value,) if key in lists and not isinstance(value, tuple) else value for key, value in values.items()}


def argument(parameter: inspect.Parameter) -> str:
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
