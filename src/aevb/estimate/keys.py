"""Keys of a batch: ``x`` holds the values of a variable, ``x?`` the mask of its known values."""

from __future__ import annotations


def mask_of(name: str) -> str:
    """The key of a variable's mask.

    A batch has it if some values are missing. No variable can have such a name.
    """
    return f"{name}?"


def is_mask(key: str) -> bool:
    """Whether a key of a batch holds a mask."""
    return key.endswith("?")


def variable_of(key: str) -> str:
    """The variable whose values or whose mask a key holds."""
    return key.removesuffix("?")
