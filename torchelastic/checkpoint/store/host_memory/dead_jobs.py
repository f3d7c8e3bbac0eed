"""What dead jobs have left in this host's memory: found, and removed while a job may start there. Imports no torch.

Every process that uses a container holds a shared lock on its file `.job` (`store.owner.OwnerLock`); the kernel takes
that away when the last of them ends, however it ends. A container is dead when nobody holds that lock, nor any other
file in it. To remove one:

    lock .job exclusively      no process of the job lives; one that starts now waits for its shared lock
    is it still the same?      somebody else may have removed it, and another job made a new one
    rename the container       to a hidden name: whoever waits finds its .job gone, and makes a new container
    remove it, .job last       a remover that is killed half way leaves something that is found again

So a job that starts at the same moment has either locked `.job` first, and then the container is intact, or finds none
and starts with an empty one. Only tmpfs is looked at, which no other host shares and no reboot survives: locks tell
nothing about others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.store.host_memory.room import held_bytes
from torchelastic.checkpoint.store.owner import FENCE_NAME, FenceState, read_fence
from torchelastic.checkpoint.store.save_id import STAGING_PREFIX
from torchelastic.file_systems import is_in_memory
from torchelastic.processes.file_locks import lock_of_nobody

#: The lock of the owner of a container; other folders of checkpoints have another name for theirs.
JOB_FILE = ".job"
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
        with _held(base) as fence:
            if fence is not None:
                found.append(_look_at(base, fence))
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
    with _held(dead.base) as fence:
        if fence is None or _look_at(dead.base, fence) != dead:
            return False
        hidden = dead.base.with_name(f"{DOOMED}{secrets.token_hex(8)}")
        disk.rename(dead.base, hidden)
        with os.scandir(hidden) as entries:
            content = [(Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries]
        for path, is_folder in content:
            if path.name not in (JOB_FILE, FENCE_NAME):
                (disk.remove_folder if is_folder else disk.remove)(path)
        disk.remove_folder(hidden)
    return True


@contextlib.contextmanager
def _held(base: Path) -> Iterator[FenceState | None]:
    """Nobody can enter the container inside; None: it is in use, or of another user, or nobody can tell."""
    job_file = base / JOB_FILE
    with lock_of_nobody(job_file) as is_left_over:
        is_dead = is_left_over and _is_own_file(job_file) and is_in_memory(base) and not _is_in_use(base)
        yield _fence_of(base) if is_dead else None


def _is_own_file(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False  # gone
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _fence_of(base: Path) -> FenceState:
    try:
        return read_fence(base)
    except CheckpointError:
        return FenceState()  # damaged: nobody knows whose it is, and nobody uses it


def _is_in_use(base: Path) -> bool:
    """Whether a process without a claim writes or reads there: writers and readers of shards keep them locked."""
    for where, _, names in os.walk(base):
        for name in names:
            if name == JOB_FILE:
                continue  # that one we have locked ourselves
            with lock_of_nobody(Path(where) / name) as is_left_over:
                if is_left_over is False:
                    return True
    return False


def _look_at(base: Path, fence: FenceState) -> DeadJob:
    try:
        created_s = (base / JOB_FILE).lstat().st_mtime  # nobody writes into it
    except OSError:
        created_s = 0.0  # somebody has removed it meanwhile
    return DeadJob(base, fence.run_id or None, created_s, _changed_s(base), held_bytes(base))


def _changed_s(base: Path) -> float:
    """Writing through a memory map leaves no time behind; publishing it under a name does (ctime)."""
    newest = 0.0
    for path in (base, *base.rglob("*")):
        with contextlib.suppress(OSError):
            newest = max(newest, path.lstat().st_ctime)
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
