"""Networks of the user: any torch module, or a plain function of the parents' tensors.

A network of the library sums blocks of the parents in its first layer. A module of the user has no
such layer, so ``first`` lays the parents' values side by side instead, with zeros for the others.
The sum of two such rows is the row with both, so everything that adds first layers (enumeration,
loops over time, particle filters) works unchanged. ``rest`` then calls the module once, on all rows
of all axes: each parent is a tensor [rows, *its shape].
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aevb.compiled_step.gradients import affine
from aevb.declare.networks import Named, Network, Shape, _choice, _layer
from aevb.declare.own_dropout import dropping, replace_dropout
from aevb.declare.probe import Found, probe
from aevb.declare.registry import name_of, register
from aevb.runtime.seeding import global_seeded
from aevb.runtime.shapes import broadcast_shapes

OUTPUTS = ("auto", "features", "parameters")
Dropouts = tuple[tuple[float, int], ...]


@register
@dataclass(frozen=True, repr=False)
class wrap(Network):
    """A torch module, a class of modules, or a function, as a network.

    ``net=`` of a conditional does this itself; use ``wrap`` to set an option. The network is called
    with one tensor per parent, in the order of the key, each [rows, *shape of the parent]. Rows are
    examples, time steps, samples and enumerated values, so a row must not depend on another one.

    - ``output="parameters"``: the network returns the raw parameters, in the order of the family's
      heads: one tensor, or a tuple with one tensor per head. ``"features"``: a linear layer makes
      the parameters of what it returns. ``"auto"``: parameters if it returns a tuple or as many
      numbers as there are parameters, otherwise features.
    - ``join=True``: the network gets one tensor, of all parents side by side.
    - ``pretrained=True``: a fresh model starts from the given weights. Otherwise its weights are
      drawn again.

    >>> from torch import nn
    >>> from aevb import Bernoulli, Model, Normal
    >>> encoder = nn.Sequential(nn.Linear(13, 32), nn.Tanh())
    >>> model = Model(
    ...     p={"z": Normal(2), "x | z": Bernoulli(10)},
    ...     q={"z | x, y": Normal(net=wrap(encoder, join=True))},
    ...     given={"y": 3},
    ... )
    >>> model.factors["q(z|x, y)"].net.heads
    Linear(in_features=32, out_features=4, bias=True)
    """

    own_field: ClassVar[str] = "net"

    net: Any = None
    output: str = "auto"
    join: bool = False
    pretrained: bool = False

    def __post_init__(self) -> None:
        _choice("output", self.output, OUTPUTS)
        if isinstance(self.net, nn.Module):
            object.__setattr__(self, "net", _copied(self.net))
        elif not callable(self.net) or (isinstance(self.net, type) and not is_maker(self.net)):
            raise ValueError(
                f"wrap takes a torch module, a class of modules, or a function; got {self.net!r}."
            )

    def make(self, parents: Mapping[str, Shape], shape: Shape) -> Any:
        if isinstance(self.net, nn.Module):
            return _copied(self.net)
        return _made(self.net) if is_maker(self.net) else self.net

    def __repr__(self) -> str:
        name = name_of(self.net) + ("(…)" if isinstance(self.net, nn.Module) else "")
        shown = [
            f"{field.name}={value!r}"
            for field in fields(self)[1:]
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"wrap({', '.join([name, *shown])})" if shown else name


def as_network(net: Any) -> Network | None:
    """The network that ``net=`` of a conditional means. Raise ValueError if it means none."""
    if net is None or isinstance(net, Network):
        return net
    if isinstance(net, type) and issubclass(net, Network):
        raise ValueError(
            f"net={net!r} is not a network. Use linear(), mlp(500, 500), …: an object, not the "
            f"class."
        )
    if isinstance(net, nn.Module) or (callable(net) and not isinstance(net, type)) or is_maker(net):
        return wrap(net)
    raise ValueError(
        f"net={net!r} is not a network. Use linear(), mlp(500, 500), conv(...), deconv(...), or "
        f"any torch module or function of the parents' tensors."
    )


def is_maker(net: Any) -> bool:
    """Whether calling ``net()`` makes a module: a class of modules, or a partial of one."""
    if isinstance(net, partial):
        return is_maker(net.func)
    return isinstance(net, type) and issubclass(net, nn.Module)


def _made(maker: Any) -> Any:
    name = name_of(maker)
    try:
        return maker()
    except TypeError as error:
        raise ValueError(
            f"{name}() cannot make a module: {_first_line(error)}. Give an object, {name}(…), or "
            f"functools.partial({name}, …)."
        ) from error


def _copied(module: nn.Module) -> nn.Module:
    """A copy on torch's default device and in its default precision, which shares no weights."""
    try:
        copied = copy.deepcopy(module)
    except Exception as error:
        raise ValueError(
            f"{type(module).__name__} cannot be copied ({_first_line(error)}), so a model could "
            f"share its weights with another one. Give its class, or a functools.partial of it."
        ) from error
    return copied.to(torch.get_default_device(), torch.get_default_dtype())


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


