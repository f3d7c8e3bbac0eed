"""Pushing to a gateway that is there, away, refuses or hangs: real sockets, and never a word more than one."""

from __future__ import annotations

import http.server
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from tests.waiting import wait_until
from torchelastic.metrics.pushing import MetricsPusher


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


class Gateway(http.server.ThreadingHTTPServer):
    """Remembers what was pushed: method, path, body."""

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.pushed = status, list[tuple[str, str, str]]()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        server = self.server
        assert isinstance(server, Gateway)
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        server.pushed.append((self.command, self.path, body))
        self.send_response(server.status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Nothing."""


@contextmanager
def gateway(status: int = 200) -> Iterator[Gateway]:
    with Gateway(status) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def pushing(url: str, gauge_value: float = 1.0, every_s: float = 60.0) -> tuple[MetricsPusher, Gauge]:
    registry = CollectorRegistry()
    gauge = Gauge("mine", "Mine.", registry=registry)
    gauge.set(gauge_value)
    return MetricsPusher(url, registry, run_id="my/run", host="node-1", every_s=every_s), gauge


def test_metrics_are_pushed_at_once_and_at_the_end_into_a_group_of_run_and_host() -> None:
    with gateway() as server:
        push, gauge = pushing(server.url)
        push.start()
        wait_until(lambda: len(server.pushed) == 1)
        gauge.set(2)
        push.close()
        push.close()
        assert [method for method, _, _ in server.pushed] == ["PUT", "PUT"]
        paths = {path for _, path, _ in server.pushed}
        assert paths == {"/metrics/job/torchelastic/instance@base64/bm9kZS0xQG15L3J1bg==/run_id@base64/bXkvcnVu"}
        assert ["mine 1.0" in body for _, _, body in server.pushed] == [True, False]
        assert "mine 2.0" in server.pushed[-1][2]


def test_a_gateway_that_is_away_or_refuses_is_told_of_once_and_found_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "torchelastic.metrics.pushing")
    with gateway(status=400) as server:
        push, _ = pushing(server.url, every_s=0.01)
        push.start()
        wait_until(lambda: len(server.pushed) >= 3)
        server.status = 200
        seen = len(server.pushed)
        wait_until(lambda: len(server.pushed) >= seen + 2)
        push.close()
    away, _ = pushing(server.url)
    away.start()
    away.close()
    of_these = (record for record in caplog.records if record.name == "torchelastic.metrics.pushing")
    warnings = [record.getMessage() for record in of_these if record.levelno >= logging.WARNING]
    assert len(warnings) == 2, "one for each that pushes"
    assert server.url in warnings[0]
    assert "400" in warnings[0]
    assert len(caplog.records) > 2, "the others are there for whoever looks"


def test_a_gateway_that_never_answers_does_not_keep_the_agent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        push, _ = pushing(f"http://127.0.0.1:{silent.getsockname()[1]}")
        push.start()
        connection, _ = silent.accept()
        push.close(timeout_s=0.1)  # returns although the push still waits
        assert [thread for thread in threading.enumerate() if thread.name == "torchelastic-push"]
        connection.close()
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "torchelastic-push"], 15)
