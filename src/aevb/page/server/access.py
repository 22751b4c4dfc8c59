"""Who may ask the server what: hosts, origins, tokens, methods, sizes, and headers of responses.

A page of another site can send requests to a server on this machine, and can make a name of its own
point to it (DNS rebinding). So the server answers only requests that name it by its own host and
port, and that no other site has caused. Every run is addressed by its number, and no part of a
request ever becomes a path.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
LONGEST_URL = 200_000  # bytes; a request of decoded latents has at most 64 KiB before its encoding
LONGEST_HEADERS = 2**16  # bytes of all headers of a request
LONGEST_HEAD = 2**18  # bytes of a request's first line and headers
TOKEN = r"[A-Za-z0-9._~-]{12,200}"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Refusal:
    status: int
    text: str


@dataclass(frozen=True)
class Access:
    """The rules of a server that listens at a host and port."""

    host: str
    port: int
    token: str | None = None

    def __post_init__(self) -> None:
        if self.token is not None and not re.fullmatch(TOKEN, self.token):
            raise ValueError(
                "--token takes 12 to 200 letters, digits, hyphens, dots and underscores. Leave it "
                "out for a random token."
            )
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"Other machines can reach {self.host}, so the server needs a token there."
            )

    @property
    def cookie(self) -> str:
        return f"aevb-{self.port}"  # browsers share cookies between the ports of a host

    @property
    def url(self) -> str:
        """The address to open, with the token."""
        host = socket.gethostname() if _is_wildcard(self.host) else self.host
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.port}/" + (f"?token={self.token}" if self.token else "")

    def refusal(
        self, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]]
    ) -> Refusal | None:
        """Return why a request is refused; None if it is allowed.

        ``target`` is the path and the query as they were sent.
        """
        values: dict[str, list[str]] = {}
        size = 0
        for name, value in headers:
            size += len(name) + len(value)
            values.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        host = _only(values, "host")
        if len(target) > LONGEST_URL:
            return Refusal(414, f"The address has more than {LONGEST_URL:,} characters.")
        if size > LONGEST_HEADERS:
            return Refusal(431, f"The headers have more than {LONGEST_HEADERS:,} bytes.")
        if host is None or not self._is_own(host):
            return Refusal(
                421,
                f"This server answers only requests for {self._own_name()}. Open that address; "
                f"with ssh forward the same port: ssh -L {self.port}:localhost:{self.port} HOST.",
            )
        origins, sites = values.get("origin", []), values.get("sec-fetch-site", [])
        if any(origin.lower() != f"http://{host.lower()}" for origin in origins):
            return Refusal(403, "Another site has caused this request, so it is refused.")
        if any(site not in ("same-origin", "none") for site in sites):
            return Refusal(
                403,
                "Another site has caused this request, so it is refused. Type the address into the "
                "browser.",
            )
        if method not in ("GET", "HEAD"):
            return Refusal(405, "This server only shows runs: it answers GET and HEAD.")
        if self.token is not None and not self._has_token(target, values.get("cookie", [])):
            return Refusal(
                401, "The token is missing or wrong. Open the address that aevb serve printed."
            )
        return None

    def asks_cookie(self, query: bytes) -> bool:
        """Whether an allowed request for the page has its token in the address."""
        return self.token is not None and "token" in parse_qs(query.decode("latin-1"))

    @property
    def set_cookie(self) -> str:
        return f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"

    def _has_token(self, target: bytes, cookies: list[str]) -> bool:
        assert self.token is not None
        path, _, query = target.partition(b"?")
        given: list[str] = []
        if path == b"/":
            given += parse_qs(query.decode("latin-1")).get("token", [])[:1]
        for line in cookies:
            try:
                jar: SimpleCookie = SimpleCookie(line)
            except CookieError:
                continue
            given += [jar[self.cookie].value] if self.cookie in jar else []
        # Compare all of them, each in constant time.
        right = [hmac.compare_digest(one.encode(), self.token.encode()) for one in given[:4]]
        return any(right)

    def _is_own(self, host: str) -> bool:
        name, port = _split(host.lower())
        if port != str(self.port):
            return False
        if name in LOOPBACK or name == _bracketed(self.host.lower()):
            return True
        # No name can be made to point to an address that is a number.
        return _is_wildcard(self.host) and (
            _is_number(name) or name in (socket.gethostname().lower(), socket.getfqdn().lower())
        )

    def _own_name(self) -> str:
        host = "localhost" if is_loopback(self.host) else _bracketed(self.host)
        return f"{host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _split(host: str) -> tuple[str, str]:
    """Split a Host header into name and port; the port of http is 80."""
    found = re.fullmatch(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?", host)
    return ("", "") if found is None else (found[1], found[2] or "80")


def _only(values: Mapping[str, list[str]], name: str) -> str | None:
    found = values.get(name, [])
    return found[0] if len(found) == 1 else None
