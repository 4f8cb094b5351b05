"""One target under inputs that hypothesis draws, for a bounded time: ``NAME SECONDS SEED FOLDER``."""

from __future__ import annotations

import faulthandler
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tools.fuzz.mutations import damaged
from tools.fuzz.targets import TARGETS

MEMORY_NUM_BYTES = 1 << 30  # more than the process has after the good inputs
INPUT_S = 20.0  # one input may take as long, on a loaded machine
_ROUND = 200  # inputs between two looks at the clock


def main(name: str, seconds: float, first_seed: int, folder: Path) -> None:
    """Fuzzes a target and prints how many inputs it met; the input under way lies in the folder, should all end."""
    target, current = TARGETS[name], folder / "current"
    corpus = target.corpus()
    num_tried = num_taken = 0

    def one(data: bytes) -> None:
        nonlocal num_tried, num_taken
        current.write_bytes(data)
        faulthandler.dump_traceback_later(INPUT_S, exit=True)
        num_taken += target.try_one(data)
        num_tried += 1
        faulthandler.cancel_dump_traceback_later()

    for data in corpus:
        one(data)
    limit_memory()
    deadline, number = time.monotonic() + seconds, first_seed
    while time.monotonic() < deadline:
        seed(number)(_test(corpus, one, folder / "finding"))()
        number += 1
    current.unlink()
    print(f"{name}: {num_tried} inputs, {num_taken} taken, the others refused; seeds {first_seed} to {number - 1}")


def _test(corpus: list[bytes], one: Callable[[bytes], None], finding: Path) -> Callable[[], None]:
    @settings(
        max_examples=_ROUND,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(damaged(corpus))
    def test(data: bytes) -> None:
        try:
            one(data)
        except Exception:
            finding.write_bytes(data)  # the last one is the smallest
            raise

    made: Callable[[], None] = test
    return made


def limit_memory() -> None:
    """Lets this process have a bounded amount more than it has, as address space."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_NUM_BYTES, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
