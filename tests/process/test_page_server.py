"""The live page's server, asked over real sockets."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.pure.test_status_screen import NOW_S, a_host, a_run
from torchelastic.agent.showing import Showing
from torchelastic.agent.supervisor import Supervisor, Worker
from torchelastic.launch.options import UsageError
from torchelastic.launch.page import opened_page
from torchelastic.ledger.accounts import Account
from torchelastic.ledger.book import Book
from torchelastic.ledger.events import Save
from torchelastic.page import server as server_module
from torchelastic.page.differences import applied
from torchelastic.page.document import About, document_of
from torchelastic.page.feed import Picture, as_json
from torchelastic.page.listening import PageOptions, listening
from torchelastic.page.logs import MOST_BYTES, Logs
from torchelastic.page.peers import uid_of_peer
from torchelastic.page.server import MOST_STREAMS, PageServer
from torchelastic.page.source import RunSource
from torchelastic.rendezvous.memory import MemoryStore
from torchelastic.rendezvous.records import Keys, Member, Round, RoundState, encode_member, encode_round
from torchelastic.rendezvous.store import StoreUnavailableError
from torchelastic.rendezvous.url import parse_url
from torchelastic.status.host import HostView
from torchelastic.status.reading import StatusReader
from torchelastic.status.run_status import EventLine, HostStatus, RunStatus, combined
from torchelastic.status.status_format import run_to_plain

TOKEN = "a-token-of-some-length"


class Source:
    """A run that goes on by a step with every reading."""

    def __init__(self, workers: int = 2, hosts: int = 1) -> None:
        self.reads, self.workers, self.hosts = 0, workers, hosts

    def read(self) -> Picture:
        self.reads += 1
        status = self.status(self.reads)
        return Picture(run_to_plain(status), document_of(status, About("node-0", "1.0", ("0.0",))))

    def status(self, n: int) -> RunStatus:
        each = self.workers // self.hosts
        hosts = [a_host(f"node-{h}", *range(h * each, (h + 1) * each)) for h in range(self.hosts)]
        return a_run(*(self.later(host, n) for host in hosts))

    def later(self, host: HostStatus, n: int) -> HostStatus:
        """After n seconds in which everything has changed that can."""
        spent = tuple(
            {Account.PRODUCTIVE: 950_123_457, Account.DATA_WAIT: 49_876_543}.get(a, 0) * n + 10**13 // 7 * (a + 1)
            for a in Account
        )
        workers = tuple(
            replace(
                one, step=1200 + 31 * n, steps_per_s=31.25 + n / 77, amounts=spent,
                values=dict.fromkeys(("loss", "lr", "grad_norm"), 0.1234567 / n + one.rank),
            )
            for one in host.workers
        )  # fmt: skip
        event = EventLine(at_s=NOW_S + n, host=host.host, kind="save", text=f"saved step {n}, stood still for 12 ms")
        total = tuple(amount * len(workers) for amount in spent)
        seen = replace(host.seen, amounts=total, worker_ns=sum(total), committed=n * len(workers))
        events = (*host.events, event) if n % 10 == 0 else host.events
        return replace(host, at_s=NOW_S - 1 / (n + 1), workers=workers, seen=seen, events=events)


@contextlib.contextmanager
def served(
    source: Source | None = None,
    *,
    token_file: Path | None = None,
    logs: Logs | None = None,
    read: Callable[[], Picture] | None = None,
    **settings: float,
) -> Iterator[tuple[PageServer, PageOptions]]:
    options = listening("0", token_file, is_seen=False)
    server = PageServer(options, read or (source or Source()).read, logs or Logs(), **settings)
    server.start()
    try:
        yield server, options
    finally:
        server.stop()


def get(options: PageOptions, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    host, port = options.socket.getsockname()[:2]
    connection = http.client.HTTPConnection(host, port, timeout=20)
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=told)
    return connection.getresponse()


def raw(options: PageOptions, content: bytes = b"") -> socket.socket:
    connection = socket.create_connection(options.socket.getsockname()[:2], timeout=20)
    connection.sendall(content)
    return connection


def stream(options: PageOptions) -> socket.socket:
    return raw(options, b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")


class Events:
    """The server-sent events of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")
        self.head = b""
        while not self.head.endswith(b"\r\n\r\n"):
            self.head += self._file.readline()
        self.bytes = 0

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        name, data = "", b""
        for line in self._file:
            self.bytes += len(line)
            if line.startswith(b"event: "):
                name = line[7:-1].decode()
            elif line.startswith(b"data: "):
                data = line[6:-1]
            elif line == b"\n" and name:
                yield name, json.loads(data)
                name = ""


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
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
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


