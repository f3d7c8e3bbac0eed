"""How a worker gets into a group: `RendezvousHandler` as in torchelastic 0.1, and the one for `etcd://` URLs.

A handler for another store implements the four abstract methods and is registered with
`torch.distributed.register_rendezvous_handler`; the rest has defaults.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from torchelastic.processes import boot_time_s
from torchelastic.processes.script_import import check_not_importing
from torchelastic.rendezvous import wire
from torchelastic.rendezvous.client import AgentClient, AgentError
from torchelastic.rendezvous.own_agent import (
    ONE_RUN_PER_START,
    launchers_socket,
    notify_launcher,
    over_here,
    start_private_agent,
)
from torchelastic.rendezvous.records import MAX_TEXT, NO_ROUND, JoinRequest, Round, RoundState, StateStatus
from torchelastic.rendezvous.round_store import RoundStore
from torchelastic.rendezvous.url import RendezvousUrl, parse_url

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

#: How long the end of the run may take to reach the store before this worker goes home all the same.
DONE_TIMEOUT_S = 10.0

OnRound = Callable[[Round], None]


class RendezvousClosedException(Exception):  # noqa: N818 - a name of the public API
    """The run is closed: there will be no further group."""


class RendezvousDrainedException(RendezvousClosedException):
    """This worker was asked to leave the run and has left it; the others go on."""


class RendezvousTimeoutException(Exception):  # noqa: N818 - a name of the public API
    """Too few workers came in time."""


class RendezvousNonRetryableError(Exception):
    """The rendezvous cannot work; trying again does not help."""


class RendezvousHandler(ABC):
    """Finds the other workers."""

    @abstractmethod
    def next_rendezvous(self) -> tuple[Store, int, int]:
        """Wait for the next group; returns (store, rank, world_size).

        Raises:
            RendezvousClosedException: the run is closed.
            RendezvousDrainedException: this worker was asked to leave, and has left.
            RendezvousTimeoutException: too few workers came in time.
            RendezvousNonRetryableError: anything else that waiting does not mend.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the run is closed, or is being closed."""

    @abstractmethod
    def set_closed(self) -> None:
        """Close the run for everybody. Idempotent."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """How many workers wait for the present group to make room for them; spares over the maximum do not count."""

    # --- later than 0.1, each with a default --------------------------------------------------------------------------

    @property
    def round(self) -> Round:
        """The newest round that is known; `NO_ROUND` where a handler has no such thing."""
        return NO_ROUND

    @property
    def joined(self) -> Round:
        """The round of the last `next_rendezvous`, as it was then; `NO_ROUND` where a handler has no such thing."""
        return NO_ROUND

    @property
    def is_spare(self) -> bool:
        """Whether `next_rendezvous` waits while others train, as not all fit; False where a handler cannot tell."""
        return False

    @property
    def address(self) -> str:
        """The address at which the others reach this host; empty where it is not known."""
        return ""

    def serves_port(self, port: int) -> bool:
        """Whether a server of this handler listens at that local port: its clients' connections are no group's."""
        del port
        return False

    def on_round(self, callback: OnRound) -> None:  # noqa: B027 - a hook that only some handlers have
        """Have `callback` called, on another thread, with every change of the round."""

    def report(self, *, step: int, state_status: StateStatus, failed: bool, patience_s: float) -> None:  # noqa: B027 - as above
        """Say what this worker brings to the next group: see `records.Member`."""

    def need(self, workers: int) -> None:  # noqa: B027 - as above
        """From now on ask for no group of fewer workers; 0: of as many as the run allows."""

    def signal_done(self, step: int) -> None:
        """This worker has finished after `step` steps, which ends the run for everybody."""
        del step
        self.set_closed()

    def interrupt(self) -> None:  # noqa: B027 - as above
        """Make whoever waits for a key of the present round's store fail at once; called from any thread."""

    def wait_closed(self) -> bool:
        """After `signal_done`: wait for the others. False: one more round is needed to synchronize one of them."""
        return True

    def close(self) -> None:  # noqa: B027 - as above
        """The run is over for this worker: let go of whatever is held for it. Idempotent."""

    def is_over_for(self, step: int) -> bool:
        """Whether a worker with this many committed steps is to stop."""
        del step
        return self.is_closed()

    def should_pause(self) -> bool:
        """Whether the group is to be left with its state intact: nobody has heard of the store for too long."""
        return False

    def can_leave(self) -> bool:
        """Whether `leave` can be called now. Called from a signal handler: it must neither block nor lock."""
        return False

    def leave(self) -> None:  # noqa: B027 - a hook that only some handlers have
        """This worker wants to leave the run at an agreed step; from any thread."""

    def stop(self) -> None:  # noqa: B027 - as above
        """This worker and its group stop the run before a deadline; it goes on with its next start. `close` follows."""

    def fail_for_good(self) -> None:  # noqa: B027 - as above
        """This worker is about to end with an error that another process in its place would run into again."""

    def computes_wrong(self, step: int, why: str) -> None:  # noqa: B027 - as above
        """This worker was found to compute wrong in a step: none is to be started in its place, on this host."""

    def somebody_leaves(self) -> bool:
        """Whether a member of the present group leaves the run, so that all are to stop at an agreed step."""
        return False

    def leaves_last(self) -> bool:
        """After RendezvousDrainedException: whether those who stay are too few to go on, and this state is the best."""
        return False

    def may_commit(self) -> bool:
        """Whether a step that was done may count; not where another group may be training by now."""
        return True


