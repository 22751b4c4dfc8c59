"""Choose the size of a model of a table by BIC, and show the comparison."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aevb.cli.table_text import paragraph

if TYPE_CHECKING:
    from aevb.model import Model
    from aevb.tables import Schema
    from aevb.tables.selection import Candidate

CLEAR = 10.0  # difference of BIC from which a model is clearly better
SHOWN = 5  # names of columns


def choose_by_bic(
    schema: Schema, frame: Any, name: str, arguments: Mapping[str, Any], seed: int
) -> tuple[Model, list[str]]:
    """Print the comparison of models, and return the best one and the lines that were printed."""
    from aevb.tables.selection import compare, compared_rows, declare

    rows = compared_rows(schema, frame.num_rows)
    some = f" of {rows:,} random rows" if rows < frame.num_rows else ""
    head = [
        f"Choosing the model by BIC{some} (smaller is better):",
        "",
        f"  {'model':<24} {'parameters':>10}  {'log p per row':>13}  {'BIC':>13}",
    ]
    print("\n".join(head))
    lines: list[str] = []

    def tell(one: Candidate) -> None:
        lines.append(
            f"  {one.short:<24} {one.parameters:>10,}  {one.log_p:>13.3f}  {one.bic:>13,.1f}"
            + ("" if one.sound else "  collapsed")
        )
        print(lines[-1], flush=True)

    found = compare(schema, frame, name, arguments, seed=seed, tell=tell)
    best = found[0]
    told = _told(found, open_size=arguments.get("components") is None)
    print("\n".join(["", *told]))
    return declare(schema, best.model, best.arguments), [*head, *lines, "", *told]


def _told(found: Sequence[Candidate], *, open_size: bool) -> list[str]:
    """Say which model was chosen, and what a collapsed one is.

    ``open_size`` says that BIC chose the number of components.
    """
    from aevb.tables.selection import MOST, at_most_text, rejected_text

    best = found[0]
    collapses = [one for one in found if not one.sound]
    names = list(dict.fromkeys(name for one in collapses for name in one.redundant))
    shown = ", ".join(map(repr, names[:SHOWN])) + ", …" * (len(names) > SHOWN)
    columns = (
        f", or a few rows, in which column{'s' * (len(names) > 1)} {shown} "
        f"{'are' if len(names) > 1 else 'is'} constant or a function of other columns"
        if names
        else ""
    )
    collapsed = f"collapsed: a cluster has fewer than two rows{columns}."
    if not best.sound:
        column = shlex.quote(names[-1]) if names else "COLUMN"
        return [
            paragraph(f"All models collapsed, the chosen one too: {best.name}."),
            paragraph(
                f"{collapsed} Leave the redundant column out: aevb train … --without {column}. Or "
                f"read it as levels: aevb train … --kind {column}=ordered."
            ),
        ]
    told = [paragraph(f"Chosen: {best.name}{_next_best(found)}.")]
    rejected = rejected_text(best, found[1:])
    if best.arguments.get("components") == 1 and open_size and rejected is None:
        told.append(
            paragraph(
                "With one component, BIC finds no clusters in this table. To see some in spite of "
                "that: aevb train … --set components=3."
            )
        )
    if best.arguments.get("components") == MOST and open_size:
        told.append(paragraph(f"{at_most_text()} To fit more: aevb train … --set components=20."))
    if collapses:
        told.append(paragraph(f"{collapsed} Such models are not chosen."))
    if rejected is not None:
        told.append(paragraph(rejected))
    return told


def _next_best(found: Sequence[Candidate]) -> str:
    if len(found) < 2 or not found[1].sound:
        return ""
    more = found[1].bic - found[0].bic
    if more < CLEAR:
        return f". The {found[1].name} is nearly as good: its BIC is only {more:.1f} larger"
    return f"; the next best has a BIC {more:,.1f} larger"
