"""The live page's server, asked over real sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.process.page_clients import TOKEN, Events, Source, get, raw, served, stream, stream_request
from tests.pure.merge_patch import applied
from tests.waiting import wait_until
from torchelastic.observe.page import page_server as server_module
from torchelastic.observe.page.document import About, document_of
from torchelastic.observe.page.feed import RunSnapshot, as_json
from torchelastic.observe.page.page_server import MOST_STREAMS

# --- what is answered -------------------------------------------------------------------------------------------------


def test_the_page_its_files_and_the_status_are_served_with_security_headers() -> None:
    with served() as (_, options):
        page = get(options, "/")
        assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert b'<script type="module" src="page.js">' in page.read()
        assert get(options, "/page.js").headers["Content-Type"] == "text/javascript; charset=utf-8"
        answer = get(options, "/status.json")
        assert json.load(answer)["run_id"] == "job7"
        for one in (page, answer, get(options, "/nothing")):
            assert one.headers["Content-Security-Policy"].startswith("default-src 'self'; base-uri 'none'")
            assert one.headers["X-Content-Type-Options"] == "nosniff"
            assert "Access-Control-Allow-Origin" not in one.headers


def test_what_is_not_there_forbidden_or_no_get_is_told_so() -> None:
    with served() as (_, options):
        assert get(options, "/nothing").status == 404
        assert get(options, "/status.json", Host="evil.example").status == 403
        assert get(options, "/events", Host="evil.example:80").status == 403
        assert get(options, "/status.json", Sec_Fetch_Site="cross-site").status == 403
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "get"):
            answer = get(options, "/", method)
            assert (answer.status, answer.headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"hello\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 40_000, b"431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
    ],
)
def test_what_is_no_request_does_no_harm(content: bytes, status: bytes) -> None:
    with served() as (_, options):
        with raw(options, content) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 " + status)
        assert get(options, "/").status == 200


def test_nothing_of_the_run_is_told_without_the_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    with served(token_file=path) as (_, options):
        assert TOKEN not in repr(options)
        assert TOKEN not in options.url_to_open
        assert get(options, "/", Authorization="").status == 200
        for secret in ("/status.json", "/events", f"/status.json?token={TOKEN}"):
            answer = get(options, secret, Authorization="")
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert TOKEN.encode() not in answer.read()
            assert get(options, secret, Authorization="Bearer wrong").status == 401
        assert get(options, "/status.json", Authorization=f"Bearer {TOKEN}").status == 200


def test_no_path_leads_to_other_files() -> None:
    with served() as (_, options):
        for path in ("/../../etc/passwd", "/static/page.js", "/page.py", "/__init__.py", "/..%2fserver.py"):
            assert get(options, path).status == 404, path


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_begins_with_everything_and_goes_on_with_what_has_changed() -> None:
    source = Source()
    with served(source) as (_, options), stream(options) as connection:
        events = Events(connection)
        assert b"Content-Type: text/event-stream\r\n" in events.head
        told = iter(events)
        name, document = next(told)
        assert (name, document["step"]) == ("whole", 1231)
        for n in (2, 3):
            name, patch = next(told)
            assert name == "change"
            document = applied(document, patch)
            assert document == json.loads(json.dumps(document_of(source.status(n), About("node-0", "1.0"))))


@pytest.mark.parametrize("hosts", [8, 64])
def test_for_64_workers_the_page_takes_less_than_50_kb_per_second(hosts: int) -> None:
    seconds = 4
    with served(Source(64, hosts)) as (_, options), stream(options) as connection:
        began_s = time.monotonic()
        events = Events(connection)
        told = iter(events)
        first, _ = next(told)
        whole = events.bytes
        names = [next(told)[0] for _ in range(seconds)]
        took_s = time.monotonic() - began_s
        changes = events.bytes - whole
    assert (first, set(names)) == ("whole", {"change"})
    print(f"{hosts} hosts: whole {whole} bytes, then {changes / seconds:.0f} bytes in each of {seconds} messages")
    assert took_s >= seconds * 0.99, "one message a second at most"
    assert changes / seconds < 50_000
    assert whole < 150_000


def test_a_client_that_does_not_read_holds_up_nobody_and_is_let_go() -> None:
    source = Source(800)  # some hundred kilobytes, more than sockets buffer
    with served(source, send_timeout_s=1.0) as (server, options):
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(options.socket.getsockname())
        slow.sendall(stream_request(options))
        with slow, stream(options) as connection:
            told = iter(Events(connection))
            assert [next(told)[0] for _ in range(2)] == ["whole", "change"]
            assert get(options, "/page.js").status == 200
            wait_until(lambda: len(server._streams) == 1, 10, "whoever does not read is cut")
            assert next(told)[0] in ("change", "whole")
            slow.settimeout(10)
            taken = sum(map(len, iter(lambda: slow.recv(65536), b"")))
            assert taken < len(as_json(source.read().document)), "it was cut in the middle of its first message"


def test_only_so_many_may_look_and_there_is_room_again_when_they_have_gone() -> None:
    with served() as (server, options), contextlib.ExitStack() as stack:
        streams = [stack.enter_context(stream(options)) for _ in range(MOST_STREAMS)]
        for one in streams:
            assert one.recv(20).startswith(b"HTTP/1.1 200")
        assert get(options, "/events").status == 503
        assert get(options, "/").status == 200
        streams[0].close()
        wait_until(lambda: len(server._streams) < MOST_STREAMS, 10, "a closed stream counts no more")
        with stream(options) as again:
            assert again.recv(20).startswith(b"HTTP/1.1 200")


def test_very_many_connections_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_CONNECTIONS", 4)
    with served() as (_, options):
        open_ones = [raw(options) for _ in range(4)]
        assert get(options, "/").status == 503
        for one in open_ones:
            one.close()
        wait_until(lambda: get(options, "/").status == 200, 10, "closed connections count no more")


def test_the_end_of_the_agent_ends_the_streams_at_once_and_says_so() -> None:
    others = set(threading.enumerate())
    with served() as (server, options):
        told = iter(Events(stream(options)))
        assert next(told)[0] == "whole"
        idle = raw(options, b"GET ")
        server.stop()
        assert [name for name, _ in told][-1:] == ["end"]
        assert idle.recv(10) == b""
        with pytest.raises(OSError):  # noqa: PT011 - refused or reset
            raw(options, b"GET / HTTP/1.1\r\n\r\n").recv(1) or (_ for _ in ()).throw(ConnectionResetError)
    assert "torchelastic-page" not in {one.name for one in set(threading.enumerate()) - others}


def test_a_reading_that_hangs_holds_up_neither_files_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, others = threading.Event(), set(threading.enumerate())

    def read() -> RunSnapshot:
        stuck.wait(60)
        raise OSError

    with served(read=read) as (server, options), stream(options) as connection:
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
        assert get(options, "/").status == 200
        server.stop()
        assert "torchelastic-page" not in {one.name for one in set(threading.enumerate()) - others}
    stuck.set()
