"""Stores that fail on purpose, to read from in tests and in ``python -m tools.reliability``.

    with FaultyServer(Folder("shards"), Faults(share=0.2, kinds=PASSING)) as server:
        ...  # read server.url + "/a.parquet"; then see server.counts

``Folder`` is an HTTP server of byte ranges; ``Upstream`` hands requests on to another server (moto's S3 protocol).
"""

from tools.faults.kinds import LYING, PASSING, Faults
from tools.faults.origins import Answer, Folder, Origin, Request, Upstream
from tools.faults.reading import all_rows
from tools.faults.server import FaultyServer

__all__ = [
    "LYING",
    "PASSING",
    "Answer",
    "Faults",
    "FaultyServer",
    "Folder",
    "Origin",
    "Request",
    "Upstream",
    "all_rows",
]
