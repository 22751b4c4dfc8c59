"""Safe files: hashes, reading with size limits, and atomic writing."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LONGEST = 2**22  # bytes of JSON that are read; a declaration of a thousand variables has 2**18
LONGEST_BESIDE = 2**26  # the same for a run's data.json, which has two numbers for each column
DEEPEST = 32  # levels of nesting; a declaration has six
LONGEST_HEADER = 2**23  # bytes that the header of a safetensors file may have
MOST_AXES = 64  # axes of a tensor; torch allows no more


class DataWarning(UserWarning):
    """Warning about unused or suspicious data, or a run whose results may be wrong.

    ``for_commands`` is the command line's message.
    """

    for_commands: str

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.for_commands = text


class IntegrityWarning(UserWarning):
    """Warning about a file that cannot be fully verified.

    The message says what is missing or damaged, and the consequence.
    """


@contextmanager
def whole_file(out: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces ``out`` when complete.

    If writing fails, e.g. on a full disk, ``out`` stays as it was. The temporary path has the same
    suffix. A symbolic link stays a link. Anything but a plain file (e.g. a pipe) is written
    directly.
    """
    real = out.resolve()
    place = (
        out
        if out.exists() and not out.is_file()
        else real.with_name(f".{os.getpid()}.part.{real.name}")
    )
    try:
        yield place
        if place != out:
            place.replace(real)
    except OSError as error:
        raise OSError(
            error.errno or errno.EIO, f"{error.strerror or error}; nothing was written", str(out)
        ) from None
    finally:
        if place != out:
            place.unlink(missing_ok=True)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder to write into, which becomes ``out`` when complete.

    It is a hidden folder beside ``out``. If writing fails, nothing is left of it, and a kill leaves
    no part of ``out``. ``out`` may be an empty folder; raise FileExistsError if it has files by
    then. A folder that cannot be replaced (a mount point, the current folder) is written directly.
    """
    real = out.resolve()
    if real.is_dir() and (
        real.is_mount() or real == Path.cwd() or not os.access(real.parent, os.W_OK)
    ):
        yield real
        return
    place = real.with_name(f".{os.getpid()}.part.{real.name}")
    shutil.rmtree(place, ignore_errors=True)  # of a killed process with the same number
    place.mkdir(parents=True)
    try:
        yield place
        try:
            place.rename(real)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            raise FileExistsError(
                errno.EEXIST, "another command wrote it; nothing was written", str(out)
            ) from None
    finally:
        shutil.rmtree(place, ignore_errors=True)


def read_json(path: Path, longest: int = LONGEST) -> Any:
    """Return the content of a JSON file.

    Raise ValueError, with the reason, for an invalid file, and for one that is longer or more
    deeply nested than any file that this library writes.
    """
    refuse_endless(path)
    size = path.stat().st_size
    if size > longest:
        raise ValueError(f"it has {size:,} bytes, more than the {longest:,} that are read")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [found]
    for _ in range(DEEPEST):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return found
    raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def refuse_endless(path: Path) -> None:
    """Raise ValueError for a pipe or a device: reading it might never end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError("it is a pipe or a device, not a file")


def seal(record: Any) -> str:
    """Return the SHA-256 of JSON-ready data, independent of their layout in a file."""
    return hashlib.sha256(
        json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file; the file is read in parts."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a safetensors file, by name.

    Only the header is read. Raise ValueError, with the reason, for an invalid file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise ValueError(f"its header would have {length:,} bytes, the file has {size:,}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise ValueError("its header is no JSON") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    found = {}
    for name, record in header.items():
        if name == "__metadata__":
            continue
        shape: Any = record.get("shape") if isinstance(record, dict) else None
        if not _is_shape(shape, size):
            raise ValueError(f"its header gives {name} a shape that the file has no room for")
        found[name] = tuple(shape)
    return found


def _is_shape(shape: Any, size: int) -> bool:
    """Return whether a tensor of this shape fits into ``size`` bytes."""
    counts = (
        isinstance(shape, list)
        and len(shape) <= MOST_AXES
        and all(type(n) is int and 0 <= n <= size for n in shape)
    )
    return counts and math.prod(shape) <= size


def replace(path: Path, content: str | bytes) -> None:
    """Write a file so that a kill leaves the old or the new file, never a partial one."""
    temporary = path.with_name(f"{path.name}.writing")
    try:
        write_synced(temporary, content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_synced(path: Path, content: bytes) -> None:
    if path.is_symlink():
        path.unlink()  # the target of the link may belong to another program
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_mapped(array: Any) -> None:
    """Refuse an array mapped from a file (numpy.memmap) that is now shorter than its map.

    Reading beyond the end of the file would kill the process (SIGBUS).
    """
    if getattr(array, "_mmap", None) is None or not array.filename:
        return  # not mapped, or computed from a mapped array
    there = os.stat(array.filename).st_size
    need = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY + len(array._mmap)
    if there < need:
        raise ValueError(
            f"{array.filename} has {there} bytes, but had {need} when it was opened: something "
            f"truncated it since. Write it again."
        )
