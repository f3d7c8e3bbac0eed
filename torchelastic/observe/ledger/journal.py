"""The ledger on disk: JSON lines, one per event, in files of bounded size and number.

Each file begins with a head: what the journal is of, how its clock relates to the time of the day, and the sums of the
files before it, so that nothing but single events is lost when the oldest file goes. A process that dies leaves
at most its last line torn; the next one writes a journal of its own.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torchelastic.foreign_json import RecordError, converted, decode_object
from torchelastic.observe.ledger.host_ledger import HostLedger, ledger_from_dict, ledger_to_dict
from torchelastic.observe.ledger.ledger_events import LedgerEvent, LedgerFormatError, from_dict, to_dict

log = logging.getLogger(__name__)

VERSION = 1
_QUEUED_LINES = 10_000
_NAME = re.compile(r"(?P<name>.+)\.(?P<number>\d{6,})\.jsonl")


@dataclass(frozen=True)
class Head:
    """What a journal is of.

    Attributes:
        run_id: of the run.
        host: whose events these are.
        monotonic_ns, wall_ns: the same moment by the clock of the events and in nanoseconds since 1970.
        configured_workers: how many workers the run wants; 0: not known.
    """

    run_id: str
    host: str
    monotonic_ns: int
    wall_ns: int
    configured_workers: int = 0

    def wall_ns_of(self, at_ns: int) -> int:
        """The time of the day of an event."""
        return at_ns - self.monotonic_ns + self.wall_ns


class WritesEvents(Protocol):
    """Where events go."""

    def write(self, event: LedgerEvent, book: HostLedger) -> None:
        """Append an event; the ledger is that before it."""
        ...

    def close(self) -> None:
        """Write out and close."""
        ...


class JournalWriter:
    """Appends events, and begins a new file when one is full. One thread at a time.

    A disk that is full or gone costs events, never the caller: `failed` counts them.

    Args:
        folder: made if missing.
        name: of the journal, unique for this process; files are called `name.000001.jsonl` and so on.
        head: of each file.
        max_bytes: of a file.
        keep: so many files are kept; the older ones go.

    Raises:
        ValueError: an argument cannot be used.
        OSError: the folder cannot be made or written to.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        head: Head,
        *,
        max_bytes: int = 16 * 2**20,
        keep: int = 8,
    ) -> None:
        if max_bytes < 4096 or keep < 2:
            raise ValueError(f"max_bytes={max_bytes}, keep={keep}: give at least 4096 bytes and 2 files")
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"{name!r} cannot be part of a file's name: use letters, digits, '.', '-' and '_'")
        self._folder, self._name, self._head = folder, name, head
        self._max_bytes, self._keep = max_bytes, keep
        self._descriptor = -1
        self._bytes = 0
        self._number = 0
        self.failed = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._number = max((number for number, _ in _files(folder, name)), default=0)
        self._begin(HostLedger())

    @property
    def path(self) -> Path:
        """The file that is written to."""
        return self._folder / f"{self._name}.{self._number:06d}.jsonl"

    def write(self, event: LedgerEvent, book: HostLedger) -> None:
        """Append one event.

        Args:
            event: what has happened.
            book: the ledger before it, for the head of a new file.
        """
        line = _line(to_dict(event))
        try:
            if self._descriptor < 0 or self._bytes + len(line) > self._max_bytes:
                self._begin(book)
            self._append(line)
        except OSError as error:
            self.failed += 1
            if self.failed == 1:
                log.warning("the ledger at %s cannot be written: %s; events are lost from here", self.path, error)

    def close(self) -> None:
        """Write out and close. Idempotent."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                os.fdatasync(descriptor)  # against the end of the agent every line is durable, once written
            except OSError as error:
                log.warning("the ledger at %s may not be durable: %s", self.path, error)
            finally:
                os.close(descriptor)

    def _begin(self, book: HostLedger) -> None:
        self.close()
        head = {"kind": "head", "version": VERSION, **asdict(self._head), "brought_forward": ledger_to_dict(book)}
        self._number += 1
        try:
            # what is there already has no head, since the disk was full
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC
            self._descriptor, self._bytes = os.open(self.path, flags, 0o644), 0
            self._append(_line(head))
        except OSError:
            self.close()  # the next event tries this file again
            self._number -= 1
            raise
        for _, path in _files(self._folder, self._name)[: -self._keep]:
            path.unlink(missing_ok=True)

    def _append(self, line: bytes) -> None:
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            os.ftruncate(self._descriptor, self._bytes)  # a part of a line would spoil the next one
            raise
        self._bytes += len(line)


class BackgroundJournal:
    """A journal that is written on a thread of its own, for an event loop that must never wait for a disk.

    Args:
        writer: owned by this from now on.
    """

    def __init__(self, writer: WritesEvents) -> None:
        self._writer = writer
        self._queue: queue.Queue[tuple[LedgerEvent, HostLedger] | None] = queue.Queue(_QUEUED_LINES)
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="torchelastic-ledger", daemon=True)
        self._thread.start()

    def write(self, event: LedgerEvent, book: HostLedger) -> None:
        """Have an event written; never waits. When the disk is far behind, events are dropped and counted."""
        try:
            self._queue.put_nowait((event, book))
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left, waiting at most so long. Idempotent."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._writer.write(*item)
        self._writer.close()


@dataclass(frozen=True)
class Journal:
    """A journal as it was found.

    Attributes:
        head: of its oldest file.
        before: the ledger at the beginning of that file.
        events: all since then.
        damaged: lines that are no events; a torn last line of a file is none of them.
        unknown: events of kinds that this version does not know.
    """

    head: Head
    before: HostLedger
    events: tuple[LedgerEvent, ...]
    damaged: int = 0
    unknown: int = 0

    def book(self) -> HostLedger:
        """The ledger at its end."""
        return self.before.after_all(self.events)


def journal_files(folder: Path) -> dict[str, tuple[Path, ...]]:
    """The files of all journals of a folder, oldest first, by name. Raises OSError: the folder cannot be read."""
    names = {match["name"] for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return {name: tuple(path for _, path in _files(folder, name)) for name in sorted(names)}


def read_journal(paths: Iterable[Path]) -> Journal:
    """One journal from its files, oldest first, which another process may still write.

    Raises:
        LedgerFormatError: a file is of a later version, or its first line is no head; it is named.
        OSError: a file cannot be read.
    """
    journal: Journal | None = None
    events: list[LedgerEvent] = []
    damaged = unknown = 0
    for path in paths:
        lines = _lines(path)
        first = next(lines, None)
        if first is None:
            continue  # its process died before the head was written
        head, before = _head(path, first)
        journal = journal or Journal(head, before, ())
        for line in lines:
            try:
                event = from_dict(line) if line is not None else None
            except LedgerFormatError:
                line = event = None
            damaged += line is None
            unknown += line is not None and event is None
            if event is not None:
                events.append(event)
    if journal is None:
        raise LedgerFormatError("no file of this journal has a head")
    return Journal(journal.head, journal.before, tuple(events), damaged, unknown)


def _head(path: Path, fields: Mapping[str, Any] | None) -> tuple[Head, HostLedger]:
    if fields is None or fields.get("kind") != "head":
        raise LedgerFormatError(f"{path} does not begin with the head of a ledger: it is none, or was damaged")
    if fields.get("version") != VERSION:
        raise LedgerFormatError(
            f"{path} is a ledger of version {fields.get('version')}, this is for {VERSION}: use a newer torchelastic"
        )
    try:
        return converted("it", fields, Head), ledger_from_dict(fields.get("brought_forward"))
    except (RecordError, LedgerFormatError) as error:
        raise LedgerFormatError(f"{path} has a damaged head: {error}") from error


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The lines of a file as objects, None for one that is none; a last line without its end is left out."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                yield decode_object(str(path), line, most_bytes=len(line))
            except RecordError:
                yield None


def _files(folder: Path, name: str) -> list[tuple[int, Path]]:
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match["number"]), path) for match, path in found if match["name"] == name)


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
