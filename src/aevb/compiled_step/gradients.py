"""Differentiable functions with hand-written gradients that are cheaper than autograd's.

Two costs are avoided. A weight's gradient is computed in the weight's own memory layout, so it need
not be copied. In a loop over time, a weight's gradient is one product over all time steps instead
of a sum of one small product per step (:func:`deferred`).

Under ``torch.autocast``, products run in the lower precision. ``full`` converts the result to the
weight's dtype, for parameters of distributions. Every gradient is itself differentiable, so second
derivatives exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from aevb.runtime import private_torch
from aevb.runtime.private_torch import is_transformed
from aevb.runtime.shapes import broadcast_shapes


def affine(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False, full: bool = False
) -> Tensor:
    """x Wᵀ + b over any leading axes, or max(x Wᵀ + b, 0)."""
    precision = _precision(weight)
    x = x.to(precision)
    if is_transformed():
        y = F.linear(x, weight.to(precision), None if bias is None else bias.to(precision))
        y = F.relu(y) if relu else y
    elif _fixed.get():
        y = _Affine.apply(
            x,
            weight.detach().to(precision),
            None if bias is None else bias.detach().to(precision),
            relu,
        )  # type: ignore[no-untyped-call]
    elif (loop := _loop.get()) is not None and weight.requires_grad:
        key = id(weight), id(bias)
        if key not in loop:
            loop[key] = _Anchored(weight, bias, precision)
        anchored = loop[key]
        y = _Step.apply(x, anchored.seen, anchored.bias, relu, anchored.waiting)  # type: ignore[no-untyped-call]
    else:
        y = _Affine.apply(
            x, weight.to(precision), None if bias is None else bias.to(precision), relu
        )  # type: ignore[no-untyped-call]
    return y.to(weight.dtype) if full else y


_fixed: ContextVar[bool] = ContextVar("weights ask for no gradient in this thread", default=False)


@contextmanager
def weights_fixed() -> Iterator[None]:
    """Treat weights as constants in :func:`affine`, inside the context and in this thread.

    Otherwise :func:`affine` computes the gradients of the weights even if only others are needed.
    """
    token = _fixed.set(True)
    try:
        yield
    finally:
        _fixed.reset(token)


@contextmanager
def held_fixed(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Set ``requires_grad=False`` inside the context.

    No layer then computes unused weight gradients.
    """
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def _precision(weight: Tensor) -> torch.dtype:
    kind = weight.device.type
    return (
        torch.get_autocast_dtype(kind)
        if torch.is_autocast_enabled(kind) and weight.dtype == torch.float32
        else weight.dtype
    )


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


_ONEDNN = torch.backends.mkldnn.is_available()


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False
) -> Tensor:
    """Return x Wᵀ + b for a matrix x, with an optional ReLU.

    On the CPU, oneDNN is faster than the BLAS of torch.mm. oneDNN and the GPU's routine fuse the
    ReLU.
    """
    if _for_onednn(x, weight):
        return private_torch.onednn_linear(x, weight, bias, "relu" if relu else "none", [], "")
    if relu and bias is not None and x.device.type == "cuda" and not torch.is_grad_enabled():
        return private_torch.product_with_relu(x, weight, bias)
    y = torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    return y.relu_() if relu else y


def _of_weight(g: Tensor, x: Tensor) -> Tensor:
    """Return gᵀ x in the weight's layout.

    oneDNN needs a contiguous first matrix. It is so fast that the copy of g pays off.
    """
    if _for_onednn(g, x.t()):
        return _product(g.t().contiguous(), x.t())
    return torch.mm(g.t(), x)


def _for_onednn(x: Tensor, weight: Tensor) -> bool:
    large = x.numel() * weight.shape[0] >= 1 << 20
    usable = _ONEDNN and private_torch.onednn_linear is not None and not torch.is_grad_enabled()
    return large and x.device.type == "cpu" and x.dtype == torch.float32 and usable


