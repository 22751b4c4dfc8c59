"""Models by name, each a short declaration: ``zoo.gmvae()`` builds one.

``zoo["gmvae"]()`` builds it by its name, and ``list(zoo)`` is all names:

>>> from aevb import zoo
>>> zoo["fa"] is zoo.fa, "vae" in zoo, len(zoo)
(True, True, 16)

The arguments are sizes and variants. ``likelihood`` is the family of x, as a name ("Normal",
"Poisson", …) or as a conditional (``Normal(scale=0.1)``). A conditional without a network gets the
network of the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, cast

from aevb.model import Model
from aevb.runtime.suggestions import did_you_mean
from aevb.zoo.deep_sequences import dmm, kvae, srnn, volatility
from aevb.zoo.markov import hmm, switching
from aevb.zoo.structural import ar, local_level, local_trend, seasonal
from aevb.zoo.tutorial import cvae, fa, gmvae, m2, vae, vrnn

__all__ = [
    "ar",
    "cvae",
    "dmm",
    "fa",
    "gmvae",
    "hmm",
    "kvae",
    "local_level",
    "local_trend",
    "m2",
    "recipes",
    "seasonal",
    "srnn",
    "switching",
    "vae",
    "volatility",
    "vrnn",
    "zoo",
]


_MODELS: dict[str, Callable[..., Model]] = {
    build.__name__: build
    for build in (
        fa,
        vae,
        cvae,
        gmvae,
        m2,
        vrnn,
        local_level,
        local_trend,
        seasonal,
        ar,
        hmm,
        switching,
        volatility,
        dmm,
        srnn,
        kvae,
    )
}


class Zoo(ModuleType, Mapping[str, Callable[..., Model]]):
    """This module, also as a mapping from names to the functions that build the models."""

    __hash__ = ModuleType.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __getitem__(self, name: str) -> Callable[..., Model]:
        if name not in _MODELS:
            raise KeyError(
                f"There is no model {name!r} in the zoo. Its models are {', '.join(_MODELS)}."
                f"{did_you_mean(name, _MODELS)}"
            )
        return _MODELS[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_MODELS)

    def __len__(self) -> int:
        return len(_MODELS)


# ``from aevb import zoo`` and ``from aevb.zoo import zoo`` are the same object.
sys.modules[__name__].__class__ = Zoo
zoo = cast(Zoo, sys.modules[__name__])

# Settings of fit on the bound that suit a model better than the general defaults. (Models with a
# usual schedule have it themselves: Model.usual_schedule.)
recipes: dict[str, dict[str, Any]] = {
    "fa": {"lr": 0.1, "batch": 32},
}
