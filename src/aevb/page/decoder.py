"""p as a program for the browser, and the same decoding in torch.

A page without a server decodes by itself: :func:`export` writes the networks, weights and families
of p as data, and ``web/src/decode.js`` runs them. :func:`decode` computes the same in torch, and
:func:`plane` the means over a plane of a latent space, for models that a page cannot run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, cast

import numpy as np
import torch
import torch.distributions as td
from torch import Tensor, nn
from torch.distributions import constraints

from aevb.declare.conditionals import Conditional, Factor
from aevb.declare.deterministic import Deterministic, Function
from aevb.declare.evaluation_order import schedule
from aevb.declare.families import FAMILIES
from aevb.declare.graph import Entry, Graph
from aevb.declare.networks import MLP, Blocks, Decoder, Named, deconv, mlp
from aevb.declare.own_networks import wrap
from aevb.estimate.ancestral import ancestral_draw
from aevb.estimate.declared_model import DeclaredModel
from aevb.estimate.program import Program
from aevb.page.packing import pack

MOST_WEIGHTS = 8_000_000
HALF_TOLERANCE = 1e-3  # the largest error of a mean, relative to max(1, |mean|), of half precision
MEASURED_ROWS = 256
PLANE_ROWS = 256  # points of a plane that are decoded at once

# The modules of a factor that a page can run. A subclass or a parametrised module has another type.
KNOWN_MODULES = (
    Factor, Function, MLP, Decoder, Blocks, Named,
    nn.ParameterDict, nn.ModuleList, nn.Linear, nn.ConvTranspose2d,
)  # fmt: skip
HOOKS = ("_forward_hooks", "_forward_pre_hooks")

Factors = Mapping[str, nn.Module]
Layer = dict[str, Any]


class NotForAPageError(ValueError):
    """p cannot run in a page, or cannot be decoded; the message says why."""


# Export -------------------------------------------------------------------------------------------


def export(
    model: DeclaredModel, *, categorical: Collection[str] = (), precision: str | None = None
) -> dict[str, Any]:
    """Write p as a program for the browser.

    The result is ``{"runs": True, "nodes": […], "given": {…}, "precision": "f2" or "f4", "error":
    …}`` with one node per variable of p, parents first, or ``{"runs": False, "why": sentence,
    "static": …, "parents": {…}}``: a model that is not static has time steps, and nothing can
    decode its points.

    Weight matrices are stored in half precision if that changes no mean of p by more than 1e-3,
    relative to max(1, |mean|), for 256 draws from p. Otherwise they are stored in single precision.
    ``precision`` ("f2" or "f4") overrides this choice. ``error`` is the measured change. Biases,
    roots and learned vectors always have single precision.

    ``categorical`` names the given variables whose values are one-hot rows.
    """
    try:
        _check(model)
    except NotForAPageError as reason:
        return {"runs": False, "why": str(reason)} | _described_graph(model.graph)
    errors = _rounding_errors(model)
    if precision is None:
        precision = "f2" if errors["f2"] < HALF_TOLERANCE else "f4"
    error = errors[precision]
    graph = model.graph
    nodes = [_given_node(graph, name) for name in given_of_p(graph)]
    nodes += [
        _node(graph, entry, model.factors[entry.id], precision)
        for entry in (graph.rule("p", name) for name in _order(graph))
    ]
    return {
        "runs": True,
        **_described_graph(graph),
        "nodes": nodes,
        "given": {
            name: {"shape": list(graph.shapes[name]), "categorical": name in categorical}
            for name in given_of_p(graph)
        },
        "precision": precision,
        "error": error if math.isfinite(error) else None,
    }


def _check(model: DeclaredModel) -> None:
    """Raise NotForAPageError if a page cannot run p."""
    _check_static(model.graph)
    weights = 0
    for name in model.graph.p:
        entry = model.graph.rule("p", name)
        factor = model.factors[entry.id]
        _check_entry(entry, factor)
        weights += sum(parameter.numel() for parameter in factor.parameters())
    if weights > MOST_WEIGHTS:
        raise NotForAPageError(
            f"p has {weights:,} weights, and a page holds at most {MOST_WEIGHTS:,}."
        )


def _described_graph(graph: Graph) -> dict[str, Any]:
    """Whether p has no time steps, and what each of its variables reads."""
    return {
        "static": _timed_of(graph) is None,
        "parents": {name: [ref.name for ref in graph.reads("p", name)] for name in graph.p},
    }


def _timed_of(graph: Graph) -> str | None:
    """The first variable of p that has time steps."""
    return next((name for name in (*given_of_p(graph), *graph.p) if graph.timed[name]), None)


def _check_static(graph: Graph) -> None:
    name = _timed_of(graph)
    if name is not None:
        raise NotForAPageError(
            f"{name}[t] is a sequence, and only a model without time steps can be decoded point by "
            f"point."
        )


def _check_entry(entry: Entry, factor: nn.Module) -> None:
    name, spec, net = entry.key.name, entry.spec, entry.spec.net
    family = type(spec).__name__
    if type(spec) is not Deterministic and FAMILIES.get(family) is not type(spec):
        raise NotForAPageError(
            f"{name}'s family {family} is a class of its own, and a page runs only the families "
            f"of aevb."
        )
    if net is not None and type(net) not in (mlp, deconv):
        shown = repr(net) if isinstance(net, wrap) else type(net).__name__
        raise NotForAPageError(
            f"{name}'s network {shown} cannot run in a page. Only linear, mlp and deconv can."
        )
    for module in factor.modules():
        if type(module) not in KNOWN_MODULES:
            raise NotForAPageError(
                f"{name}'s network contains a module {type(module).__name__}, which cannot run in "
                f"a page."
            )
        if any(getattr(module, hooks) for hooks in HOOKS):
            raise NotForAPageError(
                f"{name}'s network has a forward hook, which cannot run in a page."
            )


def given_of_p(graph: Graph) -> list[str]:
    """The given variables that p reads."""
    read = {ref.name for name in graph.p for ref in graph.reads("p", name)}
    return [name for name in graph.given if name in read]


def _order(graph: Graph) -> list[str]:
    """The variables of p, parents first."""
    return [name for stage in graph.generation for name in stage.nodes]


def _role(graph: Graph, name: str) -> str:
    if graph.is_deterministic(name):
        return "deterministic"
    return "observed" if name in graph.observed else "latent"


def _given_node(graph: Graph, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "role": "given",
        "shape": list(graph.shapes[name]),
        "family": None,
        "settings": {},
        "parents": [],
        "net": None,
        "heads": {},
        "vectors": {},
    }


def _node(graph: Graph, entry: Entry, factor: nn.Module, precision: str) -> dict[str, Any]:
    name, spec = entry.key.name, entry.spec
    assert isinstance(factor, Factor)
    return {
        "name": name,
        "role": _role(graph, name),
        "shape": list(graph.shapes[name]),
        "family": None if graph.is_deterministic(name) else type(spec).__name__,
        "settings": _settings(spec),
        "parents": [ref.name for ref in entry.key.parents],
        "net": _net(factor, [ref.label for ref in entry.key.parents], precision),
        "heads": dict(factor.sizes),
        "vectors": {key: _packed(vector, "f4") for key, vector in factor.vectors.items()},
    }


def _settings(spec: Conditional) -> dict[str, Any]:
    """The fields of a family without those of every conditional; an infinite number is None."""
    common = {field.name for field in fields(Conditional)}
    values = {
        field.name: getattr(spec, field.name) for field in fields(spec) if field.name not in common
    }
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def _net(factor: Factor, labels: list[str], precision: str) -> dict[str, Any]:
    if not labels:
        return {"kind": "root", "raw": _packed(factor.root, "f4")}
    net = factor.net
    if isinstance(net, MLP):
        layers = [_first(net.blocks, labels, precision)]
        layers += [_dense(layer, precision) for layer in net.hidden]
        layers += [] if net.heads is None else [_dense(net.heads, precision)]
        spec = net.spec
        return {
            "kind": "mlp",
            "activation": spec.activation,
            "log": spec.log,
            "layers": layers,
        }
    assert isinstance(net, Decoder)
    spec_of = cast(deconv, factor.spec.net)
    return {
        "kind": "deconv",
        "activation": spec_of.activation,
        "layers": [_first(net.blocks, labels, precision), _dense(net.grow, precision)],
        "seed": list(net.seed),
        "upsample": [
            {**_dense(layer, precision), "size": list(size)}
            for layer, size in zip(net.layers, net.sizes[1:], strict=True)
        ],
    }


def _first(blocks: Blocks, labels: list[str], precision: str) -> Layer:
    """The first layer as one matrix, whose inputs are the parents in the order of the key."""
    weight = torch.cat([blocks.weights[label] for label in labels], -1)
    bias = None if blocks.bias is None else _packed(blocks.bias, "f4")
    return {"weight": _packed(weight, precision), "bias": bias}


def _dense(layer: nn.Module, precision: str) -> Layer:
    weight, bias = cast(Tensor, layer.weight), cast(Tensor, layer.bias)
    return {"weight": _packed(weight, precision), "bias": _packed(bias, "f4")}


def _packed(tensor: Tensor, precision: str) -> dict[str, Any]:
    array = tensor.detach().cpu().double().numpy()
    with np.errstate(over="ignore"):  # a weight that overflows is not stored in half precision
        return pack(array, precision)


def _rounding_errors(model: DeclaredModel) -> dict[str, float]:
    """The largest change of a mean of p in half and in single precision.

    It is relative to max(1, |mean|), over 256 draws from p. The reference has the model's weights
    and double precision.
    """
    graph = model.graph
    with model._evaluating(0):
        rows = np.random.default_rng(0)
        given = {name: _given_rows(rows, graph, name) for name in given_of_p(graph)}
        program = _run(model, given, MEASURED_ROWS, draw=True)
        drawn = {name: program.values[name].cpu() for name in (*graph.stochastic, *given)}
        exact = _means(graph, _copies(model, torch.float64), drawn)
        return {
            precision: _difference(
                _means(graph, _copies(model, torch.float32, half=precision == "f2"), drawn), exact
            )
            for precision in ("f2", "f4")
        }


def _given_rows(rows: np.random.Generator, graph: Graph, name: str) -> np.ndarray:
    """Rows of a given variable: half of them one-hot, half standard normal."""
    size = graph.size(name)
    values = rows.standard_normal((MEASURED_ROWS, size))
    if size > 1:
        values[::2] = np.eye(size)[rows.integers(size, size=MEASURED_ROWS)][::2]
    return values


def _copies(model: DeclaredModel, dtype: torch.dtype, *, half: bool = False) -> Factors:
    """Copies of p's factors on the CPU, with the weight matrices rounded to half precision."""
    found = {}
    for name in model.graph.p:
        entry = model.graph.rule("p", name)
        factor = copy.deepcopy(model.factors[entry.id]).cpu().to(dtype)
        if half:
            for key, parameter in factor.named_parameters():
                if parameter.dim() > 1 and not key.startswith("vectors."):
                    parameter.data = parameter.data.half().to(dtype)
        found[entry.id] = factor
    return found


