"""The folders of the runs of several seeds, ``seed-N``. This module does not import torch."""

from __future__ import annotations

from pathlib import Path


def seed_folder(out: Path, seed: int) -> Path:
    """Return the folder of one run of several."""
    return out / f"seed-{seed}"


def seed_folders(out: Path) -> list[Path]:
    """Return the folders of the runs of several seeds, in the order of their seeds."""
    return sorted(out.glob("seed-*"), key=lambda path: (len(path.name), path.name))
