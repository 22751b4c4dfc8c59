"""The result of a diagnosis: findings, each with its level, its figures and a remedy."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

LEVELS = ("ok", "note", "warning", "problem")


@dataclass(frozen=True)
class Finding:
    """One finding.

    ``kind`` is its name ("collapse", "dead classes", …). ``about`` is the variable, or "run".
    """

    level: str
    kind: str
    about: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""

    def __str__(self) -> str:
        lines = textwrap.wrap(
            self.text, 110, initial_indent=f"{self.level:<9}", subsequent_indent=" " * 9
        )
        return "\n".join(
            lines
            + textwrap.wrap(
                self.remedy, 110, initial_indent=" " * 9 + "→ ", subsequent_indent=" " * 11
            )
        )


@dataclass(frozen=True)
class Diagnosis:
    """All findings, the gravest first. ``print`` shows them.

    Attributes:
        findings: The findings, each with its level, text, figures and remedy.
        rows: The number of rows that were examined.

    >>> found = Diagnosis((Finding("warning", "collapse", "z", "z is dead."),), rows=100)
    >>> found.worst, len(found.of("collapse", about="z")), found.to_dict()["rows"]
    ('warning', 1, 100)
    >>> print(found)
    100 rows examined: 1 warning.
    warning  z is dead.
    """

    findings: tuple[Finding, ...]
    rows: int

    @property
    def worst(self) -> str:
        """The gravest level: ok, note, warning or problem."""
        return max((finding.level for finding in self.findings), key=LEVELS.index, default="ok")

    def of(self, kind: str, about: str | None = None) -> tuple[Finding, ...]:
        """Return the findings of one kind.

        Arguments:
            kind: The kind, such as "collapse".
            about: The variable, or "run"; None is any.
        """
        return tuple(
            finding
            for finding in self.findings
            if finding.kind == kind and about in (None, finding.about)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain data, for JSON."""
        return {
            "worst": self.worst,
            "rows": self.rows,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def __str__(self) -> str:
        counts = {
            level: sum(finding.level == level for finding in self.findings)
            for level in reversed(LEVELS)
        }
        parts = [
            f"{count} {level}{'s' * (count > 1 and level != 'ok')}"
            for level, count in counts.items()
            if count and level != "ok"
        ]
        head = f"{self.rows} rows examined: {', '.join(parts) or 'nothing is wrong'}."
        return "\n".join([head, *map(str, self.findings)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from aevb.notebook import cards

        return cards.diagnosis_card(self)


def gravest_first(findings: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: -LEVELS.index(finding.level)))