def _means(graph: Graph, factors: Factors, values: Mapping[str, Tensor]) -> list[Tensor]:
    """The means of all stochastic variables of p, given these values of their parents."""
    dtype = next(
        tensor.dtype
        for factor in factors.values()
        for tensor in (*factor.parameters(), *factor.buffers())
        if tensor.is_floating_point()
    )
    program = Program(graph, factors, {})
    program.values |= {name: value.to(dtype) for name, value in values.items()}
    functions = [name for name in graph.p if graph.is_deterministic(name)]

    def no_draw(name: str, entry: Entry, raw: Tensor, t: int | None) -> Tensor:
        raise AssertionError(f"{name} is known")

    program.run(schedule({name: graph.reads("p", name) for name in functions}, "p"), no_draw)
    return [_location(program.distribution("p", name)[1]) for name in graph.stochastic]


def _difference(means: list[Tensor], exact: list[Tensor]) -> float:
    worst = [
        ((mean.double() - right).abs() / right.abs().clamp_min(1.0)).max()
        for mean, right in zip(means, exact, strict=True)
    ]
    return float(torch.stack(worst).max())  # max propagates NaN


# Decoding in torch --------------------------------------------------------------------------------


def decode(
    model: DeclaredModel, values: Mapping[str, Any], *, draw: bool = False, seed: int | None = None
) -> dict[str, Any]:
    """Complete some values of a static model by p, as the page's ``forward`` does.

    ``values`` fixes latents, given variables or observed parents. A value is one row ([size] or
    the variable's shape) or n rows ([n, size] or [n, *shape]). Latents without a value get p's mean
    given their parents, or a draw with ``draw=True``; a finite latent gets its most probable value
    instead of its mean. Given variables without a value are zero.

    The result is ``{"latents": {name: array}, "observed": {name: {"mean", "sd", "draw"}}}``. Its
    arrays are [n, size], or [size] if every value is one row. ``draw`` is None without
    ``draw=True``, and ``sd`` is None if the family has no variance.
    """
    graph = model.graph
    _check_static(graph)
    for name in values:
        if name not in graph.stochastic and name not in graph.given:
            raise ValueError(
                f"{name!r} is not a variable that can be fixed; those are "
                f"{', '.join((*graph.stochastic, *graph.given))}."
            )
    rows = {name: _rows(graph, name, value) for name, value in values.items()}
    n = max((len(value) for value in rows.values()), default=1)
    single = all(_is_row(graph, name, value) for name, value in values.items())
    for name, value in rows.items():
        if len(value) not in (1, n):
            raise ValueError(
                f"{name} has {len(value)} rows, but another variable has {n}. Pass one row, or {n}."
            )
    with model._evaluating(seed):
        program = _run(model, rows, n, draw=draw)
        latents = {
            name: _array(program.values[name], n)
            for name in graph.stochastic
            if name not in graph.observed
        }
        observed = {
            name: _described(model, program, name, n, draw=draw, fixed=name in rows)
            for name in graph.observed
        }
    return {
        "latents": _first_rows(latents) if single else latents,
        "observed": {
            name: _first_rows(parts) if single else parts for name, parts in observed.items()
        },
    }


