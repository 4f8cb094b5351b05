"""The disk cache gives the bytes that were put in, or nothing, whatever happens to its files and its disk."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from shardstream.cache import RangeCache
from shardstream.errors import PlanError, ShardStreamWarning

MIB = 1 << 20


def key(number):
    return RangeCache.key("s3://bucket/a", "etag", str(number))


def data(number, num_bytes=10_000):
    return hashlib.blake2b(str(number).encode()).digest() * (num_bytes // 64)


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def held(folder):
    return sum(path.stat().st_size for path in files(folder))


def test_what_is_put_is_found_by_every_process_that_names_the_folder(tmp_path):
    RangeCache(tmp_path / "new" / "folder", MIB).put(key(1), data(1))
    other = RangeCache(tmp_path / "new" / "folder", MIB)
    assert other.get(key(1)) == data(1)
    assert other.get(key(2)) is None
    other.put(key(3), b"")
    assert other.get(key(3)) == b""


def test_keys_tell_parts_apart():
    assert re.fullmatch("[0-9a-f]{32}", RangeCache.key("a"))
    assert len({RangeCache.key(*parts) for parts in [("a", "b"), ("ab",), ("ab", ""), ("", "ab"), ("a", "c")]}) == 5
    RangeCache.key("/data/\udcff.parquet")  # a name that is no text


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "cut in the header", "longer", "flipped", "flipped length", "swapped"]
)
def test_a_damaged_file_is_a_miss_and_is_replaced(tmp_path, damage):
    cache = RangeCache(tmp_path, MIB)
    cache.put(key(1), data(1))
    (path,) = files(tmp_path)
    raw = bytearray(path.read_bytes())
    if damage == "swapped":
        cache.put(key(2), data(2)[:-1] + b"?")
        raw[-5:] = b"other"
    elif damage.startswith("flipped"):
        raw[22 if "length" in damage else len(raw) // 2] ^= 1
    else:
        raw = {"cut": raw[:-1], "empty": raw[:0], "cut in the header": raw[:30], "longer": raw + b"x"}[damage]
    path.write_bytes(raw)
    assert cache.get(key(1)) is None
    cache.put(key(1), data(1))
    assert cache.get(key(1)) == data(1)


def test_every_single_flipped_byte_is_found(tmp_path):
    cache = RangeCache(tmp_path, MIB)
    cache.put(key(1), b"some bytes")
    (path,) = files(tmp_path)
    raw = path.read_bytes()
    for place in range(len(raw)):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 0x10]) + raw[place + 1 :])
        assert cache.get(key(1)) is None, place


def test_a_deleted_file_or_folder_is_a_miss(tmp_path):
    cache = RangeCache(tmp_path / "cache", MIB)
    cache.put(key(1), data(1))
    for path in files(tmp_path):
        path.unlink()
        path.parent.rmdir()
    (tmp_path / "cache").rmdir()
    assert cache.get(key(1)) is None
    cache.put(key(1), data(1))
    assert cache.get(key(1)) == data(1)


# ------------------------------------------------------------------------------------------------ eviction


def test_what_was_not_used_for_the_longest_time_goes_first(tmp_path):
    cache = RangeCache(tmp_path, 100_000)
    for number in range(8):
        cache.put(key(number), data(number))
        os.utime(cache._path(key(number)), (1000 + number, 1000 + number))
    assert cache.get(key(0)) == data(0)  # used just now
    for number in range(8, 12):
        cache.put(key(number), data(number))
        assert held(tmp_path) <= 100_000
    found = {number for number in range(12) if cache.get(key(number)) is not None}
    assert 0 in found
    assert 11 in found
    assert not {1, 2} & found


def test_a_range_larger_than_the_cache_is_not_kept(tmp_path):
    cache = RangeCache(tmp_path, 1000)
    cache.put(key(1), data(1))
    assert cache.get(key(1)) is None
    assert not files(tmp_path)


def test_nothing_is_deleted_that_was_not_written_here(tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(data(0))
    folder = tmp_path / "cache"
    like_ours = f"{'0' * 32}.range"
    foreign = [
        folder / "a.parquet",
        folder / "00" / "notes.txt",
        folder / "00" / like_ours,
        folder / "0a" / f"{like_ours}.x",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"not ours" * 1000)
        os.utime(path, (1, 1))
    link = folder / "00" / f"{'1' * 32}.range"
    link.symlink_to(outside)
    linked_folder = folder / "ab"
    (tmp_path / "elsewhere").mkdir()
    linked_folder.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / f"ab{'2' * 30}.range").write_bytes(b"not ours")
    cache = RangeCache(folder, 30_000)
    for number in range(20):
        cache.put(key(number), data(number))
    assert all(path.read_bytes() == b"not ours" * 1000 for path in foreign)
    assert outside.read_bytes() == data(0)
    assert (tmp_path / "elsewhere" / f"ab{'2' * 30}.range").read_bytes() == b"not ours"


def test_temporary_files_of_the_dead_go_those_of_the_living_stay(tmp_path):
    cache = RangeCache(tmp_path, MIB)
    cache.put(key(1), data(1))
    (path,) = files(tmp_path)
    dead, living = (path.with_name(f"{path.name}.{digit * 16}.tmp") for digit in "ab")
    for temporary in (dead, living):
        temporary.write_bytes(path.read_bytes()[:100])
    os.utime(dead, (time.time() - 3600,) * 2)
    cache = RangeCache(tmp_path, MIB)
    cache.put(key(2), data(2))
    assert not dead.exists()
    assert living.exists()
    assert cache.get(key(1)) == data(1)


# ------------------------------------------------------------------------------------------------ a disk that fails


def test_a_full_disk_is_warned_of_once_and_leaves_nothing(tmp_path, monkeypatch):
    cache = RangeCache(tmp_path, MIB)
    cache.put(key(1), data(1))
    write = os.write

    def full(number, view):
        if len(view) > 1000:
            return write(number, view[:1000])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.warns(ShardStreamWarning, match="No space left.*read from the store instead") as caught:
        _put_some(cache)
    assert len(caught) == 1
    assert len(files(tmp_path)) == 1
    assert cache.get(key(1)) == data(1)
    _put_some(RangeCache(tmp_path, MIB))  # of the next epoch: warnings are errors here
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(cache, "_paused_until", 0.0)  # a minute later
    cache.put(key(2), data(2))
    assert cache.get(key(2)) == data(2)


def test_a_folder_that_is_deleted_meanwhile_is_no_fault_of_the_disk(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    cache = RangeCache(folder, MIB)
    replace = Path.replace

    def late(path, target):
        shutil.rmtree(folder)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", late)
    cache.put(key(1), data(1))  # warnings are errors here
    monkeypatch.setattr(Path, "replace", replace)
    cache.put(key(2), data(2))
    assert (cache.get(key(1)), cache.get(key(2))) == (None, data(2))


def _put_some(cache):
    for number in range(2, 5):
        cache.put(key(number), data(number))


def test_a_real_limit_of_file_size(tmp_path):
    code = f"""
