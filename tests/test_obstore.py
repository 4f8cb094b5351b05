"""S3 through obstore and through s3fs alone: the same bytes, tags and errors; and who asks when."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from shardstream import storage
from shardstream.errors import ReadError
from shardstream.ranges import ByteRange, Ranges
from shardstream.storage import _obstore, _systems
from tests.support import stores
from tests.support.children import told_by_two
from tests.support.faults import HANGING, Once, soon_try_again, wait_for_answers
from tests.support.threads import readers
from tools.faults import PASSING, Faults, FaultyServer, Folder

pytest.importorskip("obstore")

DATA = bytes(range(256)) * 50
URL = "s3://bucket/a.bin"


@dataclass
class Watched(Folder):
    """A folder that keeps what was asked for."""

    folder: object
    asked: list = field(default_factory=list)

    def __post_init__(self):
        super().__init__(self.folder)

    def answer(self, request):
        self.asked.append(request)
        return super().answer(request)


@pytest.fixture(params=["obstore", "s3fs"])
def client(request, monkeypatch):
    """Who asks for ranges: also where the package is missing all is the same."""
    if request.param == "s3fs":
        monkeypatch.setattr(_obstore, "is_installed", lambda: False)
    return request.param


@pytest.fixture
def server(tmp_path, monkeypatch):
    # Its port may be that of an earlier test's, of which s3fs and obstore would know how they fared there.
    monkeypatch.setattr(_systems, "_file_systems", {})
    monkeypatch.setattr(_obstore, "_buckets", {})
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "a.bin").write_bytes(DATA)
    origin = Watched(tmp_path)
    with FaultyServer(origin) as running:
        running.asked = origin.asked
        yield running


def options_of(server, **more):
    return {"key": "k", "secret": "s3cret", "endpoint_url": server.url, "client_kwargs": {"region_name": "r"}, **more}


def in_thread(act, *args, **named):
    """As readers do: the main thread leaves it to s3fs."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(act, *args, **named).result(60)


def versioned(server, start=100, end=5000, url=URL, **more):
    options = options_of(server, **more)
    storage.file_system(url, options)[0].connect()  # which takes a second where others work, and is not what is timed
    return in_thread(storage.read_versioned, url, start, end, options)


def askers(server):
    agents = [request.headers["user-agent"] for request in server.asked]
    return ["s3fs" if agent.startswith("aiobotocore") else "obstore" for agent in agents]


# ------------------------------------------------------------------------------------------------ the same of both


def test_a_range_and_its_tag_in_one_request(server, client):
    got = versioned(server)
    assert askers(server) == [client]
    assert got == (DATA[100:5000], storage.stat(URL, options_of(server)).version_tag)
    assert type(in_thread(storage.read_range, URL, 1, 2, options_of(server))) is bytes


def test_ends_of_a_file(server, client):
    tag = versioned(server)[1]
    assert versioned(server, len(DATA) - 5, len(DATA) + 5) == (DATA[-5:], tag)
    assert versioned(server, len(DATA) + 5, len(DATA) + 9) == (b"", "")
    assert versioned(server, 0, len(DATA)) == (DATA, tag)


@pytest.mark.parametrize("kind", [*PASSING, "silent", "drip"])
def test_a_fault_that_passes_costs_another_request(server, client, monkeypatch, kind):
    if kind in HANGING:
        soon_try_again(monkeypatch)
    server.faults = Once(kind)
    assert versioned(server)[0] == DATA[100:5000]
    assert (server.counts[kind], server.counts["good"]) == (1, 1)


@pytest.mark.parametrize("kind", ["429", "500", "503", "whole", "short", "reset-mid-body", "stall", "retry-after"])
def test_a_store_that_never_recovers_is_given_up_within_the_deadline(server, client, monkeypatch, kind):
    if kind not in HANGING:
        wait_for_answers(monkeypatch)
    server.faults = Faults(1.0, (kind,))
    begun = time.monotonic()
    with pytest.raises(ReadError, match=r"a\.bin") as caught:
        versioned(server, retry_timeout_s=0.9)
    assert time.monotonic() - begun < 10
    assert "s3cret" not in str(caught.value)
    reason = {"whole": "ignores byte ranges", "short": "instead of", "wrong-range": "instead of",
              "stall": "no whole answer within", "drip": "no whole answer within", "429": "429|Too Many",
              "500": "500|Internal", "503": "503|Service Unavail", "retry-after": "503|Service Unavail"}  # fmt: skip
    assert re.search(reason.get(kind, "Payload|Connection|Client|Server"), str(caught.value))
    if kind == "retry-after":
        assert server.counts[kind] == 1 + (client == "obstore"), "s3fs knows when to come back"


@pytest.mark.parametrize(("kind", "found"), [("expired", "have they expired"), (None, "check the path")])
def test_lasting_failures_are_named_and_not_tried_again(server, client, kind, found):
    server.faults = Faults(1.0 if kind else 0.0, (kind,) if kind else PASSING)
    with pytest.raises(ReadError, match=found) as caught:
        versioned(server, url=URL if kind else "s3://bucket/gone.bin")
    assert "s3cret" not in str(caught.value)
    assert len(server.asked) == 1 + (client == "obstore")