def plane(
    model: DeclaredModel,
    latent: str,
    origin: np.ndarray,
    axes: np.ndarray,
    steps: int,
    fixed: Mapping[str, Any],
) -> np.ndarray:
    """Means of the first observed variable over a plane of a latent's space.

    Row ``i * steps + j`` of the result, [steps * steps, size], belongs to the point ``origin + a[j]
    * axes[0] + a[i] * axes[1]`` with ``a = linspace(0, 1, steps)``: ``origin`` is a corner, and the
    axes are the sides. Other variables have the values in ``fixed``, one row each; :func:`decode`
    describes those without a value.
    """
    graph = model.graph
    origin, axes = np.asarray(origin, float), np.asarray(axes, float)
    if latent not in graph.latents or origin.shape != (graph.size(latent),):
        raise ValueError(
            f"plane needs a latent ({', '.join(graph.latents)}) and a point of its space, got "
            f"{latent!r} and an origin of shape {origin.shape}."
        )
    if axes.shape != (2, origin.size):
        raise ValueError(f"The axes have shape {axes.shape}; a plane needs {(2, origin.size)}.")
    a = np.linspace(0, 1, steps)
    points = (origin + a[None, :, None] * axes[0] + a[:, None, None] * axes[1]).reshape(
        -1, origin.size
    )
    observed = graph.observed[0]
    parts = [
        decode(model, {**fixed, latent: points[start : start + PLANE_ROWS]})
        for start in range(0, len(points), PLANE_ROWS)
    ]
    return np.concatenate([part["observed"][observed]["mean"] for part in parts])


