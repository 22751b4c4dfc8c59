"""The command ``aevb sweep``: train a grid of models and compare them on held-out rows."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aevb.cli.completion import arguments, tables_and_models, words
from aevb.cli.missing_marks import marks_of, only_numbers
from aevb.cli.model_argument import program
from aevb.cli.options import (
    Data,
    Device,
    Kind,
    Missing,
    Prepare,
    Quiet,
    SplitSeed,
    Track,
    Validation,
    Without,
    check_evidence,
    check_resume,
    device_of,
    given_settings,
    in_its_words,
    path,
    silent,
    takes_settings,
    trackers_of,
)
from aevb.cli.sweep_table import ModelOfTable, model_of
from aevb.cli.train import refuse_for_tables, refuse_table_options
from aevb.cli.train_table import TableOptions, names_table

if TYPE_CHECKING:
    from aevb.comparison.sweep import Finished, Rows
    from aevb.model import Model
    from aevb.training.run import Run

HOLD_OUT = 0.2  # of a file's rows, unless --hold-out or --validation says otherwise
STARTING = 10.0  # seconds of work that are worth the start of other processes


@dataclass(frozen=True)
class NamedModel:
    """The model and the data that a command names, for every combination of arguments."""

    text: str
    data: str
    prepare: str | None
    missing: tuple[float, ...]
    validation: str | None
    hold_out: float
    split: int
    device: str
    track: tuple[str, ...] = ()

    def model(self, arguments: Mapping[str, str]) -> Model:
        from aevb.cli.model_argument import resolve

        found = resolve(self.text, self.data, arguments, self.missing)
        return found.to(self.device)

    def rows(self, model: Model) -> Rows:
        from aevb.comparison.entrants import identify
        from aevb.comparison.runs import describe_loaded, units_of
        from aevb.comparison.sweep import Rows
        from aevb.data.datasets import load
        from aevb.data.sources import open_source

        loaded = load(
            self.data,
            model.graph,
            prepare=self.prepare,
            validation=self.validation,
            hold_out=self.hold_out,
            split=self.split,
            missing=self.missing,
        )
        held_out = loaded.test
        if held_out is None:
            raise ValueError("A sweep compares held-out rows: give --hold-out or --validation.")
        source = open_source(model.graph, held_out.data, model._parameter())
        jacobian, units = units_of(model, loaded, source)
        names = [*model.graph.shapes]
        return Rows(
            loaded.train.data,
            held_out.data,
            identify(loaded.train.raw, names),
            identify(held_out.raw, names),
            loaded.recipe,
            jacobian,
            describe_loaded(loaded, source.n),
            units,
        )

    def train(
        self,
        model: Model,
        rows: Rows,
        seeds: Sequence[int],
        out: Path,
        *,
        resume: bool,
        settings: Mapping[str, Any],
    ) -> list[Run]:
        from aevb.training.fit import fit

        return fit(
            model,
            rows.train,
            validation=rows.held_out,
            seeds=seeds,
            out=out,
            resume=resume,
            recipe=rows.recipe,
            progress=False,
            trackers=self.track,
            **{**self._defaults(), **settings},
        )

    def _defaults(self) -> Mapping[str, Any]:
        from aevb.zoo import recipes

        return recipes.get(self.text, {})


@takes_settings
def sweep(
    model: Annotated[
        str,
        typer.Argument(
            metavar="TABLE|MODEL",
            help="A table (.csv, .tsv, .txt, .parquet); or a model with --data: a name from `aevb "
            "models`, or file.py:name (Python executes the file).",
            autocompletion=tables_and_models,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(parser=path, help="A folder for the runs; the same command goes on in it."),
    ],
    data: Data = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUES",
            help="Values of an argument of the model: components=2..12 (whole numbers), "
            "latent=2,4,8 (a list). May be repeated; all combinations are trained.",
            rich_help_panel="Model",
            autocompletion=arguments,
        ),
    ] = None,
    model_: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="The model of a table: mixture (components, covariance), factors (latent), vae "
            "(latent, hidden) or gmvae (components, latent, hidden). By default components means "
            "a mixture, latent means factors, and both mean gmvae.",
            rich_help_panel="Table",
            autocompletion=words("mixture", "factors", "vae", "gmvae"),
        ),
    ] = None,
    kind: Kind = None,
    without: Without = None,
    prepare: Prepare = None,
    missing: Missing = None,
    validation: Validation = None,
    hold_out: Annotated[
        float | None,
        typer.Option(
            help="Fraction of the file's rows to hold out; by default 0.2 of a file without "
            "--validation.",
            rich_help_panel="Data",
        ),
    ] = None,
    split: SplitSeed = 0,
    seeds: Annotated[
        int, typer.Option(help="Runs for each combination, with seeds 0, 1, ….", min=1)
    ] = 1,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Runs that train at a time, each in a process with one thread. By default one "
            "per core, or one after another if that is faster. It does not change the results.",
            min=1,
        ),
    ] = None,
    evidence: Annotated[
        str, typer.Option(help="How to compute log p(x), as in aevb compare.")
    ] = "auto",
    samples_evidence: Annotated[
        int | None, typer.Option("--evidence-samples", help="Samples of that estimate.")
    ] = None,
    device: Device = "auto",
    track: Track = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Refuse to begin a new sweep. One that is in --out goes on without this, too.",
        ),
    ] = False,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Train a model with every combination of arguments, and rank the runs by held-out log p(x).

    The command may be stopped or killed at any time. The same command goes on: finished runs are
    not repeated, and an unfinished run resumes from its last checkpoint. The grid and --seeds may
    be extended.

    The folder has one folder per run, table.csv and sweep.png.

    Examples:

    aevb sweep table.csv --set components=1..12 --out sweep

    aevb sweep gmvae --data digits --set y=5..15 --set z=4,8 --seeds 2 --out sweep
    """
    from aevb.comparison.grid import parse_grid
    from aevb.comparison.sweep import Sweep, ranked
    from aevb.comparison.sweep_report import sweep_picture, sweep_text, write_table
    from aevb.data.builtin import NAMES
    from aevb.training.settings import Settings

    check_evidence(evidence)
    if resume:
        check_resume(out, [out])
    given = given_settings(settings)
    if "seed" in given:
        raise ValueError("A sweep trains with the seeds 0, 1, …. Use --seeds instead of --seed.")
    grid = parse_grid(set_ or [])
    if hold_out is None:
        hold_out = HOLD_OUT if validation is None and data not in NAMES else 0.0
    marks, device = marks_of(missing), device_of(device)
    trackers = trackers_of(track)
    builder: NamedModel | ModelOfTable
    if names_table(model):
        refuse_for_tables(model, data, prepare, None)
        options = TableOptions(
            model_of(grid, model_),
            None,
            tuple(kind or ()),
            tuple(without or ()),
            tuple(marks),
            validation,
            hold_out,
            split,
        )
        # Several seeds are starts of their own, so that they differ.
        builder = ModelOfTable(model, options, 1 if seeds > 1 else None, device, trackers)
        with silent(quiet):
            print(f"{builder.described()}\n")
    else:
        refuse_table_options(model, model_, kind, without)
        if data is None:
            raise ValueError("Say which data to train on, e.g. --data digits or --data table.csv.")
        markers = tuple(only_numbers(missing) or ())
        builder = NamedModel(
            model, data, prepare, markers, validation, hold_out, split, device, trackers
        )
    recorded = Settings(**given).record()
    named = {
        "model": model,
        "data": data,
        "prepare": prepare,
        "missing": marks,
        "validation": validation,
        "hold_out": hold_out,
        "split": split,
        "evidence": evidence,
        "evidence_samples": samples_evidence,
        "table model": model_,
        "kind": list(kind or ()),
        "without": list(without or ()),
        "starts": getattr(builder, "starts", None),
    }
    plan = Sweep(
        builder,
        grid,
        seeds,
        out,
        given,
        {"method": evidence, "samples": samples_evidence, "seed": 0},
        {"options": named, "settings": {name: recorded[name] for name in given}},
    )
    with plan.opened() as rows:
        with silent(quiet):
            failed = _carry_out(plan, jobs)
        found, comparison = ranked(plan, rows)
        write_table(out / "table.csv", found, comparison)
        sweep_picture(found, comparison, grid, out / "sweep.png")
    print(in_its_words(sweep_text(found, comparison)))
    for name, reason in failed.items():
        print(f"Failed: {name}: {in_its_words(reason)}")
    print(f"The table is in {out / 'table.csv'}, the picture in {out / 'sweep.png'}.")
    if not quiet:
        print(f"Next: {program()} evaluate {shlex.quote(str(found[0].folder))}")
    if failed:
        raise typer.Exit(1)


