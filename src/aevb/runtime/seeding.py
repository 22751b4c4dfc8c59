"""Seeds per thread, which leave torch's global generator unchanged.

Inside ``with seeded(7):``, every draw of the library in this thread gets the numbers that
``torch.manual_seed(7)`` would give it. They come from generators of this thread, so other threads
have no effect on them. Without a seed, draws come from the enclosing ``seeded``, or else from
torch's global generator.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor
from torch.overrides import TorchFunctionMode

LIKE = {"rand_like": torch.rand, "randn_like": torch.randn}  # the keys take no generator
DRAWING = frozenset(
    {
        "rand",
        "randn",
        "randint",
        "randperm",
        "normal",
        "bernoulli",
        "multinomial",
        "poisson",
        "binomial",
        "_standard_gamma",
        "_sample_dirichlet",
        "uniform_",
        "normal_",
        "exponential_",
        "cauchy_",
        "log_normal_",
        "geometric_",
        "bernoulli_",
        "random_",
    }
)


class _Generators:
    """One generator per device, created at its first use."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.made: dict[torch.device, torch.Generator] = {}

    def on(self, device: torch.device) -> torch.Generator:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self.made:
            self.made[device] = torch.Generator(device).manual_seed(self.seed)
        return self.made[device]


_global_lock = threading.RLock()
_current: ContextVar[_Generators | None] = ContextVar("generators of this thread", default=None)


@contextmanager
def seeded(seed: int | None, *, all_code: bool = False) -> Iterator[None]:
    """Draw from a seed inside the context; None changes nothing.

    ``all_code`` includes draws by code outside the library, which is slower.
    """
    if seed is None:
        yield
        return
    token = _current.set(_Generators(int(seed)))
    try:
        with _Drawing() if all_code else nullcontext():
            yield
    finally:
        _current.reset(token)


@contextmanager
def global_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generator of a device inside the context, and restore its state after.

    Some operations of torch, such as the dropout of attention, can draw from this generator only.
    The contexts of several threads wait for each other.
    """
    with _global_lock:
        source = global_generator(device)
        state = source.get_state()
        source.manual_seed(seed)
        try:
            yield
        finally:
            source.set_state(state)


def global_generator(device: torch.device) -> torch.Generator:
    """Return torch's global generator of a device."""
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def generator(device: torch.device) -> torch.Generator | None:
    """Return the generator for draws on this device; None means torch's global one."""
    current = _current.get()
    return None if current is None else current.on(device)


def draw_from(dist: td.Distribution, *, pathwise: bool = False) -> Tensor:
    """Draw with the distribution's own sampler.

    With ``pathwise=True`` the draw is differentiable if the distribution allows it.
    """
    with nullcontext() if _current.get() is None else _Drawing():
        return dist.rsample() if pathwise and dist.has_rsample else dist.sample()


class _Drawing(TorchFunctionMode):
    """Pass the current generator to every function that draws.

    torch's samplers take no generator from their callers. A mode applies to its thread only.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in LIKE:
            like = args[0]
            options = {"dtype": like.dtype, "device": like.device} | kwargs
            return LIKE[name](
                like.shape, generator=generator(torch.device(options["device"])), **options
            )
        if kwargs.get("generator") is None and _draws(func):
            tensor = next(
                (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None
            )
            device = kwargs.get("device") or (
                torch.get_default_device() if tensor is None else tensor.device
            )
            kwargs["generator"] = generator(torch.device(device))
        return func(*args, **kwargs)


@functools.lru_cache(maxsize=4096)
def _draws(func: Callable[..., Any]) -> bool:
    """Return whether a function of torch takes a generator."""
    if getattr(func, "__name__", "") in DRAWING:
        return True
    if not inspect.isfunction(func):
        return False
    try:
        return "generator" in inspect.signature(func).parameters
    except (ValueError, TypeError):  # Tensor.__pow__ wraps a builtin, which has no signature
        return False