import resource, signal, warnings
from shardstream.cache import RangeCache
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
cache = RangeCache({str(tmp_path)!r}, 1 << 20)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for number in range(3):
        cache.put(f"{{number:032x}}", b"x" * 50_000)
    assert len(caught) == 1, caught
assert cache.get(f"{{0:032x}}") is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert not files(tmp_path)


@pytest.mark.parametrize("what", ["a file", "read-only"])
def test_a_folder_that_cannot_be_written(tmp_path, what, monkeypatch):
    folder = tmp_path / "cache"
    if what == "a file":
        folder.write_text("I am here")
    else:
        folder.mkdir()
        monkeypatch.setattr(Path, "mkdir", _refused)  # root may write everywhere
    cache = RangeCache(folder, MIB)
    with pytest.warns(ShardStreamWarning, match="cannot be written"):
        cache.put(key(1), data(1))
    assert cache.get(key(1)) is None


def _refused(*_args, **_options):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_the_size_must_be_positive(tmp_path):
    with pytest.raises(PlanError, match="positive"):
        RangeCache(tmp_path, 0)


# ------------------------------------------------------------------------------------------------ several processes

WRITER = """
import sys, hashlib
from shardstream.cache import RangeCache
cache, first, rounds = RangeCache(sys.argv[1], int(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4])
print("begun", flush=True)
for turn in range(rounds):
    for number in range(first, first + 40):
        key = RangeCache.key("s3://bucket/a", "etag", str(number))
        data = hashlib.blake2b(str(number).encode()).digest() * 3000
        found = cache.get(key)
        assert found in (None, data), number
        if found is None:
            cache.put(key, data)
"""


def writer(folder, num_bytes, first, rounds):
    command = [sys.executable, "-c", WRITER, str(folder), str(num_bytes), str(first), str(rounds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_processes_that_write_and_evict_at_once_never_get_wrong_bytes(tmp_path):
    num_bytes = 5 * MIB  # of 60 ranges of 192 kB only a part fits
    processes = [writer(tmp_path, num_bytes, first, 6) for first in (0, 10, 20)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    for process in processes:
        process.stdout.close()
    assert MIB < held(tmp_path) <= 1.2 * num_bytes
    assert not [path for path in files(tmp_path) if path.suffix == ".tmp"]


def test_a_process_that_is_killed_leaves_nothing_in_the_way(tmp_path):
    for _ in range(4):
        process = writer(tmp_path, 3 * MIB, 0, 10_000)
        process.stdout.readline()
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
        process.stdout.close()
    after = writer(tmp_path, 3 * MIB, 0, 2)
    assert after.wait(60) == 0, "what it found was whole, or not there"
    after.stdout.close()
    for path in files(tmp_path):
        if path.suffix == ".tmp":
            os.utime(path, (1, 1))  # some time later
    cache = RangeCache(tmp_path, 3 * MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put(key(1000), data(1000))
    assert not [path for path in files(tmp_path) if path.suffix == ".tmp"]
