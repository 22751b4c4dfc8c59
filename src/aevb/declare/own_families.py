"""Check a family of the user once, when a model is built: the shape of log_prob, and rsample."""

from __future__ import annotations

import torch
import torch.distributions as td

from aevb.declare.conditionals import Conditional, Factor

ROWS = 3


def check_own_family(factor: Factor) -> None:
    """Raise ValueError if the distribution of a user's family breaks what its class declares.

    An error inside the user's code is not reported here: the first call that needs it reports it.
    """
    spec = factor.spec
    if type(spec).__module__.startswith("aevb."):
        return
    try:
        with torch.no_grad():
            dist = factor.distribution(torch.zeros(1, 1, ROWS, sum(factor.sizes.values())))
    except Exception:
        return
    if not isinstance(dist, td.Distribution):
        return
    form = type(dist).__name__
    if spec.pathwise and spec.noise(1) is None and not dist.has_rsample:
        raise ValueError(
            f"{type(spec).__name__} has pathwise = True, but its distribution {form} has no "
            f"rsample(), so a sample has no gradient. Add a method rsample() and "
            f"has_rsample = True to {form}, or leave out pathwise = True."
        )
    dist._validate_args = False  # the values need not lie in the support
    value = torch.full((1, 1, ROWS, factor.d), spec.fill)
    own = type(spec).log_prob is not Conditional.log_prob
    try:
        with torch.no_grad():
            found = (spec.log_prob(dist, value) if own else dist.log_prob(value)).shape
    except Exception:
        return
    rows, entries = [ROWS], [ROWS, factor.d]
    expected = rows if own or dist.event_shape else entries
    if list(found) != [1, 1, *expected]:
        shape = list(found[2:]) if found[:2] == (1, 1) else list(found)
        where, fix = f"{type(spec).__name__}.log_prob", "Sum over the entries (.sum(-1))."
        if not own:
            where = f"the log_prob of {type(spec).__name__}'s distribution {form}"
            fix = (
                "The library sums over the entries of the event: return one number per row."
                if dist.event_shape
                else "Return one number per entry, which the library sums; or, for a distribution "
                "over whole vectors, give it that event: td.Independent(…, 1), or the event_shape "
                "of td.Distribution.__init__."
            )
        raise ValueError(
            f"{where} returns the shape {shape} for {ROWS} rows of {factor.d} entries; it must "
            f"be {expected}. {fix}"
        )
