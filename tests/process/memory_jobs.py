"""Jobs that have a container on a real tmpfs, live in processes of their own, and are killed; for the tests of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from tests.process.fork_server import living
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk
from torchelastic.checkpoint.store.fence import FENCE_LOCK_NAME, Fence
from torchelastic.checkpoint.store.host_memory.dead_jobs import JOB_FILE
from torchelastic.checkpoint.store.owner import FENCE_NAME
from torchelastic.file_systems import is_in_memory

#: What is in a container in which nothing was saved.
EMPTY = [FENCE_NAME, FENCE_LOCK_NAME, JOB_FILE]


@contextlib.contextmanager
def entered(base: Path, run_id: str = "", *, disk: Disk = REAL_DISK) -> Iterator[str]:
    """This process takes part in a job that uses a container, as one that opens it; gives the run that has it."""
    fence = Fence(base, disk, owner_lock=JOB_FILE)
    try:
        yield fence.enter(run_id)
    finally:
        fence.release()


@contextlib.contextmanager
def tmpfs_folder() -> Iterator[Path]:
    """A folder in this host's memory."""
    if not is_in_memory(Path("/dev/shm")):
        pytest.skip("/dev/shm is no tmpfs here")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def living_job(base: Path, run_id: str = "") -> AbstractContextManager[psutil.Process]:
    """A process that has entered a container; it lives until the end of the block, or until it is killed."""
    return living(_enter, base, run_id)


def _enter(base: Path, run_id: str) -> object:
    job = entered(base, run_id)
    job.__enter__()
    return job


def dead_job(base: Path, run_id: str = "", size_bytes: int = 4096) -> Path:
    """A container with one step, which no process uses."""
    save = base / "step-000000020.e1.r0.g0.5f0c1a2b"
    save.mkdir(parents=True)
    (save / "shard-00000-of-00002.shard").write_bytes(b"x" * size_bytes)
    (base / ".tmp-1-slot").write_bytes(b"y" * size_bytes)
    with entered(base, run_id):  # last, so that tmpfs lists it first
        pass
    return base


def content(base: Path) -> list[str]:
    return sorted(str(path.relative_to(base)) for path in base.rglob("*") if path.is_file())


def is_held(base: Path) -> bool:
    descriptor = os.open(base / JOB_FILE, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
