"""Rewrite a recorded step into fewer and larger operations.

On a GPU, the time of a small model, or of a loop over time, depends on the number of sequential
operations more than on their size. Three rewrites reduce it. Products of the same input become one
product with concatenated weights. A product and the ReLU after it become one operation. Operations
whose results are needed only at the end of the step, such as the gradients of weights, run on other
streams. The results differ from the recording's only by rounding.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from aevb.compiled_step.tracing import is_view, written
from aevb.runtime import private_torch

aten = torch.ops.aten
Node = Any  # an fx.Node: its arguments may be anything
LINEAR = private_torch.ONEDNN_LINEAR
PRODUCTS = (aten.mm.default, aten.addmm.default)
SHAPED = (aten.view.default, private_torch.UNSAFE_VIEW, aten.reshape.default)
# Views with the same elements in the same order.
RESHAPES = (*SHAPED, aten.unsqueeze.default, aten.squeeze.dim)
VIEWS = (*RESHAPES, aten.t.default, aten.slice.Tensor, aten.expand.default)
CAST = private_torch.TO_COPY
ENDS = (aten.mm.default, aten.bmm.default, aten.sum.dim_IntList, CAST)
DEFERRED = (
    "deferred"  # marks a node that runs on a branch stream; the value is the number of its group
)
# Marks independent products, with the pair (number of the group, whether it leaves the main
# stream).
CONCURRENT = "concurrent"
VALUES = 2  # results of a step before its gradients: the objective and the metrics
OFTEN = 4  # fewest uses of the same weights for which concatenating them pays
ALIGNED = 8  # alignment of matrix rows, in numbers, that fast routines need


class UnchangeableError(Exception):
    """A step cannot be rewritten, because the order of its operations matters."""


def rewritten(
    graph: fx.GraphModule, parameters: int, *, defer: bool = True, values: bool = False
) -> fx.GraphModule:
    """Return the rewritten step. The first ``parameters`` arguments of the graph are the weights.

    ``defer`` marks operations that are needed only at the end of the step. With ``values``, these
    include the operations that only the objective and the metrics need, not the gradients. That
    pays if every operation is a kernel of its own.
    """
    _join(graph, parameters)
    _activate(graph.graph)
    _reshape_once(graph.graph)
    graph.graph.eliminate_dead_code()
    for i, group in enumerate(_leaves(graph.graph, values) if defer else ()):
        for node in group:
            node.meta[DEFERRED] = i
    return _anew(graph)


def elemental(graph: fx.GraphModule, parameters: int) -> fx.GraphModule:
    """Return the step in operations that ``torch.vmap`` supports: none in place, none fused."""
    _join(graph, parameters)
    for node in _calls(graph.graph):
        if node.target is private_torch.ADDMM_ACTIVATION:
            with graph.graph.inserting_before(node):
                product = call(graph.graph, aten.addmm.default, *node.args)
                node.replace_all_uses_with(call(graph.graph, aten.relu.default, product))
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    return _anew(graph)


def _join(graph: fx.GraphModule, parameters: int) -> None:
    _without_side_effects(graph.graph)
    _share(graph.graph)
    weights, last = _hoist(graph.graph, parameters)
    _merge(graph.graph, weights, last)


def _anew(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph.

    After moving nodes, fx frees values too early, because it mistakes their last user.
    """
    copy = fx.Graph()
    known: dict[Node, Node] = {}
    result = copy.graph_copy(graph.graph, known)
    copy.output(result)
    for before, after in known.items():
        after.meta = before.meta
        if after.target in SHAPED:  # a slice of a wider product may not be viewable in this shape
            after.target = aten.reshape.default
    return fx.GraphModule(graph, copy)


def _calls(graph: fx.Graph) -> Iterator[Node]:
    return (node for node in list(graph.nodes) if node.op == "call_function")


def _without_side_effects(graph: fx.Graph) -> None:
    """Replace in-place operations by ordinary ones, if nothing else reads the overwritten value.

    Raise UnchangeableError for any other write, because rewriting changes the order of operations.
    """
    for node in _calls(graph):
        if (
            not isinstance(node.target, private_torch.Operation)
            or not node.target._schema.is_mutable
        ):
            continue
        packet, _, overload = node.target.__name__.partition(".")
        into = written(node.target, node.args, node.kwargs)
        alone = into == [node.args[0]] and into[0].op == "call_function" and len(into[0].users) == 1
        part = (
            alone and is_view(into[0]) and not written(into[0].target, into[0].args, into[0].kwargs)
        )
        if not alone or part or not hasattr(aten, packet[:-1]):
            raise UnchangeableError(
                f"{node.target} writes into a value that other operations may read"
            )
        node.target = getattr(getattr(aten, packet[:-1]), overload)


def _share(graph: fx.Graph) -> None:
    """Remove repeated views and concatenations, and double transposes."""
    known: dict[tuple[Any, ...], Node] = {}
    for node in _calls(graph):
        if node.target is aten.t.default and node.args[0].target is aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])
            graph.erase_node(node)
        elif node.target in (*VIEWS, aten.cat.default):
            key = node.target, *(tuple(arg) if isinstance(arg, list) else arg for arg in node.args)
            if key in known:
                node.replace_all_uses_with(known[key])
                graph.erase_node(node)
            else:
                known[key] = node


