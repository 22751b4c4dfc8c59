"""The keywords of fit for editors and type checkers. Do not edit: ``python -m aevb.training.settings`` prints this file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from aevb.data.preparation import Affine
from aevb.training.schedules import Schedule


class SettingsOptions(TypedDict, total=False):
    """The fields of :class:`Settings`, none of them required."""

    epochs: float | None
    """Passes over the data, instead of steps. By default 20, or more (at most 200) to make 2,000 steps."""
    steps: int | None
    """Steps of the optimiser, instead of epochs."""
    batch: int
    """Rows per step. Default: 100."""
    lr: float | None
    """Learning rate. By default 2e-3, and 0.05 where no factor has a hidden layer."""
    warmup: int
    """Steps over which the learning rate rises from 0. Default: 0."""
    decay: str
    """Learning rate within each phase of the schedule: cosine (falls to 0) or constant. Default: "cosine"."""
    clip: float | None
    """Largest norm of the gradient; a longer gradient is scaled down to it."""
    kl_warmup: int
    """Steps over which the weight of the KL terms rises to 1. Default: 0."""
    classify: float
    """Weight of log q(y|x) on rows whose label y is known. Default: 0.0."""
    agree: float
    """Weight of Σ q(y|x) log q(y|x̃): the class should stay the same when x is distorted a little, to x̃. Default: 0.0."""
    distort: Mapping[str, Affine]
    """How x̃ is made from x, by variable. Default: {}."""
    patience: int | None
    """Stop after this many validations without improvement, and keep the best weights."""
    seed: int
    """Seed of everything random. Default: 0."""
    schedule: Schedule
    """joint (AEVB), alternate (E-steps of q, then M-steps of p), em (exact EM) or mle (exact evidence). Default: joint()."""
    how: Mapping[str, str]
    """Choices by latent that override those of the plan. Default: {}."""
    bound: str
    """elbo or iwae. Default: "elbo"."""
    samples: int
    """Samples per example. Default: 1."""
    gradient: str
    """plain, stl or dreg. Default: "plain"."""
    temperature: float
    """Temperature of relaxed samples (gumbel). Default: 0.5."""
    validate_every: int | None
    """Steps between validations. By default one epoch."""
    log_every: int | None
    """Steps between lines of the history. By default about 200 lines per run."""
    checkpoint_every: int | None
    """Steps between checkpoints. By default at validations, at least half a minute apart."""
    precision: str
    """float32, or bf16: matrix products in bfloat16, everything else, the weights too, as the model is. Default: "float32"."""
    compile: bool
    """Fuse the operations of a step by torch's compiler. Takes about a minute at the start: for long runs. Default: False."""
    skip: int
    """Batches with a non-finite loss or gradient that may be skipped. Default: 0."""
