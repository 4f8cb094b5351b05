"""One target under atheris, which looks for inputs that reach new code: ``NAME SECONDS SEED FOLDER``.

What it keeps stays in FOLDER/corpus; ``python -m tools.fuzz.corpus`` makes the small corpus of the tests of it.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

MEMORY_MB = 3072
INPUT_S = 60


def main(name: str, seconds: float, seed: int, folder: Path) -> None:
    """Fuzzes a target; the process ends with libFuzzer's exit code."""
    try:
        import atheris  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        sys.exit("atheris is not installed: pip install atheris, or use --engine hypothesis")
    with atheris.instrument_imports(include=["shardstream", "tarfile", "braceexpand"]):
        from tools.fuzz.targets import TARGETS
    target = TARGETS[name]
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for data in target.corpus():
        (corpus / hashlib.blake2b(data, digest_size=8).hexdigest()).write_bytes(data)
    options = [
        f"-max_total_time={max(1, int(seconds))}",
        f"-seed={seed + 1}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-timeout={INPUT_S}",
        f"-artifact_prefix={folder}/",
        "-max_len=20000",
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    atheris.Setup([name, *options, str(corpus)], target.try_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
