"""The operations that a function of tensors carries out, as a graph, gradients included where it takes them.

As torch's own tracer does it, but of what a step is: operations on tensors in one order, whatever their values. So it need not watch over Python,
symbolic sizes or values that are not computed, and the tracing of a sequence takes a fraction of the time.
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
UNSAFE = (private_torch.UNSAFE_VIEW, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)  # views that torch does not call so
VALUE_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
FIXED = {aten.ones_like, aten.zeros_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros, aten.ones, aten.full,
         aten.scalar_tensor, aten.lift_fresh}  # fmt: skip  # the same every time, whatever the values of what they are given


def traced(function: Callable[..., Any], *tensors: Tensor, fold: bool = False) -> fx.GraphModule:
    """What ``function`` does with these tensors, as a function of them. It is called once; other tensors that it uses become constants, and with
    ``fold`` so does what is computed, one tensor at a time, of constants that it makes itself.

    All that it does has to be operations on tensors: what leaves them (``tolist``, ``numpy``, ``.data``), or is no operation (``nn.Parameter``), is
    not seen, and stays what it was.
    """
    tensors = tuple(tensor.detach() if any(tensor is other for other in tensors[:i]) else tensor for i, tensor in enumerate(tensors))  # each its own
    if private_torch.DispatchMode is None:
        raise RuntimeError("this torch has no mode that sees every operation")
    with _Tracer(tensors, fold) as tracer:
        results = function(*tensors)
    tracer.finish(results)
    return fx.GraphModule(tracer.constants, tracer.graph)


class _Tracer(private_torch.DispatchMode or object):  # type: ignore[misc]
    """Lets every operation happen, and writes it down, in order. A tensor's node is what made it, or what last wrote into it under its own name;
    what is written through a view is seen because the graph runs in the same order."""

    def __init__(self, tensors: Sequence[Tensor], fold: bool) -> None:
        super().__init__()
        self.graph, self.constants = fx.Graph(), dict[str, Tensor]()
        self.nodes: Any = WeakTensorKeyDictionary()
        self.folds = fold
        self.same: dict[Node, Tensor] = {}  # what is the same every time, and what it is
        self.places: dict[int, list[Node]] = defaultdict(list)  # those, by where they lie in memory
        for i, tensor in enumerate(tensors):
            self._made(self.graph.placeholder(f"x{i}"), tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads its compiler, to keep it away from here

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(tag in operation.tags for tag in VALUE_DEPENDENT) and not _by_numbers(operation, args):
            raise RuntimeError(f"{operation} asks for the value of a tensor, which differs from step to step.")
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
            raise RuntimeError(f"{operation} gives a {type(result).__name__}, which may differ from step to step.")
        return result

    def _made(self, node: Node, tensor: Tensor) -> None:
        node.meta["val"] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self.nodes[tensor] = node

    def named(self, values: Any) -> Any:
        """The nodes in the place of the tensors."""
        return fx.node.map_aggregate(values, lambda value: self._node(value) if isinstance(value, Tensor) else value)

    def _node(self, tensor: Tensor) -> Node:
        return self.nodes[tensor] if tensor in self.nodes else self._constant(tensor)

    def _constant(self, tensor: Tensor) -> Node:
        name = f"constant{len(self.constants)}"
        self.constants[name] = tensor.detach()
        node = self.graph.create_node("get_attr", name)
        self._made(node, tensor)
        return node

    def _keep(self, written: Node) -> None:
        """What writes into a constant, or a part of it, writes into a copy, made anew every time."""
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
        return operation.overloadpacket in FIXED or (bool(sources) and all(source in self.same for source in sources))

    def finish(self, results: Any) -> None:
        """Name the results. What is the same every time is not computed again; whoever gets a constant may write into it, and gets a copy."""
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
    """The node that made the memory in which this one lies: itself, or what it is a view of, or writes into."""
    while node.op == "call_function" and node.all_input_nodes and is_view(node):
        into = written(node.target, node.args, node.kwargs)
        node = into[0] if into else node.all_input_nodes[0]
    return node


def is_view(node: Node) -> bool:
    """Whether its result lies in the memory of an argument."""
    if node.target is getitem or node.target in UNSAFE:
        return True
    return any(returned.alias_info is not None for returned in node.target._schema.returns)


def _by_numbers(operation: Any, args: Sequence[Any]) -> bool:
    """Whether it takes elements by their numbers, not by a mask: then their number is known."""
    return operation is aten.index.Tensor and all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])


def written(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Which of its arguments an operation writes into."""
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    found = [named[argument.name] for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]
    return [value for one in found for value in (one if isinstance(one, list | tuple) else [one])]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
