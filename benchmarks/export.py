"""Exported files against the model: every model of the zoo, every family, every part.

    python benchmarks/export.py run results.jsonl                  # everything
    python benchmarks/export.py run results.jsonl --only vae vrnn  # some models
    python benchmarks/export.py markdown results.jsonl             # the tables of the how-to page

``run`` writes every part of every model as an ONNX file and as a ``.pt2`` file, runs both with
another number of rows than that of the export, and with missing entries, and compares all outputs
with the model's. It appends one line per model and part, and skips lines that the file has.

The difference is the largest |a − b| / max(1, |b|) over all outputs, of a file's outputs a and the
model's b. Models have random weights. Where a recurrence has no single step to export, ``run``
writes out ``STEPS`` steps, and the line has the reason.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import aevb
from aevb import Model, Normal, linear, mlp, zoo
from aevb.declare.families import FAMILIES
from aevb.export import PARTS, differences, meaning
from aevb.export.choice import part_of
from aevb.export.files import write_onnx, write_torch
from aevb.export.tracing import output_names, trace
from aevb.runtime.evaluation_mode import evaluating

STEPS = 4  # of a sequence that is written out
SMALL = {"hidden": (16,)}
SIZES: dict[str, dict[str, Any]] = {
    "fa": {"x": 4, "z": 2},
    "vae": {"x": 12, "z": 3, **SMALL},
    "cvae": {"x": 12, "z": 3, "y": 4, **SMALL},
    "gmvae": {"x": 12, "z": 3, "y": 4, **SMALL},
    "m2": {"x": 12, "z": 3, "y": 4, **SMALL},
    "vrnn": {"x": 6, "z": 2, "h": 8, **SMALL},
    "local_level": {},
    "local_trend": {},
    "seasonal": {"period": 4},
    "ar": {"x": 2},
    "hmm": {"x": 2, "y": 3},
    "switching": {"x": 2, "u": 2, "y": 3, "autoregressive": True},
    "volatility": {"x": 2, "h": 8, **SMALL},
    "dmm": {"x": 6, "z": 2, "h": 8, **SMALL},
    "srnn": {"x": 6, "z": 2, "h": 8, **SMALL},
    "kvae": {"x": 9, "a": 2, "z": 3, **SMALL},
}
FULL = {  # the sizes of the tutorial, for the sizes of files and the seconds of an export
    "vae, 784 pixels": lambda: zoo.vae(),
    "gmvae, 784 pixels": lambda: zoo.gmvae(),
}


def observed() -> Model:
    """A model with data of every family, called by their names."""
    data = {f"{name} | z": family(2, net=mlp(8)) for name, family in FAMILIES.items()}
    reads = ", ".join(FAMILIES)
    return Model({"z": Normal(2), **data}, {f"z | {reads}": Normal(net=mlp(8))})


def latent() -> Model:
    """A model with a latent of every family, called by their names."""
    prior = {name: family(2) for name, family in FAMILIES.items()}
    posterior = {f"{name} | x": family(net=mlp(8)) for name, family in FAMILIES.items()}
    data = Normal(4, net=mlp(8), scale="learned")
    return Model({**prior, f"x | {', '.join(FAMILIES)}": data}, posterior)


def mixture() -> Model:
    """Clusters with full covariances, whose exact log p needs matrices of each row."""
    return Model(
        {"y": aevb.OneHot(3, learned=True), "x | y": aevb.MultivariateNormal(4, net=linear())},
        {"y | x": aevb.Exact()},
    )


def images() -> Model:
    return Model(
        {"z": Normal(3), "x | z": aevb.Bernoulli((1, 9, 9), net=aevb.deconv(8, 4, hidden=16))},
        {"z | x": Normal(net=aevb.conv(4, 8, hidden=16))},
        missing="mask",
    )


def models() -> dict[str, Callable[[], Model]]:
    """Every model of the zoo, every family on both sides, and three more networks."""
    found: dict[str, Callable[[], Model]] = {
        name: lambda name=name: zoo.zoo[name](**SIZES[name]) for name in zoo.zoo
    }
    found["vrnn, smoothing"] = lambda: zoo.vrnn(6, 2, 8, posterior="smoothing", hidden=(16,))
    found |= {"mixture, Exact()": mixture, "conv, deconv": images}
    found |= {"all families as data": observed, "all families as latents": latent}
    return found | FULL


def lines(name: str, build: Callable[[], Model], parts: list[str]) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    model = build().eval()
    for what in parts:
        line: dict[str, Any] = {"model": name, "part": what}
        settings: dict[str, Any] = {}
        refused: list[str] = []
        for settings in ({}, {"steps": STEPS}, {"samples": 2}, {"steps": STEPS, "samples": 2}):
            if "samples" in settings and what != "score":
                continue
            try:
                part_of(model, model.teaching, what, **settings)
            except ValueError as error:
                refused.append(str(error))
                continue
            break
        else:
            yield {**line, "refused": refused[0]}
            continue
        if refused:
            line |= {"refused": refused[0], "settings": settings}
        yield {**line, **measured(model, what, settings)}


def measured(model: Model, what: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Trace a part once, write both files, run them, and compare them with the model."""
    with tempfile.TemporaryDirectory() as folder, evaluating(model):
        part = part_of(model, model.teaching, what, **settings)
        begin = time.process_time()
        try:
            program = trace(part)
        except ValueError as error:
            return {format: {"refused": str(error)} for format in ("onnx", "torch")}
        inputs = [port.name for port in part.ports]
        line: dict[str, Any] = {
            "meaning": meaning(part),
            "inputs": inputs,
            "missing": any(port.missing for port in part.ports),
            "CPU seconds to trace": time.process_time() - begin,
        }
        for format, ending in (("onnx", ".onnx"), ("torch", ".pt2")):
            out = Path(folder) / f"part{ending}"
            begin = time.process_time()
            try:
                if format == "onnx":
                    write_onnx(program, out, {}, inputs, output_names(program))
                else:
                    write_torch(program, out, {})
                seconds = time.process_time() - begin
                found = [
                    differences(part, out, seed=seed, rows=rows, missing=missing)
                    for seed, (rows, missing) in enumerate([(1, False), (7, False), (50, True)])
                ]
            except Exception as error:  # the table shows every failure
                line[format] = {"refused": f"{type(error).__name__}: {error}"}
                continue
            line[format] = {
                "differences": [max(one.values()) for one in found],
                "by output": {name: max(one[name] for one in found) for name in found[0]},
                "KiB": out.stat().st_size / 1024,
                "CPU seconds to write": seconds,
            }
        return line


