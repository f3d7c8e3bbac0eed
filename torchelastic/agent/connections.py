"""The agent's side of the socket to its workers: who is connected, what they ask for, what they are told.

The protocol is in `torchelastic.rendezvous.wire`. Only processes of this user may connect.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchelastic.agent import host_events as events
from torchelastic.foreign_json import checked
from torchelastic.processes.death_notice import notice_path, take_notice, wait_for_death
from torchelastic.processes.identity import Process
from torchelastic.rendezvous import wire
from torchelastic.rendezvous.member_id import MemberId
from torchelastic.rendezvous.records import JoinRequest, Member, Round, RoundState, round_to_dict
from torchelastic.rendezvous.view import is_done
from torchelastic.rendezvous.worker_rules import Contact, asks, asks_again, decides_alone, finishes, may_go

log = logging.getLogger(__name__)

#: Of a host's name so many characters become part of its members' ids: 10,000 of them have to fit into one value.
MAX_HOST_IN_ID = 40


@dataclass
class WorkerConnection:
    """One connected worker.

    Attributes:
        member: what it has last said of itself.
        pid: its process.
        local_rank: its place on this host; None without the launcher.
        waiting_since_s: since when it waits for a group; None while it does not.
        done_since_s: since when it is done, if it is.
        is_evicted: it is being ended, or has left the run, so nothing that it still says counts.
    """

    member: Member
    pid: int
    local_rank: int | None
    writer: asyncio.StreamWriter
    waiting_since_s: float | None = None
    done_since_s: float = 0.0
    is_evicted: bool = False

    def send(self, message: wire.Message) -> None:
        """Send without waiting; a worker that has gone is noticed elsewhere."""
        if not self.writer.is_closing():
            self.writer.write(wire.encode(message))


class Connections:
    """Serves the workers of this host. Use it on one event loop.

    Args:
        socket_path: where to listen; created with mode 0600.
        host: this host's name in the run.
        address: where the workers of other hosts reach this one; to be known by `open`.
        incarnation: unique for this agent process; part of its members' ids.
        clock: monotonic seconds.
        publish: is called with what the workers say, who is a member, and whose process is dead.
        until_written: waits until the store has what was declared.

    Attributes:
        processes: of every member that there has been.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        host: str,
        address: str = "",
        incarnation: str,
        clock: Callable[[], float],
        publish: events.Publish,
        until_written: Callable[[], Any],
    ) -> None:
        self.by_member: dict[str, WorkerConnection] = {}
        self.processes: dict[str, Process] = {}
        self.round: Round | None = None
        self.run_was_closed = False
        self.emptied = asyncio.Event()
        self.address = address
        self._path, self._host, self._incarnation = socket_path, host, incarnation
        self._clock, self._publish, self._until_written = clock, publish, until_written
        self._knows_elsewhere = False
        self._count = 0
        self._open = asyncio.Event()
        self._fatal: wire.Message | None = None
        self._contact: Contact | None = None
        self._away_since_s: float | None = None
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listen."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old_mask = os.umask(0o177)
        try:
            listener.bind(str(self._path))
        finally:
            os.umask(old_mask)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=wire.MAX_LINE_BYTES)

    def open(self) -> None:
        """Answer workers; before that, they are kept waiting."""
        self._open.set()

    def fail_all(self, kind: str, message: str) -> None:
        """Answer every worker with an error that ends it."""
        self._fatal = {"op": "fatal", "kind": kind, "message": message}
        self._open.set()

    async def stop(self) -> None:
        """Hang up on everybody and remove the socket."""
        if self._server is not None:
            self._server.close()
        for connection in self.by_member.values():
            connection.writer.close()
        self._path.unlink(missing_ok=True)

    def on_event(self, event: events.Event) -> None:
        """Tell the workers what concerns them."""
        match event:
            case events.RoundChanged(round_):
                self._send_round(round_)
            case events.StoreAnswered(_, contact):
                self._send_contact(contact)
            case events.StoreReach(in_reach):
                self._away_since_s = None if in_reach else self._clock()
                self._decide_alone()
            case events.WaitTimedOut(member_id, message):
                connection = self.by_member[member_id]
                connection.waiting_since_s = None
                connection.send({"op": "fatal", "kind": "timeout", "message": message})
                self._publish(events.MemberWithdrawn(member_id))
            case events.WorkerExited(worker, pid):
                self.process_gone(pid)
                for trainer in worker.trainers:  # of a wrapper script: one that lives is about to be ended
                    if trainer.pid != pid and trainer.has_ended:
                        self.process_gone(trainer.pid)
            case events.WorkerNotRestarted(pid):
                for member_id in [name for name, process in self.processes.items() if process.pid == pid]:
                    self._publish(events.MemberWithdrawn(member_id, for_good=True))

    def waits_for_store_since_s(self) -> float | None:
        """Since when this host's training waits for the store to answer, by the clock; None: it does not."""
        away_s, connections = self._away_since_s, self.by_member.values()
        if away_s is None or any(self._trains(connection) for connection in connections):
            return None
        since_s = [one.done_since_s if self._is_done(one) else one.waiting_since_s for one in connections]
        waits_s = [one for one in since_s if one is not None]
        return max(away_s, min(waits_s)) if waits_s else None

    def waiting_since_s(self, member_id: str) -> float | None:
        """Since when a member waits for a group, by the clock; None: it does not, or is not here."""
        connection = self.by_member.get(member_id)
        return None if connection is None else connection.waiting_since_s

    def _send_round(self, round_: Round) -> None:
        """Every worker is notified of every change of the round, and decides itself what that means for it."""
        self.round = round_
        message = {"op": "round", "round": round_to_dict(round_)}
        for connection in tuple(self.by_member.values()):
            is_granted = self._is_in_a_group(connection) and connection.member.ready_for <= round_.number
            if is_granted or round_.is_over:
                connection.waiting_since_s = None
            connection.send(message)
            if self._let_go(connection):
                continue
            again = None if connection.waiting_since_s is None else asks_again(connection.member, round_)
            if again is not None:
                connection.member = again
                self._publish(events.MemberDeclared(again))

    def _decide_alone(self) -> None:
        """While the store does not answer, nobody but this agent can let its members go, if all of them are to."""
        if self._away_since_s is None or self.round is None:
            return
        waiting = [name for name, connection in self.by_member.items() if connection.waiting_since_s is not None]
        told = decides_alone(self.round, tuple(self.members().values()), waiting)
        if told is not None:
            self._send_round(told)

    def _send_contact(self, contact: Contact) -> None:
        """Every worker hears how long it may go on without a further sign of the store."""
        if math.isinf(contact.commit_until_s) or (self._contact and contact.leave_at_s <= self._contact.leave_at_s):
            return
        self._contact = contact
        for connection in self.by_member.values():
            connection.send(_contact_message(contact))

    def members(self) -> dict[int, Member]:
        """What the connected workers have last said of themselves, by their processes."""
        return {connection.pid: connection.member for connection in self.by_member.values()}

    def leave(self, member_id: str) -> bool:
        """A member of this host is to leave the run, at an agreed step if it is in a group. False: it is not here."""
        connection = self.by_member.get(member_id)
        if connection is None:
            return False
        if not connection.member.leaving:
            log.warning("%s leaves the run, at the end of a step", member_id)
            connection.member = replace(connection.member, leaving=True)
            self._publish(events.WorkerLeaves(connection.pid, connection.local_rank))
            if connection.waiting_since_s is not None or self._is_in_a_group(connection):  # else when it asks
                self._publish(events.MemberDeclared(connection.member))
            self._let_go(connection)
            self._decide_alone()
        return True

    def leave_all(self) -> None:
        """All members of this host are to leave the run."""
        for member_id in tuple(self.by_member):
            self.leave(member_id)

    def process_gone(self, pid: int) -> None:
        """A worker's process has ended: whatever it was, it is no member any more, unless it had finished."""
        self._publish(events.ProcessDied(pid))
        for connection in [c for c in self.by_member.values() if c.pid == pid]:
            self._release(connection)

    def is_own(self, member_id: str) -> bool:
        """Whether it is a member of this agent, though it may have ended since."""
        return MemberId.of(member_id).incarnation == self._incarnation

    def evict(self, member_id: str) -> int | None:
        """A member of this host was left out because it hung, and is about to be ended; returns its process.

        Should it wake up before its end, it must not get into another group, only to be lost there. None: it is not
        here, or was evicted before.
        """
        connection = self.by_member.get(member_id)
        if connection is None:
            return None
        connection.is_evicted = True
        self._release(connection)
        return connection.pid

    # --- one connection ---------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: WorkerConnection | None = None
        try:
            _refuse_strangers(writer)
            await self._open.wait()
            if self._fatal is not None:
                writer.write(wire.encode(self._fatal))
                await writer.drain()
                return
            async for line in reader:
                message = wire.decode(line)
                if message["op"] == "hello":
                    if connection is not None:
                        raise wire.WireError("a second 'hello': one connection, one member")
                    connection = self._welcome(message, writer)
                elif message["op"] == "elsewhere":
                    self._on_elsewhere(message)
                    return
                elif message["op"] == "metrics-hello":
                    await self._serve_metrics(message, reader)
                elif connection is None:
                    raise wire.WireError(f"{message['op']!r} before 'hello'")
                elif not connection.is_evicted:
                    await self._take(connection, message)
        except ConnectionError:
            pass  # it has hung up, or ended, while it was told something
        except (OSError, ValueError) as error:
            log.warning("a worker's connection ends: %s: %s", type(error).__name__, error)
        except Exception:
            log.exception("this is a bug in torchelastic: a worker's connection ends")
        except asyncio.CancelledError:
            pass  # the agent ends; Python before 3.12 would print a cancelled connection as an error
        finally:
            writer.close()
            if connection is not None:
                self._release(connection)

    def _on_elsewhere(self, message: wire.Message) -> None:
        """A worker's script names another run: all that is done for it here is to start it again."""
        told = checked("elsewhere", message, wire.Elsewhere)
        if not self._knows_elsewhere:
            self._knows_elsewhere = True
            log.warning(
                "worker %s trains in run %s, which its script names (init_method), and not in this launcher's: it is "
                "started again if it fails, but nobody here sees whether it hangs, or who else is lost; leave "
                "init_method out of the script, or give that etcd and run id to the launcher too (--rdzv-endpoint, "
                "--rdzv-id)",
                "?" if told.local_rank is None else told.local_rank, told.run,
            )  # fmt: skip
        self._publish(events.WorkerSaid(events.Statement.ASKS, told.pid, told.local_rank))
        if told.closed:
            self._publish(events.WorkerSaid(events.Statement.CAME_LATE, told.pid, told.local_rank))

    def _welcome(self, message: wire.Message, writer: asyncio.StreamWriter) -> WorkerConnection:
        self._count += 1
        told = checked("hello", message, wire.Hello)
        place = "p" if told.local_rank is None else str(told.local_rank)
        member_id = MemberId(self._host[:MAX_HOST_IN_ID], place, self._incarnation, str(self._count))
        member = Member(str(member_id), self._host)
        connection = WorkerConnection(member, told.pid, told.local_rank, writer)
        self.by_member[member.member_id] = connection
        self.processes[member.member_id] = Process.of(connection.pid)
        if told.notice:
            self._watch_for_death(connection.pid)
        connection.send(
            {
                "op": "welcome",
                "member": member.member_id,
                "host": self._host,
                "address": self.address,
                "closed": self.run_was_closed,
            }
        )
        if self._contact is not None:
            connection.send(_contact_message(self._contact))
        if self.round is not None:
            connection.send({"op": "round", "round": round_to_dict(self.round)})
        return connection

    def _watch_for_death(self, pid: int) -> None:
        """Have a thread wait for the worker's death, long before the kernel tells of its end."""
        mutex = take_notice(notice_path(self._path, pid))
        if mutex is None:
            return
        loop = asyncio.get_running_loop()

        def wait() -> None:
            if wait_for_death(mutex):
                with suppress(RuntimeError):  # the loop is closed: this agent has ended
                    loop.call_soon_threadsafe(self.process_gone, pid)

        threading.Thread(target=wait, name=f"death-of-{pid}", daemon=True).start()

    async def _take(self, connection: WorkerConnection, message: wire.Message) -> None:
        op = message["op"]
        if op == "join":
            self._join(connection, message)
        elif op == "leave":
            self.leave(connection.member.member_id)
        elif op == "stop":
            self._stop(connection)
        elif op == "fail_for_good":
            self._publish(events.WorkerSaid(events.Statement.FAILS_FOR_GOOD, connection.pid, connection.local_rank))
        elif op == "computes_wrong":
            self._remove(connection, checked(op, message, wire.FoundWrong))
        elif op == "done":
            connection.waiting_since_s, connection.done_since_s = None, self._clock()
            self._publish(events.WorkerSaid(events.Statement.FINISHED, connection.pid, connection.local_rank))
            connection.member = finishes(connection.member, self.round, checked(op, message, wire.Done).step)
            self._publish(events.MemberDeclared(connection.member))
            self._decide_alone()
            await self._until_written()
            connection.send({"op": "noted"})
        else:
            raise wire.WireError(f"unknown op {op!r}")

    def _join(self, connection: WorkerConnection, message: wire.Message) -> None:
        member = asks(connection.member, self.round, checked("join", message, JoinRequest))
        connection.waiting_since_s = self._clock()
        self._publish(events.WorkerSaid(events.Statement.ASKS, connection.pid, connection.local_rank))
        connection.member = member
        self._decide_alone()
        if not connection.is_evicted and not self._let_go(connection):
            self._publish(events.MemberDeclared(connection.member))
            self._publish(events.MemberWaits(member.member_id))

    def _remove(self, connection: WorkerConnection, found: wire.FoundWrong) -> None:
        """It was found to compute wrong: the others wait for it no more, whatever it does until its end."""
        self._publish(events.WorkerComputesWrong(connection.pid, connection.local_rank, found))
        self._publish(events.MemberWithdrawn(connection.member.member_id, for_good=True))
        connection.is_evicted = True
        self._release(connection)

    def _stop(self, connection: WorkerConnection) -> None:
        """Its group stops before a deadline: it is not started again, and who waits here for a place does not stay."""
        self._publish(events.WorkerLeaves(connection.pid, connection.local_rank))
        for member_id in [name for name, other in self.by_member.items() if other.waiting_since_s is not None]:
            self.leave(member_id)

    def _is_in_a_group(self, connection: WorkerConnection) -> bool:
        round_ = self.round
        runs = round_ is not None and round_.state in (RoundState.RUNNING, RoundState.GATHERING)
        return runs and round_ is not None and connection.member.member_id in round_.members

    def _trains(self, connection: WorkerConnection) -> bool:
        return self._is_in_a_group(connection) and connection.waiting_since_s is None and not self._is_done(connection)

    def _is_done(self, connection: WorkerConnection) -> bool:
        return self.round is not None and is_done(connection.member, self.round)

    def _let_go(self, connection: WorkerConnection) -> bool:
        """Tell a worker that waits for a group, and is to leave, that it may go now, if that is so."""
        member = connection.member
        if connection.waiting_since_s is None or not member.leaving or not may_go(member, self.round):
            return False
        connection.waiting_since_s, connection.is_evicted = None, True
        connection.send({"op": "fatal", "kind": "drained", "message": f"{member.member_id} has left the run"})
        self._release(connection)
        return True

    async def _serve_metrics(self, hello: wire.Message, reader: asyncio.StreamReader) -> None:
        local_rank = checked("hello", hello, wire.Hello).local_rank
        async for line in reader:
            items = wire.decode(line).get("items")
            if not isinstance(items, list) or not all(isinstance(item, list) and len(item) >= 3 for item in items):
                raise wire.WireError("metrics without a list of 'items', each of a group, a name and a value")
            self._publish(events.MetricsPublished(local_rank, items))

    def _release(self, connection: WorkerConnection) -> None:
        known = self.by_member.pop(connection.member.member_id, None)
        if not self.by_member:
            self.emptied.set()
        # a finished member's record is what closes the run: it stays until the agent itself ends
        finished = self._is_done(connection) or (self.round is not None and self.round.state is RoundState.CLOSED)
        if known is not None and not finished:
            self._publish(events.MemberWithdrawn(connection.member.member_id))


def _contact_message(contact: Contact) -> wire.Message:
    return {"op": "contact", "leave_at_s": contact.leave_at_s, "commit_until_s": contact.commit_until_s}


def _refuse_strangers(writer: asyncio.StreamWriter) -> None:
    credentials = writer.get_extra_info("socket").getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _, uid, _ = struct.unpack("3i", credentials)
    if uid not in (os.getuid(), 0):
        raise PermissionError(f"a process of user {uid} may not use the agent of user {os.getuid()}")
