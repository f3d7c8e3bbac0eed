"""The agent's part: reads its workers' pages, keeps the ledger of the host, and writes the journal.

It survives its workers: their counts are in their pages, and it knows when they ended. Imports no torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.journal import WritesEvents
from torchelastic.observe.ledger.ledger_events import (
    Counted,
    End,
    LedgerEvent,
    LedgerFormatError,
    Start,
    StoreOutage,
    from_dict,
    short,
)
from torchelastic.observe.ledger.shared_counts import PageReader, page_paths
from torchelastic.processes.identity import process_started_ns

log = logging.getLogger(__name__)

#: Between two lines of counts of a worker in the journal, unless something happens.
COUNTS_EVERY_NS = 10_000_000_000
#: Deaths of processes that are not known as workers yet: so many are kept.
_MOST_STRANGERS = 1024


@dataclass
class _Watched:
    """A running worker of this host; `trainer_pid`: the process that trains, where its own is a wrapper script."""

    worker: str
    trainer_pid: int | None = None
    reader: PageReader | None = None
    counted_ns: int = 0
    fresh: Counted | None = None
    missed: int = 0


class LedgerKeeper:
    """Use it on one thread: the agent's event loop. No method waits for anything but a file in memory.

    Args:
        socket_path: of the agent; the pages are next to it.
        host: begins the names of workers.
        journal: where events are written; None: nowhere.
        listener: called with each event when it is in the book.
        clock_ns: the clock of the pages: monotonic nanoseconds of this host.
        started_ns: when a process began, by that clock.
    """

    def __init__(
        self,
        socket_path: Path,
        host: str,
        journal: WritesEvents | None = None,
        *,
        listener: Callable[[LedgerEvent], None] = lambda _event: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        started_ns: Callable[[int], int] = process_started_ns,
    ) -> None:
        self.book = HostLedger()
        self._socket_path, self._host, self._journal = socket_path, host, journal
        self._listener, self._clock_ns, self._started_ns = listener, clock_ns, started_ns
        self._watched: dict[int, _Watched] = {}
        self._died_ns: dict[int, int] = {}
        self._away_since_ns: int | None = None
        self._is_closed = False

    def now(self) -> HostLedger:
        """The ledger with the workers' counts up to the last poll; `book` is what the journal contains, too."""
        return self.book.after_all(watched.fresh for watched in self._watched.values() if watched.fresh is not None)

    def started(self, pid: int, place: str) -> None:
        """A worker's process has started; the second time nothing happens.

        Args:
            pid: of the process.
            place: names it on this host, unique in the run: `0.1` is the second process of worker 0.
        """
        if pid not in self._watched and not self._is_closed:
            worker = f"{self._host}/{place}"
            self._watched[pid] = _Watched(worker)
            self._add(Start(at_ns=self._started_ns(pid), worker=worker))

    def trains_in(self, pid: int, trainer_pid: int) -> None:
        """The counts of the worker with this process are those of another one, which a wrapper script has started."""
        watched = self._watched.get(pid)
        if watched is not None and watched.trainer_pid is None:
            watched.trainer_pid = trainer_pid

    def poll(self) -> None:
        """Take in what the workers have published. Call it every second or so: a page holds some 127 events."""
        for pid in self._watched:
            self._take(pid, is_last=False)

    def died(self, pid: int) -> None:
        """A worker's process is known to be dead, as of now; it may take the kernel a while to clean up."""
        if len(self._died_ns) < _MOST_STRANGERS:
            self._died_ns.setdefault(pid, self._clock_ns())

    def ended(self, pid: int, *, exit_code: int | None, is_loss: bool, cause: str = "") -> None:
        """A worker's process has ended: its page is read a last time. Unknown processes are ignored.

        Args:
            pid: of the process.
            exit_code: as subprocess has it; None: not known.
            is_loss: whether the others lost it: it neither finished nor left in order.
            cause: why, for people.
        """
        watched = self._watched.get(pid)
        died_ns = self._died_ns.pop(pid, None)
        if watched is None:
            return
        if watched.trainer_pid is not None:
            died_ns = self._died_ns.pop(watched.trainer_pid, died_ns)  # its wrapper has ended after it
        self._take(pid, is_last=True)
        del self._watched[pid]
        at_ns = self._clock_ns() if died_ns is None else died_ns
        life = self.book.lives.get(watched.worker)
        tally = None if life is None else life.tally
        end = End(at_ns=at_ns, worker=watched.worker, exit_code=exit_code, is_loss=is_loss, cause=short(cause))
        if tally is not None:
            end = replace(end, rank=tally.rank, round=tally.round, step=tally.step)
        self._add(end)

    def name_of(self, pid: int) -> str:
        """The name of a running worker; empty: it is not known."""
        watched = self._watched.get(pid)
        return "" if watched is None else watched.worker

    def store_away(self, since_ns: int | None = None) -> None:
        """This host cannot reach etcd. Once per outage is enough.

        Args:
            since_ns: when it was last reachable; None: now.
        """
        if self._away_since_ns is None:
            self._away_since_ns = self._clock_ns() if since_ns is None else since_ns
            self._add(StoreOutage(at_ns=self._away_since_ns))

    def store_back(self) -> None:
        """This host reaches etcd again. Without an outage nothing happens."""
        if self._away_since_ns is not None:
            now_ns, since_ns = self._clock_ns(), self._away_since_ns
            self._away_since_ns = None
            self._add(StoreOutage(at_ns=now_ns, is_over=True, away_ns=now_ns - since_ns))

    def note(self, event: LedgerEvent) -> None:
        """Something else that the agent knows."""
        self._add(event)

    def close(self) -> None:
        """The agent ends: what the workers have published by now is all that will be known. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for pid in tuple(self._watched):
            self._take(pid, is_last=True)
        if self._journal is not None:
            self._journal.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _take(self, pid: int, *, is_last: bool) -> None:
        """The events first: the counts that are read after them include whatever they report."""
        watched = self._watched[pid]
        reader = self._reader(pid, watched)
        if reader is None:
            return
        try:
            events = reader.events()
            counts = reader.counts()
        except OSError as error:
            log.warning("the page of %s cannot be read: %s", watched.worker, error)
            return
        for fields in events:
            self._take_event(watched, fields)
        if reader.missed > watched.missed:
            log.warning("%d events of %s were overwritten before they were read", reader.missed, watched.worker)
            watched.missed = reader.missed
        now_ns = self._clock_ns()
        if counts is not None and counts.since_ns <= now_ns:
            watched.fresh = Counted(
                at_ns=counts.since_ns, worker=watched.worker, rank=counts.rank, round=counts.round, step=counts.step,
                tally=counts,
            )  # fmt: skip
            if events or is_last:
                watched.counted_ns = now_ns
                self._add(watched.fresh)
            elif now_ns - watched.counted_ns >= COUNTS_EVERY_NS:
                watched.counted_ns = now_ns
                self._add(replace(watched.fresh, at_ns=now_ns))  # who waits counts nothing, and is there all the same
        if is_last:
            reader.close()

    def _take_event(self, watched: _Watched, fields: Mapping[str, Any]) -> None:
        try:
            event = from_dict({**fields, "worker": watched.worker})
        except LedgerFormatError as error:
            log.warning("%s has published something else than an event: %s", watched.worker, error)
            return
        # a worker reports neither counts nor its end by events
        if event is not None and not isinstance(event, (Start, Counted, End, StoreOutage)):
            self._add(event)

    def _reader(self, pid: int, watched: _Watched) -> PageReader | None:
        if watched.reader is None:
            for path in page_paths(self._socket_path, watched.trainer_pid or pid):
                try:
                    watched.reader = PageReader(path)
                except FileNotFoundError:
                    continue
                except (OSError, LedgerFormatError) as error:
                    log.debug("%s is no page of %s: %s", path, watched.worker, error)
                    continue
                path.unlink(missing_ok=True)  # so that nothing of it is left, however this process ends
                break
        return watched.reader

    def _add(self, event: LedgerEvent) -> None:
        if self._journal is not None:
            self._journal.write(event, self.book)
        self.book = self.book.after(event)
        self._listener(event)


def journal_name(host: str, incarnation: str) -> str:
    """The name of one agent's journal, and of no other's, also on a file system that the hosts share.

    >>> journal_name("node-7.example", "3f0a")
    'ledger-node-7.example-3f0a'
    """
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in f"{host[:40]}-{incarnation}")
    return f"ledger-{safe}"
