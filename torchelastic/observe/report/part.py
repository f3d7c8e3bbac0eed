"""One journal as a part of a run: its ledger, clock and names of workers; and events on the clock of the run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.journal import Journal
from torchelastic.observe.ledger.ledger_events import LedgerEvent
from torchelastic.observe.ledger.merge import merged_ledgers
from torchelastic.observe.status.host_view import parts_of as place_and_life


@dataclass(frozen=True)
class Part:
    """See the module's docstring.

    Attributes:
        name: of the journal.
        journal: as it was found.
        book: in the end, with what other hosts know.
        began_ns: of the run, in nanoseconds since 1970.
        host: for people: unique in the run.
    """

    name: str
    journal: Journal
    book: HostLedger
    began_ns: int
    host: str

    @property
    def first_ns(self) -> int:
        """The first that is known, by the clock of the journal."""
        return self.book.counts.first_ns or 0

    @property
    def now_ns(self) -> int:
        """The last that is known, by the clock of the journal."""
        return self.book.counts.last_ns

    @property
    def until_ns(self) -> int:
        """The last that is known of it, since the run began."""
        lives = [life.until_ns(self.now_ns) for life in self.book.lives.values()]
        return self.since_began(max([self.now_ns, *lives]))

    def since_began(self, at_ns: int) -> int:
        """A time of the journal as nanoseconds since the run began."""
        return self.journal.head.wall_ns_of(at_ns) - self.began_ns

    def name_of(self, worker: str) -> str:
        """A worker for people: `node-7/0.1` is the second process in place 0 of node-7."""
        return f"{self.host}/{worker.rpartition('/')[2]}" if worker else ""

    def place_of(self, worker: str) -> str:
        """What the lives of a place have in common."""
        return f"{self.host}/{place_and_life(worker)[0]}"


@dataclass(frozen=True)
class RunEvent:
    """An event of some journal, on the clock of the run.

    Attributes:
        at_ns: when, since the run began.
        event: what.
        name: its worker's, for people.
        detect_ns: of a failure: how long it was not noticed.
    """

    at_ns: int
    event: LedgerEvent
    name: str
    detect_ns: int = 0


def parts_of(journals: Mapping[str, Journal]) -> tuple[tuple[Part, ...], int]:
    """The parts of a run in order of their hosts, and when it began, in nanoseconds since 1970.

    Args:
        journals: none is empty.
    """
    books = merged_ledgers(journals)
    firsts_ns = [journal.head.wall_ns_of(books[name].counts.first_ns or 0) for name, journal in journals.items()]
    began_ns = min(firsts_ns, default=0)
    hosts = Counter(journal.head.host for journal in journals.values())
    parts = []
    for name, journal in journals.items():
        host = journal.head.host
        label = host if hosts[host] == 1 else _long_name(journal, books[name], name)
        parts.append(Part(name, journal, books[name], began_ns, label))
    return tuple(sorted(parts, key=lambda part: (part.host, part.name))), began_ns


def name_parts(name: str) -> tuple[str, str, int]:
    """Host, place and number of the life of a worker's name.

    >>> name_parts("node-7/0.1")
    ('node-7', '0', 1)
    """
    place, life = place_and_life(name)
    return name.rpartition("/")[0], place, life


def _long_name(journal: Journal, book: HostLedger, name: str) -> str:
    """The host with its agent, as workers are called; of an agent without workers the name of its journal."""
    worker = next((event.worker for event in journal.events if "/" in event.worker), next(iter(book.lives), ""))
    return worker.rpartition("/")[0] or name
