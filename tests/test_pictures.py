"""Tests of pictures of images in rows."""

import numpy as np
from PIL import Image

from aevb.pictures import grid

IMAGES = np.random.default_rng(0).random((5, 8, 6))


def read(path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)


def test_images_stand_row_by_row_as_ink_on_paper(tmp_path):
    grid(IMAGES, 3, tmp_path / "plain.png")
    found = read(tmp_path / "plain.png")
    # Each pixel is seven wide, and a line separates the images.
    assert found.shape == (7 * (2 * 9 + 1), 7 * (3 * 7 + 1))
    cells = found[::7, ::7]
    assert np.abs(cells[10:18, 8:14] - 255 * (1 - IMAGES[4])).max() <= 1
    assert (cells[10:18, 15:21] == 255).all()  # there is no sixth image


def test_a_label_stands_left_of_its_row(tmp_path):
    grid(IMAGES, 3, tmp_path / "plain.png")
    grid(IMAGES, 3, tmp_path / "labelled.png", ["y = 0", "y = 10"])
    plain, found = read(tmp_path / "plain.png"), read(tmp_path / "labelled.png")
    margin = found.shape[1] - plain.shape[1]
    assert np.array_equal(found[:, margin:], plain)
    rows = found[7:, :margin].reshape(2, 63, margin)
    ink = (rows < 128).any(1)
    assert ink.any(1).all()
    assert not ink[:, -6:].any()  # a space separates a label from its images
    assert ink[1].sum() > ink[0].sum()  # the longer label is wider
