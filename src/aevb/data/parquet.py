"""Rows of Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def open_dataset(path: Path) -> Any:
    """Open a Parquet file, or all Parquet files of a folder, as a ``pyarrow.dataset.Dataset``."""
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import dataset

    files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    if not files:
        raise ValueError("there is no file .parquet in it" if path.is_dir() else "there is no file")
    try:
        return dataset.dataset([str(file) for file in files], format="parquet")
    except pa.ArrowException as error:
        raise ValueError(str(error).splitlines()[0].rstrip(".")) from None
