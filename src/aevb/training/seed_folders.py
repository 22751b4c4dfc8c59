"""Folders of several runs, of seeds (``seed-N``) or of a sweep, and short names of runs.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def seed_folder(out: Path, seed: int) -> Path:
    """Return the folder of one run of several."""
    return out / f"seed-{seed}"


def seed_folders(out: Path) -> list[Path]:
    """Return the folders of the runs of several seeds, in the order of their seeds."""
    return sorted(out.glob("seed-*"), key=lambda path: (len(path.name), path.name))


def distinct(folders: Sequence[Path]) -> dict[Path, str]:
    """Return short names of folders: their paths without the parts that all share.

    >>> distinct([Path("runs/a/seed-0"), Path("runs/b/seed-0")])
    {PosixPath('runs/a/seed-0'): 'a', PosixPath('runs/b/seed-0'): 'b'}
    """
    parts = {folder: folder.parts for folder in folders}
    if len(set(parts.values())) < 2:
        return {folder: folder.name or str(folder) for folder in folders}
    most = min(map(len, parts.values()))
    start = next((i for i in range(most) if len({one[i] for one in parts.values()}) > 1), most)
    end = next((i for i in range(1, most + 1) if len({one[-i] for one in parts.values()}) > 1), 1)
    kept = {folder: "/".join(one[start : len(one) - end + 1]) for folder, one in parts.items()}
    whole = len(set(kept.values())) < len(kept) or "" in kept.values()
    return {folder: str(folder) if whole else name for folder, name in kept.items()}


def expanded(folders: Sequence[Path], having: Sequence[str] = ("checkpoints",)) -> list[Path]:
    """Replace a folder of several seeds, or of a sweep, by the folders of its runs.

    The folder of a seed is that of a run if it holds any of the files ``having``.
    """
    found: list[Path] = []
    for folder in folders:
        seeds = [
            path for path in seed_folders(folder) if any((path / name).exists() for name in having)
        ]
        if (folder / "sweep.json").is_file():
            inner = sorted(path for path in folder.iterdir() if seed_folders(path))
            found += expanded(inner, having)
        else:
            found += seeds if seeds and not (folder / "model.json").is_file() else [folder]
    return found
