"""Compile the operations between the matrix products of a recorded step into a few kernels.

Matrix products stay with the libraries made for them. The other operations are grouped by *level*:
the number of products that must come before them. The operations of one level form a cluster, which
torch's compiler compiles as one function. The time steps of a sequence need the same functions
again and again; each function is compiled once, so a loop over 28 steps compiles as fast as one
over six.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from heapq import heapify, heappop, heappush
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from aevb.compiled_step.array_bounds import corrected, stays_inside
from aevb.compiled_step.rewriting import CONCURRENT, DEFERRED, LINEAR, PRODUCTS, VIEWS, Node, call
from aevb.runtime import private_torch

aten = torch.ops.aten
EXTERN = {
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten.convolution,
    aten.convolution_backward,
    # Recurrences as one operation.
    aten.mkldnn_rnn_layer,
    aten.mkldnn_rnn_layer_backward,
    aten._cudnn_rnn,
    aten._cudnn_rnn_backward,
    *(
        private.overloadpacket
        for private in (private_torch.ADDMM_ACTIVATION, LINEAR)
        if private is not private_torch.NOTHING
    ),
}
PARTS = (
    *VIEWS,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.select.int,
    aten.transpose.int,
    aten.permute.default,
    getitem,
)
# Operations that cut a tensor, with the position of their axis argument.
CUTS = {
    aten.slice.Tensor: 1,
    aten.select.int: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
}
OPTIONS: dict[str, Any] = {
    # These limits make the compiler recompute a value rather than store it.
    "realize_reads_threshold": 32, "realize_opcount_threshold": 256,
    "size_asserts": False,  # the sizes in a recorded step never change
}  # fmt: skip
ON_GPU = {"unroll_reductions_threshold": 33}  # unroll sums over a few classes
# A product becomes a fused sum if it has at most NARROW terms, or at most 2 · NARROW columns and
# SMALL rows. Batched products on a GPU use WIDER for both, because their routines are slow for
# narrow matrices.
NARROW, SMALL = 4, 512
WIDER = 16


def fused(
    graph: fx.GraphModule, remarks: list[str] | None = None, *, on_gpu: bool = False
) -> fx.GraphModule:
    """Return the step with each cluster replaced by one call of a compiled function.

    ``remarks`` receives what could not be compiled, and why.
    """
    _spread(graph.graph, on_gpu)
    levels: dict[Node, int] = {}
    clustered: set[Node] = set()
    for node in graph.graph.nodes:
        level = max((levels[source] for source in node.all_input_nodes), default=0)
        levels[node] = level + _product(node)
        free = node.op == "call_function" and DEFERRED not in node.meta and levels[node] == level
        if free and (node.target not in PARTS or node.args[0] in clustered):
            clustered.add(node)
    return _Assembly(
        graph, levels, clustered, _cheap(graph.graph, clustered), [] if remarks is None else remarks
    ).graph


def _product(node: Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in EXTERN


def _cheap(graph: fx.Graph, clustered: set[Node]) -> set[Node]:
    """Return the values that each cluster recomputes instead of storing.

    They are views, and elementwise functions of the inputs.
    """
    given: set[Node] = set()
    found: list[Node] = []
    for node in graph.nodes:
        inside = all(source in given for source in node.all_input_nodes)
        if node.op in ("placeholder", "get_attr") or (inside and node.target in PARTS):
            given.add(node)
            found += [node] if node in clustered and _same_view(node) else []
        elif (
            inside
            and node in clustered
            and (not node.all_input_nodes or torch.Tag.pointwise in node.target.tags)
        ):
            given.add(node)
            found.append(node)
    free = {node for node in found if clustered.issuperset(node.users)}
    for node in reversed(graph.nodes):
        parts = [user for user in node.users if user.target is getitem]
        readers = {
            reader for user in node.users for reader in (user.users if user in parts else [user])
        }
        joined = all(reader in clustered or reader in free for reader in readers)
        if (
            readers
            and joined
            and _same_view(node)
            and node not in clustered
            and DEFERRED not in node.meta
        ):
            free |= {node, *parts}
    return free


def _same_view(node: Node) -> bool:
    """Return whether a node is a view that is the same at every time step.

    Slices along other axes than the last differ from step to step.
    """
    if node.target not in PARTS or node.target is getitem:
        return False
    place = CUTS.get(node.target)
    axis = -1 if place is None else node.args[place] if len(node.args) > place else 0
    return axis in (-1, node.args[0].meta["val"].dim() - 1)


def _spread(graph: fx.Graph, on_gpu: bool) -> None:
    """Replace narrow matrix products by sums, which fuse with the operations around them."""
    for node in list(graph.nodes):
        several = on_gpu and node.target is aten.bmm.default
        if not (several or node.target in PRODUCTS) or node.kwargs or DEFERRED in node.meta:
            continue
        few_terms, few_columns = (WIDER, WIDER) if several else (NARROW, 2 * NARROW)
        bias, (a, b) = node.args[0] if node.target is aten.addmm.default else None, node.args[-2:]
        (*_, rows, terms), columns = a.meta["val"].shape, b.meta["val"].shape[-1]
        with graph.inserting_before(node):
            if 0 < terms <= few_terms:
                total = _outer(graph, a, b, terms)
            elif columns <= few_columns and rows <= SMALL and a.meta["val"].dtype == torch.float32:
                turned = call(graph, aten.transpose.int, b, -2, -1)
                pairs = (
                    call(graph, aten.unsqueeze.default, a, -2),
                    call(graph, aten.unsqueeze.default, turned, -3),
                )
                total = call(
                    graph, aten.sum.dim_IntList, call(graph, aten.mul.Tensor, *pairs), [-1]
                )
            else:
                continue
            total = total if bias is None else call(graph, aten.add.Tensor, total, bias)
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def _outer(graph: fx.Graph, a: Node, b: Node, terms: int) -> Node:
    total = None
    for k in range(terms):
        term = call(
            graph,
            aten.mul.Tensor,
            call(graph, aten.slice.Tensor, a, -1, k, k + 1),
            call(graph, aten.slice.Tensor, b, -2, k, k + 1),
        )
        total = term if total is None else call(graph, aten.add.Tensor, total, term)
    return total


class _Assembly:
    """Assembly of the new graph from units (clusters and single nodes).

    The units are in topological order by level.
    """

    def __init__(
        self,
        old: fx.GraphModule,
        levels: Mapping[Node, int],
        clustered: set[Node],
        cheap: set[Node],
        remarks: list[str],
    ) -> None:
        self.remarks = remarks
        self.places, self.cheap = {node: i for i, node in enumerate(old.graph.nodes)}, cheap
        self.new = fx.Graph()
        self.known: dict[Node, Node] = {}
        self.functions: dict[
            Any, tuple[fx.GraphModule, dict[Any, Any]]
        ] = {}  # each with its cache of compiled versions
        members: dict[Any, list[Node]] = defaultdict(list)
        for node in old.graph.nodes:
            if node not in cheap:
                members[levels[node] if node in clustered else node].append(node)
        unit = {node: key for key, nodes in members.items() for node in nodes}
        needs = {
            key: {unit[source] for source in self._inputs(nodes)} for key, nodes in members.items()
        }
        users: dict[Any, list[Any]] = defaultdict(list)
        for key, sources in needs.items():
            for source in sources:
                users[source].append(key)
        products: dict[int, list[Node]] = defaultdict(list)
        for node in old.graph.nodes:
            if node in members and _product(node) and DEFERRED not in node.meta:
                products[levels[node]].append(node)
        chain = {node for group in products.values() for node in group}
        ranks = {
            key: (
                nodes[0].op == "output",
                levels[nodes[0]],
                key not in chain,
                self.places[nodes[0]],
            )
            for key, nodes in members.items()
        }
        ready = [(ranks[key], key) for key, sources in needs.items() if not sources]
        heapify(ready)
        while ready:
            _, key = heappop(ready)
            self._emit(members[key], isinstance(key, int))
            for user in users[key]:
                needs[user].discard(key)
                if not needs[user]:
                    heappush(ready, (ranks[user], user))
        for level, group in products.items():  # products of one level are independent
            for node in group if len(group) > 1 else ():
                self.known[node].meta[CONCURRENT] = level, node is not group[-1]
        constants = {
            node.target: getattr(old, node.target)
            for node in old.graph.nodes
            if node.op == "get_attr"
        }
        self.graph = fx.GraphModule(constants, self.new)

    def _whole(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes of a unit, and the recomputed nodes that they need."""
        found, waiting = set(nodes), list(nodes)
        while waiting:
            more = [
                source
                for source in waiting.pop().all_input_nodes
                if source in self.cheap and source not in found
            ]
            found.update(more)
            waiting += more
        return sorted(found, key=self.places.__getitem__)

    def _inputs(self, nodes: Sequence[Node]) -> list[Node]:
        whole = self._whole(nodes)
        return list(
            dict.fromkeys(
                source
                for node in whole
                for source in node.all_input_nodes
                if source not in set(whole)
            )
        )

    def _emit(self, nodes: Sequence[Node], cluster: bool) -> None:
        first = nodes[0]
        if not cluster and not (DEFERRED in first.meta and first.target is aten.sum.dim_IntList):
            self.known[first] = self.new.node_copy(first, self.known.__getitem__)
            return
        inputs, whole = self._inputs(nodes), self._whole(nodes)
        outputs = [node for node in nodes if any(user not in set(nodes) for user in node.users)]
        names = {node: i for i, node in enumerate([*inputs, *whole])}
        lines = [
            (
                str(node.target),
                str(fx.map_arg((node.args, node.kwargs), lambda argument: _Name(names[argument]))),
            )
            for node in whole
        ]
        key = (
            tuple(lines),
            tuple(_form(node.meta["val"]) for node in inputs),
            tuple(names[node] for node in outputs),
        )
        if key not in self.functions:
            self.functions[key] = _function(inputs, whole, outputs), {}
        call = self.new.call_function(
            Compiled(*self.functions[key], self.remarks), tuple(self.known[node] for node in inputs)
        )
        self.known |= {
            node: self.new.call_function(getitem, (call, i)) for i, node in enumerate(outputs)
        }
        for node in (
            [call, *(self.known[output] for output in outputs)] if DEFERRED in first.meta else ()
        ):
            node.meta[DEFERRED] = first.meta[DEFERRED]


