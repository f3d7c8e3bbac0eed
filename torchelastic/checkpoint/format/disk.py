"""Everything that the engine does to a disk, one method per thing that can fail.

Tests subclass it to kill the process, to write short or to fill the disk at the n-th call; nothing else in this package
creates, writes, renames or removes a file.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from torchelastic.checkpoint.errors import REMEDIES_BY_CALL, CheckpointError, explained
from torchelastic.checkpoint.format.abilities import ALL_ABILITIES, FALLBACKS, FolderAbilities
from torchelastic.file_systems import Call, file_system_of, reason_of
from torchelastic.processes.file_locks import lock_file

log = logging.getLogger(__name__)

#: How hidden files begin; whoever lists a folder passes them over.
HIDDEN = ".tmp-"
#: How often, and after what pause, a file is created again that was taken for a left-over.
CREATE_ATTEMPTS, CREATE_PAUSE_S = 50, 0.01
#: The same of a file that is renamed over one that somebody reads; SMB refuses that, and a manifest is read at once.
RENAME_ATTEMPTS, RENAME_PAUSE_S = 10, 0.02
_OPEN_ELSEWHERE = (errno.EACCES, errno.EBUSY, errno.ETXTBSY)
#: By fsync(2) a file system that orders names by itself says so of a folder: nothing is lacking.
_ORDERS_NAMES = (errno.EINVAL, errno.EOPNOTSUPP)


def remove_tree(path: Path) -> BaseException | None:
    """Removes a folder as far as it can be; returns the first refusal. What is gone already is none."""
    refused: list[BaseException] = []

    def note(_call: object, _path: str, error: BaseException) -> None:
        if not isinstance(error, FileNotFoundError):
            refused.append(error)

    if sys.version_info >= (3, 12):
        shutil.rmtree(path, onexc=note)
    else:
        shutil.rmtree(path, onerror=lambda call, name, raised: note(call, name, raised[1]))
    return refused[0] if refused else None


@contextmanager
def replacing(path: Path, hidden: Path, mode: Literal["w", "xb"]) -> Iterator[IO[Any]]:
    """A new file, which takes the place of `path` in one step when it is on the disk; removed where anything fails.

    Args:
        path: there may be a file. Its folder is not made durable: see `Disk.sync_folder`.
        hidden: what it is called until then; in the same folder.
        mode: to open it.

    Raises:
        OSError: the disk refuses.
    """
    try:
        with hidden.open(mode) as file:
            yield file
            file.flush()
            with explained("write to the disk", path, Call.FSYNC):
                os.fsync(file.fileno())
        with explained("replace a file", path, Call.RENAME_OVER):
            hidden.replace(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


class Disk:
    """The real one. Every method that fails raises a `CheckpointError`, which names the place and the remedy.

    What its file systems do not have is found out by the first call that fails, and done in another way from then on,
    by all that write with this object.
    """

    @functools.cached_property
    def _abilities(self) -> dict[int, FolderAbilities]:
        return {}  # by device: a folder has as many as its file system

    def abilities(self, folder: Path) -> FolderAbilities:
        """What the file system of a folder can do, as far as it was found out. Raises: CheckpointError."""
        if not self._abilities:
            return ALL_ABILITIES
        with explained("look at the folder", folder):
            return self._abilities.get(folder.stat().st_dev, ALL_ABILITIES)

    def forget_abilities(self) -> None:
        """What was found out counts no more: the same device has another file system's behaviour from now on."""
        self._abilities.clear()

    def note_lack(self, call: Call, folder: Path, error: OSError | None = None) -> None:
        """From now on nobody tries this call on the file system of a folder; said once, if it costs something.

        Args:
            call: has a fallback.
            folder: it is there.
            error: what it has answered; None: it did not say.
        """
        with explained("look at the folder", folder):
            device = folder.stat().st_dev
        known = self._abilities.get(device, ALL_ABILITIES)
        if not known.has(call):
            return
        self._abilities[device] = known.without(call)
        self.report_lack(call, folder, error)

    def report_lack(self, call: Call, folder: Path, error: OSError | None) -> None:
        """Says in the log what is lacking, and what follows; called once for each, see `note_lack`."""
        fallback, system = FALLBACKS[call], file_system_of(folder)
        reason = "" if error is None or error.errno is None else f": {reason_of(error.errno)}"
        remedy = REMEDIES_BY_CALL.get(call)
        log.log(
            logging.WARNING if fallback.costs else logging.INFO,
            "the file system of %s%s has no %s%s; so %s%s",
            folder, f" ({system})" if system else "", call.value, reason,
            fallback.instead, f". To have it, {remedy}" if remedy else "",
        )  # fmt: skip

    def _is_absent(self, call: Call, error: CheckpointError, folder: Path) -> bool:
        if not call.is_absent_by(error.errno):
            return False
        self.note_lack(call, folder, error)
        return True

    def create(self, path: Path) -> int:
        """Creates a file that must not exist yet, locks it (flock), and returns a descriptor to read and write it.

        The lock tells others on this host that its writer lives: see `pool.remove_left_overs`.
        """
        with explained("create a file of the checkpoint", path, Call.OPEN_READ_WRITE):
            descriptor = self._create_locked(path, may_exist=False)
            for _ in range(CREATE_ATTEMPTS):
                if descriptor is not None:
                    return descriptor
                time.sleep(CREATE_PAUSE_S)
                descriptor = self._create_locked(path, may_exist=True)
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))

    def _create_locked(self, path: Path, *, may_exist: bool) -> int | None:
        """None where somebody took the file for a left-over, in the moment between its creation and its lock.

        That file is left to whoever took it: two removals of one name could hit the next file of that name.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            if may_exist:
                return None
            raise
        try:
            if not lock_file(descriptor, fcntl.LOCK_EX):
                self.note_lack(Call.FLOCK, path.parent)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        os.close(descriptor)
        return None

    def allocate(self, descriptor: int, size_bytes: int, path: Path) -> None:
        """Reserves room, so that writing through a memory map cannot run out of it."""
        with explained("reserve room for the checkpoint", path, Call.FALLOCATE):
            os.posix_fallocate(descriptor, 0, size_bytes)

    def store(self, memory: memoryview, begin: int, data: bytes) -> None:
        """Writes into a memory map."""
        memory[begin : begin + len(data)] = data

    def write(self, descriptor: int, buffers: Sequence[memoryview], path: Path) -> None:
        """Writes all of the buffers at the position of the descriptor, also where the system writes only a part."""
        with explained("write the checkpoint", path):
            for buffer in buffers:
                left = buffer
                while left.nbytes:
                    written = self.write_some(descriptor, left)
                    if written <= 0:
                        raise OSError(errno.EIO, os.strerror(errno.EIO))
                    left = left[written:]

    def write_some(self, descriptor: int, buffer: memoryview) -> int:
        """One system call; returns how many bytes were taken."""
        return os.write(descriptor, buffer)

    def write_at(self, descriptor: int, data: bytes, begin: int, path: Path) -> None:
        """Writes at a place; the position stays."""
        with explained("write the checkpoint", path):
            while data:
                written = os.pwrite(descriptor, data, begin)
                if written <= 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                data, begin = data[written:], begin + written

    def sync(self, descriptor: int, path: Path) -> None:
        """Returns when the file is on the disk."""
        with explained("write the checkpoint", path, Call.FSYNC):
            os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Returns when the names in a folder are on the disk, or its file system does not know how."""
        if not self.abilities(path).has(Call.FSYNC_FOLDER):
            return
        try:
            with explained("publish the checkpoint", path):
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with explained("publish the checkpoint", path, Call.FSYNC_FOLDER):
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except CheckpointError as error:
            if error.errno not in _ORDERS_NAMES and not self._is_absent(Call.FSYNC_FOLDER, error, path):
                raise

    def rename(self, source: Path, target: Path) -> None:
        """Gives a file or folder another name in one step; a file of that name is replaced."""
        with explained("publish the checkpoint", target, Call.RENAME_OVER):
            for _ in range(RENAME_ATTEMPTS - 1):
                try:
                    source.rename(target)
                    return
                except OSError as error:
                    if error.errno not in _OPEN_ELSEWHERE or not os.path.lexists(target):
                        raise
                time.sleep(RENAME_PAUSE_S)
            source.rename(target)

    def rename_folder(self, source: Path, target: Path) -> bool:
        """`rename` of a folder; false, and nothing has changed, where the file system does not have that."""
        if not self.abilities(source.parent).has(Call.RENAME_FOLDER):
            return False
        try:
            self.rename(source, target)
        except CheckpointError as error:
            if self._is_absent(Call.RENAME_FOLDER, error, source.parent):
                return False
            raise
        return True

    def rename_files(self, source: Path, target: Path, last: str) -> None:
        """Moves all files of a folder into another one, which is made; for where folders cannot be renamed.

        Args:
            source: of the same file system; stays, empty but for what is hidden.
            target: so long as it does not have the last file, nobody may take it for whole.
            last: the name of that; moved when the others have their names on the disk.
        """
        with explained("publish the checkpoint", source):
            files = sorted(entry.name for entry in os.scandir(source))
        self.make_folder(target)
        for file in [file for file in files if file != last and not file.startswith(HIDDEN)]:
            self.rename(source / file, target / file)
        self.sync_folder(target)
        self.rename(source / last, target / last)
        self.sync_folder(target)

    def publish(self, source: Path, target: Path) -> None:
        """Gives a file a name that must not be taken yet, in one step.

        Where there are no links, the name is taken by an empty file in the step before: who is killed between the two
        leaves that, which no reader takes for a shard.
        """
        if self.abilities(target.parent).has(Call.LINK):
            try:
                with explained("publish the checkpoint", target, Call.LINK):
                    os.link(source, target)
            except CheckpointError as error:
                if not self._is_absent(Call.LINK, error, target.parent):
                    raise
            else:
                try:
                    self.remove(source)
                except CheckpointError:
                    pass  # it is published; the other name is a left-over, and is removed as one
                return
        with explained("publish the checkpoint", target):
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        try:
            self.rename(source, target)
        except BaseException:
            self.remove(target)
            raise

    def remove(self, path: Path) -> None:
        """Removes a file; it may be gone already."""
        with explained("remove a file of a checkpoint", path):
            path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Removes a folder and all that is in it, also where a part is refused or gone; it may be gone already."""
        with explained("remove a checkpoint", path):
            refused = remove_tree(path)
            if refused is not None:
                raise refused

    def make_folder(self, path: Path) -> None:
        """Creates a folder and its parents; it may exist."""
        with explained("create a folder for checkpoints", path):
            path.mkdir(parents=True, exist_ok=True)


#: What is used where the caller gives none.
REAL_DISK = Disk()
