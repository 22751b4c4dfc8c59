"""What decides a run besides the model and the data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from aevb.training.schedules import Schedule, joint


@dataclass(frozen=True)
class Settings:
    """All that decides a run besides the model and the data; recorded with it."""

    epochs: float | None = None  # passes over the data; or steps
    steps: int | None = None
    batch: int = 100
    lr: float = 1e-3
    warmup: int = 0  # steps of rising learning rate
    decay: str = "cosine"  # or "constant"; inside each phase of the schedule
    clip: float | None = None  # largest norm of the gradient
    kl_warmup: int = 0  # steps over which the weight of the KL terms rises to 1
    classify: float = 0.0  # weight of log q(y|x) on rows whose label is known
    patience: int | None = None  # validations without improvement before it stops
    seed: int = 0
    schedule: Schedule = field(default_factory=joint)
    how: Mapping[str, str] = field(default_factory=dict)
    bound: str = "elbo"
    samples: int = 1
    gradient: str = "plain"
    temperature: float = 0.5
    validate_every: int | None = None  # steps; by default once an epoch
    log_every: int | None = None  # steps; by default about 200 lines a run
    checkpoint_every: int | None = None  # steps; by default at every validation
    skip: int = 0  # batches with a non-finite loss or gradient that may be skipped

    def __post_init__(self) -> None:
        for name in ("batch", "samples"):
            _positive(name, getattr(self, name))
        if self.epochs is not None and self.steps is not None:
            raise ValueError("Say epochs= or steps=, not both.")
        if self.decay not in ("cosine", "constant"):
            raise ValueError(f'decay is "cosine" or "constant", got {self.decay!r}.')
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"lr must be positive, got {self.lr}.")

    def total(self, n: int) -> int:
        """The number of steps; by default 20 epochs, but at least 2,000 steps and at most 200 epochs."""
        per_epoch = n / min(self.batch, n)
        if self.steps is not None:
            return self.steps
        epochs = self.epochs if self.epochs is not None else min(200.0, max(20.0, 2000 / per_epoch))
        return max(1, round(epochs * per_epoch))

    def record(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "schedule"}
        return plain | {"how": dict(self.how), "schedule": {"name": type(self.schedule).__name__, **asdict(self.schedule)}}


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is a positive whole number, got {value!r}.")


def to_toml(record: Mapping[str, Any]) -> str:
    """A flat record with tables one deep, as TOML; what is not set is left out."""
    plain = {key: value for key, value in record.items() if not isinstance(value, Mapping) and value is not None}
    lines = [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    for name, table in record.items():
        if isinstance(table, Mapping) and table:
            lines += ["", f"[{name}]", *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"
