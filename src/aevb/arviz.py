"""Draws of a model as an ArviZ object: posterior, prior and predictive draws with named axes.

ArviZ calls the parts groups. All draws are independent, and one chain holds them. ArviZ before 1.0
stores groups in its ``InferenceData``, ArviZ 1 in xarray's ``DataTree``; :func:`to_arviz` returns
the one that the installed ArviZ reads.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aevb.declare.graph import Graph
from aevb.estimate.batch import Batch, public
from aevb.estimate.estimators import estimate
from aevb.estimate.keys import LENGTHS, STEPS, mask_of, masks_of, real_steps
from aevb.model import Model
from aevb.posterior import Posterior, posterior_of
from aevb.predictive.replicate import redraw
from aevb.runtime.suggestions import did_you_mean
from aevb.version import __version__

GROUPS = ("posterior", "posterior_predictive", "prior", "prior_predictive", "log_likelihood")
DRAWS = ("chain", "draw")
AT_ONCE = 2**25  # numbers of all variables that are computed together
MOST = 2**28  # numbers in a group; more would need more than a gigabyte
Part = dict[str, np.ndarray]


def to_arviz(
    model: Model,
    data: Mapping[str, Any],
    *,
    samples: int = 500,
    groups: Sequence[str] = GROUPS,
    method: str = "auto",
    seed: int | None = None,
    coords: Mapping[str, Sequence[Any]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
) -> Any:
    """Return draws of a model, given data, as an ArviZ object.

    The groups ``posterior``, ``posterior_predictive``, ``prior`` and ``prior_predictive`` hold
    ``samples`` draws for each row, with the dimensions chain (one), draw, row, time for sequences,
    and ``x_dim`` for the entries of x (``x_dim_0``, ``x_dim_1`` for images). ``log_likelihood``
    holds log p(x | its parents) of each draw and row, summed over steps and known entries.
    ``observed_data`` holds the data, NaN where missing, and ``constant_data`` the given variables.
    Classes are numbers from 0.

    The latents are drawn as by :meth:`Model.posterior`: from q if it was trained, otherwise from
    the exact posterior. The attributes of the group say from which. Draws of q are not weighted,
    so that functions that assume draws of the exact posterior, such as ``az.loo``, inherit the
    error of q. Every row has latents of its own, and the weights are fixed. The
    leave-one-out density of a row is therefore its evidence, log p(x), which
    :meth:`Model.log_evidence` estimates better.

    Arguments:
        model: A trained model.
        data: The data by variable, as for :func:`aevb.fit`; ``lengths`` or ``steps`` too.
        samples: Number of draws in each group.
        groups: The groups of draws to compute, of those above.
        method: "auto", "q" or "exact", as in :meth:`Model.posterior`.
        seed: Seed of all draws.
        coords: Labels of dimensions, such as ``{"x_dim": ["height", "weight"], "row": names}``.
        dims: Other names of the dimensions of a variable after row and time, such as
            ``{"x": ["column"]}``.

    Returns:
        An ``arviz.InferenceData`` with ArviZ before 1.0, else an ``xarray.DataTree``.

    Raises:
        ValueError: ArviZ is not installed, or the data or an argument do not fit the model.

    >>> from aevb import Model, Normal
    >>> model = Model(p={"z": Normal(1), "x | z": Normal(2, scale=1.0)}, q={"z | x": Normal()})
    >>> draws = to_arviz(model, {"x": torch.zeros(3, 2)}, samples=10, method="exact", seed=0)
    >>> draws["posterior"]["z"].dims, draws["posterior"]["z"].shape
    (('chain', 'draw', 'row', 'z_dim'), (1, 10, 3, 1))
    """
    wrap = _container()
    _check(model, samples, groups)
    batch = _batch(model, data)
    n, steps = model._extent(batch)
    posterior = posterior_of(
        model, model.teaching, batch, samples=samples, seed=seed, method=method, weigh_gaps=True
    )
    _check_size(model.graph, samples, n, steps, groups)
    layout = _Layout(model.graph, n, steps, dict(coords or {}), dict(dims or {}))
    found: dict[str, Any] = {}
    attrs = {"inference_library": "aevb", "inference_library_version": __version__}
    if {"posterior", "posterior_predictive", "log_likelihood"} & set(groups):
        latents, predicted, densities = _given_data(model, posterior, samples, groups)
        if "posterior" in groups and latents:
            found["posterior"] = layout.dataset(latents, attrs | _source(posterior), DRAWS)
        if predicted:
            found["posterior_predictive"] = layout.dataset(predicted, attrs, DRAWS)
        if densities:
            what = "log p(variable | its parents) per row, summed over steps and known entries"
            found["log_likelihood"] = layout.dataset(
                densities, attrs | {"density": what}, DRAWS, by_row=True
            )
    if {"prior", "prior_predictive"} & set(groups):
        latents, predicted = _from_prior(model, posterior, samples)
        if "prior" in groups and latents:
            found["prior"] = layout.dataset(latents, attrs, DRAWS)
        if "prior_predictive" in groups:
            found["prior_predictive"] = layout.dataset(predicted, attrs, DRAWS)
    graph = model.graph
    for group, names in (("observed_data", graph.observed), ("constant_data", graph.given)):
        known = {name: _known(graph, batch, name, n, steps) for name in names}
        if known:
            found[group] = layout.dataset(known, attrs, ())
    return wrap(found)


# Draws --------------------------------------------------------------------------------------------


def _given_data(
    model: Model, posterior: Posterior, samples: int, groups: Sequence[str]
) -> tuple[Part, Part, Part]:
    """Draw latents from the posterior, data from p given them, and evaluate p at the data.

    There are no densities if p reads missing entries: those would have to be known.
    """
    graph, (n, steps) = model.graph, (posterior.n, posterior.steps)
    drawn = posterior.joint(samples)  # [S, T or 1, N, d]
    unknown = [name for name in graph.latents if name in drawn]
    latents = {
        name: _array(graph, name, public(graph, name, drawn[name], n, steps)) for name in unknown
    }
    predicted: dict[str, list[np.ndarray]] = {name: [] for name in graph.observed}
    densities: dict[str, list[np.ndarray]] = {name: [] for name in graph.observed}
    with model._evaluating(posterior.next_seed):
        for part in _parts(graph, samples, n, steps):
            count = len(range(*part.indices(samples)))
            batch = _copies(posterior, count)
            for name in unknown:
                value = drawn[name][part]
                batch[name] = value.transpose(0, 1).reshape(value.shape[1], -1, value.shape[-1])
                batch.pop(mask_of(name), None)
            if "posterior_predictive" in groups:
                new = redraw(model, batch, graph.observed)
                for name, value in new.items():
                    rows = public(graph, name, value, count * n, steps)
                    predicted[name].append(_array(graph, name, rows.unflatten(0, (count, n))))
            if "log_likelihood" in groups and not posterior.gaps:
                plan = model.plan(clamped=graph.latents)
                terms = estimate(plan, model.factors, batch, {}).terms
                for name in graph.observed:
                    densities[name].append(terms[name].reshape(count, n).cpu().double().numpy())
    padded = _padding(posterior.batch)
    return (
        {name: _blank(graph, name, value, padded) for name, value in latents.items()},
        {
            name: _blank(graph, name, np.concatenate(parts), padded)
            for name, parts in predicted.items()
            if parts
        },
        {name: np.concatenate(parts) for name, parts in densities.items() if parts},
    )


def _from_prior(model: Model, posterior: Posterior, samples: int) -> tuple[Part, Part]:
    """Draw latents and data from p, for the given variables of each row."""
    graph, (n, steps) = model.graph, (posterior.n, posterior.steps)
    found: dict[str, list[np.ndarray]] = {name: [] for name in graph.stochastic}
    seed = posterior.next_seed
    with model._evaluating(None if seed is None else seed ^ 1):
        for part in _parts(graph, samples, n, steps):
            count = len(range(*part.indices(samples)))
            for name, value in redraw(model, _copies(posterior, count), graph.stochastic).items():
                rows = public(graph, name, value, count * n, steps)
                found[name].append(_array(graph, name, rows.unflatten(0, (count, n))))
    padded = _padding(posterior.batch)
    whole = {
        name: _blank(graph, name, np.concatenate(parts), padded) for name, parts in found.items()
    }
    return (
        {name: value for name, value in whole.items() if name in graph.latents},
        {name: value for name, value in whole.items() if name in graph.observed},
    )


def _copies(posterior: Posterior, count: int) -> Batch:
    """Return the rows repeated ``count`` times."""
    return {
        key: value.repeat(*[1] * (value.dim() - 2), count, 1)
        for key, value in posterior.batch.items()
    }


def _parts(graph: Graph, samples: int, n: int, steps: int) -> Iterator[slice]:
    """Yield the draws that are computed together."""
    size = sum(graph.size(name) * (steps if graph.timed[name] else 1) for name in graph.stochastic)
    count = max(1, AT_ONCE // max(1, size * n))
    return (slice(start, min(start + count, samples)) for start in range(0, samples, count))


def _known(graph: Graph, batch: Batch, name: str, n: int, steps: int) -> np.ndarray:
    """Return the data of a variable, with NaN (−1 for classes) where an entry is missing."""
    value = public(graph, name, batch[name], n, steps)
    masks = [
        public(graph, name, mask.to(value.dtype).expand(batch[name].shape), n, steps).bool()
        for mask in masks_of(batch, name, timed=graph.timed[name])
    ]
    for mask in masks:
        value = torch.where(mask, value, torch.nan)
    return _array(graph, name, value)


def _array(graph: Graph, name: str, value: Tensor) -> np.ndarray:
    """Return values as an array; one-hot vectors become class numbers, −1 where unknown."""
    array: np.ndarray = value.detach().cpu().numpy()
    if not _has_classes(graph, name):
        return array
    unknown = np.isnan(array).any(-1) | ~array.any(-1)
    return np.where(unknown, -1, np.nan_to_num(array).argmax(-1))


def _has_classes(graph: Graph, name: str) -> bool:
    return name not in graph.given and graph.rule("p", name).spec.categorical


def _padding(batch: Batch) -> np.ndarray | None:
    """Return where sequences have ended, [N, T]; None if all have the same length."""
    real = real_steps(batch)
    return None if real is None else ~real.squeeze(-1).T.cpu().numpy()


def _blank(graph: Graph, name: str, value: np.ndarray, padded: np.ndarray | None) -> np.ndarray:
    """Replace values beyond the end of a sequence by NaN, or −1 for classes."""
    if padded is None or not graph.timed[name]:
        return value
    beyond = np.broadcast_to(padded, (len(value), *padded.shape))
    value = value.copy()
    value[beyond] = -1 if value.dtype.kind == "i" else np.nan
    return value


# Names and checks ---------------------------------------------------------------------------------


class _Layout:
    """The dimensions and coordinates of all groups."""

    def __init__(
        self,
        graph: Graph,
        n: int,
        steps: int,
        coords: dict[str, Sequence[Any]],
        dims: dict[str, Sequence[str]],
    ) -> None:
        self.graph, self.coords, self.sizes = graph, coords, {"row": n, "time": steps}
        self.events: dict[str, list[str]] = {}
        for name in dims:
            if name not in graph.shapes:
                known = [*graph.stochastic, *graph.given]
                raise ValueError(
                    f"dims= names {name!r}, which is not a variable of this model. The variables "
                    f"are {', '.join(known)}.{did_you_mean(name, known)}"
                )
        for name in (*graph.stochastic, *graph.given):
            shape = () if _has_classes(graph, name) else graph.shapes[name]
            usual = [f"{name}_dim{f'_{i}' if len(shape) > 1 else ''}" for i in range(len(shape))]
            chosen = list(dims.get(name, usual))
            if len(chosen) != len(shape):
                raise ValueError(
                    f"dims= gives {name} the dimensions {', '.join(chosen) or 'none'}, but it has "
                    f"{len(shape)} after row{' and time' * graph.timed[name]}."
                )
            self.events[name] = chosen
            self.sizes |= dict(zip(chosen, shape, strict=True))
        for name, labels in coords.items():
            if name not in self.sizes:
                raise ValueError(
                    f"coords= names the dimension {name!r}, which no variable has. The dimensions "
                    f"are {', '.join(self.sizes)}.{did_you_mean(name, self.sizes)}"
                )
            if len(labels) != self.sizes[name]:
                raise ValueError(
                    f"coords= has {len(labels)} labels of {name}, which has {self.sizes[name]} "
                    f"entries."
                )

    def dataset(
        self,
        values: Mapping[str, np.ndarray],
        attrs: Mapping[str, str],
        before: Sequence[str],
        *,
        by_row: bool = False,
    ) -> Any:
        """Return a group: arrays [draws, row, …], or [row, …] without dimensions ``before``."""
        import xarray as xr

        variables = {}
        for name, value in values.items():
            time = ["time"] if self.graph.timed[name] else []
            own = [] if by_row else [*time, *self.events[name]]
            array = value[None] if before else value
            variables[name] = ([*before, "row", *own], array)
        used = {dim for names, _ in variables.values() for dim in names}
        lengths = {dim: self.sizes[dim] for dim in self.sizes if dim in used}
        if before:
            lengths |= {"chain": 1, "draw": len(next(iter(values.values())))}
        coords = {dim: self.coords.get(dim, np.arange(size)) for dim, size in lengths.items()}
        return xr.Dataset(variables, coords=coords, attrs=dict(attrs))


def _source(posterior: Posterior) -> dict[str, str]:
    """Say where the draws of the latents come from."""
    whence = {
        "exact": "independent draws of the exact posterior",
        "q": "independent draws of q, the approximate posterior; they are not weighted",
        "particles": "draws of a particle filter, resampled by their weights",
        "importance": "draws of q, resampled by their importance weights",
    }[posterior.method]
    return {"draws": whence, "posterior": posterior.method} | (
        {"why": posterior.why} if posterior.why else {}
    )


def _batch(model: Model, data: Mapping[str, Any]) -> Batch:
    """Check the data and lay them out."""
    if not isinstance(data, Mapping):
        raise ValueError(
            f"data are arrays by variable, such as {{{model.graph.observed[0]!r}: X}}; got a "
            f"{type(data).__name__}."
        )
    options = {key: data[key] for key in (STEPS, LENGTHS) if key in data}
    rest = {key: value for key, value in data.items() if key not in options}
    return model.prepare(gaps=True, **options, **rest)


def _check(model: Model, samples: int, groups: Sequence[str]) -> None:
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples is the number of draws, a positive whole number, got {samples}.")
    if isinstance(groups, str):
        raise ValueError(f"groups is a list of names, such as [{groups!r}].")
    for group in groups:
        if group not in GROUPS:
            raise ValueError(
                f"groups= names {group!r}. The groups of draws are {', '.join(GROUPS)}."
                f"{did_you_mean(group, GROUPS)}"
            )
    if not model.graph.observed:
        raise ValueError("This model has no observed variable, so there are no data to draw.")


def _check_size(graph: Graph, samples: int, n: int, steps: int, groups: Sequence[str]) -> None:
    """Refuse groups of draws that would fill the memory."""
    predictive = any(group.endswith("predictive") for group in groups)
    sizes = {
        name: samples * n * graph.size(name) * (steps if graph.timed[name] else 1)
        for name in (graph.stochastic if predictive else graph.latents)
    }
    if (total := sum(sizes.values())) > MOST:
        name = max(sizes, key=lambda one: sizes[one])
        rows = math.floor(n * MOST / total)
        fewer = f"Pass at most {rows:,} rows, take" if rows else "Take"
        raise ValueError(
            f"{samples:,} draws of {n:,} rows are {total:,} numbers, most of them of {name}. "
            f"{fewer} fewer samples, or groups=['posterior']."
        )


def _container() -> Callable[[dict[str, Any]], Any]:
    """Return the function that makes the installed ArviZ's object from its groups."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ArviZ announces its next version when it is imported
            import arviz
            import xarray
    except ImportError:
        raise ValueError("to_arviz needs the package arviz: pip install 'aevb[arviz]'.") from None
    if hasattr(arviz, "InferenceData"):  # before 1.0
        return lambda groups: arviz.InferenceData(**groups)
    return lambda groups: xarray.DataTree.from_dict(groups)
