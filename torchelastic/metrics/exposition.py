"""The agent's side of Prometheus: 0.1's metric names turned into Prometheus metrics, and the `/metrics` endpoint.

Naming follows https://prometheus.io/docs/practices/naming/ (snake case, base units, `_total` for counters):

| published under group `torchelastic` | becomes                                                               |
| ------------------------------------ | --------------------------------------------------------------------- |
| `train_step.duration.ms`             | histogram `torchelastic_train_step_duration_seconds{local_rank}`      |
| `train_step.success`, `.failure`     | counter `torchelastic_train_step_total{local_rank, outcome}`          |
| `queue.wait.ms`                      | gauge `torchelastic_queue_wait_seconds{local_rank}`                   |
| what the library publishes each time | counter `torchelastic_checkpoint_failed_total{local_rank}`, see below |
| anything else, such as `loss`        | gauge `torchelastic_loss{local_rank}`                                 |

Imports prometheus_client, never torch.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.registry import Collector

from torchelastic.text import host_port

logger = logging.getLogger(__name__)

MAX_NAMES = 1000
MAX_NAME_LENGTH = 200
#: For a client of the endpoint that sends no request, or does not take the answer: it would keep a thread and a socket.
CLIENT_TIMEOUT_S = 10.0
MAX_LOCAL_RANK = 1023  # every label value is a time series in the server's memory

# From a control-plane call (tens of microseconds) to a checkpoint to slow storage (minutes).
# fmt: off
DURATION_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
    0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)
# fmt: on

# Suffixes that Prometheus keeps for the parts of counters, histograms and summaries, and for metadata.
_RESERVED_SUFFIXES = ("_total", "_count", "_sum", "_bucket", "_created", "_info")

#: What the library publishes each time that something happens: as gauges they would stay at their last value for good.
_OWN_GROUP = "torchelastic"
_OWN_SUMS = re.compile(
    r"checkpoint\.(failed|put_off|replication\.(failures|bytes|remade\.bytes)|recovery\.fetched\.bytes)"
    r"|recovery\.cause\.\w+|salvage\.(kept|recomputed|postponed)"
)

_Update = Callable[[float], None]


@dataclass(frozen=True)
class PrometheusName:
    """What a published name becomes: `kind` is histogram, counter or gauge; values are multiplied by `scale`."""

    kind: str
    name: str
    scale: float = 1.0
    outcome: str = ""


def prometheus_name(group: str, name: str) -> PrometheusName:
    """Translate a metric name of torchelastic 0.1 into a Prometheus one. Pure; the table is in the module's docstring.

    Args:
        group: the metric group, may be empty.
        name: the published name, such as `train_step.duration.ms`.
    """
    if name.endswith(".duration.ms"):
        stem = _snake_case(group, name.removesuffix(".duration.ms"))
        return PrometheusName("histogram", f"{stem}_duration_seconds", scale=1e-3)
    for outcome in ("success", "failure"):
        if name.endswith(f".{outcome}"):
            stem = _snake_case(group, name.removesuffix(f".{outcome}"))
            return PrometheusName("counter", f"{stem.removesuffix('_total')}_total", outcome=outcome)
    gauge = _snake_case(group, name)
    if group == _OWN_GROUP and _OWN_SUMS.fullmatch(name):
        return PrometheusName("counter", f"{gauge}_total")
    if gauge.endswith("_ms"):
        return PrometheusName("gauge", gauge.removesuffix("_ms") + "_seconds", scale=1e-3)
    return PrometheusName("gauge", f"{gauge}_value" if gauge.endswith(_RESERVED_SUFFIXES) else gauge)


def _snake_case(group: str, name: str) -> str:
    text = f"{group}_{name}" if group else name
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower()
    text = re.sub(r"[^a-z0-9]+", "_", text).strip("_")
    if not text:
        text = "unnamed"
    return text if text[0].isalpha() else f"metric_{text}"


class MetricsRegistry:
    """The metrics of this host's workers, ready to be scraped. Methods may be called from any thread of the agent.

    Args:
        max_names: how many distinct (group, name) pairs are kept; values of further ones are dropped and counted in
            `torchelastic_metrics_dropped_total`, so that a name with a step number in it cannot eat the agent's memory.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self.collector_registry = CollectorRegistry(auto_describe=True)
        self._max_names = max_names
        self._lock = threading.Lock()
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        self._prom_names: dict[tuple[str, str], PrometheusName] = {}
        self._updates: dict[tuple[str, str, int | None], _Update] = {}
        self._has_skipped = False
        self._dropped = Counter(
            "torchelastic_metrics_dropped",
            f"Values dropped because more than {max_names} distinct metric names were published.",
            registry=self.collector_registry,
        )

    def record(self, local_rank: int | None, group: str, name: str, value: float) -> None:
        """Take one value from a worker.

        Args:
            local_rank: the worker's rank on this host, 0 to 1023; None when unknown (an empty label).
            group: metric group, may be empty.
            name: metric name, at most 200 characters.
            value: a number; NaN and infinity are fine for a gauge (a loss may well be NaN).

        Raises:
            ValueError: an argument is not as above, a count or duration is negative or not finite (it would spoil the
                sum for good), or the name collides with a metric of another kind. Nothing was recorded then; the
                caller logs it, for it is a fault of what the worker sent.
        """
        number = _checked(local_rank, group, name, value)
        update = self._updates.get((group, name, local_rank))
        if update is None:
            with self._lock:
                update = self._resolve(local_rank, group, name)
        update(number)

    def add(self, collector: Collector) -> None:
        """Serve these too. Raises ValueError: one of their names is taken."""
        self.collector_registry.register(collector)

    def start_endpoint(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Serve `/metrics` over HTTP on a daemon thread.

        Args:
            host: address to listen on; an empty string means all of them.
            port: TCP port; 0 lets the system choose one.

        Returns:
            The port it listens on, and a function that stops serving (callable more than once).

        Raises:
            OSError: the address cannot be listened on.
        """
        address = host or "0.0.0.0"  # noqa: S104 - what an empty host means, and what Prometheus needs to scrape
        try:
            server, thread = start_http_server(port, addr=address, registry=self.collector_registry)
        except (OSError, OverflowError) as error:  # the latter: no port is that high
            raise OSError(
                f"the metrics endpoint cannot listen on {host_port(address, port)} ({error}): choose another"
            ) from error
        server.RequestHandlerClass = _Client
        stopped = threading.Event()

        def stop() -> None:
            if not stopped.is_set():
                stopped.set()
                server.shutdown()
                server.server_close()
                thread.join()

        return server.server_port, stop

    def _resolve(self, local_rank: int | None, group: str, name: str) -> _Update:
        """Find or make the series of one worker's metric. The lock is held."""
        prom_name = self._prom_names.get((group, name))
        if prom_name is None:
            if len(self._prom_names) >= self._max_names:
                return self._skip
            prom_name = prometheus_name(group, name)
        metric = self._metric(prom_name, group, name)
        self._prom_names[(group, name)] = prom_name
        label = "" if local_rank is None else str(local_rank)
        update = _updater(metric, prom_name, label)
        self._updates[(group, name, local_rank)] = update
        return update

    def _skip(self, _: float) -> None:
        if not self._has_skipped:
            self._has_skipped = True
            logger.warning(
                "more than %d distinct metric names were published; values of new ones are dropped", self._max_names
            )
        self._dropped.inc()

    def _metric(self, prom_name: PrometheusName, group: str, name: str) -> Counter | Gauge | Histogram:
        metric = self._metrics.get(prom_name.name)
        if metric is None:
            try:
                metric = _create(prom_name, self.collector_registry)
            except ValueError as error:
                raise ValueError(_collision(prom_name, group, name)) from error
            self._metrics[prom_name.name] = metric
        if not isinstance(metric, _KINDS[prom_name.kind]):
            raise ValueError(_collision(prom_name, group, name))
        return metric


class _Client(WSGIRequestHandler):
    """One scrape. Of a client that has gone, or is silent, nothing is written on standard error, which is the log."""

    def handle(self) -> None:
        self.connection.settimeout(CLIENT_TIMEOUT_S)
        with suppress(OSError):
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


_KINDS: dict[str, type[Counter] | type[Gauge] | type[Histogram]] = {
    "counter": Counter,
    "gauge": Gauge,
    "histogram": Histogram,
}


def _create(prom_name: PrometheusName, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    readable = prom_name.name.replace("_", " ")
    if prom_name.kind == "histogram":
        return Histogram(
            prom_name.name,
            f"Duration of {readable.removesuffix(' duration seconds')} in seconds.",
            ["local_rank"],
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
    if prom_name.kind == "counter" and not prom_name.outcome:
        help_text = f"Sum of {readable.removesuffix(' total')} as published by the worker."
        return Counter(prom_name.name, help_text, ["local_rank"], registry=registry)
    if prom_name.kind == "counter":
        help_text = f"Calls of {readable.removesuffix(' total')} by outcome."
        return Counter(prom_name.name, help_text, ["local_rank", "outcome"], registry=registry)
    return Gauge(prom_name.name, f"Last published value of {readable}.", ["local_rank"], registry=registry)


def _updater(metric: Counter | Gauge | Histogram, prom_name: PrometheusName, label: str) -> _Update:
    """Bind the series once: looking it up by labels at each value costs more than the update itself."""
    scale = prom_name.scale
    if isinstance(metric, Gauge):
        gauge = metric.labels(label)
        return lambda value: gauge.set(value * scale)
    labels = (label, prom_name.outcome) if prom_name.outcome else (label,)
    series = metric.labels(*labels)
    add = series.observe if isinstance(series, Histogram) else series.inc

    def accumulate(value: float) -> None:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{prom_name.name} takes finite numbers from 0 up, got {value}")
        add(value * scale)

    return accumulate


def _collision(prom_name: PrometheusName, group: str, name: str) -> str:
    return (
        f"metric {name!r} of group {group!r} would be the {prom_name.kind} {prom_name.name}, "
        "which exists with another type: rename one of them"
    )


def _checked(local_rank: object, group: object, name: object, value: object) -> float:
    """Return the value as a float, or say what is wrong. Everything here came over a socket."""
    if not isinstance(group, str) or len(group) > MAX_NAME_LENGTH:
        raise ValueError(f"a metric group is a string of at most {MAX_NAME_LENGTH} characters, got {group!r:.80}")
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_LENGTH:
        raise ValueError(f"a metric name is a string of 1 to {MAX_NAME_LENGTH} characters, got {name!r:.80}")
    if local_rank is not None and (type(local_rank) is not int or not 0 <= local_rank <= MAX_LOCAL_RANK):
        raise ValueError(f"local_rank is None or a number from 0 to {MAX_LOCAL_RANK}, got {local_rank!r:.80}")
    if not isinstance(value, (int, float)):
        raise ValueError(f"metric {name!r} takes a number, got {value!r:.80}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"metric {name!r} got a number that does not fit a float") from None
