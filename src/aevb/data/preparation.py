"""Preparation: from grey levels or raw columns to what a likelihood takes. Each is a value, recorded with the run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class dequantise:
    """(x + u) / levels with u uniform: grey levels 0 … levels − 1 become densities on (0, 1)."""

    levels: int = 256
    seed: int = 0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        noise = np.random.default_rng(self.seed).random(x.shape, dtype=np.float32)
        return (x.astype(np.float32) + noise) / np.float32(self.levels)


@dataclass(frozen=True)
class threshold:
    """1 where x ≥ levels/2, else 0."""

    levels: int = 256

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return (x >= self.levels / 2).astype(np.float32)


@dataclass(frozen=True)
class binarise:
    """1 with probability x / (levels − 1), drawn once."""

    levels: int = 256
    seed: int = 0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        draws = np.random.default_rng(self.seed).random(x.shape, dtype=np.float32)
        return (draws * (self.levels - 1) < x).astype(np.float32)
