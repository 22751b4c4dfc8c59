"""Draw the README's figures from the results of a reproduction.

python docs/figures.py REPRODUCTION docs/figures
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from aevb.experiments.lab import Result, read
from aevb.pictures import grid


def phases(result: Result, path: Path) -> None:
    """Draw evidence, bound and gap over alternating E- and M-phases of factor analysis."""
    step, evidence, gap = (
        result.arrays[name]
        for name in ("validation evidence.step", "validation evidence", "validation gap")
    )
    length = result.numbers["length"]
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    above.plot(step, evidence, color="#2f6b4f", label="evidence log p(x)")
    above.plot(step, evidence - gap, color="#b5482f", label="ELBO")
    above.axhline(result.numbers["truth"], color="0.4", lw=0.8, ls="--", label="the true model")
    above.set_ylim(evidence.min() - 1, result.numbers["truth"] + 0.2)
    below.semilogy(step, gap, color="#b5482f")
    for axes, name in ((above, "nats an example"), (below, "gap KL(q ‖ p(z|x))")):
        axes.set_ylabel(name)
        axes.spines[["top", "right"]].set_visible(False)
        for start in range(0, int(step[-1]), 2 * length):
            axes.axvspan(start, start + length, color="0.93", lw=0)
    above.legend(frameon=False, ncols=3, loc="lower right")
    below.set_xlabel("step; shaded: E-steps (φ moves), white: M-steps (θ moves)")
    figure.savefig(path, dpi=110)


def main(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    results = source / "results"
    phases(read(results / "fa" / "alternate"), target / "phases.png")
    grid(
        np.clip(read(results / "gmvae" / "clustering").arrays["generated"], 0, 1),
        15,
        target / "clusters.png",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