def _carry_out(plan: Any, jobs: int | None) -> dict[str, str]:
    """Carry out what is left of a sweep, and print a line for each run. Return the failures."""
    from aevb.comparison.sweep import carry_out_here
    from aevb.comparison.workers import carry_out_in_parallel
    from aevb.runtime.contention import CORES
    from aevb.training.interrupts import Stopped

    on_gpu = plan.builder.device != "cpu"
    # On a GPU, the seeds of a combination train at the same time in one process.
    left = plan.open_jobs(together=on_gpu)
    total = len(plan.runs())
    done = total - sum(len(job.seeds) for job in left)
    print(
        f"{total} runs in {plan.out}"
        + (f", {done} of them finished before" if done else "")
        + (f"; {total - done} to do." if left else ".")
    )
    failed: dict[str, str] = {}
    count = done

    def told(name: str, outcome: list[Finished] | str, seconds: float) -> None:
        nonlocal count
        if isinstance(outcome, str):
            failed[name] = outcome
            print(f"  {name}: failed: {in_its_words(outcome)}", flush=True)
            return
        for one in outcome:
            count += 1
            print(
                f"  {count:>{len(str(total))}}/{total}  {one.compared.name}: log p "
                f"{one.compared.mean:.3f}, {one.steps} steps, {seconds:.1f} s",
                flush=True,
            )

    try:
        workers = 1 if on_gpu else jobs or CORES
        if left and (jobs is None or workers == 1):
            # The first run shows whether other processes are worth their start.
            first, left = left[:1], left[1:]
            start = time.perf_counter()
            carry_out_here(plan, first, told)
            slow = (time.perf_counter() - start) * len(left) > STARTING
            workers = workers if slow else 1
        if workers > 1 and len(left) > 1:
            carry_out_in_parallel(plan, left, workers, told)
        else:
            carry_out_here(plan, left, told)
    except (Stopped, KeyboardInterrupt):
        print(
            f"aevb: stopped after {count} of {total} runs; the same command goes on",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    return failed
