"""One fresh process: ``python -m tools.bench.child CASE ROOT DATA OUTPUT`` measures a case and writes its numbers.

The output is a JSON object: ``metrics``, or ``skipped``, or ``error`` with a trace.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.bench.case import Case, Folders
from tools.bench.memory import own_pss_mb
from tools.bench.subjects import load_subject
from tools.bench.workloads import workload

PREPARE = "prepare"
_QUIET = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_case(case: Case, folders: Folders) -> dict[str, Any]:
    """Measures a case in this process; whatever happens is in what it returns."""
    os.environ.update(_QUIET)
    try:
        subject = load_subject(case.subject, folders)
        os.environ.update(subject.variables(case))
        began = time.perf_counter()
        try:
            import_module("torch")
            import_module(subject.package)
            for package in () if case.options.get("cold") else subject.lazy_packages:
                import_module(package)
        except ImportError as error:
            return {"skipped": f"{subject.package} cannot be imported: {error}"}
        imports = {"import_s": time.perf_counter() - began, "imports_pss_mb": own_pss_mb()}
        if PREPARE in case.options:
            began = time.perf_counter()
            subject.prepare(workload(case.workload, float(case.options[PREPARE])))
            return {"metrics": {"prepare_s": time.perf_counter() - began}}
        return {"metrics": {**imports, **subject.measure(case)}}
    except Exception as error:  # noqa: BLE001 - one that fails must not end the bench
        return {"error": f"{type(error).__name__}: {error}"[:1000], "trace": traceback.format_exc()[-4000:]}


def main(arguments: list[str]) -> None:
    """Runs the case and ends the process at once: some peers leave threads and workers behind."""
    case, root, data, output = arguments
    outcome = run_case(Case.from_json(case), Folders(Path(root), Path(data)))
    Path(output).write_text(json.dumps(outcome))
    sys.stdout.flush()
    sys.stderr.flush()
    for process in multiprocessing.active_children():
        process.terminate()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
