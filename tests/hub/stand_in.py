"""A model hub on this machine: the few endpoints that a push and a pull use."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub(ThreadingHTTPServer):
    """Repositories in memory: ``files`` by name of the repository and path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.cards: list[str] = []  # cards whose front matter was to be validated
        self.tokens: set[str | None] = set()
        self.sizes: dict[str, int | None] = {}  # sizes that the hub tells, if not the true ones
        self.fetched: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit_of(self, name: str) -> str:
        digest = hashlib.sha1()
        for path, content in sorted(self.files[name].items()):
            digest.update(path.encode() + hashlib.sha1(content).digest())
        return digest.hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else None
            name = name or f"me/{asked['name']}"
            self.server.private.setdefault(name, self._is_private(asked))
            if name in self.server.files:
                self._json({"error": "exists", "url": f"{self.server.url}/{name}"}, 409)
                return
            self.server.files[name] = {".gitattributes": b"", "old.py": b"print('code')"}
            self._json({"url": f"{self.server.url}/{name}"})
        elif self.path == "/api/validate-yaml":
            self.server.cards.append(json.loads(content)["content"])
            self._json({"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/api/models/(.+/.+)/preupload/main", self.path):
            asked = json.loads(content)["files"]
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            self._json({"files": [{"path": one["path"], **plain} for one in asked]})
        elif found := re.fullmatch(r"/api/models/(.+/.+)/commit/main", self.path):
            self._commit(found[1], [json.loads(line) for line in content.splitlines()])
        else:
            self._json({"error": f"no endpoint {self.path}"}, 404)

    @staticmethod
    def _is_private(asked) -> bool:
        return bool(asked.get("private")) or asked.get("visibility") == "private"

    def _commit(self, name: str, lines) -> None:
        files = self.server.files[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.server.commit_of(name)
        self._json({"commitUrl": f"{self.server.url}/{name}/commit/{commit}", "commitOid": commit})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/(.+))?", path):
            name = found[1]
            if name not in self.server.files:
                self._json({"error": "Repository not found"}, 404, "RepoNotFound")
            elif found[3] not in (None, "main", self.server.commit_of(name)):
                self._json({"error": "Invalid rev id"}, 404, "RevisionNotFound")
            else:
                siblings = [{"rfilename": one} for one in sorted(self.server.files[name])]
                if "blobs=" in self.path:
                    for one in siblings:
                        content = self.server.files[name][one["rfilename"]]
                        size = self.server.sizes.get(one["rfilename"], len(content))
                        one |= {"size": size, "blobId": hashlib.sha1(content).hexdigest()}
                commit = self.server.commit_of(name)
                private = self.server.private.get(name, False)
                about = {"id": name, "modelId": name, "sha": commit, "private": private}
                self._json({**about, "siblings": siblings})
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            content = self.server.files[found[1]][found[3]]
            self.server.fetched.append(found[3])
            headers = {
                "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
                "X-Repo-Commit": self.server.commit_of(found[1]),
            }
            self._send(content, "application/octet-stream", 200, headers)
        else:
            self._json({"error": f"no endpoint {path}"}, 404)

    def _json(self, answer, status: int = 200, code: str | None = None) -> None:
        headers = {} if code is None else {"X-Error-Code": code, "X-Error-Message": "not found"}
        self._send(json.dumps(answer).encode(), "application/json", status, headers)

    def _send(self, content: bytes, kind: str, status: int, headers) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": len(content),
            **headers,
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub():
    """Run a hub for a while."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
