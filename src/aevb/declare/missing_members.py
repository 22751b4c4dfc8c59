"""Explain which member a distribution of the user lacks: a torch Distribution may leave any out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributions as td
from torch import nn

from aevb.declare.conditionals import Factor

SOURCE = inspect.getsourcefile(td.Distribution)  # of the methods that raise NotImplementedError
USES = {
    "sample": "to draw: sample(), impute(), predictive checks, export(), and as a latent",
    "rsample": "to draw as a pathwise latent",
    "expand": "to draw for rows that share a distribution: impute()",
    "mean": "for means: reconstruct(), impute(), posterior(), export()",
    "variance": "for standard deviations: posterior(), export()",
    "log_prob": "for every bound and density",
    "entropy": "for the entropy that has_entropy promises",
}
PROPERTIES = ("mean", "variance")


class MissingMemberError(ValueError, NotImplementedError):
    """A distribution of the user lacks a member that the call needs."""


@contextmanager
def explaining_missing_members(factors: Mapping[str, nn.Module]) -> Iterator[None]:
    """Raise MissingMemberError, with the family and the member, for torch's NotImplementedError."""
    try:
        yield
    except MissingMemberError:
        raise
    except NotImplementedError as error:
        if (found := _lacking(error.__traceback__)) is None:
            raise
        distribution, member = found
        use = f", which is needed {USES[member]}" if member in USES else ""
        fix = (
            f"Add a property {member} to the class"
            if member in PROPERTIES
            else f"Add a method {member}() to the class"
        )
        raise MissingMemberError(
            f"{_family(factors, distribution)}: its distribution {distribution.__name__} has no "
            f"{member}{use}. {fix}."
        ) from error


def _lacking(trace: TracebackType | None) -> tuple[type, str] | None:
    """Return the class of the distribution and the member that torch's base class lacks."""
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_filename == SOURCE and "self" in frame.f_locals:
            member = frame.f_code.co_name
            return type(frame.f_locals["self"]), "variance" if member == "stddev" else member
        trace = trace.tb_next
    return None


def _family(factors: Mapping[str, nn.Module], distribution: type) -> str:
    """Return the factor and the family whose distribution has this class."""
    for name, factor in factors.items():
        if isinstance(factor, Factor) and _makes(factor, distribution):
            return f"{name} has the family {type(factor.spec).__name__}"
    return "A family of the model"


def _makes(factor: Factor, distribution: type) -> bool:
    with torch.no_grad():
        made: Any = factor.distribution(torch.zeros(1, 1, 1, sum(factor.sizes.values())))
    while type(made) is not distribution and hasattr(made, "base_dist"):
        made = made.base_dist
    return type(made) is distribution
