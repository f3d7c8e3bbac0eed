"""A private folder with a link to each container, by which the processes of one program know each other's containers.

The process that makes it holds a lock as long as it lives, so that what a killed one has left is found and removed.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from torchelastic.checkpoint.shards.disk import lock_file, lock_of_nobody

_PREFIX = "torchelastic-containers-"
_LOCK = ".lock"


def new_registry() -> Path:
    """Makes one, which goes when this process ends; those of processes that were killed go at once."""
    for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _remove_if_dead(old)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mode 0700
    atexit.register(_remove, folder, os.getpid())
    unlocked = folder / f"{_LOCK}.new"
    descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)  # open until the end
    lock_file(descriptor, fcntl.LOCK_EX)
    unlocked.rename(folder / _LOCK)
    return folder


def registered_in(folder: Path) -> list[str]:
    """The names of the containers in a registry; none if it is gone."""
    try:
        return [link.name for link in folder.iterdir() if not link.name.startswith(_LOCK)]
    except FileNotFoundError:
        return []


def _remove_if_dead(folder: Path) -> None:
    with lock_of_nobody(folder / _LOCK) as is_left_over:  # one that is being made has no such file yet
        if is_left_over:
            shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a process that was forked
        shutil.rmtree(folder, ignore_errors=True)
