"""Where the page's pictures come from: the run as etcd has it, and this host as its agent knows it.

What the agent knows of its own host is newer than what it has written to etcd, and is there while etcd is unreachable.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace

from torchelastic.observe.page.document import About, document_of
from torchelastic.observe.page.feed import RunSnapshot
from torchelastic.observe.status.run_status import HostStatus, RunStatus, combined
from torchelastic.observe.status.status_format import run_to_plain
from torchelastic.observe.status.status_reader import StatusReader
from torchelastic.processes.background import in_background
from torchelastic.rendezvous.records import NO_ROUND
from torchelastic.rendezvous.store import StoreError

#: etcd may take so long for an answer before the page says that it is unreachable.
PATIENCE_S = 2.0


def with_own_host(status: RunStatus, own: HostStatus | None, now_s: float, away_s: float = 0.0) -> RunStatus:
    """The run with its host's own status in place of what etcd has of it.

    Args:
        status: as it was read last.
        own: of this host's agent; None: it did not answer.
        now_s: Unix seconds.
        away_s: how long etcd has been unreachable. Hosts are no older than before that: silent ones cannot be seen,
            and how fast the others are is not known.
    """
    name = own.incarnation if own else ""
    others = [host for host in (*status.hosts, *status.silent) if host.incarnation != name]
    if away_s:
        others = [_as_it_was(host, away_s) for host in others]
    hosts = [*others, *([own] if own else [])]
    left = [host for host in status.left if host.incarnation != name]
    return combined(status.run_id, now_s, status.round, status.members, hosts, left, status.kept_out)


def _as_it_was(host: HostStatus, away_s: float) -> HostStatus:
    workers = tuple(replace(worker, steps_per_s=0.0) for worker in host.workers)
    return replace(host, at_s=host.at_s + away_s if host.at_s else 0.0, workers=workers)


class RunSource:
    """Makes pictures. One call of etcd is under way at most, on a thread of its own; `read` never waits long for it.

    Args:
        reader: of the run.
        run_id: of the run.
        own: gives this host's status; None: the agent is busy. Any thread.
        about: the host and its version.
        clock: Unix seconds.
    """

    def __init__(
        self,
        reader: StatusReader,
        run_id: str,
        own: Callable[[], HostStatus | None],
        about: About,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._reader, self._own, self._about, self._clock = reader, own, about, clock
        self._reading: Future[RunStatus] | None = None
        now_s = clock()
        self._last = combined(run_id, now_s, NO_ROUND, (), ())
        self._read_s, self._asked_s, self._away_s = now_s, now_s, 0.0

    def read(self) -> RunSnapshot:
        """The run as it is now. From one thread at a time; a call of etcd that fails late ends by itself."""
        self._read_etcd()
        now_s = self._clock()
        status = with_own_host(self._last, self._own(), now_s, now_s - self._read_s if self._away_s else 0.0)
        about = replace(self._about, etcd_away_s=self._away_s)
        return RunSnapshot(run_to_plain(status), document_of(status, about))

    def _read_etcd(self) -> None:
        if self._reading is None:
            self._asked_s, self._reading = self._clock(), in_background(self._reader.read, "page-etcd")
        wait([self._reading], PATIENCE_S if not self._away_s else 0.0)
        if not self._reading.done():
            self._away_s = self._away_s or self._asked_s
            return
        reading, self._reading = self._reading, None
        try:
            self._last = reading.result()
        except StoreError:
            self._away_s = self._away_s or self._asked_s
        else:
            self._read_s, self._away_s = self._clock(), 0.0
