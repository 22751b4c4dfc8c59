"""Export a model as an ONNX file, or as a file of ``torch.export``.

The exported functions run the plan and the program of the model's own estimates
(:mod:`aevb.export.parts`). They are traced by torch (:mod:`aevb.export.tracing`) and written with
named inputs and outputs (:mod:`aevb.export.files`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aevb.declare.serialization import serialize
from aevb.estimate.declared_model import DeclaredModel
from aevb.export import files
from aevb.export.choice import BOUNDS as BOUNDS
from aevb.export.choice import PARTS as PARTS
from aevb.export.choice import part_of
from aevb.export.files import read_metadata, run_onnx, run_torch
from aevb.export.parts import Bound, Encoder, LogEvidence, Part
from aevb.export.ports import TIME_AXIS, Axes
from aevb.export.tracing import ExportError, output_axes, trace
from aevb.export.values import example
from aevb.posterior.training_record import Teaching
from aevb.runtime.evaluation_mode import evaluating
from aevb.version import __version__

__all__ = ["ExportError", "ExportWarning", "Exported", "read_metadata", "run_onnx", "run_torch"]

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
# The rows and steps of the check: others than those of the example that was traced.
ROWS, STEPS = 7, 9
# The largest difference without a warning, by precision: rounding of a long computation.
TOLERANCE = {"float32": 1e-3, "float64": 1e-8}


class ExportWarning(UserWarning):
    """A file whose outputs differ from those of the model by more than rounding.

    >>> str(ExportWarning("z.sd has other values."))
    'z.sd has other values.'
    """


@dataclass(frozen=True)
class Exported:
    """A file that an export wrote.

    Attributes:
        path: The file.
        format: "onnx" or "torch".
        what: The part: "encoder", "decoder", "prior" or "score".
        inputs: The axes of each input: numbers, and the words "batch" and "time" for axes of any
            length.
        outputs: The axes of each output.
        meaning: What the outputs are, in words.
        dtype: The precision of all inputs (but ``start``) and outputs.
        difference: The largest difference |a − b| / max(1, |b|) between the file's outputs a and
            the model's b, for another number of rows than that of the export and with missing
            entries; None if it was not measured. Infinite if an output has another shape, or is
            NaN in one of the two only. Above 1e-3 (1e-8 in double precision) an
            :class:`ExportWarning` names the output.

    >>> import os, tempfile
    >>> from aevb import zoo
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = zoo.fa(x=3, z=2).export("torch", out=os.path.join(folder, "encoder.pt2"))
    >>> file.inputs, list(file.outputs)
    ({'x': ('batch', 3)}, ['z.mean', 'z.sd', 'z.tril'])
    """

    path: Path
    format: str
    what: str
    inputs: dict[str, Axes]
    outputs: dict[str, Axes]
    meaning: str
    dtype: str
    difference: float | None = None

    def __repr__(self) -> str:
        def shown(ports: Mapping[str, Axes]) -> str:
            return ", ".join(
                f"{name} [{', '.join(map(str, axes))}]" for name, axes in ports.items()
            )

        lines = [
            f"{self.path}: {self.meaning}, in {self.dtype}",
            f"  inputs   {shown(self.inputs)}",
            f"  outputs  {shown(self.outputs)}",
        ]
        if self.difference is not None:
            lines.append(f"  largest difference from the model: {self.difference:.1e}")
        return "\n".join(lines)


# What training made of images of bytes; the inputs of a file are these numbers.
OF_BYTES = {"dequantise": "(byte + 1/2) / 256", "threshold": "1 from 128 on, else 0"}


def export_model(
    model: DeclaredModel,
    teaching: Teaching,
    format: str = "onnx",
    *,
    what: str = "encoder",
    out: str | Path | None = None,
    steps: int | None = None,
    bound: str = "auto",
    samples: int | None = None,
    check: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> Exported:
    """Write a part of a model into a file; see :meth:`aevb.Model.export`.

    ``metadata`` is added to the metadata of the file.
    """
    path = _path(format, what, out)
    if format == "onnx":
        files.check_installed()
    like = model._parameter()
    if like.device.type != "cpu" or like.dtype in (torch.bfloat16, torch.float16):
        # Files are for any device, and few runtimes have all operators in half precision.
        model = deepcopy(model).to("cpu", torch.promote_types(like.dtype, torch.float32))
    with evaluating(model):
        part = part_of(model, teaching, what, steps=steps, bound=bound, samples=samples)
        program = trace(part)
        inputs = {port.name: port.axes for port in part.ports}
        outputs = output_axes(part, program)
        told = meaning(part)
        facts = _facts(part, outputs, told) | dict(metadata or {})
        if teaching.pixels:
            facts["bytes"] = {name: OF_BYTES.get(how, how) for name, how in teaching.pixels.items()}
        if format == "onnx":
            files.write_onnx(program, path, facts, list(inputs), list(outputs))
        else:
            files.write_torch(program, path, facts)
        difference = None
        if check and (format != "onnx" or files.has_onnxruntime()):
            found = differences(part, path)
            difference = max(found.values())
            if difference > TOLERANCE[facts["dtype"]]:
                _warn(path, found, facts["dtype"])
    return Exported(path, format, what, inputs, outputs, told, facts["dtype"], difference)


def differences(
    part: Part, path: Path, *, seed: int = 1, rows: int = ROWS, missing: bool = True
) -> dict[str, float]:
    """The largest |a − b| / max(1, |b|) of every output a of a file and b of the model."""
    values = example(part, rows, STEPS, seed=seed, missing=missing, start=False)
    with torch.no_grad():
        expected = {name: value.numpy() for name, value in part(values).items()}
    run = run_onnx if path.suffix == SUFFIXES["onnx"] else run_torch
    found = run(path, {name: value.numpy() for name, value in values.items()})
    return {name: _difference(found[name], value) for name, value in expected.items()}


def _warn(path: Path, found: Mapping[str, float], dtype: str) -> None:
    tolerance = TOLERANCE[dtype]
    wrong = {name: value for name, value in found.items() if value > tolerance}
    listed = ", ".join(
        f"{name} has another shape, or NaN or infinite values in one of the two only"
        if math.isinf(value)
        else f"{name} differs by {value:.1e}"
        for name, value in wrong.items()
    )
    precision = "" if dtype == "float64" else "model.double(), or "
    other = "torch" if path.suffix == SUFFIXES["onnx"] else "onnx"
    warnings.warn(
        f"{path} does not compute what the model does (tolerance {tolerance:.0e}): {listed}. Do "
        f"not use these outputs of the file. Try {precision}the format {other!r}.",
        ExportWarning,
        stacklevel=4,
    )


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest scaled difference; other shapes, or NaN in one of the two, are infinitely far."""
    if found.shape != expected.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):  # of infinite values that are equal
        scaled = np.abs(found - expected) / np.maximum(1, np.abs(expected))
    scaled[(found == expected) | (np.isnan(found) & np.isnan(expected))] = 0
    return float(np.nan_to_num(scaled, nan=np.inf).max(initial=0.0))


