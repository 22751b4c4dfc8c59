"""What a window of longer sequences reads of the steps before it.

A window is a batch whose first step need not be the first step of its sequences. Its program reads
the last values and states of the window before (:class:`Before`) where it would otherwise read
zeros, and the rules for the first step hold only where a sequence starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aevb.declare.deterministic import Recurrence
from aevb.declare.graph import Graph
from aevb.derive.plan import Plan
from aevb.estimate.keys import mask_of

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Before:
    """The step before a window.

    ``start`` is a mask [1, 1, 1], True if the sequences start with this window; all values are then
    zeros. ``values`` holds what is read at [t-1] at the window's first step: values by name, masks
    of missing entries by the name of the mask, and states of recurrences by :func:`state_name`.
    """

    start: Tensor
    values: Mapping[str, Tensor]

    @classmethod
    def of(cls, start: Tensor, values: Mapping[str, Tensor]) -> Before:
        """Return the step before a window, from what the window before it left in ``values``."""
        return cls(
            start,
            {
                name: torch.where(start, torch.zeros_like(value), value)
                for name, value in values.items()
            },
        )


def state_name(name: str, part: int) -> str:
    """The name of a part of a recurrence's state: hidden states of all layers, then cells."""
    return f"{name}:{part}"


def shapes_before(
    plan: Plan, batch: Mapping[str, Tensor], modules: Mapping[str, nn.Module] | nn.ModuleDict
) -> Shapes:
    """The names and shapes of what a window reads of the step before it.

    ``batch`` gives the number of rows, and the masks that exist.
    """
    graph, found = plan.graph, Shapes()
    n = next(iter(batch.values())).shape[-2]
    computed = {node for stage in plan.stages for node in stage.nodes}
    for entry in graph.entries():
        for ref in entry.key.parents:
            name = ref.name
            if ref.lag != -1:
                continue
            if name in computed:
                found[name] = plan._shape(plan.values[name], n, 1, graph.size(name))
            elif name in batch:
                found[name] = (1, n, graph.size(name))
            if entry.side == "q" and mask_of(name) in batch:
                found[mask_of(name)] = (1, n, graph.size(name))
    for node in computed:
        for entry in graph.p.get(node, graph.q.get(node, {})).values():
            factor = modules[entry.id]
            if isinstance(factor, Recurrence):
                shape = plan._shape(plan.values[node], n, 1, factor.d)
                parts = len(factor.initial(torch.zeros(1, 1, 1)))
                found |= {state_name(node, i): shape for i in range(parts)}
    return found


def why_no_windows(graph: Graph) -> str | None:
    """Return why sequences of this model have no windows, with the fix; None if they have.

    A window is computed without those after it, so nothing may read a later step, or the whole
    sequence.
    """
    whole = "Train on whole sequences (checkpoint_time= saves memory)"
    if not any(graph.timed[name] for name in graph.observed):
        return "the model has no sequences: no observed variable has [t]. Leave window= out"
    for entry in graph.entries():
        key = entry.key
        for ref in key.parents:
            if ref.lag > 0:
                return (
                    f'"{key}" reads {ref}, which lies in the next window at the last step of each '
                    f"window. Use a q that reads only the present and the past, e.g. "
                    f'"z[t] | h[t], x[t]", or train on whole sequences (checkpoint_time= saves '
                    f"memory)"
                )
        if key.at == "last":
            return (
                f'"{key}" is a rule for the last step, and a window does not know whether it has '
                f"it. {whole}"
            )
        if key.at == "static" and entry.spec.stochastic:
            return (
                f"{key.name} has no [t], so all windows of a sequence share it, and every window "
                f"would count its terms again. {whole}"
            )
        if key.at == "static" and any(ref.timed for ref in key.parents):
            return f'"{key}" reads an end of the sequence, which one window has. {whole}'
    return None


def why_no_windows_by_plan(plan: Plan) -> str | None:
    """Return why a plan's bound is not a sum over windows, with the fix; None if it is."""
    if plan.bound != "elbo":
        return (
            f'bound="{plan.bound}" takes the logarithm of a mean over samples of whole sequences, '
            f'which is no sum over windows. Use bound="elbo"'
        )
    if plan.completed:
        return (
            f"{min(plan.completed)} has missing entries that p reads, and a window does not know "
            f"the values that were drawn before it. Fill the entries, or train on whole sequences"
        )
    for name, (_, neighbour) in plan.slots.items():
        if neighbour is not None:
            return (
                f"{name}[t] is summed over together with its neighbour in time, from the first to "
                f"the last step. Draw it (how={{{name!r}: 'gumbel'}}), or train on whole sequences"
            )
    return None
