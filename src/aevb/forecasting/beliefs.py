"""The result of filtering and smoothing: beliefs about the latents at each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributions as td
from torch import Tensor

from aevb.estimate.keys import real_steps
from aevb.posterior.amortised import Posterior
from aevb.runtime.suggestions import did_you_mean

if TYPE_CHECKING:
    from aevb.data.sequence_index import SequenceIndex

SHOWN = 3  # rows that the text of beliefs shows


@dataclass(frozen=True, repr=False)
class Beliefs:
    """Beliefs about the latents at each step, p(z[t] | x[0..t]) or p(z[t] | all x).

    Beyond the end of a row all numbers are NaN. ``beliefs["z"]`` is a torch distribution, where the
    method gives one.

    Attributes:
        mean: The means [N, T, …] by latent. A latent without time has one belief per step in a
            filter and one per row, [N, …], in a smoother.
        sd: The standard deviations, in the same shapes.
        probs: The probabilities of the values of finite latents, [N, T, C].
        filtered: Whether each step is given the data up to it only.
        method: "exact", "particles" or "q".
        why: Why the method was chosen.
        lengths: The number of steps of each row.
        samples: The number of particles or draws behind the numbers, 0 if they are exact.
        draws: Joint draws of the latents, [S, N, T, …], of a smoother by particles.
        notes: Reasons not to trust the numbers.
        index: The ids and times of the data if they were a frame.

    >>> from aevb import zoo
    >>> beliefs = zoo.hmm(x=1, y=2).filter(x=torch.zeros(1, 5, 1), method="exact")
    >>> beliefs.filtered, beliefs.probs["y"].shape, beliefs["y"].mean.shape
    (True, torch.Size([1, 5, 2]), torch.Size([1, 5, 2]))
    """

    mean: dict[str, Tensor]
    sd: dict[str, Tensor]
    probs: dict[str, Tensor]
    filtered: bool
    method: str
    why: str
    lengths: Tensor  # the number of steps of each row
    samples: int = 0
    draws: dict[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # reasons not to trust the numbers
    _posterior: Posterior | None = None
    index: SequenceIndex | None = None  # of the frame of the data
    _constant: frozenset[str] = frozenset()  # the latents with one belief per row

    def _by_step(self, name: str) -> bool:
        """Return whether a latent has a belief for each step, not one per row."""
        return name not in self._constant

    def frame(self) -> Any:
        """Return a frame with one line per step of the data, in their index.

        Columns are ``z_mean`` and ``z_sd``, for finite latents the probabilities of their values,
        ``z_p0``, ``z_p1``, …. A latent without time is repeated on the lines of its sequence.

        >>> import pandas as pd
        >>> from aevb import zoo
        >>> years = pd.Index([1871, 1872, 1873], name="year")
        >>> flow = pd.Series([3.0, 1.0, 2.0], years, name="flow")
        >>> list(zoo.local_level().smooth(x=flow).frame())
        ['level_mean', 'level_sd']
        """
        from aevb.data.sequence_index import entry_names, numbered

        lengths = self.lengths.tolist()
        index = self.index or numbered(lengths)
        columns = {}
        for name, mean in self.mean.items():
            kinds = {"mean": mean, "sd": self.sd[name]}
            if name in self.probs:
                probs = self.probs[name]
                kinds = {f"p{i}": probs[..., i, None] for i in range(probs.shape[-1])}
            for kind, value in kinds.items():
                timed = self._by_step(name)
                flat = value.reshape(*value.shape[: 1 + timed], -1).cpu().numpy()
                if not timed:
                    flat = flat[:, None].repeat(max(lengths), 1)
                for i, entry in enumerate(entry_names(index, name, flat.shape[-1])):
                    columns[f"{entry}_{kind}"] = flat[..., i]
        return index.past_frame(columns)

    def __getitem__(self, name: str) -> td.Distribution:
        """Return the belief about one latent as a torch distribution with batch [N, T]."""
        if self._posterior is None:
            if name not in self.mean:
                raise ValueError(
                    f"{name!r} is not an unknown latent; those are {', '.join(self.mean)}."
                    f"{did_you_mean(name, self.mean)}"
                )
            raise ValueError(
                f"Beliefs by particles have no distribution for {name!r}. Use .mean[{name!r}], "
                f".sd[{name!r}], or .probs for finite latents."
            )
        return self._posterior[name]

    def __repr__(self) -> str:
        n = len(self.lengths)
        rows = "1 row" if n == 1 else f"{n} rows"
        how = self.method + (f", {self.samples} particles" if self.method == "particles" else "")
        given = "the data up to it" if self.filtered else "all data"
        lines = [
            f"Beliefs about {', '.join(self.mean) or 'nothing'} at each step given {given}, "
            f"{rows} ({how}{f': {self.why}' if self.why else ''})"
        ]
        for name in self.mean:
            timed = self._by_step(name)
            for row in range(min(n, SHOWN)):
                last = int(self.lengths[row]) - 1
                parts = [
                    self._at(name, (row, t) if timed else (row,), f"step {t + 1} " if timed else "")
                    for t in (dict.fromkeys((0, last)) if timed else (0,))
                ]
                lines.append(f"  {name}, row {row}: {'; '.join(parts)}")
        if n > SHOWN:
            lines.append(f"  … and {n - SHOWN} more rows")
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        from aevb.notebook import result_cards

        return result_cards.beliefs_card(self)

    def _at(self, name: str, place: tuple[int, ...], step: str) -> str:
        if name in self.probs:
            return step + " ".join(f"{p:.3f}" for p in self.probs[name][place][:6].tolist())
        mean, sd = (part[name][place].reshape(-1)[0] for part in (self.mean, self.sd))
        return f"{step}{mean:.4g} ± {sd:.3g}"


def beliefs_of(posterior: Posterior, *, filtered: bool, samples: int = 0) -> Beliefs:
    """Return the moments of a posterior's marginals, with NaN beyond the end of each row."""
    graph, mean, sd, probs, constant = posterior.graph, {}, {}, {}, set()
    real = real_steps(posterior.batch)
    inside = None if real is None else real.squeeze(-1).T  # [N, T]
    for name in (name for name in graph.latents if name not in posterior.clamped):
        dist = posterior[name]
        by_step = dist.mean.dim() > 2  # [N, T, d]; a filter has steps for a static latent, too
        if not by_step:
            constant.add(name)

        def laid(value: Tensor, by_step: bool = by_step) -> Tensor:
            if inside is None or not by_step:
                return value
            mask = inside.reshape(*inside.shape, *[1] * (value.dim() - 2))
            return torch.where(mask, value, torch.nan)

        shape = (*dist.mean.shape[:-1], *graph.shapes[name])
        mean[name] = laid(dist.mean.reshape(shape))
        sd[name] = laid(dist.variance.clamp_min(0.0).sqrt().reshape(shape))
        if graph.rule("p", name).spec.finite:
            probs[name] = laid(dist.probs)  # type: ignore[attr-defined]
    return Beliefs(
        mean,
        sd,
        probs,
        filtered,
        posterior.method,
        posterior.why,
        lengths_of(posterior),
        samples,
        _posterior=posterior,
        _constant=frozenset(constant),
    )


def lengths_of(posterior: Posterior) -> Tensor:
    """Return the number of steps of each row, [N]."""
    real = real_steps(posterior.batch)
    if real is None:
        return torch.full((posterior.n,), posterior.steps)
    return real.squeeze(-1).sum(0).expand(posterior.n)
