"""When the checkpoints of a run are written, and which of them are kept."""

from __future__ import annotations

import time
from pathlib import Path

from aevb.training.checkpoint import Checkpoint, folder_of, folders, read, saved_steps
from aevb.training.distributed import World
from aevb.training.run_folder import Folder

APART = 30.0  # seconds between checkpoints, unless checkpoint_every is set


class Saving:
    """The checkpoints of a run: the last, the one before it, and the best by validation.

    ``out`` is None if nothing is saved; ``folder`` is None in all processes but the first.
    ``every`` is the setting ``checkpoint_every``.
    """

    def __init__(
        self, out: Path | None, folder: Folder | None, world: World, every: int | None
    ) -> None:
        self.out, self.folder, self.world, self.every = out, folder, world, every
        self._best: Checkpoint | None = None
        self._saved = time.perf_counter()

    def start_clock(self) -> None:
        self._saved = time.perf_counter()

    def time_to_save(self) -> bool:
        """Return whether a due checkpoint is written now.

        Unless ``checkpoint_every`` is set, checkpoints are at least half a minute apart: on small
        data, writing them would take longer than training.
        """
        return self.every is not None or self.world.any(
            self.world.first and time.perf_counter() - self._saved > APART
        )

    def keep_best(self, checkpoint: Checkpoint) -> None:
        """Keep the best checkpoint in memory; it is written with the next one."""
        self._best = checkpoint

    def save(self, newest: Checkpoint, best_step: int | None) -> None:
        """Write a checkpoint, and the best one if it is not on disk; delete those not needed."""
        if self.folder is not None:
            known = saved_steps(self.folder.path)
            best = self._best
            if best is not None and best.step != newest.step and best.step not in known:
                self.folder.save(best, keep=frozenset(known))
            # Keep one earlier checkpoint as a fallback, in case the newest gets damaged.
            before = max((step for step in known if step < newest.step), default=newest.step)
            self.folder.save(
                newest, keep=frozenset({before} | (set() if best_step is None else {best_step}))
            )
        self._saved = time.perf_counter()
        self.world.wait()

    def best(self, step: int) -> Checkpoint | None:
        """Return the best checkpoint, of this step, from memory or from disk."""
        if self._best is None and self.out is not None:
            return read(folder_of(self.out, step))
        return self._best

    def last_good(self) -> str:
        """Return a sentence that names the newest checkpoint.

        Every checkpoint was tested before it was saved.
        """
        found = [] if self.out is None else folders(self.out)
        return f" The last good checkpoint is {found[-1]}." if found else ""
