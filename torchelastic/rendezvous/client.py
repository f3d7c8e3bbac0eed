"""A worker's end of the socket to its agent: asks for rounds, is notified of each change, on a thread of its own."""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable

import msgspec
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from torchelastic.processes.death_notice import leave_notice, notice_path
from torchelastic.processes.identity import Process
from torchelastic.rendezvous import wire
from torchelastic.rendezvous.records import NO_ROUND, JoinRequest, Round, RoundState, round_from_dict
from torchelastic.rendezvous.worker_rules import Contact, is_granted, is_over_for, is_replaced

log = logging.getLogger(__name__)

#: A launcher that is killed closes its connections first, and has ended within this time.
KILLED_S = 10.0

OnRound = Callable[[Round], None]


class AgentError(Exception):
    """The agent said no, or is gone. `kind` is "timeout", "closed", "unavailable", "drained" or "lost"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class AgentClient:
    """One connection of one worker process to the agent of its host.

    Args:
        socket_path: the agent's Unix socket.
        connect_timeout_s: how long to wait for it to appear.
        on_round: called on the reader's thread with each change of a round that this member is on; must return soon.
        ends_with_agent: whether this process is to end when the agent's is killed. The kernel ends what that has
            started, and not what a wrapper script between the two has.

    Raises:
        AgentError: nobody listens there in time.
    """

    def __init__(
        self, socket_path: str, *, connect_timeout_s: float, on_round: OnRound, ends_with_agent: bool = False
    ) -> None:
        self._on_round = on_round
        self._changed = threading.Condition()
        self._round = NO_ROUND
        self._after: int | None = None  # the last round of this member, while it waits for the next; else None
        self._granted: Round | None = None  # that one: it may be no more before the thread that waits has looked
        self._fatal: AgentError | None = None
        self._noted = 0
        self._welcomed = False
        self._sending = threading.Lock()
        self.member_id = ""
        self.host = ""
        self.address = ""
        self.run_was_closed = False
        #: how long this worker may go on without a further sign of the store
        self.contact = Contact()
        self._socket = _connect(socket_path, connect_timeout_s)
        self._ends_with, self._has_closed = _peer_of(self._socket) if ends_with_agent else None, False
        threading.Thread(target=self._read, name="torchelastic-agent", daemon=True).start()
        notice = leave_notice(notice_path(socket_path, os.getpid()))
        try:
            self._send({"op": "hello", **wire.who(os.environ), "notice": notice})
            self._wait_for(lambda: self._welcomed, connect_timeout_s, "the agent did not answer")
        except AgentError:
            self.close()  # or an agent that is only slow would make a member of it all the same
            raise

    @property
    def round(self) -> Round:
        """The newest round that the agent has sent."""
        return self._round

    @property
    def is_lost(self) -> bool:
        """Whether the agent is gone."""
        return self._fatal is not None and self._fatal.kind == "lost"

    def join(self, request: JoinRequest) -> Round:
        """Ask for the next round and wait until this member is on the roster of one; returns that round.

        The round may be no more by then: who joins it notices, and asks again. One that this member was given after it
        had finished, to synchronize the others, is its next round without being asked for.

        The wait has no bound here: the agent ends it by the run's time-out, which does not count for spares.

        Raises:
            AgentError: the run is closed, nobody came in time, this worker was to leave and may go, etcd is out of
                reach, or the agent is gone.
        """
        step = request.step
        if self._granted is None or is_replaced(self._granted, self._round):
            self._expect_a_round()
            self._send({"op": "join", **msgspec.to_builtins(request)})
            self._wait_for(lambda: self.is_over_for(step) or self._granted is not None, None, "")
        granted, self._granted, self._after = self._granted, None, None
        if granted is None or self.is_over_for(step):
            raise AgentError("closed", self._round.because or "the run is closed")
        return granted

    def send(self, op: str) -> None:
        """Say something that has no more words to it ("leave", "stop", "fail_for_good"; see `wire`); from any thread.

        Raises:
            AgentError: the agent is gone.
        """
        self._send({"op": op})

    def computes_wrong(self, step: int, why: str) -> None:
        """Say that this worker was found to compute wrong in a step, and how; from any thread.

        Raises:
            AgentError: the agent is gone.
        """
        self._send({"op": "computes_wrong", "step": step, "why": why})

    def is_over_for(self, step: int) -> bool:
        """Whether the run is over for a member with this many committed steps.

        One that lost its last step while others finished is synchronized first, in one more round.
        """
        return is_over_for(self._round, self.member_id, step)

    def done(self, step: int, timeout_s: float) -> None:
        """Say that this member has finished; returns when the store has it, or after `timeout_s`."""
        expected = self._noted + 1

        def is_noted() -> bool:
            return self._noted >= expected or self._round.state is RoundState.CLOSED

        self._expect_a_round()
        try:
            self._send({"op": "done", "step": step})
            self._wait_for(is_noted, timeout_s, "etcd did not note the end in time")
        except AgentError as error:
            log.warning("%s: the others will notice when this process ends", error)

    def wait_closed(self, timeout_s: float) -> bool:
        """After `done`.

        Wait until all are (True), or until one more round is needed to synchronize somebody (False).
        """
        is_settled = lambda: self._round.state is RoundState.CLOSED or self._granted is not None  # noqa: E731 - one line
        try:
            self._wait_for(is_settled, timeout_s, "the others did not finish in time")
        except AgentError as error:
            log.warning("%s: this worker ends all the same", error)
        return self._granted is None

    def close(self) -> None:
        """Hang up; the agent withdraws the member unless it is done. Idempotent."""
        self._has_closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end has hung up already
        self._socket.close()

    # --- inside -----------------------------------------------------------------------------------

    def _expect_a_round(self) -> None:
        """From now on the first round that this member is given is kept, however soon it is no more."""
        with self._changed:
            self._after = self._round.number if self.member_id in self._round.members else 0
            self._granted = None

    def _send(self, message: wire.Message) -> None:
        try:
            with self._sending:
                self._socket.sendall(wire.encode(message))
        except OSError as error:
            raise self._fatal or AgentError("lost", f"the agent of this host is gone: {error}") from error

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float | None, complaint: str) -> None:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not condition():
                if self._fatal is not None:
                    raise AgentError(self._fatal.kind, str(self._fatal))
                remaining_s = None if deadline_s is None else deadline_s - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    raise AgentError("timeout", complaint)
                self._changed.wait(remaining_s)

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    self._take(wire.decode(line))
        except (OSError, ValueError) as error:
            self._fail(AgentError("lost", f"the connection to the agent of this host broke: {error}"))
        except Exception as error:  # or the training thread would wait for ever
            log.exception("this is a bug in torchelastic: a message of the agent of this host could not be taken in")
            self._fail(AgentError("lost", f"a message of the agent of this host could not be taken in: {error!r}"))
        else:
            self._fail(AgentError("lost", "the agent of this host has ended the connection: its output says why"))
        if self._ends_with is not None and not self._has_closed:
            _end_after(self._ends_with)

    def _take(self, message: wire.Message) -> None:
        op = message["op"]
        if op == "round":
            self._take_round(round_from_dict("the agent's message", message["round"]))
        elif op == "contact":
            self.contact = Contact(float(message["leave_at_s"]), float(message["commit_until_s"]))
        elif op == "fatal":
            self._fail(AgentError(str(message["kind"]), str(message["message"])))
        elif op in ("welcome", "noted"):
            with self._changed:
                if op == "noted":
                    self._noted += 1
                else:
                    self.member_id, self.host = str(message["member"]), str(message["host"])
                    self.address, self.run_was_closed = str(message["address"]), bool(message["closed"])
                    self._welcomed = True
                self._changed.notify_all()

    def _take_round(self, round_: Round) -> None:
        with self._changed:
            self._round = round_
            if self._after is not None and is_granted(round_, self.member_id, self._after):
                self._granted, self._after = round_, None
            self._changed.notify_all()
        self._on_round(round_)

    def _fail(self, error: AgentError) -> None:
        with self._changed:
            self._fatal = self._fatal or error
            self._changed.notify_all()


def _peer_of(connection: socket.socket) -> Process:
    """The process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return Process.of(struct.unpack("3i", credentials)[0])


def _end_after(agent: Process) -> None:
    """End this process, as the kernel does a child of the launcher, if the launcher has just been killed."""
    deadline_s = time.monotonic() + KILLED_S
    while time.monotonic() < deadline_s:
        if agent.has_ended:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)


def _connect(path: str, timeout_s: float) -> socket.socket:
    retrying = Retrying(
        retry=retry_if_exception_type(OSError), stop=stop_after_delay(timeout_s), wait=wait_fixed(0.01), reraise=True
    )
    try:
        return retrying(_connect_once, path)
    except OSError as error:
        raise AgentError("lost", f"no agent of this host answers at {path} ({error}): was it stopped?") from error


def _connect_once(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection
