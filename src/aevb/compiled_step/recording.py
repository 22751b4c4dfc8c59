"""Record the operations of a step once, and replay them without the Python code that chose them.

An estimate is a pure function of parameters, batch and noise, and every step of a run executes the
same operations. The operations of one step, including its gradients, are therefore recorded as a
graph and replayed. The results are the same bit for bit. With ``streams``, for a CUDA graph, the
operations are also rewritten; with ``fuse``, torch compiles those between matrix products. The
results then differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from aevb.compiled_step.cuda_streams import ConcurrentRun, CudaStreams
from aevb.compiled_step.fusing import fused
from aevb.compiled_step.gradients import elementary
from aevb.compiled_step.rewriting import UnchangeableError, elemental, rewritten
from aevb.compiled_step.tracing import memory_of, traced, written
from aevb.runtime import private_torch

aten = torch.ops.aten
# Operations that return their argument.
SAME = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
Inputs = Mapping[Any, Tensor]  # of a step, besides the parameters; the caller chooses the keys
Function = Callable[[Inputs], tuple[Tensor, Tensor]]  # from inputs to objective and metrics
Found = tuple[Tensor, Tensor, list[Tensor | None]]  # objective, metrics, gradients of −objective


class _With(nn.Module):
    """A function as a module, so that ``functional_call`` can replace its parameters."""

    def __init__(self, module: nn.Module, function: Function) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return self.function(inputs)


class CompiledStep:
    """A compiled step.

    It maps inputs to the objective, the metrics and the gradients of the active parameters.

    ``remarks`` lists the optimisations that failed, and why; the step then runs without them.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        parameters: Sequence[Tensor],
        inputs: Inputs,
        streams: CudaStreams | None,
        remarks: list[str],
    ) -> None:
        self.parameters, self.shapes, self.remarks = list(parameters), shapes(inputs), remarks
        self._concurrent = None if streams is None else ConcurrentRun(graph, streams)
        self.run: Callable[..., Any] = graph if self._concurrent is None else self._concurrent.run
        self.active: list[Tensor] = []
        self.order: list[int] = []  # index of each active parameter's gradient among the results

    def read_from(self, parameters: Iterable[Tensor]) -> None:
        """Read the parameters from other tensors of the same shapes from now on."""
        self.parameters = list(parameters)

    def write_into(self, places: Mapping[Any, Tensor]) -> None:
        """Write gradients directly into these tensors, if computed last on their CUDA stream."""
        if self._concurrent is not None:
            outputs = self._concurrent.outputs[len(self._concurrent.outputs) - len(self.order) :]
            self._concurrent.into = {
                outputs[i]: places[parameter]
                for i, parameter in zip(self.order, self.active, strict=True)
            }

    def fits(self, inputs: Inputs) -> bool:
        """Whether the step was compiled for inputs with these keys, shapes and strides."""
        return self.shapes == shapes(inputs)

    def __call__(self, inputs: Inputs) -> Found:
        with torch.no_grad():
            objective, measured, *gradients = self.run(*self.parameters, *inputs.values())
        return objective, measured, [gradients[i] for i in self.order]


