"""The agent keeps the ledger of its host: it tells `torchelastic.ledger.keeper` what it knows, and has it look."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from torchelastic.agent.causes import describe_exit
from torchelastic.agent.ending import Ended, end_of
from torchelastic.agent.event_log import EventLog
from torchelastic.agent.worker import Worker
from torchelastic.ledger.events import Drain, Event
from torchelastic.ledger.journal import BackgroundJournal, Head, JournalWriter
from torchelastic.ledger.keeper import Keeper, journal_name
from torchelastic.log_lines import Position
from torchelastic.processes import boot_time_s
from torchelastic.status.host import HostView
from torchelastic.status.ledger_collector import HostSnapshot, Place

log = logging.getLogger(__name__)

#: Between two looks at the workers' pages.
LOOK_S = 1.0


class Bookkeeping:
    """Use it on the agent's event loop.

    Args:
        socket_path: of the agent.
        run_id: of the run.
        host: this host's name.
        incarnation: unique for this agent process.
        folder: where the journal goes; None: the book is kept in memory only.
        configured_workers: how many workers the run wants.
        workers: the workers of this host at the moment.
        sees_store: whether etcd is in reach at the moment.
        logs_each: log each event by itself, see `EventLog`.
        on_event: called with (when in Unix seconds, what) for each event.
        on_look: called after each look.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        run_id: str,
        host: str,
        incarnation: str,
        folder: Path | None,
        configured_workers: int,
        workers: Callable[[], Iterable[Worker]],
        sees_store: Callable[[], bool],
        logs_each: bool = False,
        on_event: Callable[[float, Event], None] = lambda _at_s, _event: None,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        head = Head(run_id, host, time.monotonic_ns(), time.time_ns(), configured_workers)
        #: what the host looks like: it is told every event on its way to the journal
        self._log = EventLog(host, _journal(folder, host, incarnation, head), each=logs_each, listener=on_event)
        self.view = HostView(host, incarnation, self._log)
        self.journal = "" if folder is None else str(folder.absolute())
        self.keeper = Keeper(socket_path, f"{host}-{incarnation}", self.view)
        self._workers, self._sees_store, self._on_look = workers, sees_store, on_look
        self._contact_s: float | None = None
        self._left: set[int] = set()
        self._task: asyncio.Task[None] | None = None
        self._latest = HostSnapshot(self.keeper.book, time.monotonic_ns())

    def start(self) -> None:
        """Look once a second from now on."""
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """The agent ends: look a last time, and have everything written, within a bound."""
        if self._task is not None:
            self._task.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self.keeper.close)
        self._latest = self._snapshot(sees_store=self._latest.sees_store)

    def latest(self) -> HostSnapshot:
        """What was known at the last look; from any thread."""
        return self._latest

    def heard_of_store(self, sent_s: float) -> None:
        """A sign of life that was sent at this time, by the clock of the boot, has been answered."""
        self._contact_s = sent_s

    def leaves(self, pid: int) -> None:
        """A worker was asked to leave the run, or stops before a deadline."""
        self._left.add(pid)

    def died(self, pid: int) -> None:
        """A worker's process is known to be dead."""
        self.keeper.died(pid)

    def ended(self, worker: Worker, pid: int) -> None:
        """A worker's process has ended and is not reaped yet."""
        try:
            self._ended(worker, pid)
        except Exception:  # as in `_run`
            log.exception("the end of worker %d is missing in the ledger", worker.local_rank)

    def _ended(self, worker: Worker, pid: int) -> None:
        self.keeper.died(pid)  # now, unless it is known for longer: what follows takes a while
        self._started(worker, pid)
        code = exit_code_of(pid)
        was_asked, has_joined = pid in self._left or worker.leaves, worker.asked_s is not None
        self._left.discard(pid)
        name = self.keeper.name_of(pid)
        self.keeper.poll()  # how far it came decides how it ended
        tally = self.keeper.now().lives[name].tally if name else None
        end = end_of(code, tally, was_asked=was_asked, has_joined=has_joined)
        self.keeper.ended(
            pid, exit_code=code, is_loss=end is Ended.LOST, cause="" if code is None else describe_exit(code)
        )
        if tally is not None:
            worker.position = Position(tally.rank, tally.round, tally.step)
            if end is Ended.LEFT:
                at_ns = self.keeper.book.lives[name].tally.since_ns
                self.keeper.note(Drain(at_ns=at_ns, worker=name, rank=tally.rank, round=tally.round, step=tally.step))
        self._log.flush()

    def pids(self) -> dict[str, int]:
        """The processes of the workers that live, by the workers' names."""
        pids = [worker.process.pid for worker in self._workers() if worker.process is not None]
        return {self.keeper.name_of(pid): pid for pid in pids}

    def look(self) -> None:
        """What is new."""
        for worker in self._workers():
            if worker.process is not None:
                self._started(worker, worker.process.pid)
        self.keeper.poll()
        sees_store = self._sees_store()
        if sees_store:
            self.keeper.store_back()
        else:
            silent_s = 0.0 if self._contact_s is None else max(0.0, boot_time_s() - self._contact_s)
            self.keeper.store_away(time.monotonic_ns() - int(silent_s * 1e9))
        self._log.flush()
        self._latest = self._snapshot(sees_store=sees_store)
        self._on_look()

    def _snapshot(self, *, sees_store: bool) -> HostSnapshot:
        book = self.keeper.now()
        places = []
        for worker in self._workers():
            name = "" if worker.process is None else self.keeper.name_of(worker.process.pid)
            step = book.lives[name].tally.step if name in book.lives else -1
            places.append(Place(worker.local_rank, worker.process is not None, worker.restarts, step))
        return HostSnapshot(book, time.monotonic_ns(), tuple(places), sees_store)

    def _started(self, worker: Worker, pid: int) -> None:
        self.keeper.started(pid, f"{worker.local_rank}.{worker.restarts}")

    async def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:  # the ledger must never end the agent, and with it the workers
                log.exception("the ledger could not be kept up")
            await asyncio.sleep(LOOK_S)


def exit_code_of(pid: int) -> int | None:
    """How a child of this process ended, as subprocess has it, without reaping it; None: it lives, or is no child."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _journal(folder: Path | None, host: str, incarnation: str, head: Head) -> BackgroundJournal | None:
    if folder is None:
        return None
    try:
        return BackgroundJournal(JournalWriter(folder, journal_name(host, incarnation), head))
    except OSError as error:
        log.warning("no ledger is written to %s: %s", folder, error)
        return None
