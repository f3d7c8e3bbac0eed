"""Which processes of this host hold the lock of a file now: as /proc shows it, for errors that say whom to end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchelastic.processes.family import command_text
from torchelastic.processes.identity import Process
from torchelastic.text import shortlist

_PROC = Path("/proc")


@dataclass(frozen=True)
class LockHolder:
    """A process that has a lock.

    Attributes:
        pid: its number.
        command: its command line, shortened; empty: it shows none.
    """

    pid: int
    command: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})" if self.command else f"process {self.pid}"


def holders_of(path: Path) -> list[LockHolder]:
    """Who holds a lock (flock) on a file, by pid; without those that this process does not see.

    A lock belongs to an open file, which processes share that were forked. So /proc/PID/fdinfo (proc(5)) counts, and
    not the process that /proc/locks has: it took the lock, and may have ended. Other users' descriptors are not shown:
    of those /proc/locks is all there is.

    Args:
        path: the file; empty where it is gone.
    """
    try:
        inode, path = path.stat().st_ino, path.resolve()
    except OSError:
        return []
    pids = [int(entry.name) for entry in _PROC.glob("[0-9]*") if _has_locked(entry, inode, path)]
    if not pids:
        pids = [pid for pid in _in_table(inode) if Process.of(pid).started_ticks >= 0]
    return [LockHolder(pid, command_text(pid)) for pid in sorted(set(pids))]


def holders_text(holders: Sequence[LockHolder]) -> str:
    """Who holds it, and how to end that; for an error.

    >>> holders_text([LockHolder(7, "python train.py")])
    'process 7 (python train.py) holds it: wait until it has ended, or end it (`kill 7`)'
    """
    kill = f"`kill {' '.join(str(holder.pid) for holder in holders)}`"
    if len(holders) == 1:
        return f"{holders[0]} holds it: wait until it has ended, or end it ({kill})"
    return f"{shortlist([str(holder) for holder in holders])} hold it: wait until they have ended, or end them ({kill})"


def _has_locked(process: Path, inode: int, path: Path) -> bool:
    """Whether one of its descriptors has a lock on the file."""
    with suppress(OSError):  # it has ended, or is another user's
        for entry in (process / "fd").iterdir():
            with suppress(OSError):
                # by name first, which asks no file system: one that hangs must not hold this up
                if entry.readlink() == path:
                    lines = (process / "fdinfo" / entry.name).read_text().splitlines()
                    if any(_inode_in(line) == inode for line in lines if line.startswith("lock:")):
                        return True
    return False


def _in_table(inode: int) -> list[int]:
    """The processes that have taken a lock on a file with this number."""
    try:
        lines = (_PROC / "locks").read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[4]) for line in lines if _inode_in(line) == inode]


def _inode_in(line: str) -> int | None:
    """Of a line such as `1: FLOCK  ADVISORY  READ 4711 fe:00:2146340 0 EOF`; None: of no flock."""
    words = line.removeprefix("lock:").split()
    return int(words[5].rpartition(":")[2]) if len(words) > 5 and words[1] == "FLOCK" else None
