"""What ``import shardstream.torch`` adds to ``import torch``."""

from __future__ import annotations

import time
from importlib import import_module

from tools.bench.case import Case
from tools.bench.measuring import Metrics, Subject


class ImportCost(Subject):
    """Torch is imported before; what counts is the rest."""

    def measure(self, case: Case) -> Metrics:
        """Imports it once."""
        del case
        began = time.perf_counter()
        import_module("shardstream.torch")
        return {"seconds": time.perf_counter() - began}
