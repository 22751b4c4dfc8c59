"""Built-in data sets: included in the library, or downloaded and verified.

``digits`` (scikit-learn's 1,797 images of 8×8, embedded), ``mnist`` and ``fashion`` (from the
folder ``AEVB_DATA``, the cache, or a download whose checksum is verified), ``fa`` (the tutorial's
synthetic factor-analysis data).
"""

from __future__ import annotations

import gzip
import hashlib
import os
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

FA_LOADINGS = np.array([[-0.5, -1.0], [-1.0, -1.0], [2.0, 0.5]])
FA_SCALE = np.array([0.4, 0.2, 0.3])

_IDX = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_MIRRORS = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "fashion": ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
}
# MD5 of the gzipped files, as published; a downloaded file with another checksum is refused.
_PUBLISHED = {
    ("mnist", "train-images-idx3-ubyte"): "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    ("mnist", "train-labels-idx1-ubyte"): "d53e105ee54ea40749a09fcbcd1e9432",
    ("mnist", "t10k-images-idx3-ubyte"): "9fb629c4189551a2d022fa330f9573f3",
    ("mnist", "t10k-labels-idx1-ubyte"): "ec29112dd5afa0611ce80d1b7f02629c",
    ("fashion", "train-images-idx3-ubyte"): "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    ("fashion", "train-labels-idx1-ubyte"): "25c81989df183df01b3e8a0aad5dffbe",
    ("fashion", "t10k-images-idx3-ubyte"): "bef4ecab320f06d8554ea6380940ec79",
    ("fashion", "t10k-labels-idx1-ubyte"): "bb300cfdad3c16e7a12a480ee83cd310",
}


@dataclass(frozen=True)
class Images:
    """Images of grey levels 0 … ``levels`` − 1, and their labels (−1 where unknown).

    ``pixels`` are [N, height, width], or [N, height, width, 3] for colours.
    """

    pixels: np.ndarray
    labels: np.ndarray
    levels: int
    names: tuple[str, ...] = ()  # of the classes, in the order of their numbers
    files: tuple[Path, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape to declare: (channels, height, width)."""
        _, height, width, *channels = self.pixels.shape
        return (channels[0] if channels else 1, height, width)

    def __len__(self) -> int:
        return len(self.pixels)


def factor_analysis(n: int = 1000, *, seed: int = 0) -> np.ndarray:
    """Draw the tutorial's synthetic data: x = W z + noise, three columns from two factors."""
    random = np.random.default_rng(seed)
    return random.normal(size=(n, 2)) @ FA_LOADINGS.T + FA_SCALE * random.normal(size=(n, 3))


def digits() -> tuple[Images, Images]:
    """Return scikit-learn's handwritten digits as training and test images.

    Every sixth row is a test row.
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    data = load_digits()
    pixels, labels = data.images.astype(np.uint8), data.target.astype(np.int64)
    test = np.arange(len(pixels)) % 6 == 5
    return Images(pixels[~test], labels[~test], 17), Images(pixels[test], labels[test], 17)


def mnist(name: str = "mnist") -> tuple[Images, Images]:
    """Return the training and test images of MNIST, or of Fashion-MNIST with ``name="fashion"``."""
    train, test = (
        Images(_idx(name, files[0]), _idx(name, files[1]).astype(np.int64), 256)
        for files in (_IDX["train"], _IDX["test"])
    )
    return train, test


IMAGES: dict[str, Callable[[], tuple[Images, Images]]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion": partial(mnist, "fashion"),
}
NAMES = ("fa", *IMAGES)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "aevb"


def at_hand(name: str) -> bool:
    """Return whether all files of a data set are on this machine."""
    return all(_find(name, file) is not None for files in _IDX.values() for file in files)


def data_folders(name: str) -> list[Path]:
    """Return the folders of a data set on this machine, the first to look into first."""
    return [Path(os.environ[key]) / name for key in ("AEVB_DATA",) if os.environ.get(key)] + [
        cache_folder() / name
    ]


def _find(name: str, file: str) -> Path | None:
    paths = (
        path for folder in data_folders(name) for path in (folder / f"{file}.gz", folder / file)
    )
    return next((path for path in paths if path.is_file()), None)


def _idx(name: str, file: str) -> np.ndarray:
    """Read one idx file from this machine, or download and verify it."""
    found = _find(name, file)
    if found is not None:
        return _parse(found.read_bytes(), found)
    cache = data_folders(name)[-1]
    return _parse(_fetch(name, file, cache), cache / f"{file}.gz")


def _parse(content: bytes, path: Path) -> np.ndarray:
    try:
        raw = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        if raw[:3] != b"\x00\x00\x08":
            raise ValueError("it is not an idx file of bytes")
        shape = tuple(int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3]))
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise ValueError(
            f"{path} is damaged: {str(error).rstrip('.')}. Delete it, or put a good copy there."
        ) from None


def _fetch(name: str, file: str, folder: Path) -> bytes:
    problems = []
    for mirror in _MIRRORS[name]:
        try:
            with urllib.request.urlopen(f"{mirror}{file}.gz", timeout=30) as answer:
                content: bytes = answer.read()
        except OSError as error:
            problems.append(f"{mirror}: {error}")
            continue
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != _PUBLISHED[name, file]:
            problems.append(f"{mirror}: the checksum of the file is not the published one")
            continue
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{file}.gz.part"
        temporary.write_bytes(content)
        temporary.rename(folder / f"{file}.gz")
        return content
    raise ValueError(
        f"{name} is not on this machine and could not be downloaded ({'; '.join(problems)}). "
        f"Put {file}.gz into a folder {name!r} and set AEVB_DATA to that folder's parent."
    )
