"""Sources of batches: arrays in memory, memory-mapped files, tables, torch Datasets.

A source checks all its rows once. After that it returns batches of rows.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aevb.data.files import read_file
from aevb.data.grey_levels import Fresh
from aevb.data.lazy_rows import Windows, is_lazy
from aevb.data.mapped_rows import memory_map, rows_of, windows_of
from aevb.data.preparation import CHUNK, Standardised, default_preparation, prepare_levels
from aevb.data.sequences import (
    Sequences,
    column_names,
    frame_by_variable,
    frames_in_arrays,
    is_frame,
)
from aevb.data.torch_datasets import dataset_of, read_dataset, read_stream
from aevb.declare.graph import Graph
from aevb.estimate.batch import (
    Batch,
    holds_pixels,
    lay_out,
    pad,
    prepare,
    raw_on_axes,
    unmasked,
)
from aevb.estimate.gap_patterns import GapPatterns
from aevb.estimate.keys import LENGTHS, STEPS, is_mask, mask_of, masks_of
from aevb.estimate.places import INDICES, ColumnNames, Placed, Places, columns_of, places_of
from aevb.runtime.checked_files import check_mapped

RELEASE = 2**28  # bytes of mapped files in memory before their pages are released
PIECE = 64  # rows read between two checks of that; the system may page in 2 MiB per row
SPREAD = 8  # groups of rows from which a sample is taken
BLOCK = 256  # rows that share a generator if draws are fixed

Extents = dict[str, tuple[Tensor, Tensor]]  # variable → smallest and largest value of each column
Told = Callable[[int, int], None]  # receives (rows checked so far, all rows)


class Digest:
    """Incremental hash of laid-out rows; it does not depend on the sizes of the parts."""

    def __init__(self) -> None:
        self.hashes: dict[str, Any] = {}

    def update(self, batch: Batch, first_row: int) -> None:
        for name, value in batch.items():
            rows = value.detach().movedim(-2, 0).cpu().contiguous().numpy()
            if rows.dtype == bool:
                # A part without missing entries has no mask. Hash only the missing entries, so that
                # this makes no difference.
                rows = np.argwhere(~rows)
                rows[:, 0] += first_row
            if rows.size:
                self.hashes.setdefault(name, hashlib.sha256()).update(
                    np.ascontiguousarray(rows).view(np.uint8)
                )

    def __str__(self) -> str:
        whole = hashlib.sha256()
        for name, found in sorted(self.hashes.items()):
            whole.update(name.encode() + found.digest())
        return whole.hexdigest()[:32]


class Source:
    """Base class: ``n`` rows laid out for a model. ``take`` returns the batch of some rows.

    Subclasses implement ``read``. ``extents`` holds the smallest and largest value of every column
    of the observed variables, over known entries at real steps. ``lacking`` holds the columns in
    which at least one row has a missing entry, and ``patterns`` how they lie beside one another.
    """

    n: int
    like: Tensor
    fresh: dict[str, Fresh]
    extents: Extents
    lacking: dict[str, set[int]]
    patterns: GapPatterns | None
    near = False  # whether the rows are on the model's device
    windows: Windows | None = None  # groups of rows that are read together, if there are any
    places: Places = INDICES  # names of rows and columns in messages
    pixels: Mapping[str, str] = MappingProxyType({})  # how images of bytes were prepared
    columns: ColumnNames = MappingProxyType({})  # the names of the columns of frames
    _last: tuple[Tensor, Batch]  # the rows that ``read_at`` read last

    def take(
        self, rows: Tensor, *, generator: torch.Generator | None = None, share: slice = slice(None)
    ) -> Batch:
        """Return the batch of ``rows[share]``.

        The generator draws :class:`Fresh` values for all rows, of which ``share`` keeps its part.
        Without a generator the draw of each row is fixed.
        """
        return self.prepare(*self.draw(rows, generator=generator, share=share))

    def draw(
        self, rows: Tensor, *, generator: torch.Generator | None = None, share: slice = slice(None)
    ) -> tuple[Batch, dict[str, Tensor]]:
        """Return the stored values of ``rows[share]``, and uniform numbers.

        :class:`Fresh` values are drawn with the uniform numbers.
        """
        chosen = rows[share]
        batch = self.read(chosen)
        if generator is not None:
            return batch, self.uniform(batch, len(rows), generator, share)
        return batch, {
            name: self._fixed(chosen, batch[name].shape[0], batch[name].shape[2])
            for name in self.fresh
        }

    def uniform(
        self, batch: Batch, n: int, generator: torch.Generator, share: slice = slice(None)
    ) -> dict[str, Tensor]:
        """Draw uniform numbers for the :class:`Fresh` values of all ``n`` rows.

        Return those of ``share``.
        """
        like, found = self.like, {}
        for name in self.fresh:
            steps, _, d = batch[name].shape
            found[name] = torch.rand(
                (steps, n, d), generator=generator, device=like.device, dtype=like.dtype
            )[:, share]
        return found

    def prepare(self, batch: Batch, uniform: Mapping[str, Tensor]) -> Batch:
        """Compute the batch from stored values and uniform numbers, by tensor operations only."""
        batch = dict(batch)
        for name, numbers in uniform.items():
            value = self.fresh[name].draw(batch[name].to(self.like.dtype), numbers)
            for mask in masks_of(batch, name, timed=len(value) > 1):
                value = torch.where(mask, value, 0.0)
            batch[name] = value
        return batch

    def read(self, rows: Tensor) -> Batch:
        """Return the batch of these rows as stored; :class:`Fresh` values are still grey levels."""
        raise TypeError(f"{type(self).__name__} must implement read(rows).")

    def read_at(self, rows: Tensor, times: Tensor, timed: Callable[[str], bool]) -> Batch:
        """Return the batch of these rows at some time steps.

        ``timed`` tells which keys of a batch have a time axis.
        """
        last = self.__dict__.get("_last")
        if last is None or not torch.equal(last[0], rows):
            # The windows of a batch follow one another: read its rows from their files once.
            last = self._last = rows, self.read(rows)
        return {
            name: value.index_select(0, times.to(value.device)) if timed(name) else value
            for name, value in last[1].items()
        }

    def on_host(self, rows: Tensor) -> Batch:
        """Return the same batch as ``read``, in host memory."""
        return {name: value.cpu() for name, value in self.read(rows).items()}

    def spread(self, count: int) -> Tensor:
        """Return the numbers of at most ``count`` rows, spread over all rows in ascending order.

        Rows that are read in groups come from few groups.
        """
        if self.n <= count or self.windows is None:
            return torch.linspace(0, self.n - 1, min(count, self.n)).long()
        starts = np.concatenate([[0], np.cumsum(self.windows.sizes)])
        groups = np.unique(np.linspace(0, len(starts) - 2, SPREAD).astype(int))
        each = [
            np.linspace(starts[j], starts[j + 1] - 1, min(count // len(groups), size)).astype(int)
            for j, size in zip(groups, np.diff(starts)[groups], strict=True)
        ]
        return torch.from_numpy(np.concatenate(each))

    def digest(self) -> str:
        """Hash all stored rows, to recognise the same data later.

        The hash is the same for data in memory and in files.
        """
        found, part = (
            Digest(),
            max(
                1,
                CHUNK
                // max(
                    1, sum(value.nbytes for value in self.on_host(torch.zeros(1).long()).values())
                ),
            ),
        )
        for start in range(0, self.n, part):
            found.update(self.on_host(torch.arange(start, min(self.n, start + part))), start)
        return str(found)

    def _fixed(self, rows: Tensor, steps: int, d: int) -> Tensor:
        """Return uniform numbers that depend on the row only, not on the rest of the batch."""
        rows = rows.cpu()
        uniform = torch.empty((steps, len(rows), d), device=self.like.device, dtype=self.like.dtype)
        for block in (rows // BLOCK).unique().tolist():
            generator = torch.Generator(self.like.device).manual_seed(block)
            drawn = torch.rand(
                (steps, BLOCK, d),
                generator=generator,
                device=self.like.device,
                dtype=self.like.dtype,
            )
            here = (rows // BLOCK == block).nonzero()[:, 0]
            uniform[:, here] = drawn[:, rows[here] % BLOCK]
        return uniform


class Resident(Source):
    """Data in memory, laid out once and then indexed.

    :class:`Fresh` levels keep their type (e.g. uint8). The data are on the model's device if they
    fit there, otherwise in host memory.
    """

    def __init__(
        self, graph: Graph, data: Mapping[str, Any], like: Tensor, places: Places = INDICES
    ) -> None:
        self.like, self.places = like, places
        like = like if _surely_fits(data, like) else like.new_empty((), device="cpu")
        self.fresh = {name: value for name, value in data.items() if isinstance(value, Fresh)}
        values = {
            name: value.middle(np.asarray(value.values)) if isinstance(value, Fresh) else value
            for name, value in data.items()
        }
        steps, lengths = values.pop(STEPS, None), values.pop(LENGTHS, None)
        self.batch = prepare(
            graph, values, like=like, steps=steps, lengths=lengths, places=places, gaps=True
        )
        for name, value in self.fresh.items():
            self.batch[name] = raw_on_axes(graph, name, value.values, like)
        owners = (
            values | {STEPS: steps} | {name: value.values for name, value in self.fresh.items()}
        )
        self.batch = {name: _own(value, owners.get(name)) for name, value in self.batch.items()}
        self.n = next(iter(self.batch.values())).shape[-2]
        self.extents, self.lacking, self.patterns = (
            _extents(graph, self.batch, self.fresh),
            _lacking(graph, self.batch),
            GapPatterns.of(graph, self.batch),
        )
        self.near = like.device == self.like.device or _fits(self.batch, self.like)
        if self.near:
            self.batch = {name: value.to(self.like.device) for name, value in self.batch.items()}

    def read(self, rows: Tensor) -> Batch:
        return {
            name: _taken(value, rows).to(self.like.device) for name, value in self.batch.items()
        }

    def read_at(self, rows: Tensor, times: Tensor, timed: Callable[[str], bool]) -> Batch:
        found = {}
        for name, value in self.batch.items():
            r, t = rows.to(value.device), times.to(value.device)
            part = value[t[:, None], r[None, :]] if timed(name) else _taken(value, r)
            found[name] = part.to(self.like.device)
        return found

    def on_host(self, rows: Tensor) -> Batch:
        return {name: _taken(value, rows).cpu() for name, value in self.batch.items()}

    @classmethod
    def brought(cls, source: Mapped) -> Resident:
        """Copy all rows of mapped files to the model's device, in parts."""
        self = cls.__new__(cls)
        self.like, self.fresh, self.n, self.extents, self.near = (
            source.like,
            source.fresh,
            source.n,
            source.extents,
            True,
        )
        self.batch, self.lacking, self.patterns = {}, source.lacking, source.patterns
        # The order of rows must not depend on the device.
        self.windows = source.windows
        for start in range(0, self.n, source.part):
            rows = torch.arange(start, min(self.n, start + source.part))
            for name, value in source.on_host(rows).items():
                if name not in self.batch:
                    self.batch[name] = value.new_empty(
                        (*value.shape[:-2], self.n, value.shape[-1]), device=self.like.device
                    )
                self.batch[name][..., start : start + len(rows), :].copy_(value)
        return self


