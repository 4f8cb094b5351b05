from __future__ import annotations

import copy
import pickle

import pytest

from shardstream import errors
from shardstream.errors import ShardStreamError, shown_url

ERRORS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ShardStreamError)]


def test_the_tree_is_the_designs():
    parents = {error.__name__: error.__base__.__name__ for error in ERRORS}
    assert parents == {
        "ShardStreamError": "Exception",
        "ManifestError": "ShardStreamError",
        "ShardChangedError": "ManifestError",
        "PlanError": "ShardStreamError",
        "CursorError": "ShardStreamError",
        "TopologyError": "ShardStreamError",
        "ReadError": "ShardStreamError",
        "DecodeError": "ReadError",
        "DesyncError": "ShardStreamError",
    }


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_survives_what_processes_do_to_it(error):
    made = error("it broke", url="https://me:pw@h/a.tar?sig=1", block=3, row=0, expected=1, found=0, hint="mend it")
    text = "it broke [https://h/a.tar?..., block 3, row 0]: expected 1, found 0; mend it"
    assert str(made) == text
    for again in (pickle.loads(pickle.dumps(made)), copy.copy(made), error(str(made))):
        assert type(again) is error
        assert str(again) == text


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "broken"),
        ({"url": "a.tar"}, "broken [a.tar]"),
        ({"block": 0}, "broken [block 0]"),
        ({"row": 7, "url": "a"}, "broken [a, row 7]"),
        ({"expected": 0}, "broken: expected 0"),
        ({"found": ""}, "broken: found "),
        ({"expected": False, "found": True}, "broken: expected False, found True"),
        ({"hint": "wait"}, "broken; wait"),
    ],
)
def test_a_message_is_composed_of_the_parts_that_are_given(parts, text):
    assert str(ShardStreamError("broken", **parts)) == text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/a.parquet", "s3://bucket/a.parquet"),
        ("s3://KEY:SECRET@bucket/a.parquet", "s3://bucket/a.parquet"),
        ("s3://KEY:SEC/RE+T@bucket/a.parquet", "s3://bucket/a.parquet"),
        ("ftp://me:SEC@RET@host/a", "ftp://host/a"),
        ("https://SECRET@host/a", "https://host/a"),
        ("s3://bucket/v@2/a.parquet", "s3://bucket/v@2/a.parquet"),
        ("http://host:9000/v@2/a.tar", "http://host:9000/v@2/a.tar"),
        ("https://host/a.tar?X-Amz-Signature=SECRET", "https://host/a.tar?..."),
        ("https://me:SECRET@host:80/a.tar?sig=SECRET&b=1", "https://host:80/a.tar?..."),
        ("simplecache::s3://KEY:SECRET@bucket/a", "simplecache::s3://bucket/a"),
        ("zip://in.tar::https://me:SECRET@host/a.zip", "zip://in.tar::https://host/a.zip"),
        ("s3://KEY:SECRET@a/x::s3://KEY:SECRET@b/y", "s3://a/x::s3://b/y"),
        ("/data/me@home/really?.parquet", "/data/me@home/really?.parquet"),
        ("file:///data/me@home/a", "file:///data/me@home/a"),
    ],
)
def test_urls_are_shown_without_credentials(url, shown):
    assert shown_url(url) == shown
    assert shown_url(shown) == shown


def test_no_part_of_a_message_shows_credentials():
    secret = "cannot open s3://KEY:SECRET@b/x nor https://h/y?sig=SECRET, but (ftp://me:SECRET@h/z)"
    shown = "cannot open s3://b/x nor https://h/y?... but (ftp://h/z)"
    made = ShardStreamError(secret, expected=secret, found=ValueError(secret), hint=secret)
    assert str(made) == f"{shown}: expected {shown}, found {shown}; {shown}"
