from __future__ import annotations

import http.server
import os
import pickle
import socket
import stat as modes
import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from shardstream import storage
from shardstream.errors import ReadError
from tests.support.children import told_by_two

# ----------------------------------------------------------------------------------------------------------- locations


@pytest.mark.parametrize(
    ("urls", "root", "names"),
    [
        (["/d/a.tar", "/d/b.tar"], "/d", ["a.tar", "b.tar"]),
        (["/d/a/0.tar", "/d/b/0.tar"], "/d", ["a/0.tar", "b/0.tar"]),
        (["/d/a/0.tar", "/d/ab/0.tar"], "/d", ["a/0.tar", "ab/0.tar"]),
        (["/a.tar", "/b.tar"], "", ["/a.tar", "/b.tar"]),
        (["/d/only.tar"], "/d", ["only.tar"]),
        (["s3://one/a.tar", "s3://two/a.tar"], "", ["s3://one/a.tar", "s3://two/a.tar"]),
        (["s3://one/x/a.tar", "s3://one/y/a.tar"], "s3://one", ["x/a.tar", "y/a.tar"]),
        (["simplecache::s3://b/x/a.tar"], "simplecache::s3://b/x", ["a.tar"]),
        (["zip://a.parquet::s3://b/x.zip"], "", ["zip://a.parquet::s3://b/x.zip"]),
        (["https://h/x/a.tar?v=1/2", "https://h/x/b.tar"], "https://h/x", ["a.tar?v=1/2", "b.tar"]),
        ([], "", []),
    ],
)
def test_common_root(urls, root, names):
    assert storage.common_root(urls) == (root, names)
    assert [f"{root}/{name}" if root else name for name in names] == urls


def test_a_file_named_like_a_protocol_is_a_file():
    assert storage.local_path("dir") == "dir"
    assert storage.local_path("cached") == "cached"


# --------------------------------------------------------------------------------------------------------------- reads


@pytest.fixture(params=["path", "file", "memory"])
def place(request, tmp_path):
    if request.param == "memory":
        return f"memory://{tmp_path.name}/file.bin"
    return ("file://" if request.param == "file" else "") + str(tmp_path / "file.bin")


DATA = bytes(range(256)) * 50


def test_reads_of_every_kind(place):
    with storage.write_atomic(place) as file:
        file.write(DATA)
    info = storage.stat(place)
    assert info.num_bytes == len(DATA)
    assert storage.read_range(place, 3, 10) == DATA[3:10]
    assert storage.read_range(place, 7, 7) == b""
    assert storage.read_tail(place, 5) == DATA[-5:]
    assert storage.read_tail(place, 10**6) == DATA
    assert storage.read_tail(place, 5, file_num_bytes=100) == DATA[95:100]
    for ahead in (0, 1000, 8 << 20):
        with storage.open_source(place, ahead_num_bytes=ahead) as file:
            assert file.read(10) == DATA[:10]
            assert file.read() == DATA[10:]
            assert file.read(1) == b""
            file.seek(-20, os.SEEK_END)
            assert file.read(5) == DATA[-20:-15]
            file.seek(100)
            assert file.read(2000) == DATA[100:2100]
            assert file.tell() == 2100
    assert storage.kind_of(place) == "file"
    assert storage.kind_of(place + ".none") is None


def test_a_changed_file_has_another_tag(place):
    tags = []
    for data in (b"one", b"two!"):
        with storage.write_atomic(place) as file:
            file.write(data)
        tags.append(storage.stat(place).version_tag)
    assert tags[0] != tags[1]
    assert storage.stat(place).version_tag == tags[1]


def test_missing_and_short_files_are_named(place):
    with pytest.raises(ReadError, match=r"file\.bin.*FileNotFoundError.*check the path"):
        storage.stat(place)
    with pytest.raises(ReadError, match=r"file\.bin"):
        storage.read_range(place, 0, 5)
    with pytest.raises(ReadError, match=r"file\.bin"):
        storage.open_source(place)
    with storage.write_atomic(place) as file:
        file.write(b"12345")
    with pytest.raises(ReadError, match=r"file\.bin.*(expected 8, found 3|3 of 8 bytes)"):
        storage.read_range(place, 2, 10, {"retry_timeout_s": 0})


