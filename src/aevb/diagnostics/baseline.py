"""The density of the rows under independent columns, which a good model exceeds.

Each column has one distribution for all rows and steps, by maximum likelihood: frequencies,
a Poisson, or a Gaussian, as the support of p's family demands. The rows of either half are judged
by the distributions of the other half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints

from aevb.diagnostics.finding import Finding
from aevb.diagnostics.paired import known, observed_numbers, paired
from aevb.model import Model

FEW = 40  # rows; with fewer, the distributions are fitted to the rows that they judge
PARAMETERS = 2  # of a column, at most
HALF = 0.5  # of an observation of each value, added to the counts
EQUAL = 1e-12  # share of the squared mean; a column with a smaller variance counts as constant

Density = Callable[[Tensor], Tensor]  # values [T or 1, N, d] → log density of each entry


def independent_columns(model: Model, batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return log p of every row under independent columns, [N].

    None if a variable has no such distribution: its support has none in closed form, or a column is
    constant.
    """
    n = model._extent(batch)[0]
    total = torch.zeros(n, dtype=torch.float64)
    even, odd, whole = slice(0, n, 2), slice(1, n, 2), slice(None)
    parts = [(even, odd), (odd, even)] if n >= FEW else [(whole, whole)]
    for name in model.graph.observed:
        values, seen = batch[name].double().cpu(), known(model, batch, name).cpu()
        support = model.graph.rule("p", name).spec.support
        for fitted, judged in parts:
            found = _fit(support, values[:, fitted], seen[:, fitted])
            if found is None:
                return None
            terms = torch.where(seen[:, judged], found(values[:, judged]), 0.0)
            total[judged] += terms.sum((0, -1))
        if fitted is judged:  # what the fit to the rows themselves may gain by chance
            total -= PARAMETERS * values.shape[-1] / n
    return total


def _fit(support: constraints.Constraint, values: Tensor, seen: Tensor) -> Density | None:
    """Return the maximum-likelihood density of each entry, [d] distributions; None without one."""
    count = seen.sum((0, 1)).double()
    if support is constraints.positive:
        logs = _fit(constraints.real, torch.where(seen, values, 1.0).log(), seen)
        return None if logs is None else lambda new: logs(new.log()) - new.log()
    mean = torch.where(seen, values, 0.0).sum((0, 1)) / count.clamp_min(1)
    if support is constraints.one_hot:
        share = (mean * count + HALF) / (count + HALF * len(mean))
        return lambda new: new * share.log()
    if support is constraints.boolean:
        return td.Bernoulli(
            (mean * count + HALF) / (count + 2 * HALF), validate_args=False
        ).log_prob
    if support is constraints.nonnegative_integer:
        rate = (mean * count + HALF) / (count + 1)
        return td.Poisson(rate, validate_args=False).log_prob
    if support is constraints.real:
        variance = torch.where(seen, (values - mean).square(), 0.0).sum((0, 1)) / count.clamp_min(1)
        if not bool((variance > EQUAL * mean.square()).all()):
            return None
        return td.Normal(mean, variance.sqrt(), validate_args=False).log_prob
    return None


def judge_baseline(
    what: str, values: Tensor, model: Model, batch: Mapping[str, Tensor]
) -> list[Finding]:
    """Report whether the model explains the rows worse than independent columns do.

    ``values`` is its log p or bound per row, which ``what`` names.
    """
    found = independent_columns(model, batch)
    if found is None:
        return []
    baseline, values = found, values.double().cpu()
    worse = paired(baseline - values, observed_numbers(model, batch))
    if not worse.clear:
        return []
    means = float(values.mean()), float(baseline.mean())
    text = (
        f"The model is worse than independent columns: {what} is {means[0]:.2f} nats per example; "
        f"columns that are independent, each with one distribution for all rows, have log p "
        f"{means[1]:.2f}. Row by row they are better by {worse}."
    )
    figures = asdict(worse) | {"model": means[0], "independent columns": means[1]}
    remedy = (
        "Train longer or with a larger lr. If that does not help, look at p: a network that ends "
        "in a Sigmoid, Softmax or ReLU cannot reach all parameters (the family applies its own "
        "function), and a fixed scale= may not suit the data."
    )
    return [Finding("warning", "worse than independent columns", "run", text, figures, remedy)]
