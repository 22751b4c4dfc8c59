"""The job of a run: everything that is fixed before its first step.

:func:`prepare_job` opens the data and derives from them the plan, the order of the rows and the
number of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from aevb.data.markers import array_warnings
from aevb.data.repeated_values import refuse_degenerate
from aevb.data.sequences import is_frame
from aevb.data.sources import Source, open_source, read_arrays
from aevb.declare.deterministic import Recurrence
from aevb.declare.graph import Graph
from aevb.declare.networks import MLP
from aevb.declare.own_networks import Wrapped
from aevb.derive.completion import incomplete
from aevb.derive.plan import Plan
from aevb.estimate.batch import Batch, split_latents
from aevb.evidence.exact import why_not_exact
from aevb.model import Model
from aevb.posterior.choice import open_ended
from aevb.runtime.checked_files import DataWarning
from aevb.training import schedules
from aevb.training.compile_choice import Choice, choose
from aevb.training.cropping import cropping_pays
from aevb.training.display import Checking
from aevb.training.distributed import World, join
from aevb.training.em import Regressions, Responsibilities, exact_em
from aevb.training.maximum_likelihood import why_in_batches
from aevb.training.purity import too_long_to_record, why_not_recorded
from aevb.training.row_order import Order
from aevb.training.settings import Settings
from aevb.training.windows import Windows, check_windows

ITERATIONS = 1000  # default limit for iterations over all rows; they usually converge earlier


@dataclass(frozen=True)
class Job:
    """What a run trains, on which rows, how, and for how many steps."""

    model: Model
    plan: Plan
    source: Source
    order: Order
    settings: Settings  # with lr, samples and compile=, if the user gave none
    world: World
    labelled: Sequence[str]  # discrete latents with labels in some rows
    classes: Sequence[str]  # discrete latents whose q is a function of the data
    em: Regressions | Responsibilities | None
    total: int  # steps of the whole run
    on_all_rows: bool  # whether a step is an iteration over all rows (closed-form EM, L-BFGS)
    in_batches: str | None  # why mle() takes batches although the evidence is exact
    frozen: Sequence[str]  # parameters that are not trained
    markers: Sequence[str]  # warnings about values that look like markers of missing values
    crops: bool  # whether a batch is cut to its own longest row
    too_long: str | None  # why the steps' loops over time are not recorded
    windows: Windows | None  # which window of time each step takes; None for whole sequences
    compiling: Choice | None  # why the steps are compiled or not, if it was considered

    @property
    def per_epoch(self) -> int:
        """The number of steps per pass over the data."""
        windows = 1.0 if self.windows is None else self.windows.per_batch()
        return max(1, round(self.source.n / self.order.batch * windows))

    def epochs(self, step: int) -> float:
        """Return how many passes over the data a number of steps is."""
        batches = step if self.windows is None else self.windows.batches(step)
        return batches * self.order.batch / self.source.n

    @cached_property
    def open_ends(self) -> bool:
        """Whether sequences end in time steps without data, judged by the first 1,000 rows."""
        graph = self.model.graph
        return any(graph.timed[name] for name in graph.observed) and open_ended(
            graph, self.source.take(torch.arange(min(1000, self.source.n)))
        )


def prepare_job(
    model: Model,
    data: Any,
    asked: Settings,
    *,
    progress: bool | None = False,
    look_for_markers: bool = True,
) -> Job:
    """Open the data and return the job of a run.

    ``progress`` shows how the data are checked. ``look_for_markers=False`` is for rows that the
    command line has already searched for markers of missing values.
    """
    settings = asked if asked.lr is not None else replace(asked, lr=usual_rate(model))
    like = model._parameter()
    if like.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"The model is in {str(like.dtype)[6:]}, too coarse to train in. Train model.float(); "
            'precision="bf16" then computes matrix products in bfloat16.'
        )
    world = join(like.device)
    world.copy_first(list(model.state_dict().values()))
    source = open_source(model.graph, data, like, Checking(progress if world.first else False))
    model.teaching.check_columns(source.columns)
    markers = _markers(model.graph, data) if look_for_markers else []
    refuse_degenerate(model.graph, source)
    em = (
        exact_em(model, settings.schedule.least)
        if isinstance(settings.schedule, schedules.em)
        else None
    )
    first = source.take(torch.arange(min(2, source.n)))
    exact = settings.schedule.objective == "evidence" and why_not_exact(model, first) is None
    in_batches = why_in_batches(model, source, asked) if exact else None
    on_all_rows = (exact and in_batches is None) or (em is not None and em.closed)
    size = source.n if on_all_rows else settings.batch
    unbounded = on_all_rows and settings.steps is None and settings.epochs is None
    plan = _plan(model, settings, first)
    settings = replace(settings, samples=plan.samples)
    order = Order(
        source.n,
        size,
        settings.seed,
        like.device if source.near else None,
        windows=source.windows,
    )
    windows = None
    if settings.window is not None:
        check_windows(model.graph, plan, settings, world.size, source)
        windows = Windows(model.graph, source, order, settings.window)
    per_batch = 1.0 if windows is None else windows.per_batch()
    total = ITERATIONS if unbounded else settings.total(source.n, size, per_batch)
    compiling = None
    steps = model._extent(first)[1] if windows is None else windows.size
    too_long = too_long_to_record(model, plan, steps)
    not_recorded = why_not_recorded(model, settings, plan, world.size)
    bounded = settings.schedule.objective == "bound" and windows is None and not settings.compile
    crops = bounded and cropping_pays(source, order)
    if crops:
        settings = replace(settings, compile=False)
    if settings.compile is None and not_recorded is None and too_long is None:
        rows = torch.arange(min(size, source.n))
        batch = source.take(rows) if windows is None else windows.read(rows, windows.times(0))
        compiling = choose(model, plan, batch, total)
    if settings.compile is None:
        settings = replace(settings, compile=compiling is not None and compiling.compile)
    return Job(
        model=model,
        plan=plan,
        source=source,
        order=order,
        settings=settings,
        world=world,
        labelled=_labelled(model.graph, first),
        classes=_classes(model.graph),
        em=em,
        total=total,
        on_all_rows=on_all_rows,
        in_batches=in_batches,
        frozen=frozen(model),
        markers=[str(warning) for warning in markers],
        crops=crops,
        too_long=too_long,
        windows=windows,
        compiling=compiling,
    )


def frozen(model: Model) -> list[str]:
    """Return the names of the frozen parameters."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def usual_rate(model: Model) -> float:
    """Return the default learning rate: larger for linear models than for models with networks."""
    return 2e-3 if has_hidden_layers(model) else 0.05


