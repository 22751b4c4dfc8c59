"""The command ``aevb serve``, and the server that ``aevb train --serve`` starts beside a run."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from aevb.training.seed_folders import expanded

START = 20.0  # seconds that aevb train waits for its server
FUNCTIONS = {  # for the processes that compute the parts of a page
    "section": "aevb.cli.page_subjects:section_json",
    "decode": "aevb.cli.page_subjects:decode_json",
    "comparison": "aevb.cli.page_subjects:comparison_json",
}
OURS = (".lock", "model.json", "metrics.jsonl", "checkpoints")  # files that only a run has


def serve(
    context: typer.Context,
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Folders of runs. A folder of several seeds, or of a sweep, stands for its runs.",
        ),
    ],
    port: Annotated[
        int | None,
        typer.Option(
            help="Port to listen at; 0 for any free one.", show_default="8765 or the next free one"
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen at. Other machines can reach an address that is not of this "
            "machine alone, so a token is needed there."
        ),
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            help="Text that a browser must send once, in the address. By default random if other "
            "machines can reach the server, and none otherwise."
        ),
    ] = None,
    open_: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser of this machine.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for runs that have not begun yet.")
    ] = False,
    until_end_of_input: Annotated[bool, typer.Option("--until-end-of-input", hidden=True)] = False,
) -> None:
    """Show runs in the browser, also while they train.

    The page follows the training: curves, the latent map at every checkpoint, and checks when the
    run has ended. The server only reads the folders. Only this machine can reach it, unless --host
    says otherwise.

    aevb serve run

    aevb serve run other-run --open

    On another machine, forward the port: ssh -L 8765:localhost:8765 MACHINE, and open
    http://localhost:8765.
    """
    check_installed()
    from aevb.page.server.access import Access, is_loopback
    from aevb.page.server.app import create_app
    from aevb.page.server.listening import listen, open_socket
    from aevb.page.server.workers import Functions, Job

    folders = folders_of(runs, follow=follow)
    if token is None and not is_loopback(host):
        import secrets

        token = secrets.token_urlsafe(24)
    listener = open_socket(host, port)
    access = Access(host, listener.getsockname()[1], token)
    code = context.find_root().params.get("code")
    prepare = None if code is None else Job("aevb.cli.model_argument:use_code", (code,))
    app = create_app(folders, access, Functions(**FUNCTIONS, prepare=prepare))
    if until_end_of_input:
        with contextlib.suppress(OSError, AttributeError):
            os.nice(19)

    def started() -> None:
        shown = ", ".join(map(str, folders[:3])) + (", …" if len(folders) > 3 else "")
        print(f"{access.url} shows {shown}. Ctrl-C stops the server.", flush=True)
        if open_:
            import webbrowser

            threading.Thread(target=webbrowser.open, args=(access.url,), daemon=True).start()

    end = sys.stdin.buffer.read if until_end_of_input else threading.Event().wait
    with contextlib.suppress(KeyboardInterrupt):
        listen(app, listener, started, end)


def folders_of(runs: list[Path], *, follow: bool = False) -> list[Path]:
    """Return the folders of runs, with those of several seeds and of sweeps one by one.

    Raise ValueError for a folder that holds no run, unless it may begin later (``follow``).
    """
    found = list(dict.fromkeys(expanded(runs, OURS)))
    if not found:
        raise ValueError(f"{runs[0]} holds no runs yet.")
    for run in found:
        if run.exists() and not run.is_dir():
            raise ValueError(f"{run} is a file. Name the folder of a run.")
        if not follow and not any((run / name).exists() for name in OURS):
            raise ValueError(
                f"{run} holds no run. Name the folder of one, or wait for one that will begin "
                f"there: --follow."
            )
    return found


def check_installed() -> None:
    """Raise ValueError if the packages of the server are not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise ValueError(
            "The server needs starlette and uvicorn: pip install 'aevb[serve]'."
        ) from None


@contextlib.contextmanager
def page_beside(folders: list[Path], *, wanted: bool, code: str | None = None) -> Iterator[None]:
    """Show runs in the browser while they train in this process, and afterwards.

    ``code`` is the file with networks of the user that the runs need, as for ``--code``. Ctrl-C
    stops the training, and the page stays open at a terminal until another one. An error ends both.
    """
    if not wanted:
        yield
        return
    page = PageServer(folders, code)
    try:
        yield
    except typer.Exit:  # the training was interrupted, and has said so
        page.stay()
        raise
    except BaseException:
        page.close()
        raise
    page.stay()


class PageServer:
    """A server in a process of its own, which ends with this one.

    It ends when its standard input does, so even a killed trainer leaves no server behind. It has
    its own session, so that Ctrl-C does not reach it.
    """

    def __init__(self, folders: list[Path], code: str | None = None) -> None:
        check_installed()
        self.folders, self.code = folders, [] if code is None else ["--code", code]
        options = ["--follow", "--until-end-of-input", "--"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aevb", *self.code, "serve", *options, *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._first = ""
        reader = threading.Thread(target=self._read, name="aevb-page", daemon=True)
        reader.start()
        reader.join(START)
        address = self._first.partition(" ")[0]
        if address:
            print(f"The page of the run: {address}\n", flush=True)
        else:
            print("aevb: the server of the page did not start", file=sys.stderr)

    def _read(self) -> None:
        assert self.process.stdout is not None
        self._first = self.process.stdout.readline()

    def stay(self) -> None:
        """Keep the page open for a user at a terminal until Ctrl-C; else end it."""
        command = shlex.join(["aevb", *self.code, "serve", *map(str, self.folders)])
        if self.process.poll() is None and sys.stdin.isatty() and sys.stdout.isatty():
            print("The page stays open until Ctrl-C.")
            with contextlib.suppress(KeyboardInterrupt):
                self.process.wait()
        print(f"{command} shows the page again.")
        self.close()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
