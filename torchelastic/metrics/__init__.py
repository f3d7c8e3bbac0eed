"""Metrics: publish numbers under a group and a name, and choose with a handler where they go.

Nothing is published anywhere until `configure` is called. What a handler raises is logged once, with its traceback,
and counted (`failure_count`); it never disturbs training, while in torchelastic 0.1 a `RuntimeError` there rolled
back a good step. A profiled call with the default handler is not timed, and costs about 0.1 microseconds. Prometheus
keeps at most 1000 names: put no step number into one.

`profile` measures by the monotonic clock, in fractions of a millisecond; `get_elapsed_time_ms` takes a reading of
`time.monotonic()`, and as in 0.1 one of `time.time()`. Importing this package imports neither torch nor
prometheus_client; `MetricsRegistry` (for the agent) loads the latter on first use.
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

__getattr__, __dir__ = lazily(__name__)
