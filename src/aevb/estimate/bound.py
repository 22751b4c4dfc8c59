"""The estimate of a bound, its terms, and the weights of its KL terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributions as td
from torch import Tensor

from aevb.estimate.metric_names import latent_of
from aevb.runtime.seeding import draw_from, seeded


@dataclass(frozen=True)
class Bound:
    """An estimate of a bound, one number per example.

    For the ELBO, value = Σ likelihood terms − Σ KL terms, exactly.

    Attributes:
        value: The bound [N]. It has no gradient if the KL terms have weights or free bits.
        terms: ``"x"`` is log p(x|·), and ``"kl(z)"`` is E[log q(z|·) − log p(z|·)], which is
            −log p(z|·) in rows where z is known. Under iwae and particles the terms are
            diagnostics: averages with the normalised weights.
        log_weights: The log-weights of iwae, [K, N]; None for other bounds, or if a latent is
            enumerated outside them.
        weighted: The bound with weights and free bits of its KL terms; None if there are none.

    >>> import torch
    >>> from aevb import Model, Normal
    >>> model = Model(p={"z": Normal(1), "x | z": Normal(2)}, q={"z | x": Normal()})
    >>> bound = model.elbo(x=torch.zeros(3, 2), seed=0)
    >>> torch.equal(bound.value, bound.terms["x"] - bound.terms["kl(z)"])
    True
    """

    value: Tensor
    terms: dict[str, Tensor]
    log_weights: Tensor | None = None
    weighted: Tensor | None = None

    def __repr__(self) -> str:
        """Return the means over the examples; the fields have the number of each.

        >>> import torch
        >>> Bound(torch.tensor([-3.0, -2.0]), {"x": torch.zeros(2), "kl(z)": torch.ones(2) * 2.5})
        Bound of 2 examples, mean -2.5000 nats: x 0.0000, kl(z) 2.5000
        """
        n = len(self.value)
        mean = float(self.value.detach().double().mean())
        parts = [
            f"{name} {float(term.detach().double().mean()):.4f}"
            for name, term in self.terms.items()
        ]
        rows = f"{n} example{'s' * (n != 1)}, mean" if n != 1 else "1 example,"
        return f"Bound of {rows} {mean:.4f} nats" + (": " if parts else "") + ", ".join(parts)

    def _repr_html_(self) -> str:
        from aevb.notebook import result_cards

        return result_cards.bound_card(self)

    @property
    def objective(self) -> Tensor:
        """What to maximise: the bound, with the weights and free bits of its KL terms if given.

        log p of a known latent is a likelihood term and has no weight.
        """
        return self.value if self.weighted is None else self.weighted


# The weight of the KL terms: one for all, or by latent (1 for the latents that are left out).
KLWeight = float | Tensor | Mapping[str, float | Tensor]


def integrand(
    terms: Mapping[str, Tensor], kls: Mapping[str, Tensor], kl_weight: KLWeight
) -> Tensor:
    """Σ likelihood terms − Σ KL terms, each times its weight."""
    total: Tensor | None = None
    for term in terms.values():
        total = term if total is None else total + term
    assert total is not None  # every model has an observed variable
    for name, kl in kls.items():
        weight = weight_of(kl_weight, str(latent_of(name)))
        total = total - (kl if is_one(weight) else weight * kl)
    return total


def weight_of(kl_weight: KLWeight, latent: str) -> float | Tensor:
    """Return the weight of a latent's KL term."""
    return kl_weight.get(latent, 1.0) if isinstance(kl_weight, Mapping) else kl_weight


def is_one(kl_weight: KLWeight) -> bool:
    return isinstance(kl_weight, float) and kl_weight == 1.0


def sample_with_seed(dist: td.Distribution, seed: Tensor) -> Tensor:
    """Draw torch's own sample from a seed, for families that define no ``noise``.

    The sample is ``rsample`` if available.
    """
    with seeded(int(seed)):
        return draw_from(dist, pathwise=True)
