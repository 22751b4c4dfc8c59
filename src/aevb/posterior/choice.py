"""Choose the posterior: q if it was trained for this p, else the exact one, else an error."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from aevb.declare.graph import Graph
from aevb.derive.completion import incomplete
from aevb.estimate.batch import Batch, split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.gap_patterns import missing_of
from aevb.estimate.keys import mask_of, real_steps
from aevb.estimate.places import INDICES, Places
from aevb.evidence.structure import NotExactError
from aevb.posterior.amortised import Posterior
from aevb.posterior.exact import ExactPosterior
from aevb.posterior.training_record import Teaching
from aevb.posterior.weighted import WeightedPosterior
from aevb.runtime.callers import frames_of_aevb
from aevb.runtime.checked_files import DataWarning

METHODS = ("auto", "q", "exact")
UNSEEN = "a pattern that no training row of q had"
LOOSE = "An estimate of log p by draws of q may be far too low."


class UntaughtError(ValueError):
    """q was not trained for these rows, and the exact posterior is not known.

    ``for_commands`` is the message without the advice that only Python code can follow.
    """

    def __init__(self, text: str) -> None:
        self.for_commands = text
        super().__init__(f'{text} method="q" uses q anyway.')


def posterior_of(
    model: DeclaredModel,
    teaching: Teaching,
    batch: Batch,
    *,
    samples: int = 64,
    seed: int | None = None,
    method: str = "auto",
    prefer_exact: bool = False,
    weigh_gaps: bool = False,
    first_row: int = 0,
    places: Places = INDICES,
) -> Posterior:
    """Return the posterior of the latents of a batch.

    ``teaching`` is the record of how q was trained. ``method="auto"`` uses q if it was trained for
    such rows, otherwise the exact posterior; with ``prefer_exact=True`` it uses the exact posterior
    whenever it is known. With ``weigh_gaps=True``, draws of missing entries that p reads are
    weighted instead of taken from q as they are. "q" uses q in any case, "exact" never uses q.
    ``first_row`` (the number of the batch's first row) and ``places`` (the names of rows) are for
    messages.

    Raises :class:`UntaughtError` if neither q nor the exact posterior is available.
    """
    if method not in METHODS:
        raise ValueError(f'method is "auto", "q" or "exact", got {method!r}.')
    if method == "q":
        return Posterior(model, batch, samples=samples, seed=seed, why="as asked")
    weigh = weigh_gaps and bool(incomplete(model.graph, split_latents(model.graph, batch)[1]))
    reason = (
        None
        if method == "exact"
        else _untaught(model, teaching, batch)  # weights correct a q that saw no gaps
        if weigh
        else why_not_q(model, teaching, batch, first_row, places)
    )
    if method == "auto" and reason is None and not prefer_exact:
        warn_of_unseen_patterns(model, teaching, batch, first_row, places)
        return Posterior(model, batch, samples=samples, seed=seed)
    try:
        return ExactPosterior(
            model,
            batch,
            samples=samples,
            seed=seed,
            why="as asked" if method == "exact" else reason or "known for this model",
        )
    except NotExactError as why:
        if method == "exact":
            raise ValueError(
                f'The posterior of this model is not known in closed form: {why}. Use method="q".'
            ) from None
        if reason is None and weigh:
            return WeightedPosterior(model, batch, samples=samples, seed=seed)
        if reason is None:
            warn_of_unseen_patterns(model, teaching, batch, first_row, places)
            return Posterior(model, batch, samples=samples, seed=seed)
        raise UntaughtError(
            f"{reason}, and the exact posterior is not known: {why}. "
            f"{remedy(model, teaching, batch)}"
        ) from None


def warn_of_unseen_patterns(
    model: DeclaredModel,
    teaching: Teaching,
    batch: Batch,
    first_row: int = 0,
    places: Places = INDICES,
) -> None:
    """Warn if rows have a pattern of gaps that no training row of q had."""
    pattern = _unseen_pattern(model, teaching, batch, first_row, places)
    if pattern is not None and teaching.holds(model, _unknown(model, batch)):
        warnings.warn(
            DataWarning(
                f"{pattern}, {UNSEEN}. The posterior by q may be far too narrow and far off. "
                f"Train on rows with such gaps."
            ),
            stacklevel=frames_of_aevb(),
        )


def why_not_q(
    model: DeclaredModel,
    teaching: Teaching,
    batch: Batch,
    first_row: int = 0,
    places: Places = INDICES,
) -> str | None:
    """Return the reason why q cannot be used for these rows, as text; None if it can."""
    return _untaught(model, teaching, batch) or _untrained_gaps(
        model, teaching, batch, first_row, places
    )


def _untrained_gaps(
    model: DeclaredModel,
    teaching: Teaching,
    batch: Batch,
    first_row: int = 0,
    places: Places = INDICES,
) -> str | None:
    """Return which gaps of these rows q was not trained on, as text; None if there are none."""
    reasons, ends = [], None if teaching.open_ends else _ends(model.graph, batch)
    if ends is not None:
        counted = _counted(ends.any(0), "ends", "end", "in steps without data", first_row, places)
        reasons.append(f"{counted}, which q was not trained on, so it cannot forecast them")
    for name in _lacking(model.graph, batch):
        columns = torch.tensor(
            sorted(teaching.complete(model, name)), dtype=torch.long, device=batch[name].device
        )
        lacking = ~batch[mask_of(name)].index_select(-1, columns)
        if ends is not None and model.graph.timed[name]:
            lacking = lacking & ~ends[..., None]
        if bool(lacking.any()):
            if not teaching.holds(model, _unknown(model, batch)):
                break
            lacks = _counted(
                lacking.any(-1).any(0), "lacks", "lack", f"entries of {name}", first_row, places
            )
            first = int(columns[lacking.any(0).any(0)][0])
            had = (
                "all of them"
                if len(columns) == model.graph.size(name)
                else f"every entry of {places.among(name, [first])}"
            )
            reasons.append(
                f"{lacks}, which q was not trained on: its training rows had {had}, and it would "
                f"read a missing entry as 0"
            )
            break
    return "; ".join(reasons) or None


def _unseen_pattern(
    model: DeclaredModel,
    teaching: Teaching,
    batch: Batch,
    first_row: int = 0,
    places: Places = INDICES,
) -> str | None:
    """Return which columns these rows lack in a pattern that no training row of q had.

    Without a look at q: :meth:`Teaching.holds` says whether it is still as training left it.
    """
    graph, seen = model.graph, teaching.patterns
    read = read_by_q(graph)
    missing = None if seen is None else missing_of(graph, batch)
    if seen is None or missing is None:
        return None
    labels = [(name, i) for name in graph.observed for i in range(graph.size(name))]
    used = torch.tensor([name in read for name, _ in labels])
    gone, real = (part.cpu() for part in missing)
    gone = gone & used
    known = real & ~gone & used

    def column(i: int) -> str:
        name, place = labels[i]
        return f"{places.among(name, [place]).removesuffix(', from 0')} of {name}"

    throughout = (gone | ~real).all(0) & gone.any(0) & ~seen.throughout  # [N, D]
    if bool(throughout.any()) and len(gone) > 1:
        i = int(throughout.any(0).nonzero()[0, 0])
        rows, lack = throughout.any(-1), f"{column(i)} in every step"
        return _counted(rows, "lacks", "lack", lack, first_row, places)
    pairs = (gone.float() @ (~seen.apart).float() > 0) & known  # a new pair with j, [T, N, D]
    if bool(pairs.any()):
        step, row, j = pairs.nonzero()[0].tolist()
        i = int((gone[step, row] & ~seen.apart[:, j]).nonzero()[0, 0])
        lack = f"{column(i)} where {column(j)} is known"
        return _counted(pairs.any(-1).any(0), "lacks", "lack", lack, first_row, places)
    counts = gone.sum(-1).amax(0)  # [N]
    many = seen.too_many(counts)
    if bool(many.any()):
        # A category is one column of the user's table, however many entries it has.
        step, row = divmod(int(gone.sum(-1).argmax()), gone.shape[1])
        lacked = [labels[i] for i in gone[step, row].nonzero()[:, 0].tolist()]
        whole = {
            name
            for name, _ in lacked
            if any(entry.spec.categorical for entry in model.graph.p[name].values())
        }
        count = len(whole) + sum(name not in whole for name, _ in lacked)
        lack = f"{count} columns at once"
        return _counted(many, "lacks", "lack", lack, first_row, places)
    return None


def untrained_gaps_note(
    model: DeclaredModel, teaching: Teaching, batch: Batch, places: Places = INDICES
) -> str | None:
    """Return a note on estimates with draws of q, if q was not trained on the gaps of these rows.

    None if q was never trained, since a user's own loop may be training it.
    """
    reason = _untrained_gaps(model, teaching, batch, places=places)
    pattern = None if reason else _unseen_pattern(model, teaching, batch, places=places)
    if not (reason or pattern) or not teaching.holds(model, _unknown(model, batch)):
        return None
    if reason:
        return f"{reason}. {LOOSE} {remedy(model, teaching, batch)}"
    return f"{pattern}, {UNSEEN}. {LOOSE} Train on rows with such gaps."


def _unknown(model: DeclaredModel, batch: Batch) -> list[str]:
    return [name for name in model.graph.latents if name not in batch or mask_of(name) in batch]


def _untaught(model: DeclaredModel, teaching: Teaching, batch: Batch) -> str | None:
    """Return why q's factors of the unknown latents are no posterior of this p, if so."""
    reasons = teaching.untaught(model)
    return next((reasons[name] for name in _unknown(model, batch) if name in reasons), None)


def _counted(rows: Tensor, does: str, do: str, what: str, first_row: int, places: Places) -> str:
    """Describe how many rows [N] do something, and name the first of them."""
    count = int(rows.sum())
    return (
        f"{f'1 row {does}' if count == 1 else f'{count} rows {do}'} {what} "
        f"({places.first(first_row + int(rows.nonzero()[0, 0]))})"
    )


def remedy(model: DeclaredModel, teaching: Teaching, batch: Batch) -> str:
    """Return how to train q for these rows, where :func:`why_not_q` has a reason against it."""
    if _untaught(model, teaching, batch):
        return "Train q (schedule=joint()), with classify=1 where every row has a label."
    padding = (
        "If the NaN at the ends are only padding, give the lengths of the rows: lengths=…. "
        if open_ended(model.graph, batch) and not teaching.open_ends
        else ""
    )
    return (
        f"{padding}Train on rows with missing entries too (NaN), of the same kind; for example, "
        f"remove some entries at random."
    )


def _lacking(graph: Graph, batch: Batch) -> list[str]:
    """Return the observed variables with missing entries that q reads.

    q reads them directly or through a function.
    """
    read = read_by_q(graph)
    return [name for name in graph.observed if mask_of(name) in batch and name in read]


def read_by_q(graph: Graph) -> set[str]:
    """Return the variables that q reads, directly or through a function."""
    return {
        ref.name
        for entry in graph.entries()
        if entry.side == "q" or graph.is_deterministic(entry.key.name)
        for ref in entry.key.parents
    }


def _ends(graph: Graph, batch: Batch) -> Tensor | None:
    """Return a mask [T, N] of the steps after the last one with data; None if there are none."""
    timed = [name for name in graph.observed if graph.timed[name]]
    if not timed or any(mask_of(name) not in batch for name in timed):
        return None
    seen = torch.stack([batch[mask_of(name)].any(-1) for name in timed]).any(0)  # [T, N]
    steps = real_steps(batch)
    real = torch.ones_like(seen) if steps is None else steps.squeeze(-1)
    later = (seen & real).flip(0).int().cummax(0).values.flip(0).bool()
    ends = real & ~later
    return ends if bool(ends.any()) else None


def open_ended(graph: Graph, batch: Batch) -> bool:
    """Return whether any row ends in a step without an observed variable."""
    return _ends(graph, batch) is not None
