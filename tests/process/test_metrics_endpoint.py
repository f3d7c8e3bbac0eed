"""Where Prometheus scrapes an agent, asked over real sockets by clients that do not behave."""

from __future__ import annotations

import socket
import struct
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from tests.waiting import wait_until
from torchelastic.metrics import exposition
from torchelastic.metrics.exposition import MetricsRegistry


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(exposition, "CLIENT_TIMEOUT_S", 0.5)
    port, stop = MetricsRegistry().start_endpoint("127.0.0.1", 0)
    yield port
    stop()


def scraped(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        content: bytes = answer.read()
    return content


def test_clients_that_say_nothing_are_hung_up_on_and_their_threads_end(
    port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(4)]
    assert b"torchelastic_metrics_dropped_total" in scraped(port)
    assert [one.recv(1) for one in silent] == [b""] * 4
    wait_until(lambda: threading.active_count() <= before, timeout_s=10)
    for one in silent:
        one.close()
    assert capfd.readouterr() == ("", "")


def test_a_client_that_breaks_off_leaves_no_traceback_in_the_log(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        wait_until(lambda: threading.active_count() > before, timeout_s=10)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a RST
    wait_until(lambda: threading.active_count() <= before, timeout_s=10)
    assert b"torchelastic_metrics_dropped_total" in scraped(port)
    assert capfd.readouterr() == ("", "")
