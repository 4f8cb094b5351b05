"""The audit: shows for any topology, before a job starts, that every sample comes exactly once and at what cost.

It looks at what the plan's orders, deals and micro-batches return, never at how they find it: a fault there is a
violation here.

Its parts are loaded when they are first used: a training job needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardstream.audit.amplification import ReadCost, read_cost
    from shardstream.audit.labels import Labels, read_labels
    from shardstream.audit.mixture import MixtureReport, SourceCounts, audit_mixture
    from shardstream.audit.mixture_logs import MixtureLogsReport, check_mixture_logs
    from shardstream.audit.quality import ShuffleQuality, expected_classes, shuffle_quality, uniform_neighbours
    from shardstream.audit.report import AuditReport, EpochCounts, RankCounts
    from shardstream.audit.tokens import PackingFigures
    from shardstream.audit.tracing import TracedBatch, trace
    from shardstream.audit.whole import audit
else:
    from shardstream._lazy import attributes

    __getattr__, __dir__ = attributes(
        __name__,
        {
            "AuditReport": "shardstream.audit.report",
            "EpochCounts": "shardstream.audit.report",
            "Labels": "shardstream.audit.labels",
            "MixtureLogsReport": "shardstream.audit.mixture_logs",
            "MixtureReport": "shardstream.audit.mixture",
            "PackingFigures": "shardstream.audit.tokens",
            "RankCounts": "shardstream.audit.report",
            "ReadCost": "shardstream.audit.amplification",
            "ShuffleQuality": "shardstream.audit.quality",
            "SourceCounts": "shardstream.audit.mixture",
            "TracedBatch": "shardstream.audit.tracing",
            "audit": "shardstream.audit.whole",
            "audit_mixture": "shardstream.audit.mixture",
            "check_mixture_logs": "shardstream.audit.mixture_logs",
            "expected_classes": "shardstream.audit.quality",
            "read_cost": "shardstream.audit.amplification",
            "read_labels": "shardstream.audit.labels",
            "shuffle_quality": "shardstream.audit.quality",
            "trace": "shardstream.audit.tracing",
            "uniform_neighbours": "shardstream.audit.quality",
        },
    )

__all__ = [
    "AuditReport",
    "EpochCounts",
    "Labels",
    "MixtureLogsReport",
    "MixtureReport",
    "PackingFigures",
    "RankCounts",
    "ReadCost",
    "ShuffleQuality",
    "SourceCounts",
    "TracedBatch",
    "audit",
    "audit_mixture",
    "check_mixture_logs",
    "expected_classes",
    "read_cost",
    "read_labels",
    "shuffle_quality",
    "trace",
    "uniform_neighbours",
]
