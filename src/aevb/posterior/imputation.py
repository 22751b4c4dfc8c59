"""Impute missing cells of observed variables, given the known cells.

The results are the mean, the standard deviation and draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aevb.estimate.batch import public
from aevb.estimate.keys import mask_of, real_steps
from aevb.estimate.program import Program
from aevb.evidence.exact_posterior import Components
from aevb.evidence.quantiles import checked_levels, drawn_quantiles, normal_quantiles
from aevb.posterior.amortised import Posterior
from aevb.posterior.exact import ExactPosterior
from aevb.posterior.weighted import WeightedPosterior
from aevb.runtime.seeding import draw_from
from aevb.runtime.shapes import broadcast_shapes

if TYPE_CHECKING:
    from aevb.data.sequence_index import SequenceIndex

ROWS = 4096  # rows per batch, counted once per draw of the latents


@dataclass(frozen=True, repr=False)
class Imputation:
    """Data with imputed cells, by variable and in the shape of the data.

    ``mean`` holds the posterior mean of each missing cell, ``sd`` its standard deviation (0 for
    known cells), ``draws`` joint draws [S, N, …] for multiple imputation. ``missing`` marks the
    imputed cells. Classes are probabilities; entries beyond the end of a sequence are NaN.
    ``method`` is "exact" if mean and sd are exact, "q" if they are averages over ``samples`` draws,
    and "particles" or "importance" if they are averages over weighted draws. ``notes`` are reasons
    not to trust the numbers.
    """

    mean: dict[str, Tensor]
    sd: dict[str, Tensor]
    draws: dict[str, Tensor]
    missing: dict[str, Tensor]
    method: str
    samples: int
    why: str = field(default="")
    index: SequenceIndex | None = None  # of the frame of the data, if they are sequences
    _constant: frozenset[str] = frozenset()  # the variables with one value per row
    # Exact mixtures of normals of the cells, [N, T, K, d]; empty for other families and methods.
    _mixtures: Mapping[str, Components] = field(repr=False, default_factory=dict)
    _discrete: frozenset[str] = frozenset()  # counts, classes and 0-1 variables
    notes: tuple[str, ...] = ()

    def quantile(self, levels: float | Sequence[float]) -> dict[str, Tensor]:
        """Return quantiles of each cell, [Q, N, …] by variable; a known cell is its own quantile.

        They are exact where the posterior is exact and the variable normally distributed, otherwise
        quantiles of the draws. Those of counts are whole numbers.

        Arguments:
            levels: One level between 0 and 1, or Q of them.
        """
        wanted = checked_levels(levels)
        found = {}
        for name, mean in self.mean.items():
            shape = (len(wanted), *mean.shape)
            if not bool(self.missing[name].any()):
                found[name] = mean.expand(shape)
                continue
            if name in self._mixtures:
                values = normal_quantiles(self._mixtures[name], wanted)
            elif name in self.draws:
                discrete = name in self._discrete
                values = drawn_quantiles(self.draws[name], wanted, discrete=discrete)
            else:
                raise ValueError(f"Quantiles of {name} need draws, and this imputation has none.")
            values = values.reshape(shape).to(mean.dtype)
            found[name] = torch.where(self.missing[name], values, mean)
        return found

    def frame(self, levels: Sequence[float] = ()) -> Any:
        """Return the data as a frame, missing cells filled by their means.

        It has the index of the frame that the data were. A column of labels gets the most probable
        class. ``levels`` adds the ends of central intervals, as columns ``x_lower_80``,
        ``x_upper_80``, …; both ends of a known cell are its value.

        Arguments:
            levels: The probabilities of the intervals, such as [0.8, 0.95].

        Raises ValueError if the data were arrays.

        >>> import pandas as pd
        >>> from aevb import zoo
        >>> years = pd.Index([1871, 1872, 1873], name="year")
        >>> flow = pd.Series([3.0, None, 2.0], years, name="flow")
        >>> frame = zoo.local_level().double().impute(x=flow, seed=0).frame(levels=[0.8])
        >>> frame.round(2)  # doctest: +NORMALIZE_WHITESPACE
              flow  flow_lower_80  flow_upper_80
        year
        1871   3.0           3.00           3.00
        1872   2.5           0.69           4.31
        1873   2.0           2.00           2.00
        """
        if self.index is None:
            raise ValueError(
                "The data were arrays, so there is no index to give a frame in. Use .mean, or pass "
                "the data as a frame (aevb.sequences)."
            )
        inside = checked_levels(levels) if len(levels) else []
        ends = [end for level in inside for end in ((1 - level) / 2, (1 + level) / 2)]
        sides = [f"{side}_{100 * level:.12g}" for level in inside for side in ("lower", "upper")]
        quantiles = self.quantile(ends) if ends else {}
        columns: dict[str, Any] = {}
        for name, names in self.index.columns.items():
            if name not in self.mean:
                continue
            mean = self.mean[name]
            timed = name not in self._constant
            kinds = {"": mean} | {
                f"_{side}": value
                for side, value in zip(sides, quantiles.get(name, ()), strict=False)
            }
            for kind, values in kinds.items():
                flat = values.reshape(*values.shape[: 1 + timed], -1).cpu()
                if len(names) != flat.shape[-1]:
                    if kind:
                        continue  # labels have no intervals
                    flat = flat.argmax(-1, keepdim=True)
                whole = flat.numpy()
                whole = whole if timed else whole[:, None].repeat(max(self.index.lengths), 1)
                columns |= {f"{column}{kind}": whole[..., i] for i, column in enumerate(names)}
        return self.index.past_frame(columns)

    def __repr__(self) -> str:
        count = sum(int(mask.sum()) for mask in self.missing.values())
        cells = "1 missing cell" if count == 1 else f"{count} missing cells"
        how = {
            "exact": "the exact posterior",
            "q": f"q, {self.samples} draws",
            "particles": f"a particle filter, {self.samples} draws",
        }.get(self.method, f"weighted draws of q, {self.samples} of them")
        why = f" ({self.why})" if self.why else ""
        return "\n".join(
            [f"{cells} of {', '.join(self.missing)} filled by {how}{why}", *self.notes]
        )

    def _repr_html_(self) -> str:
        from aevb.notebook import result_cards

        return result_cards.imputation_card(self)


def impute(posterior: Posterior, samples: int, *, draws: bool = True) -> Imputation:
    """Impute the missing cells of a posterior's batch by ``samples`` draws of the latents.

    ``draws=False`` leaves ``Imputation.draws`` empty.
    """
    graph, batch = posterior.graph, posterior.batch
    if samples < 1:
        raise ValueError(
            f"samples is the number of draws of the latents to average over, at least 1, got "
            f"{samples}."
        )
    hidden = [name for name in graph.observed if mask_of(name) in batch]
    exact = isinstance(posterior, ExactPosterior)
    found = _by_draws(posterior, hidden, samples) if hidden and (draws or not exact) else {}
    mean, sd, drawn, missing, mixtures = {}, {}, {}, {}, dict[str, Components]()
    specs = {name: graph.rule("p", name).spec for name in graph.observed}
    for name in graph.observed:
        value = batch[name]
        here = (
            ~batch[mask_of(name)] if name in hidden else torch.zeros_like(value, dtype=torch.bool)
        )
        middle, spread = value, torch.zeros_like(value)
        every = value.expand(samples, *value.shape)
        if name in hidden:
            weighed = isinstance(posterior, WeightedPosterior) and name in posterior.gaps
            if weighed or isinstance(posterior, ExactPosterior):
                middle, spread = posterior.moments(name)  # type: ignore[attr-defined]
                if isinstance(posterior, ExactPosterior) and specs[name].gaussian:
                    mixtures[name] = posterior.marginals.components[name]
            else:
                middle, spread = found[name].mean, found[name].sd
            every = found[name].draws if name in found else every
        real = real_steps(batch, timed=graph.timed[name])

        def laid(
            filled: Tensor,
            known: Tensor,
            name: str = name,
            here: Tensor = here,
            real: Tensor | None = real,
        ) -> Tensor:
            whole = torch.where(here, filled, known)
            return public(
                graph,
                name,
                whole if real is None else torch.where(real, whole, torch.nan),
                posterior.n,
                posterior.steps,
            )

        mean[name], sd[name] = laid(middle, value), laid(spread, torch.zeros_like(value))
        if draws:
            drawn[name] = laid(every, value)
        missing[name] = public(
            graph, name, here if real is None else here & real, posterior.n, posterior.steps
        )
    constant = frozenset(name for name in mean if not graph.timed[name])
    discrete = frozenset(name for name, spec in specs.items() if spec.support.is_discrete)
    return Imputation(
        mean,
        sd,
        drawn,
        missing,
        posterior.method,
        samples,
        posterior.why,
        _mixtures=mixtures,
        _constant=constant,
        _discrete=discrete,
    )


@dataclass(frozen=True)
class _Drawn:
    mean: Tensor
    sd: Tensor
    draws: Tensor


def _by_draws(posterior: Posterior, names: list[str], samples: int) -> dict[str, _Drawn]:
    """Return moments and draws of missing entries, from draws of the latents.

    Each has shape [T or 1, N, d].
    """
    model, batch, n = posterior.model, posterior.batch, posterior.n
    drawn_before = posterior.joint(samples)
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    with model._evaluating(posterior.next_seed):
        for start in range(0, samples, block := max(1, ROWS // n)):
            count = min(block, samples - start)
            repeated = Posterior(
                model, {key: value.repeat(1, count, 1) for key, value in batch.items()}
            )
            program = repeated.generated(
                {
                    name: value[start : start + count].movedim(0, 1).flatten(1, 2)
                    for name, value in drawn_before.items()
                }
            )
            for name in names:
                # [3, T or 1, count · N, d]
                found = _given_known(
                    program, name, repeated.batch[name], repeated.batch[mask_of(name)]
                )
                parts[name].append(found.unflatten(-2, (count, n)).movedim(-3, 1))
    result = {}
    for name, each in parts.items():
        mean, variance, drawn = torch.cat(each, 1)
        drawn = drawn_before.get(name, drawn)  # later steps were drawn given these
        total = variance.mean(0) + mean.var(0, correction=0)
        result[name] = _Drawn(
            mean.mean(0),
            torch.where(total.isnan(), drawn.var(0, correction=0), total).sqrt(),
            drawn,
        )
    return result


def _given_known(program: Program, name: str, value: Tensor, present: Tensor) -> Tensor:
    """Stack mean, variance and a draw of a variable given its known entries.

    The variance is NaN if the family has no formula for it.
    """

    def at(region: str) -> Tensor:
        spec, dist = program.distribution("p", name, region)
        here = program.select(present.to(value.dtype), region) > 0
        dist = spec.given_known(dist, program.select(value, region), here)
        mean = dist.mean
        try:
            variance = dist.variance
        except NotImplementedError:
            variance = torch.full_like(mean, torch.nan)
        shape = broadcast_shapes(mean.shape, program.select(value, region).shape)
        drawn = draw_from(dist.expand(shape[: len(shape) - len(dist.event_shape)]))
        return torch.stack([mean.expand(shape), variance.expand(shape), drawn])

    return program.piecewise(name, "p", at)
