"""Data: where rows come from, and how they are prepared."""

from aevb.data.preparation import Affine, Fresh, Standardised, as_sequence, binarise, counts, dequantise, scale, standardise, threshold

__all__ = ["Affine", "Fresh", "Standardised", "as_sequence", "binarise", "counts", "dequantise", "scale", "standardise", "threshold"]
