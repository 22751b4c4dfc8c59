"""Models of a table that ``aevb train table.csv`` knows, and their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aevb.cli.model_argument import value_of
from aevb.runtime.suggestions import did_you_mean

DENSITY = "density"  # the default: several mixtures, joined
# Arguments of --set for each model, with their defaults. None means that BIC chooses.
ARGUMENTS: dict[str, dict[str, Any]] = {
    DENSITY: {},
    "mixture": {"components": None, "covariance": None},
    "factors": {"latent": None},
    "vae": {"latent": 4, "hidden": (64, 64)},
    "gmvae": {"components": 5, "latent": 4, "hidden": (64, 64)},
}


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
    model = model or DENSITY
    if model not in ARGUMENTS:
        raise ValueError(
            f"Unknown --model {model}. Choose one of {', '.join(ARGUMENTS)}."
            f"{did_you_mean(model, ARGUMENTS)}"
        )
    known = ARGUMENTS[model]
    for name in given:
        if name not in known:
            raise ValueError(
                f"--model {model} has no argument {name!r}. Its arguments are {', '.join(known)}."
                f"{did_you_mean(name, known)}"
                if known
                else f"--model {model} takes no --set. Leave it out, or choose another model."
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
