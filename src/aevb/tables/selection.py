"""Choose the size of a mixture or of a factor analysis of a table by BIC.

BIC = −2 Σ log p + parameters · log(rows); a smaller one is better. log p is exact, so both models
are compared by their evidence itself.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aevb.data.large_tables import in_memory
from aevb.model import Model
from aevb.runtime.checked_files import DataWarning
from aevb.tables.fitted import TableModel, fit_table
from aevb.tables.fitting import at_limit, fit_data
from aevb.tables.frames import read_table
from aevb.tables.schema import Schema

MOST = 10  # components or factors of the largest model that is compared
PATIENCE = 3  # sizes without improvement before the comparison stops
STARTS = 3  # of each mixture that is compared
CELLS, ROWS = 40_000, 1000  # the comparison reads this many cells, or this many rows if more
SHOWN = 5  # rows that a message names
WIDE = 50  # columns of x beyond which full covariances are not compared


@dataclass(frozen=True)
class Candidate:
    """A model that was compared: log p per row, free parameters and BIC.

    A model is not ``sound`` if it collapsed onto equal or redundant cells of a few rows. Those of
    many rows have a density with a limit. ``redundant`` are the columns of such cells, and
    ``alone`` the rows that have a cluster of their own.
    """

    model: str
    arguments: Mapping[str, Any]
    log_p: float
    parameters: int
    bic: float
    sound: bool = True
    redundant: tuple[str, ...] = ()
    alone: tuple[int, ...] = ()

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


def declare(schema: Schema, model: str, arguments: Mapping[str, Any]) -> Model:
    """Declare a model of the schema: "mixture", "factors", "vae" or "gmvae"."""
    if model == "mixture":
        return schema.mixture(arguments["components"], covariance=arguments["covariance"])
    if model == "factors":
        return schema.factors(arguments["latent"])
    if model == "vae":
        return schema.vae(arguments["latent"], hidden=arguments["hidden"])
    if model == "gmvae":
        components, latent = arguments["components"], arguments["latent"]
        return schema.gmvae(components, latent, hidden=arguments["hidden"])
    raise ValueError(f"Unknown model {model!r}. Choose one of mixture, factors, vae and gmvae.")


def fit_clusters(
    schema: Schema,
    frame: Any,
    *,
    seed: int = 0,
    tell: Callable[[Candidate], None] = lambda _: None,
    **settings: Any,
) -> TableModel:
    """Fit a mixture whose number of clusters and covariance BIC chooses.

    ``tell`` receives every model that is compared. ``settings`` are those of :meth:`Schema.fit`.
    """
    best, *others = compare(schema, frame, "mixture", {}, seed=seed, tell=tell)
    if (told := rejected_text(best, others)) is not None:
        warnings.warn(told, DataWarning, stacklevel=3)
    model = declare(schema, best.model, best.arguments)
    if best.arguments["components"] == MOST:
        more = "To fit more: schema.fit(schema.mixture(20), frame)."
        warnings.warn(f"{at_most_text()} {more}", DataWarning, stacklevel=3)
    # The starts that were compared: if they read all rows, the fit is the one that was chosen.
    return fit_table(schema, model, frame, seed=seed, **({"starts": STARTS} | settings))


def at_most_text() -> str:
    return (
        f"BIC chose {MOST} clusters, the largest number that is compared: more may fit better, or "
        f"a column has a form that no few clusters fit."
    )


def rejected_text(best: Candidate, others: Sequence[Candidate]) -> str | None:
    """Name the rows because of which a model with a better BIC than the best was not chosen."""
    better = [one for one in others if one.bic < best.bic and one.alone]
    if not better:
        return None
    rows = list(dict.fromkeys(row for one in better for row in one.alone))
    shown = ", ".join(map(str, rows[:SHOWN])) + ", …" * (len(rows) > SHOWN)
    return (
        f"Larger mixtures spend a cluster on a row that is far from all others "
        f"(row{'s' * (len(rows) > 1)} {shown}), and are not chosen for this reason, although their "
        f"BIC is better. Correct such rows or leave them out, and choose again."
    )


def compare(
    schema: Schema,
    frame: Any,
    model: str,
    arguments: Mapping[str, Any],
    *,
    seed: int = 0,
    tell: Callable[[Candidate], None] = lambda _: None,
) -> list[Candidate]:
    """Fit models of rising size and return them with their BIC, the best one first.

    ``model`` is "mixture" or "factors", and ``arguments`` are those that are fixed. A family ends
    after ``PATIENCE`` sizes without improvement. Of a large table, random rows are read.
    """
    table = read_table(in_memory(frame))
    data, jacobian = schema.encode(table), schema.log_jacobian(table)
    most = compared_rows(schema, table.rows)
    some = np.arange(table.rows)
    if most < table.rows:
        some = np.sort(np.random.default_rng(seed).permutation(table.rows)[:most])
        data, jacobian = {name: value[some] for name, value in data.items()}, jacobian[some]
    found: list[Candidate] = []
    for varied, fixed, sizes in _families(schema, model, arguments):
        best, worse = math.inf, 0
        for size in sizes:
            candidate = _fitted(schema, data, jacobian, model, {varied: size} | fixed, seed, some)
            found.append(candidate)
            tell(candidate)
            better = candidate.sound and candidate.bic < best
            worse, best = (0, candidate.bic) if better else (worse + 1, best)
            if worse == PATIENCE:
                break
    return sorted(found, key=lambda candidate: (not candidate.sound, candidate.bic))


def compared_rows(schema: Schema, rows: int) -> int:
    """The number of rows that the comparison reads."""
    return min(rows, max(ROWS, CELLS // len(schema.used)))


def _families(
    schema: Schema, model: str, arguments: Mapping[str, Any]
) -> list[tuple[str, dict[str, Any], list[int]]]:
    """Families to compare: the argument to vary, the other arguments, and the sizes."""
    dense = sum(column.dense for column in schema.used)
    if model == "mixture":
        components, covariance = arguments.get("components"), arguments.get("covariance")
        sizes = [components] if components else list(range(1, MOST + 1))
        kinds = ["diagonal", "full"] if 2 <= dense <= WIDE else ["diagonal"]
        return [
            ("components", {"covariance": kind}, sizes)
            for kind in ([covariance] if covariance else kinds)
        ]
    if dense < len(schema.used) or dense < 3:
        raise ValueError(
            "Factor analysis needs its number of factors for a table with counts, categories or "
            "truth values, because log p is not exact there, and for fewer than three columns: "
            "schema.factors(2), or --set latent=2."
        )
    # With more factors, factor analysis has as many parameters as a full covariance.
    most = int(dense + 0.5 - math.sqrt(2 * dense + 0.25))
    return [("latent", {}, list(range(1, min(most, MOST) + 1)))]


def _fitted(
    schema: Schema,
    data: Mapping[str, Any],
    jacobian: np.ndarray,
    model: str,
    arguments: Mapping[str, Any],
    seed: int,
    some: np.ndarray,
) -> Candidate:
    starts = STARTS if arguments.get("components", 1) > 1 else None
    declared = declare(schema, model, arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the chosen model is fitted again, with its warnings
        fit_data(schema, declared, data, starts=starts, seed=seed, progress=False)
        total = float(declared.log_evidence(**data).value.sum()) + float(jacobian.sum())
    found = at_limit(declared, data)
    entries = sorted({j for one in found for j in one.entries})
    names = tuple(schema.variables["x"][j].name for j in entries)
    free, n = parameters(declared), len(jacobian)
    bic = free * math.log(n) - 2 * total
    sound, alone = all(one.sound for one in found), [one.row for one in found]
    rows = tuple(int(some[row]) for row in alone if row is not None)
    return Candidate(model, arguments, total / n, free, bic, sound, names, rows)


def parameters(model: Model) -> int:
    """The number of free parameters of a mixture or of an exact factor analysis.

    Each cluster has its own heads (means, scales, logits); learned vectors, such as the dispersion
    of a NegativeBinomial, are shared by all clusters. A rotation of the factors changes nothing.
    """
    graph = model.graph
    (latent,) = graph.latents
    size, root = graph.size(latent), graph.rule("p", latent).spec
    total = size - 1 if root.categorical else -size * (size - 1) // 2
    for entry in graph.entries():
        if entry.side == "p" and entry.key.name != latent:
            spec: Any = entry.spec
            d = graph.size(entry.key.name)
            # The logits of the levels of a category have one number too many.
            each = sum(spec.heads(d).values()) - int(spec.categorical)
            total += size * each if root.categorical else (size + 1) * each
            total += sum(vector.numel() for vector in spec.vectors(d).values())
    return total
