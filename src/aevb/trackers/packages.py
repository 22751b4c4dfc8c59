"""Check that the package of a tracker is installed."""

from __future__ import annotations

from importlib.util import find_spec


def check_installed(package: str, tracker: str) -> None:
    """Raise ValueError with the pip command if a package is missing. It is not imported."""
    if find_spec(package) is None:
        raise ValueError(
            f"The tracker {tracker} needs the package {package}: pip install 'aevb[{package}]'."
        )
