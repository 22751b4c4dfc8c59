"""The variational RNN (5.6): images row by row, filtering, smoothing, and detached samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from aevb import zoo
from aevb.data.sources import open_source
from aevb.experiments import evidence
from aevb.experiments.lab import Lab, Result, check, curve, declared
from aevb.experiments.vae import epochs
from aevb.model import Model
from aevb.training.evaluation import evaluate

TUTORIAL: dict[str, Any] = {"lr": 1e-3, "decay": "constant", "batch": 100}
OURS: dict[str, Any] = {"lr": 2e-3, "decay": "cosine", "batch": 100, "clip": 100.0}
DOCTOR = {"filtering": "gradient through the samples", "detached": "samples detached"}
EXPECTED: dict[str, dict[str, Any]] = {
    "filtering": {"most": 0, "source": "the bound needs the model's one latent"},
    "detached": {"least": 1, "source": "only the KL sends a gradient to q"},
}


def build(lab: Lab, posterior: str, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    x = lab.images()[0].pixels.shape[2]
    sizes: dict[str, Any] = (
        {"x": x} if lab.tutorial_sizes else {"x": x, "h": 64, "hidden": (64,), "layers": 1}
    )
    return zoo.vrnn(posterior=posterior, **sizes)


def _train(
    lab: Lab, name: str, settings: dict[str, Any], *, look: bool = False, **choices: Any
) -> Result:
    full = {"mnist": 20, "digits": 60} if name == "ours" else {"mnist": 7, "digits": 30}
    count = epochs(lab, full, {"mnist": 1, "digits": 3})
    model = build(lab, "smoothing" if name == "smoothing" else "filtering")
    train, test, _, _ = lab.rows(model)
    run = lab.train(f"vrnn/{name}", model, train, test, epochs=count, seed=0, **settings, **choices)
    found = evaluate(model, open_source(model.graph, test, model._parameter()), seed=1)
    numbers: dict[str, Any] = {
        "elbo": found["elbo"],
        "kl": found["kl(z)"],
        "terms": found,
        "epochs": count,
        "settings": settings,
    }
    numbers |= declared(model, **choices)
    arrays = curve(run, "validation elbo", "validation kl(z)")
    if look:
        arrays["generated"] = (
            model.sample(30, steps=np.shape(test["x"])[1], mean=True, seed=0)["x"].cpu().numpy()
        )
    checks = []
    if name in DOCTOR:
        numbers["doctor"] = evidence.examined(lab, model, test, run)
        if not lab.quick:
            checks.append(
                check(
                    f"number of latents that the diagnosis calls dead, {DOCTOR[name]}",
                    evidence.dead(numbers["doctor"]),
                    **EXPECTED[name],
                )
            )
    if name == "filtering":
        numbers["evidence"] = evidence.filtered(lab, model, test)
    on_mnist = lab.data == "mnist" and not lab.quick
    if on_mnist and name in ("filtering", "ours"):
        least = {"filtering": -65.5, "ours": -61.5}[name]
        checks.append(
            check(
                f"test ELBO, {name}, {count} epochs",
                found["elbo"],
                least=least,
                source="tutorial's run: −78.5",
            )
        )
    if name == "detached":
        checks.append(
            check(
                "KL of the latents with detached samples",
                found["kl(z)"],
                most=0.01 if on_mnist else 0.1,
                source="a dead latent has a KL of 0",
            )
        )
    return Result(numbers | {"checks": checks}, arrays)


TASKS: dict[str, Callable[[Lab], Result]] = {
    "vrnn/filtering": lambda lab: _train(lab, "filtering", TUTORIAL, look=True),
    "vrnn/detached": lambda lab: _train(lab, "detached", TUTORIAL, how={"z": "detached"}),
    "vrnn/smoothing": lambda lab: _train(lab, "smoothing", TUTORIAL),
    "vrnn/ours": lambda lab: _train(lab, "ours", OURS, look=True),
}
