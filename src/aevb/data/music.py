"""Polyphonic music: pieces of a piano roll, in the split that papers on sequence models use.

There is no host to download the files from. Put them into the folder ``music`` of ``AEVB_DATA``, or
of the cache: one ``.npz`` file per collection, with ``train``, ``validation`` and ``test`` (the
steps of all pieces one after another, 88 keys packed into bits) and ``train_lengths``, … (the
number of steps of each piece).
"""

from __future__ import annotations

import zipfile
from typing import NamedTuple

import numpy as np

from aevb.data.builtin import data_folders

COLLECTIONS = ("jsb-chorales", "nottingham", "piano-midi", "musedata")
KEYS = 88
SPLITS = ("train", "validation", "test")


class Pieces(NamedTuple):
    """Pieces of music: 1 where a key sounds, [N, T, 88], and their lengths, [N]."""

    x: np.ndarray
    lengths: np.ndarray


def at_hand(name: str) -> bool:
    """Return whether a collection is on this machine."""
    return any((folder / f"{name}.npz").is_file() for folder in data_folders("music"))


def polyphonic(name: str) -> tuple[Pieces, Pieces, Pieces]:
    """Return the training, validation and test pieces of a collection."""
    if name not in COLLECTIONS:
        raise ValueError(f"Unknown collection {name!r}. Choose one of {', '.join(COLLECTIONS)}.")
    folders = data_folders("music")
    path = next((one for folder in folders if (one := folder / f"{name}.npz").is_file()), None)
    if path is None:
        raise ValueError(
            f"{name}.npz is not on this machine. Put it into {folders[0]}, or set AEVB_DATA to a "
            f"folder in which it lies as music/{name}.npz."
        )
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return tuple(_pieces(file[part], file[f"{part}_lengths"]) for part in SPLITS)  # type: ignore[return-value]
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no collection of music: {error}") from None


def _pieces(packed: np.ndarray, lengths: np.ndarray) -> Pieces:
    if packed.dtype != np.uint8 or packed.ndim != 2 or packed.shape[1] != KEYS // 8:
        raise ValueError(f"steps of {KEYS} keys are {KEYS // 8} bytes, got {list(packed.shape)}")
    if (lengths < 1).any():
        raise ValueError("a piece has no steps")
    if lengths.sum() != len(packed):
        raise ValueError(f"the lengths sum to {lengths.sum()}, but there are {len(packed)} steps")
    steps = np.unpackbits(packed, axis=1)
    x = np.zeros((len(lengths), lengths.max(), KEYS), np.uint8)
    x[np.arange(lengths.max()) < lengths[:, None]] = steps
    return Pieces(x, lengths.astype(np.int64))
