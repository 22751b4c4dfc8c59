"""Write a traced part as an ONNX file or as a torch file, and run such files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aevb.export.operators import OPERATORS, NotInOnnxError
from aevb.export.tracing import ExportError, quiet

KEY = "aevb"  # of the metadata in both kinds of file
LARGEST = 2**31 - 2**20  # bytes of weights above which ONNX needs a second file
OPSET = 20
DOUBLE = 11  # the number of float64 among the types of ONNX


def write_torch(program: Any, out: Path, metadata: Mapping[str, Any]) -> None:
    """Write a ``.pt2`` file, which ``torch.export.load`` reads."""
    with _replacing(out) as partial:
        torch.export.save(program, partial, extra_files={KEY: json.dumps(metadata)})


def write_onnx(
    program: Any,
    out: Path,
    metadata: Mapping[str, Any],
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> None:
    """Write an ONNX file. Raise ExportError, with the operator, if ONNX lacks one."""
    check_installed()
    try:
        with quiet():
            if any(node.target in OPERATORS for node in program.graph.nodes):
                program = program.run_decompositions(dict(OPERATORS))
            found = torch.onnx.export(
                program,
                input_names=list(inputs),
                output_names=list(outputs),
                opset_version=OPSET,
                dynamo=True,
                custom_translation_table={
                    torch.ops.aten.scalar_tensor.default: _constant,
                    torch.ops.aten.full.default: _filled,
                    torch.ops.aten.new_full.default: _filled_like,
                },
                verbose=False,
            )
    except Exception as error:  # torch raises errors of many classes, some of them private
        raise _explained(error) from error
    assert found is not None
    found.model.metadata_props[KEY] = json.dumps(metadata)
    large = sum(weight.nbytes for weight in program.state_dict.values()) > LARGEST
    if large:  # the weights are in a second file, whose name the first one contains
        found.save(str(out), external_data=True)
        return
    with _replacing(out) as partial:
        found.save(str(partial), external_data=False)


def _constant(
    s: Any, dtype: int = 1, layout: str = "", device: str = "", pin_memory: bool = False
) -> Any:
    """A number as an ONNX tensor. torch's own translation rounds it to single precision first."""
    from onnxscript import ir, opset20

    op: Any = opset20
    if not isinstance(s, bool | int | float):
        return s if dtype == -1 else op.Cast(s, to=dtype)
    return op.Constant(value=ir.tensor(s, None if dtype == -1 else ir.DataType(dtype)))


def _filled(
    size: Any,
    fill_value: Any,
    dtype: int = -1,
    layout: str = "",
    device: str = "",
    pin_memory: bool = False,
) -> Any:
    """An array of one number; see :func:`_constant`."""
    from onnxscript import opset20

    op: Any = opset20
    return op.Expand(_constant(fill_value, dtype), op.Cast(size, to=7))


def _filled_like(
    self: Any,
    size: Any,
    fill_value: Any,
    dtype: int = -1,
    layout: str = "",
    device: str = "",
    pin_memory: bool = False,
) -> Any:
    """An array of one number in the precision of another; see :func:`_constant`."""
    from onnxscript import opset20

    op: Any = opset20
    number = op.CastLike(_constant(float(fill_value), DOUBLE), self)
    return op.Expand(number if dtype == -1 else op.Cast(number, to=dtype), op.Cast(size, to=7))


def _explained(error: Exception) -> ExportError:
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    for one in chain:
        if isinstance(one, NotInOnnxError):
            return ExportError(str(one))
        if found := re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", str(one)):
            return ExportError(
                f"ONNX has no operator for torch's {found[1]}, which this model needs. Export it "
                f'with format "torch".'
            )
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ExportError(f"torch.onnx cannot write this model: {text}")


# Running files --------------------------------------------------------------------------------


def run_onnx(path: Path, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run an ONNX file by onnxruntime on a CPU.

    Arguments:
        path: The file.
        inputs: An array for each input.

    Returns:
        An array for each output.

    >>> import os, tempfile
    >>> from aevb import zoo
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = zoo.fa(x=3, z=2).export("onnx", out=os.path.join(folder, "encoder.onnx"))
    ...     run_onnx(file.path, {"x": np.zeros((5, 3), np.float32)})["z.mean"].shape
    (5, 2)
    """
    onnxruntime = _need("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime's classes of errors have no public name
        if found := re.search(r"Could not find an implementation for (\w+)\(", str(error)):
            raise ExportError(
                f"onnxruntime has no {found[1]} in the precision of {path}. Export the model in "
                f'single precision (model.float()), or with format "torch".'
            ) from error
        raise
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def run_torch(path: Path, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a ``.pt2`` file of ``torch.export``.

    Arguments:
        path: The file.
        inputs: An array for each input.

    Returns:
        An array for each output.

    >>> import os, tempfile
    >>> from aevb import zoo
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = zoo.fa(x=3, z=2).export("torch", out=os.path.join(folder, "encoder.pt2"))
    ...     found = run_torch(file.path, {"x": np.zeros((5, 3), np.float32)})
    ...     found["z.mean"].shape, read_metadata(file.path)["what"]
    ((5, 2), 'encoder')
    """
    with quiet():
        program = torch.export.load(path)
    tensors = {name: torch.as_tensor(value) for name, value in inputs.items()}
    with torch.no_grad():
        found = program.module()(tensors)
    return {name: value.numpy() for name, value in found.items()}


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Return the metadata that an export wrote into a file.

    ``path`` is the file. The declaration, the inputs with their axes, and the meaning of the
    outputs are among them.

    >>> import os, tempfile
    >>> from aevb import zoo
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = zoo.fa(x=3, z=2).export("torch", out=os.path.join(folder, "encoder.pt2"))
    ...     found = read_metadata(file.path)
    >>> found["what"], found["inputs"]
    ('encoder', [{'name': 'x', 'kind': 'data', 'axes': ['batch', 3], 'missing': 'NaN'}])
    """
    if Path(path).suffix == ".onnx":
        onnx = _need("onnx")
        properties = onnx.load(str(path), load_external_data=False).metadata_props
        text = next((one.value for one in properties if one.key == KEY), "{}")
    else:
        extra = {KEY: ""}
        with quiet():
            torch.export.load(path, extra_files=extra)
        text = extra[KEY] or "{}"
    found: dict[str, Any] = json.loads(text)
    return found


def check_installed() -> None:
    """Raise ValueError if a package is missing that writes ONNX files."""
    for module in ("onnx", "onnxscript"):
        _need(module)


def has_onnxruntime() -> bool:
    try:
        _need("onnxruntime")
    except ValueError:
        return False
    return True


def _need(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        raise ValueError(
            f"ONNX files need the package {module}: pip install 'aevb[onnx]'."
        ) from None


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """Write a temporary file, which then replaces ``out`` as a whole."""
    partial = out.with_name(f".{out.stem}.new{out.suffix}")
    try:
        yield partial
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
