"""The trainer's side of Prometheus: hand every metric to the agent of this host, which serves `/metrics`.

The training thread only appends to a queue. A daemon thread owns the connection (a Unix socket of its own, apart from
the control connection) and writes JSON lines to it:

    {"op": "metrics-hello", "pid": 4711, "local_rank": 0}
    {"op": "metrics", "items": [[group, name, value, timestamp], ...]}
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import socket
import threading
from collections.abc import Mapping

from torchelastic.metrics.api import MetricData, MetricHandler
from torchelastic.processes.local_rank import local_rank_of

logger = logging.getLogger(__name__)

SOCKET_VARIABLE = "TORCHELASTIC_AGENT_SOCKET"

_QUEUE_ITEMS = 10_000  # some minutes of an ordinary job while the agent is away, about 2 MB
_BATCH_ITEMS = 200  # keeps an ordinary line well below 64 KiB
_GATHER_S = 0.1  # a thread that wakes ten times a second does not compete with training for the interpreter lock
_IDLE_S = 5.0
_SEND_TIMEOUT_S = 5.0
_BACKOFF_FIRST_S = 0.1
_BACKOFF_MOST_S = 5.0

_Item = tuple[str, str, float, float]


class PrometheusMetricHandler(MetricHandler):
    """Forwards metrics to this host's agent, in the background.

    `emit` never blocks and never raises. While the agent cannot be reached the newest 10 000 values are kept and older
    ones are dropped; `dropped` counts them. A forked child (a DataLoader worker) opens its own connection with its
    first value and leaves its parent's alone. A process that trains alone has no agent: its values are dropped.

    Args:
        socket_path: the agent's Unix socket; default: the environment variable TORCHELASTIC_AGENT_SOCKET, which
            `torchelastic run` sets.
    """

    def __init__(self, socket_path: str | None = None) -> None:
        path = socket_path or os.environ.get(SOCKET_VARIABLE, "")
        if not path:
            logger.info("no agent to forward metrics to: they are dropped; `torchelastic run` starts one")
        self.socket_path = path
        self._pid = os.getpid()
        self._forwarder = _Forwarder(path, _hello(self._pid, os.environ))
        atexit.register(self.close)  # the last step's metrics are the ones people look at

    def _begin_in_child(self) -> None:
        """Leave the parent's forwarder alone and start an own one.

        The parent's thread does not exist in this process, its lock may have been held at the fork, and bytes written
        to its connection would land in the middle of its lines.
        """
        self._forwarder.abandon()
        self._forwarder = _Forwarder(self.socket_path, _hello(os.getpid(), os.environ))
        self._pid = os.getpid()  # last: until then no other thread may take the parent's forwarder for its own

    @property
    def dropped(self) -> int:
        """How many values were lost in this process: queue full, not a number, or no thread could be started."""
        return self._forwarder.dropped

    def emit(self, metric_data: MetricData) -> None:
        """Queue one value. Any thread; does not block, does not raise. Tensors are read later, so pass numbers."""
        if not self.socket_path:
            return
        if os.getpid() != self._pid:
            self._begin_in_child()
        self._forwarder.put(metric_data)

    def close(self, timeout_s: float = 1.0) -> None:
        """Send what is queued, waiting at most `timeout_s` seconds, and stop. A later `emit` starts again."""
        if os.getpid() == self._pid:
            self._forwarder.close(timeout_s)


class _Forwarder:
    """One process's queue, thread and connection."""

    def __init__(self, socket_path: str, hello: bytes) -> None:
        self._socket_path = socket_path
        self._hello = hello
        # SimpleQueue.put is reentrant: `emit` may run in a destructor or a signal handler in the middle of another.
        # None wakes the thread so that it sees that it is to stop.
        self._items: queue.SimpleQueue[MetricData | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards starting and stopping only
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._connection: socket.socket | None = None
        self._complained = False
        self.dropped = 0

    def put(self, metric_data: MetricData) -> None:
        if self._items.qsize() >= _QUEUE_ITEMS:
            with contextlib.suppress(queue.Empty):  # the thread may have taken it first
                self._items.get_nowait()
                self.dropped += 1
        self._items.put(metric_data)
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread is doing it, or this one is, further up the stack
        try:
            if self._thread is None:
                self._closing = threading.Event()
                self._thread = threading.Thread(target=self._run, name="torchelastic-metrics", daemon=True)
                self._thread.start()
        except RuntimeError:  # "can't start new thread": out of threads, or the interpreter is going down
            self._thread = None
            self._complain("no thread for forwarding metrics could be started; they are dropped")
        finally:
            self._lock.release()

    def close(self, timeout_s: float) -> None:
        thread = self._thread
        if thread is None:
            return
        self._closing.set()
        self._items.put(None)
        thread.join(timeout_s)

    def abandon(self) -> None:
        """Close the descriptor inherited over a fork; the parent's connection stays as it is."""
        self._disconnect()

    def _run(self) -> None:
        try:
            while not (self._closing.is_set() and self._items.empty()):
                items = self._gather()
                if not items:
                    continue
                line = json.dumps({"op": "metrics", "items": items}).encode() + b"\n"
                if not self._deliver(line):
                    self.dropped += len(items)
        finally:
            self._disconnect()
            self._thread = None  # so that the next value starts another

    def _gather(self) -> list[_Item]:
        """Wait for the next value and the ones that follow at once; may be empty."""
        items: list[_Item] = []
        try:
            self._take(self._items.get(timeout=_IDLE_S), items)
        except queue.Empty:
            return items
        if self._items.qsize() < _BATCH_ITEMS:
            self._closing.wait(_GATHER_S)
        with contextlib.suppress(queue.Empty):
            while len(items) < _BATCH_ITEMS:
                self._take(self._items.get_nowait(), items)
        return items

    def _take(self, metric_data: MetricData | None, items: list[_Item]) -> None:
        if metric_data is None:
            return
        try:
            timestamp, group, name, value = metric_data
            items.append((str(group or ""), str(name), float(value), float(timestamp)))
        except Exception:  # noqa: BLE001 - a value's own __float__ or __str__ may raise anything
            self.dropped += 1
            self._complain("a metric that is not (timestamp, group, name, number) was dropped", with_traceback=True)

    def _deliver(self, line: bytes) -> bool:
        """Send one line, reconnecting until it is out; False if the handler was closed before."""
        backoff_s = _BACKOFF_FIRST_S
        while True:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                self._connection.sendall(line)
                return True
            except OSError as error:
                # A line that was cut half way is worthless to the agent, so the next connection sends it again.
                self._disconnect()
                self._complain(f"the agent at {self._socket_path} does not take metrics ({error}); still trying")
            if self._closing.wait(backoff_s):
                return False
            backoff_s = min(2 * backoff_s, _BACKOFF_MOST_S)

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_SEND_TIMEOUT_S)
            connection.connect(self._socket_path)
            connection.sendall(self._hello)
        except OSError:
            connection.close()
            raise
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _complain(self, message: str, *, with_traceback: bool = False) -> None:
        if not self._complained:  # once: a broken dashboard must not flood the training log
            self._complained = True
            logger.warning(message, exc_info=with_traceback)


def _hello(pid: int, environment: Mapping[str, str]) -> bytes:
    return json.dumps({"op": "metrics-hello", "pid": pid, "local_rank": local_rank_of(environment)}).encode() + b"\n"
