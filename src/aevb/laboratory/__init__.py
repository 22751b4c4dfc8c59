"""Compare estimators: measure every valid estimator of a model's bound, on its data and weights.

A *way* is one estimator of the bound: how each latent is drawn, which terms are in closed form, and
the kind of gradient.

>>> import torch
>>> from aevb.laboratory import compare_estimators
>>> from aevb.zoo import gmvae
>>> torch.manual_seed(0)                                                # doctest: +ELLIPSIS
<torch._C.Generator object at ...>
>>> x = torch.rand(20, 8).round()
>>> model = gmvae(x=8, z=2, y=3, hidden=(4,))
>>> found = compare_estimators(
...     model, {"x": x}, replicates=16, samples=(1,), temperatures=(0.5,)
... )
>>> found["elbo K=1: y enumerate, z pathwise closed"].unbiased
True
>>> found["elbo K=1: y gumbel τ=0.5 closed, z pathwise closed"].unbiased
False
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from aevb.data.sources import Source, open_source
from aevb.estimate.batch import Batch
from aevb.laboratory.measurement import (
    Moments,
    Reference,
    Replicates,
    exact_elbo,
    exact_reference,
    gradients,
    groups_of,
    memory,
    replicate,
    sampled_reference,
    squared_bias,
    step,
    timings,
)
from aevb.laboratory.result import Figures, GradientFigures, Laboratory, Target
from aevb.laboratory.ways import How, Way, find_ways
from aevb.model import Model
from aevb.runtime.contention import sharing_cores
from aevb.runtime.evaluation_mode import evaluating
from aevb.training.row_order import Order, seed_of

__all__ = ["Figures", "Laboratory", "compare_estimators"]

TIMES_REFERENCE = 4  # replicates of the reference per replicate of a way


@sharing_cores()
def compare_estimators(
    model: Model,
    data: Mapping[str, Any],
    *,
    rows: int = 50,
    replicates: int = 64,
    samples: Sequence[int] = (1, 10),
    bounds: Sequence[str] = ("elbo", "iwae"),
    temperatures: Sequence[float] = (0.1, 0.5, 1.0),
    how: How | Sequence[How] | None = None,
    rounds: int = 15,
    seed: int = 0,
    tell: Callable[[str], None] | None = None,
) -> Laboratory:
    """Measure every valid estimator of the bound, with the current weights.

    Each way is repeated with independent noise; the rows are fixed and dropout is off. Measured
    are:

    - the bias of the bound, and its variance per example;
    - for θ and φ, the variance (trace of the covariance) and squared bias of the gradient of the
      mean bound;
    - the time of a step, as the median over rounds in which every way takes one turn, and its
      memory.

    Biases are relative to the exact bound if it is known, otherwise to an unbiased way with four
    times the replicates.

    Arguments:
        model: The model.
        data: The rows, as for :func:`fit`.
        rows: The number of rows of the batch.
        replicates: The number of repetitions of each way.
        samples: The numbers of samples to try.
        bounds: The bounds to try.
        temperatures: The temperatures of relaxed draws to try.
        how: One request such as ``{"y": "score"}``, or a list of them, to measure instead of all
            ways.
        rounds: The number of rounds of the timing.
        seed: Decides rows and draws.
        tell: A function that is called with the name of each measurement before it starts.

    Returns:
        A :class:`Laboratory`: ``print`` shows a table and a recommendation.

    >>> from aevb import Normal
    >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
    >>> few = {"samples": (1,), "bounds": ("elbo",), "replicates": 16, "rounds": 1}
    >>> found = compare_estimators(model, {"x": torch.zeros(20, 2)}, **few)
    >>> found["elbo K=1: z pathwise closed"].unbiased
    True
    """
    if rows < 1 or rounds < 1:
        raise ValueError(f"rows and rounds must be at least 1, got {rows} and {rounds}.")
    bad = next((temperature for temperature in temperatures if not temperature > 0), None)
    if bad is not None or not temperatures:
        raise ValueError(
            f"temperatures are positive numbers, got {bad if temperatures else 'none'}."
        )
    Moments(replicates)  # refuse too few replicates before the first measurement
    source = open_source(model.graph, dict(data), model._parameter())
    order = Order(source.n, rows, seed, windows=source.windows)
    batch = source.take(order.rows(0))
    ways, refused = find_ways(
        model, batch, bounds=bounds, samples=samples, temperatures=temperatures, how=how
    )
    tell = tell or (lambda _: None)
    with _differentiating(model):
        references = {}
        for target in dict.fromkeys(way.target for way in ways):
            tell(f"reference of {target}")
            references[target] = _reference(
                model, [way for way in ways if way.target == target], batch, replicates, seed
            )
        targets = []
        for target, (reference, way) in references.items():
            tell(f"batches of {target}")
            between = _between(model, way, reference, source, order, replicates, seed)
            if reference is None:
                targets.append(Target(target, None, None, dict.fromkeys(between, 0.0), between))
            else:
                targets.append(
                    Target(
                        target,
                        reference.name,
                        float(reference.value.mean()),
                        reference.squared_norm,
                        between,
                    )
                )
        tell("time")
        seconds = timings(model, ways, batch, rounds, seed)
        figures = []
        for i, (way, taken) in enumerate(zip(ways, seconds, strict=True), 1):
            tell(f"{i} of {len(ways)}: {way.full_name}")
            # The replicates are freed before the next way, to save memory.
            found = replicate(model, way, batch, replicates, seed)
            figures.append(
                _figures(
                    way, found, references[way.target][0], memory(model, way, batch, seed), *taken
                )
            )
    sizes = {name: sum(p.numel() for p in group) for name, group in groups_of(model).items()}
    kind = "peak on the GPU" if model._parameter().is_cuda else "kept for the backward pass"
    return Laboratory(tuple(figures), tuple(targets), order.batch, replicates, sizes, kind, refused)


@contextmanager
def _differentiating(model: Model) -> Iterator[None]:
    """Enable gradients and disable dropout.

    The noise of dropout belongs to the model, not to the estimator.
    """
    with evaluating(model), torch.enable_grad():
        yield


def _reference(
    model: Model, ways: Sequence[Way], batch: Batch, replicates: int, seed: int
) -> tuple[Reference | None, Way]:
    """Return the reference of a target, and the way that represents the target.

    The way is an unbiased one without draws if there is one, else the one with the most samples.
    """
    unbiased = sorted(
        (way for way in ways if way.unbiased),
        key=lambda way: (bool(way.plan.drawn), -way.plan.samples),
    )
    chosen = (unbiased or list(ways))[0]
    exact = exact_reference(model, batch) if chosen.plan.bound == "elbo" else None
    if exact is not None or not unbiased:
        return exact, chosen
    found = replicate(
        model, chosen, batch, TIMES_REFERENCE * replicates, seed_of(seed, "reference")
    )
    return sampled_reference(chosen, found), chosen


def _between(
    model: Model,
    way: Way,
    reference: Reference | None,
    source: Source,
    order: Order,
    count: int,
    seed: int,
) -> dict[str, float]:
    """Return the variance of the gradient due to the choice of the rows of a batch.

    It is the total variance over batches minus the variance of the noise. It is 0 if a batch holds
    all rows.
    """
    groups = groups_of(model)
    if source.n <= order.batch:
        return dict.fromkeys(groups, 0.0)
    total, noise = ({name: Moments(count) for name in groups} for _ in range(2))
    for m in range(count):
        batch = source.take(order.rows(m))
        if reference is not None and reference.name == "exact":
            value = exact_elbo(model, batch)
            assert value is not None
            pair = [gradients(value, groups)] * 2
        else:  # the same rows twice: half the squared difference is the variance of the noise
            pair = [
                step(model, way, batch, groups, seed_of(seed, "rows", 2 * m + i))[1]
                for i in range(2)
            ]
        for name in groups:
            total[name].add(pair[0][name])
            noise[name].add((pair[0][name] - pair[1][name]) / 2**0.5)
    return {
        name: max(0.0, total[name].variance()[0] - noise[name].variance()[0]) for name in groups
    }


def _figures(
    way: Way,
    found: Replicates,
    reference: Reference | None,
    size: int,
    seconds: float,
    seconds_error: float,
) -> Figures:
    parts = {}
    for name, moments in found.gradients.items():
        variance, error = moments.variance()
        squared, p = (
            (None, None)
            if reference is None
            else squared_bias(moments.blocks - reference.blocks[name])
        )
        parts[name] = GradientFigures(variance, error, squared, p)
    bias = error_of_bias = None
    if reference is not None:
        bias = float((found.value - reference.value).mean())
        error_of_bias = (
            float((found.spread / found.count + reference.error).mean() / len(found.value)) ** 0.5
        )
    plan = way.plan
    scale = sum(
        float(moments.mean.double().square().sum()) + parts[name].variance
        for name, moments in found.gradients.items()
    )
    precision = torch.finfo(found.gradients["theta"].origin.dtype).eps
    return Figures(
        name=way.name,
        bound=plan.bound,
        samples=plan.samples,
        gradient=plan.gradient,
        how=dict(way.how),
        enumerated=list(plan.enumerated),
        temperature=way.temperature,
        target=way.target,
        unbiased=way.unbiased,
        note="; ".join(f"{name}: {note}" for name, note in plan.biased.items()),
        value=float(found.value.mean()),
        bias=bias,
        bias_error=error_of_bias,
        variance=float(found.spread.mean()),
        theta=parts["theta"],
        phi=parts["phi"],
        seconds=seconds,
        seconds_error=seconds_error,
        memory=size,
        rounding=(1000 * precision) ** 2 * scale,
    )
