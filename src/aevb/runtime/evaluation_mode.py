"""Evaluation mode (no dropout) per thread.

``model.training`` alone does not decide about dropout. A thread that evaluates sets a context
variable of its own, so it does not disturb a thread that trains the same model. Modules that are
not the library's read ``training`` themselves; for these it is switched off while any thread
evaluates.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

_evaluated: ContextVar[frozenset[int]] = ContextVar(
    "models that this thread evaluates", default=frozenset()
)
_lock = threading.Lock()
# Modules that are out of training mode, and for how many evaluations.
_switched: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
# Modules that behave the same in training.
PLAIN = (
    nn.Module,
    nn.ModuleDict,
    nn.ModuleList,
    nn.Sequential,
    nn.Linear,
    nn.Conv2d,
    nn.ConvTranspose2d,
)


def is_evaluated(model: nn.Module) -> bool:
    """Return whether this thread is evaluating a model."""
    return id(model) in _evaluated.get()


def drops_units(model: nn.Module) -> bool:
    """Return whether an estimate of this thread has dropout."""
    return model.training and not is_evaluated(model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disable dropout, inside the context, for this thread's estimates of a model."""
    if is_evaluated(model):
        yield
        return
    token = _evaluated.set(_evaluated.get() | {id(model)})
    found = [module for module in model.modules() if _reads_training(module)]
    with _lock:
        found = [module for module in found if module.training or module in _switched]
        for module in found:
            _switched[module] = _switched.get(module, 0) + 1
            module.training = False
    try:
        yield
    finally:
        with _lock:
            for module in found:
                _switched[module] -= 1
                if not _switched[module]:
                    del _switched[module]
                    module.training = True
        _evaluated.reset(token)


def _reads_training(module: nn.Module) -> bool:
    return type(module) not in PLAIN and not type(module).__module__.startswith("aevb.")
