"""Whose a folder of checkpoints is, and whether that run still lives; `fence` decides by it. Imports no torch."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, FencedError, explained
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.store.lease import FolderLease, held_alone
from torchelastic.file_systems import Call
from torchelastic.processes.dropped import when_dropped
from torchelastic.processes.file_locks import is_file_at, lock_file
from torchelastic.processes.held_files import HeldFile
from torchelastic.processes.lock_holders import holders_of, holders_text

FENCE_NAME = ".fence.json"
#: How often whoever waits for a lock tries again.
POLL_S = 0.02


@dataclass(frozen=True, order=True)
class FenceState:
    """What the fence of a folder says.

    Attributes:
        epoch: how many jobs have claimed the folder.
        round: the newest group of workers of that job.
        run_id: of that job.
        owner: who claimed it, in the words of that job.
        host: where it was claimed; for people.
        pid: the process that claimed it, on that host.
    """

    epoch: int = 0
    round: int = 0
    run_id: str = ""
    owner: str = ""
    host: str = ""
    pid: int = 0

    @property
    def token(self) -> tuple[int, int]:
        """Epoch and round."""
        return (self.epoch, self.round)

    def check(self, epoch: int, round_number: int, where: object) -> None:
        """Raises: FencedError if a newer group, or another job, has the place of this writer."""
        if self.token > (epoch, round_number):
            raise self.fenced(epoch, round_number, where)

    def fenced(self, epoch: int, round_number: int, where: object) -> FencedError:
        """The error of a writer that was replaced."""
        is_here = (self.host, self.pid) == (socket.gethostname(), os.getpid())
        remedy = ". This process has begun to save there twice: give each state a place of its own" if is_here else ""
        return FencedError(
            f"this writer of epoch {epoch}, round {round_number} in {where} was replaced by {self}: its checkpoint "
            f"is not published, and it must end{remedy}"
        )

    def __str__(self) -> str:
        whose = f"run {self.run_id!r} ({self.owner}, process {self.pid} on {self.host})"
        return f"{whose}, epoch {self.epoch}, round {self.round}"


class OwnerLock:
    """The file that every process of a run keeps locked (flock, shared) while it uses a folder: so the run lives.

    The run lives until the processes that hold it have ended or released it; the kernel sees to that, however they end.
    A fork of one of them (a worker of a data loader, say) does not hold it, but may call `hold` for itself. Dropping
    this object releases it too. Where files cannot be locked, a `FolderLease` beside it has to do.

    Args:
        path: of the file, in the folder; created where it is missing.
        disk: what touches files.
    """

    def __init__(self, path: Path, disk: Disk = REAL_DISK) -> None:
        self._path = path
        self._disk = disk
        self._lease = FolderLease(path, disk)
        self._file = HeldFile(-1)

    @property
    def is_there(self) -> bool:
        """Whether anybody has used the folder yet."""
        return os.path.lexists(self._path)

    @property
    def is_held(self) -> bool:
        """Whether this process has the file open that is there now; nobody else holds the folder alone then."""
        return is_file_at(self._path, self._file.descriptor)

    def hold(self) -> bool:
        """Holds the folder, until `release` or the end of this process; what is held already stays so.

        Returns:
            False: somebody holds it alone, or it was removed meanwhile; it is worth another try.

        Raises:
            CheckpointError: the file cannot be opened or locked.
        """
        if not self.is_held:
            self.release()
            with explained("open a lock in the folder of checkpoints", self._path):
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._file = HeldFile(os.open(self._path, flags, 0o666))
            when_dropped(self, self._file.close)
        return self._lock(fcntl.LOCK_SH)

    def hold_alone(self) -> bool:
        """The same, unless anybody else holds the folder: then it is not held, and the answer is false."""
        return self.hold() and self._lock(fcntl.LOCK_EX) and self._lock(fcntl.LOCK_SH)

    def _lock(self, operation: int) -> bool:
        with explained("lock the folder of checkpoints", self._path):
            try:
                is_locked = lock_file(self._file.descriptor, operation)
            except BlockingIOError:
                self.release()
                return False
        if not is_locked:
            self._disk.note_lack(Call.FLOCK, self._path.parent)
            self._lease.hold()
            if operation == fcntl.LOCK_EX and self._lease.others():
                self.release()
                return False
        if not self.is_held:
            self.release()
            return False
        return True

    def holders(self) -> str:
        """Who else uses the folder, as far as leases tell; "" if nobody, or by locks alone. Raises: CheckpointError."""
        return " and ".join(map(str, self._lease.others()))

    def replace_others(self) -> None:
        """All others that hold the folder were replaced: their leases go, also of those that may live."""
        self._lease.remove_others()

    def release(self) -> None:
        """This process does not use the folder any more; doing it again does nothing."""
        self._lease.release()
        self._file.close()

    def holders_text(self) -> str:
        """Which processes hold it now, of this host or by their leases, and how to end them; "" where none is seen."""
        holders = holders_of(self._path)
        leases = self.holders()
        return holders_text(holders) if holders else f"it is used by {leases}" if leases else ""


@contextmanager
def locked(
    path: Path,
    timeout_s: float,
    *,
    disk: Disk = REAL_DISK,
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Holds a lock that one process of a host has at a time; its file says which, for those that wait in vain.

    Args:
        path: of the file; created where it is missing.
        timeout_s: for how long to wait.
        disk: what touches files.
        sleep: waits so many seconds.
        monotonic: a clock in seconds that never goes back.

    Raises:
        CheckpointError: it cannot be opened, or is not free in time; names who holds it.
    """
    deadline_s = monotonic() + timeout_s

    def wait(holder: Callable[[], str]) -> None:
        if monotonic() >= deadline_s:
            raise CheckpointError(
                f"the lock {path} was not free for {timeout_s:g} s: {holder()} holds it, and is stopped or its file "
                "system hangs; end that process"
            )
        sleep(POLL_S)

    with explained("open a lock in the folder of checkpoints", path):
        file = HeldFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666))
    try:
        if _lock_alone(path, file.descriptor, wait):
            yield
        else:
            disk.note_lack(Call.FLOCK, path.parent)
            with held_alone(path, lambda holder: wait(lambda: holder), disk):
                yield
    finally:
        file.close()


