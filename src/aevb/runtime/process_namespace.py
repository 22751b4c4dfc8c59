"""The namespace in which a process has its id: containers have their own."""

from __future__ import annotations

import os


def process_namespace() -> str:
    """Return a name of this process's namespace of process ids; "" where there are none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
