"""Which inputs the outputs of a part depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aevb.export.parts import Part
from aevb.export.ports import next_name
from aevb.runtime import private_torch

# Operations whose result depends on the sizes of their arguments alone.
SIZES_ONLY = ("_like", "aten::new_", "sym_size")


def used_inputs(part: Part, reads: Mapping[str, frozenset[str]]) -> set[str]:
    """The inputs that are needed, if every output reads these inputs.

    A new state is computed only if a step reads it, so its output counts only if its input is used.
    """
    states = {next_name(port.name): port.name for port in part.ports if port.kind == "state"}
    used: set[str] = set()
    while True:
        needed = [name for name in reads if name not in states or states[name] in used]
        found = set().union(*(reads[name] for name in needed))
        if found <= used:
            return used
        used |= found


def drop_unused(part: Part, inputs: Mapping[str, Tensor]) -> None:
    """Remove the inputs that no operation reads when the part runs on these values.

    If the outputs depend on a removed input after all (through code that is not torch's), nothing
    is removed.
    """
    if private_torch.DispatchMode is None:
        return
    tracker = _tracker()
    with torch.no_grad():
        copies = {name: value.clone() for name, value in inputs.items()}
        tracker.mark(copies)
        with tracker:
            expected = part(copies)
        reads = {name: tracker.reads(value) for name, value in expected.items()}
        used = used_inputs(part, reads)
        before = list(part.ports), list(part.dropped)
        part.drop({port.name for port in part.ports} - used)
        found = part({port.name: inputs[port.name] for port in part.ports})
    if not all(torch.equal(value, expected[name]) for name, value in found.items()):
        part.ports, part.dropped = before


def _tracker() -> Any:
    """A mode that records which marked tensors every result was computed from."""

    class Tracker(private_torch.DispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            # The tensors are kept, so that no other one gets the same id.
            self.sources: dict[int, tuple[Tensor, frozenset[str]]] = {}

        def mark(self, values: Mapping[str, Tensor]) -> None:
            for name, value in values.items():
                self.sources[id(value)] = value, frozenset({name})

        def reads(self, value: Any) -> frozenset[str]:
            known = (self.sources.get(id(leaf)) for leaf in private_torch.tree_leaves(value))
            # A slice without entries, such as the steps before the only one, tells nothing.
            return frozenset().union(*(one[1] for one in known if one and one[0].numel()))

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            sizes_only = any(word in str(func.name()) for word in SIZES_ONLY)
            read = frozenset() if sizes_only else self.reads([args, kwargs or {}])
            for leaf in private_torch.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.sources[id(leaf)] = leaf, read | self.reads(leaf)
            return result

    return Tracker()
