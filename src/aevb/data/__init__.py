"""Data: read rows from arrays and files, and prepare them for a likelihood."""

from aevb.data.frames import read_frame
from aevb.data.grey_levels import (
    Fresh,
    Prepared,
    binarise,
    counts,
    dequantise,
    scale,
    threshold,
)
from aevb.data.image_folders import images
from aevb.data.markers import mark_missing
from aevb.data.preparation import Affine, Standardised, as_sequence, standardise

__all__ = [
    "Affine",
    "Fresh",
    "Prepared",
    "Standardised",
    "as_sequence",
    "binarise",
    "counts",
    "dequantise",
    "images",
    "mark_missing",
    "read_frame",
    "scale",
    "standardise",
    "threshold",
]
