"""The bounds of a sequence model against its exact evidence: ELBO, importance weights, particles.

    python benchmarks/particle_bound.py

prints, for 4, 16 and 64 samples, the gap log p(x) − bound in nats per sequence with its standard
error. The model is linear and Gaussian, so log p(x) is exact. Its q reads the last draw and the
observation: it is p(z[t] | z[t-1], x[t]), with a scale that is 1.2 times as large.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

from aevb import Model, Normal, linear

SAMPLES = (4, 16, 64)


def random_walk() -> Model:
    """z[t] | z[t-1] ~ N(0.9 z, 0.7²), x[t] | z[t] ~ N((z, −z/2), 0.8²), and a q that filters."""
    torch.manual_seed(0)
    model = Model(
        {
            "z[0]": Normal(1),
            "z[t] | z[t-1]": Normal(1, net=linear(bias=False), scale=0.7),
            "x[t] | z[t]": Normal(2, net=linear(bias=False), scale=0.8),
        },
        {"z[t] | z[t-1], x[t]": Normal(net=linear())},
    ).double()
    # p(z[t] | z[t-1], x[t]): precision 1/0.49 + 1.25/0.64
    precision = 1 / 0.49 + 1.25 / 0.64
    scale = 1.2 * precision**-0.5
    with torch.no_grad():
        model.factors["p(z[t]|z[t-1])"].net.blocks.weights["z[t-1]"].fill_(0.9)
        model.factors["p(x[t]|z[t])"].net.blocks.weights["z[t]"].copy_(
            torch.tensor([[1.0], [-0.5]])
        )
        q = model.factors["q(z[t]|z[t-1], x[t])"].net.blocks
        for weight in q.weights.values():
            weight.zero_()
        q.weights["z[t-1]"][0] = 0.9 / 0.49 / precision
        q.weights["x[t]"][0] = torch.tensor([1.0, -0.5]).double() / 0.64 / precision
        q.bias.copy_(torch.tensor([0.0, math.log(math.expm1(scale))]))
    return model


def gap(model: Model, x: Tensor, exact: Tensor, repeats: int, **choices) -> tuple[float, float]:
    """The mean of log p(x) − bound and its standard error, over rows and repeats."""
    with torch.no_grad():
        found = torch.stack(
            [exact - model.elbo(x=x, seed=seed, **choices).value for seed in range(repeats)]
        )
    return float(found.mean()), float(found.mean(1).std() / repeats**0.5)


def rows(steps: int, sequences: int, repeats: int) -> list[tuple[str, list[tuple[float, float]]]]:
    """The lines of the table: a bound's name, and its gap for each number of samples."""
    model = random_walk()
    x = model.sample(sequences, steps=steps, seed=1)["x"]
    exact = model.log_evidence(x=x, method="exact").value
    bounds: dict[str, dict] = {
        "ELBO": {"bound": "elbo"},
        "importance weights (iwae)": {"bound": "iwae"},
        "particles, resample=1": {"bound": "particles", "resample": 1.0},
        "particles, resample=0.5": {"bound": "particles"},
    }
    return [
        (name, [gap(model, x, exact, repeats, samples=k, **choices) for k in SAMPLES])
        for name, choices in bounds.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Gaps of three bounds, in nats per sequence.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sequences", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=20)
    chosen = parser.parse_args(arguments)
    print(f"log p(x) − bound, nats per sequence of {chosen.steps} steps")
    print(f"{'':<28}" + "".join(f"{f'K = {k}':>18}" for k in SAMPLES))
    for name, cells in rows(chosen.steps, chosen.sequences, chosen.repeats):
        print(f"{name:<28}" + "".join(f"{mean:>10.3f} ± {error:<5.3f}" for mean, error in cells))


if __name__ == "__main__":
    main()