def _holder(path: Path, descriptor: int) -> str:
    """Who holds a lock: who is seen here, else what its file says, which may be of another host."""
    here = " and ".join(map(str, holders_of(path)))
    return here or os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"


def _lock_alone(path: Path, descriptor: int, wait: Callable[[Callable[[], str]], None]) -> bool:
    """False if files cannot be locked there."""
    while True:
        with explained("lock the folder of checkpoints", path):
            try:
                if not lock_file(descriptor, fcntl.LOCK_EX):
                    return False
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return True
            except BlockingIOError:
                pass
        wait(lambda: _holder(path, descriptor))


def encode_fence(state: FenceState) -> bytes:
    """The fence as JSON, with a digest of itself."""
    text = json.dumps(asdict(state), sort_keys=True)
    return json.dumps({"fence": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode() + b"\n"


def decode_fence(data: bytes) -> FenceState:
    """The inverse of `encode_fence`. Raises: CorruptCheckpointError."""
    try:
        document = json.loads(data)
        state = FenceState(**json.loads(document["fence"]))
        if encode_fence(state) != data:
            raise ValueError("its digest does not match")
        return state
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"the fence is damaged: {error!r}") from error


def read_fence(folder: Path) -> FenceState:
    """What the fence of a folder says now; epoch 0 where there was no claim yet.

    Raises:
        CorruptCheckpointError: it is damaged.
        CheckpointError: it cannot be read.
    """
    path = folder / FENCE_NAME
    try:
        with explained("read the fence of the checkpoints", path):
            return decode_fence(path.read_bytes())
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{path}: {error}; start the run anew, which repairs it") from error
    except CheckpointError as error:
        if error.errno == errno.ENOENT:
            return FenceState()
        raise
