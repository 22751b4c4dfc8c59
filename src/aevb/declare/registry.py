"""The registry of conditionals and networks (name → class), for saving and loading declarations.

A specification (a conditional or a network) is a frozen dataclass. Its record holds its registered
name and the fields that differ from their defaults. A torch module or a function of the user is
recorded by its name only: a class of modules and a function may be registered, everything else has
to be given again. Reading a record imports nothing, and runs no code except the registered
constructor.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, TypeVar

from torch import nn

_known: dict[str, type] = {}
_modules: dict[str, Any] = {}  # classes of torch modules, and functions, of the user
C = TypeVar("C", bound=Callable[..., Any])


def register(cls: C) -> C:
    """Register a class (or a function) by its name.

    Models that use it can then be saved and loaded.

    Arguments:
        cls: The class. A conditional or a network is a frozen dataclass: put
            ``@dataclass(frozen=True)`` below ``@register``. A class of torch modules
            (``net=Encoder``) takes no arguments. A function of the parents' tensors needs a name of
            its own.

    Returns:
        The class, so that this function is a decorator.

    >>> from dataclasses import dataclass
    >>> from aevb import Normal
    >>> @register
    ... @dataclass(frozen=True, repr=False)
    ... class NarrowNormal(Normal):
    ...     scale: str | float = 0.1
    >>> NarrowNormal(3)
    NarrowNormal(3)
    """
    if not isinstance(cls, type) or issubclass(cls, nn.Module):
        name = name_of(cls)
        other = _modules.get(name)
        if not name.isidentifier():
            raise ValueError(f"{cls!r} has no name to find it by. Define it with class or def.")
        if other is not None and _place(other) != _place(cls):
            raise ValueError(f"The name {name!r} is taken by {_place(other)}. Use another name.")
        _modules[name] = cls
        return cls
    if not dataclasses.is_dataclass(cls):
        raise TypeError(
            f"{cls.__name__} is not a dataclass. Put @dataclass(frozen=True) below @register."
        )
    if not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"{cls.__name__} is a mutable dataclass. Write @dataclass(frozen=True).")
    other = _known.get(cls.__name__)
    if other is not None and (other.__module__, other.__qualname__) != (
        cls.__module__,
        cls.__qualname__,
    ):
        raise ValueError(
            f"The name {cls.__name__!r} is taken by {other.__module__}.{other.__qualname__}. "
            f"Rename the class."
        )
    _known[cls.__name__] = cls
    return cls


def registered(module: str) -> dict[str, Any]:
    """The classes that a module registered, by name, in the order of their definition."""
    return {name: cls for name, cls in _known.items() if cls.__module__ == module}


def to_record(spec: Any) -> Any:
    """Convert a specification to JSON-ready data."""
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        record: dict[str, Any] = {"type": type(spec).__name__}
        for field in dataclasses.fields(spec):
            value = getattr(spec, field.name)
            if field.name == _own_field(type(spec)):
                # An object's arguments are unknown, so it is not found by its class.
                kind = "(…)" if isinstance(value, nn.Module) else ""
                record[field.name] = {OWN: name_of(value) + kind}
            elif field.default is dataclasses.MISSING or value != field.default:
                record[field.name] = to_record(value)
        return record
    if isinstance(spec, tuple | list):
        return [to_record(item) for item in spec]
    if spec is None or isinstance(spec, bool | int | float | str):
        return spec
    raise TypeError(
        f"A declaration holds numbers, strings, tuples and registered specifications, not "
        f"{type(spec).__name__}: {spec!r}."
    )


OWN = "own"  # the key of the name of a torch module or a function of the user


def name_of(part: Any) -> str:
    """The name of a class, a function, or an object's class."""
    if isinstance(part, partial):
        return name_of(part.func)
    return str(getattr(part, "__name__", type(part).__name__))


def _place(part: Any) -> str:
    return f"{part.__module__}.{part.__qualname__}"


def from_record(
    record: Any, custom: Iterable[type] = (), *, module: Any = None, where: str = "…"
) -> Any:
    """Build the specification that a record describes.

    ``custom`` holds classes of the caller that are not registered, and ``module`` the torch module
    or function of the factor ``where``.
    """
    known = _known | {cls.__name__: cls for cls in custom}
    return _read(record, known, module, where)


def _own_field(cls: type) -> str | None:
    """The field of a specification that holds a torch module or a function of the user."""
    return getattr(cls, "own_field", None)


class UnknownNetworkError(ValueError):
    """Error for a saved network of the user whose code is not known here.

    ``for_commands`` is the message with the remedy on the command line.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what} {remedy}")
        self.for_commands = (
            f"{what} Name the Python file that declares the model, or registers the network, "
            f"before the command: aevb --code FILE.py … (FILE.py:NAME for a function that returns "
            f"the model)."
        )


def _own(record: Any, module: Any, where: str) -> Any:
    """The user's module or function: the given one, or a registered one of this name."""
    if module is not None:
        return module
    name = record.get(OWN) if isinstance(record, dict) else None
    if not isinstance(name, str) or name not in _modules:
        raise UnknownNetworkError(
            f"The saved model has a network of your own in {where}, {name}.",
            f'Pass it: load(path, modules={{"{where}": …}}). A class of modules (net=Encoder, '
            f"without arguments) or a function is also found by its name after "
            f"aevb.register(Encoder).",
        )
    return _modules[name]


def _read(record: Any, known: dict[str, type], module: Any, where: str) -> Any:
    if isinstance(record, dict):
        name = record.get("type")
        if not isinstance(name, str) or name not in known:
            raise UnknownNetworkError(
                f"The saved model uses {name!r}, which is not a known conditional or network.",
                f"Pass its class: load(path, custom=[{name}]).",
            )
        fields = {field.name for field in dataclasses.fields(known[name])}
        unknown = sorted(set(record) - fields - {"type"})
        if unknown:
            raise ValueError(
                f"The saved model gives {name} a setting {unknown[0]!r} that it does not have; it "
                f"may come from another version."
            )
        own = _own_field(known[name])
        settings = {
            key: _own(value, module, where) if key == own else _read(value, known, module, where)
            for key, value in record.items()
            if key != "type"
        }
        kinds = _kinds(known[name])
        for key, value in settings.items():
            if not _is(value, kinds.get(key, Any)):
                raise ValueError(
                    f"The saved model gives {name} the setting {key}={_short(value)}, which has "
                    f"the wrong type (expected {kinds[key]})."
                )
        return known[name](**settings)
    if isinstance(record, list):
        return tuple(_read(item, known, module, where) for item in record)
    return record


def _short(value: Any) -> str:
    """The repr of a value, cut at 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


@lru_cache(maxsize=128)
def _kinds(cls: type) -> dict[str, Any]:
    """The type hints of a class's settings.

    Empty if they cannot be resolved, e.g. for a class defined inside a function.
    """
    try:
        return typing.get_type_hints(cls)
    except NameError:
        return {}


def _is(value: Any, kind: Any) -> bool:
    """Return whether a value has a type, for the types that declarations use.

    These are numbers, strings, tuples, specifications, and unions.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin is Callable:
        return callable(value)
    if origin in (typing.Union, types.UnionType):
        return any(_is(value, one) for one in inner)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is tuple and inner[1:] == (...,):
        return isinstance(value, tuple) and all(_is(one, inner[0]) for one in value)
    return isinstance(value, kind) if isinstance(kind, type) and origin is None else True
