"""Hosts that run the doctor at once find each other in etcd, and connect to each other.

Each writes a card on a lease below `<run>/doctor/hosts/`, waits for the cards of the others, connects to every port on
them, and goes when all are done.
"""

from __future__ import annotations

import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from torchelastic.doctor.etcd_facts import CredentialsOrReason, doctor_root, open_store
from torchelastic.doctor.findings import Finding
from torchelastic.doctor.meeting_rules import (
    HostCard,
    MeetingFacts,
    Visit,
    decode_card,
    encode_card,
    judge_meeting,
)
from torchelastic.doctor.network import announced_address
from torchelastic.network.choice import InterfaceError
from torchelastic.network.interfaces import is_loopback
from torchelastic.processes.background import side_by_side
from torchelastic.processes.identity import host_id
from torchelastic.rendezvous.store import CoordinationStore, Put, StoreError
from torchelastic.rendezvous.url import RendezvousUrl

#: Between two checks for the others.
POLL_S = 0.1
#: For one connection.
CONNECT_S = 2.0
#: After its own visits a host stays so long at most for those that have not checked it yet.
STAY_S = CONNECT_S + 0.5
#: Beyond the time that it waits for others, a meeting takes no longer than this.
BESIDE_WAITING_S = STAY_S + CONNECT_S + 1.0


class _Listener(socketserver.TCPServer):
    """Takes connections, and closes them."""

    allow_reuse_address = True

    def __init__(self, address: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), socketserver.BaseRequestHandler)


class Meeting:
    """One host's part in a meeting.

    Args:
        store: where the hosts meet; is not closed.
        root: the key below which the cards are.
        address: of this host for the others.
        ports: at which it is to listen, besides a free one; those that are taken are left out.
        facts: what should be the same on all hosts.
        name: of this host.
        boot_id: of it.
        clock: monotonic seconds.
        sleep: waits.
    """

    def __init__(
        self,
        store: CoordinationStore,
        root: str,
        address: str,
        *,
        ports: Sequence[int] = (),
        facts: Mapping[str, str] | None = None,
        name: str = "",
        boot_id: str = "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._prefix = store, f"{root}/hosts/"
        self._key = f"{self._prefix}{secrets.token_hex(8)}"
        self._address, self._ports = address, tuple(ports)
        self._facts, self._name, self._boot_id = dict(facts or {}), name or socket.gethostname(), boot_id or host_id()
        self._clock, self._sleep = clock, sleep

    def hold(self, wanted: int, wait_s: float) -> MeetingFacts:
        """Meet the others.

        Args:
            wanted: how many hosts there are, this one counted in.
            wait_s: how long to wait for them.

        Raises:
            StoreError: the store does not serve.
            OSError: this host cannot listen at its address.
        """
        with ExitStack() as stack:
            own = self._listen(stack)
            lease = self._store.grant_lease(wait_s + BESIDE_WAITING_S)
            stack.callback(self._go, lease.lease_id)
            self._show(own, lease.lease_id)
            began_s = self._clock()
            others = self._others()
            while len(others) + 1 < wanted and self._clock() < began_s + wait_s:
                self._sleep(POLL_S)
                others = self._others()
            waited_s = self._clock() - began_s
            visits = self._visit_all(others)
            self._show(own.done(), lease.lease_id)
            stay_until_s = self._clock() + STAY_S
            while self._clock() < stay_until_s and not all(card.is_done for card in self._others().values()):
                self._sleep(POLL_S)
        return MeetingFacts(own, wanted, waited_s, visits)

    def _listen(self, stack: ExitStack) -> HostCard:
        listening = []
        for port in (0, *self._ports):
            try:
                server = _Listener(self._address, port)
            except OSError:
                if port == 0:
                    raise
                continue  # whether it is free is another check's matter
            threading.Thread(target=server.serve_forever, args=(0.05,), name="doctor-listener", daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            listening.append(int(server.server_address[1]))
        return HostCard(self._name, self._address, tuple(listening), self._boot_id, facts=self._facts)

    def _show(self, card: HostCard, lease_id: int) -> None:
        self._store.txn((), (Put(self._key, encode_card(card), lease_id),))

    def _go(self, lease_id: int) -> None:
        try:
            self._store.revoke_lease(lease_id)
        except StoreError:
            pass  # the card goes with the lease, a little later

    def _others(self) -> dict[str, HostCard]:
        cards = {kv.key: decode_card(kv.value) for kv in self._store.list_prefix(self._prefix).items}
        return {key: card for key, card in cards.items() if card is not None and key != self._key}

    def _visit_all(self, others: Mapping[str, HostCard]) -> tuple[Visit, ...]:
        tries = {
            f"{key}:{port}": partial(_connect, card.address, port)
            for key, card in others.items()
            for port in card.ports
        }
        ended = side_by_side(tries, dict.fromkeys(tries, CONNECT_S + 0.5))
        visits = []
        for key, card in others.items():
            failures = {}
            for port in card.ports:
                answer = ended.get(f"{key}:{port}")
                error = None if answer is None else answer.exception()
                if answer is None or error is not None:
                    failures[port] = "no answer" if answer is None else str(error) or type(error).__name__
            visits.append(Visit(card, failures))
        return tuple(sorted(visits, key=lambda visit: (visit.host.name, visit.host.address)))


def _connect(address: str, port: int) -> None:
    socket.create_connection((address, port), CONNECT_S).close()


def check(
    url: RendezvousUrl,
    credentials: CredentialsOrReason,
    wanted: int,
    wait_s: float,
    ports: Sequence[int],
    facts: Mapping[str, str],
    iface: str | None = None,
) -> Sequence[Finding]:
    """Meet the other hosts, at an etcd. A text in place of credentials: there are none, which another check says."""
    if isinstance(credentials, str):
        return judge_meeting(_no_meeting(wanted, credentials))
    store = open_store(url, credentials)
    try:
        address = announced_address(url.endpoints[0], iface)
        facts_seen = Meeting(store, doctor_root(url), address, ports=ports, facts=facts).hold(wanted, wait_s)
        return judge_meeting(replace(facts_seen, etcd_is_here=is_loopback(address)))
    except (StoreError, OSError, InterfaceError) as error:
        return judge_meeting(_no_meeting(wanted, str(error)))
    finally:
        store.close()


def _no_meeting(wanted: int, why: str) -> MeetingFacts:
    return MeetingFacts(HostCard(socket.gethostname(), "", (0,), ""), wanted, failure=why)
