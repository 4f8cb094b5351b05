"""Storage: all that touches a file system. fsspec opens everything; plain local paths take the short way by ``os``.

Everything is opened lazily and belongs to the process that opened it, so that any start method of worker processes
works: file systems are looked up by process id and never travel.
"""

from __future__ import annotations

from shardstream.storage._listing import kind_of, list_files, list_matches
from shardstream.storage._locations import absolute, common_root, folder_of, is_chain, local_path, path_below
from shardstream.storage._reads import (
    FileInfo,
    open_source,
    read_at,
    read_local,
    read_range,
    read_tail,
    read_versioned,
    stat,
    tells_versions,
    whole,
)
from shardstream.storage._systems import Data, file_system
from shardstream.storage._writes import write_atomic

__all__ = [
    "Data",
    "FileInfo",
    "absolute",
    "common_root",
    "file_system",
    "folder_of",
    "is_chain",
    "kind_of",
    "list_files",
    "list_matches",
    "local_path",
    "open_source",
    "path_below",
    "read_at",
    "read_local",
    "read_range",
    "read_tail",
    "read_versioned",
    "stat",
    "tells_versions",
    "whole",
    "write_atomic",
]
