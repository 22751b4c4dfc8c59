"""Compare the library with the interpreter on many random declarations and print a table.

cd tests && python -m interpreter --models 1200
cd tests && python -m interpreter --models 40 --faults
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections import Counter

import torch

from .compare import Comparer
from .faults import FAULTS, noticed
from .random_declarations import random_declaration


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=1200, help="how many random declarations")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed")
    parser.add_argument("--show", type=int, default=20, help="how many differences to print")
    parser.add_argument(
        "--faults",
        action="store_true",
        help="put each of the known faults into the library and count who notices",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.faults:
        for fault in FAULTS:
            found = noticed(fault, range(arguments.first, arguments.first + arguments.models))
            print(
                f"{fault:<80} {found['comparisons']:>6} compared {found['noticed']:>6} notice it, "
                f"{found['errors']} errors",
                flush=True,
            )
        return
    made, differing, refused, shown, started = Counter(), Counter(), 0, 0, time.time()
    for seed in range(arguments.first, arguments.first + arguments.models):
        declaration, _ = random_declaration(seed)
        comparer = Comparer(declaration, seed)
        try:
            for comparison in comparer.run():
                made[comparison.what] += 1
                if not comparison.agrees:
                    differing[comparison.what] += 1
                    shown += 1
                    if shown <= arguments.show:
                        print(
                            f"seed {seed}: {comparison.what} differs by "
                            f"{comparison.difference:.3g} ({comparison.detail})\n  {declaration}",
                            flush=True,
                        )
        except Exception:
            differing["error"] += 1
            shown += 1
            if shown <= arguments.show:
                print(f"seed {seed}: {declaration}\n{traceback.format_exc(limit=-6)}", flush=True)
        refused += comparer.refused
    for what in sorted(made):
        print(f"{what:<28} {made[what]:>7} {differing[what]:>7}")
    total = f"{'all':<28} {sum(made.values()):>7} {sum(differing.values()):>7}"
    print(
        f"{total}   {arguments.models} models, {refused} requests refused by the library, "
        f"{time.time() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
