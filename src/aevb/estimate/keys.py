"""Keys of a batch: a variable's name holds its values, and a key beside it the mask of those that are known."""

from __future__ import annotations


def mask_of(name: str) -> str:
    """The key of a variable's mask, which is there if some of its values are missing; no variable can have such a name."""
    return f"{name}?"


def is_mask(key: str) -> bool:
    """Whether a key of a batch holds a mask."""
    return key.endswith("?")


def variable_of(key: str) -> str:
    """The variable whose values or whose mask a key holds."""
    return key.removesuffix("?")
