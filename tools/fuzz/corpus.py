"""Keeps a little of what fuzzing found in tests/fuzz_corpus: ``python -m tools.fuzz.corpus build/fuzz``.

Of each target all findings (they are fixed by now, and stay so), and of what reached new code the smallest ones.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from tools.fuzz.targets import CORPUS, TARGETS

TARGET_NUM_BYTES = 16 << 10  # kept of each target
MOST_NUM_BYTES = 6 << 10  # of one input


def main(out: Path) -> None:
    """Copies inputs under names made of what they hold."""
    for name, target in TARGETS.items():
        known = set(target.corpus())
        findings = [path for path in sorted((out / name).glob("*")) if path.is_file() and path.name != "current"]
        reached = sorted((out / name / "corpus").glob("*"), key=lambda path: (path.stat().st_size, path.name))
        left = TARGET_NUM_BYTES - sum(path.stat().st_size for path in (CORPUS / name).glob("*"))
        for path in (*findings, *reached):
            data = path.read_bytes()
            if data in known or len(data) > min(left, MOST_NUM_BYTES):
                continue
            (CORPUS / name).mkdir(parents=True, exist_ok=True)
            (CORPUS / name / hashlib.blake2b(data, digest_size=8).hexdigest()).write_bytes(data)
            known.add(data)
            left -= len(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