def test_a_client_that_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEAD_TIMEOUT_S", 0.2)
    with served() as (_, options), raw(options, b"GET / HTT") as connection:
        assert connection.recv(100) == b""


def test_with_a_token_nothing_of_the_run_is_told_without_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    with served(token_file=path, logs=Logs(lambda: {"0.0": path})) as (_, options):
        assert TOKEN not in repr(options)
        assert TOKEN not in options.url_to_open
        assert get(options, "/").status == 200
        for secret in ("/status.json", "/events", "/log/0.0", f"/status.json?token={TOKEN}"):
            answer = get(options, secret)
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert TOKEN.encode() not in answer.read()
            assert get(options, secret, Authorization="Bearer wrong").status == 401
        assert get(options, "/status.json", Authorization=f"Bearer {TOKEN}").status == 200


def test_without_one_only_this_users_connections_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as (_, options):
        assert get(options, "/status.json").status == 200
        monkeypatch.setattr(server_module, "uid_of_peer", lambda _peer, _here: os.getuid() + 1)
        assert get(options, "/status.json").status == 403
        assert get(options, "/").status == 200


def test_the_kernel_says_whose_a_connection_is() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as accepted,
    ):
        assert uid_of_peer(client.getsockname(), accepted.getsockname()) == os.getuid()
        assert uid_of_peer(("127.0.0.1", 1), accepted.getsockname()) is None


# --- logs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    folder = tmp_path / "logs"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    (folder / "worker_0.0.log").write_text("".join(f"line {n}\n" for n in range(5000)))
    (folder / "worker_1.0.log").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "worker_2.0.log")
    return Logs(lambda: {f"{n}.0": folder / f"worker_{n}.0.log" for n in range(4)})


def test_the_end_of_a_log_is_told_once_until_there_is_more(logs: Logs, tmp_path: Path) -> None:
    with served(logs=logs) as (_, options):
        answer = get(options, "/log/0.0?tail=2")
        assert (answer.status, answer.read()) == (200, b"line 4998\nline 4999\n")
        assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
        version = answer.headers["ETag"]
        assert get(options, "/log/0.0?tail=2", If_None_Match=version).status == 304
        with (tmp_path / "logs" / "worker_0.0.log").open("a") as file:
            file.write("more\n")
        again = get(options, "/log/0.0?tail=2", If_None_Match=version)
        assert (again.status, again.read()) == (200, b"line 4999\nmore\n")
        assert len(get(options, "/log/0.0?tail=2000").read().splitlines()) == 2000
    assert len((logs.tail("0.0", 10**6) or pytest.fail("no log")).content) == MOST_BYTES


def test_nothing_but_logs_can_be_read(logs: Logs) -> None:
    with served(logs=logs) as (_, options):
        tried = [
            "1.0",
            "2.0",
            "3.0",
            "9.0",
            "../secret",
            "..%2f..%2fsecret",
            "%2e%2e/secret",
            "/etc/passwd",
            "0.0%00",
            "",
        ]
        for name in tried:
            answer = get(options, f"/log/{name}")
            assert answer.status == 404, name
            assert b"secret" not in answer.read()
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
            assert document == json.loads(json.dumps(document_of(source.status(n), About("node-0", "1.0", ("0.0",)))))


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
    assert changes / seconds + MOST_BYTES / 3 < 50_000, "with the tail of a log that fills its bound, every 3 s"
    assert whole < 150_000


def test_a_client_that_does_not_read_holds_up_nobody_and_is_let_go() -> None:
    source = Source(800)  # some hundred kilobytes, more than sockets buffer
    with served(source, send_timeout_s=1.0) as (server, options):
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(options.socket.getsockname())
        slow.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with slow, stream(options) as connection:
            told = iter(Events(connection))
            assert [next(told)[0] for _ in range(2)] == ["whole", "change"]
            assert get(options, "/page.js").status == 200
            until_s = time.monotonic() + 10
            while len(server._streams) > 1 and time.monotonic() < until_s:
                time.sleep(0.02)
            assert len(server._streams) == 1
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
        until_s = time.monotonic() + 10
        while len(server._streams) == MOST_STREAMS and time.monotonic() < until_s:
            time.sleep(0.02)
        with stream(options) as again:
            assert again.recv(20).startswith(b"HTTP/1.1 200")


