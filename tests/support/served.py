"""A folder behind an HTTP server that knows byte ranges, in a thread of this process."""

from __future__ import annotations

import hashlib
import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Ranges(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.server.folder / unquote(urlsplit(self.path).path[1:])  # type: ignore[attr-defined]
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = path.read_bytes()
        start, end = map(int, re.findall(r"\d+", self.headers.get("Range", f"0-{len(data) - 1}")))
        part = data[start : end + 1]
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(data)}")
        self.send_header("Accept-Ranges", "bytes")
        if self.server.tells_versions:  # type: ignore[attr-defined]
            self.send_header("ETag", f'"{hashlib.blake2b(data, digest_size=8).hexdigest()}"')
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part if self.command == "GET" else b"")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path, *, tells_versions: bool = True) -> Iterator[str]:
    """Serves a folder; gives the address, without a slash at its end."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Ranges) as server:
        server.folder, server.tells_versions = folder, tells_versions  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
