"""The operations that a function of tensors carries out, as a graph, gradients included where it takes them.

As torch's own tracer does it, but of what a step is: operations on tensors in one order, whatever their values. So it need not watch over Python,
symbolic sizes or values that are not computed, and the tracing of a sequence takes a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten
Node = Any  # an fx.Node: its arguments may be anything


def traced(function: Callable[..., Any], *tensors: Tensor) -> fx.GraphModule:
    """What ``function`` does with these tensors, as a function of them. It is called once; other tensors that it uses become constants."""
    with _Tracer(tensors) as tracer:
        results = function(*tensors)
    tracer.graph.output(tracer.named(results))
    return fx.GraphModule(tracer.constants, tracer.graph)


class _Tracer(TorchDispatchMode):
    """Lets every operation happen, and writes it down. A tensor's node is what last made it, or last wrote into it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.constants = fx.Graph(), dict[str, Tensor]()
        self.nodes: Any = WeakTensorKeyDictionary()
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
        result = operation(*args, **kwargs)
        node = self.graph.call_function(operation, *given)
        if isinstance(result, Tensor):
            self._made(node, result)
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
