"""The agent of one host: takes part in the run for its processes. Never imports torch.

What every agent has is here, and no more than that is loaded by one that serves a process which was started by hand
(`private_agent.py`): that process waits for it. What a launcher's has besides is in `launcher_agent.py`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchelastic.agent.connections import Connections
from torchelastic.agent.host_events import Dispatcher, RoundChanged, StoreAnswered, StoreReach
from torchelastic.agent.membership import Membership
from torchelastic.agent.signals import NOTICE_SIGNALS, ORDERLY_SIGNALS
from torchelastic.agent.tasks import first_of, within
from torchelastic.agent.wait_limit import WaitLimit
from torchelastic.network.interface_choice import InterfaceError
from torchelastic.network.interfaces import address_towards
from torchelastic.network.this_host import chosen_address
from torchelastic.processes import boot_time_s
from torchelastic.rendezvous.records import Keys
from torchelastic.rendezvous.store import CoordinationStore, StoreError
from torchelastic.rendezvous.url import RendezvousUrl
from torchelastic.rendezvous.worker_rules import Contact

log = logging.getLogger(__name__)

#: At the first of them the workers leave in order.
DRAIN_SIGNALS = (signal.SIGTERM, *ORDERLY_SIGNALS)
#: Who ignores them when it starts this process means it: `nohup`, and a script that starts it with `&`.
MAY_BE_IGNORED = ORDERLY_SIGNALS


@dataclass(frozen=True)
class AgentOptions:
    """What every agent is started with.

    Attributes:
        url: the run.
        socket_path: where its workers connect.
        address: at which the others reach this host; empty: as the environment chooses, else on the way to etcd.
        term_grace_s: how long workers may take to leave the run and to end by themselves after a drain signal,
            and those that never asked for a group to end by themselves after the end of the run.
    """

    url: RendezvousUrl
    socket_path: Path
    address: str = ""
    term_grace_s: float = 30.0


@dataclass(frozen=True)
class Outcome:
    """How it ended: the exit code of the launcher, what to say last, and whether the run was over before it began.

    `detail` is more keys of the last line, for JSON.
    """

    exit_code: int
    message: str = ""
    came_late: bool = False
    detail: Mapping[str, Any] = field(default_factory=dict)


class Agent(ABC):
    """Runs until the run is over, or whom it serves is.

    Args:
        options: see `AgentOptions`.
        store: a connection to the run's etcd, owned by the agent from now on.
        owner_pid: of the process that a private agent serves.
    """

    def __init__(self, options: AgentOptions, store: CoordinationStore, owner_pid: int | None = None) -> None:
        self.options, self._store, self._owner_pid = options, store, owner_pid
        self._host, self._incarnation = socket.gethostname(), uuid.uuid4().hex[:8]
        self._keys = Keys(options.url.root)
        self._events = Dispatcher()
        self._stop_signal: int | None = None
        self._draining = asyncio.Event()
        self._interrupted = asyncio.Event()

    async def run(self) -> Outcome:
        """Do everything; the event loop must run in the main thread."""
        self._build()
        self._heed_signals()
        await self.connections.start()
        try:
            address = self.options.address or chosen_address()
            self._listen()
            if not await self._has_started():
                await self.connections.stop()
                return self._stopped()
            # not before: until etcd has answered, its name may be known to nobody yet
            self.connections.address = address or address_towards(self.options.url.endpoints)
        except (StoreError, InterfaceError, OSError) as error:
            return await self._fail(f"{error}; the run was not started")
        self.connections.run_was_closed = self.membership.host.round.is_over
        early = self._early_end()
        if early is not None:
            return early
        self.connections.open()
        self._begin()
        try:
            return await self._serve()
        finally:
            await self._stop()

    def _heed_signals(self) -> None:
        for number in (*DRAIN_SIGNALS, signal.SIGINT):
            if number not in MAY_BE_IGNORED or signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        for number in NOTICE_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_notice, number)

    async def _has_started(self) -> bool:
        """Find the store and take part; false: a signal came before. Raises StoreError."""
        starting = asyncio.ensure_future(self.membership.start(self.options.url.connect_timeout_s))
        signals = [asyncio.ensure_future(one.wait()) for one in (self._draining, self._interrupted)]
        await asyncio.wait((starting, *signals), return_when=asyncio.FIRST_COMPLETED)
        for task in signals:
            task.cancel()
        if not starting.done():
            starting.cancel()
            return False
        starting.result()
        return True

    async def _fail(self, message: str) -> Outcome:
        """Nothing can be done: say so to the workers, and to the person at the terminal."""
        self.connections.fail_all("unavailable", message)
        await self.connections.stop()
        return Outcome(1, message)

    # --- what the two kinds have of their own -----------------------------------------------------

    def _build(self) -> None:
        """Make the parts; they know each other by the events that they publish and act on."""
        url, publish = self.options.url, self._events.publish
        self.connections = Connections(
            self.options.socket_path,
            host=self._host,
            incarnation=self._incarnation,
            clock=time.monotonic,
            publish=publish,
            until_written=lambda: self.membership.until_written(),
        )
        self.membership = Membership(
            self._store, self._keys, url.settings, host=self._host, agent_id=f"{self._host}-{self._incarnation}",
            on_round=lambda round_: publish(RoundChanged(round_)),
            on_contact=lambda sent_s: publish(StoreAnswered(sent_s, Contact.at(sent_s, url.orphan_timeout_s))),
            on_reach=lambda in_reach: publish(StoreReach(in_reach)),
            on_drain=self.connections.leave,
            processes=self.connections.processes,
            owner_pid=self._owner_pid,
            clock=boot_time_s,
        )  # fmt: skip
        connections = self.connections
        self._wait_limit = WaitLimit(
            url, publish, connections.waiting_since_s, connections.waits_for_store_since_s, self._kept_out
        )
        for part in (self.connections, self.membership, self._wait_limit):
            self._events.subscribe(part.on_event)

    def _kept_out(self) -> str:
        """Names the hosts that may not take part, for people; empty: none is known."""
        return ""

    def _listen(self) -> None:  # noqa: B027 - not every agent does
        """Take the ports of what this agent serves. Raises OSError."""

    def _early_end(self) -> Outcome | None:
        """The run was found; whether this host takes no part in it, and how that ends."""
        return None

    @abstractmethod
    def _begin(self) -> None:
        """Workers are answered now: start what there is besides."""

    @abstractmethod
    async def _serve(self) -> Outcome:
        """Until this agent is not needed any more."""

    async def _stop(self) -> None:
        """End what was begun: the members leave the run."""
        await self.connections.stop()
        await self.membership.stop()

    def _on_notice(self, number: signal.Signals) -> None:  # noqa: B027 - see below
        """A scheduler's notice to its workers; a process that was not started from here has it from the scheduler."""

    # --- what happens -----------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        """A drain signal once: the workers leave in order. A second one but SIGHUP, or SIGINT: they are ended."""
        is_first = self._stop_signal is None
        if number == signal.SIGHUP and not is_first:  # the kernel and the shell both send it when a terminal is closed
            return
        self._stop_signal = number
        (self._draining if is_first and number in DRAIN_SIGNALS else self._interrupted).set()

    def _stopped(self) -> Outcome:
        assert self._stop_signal is not None
        return Outcome(128 + self._stop_signal, f"stopped by {signal.Signals(self._stop_signal).name}")

    async def _leave_in_order(self, at_most_s: float) -> None:
        """What this host has said must reach the store; if its workers finished, see the run closed, within a time."""
        host = self.membership.host
        has_finished = any(member.done for member in host.members)
        if not host.in_reach and (self._stop_signal is not None or not has_finished):
            return
        if not has_finished:
            await within(2.0, self.membership.until_written())
            return
        # the others may be in a long step: they see the end when it is over; and etcd may be away for good
        longest = asyncio.sleep(at_most_s)
        await first_of(self.membership.until_closed(), self._interrupted.wait(), longest)
