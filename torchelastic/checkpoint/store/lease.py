"""Who uses a folder whose file system has no locks (flock): files that say which process of which host it is.

    .fence.lock.lease                   one process at a time; its name can be taken once
    .owner.lock.4711-9f3a12cd.lease     one for each process of a run that lives

The kernel takes no such file away. So of a process that was killed only its own host can say that it has ended (its
boot, its pid namespace, its pid and the moment of its start); of others nobody can, and errors name the file that a
user has to remove then. Imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError, explained
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.store.save_id import STAGING_PREFIX
from torchelastic.processes.identity import Process, is_this_place, this_place

_SUFFIX = ".lease"
#: Who has taken a lease says in the next moment who it is; later than this it was killed, or will notice its loss.
UNSAID_S = 5.0


@dataclass(frozen=True)
class LeaseHolder:
    """What a lease says.

    Attributes:
        path: the lease.
        content: all of it.
    """

    path: Path
    content: bytes

    @property
    def has_ended(self) -> bool:
        """Whether the process certainly does not run any more; False wherever that cannot be known."""
        try:
            said = json.loads(self.content)
            process = Process(int(said["pid"]), int(said["started_ticks"]))
            return is_this_place(dict(said["place"])) and process.has_ended
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False  # cut, or of a newer release

    @property
    def may_have_ended(self) -> bool:
        """Whether it has, or was killed before it had said who it is."""
        return self.has_ended or not self.content

    def __str__(self) -> str:
        try:
            said = json.loads(self.content)
            who = f"process {said['pid']} on {said['host']}"
        except (ValueError, TypeError, KeyError, RecursionError):
            who = "a process that was killed while it wrote it, perhaps,"
        return f"{who} (remove {self.path} if it has ended)"


class FolderLease:
    """One of any number of processes that use a folder, as long as it holds this; nothing is made before.

    Args:
        lock: the file that cannot be locked.
        disk: what touches files.
    """

    def __init__(self, lock: Path, disk: Disk) -> None:
        self._lock = lock
        self._disk = disk
        self._path: Path | None = None
        self._pid = 0
        self._remove: Callable[[], object] = lambda: None

    def hold(self) -> None:
        """Shows that this process uses the folder, until `release` or its end. Raises: CheckpointError."""
        if self._path is not None and self._pid == os.getpid() and self._path.exists():
            return
        self.release()  # a fork leaves its parent's alone, and has one of its own
        for holder in self._all():
            if holder.has_ended:
                self._disk.remove(holder.path)  # its name is never taken again
        self._pid = os.getpid()
        self._path = self._lock.with_name(f"{self._lock.name}.{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}")
        hidden = _written(self._lock.parent, self._disk)
        self._disk.rename(hidden, self._path)
        # also when the interpreter ends: nobody would know it on another host
        self._remove = weakref.finalize(self, _remove, self._path, os.getpid(), self._disk)

    def others(self) -> list[LeaseHolder]:
        """Whoever else holds the folder, or may. Raises: CheckpointError."""
        return [holder for holder in self._all() if holder.path != self._path and not holder.has_ended]

    def remove_others(self) -> None:
        """Removes what all others have left, who are replaced by this process. Raises: CheckpointError."""
        for holder in self._all():
            if holder.path != self._path:
                self._disk.remove(holder.path)

    def _all(self) -> list[LeaseHolder]:
        with explained("look who uses the folder of checkpoints", self._lock):
            paths = [*self._lock.parent.glob(f"{self._lock.name}.*-*{_SUFFIX}")]
        return [holder for path in paths if (holder := _read(path)) is not None]

    def release(self) -> None:
        """This process does not use the folder any more; doing it again does nothing."""
        self._remove()
        self._path = None


@contextmanager
def held_alone(lock: Path, may_wait: Callable[[str], None], disk: Disk) -> Iterator[None]:
    """Holds a lease that one process has at a time.

    Args:
        lock: the file that cannot be locked.
        may_wait: called again and again with the words for who holds it; waits a moment, or raises.
        disk: what touches files.

    Raises:
        CheckpointError: the disk refuses.
    """
    lease, content = lock.with_name(lock.name + _SUFFIX), _identity()
    while not _is_taken(lease, content, disk):
        holder = _read(lease)
        if holder is not None and not (holder.may_have_ended and _take_away(holder, disk)):
            may_wait(str(holder))
    try:
        yield
    finally:
        disk.remove(lease)


def _is_taken(lease: Path, content: bytes, disk: Disk) -> bool:
    """Whether the name of a lease was free, and this process has it now."""
    try:
        descriptor = disk.create(lease)
    except CheckpointError as error:
        if error.errno == errno.EEXIST:
            return False
        raise
    try:
        disk.write(descriptor, [memoryview(content)], lease)
        disk.sync(descriptor, lease)
    finally:
        os.close(descriptor)
    holder = _read(lease)
    return holder is not None and holder.content == content  # else it stood still before it had said who it is


def _take_away(holder: LeaseHolder, disk: Disk) -> bool:
    """Removes the lease of a process that has ended, if it still is that; false if it may not have, or another does."""
    digest = hashlib.sha256(holder.content).hexdigest()[:8]
    mark = holder.path.with_name(f"{holder.path.name}.ended-{digest}")
    try:
        os.close(disk.create(mark))  # by one process at a time: two removals of one name could hit the next lease
    except CheckpointError as error:
        if error.errno == errno.EEXIST:
            return False
        raise
    try:
        with explained("look who uses the folder of checkpoints", holder.path):
            try:  # by the clock of the file system
                age_s = mark.stat().st_mtime - holder.path.stat().st_mtime
            except FileNotFoundError:
                return True
        is_over = _read(holder.path) == holder and (holder.has_ended or age_s > UNSAID_S)
        if is_over:
            disk.remove(holder.path)
        return is_over
    finally:
        disk.remove(mark)


def _identity() -> bytes:
    """Says which process this is, and nothing twice."""
    process = Process.of(os.getpid())
    said = {"host": socket.gethostname(), "place": this_place(), "pid": process.pid}
    return json.dumps({**said, "started_ticks": process.started_ticks, "nonce": secrets.token_hex(8)}).encode()


def _written(folder: Path, disk: Disk) -> Path:
    """A hidden file that says which process this is."""
    hidden = folder / f"{STAGING_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    descriptor = disk.create(hidden)
    try:
        disk.write(descriptor, [memoryview(_identity())], hidden)
        disk.sync(descriptor, hidden)
    except BaseException:
        disk.remove(hidden)
        raise
    finally:
        os.close(descriptor)
    return hidden


def _read(path: Path) -> LeaseHolder | None:
    """None if it is gone."""
    with explained("look who uses the folder of checkpoints", path):
        try:
            return LeaseHolder(path, path.read_bytes())
        except FileNotFoundError:
            return None


def _remove(path: Path, pid: int, disk: Disk) -> None:
    if os.getpid() == pid:  # a fork has it from its parent
        with suppress(CheckpointError):
            disk.remove(path)
