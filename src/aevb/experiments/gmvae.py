"""The Gaussian-mixture VAE (5.5): clusters without labels, all estimators, and model M2."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from aevb import zoo
from aevb.clustering import deskew, graph_partition, principal
from aevb.data.builtin import Images, at_hand
from aevb.data.datasets import clustering_accuracy
from aevb.data.preparation import Affine
from aevb.data.sources import open_source
from aevb.experiments import evidence
from aevb.experiments.lab import Lab, Result, check, curve, declared
from aevb.experiments.vae import epochs
from aevb.model import Model
from aevb.training.evaluation import evaluate
from aevb.training.run import Run

TUTORIAL: dict[str, Any] = {"lr": 1e-3, "decay": "constant", "batch": 100}
OURS: dict[str, Any] = {"lr": 1e-3, "decay": "cosine", "batch": 100}
RECIPE = (
    "The training images are centred and sheared upright, and a graph joins each with its ten "
    "nearest neighbours. The graph is cut into ten parts with the smallest normalised cut. These "
    "parts are the initial classes. The model has a smaller z. It first trains with these classes "
    "as labels ({warm} epochs, classify=10), and then with y unknown ({free} epochs). The "
    "objective has one more term: an image that is rotated, sheared, scaled and shifted a little "
    "should keep its class (agree=10). No label is used."
)
WAYS: dict[str, dict[str, Any]] = {
    "enumerated": {},
    "Gumbel-softmax, KL in closed form": {"how": {"y": "gumbel"}},
    "Gumbel-softmax, relaxed densities": {"how": {"y": "relaxed"}},
    "straight-through": {"how": {"y": "straight-through"}},
    "score function, leave-one-out": {"how": {"y": "score"}, "samples": 2},
}


def build(lab: Lab, seed: int, *, model: str = "gmvae") -> Model:
    torch.manual_seed(seed)
    x = lab.images()[0].pixels[0].size
    sizes: dict[str, Any] = (
        {"x": x} if lab.tutorial_sizes else {"x": x, "z": 8, "hidden": (128, 128)}
    )
    return zoo.zoo[model](**sizes)


def clusters(model: Model, rows: dict[str, Any]) -> np.ndarray:
    """Return q(y|x), one row per image."""
    found = []
    with torch.no_grad():
        for start in range(0, len(rows["x"]), 2000):
            found.append(
                model.posterior(x=rows["x"][start : start + 2000], seed=0)["y"].probs.cpu().numpy()  # type: ignore[attr-defined]
            )
    return np.concatenate(found)


def entropy(probs: np.ndarray) -> float:
    """Return the mean conditional entropy of the clusters."""
    return float(-(probs * np.log(np.maximum(probs, 1e-12))).sum(-1).mean())


def _follow(test: dict[str, Any], labels: np.ndarray) -> Callable[[int, Model], dict[str, float]]:
    """Return a hook that records accuracy and conditional entropy after every validation."""

    def look(step: int, model: Model) -> dict[str, float]:
        probs = clusters(model, test)
        return {
            "accuracy": clustering_accuracy(probs.argmax(-1), labels),
            "entropy": entropy(probs),
        }

    return look


def _followed(run: Run) -> dict[str, np.ndarray]:
    return {
        "accuracy": run.history["accuracy"],
        "entropy": run.history["entropy"],
        "step": run.history["accuracy.step"],
    }


def _seed(lab: Lab, seed: int) -> Result:
    """Train with the tutorial's settings from one seed (Figures 10 and 11)."""
    count = epochs(lab, {"mnist": 78, "digits": 80}, {"mnist": 2, "digits": 8})
    model = build(lab, seed)
    train, test, _, labels = lab.rows(model)
    run = lab.train(
        f"gmvae/tutorial/{seed}",
        model,
        train,
        test,
        epochs=count,
        seed=seed,
        after=_follow(test, labels),
        **TUTORIAL,
    )
    found = _followed(run)
    numbers: dict[str, Any] = {
        "epochs": count,
        "settings": TUTORIAL,
        "elbo": float(run.history["validation elbo"][-1]),
    }
    numbers |= {name: float(found[name][-1]) for name in ("accuracy", "entropy")} | declared(model)
    arrays = found | curve(run, "validation elbo")
    return Result(numbers, arrays | {"generated": generated(lab, model, test, labels)})


def seeds(lab: Lab) -> int:
    return 2 if lab.quick else 6 if lab.tutorial_sizes else 4


