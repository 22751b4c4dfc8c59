"""Trace a function of tensors into an fx graph, including the gradients that it computes.

This is a simpler version of torch's ``make_fx`` for training steps: a fixed sequence of operations
that does not depend on the values of tensors. It needs no Python guards, symbolic sizes or fake
tensors, and traces a loop over time in a fraction of the time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from aevb.runtime import private_torch

aten = torch.ops.aten
Node = Any  # an fx.Node: its arguments may be anything
# Views whose schema does not say that they are views.
UNSAFE = (private_torch.UNSAFE_VIEW, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)
VALUE_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
# Operations whose result does not depend on the values of their arguments.
FIXED = {
    aten.ones_like,
    aten.zeros_like,
    aten.full_like,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.zeros,
    aten.ones,
    aten.full,
    aten.scalar_tensor,
    aten.lift_fresh,
}


def traced(function: Callable[..., Any], *tensors: Tensor, fold: bool = False) -> fx.GraphModule:
    """Return the operations of ``function`` on these tensors, as a graph. It is called once.

    Other tensors that it uses become constants. With ``fold``, values computed only from constants
    that it creates (``zeros``, ``full``, …) become constants as well.

    The function may consist only of operations on tensors. The tracer does not see conversions
    (``tolist``, ``numpy``, ``.data``) or new objects (``nn.Parameter``): the graph then replays the
    values of this call.
    """
    # Replace duplicates by new tensors.
    tensors = tuple(
        tensor.detach() if any(tensor is other for other in tensors[:i]) else tensor
        for i, tensor in enumerate(tensors)
    )
    if private_torch.DispatchMode is None:
        raise RuntimeError("this version of torch has no TorchDispatchMode")
    with _Tracer(tensors, fold) as tracer:
        results = function(*tensors)
    tracer.finish(results)
    return fx.GraphModule(tracer.constants, tracer.graph)


class _Tracer(private_torch.DispatchMode or object):  # type: ignore[misc]
    """Execute and record every operation in order.

    The node of a tensor is the operation that created it, or the last one that wrote into it
    directly. Writes through views need no extra treatment, because the graph replays operations in
    the same order.
    """

    def __init__(self, tensors: Sequence[Tensor], fold: bool) -> None:
        super().__init__()
        self.graph, self.constants = fx.Graph(), dict[str, Tensor]()
        self.nodes: Any = WeakTensorKeyDictionary()
        self.folds = fold
        self.same: dict[Node, Tensor] = {}  # nodes with a constant result, and that result
        self.places: dict[int, list[Node]] = defaultdict(list)  # these nodes by storage address
        for i, tensor in enumerate(tensors):
            self._made(self.graph.placeholder(f"x{i}"), tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default, True, makes torch import its compiler

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(tag in operation.tags for tag in VALUE_DEPENDENT) and not _by_numbers(
            operation, args
        ):
            raise RuntimeError(
                f"{operation} asks for the value of a tensor, which differs from step to step."
            )
        for tensor in written(operation, args, kwargs):
            self._keep(self._node(tensor))
            for node in self.places.pop(_place(tensor), ()):
                del self.same[node]
        given = self.named(args), self.named(kwargs)
        result = operation(*args, **kwargs)
        node = self.graph.call_function(operation, *given)
        if isinstance(result, Tensor):
            self._made(node, result)
            if self.folds and self._same_every_time(node):
                self.same[node] = result
                self.places[_place(result)].append(node)
        elif isinstance(result, list | tuple):
            for i, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._made(self.graph.call_function(getitem, (node, i)), part)
        elif result is not None:
            raise RuntimeError(
                f"{operation} returns a {type(result).__name__}, which may differ from step to "
                f"step."
            )
        return result

    def _made(self, node: Node, tensor: Tensor) -> None:
        node.meta["val"] = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        self.nodes[tensor] = node

    def named(self, values: Any) -> Any:
        """Return the values with every tensor replaced by its node."""
        return fx.node.map_aggregate(
            values, lambda value: self._node(value) if isinstance(value, Tensor) else value
        )

    def _node(self, tensor: Tensor) -> Node:
        return self.nodes[tensor] if tensor in self.nodes else self._constant(tensor)

    def _constant(self, tensor: Tensor) -> Node:
        name = f"constant{len(self.constants)}"
        self.constants[name] = tensor.detach()
        node = self.graph.create_node("get_attr", name)
        self._made(node, tensor)
        return node

    def _keep(self, written: Node) -> None:
        """Replace a constant that is written into by a copy, which every replay makes again."""
        root = memory_of(written)
        if root.op == "get_attr":
            self.constants[root.target] = self.constants[root.target].clone()
            with self.graph.inserting_after(root):
                copy = self.graph.call_function(aten.clone.default)
            root.replace_all_uses_with(copy)
            copy.args, copy.meta = (root,), dict(root.meta)
            for tensor, node in list(self.nodes.items()):
                if node is root:
                    self.nodes[tensor] = copy

    def _same_every_time(self, node: Node) -> bool:
        operation, sources = node.target, node.all_input_nodes
        if operation._schema.is_mutable or torch.Tag.nondeterministic_seeded in operation.tags:
            return False
        return operation.overloadpacket in FIXED or (
            bool(sources) and all(source in self.same for source in sources)
        )

    def finish(self, results: Any) -> None:
        """Set the outputs, and replace constant results by constants.

        An output that is a constant becomes a copy, because the caller may write into it.
        """
        for node, tensor in self.same.items():
            with self.graph.inserting_before(node):
                node.replace_all_uses_with(self._constant(tensor))
            self.graph.erase_node(node)
        self.graph.output(fx.node.map_arg(self.named(results), self._own))
        self.graph.eliminate_dead_code()
        used = {node.target for node in self.graph.nodes if node.op == "get_attr"}
        self.constants = {name: tensor for name, tensor in self.constants.items() if name in used}

    def _own(self, result: Node) -> Node:
        if memory_of(result).op != "get_attr":
            return result
        copy = self.graph.call_function(aten.clone.default, (result,))
        copy.meta = dict(result.meta)
        return copy


def memory_of(node: Node) -> Node:
    """Return the node that allocated this node's memory.

    It is the node itself, or the base of a view or in-place write.
    """
    while node.op == "call_function" and node.all_input_nodes and is_view(node):
        into = written(node.target, node.args, node.kwargs)
        node = into[0] if into else node.all_input_nodes[0]
    return node


def is_view(node: Node) -> bool:
    """Whether the node's result shares memory with an argument."""
    if node.target is getitem or node.target in UNSAFE:
        return True
    return any(returned.alias_info is not None for returned in node.target._schema.returns)


def _by_numbers(operation: Any, args: Sequence[Any]) -> bool:
    """Return whether the operation indexes by integers, not by a mask.

    The size of its result is then fixed.
    """
    return operation is aten.index.Tensor and all(
        index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1]
    )


def written(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes into."""
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(
        kwargs
    )
    found = [
        named[argument.name]
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [value for one in found for value in (one if isinstance(one, list | tuple) else [one])]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