def _function(
    inputs: Sequence[Node], nodes: Sequence[Node], outputs: Sequence[Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    known = {node: graph.placeholder(f"x{i}") for i, node in enumerate(inputs)}
    for node in nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(tuple(known[node] for node in outputs))
    return fx.GraphModule({}, graph)


class Compiled:
    """A call of a function that is compiled for the memory layout of its arguments.

    Calls of the same function share the compiled versions. It calls torch's Inductor directly,
    without Dynamo, whose guards cost time at every call.
    """

    def __init__(self, function: fx.GraphModule, known: dict[Any, Any], remarks: list[str]) -> None:
        self.function, self.known, self.remarks = function, known, remarks
        self.run: Any = None
        self.__name__ = "compiled"  # fx requires a name of functions that a graph calls

    def __call__(self, *arguments: Tensor) -> Any:
        if self.run is None:
            form = tuple((value.stride(), value.data_ptr() % 16 == 0) for value in arguments)
            if form not in self.known:
                self.known[form] = or_plain(_compiled, self.function, arguments, self.remarks)
            self.run = self.known[form]
        return self.run(list(arguments))


Code = Callable[[list[Tensor]], Sequence[Tensor]]


def or_plain(
    compile: Callable[[Any, Sequence[Tensor]], Code],
    function: Any,
    arguments: Sequence[Tensor],
    remarks: list[str],
) -> Code:
    """Return the compiled function.

    If torch cannot compile it, return the function itself, and add a remark.
    """
    try:
        return compile(function, arguments)
    except (
        Exception
    ) as error:  # a compiler may raise anything, and a failed optimisation must not stop a run
        cause = str(error).partition("\n")[0] or type(error).__name__
        remark = (
            f"torch could not compile a part of the step ({cause}), which therefore runs uncompiled"
        )
        if isinstance(error, RuntimeError | OSError):
            # torch's compiler raises these errors, also if there is no C++ compiler.
            remark += (
                ". On a CPU, torch needs a C++ compiler (g++, or the one named by CXX); on a GPU, "
                "it needs Triton and a C compiler"
            )
        if remark not in remarks:
            remarks.append(remark)
        return lambda inputs: function(*inputs)


def _compiled(function: fx.GraphModule, arguments: Sequence[Tensor]) -> Code:
    """Compile a function with torch.

    Return the bare code if it gives the same tensors as torch's wrapper.
    """
    wrapped, code = _both(function, arguments)
    expected = wrapped(*arguments)
    results: Any = function.graph.output_node().args[0]
    places = [
        value.data_ptr()
        for value, node in zip(expected, results, strict=True)
        if node.target not in PARTS and value.numel()
    ]
    if len(set(places)) < len(places):
        # Two results share memory, but later operations may write into each of them.
        return lambda inputs: [value.clone() for value in wrapped(*inputs)]
    if code is not None and _same(code(list(arguments)), expected):
        return code
    return lambda inputs: wrapped(*inputs)


def compiled(function: Callable[..., Sequence[Tensor]], arguments: Sequence[Tensor]) -> Code:
    """Compile a function that writes into its arguments, for arguments with this memory layout.

    The given arguments themselves stay unchanged.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    wrapped, code = _both(make_fx(function, tracing_mode="fake")(*arguments), arguments)
    if code is not None:
        these, those = ([_copy(argument) for argument in arguments] for _ in range(2))
        if _same([*code(list(these)), *these], [*wrapped(*those), *those]):
            return code
    return lambda inputs: wrapped(*inputs)


def _both(
    function: fx.GraphModule, arguments: Sequence[Tensor]
) -> tuple[Callable[..., Sequence[Tensor]], Any]:
    """Compile a function; return it with torch's wrapper, and the bare code (None if none).

    Return the function itself if the compiled code writes past the end of an array.
    """
    inductor, made = private_torch.inductor(), list[Any]()

    def inner(*given: Any, **choices: Any) -> Any:
        made.append(inductor.compile_fx_inner(*given, **choices))
        return made[-1]

    on_gpu = any(argument.is_cuda for argument in arguments)
    options = OPTIONS | (ON_GPU if on_gpu else {})
    # torch's cache of compiled code needs a ShapeEnv.
    mode = inductor.FakeTensorMode(shape_env=inductor.ShapeEnv())
    with (
        inductor.tracing(inductor.TracingContext(mode)),
        inductor.config.patch(enable_autograd_cache=False),  # this cache would hide the bare code
        nullcontext() if on_gpu else corrected(),
    ):
        fixed = [mode.from_tensor(argument, static_shapes=True) for argument in arguments]
        wrapped: Any = inductor.compile_fx(
            function, fixed, inner_compile=inner, config_patches=options
        )
    code = getattr(made[0], "current_callable", None) if len(made) == 1 else None
    if made and not on_gpu and code is None and private_torch.cpp_kernels() is None:
        raise RuntimeError(
            "its code can neither be corrected nor be checked for writes past the end of an array"
        )
    if code is not None and not on_gpu and not stays_inside(code, arguments):
        return function, None
    return wrapped, code


def _copy(value: Tensor) -> Tensor:
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=value.device
    ).copy_(value)


def _same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(_equal, found, expected))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have equal values, shapes, strides and dtypes; NaN equals NaN."""
    if (a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype):
        return False
    return torch.equal(a, b) or (
        a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    )


class _Name(int):
    def __repr__(self) -> str:
        return f"%{int(self)}"


def _form(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.dtype
