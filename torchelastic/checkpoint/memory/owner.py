"""Who owns the memory of a container, and whether its job still lives on this host; what dead jobs have left goes.

The file `.job` in a container says whose it is. Every process that uses the container holds a shared lock (flock) on
it; the kernel takes that away when the last of them ends, however it ends. The content of a file never changes: another
one takes its place. So who has locked it looks whether it is still there.

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
import errno
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.memory.room import held_bytes
from torchelastic.checkpoint.shards.disk import REAL_DISK, Disk, is_in_memory
from torchelastic.checkpoint.store.save_id import STAGING_PREFIX
from torchelastic.foreign_json import Amount, RecordError, converted, decode_object
from torchelastic.processes.file_locks import lock_file, lock_of_nobody
from torchelastic.processes.identity import boot_id

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
    created_s: Amount


def encode_record(record: JobRecord) -> bytes:
    """The record as JSON."""
    return json.dumps({"version": VERSION, **asdict(record)}, sort_keys=True).encode() + b"\n"


def decode_record(data: bytes) -> JobRecord:
    """The inverse of `encode_record`.

    Raises:
        CorruptCheckpointError: it is no record.
    """
    try:
        document = decode_object("it", data, most_bytes=_MAX_BYTES)
        if document.get("version") != VERSION:
            raise RecordError(f"version {document.get('version')!r}")
        return converted("it", document, JobRecord)
    except RecordError as error:
        raise CorruptCheckpointError(f"it does not say whose container this is ({error})") from error


class Claim:
    """The file `.job` of a container, open; while it is locked (shared), the container is in use.

    The lock belongs to the open file, which a fork shares: the container is in use until the process that has claimed
    it and all its forks (the workers of a data loader, say) have ended or closed theirs. A new program (exec, spawn)
    does not get it; one that writes into the container should claim it itself.

    Attributes:
        base: the container.
        record: what its file says of the job.
    """

    def __init__(self, base: Path, record: JobRecord, descriptor: int) -> None:
        self.base = base
        self.record = record
        self._descriptor = descriptor

    @property
    def is_current(self) -> bool:
        """Whether it still is the file of the container: ask after locking it."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), (self.base / JOB_FILE).lstat())
        except OSError:
            return False

    def lock(self, operation: int) -> bool:
        """See `lock_file`. Raises: BlockingIOError if somebody else holds a lock that excludes this one."""
        return lock_file(self._descriptor, operation)

    def close(self) -> None:
        """This process does not use the container any more; closing again does nothing. Forks keep their share."""
        if self._descriptor >= 0:
            os.close(self._descriptor)  # no LOCK_UN: that would take the lock away from forks too
            self._descriptor = -1

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(f"the claim on {self.base} cannot be sent to another process: claim the container there")

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_claim(base: Path) -> Claim | None:
    """The file of a container, not locked yet; None: there is none.

    Raises:
        CorruptCheckpointError: nothing in it can be understood; names the remedy.
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
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise CheckpointError(
                f"{path} is no file of this user (but of user {status.st_uid}): give the job a container of its own"
            )
        with explained("read the claim of a container", path):
            return Claim(base, decode_record(os.pread(descriptor, _MAX_BYTES, 0)), descriptor)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, CorruptCheckpointError):
            raise CorruptCheckpointError(f"{path}: {error}; remove {base} if no job uses it") from error
        raise


def put_claim(base: Path, record: JobRecord, disk: Disk, *, instead: bool) -> Claim | None:
    """Writes the file, complete and locked (shared) from the moment on at which others see it.

    Args:
        base: the container.
        record: what it is to say.
        disk: what touches files.
        instead: replace the one that is there, which the caller has locked exclusively.

    Returns:
        None: there is one already, or the container was removed meanwhile.

    Raises:
        CheckpointError: the disk refuses.
    """
    hidden = base / f"{STAGING_PREFIX}job-{secrets.token_hex(8)}"  # a left-over goes with those of the slots
    made: Claim | None = None
    try:
        descriptor = disk.create(hidden)
        made = Claim(base, record, descriptor)
        disk.write(descriptor, [memoryview(encode_record(record))], hidden)
        with explained("lock the claim of a container", hidden):
            made.lock(fcntl.LOCK_SH)
        (disk.rename if instead else disk.publish)(hidden, base / JOB_FILE)
        return made
    except BaseException as error:
        if made is not None:
            made.close()
            with contextlib.suppress(CheckpointError):  # the first error is the one to see
                disk.remove(hidden)  # else the next writer of this folder removes what is hidden
        if isinstance(error, CheckpointError) and error.errno in (errno.EEXIST, errno.ENOENT):
            return None
        raise


# --- dead jobs --------------------------------------------------------------------------------------------------------


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
        found = open_claim(base)
    except CheckpointError:
        found = None
    if found is None:
        yield None
        return
    with found:
        yield found.record if _is_dead(found) else None


def _is_dead(found: Claim) -> bool:
    try:
        is_locked = found.lock(fcntl.LOCK_EX)
    except BlockingIOError:
        return False
    is_ours_alone = is_locked and found.is_current and found.record.boot_id == boot_id()
    return is_ours_alone and is_in_memory(found.base) and not _is_in_use(found.base)


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


def _look_at(base: Path, record: JobRecord) -> DeadJob:
    return DeadJob(base, record.run_id, record.created_s, _changed_s(base), held_bytes(base))


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