def run(path: Path, only: list[str], parts: list[str]) -> None:
    done = {(line["model"], line["part"]) for line in read(path)}
    for name, build in models().items():
        if only and name not in only:
            continue
        waiting = [what for what in parts if (name, what) not in done]
        for line in lines(name, build, waiting):
            with path.open("a", encoding="utf-8") as file:
                print(json.dumps(line, ensure_ascii=False), file=file)
            print(shown(line), flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def shown(line: dict[str, Any]) -> str:
    cells = [
        line["model"],
        line["part"],
        line.get("meaning", "refused: " + line.get("refused", "")),
    ]
    return " | ".join([*cells, *(cell(line, format) for format in ("onnx", "torch"))])


def cell(line: dict[str, Any], format: str) -> str:
    found = line.get(format)
    if found is None:
        return "–"
    if "refused" in found:
        return found["refused"]
    return f"{max(found['differences']):.1e}"


def markdown(path: Path) -> None:
    """Print the largest difference of every part of a model, then those of the families."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for line in read(path):
        rows.setdefault(line["model"], {})[line["part"]] = line
    print(f"| model | {' | '.join(PARTS)} |\n| --- |{' --- |' * len(PARTS)}")
    for name in models():
        if not name.startswith("all families"):
            found = rows[name]
            cells = [mark(found[what]) if what in found else "" for what in PARTS]
            print(f"| {name} | {' | '.join(cells)} |")
    print("\n| family | decoder | score, as data | encoder | score, as a latent |")
    print("| --- |" + " --- |" * 4)
    data, latents = rows["all families as data"], rows["all families as latents"]
    for name in FAMILIES:
        cells = [
            of_family(data["decoder"], f"{name}."),
            of_family(data["score"], f"elbo.{name}"),
            of_family(latents["encoder"], f"{name}."),
            of_family(latents["score"], f"elbo.kl({name})"),
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    worst = max(max(line["torch"]["differences"]) for line in read(path) if "torch" in line)
    print(f"\nFiles of torch.export: at most {worst:.0e} everywhere.")


def mark(line: dict[str, Any]) -> str:
    """The largest difference; ``ˢ`` where one step was refused and a sequence was written out."""
    found = line.get("onnx")
    if found is None:
        return "–"
    if "refused" in found:
        return "refused"
    return number(max(found["differences"])) + "ˢ" * ("steps" in line.get("settings", {}))


def of_family(line: dict[str, Any], prefix: str) -> str:
    found = line["onnx"]["by output"]
    return number(max(value for name, value in found.items() if name.startswith(prefix)))


def number(difference: float) -> str:
    return "0" if difference == 0 else f"{difference:.0e}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("task", choices=["run", "markdown"])
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if given.task == "markdown":
        markdown(given.results)
    else:
        run(given.results, given.only, given.parts)


if __name__ == "__main__":
    main()
