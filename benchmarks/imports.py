"""Time commands from start to end: imports of torch and of the library, and the command line."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping

from timing import summary

COMMANDS = {
    "python": [sys.executable, "-c", "pass"],
    "import torch": [sys.executable, "-c", "import torch"],
    "from aevb import Model, fit": [sys.executable, "-c", "from aevb import Model, fit"],
    "aevb --help": [sys.executable, "-m", "aevb", "--help"],
}


def startup(
    rounds: int, commands: Mapping[str, list[str]] = COMMANDS
) -> dict[str, dict[str, float]]:
    """Return the median seconds over rounds, each of which starts every command once.

    One round before them does not count: it fills the file cache.
    """
    times: dict[str, list[float]] = {name: [] for name in commands}
    for count in range(rounds + 1):
        for name, command in commands.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if count:
                times[name].append(time.perf_counter() - began)
    return summary(times)