def test_nobody_listens(server, client, monkeypatch):
    wait_for_answers(monkeypatch)
    server.close()
    with pytest.raises(ReadError, match=r"a\.bin.*(Connect|connect)"):
        versioned(server, retry_timeout_s=0.5)


@pytest.mark.parametrize("kind", ["silent", "stall"])
def test_what_hangs_does_not_hold_up_a_reader_that_closes(server, client, kind):
    server.faults = Faults(1.0, (kind,))
    ranges = Ranges(4)
    for number in range(8):
        ranges.ahead(ByteRange(URL, "", number, 5000, lambda _: None, options_of(server, retry_timeout_s=2)))
    time.sleep(0.3)
    begun = time.monotonic()
    ranges.close()
    assert time.monotonic() - begun < 5
    assert not readers()


def test_a_real_s3_protocol(client):
    with stores.s3() as store:
        for name in (
            "a b+c=d@e,f-_.bin",
            "folder/sub.folder/x.bin",
            "ü%20é.bin",
            "a//b.bin",
            "~#[x]&y;.bin",
            "q?x=1.bin",
        ):
            store.put(name, name.encode())
            url, data = f"{store.root}/{name}", name.encode()
            tag = storage.stat(url, store.storage_options).version_tag
            assert in_thread(storage.read_versioned, url, 1, 9, store.storage_options) == (data[1:9], tag)
        store.fs.call_s3("put_object", Bucket="bucket", Key="z", Body=b"\x1f\x8b" + DATA, ContentEncoding="gzip")
        assert in_thread(storage.read_range, "s3://bucket/z", 0, 9, store.storage_options) == b"\x1f\x8b" + DATA[:7]


# ------------------------------------------------------------------------------------------------ which of them asks


def test_the_main_thread_hears_ctrl_c_and_so_asks_by_s3fs(server):
    assert storage.read_range(URL, 100, 5000, options_of(server)) == DATA[100:5000]
    assert askers(server) == ["s3fs"]


@pytest.mark.parametrize(
    "more",
    [
        {"requester_pays": True},
        {"s3_additional_kwargs": {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "x" * 32}},
        {"config_kwargs": {"proxies": {}}},
        {"config_kwargs": {"max_pool_connections": 1}},
        {"config_kwargs": {"signature_version": "s3"}},
        {"client_kwargs": {"region_name": "r", "verify": False}},
        {"version_aware": True, "url": URL + "?versionId=1"},
    ],
)
def test_what_is_not_known_to_be_the_same_is_left_to_s3fs(server, more):
    assert versioned(server, **more)[0] == DATA[100:5000]
    assert askers(server) == ["s3fs"]


@pytest.mark.parametrize("name", ["HTTP_PROXY", "https_proxy", "AWS_SSE_CUSTOMER_KEY_BASE64"])
def test_an_environment_that_is_not_the_same_to_both_is_left_to_s3fs(server, monkeypatch, name):
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert versioned(server)[0] == DATA[100:5000]
    assert askers(server) == ["s3fs"]


def test_certificates_that_python_is_told_of_are_not_known_to_obstore(server, monkeypatch):
    fs, _ = storage.file_system(URL, options_of(server))
    fs.connect()
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/some.pem")
    assert _obstore._goes_alike(fs, "http://host/bucket")
    assert not _obstore._goes_alike(fs, "https://host/bucket")


def test_anonymous_requests_are_not_signed(server):
    options = {"anon": True, "endpoint_url": server.url}
    assert in_thread(storage.read_range, URL, 100, 5000, options) == DATA[100:5000]
    assert askers(server) == ["obstore"]
    assert "authorization" not in server.asked[0].headers


def test_the_environment_does_not_change_what_is_asked(server, monkeypatch):
    for name, value in {
        "ACCESS_KEY_ID": "other", "SECRET_ACCESS_KEY": "other", "SESSION_TOKEN": "other", "TOKEN": "other",
        "BUCKET": "other", "REGION": "other", "DEFAULT_REGION": "other", "ENDPOINT": "http://127.0.0.1:9",
        "ENDPOINT_URL": "http://127.0.0.1:9", "ENDPOINT_URL_S3": "http://127.0.0.1:9", "SKIP_SIGNATURE": "true",
        "VIRTUAL_HOSTED_STYLE_REQUEST": "false", "REQUEST_PAYER": "true", "S3_EXPRESS": "true", "TIMEOUT": "1ms",
        "UNSIGNED_PAYLOAD": "true", "PROXY_URL": "http://127.0.0.1:9", "ALLOW_HTTP": "false",
    }.items():  # fmt: skip
        monkeypatch.setenv("AWS_" + name, value)
    assert versioned(server)[0] == DATA[100:5000]
    assert askers(server) == ["obstore"]
    (asked,) = server.asked
    assert asked.target == "/bucket/a.bin"
    assert re.search(r"Credential=k/\d+/r/s3/", asked.headers["authorization"])
    assert {name for name in asked.headers if name.startswith("x-")} == {"x-amz-content-sha256", "x-amz-date"}


