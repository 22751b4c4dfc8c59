"""Free bits: an amount of nats below which the KL term of a latent costs nothing more.

The objective of Kingma et al. (2016, appendix C.8) has max(λ, E[KL]) in place of a KL term. The
maximum is taken for each latent variable, over all its dimensions and time steps together, and E is
the mean over the examples of a batch in which the latent is not known. Below λ nats, the KL term
has no gradient. The objective is still a lower bound of the ELBO.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor


def _one_process(tensors: list[Tensor]) -> None:
    """Do nothing: there are no other processes."""


@dataclass(frozen=True)
class FreeBits:
    """The free bits by latent, in nats; latents without free bits are left out.

    ``sum_over_processes`` sums tensors in place over all processes that have parts of the batch.
    """

    nats: Mapping[str, float]
    sum_over_processes: Callable[[list[Tensor]], None] = _one_process
