"""Missing steps of JSB chorales: a VRNN trained on pieces with gaps, against filling the gaps.

    AEVB_DATA=… python benchmarks/music_gaps.py                       # small: minutes on two cores
    AEVB_DATA=… python benchmarks/music_gaps.py --full --device cuda --json gaps.json

30 % of the steps of every piece are removed at random. Three models of one kind are trained with
the bound of particles: on the pieces with gaps (missing steps are drawn from p), on the same pieces
with the last value carried into the gaps, and on the complete pieces, which is a reference that the
others do not have. The training pieces are transposed by up to --transpose semitones.

Printed is the log probability of the removed steps of the test pieces, in nats per removed step:

- "given the past": each removed step given the kept steps before it. In the lines "past filled",
  the model reads the carried value in place of earlier gaps;
- "given the rest": all removed steps of a piece jointly, given all kept ones,
  log p(all) − log p(kept).

Evidence is estimated by a particle filter. "Carried value": each key keeps its last known state, up
to flips whose two probabilities are fitted to the known neighbours of the training pieces.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from music import transposed
from timing import where

from aevb import LSTM, Bernoulli, Model, Normal, fit, mlp
from aevb.data.music import Pieces, polyphonic
from aevb.evidence import Particles

SHARE = 0.3


class Gappy(NamedTuple):
    """Pieces [N, T, 88], their lengths [N], and which steps are removed [N, T]."""

    x: np.ndarray
    lengths: np.ndarray
    removed: np.ndarray

    def with_gaps(self) -> np.ndarray:
        return np.where(self.removed[..., None], np.nan, self.x)

    def carried(self) -> np.ndarray:
        """The pieces with the last kept step in place of every gap; silence before the first."""
        found = np.where(self.removed[..., None], 0.0, self.x)
        for t in range(1, found.shape[1]):
            gone = self.removed[:, t]
            found[gone, t] = found[gone, t - 1]
        return found


def remove(pieces: Pieces, seed: int) -> Gappy:
    """Remove steps at random, each with probability ``SHARE``."""
    gone = np.random.default_rng(seed).random(pieces.x.shape[:2]) < SHARE
    gone &= np.arange(pieces.x.shape[1]) < pieces.lengths[:, None]
    return Gappy(pieces.x.astype(np.float64), pieces.lengths, gone)


# Carrying the last value --------------------------------------------------------------------------


class Flips:
    """Independent two-state chains, one per key: P(on at t | state at t−1), shared by all keys."""

    def __init__(self, pieces: Gappy) -> None:
        real = np.arange(pieces.x.shape[1]) < pieces.lengths[:, None]
        known = real & ~pieces.removed
        pairs = known[:, 1:] & known[:, :-1]
        before, after = pieces.x[:, :-1][pairs], pieces.x[:, 1:][pairs]
        on = [
            (after[before == state].sum() + 0.5) / ((before == state).sum() + 1) for state in (0, 1)
        ]
        self.step = np.array([[1 - on[0], on[0]], [1 - on[1], on[1]]])
        self.start = np.clip(pieces.x[known].mean(0), 1e-3, 1 - 1e-3)  # of each key

    def _ahead(self, x: np.ndarray, t: int, last: int | None) -> np.ndarray:
        """P(on) of each key at step t, given the state at the ``last`` known step."""
        if last is None:
            return self.start
        return np.linalg.matrix_power(self.step, t - last)[x[last].astype(int), 1]

    def score(self, pieces: Gappy, *, rest: bool) -> float:
        """Nats per removed step, given the past or given the rest."""
        total = 0.0
        for x, length, gone in zip(pieces.x, pieces.lengths, pieces.removed, strict=True):
            if rest:
                total += self._log_p(x[:length], np.zeros(length, bool))
                total -= self._log_p(x[:length], gone[:length])
                continue
            last = None
            for t in range(length):
                if gone[t]:
                    total += _bernoulli(x[t], self._ahead(x, t, last))
                else:
                    last = t
        return total / pieces.removed.sum()

    def _log_p(self, x: np.ndarray, gone: np.ndarray) -> float:
        total, last = 0.0, None
        for t in np.flatnonzero(~gone):
            total += _bernoulli(x[t], self._ahead(x, t, last))
            last = t
        return total


def _bernoulli(x: np.ndarray, on: np.ndarray) -> float:
    return float(np.log(np.where(x > 0, on, 1 - on)).sum())


# Models -------------------------------------------------------------------------------------------


def vrnn(hidden: int, latent: int) -> Model:
    return Model(
        p={
            "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(hidden),
            "z[t] | h[t]": Normal(latent, net=mlp(hidden)),
            "x[t] | h[t], z[t]": Bernoulli(88, net=mlp(hidden)),
        },
        q={"z[t] | h[t], x[t]": Normal(net=mlp(hidden))},
        missing="mask",
    )


def score_given_rest(model: Model, pieces: Gappy, particles: int) -> tuple[float, float]:
    """log p(all) − log p(kept) in nats per removed step, and its standard error."""
    settings = {"method": Particles(repeats=4), "samples": particles, "lengths": pieces.lengths}
    whole = model.log_evidence(x=pieces.x, seed=1, **settings)
    kept = model.log_evidence(x=pieces.with_gaps(), seed=2, **settings)
    count = pieces.removed.sum()
    error = (whole.stderr.square().sum() + kept.stderr.square().sum()).sqrt()
    return float((whole.value - kept.value).double().sum()) / count, float(error) / count


def score_given_past(
    model: Model, pieces: Gappy, past: np.ndarray, particles: int
) -> tuple[float, float]:
    """log p(x[t] | past[0…t-1]) of the removed steps, in nats per step, and its standard error.

    ``past`` is what the model reads: pieces with gaps, or with filled gaps. A first step, which has
    no past, counts too.
    """
    rows, steps = np.nonzero(pieces.removed)
    order = np.argsort(steps)  # rows of similar length together
    total, variance = 0.0, 0.0
    for part in np.array_split(order, max(1, len(order) // 200)):
        n, t = rows[part], steps[part]
        longest = t.max() + 1
        x = past[n, :longest].copy()
        x[np.arange(len(n)), t] = pieces.x[n, t]
        x[np.arange(longest) > t[:, None]] = 0.0
        settings = {"method": Particles(repeats=4), "samples": particles}
        after = model.log_evidence(x=x, lengths=t + 1, seed=1, **settings)
        total += float(after.value.double().sum())
        variance += float(after.stderr.double().square().sum())
        some = t > 0
        if some.any():
            before = model.log_evidence(
                x=x[some][:, : longest - 1], lengths=t[some], seed=2, **settings
            )
            total -= float(before.value.double().sum())
            variance += float(before.stderr.double().square().sum())
    return total / len(order), variance**0.5 / len(order)


def segments(x: np.ndarray, lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut pieces into segments of at most ``size`` steps: shorter loops, and more rows a batch."""
    parts, counts = [], []
    for piece, length in zip(x, lengths, strict=True):
        for start in range(0, length, size):
            part = piece[start : min(start + size, length)]
            parts.append(np.pad(part, ((0, size - len(part)), (0, 0))))
            counts.append(len(part))
    return np.stack(parts), np.array(counts)


