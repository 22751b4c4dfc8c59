"""Findings on classes: dead and duplicate ones, the certainty of q, the match with labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aevb.data.datasets import clustering_accuracy
from aevb.diagnostics.causes import Dependence, Reach
from aevb.diagnostics.finding import Finding
from aevb.diagnostics.latents import collapsed, misled, reached
from aevb.diagnostics.measure import with_values
from aevb.estimate.batch import Batch
from aevb.estimate.keys import real_steps
from aevb.model import Model
from aevb.posterior import Posterior
from aevb.predictive.replicate import complete
from aevb.tables.declarations import PART

TELLS = 0.05  # fraction of log C; with less information per row, the class is not inferred
DEAD = 0.1  # fraction of an even share; a class with less is dead
SAME = 0.1  # nats; two classes are duplicates if p's other factors differ by less


def class_probabilities(model: Model, batches: list[Batch], name: str, seed: int) -> Tensor:
    """Return q(y | x) for every row, or for every real step of sequences, [rows, C]."""
    found = []
    for i, batch in enumerate(batches):
        probs = Posterior(model, batch, seed=seed + i)[name].probs  # type: ignore[attr-defined]
        real = real_steps(batch, timed=model.graph.timed[name])
        found.append(probs.reshape(-1, probs.shape[-1]) if real is None else probs[real[..., 0].T])
    return torch.cat(found).double().cpu()


def information(probs: Tensor) -> tuple[float, float]:
    """Return mutual information H(E q) − E H(q) and conditional entropy E H(q) in nats.

    The argument is an array of class probabilities [N, C].
    """
    left = float(-(probs * probs.clamp_min(1e-30).log()).sum(-1).mean())
    mean = probs.mean(0)
    return float(-(mean * mean.clamp_min(1e-30).log()).sum()) - left, left


def differences(model: Model, batch: Batch, name: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return Σ log p of all other variables under each class, [N, C], and the drawn class, [N].

    The other latents are drawn from q together with the class.
    """
    with model._evaluating(seed):
        whole = complete(model, batch, method="q")
        count, like = model.graph.size(name), whole[name]
        under = [
            with_values(model, whole, {name: torch.eye(count).to(like)[c].expand_as(like)}, name)
            for c in range(count)
        ]
        return torch.stack(under, -1).double().cpu(), like[0].argmax(-1).cpu()


def same_classes(under: Tensor, drawn: Tensor) -> list[tuple[int, int, float]]:
    """Return pairs of classes that p's other factors do not distinguish.

    A pair is (a, b, mean |difference| in nats). Each pair is compared on the rows that have one of
    the two classes.
    """
    found = []
    classes = drawn.unique().tolist()
    for i, a in enumerate(classes):
        for b in classes[i + 1 :]:
            here = (drawn == a) | (drawn == b)
            distance = float((under[here, a] - under[here, b]).abs().mean())
            if distance < SAME:
                found.append((a, b, distance))
    return found


def judge_classes(
    model: Model,
    batches: list[Batch],
    name: str,
    *,
    kl: float,
    reach: Reach | None,
    relies: Dependence,
    how: Mapping[str, str],
    labels: np.ndarray | None,
    seed: int,
) -> list[Finding]:
    """Return the findings about a latent that is a class."""
    graph, probs = model.graph, class_probabilities(model, batches, name, seed)
    rows, count = probs.shape
    told, left = information(probs)
    usage = probs.mean(0)
    figures: dict[str, Any] = {
        "kl": kl,
        "information": told,
        "conditional entropy": left,
        "usage": usage.tolist(),
    }
    figures |= reached(reach) | asdict(relies)
    unit = "step" if graph.timed[name] else "row"
    if told < TELLS * math.log(count):
        return [
            collapsed(
                model,
                name,
                f"a {unit} tells {told:.3f} of at most {math.log(count):.2f} nats about it",
                figures,
                reach,
                relies,
                how,
            )
        ]
    used = usage >= DEAD / count
    findings = misled(name, relies, figures)
    text = (
        f"{name}: {int(used.sum())} of {count} classes are used; a {unit} tells {told:.2f} of at "
        f"most "
    )
    text += f"{math.log(count):.2f} nats about its class and leaves {left:.2f} open."
    findings.append(Finding("ok", "classes", name, text, figures))
    if name == PART:  # several mixtures of the same rows: their parts resemble each other
        return findings
    if not bool(used.all()) and rows >= 10 * count:
        dead = (~used).nonzero()[:, 0].tolist()
        text = (
            f"{len(dead)} of the {count} classes of {name} are dead ({_some(dead)}): each has "
            f"less than {DEAD:.0%} of an even share of the rows."
        )
        remedy = (
            f"Use fewer classes ({name} of size {int(used.sum())}), or start again with another "
            f"seed or a slow rise of the KL (kl_warmup=…)."
        )
        findings.append(
            Finding(
                "warning",
                "dead classes",
                name,
                text,
                {"dead": dead, "usage": usage.tolist()},
                remedy,
            )
        )
    if left > 0.5 * math.log(count):
        text = (
            f"q is undecided about {name}: {left:.2f} of {math.log(count):.2f} nats are left open "
            f"in a {unit}."
        )
        findings.append(Finding("note", "undecided", name, text, {"conditional entropy": left}))
    if not graph.timed[name]:  # in a sequence the neighbouring steps also determine the class
        parts = [differences(model, batch, name, seed + i) for i, batch in enumerate(batches)]
        same = same_classes(
            torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        )
        if same:
            pairs = ", ".join(
                f"{a} and {b} ({distance:.2f} nats)" for a, b, distance in same[:5]
            ) + (", …" if len(same) > 5 else "")
            text = (
                f"{len(same)} pair{'s' * (len(same) > 1)} of classes of {name} "
                f"{'are' if len(same) > 1 else 'is'} the same one twice: "
            )
            text += f"p's other factors differ by less than {SAME} nats between {pairs}."
            findings.append(
                Finding(
                    "warning",
                    "same classes",
                    name,
                    text,
                    {"pairs": same},
                    f"Use fewer classes, or another seed for {name}.",
                )
            )
        if labels is not None:
            findings += _against(name, probs.argmax(-1).numpy(), labels, count)
    return findings


def _against(name: str, predicted: np.ndarray, labels: np.ndarray, count: int) -> list[Finding]:
    from sklearn.metrics import normalized_mutual_info_score  # type: ignore[import-untyped]

    known = labels >= 0
    if len(labels) != len(predicted) or not known.any():
        return []
    predicted, labels = predicted[known], labels[known].astype(int)
    accuracy = clustering_accuracy(predicted, labels)
    shared = float(normalized_mutual_info_score(labels, predicted))
    figures = {
        "accuracy": accuracy,
        "nmi": shared,
        "used": len(np.unique(predicted)),
        "labels": len(np.unique(labels)),
    }
    text = (
        f"{name} against the labels: {accuracy:.1%} of {len(labels)} rows match under the best "
        f"matching of {figures['used']} classes "
    )
    text += (
        f"that rows have with {figures['labels']} labels; NMI {shared:.3f}. These are the labelled "
        f"rows given here: if the training saw their labels, this is no test of the model."
    )
    return [Finding("ok", "labels", name, text, figures)]


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (", …" if len(numbers) > 10 else "")
