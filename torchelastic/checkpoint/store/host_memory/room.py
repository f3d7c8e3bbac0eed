"""Whether there is room for what a save has to allocate: on the tmpfs, and in the memory of this host.

A tmpfs may be larger than the memory that is left, and then the kernel ends processes when it is filled. So both count,
and so does the memory limit of a control group (version 2), by which Docker, Kubernetes and SLURM limit a job: files on
tmpfs are charged to the group that writes them. The kernel reclaims page cache before it ends a process of a group that
has reached its limit, so that counts as free; shared memory does not. (Documentation/admin-guide/cgroup-v2.rst of the
kernel.) Imports no torch.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from torchelastic.checkpoint.errors import CheckpointError, explained, is_full
from torchelastic.processes.control_groups import CGROUP_ROOT, SELF_CGROUP, control_groups, text_of
from torchelastic.text import bytes_text

#: What is left to everybody else on this host: a step allocates too, and so do data loaders.
DEFAULT_MARGIN_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Free:
    """What there is.

    Attributes:
        tmpfs_bytes: how much more fits onto the file system; None: it has no limit of its own (ramfs, size=0).
        ram_bytes: how much can be allocated without swapping, in this control group and on this host.
    """

    tmpfs_bytes: int | None
    ram_bytes: int


@dataclass(frozen=True)
class NotSaved:
    """Why a save is left out: in a decision for all ranks, or in place of the results of the rank that failed.

    Attributes:
        reason: one word: "tmpfs" (too small or too full), "ram" (too little memory is left on the host), "disk" (it
            refused) or "replica" (there is none).
        because: the numbers or the error, and the remedy.
        rank: whose fault it is.
    """

    reason: str
    because: str
    rank: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.because}"


def why_no_room(needed_bytes: int, free: Free, margin_bytes: int = DEFAULT_MARGIN_BYTES) -> NotSaved | None:
    """Why a save may not allocate what it needs; None if it may. Pure.

    A save that needs nothing, because it goes into slots that are there, always fits. The margin is taken off the
    memory alone: a tmpfs that is full refuses more, and harms nobody.

    Args:
        needed_bytes: what all ranks of this host allocate for it together, beside what they hold already.
        free: what there is on that host.
        margin_bytes: how much memory is left alone.

    Raises:
        ValueError: a number is negative.
    """
    if min(needed_bytes, free.tmpfs_bytes or 0, free.ram_bytes, margin_bytes) < 0:
        raise ValueError(f"bytes cannot be negative: needed {needed_bytes}, {free}, margin {margin_bytes}")
    tmpfs = "no limit" if free.tmpfs_bytes is None else bytes_text(free.tmpfs_bytes)
    stays = f" ({bytes_text(margin_bytes)} of them stay)" if margin_bytes else ""
    numbers = (
        f"it has to allocate {bytes_text(needed_bytes)}; there are {tmpfs} on the tmpfs, and "
        f"{bytes_text(free.ram_bytes)} of memory{stays}"
    )
    if free.tmpfs_bytes is not None and needed_bytes > free.tmpfs_bytes:
        return NotSaved(
            "tmpfs",
            f"{numbers}: make the tmpfs larger (`mount -o remount,size=...`; `--shm-size` for docker; `sizeLimit` of a "
            "volume of Kubernetes with `medium: Memory`), give a folder on a larger one, or remove what dead jobs have "
            "left there (`torchelastic checkpoint prune --dead`)",
        )
    if needed_bytes and needed_bytes + margin_bytes > free.ram_bytes:
        return NotSaved(
            "ram",
            f"{numbers}: remove what dead jobs have left there (`torchelastic checkpoint prune --dead`), raise the "
            "memory limit of the container, or save on hosts with more memory",
        )
    return None


def measure(
    path: Path,
    *,
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs,
    host_available_bytes: Callable[[], int] = lambda: int(psutil.virtual_memory().available),
    cgroup_root: Path = CGROUP_ROOT,
    self_cgroup: Path = SELF_CGROUP,
) -> Free:
    """What there is now; on any thread, in about 0.2 ms.

    Args:
        path: a folder on the tmpfs.
        statvfs: asks a file system.
        host_available_bytes: asks the host (`MemAvailable` of /proc/meminfo: without swapping, page cache counted in).
        cgroup_root: where control groups are mounted.
        self_cgroup: names those of this process.

    Raises:
        CheckpointError: the path is not there.
    """
    with explained("ask for the room on a file system", path):
        status = statvfs(path)
    tmpfs_bytes = status.f_bavail * status.f_frsize if status.f_blocks else None
    return Free(tmpfs_bytes, free_ram_bytes(host_available_bytes, cgroup_root, self_cgroup))


def free_ram_bytes(
    host_available_bytes: Callable[[], int] = lambda: int(psutil.virtual_memory().available),
    cgroup_root: Path = CGROUP_ROOT,
    self_cgroup: Path = SELF_CGROUP,
) -> int:
    """`Free.ram_bytes`; arguments as of `measure`."""
    ram_bytes, limit_bytes = host_available_bytes(), cgroup_available_bytes(cgroup_root, self_cgroup)
    return ram_bytes if limit_bytes is None else min(ram_bytes, limit_bytes)


def require_tmpfs_room(needed_bytes: int, folder: Path) -> None:
    """To try what cannot succeed takes all that is left there for a moment. Raises: CheckpointError (`is_full`)."""
    if why_no_room(needed_bytes, measure(folder), margin_bytes=0) is not None:
        raise CheckpointError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def shortage(error: CheckpointError, needed_bytes: int, folder: Path) -> CheckpointError:
    """What to say of a slot that was refused: how much it needs, what there is, and the remedy.

    Args:
        error: the refusal; comes back as it is where it was not for lack of room.
        needed_bytes: how large the slot was to be.
        folder: where; asked how much room is left.
    """
    if not is_full(error):
        return error
    try:
        why = why_no_room(needed_bytes, measure(folder), margin_bytes=0)
    except CheckpointError:
        why = None  # it is gone by now
    # it has room by now, or is not short of bytes (a quota, too many files)
    because = why.because if why else f"it has to allocate {bytes_text(needed_bytes)}: {os.strerror(error.errno or 0)}"
    return CheckpointError(error.errno, f"there is no room for a shard in memory: {because}", str(folder))


def held_bytes(folder: Path) -> int:
    """How much memory the files in a folder take, hidden ones too; what goes away meanwhile is not counted."""
    seen: dict[tuple[int, int], int] = {}
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                status = (Path(where) / name).lstat()
            except OSError:
                continue
            seen[(status.st_dev, status.st_ino)] = status.st_blocks * 512  # a slot has two names for a moment
    return sum(seen.values())


# --- control groups ---------------------------------------------------------------------------------------------------


def cgroup_available_bytes(root: Path = CGROUP_ROOT, self_cgroup: Path = SELF_CGROUP) -> int | None:
    """What the strictest of the groups of this process still allows; None: no group has a limit.

    Args:
        root: where they are mounted.
        self_cgroup: names the lowest one.
    """
    found = [left for group in control_groups(root, self_cgroup) if (left := _left(group)) is not None]
    return min(found, default=None)


def _left(group: Path) -> int | None:
    limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(group, name)) is not None]
    used = _number(group, "memory.current")
    if not limits or used is None:
        return None
    cache = _of_stat(group, "inactive_file") + _of_stat(group, "active_file")
    return max(0, min(limits) - used + cache)


def _number(group: Path, name: str) -> int | None:
    """None for a file that is not there, or says `max`."""
    text = text_of(group, name)
    return int(text) if text.isdecimal() else None


def _of_stat(group: Path, name: str) -> int:
    lines = text_of(group, "memory.stat").splitlines()
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)
