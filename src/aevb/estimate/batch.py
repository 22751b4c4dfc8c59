"""Check a user's data (arrays, labels, NaNs, lengths, ragged lists) and convert them to a batch.

A batch is a flat dictionary of [T or 1, N, d] tensors. ``x`` holds the values. ``x?`` is a mask of
the known values; it exists only if some values are missing. ``steps`` is a mask of the real steps;
it exists only for ragged sequences. The examples are always on axis −2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import constraints

from aevb.declare.conditionals import Conditional
from aevb.declare.graph import Entry, Graph
from aevb.declare.networks import table
from aevb.estimate.keys import LENGTHS, STEPS, is_mask, mask_of, variable_of
from aevb.estimate.places import INDICES, Places
from aevb.runtime.checked_files import check_mapped
from aevb.runtime.suggestions import did_you_mean

Batch = dict[str, Tensor]

# From this many short sequences on, a step whose values count them is taken for a column of times.
MANY = 20


def prepare(
    graph: Graph,
    data: Mapping[str, Any],
    *,
    like: Tensor,
    need: tuple[str, ...] | None = None,
    steps: Any = None,
    lengths: Any = None,
    first_row: int = 0,
    places: Places = INDICES,
    single: bool = False,
    gaps: bool = False,
) -> Batch:
    """Check the data against the declaration and convert them to a batch.

    ``need`` names the variables that the data must contain. ``first_row`` (the number of the first
    row) and ``places`` (the names of rows and columns) are used in messages. Several sequences of
    one step each raise an error, because they are usually one sequence on the wrong axis;
    ``lengths=1`` or ``single`` allows them. A single number as ``lengths`` is the length of every
    row. ``gaps`` allows missing entries of observed variables that p reads; the caller must draw or
    integrate out these entries.

    Raises ValueError if the data do not fit the declaration.
    """
    need = (*graph.observed, *graph.given) if need is None else need
    known = (*graph.stochastic, *graph.given)
    for name in data:
        if name not in known:
            what = (
                "deterministic, so it is computed"
                if name in graph.deterministic
                else f"not a variable of this model ({', '.join(known)})"
            )
            similar = did_you_mean(name, [other for other in known if other not in data])
            raise ValueError(
                f"The data have {name!r}, which is {what}.{similar or ' Leave it out.'}"
            )
    for name in need:
        if data.get(name) is None:
            raise ValueError(_lacking(graph, name))
    # Padding and missing entries turn bytes into other numbers.
    pixels = {name for name, value in data.items() if holds_pixels(graph, name, value)}
    data, lengths = pad(graph, data, steps, lengths)
    batch: Batch = {}
    masks: Batch = {}
    for name, value in data.items():
        if value is not None:
            batch[name], mask = _layout(
                graph, name, value, like, first_row, places, pixels=name in pixels
            )
            if mask is not None:
                masks[mask_of(name)] = mask
    _check_lengths(graph, batch)
    if steps is None and np.ndim(lengths) == 0 and any(graph.timed[name] for name in batch):
        _check_steps(graph, batch, lengths, single)
        lengths = None
    real = _real_steps(graph, batch, steps, lengths)
    for name, value in batch.items():
        mask = masks.get(mask_of(name))
        inside = None if real is None or not graph.timed[name] else real
        _check_support(graph, name, value, mask, inside, first_row, places)
        if inside is not None:
            batch[name] = torch.where(inside, value, torch.zeros_like(value))
            if mask is not None:
                masks[mask_of(name)] = mask = mask | ~inside
        if mask is not None:
            if bool(mask.all()):
                del masks[mask_of(name)]
            else:
                _check_missing(graph, name, mask, padded=inside is not None, gaps=gaps)
    return batch | masks | ({} if real is None else {STEPS: real})


def lay_out(
    graph: Graph,
    data: Mapping[str, Any],
    *,
    like: Tensor,
    masks: Iterable[str] = (),
    steps: Any = None,
    lengths: Any = None,
) -> Batch:
    """Convert rows that ``prepare`` has already checked to a batch, without checking them again.

    ``masks`` names the masks (``x?``) that the whole dataset needs, so that all batches have the
    same keys.
    """
    batch: Batch = {}
    for name, value in data.items():
        tensor = numbers(name, value).to(like.device)
        masked = mask_of(name) in masks
        if are_labels(graph, name, tensor):
            batch[name], known = _vectors(tensor, graph.size(name), like)
        else:
            batch[name] = known = _on_axes(graph, name, tensor, like)
            if masked:
                known = ~known.isnan()
                batch[name] = torch.where(known, batch[name], 0.0)
        if masked:
            batch[mask_of(name)] = known
    real = _real_steps(graph, batch, steps, lengths, check=False)
    if real is not None:
        for name in data:
            if graph.timed[name]:
                batch[name] = torch.where(real, batch[name], 0.0)
                if mask_of(name) in batch:
                    batch[mask_of(name)] = batch[mask_of(name)] | ~real
        batch[STEPS] = real
    return batch


def raw_on_axes(graph: Graph, name: str, value: Any, like: Tensor) -> Tensor:
    """Convert values to [T or 1, N, d] on the model's device.

    Integers keep their type, and missing values become zeros.
    """
    tensor = numbers(name, value)
    kind = torch.empty(
        (), dtype=like.dtype if tensor.is_floating_point() else tensor.dtype, device=like.device
    )
    found = _on_axes(graph, name, tensor, kind)
    return found.nan_to_num(0.0) if found.is_floating_point() else found


def pad(
    graph: Graph, data: Mapping[str, Any], steps: Any = None, lengths: Any = None
) -> tuple[dict[str, Any], Any]:
    """Pad lists of sequences of different lengths to arrays. Return the data and the lengths."""
    # A standardised list of sequences keeps its numbers in ``values``.
    data = {
        name: value.values if isinstance(getattr(value, "raw", None), list) else value
        for name, value in data.items()
    }
    ragged = {
        name: rows
        for name, value in data.items()
        if graph.timed.get(name) and (rows := _ragged(value)) is not None
    }
    if not ragged:
        return dict(data), lengths
    if steps is not None or lengths is not None:
        word = STEPS if lengths is None else LENGTHS
        raise ValueError(
            f"{next(iter(ragged))} is a list of sequences of different lengths, so the lengths "
            f"are already known. Leave out {word}=."
        )
    found: dict[str, list[int]] = {}
    padded = dict(data)
    for name, value in data.items():
        if name in ragged:
            padded[name], found[name] = _padded(name, ragged[name])
        elif graph.timed.get(name) and value is not None:
            shape = np.shape(value)
            found[name] = [shape[1] if len(shape) > 1 else 0] * (shape[0] if shape else 0)
    first, *others = found
    for other in others:
        if len(found[first]) != len(found[other]):
            raise ValueError(
                f"The data disagree on the number of examples: {first} {len(found[first])}, "
                f"{other} {len(found[other])}."
            )
        for row, (a, b) in enumerate(zip(found[first], found[other], strict=True)):
            if a != b:
                raise ValueError(
                    f"Row {row} (from 0) has {_counted(a, 'step')} of {first} but {b} of {other}. "
                    "Sequences of one row have one length: pass both as lists."
                )
    return padded, np.array(found[first])


def _ragged(value: Any) -> list[np.ndarray] | None:
    """Return the rows of a list (or object array) whose first axes differ in length.

    None if the value is a regular array.
    """
    if not isinstance(value, list | tuple) and not (
        isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1
    ):
        return None
    try:
        rows = [
            row.detach().cpu().numpy() if isinstance(row, Tensor) else np.asarray(unmasked(row))
            for row in value
        ]
    except ValueError:
        return None
    if not rows or any(row.ndim == 0 for row in rows):
        return None
    return rows if len({len(row) for row in rows}) > 1 or isinstance(value, np.ndarray) else None


def _padded(name: str, rows: list[np.ndarray]) -> tuple[np.ndarray, list[int]]:
    lengths = [len(row) for row in rows]
    for i, row in enumerate(rows):
        if not len(row):
            raise ValueError(f"{name} has no steps in row {i} (from 0). Leave that row out.")
        if row.dtype.kind not in "biuf":
            raise ValueError(f"{name} holds {row.dtype} in row {i} (from 0), not numbers.")
        if row.shape[1:] != rows[0].shape[1:]:
            shapes = f"{list(row.shape)} in row {i} (from 0) but {list(rows[0].shape)} in row 0"
            raise ValueError(f"{name} has shape {shapes}. Only the first axis, time, may differ.")
    whole = np.zeros(
        (len(rows), max(lengths), *rows[0].shape[1:]), np.result_type(*(row.dtype for row in rows))
    )
    for i, row in enumerate(rows):
        whole[i, : len(row)] = row
    return whole, lengths


def completed(graph: Graph, batch: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the observed variables whose missing entries must be drawn from p: p reads them."""
    return frozenset(
        name for name in graph.observed if mask_of(name) in batch and graph.is_read_by_p(name)
    )


