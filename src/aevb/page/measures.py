"""Numbers per row for the map: codes of the latents, the bound and its terms, log p, errors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from aevb.data.datasets import log_jacobian, log_spreads
from aevb.data.units import as_prepared
from aevb.estimate.batch import Batch, split_latents
from aevb.estimate.estimators import estimate
from aevb.estimate.keys import masks_of, real_steps
from aevb.estimate.metric_names import latent_of
from aevb.evidence import unnoted_evidence
from aevb.evidence.exact import why_not_exact
from aevb.model import Model
from aevb.page.subject import Rows, Subject
from aevb.posterior import posterior_of, why_not_q

SAMPLED_ROWS = 2000  # most rows whose log p is estimated by sampling
SAMPLES = 100  # importance samples per row
WORK = 1e11  # most multiplications for that; of a large model, fewer rows are sampled
SLOWER = 8  # the time of a multiplication in a convolution, relative to that in a dense layer
DRAWS = 8  # draws of q per row for the bound, and for more rows than MANY:
# One draw would be a relaxed one of a discrete latent that cannot be enumerated.
FEW_DRAWS = 2
MANY = 20_000


@dataclass(frozen=True)
class Measures:
    """What a model says about each row.

    ``codes`` are posterior means of the latents, [n, d] or [n, T, d] with NaN beyond the end of a
    sequence. ``numbers`` are by name, [n], with NaN where a number was not computed. ``method`` is
    "q" or "exact".
    """

    codes: dict[str, np.ndarray]
    method: str
    numbers: dict[str, np.ndarray]
    notes: dict[str, str] = field(default_factory=dict)  # by number: which rows have it, and why
    problems: tuple[str, ...] = ()  # sentences on numbers that could not be computed


def measure(rows: Rows, seed: int = 0, *, evidence: bool = True) -> Measures:
    """Compute the codes of all rows, and the numbers that the bound consists of.

    Raises ``UntaughtError`` if q was not trained and the exact posterior is not known.
    """
    model, graph = rows.subject.model, rows.subject.model.graph
    n, draws = len(rows), DRAWS if len(rows) <= MANY else FEW_DRAWS
    codes: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in graph.latents}
    numbers: dict[str, np.ndarray] = {}
    method = "q"

    def keep(name: str, at: np.ndarray, values: Tensor) -> None:
        numbers.setdefault(name, np.full(n, np.nan))[at] = values.double().cpu().numpy()

    # If q cannot answer for some rows, use the exact posterior for all: codes stay comparable.
    exact = any(why_not_q(model, model.teaching, batch) for _, batch in rows.batches())
    log_p = _LogP(rows, seed) if evidence else None
    for number, (at, batch) in enumerate(rows.batches()):
        posterior = posterior_of(
            model, model.teaching, batch, seed=seed + number, prefer_exact=exact
        )
        method = posterior.method
        with torch.no_grad():
            for name in graph.latents:
                mean = posterior[name].mean
                real = real_steps(batch, timed=graph.timed[name])
                if real is not None:
                    mean = torch.where(real.transpose(0, 1), mean, torch.nan)
                codes[name].append((at, mean.float().cpu().numpy()))
            shifts = units_shifts(rows, at, batch)
            shift = _total(shifts, len(at))
            if method == "q":
                moved = {"ELBO": shift} | {_likelihood(name): each for name, each in shifts.items()}
                for name, values in _bound(rows.subject, batch, draws, seed + number).items():
                    keep(name, at, values.double().cpu() - moved.get(name, 0.0))
            error = _reconstruction_error(rows.subject, batch, posterior)
            if error is not None:
                keep("reconstruction error", at, error)
        if log_p is not None and (found := log_p.of(at, batch)) is not None:
            among, values = found
            keep("log p", at[among], values.double().cpu() - shift[torch.from_numpy(among)])
    if "log p" in numbers and "ELBO" in numbers:
        gap = numbers["log p"] - numbers["ELBO"]
        # Less than this is rounding: an exact posterior has no gap.
        numbers["gap"] = np.where(np.abs(gap) < 1e-6, 0.0, gap)
    notes = dict.fromkeys(("log p", "gap"), log_p.note) if log_p is not None and log_p.note else {}
    if "gap" in notes:
        notes["gap"] = f"log p {notes['gap']}; noise of both estimates can make a gap negative"
    if rows.subject.schema is not None:
        notes["log p"] = f"{notes.get('log p', '')} a missing cell adds no term".strip()
    if rows.subject.schema is not None or rows.subject.standardised:
        notes["reconstruction error"] = f"of {graph.observed[0]}, in units of the model"
    if rows.subject.recipe is not None and not rows.subject.standardised:
        prepared = list(log_spreads(rows.subject.recipe, graph))
        if prepared and rows.subject.schema is None:
            of = f"of {as_prepared(rows.subject.recipe, prepared)}"
            for name in ("log p", "ELBO", *(_likelihood(one) for one in prepared)):
                notes[name] = "; ".join(filter(None, [notes.get(name, ""), of]))
    order = ("log p", "ELBO", "gap", "reconstruction error")
    return Measures(
        {name: _joined(parts, n) for name, parts in codes.items()},
        method,
        {name: numbers[name] for name in (*order, *numbers) if name in numbers},
        {name: note for name, note in notes.items() if name in numbers},
        () if log_p is None or not log_p.failure else (log_p.failure,),
    )


class _LogP:
    """log p per row: exact for all rows if it is known, else by sampling for some of them."""

    def __init__(self, rows: Rows, seed: int) -> None:
        self.model, self.seed = rows.subject.model, seed
        self.exact = why_not_exact(self.model) is None
        self.chosen = np.ones(len(rows), bool)
        self.note, self.failure = "", ""
        if not self.exact:
            self.note = f"by importance sampling with {SAMPLES} samples, which is a lower bound"
            first = next(rows.some(np.arange(1)).batches())[1]
            most = min(SAMPLED_ROWS, max(50, int(WORK / SAMPLES / work_of(self.model, first))))
            if len(rows) > most:
                kept = np.random.default_rng(seed).permutation(len(rows))[:most]
                self.chosen[:] = False
                self.chosen[kept] = True
                self.note += f"; for {most:,} random ones of the {len(rows):,} rows"

    def of(self, at: np.ndarray, batch: Batch) -> tuple[np.ndarray, Tensor] | None:
        """log p of the chosen ones among the rows ``at``, and which of these rows they are."""
        mine = np.flatnonzero(self.chosen[at])
        if not len(mine) or self.failure:
            return None
        part = batch
        if len(mine) < len(at):
            kept = torch.from_numpy(mine)
            part = {
                name: value.index_select(-2, kept.to(value.device)) for name, value in batch.items()
            }
        method = "exact" if self.exact else "importance"
        try:
            found = unnoted_evidence(
                self.model, part, method=method, samples=SAMPLES, seed=self.seed + int(at[0])
            )
        except (ValueError, ArithmeticError, RuntimeError) as error:
            self.failure = f"log p of the rows could not be computed: {error}"
            return None
        return mine, found.value.detach()


def work_of(model: Model, batch: Batch) -> float:
    """About how many multiplications one sample of one row takes, as a dense layer does them."""
    graph = model.graph
    steps = max(value.shape[0] for value in batch.values())
    # A q that is scored needs a second sample.
    enumerated = model.plan(samples=2).enumerated
    classes = [graph.size(name) for name in enumerated if not graph.timed[name]]
    weights = sum(parameter.numel() for parameter in model.parameters())
    dense = max(1.0, float(weights) * steps * float(np.prod(classes or [1])))
    if not any(parameter.dim() > 2 for parameter in model.parameters()):
        return dense
    return dense + SLOWER * _convolutions(model, batch)


def _convolutions(model: Model, batch: Batch) -> float:
    """The multiplications of the convolutions in an estimate of the bound of one row.

    A convolution uses each of its weights at every place of the image.
    """
    row = {name: value[..., :1, :] for name, value in batch.items()}
    with torch.no_grad(), model._evaluating(0), FlopCounterMode(display=False) as counter:
        plan = model.plan(partial=split_latents(model.graph, row)[1])
        estimate(plan, model.factors, row, model.draw_noise(plan, row, seed=0))
    counts = counter.get_flop_counts().get("Global", {})
    return sum(count for op, count in counts.items() if "conv" in str(op)) / 2


def _bound(subject: Subject, batch: Batch, draws: int, seed: int) -> dict[str, Tensor]:
    """The bound and its terms, per row, averaged over draws of q."""
    model = subject.model
    plan = model.plan(samples=draws, partial=split_latents(model.graph, batch)[1])
    noise = model.draw_noise(plan, batch, seed=seed)
    with model._evaluating(seed):
        found = estimate(plan, model.factors, batch, noise)
    names = {
        name: f"KL({latent_of(name)})" if latent_of(name) else _likelihood(name)
        for name in found.terms
    }
    return {"ELBO": found.value} | {names[name]: value for name, value in found.terms.items()}


def _likelihood(name: str) -> str:
    return f"log p({name}|·)"


def _reconstruction_error(subject: Subject, batch: Batch, posterior: object) -> Tensor | None:
    """The root mean square of x − E[x | z] over the known entries of the first variable, [N].

    None if that variable is a class, or if a reconstruction is refused.
    """
    graph = subject.model.graph
    name = graph.observed[0]
    if graph.rule("p", name).spec.categorical:
        return None
    try:
        mean = posterior.reconstruct()[name]  # type: ignore[attr-defined]
    except (ValueError, NotImplementedError):
        return None
    x = batch[name]
    mean = mean.transpose(0, 1) if graph.timed[name] else mean.unsqueeze(0)
    squares = (x - mean.reshape(x.shape)).square()
    known = torch.ones_like(x, dtype=torch.bool)
    for mask in masks_of(batch, name, timed=graph.timed[name]):
        known = known & mask
    total = torch.where(known, squares, 0.0).sum((0, 2))
    return (total / known.sum((0, 2))).sqrt()


def units_shift(rows: Rows, at: np.ndarray, batch: Batch) -> Tensor:
    """What to subtract from log p of the rows ``at`` to get the units of the data, [N]."""
    return _total(units_shifts(rows, at, batch), len(at))


def units_shifts(rows: Rows, at: np.ndarray, batch: Batch) -> dict[str, Tensor]:
    """The parts of :func:`units_shift` by observed variable; none where the units are the same."""
    subject = rows.subject
    if subject.schema is not None:
        # All rows of a batch are of one split.
        cells = subject.splits[int(rows.split[at[0]])].cells
        found = {}
        for name, columns in subject.schema.variables.items():
            if any(column.dense for column in columns):
                part = replace(subject.schema, columns=tuple(columns))
                frame = cells.select([column.name for column in columns]).take(rows.index[at])
                found[name] = torch.from_numpy(-part.log_jacobian(frame))
        return found
    if not subject.standardised or subject.recipe is None:
        return {}
    shifts = log_jacobian(subject.recipe, subject.model.graph, batch)
    return {name: shift.double().cpu() for name, shift in shifts.items()}


def _total(shifts: dict[str, Tensor], n: int) -> Tensor:
    return sum(shifts.values(), torch.zeros(n, dtype=torch.float64))


def _joined(parts: list[tuple[np.ndarray, np.ndarray]], n: int) -> np.ndarray:
    steps = max((part.shape[1] for _, part in parts if part.ndim == 3), default=0)
    shape = parts[0][1].shape
    found = np.full((n, steps, shape[-1]) if steps else (n, shape[-1]), np.nan, dtype=np.float32)
    for at, part in parts:
        if steps:
            found[at, : part.shape[1]] = part
        else:
            found[at] = part
    return found
