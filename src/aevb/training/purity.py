"""Whether a model is a pure function of its tensors: its steps may then be recorded."""

from __future__ import annotations

from typing import Any

import torch

from aevb.declare.deterministic import LSTM, Cell
from aevb.declare.evaluation_order import Stage
from aevb.declare.graph import Entry
from aevb.declare.noise_kinds import SEED
from aevb.declare.own_networks import own_networks
from aevb.derive.plan import Plan
from aevb.model import Model
from aevb.runtime.private_torch import has_hooks, hooks_known
from aevb.training.settings import Settings

LONGEST = 1024  # steps of time that a recording of a loop may have
UNKNOWN_HOOKS = (
    "this version of torch does not tell whether a module has hooks, which every step must call"
)


def why_not_recorded(
    model: Model, settings: Settings, plan: Plan, processes: int = 1
) -> str | None:
    """Return why a step cannot be recorded and runs eagerly; None if it can."""
    if settings.schedule.objective != "bound":
        return (
            f"{settings.schedule} computes the objective exactly, without an estimate of the bound"
        )
    if processes > 1 and settings.has_free_bits:
        return "free_bits= compares KL terms over all processes within a step"
    if names := drawn_by_torch(plan):
        return f"{names[0]} is drawn by a sampler of torch's own"
    return own_part(model)


def too_long_to_record(model: Model, plan: Plan, steps: int) -> str | None:
    """Return why the loops over ``steps`` steps of time are not recorded; None if they are.

    A recording repeats the operations of a loop for every step of time. Its cost in seconds and
    memory is proportional to their number, and it gains nothing for thousands of them: recording a
    VRNN with 2,048 steps took 25 steps' time and 2 GB.
    """
    chained = any(neighbour is not None for _, neighbour in plan.slots.values())
    looped = any(stage.direction and not _one_operation(model, stage) for stage in plan.stages)
    if steps <= LONGEST or not (chained or looped):
        return None
    return (
        f"sequences of {steps:,} steps are too long to record (over {LONGEST:,}). window= trains "
        f"on windows of time, which are recorded"
    )


def _one_operation(model: Model, stage: Stage) -> bool:
    """Whether torch's own recurrence computes a loop as one operation."""
    (name, *others), graph = stage.nodes, model.graph
    rules = graph.p.get(name) or graph.q[name]
    spec, like = rules[graph.main(name)].spec, model._parameter()
    fused = isinstance(spec, Cell) if like.is_cuda else isinstance(spec, LSTM)
    return fused and not others and "last" not in rules and like.dtype == torch.float32


def drawn_by_torch(plan: Plan) -> list[str]:
    """Return the latents that torch's own samplers draw from a seed."""
    layout = plan.layout(1, 1, dropout=False)
    return [name for name, (kind, _) in layout.items() if kind == SEED]


def own_part(model: Model) -> str | None:
    """Return why a model's steps cannot be recorded (custom code, hooks, …); None if they can."""
    own = [cls for entry in model.graph.entries() for cls in _own_classes(entry) if not cls.pure]
    if own:
        return (
            f"{own[0].__name__} is a part of your own, whose code may have side effects (set pure "
            f"= True in its class if it has none)"
        )
    for name, net in own_networks(dict(model.factors.items())):
        if (why := net.why_impure()) is not None:
            return f"{name}: {why}"
    return added(model) or (None if hooks_known() else UNKNOWN_HOOKS)


def added(model: Model) -> str | None:
    """Return what was added to a model beyond its declaration (modules, hooks), or None."""
    own = dict(own_networks(dict(model.factors.items())))
    declared = {id(part) for net in own.values() for part in net.modules()}
    for entry in model.graph.entries():
        for name, module in (
            model.factors[entry.id].named_modules() if not _own_classes(entry) else ()
        ):
            if id(module) in declared:
                continue
            if not _ours(type(module)) and (
                not type(module).__module__.startswith("torch.nn.modules.")
                or list(module.buffers(recurse=False))
            ):
                return (
                    f"{name} of {entry.id} is a {type(module).__name__} of your own, whose code "
                    f"may have side effects"
                )
    for name, module in model.named_modules():
        if hooks_known() and has_hooks(module):
            return f"{name or 'the model'} has a hook, which every step must call"
        if hasattr(module, "parametrizations"):
            return f"{name} has a parametrization, which every step must call"
    hooked = next(
        (name for name, parameter in model.named_parameters() if has_hooks(parameter)), None
    )
    return None if hooked is None else f"{hooked} has a hook, which every step must call"


def _own_classes(entry: Entry) -> list[Any]:
    """Return the user-defined classes in an entry of the declaration."""
    return [
        type(part)
        for part in (entry.spec, getattr(entry.spec, "net", None))
        if part is not None and not _ours(type(part))
    ]


def _ours(cls: type) -> bool:
    return cls.__module__.startswith("aevb.")
