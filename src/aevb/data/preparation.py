"""Preparation: from grey levels to what a likelihood takes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aevb.families import Bernoulli, Beta, ContinuousBernoulli
from aevb.graph import Graph


def dequantise(x: np.ndarray, levels: int = 256, *, seed: int = 0) -> np.ndarray:
    """(x + u) / levels with u uniform: grey levels 0 … levels − 1 become values of a density on (0, 1)."""
    noise = np.random.default_rng(seed).random(x.shape, dtype=np.float32)
    return (x.astype(np.float32) + noise) / np.float32(levels)


def threshold(x: np.ndarray, levels: int = 256, *, seed: int = 0) -> np.ndarray:
    """1 where the grey level is in the upper half, else 0."""
    return (x >= levels / 2).astype(np.float32)


def binarise(x: np.ndarray, levels: int = 256, *, seed: int = 0) -> np.ndarray:
    """1 with the probability that the grey level stands for, drawn once."""
    draws = np.random.default_rng(seed).random(x.shape, dtype=np.float32)
    return (draws * (levels - 1) < x).astype(np.float32)


def scale(x: np.ndarray, levels: int = 256, *, seed: int = 0) -> np.ndarray:
    """Grey levels to [0, 1]."""
    return x.astype(np.float32) / np.float32(levels - 1)


PREPARATIONS: dict[str, Callable[..., np.ndarray]] = {"dequantise": dequantise, "threshold": threshold, "binarise": binarise, "scale": scale}


def default_preparation(graph: Graph, name: str) -> str:
    """What the likelihood of an image calls for: binary, a density on (0, 1), or plain scaling."""
    family = graph.rule("p", name).spec
    return "threshold" if isinstance(family, Bernoulli) else "dequantise" if isinstance(family, ContinuousBernoulli | Beta) else "scale"


def as_variable(graph: Graph, name: str, pixels: np.ndarray, levels: int, *, how: str | None = None, seed: int = 0) -> np.ndarray:
    """Images [N, height, width] as the model's variable: prepared, flat, or a row a step where the variable lives in time."""
    how = how or default_preparation(graph, name)
    if how not in PREPARATIONS:
        raise ValueError(f"Unknown preparation {how!r}. Choose one of {', '.join(PREPARATIONS)}.")
    x = PREPARATIONS[how](pixels, levels, seed=seed)
    return x if graph.timed[name] else x.reshape(len(x), -1)
