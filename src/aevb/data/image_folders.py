"""Read a folder of image files (PNG, JPEG, …) as one array of bytes."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from aevb.data.builtin import Images
from aevb.runtime.checked_files import DataWarning

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
GREY = ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I", "F")
NAMED = 3  # files that a message names
ORIENTATION = 0x0112  # the EXIF tag


def images(
    folder: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    colour: bool | None = None,
    classes: Sequence[str] | None = None,
) -> Images:
    """Read the image files of a folder as bytes, [N, height, width] or [N, height, width, 3].

    The subfolders are the classes: ``labels`` numbers them in the order of ``names``, with −1 for
    files outside them. The result's ``shape`` is the shape to declare, (channels, height, width),
    and ``files`` are the paths. Files are turned as their camera recorded it; what is transparent
    becomes white.

    Arguments:
        folder: The folder. Its subfolders are read too; hidden files are not.
        size: (height, width), or one number for both, to crop the files to the centre and resize
            them. Required if the files differ in size.
        colour: True for RGB, False for grey levels. By default RGB if any file has colours.
        classes: The names of the classes in the order of their numbers, such as the ``names`` of
            other images. By default the subfolders in alphabetical order.

    Returns:
        ``pixels`` (bytes), ``labels``, ``names``, ``shape`` and ``files``.

    Raises:
        ValueError: A file cannot be read, there are none, or their sizes differ.

    >>> import os, tempfile
    >>> from PIL import Image
    >>> from aevb import ContinuousBernoulli, Model, Normal, conv, deconv
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("a", "b"):
    ...         Image.new("L", (32, 32)).save(os.path.join(folder, f"{name}.png"))
    ...     photos = images(folder, size=16)
    >>> photos.pixels.shape, photos.shape
    ((2, 16, 16), (1, 16, 16))
    >>> vae = Model(
    ...     p={"z": Normal(4), "x | z": ContinuousBernoulli(photos.shape, net=deconv(16, 8))},
    ...     q={"z | x": Normal(net=conv(8, 16))},
    ... )
    >>> vae.sample(3, seed=0)["x"].shape  # fit(vae, {"x": photos.pixels}) takes the bytes
    torch.Size([3, 1, 16, 16])
    """
    place = Path(folder)
    if not place.is_dir():
        raise ValueError(f"There is no folder {place}.")
    wanted = _wanted(size)
    files = list(_files(place))
    if not files:
        raise ValueError(
            f"{place} holds no images. Images are files ending in {', '.join(SUFFIXES)}."
        )
    _note_others(place, len(files))
    groups = [file.relative_to(place).parts[0] if file.parent != place else None for file in files]
    there = sorted({group for group in groups if group is not None})
    names = list(classes) if classes is not None else there
    if unknown := [group for group in there if group not in names]:
        raise ValueError(
            f"{place} has a subfolder {unknown[0]!r}, which is no class of {', '.join(names)}. "
            f"Rename it, or move it away."
        )
    numbers = {name: number for number, name in enumerate(names)}
    labels = [-1 if group is None else numbers[group] for group in groups]
    pixels = _read(files, place, wanted, colour)
    return Images(pixels, np.array(labels), 256, tuple(names), tuple(files))


def shape_of(folder: Path, size: tuple[int, int] | None = None) -> tuple[int, int, int]:
    """The shape (channels, height, width) of a folder's images, from the headers of its files.

    Files that cannot be read are left out; :func:`images` names them.
    """
    from PIL import Image

    found, colour = size, False
    for file in _files(folder):
        try:
            with Image.open(file) as opened:
                turned = opened.getexif().get(ORIENTATION, 1) > 4  # by a quarter or three quarters
                found = found or (opened.size if turned else opened.size[::-1])
                colour = colour or opened.mode not in GREY
        except Exception:
            continue
    height, width = found or (1, 1)
    return (3 if colour else 1, height, width)


def classes_of(folder: Path) -> list[str]:
    """The names of the subfolders that hold images."""
    return [
        path.name
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".") and is_image_folder(path)
    ]


def is_image_folder(path: Path) -> bool:
    """Whether a folder, or one of its subfolders, holds image files."""
    return path.is_dir() and next(_files(path), None) is not None


def _files(folder: Path) -> Iterator[Path]:
    """The image files of a folder and its subfolders, in alphabetical order; hidden ones not."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.suffix.lower() in SUFFIXES:
            yield path