def test_what_cannot_be_written_is_named_as_the_user_named_it(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for place, found in (
        ("none/file.bin", "no folder .*none"),
        ("file/file.bin", "no folder .*file"),
        ("", "a folder of that name"),
    ):
        path = str(tmp_path / place)
        told = rf"cannot write the file.*: found {found}; "
        with pytest.raises(ReadError, match=told) as caught, storage.write_atomic(path):
            pass
        assert ".tmp" not in str(caught.value).replace(str(tmp_path), "")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ReadError, match="IsADirectoryError"):
        storage.stat(str(tmp_path))


@pytest.mark.parametrize("url", ["nosuchprotocol://x/y", "s3-nope://x"])
def test_unknown_protocols_are_refused(url):
    with pytest.raises(ReadError, match="cannot open this kind of location"):
        storage.stat(url)


def test_listings(tmp_path):
    names = ["a.tar", "x/b.tar", "x/y/c.tar", ".hidden/d.tar", "x/.e.tar"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "x" / "loop").symlink_to(tmp_path)
    assert sorted(storage.list_files(str(tmp_path))) == [str(tmp_path / name) for name in names[:3]]
    assert storage.list_matches(str(tmp_path / "x" / "*.tar")) == [str(tmp_path / "x" / "b.tar")]


@pytest.mark.parametrize("prefix", ["memory://", "simplecache::memory://"])
def test_listings_keep_the_form_of_the_url(prefix, tmp_path):
    base = f"memory://{tmp_path.name}"
    for name in ("a.tar", "x/b.tar", ".hidden/c.tar", "x/.d.tar"):
        fsspec.filesystem("memory").pipe(f"{base}/{name}", b"1")
    base = f"{prefix}{tmp_path.name}"
    assert sorted(storage.list_files(base + "/")) == [f"{base}/a.tar", f"{base}/x/b.tar"]
    assert storage.list_matches(base + "/*.tar") == [f"{base}/a.tar"]
    assert storage.read_range(f"{base}/x/b.tar", 0, 1) == b"1"


# -------------------------------------------------------------------------------------------------------------- writes


def test_a_failed_write_leaves_what_was_there(place, tmp_path):
    with storage.write_atomic(place) as file:
        file.write(b"old")

    def fail():
        with storage.write_atomic(place) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert storage.read_tail(place, 10) == b"old"
    assert [path.name for path in tmp_path.iterdir()] in (["file.bin"], [])


def test_the_mode_is_that_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        with storage.write_atomic(str(tmp_path / "f")) as file:
            file.write(b"x")
    finally:
        os.umask(before)
    assert modes.S_IMODE((tmp_path / "f").stat().st_mode) == 0o640


def test_writing_into_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ReadError, match="cannot write the file"), storage.write_atomic(str(tmp_path / "none/f")):
        pass


