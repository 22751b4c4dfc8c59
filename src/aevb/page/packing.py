"""Arrays as JSON objects: raw bytes in base64, deflated if that makes them smaller."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

TYPES: dict[str, Any] = {
    "u1": np.uint8,
    "u2": np.uint16,
    "u4": np.uint32,
    "i4": np.int32,
    "f2": np.float16,
    "f4": np.float32,
    "f8": np.float64,
}
TRIED = 2**16  # bytes that are deflated to see whether deflating the whole array pays
WORTH = 0.9  # deflate if that leaves at most this share of the bytes


def pack(array: np.ndarray, dtype: str) -> dict[str, Any]:
    """Pack an array as a JSON object: ``$`` is the type, ``b`` the bytes, ``z`` if deflated.

    >>> pack(np.array([1.0, 2.0]), "u1")
    {'$': 'u1', 'shape': [2], 'z': False, 'b': 'AQI='}
    """
    array = np.asarray(array)
    if dtype[0] in "ui" and array.size:
        limits = np.iinfo(TYPES[dtype])
        least, most = limits.min, limits.max
        if not (array.min() >= least and array.max() <= most):  # a NaN is in no range
            raise ValueError(
                f"{dtype} holds numbers from {least} to {most}, got {array.min()} to {array.max()}."
            )
    kept = np.ascontiguousarray(array, dtype=np.dtype(TYPES[dtype]).newbyteorder("<"))
    raw = kept.tobytes()
    # Coordinates hardly shrink, and deflating megabytes of them takes seconds.
    start = raw[:TRIED]
    deflated = bool(raw) and len(_deflate(start)) <= WORTH * len(start)
    return {
        "$": dtype,
        "shape": list(kept.shape),
        "z": deflated,
        "b": base64.b64encode(_deflate(raw) if deflated else raw).decode("ascii"),
    }


def unpack(packed: dict[str, Any]) -> np.ndarray:
    """Return the array of a packed one."""
    raw = base64.b64decode(packed["b"])
    raw = zlib.decompress(raw, wbits=-15) if packed["z"] else raw
    dtype = np.dtype(TYPES[packed["$"]]).newbyteorder("<")
    return np.frombuffer(raw, dtype=dtype).reshape(packed["shape"])


def quantised(values: np.ndarray) -> dict[str, Any]:
    """Pack numbers as 16-bit steps between their extremes; 65535 marks those that are not finite.

    The result has ``low`` and ``high``, so that number k stands for low + (high − low) k / 65534.
    """
    finite = np.isfinite(values)
    low = float(values[finite].min()) if finite.any() else 0.0
    high = float(values[finite].max()) if finite.any() else 0.0
    steps = np.zeros(values.shape)
    if high > low:
        # High and low may be so far apart that their difference overflows.
        np.divide(values / 2 - low / 2, high / 2 - low / 2, out=steps, where=finite)
    numbers = np.where(finite, np.round(steps * 65534), 65535)
    return {"low": low, "high": high, "values": pack(numbers, "u2")}


def _deflate(raw: bytes) -> bytes:
    deflater = zlib.compressobj(6, zlib.DEFLATED, -15)
    return deflater.compress(raw) + deflater.flush()