def _taken(value: Tensor, rows: Tensor) -> Tensor:
    """Select rows of a tensor [steps, n, d].

    With one step it is a matrix, which torch indexes faster.
    """
    rows = rows.to(value.device)
    return (
        value[0].index_select(0, rows).unsqueeze(0)
        if len(value) == 1
        else value.index_select(-2, rows)
    )


def _surely_fits(data: Mapping[str, Any], like: Tensor) -> bool:
    """Return whether the data fit on the device while they are checked and laid out.

    Checking and layout need several copies.
    """
    if not like.is_cuda:
        return True
    count = sum(
        _numbers_in(value.values if isinstance(value, Fresh) else value) for value in data.values()
    )
    return 8 * count * like.element_size() < torch.cuda.mem_get_info(like.device)[0]


def _fits(batch: Batch, like: Tensor, times: int = 1) -> bool:
    """Return whether ``times`` copies of a batch take less than half of the free memory.

    The memory is that of the device.
    """
    return (
        2 * times * sum(value.numel() * value.element_size() for value in batch.values())
        < torch.cuda.mem_get_info(like.device)[0]
    )


def _numbers_in(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, list | tuple):
        return sum(map(_numbers_in, value))
    return int(getattr(value, "size", 0 if value is None else 1))


class Mapped(Source):
    """Rows that are read when indexed: checked in parts before training, then read batch by batch.

    They are in memory-mapped files, in large Parquet files, or in a large torch Dataset.

    ``told(rows, all)`` is called with the number of rows checked so far, because checking a large
    file takes minutes. The pages of a map that were read count as memory of this process until they
    are released. Therefore a plain array is read from its file directly (:class:`OnDisk`). The
    pages of other maps (a part of a file, another order of axes) are released during reading.
    """

    def __init__(
        self, graph: Graph, data: Mapping[str, Any], like: Tensor, told: Told | None = None
    ) -> None:
        self.graph, self.like = graph, like
        self.fresh = {name: value for name, value in data.items() if isinstance(value, Fresh)}
        values, lengths = pad(
            graph,
            {
                name: value.values if isinstance(value, Fresh) else value
                for name, value in data.items()
            },
        )
        values |= {} if lengths is None else {LENGTHS: lengths}
        # A single number is one length for all rows.
        self.length = (
            values.pop(LENGTHS) if LENGTHS in values and np.ndim(values[LENGTHS]) == 0 else None
        )
        self.data = {name: rows_of(value) for name, value in values.items()}
        self.maps = {
            name: found
            for name, value in self.data.items()
            if (found := memory_map(value)) is not None and found.mode == "r"
        }
        for value in values.values():
            if (found := memory_map(value)) is not None:
                check_mapped(found)
        self.before = _mapped_bytes()
        counts = {name: len(value) for name, value in self.data.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"The data disagree on the number of examples: "
                f"{', '.join(f'{name} {n}' for name, n in counts.items())}."
            )
        self.n = next(iter(counts.values()))
        self.windows = _common_windows([windows_of(value) for value in values.values()])
        # Reading rows that are not mapped costs more than their hash: one pass checks and hashes.
        costly = any(is_lazy(value) and memory_map(value) is None for value in values.values())
        self.hashed = Digest() if costly else None
        self.masks: set[str] = set()
        self.extents, self.lacking, self.patterns = {}, {}, None
        self.part = max(
            1,
            CHUNK
            // max(
                1,
                sum(
                    np.asarray(value[:1]).size * like.element_size() for value in self.data.values()
                ),
            ),
        )
        for start in range(0, max(1, self.n), self.part):
            self._check(start, min(start + self.part, self.n))
            if told is not None:
                told(min(start + self.part, self.n), self.n)

    def _check(self, start: int, stop: int) -> None:
        stored = {name: np.asarray(value[start:stop]) for name, value in self.data.items()}
        values = stored | {
            name: fresh.middle(stored[name], start) for name, fresh in self.fresh.items()
        }
        steps, lengths = values.pop(STEPS, None), values.pop(LENGTHS, self.length)
        batch = prepare(
            self.graph,
            values,
            like=self.like,
            first_row=start,
            steps=steps,
            lengths=lengths,
            gaps=True,
        )
        self.masks |= {name for name in batch if is_mask(name)}
        if self.hashed is not None:
            self.hashed.update(self._laid_out(stored), start)
        for name, (low, high) in _extents(self.graph, batch, self.fresh).items():
            before = self.extents.get(name, (low, high))
            self.extents[name] = torch.minimum(before[0], low), torch.maximum(before[1], high)
        for name, columns in _lacking(self.graph, batch).items():
            self.lacking[name] = self.lacking.get(name, set()) | columns
        earlier, here = self.patterns, GapPatterns.of(self.graph, batch)
        self.patterns = here if earlier is None or here is None else earlier | here
        self._release()

    def _release(self) -> None:
        """Release the pages of read-only maps when they exceed :data:`RELEASE` bytes.

        A copy-on-write map would lose the changes written to it, so it keeps its pages.
        """
        if self.maps and _mapped_bytes() - self.before > RELEASE:
            for found in self.maps.values():
                found._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
            self.before = _mapped_bytes()

    def _gather(self, name: str, index: np.ndarray) -> np.ndarray:
        if name in self.maps:
            check_mapped(self.maps[name])
        if len(index) and len(index) == index[-1] - index[0] + 1 and (np.diff(index) == 1).all():
            found = np.asarray(self.data[name][int(index[0]) : int(index[-1]) + 1])
            # Copy the rows from the map, because its pages may be released or written to.
            found = found if found.base is None else found.copy()
            self._release()
            return found
        if name not in self.maps or not len(index):
            return np.asarray(self.data[name][index])
        parts = []
        for start in range(0, len(index), PIECE):
            parts.append(np.asarray(self.data[name][index[start : start + PIECE]]))
            self._release()
        return np.concatenate(parts)

    def read(self, rows: Tensor) -> Batch:
        return {name: value.to(self.like.device) for name, value in self.on_host(rows).items()}

    def on_host(self, rows: Tensor) -> Batch:
        index = rows.cpu().numpy()
        return self._laid_out({name: self._gather(name, index) for name in self.data})

    def digest(self) -> str:
        return super().digest() if self.hashed is None else str(self.hashed)

    def _laid_out(self, values: dict[str, np.ndarray]) -> Batch:
        steps, lengths = values.pop(STEPS, None), values.pop(LENGTHS, None)
        host = self.like.new_empty((), device="cpu")
        batch = lay_out(
            self.graph, values, like=host, masks=self.masks, steps=steps, lengths=lengths
        )
        return batch | {
            name: raw_on_axes(self.graph, name, values[name], host) for name in self.fresh
        }


