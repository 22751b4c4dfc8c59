"""A step's arithmetic, recorded once and replayed: the operations alone, without the Python that chose them.

An estimate is a pure function of parameters, batch and noise, and every step of a run makes the same choices. So the operations of one
step, gradients included, are written down as a list and run as that list. The numbers are the same to the last bit. For a graph on a
GPU the list is rewritten, and with ``compile`` torch fuses what lies between its products: then they differ in rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from aevb.declare.gradients import elementary
from aevb.declare.graph import Entry
from aevb.model import Model
from aevb.training.fusing import explained, fused
from aevb.training.rewriting import Beside, UnchangeableError, elemental, rewritten
from aevb.training.tracing import memory_of, traced, written

if TYPE_CHECKING:
    from aevb.training.capture import Lane

aten = torch.ops.aten
SAME = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)  # what they give is what they are given
Function = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]  # of the inputs: the objective, and what is measured
Found = tuple[Tensor, Tensor, list[Tensor | None]]  # the objective, what is measured, a gradient of −objective a parameter


class _With(nn.Module):
    """A function of a model, as a module: torch can then put other tensors in the place of its parameters."""

    def __init__(self, model: nn.Module, function: Function) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.function(inputs)


class Recording:
    """What ``function`` computes for these inputs and the model's parameters, and its gradients with respect to the active ones.

    Where it is to be captured, on a GPU, ``lane`` has the streams that it may use beside its own. With ``stacked``, the parameters of several models
    of one declaration (each with an axis in front, and so have the inputs), it is the function of all of them at once.
    """

    def __init__(
        self,
        model: nn.Module,
        function: Function,
        inputs: Mapping[str, Tensor],
        active: Sequence[Tensor],
        *,
        compiled: bool,
        lane: Lane | None = None,
        stacked: Sequence[Tensor] | None = None,
    ) -> None:
        named = dict(model.named_parameters())
        self.shapes = shapes(inputs)
        self.parameters: list[Tensor] = list(named.values())
        wanted = {id(parameter) for parameter in active}
        whole = _With(model, function)

        def flat(*tensors: Tensor) -> tuple[Tensor | None, ...]:
            parameters = {name: tensor.detach() for name, tensor in zip(named, tensors, strict=False)}
            sources = [parameters[name].requires_grad_() for name, parameter in named.items() if id(parameter) in wanted]
            data = dict(zip(inputs, tensors[len(named) :], strict=True))
            objective, measured = torch.func.functional_call(whole, {f"model.{name}": tensor for name, tensor in parameters.items()}, (data,))
            return objective.detach(), measured, *gradients_of(objective, sources)

        given = list(inputs.values())
        with elementary() if compiled else nullcontext():
            graph = _trim(traced(flat, *self.parameters, *(given if stacked is None else [value[0] for value in given]), fold=not compiled))
            if stacked is not None:
                self.parameters = list(stacked)
                with torch.no_grad(), _without_loops():
                    graph = _trim(traced(torch.vmap(elemental(graph, len(named))), *stacked, *given))
        if compiled and lane is None:
            _as_they_come(graph, len(active))
        self.unchanged: str | None = None  # why it runs as it was recorded, though it was to be rewritten
        try:
            if compiled or lane is not None:
                graph = rewritten(graph, len(named), beside=lane is not None, values=not compiled)
            if compiled:
                graph = fused(graph, on_gpu=lane is not None)
        except UnchangeableError as reason:
            self.unchanged = str(reason)
        self.beside = None if lane is None else Beside(graph, lane)
        self.run: Callable[..., Any] = graph if self.beside is None else self.beside.run
        places = {id(parameter): i for i, parameter in enumerate(parameter for parameter in named.values() if id(parameter) in wanted)}
        self.active, self.order = list(active), [places[id(parameter)] for parameter in active]

    def write_into(self, places: Mapping[Any, Tensor]) -> None:
        """Where the gradients belong, by parameter: those that are the last of their branch are put there as they come."""
        if self.beside is not None:
            outputs = self.beside.outputs[len(self.beside.outputs) - len(self.order) :]
            self.beside.into = {outputs[i]: places[parameter] for i, parameter in zip(self.order, self.active, strict=True)}

    def __call__(self, inputs: Mapping[str, Tensor]) -> Found:
        with torch.no_grad(), explained():
            objective, measured, *gradients = self.run(*self.parameters, *inputs.values())
        return objective, measured, [gradients[i] for i in self.order]


def gradients_of(objective: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Of −objective; there is one of one parameter at least, or nothing could be trained."""
    found: list[Tensor | None] = []
    if objective.requires_grad:
        found += torch.autograd.grad(-objective, parameters, allow_unused=True)
    if all(gradient is None for gradient in found):
        raise ValueError(
            "The objective depends on no parameter that this phase may move: all that it reads is frozen, or known from the data. "
            "Unfreeze some, use another schedule, or leave labels out."
        )
    return found


