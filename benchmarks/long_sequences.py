"""Measure how the cost of training grows with the length of the sequences.

python benchmarks/long_sequences.py
python benchmarks/long_sequences.py --device cuda --json docs/figures/long-cuda.json
python benchmarks/long_sequences.py --models vrnn --steps 32 128 --ways eager
python benchmarks/long_sequences.py --quick

Every measurement on a CPU is a process of its own, which calls `fit` and times its steps. On a GPU,
where torch counts the memory, one process measures all lengths of a model and a way. A process that
takes longer than `--limit` seconds is stopped, and longer sequences of the same kind are skipped.

The columns: `first`, the seconds until the first step is done, from the call of fit on; `compile`,
the seconds of the step that records and compiles, less those of a later step; `step`, the median
seconds of a later step; `memory`, the most memory that the process needed beyond that before fit
(on a GPU, the most that torch allocated there); `slope`, the exponent of T in `step` since the row
above: 1 is proportional to T.

The ways: `eager`, steps run as they are written; `recorded`, as in long runs without compile=True;
`compiled`, compile=True; `window`, eager steps of fit(window=128); `checkpoint`, eager steps of
fit(checkpoint_time=128); `hand`, the same model and step written in torch with its own LSTM (cuDNN
on a GPU), for the model `encoder` alone, whose recurrences read data.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from timing import where

LENGTHS = (32, 128, 512, 2048, 8192)
WAYS = ("eager", "recorded", "compiled", "window", "checkpoint", "hand")
MODELS = ("vrnn", "dmm", "lgssm", "encoder")
BATCH, PIECE = 16, 128


def model_of(name: str, h: int = 64, x: int = 8, z: int = 4) -> Any:
    from aevb import GRU, LSTM, Model, Normal, linear, mlp

    if name == "vrnn":  # everything runs in the loop over time
        return Model(
            p={
                "h[t] | h[t-1], x[t-1], z[t-1]": LSTM(h),
                "z[t] | h[t]": Normal(z, net=mlp(h)),
                "x[t] | h[t], z[t]": Normal(x, net=mlp(h)),
            },
            q={"z[t] | h[t], x[t]": Normal(net=mlp(h))},
        )
    if name == "dmm":  # a recurrence over known inputs, then a loop that draws
        return Model(
            p={"z[t] | z[t-1]": Normal(z, net=mlp(h)), "x[t] | z[t]": Normal(x, net=mlp(h))},
            q={"b[t] | b[t+1], x[t]": GRU(h), "z[t] | z[t-1], b[t]": Normal(net=mlp(h))},
        )
    if name == "encoder":  # only a recurrence over known inputs
        return Model(
            p={
                "h[t] | h[t-1], x[t-1]": LSTM(h),
                "z[t] | h[t]": Normal(z),
                "x[t] | h[t], z[t]": Normal(x),
            },
            q={"b[t] | b[t+1], x[t]": LSTM(h), "z[t] | h[t], b[t]": Normal()},
        )
    return Model(  # a linear-Gaussian state-space model
        p={
            "z[t] | z[t-1]": Normal(z, net=linear(), scale="learned"),
            "x[t] | z[t]": Normal(x, net=linear(), scale="learned"),
        },
        q={"z[t] | z[t-1], x[t]": Normal(net=linear())},
    )


def measure(name: str, way: str, length: int, device: str, count: int) -> dict[str, float]:
    """Train a model for a few steps in this process, and return the figures."""
    import torch

    import aevb
    from aevb.training import gradient_steps, graph_steps, step_queue
    from aevb.training.gradient_steps import GradientSteps

    if way in ("recorded", "compiled", "window"):  # record as soon as possible
        gradient_steps.RECORD_AFTER, gradient_steps.RECORD_FOR = 2, 0
    torch.manual_seed(0)
    model = model_of(name).to(device)
    x = torch.randn(BATCH, length, 8, generator=torch.Generator().manual_seed(0)).cumsum(1) / 8
    settings: dict[str, Any] = {"compile": way == "compiled"}
    if way == "window":
        settings["window"] = PIECE
    if way == "checkpoint":
        settings["checkpoint_time"] = PIECE
    steps = count + (2 if way in ("eager", "window", "checkpoint") else 6)
    if device == "cuda" and way != "eager":
        steps = count + 30  # a graph of ten steps is captured after the warm-up
    ends: list[float] = []
    aevb.fit(
        model, {"x": x[:2, :4]}, steps=1, batch=2, progress=False, compile=False, log_every=1
    )  # imports and libraries
    advance = GradientSteps.advance

    def timed(self: Any, *args: Any, **kwargs: Any) -> None:
        advance(self, *args, **kwargs)
        if device == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    if way == "eager" and device == "cuda":
        step_queue.WARM_UP = graph_steps.WARM_UP = 10**9  # never capture
        gradient_steps.RECORD_FOR = 10**9
    watch = Watch(device)
    if device == "cuda" and way != "eager":
        rows = aevb.fit(
            model, {"x": x}, steps=steps, batch=BATCH, progress=False, log_every=1, **settings
        ).rows
        ends = [row["seconds"] for row in rows if "elbo" in row]
        began = 0.0
    else:
        GradientSteps.advance = timed  # type: ignore[method-assign]
        began = time.perf_counter()
        try:
            aevb.fit(model, {"x": x}, steps=steps, batch=BATCH, progress=False, **settings)
        finally:
            GradientSteps.advance = advance  # type: ignore[method-assign]
    each = [b - a for a, b in zip([began, *ends], ends, strict=False)]
    later = statistics.median(each[-count:])
    slowest = max(each[1:-count], default=later)
    return {
        "first": each[0],
        "compile": max(0.0, slowest - later) if way in ("recorded", "compiled") else 0.0,
        "step": later,
        "memory": watch.peak() / 2**20,
    }


def encoder_by_hand() -> Any:
    """The model `encoder` as one writes it in torch: a module that returns its negative ELBO."""
    import torch
    from torch import nn
    from torch.distributions import Normal, kl_divergence
    from torch.nn.functional import pad, softplus

    class Gaussian(nn.Linear):
        """A Normal whose mean and scale are linear in the parents."""

        def __init__(self, parents: int, size: int) -> None:
            super().__init__(parents, 2 * size)

        def forward(self, *parents: torch.Tensor) -> Any:
            mean, scale = super().forward(torch.cat(parents, -1)).chunk(2, -1)
            return Normal(mean, softplus(scale) + 1e-5, validate_args=False)

    class Encoder(nn.Module):
        def __init__(self, h: int = 64, x: int = 8, z: int = 4) -> None:
            super().__init__()
            self.forth, self.back = (nn.LSTM(x, h, batch_first=True) for _ in range(2))
            self.prior, self.posterior = Gaussian(h, z), Gaussian(2 * h, z)
            self.likelihood = Gaussian(h + z, x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, _ = self.forth(pad(x[:, :-1], (0, 0, 1, 0)))
            b = self.back(x.flip(1))[0].flip(1)
            q, p = self.posterior(h, b), self.prior(h)
            z = q.rsample()
            found: torch.Tensor = (
                self.likelihood(h, z).log_prob(x).sum() - kl_divergence(q, p).sum()
            )
            return -found / len(x)

    return Encoder()


def measure_by_hand(length: int, device: str, count: int) -> dict[str, float]:
    """Train the model `encoder` by hand, with Adam."""
    import torch

    torch.manual_seed(0)
    model = encoder_by_hand().to(device)
    optimiser = torch.optim.Adam(model.parameters(), fused=True)
    x = torch.randn(BATCH, length, 8, generator=torch.Generator().manual_seed(0)).cumsum(1) / 8
    x = x.to(device)

    def step() -> None:
        optimiser.zero_grad()
        model(x).backward()
        optimiser.step()
        if device == "cuda":
            torch.cuda.synchronize()

    watch, ends = Watch(device), [time.perf_counter()]
    for _ in range(count + 2):
        step()
        ends.append(time.perf_counter())
    each = [b - a for a, b in itertools.pairwise(ends)]
    return {
        "first": each[0],
        "compile": 0.0,
        "step": statistics.median(each[-count:]),
        "memory": watch.peak() / 2**20,
    }


class Watch:
    """The most memory used since the start: of this process, or of a GPU."""

    def __init__(self, device: str) -> None:
        self.device, self.most, self.before = device, 0, _resident()
        if device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.most = max(self.most, _resident())
            time.sleep(0.005)

    def peak(self) -> int:
        if self.device == "cuda":
            import torch

            return torch.cuda.max_memory_allocated() - self.before
        return max(self.most, _resident()) - self.before


def _resident() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--steps", nargs="+", type=int, default=list(LENGTHS), metavar="T")
    parser.add_argument("--count", type=int, default=3, help="later steps that are timed")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds per process")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="tiny lengths, to see that it runs")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.here:
        (name,), (way,) = given.models, given.ways
        for length in given.steps:
            if way == "hand":
                found = measure_by_hand(length, given.device, given.count)
            else:
                found = measure(name, way, length, given.device, given.count)
            print(json.dumps(found), flush=True)
        return
    if given.quick:
        given.steps, given.models, given.ways = [4, 8], ["vrnn"], ["recorded"]
    rows = []
    titles = ("model", "way", "T", "first s", "compile s", "step s", "memory MiB", "slope")
    print("  ".join(f"{title:>10}" for title in titles), flush=True)
    for name in given.models:
        for way in given.ways:
            if way == "hand" and name != "encoder":
                continue
            before: dict[str, Any] | None = None
            for length, found in _measured(name, way, given):
                row = {"model": name, "way": way, "T": length} | found
                rows.append(row)
                print(_line(row, before), flush=True)
                before = row
    if given.json:
        record = {"on": where(given.device), "rows": rows}
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _measured(
    name: str, way: str, given: argparse.Namespace
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each length and its figures, or the reason why there are none, which ends the row."""
    apart = given.device == "cpu"  # each in a process of its own, so that its memory is its own
    for lengths in [[one] for one in given.steps] if apart else [given.steps]:
        found, why = _in_a_process(name, way, lengths, given)
        yield from zip(lengths, found, strict=False)
        if why:
            if len(found) < len(lengths):
                yield lengths[len(found)], {"why": why}
            return


