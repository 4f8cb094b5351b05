"""Servers that speak the protocols of object stores, and what a data set must do in each of them."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from urllib.parse import unquote, urlsplit

import fsspec

PROJECT = Path(__file__).parents[2]
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = (  # public: every Azurite has this account
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


class Store(NamedTuple):
    """An empty place in a store: its URL, the options to reach it, a way to put files there."""

    root: str
    storage_options: dict[str, Any]
    fs: fsspec.AbstractFileSystem
    is_listed: bool = True

    def put(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{name}", data)


@contextlib.contextmanager
def s3() -> Iterator[Store]:
    import boto3
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(port=0, verbose=False)
    moto.start()
    try:
        address = "http://{}:{}".format(*moto.get_host_and_port())
        options = {"key": "k", "secret": "s", "endpoint_url": address, "client_kwargs": {"region_name": "us-east-1"}}
        client = boto3.client(
            "s3", endpoint_url=address, aws_access_key_id="k", aws_secret_access_key="s", region_name="us-east-1"
        )
        client.create_bucket(Bucket="bucket")
        fs = fsspec.filesystem("s3", skip_instance_cache=True, **options)
        yield Store("s3://bucket/data", options, fs)
    finally:
        moto.stop()


@contextlib.contextmanager
def gs() -> Iterator[Store]:
    from gcp_storage_emulator.server import create_server

    port = free_port()
    served = create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    served.start()
    try:
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon"}
        with mock.patch.dict(os.environ, GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false"):  # it would ask for gRPC first
            fs = fsspec.filesystem("gs", skip_instance_cache=True, **options)
        yield Store("gs://bucket/data", options, fs)
    finally:
        served.stop()


def azurite() -> str | None:
    """The program, where ``make emulators`` or the PATH has it."""
    ours = PROJECT / "build" / "emulators" / "node_modules" / ".bin" / "azurite-blob"
    return str(ours) if ours.exists() else shutil.which("azurite-blob")


@contextlib.contextmanager
def az(folder: Path) -> Iterator[Store]:
    program, port = azurite(), free_port()
    assert program is not None
    command = [program, "--blobPort", str(port), "--location", str(folder), "--silent", "--skipApiVersionCheck"]
    process = subprocess.Popen([*command, "--disableTelemetry"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port, process)
        connection = (
            f"DefaultEndpointsProtocol=http;AccountName={AZURITE_ACCOUNT};AccountKey={AZURITE_KEY};"
            f"BlobEndpoint=http://127.0.0.1:{port}/{AZURITE_ACCOUNT};"
        )
        options = {"connection_string": connection}
        fs = fsspec.filesystem("az", skip_instance_cache=True, **options)
        fs.mkdir("container")
        yield Store("az://container/data", options, fs)
    finally:
        process.terminate()
        process.wait(20)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise TimeoutError("the server does not listen")


# ------------------------------------------------------------------------------------------------ over HTTP


class _FolderHandler(http.server.SimpleHTTPRequestHandler):
    """A folder with ranges and etags, as a real web server serves it; listings are pages with links."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        if Path(self.translate_path(self.path)).is_dir():
            super().do_GET()
        else:
            self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        part = data[int(asked[1]) : int(asked[2]) + 1] if asked else data
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(data)}")
        self.send_header("ETag", f'"{hashlib.md5(data).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if with_body:
            self.wfile.write(part)


class _HubHandler(_FolderHandler):
    """The few answers of the Hugging Face Hub's HTTP API that reading a public data set needs. A stub, not the Hub."""

    repo = "datasets/user/name"

    def _files(self) -> list[dict[str, Any]]:
        root = Path(self.directory)
        return [
            {
                "type": "file",
                "path": path.relative_to(root).as_posix(),
                "size": path.stat().st_size,
                "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
            }
            for path in sorted(root.rglob("*"))
            if path.is_file()
        ]

    def _json(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        paths = json.loads(body)["paths"] if body.startswith("{") else [unquote(p[6:]) for p in body.split("&")
                                                                        if p.startswith("paths=")]  # fmt: skip
        files = self._files()
        folders = {path for path in paths if any(file["path"].startswith(path + "/") for file in files)}
        found = [file for file in files if file["path"] in paths]
        self._json([*found, *({"type": "directory", "path": path, "oid": "0" * 40} for path in sorted(folders))])

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path.startswith(f"/api/{self.repo}/tree/main"):
            below = unquote(path.removeprefix(f"/api/{self.repo}/tree/main").strip("/"))
            self._tree(below + "/" if below else "", is_deep="recursive=true" in self.path.lower())
        elif path.startswith(f"/api/{self.repo}"):
            self._json({"id": self.repo.partition("/")[2], "sha": "0" * 40, "siblings": []})
        else:
            super().do_GET()

    def _tree(self, prefix: str, *, is_deep: bool) -> None:
        files = [file for file in self._files() if file["path"].startswith(prefix)]
        inner = {file["path"][: len(prefix) + file["path"][len(prefix) :].find("/")] for file in files
                 if "/" in file["path"][len(prefix) :]}  # fmt: skip
        folders = [{"type": "directory", "path": path, "oid": "0" * 40} for path in sorted(inner)]
        here = files if is_deep else [file for file in files if "/" not in file["path"][len(prefix) :]]
        if files:
            self._json([*folders, *here])
        else:
            self._json({"error": "no such folder"}, 404)

    def translate_path(self, path: str) -> str:
        prefix = f"/{self.repo}/resolve/main/"
        return super().translate_path("/" + path.removeprefix(prefix) if path.startswith(prefix) else "/nothere/")


@contextlib.contextmanager
def _served(handler: type[_FolderHandler], folder: Path) -> Iterator[str]:
    def make(*args: Any) -> _FolderHandler:
        return handler(*args, directory=os.fspath(folder))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), make) as served:
        served.daemon_threads = True
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{served.server_port}"
        finally:
            served.shutdown()
            thread.join()


class _Folder:
    """Puts files into the folder that a server serves."""

    def __init__(self, folder: Path, root: str) -> None:
        self._folder, self._root = folder, root

    def pipe_file(self, url: str, data: bytes) -> None:
        path = self._folder / url.removeprefix(self._root + "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@contextlib.contextmanager
def web(folder: Path) -> Iterator[Store]:
    with _served(_FolderHandler, folder) as root:
        yield Store(root + "/data", {}, _Folder(folder, root))


@contextlib.contextmanager
def hub(folder: Path) -> Iterator[Store]:
    with _served(_HubHandler, folder) as endpoint:
        root = "hf://" + _HubHandler.repo
        yield Store(root + "/data", {"endpoint": endpoint, "token": False}, _Folder(folder, root))
