"""Metrics: publish numbers under a group and a name, and choose with a handler where they go.

Importing this package imports neither torch nor prometheus_client; `MetricsRegistry` (for the agent) loads the latter
on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.metrics.api import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricStream,
    NullMetricHandler,
    configure,
    failure_count,
    get_elapsed_time_ms,
    getStream,
    initialize_metrics,
    profile,
    publish_metric,
)
from torchelastic.metrics.prometheus import PrometheusMetricHandler

if TYPE_CHECKING:
    from torchelastic.metrics.exposition import MetricsRegistry as MetricsRegistry

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsRegistry",
    "NullMetricHandler",
    "PrometheusMetricHandler",
    "configure",
    "failure_count",
    "getStream",
    "get_elapsed_time_ms",
    "initialize_metrics",
    "profile",
    "publish_metric",
]


def __getattr__(name: str) -> object:
    if name == "MetricsRegistry":
        from torchelastic.metrics.exposition import MetricsRegistry

        return MetricsRegistry
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
