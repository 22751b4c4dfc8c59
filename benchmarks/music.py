"""Train sequence models of polyphonic music with each bound, and judge them by particles.

    python benchmarks/music.py --collections jsb-chorales --device cuda --json music.json

A step of a piece is 88 keys, each on or off; the split is that of the papers. A model is trained
with the ELBO, the importance-weighted bound and the bound of particles, each with the same number
of optimiser steps. Training pieces are cut into parts of at most ``--part`` steps;
``--transpose 6`` adds them in the keys up to six semitones away, which the published numbers did
not do. The weights of the best validation are judged on the whole test pieces: log p(x) by a
particle filter with q as the proposal, in nats per step, with the standard error of that estimate.
"bound" is the bound that was trained, on the same pieces.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import where

from aevb import GRU, LSTM, Bernoulli, Deterministic, Model, Normal, Particles, fit, mlp
from aevb.data.music import COLLECTIONS, KEYS, Pieces, polyphonic

BOUNDS = ("elbo", "iwae", "particles")
# By collection: units of the recurrence, entries of the latent, dropout, steps of the optimiser.
SIZES = {
    "jsb-chorales": {"h": 64, "z": 32, "dropout": 0.3, "steps": 3000},
    "nottingham": {"h": 128, "z": 64, "dropout": 0.2, "steps": 6000},
    "piano-midi": {"h": 64, "z": 32, "dropout": 0.3, "steps": 3000},
    "musedata": {"h": 128, "z": 64, "dropout": 0.2, "steps": 6000},
}


def vrnn(h: int, z: int, dropout: float) -> Model:
    """A variational RNN whose q filters."""
    net = mlp(2 * h, dropout=dropout)
    return Model(
        p={
            "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(h),
            "z[t] | h[t]": Normal(z, net=net),
            "x[t] | h[t], z[t]": Bernoulli(KEYS, net=net),
        },
        q={"z[t] | h[t], x[t]": Normal(net=net)},
    )


def srnn(h: int, z: int, dropout: float) -> Model:
    """A stochastic RNN: the recurrence reads the data alone, the latents are a Markov chain."""
    net = mlp(2 * h, dropout=dropout)
    return Model(
        p={
            "u[t] | x[t-1]": Deterministic(2 * h, net=mlp(2 * h, dropout=dropout)),
            "h[t] | h[t-1], u[t]": LSTM(h),
            "z[t] | z[t-1], h[t]": Normal(z, net=net),
            "x[t] | z[t], h[t]": Bernoulli(KEYS, net=net),
        },
        q={
            "a[t] | a[t+1], h[t], x[t]": GRU(h),
            "z[t] | z[t-1], a[t]": Normal(net=net),
        },
    )


MODELS = {"vrnn": vrnn, "srnn": srnn}


def transposed(pieces: Pieces, most: int) -> Pieces:
    """Add every piece in the keys up to ``most`` semitones above and below, as far as it fits."""
    x, lengths = [], []
    for shift in range(-most, most + 1):
        moved = np.roll(pieces.x, shift, axis=2)
        lost = moved[..., :shift] if shift > 0 else moved[..., KEYS + shift :]
        fits = ~lost.any(axis=(1, 2)) if shift else np.ones(len(moved), bool)
        x.append(moved[fits])
        lengths.append(pieces.lengths[fits])
    return Pieces(np.concatenate(x), np.concatenate(lengths))


def parts(pieces: Pieces, longest: int) -> dict[str, Any]:
    """Cut the pieces into parts of at most ``longest`` steps."""
    found = [
        row[start : min(length, start + longest)]
        for row, length in zip(pieces.x, pieces.lengths, strict=True)
        for start in range(0, length, longest)
        if min(length, start + longest) - start > 1
    ]
    lengths = np.array([len(one) for one in found])
    x = np.zeros((len(found), lengths.max(), KEYS), np.float32)
    for row, one in zip(x, found, strict=True):
        row[: len(one)] = one
    return {"x": x, "lengths": lengths}


def judge(
    model: Model, pieces: Pieces, particles: int, repeats: int, device: str, rows: int = 64
) -> dict[str, float]:
    """Estimate log p of whole pieces, in nats per step, with its standard error.

    Pieces of similar lengths share a batch.
    """
    order = np.argsort(pieces.lengths)
    total = variance = 0.0
    worst = math.inf
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        lengths = pieces.lengths[chosen]
        x = torch.as_tensor(pieces.x[chosen, : lengths.max()], device=device)
        found = model.log_evidence(
            x=x.float(),
            lengths=torch.as_tensor(lengths),
            method=Particles(repeats=repeats),
            samples=particles,
            seed=0,
        )
        total += float(found.value.double().sum())
        variance += float(found.stderr.double().square().sum())
        worst = min(worst, float(found.diagnostics["ess"].min()))
    steps = int(pieces.lengths.sum())
    return {"log p": total / steps, "stderr": math.sqrt(variance) / steps, "least ess": worst}


def run(collection: str, kind: str, bound: str, options: argparse.Namespace) -> dict[str, Any]:
    size = dict(SIZES[collection])
    steps = options.steps or size.pop("steps")
    size.pop("steps", None)
    train, validation, test = polyphonic(collection)
    train = transposed(train, options.transpose)
    held_out = parts(validation, options.part)
    per_part = held_out["lengths"].mean()
    torch.manual_seed(options.seed)
    size |= {
        key: value for key in ("h", "z", "dropout") if (value := getattr(options, key)) is not None
    }
    model = MODELS[kind](**size).to(options.device)
    began = time.perf_counter()
    found = fit(
        model,
        parts(train, options.part),
        validation=held_out,
        steps=steps,
        batch=options.batch,
        lr=options.lr,
        clip=5.0,
        bound=bound,
        samples=1 if bound == "elbo" else options.samples,
        validate_every=max(1, steps // 20),
        kl_warmup=steps // 5 if options.kl_warmup and bound == "elbo" else 0,
        patience=1000,  # keep the best weights
        seed=options.seed,
        progress=False,
    )
    trained = time.perf_counter() - began
    best = found.best
    judged = judge(model, test, options.particles, options.repeats, options.device)
    result = {
        "collection": collection,
        "model": kind,
        "bound": bound,
        "samples": 1 if bound == "elbo" else options.samples,
        "steps": steps,
        "batch": options.batch,
        "lr": options.lr,
        "part": options.part,
        "transposed by": options.transpose,
        "best step": None if best is None else best[0],
        # Nats per step of the parts, under the bound that was trained.
        "best validation": None if best is None else best[1] / per_part,
        "training minutes": trained / 60,
        "minutes": (time.perf_counter() - began) / 60,
        "particles": options.particles,
        "repeats": options.repeats,
        "seed": options.seed,
        "on": where(options.device),
        **size,
        **judged,
    }
    print(
        f"{collection:13} {kind:5} {bound:9} K={result['samples']:<3} test log p "
        f"{judged['log p']:8.4f} ± {judged['stderr']:.4f} nats per step; best validation "
        f"{result['best validation']:.4f} at step {result['best step']} of {steps}; "
        f"{trained / 60:.1f} min of training, "
        f"{result['minutes']:.1f} min in all",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--collections", nargs="+", default=COLLECTIONS, choices=COLLECTIONS)
    parser.add_argument("--models", nargs="+", default=["vrnn"], choices=MODELS)
    parser.add_argument("--bounds", nargs="+", default=BOUNDS, choices=BOUNDS)
    parser.add_argument("--samples", type=int, default=4, help="K of iwae and of particles.")
    parser.add_argument("--steps", type=int, help="Steps of the optimiser.")
    parser.add_argument("--part", type=int, default=128, help="Longest part in training.")
    parser.add_argument("--transpose", type=int, default=0, help="Most semitones to transpose.")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--kl-warmup", action="store_true", help="Warm up the KL of the ELBO.")
    parser.add_argument("--h", type=int, help="Units of the recurrence.")
    parser.add_argument("--z", type=int, help="Entries of the latent.")
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--particles", type=int, default=1000, help="Particles of the judge.")
    parser.add_argument("--repeats", type=int, default=8, help="Filters of the judge.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    for collection in options.collections:
        for kind in options.models:
            for bound in options.bounds:
                found.append(run(collection, kind, bound, options))
                if options.json:
                    options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
