"""What a faulty server answers when nothing fails: files of a folder, or what another server says."""

from __future__ import annotations

import http.client
import re
from dataclasses import dataclass, field
from email.utils import formatdate
from html import escape
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, unquote, urlsplit

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_HOP_BY_HOP = frozenset({"connection", "transfer-encoding", "keep-alive"})


@dataclass(frozen=True)
class Request:
    """A request without a body.

    Attributes:
        method: ``"GET"`` or ``"HEAD"``.
        target: Path and query.
        headers: Names in lower case.
    """

    method: str
    target: str
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def range(self) -> tuple[int, int | None] | None:
        """First byte and end that are asked for; an end of None is the file's."""
        found = _RANGE.fullmatch(self.headers.get("range", ""))
        return None if found is None else (int(found[1]), int(found[2]) + 1 if found[2] else None)

    @property
    def is_listing(self) -> bool:
        """Whether names are asked for, not data."""
        path, _, query = self.target.partition("?")
        return path.endswith("/") or "list-type=" in query


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Origin(Protocol):
    """Answers requests; called by several threads at once."""

    def answer(self, request: Request) -> Answer:
        """Returns what is right."""
        ...


class Folder:
    """Serves byte ranges of the files below a folder, as they are at that moment, and lists folders as HTML.

    Args:
        folder: The folder.
        with_etag: Whether answers carry an ETag, from size and modification time.
    """

    def __init__(self, folder: Path, *, with_etag: bool = True) -> None:
        self._folder, self._with_etag = folder.resolve(), with_etag

    def answer(self, request: Request) -> Answer:
        """Returns a file, a range of it, a listing, or that there is none."""
        path = (self._folder / unquote(urlsplit(request.target).path).lstrip("/")).resolve()
        if not path.is_relative_to(self._folder) or not path.exists():
            return Answer(404, {}, b"no such file")
        if path.is_dir():
            names = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir())
            links = "".join(f'<a href="{quote(name)}">{escape(name)}</a>\n' for name in names)
            return Answer(200, {"Content-Type": "text/html"}, f"<html><body>{links}</body></html>".encode())
        data, status = path.read_bytes(), path.stat()
        headers = {"Accept-Ranges": "bytes", "Last-Modified": formatdate(status.st_mtime, usegmt=True)}
        if self._with_etag:
            headers["ETag"] = f'"{len(data)}-{status.st_mtime_ns}"'
        if request.range is None:
            return Answer(200, headers, data)
        start, end = request.range
        end = len(data) if end is None else min(end, len(data))
        if start >= end:
            return Answer(416, {"Content-Range": f"bytes */{len(data)}"})
        return Answer(206, {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}, data[start:end])


class Upstream:
    """Hands requests on to another server.

    Args:
        url: Its address, as ``http://127.0.0.1:5000``.
    """

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc

    def answer(self, request: Request) -> Answer:
        """Returns what the other server says."""
        connection = http.client.HTTPConnection(self._host, timeout=30)
        try:
            connection.request(request.method, request.target, headers=request.headers)
            answer = connection.getresponse()
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP}
            return Answer(answer.status, headers, answer.read())
        finally:
            connection.close()
