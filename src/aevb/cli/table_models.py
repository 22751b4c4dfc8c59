"""Models of a table that ``aevb train table.csv`` knows, and the choice between mixtures by BIC."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aevb.cli.model_argument import value_of

if TYPE_CHECKING:
    from aevb.model import Model
    from aevb.tables import Schema

MOST = 10  # components of the largest mixture that is compared
PATIENCE = 3  # sizes without improvement before the comparison stops
STARTS = 3  # of each mixture that is compared
CELLS, ROWS = 40_000, 1000  # the comparison reads this many cells, or this many rows if more
WIDE = 50  # columns of x beyond which full covariances are not compared
# Arguments of --set for each model, with their defaults. None means that BIC chooses.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "mixture": {"components": None, "covariance": None},
    "factors": {"latent": None},
    "vae": {"latent": 4, "hidden": (64, 64)},
    "gmvae": {"components": 5, "latent": 4, "hidden": (64, 64)},
}
MODELS = ("auto", *ARGUMENTS)


@dataclass(frozen=True)
class Candidate:
    """A model that was compared: log p per row, free parameters and BIC.

    A model is not ``sound`` if it collapsed onto equal or redundant cells or a single row: its
    log p can be raised at will.
    """

    model: str
    arguments: Mapping[str, Any]
    log_p: float
    parameters: int
    bic: float
    sound: bool = True

    @property
    def name(self) -> str:
        return described(self.model, self.arguments)

    @property
    def short(self) -> str:
        """The model in a few words, e.g. "3 components, full"."""
        size = next(iter(self.arguments.values()))
        if self.model == "mixture":
            return f"{size} component{'s' * (size != 1)}, {self.arguments['covariance']}"
        return f"{size} factor{'s' * (size != 1)}"


def described(model: str, arguments: Mapping[str, Any]) -> str:
    """A model in words, e.g. "mixture of 3 components, full covariance"."""
    if model == "mixture":
        k = arguments["components"]
        return f"mixture of {k} component{'s' * (k != 1)}, {arguments['covariance']} covariance"
    if model == "factors":
        return f"factor analysis, {arguments['latent']} factor{'s' * (arguments['latent'] != 1)}"
    shown = ", ".join(
        f"{name} {'×'.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in arguments.items()
    )
    return f"{model}, {shown}"


def read_arguments(model: str | None, given: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the model of ``--model`` and ``--set``, and the arguments of ``--set``.

    Without --model, components or a covariance mean a mixture.
    """
    if model is None and given:
        if not given.keys() <= ARGUMENTS["mixture"].keys():
            raise ValueError(
                f"--set {next(iter(given))}=… needs the model that it belongs to, e.g. --model "
                f"mixture --set components=3, --model factors --set latent=2, or --model vae "
                f"--set latent=4."
            )
        model = "mixture"
    model = model or "auto"
    if model not in MODELS:
        raise ValueError(f"Unknown --model {model}. Choose one of {', '.join(MODELS)}.")
    if model == "auto":
        if given:
            raise ValueError("--model auto chooses the arguments of --set. Leave out one of them.")
        return model, {}
    known = ARGUMENTS[model]
    for name in given:
        if name not in known:
            raise ValueError(
                f"--model {model} has no argument {name!r}. Its arguments are {', '.join(known)}."
            )
    found = {name: value_of(text) for name, text in given.items()}
    for name, value in found.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if name in ("components", "latent") and (not whole or value < 1):
            raise ValueError(f"--set {name} is a whole number from 1 on, got {value!r}.")
        if name == "covariance" and value not in ("diagonal", "full"):
            raise ValueError(f"--set covariance is diagonal or full, got {value!r}.")
        if name == "hidden":
            sizes = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(size, int) and size > 0 for size in sizes):
                raise ValueError(f"--set hidden is a list of sizes, e.g. [64,64], got {value!r}.")
            found[name] = sizes
    return model, {name: found.get(name, default) for name, default in known.items()}


def declare(schema: Schema, model: str, arguments: Mapping[str, Any]) -> Model:
    """Declare a model of the schema with the arguments of ``--set``."""
    if model == "mixture":
        return schema.mixture(arguments["components"], covariance=arguments["covariance"])
    if model == "factors":
        return schema.factors(arguments["latent"])
    if model == "vae":
        return schema.vae(arguments["latent"], hidden=arguments["hidden"])
    return schema.gmvae(arguments["components"], arguments["latent"], hidden=arguments["hidden"])


