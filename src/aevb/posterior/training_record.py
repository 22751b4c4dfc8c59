"""Record of whether q was trained for the current p, and on which kind of rows.

q can be outdated: p was trained or set by hand, but q was not. Causes are ``mle()``, ``em()``
without a closed form for q, a frozen q, a schedule of M-steps only, or a latent that was known in
every training row. The record keeps, per latent, a digest of the parameters of q's factor and of p.
If p has changed since and q's factor has not, q is outdated. If q's factor has changed, it was
trained since, and its record is no longer valid.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from aevb.data.sources import Source
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.gap_patterns import GapPatterns
from aevb.estimate.keys import masks_of
from aevb.estimate.places import ColumnNames, Pace, refuse_other_columns
from aevb.runtime.callers import frames_of_aevb
from aevb.runtime.checked_files import DataWarning
from aevb.runtime.devices import wide

Digest = tuple[float, ...]
Ranges = dict[str, tuple[Tensor, Tensor]]  # float64 in host memory
FAR = 2  # widths of a column's range from which a value lies far outside it
LARGEST_PIXEL = 2  # images prepared by hand may leave [0, 1] a little, grey levels leave it far
OTHER_PACE = 1.5  # ratio of the times between two steps from which they differ
MOST_COLUMNS = 1000  # variables with more columns, such as images, have no ranges


def digest(parameters: Iterable[nn.Parameter]) -> Digest:
    """Return numbers that change when the parameters change.

    They do not change with the device, or if the precision is raised and lowered again.
    """
    sums: list[Tensor] = []
    for parameter in parameters:  # one at a time: copies of all in float64 would leave the cache
        if not parameter.is_meta:
            value = wide(parameter.detach()).flatten()
            sums += value.sum(), value.dot(value)
    return tuple(torch.stack(sums).tolist()) if sums else ()


def alike(a: Digest, b: Digest) -> bool:
    """Return whether two digests are equal up to rounding."""
    return len(a) == len(b) and all(
        math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9) for x, y in zip(a, b, strict=True)
    )


@dataclass(frozen=True)
class Record:
    """Digests of q's factor of a latent and of p, taken when the factor was trained or skipped.

    ``reason`` says why training skipped the factor. It is None if the factor was trained, or if
    nothing has been trained yet.
    """

    trained: bool
    reason: str | None
    q: Digest
    p: Digest


class Teaching:
    """Which factors of q were trained, and on which kind of rows.

    ``open_ends``: whether training rows ended in steps without data. ``lacked``: per observed
    variable, the columns with a missing entry in some training row; None if that is not known.
    ``patterns``: how they lie beside one another; None if that is not known. ``ranges``: per
    observed variable, the smallest and largest training value of every column. ``columns``: per
    variable that was a frame, the names of its columns. ``pixels``: per variable that was images of
    bytes, how they were prepared. ``pace``: the time between two steps, if they had dates.
    """

    def __init__(self, model: DeclaredModel) -> None:
        self.records: dict[str, Record] = {}
        self.open_ends = False
        self.lacked: dict[str, frozenset[int]] | None = None
        self.patterns: GapPatterns | None = None
        self.ranges: Ranges = {}
        self.columns: dict[str, tuple[str, ...]] = {}
        self.pixels: dict[str, str] = {}
        self.pace: Pace | None = None
        self.record(model, dict.fromkeys(with_weights(model)))

    @property
    def trained(self) -> bool:
        """Whether ``fit`` has trained the model."""
        return self.lacked is not None or bool(self.ranges)

    def record(
        self, model: DeclaredModel, reasons: Mapping[str, str | None], *, trained: bool = False
    ) -> None:
        """Record that q's factors of these latents were not trained (or were, ``trained=True``)."""
        p = digest(model.theta()) if reasons else ()
        self.records |= {
            name: Record(trained, reason, digest(_weights(model, name)), p)
            for name, reason in reasons.items()
        }

    def taught(
        self,
        model: DeclaredModel,
        names: Collection[str],
        *,
        lacked: Mapping[str, Collection[int]],
        patterns: GapPatterns | None = None,
        open_ends: bool = False,
    ) -> None:
        """Record that q's factors of these latents were trained.

        ``lacked`` gives the columns with missing entries in the training rows, ``patterns`` how
        they lie beside one another; ``open_ends`` says whether rows ended in steps without data.
        """
        if self.lacked is None:
            self.patterns = patterns
        elif self.patterns is not None:
            rows = max(self.patterns.rows, 0 if patterns is None else patterns.rows)
            self.patterns = patterns and replace(self.patterns | patterns, rows=rows)
        self.open_ends = self.open_ends or open_ends
        before = self.lacked or {}
        self.lacked = {
            name: before.get(name, frozenset()) | frozenset(lacked.get(name, ()))
            for name in model.graph.observed
        }
        self.record(model, dict.fromkeys(names), trained=True)

    def replaced(self, model: DeclaredModel, names: Collection[str]) -> None:
        """Record that q's factors of these latents were set to the exact posterior.

        It is the posterior of complete rows, whatever q was trained on before.
        """
        self.lacked = None
        self.taught(model, names, lacked={}, patterns=GapPatterns.of(model.graph, {}))

    def saw(
        self,
        model: DeclaredModel,
        ranges: Mapping[str, tuple[Tensor, Tensor]],
        columns: ColumnNames,
        pixels: Mapping[str, str],
        pace: Pace | None = None,
    ) -> None:
        """Record the smallest and largest values of the training rows, and their form.

        The names of their columns, the preparation of their images and the time between their
        steps replace those of earlier rows.
        """
        self.pace = pace
        for name in (*model.graph.observed, *model.graph.given):
            self.columns.pop(name, None)
            self.pixels.pop(name, None)
        self.columns |= columns
        self.pixels |= pixels
        for name, (low, high) in ranges.items():
            low, high = low.detach().cpu().double(), high.detach().cpu().double()
            if len(low) > MOST_COLUMNS or not bool((low <= high).all()):
                continue  # low > high: a column without known values
            if name in self.ranges:
                low = torch.minimum(low, self.ranges[name][0])
                high = torch.maximum(high, self.ranges[name][1])
            self.ranges[name] = low, high

    def check_columns(self, columns: ColumnNames) -> None:
        """Raise ValueError for a frame whose columns are not those of the training rows."""
        for name, found in columns.items():
            if name in self.columns:
                refuse_other_columns(name, found, self.columns[name])

    def warn_of_other_pace(self, pace: Pace | None) -> None:
        """Warn if the steps are not as far apart as those of the training rows."""
        if pace is None or self.pace is None:
            return
        if not 1 / OTHER_PACE < pace.seconds / self.pace.seconds < OTHER_PACE:
            warnings.warn(
                DataWarning(
                    f"The steps are {pace.text} apart, but those that the model was trained on are "
                    f"{self.pace.text} apart. A step of the model has the length of the training "
                    f"steps: aggregate the data to it, or train a model on them."
                ),
                stacklevel=frames_of_aevb(),
            )

    def check_levels(self, model: DeclaredModel, batch: Mapping[str, Tensor]) -> None:
        """Raise ValueError for grey levels, if training prepared images of bytes."""
        for name, how in self.pixels.items():
            if how == "dequantise" and name in batch and not batch[name].is_meta:
                refuse_levels(name, batch[name].max())

    def warn_of_other_units(self, model: DeclaredModel, batch: Mapping[str, Tensor]) -> None:
        """Warn if most values of a column lie far outside the range of the training rows.

        The rows were then probably not prepared as the training rows were.
        """
        for name, (low, high) in self.ranges.items():
            if name not in batch or batch[name].is_meta or batch[name].shape[-1] != len(low):
                continue
            value = batch[name].detach().double().cpu().flatten(0, -2)
            known = torch.ones_like(value, dtype=torch.bool)
            for mask in masks_of(batch, name, timed=model.graph.timed[name]):
                known &= mask.cpu().expand(*batch[name].shape).flatten(0, -2)
            far = FAR * (high - low).clamp_min(1e-12)
            outside = known & ((value < low - far) | (value > high + far))
            columns = (2 * outside.sum(0) > known.sum(0)).nonzero()[:, 0].tolist()
            if not columns:
                continue
            j, names = columns[0], self.columns.get(name) or tuple(map(str, range(len(low))))
            shown = f"{', '.join(names[i] for i in columns[:3])}{', …' * (len(columns) > 3)}"
            which = f"column {shown} lies" if len(columns) == 1 else f"columns {shown} lie"
            text = (
                f"In {name}, {which} far from the rows that the model was trained on: the median "
                f"of column {names[j]} is {value[known[:, j], j].median():g}, and its training "
                f"values were {low[j]:g} to {high[j]:g}"
                f"{'' if name in self.columns else ' (columns count from 0)'}. "
            )
            warning = DataWarning(
                f"{text}Prepare the rows as the training rows were, for example by "
                f"standardise(rows, like=training_rows)."
            )
            warning.for_commands = (
                f"{text}Give the columns in the order and the units of the training rows."
            )
            warnings.warn(warning, stacklevel=frames_of_aevb())

    def untaught(self, model: DeclaredModel) -> dict[str, str]:
        """Return the latents whose factors in q are outdated, with the reason for each."""
        found, p = {}, None
        for name, record in self.records.items():
            if not alike(digest(_weights(model, name)), record.q):
                continue
            if record.reason is not None:
                found[name] = record.reason
                continue
            p = digest(model.theta()) if p is None else p
            if not alike(p, record.p):
                what = (
                    f"p was trained or set after q({name}|·) was"
                    if record.trained
                    else f"q({name}|·) was never trained, while p was trained or set"
                )
                found[name] = what
        return found

    def unseen(self, model: DeclaredModel, names: Collection[str]) -> dict[str, frozenset[int]]:
        """Return, per observed variable, the columns that q never saw with missing entries.

        These columns were complete in all rows q was trained on.

        ``names`` are the latents whose factors are needed. Variables without such columns are left
        out.
        """
        found = {name: self.complete(model, name) for name in model.graph.observed}
        found = {name: columns for name, columns in found.items() if columns}
        return found if found and self.holds(model, names) else {}

    def complete(self, model: DeclaredModel, name: str) -> frozenset[int]:
        """Return the columns of a variable that no recorded training row of q had missing."""
        if self.lacked is None:
            return frozenset()
        return frozenset(range(model.graph.size(name))) - self.lacked.get(name, frozenset())

    def holds(self, model: DeclaredModel, names: Collection[str]) -> bool:
        """Return whether q's factor of some of these latents is as training left it.

        This reads all weights of the factors, so ask it last.
        """
        return any(
            record.trained and alike(digest(_weights(model, name)), record.q)
            for name, record in self.records.items()
            if name in names
        )

    # Saving and loading ---------------------------------------------------------------------------

    def state(self, model: DeclaredModel) -> dict[str, object]:
        """Return the record as JSON-ready data.

        It holds the reasons of outdated latents (null for latents of a model that was never
        trained) and the kind of rows that q was trained on.
        """
        held = self.untaught(model)
        new = [
            name
            for name, record in self.records.items()
            if not record.trained
            and name not in held
            and alike(digest(_weights(model, name)), record.q)
        ]
        lacked = (
            None
            if self.lacked is None
            else {name: _runs(columns) for name, columns in self.lacked.items() if columns}
        )
        return {
            "untaught": held | dict.fromkeys(new),
            "open ends": self.open_ends,
            "lacked": lacked,
            "patterns": None if self.patterns is None else self.patterns.state(),
            "ranges": {
                name: [low.tolist(), high.tolist()] for name, (low, high) in self.ranges.items()
            },
            "columns": {name: list(columns) for name, columns in self.columns.items()},
            "pixels": dict(self.pixels),
            "pace": None if self.pace is None else list(self.pace),
        }

    def restore(self, model: DeclaredModel, state: Mapping[str, object] | None) -> None:
        """Restore a saved record for the model's current weights.

        Without a record, q counts as trained.
        """
        stored = state if isinstance(state, Mapping) else {}
        self.records, self.open_ends = {}, bool(stored.get("open ends", False))
        saved, names = stored.get("untaught"), with_weights(model)
        self.lacked = _columns(model, stored)
        width = sum(map(model.graph.size, model.graph.observed))
        self.patterns = GapPatterns.restored(stored.get("patterns"), width)
        self.ranges = _ranges(model, stored)
        variables = (*model.graph.observed, *model.graph.given, *model.graph.latents)
        kept = {
            key: {name: value for name, value in part.items() if name in variables}
            for key in ("columns", "pixels")
            if isinstance(part := stored.get(key), Mapping)
        }
        self.columns = {
            name: tuple(map(str, columns))
            for name, columns in kept.get("columns", {}).items()
            if isinstance(columns, list)
        }
        pace = stored.get("pace")
        self.pace = None
        if isinstance(pace, list) and len(pace) == 2 and isinstance(pace[1], int | float):
            self.pace = Pace(str(pace[0]), float(pace[1])) if pace[1] > 0 else None
        self.pixels = {name: str(how) for name, how in kept.get("pixels", {}).items()}
        reasons = (
            {
                name: None if reason is None else str(reason)
                for name, reason in saved.items()
                if name in names
            }
            if isinstance(saved, Mapping)
            else {}
        )
        self.record(model, reasons)
        self.record(model, {name: None for name in names if name not in reasons}, trained=True)


