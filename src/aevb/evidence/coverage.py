"""Detect parts of the posterior that no sample of q reached, which Pareto's k cannot detect.

If q covers one mode only, or is far too narrow, its importance weights may still be nearly equal.
As a check, two wider proposals (draws from p, and q with wider Gaussian noise) estimate the same
log p(x) from a few weights. If one of them is clearly higher, q misses part of the posterior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from aevb.derive.plan import Layout
from aevb.evidence.result import Evidence, count
from aevb.evidence.weights import suspect

ROWS, LEAST, MOST = 256, 50, 200  # rows to compare; fewest and most weights per row
WIDER = 2.0
NATS, SIGMAS = 0.1, 4.0  # an estimate is clearly higher if it exceeds NATS + SIGMAS · error
SEED = 0


def how_many(samples: int) -> int:
    """Return the number of weights per wider proposal: a tenth of q's weights, within limits."""
    return min(samples, max(LEAST, min(samples // 10, MOST)))


def widened(layout: Layout, noise: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Scale Gaussian noise ε by WIDER and return the correction of the log-weights.

    The correction is log N(ε; 0, 1) − log N(ε; 0, WIDER²), […, S, 1, N, 1].
    """
    wide, correction = dict(noise), torch.zeros(())
    for name, (kind, _) in layout.items():
        if kind == "normal":
            wide[name] = WIDER * noise[name]
            ratio = math.log(WIDER) - 0.5 * (WIDER**2 - 1) * noise[name].square()
            correction = correction + ratio.sum((-1, -3), keepdim=True)
    return wide, correction


def note_missed(found: Evidence, others: Mapping[str, Evidence], remedy: str) -> list[str]:
    """Return a note if a wider proposal finds a clearly higher evidence than q.

    "Clearly" means in more than one row of a hundred, or on average. Only rows with a good Pareto k
    under both proposals are compared; the others already have a note of their own.
    """
    for what, other in others.items():
        n = len(other.value)
        gap = other.value.double() - found.value[:n].double()
        error = (other.stderr.double().square() + found.stderr[:n].double().square()).sqrt()
        fine = gap.isfinite() & error.isfinite()
        for each in (found, other):
            khat, ess = each.diagnostics["khat"], each.diagnostics["ess"]
            assert isinstance(khat, Tensor)
            assert isinstance(ess, Tensor)
            fine = fine & ~suspect(khat[:n], ess[:n], int(each.diagnostics["samples"]))
        gap, error = gap[fine], error[fine]
        if not len(gap):
            continue
        higher, mean, spread = (
            int((gap > NATS + SIGMAS * error).sum()),
            float(gap.mean()),
            float(error.square().sum().sqrt()) / len(gap),
        )
        if higher > len(gap) / 100 or mean > NATS + SIGMAS * spread:
            return [
                f"{other.diagnostics['samples']} draws from {what} find a higher log p than q "
                f"does, by {mean:.2f} nats on average (sampling error {spread:.2g}) and clearly "
                f"in {count(higher, len(gap))} whose Pareto k looks fine: k cannot see that q has "
                f"no samples in part of the posterior; {remedy}."
            ]
    return []
