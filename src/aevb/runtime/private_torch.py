"""All private torch APIs that the library uses, each with a fallback.

The fallbacks are for releases of torch that lack an API. A name below is None if this torch lacks
it. The functions in this module then use public, slower APIs. Features without a public alternative
are switched off (recording, fusing or mapping a step over several models), and the caller reports
it. Training works in every case.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def _find(path: str) -> Any:
    """Return the object at this dotted path inside torch, or None."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _module(name: str, attribute: str) -> Any:
    try:
        return getattr(importlib.import_module(name), attribute, None)
    except ImportError:
        return None


foreach_mul = _find("_foreach_mul")
foreach_add = _find("_foreach_add_")
fused_adam = _find("_fused_adam_")
standard_gamma = _find("_standard_gamma")
transforms_active = _find("_C._are_functorch_transforms_active")
# the level of forward-mode derivatives as torch is imported: its value changes, see is_transformed
forward_level = _find("autograd.forward_ad._current_level")
graph_task = _find("_C._current_graph_task_id")
will_execute = _find("_C._will_engine_execute_node")
onednn_linear = _find("ops.mkldnn._linear_pointwise")
addmm_activation = _find("_addmm_activation")
lstm_cell = _find("ops.aten._thnn_fused_lstm_cell")
vmap_fallback_enabled = _find("_C._functorch._is_vmap_fallback_enabled")
set_vmap_fallback = _find("_C._functorch._set_vmap_fallback_enabled")

# The base class of modes that see every operation.
DispatchMode: Any = _module("torch.utils._python_dispatch", "TorchDispatchMode")

NOTHING: Any = object()  # the target of no operation
UNSAFE_VIEW = _find("ops.aten._unsafe_view.default") or NOTHING
TO_COPY = _find("ops.aten._to_copy.default") or NOTHING
ADDMM_ACTIVATION = _find("ops.aten._addmm_activation.default") or NOTHING
ONEDNN_LINEAR = _find("ops.mkldnn._linear_pointwise.default") or NOTHING
Operation = type(torch.ops.aten.add.Tensor)


SLOWER = {  # the part that is slower if torch lacks an API
    "foreach_mul": "gradient clipping",
    "foreach_add": "Adam on a GPU",
    "fused_adam": "Adam",
    "transforms_active": "matrix products and their gradients",
    "forward_level": "matrix products and their gradients",
    "graph_task": "recurrent networks",
    "will_execute": "recurrent networks",
    "onednn_linear": "matrix products on a CPU",
    "addmm_activation": "ReLU layers on a GPU",
    "lstm_cell": "LSTMs on a GPU",
    "standard_gamma": "draws from Gamma distributions, which Student t needs",
}


def slower() -> list[str]:
    """Return the parts that are slower with this torch, because a private API is missing."""
    return sorted({what for name, what in SLOWER.items() if globals()[name] is None})


# Arithmetic ---------------------------------------------------------------------------------------


def scaled(tensors: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    """Return every tensor times the factor."""
    return (
        list(foreach_mul(tensors, factor))
        if foreach_mul is not None
        else [tensor * factor for tensor in tensors]
    )


def add_to(tensors: Sequence[Tensor], value: Tensor) -> None:
    """Add the value to every tensor in place, without synchronising the host with the device."""
    if foreach_add is not None:
        foreach_add(tensors, [value] * len(tensors))
        return
    for tensor in tensors:
        tensor.add_(value)


def gamma(concentration: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw from Gamma(concentration, 1)."""
    if standard_gamma is not None:
        return standard_gamma(concentration, generator=generator)
    distribution = torch.distributions.Gamma(concentration, torch.ones_like(concentration))
    if generator is None:
        return distribution.sample()
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return distribution.sample()


def product_with_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute max(x Wᵀ + b, 0), in one kernel on a GPU."""
    if addmm_activation is not None:
        return addmm_activation(bias, x, weight.t())
    return torch.addmm(bias, x, weight.t()).relu_()


def is_transformed() -> bool:
    """Return whether torch transforms the operations: compiles, maps or differentiates them.

    A transformation needs plain operations. If this torch cannot tell, the answer is True: every
    product is then a plain operation, and autograd derives its gradient.
    """
    if transforms_active is None or forward_level is None:
        return True
    level = torch.autograd.forward_ad._current_level
    return bool(torch.compiler.is_compiling() or transforms_active() or level >= 0)


def can_defer() -> bool:
    """Return whether a weight's gradient can be deferred until all its uses in a loop are known.

    Autograd must tell the current backward pass and the nodes that it will run.
    """
    return graph_task is not None and will_execute is not None


# Recording and compiling --------------------------------------------------------------------------


def tree_leaves(value: Any) -> Iterable[Any]:
    """Return the leaves of nested lists, tuples and dictionaries."""
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [leaf for part in value for leaf in tree_leaves(part)]
        if isinstance(value, list | tuple)
        else [value]
    )


@contextmanager
def vmap_without_loops() -> Iterator[None]:
    """Make ``torch.vmap`` refuse, inside the context, an operation that it cannot map.

    It raises RuntimeError instead of looping over the axis.
    """
    if vmap_fallback_enabled is None or set_vmap_fallback is None:
        yield
        return
    was = vmap_fallback_enabled()
    set_vmap_fallback(False)
    try:
        yield
    finally:
        set_vmap_fallback(was)


def inductor() -> Any:
    """Return the parts of torch's compiler that are needed to call it.

    Raise ImportError or AttributeError if a part is missing.
    """
    from types import SimpleNamespace

    from torch._functorch import config
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return SimpleNamespace(
        config=config,
        TracingContext=TracingContext,
        tracing=tracing,
        compile_fx=compile_fx,
        compile_fx_inner=compile_fx_inner,
        FakeTensorMode=FakeTensorMode,
        ShapeEnv=ShapeEnv,
    )


def cpp_kernels() -> Any:
    """Return the class that generates the compiler's C++ loops; None if torch has moved it."""
    found = _module("torch._inductor.codegen.cpp", "CppKernelProxy")
    return found if hasattr(found, "aggregate_reduction_buffers") else None


# Hooks --------------------------------------------------------------------------------------------

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_known() -> bool:
    """Return whether this torch tells which hooks a module has."""
    module = nn.Module()
    return all(hasattr(module, name) for name in HOOKS)


def has_hooks(part: nn.Module | Tensor) -> bool:
    """Return whether a module or a parameter has hooks, which every call must run.

    Ask :func:`hooks_known` first. If this part lacks one of the attributes, the answer is True.
    """
    names = HOOKS if isinstance(part, nn.Module) else ("_backward_hooks",)
    return any(getattr(part, name, True) for name in names)