def check_rows(source: Source, columns: ColumnNames, pixels: Mapping[str, str]) -> None:
    """Raise ValueError for rows in another form than the training rows: columns, grey levels."""
    for name, found in source.columns.items():
        if name in columns:
            refuse_other_columns(name, found, columns[name])
    for name, how in pixels.items():
        if how == "dequantise" and name in source.extents:
            refuse_levels(name, source.extents[name][1].max())


def not_finite_text(value: Tensor) -> str | None:
    """Say that log densities of rows [N] are not finite; None if they are."""
    value = value.detach()
    bad = ~value.isfinite()
    count = 0 if value.is_meta else int(bad.sum())
    if not count:
        return None
    row = int(bad.nonzero()[0, 0])
    return (
        f"is {float(value[row]):g} in {count} of {len(value)} rows (first, from 0: row {row}): the "
        f"model gives their values no density, or numbers overflow. Check that the columns have "
        f"the order and the units of the training rows."
    )


def refuse_levels(name: str, high: Tensor) -> None:
    """Raise ValueError if the largest value of prepared images lies far above 1."""
    if high > LARGEST_PIXEL:
        raise ValueError(
            f"{name} has values up to {float(high):g}, but training prepared its images of bytes "
            f"as numbers in (0, 1). They look like grey levels 0 … 255: pass the images as bytes "
            f"[N, height, width], or spread them over (0, 1) (aevb.data.dequantise({name}, 256))."
        )


