"""aevb: declare p and q, and the bound is derived.

>>> from aevb import Model, Normal, Bernoulli, mlp
>>> vae = Model(
...     p={"z": Normal(20), "x | z": Bernoulli(784, net=mlp(500, 500))},
...     q={"z | x": Normal(net=mlp(500, 500))},
... )
>>> print(vae.explain())                                                # doctest: +ELLIPSIS
log p(x) ≥ E of this estimator (ELBO):
<BLANKLINE>
  log p(x|zˢ) − KL(q(z|x) ‖ p(z))
...

Public names are imported lazily, at their first use, so that ``aevb --help`` does not wait for
torch.
"""

from importlib import import_module as _import
from importlib import util as _util

from aevb.version import __version__

_FROM = {  # keep in step with __init__.pyi, which type checkers read
    "arviz": ("to_arviz",),
    "comparison": ("Comparison", "compare"),
    "declare.conditionals": ("Conditional",),
    "declare.deterministic": ("GRU", "LSTM", "Deterministic"),
    "diagnostics": ("Diagnosis", "diagnose"),
    "data.sequences": ("Sequences", "sequences"),
    "derive.divergences": ("register_kl",),
    "estimate.bound": ("Bound",),
    "estimate.family_check": ("FamilyCheck", "check_family"),
    "evidence": ("AIS", "Evidence", "Particles", "bidirectional"),
    "evidence.amortisation": ("Gap",),
    "declare.families": (
        "Bernoulli",
        "Beta",
        "ContinuousBernoulli",
        "Exact",
        "Laplace",
        "Mixture",
        "MultivariateNormal",
        "NegativeBinomial",
        "Normal",
        "OneHot",
        "Poisson",
        "StudentT",
    ),
    "forecasting": ("Beliefs", "Forecast"),
    "laboratory": ("compare_estimators",),
    "loading": ("from_declaration", "load"),
    "model": ("Model",),
    "declare.networks": (
        "Network",
        "conv",
        "deconv",
        "linear",
        "mlp",
        "table",
    ),
    "declare.deep_networks": ("attention", "residual"),
    "declare.own_networks": ("wrap",),
    "declare.switching": ("switching",),
    "posterior": ("Posterior",),
    "predictive": ("PredictiveCheck", "predictive_check"),
    "declare.registry": ("register",),
    "tables": ("Schema", "TableModel", "load_table"),
    "training.fit": ("fit",),
    "training.run": ("Run", "load_run"),
    "training.schedules": ("alternate", "em", "joint", "mle"),
    "training.settings": ("Settings",),
    "zoo": ("zoo",),
}
_HOME = {name: module for module, names in _FROM.items() for name in names}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> object:
    """Import a public name or a top-level module of this package at its first use."""
    if name in _HOME:
        found = globals()[name] = getattr(_import(f"aevb.{_HOME[name]}"), name)
        return found
    if (
        name.isidentifier()
        and not name.startswith("_")
        and _util.find_spec(f"aevb.{name}") is not None
    ):
        return _import(f"aevb.{name}")
    from aevb.runtime.suggestions import did_you_mean

    near = "" if name.startswith("_") else did_you_mean(name, __all__)
    raise AttributeError(f"module 'aevb' has no attribute {name!r}.{near}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