class _Affine(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        y = _product(_flat(x), weight, bias, relu=relu).reshape(*x.shape[:-1], weight.shape[0])
        ctx.save_for_backward(x, weight, *([y] if relu else []))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, *y = ctx.saved_tensors
        if y:
            gradient = torch.ops.aten.threshold_backward(gradient, y[0], 0)
        g = _flat(gradient)
        of_x = _product(g, weight.t()).reshape(x.shape) if ctx.needs_input_grad[0] else None
        of_weight = _of_weight(g, _flat(x)) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, g.sum(0) if ctx.needs_input_grad[2] else None, None


# Weights used at every time step of a loop --------------------------------------------------------


class _Waiting:
    """The pairs (input, gradient of the output) that make up a weight's gradient.

    There is one pair per time step. The autograd graph refers to this object. To avoid reference
    cycles, it does not refer to the weight, and it keeps the pairs only during one backward pass.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.pass_ = -1

    def of_this_pass(self) -> list[tuple[Tensor, Tensor]]:
        """Return the pairs of this backward pass, without those that a failed pass left."""
        current = private_torch.graph_task()
        if current != self.pass_:
            self.pairs, self.pass_ = [], current
        return self.pairs


class _Anchored:
    """A weight and its bias as a loop uses them.

    The object keeps the originals alive, because their ids are its key.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, precision: torch.dtype) -> None:
        self.originals, self.waiting = (weight, bias), _Waiting()
        low = weight.to(precision), None if bias is None else bias.to(precision)
        self.seen, self.bias = _Anchor.apply(*low, self.waiting)  # type: ignore[no-untyped-call]


_loop: ContextVar[dict[tuple[int, int], _Anchored] | None] = ContextVar("loop", default=None)


@contextmanager
def deferred() -> Iterator[None]:
    """Defer the weight gradients of :func:`affine`: one product over all uses in the context."""
    if is_transformed() or not torch.is_grad_enabled() or not private_torch.can_defer():
        yield
        return
    token = _loop.set({})
    try:
        yield
    finally:
        _loop.reset(token)


