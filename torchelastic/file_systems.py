"""Which file system a path lies on, and how one says that it does not have a call."""

from __future__ import annotations

import enum
import errno
import os
from pathlib import Path

#: ENOTSUPP of the Linux kernel, which some network file systems pass on (Lustre, NFS); not EOPNOTSUPP, and no C library
#: has a name for it.
KERNEL_ENOTSUPP = 524
_ABSENT = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, KERNEL_ENOTSUPP})


class Call(enum.Enum):
    """What not every file system has; the value completes "has no ...".

    >>> Call.LINK.is_absent_by(errno.EPERM), Call.FSYNC.is_absent_by(errno.EPERM)
    (True, False)
    """

    FLOCK = "locks (flock)"
    LINK = "hard links (link)"
    FSYNC = "fsync of files"
    FSYNC_FOLDER = "fsync of folders"
    RENAME_OVER = "rename over an existing file"
    RENAME_FOLDER = "rename of folders"
    RENAME_OPEN = "rename of open files"
    OPEN_READ_WRITE = "files that are open for reading and writing (O_RDWR)"
    FALLOCATE = "reserving of room (fallocate)"
    MMAP = "memory maps of files (mmap)"

    def is_absent_by(self, number: int | None) -> bool:
        """Whether a file system that answers this call with this errno does not have it, or may not.

        Args:
            number: the errno.
        """
        return number in _ABSENT or number in _ABSENT_BY.get(self, frozenset())


#: What besides says so, by the manual pages and by what file systems answer.
_ABSENT_BY = {
    Call.FLOCK: frozenset({errno.ENOLCK, errno.EINVAL}),  # no other call of ours is invalid; GPFS, where it is off
    # EPERM: link(2) has it for file systems without links; AFS has none from one folder into another (EXDEV), EIO was
    # seen of SeaweedFS
    Call.LINK: frozenset({errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EIO}),
    Call.FSYNC: frozenset({errno.EINVAL}),
    Call.FSYNC_FOLDER: frozenset({errno.EINVAL, errno.EPERM, errno.EACCES, errno.EBADF, errno.EISDIR}),
    Call.RENAME_OVER: frozenset({errno.EPERM, errno.EEXIST, errno.EXDEV, errno.EINVAL}),
    # EXDEV: layers of overlayfs; EMFILE: what gcsfuse says of a folder with more objects than it moves one by one
    Call.RENAME_FOLDER: frozenset({errno.EXDEV, errno.EMFILE}),
    Call.RENAME_OPEN: frozenset({errno.EBUSY, errno.ETXTBSY}),  # gcsfuse has EOPNOTSUPP, SMB the others
    Call.OPEN_READ_WRITE: frozenset({errno.EINVAL}),
    Call.FALLOCATE: frozenset({errno.EINVAL}),
    Call.MMAP: frozenset({errno.ENODEV}),
}


def reason_of(number: int) -> str:
    """What the system says of an errno.

    >>> reason_of(KERNEL_ENOTSUPP)
    'Operation not supported (error 524 of the kernel)'
    """
    if number == KERNEL_ENOTSUPP:
        return f"{os.strerror(errno.EOPNOTSUPP)} (error 524 of the kernel)"
    return os.strerror(number)


def file_system_of(path: Path) -> str:
    """The type of the file system that a path lies on; "" if nobody knows."""
    import psutil  # here: every room may raise the errors that name a file system

    real = str(path.resolve())
    mounted = [one for one in psutil.disk_partitions(all=True) if _is_below(real, one.mountpoint)]
    # what was mounted last hides what was there before
    return max(mounted, key=lambda one: len(one.mountpoint)).fstype if mounted else ""


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")  # as text: there may be hundreds of mounts


def is_in_memory(path: Path) -> bool:
    """Whether a path lies on a file system that is memory (tmpfs, ramfs), so that its pages are never read again."""
    return file_system_of(path) in ("tmpfs", "ramfs")
