"""Metrics: publish numbers under a group and a name, and choose with a handler where they go.

Importing this package imports neither torch nor prometheus_client; `MetricsRegistry` (for the agent) loads the latter
on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily
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

__getattr__, __dir__ = lazily(__name__, {"MetricsRegistry": "exposition"})
