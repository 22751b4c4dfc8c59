"""Capture several steps, of one model or of several side by side, as one CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from aevb.compiled_step.cuda_streams import CudaStreams
from aevb.compiled_step.recording import Inputs


class Capturable(Protocol):
    """Steps that can be captured.

    They draw their own inputs and write only tensors at fixed addresses.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def streams(self) -> CudaStreams: ...

    @property
    def generators(self) -> list[torch.Generator]: ...

    def settle(self) -> None:
        """Wait until no other thread uses the device."""

    def inputs(self, place: int) -> Inputs:
        """Return everything that the step with this index reads, besides the parameters."""

    def advance(self, phase: Any, place: int, inputs: Inputs) -> None:
        """Take the step with this index."""


def captured(models: Sequence[tuple[Capturable, Any]], count: int) -> torch.cuda.CUDAGraph:
    """Capture ``count`` steps as one CUDA graph.

    Several models run concurrently in the graph, because one small model does not fill a GPU.
    """
    device, graph = models[0][0].device, torch.cuda.CUDAGraph()
    for model, _ in models:
        model.settle()
        for generator in model.generators:
            graph.register_generator_state(generator)
    torch.cuda.synchronize(device)
    here = models[0][0].streams.chain
    others = {model.streams.chain for model, _ in models} - {here}
    with torch.cuda.graph(graph, stream=here):
        for chain in others:
            chain.wait_stream(here)
        for model, phase in models:
            with torch.cuda.stream(model.streams.chain):
                _advance(model, phase, count)
        for chain in others:
            here.wait_stream(chain)
    return graph


def _advance(model: Capturable, phase: Any, count: int) -> None:
    """Take steps one after another, and prepare the inputs of the next one on another stream."""
    chain, ahead = model.streams.chain, model.streams.ahead
    inputs = model.inputs(0)
    for place in range(count):
        following: Mapping[str, Tensor] = {}
        if place + 1 < count:
            ahead.wait_stream(chain)
            with torch.cuda.stream(ahead):
                following = model.inputs(place + 1)
        model.advance(phase, place, inputs)
        chain.wait_stream(ahead) if following else None
        inputs = following
