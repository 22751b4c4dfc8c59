"""Ordinary models of a table, declared from the families and sizes of its variables.

``specs`` maps each observed variable to the name of its family and its size, in the order of the
declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aevb.declare.conditionals import Conditional
from aevb.declare.families import FAMILIES, Exact, MultivariateNormal, Normal, OneHot
from aevb.declare.networks import Network, linear, mlp
from aevb.derive.plan import LIMIT
from aevb.model import Model

Specs = Mapping[str, tuple[str, int]]
COUNTS = ("Poisson", "NegativeBinomial")
PART = "part"  # the class of a joined mixture, whose values are no clusters


def mixture(
    specs: Specs, clusters: int, *, covariance: str = "diagonal", latent: str = "cluster"
) -> Model:
    """A mixture: a cluster, and all variables given the cluster; float64, exact."""
    if covariance not in ("diagonal", "full"):
        raise ValueError(f'covariance is "diagonal" or "full", got {covariance!r}.')
    if covariance == "full" and "x" not in specs:
        raise ValueError(
            'covariance="full" is that of real and positive columns, and this table has none. '
            'Use covariance="diagonal".'
        )
    _check_size("clusters", clusters)
    if clusters > LIMIT:
        raise ValueError(
            f"A mixture of a table has at most {LIMIT} clusters, for which EM and log p are exact, "
            f"got {clusters:,}."
        )
    p: dict[str, Conditional] = {latent: OneHot(clusters, learned=True)}
    for name, (family, size) in specs.items():
        full = covariance == "full" and name == "x"
        p[f"{name} | {latent}"] = (MultivariateNormal if full else FAMILIES[family])(size)
    return Model(p=p, q={f"{latent} | {', '.join(specs)}": Exact()}).double()


def factors(specs: Specs, size: int) -> Model:
    """Factor analysis; exact and in float64 if all columns have densities."""
    _check_size("factors", size)
    p: dict[str, Conditional] = {"z": Normal(size)}
    if list(specs) == ["x"]:
        p["x | z"] = Normal(specs["x"][1], net=linear(), scale="learned")
        q = MultivariateNormal(net=linear(init="zeros"), covariance="shared")
        return Model(p=p, q={"z | x": q}).double()
    return _amortised(specs, p | _decoders(specs, linear()), (64, 64))


def vae(specs: Specs, codes: int, *, hidden: tuple[int, ...]) -> Model:
    """A variational auto-encoder with one decoder per variable."""
    _check_size("codes", codes)
    p: dict[str, Conditional] = {"z": Normal(codes)}
    return _amortised(specs, p | _decoders(specs, mlp(*hidden)), hidden)


def gmvae(specs: Specs, clusters: int, codes: int, *, hidden: tuple[int, ...]) -> Model:
    """A VAE with a mixture of Gaussians as prior of the codes."""
    _check_size("clusters", clusters)
    _check_size("codes", codes)
    p: dict[str, Conditional] = {
        "cluster": OneHot(clusters, learned=True),
        "z | cluster": Normal(codes, net=linear()),
    }
    return _amortised(specs, p | _decoders(specs, mlp(*hidden)), hidden, cluster=True)


def _decoders(specs: Specs, net: Network) -> dict[str, Conditional]:
    found: dict[str, Conditional] = {}
    for name, (family, size) in specs.items():
        spec = FAMILIES[family](size, net=net)
        # One learned scale per column: a scale from the network can collapse onto single rows.
        found[f"{name} | z"] = replace(spec, scale="learned") if isinstance(spec, Normal) else spec
    return found


def _amortised(
    specs: Specs,
    p: dict[str, Conditional],
    hidden: tuple[int, ...],
    *,
    cluster: bool = False,
) -> Model:
    """Add q: networks that read all columns, and a mask of the missing ones."""
    counted = any(family in COUNTS for family, _ in specs.values())
    net = mlp(*hidden, log=counted and bool(hidden))
    q: dict[str, Conditional] = {f"z | {', '.join(specs)}": Normal(net=net)}
    if cluster:  # the cluster depends on the data through the codes alone, and is summed out
        q["cluster | z"] = Exact()
    return Model(p=p, q=q, missing="mask")


def _check_size(what: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"The number of {what} is a positive whole number, got {value!r}.")
