"""The operations that a function of tensors carries out, as a graph, gradients included where it takes them.

As torch's own tracer does it, but of what a step is: operations on tensors in one order, whatever their values. So it need not watch over Python,
symbolic sizes or values that are not computed, and the tracing of a sequence takes a fraction of the time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten
Node = Any  # an fx.Node: its arguments may be anything
FIXED = {aten.ones_like, aten.zeros_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros, aten.ones, aten.full,
         aten.scalar_tensor, aten.lift_fresh}  # fmt: skip  # the same every time, whatever the values of what they are given


def traced(function: Callable[..., Any], *tensors: Tensor, fold: bool = False) -> fx.GraphModule:
    """What ``function`` does with these tensors, as a function of them. It is called once; other tensors that it uses become constants.

    With ``fold`` so does what is computed of constants that it makes itself.
    """
    with _Tracer(tensors) as tracer:
        results = function(*tensors)
    tracer.graph.output(tracer.named(results))
    if fold:
        tracer.fold()
    return fx.GraphModule(tracer.constants, tracer.graph)


class _Tracer(TorchDispatchMode):
    """Lets every operation happen, and writes it down. A tensor's node is what last made it, or last wrote into it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.constants = fx.Graph(), dict[str, Tensor]()
        self.nodes: Any = WeakTensorKeyDictionary()
        self.same: dict[Node, Tensor] = {}  # what is the same every time, and what it is
        self.places: dict[int, list[Node]] = defaultdict(list)  # those, by where they lie in memory
        for i, tensor in enumerate(tensors):
            self._made(self.graph.placeholder(f"x{i}"), tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads its compiler, to keep it away from here

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in operation.tags:
            raise RuntimeError(f"{operation} asks for the value of a tensor, which differs from step to step.")
        given = self.named(args), self.named(kwargs)
        if operation._schema.is_mutable:
            self._keep(given[0][0])
            given = self.named(args), self.named(kwargs)
            for written in self.places.pop(_place(args[0]), ()):
                del self.same[written]
        result = operation(*args, **kwargs)
        node = self.graph.call_function(operation, *given)
        if isinstance(result, Tensor):
            self._made(node, result)
            if self._same_every_time(node):
                self.same[node] = result
                self.places[_place(result)].append(node)
        else:
            for i, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._made(self.graph.call_function(getitem, (node, i)), part)
        return result

    def _made(self, node: Node, tensor: Tensor) -> None:
        node.meta["val"] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self.nodes[tensor] = node

    def named(self, values: Any) -> Any:
        """The nodes in the place of the tensors."""
        return fx.node.map_aggregate(values, lambda value: self._node(value) if isinstance(value, Tensor) else value)

    def _node(self, tensor: Tensor) -> Node:
        if tensor not in self.nodes:
            name = f"constant{len(self.constants)}"
            self.constants[name] = tensor.detach()
            self._made(self.graph.create_node("get_attr", name), tensor)
        return self.nodes[tensor]

    def _keep(self, written: Node) -> None:
        """What writes into a constant, or a part of it, writes into a copy, made anew every time."""
        root = written
        while root.op == "call_function" and isinstance(root.args[0], fx.Node):
            root = root.args[0]
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

    def fold(self) -> None:
        """What is the same every time is not computed again. Whoever gets it as a result may write into it, and gets a copy."""
        for node, tensor in self.same.items():
            name = f"constant{len(self.constants)}"
            self.constants[name] = tensor.detach()
            with self.graph.inserting_before(node):
                constant = self.graph.create_node("get_attr", name)
                constant.meta = node.meta
                if any(user.op == "output" for user in node.users):
                    copy = self.graph.call_function(aten.clone.default, (constant,))
                    copy.meta = node.meta
                    node.replace_all_uses_with(copy, lambda user: user.op == "output")
            node.replace_all_uses_with(constant)
            self.graph.erase_node(node)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
