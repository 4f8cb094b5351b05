from __future__ import annotations

from hypothesis import HealthCheck, settings

# No deadline: a machine under load is not a defect. Derandomized: a run of the suite can be repeated exactly.
settings.register_profile("shardstream", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shardstream")
