"""The file `.job` in the container of a job: whose it is, and, by its lock, whether the job still lives on this host.

Every process that uses the container holds a shared lock (flock) on the file; the kernel takes it away when the last of
them ends, however it ends. Whoever gets it exclusively has the container for himself, and may remove it; see `dead.py`.
The content of a file never changes: another one takes its place. So who has locked it looks whether it is still there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import secrets
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.shards.disk import Disk, lock_file
from torchelastic.checkpoint.store.save_id import STAGING_PREFIX

JOB_FILE = ".job"
VERSION = 1
_MAX_BYTES = 65536


@dataclass(frozen=True)
class JobRecord:
    """What the file says.

    Attributes:
        run_id: of the job that claimed the container first; None: it has none.
        boot_id: of the kernel under which that was: a lock proves nothing about what an earlier one has left.
        created_s: when it was, in seconds of wall time.
    """

    run_id: str | None
    boot_id: str
    created_s: float


def encode_record(record: JobRecord) -> bytes:
    """The record as JSON."""
    return json.dumps({"version": VERSION, **asdict(record)}, sort_keys=True).encode() + b"\n"


def decode_record(data: bytes) -> JobRecord:
    """The inverse of `encode_record`.

    Raises:
        CorruptCheckpointError: it is no record.
    """
    try:
        document = json.loads(data)
        run_id, boot_id, created_s = document["run_id"], document["boot_id"], float(document["created_s"])
        if document["version"] != VERSION:
            raise ValueError(f"version {document['version']!r}")
        if not isinstance(run_id, (str, type(None))) or not isinstance(boot_id, str) or not math.isfinite(created_s):
            raise TypeError("no names and no time")
        return JobRecord(run_id, boot_id, created_s)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise CorruptCheckpointError(f"it does not say whose container this is ({error!r})") from error


def open_job_file(base: Path) -> int | None:
    """A descriptor to read and lock the file of a container; None: there is none. Close it to let the lock go.

    Raises:
        CheckpointError: it cannot be opened, is no file, or belongs to another user.
    """
    path = base / JOB_FILE
    try:
        with explained("open the claim of a container", path):
            # O_NONBLOCK: a pipe that somebody put there must not stop us
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except CheckpointError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise CheckpointError(
            f"{path} is no file of this user (but of user {status.st_uid}): give the job a container of its own"
        )
    return descriptor


def read_record(descriptor: int, base: Path) -> JobRecord:
    """What an open file says.

    Raises:
        CorruptCheckpointError: nothing that can be understood; names the remedy.
    """
    path = base / JOB_FILE
    try:
        with explained("read the claim of a container", path):
            return decode_record(os.pread(descriptor, _MAX_BYTES, 0))
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{path}: {error}; remove {base} if no job uses it") from error


def is_current(descriptor: int, base: Path) -> bool:
    """Whether an open file is still that of the container: ask after locking it."""
    try:
        return os.path.samestat(os.fstat(descriptor), (base / JOB_FILE).lstat())
    except OSError:
        return False


def put_job_file(base: Path, record: JobRecord, disk: Disk, *, instead: bool) -> int | None:
    """Writes the file, complete and locked (shared) from the moment on at which others see it.

    Args:
        base: the container.
        record: what it is to say.
        disk: what touches files.
        instead: replace the one that is there, which the caller has locked exclusively.

    Returns:
        A descriptor that holds the lock; None: there is one already, or the container was removed meanwhile.

    Raises:
        CheckpointError: the disk refuses.
    """
    hidden = base / f"{STAGING_PREFIX}job-{secrets.token_hex(8)}"  # a left-over goes with those of the slots
    descriptor = -1
    try:
        descriptor = disk.create(hidden)
        disk.write(descriptor, [memoryview(encode_record(record))], hidden)
        with explained("lock the claim of a container", hidden):
            lock_file(descriptor, fcntl.LOCK_SH)
        (disk.rename if instead else disk.publish)(hidden, base / JOB_FILE)
        return descriptor
    except BaseException as error:
        if descriptor >= 0:
            os.close(descriptor)
            _forget(hidden, disk)
        if isinstance(error, CheckpointError) and error.errno in (errno.EEXIST, errno.ENOENT):
            return None
        raise


def _forget(hidden: Path, disk: Disk) -> None:
    try:
        disk.remove(hidden)
    except CheckpointError:
        pass  # the first error is the one to see; the next writer of this folder removes what is hidden
