"""What Pareto's k cannot see: parts of the posterior that no sample of q reached.

The weights of a q that sits on one mode, or is far too narrow, may be nearly equal. A few weights of two wider proposals, p's own draws
and q with its Gaussian noise widened, estimate the same log p(x); where one of them lies clearly higher, q misses something.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from aevb.estimate.noise import Layout
from aevb.evidence.result import Evidence, count
from aevb.evidence.weights import reliable_shape

ROWS, LEAST, MOST = 256, 50, 200  # rows that are compared, and weights of each of them
WIDER = 2.0
NATS, SIGMAS = 0.1, 4.0  # what is clearly higher
SEED = 0


def how_many(samples: int) -> int:
    """Weights of each other proposal: a tenth of those that are judged, within limits."""
    return min(samples, max(LEAST, min(samples // 10, MOST)))


def widened(layout: Layout, noise: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Gaussian noise ε WIDER times as wide, and log N(ε; 0, 1) − log N(ε; 0, WIDER²) for the log-weights, […, S, 1, N, 1]."""
    wide, correction = dict(noise), torch.zeros(())
    for name, (kind, _) in layout.items():
        if kind == "normal":
            wide[name] = WIDER * noise[name]
            ratio = math.log(WIDER) - 0.5 * (WIDER**2 - 1) * noise[name].square()
            correction = correction + ratio.sum((-1, -3), keepdim=True)
    return wide, correction


def note_missed(found: Evidence, others: Mapping[str, Evidence], remedy: str) -> list[str]:
    """A sentence if another proposal finds clearly more than q does, in more than one row of a hundred or on average.

    Rows are compared where both tails look fine: of the others Pareto's k has spoken.
    """
    for what, other in others.items():
        n = len(other.value)
        gap = other.value.double() - found.value[:n].double()
        error = (other.stderr.double().square() + found.stderr[:n].double().square()).sqrt()
        fine = gap.isfinite() & error.isfinite()
        for each in (found, other):
            khat, samples = each.diagnostics["khat"], each.diagnostics["samples"]
            assert isinstance(khat, Tensor)
            fine = fine & ~(khat[:n] > reliable_shape(int(samples)))
        gap, error = gap[fine], error[fine]
        if not len(gap):
            continue
        higher, mean, spread = int((gap > NATS + SIGMAS * error).sum()), float(gap.mean()), float(error.square().sum().sqrt()) / len(gap)
        if higher > len(gap) / 100 or mean > NATS + SIGMAS * spread:
            return [
                f"{other.diagnostics['samples']} draws from {what} find a higher log p than q does, by {mean:.2f} nats on average (sampling error "
                f"{spread:.2g}) and clearly in {count(higher, len(gap))} whose Pareto k looks fine: k cannot see that q has no samples in part of "
                f"the posterior; {remedy}."
            ]
    return []