def _note_others(folder: Path, count: int) -> None:
    others = [
        path
        for path in sorted(folder.rglob("[!.]*"))
        if path.is_file() and path.suffix.lower() not in SUFFIXES
    ]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        warnings.warn(
            f"{folder}: {count} images were read; {others[0].name}{more} "
            f"{'are no images' if more else 'is no image'}.",
            DataWarning,
            stacklevel=3,
        )


def _wanted(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    both = (size, size) if isinstance(size, int) else tuple(size)
    if len(both) != 2 or not all(
        isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in both
    ):
        raise ValueError(f"size is (height, width) or one number for both, got {size!r}.")
    return both[0], both[1]


def _read(
    files: Sequence[Path], folder: Path, size: tuple[int, int] | None, colour: bool | None
) -> np.ndarray:
    """All files as one array. Raise ValueError, with their names, if some cannot be used."""
    found: list[np.ndarray] = []
    broken: list[str] = []
    for file in files:
        try:
            found.append(_pixels(file, size, colour))
        except Exception as error:  # Pillow raises many kinds for a damaged file
            found.append(np.zeros((0, 0), np.uint8))
            broken.append(f"{file.relative_to(folder)} ({_reason(error)})")
    if broken:
        more = f", and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
        raise ValueError(
            f"{len(broken)} of the {len(files)} images in {folder} cannot be read: "
            f"{', '.join(broken[:NAMED])}{more}. Replace or remove them."
        )
    sizes = Counter(image.shape[:2] for image in found)
    if len(sizes) > 1:
        first = {image.shape[:2]: file.name for file, image in reversed([*zip(files, found)])}
        shown = [
            f"{h}×{w} ({count}, such as {first[h, w]})"
            for (h, w), count in sizes.most_common(NAMED)
        ]
        height, width = sizes.most_common(1)[0][0]
        more = f" and {len(sizes) - NAMED} other sizes" if len(sizes) > NAMED else ""
        raise ValueError(
            f"The images in {folder} differ in size (height×width): {', '.join(shown)}{more}. Crop "
            f"and resize them: size=({height}, {width}) (--size {height},{width})."
        )
    if any(image.ndim == 3 for image in found):
        found = [
            image if image.ndim == 3 else np.repeat(image[..., None], 3, -1) for image in found
        ]
    return np.stack(found)


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return "not an image, or damaged" if "cannot identify" in text else text.rstrip(".")


def _pixels(file: Path, size: tuple[int, int] | None, colour: bool | None) -> np.ndarray:
    """The pixels of a file, [height, width] or [height, width, 3]."""
    from PIL import Image, ImageOps

    with Image.open(file) as opened:
        picture: Image.Image = ImageOps.exif_transpose(opened)
        if picture.mode.startswith("I"):  # 16 bits; Pillow would cut values off at 255
            picture = Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).astype(np.uint8))
        grey = picture.mode in GREY if colour is None else not colour
        picture = _opaque(picture).convert("L" if grey else "RGB")
        if size is not None and (picture.height, picture.width) != size:
            picture = ImageOps.fit(picture, (size[1], size[0]), Image.Resampling.LANCZOS)
        return np.array(picture)


def _opaque(picture: Image) -> Image:
    """A picture on white paper, if parts of it are transparent."""
    from PIL import Image

    if not picture.has_transparency_data:
        return picture
    over = picture.convert("RGBA")
    paper = Image.new("RGBA", over.size, "white")
    return Image.alpha_composite(paper, over)
