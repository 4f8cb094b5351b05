"""A small object store for speed: byte ranges of local files over the S3 protocol, slowed down as it is asked to.

    python -m tools.bench.range_server FOLDER --latency-s 0.05 --bytes-per-s 1e8

It answers GET and HEAD for ``/BUCKET/KEY`` and nothing else; any bucket is the folder, any signature is right.
``/stats`` tells requests and bytes so far as JSON, and begins to count anew. The first line it prints is its port.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import subprocess
import sys
import urllib.request
from dataclasses import asdict, dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

import click

from tools.bench.case import REPOSITORY

_PIECE_NUM_BYTES = 256 << 10


@dataclass
class Served:
    """What was served since it was last asked.

    Attributes:
        num_gets: GET requests of data.
        num_others: Other requests.
        num_bytes: Bytes of bodies.
    """

    num_gets: int = 0
    num_others: int = 0
    num_bytes: int = 0


@dataclass
class _Store:
    folder: Path
    latency_s: float
    bytes_per_s: float
    served: Served = field(default_factory=Served)

    def path(self, key: str) -> Path | None:
        path = (self.folder / key).resolve()
        return path if path.is_file() and path.is_relative_to(self.folder) else None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of one connection, one after the other."""
        try:
            while request := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(request.decode("latin-1"), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has what it wanted
        finally:
            writer.close()

    async def _answer(self, request: str, writer: asyncio.StreamWriter) -> None:
        method, target, _ = request.split(" ", 2)
        path = unquote(urlsplit(target).path)
        if path == "/stats":
            body = json.dumps(asdict(self.served)).encode()
            self.served = Served()
            writer.write(_head(HTTPStatus.OK, len(body)) + body)
            return
        await asyncio.sleep(self.latency_s)
        key = path.lstrip("/").partition("/")[2]
        file = self.path(key)
        if file is None or method not in ("GET", "HEAD"):
            self.served.num_others += 1
            writer.write(_head(HTTPStatus.NOT_FOUND, 0))
            return
        size = file.stat().st_size
        begin, end, status = 0, size, HTTPStatus.OK
        if found := re.search(r"\r\nrange: bytes=(\d*)-(\d*)\r\n", request, re.IGNORECASE):
            begin, end = _span(found[1], found[2], size)
            status = HTTPStatus.PARTIAL_CONTENT
        etag = hashlib.md5(f"{key} {size}".encode(), usedforsecurity=False).hexdigest()
        more = {"ETag": f'"{etag}"', "Last-Modified": formatdate(0, usegmt=True), "Accept-Ranges": "bytes"}
        if status == HTTPStatus.PARTIAL_CONTENT:
            more["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        writer.write(_head(status, end - begin, more))
        if method == "HEAD":
            self.served.num_others += 1
            return
        self.served.num_gets += 1
        self.served.num_bytes += end - begin
        with file.open("rb") as opened:
            await self._send(opened, begin, end, writer)

    async def _send(self, file: BinaryIO, begin: int, end: int, writer: asyncio.StreamWriter) -> None:
        """Sends bytes no faster than a connection may."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        for at in range(begin, end, _PIECE_NUM_BYTES):
            stop = min(at + _PIECE_NUM_BYTES, end)
            await writer.drain()  # who has gone is noticed here
            # By the system, from the file to the socket: the client needs the processor's time that copying would take.
            await loop.sendfile(writer.transport, file, at, stop - at)
            due = started + (stop - begin) / self.bytes_per_s
            if due > loop.time():
                await asyncio.sleep(due - loop.time())


def _span(first: str, last: str, size: int) -> tuple[int, int]:
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(int(last) + 1, size) if last else size


def _head(status: HTTPStatus, num_bytes: int, more: dict[str, str] | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", f"Content-Length: {num_bytes}"]
    lines += [f"{name}: {value}" for name, value in (more or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


class RangeServer:
    """The server in a process of its own, as a context.

    Attributes:
        storage_options: For fsspec's S3 file system.
    """

    def __init__(self, folder: Path, latency_s: float = 0.05, bytes_per_s: float = 1e8) -> None:
        self._command = [sys.executable, "-m", "tools.bench.range_server", str(folder)]
        self._command += ["--latency-s", str(latency_s), "--bytes-per-s", str(bytes_per_s)]

    def __enter__(self) -> RangeServer:  # noqa: PYI034 - final in practice, and Self needs Python 3.11
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, cwd=REPOSITORY)
        assert self._process.stdout is not None  # noqa: S101 - narrows the type
        self._url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=10)

    @property
    def storage_options(self) -> dict[str, Any]:
        """For ``s3://bench/...``."""
        return {"key": "bench", "secret": "bench", "endpoint_url": self._url, "client_kwargs": {"region_name": "none"}}

    def served(self) -> Served:
        """Returns what was served since this was last asked."""
        with urllib.request.urlopen(f"{self._url}/stats", timeout=10) as answer:  # noqa: S310 - our own server
            return Served(**json.load(answer))


async def _run(store: _Store) -> None:
    server = await asyncio.start_server(store.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--latency-s", default=0.05, help="Added to each request.")
@click.option("--bytes-per-s", default=1e8, help="Of each connection.")
def main(folder: Path, latency_s: float, bytes_per_s: float) -> None:
    """Serve the files below FOLDER."""
    asyncio.run(_run(_Store(folder.resolve(), latency_s, bytes_per_s)))


if __name__ == "__main__":
    main()
