"""Check a request for a forecast, and extend the past by steps without observations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aevb.declare.graph import Graph
from aevb.estimate.batch import Batch, numbers, pad, prepare, public
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.keys import STEPS, is_mask, mask_of, real_steps
from aevb.evidence.forward_pass import why_not_forward
from aevb.evidence.memory_limit import narrow
from aevb.runtime.suggestions import did_you_mean


@dataclass(frozen=True)
class Past:
    """The past of some rows, and the horizon of their forecast.

    ``batch`` holds the past as it was passed. ``given`` holds the future of the given variables,
    [steps, N, d]. Each row's forecast starts at its own end.
    """

    model: DeclaredModel
    batch: Batch
    steps: int
    given: Batch

    @cached_property
    def lengths(self) -> Tensor:
        """The number of steps of each row, [N]."""
        real = real_steps(self.batch)
        n, steps = self.model._extent(self.batch)
        if real is None:
            like = next(iter(self.batch.values()))
            return torch.full((n,), steps, device=like.device)
        return real.squeeze(-1).sum(0).expand(n)

    def rows(self, start: int, count: int) -> Past:
        """Return the past of some of the rows."""
        batch, given = (narrow(part, start, count) for part in (self.batch, self.given))
        return Past(self.model, batch, self.steps, given)

    @cached_property
    def names(self) -> list[str]:
        """The variables that a forecast is about: the observed ones in time."""
        graph = self.model.graph
        return [name for name in graph.observed if graph.timed[name]]

    @cached_property
    def extended(self) -> Batch:
        """The past, followed by ``steps`` steps without observations."""
        return self.with_future({})

    def with_future(self, future: Mapping[str, Tensor]) -> Batch:
        """Return the past followed by a future of observed variables.

        ``future`` holds values and masks of the known values (``x?``), [steps, N, d].
        """
        graph, batch = self.model.graph, self.batch
        n, steps = self.model._extent(batch)
        whole = steps + self.steps
        later = {**self.given, **future}
        found: Batch = {}
        for key, value in batch.items():
            if key == STEPS or is_mask(key):
                continue
            if not graph.timed[key]:
                found[key] = value
                if mask_of(key) in batch:
                    found[mask_of(key)] = batch[mask_of(key)]
                continue
            nothing = value.new_zeros(self.steps, n, value.shape[-1])
            found[key] = self._placed(value, later.get(key, nothing))
            known = batch.get(mask_of(key), torch.ones_like(value, dtype=torch.bool))
            after = torch.full_like(nothing, key in later, dtype=torch.bool)
            after = later.get(mask_of(key), after)
            mask = self._placed(known.expand(value.shape), after.expand(nothing.shape), fill=True)
            if not bool(mask.all()):
                found[mask_of(key)] = mask
        if STEPS in batch:
            step = torch.arange(whole, device=self.lengths.device)[:, None]
            found[STEPS] = (step < self.lengths + self.steps).unsqueeze(-1)
        return found

    def _placed(self, past: Tensor, future: Tensor, *, fill: bool = False) -> Tensor:
        """Put each row's future after its own past, [T + steps, N, d]; ``fill`` is padding."""
        n = past.shape[-2]
        if STEPS not in self.batch:
            return torch.cat([past, future])
        padding = past.new_full((self.steps, n, past.shape[-1]), fill)
        whole = torch.cat([past, padding])
        index = self.index.unsqueeze(-1).expand(future.shape)
        return whole.scatter(0, index, future)

    @cached_property
    def index(self) -> Tensor:
        """The step of each row's forecasts within the extended rows, [steps, N]."""
        ahead = torch.arange(self.steps, device=self.lengths.device)[:, None]
        return self.lengths + ahead

    def ahead_by_row(self, value: Tensor) -> Tensor:
        """Select the forecast's steps of a value, [N, T + steps, …] → [N, steps, …]."""
        rest = value.shape[2:]
        index = self.index.T.reshape(*self.index.T.shape, *[1] * len(rest))
        return value.gather(1, index.expand(*self.index.T.shape, *rest))

    def observed(self) -> dict[str, Tensor]:
        """The past of each forecast variable, [N, T, *shape], with NaN where nothing is known."""
        n, steps = self.model._extent(self.batch)
        found = {}
        for name in self.names:
            value, real = self.batch[name], real_steps(self.batch)
            for mask in (self.batch.get(mask_of(name)), real):
                value = value if mask is None else torch.where(mask, value, torch.nan)
            found[name] = public(self.model.graph, name, value, n, steps)
        return found

    def future(self, data: Mapping[str, Any], what: str) -> Batch:
        """Check the future of variables, [N, steps, …], and lay it out: values and masks."""
        return future_of(self.model, data, len(self.lengths), self.steps, what)


def at_steps(value: Tensor, index: Tensor) -> Tensor:
    """Select steps of each row, index [steps, N]: […, T, N, d] → […, steps, N, d]."""
    shape = (*value.shape[:-3], *index.shape, value.shape[-1])
    return value.gather(-3, index.unsqueeze(-1).expand(shape))


def past_of(
    model: DeclaredModel, steps: Any, given: Mapping[str, Any] | None, lengths: Any, data: Any
) -> Past:
    """Check a request for a forecast.

    Raises ValueError if the data do not fit the declaration, if p cannot be continued, or if the
    future of a given variable is missing.
    """
    count = _steps(steps)
    check_continuable(model.graph)
    return past_of_batch(model, prepared(model, data, lengths), count, given)


