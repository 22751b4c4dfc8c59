"""Read the estimator that ``explain`` prints, to evaluate the printed formula itself.

The text has reductions, then braces with the terms, then constant terms: ``Σ_y q(y|x) log 1/3 Σₛ
exp { log p(x|zˢ, y) + … } − KL(…)``. Sums between ``log`` and ``exp`` are inside the logarithm.
"""

from __future__ import annotations

import re

_SUMS = {
    "samples": r"1/\d+ Σₛ",
    "component": r"Σₖ πₖ(?:\([^)]*\))?",
    "named": r"Σ_k_(\w+) π_k_\w+(?:\([^)]*\))?",
    "weighted": r"Σ_(\w+) q\([^)]*\)",
    "sum": r"Σ_(\w+)",
}
_LATEX = (
    (r"\\sum_\{t\}", "Σₜ"),
    (r"\\tfrac\{1\}\{(\d+)\} \\sum_\{s=1\}\^\{\d+\}", r"1/\1 Σₛ"),
    (r"\\sum_\{k\} \\pi_k", "Σₖ πₖ"),
    (r"\\sum_\{(\w+)\}", r"Σ_\1"),
    (r"\\pi_\{(\w+)\}", r"π_\1"),
    (r"\\(log|exp) ", r"\1 "),
    (r"p_\\theta", "p"),
    (r"q_\\phi", "q"),
    (r" \\mid ", "|"),
    (r"\\Big\\([{}])", r"\1"),
    (r"(^| )- ", r"\1− "),
    (r"D_\{\\mathrm\{KL\}\}", "KL"),
    (r" \\,\\\|\\, ", " ‖ "),
    (r"\\mathbb\{H\}", "H"),
    (r"_\{t-1\}", "ₜ₋₁"),
    (r"_\{t\+1\}", "ₜ₊₁"),
    (r"_\{t\}", "ₜ"),
    (r"_\{0\}", "₀"),
    (r"_\{T\}", "_T"),
    (r"\^\{s\}", "ˢ"),
    (r"\\mathbb\{E\}_\{(q\([^}]*\))\}", r"E_\1"),
    (r"\\tilde\{(\w+)\}", "\\1\u0303"),
)


def from_latex(latex: str) -> str:
    """Convert a LaTeX formula to the printed text."""
    for pattern, text in _LATEX:
        latex = re.sub(pattern, text, latex)
    return latex


class Formula:
    def __init__(self, explanation: str) -> None:
        self.text = next(line for line in explanation.split("\n") if line.startswith("  ")).strip()
        before, braces, after = self.text.partition("{ ")
        self.prefix, self.body = (before, after) if braces else ("", self.text)

    def nesting(self, mixtures: list[str]) -> tuple[tuple[str, str], ...]:
        """Return the reductions, outermost first: (kind, latent or "samples").

        ``mixtures`` names the latent whose index is only k.
        """
        found, rest, inside = [], self.prefix.strip(), False
        while rest:
            if rest.startswith(("log ", "exp")):
                inside, rest = rest.startswith("log"), rest[3:].strip()
                continue
            sort, match = next(
                (sort, match)
                for sort, pattern in _SUMS.items()
                if (match := re.match(pattern, rest))
            )
            name = (
                "samples" if sort == "samples" else mixtures[0] if sort == "component" else match[1]
            )
            kind = {"samples": "mean", "sum": "sum"}.get(sort, "expect")
            found.append((f"log {kind} exp" if inside else kind, name))
            rest = rest[match.end() :].strip()
        assert not inside, self.text
        return tuple(found)

    def count(self, before: str, name: str) -> int:
        """Count a term of the variable in the formula: "log p", "− log q", "H[q" or "KL(q"."""
        return len(re.findall(re.escape(before) + rf"\({name}(?=[\u0303ₜˢ|)])", self.body))

    def term(self, name: str, way: str) -> str:
        """Return how a latent's term is printed, in the words of a recipe."""
        counts = tuple(self.count(before, name) for before in ("log p", "− log q", "H[q", "KL(q"))
        printed = {
            (0, 0, 0, 1): "closed",
            (1, 0, 1, 0): "entropy",
            (1, 1, 0, 0): "sampled",
            (1, 0, 0, 0): "summed",
        }[counts]
        assert (printed == "summed") == (way == "sum"), self.text
        return "relaxed" if way == "relaxed" else printed