class EtcdRendezvousHandler(RendezvousHandler):
    """Rendezvous over etcd v3, through the agent of this host; without one, a private agent is started.

    Construct it and call its methods on the training thread. Neither grpc nor protobuf is imported here.

    Args:
        url: `etcd://host[:port][,host...]/run_id?min_workers=..`, see `RendezvousUrl`.

    Raises:
        RendezvousUrlError: the URL cannot be used.
    """

    def __init__(self, url: str) -> None:
        self.url: RendezvousUrl = parse_url(url)
        self._launchers_socket = launchers_socket(self.url, os.environ)
        self._client: AgentClient | None = None
        self._callbacks: list[OnRound] = []
        self._store = RoundStore()
        self._joined = NO_ROUND
        self._waits = False
        self._needed = 0
        self._request = JoinRequest("", 0, StateStatus.INITIAL, False, 15.0)

    @property
    def round(self) -> Round:
        """The newest round that the agent has sent."""
        return NO_ROUND if self._client is None else self._client.round

    @property
    def member_id(self) -> str:
        """This worker's name in the run, empty before the first rendezvous."""
        return "" if self._client is None else self._client.member_id

    @property
    def joined(self) -> Round:
        """The round of the last `next_rendezvous`, as it was then."""
        return self._joined

    @property
    def is_spare(self) -> bool:
        """Whether `next_rendezvous` waits while others train."""
        round_ = self.round
        return self._waits and round_.state is RoundState.RUNNING and self.member_id not in round_.members

    def serves_port(self, port: int) -> bool:
        """Whether this process's store server listens there."""
        return self._store.serves_port(port)

    @property
    def address(self) -> str:
        """The address at which the others reach this host, empty before the first rendezvous."""
        return "" if self._client is None else self._client.address

    def on_round(self, callback: OnRound) -> None:
        """Have `callback` called, on the reader's thread, with every change of the round; it must return soon."""
        self._callbacks.append(callback)

    def report(self, *, step: int, state_status: StateStatus, failed: bool, patience_s: float) -> None:
        """Say what this worker brings to the next group."""
        self._request = JoinRequest("", step, state_status, failed, patience_s)

    def need(self, workers: int) -> None:
        """From now on ask for no group of fewer workers."""
        self._needed = workers

    def next_rendezvous(self) -> tuple[Store, int, int]:
        """Wait for the next group.

        See `RendezvousHandler`. The store is fresh for each round and belongs to it alone.
        """
        from torchelastic.torch_internals.c10d_types import PrefixStore

        client = self._connected()
        self._waits = True
        try:
            address = self._store.listen(client.address)
            round_ = client.join(replace(self._request, store_address=address, needed=self._needed))
        except AgentError as error:
            raise _as_rendezvous_error(error) from error
        finally:
            self._waits = False
        self._joined = round_
        store = self._store.connect(round_, lambda: client.round)
        return PrefixStore(f"round/{round_.number}", store), round_.roster.index(client.member_id), len(round_.roster)

    def is_closed(self) -> bool:
        """Whether the run is closed or closing, as far as the agent has reported; asks nobody."""
        return self.round.is_over

    def interrupt(self) -> None:
        """Make whoever waits for a key of the present round's store fail at once; from any thread."""
        self._store.interrupt()

    def set_closed(self) -> None:
        """Close the run for everybody."""
        self.signal_done(self._request.step)

    def signal_done(self, step: int) -> None:
        """This worker has finished after `step` steps, which ends the run for everybody."""
        self._connected().done(step, DONE_TIMEOUT_S)

    def wait_closed(self) -> bool:
        """After `signal_done`: wait for the others, within the run's time-out; see `RendezvousHandler`."""
        return self._connected().wait_closed(self.url.timeout_s)

    def is_over_for(self, step: int) -> bool:
        """Whether a worker with this many committed steps is to stop; asks nobody."""
        return self._client is not None and self._client.is_over_for(step)

    def should_pause(self) -> bool:
        """Whether `orphan_timeout` draws near without a sign of etcd; asks nobody."""
        return self._client is not None and boot_time_s() > self._client.contact.leave_at_s

    def may_commit(self) -> bool:
        """Whether the time is not over for which this group may train without a sign of etcd; asks nobody."""
        return self._client is None or boot_time_s() < self._client.contact.commit_until_s

    def can_leave(self) -> bool:
        """Whether this worker has ever asked for a group, and its agent is there."""
        return self._client is not None and not self._client.is_lost

    def leave(self) -> None:
        """Ask the agent to let this worker leave the run; from any thread."""
        if self._client is not None:
            self._client.send("leave")

    def stop(self) -> None:
        """Tell the agent, which does not start this worker again; waits for nothing."""
        self._send_if_there("stop")

    def fail_for_good(self) -> None:
        """Tell the agent, which does not start another process in this one's place; waits for nothing."""
        self._send_if_there("fail_for_good")

    def computes_wrong(self, step: int, why: str) -> None:
        """Tell the agent, which remembers it for as long as the run is; waits for nothing."""
        if self._client is not None:
            with suppress(AgentError):  # as below
                self._client.computes_wrong(step, why[:MAX_TEXT])

    def _send_if_there(self, op: str) -> None:
        if self._client is not None:
            with suppress(AgentError):  # it is gone, and starts nobody again
                self._client.send(op)

    def somebody_leaves(self) -> bool:
        """Whether a member of the present group leaves the run."""
        round_ = self.round
        return round_.state is RoundState.GATHERING and bool(round_.leaving)

    def leaves_last(self) -> bool:
        """Whether this worker was let go as the first of those without whom the run cannot go on, and may save."""
        round_ = self.round
        return round_.state is RoundState.BROKEN and round_.leaving[:1] == (self.member_id,) and self.may_commit()

    def num_nodes_waiting(self) -> int:
        """How many workers the present group is asked to stop for."""
        round_ = self.round
        return round_.waiting if round_.state is RoundState.GATHERING else 0

    def close(self) -> None:
        """Leave the run: the agent withdraws this worker unless it is done."""
        if self._client is not None:
            self._client.close()
        if self._launchers_socket is not None:
            over_here.add(self._launchers_socket)

    # `torch.distributed.init_process_group(init_method="etcd://...")` takes a generator of rendezvous
    def __iter__(self) -> EtcdRendezvousHandler:
        return self

    def __next__(self) -> tuple[Store, int, int]:
        return self.next_rendezvous()

    def _connected(self) -> AgentClient:
        if self._client is not None and not self._client.is_lost:
            return self._client
        path = self._launchers_socket
        check_not_importing("asks for a group")
        if path in over_here:
            raise RendezvousNonRetryableError(f"run {self.url.run_id!r} is over for this process: {ONE_RUN_PER_START}")
        try:
            if path is None or self._client is not None:
                path = start_private_agent(self.url)
                os.environ.setdefault(wire.SOCKET_VARIABLE, path)  # for the metrics of this process
            self._client = AgentClient(
                path,
                connect_timeout_s=self.url.connect_timeout_s + 10.0,
                on_round=self._notify_callbacks,
                ends_with_agent=path == self._launchers_socket,
            )
        except AgentError as error:
            raise _as_rendezvous_error(error) from error
        if self._launchers_socket is None:
            notify_launcher(self.url, os.environ, is_closed=self._client.run_was_closed)
        if self._client.run_was_closed and self._joined is NO_ROUND:
            raise RendezvousNonRetryableError(
                f"run {self.url.run_id!r} at {self.url.endpoints_text} is already closed: it was finished before this "
                f"worker started; choose another run id (--rdzv-id)"
            )
        return self._client

    def _notify_callbacks(self, round_: Round) -> None:
        self._store.sees(round_)
        for callback in self._callbacks:
            callback(round_)


def register() -> None:
    """Make `etcd://` known to `torch.distributed.rendezvous`. Idempotent."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    try:
        register_rendezvous_handler("etcd", _handler_for)  # type: ignore[no-untyped-call]  # torch has no types here
    except RuntimeError:
        pass  # registered already: by us, in an earlier import


def _handler_for(url: str, **_unused: object) -> EtcdRendezvousHandler:
    return EtcdRendezvousHandler(url)


def _as_rendezvous_error(error: AgentError) -> Exception:
    kinds = {
        "closed": RendezvousClosedException,
        "drained": RendezvousDrainedException,
        "timeout": RendezvousTimeoutException,
    }
    return kinds.get(error.kind, RendezvousNonRetryableError)(str(error))
