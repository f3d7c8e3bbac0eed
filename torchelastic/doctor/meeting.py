"""Hosts that run the doctor at once find each other in etcd, and connect to each other.

Each writes a card on a lease below `<run>/doctor/hosts/`, waits for the cards of the others, connects to every port on
them, and goes when all are done.
"""

from __future__ import annotations

import secrets
import socket
import socketserver
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
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
from torchelastic.network.interface_choice import InterfaceError
from torchelastic.network.interfaces import is_loopback
from torchelastic.processes.background import in_background, side_by_side
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


def meet(
    store: CoordinationStore,
    root: str,
    wanted: int,
    wait_s: float,
    address: str,
    *,
    ports: Sequence[int] = (),
    facts: Mapping[str, str] | None = None,
    name: str = "",
    boot_id: str = "",
) -> MeetingFacts:
    """Meet the other hosts.

    Args:
        store: where the hosts meet; is not closed.
        root: the key below which the cards are.
        wanted: how many hosts there are, this one counted in.
        wait_s: how long to wait for them.
        address: of this host for the others.
        ports: at which it is to listen, besides a free one; those that are taken are left out.
        facts: what should be the same on all hosts.
        name: of this host.
        boot_id: of it.

    Raises:
        StoreError: the store does not serve.
        OSError: this host cannot listen at its address.
    """
    prefix = f"{root}/hosts/"
    key = f"{prefix}{secrets.token_hex(8)}"

    def show(card: HostCard) -> None:
        store.txn((), (Put(key, encode_card(card), lease_id),))

    def others() -> dict[str, HostCard]:
        cards = {kv.key: decode_card(kv.value) for kv in store.list_prefix(prefix).items}
        return {there: card for there, card in cards.items() if card is not None and there != key}

    def watch(is_enough: Callable[[Mapping[str, HostCard]], bool], longest_s: float) -> Mapping[str, HostCard]:
        until_s = time.monotonic() + longest_s
        while not is_enough(found := others()) and time.monotonic() < until_s:
            time.sleep(POLL_S)
        return found

    with ExitStack() as stack:
        listening = _listen(stack, address, ports)
        own = HostCard(name or socket.gethostname(), address, listening, boot_id or host_id(), facts=facts or {})
        lease_id = store.grant_lease(wait_s + BESIDE_WAITING_S).lease_id
        stack.callback(_go, store, lease_id)
        show(own)
        began_s = time.monotonic()
        here = watch(lambda found: len(found) + 1 >= wanted, wait_s)
        waited_s = time.monotonic() - began_s
        visits = _visit_all(here)
        show(replace(own, is_done=True))
        watch(lambda found: all(card.is_done for card in found.values()), STAY_S)
    return MeetingFacts(own, wanted, waited_s, visits)


def _listen(stack: ExitStack, address: str, ports: Sequence[int]) -> tuple[int, ...]:
    listening = []
    for port in (0, *ports):
        try:
            server = _Listener(address, port)
        except OSError:
            if port == 0:
                raise
            continue  # whether it is free is another check's matter
        in_background(partial(server.serve_forever, 0.05), "doctor-listener")
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        listening.append(int(server.server_address[1]))
    return tuple(listening)


def _go(store: CoordinationStore, lease_id: int) -> None:
    with suppress(StoreError):  # the card goes with the lease, a little later
        store.revoke_lease(lease_id)


def _visit_all(others: Mapping[str, HostCard]) -> tuple[Visit, ...]:
    tries = {
        f"{key}:{port}": partial(_connect, card.address, port) for key, card in others.items() for port in card.ports
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
        seen = meet(store, doctor_root(url), wanted, wait_s, address, ports=ports, facts=facts)
        return judge_meeting(replace(seen, etcd_is_here=is_loopback(address)))
    except (StoreError, OSError, InterfaceError) as error:
        return judge_meeting(_no_meeting(wanted, str(error)))
    finally:
        store.close()


def _no_meeting(wanted: int, why: str) -> MeetingFacts:
    return MeetingFacts(HostCard(socket.gethostname(), "", (0,), ""), wanted, failure=why)