def _rows(graph: Graph, name: str, value: Any) -> np.ndarray:
    """Values of a variable as [n, size]."""
    array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value, float)
    size = graph.size(name)
    if array.size % size or not array.size:
        raise ValueError(
            f"{name} has shape {graph.shapes[name]}, so a row has {size} numbers; got an array of "
            f"shape {array.shape}."
        )
    return array.reshape(-1, size)


def _is_row(graph: Graph, name: str, value: Any) -> bool:
    return np.shape(value) in ((), (graph.size(name),), graph.shapes[name])


def _first_rows(arrays: Mapping[str, np.ndarray | None]) -> dict[str, np.ndarray | None]:
    return {name: None if array is None else array[0] for name, array in arrays.items()}


def _run(model: DeclaredModel, known: Mapping[str, np.ndarray], n: int, *, draw: bool) -> Program:
    """Compute all variables of a static p that are not known."""
    graph, like = model.graph, model._parameter()
    program = Program(graph, model.factors, {})
    for name in given_of_p(graph):
        program.values[name] = like.new_zeros(1, n, graph.size(name))
    for name, value in known.items():
        tensor = torch.as_tensor(value).to(like).unsqueeze(0)
        program.values[name] = tensor.expand(1, n, tensor.shape[-1])
    free = {name: graph.reads("p", name) for name in graph.p if name not in known}
    program.run(schedule(free, "p"), ancestral_draw(model, n, 1) if draw else _central(model))
    return program