def _in_a_process(
    name: str, way: str, lengths: list[int], given: argparse.Namespace
) -> tuple[list[dict[str, Any]], str]:
    """Measure these lengths; return the figures, and why some are missing."""
    command = [sys.executable, __file__, "--here", "--models", name, "--ways", way, "--steps"]
    command += [*map(str, lengths), "--device", given.device, "--count", str(given.count)]
    why, limit = "", given.limit * len(lengths)
    with tempfile.TemporaryFile("w+") as printed:
        try:
            done = subprocess.run(
                command, stdout=printed, stderr=subprocess.PIPE, text=True, timeout=limit
            )
            if done.returncode:
                why = (done.stderr.strip().splitlines() or ["failed"])[-1]
        except subprocess.TimeoutExpired:
            why = f"over {limit:g} s"
        printed.seek(0)
        return [json.loads(line) for line in printed if line.startswith("{")], why


def _line(row: dict[str, Any], before: dict[str, Any] | None) -> str:
    start = [row["model"], row["way"], str(row["T"])]
    if "step" not in row:
        return "  ".join(f"{text:>10}" for text in start) + f"  {row['why']}"
    numbers = [f"{row[key]:.3f}" for key in ("first", "compile", "step")] + [f"{row['memory']:.0f}"]
    if before is not None:
        slope = math.log(row["step"] / before["step"]) / math.log(row["T"] / before["T"])
        numbers.append(f"{slope:.2f}")
    return "  ".join(f"{text:>10}" for text in [*start, *numbers])


if __name__ == "__main__":
    main()
