"""Networks with several named parents.

A network has a block of first-layer weights for each parent and adds the results, instead of
concatenating the parents. The sum is the same function. But a parent that is constant over some
axis (a static variable in a sequence, a class that is enumerated) is multiplied once and then
broadcast. The blocks also split the work of a recurrence: those of parents known in advance run for
all steps at once, and only the others run inside the loop.

A built network therefore has two methods: ``first`` sums the blocks of some of the parents, and
``rest`` computes the remaining layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aevb.compiled_step.gradients import affine
from aevb.declare.fixed_weights import Fixed, constant_blocks, read_fixed, show_fixed
from aevb.declare.registry import register

Shape = tuple[int, ...]
INITIALIZERS = ("default", "glorot_normal", "glorot_uniform", "normal", "zeros")
ACTIVATIONS: dict[str, Any] = {
    "relu": F.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "elu": F.elu, "gelu": F.gelu,
    "silu": F.silu, "softplus": F.softplus, "leaky_relu": F.leaky_relu, "identity": lambda h: h,
}  # fmt: skip


def _choice(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"Unknown {what} {value!r}. Choose one of {', '.join(choices)}.")


def _sizes(what: str, sizes: Sequence[int]) -> None:
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{what} takes positive whole numbers, got {size!r}.")


def initialise(
    weight: Tensor, bias: Tensor | None, how: str, fan_in: int, fan_out: int | None = None
) -> None:
    """Initialise one layer in place.

    ``fan_in`` counts the inputs from all parents, even if ``weight`` is one block.
    """
    with torch.no_grad():
        if how == "default":  # as torch initialises nn.Linear
            bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
            weight.uniform_(-bound, bound)
            if bias is not None:
                bias.uniform_(-bound, bound)
            return
        if how == "normal":
            weight.normal_()
        elif how == "zeros":
            weight.zero_()
        else:
            std = math.sqrt(2 / (fan_in + (fan_out or weight.shape[0])))
            weight.normal_(0, std) if how == "glorot_normal" else weight.uniform_(
                -std * math.sqrt(3), std * math.sqrt(3)
            )
        if bias is not None:
            bias.zero_()


class Named(nn.ParameterDict):
    """A ParameterDict whose keys may equal the names of its own attributes ("values", "type").

    Some entries may be constants, kept in double precision: a cast to another precision rounds the
    declared numbers once. They are no parameters, and no part of the saved weights.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], constants: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__(parameters)
        self.constants = dict(constants or {})
        for key, constant in self.constants.items():
            attribute = self._key_to_attr(key)
            delattr(self, attribute)
            rounded = constant.to(torch.get_default_dtype())
            self.register_buffer(attribute, rounded, persistent=False)

    def _key_to_attr(self, key: str) -> str:
        return f"[{key}]" if key in TAKEN else key

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Named:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for key, constant in self.constants.items():
            attribute = self._key_to_attr(key)
            self._buffers[attribute] = constant.to(self._buffers[attribute])  # type: ignore[arg-type]
        return self


TAKEN = frozenset({*dir(nn.ParameterDict()), "constants"})