def compile_step(
    function: Function,
    module: nn.Module,
    inputs: Inputs,
    active: Sequence[Tensor],
    *,
    fuse: bool = False,
    streams: CudaStreams | None = None,
    copies: Sequence[Tensor] | None = None,
) -> CompiledStep:
    """Compile a step: record ``function`` and its gradients, then rewrite and fuse the operations.

    Arguments:
        function: Maps the inputs to the objective and the metrics, and reads the module's
        parameters. module: The module whose parameters ``function`` reads. inputs: Example inputs.
        The compiled step accepts inputs with the same shapes and strides. active: The parameters to
        differentiate with respect to. fuse: Compile the operations between matrix products.
        streams: Additional CUDA streams that a step on a GPU may use. copies: The stacked
        parameters of several modules of one kind. They have a leading axis of
            modules, and so have the inputs. The result is then one step of all modules at once.

    A step that cannot be rewritten or fused is replayed as recorded, and its ``remarks`` give the
    reason. A RuntimeError says that the function cannot be recorded at all, for example because it
    reads the value of a tensor.
    """
    named = dict(module.named_parameters())
    wanted = {id(parameter) for parameter in active}
    whole = _With(module, function)

    def flat(*tensors: Tensor) -> tuple[Tensor | None, ...]:
        parameters = {name: tensor.detach() for name, tensor in zip(named, tensors, strict=False)}
        sources = [
            parameters[name].requires_grad_()
            for name, parameter in named.items()
            if id(parameter) in wanted
        ]
        data = dict(zip(inputs, tensors[len(named) :], strict=True))
        objective, measured = torch.func.functional_call(
            whole, {f"module.{name}": tensor for name, tensor in parameters.items()}, (data,)
        )
        return objective.detach(), measured, *gradients_of(objective, sources)

    parameters, given = list(named.values()), list(inputs.values())
    with elementary() if fuse else nullcontext():
        graph = _trim(
            traced(
                flat,
                *parameters,
                *(given if copies is None else [value[0] for value in given]),
                fold=not fuse,
            )
        )
        if copies is not None:
            parameters = list(copies)  # type: ignore[arg-type]
            with torch.no_grad(), private_torch.vmap_without_loops():
                graph = _trim(traced(torch.vmap(elemental(graph, len(named))), *copies, *given))
    if fuse and streams is None:
        _as_they_come(graph, len(active))
    remarks: list[str] = []
    try:
        if fuse or streams is not None:
            graph = rewritten(graph, len(named), defer=streams is not None, values=not fuse)
        if fuse:
            graph = fused(graph, remarks, on_gpu=streams is not None)
    except UnchangeableError as reason:
        remarks.append(f"the operations of a step run as recorded, without optimisation: {reason}")
    # A failed optimisation must not stop a run. The graph may be half rewritten, so record it
    # again.
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        step = compile_step(function, module, inputs, active, copies=copies)
        step.remarks.append(
            f"the operations of a step run as recorded, without optimisation ({cause})"
        )
        return step
    _with_workspaces(graph)
    step = CompiledStep(graph, parameters, inputs, streams, remarks)
    places = {
        id(parameter): i
        for i, parameter in enumerate(
            parameter for parameter in named.values() if id(parameter) in wanted
        )
    }
    step.active, step.order = list(active), [places[id(parameter)] for parameter in active]
    return step


def _with_workspaces(graph: fx.GraphModule) -> None:
    """Let oneDNN's LSTM keep what its gradient needs, although a replay asks for no gradients."""
    layers = [node for node in graph.graph.nodes if node.target is aten.mkldnn_rnn_layer.default]
    for node in layers:
        node.target = _lstm_layer
    if layers:
        graph.recompile()


def _lstm_layer(*arguments: Any) -> Any:
    detached = (one.detach() if isinstance(one, Tensor) else one for one in arguments)
    with torch.enable_grad():
        return aten.mkldnn_rnn_layer.default(*detached)


def gradients_of(objective: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of −objective; a ValueError if it depends on none of the parameters."""
    found: list[Tensor | None] = []
    if objective.requires_grad:
        found += torch.autograd.grad(-objective, parameters, allow_unused=True)
    if all(gradient is None for gradient in found):
        raise ValueError(
            "The objective depends on no parameter that this phase may train: those that it uses "
            "are frozen, or their variable is known from the data. Unfreeze some parameters, use "
            "another schedule, or leave labels out."
        )
    return found


def shapes(inputs: Inputs) -> tuple[Any, ...]:
    """Return the keys, shapes and strides that a recording is valid for."""
    return tuple((key, value.shape, value.stride()) for key, value in inputs.items())


def _trim(graph: fx.GraphModule) -> fx.GraphModule:
    """Remove operations without effect.

    These are detach, factors and powers of 1, sums of one term, and redundant views.
    """
    reshaping = (aten.view.default, private_torch.UNSAFE_VIEW)
    changed = {
        memory_of(argument)
        for node in graph.graph.nodes
        for argument in written(node.target, node.args, node.kwargs)
    }
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
            given_away = root.op in ("placeholder", "get_attr") and any(
                user.op == "output" for user in node.users
            )
            same = not given_away and changed.isdisjoint((root, node))
        if same:
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _as_they_come(graph: fx.GraphModule, count: int) -> None:
    """Let the graph return gradients, its last ``count`` results, in bfloat16 if computed so.

    Compiled code converts them.
    """
    output = next(node for node in graph.graph.nodes if node.op == "output")
    results = list(output.args[0])
    for i in range(len(results) - count, len(results)):
        node: Any = results[i]
        if (
            node is not None
            and node.target is private_torch.TO_COPY
            and node.args[0].meta["val"].dtype == torch.bfloat16
        ):
            results[i] = node.args[0]
    output.args = (tuple(results),)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _copies(node: fx.Node) -> bool:
    """Whether an operation returns a copy of its argument, provided that the shapes are equal."""
    if node.target in (aten.mul.Scalar, aten.pow.Tensor_Scalar):
        return bool(node.args[1] == 1)
    if node.target is aten.cat.default:
        return len(node.all_input_nodes) == 1 == len(node.args[0])  # type: ignore[arg-type]
    # With keepdim and equal shapes, this is a sum over axes of size one.
    return node.target is aten.sum.dim_IntList and len(node.args) == 3


def _form(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return (node,) if value is None else (value.shape, value.stride(), value.dtype)
