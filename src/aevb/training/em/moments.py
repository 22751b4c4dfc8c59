"""E-step of linear-Gaussian models: expected second moments of all variables.

All variables are concatenated to one vector w = (1, given, observed, latent). Columns that any row
knows are standardised. Each entry of a stochastic variable defines a residual that is standard
normal under p: a row of a matrix R, with log p(w) = −½ |R w|² − Σ log scale + const. Let J = RᵀR.
Given the known part u of w, the unknown part z is Gaussian with precision J_zz and mean −J_zz⁻¹
J_zu u, which is linear in u. If nothing is missing, the posterior moments therefore depend on the
data only through the second moments of u, and the rows are read once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aevb.estimate.keys import mask_of
from aevb.training.em.columns import Columns, known
from aevb.training.em.factors import KEPT, Rows, Statistics, add

LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Residuals:
    """The matrix R ([T, W]) and the log-scale of each of its rows ([T])."""

    matrix: Tensor
    log_scale: Tensor


@dataclass(frozen=True)
class Design:
    """Regressors and target of a factor's regression.

    ``places`` and ``own`` are the positions of the regressors and of the factor's variable in w.
    ``offsets`` and ``own_offsets`` are added to them. ``holes`` are the variable's columns among
    all columns with missing entries.
    """

    places: Tensor
    own: Tensor
    holes: slice
    offsets: Tensor | None = None
    own_offsets: Tensor | None = None


class Complete:
    """Complete rows with the same known variables, summarised by their second moments."""

    def __init__(self, known: Tensor, unknown: Tensor) -> None:
        self.known, self.unknown, size = known, unknown, len(known)
        order = torch.cat([known, unknown])
        # The permutation from (known, unknown) to w.
        self.back = None if bool((order.diff() == 1).all()) else order.argsort()
        self.count = torch.zeros((), dtype=torch.float64, device=known.device)
        self.second = torch.zeros(size, size, dtype=torch.float64, device=known.device)

    def add(self, rows: Tensor) -> None:
        """Add rows of w, which are zero where unknown."""
        u = rows[:, self.known]
        self.second += u.mT @ u
        self.count += len(u)

    def expect(self, residuals: Residuals) -> Statistics:
        size, r = len(self.known), residuals.matrix
        r = r if self.back is None else r[:, torch.cat([self.known, self.unknown])]
        at_known, at_unknown = r[:, :size], r[:, size:]
        root = torch.linalg.cholesky(at_unknown.mT @ at_unknown)
        gain = -torch.cholesky_solve(at_unknown.mT @ at_known, root)
        left = at_known + at_unknown @ gain  # residuals at the posterior mean
        constant = (
            residuals.log_scale.sum()
            + root.diagonal().log().sum()
            + 0.5 * LOG_2PI * (len(r) - len(gain))
        )
        cross = gain @ self.second
        own = cross @ gain.mT + self.count * torch.cholesky_inverse(root)
        second = torch.cat([torch.cat([self.second, cross]), torch.cat([cross.mT, own])], 1)
        second = second if self.back is None else second[self.back.unsqueeze(1), self.back]
        return {
            "evidence": -0.5 * ((left @ self.second) * left).sum() - self.count * constant,
            "second": second,
        }


class Incomplete:
    """Rows with missing entries and the same known latents.

    The residuals of missing entries are left out. A row's posterior precision is a sum over its
    known entries, so rows with the same pattern share it. Each column of a variable with missing
    entries is regressed on the rows that know the column.
    """

    def __init__(self, known: Tensor, unknown: Tensor, holes: Tensor) -> None:
        """``holes`` are the rows of R whose entries may be missing."""
        self.known, self.unknown, self.holes = known, unknown, holes
        self.parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, rows: Tensor, keep: Tensor) -> None:
        patterns, which = keep.unique(dim=0, return_inverse=True)
        self.parts.append((rows, keep.double(), patterns.double(), which))

    def expect(
        self, residuals: Residuals, designs: dict[str, Design], everything: bool
    ) -> Statistics:
        found: Statistics = {}
        for part in self.parts:
            add(found, self._expect(*part, residuals, designs, everything))
        return found

    def _expect(
        self,
        rows: Tensor,
        keep: Tensor,
        patterns: Tensor,
        which: Tensor,
        residuals: Residuals,
        designs: dict[str, Design],
        everything: bool,
    ) -> Statistics:
        z, r, n = self.unknown, residuals.matrix, len(rows)
        full = torch.ones(len(r), dtype=torch.bool, device=r.device).index_fill(
            0, self.holes, False
        )
        hole, rest = r[self.holes], r[full]
        pairs = (hole[:, z].unsqueeze(2) * hole[:, z].unsqueeze(1)).flatten(1)
        precision = rest[:, z].mT @ rest[:, z] + (patterns @ pairs).unflatten(1, (len(z), len(z)))
        root = torch.linalg.cholesky(precision)
        covariance = torch.cholesky_inverse(root)
        # The residuals at z = 0, the value of the unknowns in these rows.
        seen = keep * (rows @ hole.mT)
        others = rows @ rest.mT
        pull = seen @ hole[:, z] + others @ rest[:, z]
        mean = -(covariance[which] @ pull.unsqueeze(-1)).squeeze(-1)
        quadratic = seen.square().sum() + others.square().sum() + (mean * pull).sum()
        log_root = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        constant = (
            n * (residuals.log_scale[full].sum() + 0.5 * LOG_2PI * (len(rest) - len(z)))
            + log_root[which].sum()
        )
        constant = constant + (keep @ (residuals.log_scale[self.holes] + 0.5 * LOG_2PI)).sum()
        found = {"evidence": -0.5 * quadratic - constant}
        w = rows.index_copy(1, z, mean)
        times = torch.zeros(len(patterns), dtype=torch.float64, device=r.device).index_add_(
            0, which, torch.ones_like(rows[:, 0])
        )
        if everything:
            second = w.mT @ w
            second[z.unsqueeze(1), z] += (times[:, None, None] * covariance).sum(0)
            found["rest"] = second
        for name, design in designs.items():
            here, pattern = keep[:, design.holes], patterns[:, design.holes] * times.unsqueeze(1)
            columns, value = w[:, design.places], w[:, design.own]
            if design.offsets is not None and design.own_offsets is not None:
                columns, value = columns + design.offsets, here * (value + design.own_offsets)
            width = len(design.places)
            inner = (here.mT @ (columns.unsqueeze(2) * columns.unsqueeze(1)).flatten(1)).unflatten(
                1, (width, width)
            )
            at = torch.full((r.shape[1],), -1, device=z.device).index_copy(
                0, z, torch.arange(len(z), device=z.device)
            )[design.places]
            hidden = (at >= 0).nonzero()[:, 0]
            if len(hidden):
                spread = covariance[:, at[hidden].unsqueeze(1), at[hidden]]
                inner[:, hidden.unsqueeze(1), hidden] += (pattern.mT @ spread.flatten(1)).unflatten(
                    1, (len(hidden), len(hidden))
                )
            found |= {
                f"{name} inner": inner,
                f"{name} outer": value.mT @ columns,
                f"{name} own": value.square().sum(0),
            }
        return found


class Moments:
    """Data of a linear-Gaussian model: second moments of complete rows, and the incomplete rows.

    ``columns`` are the columns of all variables that any row knows, including latents. ``places``
    are the slices of each variable in w, whose first entry is 1 and which has ``width`` entries.
    ``entries`` are the rows of R of each variable.
    """

    def __init__(
        self,
        rows: Rows,
        columns: Columns,
        places: dict[str, slice],
        entries: dict[str, slice],
        latents: tuple[str, ...],
    ) -> None:
        self.rows, self.columns, self.places, self.entries, self.latents = (
            rows,
            columns,
            places,
            entries,
            latents,
        )
        self.width = 1 + sum(place.stop - place.start for place in places.values())
        first = rows.first()
        self.data = [name for name in columns.names if name not in latents]
        self.known_somewhere = [name for name in columns.names if name in latents]
        self.holes = [name for name in self.data if mask_of(name) in first]
        self.complete: dict[tuple[bool, ...], Complete] = {}
        self.incomplete: dict[tuple[bool, ...], Incomplete] = {}
        self.streams = bool(self.holes) and len(rows) * self.width > KEPT
        for batch in rows.parts():
            self._sort(batch, self.complete, {} if self.streams else self.incomplete)
        # Visit the patterns of all processes, in the same order in each.
        for pattern in sorted(
            {pattern for found in rows.world.gather(list(self.complete)) for pattern in found}
        ):
            group = self.complete.setdefault(pattern, self._empty(pattern))
            rows.world.sum([group.second, group.count])

    def _sort(
        self,
        batch: dict[str, Tensor],
        complete: dict[tuple[bool, ...], Complete],
        incomplete: dict[tuple[bool, ...], Incomplete],
    ) -> None:
        """Add a chunk of rows to the groups that they belong to."""
        w, there, keep = self._lay_out(batch)
        for pattern in there.unique(dim=0) if there.shape[1] else there[:1]:
            mine, code = (there == pattern).all(1), tuple(pattern.tolist())
            whole = mine & keep.all(1)
            if bool(whole.any()):
                complete.setdefault(code, self._empty(code)).add(w[whole])
            if bool((holed := mine & ~whole).any()):
                known, unknown = self._split(code)
                rows = torch.cat(
                    [
                        torch.arange(self.entries[name].start, self.entries[name].stop)
                        for name in self.holes
                    ]
                ).to(w.device)
                incomplete.setdefault(code, Incomplete(known, unknown, rows)).add(
                    w[holed], keep[holed]
                )

    def _lay_out(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows of w (zero where unknown), and two masks.

        The masks say which latents each row knows, and which entries of variables with missing
        values.
        """
        like = batch[self.data[0]][0]
        w = like.new_zeros(len(like), self.width)
        w[:, 0] = 1.0
        for name in self.data:
            w[:, self.places[name]] = known(batch, name) * self.columns.standard(
                name, batch[name][0]
            )
        there = torch.zeros(len(w), len(self.known_somewhere), dtype=torch.bool, device=w.device)
        for i, name in enumerate(self.known_somewhere):
            there[:, i] = batch[mask_of(name)][0].all(-1) if mask_of(name) in batch else True
            w[:, self.places[name]] = torch.where(
                there[:, i : i + 1], self.columns.standard(name, batch[name][0]), 0.0
            )
        masks = [batch[mask_of(name)][0] for name in self.holes]
        return (
            w,
            there,
            torch.cat(masks, 1)
            if masks
            else torch.ones(len(w), 1, dtype=torch.bool, device=w.device),
        )

    def _split(self, code: tuple[bool, ...]) -> tuple[Tensor, Tensor]:
        """Return the positions in w that rows of this pattern know, and those that they do not."""
        here = dict(zip(self.known_somewhere, code, strict=True))
        unknown = torch.zeros(self.width, dtype=torch.bool)
        for name in self.latents:
            if not here.get(name, False):
                unknown[self.places[name]] = True
        device = self.rows.source.like.device
        return (~unknown).nonzero()[:, 0].to(device), unknown.nonzero()[:, 0].to(device)

    def _empty(self, code: tuple[bool, ...]) -> Complete:
        return Complete(*self._split(code))

    def observed(self) -> Tensor:
        """Return the mean second moments of w, positive semi-definite; 0 for unknown entries.

        Each moment is averaged over the rows that know both entries.
        """
        second = self.columns.mean[self.data[0]].new_zeros(self.width, self.width)
        count = torch.full_like(second, float(len(self.rows)) if not self.holes else 0.0)
        for batch in self.rows.parts():
            w, _, _ = self._lay_out(batch)
            second += w.mT @ w
            if self.holes:
                there = torch.ones_like(w)
                for name in self.holes:
                    there[:, self.places[name]] = known(batch, name)
                count += there.mT @ there
        self.rows.world.sum([second, count] if self.holes else [second])
        second = second / count.clamp_min(1.0)
        if self.holes:
            values, vectors = torch.linalg.eigh(second)
            second = (vectors * values.clamp_min(0.0)) @ vectors.mT
        return second

    def expect(
        self, residuals: Residuals, designs: dict[str, Design], everything: bool
    ) -> Statistics:
        """Return the E-step's sums over all rows.

        These are the evidence, the second moments of w over complete rows ("second"), and the
        moments that the regressions of incomplete rows need. With ``everything``, "rest" holds the
        second moments of w over incomplete rows.
        """
        nothing = residuals.matrix.new_zeros(self.width, self.width)
        found: Statistics = {"evidence": residuals.matrix.new_zeros(()), "second": nothing}
        for group in self.complete.values():
            add(found, group.expect(residuals))
        if not self.holes:
            return found
        rest: Statistics = {"evidence": residuals.matrix.new_zeros(()), "rest": nothing}
        for name, design in designs.items():
            own, wide = len(design.own), len(design.places)
            rest |= {
                f"{name} inner": nothing.new_zeros(own, wide, wide),
                f"{name} outer": nothing.new_zeros(own, wide),
                f"{name} own": nothing.new_zeros(own),
            }
        for batch in self.rows.parts() if self.streams else ():
            some: dict[tuple[bool, ...], Incomplete] = {}
            self._sort(batch, {}, some)
            for holed in some.values():
                add(rest, holed.expect(residuals, designs, everything))
        for holed in self.incomplete.values():
            add(rest, holed.expect(residuals, designs, everything))
        self.rows.world.sum(list(rest.values()))
        add(found, rest)
        return found