def past_of_batch(
    model: DeclaredModel, batch: Batch, steps: int, given: Mapping[str, Any] | None = None
) -> Past:
    """Return the past of prepared rows with the future of the given variables."""
    return Past(model, batch, steps, _given(Past(model, batch, steps, {}), given))


def check_continuable(graph: Graph) -> None:
    """Raise ValueError if p has no sequences, or cannot be continued past their end."""
    check_sequences(graph, "forecast")
    if (reason := why_not_forward(graph)) is not None:
        raise ValueError(
            f"A forecast continues p step by step, but {reason}. p of more steps is then another "
            f"model. Append missing steps (NaN) to the data and use impute(…) instead."
        )


def check_sequences(graph: Graph, what: str) -> None:
    """Raise ValueError for a model without sequences."""
    if not any(graph.timed[name] for name in graph.observed):
        raise ValueError(
            f"{what} is for sequences, but no observed variable of this model has [t]. Use "
            f"posterior(…) for the latents, or impute(…) for missing entries."
        )


def prepared(model: DeclaredModel, data: Mapping[str, Any], lengths: Any) -> Batch:
    """Check the data of sequences and lay them out; refuse sequences without steps."""
    graph = model.graph
    for name, value in data.items():
        if graph.timed.get(name) and value is not None and not isinstance(value, list | tuple):
            shape = np.shape(value)
            if len(shape) > 1 and 0 in shape[:2]:
                raise ValueError(
                    f"{name} has shape {list(shape)}, so there is no past: a row needs at least "
                    f"one step. For draws without a past use model.sample(n, steps=…)."
                )
    return model.prepare(lengths=lengths, gaps=True, **data)


def _steps(steps: Any) -> int:
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
        got = "" if steps is None else f" Got {steps!r}."
        raise ValueError(
            f"forecast(steps=…) is how many steps to forecast after the end of each row, a whole "
            f"number from 1 on, e.g. forecast(steps=12, x=x).{got}"
        )
    return int(steps)


def _given(past: Past, given: Mapping[str, Any] | None) -> Batch:
    """Return the future of every given variable in time that p reads."""
    graph = past.model.graph
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(
            f"given= is the future of the given variables by name, e.g. given={{'u': u}}, got "
            f"{type(given).__name__}."
        )
    given = given or {}
    timed = [name for name in graph.given if graph.timed[name]]
    for name in given:
        if name not in timed:
            known = f" Those are {', '.join(timed)}." if timed else " This model has none."
            what = (
                f"{name} has no time: pass it as data, {name}=…"
                if name in graph.given
                else f"{name!r} is not a given variable in time"
            )
            near = "" if name in graph.given else did_you_mean(name, timed)
            raise ValueError(
                f"given= holds the future of given variables, but {what}.{known}{near}"
            )
    n = len(past.lengths)
    for name in timed:
        if name not in given and graph.is_read_by_p(name):
            shape = ", ".join(map(str, (n, past.steps, *graph.shapes[name])))
            raise ValueError(
                f"p is conditioned on {name}[t], so a forecast of {past.steps} steps needs its "
                f"future: given={{{name!r}: …}} of shape [{shape}]."
            )
    found = future_of(past.model, given, n, past.steps, "given")
    # A variable that only q reads has no part in the future; its values are not needed.
    zeros = {
        name: past.batch[name].new_zeros(past.steps, n, graph.size(name))
        for name in timed
        if name not in found
    }
    return found | zeros


def future_of(
    model: DeclaredModel, data: Mapping[str, Any], n: int, steps: int, what: str
) -> Batch:
    """Check the future of some variables, [N, steps, …], and lay it out: values and masks.

    A single row, [steps, …], holds for all rows.
    """
    graph = model.graph
    data, lengths = pad(graph, data)
    if lengths is not None:
        raise ValueError(f"{what}: the future has the same {steps} steps in every row.")
    full = {}
    for name, value in data.items():
        tensor = numbers(name, value)
        shape = graph.shapes[name]
        if tensor.shape[:2] != (n, steps) and tensor.shape in ((steps, *shape), (steps,)):
            tensor = tensor.expand(n, *tensor.shape)
        if tensor.dim() < 2 or tensor.shape[:2] != (n, steps):
            wanted = ", ".join(map(str, (n, steps, *shape)))
            raise ValueError(
                f"{what}: the future of {name} has shape {list(tensor.shape)}; expected "
                f"[{wanted}], the {n} row{'s' * (n != 1)} of the past and the {steps} "
                f"step{'s' * (steps != 1)} of the forecast."
            )
        full[name] = tensor
    for name in (name for name in full if name in graph.given):
        _check_known(name, full[name], graph.size(name))
    like = model._parameter()
    return prepare(graph, full, like=like, need=tuple(full), single=True, gaps=True) if full else {}


def _check_known(name: str, value: Tensor, size: int) -> None:
    """Raise ValueError if the future of a given variable has a missing value."""
    unknown = value.isnan() if value.is_floating_point() else torch.zeros_like(value).bool()
    if value.dim() == 2 and size > 1:
        unknown = unknown | (value == -1)
    if bool(unknown.any()):
        row, t = (int(i) for i in unknown.nonzero()[0, :2])
        raise ValueError(
            f"given: the future of {name} is missing in row {row} (from 0) at step {t + 1} of the "
            f"forecast (NaN, or the label −1). A forecast needs every value."
        )