@pytest.mark.parametrize(
    ("bucket", "options", "url"),
    [
        ("bucket", {}, "https://bucket.s3.eu-west-1.amazonaws.com"),
        ("with.dots", {}, "https://s3.eu-west-1.amazonaws.com/with.dots"),
        ("bucket", {"use_ssl": False}, "http://bucket.s3.eu-west-1.amazonaws.com"),
        (
            "bucket",
            {"config_kwargs": {"s3": {"addressing_style": "path"}}},
            "https://s3.eu-west-1.amazonaws.com/bucket",
        ),
        (
            "arn:aws:s3:eu-west-1:123456789012:accesspoint/x",
            {},
            "https://x-123456789012.s3-accesspoint.eu-west-1.amazonaws.com",
        ),
    ],
)
def test_a_bucket_is_where_s3fs_says(monkeypatch, bucket, options, url):
    from fsspec.asyn import sync

    for name in ("REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    options = {"key": "k", "secret": "s3cret", "client_kwargs": {"region_name": "eu-west-1"}, **options}
    fs, _ = storage.file_system("s3://bucket/x", options)
    place = sync(fs.loop, _obstore._place, fs, bucket)
    assert (place.url, place.region) == (url, "eu-west-1")
    assert "s3cret" not in repr(place)


def test_credentials_that_were_renewed_are_used(server, monkeypatch):
    from aiobotocore.credentials import AioCredentials

    versioned(server)
    fs, _ = storage.file_system(URL, options_of(server))
    signer = fs.s3._request_signer
    monkeypatch.setattr(signer, "_credentials", AioCredentials("new", "secret", "token"))
    versioned(server)
    assert "Credential=k/" in server.asked[-1].headers["authorization"], "looked at a moment ago"
    server.faults = Once("expired")
    with pytest.raises(ReadError, match="check the path"):
        versioned(server, url="s3://bucket/gone")
    versioned(server)
    assert askers(server)[-1] == "obstore"
    assert "Credential=new/" in server.asked[-1].headers["authorization"]
    assert server.asked[-1].headers["x-amz-security-token"] == "token"
    monkeypatch.setattr(signer, "_credentials", AioCredentials("newer", "secret"))
    monkeypatch.setattr(_obstore, "_AGAIN_S", 0.0)
    versioned(server)
    assert "Credential=newer/" in server.asked[-1].headers["authorization"]


def test_what_only_s3fs_can_read_is_tried_now_and_then(server, monkeypatch):
    get = _obstore._get
    monkeypatch.setattr(_obstore, "_get", lambda *_: 1 / 0)
    monkeypatch.setattr(_obstore, "_AGAIN_S", 0.5)
    for _ in range(6):
        assert versioned(server)[0] == DATA[100:5000]
    monkeypatch.setattr(_obstore, "_get", get)
    versioned(server)
    assert askers(server) == ["s3fs"] * 7
    time.sleep(0.6)
    versioned(server)
    assert askers(server)[7:] == ["obstore"]


def test_a_look_that_fails_holds_nobody_up(server, monkeypatch):
    monkeypatch.setattr(_obstore, "_place", lambda *_: 1 / 0)
    for _ in range(2):
        assert versioned(server)[0] == DATA[100:5000]
    assert askers(server) == ["s3fs"] * 2


# ------------------------------------------------------------------------------------------------ processes


def _read_in_child(url, queue):
    options = {"key": "k", "secret": "s3cret", "endpoint_url": url, "client_kwargs": {"region_name": "r"}}
    queue.put(in_thread(storage.read_range, URL, 100, 5000, options))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_every_start_method_reads_what_the_parent_has_read_before(server, method):
    versioned(server)
    assert told_by_two(method, _read_in_child, server.url) == [DATA[100:5000]] * 2
    assert askers(server) == ["obstore"] + ["s3fs" if method == "fork" else "obstore"] * 2


FORK = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from shardstream import storage
url, options = "s3://bucket/a.bin", {"key": "k", "secret": "s", "endpoint_url": sys.argv[1],
                                     "client_kwargs": {"region_name": "r"}}
def read():
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: storage.read_range(url, 5, 99, options), range(32)))
    assert len(set(found)) == 1
assert "obstore" not in sys.modules
read()
assert "obstore" in sys.modules
child = os.fork()
read()
if child:
    assert os.waitpid(child, 0)[1] == 0
    read()
"""


def test_a_fork_reads_and_ends_like_any_process(server):
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK, server.url], check=True, timeout=60)
    assert set(askers(server)) == {"obstore", "s3fs"}


def test_nothing_of_it_is_loaded_before_it_is_used(tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    code = f"""
import sys, shardstream.torch
from shardstream import storage
assert storage.read_range({os.fspath(tmp_path / "a")!r}, 0, 2) == b"12"
assert "obstore" not in sys.modules and "s3fs" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