def _runs(columns: Collection[int]) -> list[list[int]]:
    """Return columns as runs [first, last], which are few even if there are many columns."""
    found: list[list[int]] = []
    for column in sorted(columns):
        if found and column == found[-1][1] + 1:
            found[-1][1] = column
        else:
            found.append([column, column])
    return found


def _ranges(model: DeclaredModel, stored: Mapping[str, object]) -> Ranges:
    """Return the saved ranges of variables that the model observes."""
    saved = stored.get("ranges")
    found: Ranges = {}
    for name, ends in saved.items() if isinstance(saved, Mapping) else ():
        try:
            low, high = torch.tensor(ends, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            continue
        if name in model.graph.observed and low.shape == (model.graph.size(name),):
            found[name] = low, high
    return found


def _columns(
    model: DeclaredModel, stored: Mapping[str, object]
) -> dict[str, frozenset[int]] | None:
    """Return the columns of saved runs.

    An earlier version saved the variables without missing entries.
    """
    observed = {name: range(model.graph.size(name)) for name in model.graph.observed}
    whole, lacked = stored.get("whole"), stored.get("lacked")
    if isinstance(lacked, Mapping):
        try:
            ends = {
                name: [
                    (int(first), int(last)) for first, last in lacked.get(name, ())[: len(columns)]
                ]
                for name, columns in observed.items()
            }
        except (KeyError, TypeError, ValueError):
            return None
        return {
            name: frozenset(i for i in columns if any(a <= i <= b for a, b in ends[name]))
            for name, columns in observed.items()
        }
    if isinstance(whole, list):
        return {
            name: frozenset() if name in whole else frozenset(columns)
            for name, columns in observed.items()
        }
    return None


def _weights(model: DeclaredModel, name: str) -> list[nn.Parameter]:
    return [
        parameter
        for entry in model.graph.q[name].values()
        for parameter in model.factors[entry.id].parameters()
    ]


def with_weights(model: DeclaredModel) -> list[str]:
    """Return the latents whose factors in q have parameters."""
    return [name for name in model.graph.latents if _weights(model, name)]


def trainable_latents(model: DeclaredModel) -> list[str]:
    """Return the latents whose factors in q have parameters that are not frozen."""
    return [
        name
        for name in with_weights(model)
        if any(parameter.requires_grad for parameter in _weights(model, name))
    ]
