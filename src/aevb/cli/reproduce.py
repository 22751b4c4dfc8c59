"""The command ``aevb reproduce``: run the tutorial's experiments and write their report."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from aevb.cli.options import Device, Quiet, device_of, path
from aevb.runtime.suggestions import did_you_mean


def reproduce(
    sections: Annotated[
        list[str] | None,
        typer.Argument(help="Models to train: fa, vae, cvae, gmvae, vrnn, or all (the default)."),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            help="digits (8×8, included: minutes on a laptop) or mnist (28×28, the tutorial's "
            "sizes: needs a GPU)."
        ),
    ] = "digits",
    out: Annotated[
        Path, typer.Option(parser=path, help="A folder for the results and the report.")
    ] = Path("reproduction"),
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Number of parallel experiments, each in its own process; the default depends on "
            "the machine."
        ),
    ] = None,
    device: Device = "auto",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Train only a few epochs per experiment, to test that everything runs."
        ),
    ] = False,
    report_only: Annotated[
        bool,
        typer.Option(
            "--report-only", help="Build the report from existing results, without training."
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Train the tutorial's five models, run all experiments, and write one report.

    Finished experiments are not repeated: run the same command again to continue an interrupted
    reproduction.

    Example: aevb reproduce --out reproduction
    """
    import time

    from aevb import experiments
    from aevb.experiments.lab import Lab
    from aevb.report.page import build

    chosen = experiments.SECTIONS if not sections or "all" in sections else tuple(sections)
    for section in chosen:
        if section not in experiments.SECTIONS:
            raise ValueError(
                f"There is no section {section!r}. Choose {', '.join(experiments.SECTIONS)}, or "
                f"all.{did_you_mean(section, (*experiments.SECTIONS, 'all'))}"
            )
    if data not in ("digits", "mnist"):
        raise ValueError(f"The experiments use digits or mnist, not {data!r}. Use --data digits.")
    lab = Lab(out, data, device_of(device), quick)
    failed = []
    if not report_only:
        lab.claim()
        began = time.perf_counter()
        count = sum(len(experiments.tasks(lab, section)) for section in chosen)
        at_once = jobs or (
            8 if lab.device.startswith("cuda") else max(1, min(4, os.cpu_count() or 1))
        )
        if not quiet:
            print(f"{count} experiments on {data}, {at_once} at a time, into {out}")
        for number, (name, seconds, why) in enumerate(
            experiments.run(lab, chosen, jobs=at_once), 1
        ):
            state = "failed" if why else "done before" if seconds is None else f"{seconds:.1f} s"
            if not quiet:
                print(
                    f"{number:>3} of {count}  {name:<22} {state:>12}   "
                    f"{time.perf_counter() - began:6.0f} s in all",
                    flush=True,
                )
            if why:
                failed.append(name)
                print(why, file=sys.stderr)
            lab.took(time.perf_counter() - began)
    print(f"The report: {build(out)}")
    if failed:
        print(
            f"aevb: {len(failed)} of the experiments failed: {', '.join(failed)}. Run the same "
            f"command to try them again.",
            file=sys.stderr,
        )
        raise typer.Exit(1)
