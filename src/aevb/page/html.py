"""The HTML of a page: one shell for both back ends, and the file with everything inlined.

The file carries a content-security policy that forbids every request, so that it stays what it is:
a document that shows data and sends none.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from aevb.runtime.checked_files import whole_file
from aevb.version import __version__

FORMAT, VERSION = "aevb page", 1
SHELL = Markup("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
{head}
<title>{title}</title>
{style}
</head>
<body{live}>
<noscript>This page needs JavaScript, which runs in it offline.</noscript>
<div id="page" aria-busy="true"><p class="loading">Reading …</p></div>
{data}{script}
</body>
</html>
""")


def asset(name: str) -> str:
    """The text of a file of the built front end: ``app.js`` or ``app.css``."""
    return (files("aevb.page") / "static" / name).read_text(encoding="utf-8")


def shell() -> str:
    """The HTML that a server sends: everything else is fetched from it."""
    return str(
        SHELL.format(
            head="",
            title="aevb",
            style=Markup('<link rel="stylesheet" href="/app.css">'),
            live=Markup(' data-live="1" data-version="{}"').format(__version__),
            data="",
            script=Markup('<script type="module" src="/app.js"></script>'),
        )
    )


def document(
    runs: Sequence[dict[str, Any]], comparison: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The data of a page as one JSON-ready object."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "aevb": __version__,
        "runs": list(runs),
        "comparison": comparison,
    }


def page(content: dict[str, Any]) -> str:
    """Return a page as one HTML file that needs nothing else."""
    style, script = asset("app.css"), asset("app.js")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    # "</script" in a text would end the element, and "<!--" would change how it is read.
    data = to_json(content).replace("<", "\\u003c")
    head = Markup('<meta http-equiv="Content-Security-Policy" content="{}">').format(policy)
    title = ", ".join(run["name"] for run in content["runs"])
    return str(
        SHELL.format(
            head=head,
            title=f"{title} – aevb" if title else "aevb",
            style=Markup("<style>") + Markup(style) + Markup("</style>"),
            live="",
            data=Markup('<script type="application/json" id="data">')
            + Markup(data)
            + Markup("</script>\n"),
            script=Markup('<script type="module">') + Markup(script) + Markup("</script>"),
        )
    )


def write_page(content: dict[str, Any], out: Path) -> None:
    """Write a page, whole or not at all."""
    text = page(content)
    with whole_file(out) as place:
        # A name of a file may hold bytes that are no text.
        place.write_text(text, encoding="utf-8", errors="replace")


def to_json(content: Any) -> str:
    """JSON that every parser reads: no NaN, no infinity (they become null)."""
    return json.dumps(_finite(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
