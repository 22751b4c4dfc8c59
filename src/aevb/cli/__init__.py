"""The command line ``aevb``: its commands, exit codes, and how errors and warnings are printed.

Example: ``aevb train gmvae --data digits --out run``, then ``aevb evaluate run``.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, TextIO

import typer

from aevb.cli import card as card_command
from aevb.cli import (
    cluster_table,
    compare,
    doctor,
    estimators,
    export,
    reproduce,
    score_table,
    serve,
    share,
    sweep,
    train,
    use,
)
from aevb.cli import explain as look
from aevb.cli import forecast as forecast_command
from aevb.cli import page as page_command
from aevb.cli.options import in_its_words
from aevb.runtime.contention import sharing_cores

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Latent variable models by auto-encoding variational Bayes: you declare p and q, and aevb "
    "derives the bound.",
    epilog="Start with: aevb train table.csv; or: aevb models; aevb train gmvae --data digits "
    "--out run. aevb --install-completion completes names in your shell.",
)


def _version(asked: bool) -> None:
    if asked:
        from aevb.version import __version__

        print(f"aevb {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    code: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py[:NAME]",
            help="Execute this Python file first: runs of models with networks or families of your "
            "own need the file that declares them, e.g. aevb --code models.py evaluate run.",
        ),
    ] = None,
) -> None:
    from aevb.cli.model_argument import use_code

    use_code(code)


app.command(rich_help_panel="Models")(look.models)
app.command(rich_help_panel="Models")(look.explain)
app.command(rich_help_panel="Runs")(train.train)
app.command(rich_help_panel="Runs")(sweep.sweep)
app.command(rich_help_panel="Runs")(use.evaluate)
app.command(rich_help_panel="Runs")(compare.compare)
app.command(rich_help_panel="Runs")(use.sample)
app.command(rich_help_panel="Runs")(use.encode)
app.command(rich_help_panel="Runs")(use.impute)
app.command(rich_help_panel="Runs of series")(forecast_command.forecast)
app.command(rich_help_panel="Runs of series")(forecast_command.smooth)
app.command(rich_help_panel="Runs of tables")(score_table.score)
app.command(rich_help_panel="Runs of tables")(cluster_table.cluster)
app.command(rich_help_panel="Runs")(doctor.doctor)
app.command(rich_help_panel="Runs")(doctor.check)
app.command(rich_help_panel="Runs")(estimators.estimators)
app.command(rich_help_panel="Runs")(serve.serve)
app.command(rich_help_panel="Runs")(page_command.page)
app.command(rich_help_panel="Runs")(export.export)
app.command(rich_help_panel="Runs")(card_command.card)
app.command(rich_help_panel="Runs")(share.push)
app.command(rich_help_panel="Runs")(share.pull)
app.command(rich_help_panel="Runs")(reproduce.reproduce)


@cache
def command() -> Callable[[], None]:
    """Build the commands once for a process that runs several."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line and exit with a code.

    The code is 0 on success, 1 if a run failed, 2 for a wrong argument or wrong data, and 130 after
    an interrupt (Ctrl-C).
    """
    out, sys.stdout = sys.stdout, Output(sys.stdout)  # type: ignore[assignment]
    try:
        code = _run()
        sys.stdout.flush()
    finally:
        sys.stdout = out
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # torch's gloo and autograd threads can abort a process during a normal exit. All files are
        # written at this point, so skip the normal exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


class Output:
    """Standard output that survives a closed pipe (``| head``).

    Later text is discarded, and the run continues.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except BrokenPipeError:
            self._discard()
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except BrokenPipeError:
            self._discard()

    def _discard(self) -> None:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _failures() -> tuple[type[Exception], ...]:
    """Return the exceptions that mean a failed run.

    They are imported here, so that ``--help`` does not load torch.
    """
    from aevb.training.checkpoint import TrainingError

    return TrainingError, OSError


class _WarningPrinter:
    """Print each warning once, as one line in the form of every other message."""

    def __init__(self) -> None:
        self.lines: set[str] = set()

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: object = None,
        line: str | None = None,
    ) -> None:
        text = f"aevb: {in_its_words(message)}"
        if text not in self.lines:
            print(text, file=sys.stderr)
        self.lines.add(text)


def _run() -> int:
    from aevb.runtime.checked_files import DataWarning, IntegrityWarning

    with sharing_cores(), warnings.catch_warnings():
        for kind in (DataWarning, IntegrityWarning):
            warnings.simplefilter("always", kind)
        warnings.showwarning = _WarningPrinter()
        return _exit_code()


def _exit_code() -> int:
    try:
        command()()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt as error:  # raised outside the part that typer handles
        print(f"aevb: {str(error) or 'interrupted'}", file=sys.stderr)
        return 130
    except ValueError as error:
        print(f"aevb: {in_its_words(error)}", file=sys.stderr)
        return 2
    except _failures() as error:
        print(f"aevb: {in_its_words(error)}", file=sys.stderr)
        return 1
    return 0