class _Anchor(Function):
    """Identity on a weight. Autograd calls its backward once, after those of all time steps."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, waiting: _Waiting
    ) -> tuple[Tensor, Tensor | None]:
        ctx.waiting = waiting
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, of_weight: Tensor | None, of_bias: Tensor | None) -> Any:
        """Add the product over all pairs to the incoming gradients.

        The incoming gradients come from second derivatives.
        """
        if pairs := ctx.waiting.of_this_pass():
            x, g = (torch.cat([pair[i] for pair in pairs]) for i in (0, 1))
            ctx.waiting.pairs = []
            product = _of_weight(g, x)
            of_weight = product if of_weight is None else product + of_weight
            if ctx.needs_input_grad[1]:
                of_bias = g.sum(0) if of_bias is None else g.sum(0) + of_bias
        return of_weight, of_bias, None


class _Step(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool, waiting: _Waiting
    ) -> Tensor:
        y = _product(_flat(x), weight, bias, relu=relu).reshape(*x.shape[:-1], weight.shape[0])
        ctx.save_for_backward(x, weight, *([y] if relu else []))
        ctx.waiting = waiting
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, *y = ctx.saved_tensors
        if y:
            gradient = torch.ops.aten.threshold_backward(gradient, y[0], 0)
        if private_torch.will_execute(ctx.next_functions[1][0]):  # the weight's gradient is needed
            ctx.waiting.of_this_pass().append((_flat(x), _flat(gradient)))
        return (
            _product(_flat(gradient), weight.t()).reshape(x.shape)
            if ctx.needs_input_grad[0]
            else None,
            None,
            None,
            None,
            None,
        )


# Likelihoods and cells ----------------------------------------------------------------------------


def bernoulli_log_prob(logits: Tensor, x: Tensor) -> Tensor:
    """Return Σ x η − softplus(η) over the last axis.

    Its gradient with respect to η is x − sigmoid(η).
    """
    if is_transformed():
        return (x * logits - F.softplus(logits)).sum(-1)
    return _Bernoulli.apply(logits, x)  # type: ignore[no-untyped-call]


class _Bernoulli(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(logits, x)
        if (
            _elementary.get()
            and logits.device.type == "cpu"
            and (many := _multiplied(logits.shape[-1])) > 1
        ):
            factors = (1 + torch.exp(-logits.abs())).unflatten(-1, (many, -1))
            return (x * logits - logits.clamp_min(0)).sum(-1) - factors.prod(-2).log().sum(-1)
        return (x * logits).sub_(F.softplus(logits)).sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, x = ctx.saved_tensors
        g = gradient.unsqueeze(-1)
        of_logits = (
            ((x - torch.sigmoid(logits)) * g).sum_to_size(logits.shape)
            if ctx.needs_input_grad[0]
            else None
        )
        return of_logits, (logits * g).sum_to_size(x.shape) if ctx.needs_input_grad[1] else None


def _multiplied(size: int) -> int:
    """Return how many factors 1 + exp(−|η|) ≤ 2 to multiply per logarithm.

    The logarithm is the costliest operation on a CPU.
    """
    return next((many for many in range(64, 1, -1) if size % many == 0 and size // many >= 16), 1)


_elementary: ContextVar[bool] = ContextVar("elementary", default=False)


@contextmanager
def elementary() -> Iterator[None]:
    """Use elementary operations for LSTM cells and Bernoulli likelihoods.

    A compiler can fuse them.
    """
    token = _elementary.set(True)
    try:
        yield
    finally:
        _elementary.reset(token)


def lstm_cell(inputs: Tensor, recurrent: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new hidden state and cell of an LSTM.

    ``inputs`` and ``recurrent`` are the two parts of the gates (input, forget, candidate, output).
    On a GPU, forward and backward are one kernel each.
    """
    fused = inputs.device.type == "cuda" and private_torch.lstm_cell is not None
    if not is_transformed() and (fused or _elementary.get()):
        shape = broadcast_shapes(inputs.shape[:-1], recurrent.shape[:-1], cell.shape[:-1])
        rows = [
            value.expand(*shape, value.shape[-1]).reshape(-1, value.shape[-1])
            for value in (inputs, recurrent, cell)
        ]
        hidden, new = (
            _Cell.apply(*rows) if _elementary.get() else private_torch.lstm_cell(*rows)[:2]  # type: ignore[no-untyped-call]
        )
        return hidden.reshape(*shape, -1), new.reshape(*shape, -1)
    i, f, c, o = (inputs + recurrent).chunk(4, -1)
    new = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(c)
    return torch.sigmoid(o) * torch.tanh(new), new


class _Cell(Function):
    """An LSTM cell of elementary operations.

    Its gradients are concatenated, so that they fuse into one kernel.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, recurrent: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        i, f, c, o = (inputs + recurrent).chunk(4, -1)
        i, f, c, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(c), torch.sigmoid(o)
        new = f * cell + i * c
        out = torch.tanh(new)
        ctx.save_for_backward(i, f, c, o, out, cell)
        ctx.set_materialize_grads(False)
        return o * out, new

    @staticmethod
    def backward(ctx: Any, of_hidden: Tensor | None, of_new: Tensor | None) -> Any:
        i, f, c, o, out, cell = ctx.saved_tensors
        of_hidden = torch.zeros_like(cell) if of_hidden is None else of_hidden
        total = of_hidden * o
        total = total - total * out * out if of_new is None else total - total * out * out + of_new
        of_i, of_f, of_c, of_o = total * c * i, total * cell * f, total * i, of_hidden * out * o
        parts = [of_i - of_i * i, of_f - of_f * f, of_c - of_c * c * c, of_o - of_o * o, total * f]
        gates, before = torch.cat(parts, -1).split([4 * cell.shape[-1], cell.shape[-1]], -1)
        return gates, gates, before