def _central(model: DeclaredModel) -> Callable[[str, Entry, Tensor, int | None], Tensor]:
    """Return the function by which a program takes a variable's mean instead of a draw.

    A finite variable gets its most probable value, because p's networks never saw another one.
    """

    def central(name: str, entry: Entry, raw: Tensor, t: int | None) -> Tensor:
        factor = model.factors[entry.id]
        assert isinstance(factor, Factor)
        mean = _mean(name, factor.spec, _location, factor.distribution(raw))
        if factor.spec.categorical:
            return torch.zeros_like(mean).scatter_(-1, mean.argmax(-1, keepdim=True), 1.0)
        return (mean > 0.5).to(mean.dtype) if factor.spec.support is constraints.boolean else mean

    return central


def _location(dist: td.Distribution) -> Tensor:
    """The mean, or the centre of Student's t, whose mean is undefined for df ≤ 1."""
    return dist.loc if isinstance(dist, td.StudentT) else dist.mean


def _mean(
    name: str,
    spec: Conditional,
    mean: Callable[[td.Distribution], Tensor],
    dist: td.Distribution,
) -> Tensor:
    try:
        return mean(dist)
    except NotImplementedError:
        raise NotForAPageError(
            f"{name}'s family {type(spec).__name__} has no mean, so it cannot be decoded."
        ) from None


def _described(
    model: DeclaredModel, program: Program, name: str, n: int, *, draw: bool, fixed: bool
) -> dict[str, np.ndarray | None]:
    entry = model.graph.rule("p", name)
    _, dist = program.distribution("p", name)
    mean = _mean(name, entry.spec, lambda dist: dist.mean, dist)
    try:
        sd = _array(dist.stddev, n)
    except NotImplementedError:
        sd = None
    drawn = None
    if draw:
        again = ancestral_draw(model, n, 1)
        drawn = again(name, entry, program.raw(entry), None) if fixed else program.values[name]
    return {
        "mean": _array(mean, n),
        "sd": sd,
        "draw": None if drawn is None else _array(drawn, n),
    }


def _array(value: Tensor, n: int) -> np.ndarray:
    """A value [1, n or 1, d] of a program as an array [n, d]."""
    return value.expand(1, n, value.shape[-1])[0].float().cpu().numpy().copy()