class Wrapped(nn.Module):
    """The built module of the user's network, between its parents and its raw parameters."""

    def __init__(
        self,
        spec: Network,
        part: Any,
        parents: Mapping[str, Shape],
        heads: Sequence[int],
        shape: Shape,
        masked: Sequence[str],
    ) -> None:
        super().__init__()
        if not isinstance(part, nn.Module) and not callable(part):
            raise ValueError(
                f"{type(spec).__name__}.make returned {part!r}, which is no torch module or "
                f"function."
            )
        self.parents, self.masked, self.out = dict(parents), list(masked), sum(heads)
        self.title = name_of(part)
        self.joined = isinstance(spec, wrap) and spec.join
        self.widths = [math.prod(parent) for parent in parents.values()]
        self.widths += [math.prod(parents[label]) for label in masked]
        self.module, self.function = None, None
        if isinstance(part, nn.Module):
            self.module = replace_dropout(part)
        else:
            self.function = part
        # Parts that were given in evaluation mode, such as trained batch normalisation, stay in it.
        modules = [] if self.module is None else self.module.modules()
        self.evaluated = [module for module in modules if not module.training]
        self.found: Found = probe(self.title, self.call, parents, self.module, self.joined)
        output = spec.output if isinstance(spec, wrap) else "auto"
        self.features = _features(self.title, output, self.found.shapes, list(heads), shape)
        self.heads = _layer(self.features, self.out, "default", heads) if self.features else None
        # Masks of missing entries are extra inputs of q. Their weights start at zero.
        self.missing = Named(
            {label: torch.zeros(self.out, math.prod(parents[label])) for label in masked}
        )

    def train(self, mode: bool = True) -> Wrapped:
        super().train(mode)
        for module in self.evaluated:
            module.training = False
        return self

    def call(self, *values: Tensor) -> Any:
        """What the user's network returns for the parents' tensors, each [rows, *shape]."""
        if self.joined:
            values = (torch.cat([value.flatten(1) for value in values], -1),)
        return self.module(*values) if self.module is not None else self.function(*values)  # type: ignore[misc]

    def first(
        self,
        inputs: Mapping[str, Tensor],
        *,
        bias: bool = True,
        missing: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        missing = missing or {}
        given = [inputs.get(label) for label in self.parents]
        given += [missing.get(label) for label in self.masked]
        known = [value for value in given if value is not None]
        if not known:
            raise ValueError("a first layer needs at least one parent")
        if len(given) == 1:
            return known[0]
        lead = broadcast_shapes(*(value.shape[:-1] for value in known))
        return torch.cat(
            [
                known[0].new_zeros(*lead, width)
                if value is None
                else value.to(known[0].dtype).expand(*lead, width)
                for value, width in zip(given, self.widths, strict=True)
            ],
            -1,
        )

    def rest(self, h: Tensor, keep: Sequence[Tensor] = ()) -> Tensor:
        seed = None
        if self.found.draws and keep:
            *keep, seed = keep
        lead = broadcast_shapes(h.shape[:-1], *(mask.shape[:-1] for mask in keep))
        rows = h.expand(*lead, h.shape[-1]).reshape(-1, h.shape[-1])
        values = rows.split(self.widths, -1)
        shapes = self.parents.values()
        reads = [value.reshape(-1, *shape) for value, shape in zip(values, shapes, strict=False)]
        if self.found.writes:  # others read the same values
            reads = [value.clone() for value in reads]
        masks = [mask.expand(*lead, mask.shape[-1]).flatten(0, -2) for mask in keep]
        with (
            dropping(masks) if masks else nullcontext(),
            nullcontext() if seed is None else global_seeded(int(seed.flatten()[0]), h.device),
        ):
            raw = torch.cat([_by_row(part) for part in _parts(self.call(*reads))], -1)
        raw = raw.to(h.dtype)
        if self.heads is not None:
            raw = affine(raw, self.heads.weight, self.heads.bias, full=True)
        for label, absent in zip(self.masked, values[len(reads) :], strict=True):
            raw = raw + F.linear(absent, self.missing[label])
        return raw.reshape(*lead, self.out)

    def why_impure(self) -> str | None:
        """Why a step with this network cannot be recorded; None if it can."""
        fix = "= True in its class if it has none"
        if self.found.draws:
            return (
                f"{self.title} draws random numbers itself, which a recording would repeat (of "
                f"dropout, use modules such as nn.Dropout)"
            )
        if self.module is None and not getattr(self.function, "pure", False):
            return (
                f"{self.title} is a function of your own, whose code may have side effects (set "
                f"{self.title}.pure = True if it has none)"
            )
        for module in () if self.module is None else self.module.modules():
            known = type(module).__module__.startswith(("torch.nn.modules.", "aevb."))
            if not known and not getattr(module, "pure", False):
                return (
                    f"{type(module).__name__} is a module of your own, whose code may have side "
                    f"effects (set pure {fix})"
                )
        return None

    def redraw(self) -> None:
        """Draw the weights of the user's module again, as its parts do themselves."""
        if self.module is None:
            return
        # What was given in evaluation mode is trained already, and keeps its values.
        kept = {id(parameter) for module in self.evaluated for parameter in module.parameters()}
        drawn = {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and id(parameter) not in kept
        }
        with torch.no_grad():
            for parameter in drawn.values():  # NaN marks what no part draws
                parameter.fill_(math.nan)
            # A part comes after its own parts, as when they are made: it may change their weights.
            for module in reversed([*self.module.modules()]):
                reset = getattr(
                    module, "reset_parameters", getattr(module, "_reset_parameters", None)
                )
                own = any(parameter.requires_grad for parameter in module.parameters())
                if reset is not None and module not in self.evaluated and own:
                    reset()
        for name, parameter in self.module.named_parameters():
            if name in drawn and bool(parameter.isnan().any()):
                raise ValueError(
                    f"{self.title} does not say how its parameter {name} is drawn, so no "
                    f"seed can decide its initial values. Give the class instead of an object "
                    f"(net={self.title}), give the module a method reset_parameters(), or use "
                    f"wrap(…, pretrained=True) to start from the given weights."
                )


def _parts(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _by_row(part: Tensor) -> Tensor:
    return part.flatten(1) if part.dim() > 1 else part.unsqueeze(-1)


def _features(
    name: str, output: str, shapes: Sequence[Shape], heads: list[int], shape: Shape
) -> int:
    """The number of features that a linear layer reads; 0 if the network returns parameters."""
    sizes, needed = [math.prod(one) for one in shapes], sum(heads)
    what = " + ".join("×".join(map(str, one)) or "1" for one in shapes)
    want = " + ".join(map(str, heads))
    if len(sizes) > 1:
        if sizes != heads or output == "features":
            raise ValueError(
                f"{name} returns {len(sizes)} tensors of {what} numbers per row; a tuple holds the "
                f"raw parameters, here {want}. For features, return one tensor."
            )
        return 0
    fits = sizes[0] == needed
    if output == "features" or (output == "auto" and not fits):
        # An image of another size, for a variable that is an image, is most likely a mistake.
        if output == "auto" and len(shapes[0]) == len(shape) == 3:
            raise ValueError(
                f"{name} returns {what} numbers per row, but this variable of shape "
                f"{'×'.join(map(str, shape))} needs {want} raw parameters. Change its last layer, "
                f'or use wrap(…, output="features") to add a linear layer.'
            )
        return sizes[0]
    if not fits:
        raise ValueError(
            f"{name} returns {what} numbers per row, but this conditional needs {want} raw "
            f'parameters. Change its last layer, or use output="features".'
        )
    return 0


# What the trial of a specification found for some parents; known when it is built.
_tried: WeakKeyDictionary[Network, dict[Any, Found]] = WeakKeyDictionary()


def build_own(
    spec: Network,
    parents: Mapping[str, Shape],
    heads: Sequence[int],
    shape: Shape,
    masked: Sequence[str],
) -> Wrapped:
    """Build what ``spec.make`` makes, between these parents and heads."""
    built = Wrapped(spec, spec.make(parents, shape), parents, heads, shape, masked)
    _tried.setdefault(spec, {})[_key(parents, shape)] = built.found
    return built


def dropouts_of(spec: Network, parents: Mapping[str, Shape], shape: Shape) -> Dropouts:
    """The dropout masks that the built network takes."""
    return _found(spec, parents, shape).dropouts


def draws_itself(spec: Network, parents: Mapping[str, Shape], shape: Shape) -> bool:
    """Whether the built network draws random numbers itself, in training."""
    return _found(spec, parents, shape).draws


def _found(spec: Network, parents: Mapping[str, Shape], shape: Shape) -> Found:
    known = _tried.setdefault(spec, {})
    if (key := _key(parents, shape)) not in known:
        part = spec.make(parents, shape)
        known[key] = Wrapped(spec, part, parents, [math.prod(shape)], shape, ()).found
    return known[key]


def _key(parents: Mapping[str, Shape], shape: Shape) -> Any:
    return tuple(parents.items()), shape


def own_networks(factors: Mapping[str, nn.Module]) -> Iterator[tuple[str, Wrapped]]:
    """The user's networks in a model, by the factor's name."""
    for name, factor in factors.items():
        if isinstance(net := getattr(factor, "net", None), Wrapped):
            yield name, net
