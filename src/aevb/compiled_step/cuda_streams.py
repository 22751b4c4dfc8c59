"""Run a recorded step on several CUDA streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from aevb.compiled_step.rewriting import CONCURRENT, DEFERRED, Node

aten = torch.ops.aten
MODELS, BRANCHES = 8, 3


@dataclass(frozen=True)
class CudaStreams:
    """The CUDA streams of a model.

    ``chain`` runs its steps, ``concurrent`` independent matrix products, ``ahead`` the rows and
    noise of the next step, and ``branches`` operations whose results are needed only at the end of
    the step.

    torch returns freed memory to the stream on which it was allocated, and that stream may reuse it
    as soon as it has waited for ``chain``. This is safe only if nothing else runs on these streams.
    They must therefore be used together, by one model at a time.
    """

    chain: torch.cuda.Stream
    concurrent: torch.cuda.Stream
    ahead: torch.cuda.Stream
    branches: tuple[torch.cuda.Stream, ...]


_streams: dict[torch.device, list[CudaStreams]] = {}


def streams_of(device: torch.device, number: int) -> CudaStreams:
    """Return the streams of the model with this number.

    torch has 32 streams of each priority and hands them out in turn. All are requested at once, so
    that no stream has two roles.
    """
    if device not in _streams:
        others = [torch.cuda.Stream(device) for _ in range(MODELS * (1 + BRANCHES))]
        chains, concurrent = (
            [torch.cuda.Stream(device, priority=-1) for _ in range(MODELS)] for _ in range(2)
        )
        parts = [others[i::MODELS] for i in range(MODELS)]
        streams = zip(chains, concurrent, parts, strict=True)
        _streams[device] = [
            CudaStreams(chain, other, part[0], tuple(part[1:])) for chain, other, part in streams
        ]
    return _streams[device][number % MODELS]


class ConcurrentRun(fx.Interpreter):
    """Run a recorded step on a GPU, with marked operations on other streams.

    The step waits for DEFERRED operations at its end. It waits for a group of CONCURRENT products
    before the next operation outside the group.
    """

    def __init__(self, graph: fx.GraphModule, streams: CudaStreams) -> None:
        super().__init__(graph)
        self.streams = streams
        self.kept: list[Any] = []  # tensors that a branch may still read
        self.waiting: list[
            Any
        ] = []  # tensors that ``concurrent`` may still read, until the chain has waited for it
        self.products: int | None = None  # the group of products that runs on ``concurrent``
        self.outputs: list[Any] = list(
            next(node for node in graph.graph.nodes if node.op == "output").args[0]
        )
        self.into: dict[Node, torch.Tensor] = {}

    def run(self, *args: Any, **options: Any) -> Any:
        self.begun: set[torch.cuda.Stream] = set()
        return super().run(*args, **options)

    def run_node(self, node: Node) -> Any:
        here = torch.cuda.current_stream(self.streams.concurrent.device)
        products, leaves = node.meta.get(CONCURRENT, (None, False))
        if self.waiting and products != self.products:
            here.wait_stream(self.streams.concurrent)
            self.waiting.clear()
        if node.op == "output":
            for begun in self.begun:
                here.wait_stream(begun)
            self.kept.clear()
        if leaves:
            self.products = products
            self.waiting.append(
                fx.map_arg((node.args, node.kwargs), lambda argument: self.env[argument])
            )
            self.streams.concurrent.wait_stream(here)
            with torch.cuda.stream(self.streams.concurrent):
                return super().run_node(node)
        side = self._side(node)
        if side is None:
            return super().run_node(node)
        # Keep the inputs from other streams. A stream frees its own values in order.
        self.kept += [
            self.env[argument]
            for argument in node.all_input_nodes
            if self._side(argument) is not side
        ]
        self.begun.add(side)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            place = self.into.get(node)
            if place is None:
                return super().run_node(node)
            if node.target in (aten.mm.default, aten.bmm.default):
                product = torch.mm if node.target is aten.mm.default else torch.bmm
                return product(*(self.env[argument] for argument in node.args), out=place)
            return place.copy_(super().run_node(node))

    def _side(self, node: Node) -> torch.cuda.Stream | None:
        return (
            self.streams.branches[node.meta[DEFERRED] % len(self.streams.branches)]
            if DEFERRED in node.meta
            else None
        )