@contextmanager
def _without_loops() -> Iterator[None]:
    """Where torch cannot map an operation over an axis, it would loop: here it refuses, with a RuntimeError."""
    functorch: Any = torch._C._functorch
    was = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(was)


def own_part(model: Model) -> str | None:
    """What of a model may do more than its tensors show, in words: it has to be called every time."""
    own = [cls for entry in model.graph.entries() for cls in _own_classes(entry) if not cls.pure]
    if own:
        return f"{own[0].__name__} is a part of your own, which may do more than its tensors show (pure = True in its class says that it does not)"
    return added(model)


def added(model: Model) -> str | None:
    """What a model does that its declaration does not say, in words."""
    for entry in model.graph.entries():
        for name, module in model.factors[entry.id].named_modules() if not _own_classes(entry) else ():
            if not _ours(type(module)) and (not type(module).__module__.startswith("torch.nn.modules.") or list(module.buffers(recurse=False))):
                return f"{name} of {entry.id} is a {type(module).__name__} of your own, which may do more than its tensors show"
    for name, module in model.named_modules():
        if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
            return f"{name} has a hook, which wants to be called"
        if hasattr(module, "parametrizations"):
            return f"{name} has a parametrization, which wants to be called"
    hooked = next((name for name, parameter in model.named_parameters() if parameter._backward_hooks), None)
    return None if hooked is None else f"{hooked} has a hook, which wants to be called"


def _own_classes(entry: Entry) -> list[Any]:
    """The classes of a declaration's entry that are not the library's."""
    return [type(part) for part in (entry.spec, getattr(entry.spec, "net", None)) if part is not None and not _ours(type(part))]


def _ours(cls: type) -> bool:
    return cls.__module__.startswith("aevb.")


def shapes(inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """What a recording is made for."""
    return tuple((name, value.shape, value.stride()) for name, value in inputs.items())


def _trim(graph: fx.GraphModule) -> fx.GraphModule:
    """Without the operations that change nothing: detaching, factors and powers of 1, sums of one term, views of views or of what has their shape."""
    reshaping = (aten.view.default, aten._unsafe_view.default)
    changed = {memory_of(argument) for node in graph.graph.nodes for argument in written(node.target, node.args, node.kwargs)}
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not node.all_input_nodes:
            continue
        if node.target in reshaping:
            while node.args[0].target in reshaping:
                node.update_arg(0, node.args[0].args[0])
        source = node.all_input_nodes[0]
        same = node.target in SAME
        if node.target in (*reshaping, aten.expand.default):
            same = _form(source) == _form(node)
        elif _copies(node) and _form(source) == _form(node):
            root = memory_of(source)
            given_away = root.op in ("placeholder", "get_attr") and any(user.op == "output" for user in node.users)
            same = not given_away and changed.isdisjoint((root, node))
        if same:
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _as_they_come(graph: fx.GraphModule, count: int) -> None:
    """The last ``count`` results, the gradients, in the precision in which they were computed: what reads them next widens them on the way."""
    output = next(node for node in graph.graph.nodes if node.op == "output")
    results = list(output.args[0])  # type: ignore[arg-type]
    for i in range(len(results) - count, len(results)):
        node: Any = results[i]
        if node is not None and node.target is aten._to_copy.default and node.args[0].meta["val"].dtype == torch.bfloat16:
            results[i] = node.args[0]
    output.args = (tuple(results),)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _copies(node: fx.Node) -> bool:
    """Whether all that it computes is what was there, where it has the form of that."""
    if node.target in (aten.mul.Scalar, aten.pow.Tensor_Scalar):
        return bool(node.args[1] == 1)
    if node.target is aten.cat.default:
        return len(node.all_input_nodes) == 1 == len(node.args[0])  # type: ignore[arg-type]
    return node.target is aten.sum.dim_IntList and len(node.args) == 3  # over axes that stay, of size one then; but −0.0 stays −0.0


def _form(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return (node,) if value is None else (value.shape, value.stride(), value.dtype)
