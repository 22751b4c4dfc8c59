"""The display that suits the place where a run trains: terminal, notebook, or anything else."""

from __future__ import annotations

import sys
from collections.abc import Collection

from aevb.training.best import Best
from aevb.training.display import Lines, Live, Warnings, Watcher, on_terminal
from aevb.training.events import WARNINGS
from aevb.training.notebook_line import NotebookLine


def display(
    progress: bool | None,
    start: int,
    total: int,
    epochs: float,
    bound: str = "elbo",
    best: Best | None = None,
    *,
    validates: bool = True,
    warned: Collection[str] = WARNINGS,
) -> Watcher:
    """Return a live panel on a terminal, and a line that is updated in a notebook.

    Elsewhere, ``progress=True`` displays plain lines. With ``progress=False`` nothing is displayed.
    Where nothing is displayed, events of the kinds ``warned`` become warnings. ``validates`` says
    whether the run has validation data.
    """
    if progress is False:
        return Warnings(warned)
    if in_notebook():
        return NotebookLine(start, total, epochs, bound, best)
    if on_terminal():
        return Live(start, total, epochs, bound, best)
    if not progress:
        return Warnings(warned)
    return Lines(start, total, epochs, bound, best, validates=validates)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook. IPython is not imported for it."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return hasattr(shell, "kernel")
