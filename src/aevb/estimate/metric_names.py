"""Names of metrics: the bound, its terms, and the same on validation data.

A term of the bound is called ``x`` for log p(x|·) and ``kl(z)`` for E[log q(z|·) − log p(z|·)]. The
rows and the history of a run have the metrics of training under these names, those of validation
with a prefix (``validation kl(z)``), and the history the steps of a metric as ``kl(z).step``. The
bound and its terms never have weights; what a run maximises instead is called ``objective``. Only
this module builds and parses such names.
"""

from __future__ import annotations

from typing import NamedTuple

BOUNDS = ("elbo", "iwae", "particles", "expected", "evidence")
OBJECTIVE = "objective"  # what a run maximises, where that is not the bound itself
# Entries of a row that are neither a bound nor its terms.
BESIDES = ("step", "epoch", "lr", "phase", "gradient", "kl weight", "seconds", "note")
_VALIDATION, _STEPS = "validation ", ".step"


def kl_term(latent: str) -> str:
    """Return the name of a latent's KL term.

    >>> kl_term("z")
    'kl(z)'
    """
    return f"kl({latent})"


def latent_of(term: str) -> str | None:
    """Return the latent of a KL term; None for other terms.

    >>> latent_of("kl(z)")
    'z'
    >>> latent_of("x") is None
    True
    """
    return term[3:-1] if term.startswith("kl(") else None


class Metric(NamedTuple):
    """A metric of training or of validation.

    >>> Metric.of("validation elbo")
    Metric(name='elbo', validation=True)
    >>> Metric("kl(z)", validation=True).key
    'validation kl(z)'
    """

    name: str
    validation: bool = False

    @classmethod
    def of(cls, key: str) -> Metric:
        """Return the metric of a key in a row or a history."""
        return cls(key.removeprefix(_VALIDATION), key.startswith(_VALIDATION))

    @property
    def key(self) -> str:
        """The key in a row or a history."""
        return f"{_VALIDATION}{self.name}" if self.validation else self.name

    @property
    def steps(self) -> str:
        """The key of the metric's steps in a history."""
        return f"{self.key}{_STEPS}"


def is_steps(key: str) -> bool:
    """Whether a key of a history holds the steps of a metric."""
    return key.endswith(_STEPS)
