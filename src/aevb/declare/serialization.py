"""Convert a declaration to JSON-ready data and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from aevb.declare.conditionals import Conditional
from aevb.declare.graph import Graph
from aevb.declare.networks import Shape
from aevb.declare.own_networks import wrap
from aevb.declare.registry import from_record, to_record

FORMAT = 1
# Models of the user in this process: their declarations, own networks by factor, and own classes.
_offered: list[tuple[dict[str, Any], dict[str, Any], list[type]]] = []
# Limit on the factors of a declaration from a file, and on the length of a list in it.
MOST_FACTORS = 10_000


class Parts(TypedDict):
    """The arguments of :class:`aevb.Model`."""

    p: dict[str, Conditional]
    q: dict[str, Conditional]
    given: dict[str, int | Shape]
    missing: str


def serialize(graph: Graph, missing: str) -> dict[str, Any]:
    """Convert the declaration to JSON-ready data."""
    sides = {
        side: {
            str(entry.key): to_record(entry.spec) for entry in graph.entries() if entry.side == side
        }
        for side in "pq"
    }
    given = {name: list(shape) for name, shape in graph.given.items()}
    return {"format": "aevb model", "version": FORMAT, **sides, "given": given, "missing": missing}


def own_parts(graph: Graph) -> dict[str, Any]:
    """The torch modules and functions of the user in a declaration, by factor."""
    return {
        _factor(entry.side, str(entry.key)): entry.spec.net.net
        for entry in graph.entries()
        if isinstance(entry.spec.net, wrap)
    }


def own_classes(graph: Graph) -> list[type]:
    """The classes of the user in a declaration: families, and networks with settings."""
    parts = (part for entry in graph.entries() for part in (entry.spec, entry.spec.net))
    found = (type(part) for part in parts if part is not None)
    return [one for one in dict.fromkeys(found) if not one.__module__.startswith("aevb.")]


def offer(graph: Graph, missing: str) -> None:
    """Let models with this declaration be read without naming its own parts again.

    The command line does so for the models of a file that the user names.
    """
    _offered.append((serialize(graph, missing), own_parts(graph), own_classes(graph)))


def deserialize(
    declaration: Mapping[str, Any],
    custom: Iterable[type] = (),
    modules: Mapping[str, Any] | None = None,
) -> Parts:
    """Read a declaration from JSON-ready data.

    ``custom`` holds the user's classes that are not registered, and ``modules`` torch modules or
    functions by factor ("q(z|x)").
    """
    if not isinstance(declaration, Mapping) or declaration.get("format") != "aevb model":
        raise ValueError("This is not an aevb model's declaration.")
    version = declaration.get("version")
    if isinstance(version, int) and version > FORMAT:
        raise ValueError(
            f"The model was saved in format {version}, newer than this version's {FORMAT}. Update "
            f"aevb."
        )
    if not isinstance(version, int) or not all(
        isinstance(declaration.get(part), Mapping) for part in ("p", "q", "given")
    ):
        raise ValueError(
            "This is not an aevb model's declaration: version, p, q or given is missing or has "
            "the wrong type."
        )
    given, missing = declaration["given"], declaration.get("missing", "zeros")
    if not all(isinstance(shape, list | tuple) for shape in given.values()) or not isinstance(
        missing, str
    ):
        raise ValueError(
            "This is not an aevb model's declaration: given must map each variable to a shape, "
            "and missing must be a string."
        )
    if len(declaration["p"]) + len(declaration["q"]) > MOST_FACTORS:
        raise ValueError(
            f"The declaration has {len(declaration['p']) + len(declaration['q'])} factors; at "
            f"most {MOST_FACTORS} are read."
        )
    custom = tuple(custom)
    given_modules = _by_factor(declaration, modules or {})
    for known, own, classes in _offered:
        if known == declaration:
            given_modules = own | given_modules
            custom = (*classes, *custom)
    p, q = (
        {
            key: from_record(
                record,
                custom,
                module=given_modules.get(_factor(side, key)),
                where=_factor(side, key),
            )
            for key, record in declaration[side].items()
        }
        for side in ("p", "q")
    )
    return {
        "p": p,
        "q": q,
        "given": {name: tuple(shape) for name, shape in given.items()},
        "missing": missing,
    }


def _factor(side: str, key: str) -> str:
    """The name of a factor, as in ``model.factors``: q(z|x) for the key "z | x"."""
    return f"{side}({key.replace(' | ', '|')})"


def _by_factor(declaration: Mapping[str, Any], modules: Mapping[str, Any]) -> dict[str, Any]:
    """The given modules by the factor's name; a key of the declaration will do, if it is unique."""
    factors = [_factor(side, key) for side in ("p", "q") for key in declaration[side]]
    found = {}
    for name, module in modules.items():
        short = _without_spaces(str(name))
        fits = [
            one for one in factors if short in (_without_spaces(one), _without_spaces(one[2:-1]))
        ]
        if len(fits) != 1:
            which = "no factor" if not fits else "not one factor"
            raise ValueError(
                f"modules= names {name!r}, which is {which} of the saved model. Its factors are "
                f"{', '.join(factors)}."
            )
        found[fits[0]] = module
    return found


def _without_spaces(text: str) -> str:
    return "".join(text.split())
