"""Models by name, each a short declaration: ``zoo["gmvae"]()`` builds one.

The arguments are sizes and variants. ``likelihood`` is the family of x, as a name ("Normal",
"Poisson", …) or as a conditional (``Normal(scale=0.1)``). A conditional without a network gets the
network of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class Zoo(dict[str, Callable[..., Model]]):
    """The functions that build the models, by name."""

    def __missing__(self, name: str) -> Callable[..., Model]:
        raise KeyError(
            f"There is no model {name!r} in the zoo. Its models are {', '.join(self)}."
            f"{did_you_mean(name, self)}"
        )


zoo: dict[str, Callable[..., Model]] = Zoo(
    {
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
)

# Settings of fit on the bound that suit a model better than the general defaults. (Models with a
# usual schedule have it themselves: Model.usual_schedule.)
recipes: dict[str, dict[str, Any]] = {
    "fa": {"lr": 0.1, "batch": 32},
}