def _together(lab: Lab, name: str) -> Result:
    """Merge the seeds of a task into one result, with the first seed's images."""
    found = [lab.result(f"{name}/{seed}") for seed in range(seeds(lab))]
    numbers: dict[str, Any] = {**found[0].numbers}
    numbers |= {key: [one.numbers[key] for one in found] for key in ("accuracy", "entropy", "elbo")}
    numbers["seconds"] = sum(one.numbers["seconds"] for one in found)
    if name == "gmvae/clustering":
        mean, least = float(np.mean(numbers["accuracy"])), 0.95 if lab.data == "mnist" else 0.8
        what = f"clustering accuracy, mean of {len(found)} seeds"
        numbers["checks"] = (
            [check(what, mean, least=least, source="tutorial: one run, 0.833")]
            if not lab.quick
            else []
        )
    arrays = {
        f"{seed} {key}": value
        for seed, one in enumerate(found)
        for key, value in one.arrays.items()
        if key != "generated"
    }
    return Result(numbers, arrays | {"generated": found[0].arrays["generated"]})


def _start(lab: Lab, images: Images, seed: int) -> tuple[np.ndarray, float, float]:
    """Return the classes from the graph of neighbours, their normalised cut, and the seconds.

    They are written to disk, so that a task that was stopped continues with the same classes.
    """
    kept = lab.out / "unfinished" / f"gmvae/clustering/{seed}" / "start.npz"
    if not kept.is_file():
        began = time.perf_counter()
        upright = deskew(
            torch.as_tensor(
                images.pixels / (images.levels - 1), dtype=torch.float32, device=lab.device
            )
        )
        found, cut = graph_partition(principal(upright.flatten(1), 60), 10, seed=seed)
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.savez(
            kept.with_name("writing.npz"),
            classes=found.cpu().numpy(),
            cut=cut,
            seconds=time.perf_counter() - began,
        )
        kept.with_name("writing.npz").rename(kept)
    with np.load(kept) as found_before:
        return found_before["classes"], float(found_before["cut"]), float(found_before["seconds"])


def _clustering(lab: Lab, seed: int) -> Result:
    """Train with our recipe for clustering (``RECIPE``)."""
    torch.manual_seed(seed)
    images, _ = lab.images()
    x = images.pixels[0].size
    model = zoo.gmvae(x, 10) if lab.tutorial_sizes else zoo.gmvae(x, 8, hidden=(128, 128))
    train, test, truth, labels = lab.rows(model)
    classes, cut, started = _start(lab, images, seed)
    warm, free = (
        epochs(lab, {"mnist": 10, "digits": 40}, {"mnist": 1, "digits": 5}),
        epochs(lab, {"mnist": 30, "digits": 80}, {"mnist": 1, "digits": 5}),
    )
    settings: dict[str, Any] = {
        "batch": 250 if lab.tutorial_sizes else 100,
        "lr": 1e-3,
        "seed": seed,
        "agree": 10.0,
    }
    height, width = images.pixels.shape[1:]
    distort = {"x": Affine((height, width))}
    name = f"gmvae/clustering/{seed}"
    lab.train(
        f"{name}/warm",
        model,
        train | {"y": classes},
        test,
        epochs=warm,
        classify=10.0,
        decay="constant",
        distort=distort,
        **settings,
    )
    # The first steps of a new optimiser are large. Without a warm-up they would undo the start.
    settings["warmup"] = 2 * len(classes) // settings["batch"]
    run = lab.train(
        f"{name}/free",
        model,
        train,
        test,
        epochs=free,
        after=_follow(test, labels),
        distort=distort,
        **settings,
    )
    found = _followed(run)
    numbers: dict[str, Any] = {
        "recipe": RECIPE.format(warm=warm, free=free),
        "elbo": float(run.history["validation elbo"][-1]),
        "epochs": warm + free,
    }
    numbers |= {
        "start": clustering_accuracy(classes, truth),
        "cut": cut,
        "seconds of the start": started,
        "settings": settings,
    }
    numbers |= {key: float(found[key][-1]) for key in ("accuracy", "entropy")} | declared(model)
    arrays = found | curve(run, "validation elbo")
    return Result(numbers, arrays | {"generated": generated(lab, model, test, labels)})


def generated(
    lab: Lab, model: Model, test: dict[str, Any], labels: np.ndarray, *, name: str | None = None
) -> np.ndarray:
    """Generate 15 images of every cluster (Figure 11).

    The clusters are in the order of the digits that they match best.
    """
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    side = lab.images(name)[0].pixels.shape[1:]
    table = np.zeros((10, 10))
    np.add.at(table, (labels, clusters(model, test).argmax(-1)), 1)
    _, order = linear_sum_assignment(-table)  # the cluster of each digit
    return np.concatenate(
        [
            model.sample(15, y=int(c), mean=True, seed=int(c))["x"].cpu().numpy().reshape(15, *side)
            for c in order
        ]
    )


