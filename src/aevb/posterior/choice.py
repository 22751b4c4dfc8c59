"""Choose the posterior: q if it was trained for this p, else the exact one, else an error."""

from __future__ import annotations

import torch
from torch import Tensor

from aevb.declare.graph import Graph
from aevb.derive.completion import incomplete
from aevb.estimate.batch import Batch, split_latents
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.keys import mask_of, real_steps
from aevb.estimate.places import INDICES, Places
from aevb.evidence.structure import NotExactError
from aevb.posterior.amortised import Posterior
from aevb.posterior.exact import ExactPosterior
from aevb.posterior.training_record import Teaching
from aevb.posterior.weighted import WeightedPosterior

METHODS = ("auto", "q", "exact")


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
            return Posterior(model, batch, samples=samples, seed=seed)
        raise UntaughtError(
            f"{reason}, and the exact posterior is not known: {why}. "
            f"{_remedy(model, teaching, batch)}"
        ) from None


def why_not_q(
    model: DeclaredModel,
    teaching: Teaching,
    batch: Batch,
    first_row: int = 0,
    places: Places = INDICES,
) -> str | None:
    """Return the reason why q cannot be used for these rows, as text; None if it can."""
    if reason := _untaught(model, teaching, batch):
        return reason
    rows = _open_ended(model.graph, batch)
    if rows is not None and not teaching.open_ends:
        ends = _counted(rows, "ends", "end", "in steps without data", first_row, places)
        return f"{ends}, which q was not trained on, so it cannot forecast them"
    unseen = teaching.unseen(model, _unknown(model, batch))
    for name in _lacking(model.graph, batch):
        columns = torch.tensor(
            sorted(unseen.get(name, ())), dtype=torch.long, device=batch[name].device
        )
        lacking = ~batch[mask_of(name)].index_select(-1, columns)
        if bool(lacking.any()):
            lacks = _counted(
                lacking.any(-1).any(0), "lacks", "lack", f"entries of {name}", first_row, places
            )
            first = int(columns[lacking.any(0).any(0)][0])
            had = (
                "all of them"
                if len(columns) == model.graph.size(name)
                else f"every entry of {places.among(name, [first])}"
            )
            return (
                f"{lacks}, which q was not trained on: its training rows had {had}, and it would "
                f"read a missing entry as 0"
            )
    return None


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


def _remedy(model: DeclaredModel, teaching: Teaching, batch: Batch) -> str:
    if teaching.untaught(model):
        return "Train q (schedule=joint(); classify=1 where every row has a label)."
    if open_ended(model.graph, batch) and not teaching.open_ends:
        return "If the NaN are only padding, give the lengths of the rows: lengths=…."
    return (
        "Train on rows with missing entries too (NaN); for example, remove some entries at random."
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


def _open_ended(graph: Graph, batch: Batch) -> Tensor | None:
    """Return a mask of the rows [N] whose last step has no observed variable; None if none."""
    timed = [name for name in graph.observed if graph.timed[name]]
    if not timed or any(mask_of(name) not in batch for name in timed):
        return None
    seen = torch.stack([batch[mask_of(name)].any(-1) for name in timed]).any(0)  # [T, N]
    steps = real_steps(batch)
    real = torch.ones_like(seen) if steps is None else steps.squeeze(-1)
    last = real & ~torch.cat([real[1:], torch.zeros_like(real[:1])])
    rows = (last & ~seen).any(0)
    return rows if bool(rows.any()) else None


def open_ended(graph: Graph, batch: Batch) -> bool:
    """Return whether any row ends in a step without an observed variable."""
    return _open_ended(graph, batch) is not None
