"""The user's function ``after=``: call it after a validation, and check what it did to the model.

It may change the values of the weights, but not their layout, nor their address if steps are CUDA
graphs: a compiled step reads them where they were. It may not freeze parameters or add hooks
either, because the steps are fixed when the run begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aevb.model import Model
from aevb.training.checkpoint import TrainingError
from aevb.training.job import Job, frozen
from aevb.training.purity import own_part
from aevb.training.step import Stepper

After = Callable[[int, Model], Mapping[str, float] | None]


def call_after(after: After, step: int, job: Job, stepper: Stepper) -> dict[str, float]:
    """Call ``after`` and return the numbers that it gives; a TrainingError says what it broke."""
    model, before = job.model, _forms(job.model, stepper)
    found = dict(after(step, model) or {})
    changed = next(
        (name for name, form in _forms(model, stepper).items() if before.get(name) != form), None
    )
    if changed is not None:
        raise TrainingError(
            f"after= put another tensor in the place of {changed} at step {step}, but the run "
            f"keeps using the old one. Write the new values into the parameter "
            f"(parameter.copy_(…) under torch.no_grad(), or load_state_dict)."
        )
    now = frozen(model)
    if now != job.frozen:
        name = min(set(now).symmetric_difference(job.frozen))
        done = "froze" if name in now else "unfroze"
        raise TrainingError(
            f"after= {done} {name} at step {step}, but a run cannot change which parameters it "
            f"trains. Train in two runs."
        )
    own = own_part(model) if stepper.not_recorded is None else None
    if own is not None:
        raise TrainingError(
            f"after= changed the model at step {step}: {own}. This run replays recorded steps, so "
            f"the change would have no effect. Make it before fit()."
        )
    return found


def _forms(model: Model, stepper: Stepper) -> dict[str, tuple[Any, ...]]:
    """Return where each parameter lies and in which layout."""
    fixed = stepper.captures
    return {
        name: (id(p), p.shape, p.stride(), p.dtype, p.device, p.data_ptr() if fixed else None)
        for name, p in model.named_parameters()
    }
