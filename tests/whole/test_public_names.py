"""Every public name says what it is, what it takes and returns, and shows it in an example.

Public are the names of ``__all__`` in the modules below, and the public methods and properties of
their classes. What is asked of them are rules, so that nothing is excused by a list:

- A parameter, or a field of a result, is an item of ``Arguments:``, ``Parameters:`` or
  ``Attributes:``, or is named in ``double backquotes`` or with its shape, as in "rows X [n, d]". It
  may be documented by another public name: "as in :meth:`posterior`".
- A result is described by a section ``Returns:``, or by a sentence that begins with "Return",
  "Compute", "Draw" or a noun.
- An example is code after ``>>>``, which runs as a doctest. A method may be called in the example
  of its class instead.
- A property needs words only. A method that overrides one of another class, with parameters that
  the other one takes, is documented there.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import pytest

MODULES = (
    "aevb",
    "aevb.clustering",
    "aevb.data",
    "aevb.export",
    "aevb.hub",
    "aevb.model_card",
    "aevb.pictures",
    "aevb.sklearn",
    "aevb.trackers",
    "aevb.zoo",
)
LITERALS = re.compile(r"``(.+?)``", re.DOTALL)
ITEM = re.compile(r"^\s+\*{0,2}(\w+)(?: \([^)]*\))?:(?= |$)", re.MULTILINE)
SHAPED = re.compile(r"\b(\w) \[")
ELSEWHERE = re.compile(r"\bas (?:in|for|of)\s+:\w+:`~?(?:\w+\.)*(\w+)`", re.IGNORECASE)
RESULT = re.compile(r"^Returns:|\b[Rr]eturn|\A(Compute|Draw|The|Beliefs|log|``log) ", re.MULTILINE)


@dataclass(frozen=True)
class Name:
    """A public name, what it stands for, and the class that has it."""

    module: str
    dotted: str
    found: Any
    kind: str  # class, function, method or property
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
    """The function behind a method, a class method or a property."""
    member = getattr(member, "fget", None) or getattr(member, "__func__", member)
    return inspect.unwrap(member)


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters that a caller passes."""
    found = inspect.signature(function).parameters
    return [name for name in found if name not in ("self", "cls") and not name.startswith("_")]


def overrides(mine: Any, theirs: Any) -> bool:
    """Whether a member takes nothing that the one that it overrides does not take."""
    if not (callable(plain(mine)) and callable(plain(theirs))):
        return True
    base = inspect.signature(plain(theirs)).parameters.values()
    own = inspect.signature(plain(mine)).parameters.values()
    more = {one.name for one in own if "VAR" not in one.kind.name} - {one.name for one in base}
    return not more or any(one.kind is one.VAR_KEYWORD for one in base)


def members(cls: type) -> Iterator[tuple[str, type, Any]]:
    """The public methods and properties of a class, with the class that documents them."""
    for name in (name for name in dir(cls) if not name.startswith("_")):
        having = [base for base in cls.__mro__ if name in vars(base)]
        while len(having) > 1 and overrides(vars(having[0])[name], vars(having[1])[name]):
            del having[0]
        if having and ours(having[0]):
            member = vars(having[0])[name]
            if isinstance(member, property) or callable(plain(member)):
                yield name, having[0], member


def public_names() -> list[Name]:
    found: dict[str, Name] = {}
    for module in MODULES:
        home = importlib.import_module(module)
        for name in home.__all__:
            value, dotted = getattr(home, name), f"{module}.{name}"
            if not (isinstance(value, type) or inspect.isroutine(value)):
                continue  # a version, a dictionary or an alias of types has no docstring
            if not isinstance(value, type):
                found[dotted] = Name(module, dotted, value, "function")
                continue
            found[dotted] = Name(module, dotted, value, "class")
            for word, owner, member in members(value):
                kind = "property" if isinstance(member, property) else "method"
                dotted = f"{module}.{owner.__name__}.{word}"
                shown = Name(module, dotted, plain(member), kind, value)
                found[dotted] = shown if owner is value else found.get(dotted, shown)
    return list(found.values())


def named(name: Name, every: list[Name]) -> set[str]:
    """The parameters that a docstring documents, itself or by "as in"."""
    words = {word for text in LITERALS.findall(name.text) for word in re.findall(r"\w+", text)}
    words |= {*ITEM.findall(name.text), *SHAPED.findall(name.text)}
    for other in ELSEWHERE.findall(name.text):
        words.update(*(named(one, []) for one in every if one.word == other))
    return words


def wanted(name: Name) -> list[str]:
    """The parameters of a function, or the fields of a dataclass."""
    if name.kind != "class":
        return parameters(name.found)
    if is_dataclass(name.found):
        every = [one.name for one in fields(name.found) if one.init]
        return [one for one in every if not one.startswith("_")]
    return parameters(name.found) if ours(name.found.__init__) else []


def returns(name: Name) -> bool:
    if name.kind == "class":
        return False
    return inspect.signature(name.found).return_annotation not in (None, "None")


def has_example(name: Name) -> bool:
    if ">>>" in name.text:
        return True
    of_class = inspect.cleandoc(getattr(name.owner, "__doc__", None) or "")
    return bool(re.search(rf"^(>>>|\.\.\.) .*\.{name.word}\(", of_class, re.MULTILINE))


def faults(name: Name, every: list[Name]) -> list[str]:
    if not name.text:
        return ["no docstring"]
    if name.kind == "property":
        return []
    documented = named(name, every)
    found = [f"{one} is not documented" for one in wanted(name) if one not in documented]
    if returns(name) and not RESULT.search(name.text):
        found.append("does not say what it returns")
    if not has_example(name):
        found.append("no example")
    return found


EVERY = public_names()


def test_the_public_names_are_found():
    """The counts are of today; they may grow."""
    least = {"class": 53, "function": 42, "method": 140, "property": 38}
    found = {kind: sum(name.kind == kind for name in EVERY) for kind in least}
    assert all(found[kind] >= count for kind, count in least.items()), found


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented_with_an_example(module):
    names = [name for name in EVERY if name.module == module]
    assert {name.dotted: found for name in names if (found := faults(name, EVERY))} == {}


class Bare:
    pass


class Documented:
    """A class.

    >>> Documented().shown(1)
    1
    """

    def shown(self, x: int) -> int:
        """Return ``x``."""
        return x

    def silent(self, x: int, *, seed: int) -> int:
        """Do something as in :meth:`shown`."""
        return x

    def bare(self) -> None:
        pass


def test_what_is_missing_is_named():
    every = [
        Name("here", f"here.{one}", getattr(Documented, one), "method", Documented)
        for one in ("shown", "silent", "bare")
    ]
    missing = ["seed is not documented", "does not say what it returns", "no example"]
    assert [faults(one, every) for one in every] == [[], missing, ["no docstring"]]
    assert faults(Name("here", "here.Bare", Bare, "class"), every) == ["no docstring"]
