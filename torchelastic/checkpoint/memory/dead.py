"""What dead jobs have left in memory: found by their locks, and removed so that a job that starts meanwhile is safe.

A container is dead when nobody holds the lock of its file `.job`, nor any other file in it. To remove one:

    lock .job exclusively      no process of the job lives; one that starts now waits for its shared lock
    is it still the same?      somebody else may have removed it, and another job made a new one
    rename the container       to a hidden name: whoever waits finds its .job gone, and makes a new container
    remove it, .job last       a remover that is killed half way leaves something that is found again

So a job that starts at the same moment has either locked `.job` first, and then the container is intact, or finds none
and starts with an empty one. Only tmpfs is looked at: locks tell nothing about another host, or an earlier boot.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.memory.job_file import (
    JOB_FILE,
    JobRecord,
    is_current,
    open_job_file,
    read_record,
)
from torchelastic.checkpoint.memory.room import held_bytes
from torchelastic.checkpoint.shards.disk import REAL_DISK, Disk, is_in_memory, lock_file
from torchelastic.checkpoint.store.save_id import STAGING_PREFIX
from torchelastic.processes.identity import boot_id

#: How the hidden name of a container begins while it is removed.
DOOMED = f"{STAGING_PREFIX}dead-"
#: Folders below the root in which containers are looked for: that of the user, and in it those of its jobs.
_DEPTH = 2


@dataclass(frozen=True)
class DeadJob:
    """A container that no living process has.

    Attributes:
        base: where it is.
        run_id: of the job; None: it had none.
        created_s: when it was claimed first, in seconds of wall time.
        changed_s: when a file or folder of it was last changed, in seconds of wall time.
        size_bytes: how much memory it takes.
    """

    base: Path
    run_id: str | None
    created_s: float
    changed_s: float
    size_bytes: int

    @property
    def is_half_removed(self) -> bool:
        """Whether somebody has begun to remove it, and was ended."""
        return self.base.name.startswith(DOOMED)


def find_dead(root: Path) -> list[DeadJob]:
    """The containers of dead jobs of this user at a path, in it, or in its folders; in the order of their paths.

    Those that are in use or of other users, those on a disk, and those of which nobody can tell are passed over.

    Args:
        root: a container, or a folder of them such as /dev/shm.
    """
    found = []
    for base in _containers(root, _DEPTH):
        with _held(base) as record:
            if record is not None:
                found.append(_look_at(base, record))
    return found


def remove_dead(dead: DeadJob, *, disk: Disk = REAL_DISK) -> bool:
    """Removes the container of a dead job.

    Args:
        dead: as it was found.
        disk: what renames and removes.

    Returns:
        Whether it was removed; not if it is in use again, has been in use since it was found, or is gone.

    Raises:
        CheckpointError: the disk refuses.
    """
    with _held(dead.base) as record:
        if record is None or _look_at(dead.base, record) != dead:
            return False
        hidden = dead.base.with_name(f"{DOOMED}{secrets.token_hex(8)}")
        disk.rename(dead.base, hidden)
        with os.scandir(hidden) as entries:
            content = [(Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries]
        for path, is_folder in content:
            if path.name != JOB_FILE:
                (disk.remove_folder if is_folder else disk.remove)(path)
        disk.remove_folder(hidden)
    return True


@contextlib.contextmanager
def _held(base: Path) -> Iterator[JobRecord | None]:
    """Nobody else can claim the container inside; None: it is in use, or not ours, or nobody can tell."""
    try:
        descriptor = open_job_file(base)
    except CheckpointError:
        descriptor = None
    if descriptor is None:
        yield None
        return
    try:
        yield _record_if_dead(descriptor, base)
    finally:
        os.close(descriptor)


def _record_if_dead(descriptor: int, base: Path) -> JobRecord | None:
    try:
        is_locked = lock_file(descriptor, fcntl.LOCK_EX)
        record = read_record(descriptor, base)
    except (BlockingIOError, CorruptCheckpointError):
        return None
    is_ours_alone = is_locked and is_current(descriptor, base) and record.boot_id == boot_id()
    return record if is_ours_alone and is_in_memory(base) and not _is_in_use(base) else None


def _is_in_use(base: Path) -> bool:
    """Whether a process without a claim writes or reads there: writers and readers of shards keep them locked."""
    for where, _, names in os.walk(base):
        for name in names:
            try:
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                descriptor = os.open(Path(where) / name, flags)
            except OSError:
                continue  # gone, or nothing that could be locked
            try:
                if name != JOB_FILE:  # that one we have locked ourselves
                    lock_file(descriptor, fcntl.LOCK_EX)
            except OSError:
                return True
            finally:
                os.close(descriptor)
    return False


def _look_at(base: Path, record: JobRecord) -> DeadJob:
    return DeadJob(base, record.run_id, record.created_s, _changed_s(base), held_bytes(base))


def _changed_s(base: Path) -> float:
    """Writing through a memory map leaves no time behind; publishing it under a name does (ctime)."""
    newest = 0.0
    for where, folders, names in os.walk(base):
        for path in (Path(where), *(Path(where) / name for name in (*folders, *names))):
            try:
                newest = max(newest, path.lstat().st_ctime)
            except OSError:
                continue
    return newest


def _containers(folder: Path, depth: int) -> Iterator[Path]:
    """Folders with a `.job`; none lies in another."""
    if os.path.lexists(folder / JOB_FILE):
        yield folder
        return
    if not depth:
        return
    try:
        with os.scandir(folder) as entries:
            folders = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return  # gone meanwhile, or of another user
    for path in folders:
        yield from _containers(Path(path), depth - 1)
