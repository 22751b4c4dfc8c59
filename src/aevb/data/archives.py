"""Read arrays from .npy and .npz files.

Uncompressed arrays are memory-mapped, never loaded as a whole.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np

_OBJECTS = ("Python objects in dtype", "Object arrays cannot be loaded")  # numpy's messages


def read_array(path: Path) -> np.ndarray:
    """Memory-map the array of a .npy file."""
    with path.open("rb") as file:
        shape, _, dtype = _described(file)
        _check_kind(dtype)
        if not shape:
            raise ValueError("it holds a single number, not rows")
        need = file.tell() + int(np.prod(shape, dtype=object)) * dtype.itemsize
    there = path.stat().st_size
    if there < need:
        raise ValueError(
            f"it is cut short: an array of shape {list(shape)} needs {need} bytes, but the file "
            f"has {there}. Copy the file again"
        )
    if 0 in shape:
        return np.empty(shape, dtype)
    mapped: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped


def read_archive(path: Path) -> dict[str, Any]:
    """Read the arrays of a .npz file.

    Uncompressed arrays (np.savez) are memory-mapped, compressed ones are loaded.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {
                info.filename.removesuffix(".npy"): info
                for info in archive.infolist()
                if info.filename.endswith(".npy")
            }
            locked = next((info.filename for info in members.values() if info.flag_bits & 1), None)
            if locked is not None:
                raise ValueError(
                    f"its member {locked} is encrypted. Unpack it with its password, and save it "
                    f"without a password (np.savez)"
                )
            return {
                name: _mapped(path, info)
                if info.compress_type == zipfile.ZIP_STORED
                else _loaded(archive, info)
                for name, info in members.items()
            }
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, OverflowError) as error:
        raise ValueError(
            f"it is damaged ({str(error).rstrip('.') or 'it ends early'}). Copy the file again"
        ) from None


def _described(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, axis order and dtype from the header of a .npy file."""
    try:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = read(file)
    except (
        ValueError,
        SyntaxError,
        TypeError,
        KeyError,
        MemoryError,
        RecursionError,
        UnicodeDecodeError,
    ) as error:
        reason = str(error).splitlines()[0].partition(": <")[0].rstrip(".")
        raise ValueError(
            _objects(error) or f"it is not an array written by numpy, or it is damaged: {reason}"
        ) from None
    if any(not 0 <= size < 2**63 for size in shape):
        raise ValueError(f"it is damaged: an array of shape {list(shape)}")
    return shape, fortran, dtype


def _check_kind(dtype: np.dtype[Any]) -> None:
    if dtype.hasobject:
        raise ValueError(_objects(ValueError(_OBJECTS[0])))
    if dtype.kind not in "biuf":
        raise ValueError(f"it holds {dtype}, not numbers")


def _objects(error: Exception) -> str | None:
    if not any(words in str(error) for words in _OBJECTS):
        return None
    return (
        "it holds Python objects, not an array of numbers. Save sequences of different lengths "
        "padded, with their lengths (np.savez(file, x=padded, lengths=lengths)), or as a column "
        "of lists in Parquet"
    )


def _mapped(path: Path, info: zipfile.ZipInfo) -> np.ndarray:
    with path.open("rb") as file:
        file.seek(info.header_offset)
        # This is the local header. A name, an extra field and the member follow it.
        local = file.read(30)
        if local[:4] != b"PK\x03\x04":
            raise ValueError(f"its member {info.filename} is damaged. Copy the file again")
        file.seek(
            info.header_offset
            + 30
            + int.from_bytes(local[26:28], "little")
            + int.from_bytes(local[28:30], "little")
        )
        begin = file.tell()
        shape, fortran, dtype = _described(file)
        _check_kind(dtype)
        need = file.tell() - begin + int(np.prod(shape, dtype=object)) * dtype.itemsize
        there = min(info.file_size, os.fstat(file.fileno()).st_size - begin)
        if there < need:
            raise ValueError(
                f"its member {info.filename} is cut short: it needs {need} bytes but has {there}. "
                f"Copy the file again"
            )
        found = os.fstat(file.fileno())
        if (
            _checksum(path, begin, info.file_size, (found.st_ino, found.st_size, found.st_mtime_ns))
            != info.CRC
        ):
            raise ValueError(
                f"its member {info.filename} is damaged: its checksum differs from the recorded "
                f"one. Copy the file again"
            )
        if not shape or 0 in shape:
            return np.fromfile(file, dtype, 0 if 0 in shape else 1).reshape(shape)
        return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")


@lru_cache(maxsize=64)
def _checksum(path: Path, begin: int, length: int, identity: tuple[int, ...]) -> int:
    """Return the CRC-32 of a part of a file.

    The result is cached per identity (inode, size, modification time), because commands open their
    data twice.
    """
    found = 0
    with path.open("rb") as file:
        file.seek(begin)
        while length > 0 and (part := file.read(min(length, 2**20))):
            found = zlib.crc32(part, found)
            length -= len(part)
    return found


def _loaded(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """Load a compressed member, after checking that it fits into memory."""
    with archive.open(info) as file:
        shape, _, dtype = _described(file)
    _check_kind(dtype)
    need, free = int(np.prod(shape, dtype=object)) * dtype.itemsize, _free_memory()
    if need > info.file_size:
        raise ValueError(
            f"its member {info.filename} is damaged: it needs {need} bytes but has "
            f"{info.file_size}. Copy the file again"
        )
    if 2 * need > free:  # unpacking makes a copy
        raise ValueError(
            f"its member {info.filename} needs {2 * need / 2**30:.1f} GiB to unpack, but "
            f"{free / 2**30:.1f} GiB are free. "
            "Save it without compression (np.savez); aevb then reads it in parts"
        )
    with archive.open(info) as file:
        found: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return found


def _free_memory() -> float:
    """Return the bytes of free memory; infinite if the system does not report them."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(
                float(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration, ValueError):
        return float("inf")
