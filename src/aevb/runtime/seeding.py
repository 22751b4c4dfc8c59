"""Seeds of one thread: draws come from generators of its own, and torch's global generator stays as
it is.

``with seeded(7):`` gives every draw that the library makes inside, in this thread, the numbers that
``torch.manual_seed(7)`` would give it. Another thread neither sees nor disturbs them. Without a
seed, draws come from the enclosing ``seeded``, or else from torch's global generator.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor
from torch.overrides import TorchFunctionMode

LIKE = {"rand_like": torch.rand, "randn_like": torch.randn}  # they take no generator themselves
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
    """One generator for each device, made when it is first asked for."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.made: dict[torch.device, torch.Generator] = {}

    def on(self, device: torch.device) -> torch.Generator:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self.made:
            self.made[device] = torch.Generator(device).manual_seed(self.seed)
        return self.made[device]


_current: ContextVar[_Generators | None] = ContextVar("generators of this thread", default=None)


@contextmanager
def seeded(seed: int | None, *, all_code: bool = False) -> Iterator[None]:
    """Draw from a seed inside; None changes nothing. ``all_code`` includes draws by other code than
    the library's, which is slower.
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


def generator(device: torch.device) -> torch.Generator | None:
    """The generator that draws on this device come from; None is torch's global one."""
    current = _current.get()
    return None if current is None else current.on(device)


def draw_from(dist: td.Distribution, *, pathwise: bool = False) -> Tensor:
    """A draw by the distribution's own sampler, differentiable where it can be and ``pathwise``
    asks for it.
    """
    with nullcontext() if _current.get() is None else _Drawing():
        return dist.rsample() if pathwise and dist.has_rsample else dist.sample()


class _Drawing(TorchFunctionMode):
    """Pass the current generator to every function that draws: torch's samplers take none from
    their callers. A mode is its thread's own.
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
    """Whether a function of torch takes a generator."""
    if getattr(func, "__name__", "") in DRAWING:
        return True
    return inspect.isfunction(func) and "generator" in inspect.signature(func).parameters
