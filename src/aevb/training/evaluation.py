"""The bound, its terms and the evidence over all rows of a source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from aevb.data.sources import Source
from aevb.declare.noise_kinds import SEED
from aevb.derive.completion import incomplete
from aevb.derive.plan import Plan
from aevb.estimate.batch import Batch, split_latents
from aevb.estimate.estimators import Estimate, estimator
from aevb.estimate.metric_names import OBJECTIVE
from aevb.estimate.particle_bound import ParticleEstimate
from aevb.evidence.exact import exact_evidence, why_not_exact
from aevb.evidence.gap import gap
from aevb.evidence.sampling import importance
from aevb.model import Model
from aevb.runtime.devices import wide
from aevb.training.purity import own_part
from aevb.training.row_order import seed_of
from aevb.training.settings import Settings

ROWS, ROWS_ON_GPU = 1000, 10_000  # rows evaluated at a time
SHARE = 0.1  # of a GPU's free memory, for rows and noise that stay there

Part = tuple[Batch, Plan, dict[str, Tensor]]  # rows, how to estimate them, and with what noise


def evaluate(
    model: Model,
    source: Source,
    *,
    how: Mapping[str, str] | None = None,
    bound: str = "elbo",
    samples: int = 1,
    seed: int = 0,
) -> dict[str, float]:
    """Return the mean bound and its terms over all rows of a source, in nats per example.

    Expectations are taken in the plan's default way, which is exact if possible; ``how`` is used
    only if the model has no default. If the posterior is known exactly, the result includes the
    exact evidence and the gap, the mean KL(q ‖ p(z|x)).
    """
    return Evaluation(model, source, how=how, bound=bound, samples=samples, seed=seed)()


def evaluate_precisely(
    model: Model, source: Source, *, seed: int = 0, error: float = 0.01, most: int = 64
) -> dict[str, tuple[float, float]]:
    """Return the mean bound and its terms, each with its standard error.

    :func:`evaluate` is repeated with new noise until the standard error of the bound is at most
    ``error``: at least 8 times if the estimate is random, and at most ``most`` times. Exact
    quantities have error 0.
    """
    found: list[dict[str, float]] = []
    while len(found) < most:
        found.append(
            evaluate(model, source, seed=seed_of(seed, "draws", len(found)) if found else seed)
        )
        values = {
            name: torch.tensor([one[name] for one in found], dtype=torch.float64)
            for name in found[0]
        }
        if len(found) == 2 and all(
            bool((value == value[0]).all() | value.isnan().any()) for value in values.values()
        ):
            break
        if len(found) >= 8 and float(values["elbo"].std()) <= error * len(found) ** 0.5:
            break
    return {
        name: (
            float(value.mean()),
            float(value.std()) / len(found) ** 0.5 if bool((value != value[0]).any()) else 0.0,
        )
        for name, value in values.items()
    }


class Evaluation:
    """A repeated :func:`evaluate` of a model that is being trained.

    The rows and the noise are the same every time. On a GPU they stay in its memory, unless they
    are too large, and from the second call on the whole pass is a CUDA graph: small operations take
    ten times longer to launch than to run.
    """

    def __init__(
        self,
        model: Model,
        source: Source,
        *,
        how: Mapping[str, str] | None = None,
        bound: str = "elbo",
        samples: int = 1,
        seed: int = 0,
        settings: Settings | None = None,
    ) -> None:
        """``settings`` are those of a run.

        They say how particles are resampled, and add the objective of the run if ``beta`` or
        ``free_bits`` changes it.
        """
        self.model, self.source, self.how, self.bound, self.samples, self.seed = (
            model,
            source,
            how,
            bound,
            samples,
            seed,
        )
        self.penalties = settings if settings is not None and settings.penalised else None
        self.resampling = (
            {"gradient": settings.gradient, "resample": settings.resample}
            if settings is not None and bound == "particles"
            else {}
        )
        first = source.take(torch.arange(min(1, source.n)))
        self.exact = why_not_exact(model, first) is None
        chunk = max(1, (ROWS_ON_GPU if source.like.is_cuda else ROWS) // samples)
        self.parts = [
            range(start, min(source.n, start + chunk)) for start in range(0, source.n, chunk)
        ]
        self.names: list[str] = []
        self.captures = source.like.is_cuda and not self.exact
        self.held: list[Part] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.at: list[int] = []  # where the weights lay when it was captured
        self.found = torch.zeros(0)

    def __call__(self) -> dict[str, float]:
        with self.model._evaluating(None):
            again = self.captures and self.names and own_part(self.model) is None
            totals = (
                self._replayed() if again else self._totals(self._part(rows) for rows in self.parts)
            )
            return {
                name: value / self.source.n
                for name, value in zip(self.names, totals.tolist(), strict=True)
            }

    def _part(self, rows: range, known: dict[range, Batch] | None = None) -> Part:
        known = {} if known is None else known
        if rows not in known:
            known[rows] = self.source.take(torch.arange(rows.start, rows.stop))
        batch = known[rows]
        plan = _plan(self.model, batch, self.how, self.bound, self.samples, self.resampling)
        return (
            batch,
            plan,
            self.model.draw_noise(plan, batch, seed=seed_of(self.seed, "evaluation", rows.start)),
        )

    def _totals(self, parts: Iterable[Part]) -> Tensor:
        """The sums over all rows, one for each of ``names``."""
        totals: dict[str, Tensor] = {}
        for batch, plan, noise in parts:
            estimated = estimator(plan, self.model.factors, batch, noise)
            bound = estimated.bound()
            found = {self.bound: bound.value, **bound.terms} | (
                _exactly(self.model, batch) if self.exact else {}
            )
            if self.penalties is not None:
                found |= _parts_of_objective(estimated, self.penalties)
            for name, value in found.items():
                total = wide(value).sum()
                totals[name] = totals[name] + total if name in totals else total
        if self.penalties is not None:
            totals = _with_objective(totals, self.penalties)
        self.names = list(totals)
        return torch.stack(list(totals.values()))

    def _replayed(self) -> Tensor:
        if self.held is None:
            known = _rows.setdefault(self.source, {})
            first = self._part(self.parts[0], known)
            if len(self.parts) * _bytes(first) > SHARE * torch.cuda.mem_get_info(
                self.source.like.device
            )[0] or _seeded(first):
                self.captures = False
                known.clear()
                return self._totals(self._part(rows) for rows in self.parts)
            self.held = [first, *(self._part(rows, known) for rows in self.parts[1:])]
        at = [tensor.data_ptr() for tensor in self.model.state_dict().values()]
        if self.graph is None or self.at != at:
            self.graph, self.at = self._captured(self.held), at
        if self.graph is None:
            self.captures, held, self.held = False, self.held, None
            return self._totals(held)
        self.graph.replay()
        return self.found

    def _captured(self, held: Sequence[Part]) -> torch.cuda.CUDAGraph | None:
        """Capture a CUDA graph; None if memory is short or a part synchronises with the host."""
        graph, device = torch.cuda.CUDAGraph(), self.source.like.device
        pool = next(
            (
                other.graph.pool()
                for other in _sharing
                if other.graph is not None and other.source.like.device == device
            ),
            None,
        )
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                # Another thread may be reading rows.
                self.found = self._totals(held)
        except RuntimeError:
            return None
        _sharing.add(self)
        return graph


# Evaluations whose graphs share memory. Each is read before another begins.
_sharing: WeakSet[Evaluation] = WeakSet()
# The rows of a source, because several models evaluate them.
_rows: WeakKeyDictionary[Source, dict[range, Batch]] = WeakKeyDictionary()


def _bytes(part: Part) -> int:
    batch, _, noise = part
    return sum(value.numel() * value.element_size() for value in (*batch.values(), *noise.values()))


def _seeded(part: Part) -> bool:
    """Return whether torch draws something with its own sampler.

    Such a sampler reads its seed on the host.
    """
    _, plan, _ = part
    return any(kind == SEED for kind, _ in plan.layout(1, 1, dropout=False).values())


def _exactly(model: Model, batch: Batch) -> dict[str, Tensor]:
    """Return the exact evidence and, if known, the gap.

    Both are NaN if a covariance is no longer positive definite.
    """
    nan = model._parameter().new_full((next(iter(batch.values())).shape[-2],), torch.nan)
    found: dict[str, Tensor] = {}
    for name, way in (("evidence", exact_evidence), ("gap", gap)):
        try:
            value = way(model, batch)
        except LinAlgError:
            value = nan
        found |= {} if value is None else {name: value}
    return found


def _parts_of_objective(
    estimated: Estimate | ParticleEstimate, penalties: Settings
) -> dict[str, Tensor]:
    """Return the objective without free bits, and the KL terms and rows of latents that have them.

    The free bits are compared with the mean over all rows, so that the result does not depend on
    the number of rows evaluated at a time.
    """
    latents = list(estimated.plan.choices)
    betas = {name: penalties.beta_of(name) for name in latents}
    found = {OBJECTIVE: estimated.bound(betas).objective}
    free = [name for name in latents if penalties.free_bits_of(name)]
    if free and isinstance(estimated, Estimate):  # weighted bounds have no free bits
        for name, kl, rows in zip(free, *estimated.kl_totals(free), strict=True):
            found |= {f"{_FREE} {name}": kl, f"{_ROWS} {name}": rows}
    return found


_FREE, _ROWS = "free kl", "free rows"  # names of sums that are not reported


def _with_objective(totals: Mapping[str, Tensor], penalties: Settings) -> dict[str, Tensor]:
    """Return the totals with the free bits counted in the objective."""
    found = {name: total for name, total in totals.items() if not name.startswith((_FREE, _ROWS))}
    for name in (key.removeprefix(f"{_FREE} ") for key in totals if key.startswith(_FREE)):
        kl, rows = totals[f"{_FREE} {name}"], totals[f"{_ROWS} {name}"]
        short = (penalties.free_bits_of(name) * rows - kl).clamp_min(0)
        found[OBJECTIVE] = found[OBJECTIVE] - penalties.beta_of(name) * short
    return found


def _plan(
    model: Model,
    batch: Batch,
    how: Mapping[str, str] | None,
    bound: str,
    samples: int,
    resampling: Mapping[str, Any],
) -> Plan:
    clamped, partial = split_latents(model.graph, batch)
    choices: dict[str, Any] = {
        **resampling,
        "bound": bound,
        "samples": samples,
        "clamped": clamped,
        "partial": partial,
    }
    # An evaluation needs no gradient of missing entries that p draws.
    gaps = incomplete(model.graph, partial) if bound != "particles" else ()
    drawn = dict.fromkeys(gaps, "detached")
    if not how:
        return model.plan(how=drawn, **choices)
    try:
        return model.plan(how=drawn, **choices)
    except ValueError:
        return model.plan(how={**how, **drawn}, **choices)


def evaluate_evidence(
    model: Model, source: Source, *, samples: int, seed: int = 0, chunk: int = 100
) -> float:
    """The mean importance-sampled log p(x) over all rows of a source."""
    total = 0.0
    for start in range(0, source.n, chunk):
        batch = source.take(torch.arange(start, min(source.n, start + chunk)))
        with torch.no_grad():
            found = importance(model, batch, samples, seed_of(seed, "evidence", start))
            total += float(wide(found.value).sum())
    return total / source.n
