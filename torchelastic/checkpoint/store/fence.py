"""Who may publish checkpoints in a folder: a writer that was replaced while it was paused publishes nothing.

A fencing token (epoch, round) only ever grows: a job that claims the folder takes the next epoch, each new group of its
workers a higher round. It lies in the folder itself, so no clock, lease or server is asked. (Leslie Lamport calls such
numbers ballots; the name is from Kleppmann, "How to do distributed locking", 2016.)

Publishing is a rename of the writer's hidden folder, and raising the fence takes the hidden folders of older writers
away. So a writer that stops between its last look at the fence and its rename has nothing to rename when it wakes up,
and no lock is held meanwhile that a stopped process could keep from its successor.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, FencedError, explained
from torchelastic.checkpoint.shards.disk import REAL_DISK, Disk
from torchelastic.checkpoint.shards.writing import write_whole
from torchelastic.checkpoint.store.pruning import remove_left_overs
from torchelastic.checkpoint.store.reading import names_in
from torchelastic.checkpoint.store.save_id import STAGING_PREFIX, SaveId

FENCE_NAME = ".fence.json"
FENCE_LOCK_NAME = ".fence.lock"
OWNER_LOCK_NAME = ".owner.lock"
#: Who holds the lock of the fence reads and writes one small file; longer than this, something is wrong with it.
LOCK_TIMEOUT_S = 60.0
_LOCK_POLL_S = 0.02


class OwnedError(CheckpointError):
    """Another run that is alive writes its checkpoints into this folder."""


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

    def __str__(self) -> str:
        whose = f"run {self.run_id!r} ({self.owner}, process {self.pid} on {self.host})"
        return f"{whose}, epoch {self.epoch}, round {self.round}"


class Fence:
    """The fence of one folder of checkpoints; every process that writes there has one. Used by one thread at a time.

    Relies on flock; on a file system that several hosts share, mount it so that locks are passed on (NFS version 4,
    Lustre with -o flock).

    Args:
        root: the folder; created by `claim` and `join`.
        disk: what touches files.
        lock_timeout_s: how long to wait for another process that reads and writes the fence.
        sleep: waits so many seconds.
        monotonic: a clock in seconds that never goes back.
    """

    def __init__(
        self,
        root: Path,
        disk: Disk = REAL_DISK,
        *,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = root
        self._disk = disk
        self._lock_timeout_s = lock_timeout_s
        self._sleep = sleep
        self._monotonic = monotonic
        self._owner_lock = -1

    def claim(self, run_id: str, owner: str, *, at_least: int = 1) -> int:
        """Takes the folder for a new job, and holds it as `hold` does. Called by one process of the job.

        A job of the same run that is still alive (a worker that hangs, say) is replaced: its writers are fenced off.

        Args:
            run_id: names the run; jobs that go on with each other's checkpoints share it.
            owner: names this process, for the errors that others get.
            at_least: an epoch that the job has claimed elsewhere.

        Returns:
            The epoch: higher than that of every job and every checkpoint that was here before.

        Raises:
            OwnedError: another run is alive here; names it.
            CheckpointError: the folder cannot be written, or its lock is stuck; names who holds it.
        """
        self._disk.make_folder(self.root)
        with self._locked():
            before = self._read_for_claim()
            self._require_run(run_id, before)
            epoch = max(before.epoch + 1, self._highest_epoch_in_names() + 1, at_least)
            self._write(FenceState(epoch, 0, run_id, owner, socket.gethostname(), os.getpid()))
        remove_left_overs(self.root, (epoch, 0), self._disk)
        return epoch

    def known_epoch(self, run_id: str) -> int:
        """The least epoch in which nothing that is here counts as newer than what this run writes; takes no lock.

        Returns:
            The highest epoch of the fence and of the names in the folder; one more where another run was here last.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        state = self._read_for_claim()
        highest = max(state.epoch, self._highest_epoch_in_names())
        return highest + 1 if highest and state.run_id != run_id else highest

    def join(self, epoch: int, run_id: str) -> None:
        """Takes part in a claim that another process of the same job has made; holds the folder as `hold` does.

        A folder that is not shared needs no claim: this raises its fence to the epoch of the job.

        Args:
            epoch: what `claim` returned, or the largest of what it returned on all folders of the job.
            run_id: as given to `claim`.

        Raises:
            FencedError: a newer job has the folder.
            OwnedError: another run is alive here, as in `claim`.
            CheckpointError: as `claim`.
        """
        self._disk.make_folder(self.root)
        with self._locked():
            now = self._read_for_claim()
            if now.epoch > epoch or (now.epoch == epoch and now.run_id != run_id):
                raise self._fenced(epoch, 0, now)
            if now.epoch < epoch:
                self._require_run(run_id, now)
                self._write(FenceState(epoch, 0, run_id, "joined", socket.gethostname(), os.getpid()))
            self._hold()

    def _require_run(self, run_id: str, before: FenceState) -> None:
        """Holds the folder, unless it belongs to another run that lives."""
        if not self._hold_alone() and before.run_id not in ("", run_id):
            self.release()
            raise OwnedError(
                f"{self.root} belongs to {before}, which is alive: wait until it has ended, or stop it, or give this "
                "run a folder of its own"
            )

    def hold(self) -> None:
        """Shows, for as long as this process lives or until `release`, that the run is alive; `claim` and `join` do it.

        Raises:
            CheckpointError: as `claim`.
        """
        with self._locked():
            self._hold()

    def _hold(self) -> None:
        if self._owner_lock < 0:
            self._owner_lock = self._open_lock(OWNER_LOCK_NAME)
        with explained("lock the folder of checkpoints", self.root / OWNER_LOCK_NAME):
            fcntl.flock(self._owner_lock, fcntl.LOCK_SH)

    def release(self) -> None:
        """The run is not alive any more, as far as this process goes; doing it again does nothing."""
        if self._owner_lock >= 0:
            os.close(self._owner_lock)
            self._owner_lock = -1

    def advance(self, epoch: int, round_number: int) -> None:
        """A new group of the job begins: from now on nothing of older groups can be published. Called by any of them.

        Raises:
            FencedError: a newer group, or another job, has the folder.
            CheckpointError: the folder cannot be written, or its lock is stuck; names who holds it.
        """
        with self._locked():
            now = self.read()
            if now.token > (epoch, round_number):
                raise self._fenced(epoch, round_number, now)
            if now.token < (epoch, round_number):
                self._write(replace(now, epoch=epoch, round=round_number))
        remove_left_overs(self.root, (epoch, round_number), self._disk)

    def check(self, epoch: int, round_number: int) -> None:
        """Called before a checkpoint is published; takes no lock.

        Raises:
            FencedError: a newer group has taken over.
            CheckpointError: the fence cannot be read.
        """
        now = self.read()
        if now.token > (epoch, round_number):
            raise self._fenced(epoch, round_number, now)

    def read(self) -> FenceState:
        """What the fence says now; epoch 0 where there was no claim yet.

        Raises:
            CorruptCheckpointError: it is damaged.
            CheckpointError: it cannot be read.
        """
        path = self.root / FENCE_NAME
        try:
            with explained("read the fence of the checkpoints", path):
                return decode_fence(path.read_bytes())
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{path}: {error}; start the run anew, which repairs it") from error
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return FenceState()
            raise

    def _read_for_claim(self) -> FenceState:
        try:
            return self.read()
        except CorruptCheckpointError:
            return FenceState()  # the names of what is stored tell the epoch as well

    def _highest_epoch_in_names(self) -> int:
        """A folder that was copied without its hidden files, or whose fence was removed, has no other memory."""
        names = [SaveId.find(name.removeprefix(STAGING_PREFIX)) for name in names_in(self.root)]
        return max((name.epoch for name in names if name is not None), default=0)

    def _write(self, state: FenceState) -> None:
        write_whole(self.root / FENCE_NAME, [memoryview(encode_fence(state))], self._disk)

    def _hold_alone(self) -> bool:
        """Holds the folder; whether nobody else does (only while the fence is locked, so nobody comes in between)."""
        self.release()
        self._owner_lock = self._open_lock(OWNER_LOCK_NAME)
        with explained("lock the folder of checkpoints", self.root / OWNER_LOCK_NAME):
            try:
                fcntl.flock(self._owner_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                alone = False
            fcntl.flock(self._owner_lock, fcntl.LOCK_SH)
        return alone

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        path = self.root / FENCE_LOCK_NAME
        descriptor = self._open_lock(FENCE_LOCK_NAME)
        try:
            self._wait_for_lock(descriptor, path)
            holder = f"process {os.getpid()} on {socket.gethostname()}".encode()
            with explained("lock the fence of the checkpoints", path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, holder, 0)
            yield
        finally:
            os.close(descriptor)

    def _wait_for_lock(self, descriptor: int, path: Path) -> None:
        deadline_s = self._monotonic() + self._lock_timeout_s
        with explained("lock the fence of the checkpoints", path):
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    pass
                if self._monotonic() >= deadline_s:
                    holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
                    raise CheckpointError(
                        f"the lock {path} was not free for {self._lock_timeout_s:g} s: {holder} holds it, and is "
                        "stopped or its file system hangs; end that process"
                    )
                self._sleep(_LOCK_POLL_S)

    def _open_lock(self, name: str) -> int:
        path = self.root / name
        with explained("open a lock in the folder of checkpoints", path):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _fenced(self, epoch: int, round_number: int, now: FenceState) -> FencedError:
        return FencedError(
            f"this writer of epoch {epoch}, round {round_number} in {self.root} was replaced by {now}: its checkpoint "
            "is not published, and it must end"
        )


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
