"""Result of an evidence estimate: value and standard error per example, method, diagnostics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aevb.evidence.weights import ENOUGH, FEW, reliable_shape, suspect

if TYPE_CHECKING:
    from aevb.data.sequence_index import SequenceIndex


@dataclass(frozen=True, repr=False)
class Evidence:
    """log p(x) per example, with its standard error and the method.

    Attributes:
        value: log p(x) [N].
        stderr: The standard errors [N], 0 if exact.
        method: "exact", "importance", "ais", "particles" or "prior", with its details.
        diagnostics: The settings as whole numbers (``samples``) and measurements with one number
            per example (``ess``, ``khat``, ``acceptance``).
        notes: Sentences that say what is wrong with the estimate and how to fix it; empty if
            nothing is wrong.
        index: The ids and times of the data if they were sequences of a frame.

    >>> import torch
    >>> from aevb import zoo
    >>> evidence = zoo.fa(x=3, z=2).log_evidence(x=torch.zeros(4, 3))
    >>> evidence.method, evidence.value.shape, evidence.error
    ('exact', torch.Size([4]), 0.0)
    """

    value: Tensor
    stderr: Tensor
    method: str
    diagnostics: dict[str, Tensor | float | int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    index: SequenceIndex | None = None  # of the frame of the data, if they are sequences

    def frame(self) -> Any:
        """Return a frame with one line per sequence: ``log_p`` and ``stderr``, by the ids.

        Raises:
            ValueError: The data were arrays.

        >>> import pandas as pd
        >>> from aevb import sequences, zoo
        >>> days = pd.DataFrame({"shop": [1, 1, 2, 2], "x": [3.0, 1.0, 2.0, 5.0]})
        >>> evidence = zoo.local_level().log_evidence(x=sequences(days, id="shop")["x"])
        >>> list(evidence.frame())
        ['log_p', 'stderr']
        """
        if self.index is None:
            raise ValueError(
                "The data were arrays, so there is no index to give a frame in. Use .value and "
                ".stderr, or pass the data as a frame (aevb.sequences)."
            )
        columns = {"log_p": self.value, "stderr": self.stderr}
        return self.index.row_frame(
            {name: value.detach().cpu().numpy() for name, value in columns.items()}
        )

    @property
    def mean(self) -> float:
        """Mean over the examples."""
        return float(self.value.double().mean())

    @property
    def error(self) -> float:
        """Standard error of the mean due to sampling, for these examples.

        It does not include the variation between examples.
        """
        return float(self.stderr.double().square().sum().sqrt()) / len(self.stderr)

    def __repr__(self) -> str:
        n = len(self.value)
        over = "1 example" if n == 1 else f"mean of {n} examples"
        spread = "" if self.method == "exact" else f" ± {self.error:.2g}"
        settings = [
            f"{name} {value}"
            for name, value in self.diagnostics.items()
            if not isinstance(value, Tensor)
        ]
        lines = [
            f"log p = {self.mean:.4f}{spread} nats "
            f"({', '.join([over, self.method, *settings, *self._worst()])})"
        ]
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        from aevb.notebook import cards

        return cards.evidence_card(self)

    def _worst(self) -> list[str]:
        """Return the diagnostics of the worst example as text."""
        found = {
            name: value
            for name, value in self.diagnostics.items()
            if isinstance(value, Tensor) and value.numel()
        }
        lowest = [
            f"lowest {name} {float(found[name].min()):.3g}"
            for name in ("ess", "acceptance")
            if name in found
        ]
        return lowest + [
            f"largest {name} {float(found[name].max()):.2f}" for name in ("khat",) if name in found
        ]


def weight_notes(
    value: Tensor,
    khat: Tensor,
    ess: Tensor,
    samples: int,
    remedy: str,
    what: str = "weights",
) -> list[str]:
    """Return notes about unreliable estimates.

    There is a note if Pareto's k is too high and the effective sample size small, if k is unknown,
    and if a value is not finite.
    """
    finite, threshold, notes = value.isfinite(), reliable_shape(samples), []
    if bad := int((suspect(khat, ess, samples) & finite).sum()):
        why = (
            f"a few of the {samples} {what} carry the mean, which may be too low, and its error "
            f"too small"
        )
        notes.append(
            f"{count(bad, len(value))} have Pareto k above {threshold:.2f} and an effective sample "
            f"size below {FEW * samples:g}: {why}; {remedy}."
        )
    if bool((khat.isnan() & finite).any()):
        notes.append(
            f"{samples} {what} are too few to tell whether the mean and its error can be trusted: "
            f"take {ENOUGH} or more."
        )
    if lost := int((~finite).sum()):
        notes.append(
            f"{count(lost, len(value))} have no finite evidence: p or q gives NaN or zero "
            f"probability there."
        )
    return notes


def count(part: int, whole: int, what: str = "examples") -> str:
    """Format a count for a note.

    >>> count(37, 1000)
    '37 of 1000 examples'
    """
    return f"{part} of {whole} {what}"
