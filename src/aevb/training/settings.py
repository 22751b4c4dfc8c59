"""The settings of a training run.

:class:`Settings` is the only definition: each field has its type, default and documentation there.
The keywords of :func:`fit` (``settings_options.py``, printed by ``python -m
aevb.training.settings``), the options of ``aevb train`` and the keys of ``config.toml`` are made
from it. This module does not import torch, so that ``aevb train --help`` is fast.
"""

from __future__ import annotations

import json
import math
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aevb.estimate.metric_names import OBJECTIVE
from aevb.runtime.suggestions import did_you_mean
from aevb.training.schedules import Phase, Schedule, joint, schedule_from

if TYPE_CHECKING:
    from aevb.data.preparation import Affine

# Keys of config.toml that are not settings. A resumed run compares them.
RECORDED = ("data", "fresh", "frozen", "numbers")
# Names of settings in other libraries, for messages about unknown settings.
ALIASES = {
    "learning_rate": "lr",
    "learning_rate_init": "lr",
    "batch_size": "batch",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "n_epochs": "epochs",
    "max_iter": "steps",
    "num_steps": "steps",
    "max_steps": "steps",
    "num_particles": "samples",
    "num_samples": "samples",
    "early_stopping": "patience",
    "n_iter_no_change": "patience",
    "grad_clip": "clip",
    "max_norm": "clip",
    "kl_weight": "beta",
    "annealing": "kl_warmup",
    "random_state": "seed",
    "dtype": "precision",
}


def _setting(
    documentation: str, default: Any = MISSING, *, make: Callable[[], Any] | None = None
) -> Any:
    """Return a dataclass field with its documentation and its default.

    ``make`` is a default factory.
    """
    if make is not None:
        return field(default_factory=make, metadata={"documentation": documentation})
    return field(default=default, metadata={"documentation": documentation})


