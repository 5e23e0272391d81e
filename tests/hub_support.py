"""A stand-in for the hub on this machine: it makes repositories and takes commits, and remembers what it was sent."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class StandIn:
    """``files`` of each repository by path, ``asked`` paths in order; what ``refuses`` answers 403 to everything."""

    address: str = ""
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    refuses: bool = False

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}" if wanted.get("organization") else wanted["name"]
            self.repositories[name] = wanted
            return {"url": f"{self.address}/{name}"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        name, _, what = path.removeprefix("/api/models/").rpartition("/")[0].rpartition("/")
        if what == "preupload":
            return {
                "files": [
                    entry | {"uploadMode": "regular", "shouldIgnore": False} for entry in json.loads(body)["files"]
                ]
            }
        if what == "commit":
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    content = base64.b64decode(entry["value"]["content"])
                    self.files.setdefault(name, {})[entry["value"]["path"]] = content
            return {"commitUrl": f"{self.address}/{name}/commit/0", "commitOid": "0" * 40, "pullRequestUrl": None}
        raise KeyError(path)


@contextmanager
def standing_in() -> Iterator[StandIn]:
    """A server on a free port of this machine."""
    hub = StandIn()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            hub.asked.append(self.path)
            hub.tokens.add(self.headers.get("Authorization"))
            try:
                status, said = (403, {"error": "not yours"}) if hub.refuses else (200, hub.answer(self.path, body))
            except KeyError:
                status, said = 404, {"error": self.path}
            content = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
