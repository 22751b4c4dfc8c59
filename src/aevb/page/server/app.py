"""The routes of the server. All of them only read.

============================  ======================================================================
``/``                         the page without data
``/app.js``, ``/app.css``     its program and style
``/api/runs``                 the runs: names, states, versions of their parts
``/api/runs/0/summary``       a part of a run: summary, map or checks
``/api/runs/0/decode``        decoded values of latents (``?request=`` with JSON)
``/api/comparison``           the comparison of all runs
``/api/events``               news: rows, states and versions, as server-sent events
============================  ======================================================================
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aevb.page import html
from aevb.page.server.access import HEADERS, Access
from aevb.page.server.live import (
    MOST_CLIENTS,
    PARTS,
    FullError,
    Live,
    LiveRun,
    Part,
    WaitingError,
)
from aevb.page.server.workers import Functions, JobError

KINDS = {"app.js": "text/javascript; charset=utf-8", "app.css": "text/css; charset=utf-8"}
LONGEST_REQUEST = 2**16  # bytes of JSON
DEEPEST = 8  # levels of nesting of a request


def create_app(
    folders: list[Path],
    access: Access,
    functions: Functions,
    *,
    shell: str | None = None,
    static: Mapping[str, str] | None = None,
) -> ASGIApp:
    """Return the application that shows runs.

    ``functions`` compute the parts of pages. ``shell`` is the page without data, and ``static`` has
    the texts of ``app.js`` and ``app.css``; by default both are those of the package.
    """
    live = Live(folders, functions)
    files = dict(static) if static is not None else read_static()
    page = html.shell() if shell is None else shell
    server = secrets.token_hex(4)  # other servers may have computed other texts

    def tagged(request: Request, text: bytes, version: str, kind: str) -> Response:
        tag = f'"{server}-{version}"'
        headers = {"ETag": tag, "Cache-Control": "no-cache, private", "Aevb-Version": version}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(text, media_type=kind, headers=headers)

    def answered(request: Request, part: Part) -> Response:
        return tagged(request, part.text, part.version, "application/json")

    def run_of(request: Request) -> LiveRun:
        text = request.path_params["i"]
        known = text.isascii() and text.isdecimal() and len(text) < 6
        if not known or int(text) >= len(live.runs):
            raise HTTPException(404, f"There is no such run: they are 0 to {len(live.runs) - 1}.")
        return live.runs[int(text)]

    async def shown(request: Request) -> Response:
        if access.asks_cookie(request.scope["query_string"]):
            # The address without the token stays in the browser's history.
            return RedirectResponse("/", 303, {"Set-Cookie": access.set_cookie})
        return Response(page, media_type="text/html")

    async def file(request: Request) -> Response:
        name = request.url.path[1:]
        text = files[name].encode()
        return tagged(request, text, hashlib.sha256(text).hexdigest()[:16], KINDS[name])

    async def runs(request: Request) -> Response:
        for run in live.runs:
            await live.look(run)
        return JSONResponse({"server": server, "runs": live.described()})

    async def part(request: Request) -> Response:
        run = run_of(request)
        name = request.path_params["part"]
        if name not in PARTS:
            raise HTTPException(404, f"A run has the parts {', '.join(PARTS)}.")
        return answered(request, await live.part(run, name))

    async def decode(request: Request) -> Response:
        run = run_of(request)
        asked = parse_request(request.query_params.get("request", ""))
        return Response(await live.decode(run, asked), media_type="application/json")

    async def comparison(request: Request) -> Response:
        return answered(request, await live.comparison())

    async def events(request: Request) -> Response:
        last = request.headers.get("last-event-id") or request.query_params.get("after", "")
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return StreamingResponse(live.events(last), media_type="text/event-stream")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await live.close()

    app = Starlette(
        routes=[
            Route("/", shown),
            *(Route(f"/{name}", file) for name in KINDS),
            Route("/api/runs", runs),
            Route("/api/runs/{i}/decode", decode),
            Route("/api/runs/{i}/{part}", part),
            Route("/api/comparison", comparison),
            Route("/api/events", events),
        ],
        exception_handlers={
            HTTPException: _refused,
            WaitingError: _waiting,
            JobError: _failed,
            FullError: _full,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.live = live
    return Guard(app, access)


class Guard:
    """Refuse requests that :class:`Access` does not allow, and put HEADERS on every response."""

    def __init__(self, app: Starlette, access: Access) -> None:
        self.app, self.access, self.state = app, access, app.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # nothing here speaks by websockets
            await send({"type": "websocket.close", "code": 1008})
            return
        begun = False

        async def with_headers(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message = {**message, "headers": _with_headers(message.get("headers", []))}
            await send(message)

        path, query = scope.get("raw_path") or b"", scope["query_string"]
        target = path + b"?" + query if query else path
        refusal = self.access.refusal(scope["method"], target, scope["headers"])
        try:
            if refusal is None:
                await self.app(scope, receive, with_headers)
                return
            headers = {"Connection": "close"}
            headers |= {"Allow": "GET, HEAD"} if refusal.status == 405 else {}
            response = JSONResponse({"error": refusal.text}, refusal.status, headers)
            await response(scope, receive, with_headers)
        except Exception:
            if not begun:
                text = "The server has made an error. Its terminal has the details."
                await JSONResponse({"error": text}, 500)(scope, receive, with_headers)
            raise


def _with_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    given = {name.lower() for name, _ in headers}
    return list(headers) + [
        (name.lower().encode(), value.encode())
        for name, value in HEADERS.items()
        if name.lower().encode() not in given
    ]


# Errors -------------------------------------------------------------------------------------------


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = "There is nothing at this address." if error.detail == "Not Found" else error.detail
    return JSONResponse({"error": text}, error.status_code)


def _waiting(request: Request, error: Exception) -> Response:
    return JSONResponse({"waiting": str(error)})


def _failed(request: Request, error: Exception) -> Response:
    mistaken = isinstance(error, JobError) and error.mistaken
    return JSONResponse({"error": str(error)}, 422 if mistaken else 503)


def _full(request: Request, error: Exception) -> Response:
    text = f"{MOST_CLIENTS} pages follow these runs already. Close one of them."
    return JSONResponse({"error": text}, 503, {"Retry-After": "30"})


# Requests -----------------------------------------------------------------------------------------


def parse_request(text: str) -> dict[str, Any]:
    """Return the JSON object of a request.

    Raise HTTPException for a long or deeply nested one, and for numbers that are not finite.
    """
    if len(text.encode()) > LONGEST_REQUEST:
        raise HTTPException(413, f"The request has more than {LONGEST_REQUEST:,} bytes.")
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise HTTPException(400, "?request= takes a JSON object.") from None
    if not isinstance(found, dict):
        raise HTTPException(400, "?request= takes a JSON object.")
    level: list[Any] = [found]
    for _ in range(DEEPEST):
        if any(isinstance(value, float) and not math.isfinite(value) for value in level):
            raise HTTPException(400, "A number of the request is not finite.")
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return found
    raise HTTPException(400, f"The request is nested more than {DEEPEST} levels deep.")


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


# The page -----------------------------------------------------------------------------------------


def read_static() -> dict[str, str]:
    """Return the texts of the page's program and style."""
    try:
        return {name: html.asset(name) for name in KINDS}
    except FileNotFoundError as error:
        raise ValueError(
            f"This copy of aevb lacks the program of the page ({Path(error.filename).name}). In a "
            f"checkout, build it: cd web && npm install && npm run build."
        ) from None
