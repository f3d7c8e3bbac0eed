"""Publishing: groups, handlers, streams and the `profile` decorator, with the names of torchelastic 0.1.

One promise differs from 0.1: telemetry never throws into training. A handler that raised there made the train loop roll
back a good step; here the first failure of a handler is logged with its traceback and the later ones are counted.

All functions may be called on any rank and from any thread.
"""

from __future__ import annotations

import abc
import functools
import logging
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# A start time beyond this cannot come from time.monotonic() (31 years of uptime): it was read from time.time().
_WALL_CLOCK_FROM_S = 1e9


class MetricData(NamedTuple):
    """One published value; `timestamp` is wall-clock seconds since the epoch, `group_name` None if none was given."""

    timestamp: float
    group_name: str | None
    name: str
    value: float


class MetricHandler(abc.ABC):
    """Where metrics go. Subclass it, implement `emit`, and pass an instance to `configure`."""

    @abc.abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Take one value.

        Called on the thread that published, so it should return at once. What it raises is logged and dropped.
        """


class ConsoleMetricHandler(MetricHandler):
    """Prints one line per value to standard output."""

    def emit(self, metric_data: MetricData) -> None:
        """Print the value."""
        timestamp, group, name, value = metric_data
        sys.stdout.write(f"[{timestamp}][{group}]: {name}={value}\n")


class NullMetricHandler(MetricHandler):
    """Drops every value; what is used until `configure` is called."""

    def emit(self, metric_data: MetricData) -> None:
        """Do nothing."""


class _Sink:
    """A configured handler, with the number of times that it raised."""

    __slots__ = ("failures", "handler", "is_silent")

    def __init__(self, handler: MetricHandler) -> None:
        self.handler = handler
        self.failures = 0
        # the exact type: a subclass of the null handler may well do something
        self.is_silent = type(handler) is NullMetricHandler

    def deliver(self, group: str | None, name: str, value: float) -> None:
        if self.is_silent:
            return
        try:
            self.handler.emit(MetricData(time.time(), group, name, value))
        except Exception:  # whatever telemetry raises, the step that published it was good
            self.failures += 1
            if self.failures == 1:
                logger.exception(
                    "metric handler %s failed on %s/%s; training goes on, later failures of it are only counted",
                    type(self.handler).__name__,
                    group,
                    name,
                )


class _Routes:
    """Which sink serves which group. Reads are single dictionary look-ups, so that no lock is needed."""

    def __init__(self) -> None:
        self.default = _Sink(NullMetricHandler())
        self.by_group: dict[str, _Sink] = {}

    def resolve(self, group: str | None) -> _Sink:
        return self.default if group is None else self.by_group.get(group, self.default)

    def sink_of(self, handler: MetricHandler) -> _Sink | None:
        # by identity: handlers need not be hashable
        for sink in (self.default, *self.by_group.values()):
            if sink.handler is handler:
                return sink
        return None


_routes = _Routes()


class MetricStream:
    """Publishes under one group, to the handler that the group had when the stream was made.

    Get one from `getStream`; making one is cheap, so ask again rather than keep it across `configure`.
    """

    def __init__(self, group_name: str | None, sink: _Sink) -> None:
        self.group_name = group_name
        self._sink = sink

    @property
    def handler(self) -> MetricHandler:
        """The handler behind this stream."""
        return self._sink.handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        """Publish a number, in the unit that its name states. Never raises because of the handler."""
        self._sink.deliver(self.group_name, metric_name, metric_value)


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Send the metrics of one group, or of every group without a handler of its own, to `handler`.

    Args:
        handler: where they go; replaces the handler set before.
        group: the group to bind; None replaces the default handler (initially `NullMetricHandler`).

    Raises:
        TypeError: `handler` has no `emit` method.
    """
    if not callable(getattr(handler, "emit", None)) or isinstance(handler, type):
        raise TypeError(f"configure needs a MetricHandler instance, got {handler!r}: derive from MetricHandler")
    sink = _routes.sink_of(handler) or _Sink(handler)
    if group is None:
        _routes.default = sink
    else:
        _routes.by_group[group] = sink


def getStream(group: str | None) -> MetricStream:  # noqa: N802 - 0.1's name
    """Return a stream for `group`, bound to the handler that the group has now."""
    return MetricStream(group, _routes.resolve(group))


def publish_metric(metric_group: str | None, metric_name: str, metric_value: float) -> None:
    """Publish one value to the handler of `metric_group`. Never raises because of the handler."""
    _routes.resolve(metric_group).deliver(metric_group, metric_name, metric_value)


def failure_count(handler: MetricHandler) -> int:
    """Return how often `handler` raised in `emit` since it was configured; 0 for one that is not configured."""
    sink = _routes.sink_of(handler)
    return 0 if sink is None else sink.failures


def profile(group: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function publish `<name>.success` or `<name>.failure` (1), then `<name>.duration.ms`, at each call.

    The duration is a float of milliseconds by the monotonic clock (0.1: whole ones by the wall clock). With the null
    handler, the call is passed through after one look-up and nothing is timed.

    Args:
        group: the metric group; None publishes to the default handler.

    Raises:
        TypeError: used without parentheses.
    """
    if callable(group):
        raise TypeError("profile takes a group: write @profile() or @profile('my_group')")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name: str = getattr(function, "__name__", type(function).__name__)
        success, failure, duration = f"{name}.success", f"{name}.failure", f"{name}.duration.ms"

        @functools.wraps(function)
        def profiled(*args: P.args, **kwargs: P.kwargs) -> R:
            sink = _routes.resolve(group)
            if sink.is_silent:
                return function(*args, **kwargs)
            outcome = failure
            start_s = time.monotonic()
            try:
                result = function(*args, **kwargs)
                outcome = success
                return result
            finally:
                elapsed_ms = (time.monotonic() - start_s) * 1000.0
                sink.deliver(group, outcome, 1)
                sink.deliver(group, duration, elapsed_ms)

        return profiled

    return decorate


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Return the whole milliseconds since `start_time_in_seconds`, never less than 0.

    Args:
        start_time_in_seconds: a reading of `time.monotonic()`; one of `time.time()`, as in 0.1, is recognised by its
            size and compared with the wall clock.
    """
    now_s = time.time() if start_time_in_seconds > _WALL_CLOCK_FROM_S else time.monotonic()
    return max(0, int((now_s - start_time_in_seconds) * 1000))


def initialize_metrics() -> None:
    """Do nothing; kept because programs written for 0.1 call it before `configure`."""
