"""Temporary folders that go when the process that uses them has ended, also if it was killed.

    <folder for temporary files>/<prefix>k3x9_q2a/.lock    locked (flock) as long as that process lives

A process that is killed removes nothing. So whoever makes the next folder with the same prefix removes those that
nobody holds any more; one whose children have left something running stays until that has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from torchelastic.processes.file_locks import lock_file, lock_of_nobody
from torchelastic.processes.held_files import HeldFile
from torchelastic.processes.left_running import left_running

LOCK = ".lock"
#: An empty folder may be one whose process is just about to lock it; one of this age belongs to none that lives.
_UNLOCKED_AGE_S = 3600.0


class OwnFolder:
    """A folder that this process holds, until `remove` or its end. A fork neither holds nor removes it.

    Args:
        path: it is there, empty, and belongs to this user.

    Attributes:
        path: as given.

    Raises:
        OSError: the lock cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        unlocked = path / f"{LOCK}.new"  # nobody looks at it before it is locked
        self._file = HeldFile(os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        lock_file(self._file.descriptor, fcntl.LOCK_EX)
        unlocked.rename(path / LOCK)

    def remove(self) -> None:
        """Removes it with all that is in it, as far as possible; again, or in a fork, this does nothing."""
        if self._file.descriptor < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self._file.close()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def make_folder(prefix: str) -> Path:
    """A new folder for this user alone, below the one for temporary files, which the process that uses it has to hold.

    Args:
        prefix: of its name. Folders of this prefix that nobody holds any more are removed.

    Raises:
        OSError: it cannot be made.
    """
    for old in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours to remove
            _remove_if_dead(old)
    return Path(tempfile.mkdtemp(prefix=prefix))


def _remove_if_dead(folder: Path) -> None:
    status = folder.lstat()
    if status.st_uid != os.geteuid():
        return
    with lock_of_nobody(folder / LOCK) as is_left_over:
        if is_left_over and not left_running(folder):
            shutil.rmtree(folder, ignore_errors=True)
        elif is_left_over is None and time.time() - status.st_mtime > _UNLOCKED_AGE_S:
            folder.rmdir()  # fails unless it is empty
