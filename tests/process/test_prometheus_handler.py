from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until
from torchelastic.metrics import MetricData, PrometheusMetricHandler
from torchelastic.metrics import prometheus as module


class Agent:
    """The agent's end of the socket: accepts connections and keeps the JSON lines of each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[list[dict[str, Any]]] = []
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            lines: list[dict[str, Any]] = []
            self.lines.append(lines)
            self._connections.append(connection)
            thread = threading.Thread(target=self._read, args=(connection, lines), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _read(self, connection: socket.socket, lines: list[dict[str, Any]]) -> None:
        with connection.makefile("r") as stream:
            for line in stream:
                lines.append(json.loads(line))

    def items(self) -> list[list[Any]]:
        return [item for lines in self.lines for line in lines if line["op"] == "metrics" for item in line["items"]]

    def names(self) -> list[str]:
        return [item[1] for item in self.items()]

    def close(self) -> None:
        for sock in (self._listener, *self._connections):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # not connected any more
            sock.close()
        for thread in self._threads:
            thread.join(5)
        self.path.unlink(missing_ok=True)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path / "agent.sock")
    yield agent
    agent.close()


@pytest.fixture
def path(agent: Agent) -> str:
    return str(agent.path)


def metric(name: str, value: object = 1.0, group: str | None = "g") -> MetricData:
    return MetricData(100.0, group, name, value)  # type: ignore[arg-type] # some tests pass what is no number


def test_values_arrive_after_a_hello_and_in_order(agent: Agent, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    handler = PrometheusMetricHandler(path)
    for number in range(450):
        handler.emit(metric(f"m{number}", number))
    handler.emit(metric("no_group", True, group=None))
    wait_until(lambda: len(agent.items()) == 451)
    (lines,) = agent.lines
    assert lines[0] == {"op": "metrics-hello", "pid": os.getpid(), "local_rank": 3}
    assert agent.items() == [["g", f"m{n}", float(n), 100.0] for n in range(450)] + [["", "no_group", 1.0, 100.0]]
    assert handler.dropped == 0


def test_a_process_that_trains_alone_has_no_agent_and_its_values_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TORCHELASTIC_AGENT_SOCKET", raising=False)
    caplog.set_level(logging.INFO)
    handler = PrometheusMetricHandler()
    before = set(threading.enumerate())
    handler.emit(metric("x"))
    handler.close()
    assert set(threading.enumerate()) <= before, "nothing waits to be sent"
    assert "they are dropped; `torchelastic run` starts one" in caplog.text


def test_without_an_agent_emit_returns_at_once_and_the_newest_values_arrive_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_QUEUE_ITEMS", 50)
    path = tmp_path / "late.sock"
    handler = PrometheusMetricHandler(str(path))
    handler.emit(metric("first"))
    wait_until(lambda: "does not take metrics" in caplog.text)
    start_s = time.monotonic()
    for number in range(2000):
        handler.emit(metric(f"m{number}"))
    assert time.monotonic() - start_s < 1
    assert handler.dropped == 1950
    agent = Agent(path)
    try:
        wait_until(lambda: "m1999" in agent.names())
        assert agent.names() == ["first"] + [f"m{number}" for number in range(1950, 2000)]
        assert len(caplog.records) == 1
    finally:
        agent.close()


def test_an_agent_that_comes_back_is_found_again(agent: Agent, path: str) -> None:
    handler = PrometheusMetricHandler(path)
    handler.emit(metric("before"))
    wait_until(lambda: agent.names() == ["before"])
    agent.close()
    successor = Agent(Path(path))
    try:
        handler.emit(metric("after"))
        wait_until(lambda: successor.names() == ["after"])
        assert [line["op"] for line in successor.lines[0]] == ["metrics-hello", "metrics"]
    finally:
        successor.close()


def test_close_sends_what_is_queued_and_a_later_value_begins_again(agent: Agent, path: str) -> None:
    handler = PrometheusMetricHandler(path)
    handler.emit(metric("a"))
    handler.close()
    wait_until(lambda: agent.names() == ["a"])
    handler.emit(metric("b"))
    handler.close()
    handler.close()
    wait_until(lambda: agent.names() == ["a", "b"])
    assert len(agent.lines) == 2


def test_the_last_values_of_a_process_are_sent_at_its_exit_without_importing_torch(agent: Agent, path: str) -> None:
    script = (
        "import sys\n"
        "from torchelastic import metrics\n"
        f"metrics.configure(metrics.PrometheusMetricHandler({path!r}))\n"
        "metrics.publish_metric('g', 'last', 1)\n"
        "assert 'torch' not in sys.modules and 'prometheus_client' not in sys.modules\n"
    )
    start_s = time.monotonic()
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30, cwd=Path(__file__).parents[2])
    wait_until(lambda: agent.names() == ["last"])
    assert time.monotonic() - start_s < 10


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # forking with a thread running is the test
def test_a_forked_child_opens_its_own_connection_and_leaves_its_parents_alone(agent: Agent, path: str) -> None:
    handler = PrometheusMetricHandler(path)
    handler.emit(metric("parent_before"))
    wait_until(lambda: agent.names() == ["parent_before"])
    child = os.fork()
    if child == 0:
        try:
            handler.emit(metric("child"))
            handler.close(timeout_s=5)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    handler.emit(metric("parent_after"))
    wait_until(lambda: len(agent.names()) == 3)
    of_parent, of_child = agent.lines
    assert [line["pid"] for line in (of_parent[0], of_child[0])] == [os.getpid(), child]
    assert [item[1] for line in of_parent[1:] for item in line["items"]] == ["parent_before", "parent_after"]
    assert [item[1] for line in of_child[1:] for item in line["items"]] == ["child"]


def test_emit_costs_a_few_microseconds(path: str, agent: Agent) -> None:
    handler = PrometheusMetricHandler(path)
    data = metric("x")
    best_s = 1.0
    for _ in range(5):
        start_s = time.thread_time()  # a busy machine takes the processor away meanwhile
        for _ in range(1000):
            handler.emit(data)
        best_s = min(best_s, (time.thread_time() - start_s) / 1000)
    assert best_s < 20e-6
