"""Kalman smoother for any graph: moments and draws of Gaussian unknowns given all data.

Multiply the joint density by exp(λ·v) for an unknown v: the derivative of the log evidence at λ = 0
is E[v | data]. For centred unknowns and the factor exp(−½ vᵀΛv), the derivative at Λ = 0 is −½
Cov[v | data]. The smoother is therefore the filter with weights of zero, and one backward pass
through it. It inverts no covariance, which matters because deterministic functions and known
entries make covariances singular. Missing entries of an observed variable are unknowns, just like
latents.

The weight is applied after the data of the unknown's own step have been processed. The derivative
is then the filtered covariance minus the part that later data explain. If this subtraction leaves
too few digits (for example, a first state that only later steps determine), copies of the unknowns
stay in the belief for some more steps, and the weight is applied later (fixed-lag smoothing).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from aevb.derive.axes import FIRST_SLOT
from aevb.estimate.keys import mask_of
from aevb.evidence.filtering import Filter
from aevb.evidence.gaussian_belief import Column, Rule, apply
from aevb.evidence.square_root_belief import RootBelief, root_of
from aevb.runtime.seeding import generator

# (belief, place, weight) → weighted belief, log of its integral
Weigh = Callable[[RootBelief, slice, Tensor], tuple[RootBelief, Tensor]]
# Smallest share of a variance that a subtraction may leave before a longer lag is tried.
LEFT = 1e-4
# Smallest share that is accepted if only a shorter lag than the next one is possible: the rounding
# error is then a few times 10⁻⁷ of the variance.
ENOUGH = 1e-9
# Smallest share without a warning, if no longer lag is possible. Rounding is then about 1 % of the
# variance: its share is a few times 2·10⁻¹⁶ of the variance before.
LOST = 1e-13
LARGEST = 2**25  # largest number of elements in the covariances of beliefs with copies


class Smoother:
    """Means, covariances and draws of Gaussian unknowns given all data, in float64.

    Results are computed for each joint value of the discrete latents that the unknowns depend on.
    ``names`` are the requested unknowns: latents, and observed variables with missing entries.
    """

    def __init__(
        self,
        integral: Filter,
        slots: Mapping[str, tuple[int, int | None]],
        sizes: Mapping[str, int],
        names: Sequence[str],
    ) -> None:
        self.filter, self.graph, self.structure = integral, integral.graph, integral.structure
        self.names, self.like, self.steps = tuple(names), integral.like, integral.steps
        self.rules = {name: rule.detached() for name, rule in integral.rules.items()}
        self.n = next(iter(integral.batch.values())).shape[-2]
        self.data = {
            name: integral.batch[name].double()
            for name in integral.linked
            if name in integral.batch
        }
        self.keep = {name: integral._keep(name) for name in self.data}
        self.hidden = {
            name
            for name in self.data
            if name not in self.structure.gaussian and mask_of(name) in integral.batch
        }
        axes = {
            slot: sizes[name]
            for name, place in self.structure.linked_axes
            if (slot := slots[name][1 if place else 0]) is not None
        }
        self.lead = [
            axes.get(axis, 1) for axis in range(min(axes, default=FIRST_SLOT), FIRST_SLOT + 1)
        ]

    # Results --------------------------------------------------------------------------------------

    def means(
        self, data: Mapping[str, Tensor] | None = None, samples: int = 1
    ) -> dict[str, Tensor]:
        """Return E[v | data] of each variable, [axes, 1, T or 1, N, d].

        For ``samples`` data sets of shape [S, T or 1, N, d], the result is [axes, S, T or 1, N, d].
        """
        weights = self._weights(samples, self.n, 1)
        return self._derivatives(
            weights, RootBelief.weighted_mean, self.data if data is None else data, self.rules
        )

    def covariances(self) -> dict[str, Tensor]:
        """Return Cov[v | data] of each variable, [axes, 1, T or 1, N or 1, d, d].

        The covariance depends only on which entries are known, not on their values.
        """
        rules = {
            name: Rule(rule.matrices, torch.zeros_like(rule.offset[..., :1, :]), rule.noise)
            for name, rule in self.rules.items()
        }
        parts = [part for rule in rules.values() for part in (rule.noise, *rule.matrices.values())]
        shared = all(part.shape[-3] == 1 for part in parts) and all(
            keep is None for keep in self.keep.values()
        )
        weights = self._weights(1, 1 if shared else self.n, 2)
        zeros = {name: torch.zeros_like(value[:, :1]) for name, value in self.data.items()}
        copies = [name for name in self.names if self._carried(name)]
        numbers, wide, wait = (
            sum(weights[name][..., 0, 0].numel() for name in copies[:1]),
            sum(map(self.graph.size, copies)),
            0,
        )
        while True:
            before: dict[tuple[str, int], Tensor] = {}
            less = self._derivatives(
                weights, RootBelief.weighted_covariance, zeros, rules, wait, before
            )
            found = {name: -(value + value.mT) for name, value in less.items()}
            if not _lost(found, before, LEFT):
                return found
            longest = min(self.steps, int((LARGEST / numbers) ** 0.5 / wide))
            longer = 4 * (wait + 1)
            if wait >= longest or (longer > longest and not _lost(found, before, ENOUGH)):
                break
            wait = min(longer, longest)
        if _lost(found, before, LOST):
            fewer = ", or ask for fewer rows at a time" if numbers > self.steps else ""
            warnings.warn(
                f"Variances of the exact posterior may be wrong by 1 % or more: a step's variance "
                f"falls by more than 10¹³ once later data are known. Give the first step a smaller "
                f"standard deviation, such as zoo.seasonal(12, start=1e3){fewer}.",
                stacklevel=2,
            )
        return found

    def draw(self, samples: int) -> dict[str, Tensor]:
        """Draw the variables jointly given all data, [S, T or 1, N, d].

        No discrete latent may be unknown. Draw (v, x′) from p, then return v + E[v | x] − E[v |
        x′], which is a draw given the data x (Matheron's rule, as in the simulation smoother of
        Durbin and Koopman).
        """
        drawn = self._from_p(samples)
        ours, theirs = self.means(), self.means({name: drawn[name] for name in self.data}, samples)
        return {
            name: (drawn[name] + ours[name] - theirs[name]).reshape(samples, *ours[name].shape[-3:])
            for name in self.names
        }

    # Implementation -------------------------------------------------------------------------------

    def _carried(self, name: str) -> bool:
        return self.structure.carried and self.graph.timed[name]

    def _weights(self, samples: int, n: int, axes: int) -> dict[str, Tensor]:
        """Zeros to differentiate by, per value of the discrete latents, step and row.

        ``axes`` is 1 for vectors and 2 for matrices.
        """
        found = {}
        for name in self.names:
            shape = (
                *self.lead,
                samples,
                self.steps if self.graph.timed[name] else 1,
                n,
                *[self.graph.size(name)] * axes,
            )
            found[name] = torch.zeros(
                shape, dtype=self.like.dtype, device=self.like.device, requires_grad=True
            )
        return found

    def _derivatives(
        self,
        weights: dict[str, Tensor],
        weigh: Weigh,
        data: Mapping[str, Tensor],
        rules: Mapping[str, Rule],
        lag: int = 0,
        before: dict[tuple[str, int], Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Differentiate the weighted log evidence by the weights.

        The variances at the time of weighting are stored in ``before``.
        """
        with torch.enable_grad():
            total = self._weighted(
                weights, weigh, data, rules, lag, {} if before is None else before
            ).sum()
        return dict(zip(weights, torch.autograd.grad(total, list(weights.values())), strict=True))

    def _weighted(
        self,
        weights: Mapping[str, Tensor],
        weigh: Weigh,
        data: Mapping[str, Tensor],
        rules: Mapping[str, Rule],
        wait: int,
        before: dict[tuple[str, int], Tensor],
    ) -> Tensor:
        """Run the filter with each requested unknown weighted ``wait`` steps after its own step.

        Unknowns without a time axis are weighted at the end. Returns the log evidence.
        """
        belief, total = RootBelief.empty(self.like), self.like.new_zeros(1, 1)
        at_once = [name for name in self.filter.linked if not self._carried(name)]

        def weighted(column: Column, weight: Tensor) -> None:
            nonlocal belief, total
            belief, found = weigh(belief, belief.columns[column], weight)
            total = total + found

        def visit(name: str, rule: Rule, value: Tensor | None, keep: Tensor | None) -> None:
            nonlocal belief, total
            unknown = name in self.structure.gaussian or name in self.hidden
            belief, found = belief.visited((name, 0) if unknown else None, rule, value, keep)
            total = total + found

        def through_time() -> None:
            nonlocal belief
            names = [name for name in self.filter.linked if name not in at_once]
            lag = -self.structure.direction
            forever = {column: column for column in belief.columns}
            remembered = {
                (name, 0): (name, lag)
                for name in names
                if any((name, lag) in rule.matrices for rule in rules.values())
            }
            for name, _ in remembered:  # the state before the first step is zero
                belief = belief.extended((name, lag), self._zeros(name))
            each = {name: rules[name].steps(self.steps) for name in names}
            values, keep = (
                {name: self.filter._steps(part.get(name)) for name in names}
                for part in (data, self.keep)
            )
            axis = (
                -3 if all(weight.dim() == len(self.lead) + 4 for weight in weights.values()) else -4
            )
            weight = {name: weights[name].split(1, axis) for name in names if name in weights}
            waiting: list[tuple[str, int, Column]] = []
            for step, t in enumerate(order := self._order()):
                for name in names:
                    visit(name, each[name][t], values[name][t], keep[name][t])
                for name in weight:
                    if wait:
                        belief = belief.extended(
                            (f"{name}, step {t}", 0), self.filter._itself(name)
                        )
                    waiting.append((name, t, (f"{name}, step {t}" if wait else name, 0)))
                while waiting and (step == len(order) - 1 or abs(t - waiting[0][1]) >= wait):
                    name, then, column = waiting.pop(0)
                    place = belief.columns[column]
                    before[name, then] = belief.root[..., place, :].square().sum(-1).detach()
                    weighted(column, weight[name][then])
                belief = belief.kept(
                    forever | remembered | {column: column for *_, column in waiting}
                )

        for name in at_once:
            visit(name, rules[name], data.get(name), self.keep.get(name))
        if self.structure.carried:
            through_time()
        for name in at_once:
            if name in weights:
                weighted((name, 0), weights[name])
        return total

    def _zeros(self, name: str) -> Rule:
        d = self.graph.size(name)
        return Rule({}, self.like.new_zeros(1, 1, d), self.like.new_zeros(1, 1, d, d))

    def _order(self) -> range:
        return range(self.steps) if self.structure.direction > 0 else range(self.steps - 1, -1, -1)

    def _from_p(self, samples: int) -> dict[str, Tensor]:
        """Draw from p every variable that is a Gaussian unknown or reads one."""
        found: dict[str, Tensor] = {}
        before: dict[str, Tensor] = {}
        rules = self.rules

        def follow(rule: Rule, steps: int) -> Tensor:
            value = rule.offset
            for (parent, lag), matrix in rule.matrices.items():
                if not lag or parent in before:  # values outside the sequence are zero
                    value = value + apply(matrix, before[parent] if lag else found[parent])
            shape, device = (samples, steps, self.n, value.shape[-1]), self.like.device
            noise = torch.randn(
                shape, dtype=self.like.dtype, device=device, generator=generator(device)
            )
            return value + apply(root_of(rule.noise), noise)

        at_once = [name for name in self.filter.linked if not self._carried(name)]
        for name in at_once:
            found[name] = follow(rules[name], self.steps if self.graph.timed[name] else 1)
        names = [name for name in self.filter.linked if name not in at_once]
        each = {name: rules[name].steps(self.steps) for name in names}
        drawn: dict[str, dict[int, Tensor]] = {name: {} for name in names}
        for t in self._order() if names else ():
            for name in names:
                found[name] = drawn[name][t] = follow(each[name][t], 1)
            before = {name: found[name] for name in names}
        return found | {
            name: torch.cat([steps[t] for t in range(self.steps)], -3)
            for name, steps in drawn.items()
        }


def _lost(
    covariances: Mapping[str, Tensor], before: Mapping[tuple[str, int], Tensor], share: float
) -> bool:
    """Return whether a smoothed variance is below ``share`` times its filtered variance."""
    left = {
        key: covariances[key[0]].select(-4, key[1]).diagonal(dim1=-2, dim2=-1) for key in before
    }
    return any(
        bool((left[key] < share * variance.squeeze(-3)).any()) for key, variance in before.items()
    )
