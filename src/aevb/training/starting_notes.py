"""Notes that a run records before its first step: what it will not train, and odd data."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from aevb.data.narrow_starts import note_narrow_starts
from aevb.data.repeated_values import LOOK, note_numbering, note_repeated_rows
from aevb.data.short_series import note_short_series
from aevb.data.small_scales import note_small_scales
from aevb.data.sources import Source
from aevb.data.unscaled import moments_of, note_unscaled
from aevb.data.zero_starts import note_zero_starts
from aevb.declare.families import Exact
from aevb.estimate.batch import Batch
from aevb.model import Model
from aevb.posterior.training_record import with_weights
from aevb.runtime import private_torch
from aevb.training import events
from aevb.training.events import Event
from aevb.training.job import Job, has_hidden_layers
from aevb.training.purity import UNKNOWN_HOOKS, why_not_recorded
from aevb.training.settings import penalties_of
from aevb.training.trained_factors import known_everywhere

FEW_STEPS = 1000  # of a run whose length is the default
MOST_ROWS, MOST_ENTRIES = 512, 2**22  # of the rows whose scale is examined

PREPARED = {
    "dequantise": "dequantised to (0, 1): (x + u) / 256, with u uniform on [0, 1)",
    "threshold": "thresholded: 1 from 128 on, else 0",
}


def notes_at_start(job: Job) -> Iterator[Event]:
    """Return the events to record before the first step."""
    yield from _latents_known_everywhere(job)
    yield from _labels_without_effect(job)
    for name, how in job.source.pixels.items():
        if how in PREPARED:
            text = f"{name} holds images of bytes, {PREPARED[how]}."
            yield Event(events.PIXELS, name, text)
    if job.settings.penalised:
        text = (
            f"The run maximises the objective, which has {penalties_of(job.settings)}. The "
            f"{job.settings.bound} and its terms are reported without them."
        )
        yield Event(events.OBJECTIVE, "run", text)
    if job.settings.bound != "elbo" and job.plan.samples == 1:
        text = f"The run maximises the ELBO: with 1 sample, the bound {job.settings.bound} is that."
        yield Event(events.OBJECTIVE, "run", text, "Take several, such as samples=5.")
    if job.settings.bound == "particles" and job.settings.schedule.objective == "bound":
        for name, family in job.plan.undifferentiated().items():
            text = (
                f"Missing values of {name} are drawn from p. A {family} draw has no gradient, so "
                f"the gradient leaves out how these draws depend on p."
            )
            yield Event(events.BIASED, name, text)
    yield from _few_steps(job)
    if job.windows is not None:
        yield Event(events.WINDOWS, "run", str(job.windows))
    for text in _odd_data(job):
        yield Event(events.REPEATED, "data", text)
    for text in job.markers:
        yield Event(events.MARKER, "data", text)
    # Trained networks no longer start near mean 0 and scale 1.
    new = job.settings.schedule.objective == "bound" and not job.model.teaching.trained
    yield from notes_on_scales(job.model, rows_for_scales(job.source), new=new)
    if job.compiling is not None and job.compiling.compile:
        yield Event(events.COMPILED, "run", str(job.compiling))
    if slower := private_torch.slower():
        text = (
            f"torch {torch.__version__} lacks private functions that aevb uses, so these are "
            f"slower: {', '.join(slower)}."
        )
        yield Event(events.NOT_COMPILED, "run", text)
    if why_not_recorded(job.model, job.settings, job.plan) == UNKNOWN_HOOKS:
        text = f"Steps run as they are written: {UNKNOWN_HOOKS}."
        yield Event(events.NOT_COMPILED, "run", text)
    if job.settings.schedule.objective == "evidence" and with_weights(job.model):
        remedy = (
            "Judge the run by the evidence: the elbo, its terms and the gap use q as it was "
            "before the run."
        )
        yield Event(events.P_ALONE, "q", "mle() trains p alone.", remedy)
    if job.in_batches is not None:
        text = (
            f"mle() takes Adam's steps on batches instead of L-BFGS on all rows: {job.in_batches}."
        )
        yield Event(events.IN_BATCHES, "run", text)


def rows_for_scales(source: Source) -> Batch:
    """Return rows that lie evenly over the data, few enough to be read in no time."""
    each = sum(value.numel() for value in source.take(torch.arange(1)).values())
    count = min(source.n, MOST_ROWS, max(2, MOST_ENTRIES // each))
    return source.take(torch.linspace(0, source.n - 1, count, dtype=torch.float64).round().long())


def notes_on_scales(model: Model, rows: Batch, *, new: bool = True) -> Iterator[Event]:
    """Return events about data on a scale for which the model is not made.

    ``new`` says that steps on the bound train networks from their start, rather than exact methods.
    """
    for text in note_narrow_starts(model.graph, rows):
        yield Event(events.NARROW_START, "p", text)
    if (short := note_short_series(model.graph, rows)) is not None:
        yield Event(events.SHORT, "data", short)
    for name, text, remedy in note_zero_starts(model.graph, rows):
        yield Event(events.ZERO_START, name, text, remedy)
    columns = moments_of(model.graph, rows)
    for name, text, remedy in note_small_scales(model.graph, columns):
        yield Event(events.SMALL_SCALE, name, text, remedy)
    if new and has_hidden_layers(model):
        for name, text, remedy in note_unscaled(model.graph, columns):
            yield Event(events.UNSCALED, name, text, remedy)


def _few_steps(job: Job) -> Iterator[Event]:
    """Note that the default number of epochs has few steps, because the data are small."""
    settings = job.settings
    asked = settings.steps is not None or settings.epochs is not None
    if asked or settings.schedule.objective != "bound" or job.total >= FEW_STEPS:
        return
    text = (
        f"By default fit makes at most 200 epochs, and with these data that is only {job.total} "
        f"steps of the optimiser."
    )
    yield Event(events.FEW_STEPS, "run", text, "If the bound still rises, give steps=2000.")


def _latents_known_everywhere(job: Job) -> Iterator[Event]:
    for name in known_everywhere(job):
        could_classify = (
            name in job.labelled and job.model.graph.latent_behind(name) is None and job.em is None
        )
        remedy = (
            f"To train q({name}|·) too, add classify=1 (--classify 1); to infer {name}"
            if could_classify
            else f"To infer {name}"
        )
        yield Event(
            events.UNTAUGHT,
            name,
            f"{name} is known in every row: nothing teaches q({name}|·).",
            f"{remedy} without labels, leave {name} out of the data.",
        )


def _labels_without_effect(job: Job) -> Iterator[Event]:
    """Note partly labelled discrete latents whose q the labels do not train."""
    graph, s = job.model.graph, job.settings
    if s.schedule.objective != "bound" or s.classify:
        return
    for name in job.labelled:
        if (
            name in job.plan.partial
            and not isinstance(graph.rule("q", name).spec, Exact)
            and graph.latent_behind(name) is None
        ):
            yield Event(
                events.LABELS,
                name,
                f"{name} is known in some rows. The bound of these rows has no term with "
                f"q({name}|·), so their labels do not train it.",
                f"To train q to predict {name}, add classify=1 (--classify 1).",
            )


def _odd_data(job: Job) -> list[str]:
    """Return notes about a sample of rows.

    They report values repeated under a density, and columns that look like row numbers.
    """
    graph, source = job.model.graph, job.source
    first = source.read(torch.arange(min(LOOK, source.n)))
    return [
        *note_repeated_rows(graph, source),
        *note_numbering(graph, first, source.fresh, source.places),
    ]