def _path(format: str, what: str, out: str | Path | None) -> Path:
    if format not in SUFFIXES:
        raise ValueError(f"format is {' or '.join(map(repr, SUFFIXES))}, got {format!r}.")
    path = Path(f"{what}{SUFFIXES[format]}" if out is None else out)
    if path.suffix != SUFFIXES[format]:
        raise ValueError(
            f"out={str(path)!r} does not end in {SUFFIXES[format]}, the ending of format "
            f"{format!r}. Write out={str(path.with_suffix(SUFFIXES[format]))!r}."
        )
    if not path.parent.is_dir():
        raise ValueError(f"There is no folder {path.parent} for {path}. Make it first.")
    return path


def meaning(part: Part) -> str:
    """What the outputs of a part are, in words."""
    steps = "any number of" if part.steps == TIME_AXIS else part.steps
    where = "one step of a recurrence" if steps is None else f"sequences of {steps} steps"
    timed = any(part.graph.timed[name] for name in part.graph.stochastic)
    over = f", {where}" if timed else ""
    if isinstance(part, LogEvidence):
        return f"exact log p of each row{over}"
    if isinstance(part, Bound):
        if not part.graph.latents:
            return f"exact log p of each row{over}"
        count = f"{part.plan.samples} sample{'s' * (part.plan.samples > 1)}"
        name = "ELBO" if part.plan.bound == "elbo" else "importance-weighted bound"
        return f"{name} of each row, {count}, with noise as an input{over}"
    if isinstance(part, Encoder):
        drawn = any(port.kind in ("noise", "draw") for port in part.ports)
        refused = ", ".join(port.name for port in part.ports if port.refused)
        gaps = f"; NaN for rows whose gaps in {refused} q was not trained on" if refused else ""
        return f"parameters of q's factors{' given draws' * drawn}{over}{gaps}"
    side = "latents" if part.what == "prior" else "observed variables"
    return f"parameters of p's factors of the {side}{over}"


def _facts(part: Part, outputs: Mapping[str, Axes], meaning: str) -> dict[str, Any]:
    model = part.model
    return {
        "version": __version__,
        "torch": torch.__version__,
        "what": part.what,
        "meaning": meaning,
        "dtype": str(model._parameter().dtype).removeprefix("torch."),
        "inputs": [port.record() for port in part.ports],
        "outputs": [{"name": name, "axes": list(axes)} for name, axes in outputs.items()],
        "declaration": serialize(model.graph, model.missing),
    }