# ---------------------------------------------------------------------------------------- a real server that misbehaves


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves DATA by ranges; the path says what goes wrong, ``server.asked`` counts requests."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.reply(body=False)

    def do_GET(self):
        self.reply(body=True)

    def reply(self, *, body):
        name = self.path.rsplit("/", 1)[-1]
        asked = self.server.asked
        asked[name, self.command] = asked.get((name, self.command), 0) + 1
        count = asked[name, self.command]
        if name in ("404", "403", "500"):
            self.send_error(int(name))
            return
        if name == "busy" and count <= 2:
            self.send_error(503)
            return
        start, end = 0, len(DATA)
        if "Range" in self.headers and name != "no-ranges":
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            start, end = int(first), min(end, int(last) + 1 if last else end)
        self.send_response(206 if end - start < len(DATA) else 200)
        self.send_header("Content-Length", str(end - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", '"v1"')
        if end - start < len(DATA):
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(DATA)}")
        self.end_headers()
        if body and name == "broken" and count <= 2:
            self.wfile.write(DATA[start : (start + end) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
        elif body:
            self.wfile.write(DATA[start:end])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        served.asked = {}
        served.url = f"http://127.0.0.1:{served.server_port}"
        served.daemon_threads = True
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def test_a_range_is_one_request(server):
    assert storage.read_range(server.url + "/good", 10, 2000) == DATA[10:2000]
    assert server.asked == {("good", "GET"): 1}
    assert storage.stat(server.url + "/good").version_tag == "v1"


def test_a_range_tells_its_version_in_the_same_request(server):
    assert storage.read_versioned(server.url + "/good", 10, 2000) == (DATA[10:2000], "v1")
    assert server.asked == {("good", "GET"): 1}
    assert storage.read_versioned(server.url + "/good", 7, 7) == (b"", None)


def test_a_version_is_not_known_of_every_store(place):
    with fsspec.open(place, "wb") as file:
        file.write(DATA)
    assert storage.read_versioned(place, 3, 10) == (DATA[3:10], None)


@pytest.mark.parametrize(("name", "found"), [("404", "FileNotFoundError"), ("403", "403"), ("500", "500")])
def test_failures_of_versioned_reads_are_those_of_others(server, name, found):
    with pytest.raises(ReadError, match=rf"{server.url}/{name}.*{found}"):
        storage.read_versioned(f"{server.url}/{name}", 10, 20, {"retry_timeout_s": 0.2})


def test_what_is_too_short_is_for_the_caller_to_say(server):
    data, _ = storage.read_versioned(server.url + "/good", len(DATA) - 5, len(DATA) + 5)
    with pytest.raises(ReadError, match="the file is cut"):
        storage.whole(data, "a", len(DATA) - 5, len(DATA) + 5)


@pytest.mark.parametrize("name", ["busy", "broken"])
def test_passing_failures_of_versioned_reads_are_tried_again(server, name):
    assert storage.read_versioned(f"{server.url}/{name}", 10, 2000) == (DATA[10:2000], "v1")
    assert server.asked == {(name, "GET"): 3}


@pytest.mark.parametrize("name", ["busy", "broken"])
def test_passing_failures_are_tried_again(server, name):
    assert storage.read_range(f"{server.url}/{name}", 10, 2000) == DATA[10:2000]
    assert server.asked == {(name, "GET"): 3}


@pytest.mark.parametrize(("name", "found"), [("404", "FileNotFoundError"), ("403", "403")])
def test_lasting_failures_are_not_tried_again(server, name, found):
    with pytest.raises(ReadError, match=rf"{server.url}/{name}.*{found}"):
        storage.read_range(f"{server.url}/{name}", 10, 20)
    assert server.asked == {(name, "GET"): 1}


def test_the_deadline_ends_retries_with_the_last_reason(server):
    with pytest.raises(ReadError, match=r"/500.*500"):
        storage.read_range(server.url + "/500", 10, 20, {"retry_timeout_s": 0.5})
    assert server.asked["500", "GET"] > 1


def test_a_server_without_ranges_is_named(server):
    with pytest.raises(ReadError, match="ignores byte ranges"):
        storage.read_range(server.url + "/no-ranges", 10, 20)
    assert server.asked["no-ranges", "GET"] == 4, "soon: a minute would not help"
    assert storage.read_range(server.url + "/no-ranges", 0, len(DATA)) == DATA


@pytest.mark.parametrize(
    "read", [storage.stat, storage.kind_of, lambda url, options: storage.read_range(url, 0, 5, options)]
)
def test_a_server_that_says_nothing_is_given_up(read):
    """Case C46: a limit instead of a silent hang."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.tar"
        with pytest.raises(ReadError, match=r"a\.tar.*Timeout"):
            read(url, {"retry_timeout_s": 0.1})


def test_streams_read_each_byte_once(server):
    with storage.open_source(server.url + "/good", ahead_num_bytes=1000) as file:
        assert file.read() == DATA
    assert server.asked == {("good", "HEAD"): 1, ("good", "GET"): 13}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardstream")]


def test_streams_survive_broken_connections(server):
    with storage.open_source(server.url + "/broken", ahead_num_bytes=5000) as file:
        assert file.read() == DATA


def test_threads_share_a_file_system(server):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: id(storage.file_system(server.url)[0]), range(8)))
    assert len(set(found)) == 1


@pytest.mark.parametrize("config", [{}, {"config_kwargs": {"retries": {"total_max_attempts": 2}}}])
def test_one_s3_client_serves_all_that_is_read(config):
    """botocore writes into the options that it is given, and so into ours and the user's."""
    pytest.importorskip("s3fs")
    options = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9", **config}
    first, _ = storage.file_system("s3://bucket/a", options)
    first.connect()
    assert storage.file_system("s3://bucket/b", options)[0] is first
    assert config in ({}, {"config_kwargs": {"retries": {"total_max_attempts": 2}}})


def _read_in_child(url, queue):
    queue.put(storage.read_range(url, 10, 20))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_every_start_method_reads_what_the_parent_has_read_before(server, method):
    """Case C46: a forked child must not use the parent's event loop and connections."""
    url = server.url + "/good"
    assert storage.read_range(url, 10, 20) == DATA[10:20]
    assert storage.kind_of(url) == "file"
    assert told_by_two(method, _read_in_child, url) == [DATA[10:20]] * 2


def test_info_pickles():
    info = storage.FileInfo(5, "tag")
    assert pickle.loads(pickle.dumps(info)) == info
