from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# A shell's background job ignores Ctrl-C, and so would all programs that these tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# gcsfs reads it when it is imported, whoever does that first: it would ask the emulator for gRPC, for minutes.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

# No deadline: a machine under load is not a defect. Derandomized: a run of the suite can be repeated exactly.
settings.register_profile("shardstream", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shardstream")