def _ours(lab: Lab) -> Result:
    """Train the tutorial's model with a falling learning rate: a better bound in fewer epochs."""
    count = epochs(lab, {"mnist": 30, "digits": 80}, {"mnist": 2, "digits": 8})
    model = build(lab, 0)
    train, test, _, labels = lab.rows(model)
    run = lab.train(
        "gmvae/ours", model, train, test, epochs=count, seed=0, after=_follow(test, labels), **OURS
    )
    value = float(run.history["validation elbo"][-1])
    numbers: dict[str, Any] = {
        "epochs": count,
        "settings": OURS,
        "elbo": value,
        "accuracy": float(run.history["accuracy"][-1]),
    }
    if lab.data == "mnist" and not lab.quick:
        numbers["checks"] = [
            check(
                f"test ELBO, including −log 10, {count} epochs",
                value,
                least=-77.5,
                source="tutorial's run: −83.1",
            )
        ]
    return Result(numbers, curve(run, "validation elbo"))


def _estimators(lab: Lab) -> Result:
    """Train with each way of taking the expectation over y, and measure every way.

    The trained models are compared by the enumerated bound. The measurement needs no training.
    """
    count = epochs(lab, {"mnist": 5, "digits": 30}, {"mnist": 1, "digits": 4})
    found: dict[str, Any] = {}
    result = Result({"epochs": count, "ways": found})
    for name, choices in WAYS.items():
        model = build(lab, 0)
        train, test, _, labels = lab.rows(model)
        began = time.perf_counter()
        lab.train(
            f"gmvae/estimators/{name}", model, train, test, epochs=count, seed=0, **OURS, **choices
        )
        seconds = time.perf_counter() - began
        exact = evaluate(model, open_source(model.graph, test, model._parameter()), seed=1)
        probs = clusters(model, test)
        found[name] = {
            "elbo": exact["elbo"],
            "kl(y)": exact["kl(y)"],
            "accuracy": clustering_accuracy(probs.argmax(-1), labels),
            "seconds": seconds,
        }
        found[name]["estimator"] = str(model.explain(**choices))
        if name == "enumerated":
            evidence.merged(result, "laboratory", evidence.measured(lab, model, train, "y"))
    return result


def _m2(lab: Lab) -> Result:
    """Train M2 without labels (5.5.1).

    Class and style are independent, so nothing makes y represent the class.
    """
    count = epochs(lab, {"mnist": 20, "digits": 80}, {"mnist": 1, "digits": 4})
    model = build(lab, 0, model="m2")
    train, test, _, labels = lab.rows(model)
    lab.train("gmvae/m2", model, train, test, epochs=count, seed=0, **OURS)
    exact = evaluate(model, open_source(model.graph, test, model._parameter()), seed=1)
    probs = clusters(model, test)
    return Result(
        {
            "epochs": count,
            "elbo": exact["elbo"],
            "kl(y)": exact["kl(y)"],
            "entropy": entropy(probs),
            "accuracy": clustering_accuracy(probs.argmax(-1), labels),
            **declared(model),
        }
    )


def _fashion(lab: Lab) -> Result:
    """Train on Fashion-MNIST, with one seed."""
    count = epochs(lab, {"mnist": 30, "digits": 30}, {"mnist": 1, "digits": 1})
    torch.manual_seed(0)
    model = zoo.gmvae()
    train, test, _, labels = lab.rows(model, name="fashion")
    run = lab.train(
        "gmvae/fashion",
        model,
        train,
        test,
        epochs=count,
        seed=0,
        after=_follow(test, labels),
        **OURS,
    )
    found = _followed(run)
    numbers: dict[str, Any] = {
        "epochs": count,
        "settings": OURS,
        "elbo": [float(run.history["validation elbo"][-1])],
    }
    numbers |= {key: [float(found[key][-1])] for key in ("accuracy", "entropy")}
    arrays = {f"0 {key}": values for key, values in found.items()}
    arrays |= {f"0 {key}": value for key, value in curve(run, "validation elbo").items()}
    return Result(
        numbers, arrays | {"generated": generated(lab, model, test, labels, name="fashion")}
    )


def tasks(lab: Lab) -> dict[str, Callable[[Lab], Result]]:
    return {
        **{f"gmvae/tutorial/{seed}": partial(_seed, seed=seed) for seed in range(seeds(lab))},
        **{
            f"gmvae/clustering/{seed}": partial(_clustering, seed=seed)
            for seed in range(seeds(lab))
        },
        "gmvae/ours": _ours,
        "gmvae/estimators": _estimators,
        "gmvae/m2": _m2,
        **({"gmvae/fashion": _fashion} if lab.tutorial_sizes and at_hand("fashion") else {}),
    }


SUMMARIES: dict[str, Callable[[Lab], Result]] = {
    name: partial(_together, name=name) for name in ("gmvae/tutorial", "gmvae/clustering")
}