def trained(
    chosen: argparse.Namespace, name: str, train: np.ndarray, valid: np.ndarray, lengths: list
) -> Model:
    """Train a model on one kind of pieces, and return its best weights by validation."""
    torch.manual_seed(chosen.seed)
    model = vrnn(chosen.hidden, chosen.latent).to(chosen.device)
    x, counts = segments(train, lengths[0], chosen.segment)
    other, others = segments(valid, lengths[1], chosen.segment)
    began = time.perf_counter()
    run = fit(
        model,
        {"x": x, "lengths": counts},
        validation={"x": other, "lengths": others},
        steps=chosen.steps,
        batch=chosen.batch,
        lr=chosen.lr,
        clip=5.0,
        bound="particles",
        samples=chosen.samples,
        validate_every=max(1, chosen.steps // 20),
        patience=1000,  # keep the best weights
        seed=chosen.seed,
        progress=False,
    )
    minutes = (time.perf_counter() - began) / 60
    best = run.best
    print(f"{name}: best step {best and best[0]} of {chosen.steps}, {minutes:.1f} min", flush=True)
    return model


def line(name: str, *scores: tuple[float, float] | None) -> str:
    cells = ["" if one is None else f"{one[0]:.3f} ± {one[1]:.3f}" for one in scores]
    return f"{name:<34}" + "".join(f"{cell:>20}" for cell in cells)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Nats per removed step of JSB chorales.")
    parser.add_argument("--full", action="store_true", help="a larger model, trained for longer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help='one of the lines, such as "trained on gaps"')
    parser.add_argument("--json", type=Path, help="write the scores and settings to this file")
    small = {"hidden": 64, "latent": 8, "steps": 600, "batch": 32, "segment": 25, "samples": 4}
    small |= {"particles": 16, "pieces": 10, "transpose": 0}
    full = {"hidden": 128, "latent": 32, "steps": 4000, "batch": 32, "segment": 64, "samples": 16}
    full |= {"particles": 64, "pieces": 77, "transpose": 6}
    for name in small:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--lr", type=float, default=1e-3)
    chosen = parser.parse_args(arguments)
    for name, value in (full if chosen.full else small).items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, value)

    complete = list(polyphonic("jsb-chorales"))
    complete[0] = transposed(complete[0], chosen.transpose)
    train, valid, test = (remove(pieces, seed=chosen.seed + i) for i, pieces in enumerate(complete))
    test = Gappy(*(part[: chosen.pieces] for part in test))
    print(
        f"JSB chorales, {len(test.x)} test pieces, {test.removed.sum()} of {test.lengths.sum()} "
        f"steps removed; {vars(chosen)}"
    )
    print(f"{'nats per removed step':<34}{'given the past':>20}{'given the rest':>20}")
    flips, found = Flips(train), []
    settings = {key: value for key, value in vars(chosen).items() if key not in ("json", "only")}
    settings["on"] = where(chosen.device)

    def scored(name: str, *scores: tuple[float, float] | None, **more: Any) -> None:
        print(line(name, *scores), flush=True)
        found.append({"name": name, "past": scores[0], "rest": scores[1], **more})
        if chosen.json:
            chosen.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    scored(
        "carried value", (flips.score(test, rest=False), 0.0), (flips.score(test, rest=True), 0.0)
    )
    lengths = [train.lengths, valid.lengths]
    kinds = {
        "trained on gaps": (train.with_gaps(), valid.with_gaps()),
        "trained on filled gaps": (train.carried(), valid.carried()),
        "trained on complete pieces": (train.x, valid.x),
    }
    for name, (x, other) in kinds.items():
        if chosen.only and name != chosen.only:
            continue
        model = trained(chosen, name, x, other, lengths)
        past = score_given_past(model, test, test.with_gaps(), chosen.particles)
        rest = score_given_rest(model, test, chosen.particles)
        scored(name, past, rest, **settings)
        if name != "trained on gaps":
            past = score_given_past(model, test, test.carried(), chosen.particles)
            scored(f"{name}, past filled", past, None, **settings)


if __name__ == "__main__":
    main()