def _hoist(graph: fx.Graph, parameters: int) -> tuple[set[Node], Node]:
    """Move views of weights to the front; return weights and views, and the last of them."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    found, last = set(placeholders[:parameters]), placeholders[-1]
    for node in _calls(graph):
        if node.target in VIEWS and node.args[0] in found:
            last.append(node)
            last = node
            found.add(node)
    return found, last


# Products of one input ----------------------------------------------------------------------------


def _merge(graph: fx.Graph, weights: set[Node], last: Node) -> None:
    of_input: dict[Node, list[Node]] = defaultdict(list)
    for node in _calls(graph):
        bias = _bias(node)
        plain = (
            node.target in PRODUCTS
            and not node.kwargs
            and (bias is None or (bias in weights and bias.meta["val"].dim() == 1))
        )
        if plain and node.args[-1] in weights:
            of_input[node.args[-2]].append(node)
    kinds = Counter(_kind(nodes) for nodes in of_input.values() if len(nodes) > 1)
    whole: dict[tuple[Any, ...], tuple[Node, Node | None]] = {}
    places = {node: i for i, node in enumerate(graph.nodes)}
    for x, nodes in of_input.items():
        kind = _kind(nodes)
        if len(nodes) < 2 or kinds[kind] < OFTEN:
            continue
        if kind not in whole:
            with graph.inserting_before(last.next):
                whole[kind] = _side_by_side(graph, nodes)
        weight, bias = whole[kind]
        with graph.inserting_before(min(nodes, key=places.__getitem__)):
            product = (
                call(graph, aten.mm.default, x, weight)
                if bias is None
                else call(graph, aten.addmm.default, bias, x, weight)
            )
            ends = list(accumulate((node.meta["val"].shape[1] for node in nodes), initial=0))
            parts = [
                call(graph, aten.slice.Tensor, product, 1, *between) for between in pairwise(ends)
            ]
        for node, part in zip(nodes, parts, strict=True):
            node.replace_all_uses_with(part)
            graph.erase_node(node)


def _kind(nodes: list[Node]) -> tuple[Any, ...]:
    """Return the weights and biases that one input is multiplied by, after sorting the nodes."""
    nodes.sort(key=lambda node: (-node.meta["val"].shape[1], node.args[-1].name))
    return tuple((node.args[-1], _bias(node)) for node in nodes)


def _bias(node: Node) -> Node | None:
    return node.args[0] if node.target is aten.addmm.default else None


def _side_by_side(graph: fx.Graph, nodes: Sequence[Node]) -> tuple[Node, Node | None]:
    weight = call(graph, aten.cat.default, [node.args[-1] for node in nodes], 1)
    gap = -weight.meta["val"].shape[1] % ALIGNED
    if gap:
        weight = call(graph, aten.constant_pad_nd.default, weight, [0, gap])
    if all(_bias(node) is None for node in nodes):
        return weight, None
    parts = [
        _bias(node)
        or call(graph, aten.new_zeros.default, weight, [node.args[-1].meta["val"].shape[1]])
        for node in nodes
    ]
    parts += [call(graph, aten.new_zeros.default, weight, [gap])] if gap else []
    return weight, call(graph, aten.cat.default, parts)


# Activations of products and reshapes ----------------------------------------------------------


def _activate(graph: fx.Graph) -> None:
    """Fuse a ReLU into the matrix product before it, if nothing else reads the product."""
    for node in _calls(graph):
        if node.target is not aten.relu.default or not _alone(node.args[0]):
            continue
        product = _root(node.args[0])
        if product.target is LINEAR and product.args[3] == "none":
            product.update_arg(3, "relu")
        elif (
            private_torch.ADDMM_ACTIVATION is not private_torch.NOTHING
            and product.target is aten.addmm.default
            and not product.kwargs
            and product.args[0].meta["val"].dim() == 1
        ):
            product.target = private_torch.ADDMM_ACTIVATION
        else:
            continue
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _reshape_once(graph: fx.Graph) -> None:
    """Replace chains of reshapes by one reshape."""
    for node in _calls(graph):
        if node.target in SHAPED:
            node.update_arg(0, _root(node.args[0]))
            if node.args[0].meta["val"].shape == node.meta["val"].shape:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)


def _root(node: Node) -> Node:
    """Return the node before all reshapes."""
    while node.target in RESHAPES:
        node = node.args[0]
    return node


def _alone(node: Node) -> bool:
    """Return whether a node, and the node that it reshapes, have only one user."""
    while len(node.users) == 1 and node.target in RESHAPES:
        node = node.args[0]
    return len(node.users) == 1


def call(graph: fx.Graph, target: Any, *args: Any) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda argument: argument.meta["val"]))
    return node


# Operations that can be deferred ------------------------------------------------------------------


def _leaves(graph: fx.Graph, values: bool) -> list[set[Node]]:
    """Return groups of operations that can be deferred: the gradients' last products and sums.

    Independent groups are separate. With ``values``, one more group has the operations that only
    the objective and the metrics need.
    """
    found: set[Node] = set()
    groups: list[set[Node]] = []
    results = next(node for node in graph.nodes if node.op == "output").args[0]
    of_gradients = set(results[VALUES:]) if values else set(results)
    for_values: set[Node] = set()
    for node in reversed(list(graph.nodes)):
        users = [user for user in node.users if user.op != "output"]
        if (
            values
            and node.op == "call_function"
            and node not in of_gradients
            and for_values.issuperset(users)
        ):
            for_values.add(node)
            continue
        ends = node.target in ENDS and (not users or all(user.target is CAST for user in users))
        if (
            node.op == "call_function"
            and (ends or (users and node.target in (*VIEWS, aten.cat.default)))
            and found.issuperset(users)
        ):
            joined = [group for group in groups if not group.isdisjoint(users)]
            groups = [group for group in groups if group not in joined] + [{node}.union(*joined)]
            found.add(node)
    return [*groups, for_values] if for_values else groups
