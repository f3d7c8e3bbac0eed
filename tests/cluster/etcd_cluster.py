"""An etcd of three members, each of which can be killed, started again, stopped and resumed; and what etcd says of it.

Asked over etcd's JSON gateway and not by the product's own client, so that a test judges by another's words.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from tests.waiting import pause, wait_until
from torchelastic.network.ports import unused_ports
from torchelastic.processes import dies_with_parent
from torchelastic.rendezvous.server import find_etcd_binary

PATIENCE_S = 60.0


def ask_etcd(endpoint: str, method: str, question: dict[str, Any], timeout_s: float = 1.0) -> dict[str, Any]:
    """One call of etcd's JSON gateway.

    Args:
        endpoint: HOST:PORT.
        method: such as "kv/range" (https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/).
        question: its fields; keys and values in base64.
        timeout_s: of the whole call.

    Raises:
        OSError: no answer, or an answer that is an error.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a web proxy
    with opener.open(f"http://{endpoint}/v3/{method}", json.dumps(question).encode(), timeout=timeout_s) as answer:
        document: dict[str, Any] = json.load(answer)
    return document


class Cluster:
    """Three members, numbered from 0; they end with the process that made them.

    Args:
        folder: for their data and their logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # a member ends with the thread that started it: this one lasts, whoever calls
        self._starter = ThreadPoolExecutor(1, "etcd-starter")
        ports = unused_ports("127.0.0.1", 6)
        self.clients, self._peers = ports[:3], ports[3:]
        self._members = [self._start(member) for member in range(3)]

    def _start(self, member: int) -> subprocess.Popen[bytes]:
        name, client, peer = f"m{member}", _url(self.clients[member]), _url(self._peers[member])
        everybody = ",".join(f"m{n}={_url(port)}" for n, port in enumerate(self._peers))
        command = [
            str(find_etcd_binary()),
            *("--name", name, "--data-dir", str(self._folder / name), "--log-level", "error"),
            *("--heartbeat-interval", "50", "--election-timeout", "300"),  # to lose a leader soon
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", everybody),
        ]
        with (self._folder / f"{name}.log").open("ab") as log:
            return self._starter.submit(_popen, command, log).result()

    # --- verbs --------------------------------------------------------------------------------------------------------

    def kill(self, member: int) -> None:
        """End it by SIGKILL; its data stays."""
        self._members[member].kill()
        assert self._members[member].wait() == -signal.SIGKILL, f"etcd member {member} had ended by itself"

    def restart(self, member: int) -> None:
        """Start one that was killed again, with its data; returns when it serves."""
        assert self._members[member].poll() is not None, f"etcd member {member} still runs"
        self._members[member] = self._start(member)
        self.wait_until_healthy(member)

    def stop(self, *members: int) -> None:
        """SIGSTOP: connections stay, and nothing is answered."""
        pause(self._members[member].pid for member in members)

    def resume(self, *members: int) -> None:
        """SIGCONT to what was stopped."""
        for member in members:
            os.kill(self._members[member].pid, signal.SIGCONT)

    def end(self) -> None:
        """End all of them, in whatever state they are."""
        for member in self._members:
            member.kill()
            member.wait()
        self._starter.shutdown()

    # --- what is true -------------------------------------------------------------------------------------------------

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        """Where clients connect, in the order of the members."""
        return [("127.0.0.1", port) for port in self.clients]

    @property
    def endpoint_list(self) -> str:
        """All of it for `--rdzv-endpoint`."""
        return ",".join(f"127.0.0.1:{port}" for port in self.clients)

    def endpoint(self, member: int) -> str:
        """HOST:PORT of one member."""
        return f"127.0.0.1:{self.clients[member]}"

    def is_alive(self, member: int) -> bool:
        """Whether its process runs."""
        return self._members[member].poll() is None

    def leader(self) -> int:
        """The member that leads by the word of all that answer. Waits until they agree on one that lives."""

        def leaders() -> list[int]:
            words = [word for word in map(self._status, range(3)) if word is not None]
            led_by = {word["leader"] for word in words}
            return [n for n in range(3) if (word := self._status(n)) and {word["header"]["member_id"]} == led_by]

        return wait_until(leaders, PATIENCE_S, "there is an etcd leader")[0]

    def clients_of(self, member: int) -> list[int]:
        """The process of each connection to this member's client port."""
        port = self.clients[member]
        return [
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.pid and connection.raddr and connection.raddr.port == port
        ]

    def wait_until_healthy(self, *members: int) -> None:
        """Wait until these members (none named: all) know a leader."""
        for member in members or range(3):
            wait_until(
                partial(self._status, member), PATIENCE_S, f"etcd member {member} serves", partial(self._log, member)
            )

    def _status(self, member: int) -> dict[str, Any] | None:
        """Its own words, if it answers and knows a leader."""
        try:
            word = ask_etcd(self.endpoint(member), "maintenance/status", {})
        except OSError:
            return None
        return word if word.get("leader", "0") != "0" else None

    def _log(self, member: int) -> str:
        return (self._folder / f"m{member}.log").read_text(errors="replace")[-2000:]


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster with a leader; it is ended at the end of the block."""
    made = Cluster(folder)
    try:
        made.wait_until_healthy()
        yield made
    finally:
        made.end()


def _popen(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(dies_with_parent(command), stdout=log, stderr=log)


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"
