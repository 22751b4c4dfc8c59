"""The keywords of fit for editors and type checkers.

Do not edit: ``python -m aevb.training.settings`` prints this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from aevb.data.preparation import Affine
from aevb.training.schedules import Schedule


class SettingsOptions(TypedDict, total=False):
    """The fields of :class:`Settings`, none of them required."""

    epochs: float | None
    """Passes over the data; set this or steps.

    By default 20, or as many as make 2,000 steps (at most 200).
    """
    steps: int | None
    """Steps of the optimiser; set this or epochs."""
    batch: int
    """Rows per step. Default: 100."""
    lr: float | None
    """Learning rate.

    By default 2e-3, or 0.05 if no factor has a hidden layer. Your own modules and functions
    count as hidden layers, except a single nn.Linear.
    """
    warmup: int
    """Steps over which the learning rate rises from 0. Default: 0."""
    decay: str
    """Learning rate within each phase of the schedule: cosine (falls to 0) or constant.

    Default: "cosine".
    """
    clip: float | None
    """Maximum norm of the gradient; a larger gradient is scaled down to it.

    By default no clipping.
    """
    beta: float | Mapping[str, float]
    """Weight of the KL terms in the objective: a number, or numbers by latent (1 for the others).

    The bound that is reported has no weights. Default: 1.0.
    """
    free_bits: float | Mapping[str, float]
    """Nats of each latent, or by latent, below which its KL term has no gradient.

    The term counts as the maximum of this number and its mean over the batch. Default: 0.0.
    """
    kl_warmup: int
    """Steps over which the weight of the KL terms rises to 1, or to beta. Default: 0."""
    kl_cycles: int
    """Number of equal parts of the run, each of which begins with kl_warmup steps of rising weight.

    Default: 1.
    """
    classify: float
    """Weight of log q(y|x) on rows whose label y is known. Default: 0.0."""
    agree: float
    """Weight of Σ q(y|x) log q(y|x̃), a consistency term.

    It makes q predict the same class for x and its distorted copy x̃. Default: 0.0.
    """
    distort: Mapping[str, Affine]
    """Random distortion that makes x̃ from x, by variable. Default: {}."""
    patience: int | None
    """Early stopping: stop after this many validations without improvement.

    The run keeps the best weights.
    """
    seed: int
    """Seed of the order of rows and of all noise.

    The initial weights are those of the model: Model(…, seed=0) decides them. Default: 0.
    """
    schedule: Schedule
    """joint (AEVB), alternate (E-steps of q, M-steps of p), em (exact EM) or mle (exact evidence).

    Default: joint().
    """
    how: Mapping[str, str]
    """How to take the expectation over each latent, by latent; overrides the plan's choice.

    Default: {}.
    """
    window: int | None
    """Time steps per step of the optimiser (truncated back-propagation).

    Values and states are carried, without gradient, from window to window. By default whole
    sequences.
    """
    checkpoint_time: int | None
    """Save memory: keep the inner values of this many steps of a recurrence at a time.

    The backward pass computes the others again. The gradients are the same.
    """
    bound: str
    """Bound on the evidence: elbo, iwae, or particles (for sequences, by a particle filter).

    Default: "elbo".
    """
    samples: int | None
    """Samples, or particles, per example. By default 1, or 5 with bound iwae or particles."""
    gradient: str
    """Gradient estimator: plain, stl (sticking the landing), dreg (doubly reparameterised).

    For particles plain, or score, which includes the gradient of resampling. Default: "plain".
    """
    resample: float | None
    """Share of effective particles below which a row is resampled, from 0 (never) to 1.

    With 1 it is resampled after every step. By default 0.5, or 1 with gradient score.
    """
    temperature: float
    """Temperature of relaxed samples (gumbel). Default: 0.5."""
    validate_every: int | None
    """Steps between validations. By default one epoch."""
    log_every: int | None
    """Steps between entries of the history. By default about 200 entries per run."""
    checkpoint_every: int | None
    """Steps between checkpoints. By default at validations, at least half a minute apart."""
    precision: str
    """float32, or bf16: matrix products run in bfloat16.

    The weights and everything else stay in float32. Default: "float32".
    """
    compile: bool | None
    """Fuse the operations of a step with torch's compiler.

    By default this is decided by the sizes of the model and the number of steps.
    """
    skip: int
    """Maximum number of batches with a non-finite loss or gradient to skip.

    At the next one the run stops with an error. Default: 0.
    """
