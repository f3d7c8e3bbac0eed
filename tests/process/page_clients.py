"""Pages served over real sockets, and who looks at them; for test_page_*.py."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.pure.status_runs import NOW_S, a_host, a_run
from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.page.document import About, document_of
from torchelastic.observe.page.feed import RunSnapshot
from torchelastic.observe.page.listening import PageOptions, listening
from torchelastic.observe.page.page_server import PageServer
from torchelastic.observe.status.run_status import EventLine, HostStatus, RunStatus
from torchelastic.observe.status.status_format import run_to_plain

TOKEN = "a-token-of-some-length"


class Source:
    """A run that goes on by a step with every reading."""

    def __init__(self, workers: int = 2, hosts: int = 1) -> None:
        self.reads, self.workers, self.hosts = 0, workers, hosts

    def read(self) -> RunSnapshot:
        self.reads += 1
        status = self.status(self.reads)
        return RunSnapshot(run_to_plain(status), document_of(status, About("node-0", "1.0")))

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
        saved = f"saved step {n}, training stopped for 12 ms"
        event = EventLine(at_s=NOW_S + n, host=host.host, kind="save", text=saved)
        total = tuple(amount * len(workers) for amount in spent)
        seen = replace(host.seen, amounts=total, worker_ns=sum(total), committed=n * len(workers))
        events = (*host.events, event) if n % 10 == 0 else host.events
        return replace(host, at_s=NOW_S - 1 / (n + 1), workers=workers, seen=seen, events=events)


@contextlib.contextmanager
def served(
    source: Source | None = None,
    *,
    token_file: Path | None = None,
    read: Callable[[], RunSnapshot] | None = None,
    **settings: float,
) -> Iterator[tuple[PageServer, PageOptions]]:
    options = listening("0", token_file)
    server = PageServer(options, read or (source or Source()).read, **settings)
    server.start()
    try:
        yield server, options
    finally:
        server.stop()


def get(options: PageOptions, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    """What the page answers to somebody who has its token."""
    host, port = options.socket.getsockname()[:2]
    connection = http.client.HTTPConnection(host, port, timeout=20)
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers={"Authorization": f"Bearer {options.token}", **told})
    return connection.getresponse()


def raw(options: PageOptions, content: bytes = b"") -> socket.socket:
    connection = socket.create_connection(options.socket.getsockname()[:2], timeout=20)
    connection.sendall(content)
    return connection


def stream(options: PageOptions) -> socket.socket:
    return raw(options, stream_request(options))


def stream_request(options: PageOptions) -> bytes:
    return f"GET /events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {options.token}\r\n\r\n".encode()


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
