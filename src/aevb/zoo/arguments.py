"""What several models of the zoo share: the likelihood, choices by name, a usual schedule."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, ParamSpec, TypeVar

from torch.distributions import constraints

from aevb.declare.conditionals import Conditional
from aevb.declare.families import FAMILIES
from aevb.declare.networks import Network, Shape, conv, deconv, mlp
from aevb.model import Model
from aevb.runtime.suggestions import did_you_mean

Likelihood = str | Conditional
Choice = TypeVar("Choice")
Arguments = ParamSpec("Arguments")


def trained_by(
    schedule: str,
) -> Callable[[Callable[Arguments, Model]], Callable[Arguments, Model]]:
    """Give the models of a function their usual schedule, which ``fit`` uses by default."""

    def wrap(build: Callable[Arguments, Model]) -> Callable[Arguments, Model]:
        @functools.wraps(build)
        def built(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Model:
            model = build(*args, **kwargs)
            model.usual_schedule = schedule
            return model

        return built

    return wrap


def family_of(likelihood: Likelihood, size: int | Shape, net: Network | None = None) -> Conditional:
    """Return the conditional of the data, from a family's name or a conditional.

    A name may have settings: "Normal(scale=0.2)". The conditional gets the model's size and network
    if it has none.
    """
    spec = _family_named(likelihood) if isinstance(likelihood, str) else likelihood
    if not isinstance(spec, Conditional):
        raise ValueError(f"likelihood is a family's name or a conditional, got {likelihood!r}.")
    return replace(spec, size=spec.size or size, net=spec.net or net)


def _family_named(text: str) -> Conditional:
    """Return the family that a text names, with its settings: "Normal", "Normal(scale=0.2)".

    The text is parsed, and never executed.
    """
    if not text.endswith(")"):
        return choose("likelihood", text, FAMILIES)()
    name = text.partition("(")[0].strip()
    family = choose("likelihood", name, FAMILIES)
    allowed = [one.name for one in fields(family) if one.name not in ("size", "net", "learned")]
    wrong = (
        f"likelihood={text} cannot be read. Write a family and its settings, numbers or names: "
        f"{name}" + (f"({allowed[0]}=…)." if allowed else ".")
    )
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(wrong) from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(wrong)
    settings: dict[str, Any] = {}
    for keyword in call.keywords:
        try:
            value = ast.literal_eval(keyword.value)
        except ValueError:  # a word without quotes, as a shell leaves it
            value = keyword.value.id if isinstance(keyword.value, ast.Name) else None
        if keyword.arg not in allowed or not isinstance(value, int | float | str):
            raise ValueError(
                f"{wrong} Its settings are {', '.join(allowed) or 'none'}."
                f"{did_you_mean(str(keyword.arg), allowed)}"
            )
        settings[keyword.arg] = value
    return family(**settings)


def networks_of(net: str, x: int | Shape, dense: mlp, channels: Shape) -> tuple[Network, Network]:
    """Return the networks that read x and that make x, by name: "mlp" or "conv"."""
    if choose("net", net, {"mlp": False, "conv": True}):
        if isinstance(x, int) or len(x) != 3:
            raise ValueError(
                f'net="conv" is for images: x is (channels, height, width), e.g. x=(1, 28, 28), '
                f'but here x={x}. Use net="mlp".'
            )
        wide = dense.hidden[0] if dense.hidden else 256
        settings: Any = {"hidden": wide, "init": dense.init, "dropout": dense.dropout}
        return conv(*channels, **settings), deconv(*channels[::-1], **settings)
    return dense, dense


def reading(family: Conditional, net: Network) -> Network:
    """Return the network for factors that read the data; it transforms counts to a log scale.

    (Recurrent states read raw counts.)
    """
    transforms = isinstance(net, conv) or (isinstance(net, mlp) and bool(net.hidden))
    if family.support is constraints.nonnegative_integer and transforms:
        return replace(net, log=True)  # type: ignore[call-arg]
    return net


def choose(what: str, value: str, choices: Mapping[str, Choice]) -> Choice:
    """Return the choice of this name; an unknown name is a ValueError that lists all."""
    if value not in choices:
        raise ValueError(
            f"Unknown {what} {value!r}. Choose one of {', '.join(choices)}."
            f"{did_you_mean(value, choices)}"
        )
    return choices[value]
