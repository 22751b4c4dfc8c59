"""What decides a run besides the model and the data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from aevb.data.preparation import Affine
from aevb.training.schedules import Schedule, joint


@dataclass(frozen=True)
class Settings:
    """All that decides a run besides the model and the data; recorded with it."""

    epochs: float | None = None  # passes over the data; or steps
    steps: int | None = None
    batch: int = 100
    lr: float | None = None  # by default 2e-3, and 0.05 where no factor has a hidden layer
    warmup: int = 0  # steps of rising learning rate
    decay: str = "cosine"  # or "constant"; inside each phase of the schedule
    clip: float | None = None  # largest norm of the gradient
    kl_warmup: int = 0  # steps over which the weight of the KL terms rises to 1
    classify: float = 0.0  # weight of log q(y|x) on rows whose label is known
    agree: float = 0.0  # weight of Σ q(y|x) log q(y|x̃): a class that does not change when the image is distorted a little
    distort: Mapping[str, Affine] = field(default_factory=dict)  # how x̃ is made from x, by variable
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
    checkpoint_every: int | None = None  # steps; by default at validations, half a minute apart at least
    precision: str = "float32"  # or "bf16": matrix products in bfloat16, everything else, the weights too, as the model is
    compile: bool = False  # fuse what lies between the products of a step, by torch's compiler: pays off in long runs
    skip: int = 0  # batches with a non-finite loss or gradient that may be skipped

    def __post_init__(self) -> None:
        for f in fields(self):  # numpy's numbers are numbers, but no JSON
            if isinstance(value := getattr(self, f.name), np.generic):
                object.__setattr__(self, f.name, value.item())
        for name in ("batch", "samples", "steps", "patience", "validate_every", "log_every", "checkpoint_every"):
            _whole(name, getattr(self, name), least=1)
        for name in ("warmup", "kl_warmup", "skip", "seed"):
            _whole(name, getattr(self, name), least=0)
        for name in ("epochs", "lr", "clip", "temperature"):
            _positive(name, getattr(self, name))
        for name in ("classify", "agree"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} is a weight, 0 or more, got {value!r}.")
        if not isinstance(self.distort, Mapping) or not all(isinstance(value, Affine) for value in self.distort.values()):
            raise ValueError(f'distort is a dictionary from variable to distortion, e.g. {{"x": Affine((28, 28))}}, got {self.distort!r}.')
        if self.epochs is not None and self.steps is not None:
            raise ValueError("Say epochs= or steps=, not both.")
        if self.precision not in ("float32", "bf16"):
            raise ValueError(f'precision is "float32" or "bf16", got {self.precision!r}.')
        if not isinstance(self.compile, bool):
            raise ValueError(f"compile is True or False, got {self.compile!r}.")
        if self.decay not in ("cosine", "constant"):
            raise ValueError(f'decay is "cosine" or "constant", got {self.decay!r}.')
        if not isinstance(self.schedule, Schedule):
            raise ValueError(f"schedule is joint(), alternate(…), em() or mle(), got {self.schedule!r}.")
        if not isinstance(self.how, Mapping):
            raise ValueError(f'how is a dictionary from latent to choice, e.g. {{"y": "gumbel"}}, got {self.how!r}.')

    @property
    def judge(self) -> str:
        """What a validation is judged by: the bound, or the evidence where that alone is trained and q stays behind."""
        return self.bound if self.schedule.objective == "bound" else "evidence"

    def total(self, n: int, batch: int) -> int:
        """The number of steps; by default 20 epochs, but at least 2,000 steps and at most 200 epochs."""
        per_epoch = n / min(batch, n)
        if self.steps is not None:
            return self.steps
        epochs = self.epochs if self.epochs is not None else min(200.0, max(20.0, 2000 / per_epoch))
        return max(1, round(epochs * per_epoch))

    def kl_weight(self, step: int) -> float:
        """The weight of the KL terms in a step."""
        return min(1.0, (step + 1) / self.kl_warmup) if self.kl_warmup else 1.0

    def record(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "schedule"}
        distort = {name: [*how.shape, how.rotate, how.shear, how.scale, how.shift] for name, how in self.distort.items()}
        return plain | {"how": dict(self.how), "distort": distort, "schedule": {"name": type(self.schedule).__name__, **asdict(self.schedule)}}


def _whole(name: str, value: Any, *, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"{name} is a whole number, {least} or more, got {value!r}.")


def _positive(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf):
        raise ValueError(f"{name} is a positive number, got {value!r}.")


def to_toml(record: Mapping[str, Any]) -> str:
    """A flat record with tables one deep, as TOML; what is not set is left out."""
    plain = {key: value for key, value in record.items() if not isinstance(value, Mapping) and value is not None}
    lines = [f"{key} = {_word(value)}" for key, value in plain.items()]
    for name, table in record.items():
        if isinstance(table, Mapping) and table:
            lines += ["", f"[{name}]", *(f"{_word(key)} = {_word(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _word(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
