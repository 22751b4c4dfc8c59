"""Every public name says what it is, what it takes and returns, and shows it in an example.

Public are the names of ``__all__`` in the modules below, and the public methods and properties of
their classes. Four rules, so that nothing is excused by a list:

- A parameter is named in the docstring in ``double backquotes`` or as an item of ``Args:``. It may
  be documented by another public name instead: "as in :meth:`posterior`".
- A result is described by a section ``Returns:``, or by a sentence with "return" or "result".
- An example is code after ``>>>``, which runs as a doctest. A method may be called in the example
  of its class instead.
- A property needs words only. A method that overrides one of another class with the same
  parameters is documented there.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import aevb

MODULES = ("aevb", "aevb.data", "aevb.zoo", "aevb.sklearn", "aevb.clustering")
LITERALS = re.compile(r"``(.+?)``", re.DOTALL)
ITEM = re.compile(r"^\s+\*{0,2}(\w+):(?= |$)", re.MULTILINE)
ELSEWHERE = re.compile(r"\bas (?:in|for|of)\s+:\w+:`~?(?:\w+\.)*(\w+)`", re.IGNORECASE)
RESULT = re.compile(r"\breturn|\bresult\b|\byield", re.IGNORECASE)


@dataclass(frozen=True)
class Name:
    """A public name, what it stands for, and the class that has it."""

    dotted: str
    found: Any
    kind: str  # "class", "function", "method", "property" or "value"
    owner: type | None = field(default=None, compare=False)

    @property
    def text(self) -> str:
        return inspect.cleandoc(getattr(self.found, "__doc__", None) or "")

    @property
    def word(self) -> str:
        return self.dotted.rpartition(".")[2]


def ours(found: Any) -> bool:
    return (getattr(found, "__module__", None) or "").partition(".")[0] == "aevb"


def plain(member: Any) -> Any:
    """The function behind a method, a class method or a static method."""
    return inspect.unwrap(getattr(member, "__func__", member))


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters that a caller passes."""
    found = inspect.signature(function).parameters
    return [name for name in found if name not in ("self", "cls") and not name.startswith("_")]


def members(cls: type) -> Iterator[tuple[str, type, Any]]:
    """The public methods and properties of a class, at the class of this library that first has it.

    An override with parameters of its own is listed too.
    """
    for name in sorted(dir(cls)):
        if name.startswith("_"):
            continue
        having = [base for base in cls.__mro__ if name in vars(base)]
        while len(having) > 1 and same_parameters(vars(having[0])[name], vars(having[1])[name]):
            del having[0]
        if having and ours(having[0]):
            yield name, having[0], vars(having[0])[name]


def same_parameters(mine: Any, theirs: Any) -> bool:
    if not (callable(plain(mine)) and callable(plain(theirs))):
        return True
    return set(parameters(plain(mine))) <= set(parameters(plain(theirs)))


def public_names() -> list[Name]:
    found: dict[str, Name] = {}
    for place in MODULES:
        module = importlib.import_module(place)
        for name in module.__all__:
            value = getattr(module, name)
            if not callable(value):
                continue  # a version or a dictionary has no docstring
            kind = "class" if isinstance(value, type) else "function"
            found.setdefault(f"{place}.{name}", Name(f"{place}.{name}", value, kind))
            if not isinstance(value, type):
                continue
            for word, home, member in members(value):
                dotted = f"{place}.{home.__name__}.{word}"
                if isinstance(member, property) or hasattr(member, "func"):
                    read = getattr(member, "fget", None) or member
                    found.setdefault(dotted, Name(dotted, read, "property", value))
                elif callable(plain(member)):
                    found.setdefault(dotted, Name(dotted, plain(member), "method", value))
    return list(found.values())


def named(name: Name, every: list[Name]) -> set[str]:
    """The words that a docstring documents, itself or by "as in"."""
    texts = [name.text]
    if name.kind == "class":
        texts.append(inspect.cleandoc(vars(name.found).get("__init__").__doc__ or "") if "__init__" in vars(name.found) else "")
    words: set[str] = set()
    for text in texts:
        words |= {word for literal in LITERALS.findall(text) for word in re.findall(r"\w+", literal)}
        words |= set(ITEM.findall(text))
        for other in ELSEWHERE.findall(text):
            words |= {
                word
                for one in every
                if one.word == other and one is not name
                for word in named(one, [])
            }
    return words


def example(name: Name) -> bool:
    if ">>>" in name.text:
        return True
    lines = inspect.cleandoc(name.owner.__doc__ or "") if name.owner is not None else ""
    return bool(re.search(rf"^(>>>|\.\.\.) .*\.{name.word}\(", lines, re.MULTILINE))


def wants(name: Name) -> list[str]:
    """The parameters, or for a class its fields."""
    if name.kind == "class" and is_dataclass(name.found):
        return [one.name for one in fields(name.found) if one.init and not one.name.startswith("_")]
    if name.kind == "class" and not ours(name.found.__init__):
        return []
    return parameters(name.found)


def faults(name: Name, every: list[Name]) -> list[str]:
    if not name.text:
        return ["no docstring"]
    if name.kind == "property":
        return []
    found = []
    missing = [one for one in wants(name) if one not in named(name, every)]
    if missing:
        found.append(f"does not name {', '.join(missing)}")
    if name.kind != "class" and inspect.signature(name.found).return_annotation not in (
        None,
        "None",
    ) and not RESULT.search(name.text):
        found.append("does not say what it returns")
    if not example(name):
        found.append("no example")
    return found
