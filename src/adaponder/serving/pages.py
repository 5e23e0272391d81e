"""The explorer's files, all read at start: a request names one of them and never a path."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import NamedTuple

from starlette.responses import Response

from adaponder.serving.errors import ApiError

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}


class File(NamedTuple):
    content: bytes
    kind: str
    tag: str


def page_files() -> dict[str, File]:
    """The files of the page by name; empty where the package has none."""
    folder = files("adaponder.serving").joinpath("page")
    found: dict[str, File] = {}
    if folder.is_dir():
        for path in folder.iterdir():
            kind = _TYPES.get("." + path.name.rpartition(".")[2])
            if kind is not None and path.is_file():
                content = path.read_bytes()
                found[path.name] = File(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


def page_answer(found: dict[str, File], name: str, known_tag: str | None) -> Response:
    """One file; 304 where the client has it already."""
    file = found.get(name)
    if file is None:
        raise ApiError(404, "the page has no such file")
    headers = {"etag": file.tag, "cache-control": "no-cache"}
    if known_tag == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=None, headers=headers | {"content-type": file.kind})