@dataclass(frozen=True)
class Settings:
    """The settings of a training run: everything that determines it besides the model and the data.

    ``fit(model, data, **vars(settings))`` trains with them. A run saves its settings;
    ``Settings.from_toml("run/config.toml")`` reads them.

    >>> settings = Settings(epochs=5, kl_warmup=100, beta={"z": 4.0})
    >>> settings.total(n=1000, batch=100)
    50
    >>> settings.kl_weight(49, total=1000), settings.beta_of("z"), settings.free_bits_of("z")
    (0.5, 4.0, 0.0)
    >>> Settings.from_record(settings.record()) == settings
    True
    """

    epochs: float | None = _setting(
        "Passes over the data; set this or steps. By default 20, or as many as make 2,000 steps "
        "(at most 200).",
        None,
    )
    steps: int | None = _setting("Steps of the optimiser; set this or epochs.", None)
    batch: int = _setting("Rows per step.", 100)
    lr: float | None = _setting(
        "Learning rate. By default 2e-3, or 0.05 if no factor has a hidden layer. Your own modules "
        "and functions count as hidden layers, except a single nn.Linear.",
        None,
    )
    warmup: int = _setting("Steps over which the learning rate rises from 0.", 0)
    decay: str = _setting(
        "Learning rate within each phase of the schedule: cosine (falls to 0) or constant.",
        "cosine",
    )
    clip: float | None = _setting(
        "Maximum norm of the gradient; a larger gradient is scaled down to it. By default no "
        "clipping.",
        None,
    )
    beta: float | Mapping[str, float] = _setting(
        "Weight of the KL terms in the objective: a number, or numbers by latent (1 for the "
        "others). The bound that is reported has no weights.",
        1.0,
    )
    free_bits: float | Mapping[str, float] = _setting(
        "Nats of each latent, or by latent, below which its KL term has no gradient. The term "
        "counts as the maximum of this number and its mean over the batch.",
        0.0,
    )
    kl_warmup: int = _setting(
        "Steps over which the weight of the KL terms rises to 1, or to beta.", 0
    )
    kl_cycles: int = _setting(
        "Number of equal parts of the run, each of which begins with kl_warmup steps of rising "
        "weight.",
        1,
    )
    classify: float = _setting("Weight of log q(y|x) on rows whose label y is known.", 0.0)
    agree: float = _setting(
        "Weight of Σ q(y|x) log q(y|x̃), a consistency term. It makes q predict the same class "
        "for x and its distorted copy x̃.",
        0.0,
    )
    distort: Mapping[str, Affine] = _setting(
        "Random distortion that makes x̃ from x, by variable.", make=dict
    )
    patience: int | None = _setting(
        "Early stopping: stop after this many validations without improvement. The run keeps the "
        "best weights.",
        None,
    )
    seed: int = _setting(
        "Seed of the order of rows and of all noise. The initial weights are those of the model: "
        "Model(…, seed=0) decides them.",
        0,
    )
    schedule: Schedule = _setting(  # noqa: RUF009
        "joint (AEVB), alternate (E-steps of q, M-steps of p), em (exact EM) or mle (exact "
        "evidence).",
        make=joint,
    )
    how: Mapping[str, str] = _setting(
        "How to take the expectation over each latent, by latent; overrides the plan's choice.",
        make=dict,
    )
    window: int | None = _setting(
        "Time steps per step of the optimiser (truncated back-propagation). Values and states are "
        "carried, without gradient, from window to window. By default whole sequences.",
        None,
    )
    checkpoint_time: int | None = _setting(
        "Save memory: keep the inner values of this many steps of a recurrence at a time. The "
        "backward pass computes the others again. The gradients are the same.",
        None,
    )
    bound: str = _setting(
        "Bound on the evidence: elbo, iwae, or particles (for sequences, by a particle filter).",
        "elbo",
    )
    samples: int | None = _setting(
        "Samples, or particles, per example. By default 1, or 5 with bound iwae or particles.", None
    )
    gradient: str = _setting(
        "Gradient estimator: plain, stl (sticking the landing), dreg (doubly reparameterised). "
        "For particles plain, or score, which includes the gradient of resampling.",
        "plain",
    )
    resample: float | None = _setting(
        "Share of effective particles below which a row is resampled, from 0 (never) to 1. With 1 "
        "it is resampled after every step. By default 0.5, or 1 with gradient score.",
        None,
    )
    temperature: float = _setting("Temperature of relaxed samples (gumbel).", 0.5)
    validate_every: int | None = _setting("Steps between validations. By default one epoch.", None)
    log_every: int | None = _setting(
        "Steps between entries of the history. By default about 200 entries per run.", None
    )
    checkpoint_every: int | None = _setting(
        "Steps between checkpoints. By default at validations, at least half a minute apart.", None
    )
    precision: str = _setting(
        "float32, or bf16: matrix products run in bfloat16. The weights and everything else stay "
        "in float32.",
        "float32",
    )
    compile: bool | None = _setting(
        "Fuse the operations of a step with torch's compiler. By default this is decided by the "
        "sizes of the model and the number of steps.",
        None,
    )
    skip: int = _setting(
        "Maximum number of batches with a non-finite loss or gradient to skip. At the next one "
        "the run stops with an error.",
        0,
    )

    def __post_init__(self) -> None:
        import numpy as np

        from aevb.data.preparation import Affine

        for f in fields(self):  # JSON cannot store numpy's numbers
            if isinstance(value := getattr(self, f.name), np.generic):
                object.__setattr__(self, f.name, value.item())
        for name in (
            "batch",
            "samples",
            "steps",
            "patience",
            "validate_every",
            "log_every",
            "checkpoint_every",
            "kl_cycles",
            "window",
            "checkpoint_time",
        ):
            _whole(name, getattr(self, name), least=1)
        for name in ("warmup", "kl_warmup", "skip", "seed"):
            _whole(name, getattr(self, name), least=0)
        for name in ("epochs", "lr", "clip", "temperature"):
            _positive(name, getattr(self, name))
        for name in ("classify", "agree"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value < math.inf
            ):
                raise ValueError(f"{name} is a weight, 0 or more, got {value!r}.")
        for name, example in (("beta", "4.0"), ("free_bits", "0.5")):
            object.__setattr__(self, name, _by_latent(name, getattr(self, name), example))
        if self.kl_cycles > 1 and not self.kl_warmup:
            raise ValueError(
                f"kl_cycles={self.kl_cycles} repeats the warm-up of the KL terms, but kl_warmup "
                f"is 0. Set kl_warmup to the steps over which their weight rises in each cycle."
            )
        if not isinstance(self.distort, Mapping) or not all(
            isinstance(value, Affine) for value in self.distort.values()
        ):
            raise ValueError(
                f'distort is a dictionary from variable to distortion, e.g. {{"x": Affine((28, '
                f"28))}}, got {self.distort!r}."
            )
        if self.checkpoint_time is not None and self.bound == "particles":
            raise ValueError(
                "checkpoint_time= saves memory in the loop of elbo and iwae; a particle filter "
                'keeps the values of all steps. Leave it out, or use bound="iwae".'
            )
        if self.epochs is not None and self.steps is not None:
            raise ValueError("Pass epochs= or steps=, not both.")
        if self.precision not in ("float32", "bf16"):
            raise ValueError(f'precision is "float32" or "bf16", got {self.precision!r}.')
        if self.compile is not None and not isinstance(self.compile, bool):
            raise ValueError(
                f"compile is True, False, or None (decided by the length of the run), got "
                f"{self.compile!r}."
            )
        if self.decay not in ("cosine", "constant"):
            raise ValueError(f'decay is "cosine" or "constant", got {self.decay!r}.')
        if not isinstance(self.schedule, Schedule):
            raise ValueError(
                f"schedule is joint(), alternate(…), em() or mle(), got {self.schedule!r}."
            )
        if self.resample is not None and (
            isinstance(self.resample, bool)
            or not isinstance(self.resample, int | float)
            or not 0 <= self.resample <= 1
        ):
            raise ValueError(
                f"resample is a share of the particles, from 0 to 1, got {self.resample!r}."
            )
        for name in ("bound", "gradient"):  # the plan checks the word itself
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is a word, got {getattr(self, name)!r}.")
        if not isinstance(self.how, Mapping) or not all(
            isinstance(choice, str) for choice in self.how.values()
        ):
            raise ValueError(
                f'how is a dictionary from latent to choice, e.g. {{"y": "gumbel"}}, got '
                f"{self.how!r}."
            )

    @property
    def judge(self) -> str:
        """The quantity that compares validations: the bound, the objective or the evidence.

        Exact schedules use the evidence. The objective is used if it differs from the bound until
        the end (``beta``, ``free_bits``): the best bound would be that of some early step.
        """
        if self.schedule.objective != "bound":
            return "evidence"
        return OBJECTIVE if self.penalised else self.bound

    @property
    def penalised(self) -> bool:
        """Whether ``beta`` or ``free_bits`` makes the objective differ from the bound."""
        return self.has_beta or self.has_free_bits

    @property
    def has_beta(self) -> bool:
        """Whether a KL term has another weight than 1 after the warm-up."""
        return any(one != 1 for one in _numbers_of(self.beta))

    @property
    def has_free_bits(self) -> bool:
        """Whether a latent has free bits."""
        return any(one != 0 for one in _numbers_of(self.free_bits))

    @property
    def records_objective(self) -> bool:
        """Whether the objective differs from the bound in some steps, so that both are recorded."""
        return bool(self.penalised or self.kl_warmup or self.classify or self.agree)

    @property
    def weights_kl(self) -> bool:
        """Whether KL terms have a weight other than 1 in some steps."""
        return bool(self.kl_warmup) or self.has_beta

    def total(self, n: int, batch: int, windows: float = 1.0) -> int:
        """Compute the number of steps.

        By default it makes 20 epochs, but at least 2,000 steps and at most 200 epochs.

        Arguments:
            n: The number of rows.
            batch: The number of rows per step.
            windows: The mean number of windows of a batch.

        Returns:
            The number of steps of the run.
        """
        per_epoch = n / min(batch, n) * windows
        if self.steps is not None:
            return self.steps
        epochs = self.epochs if self.epochs is not None else min(200.0, max(20.0, 2000 / per_epoch))
        return max(1, round(epochs * per_epoch))

    def kl_weight(self, step: int, total: int) -> float:
        """Return the warm-up's weight of the KL terms in a step; ``beta`` multiplies it.

        Arguments:
            step: The step, from 0.
            total: The number of steps of the run, which ``kl_cycles`` divides.
        """
        if not self.kl_warmup:
            return 1.0
        start = -(-(step * self.kl_cycles // total) * total // self.kl_cycles)
        return min(1.0, (step - start + 1) / self.kl_warmup)

    def beta_of(self, latent: str) -> float:
        """Return the weight of a latent's KL term after the warm-up.

        Arguments:
            latent: The name of the latent.
        """
        return self.beta.get(latent, 1.0) if isinstance(self.beta, Mapping) else self.beta

    def free_bits_of(self, latent: str) -> float:
        """Return the free bits of a latent, in nats.

        Arguments:
            latent: The name of the latent.
        """
        bits = self.free_bits
        return bits.get(latent, 0.0) if isinstance(bits, Mapping) else bits

    def rate(self, step: int, phase: Phase) -> float:
        """Return the learning rate of a step.

        Arguments:
            step: The step, from 0.
            phase: The phase of the schedule to which it belongs.

        >>> settings = Settings(lr=0.1, warmup=10, decay="constant")
        >>> settings.rate(4, settings.schedule.phase(4, 100))
        0.05
        """
        assert self.lr is not None
        rate = self.lr * min(1.0, (step + 1) / self.warmup) if self.warmup else self.lr
        if self.decay == "cosine":
            rate *= 0.5 * (1 + math.cos(math.pi * phase.position / phase.length))
        return rate

    def record(self) -> dict[str, Any]:
        """Return the settings as plain values, for JSON and TOML."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "schedule"}
        distort = {
            name: [*how.shape, how.rotate, how.shear, how.scale, how.shift]
            for name, how in self.distort.items()
        }
        schedule = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self.schedule).items()
            if value is not None
        }
        return plain | {
            "how": dict(self.how),
            "beta": _plain(self.beta),
            "free_bits": _plain(self.free_bits),
            "distort": distort,
            "schedule": {"name": type(self.schedule).__name__, **schedule},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Settings:
        """Return the settings of a record.

        Arguments:
            record: Plain values, as :meth:`record` returns them. Missing fields get their defaults;
                unknown keys are ignored.
        """
        return cls(**_from_plain(record))

    def to_toml(self, path: str | Path) -> None:
        """Write the settings to a TOML file, which :meth:`from_toml` reads.

        Arguments:
            path: The file.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Settings(epochs=5).to_toml(f"{folder}/config.toml")
        ...     print(Path(f"{folder}/config.toml").read_text().splitlines()[0])
        epochs = 5
        """
        Path(path).write_text(toml_text(self.record()), encoding="utf-8")

    @classmethod
    def from_toml(cls, path: str | Path) -> Settings:
        """Read settings from a TOML file, e.g. a run's ``config.toml``.

        Arguments:
            path: The file. Missing fields get their defaults. The keys that a run records besides
                its settings (data, fresh, frozen, numbers) are ignored. Any other unknown key
                raises a ValueError.

        Returns:
            The settings.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Settings(epochs=5, lr=0.01).to_toml(f"{folder}/config.toml")
        ...     again = Settings.from_toml(f"{folder}/config.toml")
        >>> again == Settings(epochs=5, lr=0.01)
        True
        """
        return cls(**read_toml(path))


def penalties_of(settings: Settings) -> str:
    """Return ``beta`` and ``free_bits`` as a user would write them, if they are not the defaults.

    >>> penalties_of(Settings(beta=4.0, free_bits={"z": 0.5}))
    "beta=4 and free_bits={'z': 0.5}"
    """
    given = {"beta": settings.has_beta, "free_bits": settings.has_free_bits}
    values = {name: getattr(settings, name) for name, differs in given.items() if differs}
    return " and ".join(
        f"{name}={value}" if isinstance(value, Mapping) else f"{name}={value:g}"
        for name, value in values.items()
    )


def documentation(one: Field[Any]) -> str:
    """Return the documentation of a setting, one or two sentences."""
    return str(one.metadata["documentation"])


def default_of(one: Field[Any]) -> Any:
    return one.default_factory() if one.default_factory is not MISSING else one.default


def _listed() -> str:
    """Return every setting with its type, documentation and default, as a list of arguments."""
    return "\n".join(
        textwrap.fill(
            f"{one.name} ({one.type}): {documentation(one)} Default: {default_of(one)!r}.",
            100,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_on_hyphens=False,
        )
        for one in fields(Settings)
    )


Settings.__doc__ = f"{Settings.__doc__}\n    Arguments:\n{_listed()}\n    "


def options_source() -> str:
    """Return the source of ``settings_options.py``: :class:`Settings` as a TypedDict."""
    keys = []
    for one in fields(Settings):
        default = default_of(one)
        shown = (
            ""
            if default is None
            else f" Default: {json.dumps(default) if isinstance(default, str) else default}."
        )
        keys.append(f"    {one.name}: {one.type}\n{_docstring(documentation(one) + shown)}\n")
    return f'''"""The keywords of fit for editors and type checkers.

Do not edit: ``python -m aevb.training.settings`` prints this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from aevb.data.preparation import Affine
from aevb.training.schedules import Schedule


class SettingsOptions(TypedDict, total=False):
    """The fields of :class:`Settings`, none of them required."""

{"".join(keys)}'''


def _docstring(text: str) -> str:
    """Return an indented docstring: one line, or the first sentence and then the others."""
    one_line = f'    """{text}"""'
    if len(one_line) <= 100:
        return one_line
    first, _, rest = text.partition(". ")
    wrapped = textwrap.fill(rest, 97, initial_indent="    ", subsequent_indent="    ")
    return f'    """{first}.\n\n{wrapped}\n    """'


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file and return the keyword arguments for :class:`Settings`."""
    from aevb.runtime.checked_files import refuse_endless

    place = Path(path)
    try:
        refuse_endless(place)
        record = tomllib.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{place} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"{place} is no valid TOML: {str(error).rstrip('.')}.") from None
    known = [one.name for one in fields(Settings)]
    unknown = [key for key in record if key not in known and key not in RECORDED]
    if unknown:
        raise ValueError(
            f"{place} has unknown settings: {', '.join(unknown)}."
            f"{did_you_mean(unknown[0], known, aliases=ALIASES)} The settings are "
            f"{', '.join(known)}."
        )
    try:
        found = _from_plain(record)
        Settings(**found)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return found


def _from_plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for :class:`Settings` from a record of plain values."""
    from aevb.data.preparation import Affine

    found = {one.name: record[one.name] for one in fields(Settings) if one.name in record}
    if "schedule" in found:
        found["schedule"] = schedule_from(found["schedule"])
    if "distort" in found:
        try:
            found["distort"] = {
                name: Affine((height, width), *rest)
                for name, (height, width, *rest) in found["distort"].items()
            }
        except (AttributeError, TypeError, ValueError):
            raise ValueError(
                f"distort gives height, width, rotate, shear, scale and shift by variable, e.g. x "
                f"= [28, 28, 0.2, 0.3, 0.12, 0.06], got {found['distort']!r}."
            ) from None
    return found


def _by_latent(name: str, value: Any, example: str) -> float | dict[str, float]:
    """Return a number, or a dictionary from latent to number; refuse anything else."""
    import numpy as np

    by_latent = dict(value) if isinstance(value, Mapping) else {"": value}
    for latent, one in by_latent.items():
        plain = one.item() if isinstance(one, np.generic) else one
        if (
            not isinstance(latent, str)
            or isinstance(plain, bool)
            or not isinstance(plain, int | float)
            or not 0 <= plain < math.inf
        ):
            raise ValueError(
                f'{name} is a number, 0 or more, or numbers by latent, e.g. {example} or {{"z": '
                f"{example}}}, got {value!r}."
            )
        by_latent[latent] = float(plain)
    if not isinstance(value, Mapping):
        return by_latent[""]
    return by_latent or float(default_of(next(f for f in fields(Settings) if f.name == name)))


def _numbers_of(value: float | Mapping[str, float]) -> list[float]:
    return list(value.values()) if isinstance(value, Mapping) else [value]


def _plain(value: float | Mapping[str, float]) -> float | dict[str, float]:
    return dict(value) if isinstance(value, Mapping) else value


def _whole(name: str, value: Any, *, least: int) -> None:
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or value < least
    ):
        raise ValueError(f"{name} is a whole number, {least} or more, got {value!r}.")


def _positive(name: str, value: Any) -> None:
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf
    ):
        raise ValueError(f"{name} is a positive number, got {value!r}.")


def toml_text(record: Mapping[str, Any]) -> str:
    """Return a record as TOML, with tables at most one level deep.

    Values that are None are left out.
    """
    plain = {
        key: value
        for key, value in record.items()
        if not isinstance(value, Mapping) and value is not None
    }
    lines = [f"{key} = {_word(value)}" for key, value in plain.items()]
    for name, table in record.items():
        if isinstance(table, Mapping) and table:
            lines += [
                "",
                f"[{name}]",
                *(f"{_word(key)} = {_word(value)}" for key, value in table.items()),
            ]
    return "\n".join(lines) + "\n"


def _word(value: Any) -> str:
    # TOML requires this escape, JSON does not.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


if __name__ == "__main__":
    print(options_source(), end="")
