"""Listen at a port with uvicorn: sockets, limits of connections, and times."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from aevb.page.server.access import HEADERS, LONGEST_HEAD

PORT = 8765
TRIED = 20  # ports that are tried after PORT, unless the user names one
HEAD_TIMEOUT = 10.0  # seconds until the head of a request must be complete
KEEP_ALIVE = 15  # seconds that a connection stays open without a request
MOST_CONNECTIONS = 400


class Protocol(H11Protocol):
    """HTTP as uvicorn speaks it, with limits of time and of connections, and strict headers."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.write(_whole(503, "Too many connections. Close some pages."))
            transport.close()
            return
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._stop_watching()
        self.transport.write(_whole(400, "This is no HTTP request, or its head is too long."))
        self.transport.close()

    def _watch_head(self) -> None:
        """Close a connection whose request stays incomplete."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering:
            self._stop_watching()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._close_idle)

    def _close_idle(self) -> None:
        self._head_timer = None
        answering = self.cycle is not None and not self.cycle.response_complete
        if not answering and not self.transport.is_closing():
            self.transport.close()

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _whole(status: int, text: str) -> bytes:
    """Return a whole response, for connections that have no request."""
    body = json.dumps({"error": text}).encode()
    reason = {400: "Bad Request", 503: "Service Unavailable"}[status]
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **HEADERS,
    }
    lines = [
        f"HTTP/1.1 {status} {reason}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def open_socket(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens at a port; without one, at PORT or one of the next.

    Raise ValueError if there is none.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    error: OSError | None = None
    for tried in [port] if port is not None else range(PORT, PORT + 1 + TRIED):
        try:
            return socket.create_server((host, tried), family=family, backlog=256)
        except OSError as found:
            error = found
        except OverflowError:
            raise ValueError(f"--port is a number from 0 to 65535, got {port}.") from None
    where = f"port {port}" if port is not None else f"the ports {PORT} to {PORT + TRIED}"
    reason = error.strerror if error is not None else ""
    raise ValueError(
        f"The server cannot listen at {where} of {host}: {reason}. Choose another: --port "
        f"{PORT + 100}."
    )


class Server(uvicorn.Server):
    """A uvicorn server that says when it has started."""

    def __init__(self, app: ASGIApp, started: Callable[[], None] | None = None) -> None:
        self.tell = started
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_level="critical",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=LONGEST_HEAD,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.tell is not None:
            self.tell()

    async def main_loop(self) -> None:
        """Wait for the end. uvicorn looks ten times a second, which a run that trains would pay."""
        ticks = 0  # tenths of a second, as on_tick counts them
        while not await self.on_tick(ticks):
            await asyncio.sleep(0.5)
            ticks += 5


def listen(
    app: ASGIApp, listener: socket.socket, started: Callable[[], None], end: Callable[[], object]
) -> None:
    """Serve until Ctrl-C, SIGTERM, or until ``end`` returns; ``end`` runs in a thread."""
    server = Server(app, started)

    def stop() -> None:
        end()
        server.should_exit = True

    threading.Thread(target=stop, name="aevb-end", daemon=True).start()
    server.run(sockets=[listener])