def has_hidden_layers(model: Model) -> bool:
    """Return whether a factor has a network with a hidden layer."""
    return any(map(_has_hidden_layer, model.modules()))


def _has_hidden_layer(module: torch.nn.Module) -> bool:
    """Return whether a module is a network with a hidden layer.

    A network of the user counts as one unless it is a single linear layer.
    """
    if isinstance(module, MLP):
        return bool(module.spec.hidden)
    if isinstance(module, Wrapped):
        return not isinstance(module.module, torch.nn.Linear)
    return isinstance(module, torch.nn.Conv2d | torch.nn.ConvTranspose2d | Recurrence)


def _markers(graph: Graph, data: Any) -> list[DataWarning]:
    """Return warnings about values that look like markers of missing values."""
    if is_frame(data) or (isinstance(data, Mapping) and any(map(is_frame, data.values()))):
        data = read_arrays(data, graph)
        data = {name: np.asarray(one) if is_frame(one) else one for name, one in data.items()}
    return array_warnings(data, graph.observed) if isinstance(data, Mapping) else []


def _plan(model: Model, settings: Settings, batch: Batch) -> Plan:
    clamped, partial = split_latents(model.graph, batch)
    how = dict(settings.how or {})
    if settings.schedule.objective != "bound" and settings.bound != "particles":
        # No gradient is taken of the bound.
        how |= dict.fromkeys(incomplete(model.graph, partial), "detached")
    return model.plan(
        how=how,
        bound=settings.bound,
        samples=settings.samples,
        gradient=settings.gradient,
        resample=settings.resample,
        clamped=clamped,
        partial=partial,
    )


def _labelled(graph: Graph, batch: Batch) -> list[str]:
    """Return the discrete latents that the data have labels for."""
    return [name for name in graph.latents if name in batch and graph.rule("q", name).spec.finite]


def _classes(graph: Graph) -> list[str]:
    """Return the discrete latents without a time index whose q depends on data alone."""
    return [
        name
        for name in graph.latents
        if graph.rule("q", name).spec.categorical
        and not graph.timed[name]
        and graph.latent_behind(name) is None
    ]
