"""Metadata services of three clouds on a local port, and two servers that are none."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

AWS = "/latest/meta-data/"
GCP = "/computeMetadata/v1/instance/"


class Cloud:
    """What a service says now; the tests change it.

    Attributes:
        aws: by path below `latest/meta-data`.
        gcp: by path below `instance`.
        azure_events: of the document.
        azure_name: of the machine.
        wall_s: what its clock shows; None: that of this host.
        tokens: which are valid.
        is_down: every request is answered by 503.
        requests: method and path of each.
    """

    def __init__(self) -> None:
        self.aws: dict[str, str] = {}
        self.gcp = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.azure_events: list[dict[str, object]] = []
        self.azure_name = "gpu_3"
        self.wall_s: float | None = None
        self.tokens: set[str] = set()
        self.is_down = False
        self.requests: list[str] = []
        self.endpoint = ""

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        """Status, body and more headers."""
        self.requests.append(f"{method} {path}")
        if self.is_down:
            return 503, "", {}
        if path == "/latest/api/token":
            if method != "PUT" or not 0 < int(headers.get("x-aws-ec2-metadata-token-ttl-seconds", "0")) <= 21600:
                return 400, "", {}
            self.tokens.add(f"token-{len(self.requests)}==")
            return 200, max(self.tokens), {}
        if method != "GET":
            return 405, "", {}
        if path.startswith(AWS):
            if headers.get("x-aws-ec2-metadata-token") not in self.tokens:
                return 401, "", {}
            found = self.aws.get(path.removeprefix(AWS))
            return (404, "", {}) if found is None else (200, found, {})
        if path.startswith(GCP):
            if headers.get("metadata-flavor") != "Google":
                return 403, "", {}
            return 200, self.gcp[path.removeprefix(GCP)], {"Metadata-Flavor": "Google"}
        if headers.get("metadata") != "true":
            return 400, "", {}
        if path == "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
            return 200, self.azure_name, {}
        if path == "/metadata/scheduledevents?api-version=2020-07-01":
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.azure_events}), {}
        return 404, "", {}


@contextmanager
def serving(cloud: Cloud) -> Iterator[Cloud]:
    """The service, at `cloud.endpoint`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, body, more = cloud.answer(self.command, self.path, headers)
            self.send_response_only(status)
            self.send_header("Date", formatdate(cloud.wall_s, usegmt=True))
            self.send_header("Content-Length", str(len(body)))
            for name, value in more.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_PUT(self) -> None:
            self.do_GET()

        def log_message(self, *_args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        cloud.endpoint = f"http://127.0.0.1:{server.server_port}"
        try:
            yield cloud
        finally:
            server.shutdown()
            thread.join()


class Hanging:
    """A server that takes every connection and never says a word.

    Attributes:
        endpoint: its URL.
        was_asked: a request has come.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.was_asked = threading.Event()
        self._listener = listener
        self._open: list[socket.socket] = []

    def run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            connection.recv(65536)
            self.was_asked.set()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for connection in self._open:
            connection.close()


@contextmanager
def hanging() -> Iterator[Hanging]:
    """A server that never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        server = Hanging(listener)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.close()
            thread.join()


@contextmanager
def saying(answer: bytes, *, again: bool = False, slowly: bool = False) -> Iterator[str]:
    """The URL of a server that says just these bytes to everybody; `again`: without end, `slowly`: byte by byte."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with closing(connection):
                    try:
                        connection.recv(65536)
                        connection.sendall(answer)
                        while again:
                            connection.sendall(answer[-1:] if slowly else answer[-1024:])
                            time.sleep(0.002 if slowly else 0.0)
                    except OSError:
                        continue

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