class Blocks(nn.Module):
    """The first layer: one weight block per parent, and one bias.

    ``heads`` splits the output rows for initialisation only. The blocks of the parents in ``fixed``
    are constants.
    """

    def __init__(
        self,
        parents: Mapping[str, int],
        out: int,
        *,
        bias: bool,
        init: str,
        heads: Sequence[int] = (),
        masked: Sequence[str] = (),
        fixed: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        fixed = fixed or {}
        learned = {name: size for name, size in parents.items() if name not in fixed}
        fan_in = sum(learned.values())
        whole = torch.empty(out, fan_in)
        self.bias = nn.Parameter(torch.empty(out)) if bias else None
        _initialise_heads(whole, self.bias, init, fan_in, heads or [out])
        blocks = dict(zip(learned, whole.split(list(learned.values()), -1), strict=True))
        self.weights = Named(
            {
                name: fixed[name] if name in fixed else nn.Parameter(blocks[name].clone())
                for name in parents
            },
            fixed,
        )
        # Masks of missing entries are extra inputs of q. Their weights start at zero.
        self.missing = Named(
            {name: nn.Parameter(torch.zeros(out, parents[name])) for name in masked}
        )

    def forward(
        self,
        inputs: Mapping[str, Tensor],
        *,
        bias: bool = True,
        missing: Mapping[str, Tensor] | None = None,
        full: bool = False,
    ) -> Tensor:
        total: Tensor | None = None
        constant = self.bias if bias else None
        for name, value in inputs.items():
            part = affine(value, self.weights[name], constant, full=full)
            constant = None
            total = part if total is None else total + part
        for name, absent in (missing or {}).items():
            if name in self.missing:
                part = affine(absent, self.missing[name], full=full)
                total = part if total is None else total + part
        if total is None:
            raise ValueError("a first layer needs at least one parent")
        return total


def _initialise_heads(
    weight: Tensor, bias: Tensor | None, init: str, fan_in: int, heads: Sequence[int]
) -> None:
    parts = bias.split(list(heads)) if bias is not None else [None] * len(heads)
    for block, part in zip(weight.split(list(heads)), parts, strict=True):
        initialise(block, part, init, fan_in)


def _layer(fan_in: int, out: int, init: str, heads: Sequence[int] = ()) -> nn.Linear:
    """Make an nn.Linear without drawing torch's default initial weights first.

    ``nn.utils.skip_init`` does the same, but loads a large part of torch.
    """
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.in_features, layer.out_features = fan_in, out
    layer.weight, layer.bias = (
        nn.Parameter(torch.empty(out, fan_in)),
        nn.Parameter(torch.empty(out)),
    )
    _initialise_heads(layer.weight.data, layer.bias.data, init, fan_in, heads or [out])
    return layer


@dataclass(frozen=True, repr=False)
class Network:
    """The specification of a network: an immutable value.

    It builds a new module each time it is used. A subclass may set ``pure = True`` if its modules
    have no side effects. A training step can then be recorded and replayed without calling their
    Python code again.

    >>> issubclass(mlp, Network), mlp(8) == mlp(8)
    (True, True)
    """

    pure: ClassVar[bool] = False

    def __repr__(self) -> str:
        shown = (
            [repr(n) for n in getattr(self, fields(self)[0].name)]
            if fields(self)[0].type == "Shape"
            else []
        )
        rest = fields(self)[1:] if fields(self)[0].type == "Shape" else fields(self)
        shown += [
            f"{field.name}={self._show(field.name, value)}"
            for field in rest
            if (value := getattr(self, field.name)) != field.default
        ]
        name = "linear" if isinstance(self, mlp) and not self.hidden else type(self).__name__
        return f"{name}({', '.join(shown)})"

    def _show(self, name: str, value: Any) -> str:
        return repr(value)

    def dropouts(self) -> tuple[tuple[float, int], ...]:
        """The dropout masks that ``rest`` takes in training.

        Returns:
            For each mask a pair: the probability of dropping a unit, and the width of the layer.

        >>> mlp(500, 200, dropout=0.1).dropouts()
        ((0.1, 500), (0.1, 200))
        """
        return ()

    def dropouts_of(
        self, parents: Mapping[str, Shape], shape: Shape
    ) -> tuple[tuple[float, int], ...]:
        """The dropout masks for these parents, if the widths of the layers depend on them.

        Arguments:
            parents: The shape of each parent, by label.
            shape: The shape of the variable.

        Returns:
            The pairs of :meth:`dropouts`.

        >>> mlp(500, dropout=0.1).dropouts_of({"z": (20,)}, (784,))
        ((0.1, 500),)
        """
        if type(self).make is Network.make:
            return self.dropouts()
        from aevb.declare.own_networks import dropouts_of

        return dropouts_of(self, parents, shape)

    def draws_itself(self, parents: Mapping[str, Shape], shape: Shape) -> bool:
        """Whether a network of the user draws random numbers itself in training.

        Arguments:
            parents: The shape of each parent, by label.
            shape: The shape of the variable.

        Returns:
            Whether ``rest`` takes a seed after the masks of ``dropouts_of``, one per step.

        >>> mlp(500, dropout=0.1).draws_itself({"z": (20,)}, (784,))
        False
        """
        if type(self).make is Network.make:
            return False
        from aevb.declare.own_networks import draws_itself

        return draws_itself(self, parents, shape)

    def make(self, parents: Mapping[str, Shape], shape: Shape) -> nn.Module:
        """Make a torch module that is called with the parents' tensors, each [rows, *its shape].

        A subclass defines either this or :meth:`build`.

        Arguments:
            parents: The shape of each parent, by label.
            shape: The shape of the variable.

        Returns:
            A module that returns the raw parameters of the family, or features for a linear layer
            (:class:`aevb.wrap`).

        >>> @dataclass(frozen=True, repr=False)
        ... class encoder(Network):
        ...     width: int = 64
        ...
        ...     def make(self, parents, shape):
        ...         inputs = sum(math.prod(parent) for parent in parents.values())
        ...         return nn.Sequential(nn.Flatten(), nn.Linear(inputs, self.width), nn.GELU())
        >>> encoder(8).build({"x": (1, 4, 4)}, [2, 2], (2,), ()).heads
        Linear(in_features=8, out_features=4, bias=True)
        """
        raise TypeError(
            f"{type(self).__name__} has no method build. Define make(parents, shape), which "
            f"returns a torch module, or build(parents, heads, shape, masked)."
        )

    def build(
        self,
        parents: Mapping[str, Shape],
        heads: Sequence[int],
        shape: Shape,
        masked: Sequence[str],
    ) -> nn.Module:
        """Build a module that maps the parents to ``sum(heads)`` raw numbers.

        Arguments:
            parents: The shape of each parent, by label.
            heads: The number of raw numbers of each head.
            shape: The shape of the variable.
            masked: The labels of the parents for which ``first`` gets a mask of missing entries.

        Returns:
            A module with two methods. ``first(inputs, *, bias, missing)`` sums the contributions of
            some of the parents (by label) to the first layer; ``missing`` holds the masks.
            ``rest(h, keep)`` computes the remaining layers; ``keep`` holds the masks that
            ``dropouts`` lists (empty outside training).

        >>> net = mlp(8).build({"z": (2,)}, heads=[3, 3], shape=(3,), masked=())
        >>> net.rest(net.first({"z": torch.zeros(5, 2)})).shape
        torch.Size([5, 6])
        """
        from aevb.declare.own_networks import build_own

        return build_own(self, parents, heads, shape, masked)


@register
@dataclass(frozen=True, repr=False)
class mlp(Network):
    """A multi-layer perceptron: ``mlp(500, 500, dropout=0.1)``. Without sizes it is ``linear()``.

    Arguments:
        *sizes: The sizes of the hidden layers.
        hidden: The same as a sequence: ``mlp(hidden=(500, 500))``.
        activation: The function after each hidden layer: "relu", "tanh", "sigmoid", "elu", "gelu",
            "silu", "softplus", "leaky_relu" or "identity".
        dropout: The probability that a training step drops a hidden unit.
        init: How weights start: "default" (as torch's layers), "glorot_normal", "glorot_uniform",
            "normal" or "zeros".
        bias: Whether a ``linear`` network has an intercept.
        log: Transform inputs v to asinh(v), about log 2v for large v. Use it for counts: inputs in
            the thousands would make the first outputs just as large.
        fixed: Weights that stay as declared, of a network without hidden layers; see
            :func:`linear`.

    >>> mlp(500, 500, dropout=0.1)
    mlp(500, 500, dropout=0.1)
    >>> mlp()
    linear()
    """

    hidden: Shape = ()
    activation: str = "relu"
    dropout: float = 0.0
    init: str = "default"
    bias: bool = True
    log: bool = False
    fixed: Fixed = ()

    def __init__(
        self,
        *sizes: int,
        hidden: Sequence[int] = (),
        activation: str = "relu",
        dropout: float = 0.0,
        init: str = "default",
        bias: bool = True,
        log: bool = False,
        fixed: Any = (),
    ) -> None:
        for name, value in {
            "hidden": tuple(sizes) or tuple(hidden),
            "activation": activation,
            "dropout": dropout,
            "init": init,
            "bias": bias,
            "log": log,
            "fixed": read_fixed(fixed),
        }.items():
            object.__setattr__(self, name, value)
        _sizes("mlp", self.hidden)
        _choice("activation", activation, list(ACTIVATIONS))
        _choice("initialiser", init, INITIALIZERS)
        _check_dropout(dropout)
        if self.hidden and not bias:
            raise ValueError(
                "mlp with hidden layers always has biases; only linear() takes bias=False."
            )
        if log and not self.hidden:
            raise ValueError(
                "linear() does not transform its parents; log=True needs a hidden layer, e.g. "
                "mlp(32, log=True)."
            )
        if fixed and self.hidden:
            raise ValueError(
                "mlp with hidden layers learns all of its weights; only linear() takes fixed=."
            )

    def _show(self, name: str, value: Any) -> str:
        return show_fixed(value) if name == "fixed" else repr(value)

    def dropouts(self) -> tuple[tuple[float, int], ...]:
        return tuple((self.dropout, width) for width in self.hidden) if self.dropout else ()

    def build(
        self,
        parents: Mapping[str, Shape],
        heads: Sequence[int],
        shape: Shape,
        masked: Sequence[str],
    ) -> nn.Module:
        return MLP(self, parents, heads, masked)


def linear(
    *,
    bias: bool = True,
    init: str = "default",
    fixed: Mapping[str, float | Sequence[Sequence[float]]] | None = None,
) -> mlp:
    """An affine map from the parents to the distribution's parameters.

    Arguments:
        bias: Whether the map has an intercept.
        init: How weights start, as in :class:`mlp`.
        fixed: Weights that stay as declared, by parent: a number w (which stands for w · I), or a
            matrix with one row per entry of the variable. Weights of other parents are learned. A
            fixed parent acts on the location only; to let it act on the scale too, give the matrix
            the rows of all heads.

    Returns:
        The network, a :class:`mlp` without hidden layers.

    >>> linear(fixed={"z[t-1]": [[1, 1], [0, 1]]}, bias=False)
    linear(bias=False, fixed={'z[t-1]': [[1, 1], [0, 1]]})
    """
    return mlp(bias=bias, init=init, fixed=fixed or ())


class MLP(nn.Module):
    def __init__(
        self, spec: mlp, parents: Mapping[str, Shape], heads: Sequence[int], masked: Sequence[str]
    ) -> None:
        super().__init__()
        self.spec = spec
        inputs = {name: math.prod(shape) for name, shape in parents.items()}
        if not spec.hidden:
            self.blocks = Blocks(
                inputs,
                sum(heads),
                bias=spec.bias,
                init=spec.init,
                heads=heads,
                masked=masked,
                fixed=constant_blocks(spec.fixed, inputs, heads),
            )
        else:
            self.blocks = Blocks(inputs, spec.hidden[0], bias=True, init=spec.init, masked=masked)
        sizes = list(spec.hidden)
        self.hidden = nn.ModuleList(_layer(a, b, spec.init) for a, b in pairwise(sizes))
        self.heads = _layer(sizes[-1], sum(heads), spec.init, heads) if sizes else None
        self.activation = ACTIVATIONS[spec.activation]

    def first(
        self,
        inputs: Mapping[str, Tensor],
        *,
        bias: bool = True,
        missing: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        if self.spec.log:
            inputs = {name: value.asinh() for name, value in inputs.items()}
        return self.blocks(inputs, bias=bias, missing=missing, full=self.heads is None)

    def rest(self, h: Tensor, keep: Sequence[Tensor] = ()) -> Tensor:
        """Compute the remaining layers.

        ``keep`` holds one dropout mask per hidden layer (1 keeps a unit); empty: no dropout.
        """
        if self.heads is None:
            return h
        h, relu = self._drop(self.activation(h), 0, keep), self.spec.activation == "relu"
        for i, layer in enumerate(self.hidden, 1):
            h = affine(h, layer.weight, layer.bias, relu=relu)  # type: ignore[arg-type]
            h = self._drop(h if relu else self.activation(h), i, keep)
        return affine(h, self.heads.weight, self.heads.bias, full=True)

    def _drop(self, h: Tensor, i: int, keep: Sequence[Tensor]) -> Tensor:
        return _dropped(h, keep[i], self.spec.dropout) if keep else h


@register
@dataclass(frozen=True, repr=False)
class conv(Network):
    """Convolutions for image-shaped parents, then one dense layer: ``conv(32, 64, hidden=256)``.

    Each convolution halves height and width, which may be any numbers. The dense layer reads all
    parents. All sizes follow from the shapes of the parents.

    Arguments:
        *sizes: The number of channels of each convolution.
        channels: The same as a sequence.
        hidden: The size of the dense layer.
        activation: The function after each layer, as in :class:`mlp`.
        dropout: The share of the units of the dense layer that a training step leaves out.
        init: How weights start, as in :class:`mlp`.
        log: Transform all inputs v to asinh(v), as in :class:`mlp`. Use it for images of counts.

    >>> net = conv(4, 8, hidden=16).build({"x": (1, 8, 8)}, heads=[2, 2], shape=(2,), masked=())
    >>> net.rest(net.first({"x": torch.zeros(5, 64)})).shape
    torch.Size([5, 4])
    """

    channels: Shape = ()
    hidden: int = 256
    activation: str = "relu"
    init: str = "default"
    dropout: float = 0.0
    log: bool = False

    def __init__(
        self,
        *sizes: int,
        channels: Sequence[int] = (),
        hidden: int = 256,
        activation: str = "relu",
        init: str = "default",
        dropout: float = 0.0,
        log: bool = False,
    ) -> None:
        _set_convolution(self, tuple(sizes) or tuple(channels), hidden, activation, init, dropout)
        object.__setattr__(self, "log", log)

    def dropouts(self) -> tuple[tuple[float, int], ...]:
        return ((self.dropout, self.hidden),) if self.dropout else ()

    def build(
        self,
        parents: Mapping[str, Shape],
        heads: Sequence[int],
        shape: Shape,
        masked: Sequence[str],
    ) -> nn.Module:
        if not any(len(parent) == 3 for parent in parents.values()):
            found = ", ".join(f"{name} {parent}" for name, parent in parents.items())
            raise ValueError(
                f"conv needs a parent of shape (channels, height, width); the parents here are "
                f"{found}. Use mlp."
            )
        return Encoder(self, parents, heads, masked)


@register
@dataclass(frozen=True, repr=False)
class deconv(Network):
    """A dense layer, then transposed convolutions up to an image.

    For example, ``deconv(64, 32)`` for a variable of shape (1, 28, 28). Each transposed convolution
    doubles height and width, up to those of the variable, which may be any numbers.

    Arguments:
        *sizes: The number of channels before each transposed convolution.
        channels: The same as a sequence.
        hidden: The size of the dense layer.
        activation: The function after each layer but the last, as in :class:`mlp`.
        dropout: The share of the units of the dense layer that a training step leaves out.
        init: How weights start, as in :class:`mlp`.

    >>> net = deconv(8, 4, hidden=16).build({"z": (2,)}, heads=[64], shape=(1, 8, 8), masked=())
    >>> net.rest(net.first({"z": torch.zeros(5, 2)})).shape
    torch.Size([5, 64])
    """

    channels: Shape = ()
    hidden: int = 256
    activation: str = "relu"
    init: str = "default"
    dropout: float = 0.0

    def __init__(
        self,
        *sizes: int,
        channels: Sequence[int] = (),
        hidden: int = 256,
        activation: str = "relu",
        init: str = "default",
        dropout: float = 0.0,
    ) -> None:
        _set_convolution(self, tuple(sizes) or tuple(channels), hidden, activation, init, dropout)

    def dropouts(self) -> tuple[tuple[float, int], ...]:
        return ((self.dropout, self.hidden),) if self.dropout else ()

    def build(
        self,
        parents: Mapping[str, Shape],
        heads: Sequence[int],
        shape: Shape,
        masked: Sequence[str],
    ) -> nn.Module:
        if len(shape) != 3:
            raise ValueError(
                f"deconv makes an image (channels, height, width), but this variable has shape "
                f"{shape}. Use mlp."
            )
        if any(head != math.prod(shape) for head in heads):
            raise ValueError(
                "deconv gives each pixel its own parameters; this conditional has parameters of "
                "another size. Use mlp."
            )
        return Decoder(self, parents, heads, shape, masked)


def _set_convolution(
    spec: conv | deconv,
    channels: Shape,
    hidden: int,
    activation: str,
    init: str,
    dropout: float,
) -> None:
    for name, value in {
        "channels": channels,
        "hidden": hidden,
        "activation": activation,
        "init": init,
        "dropout": dropout,
    }.items():
        object.__setattr__(spec, name, value)
    if not channels:
        raise ValueError(
            f"{type(spec).__name__} needs at least one number of channels, e.g. "
            f"{type(spec).__name__}(32, 64)."
        )
    _sizes(type(spec).__name__, (*channels, hidden))
    _choice("activation", activation, list(ACTIVATIONS))
    _choice("initialiser", init, INITIALIZERS)
    _check_dropout(dropout)


def _check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is a probability below 1, got {dropout}.")


def _dropped(h: Tensor, keep: Tensor, dropout: float) -> Tensor:
    """Units with the dropped ones set to zero; ``keep`` is 1 for a unit that is kept."""
    return h * (keep * (1 / (1 - dropout))).to(h.dtype)


def _halve(size: int) -> int:
    return (size + 1) // 2


def _convolution(layer: nn.Conv2d | nn.ConvTranspose2d, init: str) -> Any:
    if init != "default":
        area = math.prod(layer.kernel_size)
        initialise(
            layer.weight.data,
            layer.bias.data if layer.bias is not None else None,
            init,
            layer.in_channels * area,
            layer.out_channels * area,
        )
    return layer


class Encoder(nn.Module):
    def __init__(
        self, spec: conv, parents: Mapping[str, Shape], heads: Sequence[int], masked: Sequence[str]
    ) -> None:
        super().__init__()
        self.activation, self.dropout = ACTIVATIONS[spec.activation], spec.dropout
        self.log = spec.log
        self.shapes = {name: shape for name, shape in parents.items() if len(shape) == 3}
        self.masked = [name for name in masked if name in self.shapes]
        self.stacks = nn.ModuleDict()
        sizes = {name: math.prod(shape) for name, shape in parents.items()}
        for name, (channels, height, width) in self.shapes.items():
            ins = [channels * (1 + (name in self.masked)), *spec.channels]
            layers = [
                _convolution(nn.Conv2d(a, b, 3, stride=2, padding=1), spec.init)
                for a, b in zip(ins, spec.channels, strict=False)
            ]
            if name in self.masked:
                nn.init.zeros_(layers[0].weight[:, channels:])
            self.stacks[name] = nn.ModuleList(layers)
            for _ in spec.channels:
                height, width = _halve(height), _halve(width)
            sizes[name] = spec.channels[-1] * height * width
        self.blocks = Blocks(
            sizes,
            spec.hidden,
            bias=True,
            init=spec.init,
            masked=[name for name in masked if name not in self.shapes],
        )
        self.heads = _layer(spec.hidden, sum(heads), spec.init, heads)

    def first(
        self,
        inputs: Mapping[str, Tensor],
        *,
        bias: bool = True,
        missing: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        missing = missing or {}
        if self.log:
            inputs = {name: value.asinh() for name, value in inputs.items()}
        features = {
            name: self._stack(name, value, missing.get(name)) if name in self.shapes else value
            for name, value in inputs.items()
        }
        return self.blocks(
            features,
            bias=bias,
            missing={name: mask for name, mask in missing.items() if name not in self.shapes},
        )

    def _stack(self, name: str, value: Tensor, absent: Tensor | None) -> Tensor:
        image = value.reshape(-1, *self.shapes[name])
        if name in self.masked:
            mask = (
                torch.zeros_like(image)
                if absent is None
                else absent.to(value.dtype).expand(value.shape).reshape(image.shape)
            )
            image = torch.cat([image, mask], 1)
        for layer in self.stacks[name]:  # type: ignore[attr-defined]
            image = self.activation(layer(image))
        return image.reshape(*value.shape[:-1], -1)

    def rest(self, h: Tensor, keep: Sequence[Tensor] = ()) -> Tensor:
        h = self.activation(h)
        h = _dropped(h, keep[0], self.dropout) if keep else h
        return affine(h, self.heads.weight, self.heads.bias, full=True)


class Decoder(nn.Module):
    def __init__(
        self,
        spec: deconv,
        parents: Mapping[str, Shape],
        heads: Sequence[int],
        shape: Shape,
        masked: Sequence[str],
    ) -> None:
        super().__init__()
        self.activation, self.dropout = ACTIVATIONS[spec.activation], spec.dropout
        inputs = {name: math.prod(parent) for name, parent in parents.items()}
        self.blocks = Blocks(inputs, spec.hidden, bias=True, init=spec.init, masked=masked)
        self.sizes = [shape[1:]]
        for _ in spec.channels:
            height, width = self.sizes[-1]
            self.sizes.append((_halve(height), _halve(width)))
        self.sizes.reverse()
        self.seed = (spec.channels[0], *self.sizes[0])
        self.grow = _layer(spec.hidden, math.prod(self.seed), spec.init)
        outs = [*spec.channels[1:], shape[0] * len(heads)]
        self.layers = nn.ModuleList(
            _convolution(nn.ConvTranspose2d(a, b, 4, stride=2, padding=1), spec.init)
            for a, b in zip(spec.channels, outs, strict=True)
        )

    def first(
        self,
        inputs: Mapping[str, Tensor],
        *,
        bias: bool = True,
        missing: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        return self.blocks(inputs, bias=bias, missing=missing)

    def rest(self, h: Tensor, keep: Sequence[Tensor] = ()) -> Tensor:
        h = self.activation(h)
        h = _dropped(h, keep[0], self.dropout) if keep else h
        image = self.activation(self.grow(h)).reshape(-1, *self.seed)
        for i, (layer, (height, width)) in enumerate(zip(self.layers, self.sizes[1:], strict=True)):
            # For an odd size, doubling gives one pixel too many.
            image = layer(image)[..., :height, :width]
            image = self.activation(image) if i + 1 < len(self.layers) else image
        return image.reshape(*h.shape[:-1], -1).to(self.grow.weight.dtype)


@register
@dataclass(frozen=True, repr=False)
class table(Network):
    """A lookup table with one row of free parameters per example.

    It is the non-amortised q of classic EM. Declare ``q={"z | i": Normal(net=table(1000))},
    given={"i": 1}``. In the data, ``i`` is the row of each example, 0 … rows−1.

    Arguments:
        rows: The number of examples.

    >>> net = table(10).build({"i": (1,)}, heads=[2], shape=(2,), masked=())
    >>> net.rest(net.first({"i": torch.tensor([[0.0], [9.0]])})).shape
    torch.Size([2, 2])
    """

    rows: int = 0

    def build(
        self,
        parents: Mapping[str, Shape],
        heads: Sequence[int],
        shape: Shape,
        masked: Sequence[str],
    ) -> nn.Module:
        _sizes("table", [self.rows])
        if len(parents) != 1 or math.prod(next(iter(parents.values()))) != 1:
            raise ValueError(
                f"table({self.rows}) is looked up by one parent of size 1, the row of each "
                f'example: "z | i" with given={{"i": 1}}.'
            )
        return Table(self.rows, sum(heads))


class Table(nn.Module):
    def __init__(self, rows: int, out: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(rows, out))

    def first(
        self,
        inputs: Mapping[str, Tensor],
        *,
        bias: bool = True,
        missing: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        (index,) = inputs.values()
        return F.embedding(index.squeeze(-1).long(), self.rows)

    def rest(self, h: Tensor, keep: Sequence[Tensor] = ()) -> Tensor:
        return h