def test_very_many_connections_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_CONNECTIONS", 4)
    with served() as (_, options):
        open_ones = [raw(options) for _ in range(4)]
        assert get(options, "/").status == 503
        for one in open_ones:
            one.close()
        until_s = time.monotonic() + 10
        while get(options, "/").status != 200:
            assert time.monotonic() < until_s
            time.sleep(0.02)


def test_the_end_of_the_agent_ends_the_streams_at_once_and_says_so() -> None:
    with served() as (server, options):
        told = iter(Events(stream(options)))
        assert next(told)[0] == "whole"
        idle = raw(options, b"GET ")
        server.stop()
        assert [name for name, _ in told][-1:] == ["end"]
        assert idle.recv(10) == b""
        with pytest.raises(OSError):  # noqa: PT011 - refused or reset
            raw(options, b"GET / HTTP/1.1\r\n\r\n").recv(1) or (_ for _ in ()).throw(ConnectionResetError)
    assert not [one for one in threading.enumerate() if one.name == "torchelastic-page"]


def test_connections_that_come_while_the_agent_ends_are_closed(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(40):  # often enough that some have been accepted, and their tasks have not begun
        with served() as (server, options):
            late = [raw(options, b"GET ") for _ in range(3)]
            server.stop()
            for connection in late:
                try:
                    assert connection.recv(10) == b""
                except ConnectionError:
                    continue  # it was still in the kernel's queue
    assert not caplog.records


def test_a_server_that_never_began_can_be_stopped() -> None:
    options = listening("0", None, is_seen=False)
    PageServer(options, Source().read, Logs()).stop()
    options.socket.close()
    assert options.socket.fileno() == -1


def test_while_nothing_changes_something_is_sent_all_the_same() -> None:
    picture = Source().read()
    with served(read=lambda: picture, keep_alive_s=0.2) as (_, options), stream(options) as connection:
        file = connection.makefile("rb")
        assert b": nothing new\n" in iter(file.readline, b"")


def test_a_reading_that_hangs_holds_up_neither_files_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()

    def read() -> Picture:
        stuck.wait(60)
        raise OSError

    with served(read=read) as (server, options), stream(options) as connection:
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
        assert get(options, "/").status == 200
        server.stop()
        assert not [one for one in threading.enumerate() if one.name == "torchelastic-page"]
    stuck.set()


# --- where it listens -------------------------------------------------------------------------------------------------


def test_another_address_than_loopback_wants_a_token(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--page-token-file"):
        listening("0.0.0.0:0", None, is_seen=False)
    seen = listening("0.0.0.0:0", None, is_seen=True)
    assert seen.token is not None
    assert seen.url_to_open == f"{seen.url}#token={seen.token}"
    path = tmp_path / "token"
    first = listening("0.0.0.0:0", path, is_seen=False)
    second = listening("0", path, is_seen=False)
    assert first.token == second.token == path.read_text().strip()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "token" not in first.url_to_open, "who has the file knows it"
    for one in (seen, first, second):
        one.socket.close()


def test_a_token_that_everybody_may_read_or_that_is_none_is_refused_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "token"
    for content, mode, message in (
        (TOKEN, 0o644, "chmod 600"),
        ("guess", 0o600, "holds no token"),
        ("é" * 20, 0o600, "ASCII"),
    ):
        path.write_text(content)
        path.chmod(mode)
        with pytest.raises(ValueError, match=message) as error:
            listening("0", path, is_seen=False)
        assert content not in str(error.value)


def test_an_address_that_cannot_be_had_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            listening(str(port), None, is_seen=False)
    with pytest.raises(OSError, match=r"no\.such\.host\.invalid"):
        listening("no.such.host.invalid:0", None, is_seen=False)


def opened(stack: contextlib.ExitStack, **options: Any) -> PageOptions | None:
    usual = {"page": None, "page_token_file": None, "standalone": False}
    return opened_page(argparse.Namespace(**{**usual, **options}), stack)


def test_the_page_is_off_unless_it_is_asked_for_and_on_loopback_for_a_run_on_one_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with contextlib.ExitStack() as stack:
        assert opened(stack) is None
        assert opened(stack, standalone=True, page="off") is None
        assert capsys.readouterr().err == ""
        page = opened(stack, standalone=True)
        assert page is not None
        assert page.url.startswith("http://127.0.0.1:")
        assert capsys.readouterr().err == f"live page: {page.url}\n"
        with pytest.raises(UsageError, match="cannot listen"):
            opened(stack, page=page.url.split("/")[2])
    assert page.socket.fileno() == -1


def test_a_page_for_other_hosts_wants_a_file_for_its_token_where_nobody_sees_what_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        with pytest.raises(UsageError, match="--page-token-file"):
            opened(stack, page="0.0.0.0:0")
        with pytest.raises(UsageError, match="--page "):
            opened(stack, page_token_file=tmp_path / "token")
        assert opened(stack, page="0.0.0.0:0", page_token_file=tmp_path / "token") is not None
        assert (tmp_path / "token").read_text().strip() not in capsys.readouterr().err
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        page = opened(stack, page="0.0.0.0:0")
        assert page is not None
        assert f"#token={page.token}" in capsys.readouterr().err


# --- where pictures come from -----------------------------------------------------------------------------------------


def test_while_etcd_is_away_the_own_host_goes_on_and_the_page_says_since_when() -> None:
    url = parse_url("etcd://etcd:2379/job7?min_workers=1&max_workers=4")
    store, keys = MemoryStore(), Keys(url.root)
    store.put(keys.round, encode_round(Round(4, RoundState.RUNNING, ("m0",))))
    store.put(keys.member("m0"), encode_member(Member("m0", "node-1")))
    away = [False]

    class Reader(StatusReader):
        def read(self) -> RunStatus:
            if away[0]:
                raise StoreUnavailableError("etcd is away")
            return super().read()

    now_s, step = [NOW_S], [1200]

    def own() -> HostStatus:
        host = a_host("node-1", 0, at_s=now_s[0])
        return replace(host, workers=tuple(replace(one, step=step[0]) for one in host.workers))

    source = RunSource(Reader(store, url), "job7", own, About("node-1"), Logs(), clock=lambda: now_s[0])
    document = source.read().document
    assert (document["round"]["number"], document["step"], document["page"]["etcd_away_s"]) == (4, 1200, 0.0)
    away[0], now_s[0], step[0] = True, NOW_S + 7, 1300
    document = source.read().document
    assert (document["round"]["number"], document["step"], document["page"]["etcd_away_s"]) == (4, 1300, NOW_S + 7)
    away[0], now_s[0] = False, NOW_S + 9
    until_s = time.monotonic() + 10
    while source.read().document["page"]["etcd_away_s"]:
        assert time.monotonic() < until_s


def test_an_agent_shows_more_events_of_its_host_than_it_tells_etcd_and_its_workers_logs(tmp_path: Path) -> None:
    url = parse_url("etcd://etcd:2379/job7?min_workers=1&max_workers=4")
    view = HostView("node-1", "0badcafe")
    for step in range(40):
        view.write(Save(at_ns=time.monotonic_ns(), worker="node-1/0.0", step=step), Book())
    assert [line.step for line in view.status(Book()).events] == list(range(20, 40))
    (tmp_path / "worker_0.0.log").write_text("first life\n")
    worker = Worker(0, restarts=1, log_path=tmp_path / "worker_0.1.log")
    supervisor = types.SimpleNamespace(workers=[worker, Worker(1)])

    async def show() -> tuple[dict[str, Any], bytes]:
        options = listening("0", None, is_seen=False)
        showing = Showing(
            options, MemoryStore(), url, host="node-1", status=lambda: view.status(Book()), events=view.lines,
            supervisor=cast(Supervisor, supervisor),
        )  # fmt: skip
        showing.start()
        status = await asyncio.to_thread(lambda: json.load(get(options, "/status.json")))
        log = await asyncio.to_thread(lambda: get(options, "/log/0.0").read())
        assert (await asyncio.to_thread(lambda: get(options, "/log/1.0").status)) == 404
        await showing.stop()
        return status, log

    status, log = asyncio.run(show())
    assert [event["step"] for event in status["events"]] == list(range(40))
    assert log == b"first life\n"


def test_a_run_of_which_nothing_is_known_yet_has_a_picture() -> None:
    status = combined("job7", NOW_S, Round(), (), ())
    document = document_of(status, About("node-1"))
    assert document["workers"] == document["events"] == {}