# Choosing -----------------------------------------------------------------------------------------


def is_open(model: str, arguments: Mapping[str, Any]) -> bool:
    """Whether BIC has to choose the model or one of its arguments."""
    return model == "auto" or None in arguments.values()


def families(
    schema: Schema, model: str, arguments: Mapping[str, Any]
) -> list[tuple[str, str, dict[str, Any], list[int]]]:
    """Families to compare: the model, the argument to vary, the other arguments, and the sizes."""
    dense = sum(column.dense for column in schema.used)
    found: list[tuple[str, str, dict[str, Any], list[int]]] = []
    if model in ("auto", "mixture"):
        components, covariance = arguments.get("components"), arguments.get("covariance")
        sizes = [components] if components else list(range(1, MOST + 1))
        kinds = ["diagonal", "full"] if 2 <= dense <= WIDE else ["diagonal"]
        for kind in [covariance] if covariance else kinds:
            found.append(("mixture", "components", {"covariance": kind}, sizes))
    exact = dense == len(schema.used) and dense >= 3
    if model == "factors" and not exact:
        raise ValueError(
            "--model factors needs its number of factors for a table with counts, categories or "
            "truth values, because log p is not exact there: --set latent=2."
        )
    if exact and model in ("auto", "factors"):
        # With more factors, factor analysis has as many parameters as a full covariance.
        most = int(dense + 0.5 - math.sqrt(2 * dense + 0.25))
        found.append(("factors", "latent", {}, list(range(1, min(most, MOST) + 1))))
    return found


def compared_rows(schema: Schema, rows: int) -> int:
    """The number of rows that the comparison reads."""
    return min(rows, max(ROWS, CELLS // len(schema.used)))


def compare(
    schema: Schema,
    frame: Any,
    model: str,
    arguments: Mapping[str, Any],
    *,
    seed: int,
    tell: Callable[[Candidate], None],
) -> list[Candidate]:
    """Fit models of rising size and return them with their BIC, the best one first.

    BIC = −2 Σ log p + parameters · log(rows), which is smaller for a better model. A family ends
    after ``PATIENCE`` sizes without improvement. Of a large table, random rows are read.
    """
    import numpy as np

    most = compared_rows(schema, frame.num_rows)
    if most < frame.num_rows:
        order = np.random.default_rng(seed).permutation(frame.num_rows)[:most]
        frame = frame.take(np.sort(order))
    found: list[Candidate] = []
    for name, varied, fixed, sizes in families(schema, model, arguments):
        best, worse = math.inf, 0
        for size in sizes:
            candidate = _fitted(schema, frame, name, {varied: size} | fixed, seed)
            found.append(candidate)
            tell(candidate)
            better = candidate.sound and candidate.bic < best
            worse, best = (0, candidate.bic) if better else (worse + 1, best)
            if worse == PATIENCE:
                break
    return sorted(found, key=lambda candidate: (not candidate.sound, candidate.bic))


def _fitted(
    schema: Schema, frame: Any, model: str, arguments: Mapping[str, Any], seed: int
) -> Candidate:
    from aevb.tables.fitting import collapsed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the chosen model is fitted again, with its warnings
        starts = {"starts": STARTS} if arguments.get("components", 1) > 1 else {}
        table = schema.fit(
            declare(schema, model, arguments), frame, seed=seed, progress=False, **starts
        )
        total = float(table.score(frame)["log_p"].to_numpy().sum())
    sound = not collapsed(table.model, schema.encode(frame))
    free, n = parameters(schema, model, arguments), frame.num_rows
    return Candidate(model, arguments, total / n, free, free * math.log(n) - 2 * total, sound)


def parameters(schema: Schema, model: str, arguments: Mapping[str, Any]) -> int:
    """The number of free parameters of a mixture or an exact factor analysis."""
    from aevb.comparison.criteria import mixture_parameters

    if model == "factors":
        size, dense = arguments["latent"], len(schema.used)
        return dense * (size + 2) - size * (size - 1) // 2
    return mixture_parameters(declare(schema, model, arguments))
