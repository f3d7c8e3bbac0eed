"""Who may publish checkpoints in a folder: a writer that was replaced while it was paused publishes nothing.

A fencing token (epoch, round) only ever grows: a job that claims the folder takes the next epoch, each new group of its
workers a higher round. It lies in the folder itself, so no clock, lease or server is asked. (Leslie Lamport calls such
numbers ballots; the name is from Kleppmann, "How to do distributed locking", 2016.)

Publishing is a rename of the writer's hidden folder, and raising the fence takes the hidden folders of older writers
away. So a writer that stops between its last look at the fence and its rename has nothing to rename when it wakes up,
and no lock is held meanwhile that a stopped process could keep from its successor.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.format.shard_writing import write_whole
from torchelastic.checkpoint.store.owner import (
    FENCE_NAME,
    POLL_S,
    FenceState,
    OwnerLock,
    encode_fence,
    locked,
    read_fence,
)
from torchelastic.checkpoint.store.reading import names_in
from torchelastic.checkpoint.store.rewinds import highest_epoch
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.store.writing import remove_left_overs

log = logging.getLogger(__name__)

T = TypeVar("T")

FENCE_LOCK_NAME = ".fence.lock"
OWNER_LOCK_NAME = ".owner.lock"
#: Who holds the lock of the fence reads and writes one small file; longer than this, something is wrong with it.
LOCK_TIMEOUT_S = 60.0
#: For how long it is tried to have a folder: whoever looks at it or removes it needs a moment, as does a run that ends.
ENTER_TIMEOUT_S = 5.0


class OwnedError(CheckpointError):
    """Another run that is alive writes its checkpoints into this folder."""


class _BusyError(CheckpointError):
    """Somebody looks at the folder, or removes it, at this moment."""


class _TakenError(CheckpointError):
    """Another run that is alive has the folder, until now.

    Args:
        by: what the fence says of that run.
    """

    def __init__(self, by: FenceState) -> None:
        super().__init__(str(by))
        self.by = by


class Fence:
    """The fence of one folder of checkpoints; every process that writes there has one. Used by one thread at a time.

    Relies on flock; on a file system that several hosts share, mount it so that locks are passed on (NFS version 4,
    Lustre with -o flock). Without locks files say who has the folder, see `lease`.

    Args:
        root: the folder; created by `claim`, `join` and `enter`.
        disk: what touches files.
        owner_lock: the name of the file that is locked while the run lives; whoever looks for what dead runs have left
            knows by it what the folder is for.
        lock_timeout_s: how long to wait for another process that reads and writes the fence.
        sleep: waits so many seconds.
        monotonic: a clock in seconds that never goes back.
    """

    def __init__(
        self,
        root: Path,
        disk: Disk = REAL_DISK,
        *,
        owner_lock: str = OWNER_LOCK_NAME,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = root
        self._disk = disk
        self._lock_timeout_s = lock_timeout_s
        self._sleep = sleep
        self._monotonic = monotonic
        self._owner_lock = OwnerLock(root / owner_lock, disk)

    def claim(self, run_id: str, owner: str, *, at_least: int = 1) -> int:
        """Takes the folder for a new job, and holds it. Called by one process of the job.

        Whoever holds a folder shows that the run is alive, until `release` or the end of the process. A job of the same
        run that is still alive (a worker that hangs, say) is replaced: its writers are fenced off.

        Args:
            run_id: names the run; jobs that go on with each other's checkpoints share it.
            owner: names this process, for the errors that others get.
            at_least: an epoch that the job has claimed elsewhere.

        Returns:
            The epoch: higher than that of every job and every checkpoint that was here before.

        Raises:
            OwnedError: another run is alive here, and does not end soon; names it.
            CheckpointError: the folder cannot be written, or its lock is stuck; names who holds it.
        """

        def attempt() -> int:
            self._disk.make_folder(self.root)
            with self._locked():
                before = self._read_for_claim()
                self._require_run(run_id, before)
                epoch = max(before.epoch + 1, self._highest_epoch_in_names() + 1, at_least)
                self._write_anew(epoch, run_id, owner)
                if before.run_id == run_id:
                    self._owner_lock.replace_others()
            return epoch

        epoch = self._patiently(attempt)
        self._remove_left_overs(epoch, 0)
        return epoch

    def enter(self, run_id: str) -> str:
        """Holds a folder that needs no claim; called by any process of the job before all else.

        One that is being removed as a left-over at this moment becomes a new, empty one. One of another run that has
        ended is taken over, with a warning.

        Args:
            run_id: of this job; "": it has none, and is never refused.

        Returns:
            The run that has the folder from now on: the given one, or that which was there if one of them is "".

        Raises:
            OwnedError: another run is alive here, and does not end soon; names it.
            CheckpointError: as `claim`, or somebody holds the folder alone and does not go on.
        """

        def attempt() -> str:
            try:
                return self._enter(run_id)
            except CheckpointError:
                self.release()
                raise

        return self._patiently(attempt)

    def require_free(self, run_id: str) -> None:
        """Refuses a folder in which another run is alive, and takes it for nobody; for who claims it only later.

        Args:
            run_id: of this job.

        Raises:
            OwnedError: another run is alive here, and does not end soon; names it.
        """

        def attempt() -> None:
            before = self._read_for_claim()
            if _is_others(before, run_id) and self._owner_lock.is_there:
                if not self._owner_lock.hold_alone():
                    raise _TakenError(before)
                self.release()

        try:
            self._patiently(attempt)
        except OwnedError:
            raise
        except CheckpointError as error:  # whoever reads or claims it says so
            log.debug("it is unknown whose %s is: %s", self.root, error)

    def _patiently(self, attempt: Callable[[], T], *, instead: str = "give this run a folder of its own") -> T:
        """What `attempt` returns; tried again for a while where what is in the way may go by itself.

        Args:
            attempt: is tried.
            instead: what else to do where another run has the folder and does not end.
        """
        deadline_s = self._monotonic() + ENTER_TIMEOUT_S
        while True:
            try:
                return attempt()
            except CheckpointError as error:
                is_going = error.errno in (errno.ENOENT, errno.EEXIST) and not self.root.is_file()
                may_pass = is_going or isinstance(error, (_TakenError, _BusyError))
                if not may_pass or self._monotonic() >= deadline_s:
                    if isinstance(error, _TakenError):
                        raise self._owned(error.by, instead) from None
                    raise
            self._sleep(POLL_S)

    def _enter(self, run_id: str) -> str:
        self._disk.make_folder(self.root)
        before = self._read_for_claim()
        is_others = _is_others(before, run_id)
        # held, nobody removes the folder: that is done by who holds it alone
        is_held = self._owner_lock.hold_alone() if is_others else self._owner_lock.hold()
        if is_others and not is_held:
            raise _TakenError(before)
        if not is_held:
            raise _BusyError(
                f"{self.root} could not be entered in {ENTER_TIMEOUT_S:g} s: it is looked at or removed by a "
                "`torchelastic checkpoint prune --dead` that does not go on; end that"
            )
        with self._locked():
            now = self._read_for_claim()
            if _is_others(now, run_id) != is_others:
                raise _BusyError(f"{self.root} was entered by another run at the same moment")
            if not is_others and now != FenceState():
                return now.run_id
            self._write_anew(max(now.epoch, self._highest_epoch_in_names()) + is_others, run_id, "entered")
        if is_others:
            log.warning("%s was of run %r, which has ended; run %r goes on there", self.root, now.run_id, run_id)
        return run_id

    def raise_alone(self, owner: str) -> int:
        """Takes the next epoch for the run that has the folder, while none of its processes lives; holds nothing.

        Returns:
            The epoch: higher than that of every job and every checkpoint that is here.

        Raises:
            OwnedError: a run is alive here, and does not end soon; names it.
            CheckpointError: as `claim`.
        """

        def attempt() -> int:
            with self._locked():
                before = self._read_for_claim()
                if not self._owner_lock.hold_alone():
                    raise _TakenError(before)
                epoch = max(before.epoch, self._highest_epoch_in_names()) + 1
                self._write_anew(epoch, before.run_id, owner)
            return epoch

        try:
            return self._patiently(attempt, instead="use another copy of what is there")
        finally:
            self.release()

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
        """Takes part in a claim that another process of the same job has made; holds the folder.

        A folder that is not shared needs no claim: this raises its fence to the epoch of the job.

        Args:
            epoch: what `claim` returned, or the largest of what it returned on all folders of the job.
            run_id: as given to `claim`.

        Raises:
            FencedError: a newer job has the folder.
            OwnedError: another run is alive here, as in `claim`.
            CheckpointError: as `claim`.
        """

        def attempt() -> None:
            self._disk.make_folder(self.root)
            with self._locked():
                now = self._read_for_claim()
                if now.epoch > epoch or (now.epoch == epoch and now.run_id != run_id):
                    raise now.fenced(epoch, 0, self.root)
                if now.epoch < epoch:
                    self._require_run(run_id, now)
                    self._write_anew(epoch, run_id, "joined")
                self._owner_lock.hold()

        self._patiently(attempt)

    def _require_run(self, run_id: str, before: FenceState) -> None:
        """Holds the folder, unless it belongs to another run that lives."""
        is_ours = before.run_id in ("", run_id)
        if not (self._owner_lock.hold() if is_ours else self._owner_lock.hold_alone()):
            raise _TakenError(before)

    def _owned(self, by: FenceState, instead: str) -> OwnedError:
        """Names who holds the folder now: who has claimed it may have ended, and what it has started may not."""
        who = self._owner_lock.holders_text() or f"wait until it has ended, or stop it on {by.host or 'its host'}"
        return OwnedError(f"{self.root} belongs to {by}, which is alive: {who}, or {instead}")

    @property
    def is_held(self) -> bool:
        """Whether this process holds the folder, which nobody has removed since."""
        return self._owner_lock.is_held

    def release(self) -> None:
        """The run is not alive any more, as far as this process goes; doing it again does nothing."""
        self._owner_lock.release()

    def advance(self, epoch: int, round_number: int) -> None:
        """A new group of the job begins: from now on nothing of older groups can be published. Called by any of them.

        Raises:
            FencedError: a newer group, or another job, has the folder.
            CheckpointError: the folder cannot be written, or its lock is stuck; names who holds it.
        """
        with self._locked():
            now = self.read()
            now.check(epoch, round_number, self.root)
            if now.token < (epoch, round_number):
                self._write(replace(now, epoch=epoch, round=round_number))
        self._remove_left_overs(epoch, round_number)

    def _remove_left_overs(self, epoch: int, round_number: int) -> None:
        """What older writers have hidden goes. Where only its content stays, it can be published no more all the same.

        Raises:
            CheckpointError: an older writer could still publish.
        """
        try:
            remove_left_overs(self.root, (epoch, round_number), self._disk)
        except CheckpointError as error:
            staged = filter(None, map(SaveId.find_staged, names_in(self.root)))
            if any(save.token < (epoch, round_number) for save in staged):
                raise
            log.warning("what older writers have left in %s stays, and takes its room: %s", self.root, error)

    def check(self, epoch: int, round_number: int) -> None:
        """Called before a checkpoint is published; takes no lock.

        Raises:
            FencedError: a newer group has taken over.
            CheckpointError: the fence cannot be read.
        """
        self.read().check(epoch, round_number, self.root)

    def read(self) -> FenceState:
        """What the fence says now; epoch 0 where there was no claim yet.

        Raises:
            CorruptCheckpointError: it is damaged.
            CheckpointError: it cannot be read.
        """
        return read_fence(self.root)

    def _read_for_claim(self) -> FenceState:
        try:
            return self.read()
        except CorruptCheckpointError:
            return FenceState()  # the names of what is stored tell the epoch as well

    def _highest_epoch_in_names(self) -> int:
        return highest_epoch(names_in(self.root))

    def _write_anew(self, epoch: int, run_id: str, owner: str) -> None:
        self._write(FenceState(epoch, 0, run_id, owner, socket.gethostname(), os.getpid()))

    def _write(self, state: FenceState) -> None:
        write_whole(self.root / FENCE_NAME, [memoryview(encode_fence(state))], self._disk)

    def _locked(self) -> AbstractContextManager[None]:
        path = self.root / FENCE_LOCK_NAME
        return locked(path, self._lock_timeout_s, disk=self._disk, sleep=self._sleep, monotonic=self._monotonic)


def _is_others(state: FenceState, run_id: str) -> bool:
    return state.run_id != run_id and "" not in (state.run_id, run_id)