def _common_windows(found: list[Windows | None]) -> Windows | None:
    """Return the windows of several variables whose groups are in memory at the same time."""
    known = [windows for windows in found if windows is not None]
    if not known:
        return None
    return Windows(known[0].sizes, max(1, int(1 / sum(1 / windows.rows for windows in known))))


def _mapped_bytes() -> int:
    """Return the bytes of file pages in this process's memory.

    0 if the system does not report them or cannot release them.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return 0
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[2]) * mmap.PAGESIZE
    except OSError:
        return 0


def open_source(graph: Graph, data: Any, like: Tensor, told: Told | None = None) -> Source:
    """Open a source of batches from the user's data.

    The data are a mapping from variable to array or file, a file, or a torch Dataset or DataLoader.
    ``told(rows, all)`` is called during the check of a mapped file.
    """
    if isinstance(data, Source):
        return data
    raw = read_arrays(data, graph)
    arrays = Placed({name: unmasked(value) for name, value in raw.items()}, places_of(raw))
    columns = columns_of(raw)
    pixels = {
        name: default_preparation(graph, name)
        for name, value in raw.items()
        if holds_pixels(graph, name, value)
    }
    for name, how in pixels.items():
        arrays[name] = prepare_levels(how, _flattened(graph, name, arrays[name]), 256)
    source = _opened(graph, arrays, like, told)
    source.pixels, source.columns = pixels, columns
    return source


def _opened(graph: Graph, arrays: dict[str, Any], like: Tensor, told: Told | None) -> Source:
    if any(is_lazy(v.values if isinstance(v, Fresh) else v) for v in arrays.values()):
        mapped = Mapped(graph, arrays, like, told)
        return (
            Resident.brought(mapped)
            if like.is_cuda
            and mapped.n
            and _fits(mapped.on_host(torch.zeros(1).long()), like, mapped.n)
            else mapped
        )
    values = {
        name: value.values if isinstance(value, Standardised) else value
        for name, value in arrays.items()
    }
    return Resident(graph, values, like, places_of(arrays))


def _flattened(graph: Graph, name: str, pixels: Any) -> Any:
    """Return images, or the images of videos, as rows if the variable is declared flat."""
    if len(graph.shapes[name]) > 1:
        return pixels
    if isinstance(pixels, list | tuple):
        return [row.reshape(len(row), -1) for row in pixels]
    return pixels.reshape(*pixels.shape[: 2 if graph.timed[name] else 1], -1)


def read_arrays(data: Any, graph: Graph) -> dict[str, Any]:
    """Return one array per variable, as the user passed it."""
    if isinstance(data, torch.utils.data.DataLoader):
        data = dataset_of(data)
    if isinstance(data, str | Path):
        return read_file(Path(data), graph)
    if is_frame(data) and (any(graph.timed.values()) or isinstance(data, Sequences)):
        return frame_by_variable(data, graph)
    if isinstance(data, Mapping):
        if not data:
            raise ValueError(
                'The data are empty: pass a dictionary from variable to array, e.g. {"x": X}.'
            )
        for name, value in data.items():
            if isinstance(value, torch.utils.data.Dataset | torch.utils.data.DataLoader):
                kind = "Dataset" if isinstance(value, torch.utils.data.Dataset) else "DataLoader"
                raise ValueError(
                    f"{name} is a {kind}, which holds whole rows. Pass it as the data themselves, "
                    f"e.g. fit(model, dataset), with rows that are dictionaries by variable or "
                    f"tuples in the order {', '.join(_names(graph))}."
                )
        read = {
            name: _single(Path(value), name, graph) if isinstance(value, str | Path) else value
            for name, value in data.items()
        }
        plain, lengths, index = frames_in_arrays(graph, read, read.get(LENGTHS))
        if index is not None and lengths is not None:
            plain[LENGTHS] = lengths
        columns = {**columns_of(data), **column_names(graph, read, index)}
        places = places_of(data)
        if index is not None:
            places = replace(places, pace=index.clock.pace(index.spacing))
        return Placed(plain, places, columns)
    if isinstance(data, torch.utils.data.IterableDataset):
        return read_stream(data, graph)
    if isinstance(data, torch.utils.data.Dataset):
        return read_dataset(data, graph)
    names = _names(graph)
    if len(names) == 1:
        alone = {names[0]: data}
        return Placed(alone, INDICES, column_names(graph, alone))
    raise ValueError(f"Pass the data by name: {{{', '.join(f'{name!r}: …' for name in names)}}}.")


def _names(graph: Graph) -> list[str]:
    return [*graph.observed, *graph.given]


def _own(tensor: Tensor, value: Any) -> Tensor:
    """Return the tensor, copied if it shares memory with the user's array.

    Later changes of the user's array must not change the training data.
    """
    if isinstance(value, Tensor):
        address = value.untyped_storage().data_ptr()
    elif hasattr(value, "__array__"):
        address = np.asarray(value).__array_interface__["data"][0]
    else:
        return tensor
    return tensor.clone() if tensor.untyped_storage().data_ptr() == address else tensor


def _extents(graph: Graph, batch: Batch, fresh: Mapping[str, Fresh]) -> Extents:
    found: Extents = {}
    for name in graph.observed:
        if name in batch and name not in fresh:
            low = high = batch[name]
            for mask in masks_of(batch, name, timed=graph.timed[name]):
                low, high = torch.where(mask, low, torch.inf), torch.where(mask, high, -torch.inf)
            found[name] = low.amin((0, 1)), high.amax((0, 1))
    return found


def _lacking(graph: Graph, batch: Batch) -> dict[str, set[int]]:
    """Return, per observed variable, the columns with a missing entry.

    Masks are True at padded steps.
    """
    masks = {name: batch[mask_of(name)] for name in graph.observed if mask_of(name) in batch}
    return {
        name: set((~mask).any(0).any(0).nonzero()[:, 0].tolist()) for name, mask in masks.items()
    }


def _single(path: Path, name: str, graph: Graph) -> Any:
    found = read_file(path, graph, only=name)
    return found[name] if name in found else next(iter(found.values()))
