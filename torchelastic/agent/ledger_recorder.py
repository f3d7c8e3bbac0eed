"""The agent records the ledger of its host: `observe.ledger.keeper` hears what happens, and reads workers' pages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from torchelastic.agent import host_events as events
from torchelastic.agent.causes import Ended, end_of
from torchelastic.agent.event_log import EventLog
from torchelastic.agent.tasks import keep_running
from torchelastic.agent.worker import Worker, exit_code_of
from torchelastic.log_lines import Position
from torchelastic.observe.ledger.journal import BackgroundJournal, Head, JournalWriter
from torchelastic.observe.ledger.keeper import LedgerKeeper, journal_name
from torchelastic.observe.ledger.ledger_events import Counted, Drain, LedgerEvent
from torchelastic.observe.ledger.shared_counts import remove_left_pages
from torchelastic.observe.status.ledger_collector import HostSnapshot, WorkerPlace
from torchelastic.processes import boot_time_s
from torchelastic.processes.exit_codes import describe_exit

log = logging.getLogger(__name__)

#: Between two readings of the workers' pages.
SAMPLE_S = 1.0


class LedgerRecorder:
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
        publish: is called with each event of the ledger but counts, and when the pages were read.
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
        publish: events.Publish = events.ignore,
    ) -> None:
        head = Head(run_id, host, time.monotonic_ns(), time.time_ns(), configured_workers)
        journal = _journal(folder, host, incarnation, head)
        self._log = EventLog(host, each=logs_each)
        self.journal = "" if folder is None else str(folder.absolute())
        self.keeper = LedgerKeeper(socket_path, f"{host}-{incarnation}", journal, listener=self._on_event)
        self._workers, self._sees_store, self._publish = workers, sees_store, publish
        self._contact_s: float | None = None
        self._left: set[int] = set()
        self._task: asyncio.Task[None] | None = None
        self._latest = HostSnapshot(self.keeper.book, time.monotonic_ns())

    def start(self) -> None:
        """Read the pages once a second from now on, and remove those that agents which were killed have left."""
        remove_left_pages()
        self._task = asyncio.ensure_future(keep_running("keeping the ledger", self._run))

    async def stop(self) -> None:
        """The agent ends: read a last time, and have everything written, within a bound."""
        if self._task is not None:
            self._task.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self.keeper.close)
        self._log.flush()
        self._latest = self._snapshot(sees_store=self._latest.sees_store)

    def latest(self) -> HostSnapshot:
        """What was known at the last reading; from any thread."""
        return self._latest

    def on_event(self, event: events.Event) -> None:
        """Record it, or remember it for what is recorded later."""
        match event:
            case events.StoreAnswered(sent_s):
                self._contact_s = sent_s
            case events.WorkerLeaves(pid):
                self._left.add(pid)
            case events.ProcessDied(pid):
                self.keeper.died(pid)
            case events.WorkerExited(worker, pid):
                try:
                    self._ended(worker, pid)
                except Exception:  # the ledger must never end the agent, and with it the workers
                    log.exception("the end of worker %d is missing in the ledger", worker.local_rank)

    def _on_event(self, event: LedgerEvent) -> None:
        if not isinstance(event, Counted):  # which is no news
            at_s = time.time() - (time.monotonic_ns() - event.at_ns) / 1e9
            self._log.record(at_s, event)
            self._publish(events.LedgerWritten(at_s, event))

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
        living = [(worker.process.pid, worker.speaker) for worker in self._workers() if worker.process is not None]
        return {self.keeper.name_of(pid): speaker or pid for pid, speaker in living}

    def sample(self) -> None:
        """Read what is new."""
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
        self._publish(events.LedgerSampled())

    def _snapshot(self, *, sees_store: bool) -> HostSnapshot:
        book = self.keeper.now()
        places = []
        for worker in self._workers():
            name = "" if worker.process is None else self.keeper.name_of(worker.process.pid)
            step = book.lives[name].tally.step if name in book.lives else -1
            places.append(WorkerPlace(worker.local_rank, worker.process is not None, worker.restarts, step))
        return HostSnapshot(book, time.monotonic_ns(), tuple(places), sees_store)

    def _started(self, worker: Worker, pid: int) -> None:
        self.keeper.started(pid, f"{worker.local_rank}.{worker.restarts}")
        trainers = [trainer.pid for trainer in worker.trainers]
        if trainers and pid not in trainers:
            self.keeper.trains_in(pid, trainers[0])

    async def _run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_S)


def _journal(folder: Path | None, host: str, incarnation: str, head: Head) -> BackgroundJournal | None:
    if folder is None:
        return None
    try:
        return BackgroundJournal(JournalWriter(folder, journal_name(host, incarnation), head))
    except OSError as error:
        log.warning("no ledger is written to %s: %s", folder, error)
        return None