def split_latents(
    graph: Graph, batch: Mapping[str, Tensor]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the latents known in every row, and the variables known in some rows only."""
    clamped = frozenset(
        name for name in graph.latents if name in batch and mask_of(name) not in batch
    )
    return clamped, frozenset(variable_of(name) for name in batch if is_mask(name))


def _lacking(graph: Graph, name: str) -> str:
    """The error message for a variable that the data lack."""
    if name in graph.given:
        return (
            f"{name!r} is given: p or q is conditioned on it, but the data lack it. Pass {name}=…."
        )
    family = type(graph.rule("p", name).spec).__name__
    if name in graph.latents:
        return f"{name!r} has no value. A complete assignment names every variable: pass {name}=…."
    text = f"{name!r} is observed (q has no factor for it), but the data lack it. Pass {name}=…"
    others = [other for other in graph.observed if other != name]
    return text + (
        f', or make it latent: add "{name} | {others[0]}": {family}(net=mlp(500, 500)) to q.'
        if others
        else "."
    )


def unmasked(x: Any) -> Any:
    """Replace the masked entries of a NumPy masked array, or of a list of them, by NaN.

    Integers become floats.
    """
    if isinstance(x, list | tuple):
        return (
            [unmasked(row) for row in x]
            if any(isinstance(row, np.ma.MaskedArray) for row in x)
            else x
        )
    if not isinstance(x, np.ma.MaskedArray):
        return x
    if not np.ma.is_masked(x):
        return x.data
    return np.ma.filled(x.astype(x.dtype if x.dtype.kind == "f" else np.float64), np.nan)


def numbers(name: str, value: Any) -> Tensor:
    """Convert a value to a tensor.

    Raise ValueError, naming what the value holds, if it does not hold numbers.
    """
    if isinstance(value, Tensor):
        return _plain_tensor(name, value)
    check_mapped(value)
    try:
        array = np.asarray(unmasked(value))
    except ValueError:
        raise ValueError(
            f"{name} is not an array: its rows have different lengths, which only a sequence may "
            f"have ({name}[t])."
        ) from None
    if array.dtype.kind not in "biuf":
        raise ValueError(_no_numbers(name, value, array))
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    # torch supports few operations on these types.
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.float64 if array.size and array.max() >= 2**63 else np.int64)
    if (
        not array.dtype.isnative
        or not array.flags.writeable
        or not array.flags.aligned
        or any(stride < 0 for stride in array.strides)
    ):
        # torch cannot share memory of this layout.
        array = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    return torch.as_tensor(array)


def _plain_tensor(name: str, value: Tensor) -> Tensor:
    """Return a detached dense tensor of real numbers.

    Raise ValueError for sparse, nested, complex, quantised or meta tensors.
    """
    kinds = {
        "complex numbers": value.is_complex(),
        "no numbers (a meta tensor)": value.is_meta,
        "quantised numbers": value.is_quantized,
    }
    what = next((what for what, there in kinds.items() if there), None)
    if what is not None:
        fix = "Pass value.dequantize()." if value.is_quantized else "Pass real numbers."
        raise ValueError(f"{name} holds {what}. {fix}")
    if value.layout != torch.strided or value.is_nested:
        raise ValueError(
            f"{name} is a {'nested' if value.is_nested else 'sparse'} tensor. Pass a dense one "
            f"({name}.to_dense()), or a list of sequences."
        )
    # torch supports few operations on these types.
    if value.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return numbers(name, value.detach().cpu().numpy()).to(value.device)
    return value.detach()


def _no_numbers(name: str, value: Any, array: np.ndarray) -> str:
    """The error message for an array that does not hold numbers.

    It names the first such entry, its place, and the fix.
    """
    if not array.shape and array.dtype == object:
        known = {"toarray": "toarray()", "pixels": "pixels", "collect": "collect()"}
        fix = next(
            (f" Pass {name}.{fix}." for word, fix in known.items() if hasattr(value, word)), ""
        )
        return f"{name} is a {type(value).__name__}, not an array of numbers.{fix}"
    for place in np.ndindex(array.shape) if array.dtype.kind in "OSU" else ():
        try:
            float(array[place])
        except (TypeError, ValueError):
            columns = getattr(value, "columns", None)  # of a DataFrame
            column = (
                ""
                if len(place) < 2
                else f", column {place[-1] if columns is None else repr(columns[place[-1]])}"
            )
            found = array[place].item() if isinstance(array[place], np.generic) else array[place]
            return (
                f"{name} holds {found!r} in row {place[0] if place else 0}{column} (from 0), not "
                f"a number. If these are categories, declare a "
                "variable for them (OneHot) and pass their numbers 0, 1, … as its data; otherwise "
                "leave them out."
            )
    return f"{name} holds {array.dtype}, not numbers." + (
        " Convert it: .astype(float)." if array.dtype.kind in "OSU" else ""
    )


def _layout(
    graph: Graph,
    name: str,
    value: Any,
    like: Tensor,
    first_row: int,
    places: Places,
    *,
    pixels: bool,
) -> tuple[Tensor, Tensor | None]:
    tensor = numbers(name, value)
    shape, time = graph.shapes[name], 1 if graph.timed[name] else 0
    d = graph.size(name)
    axes = "[N, T" if time else "[N"
    if tensor.shape[:1] == (0,):
        raise ValueError(f"{name} has no examples.")
    if time and tensor.shape[1:2] == (0,):
        raise ValueError(f"{name} has no steps.")
    if are_labels(graph, name, tensor):
        tensor = tensor.to(like.device)
        _check_labels(name, tensor, d, first_row, places)
        vectors, known = _vectors(tensor, d, like)
        return vectors, None if bool(known.all()) else known
    expected = ", ".join([axes, *map(str, shape)]) + "]"
    alone = tensor.dim() == 1 + time and shape == (1,)
    if (
        tensor.shape[1 + time :] != shape
        and not alone
        and not (tensor.dim() == 2 + time and tensor.shape[-1] == d)
        and not _is_image_of(shape, tensor.shape[1 + time :])
        and not (pixels and len(shape) == 1 and math.prod(tensor.shape[1 + time :]) == d)
    ):
        fix = ""
        if len(shape) == 3 and (found := image_shape(tensor.shape[1 + time :])) is not None:
            fix = (
                f" Declare the shape of the data, {found}, or resize them: "
                f"aevb.data.images(folder, size={shape[1:]})."
            )
        if time and tensor.dim() and tensor.shape[1:] in (shape, () if shape == (1,) else shape):
            one = ", ".join(map(str, (1, len(tensor), *shape)))
            fix = f" If it is one sequence of {len(tensor)} steps, write {name}.reshape({one})."
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; expected {expected}, the examples first.{fix}"
        )
    if pixels:
        tensor = middle_of_bytes(graph, name, tensor, like)
    elif len(shape) == 3:
        _refuse_levels_of_images(graph, name, tensor)
    tensor = _on_axes(graph, name, tensor, like)
    mask = ~tensor.isnan()
    if bool(mask.all()):
        return tensor, None
    return torch.where(mask, tensor, torch.zeros_like(tensor)), mask


def _on_axes(graph: Graph, name: str, tensor: Tensor, like: Tensor) -> Tensor:
    """Reshape [N, *shape] or [N, T, *shape] to [T or 1, N, d].

    The result is on the model's device and in its precision.
    """
    time = 1 if graph.timed[name] else 0
    if tensor.shape[1 + time :] == _channels_last(graph.shapes[name]) != graph.shapes[name]:
        tensor = tensor.movedim(-1, -3)
    tensor = (
        tensor.reshape(*tensor.shape[: 1 + time], graph.size(name)).to(like.device).to(like.dtype)
    )
    return tensor.transpose(0, 1) if time else tensor.unsqueeze(0)


def _channels_last(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape (height, width, channels) of an image, as files have it."""
    return (*shape[1:], shape[0]) if len(shape) == 3 else None


def _is_image_of(shape: tuple[int, ...], found: tuple[int, ...]) -> bool:
    """Whether data of this shape are the declared image: channels last, or one channel left out."""
    return len(shape) == 3 and (tuple(found) == _channels_last(shape) or (1, *found) == shape)


def holds_bytes(value: Any) -> bool:
    """Whether an array holds bytes."""
    return str(getattr(value, "dtype", None)) in ("uint8", "torch.uint8")


def image_shape(found: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape to declare for data of this shape, if they look like images."""
    if len(found) == 2:
        return (1, *found)
    if len(found) != 3:
        return None
    return (found[2], *found[:2]) if found[2] in (1, 3) else tuple(found)


def holds_pixels(graph: Graph, name: str, value: Any) -> bool:
    """Whether an array holds images as bytes: grey levels from 0 to 255, not the model's numbers.

    For a variable with time it holds videos, or is a list of them. Bytes that are all 0 or 1 are
    numbers. Entries of a masked array may be missing.
    """
    if name not in graph.shapes or graph.size(name) == 1:
        return False
    if graph.timed[name] and isinstance(value, list | tuple):
        return all(map(holds_bytes, value)) and any(
            holds_pixels(graph, name, row[None]) for row in value
        )
    if not holds_bytes(value):
        return False
    if len(value.shape) < 3 + graph.timed[name] and len(graph.shapes[name]) < 3:
        return False  # columns of a table
    if name not in graph.given and graph.rule("p", name).spec.categorical:
        return False
    some = value[:: max(1, len(value) // 1000)]  # not only the first, which may be black
    if isinstance(some, np.ma.MaskedArray):
        some = some.filled(0)
    return bool(math.prod(some.shape)) and int(some.max()) > 1


def middle_of_bytes(graph: Graph, name: str, tensor: Tensor, like: Tensor) -> Tensor:
    """Bytes as the numbers that their dequantised values lie around: (x + ½) / 256.

    Binary variables are 1 from 128 on, and counts stay as they are.
    """
    levels = tensor.to(like.device).to(like.dtype)
    how = "dequantise" if name in graph.given else graph.rule("p", name).spec.preparation
    if how == "threshold":
        return torch.where(levels.isnan(), levels, (levels >= 128).to(like.dtype))
    return levels if how == "counts" else (levels + 0.5) / 256


def are_labels(graph: Graph, name: str, tensor: Tensor) -> bool:
    """Return whether the tensor holds class labels instead of one-hot vectors.

    The variable is categorical or given.
    """
    time = 1 if graph.timed[name] else 0
    return (
        graph.size(name) > 1
        and tensor.dim() == 1 + time
        and (name in graph.given or graph.rule("p", name).spec.categorical)
    )


def class_vectors(name: str, value: Tensor, count: int) -> Tensor:
    """Return vectors [..., C] of classes: vectors that sum to 1 as they are, labels as one-hot.

    Integers are vectors only if they are one-hot on two axes or more, because one axis of integers
    holds labels. Raises ValueError for numbers that are neither.

    >>> class_vectors("y", torch.tensor([0.0, 2.0]), 3)
    tensor([[1, 0, 0],
            [0, 0, 1]])
    """
    real = value.is_floating_point()
    if value.dim() > (0 if real else 1) and value.shape[-1] == count:
        sums = value.sum(-1, keepdim=True)
        if bool(((sums - 1).abs() < 1e-3).all() and (value >= 0).all()):
            return value
    labels = value.long()
    if bool((labels != value).any() or (labels < 0).any() or (labels >= count).any()):
        raise ValueError(
            f"{name} has classes 0 to {count - 1}, or {count} numbers that sum to 1 on its last "
            f"axis, got {value.tolist()}."
        )
    return torch.nn.functional.one_hot(labels, count)


def _check_labels(name: str, labels: Tensor, count: int, first_row: int, places: Places) -> None:
    numbers = (
        torch.where(labels.isnan(), torch.full_like(labels, -1), labels)
        if labels.is_floating_point()
        else labels
    )
    whole = numbers.long()
    bad = (whole != numbers) | (whole < -1) | (whole >= count)
    if bool(bad.any()):
        row = tuple(int(i) for i in bad.nonzero()[0])
        first = (
            f"{places.first(first_row + row[0], name, row[1] if len(row) > 1 else None)}: "
            f"{numbers[row].item()}"
        )
        raise ValueError(
            f"{name} has {_counted(int(bad.sum()), 'label')} outside 0 … {count - 1} ({first}). "
            f"Number the classes from 0; −1 is unknown."
        )


def _vectors(labels: Tensor, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Convert labels 0 … C−1 (−1 or NaN: unknown) to one-hot vectors.

    Return them and a mask of the known ones.
    """
    whole = (labels.nan_to_num(-1.0) if labels.is_floating_point() else labels).long()
    known = (whole >= 0).unsqueeze(-1)
    vectors = torch.nn.functional.one_hot(whole.clamp_min(0), count).to(like.dtype) * known.to(
        like.dtype
    )
    vectors, known = (
        (part.transpose(0, 1) if vectors.dim() == 3 else part.unsqueeze(0))
        for part in (vectors, known)
    )
    return vectors, known.expand(vectors.shape)


def _check_lengths(graph: Graph, batch: Batch) -> None:
    rows = {name: value.shape[-2] for name, value in batch.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"The data disagree on the number of examples: "
            f"{', '.join(f'{name} {n}' for name, n in rows.items())}."
        )
    steps = {name: value.shape[0] for name, value in batch.items() if graph.timed[name]}
    if len(set(steps.values())) > 1:
        raise ValueError(
            f"The data disagree on the number of steps: "
            f"{', '.join(f'{name} {n}' for name, n in steps.items())}."
        )


def _check_steps(graph: Graph, batch: Batch, length: Any, single: bool) -> None:
    """Raise ValueError for data that look like one series along the axis of the examples.

    Such data are many sequences of one step, or many short sequences of which one step is a column
    of times. ``length``, if given, must be the number of steps; it says that the user wants such
    sequences.
    """
    name = next(name for name in batch if graph.timed[name])
    count, n = batch[name].shape[:2]
    if length is not None and length != count:
        raise ValueError(
            f"lengths={length}, but {name} has {_counted(count, 'step')}. Leave out lengths=, or "
            f"give a number for each row."
        )
    if length is None and count == 1 < n and not single:
        shape = ", ".join(map(str, (1, n, *graph.shapes[name])))
        raise ValueError(
            f"{name} holds {n} sequences of one step each; the axes are [N, T, …]. If they are "
            f"the {n} steps of one sequence, put the axis of the examples first: "
            f"{name}.reshape({shape}). If sequences of one step are meant, say so: lengths=1."
        )
    if length is None and not single and graph.size(name) == 1 and 2 <= count <= 3 and n >= MANY:
        for t in range(count):
            column = batch[name][t, :, 0].double()
            step = (column[-1] - column[0]) / (n - 1)
            if bool(step != 0) and bool(((column.diff() - step).abs() < 1e-3 * step.abs()).all()):
                shown = f"{float(column[0]):g}, {float(column[1]):g}, …"
                raise ValueError(
                    f"{name} holds {n} sequences of {count} steps, of which step {t} counts the "
                    f"sequences ({shown}), as a column of times does; the axes are [N, T, …]. If "
                    f"the {n} lines are the steps of one sequence, pass only their values, [1, "
                    f"{n}, 1]. If {n} sequences are meant, say so: lengths={count}."
                )


def _real_steps(
    graph: Graph, batch: Batch, steps: Any, lengths: Any, *, check: bool = True
) -> Tensor | None:
    """The mask of real (not padded) steps, [T, N, 1]; None if all steps are real."""
    if steps is None and lengths is None:
        return None
    if steps is not None and lengths is not None:
        raise ValueError("Pass steps= or lengths=, not both.")
    timed = next((value for name, value in batch.items() if graph.timed[name]), None)
    if timed is None:
        raise ValueError(
            "steps= and lengths= are for sequences; no variable of these data has [t]."
        )
    count, n = timed.shape[0], timed.shape[1]
    if lengths is not None:
        length = numbers(LENGTHS, lengths).to(timed.device)
        if check:
            _check_lengths_of(length, n, count)
        real = torch.arange(count, device=timed.device)[:, None] < length[None, :]
    else:
        marks = numbers(STEPS, steps).to(timed.device)
        if check and marks.shape != (n, count):
            raise ValueError(
                f"steps has shape {list(marks.shape)}; expected [N, T] = [{n}, {count}]."
            )
        if check and bool((unknown := marks.isnan()).any()):
            row, step = (int(i) for i in unknown.nonzero()[0])
            raise ValueError(
                f"steps is 1 at the real steps of a row and 0 after them; row {row} (from 0) has "
                f"NaN at step {step}. For a step that was not observed put 1 here, and NaN into "
                f"the data."
            )
        mask = marks.bool()
        real = mask.T
        late = real & ~torch.cat([torch.ones_like(real[:1]), real[:-1]])
        empty = ~real[0] & ~late.any(0)
        if check and bool((late.any(0) | empty).any()):
            row = int((late.any(0) | empty).nonzero()[0])
            what = (
                "has no step"
                if bool(empty[row])
                else f"has step {int(late[:, row].nonzero()[0])}, but not the one before"
            )
            raise ValueError(
                f"steps marks each row's real steps from the first on, without gaps; row {row} "
                f"(from 0) {what}. For a step that was not observed put NaN into the data."
            )
    return real.unsqueeze(-1)


def _check_lengths_of(length: Tensor, n: int, count: int) -> None:
    """Raise ValueError unless these are the lengths of n rows of at most ``count`` steps."""
    need = f"lengths holds one number for each of the {n} rows, from 1 to {count}"
    if length.shape != (n,):
        raise ValueError(f"{need}; it has shape {list(length.shape)}.")
    bad = (length.nan_to_num(0.0) if length.is_floating_point() else length).long() != length
    bad = bad | (length < 1) | (length > count)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(f"{need}; row {row} (from 0) has {length[row].item():g}.")


def _check_missing(
    graph: Graph, name: str, mask: Tensor, *, padded: bool, gaps: bool = False
) -> None:
    """Raise ValueError for missing entries that p cannot marginalise out.

    ``padded``: the lengths of the rows are known. ``gaps``: entries that p reads may be missing.
    """
    if name in graph.latents:
        if bool((mask.any(-1) != mask.all(-1)).any()):
            raise ValueError(
                f"{name!r} is latent, and in some row only part of its entries are known. Give "
                f"the whole row, or none of it (NaN)."
            )
        return
    perhaps = "" if padded else _perhaps_padding(graph, name, mask)
    reader = next(
        (
            entry
            for entry in graph.entries()
            if entry.side == "p" and any(ref.name == name for ref in entry.key.parents)
        ),
        None,
    )
    if reader is not None and not (gaps and name in graph.observed):
        fix = (
            f"Fill the entries, or declare {name} in p and q"
            if name in graph.given
            else f"Give q a factor for {name}, fill the entries, or use elbo(), which has p draw "
            f"them (for draw_noise: prepare(…, gaps=True) and plan(partial=[{name!r}]))"
        )
        raise ValueError(
            f'{name} has missing entries but p reads it ("{reader.key}"). {fix}.{perhaps}'
        )
    if name in graph.given or not bool((mask.any(-1) != mask.all(-1)).any()):
        return
    for entry in graph.p[name].values():
        spec, d = entry.spec, graph.size(name)
        # The family defines no marginals.
        if type(spec).log_prob is Conditional.log_prob and not spec.categorical:
            raw = {head: torch.zeros(size) for head, size in spec.heads(d).items()} | spec.vectors(
                d
            )
            if spec.distribution(**raw).event_shape:
                family = type(spec).__name__
                fix = f"Fill them, or use independent entries.{perhaps}"
                raise ValueError(
                    f"{name} has missing entries, but {family} has no marginal without them. {fix}"
                )


def _perhaps_padding(graph: Graph, name: str, mask: Tensor) -> str:
    """An additional hint for sequences whose rows end in missing steps; empty for other data."""
    if not graph.timed[name] or bool(mask[-1].any(-1).all()):
        return ""
    return (
        f" If the NaN at the end of the rows are only padding, pass the length of each row too, "
        f"in an array lengths next to {name}."
    )


class FamilyError(ValueError):
    """The data of an observed ``variable`` do not fit its family in p.

    They are outside its support, or degenerate. ``fits`` is a likelihood that takes them as they
    are, as text: a Normal whose fixed scale is a tenth of their ``span``.
    """

    def __init__(self, text: str, variable: str = "", *, span: float = 1.0) -> None:
        super().__init__(text)
        self.variable = variable
        scale = span / 10 if 0 < span < math.inf else 0.1
        self.fits = f"Normal(scale={float(f'{scale:.1g}'):g})"


def _check_support(
    graph: Graph,
    name: str,
    value: Tensor,
    mask: Tensor | None,
    inside: Tensor | None,
    first_row: int,
    places: Places,
) -> None:
    infinite = torch.isinf(value)
    rows = next(
        (
            e.spec.net.rows
            for e in graph.entries()
            if isinstance(e.spec.net, table) and e.key.parents[0].name == name
        ),
        None,
    )
    if name in graph.given:
        bad, what, fix = infinite, "not finite", "Replace them."
        if rows is not None:
            # A missing index is stored as 0 and would select row 0.
            unknown = torch.zeros_like(infinite) if mask is None else ~mask
            bad, mask = (
                unknown | infinite | (value != value.round()) | (value < 0) | (value >= rows),
                None,
            )
            what = f"outside the rows of table({rows})"
            fix = f"Rows are numbered 0 … {rows - 1}."
        found = [(bad, what, fix)]
    else:
        found = [(infinite, "not finite", "Replace them; NaN marks a missing entry.")]
        found += [
            _outside(graph, entry, value, _steps_of_rule(graph, entry, value, inside))
            for entry in graph.p[name].values()
        ]
    for i, (bad, what, fix) in enumerate(found):
        bad = bad if mask is None else bad & mask
        bad = bad if inside is None else bad & inside
        if bool(bad.any()):
            t, row, column = (int(i) for i in bad.transpose(0, 1).nonzero()[0][[1, 0, 2]])
            place = (
                f"{places.first(first_row + row, name, t if graph.timed[name] else None, column)}: "
                f"{value[t, row, column].item()}"
            )
            text = what.format(first=place) if "{first}" in what else f"{what} ({place})"
            count = (
                int(bad.any(-1).sum())
                if name not in graph.given and graph.rule("p", name).spec.categorical
                else int(bad.sum())
            )
            text = text.replace("that are", "that is", 1) if count == 1 else text
            message = (
                f"{name} has {_counted(count, 'value')} {text}. "
                f"{_grey_levels(graph, name, value) or fix}"
            )
            # No family accepts what the first check refuses.
            if not i:
                raise ValueError(message)
            known = value[value.isfinite() if mask is None else mask & value.isfinite()]
            raise FamilyError(message, name, span=float(known.max() - known.min()))


def _grey_levels(graph: Graph, name: str, value: Tensor) -> str | None:
    """The fix for grey levels passed to a family on {0, 1} or [0, 1].

    None if the values do not look like grey levels.
    """
    family = None if name in graph.given else graph.rule("p", name).spec
    high = float(value.max())
    if (
        family is None
        or family.support not in (constraints.boolean, constraints.unit_interval)
        or not 1 < high <= 255
    ):
        return None
    if bool(((value < 0) | (value != value.round())).any()):
        return None
    levels = 256 if high > 31 else int(high) + 1
    how = family.preparation
    what = "make them binary" if how == "threshold" else "spread them over (0, 1)"
    return (
        f"They look like grey levels 0 … {levels - 1}: {what} (aevb.data.{how}({name}, {levels}); "
        f"--prepare {how})."
    )


def _refuse_levels_of_images(graph: Graph, name: str, tensor: Tensor) -> None:
    """Raise ValueError for images whose entries are grey levels, but not bytes.

    A density of real numbers would take them, where bytes are spread over (0, 1). Images of levels
    are bright somewhere; grids of smaller whole numbers, such as counts, are data.
    """
    family = None if name in graph.given else graph.rule("p", name).spec
    if family is None or family.support is not constraints.real or tensor.is_meta:
        return
    known = tensor.nan_to_num(0.0)  # NaN marks a missing entry
    high = float(known.max())
    if 128 < high <= 255 and not bool(((known < 0) | (known != known.round())).any()):
        raise ValueError(
            f"{name} holds whole numbers up to {high:g}. "
            f"They look like grey levels 0 … 255: pass the images as bytes "
            f'({name}.astype("uint8")), or spread them over (0, 1) '
            f"(aevb.data.dequantise({name}, 256)). If they count or measure something else, "
            f"standardise them (aevb.data.standardise({name}))."
        )


def _outside(
    graph: Graph, entry: Entry, value: Tensor, where: Tensor | None
) -> tuple[Tensor, str, str]:
    """Return a mask of the values outside the support of a rule of p, a description, and the fix.

    Only the rule's steps count.
    """
    spec, target = (
        entry.spec,
        entry.key.name if len(graph.p[entry.key.name]) == 1 else str(entry.key.target),
    )
    bad, what, fix = spec.outside(value)
    return (
        bad if where is None else bad & where,
        f"{what} ({{first}}), but p gives {target} a {type(spec).__name__}",
        fix,
    )


def _steps_of_rule(graph: Graph, entry: Entry, value: Tensor, real: Tensor | None) -> Tensor | None:
    """Return a mask [T, N or 1, 1] of the steps at which this rule of p holds.

    None if it holds at all steps. In a row of one step, the rule for the last step takes precedence
    over the rule for the first.
    """
    rules = graph.p[entry.key.name]
    if len(rules) == 1:
        return None
    step = torch.arange(value.shape[0], device=value.device)[:, None, None]
    last = step == (value.shape[0] if real is None else real.sum(0, keepdim=True)) - 1
    first = (step == 0) & ~last if "last" in rules else step == 0
    held = {"first": first, "last": last}
    if entry.key.at in held:
        return held[entry.key.at]
    ends = torch.zeros_like(last)
    for at in held.keys() & rules.keys():
        ends = ends | held[at]
    return ~ends


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def public(graph: Graph, name: str, value: Tensor, n: int, steps: int) -> Tensor:
    """Convert an internal value […, T, N, d] to the user's layout.

    It is […, N, *shape] or […, N, T, *shape].
    """
    lead = value.shape[:-3]
    value = value.expand(*lead, steps if graph.timed[name] else 1, n, value.shape[-1]).transpose(
        -3, -2
    )
    return value.reshape(*lead, n, *([steps] if graph.timed[name] else []), *graph.shapes[name])
