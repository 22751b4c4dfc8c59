"""The numbers that stand for a distribution in an exported file."""

from __future__ import annotations

import torch.distributions as td
from torch import Tensor

from aevb.declare.conditionals import Conditional
from aevb.declare.distributions import Categories, MultivariateNormal


def moments(spec: Conditional, dist: td.Distribution) -> dict[str, Tensor]:
    """The parameters of a distribution, each [.., numbers].

    They are ``probs`` for a finite family: the probabilities of the classes, or for binary entries
    the probability of 1. Otherwise they are ``mean`` and ``sd``; for a full covariance also its
    Cholesky factor ``tril``, row by row. A family without these moments gives the parameters that
    its torch distribution lists in ``arg_constraints``.

    >>> import torch
    >>> from aevb import Normal
    >>> normal = td.Normal(torch.zeros(1), torch.ones(1))
    >>> sorted(moments(Normal(1), normal))
    ['mean', 'sd']
    """
    base = dist.base_dist if isinstance(dist, td.Independent) else dist
    if isinstance(base, Categories):
        return {"probs": base.probs}
    if spec.finite:
        return {"probs": dist.mean}
    try:
        found = {"mean": dist.mean, "sd": dist.stddev}
    except NotImplementedError:
        if not base.arg_constraints:
            raise
        return {name: getattr(base, name) for name in base.arg_constraints}
    if isinstance(base, MultivariateNormal):
        found["tril"] = base.scale_tril.flatten(-2)
    return found
