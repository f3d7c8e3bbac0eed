"""One worker's counts in memory that it shares with its agent: written without a system call, read after its death.

A file of fixed size on tmpfs: on a disk, the kernel may stop a writer for as long as it writes back. The counts are in
two slots that are written in turn, each with a number and a checksum, so that whatever a SIGKILL interrupts, one of
them is complete. Events are in a ring of slots of the same kind; a late reader learns how many it has missed. The
reader trusts nothing in it.

    0     magic, version, pid                                   64 bytes
    64    counts, slot 0: checksum, number, 20 numbers          192 bytes
    256   counts, slot 1                                        192 bytes
    512   events: 127 slots: checksum, length, number, JSON     512 bytes each
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import struct
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchelastic.foreign_json import RecordError, decode_object
from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.counters import Counters
from torchelastic.observe.ledger.ledger_events import LedgerFormatError
from torchelastic.processes.identity import Process

MAGIC = b"te-pages"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - made with O_EXCL, and the reader takes its own user's only
_PREFIX = "te-ledger-"
#: No agent that lives leaves a page there for so long.
_LEFT_AFTER_S = 60.0
VERSION = 1
PAGE_BYTES = 65536
EVENT_SLOTS = 127
EVENT_BYTES = 512

_HEAD = struct.Struct("<8sIQ")
_COUNTS = struct.Struct("<20q")
_CHECKSUM = struct.Struct("<I4x")
_EVENT_HEAD = struct.Struct("<IIQ")
_COUNTS_AT = (64, 256)
_COUNTS_BYTES = _CHECKSUM.size + _COUNTS.size
_EVENTS_AT = 512
MAX_EVENT_BYTES = EVENT_BYTES - _EVENT_HEAD.size
_ACCOUNTS = len(Account)


def page_paths(socket_path: str | Path, pid: int) -> tuple[Path, ...]:
    """Where the process with this id may keep its page for the agent that listens at `socket_path`, the best first."""
    name = hashlib.sha256(os.fsencode(socket_path)).hexdigest()[:16]
    return SHARED_MEMORY / f"{_PREFIX}{name}.{pid}", Path(f"{socket_path}.{pid}.ledger")


def remove_left_pages() -> None:
    """Remove this user's pages in shared memory that nobody will take: their process is dead, and so was their agent.

    An agent takes a page within seconds, and with that its name is gone.
    """
    for path in SHARED_MEMORY.glob(f"{_PREFIX}*"):
        pid = path.suffix[1:]
        with suppress(OSError):  # gone meanwhile
            status = path.lstat()
            is_old = time.time() - status.st_mtime > _LEFT_AFTER_S
            # not by the process alone: it may be one of another container with this memory, which is not seen here
            if status.st_uid == os.getuid() and is_old and pid.isdecimal() and Process.of(int(pid)).started_ticks < 0:
                path.unlink()


class PageWriter:
    """The worker's side. Counts are for one thread, events for any.

    Args:
        path: created; must not exist.
        pid: of this process.

    Raises:
        OSError: it could not be made, for example because the folder is full or gone.
    """

    def __init__(self, path: Path, pid: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            # all of it now: writing to a hole of a full tmpfs would end the trainer by SIGBUS
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)
            self._memory = mmap.mmap(descriptor, PAGE_BYTES)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._memory[: _HEAD.size] = _HEAD.pack(MAGIC, VERSION, pid)
        self._written = 0
        self._events = 0
        self._noting = threading.Lock()

    def write_counts(self, counts: Counters) -> None:
        """Publish the counts."""
        self._written = written = self._written + 1
        data = _COUNTS.pack(
            written, counts.started_ns, counts.since_ns, counts.account, counts.pending_ns, counts.step,
            counts.committed, counts.undone, counts.round, counts.rank, counts.world_size, *counts.totals,
        )  # fmt: skip
        at = _COUNTS_AT[written & 1]
        self._memory[at : at + _COUNTS_BYTES] = _CHECKSUM.pack(zlib.crc32(data)) + data

    def write_event(self, fields: Mapping[str, Any]) -> None:
        """Publish an event; one that is too long is published without its cause."""
        data = _encoded(fields)
        if len(data) > MAX_EVENT_BYTES:
            data = _encoded({**fields, "cause": ""})
        with self._noting:
            number = self._events + 1
            at = _EVENTS_AT + (self._events % EVENT_SLOTS) * EVENT_BYTES
            checksum = zlib.crc32(data, number & 0xFFFFFFFF)
            self._memory[at : at + _EVENT_HEAD.size + len(data)] = _EVENT_HEAD.pack(checksum, len(data), number) + data
            self._events = number

    def close(self) -> None:
        """Let go of the memory; the file stays for the agent. Nothing can be written any more."""
        self._memory.close()


class PageReader:
    """The agent's side: reads, never maps, so that a page that is cut off cannot end the agent.

    Args:
        path: of the page.

    Raises:
        OSError: it is not there.
        LedgerFormatError: it is no page, one of another version, or another user's.
    """

    def __init__(self, path: Path) -> None:
        # a FIFO of somebody else's must not make the agent wait
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            self.pid = self._head()
        except BaseException:
            self.close()
            raise
        self._next = 1
        self.missed = 0

    def counts(self) -> Counters | None:
        """The newest counts that are complete and sum up; None: there are none yet."""
        data = os.pread(self._descriptor, _EVENTS_AT, 0)
        found = [numbers for at in _COUNTS_AT if (numbers := _whole_counts(data[at : at + _COUNTS_BYTES]))]
        for numbers in sorted(found, reverse=True):
            tally = _tally(numbers[1:])
            if tally is not None:
                return tally
        return None

    def events(self) -> list[dict[str, Any]]:
        """What was published since the last call, in order; `missed` counts what was overwritten before."""
        at = _EVENTS_AT + ((self._next - 1) % EVENT_SLOTS) * EVENT_BYTES
        first = _whole_event(os.pread(self._descriptor, EVENT_BYTES, at))
        if first is None or first[0] < self._next:
            return []  # the usual case
        data = os.pread(self._descriptor, PAGE_BYTES - _EVENTS_AT, _EVENTS_AT)
        slots = (data[place : place + EVENT_BYTES] for place in range(0, EVENT_SLOTS * EVENT_BYTES, EVENT_BYTES))
        found = dict(event for slot in slots if (event := _whole_event(slot)) and event[0] >= self._next)
        ordered = sorted(found)
        if ordered:
            self.missed += ordered[-1] - self._next + 1 - len(ordered)
            self._next = ordered[-1] + 1
        return [found[number] for number in ordered]

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _head(self) -> int:
        status = os.fstat(self._descriptor)
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            raise LedgerFormatError(f"no file of user {os.getuid()}")
        if status.st_size != PAGE_BYTES:
            raise LedgerFormatError(f"a page has {PAGE_BYTES} bytes, this has {status.st_size}")
        magic, version, pid = _HEAD.unpack(os.pread(self._descriptor, _HEAD.size, 0))
        if magic != MAGIC or version != VERSION:
            raise LedgerFormatError(f"no page of version {VERSION}: {magic!r}, version {version}")
        return int(pid)


def _tally(numbers: tuple[int, ...]) -> Counters | None:
    started, since, account, pending, step, committed, undone, round_, rank, world_size, *totals = numbers
    if not 0 <= account < _ACCOUNTS:
        return None
    tally = Counters(
        started, since, Account(account), pending, tuple(totals), step, committed, undone, round_, rank, world_size
    )
    return None if tally.why_wrong() else tally


def _whole_counts(data: bytes) -> tuple[int, ...] | None:
    if len(data) != _COUNTS_BYTES:
        return None
    body = data[_CHECKSUM.size :]
    numbers = _COUNTS.unpack(body)
    return numbers if numbers[0] > 0 and _CHECKSUM.unpack_from(data)[0] == zlib.crc32(body) else None


def _whole_event(slot: bytes) -> tuple[int, dict[str, Any]] | None:
    if len(slot) != EVENT_BYTES:
        return None
    checksum, length, number = _EVENT_HEAD.unpack_from(slot)
    data = slot[_EVENT_HEAD.size : _EVENT_HEAD.size + length]
    if number == 0 or length > MAX_EVENT_BYTES or zlib.crc32(data, number & 0xFFFFFFFF) != checksum:
        return None
    try:
        return number, decode_object("an event", data, most_bytes=MAX_EVENT_BYTES)
    except RecordError:
        return None


def _encoded(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
