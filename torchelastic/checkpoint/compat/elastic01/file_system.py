"""Checkpoints as folders `<checkpoint_dir>/<sequence id>`, published by one rename.

Works on every file system whose rename is atomic (local ones, NFS, Lustre), also when several processes or hosts write
into the same folder. Object stores mounted as folders usually have no such rename.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from torchelastic.checkpoint.checkpoint_manager import Checkpoint, CheckpointManager
from torchelastic.checkpoint.compat.elastic01.output_stream import OutputStream
from torchelastic.checkpoint.compat.elastic01.staging import (
    delete_stale,
    make_staging_folder,
    new_staging_path,
    remove_folder,
    staging_dirs,
    take_over,
)
from torchelastic.checkpoint.compat.elastic01.verification import find_damage, open_verified
from torchelastic.checkpoint.errors import CheckpointError, FencedError, explained
from torchelastic.checkpoint.format.disk import REAL_DISK
from torchelastic.checkpoint.store.kinds import Kind, require_own_folder
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME, encode_streams
from torchelastic.file_systems import Call

log = logging.getLogger(__name__)

# How a rename says that its target exists: a folder that is not empty, or a file.
_TAKEN_ERRNOS = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})


class FileSystemCheckpoint(Checkpoint):
    """One checkpoint in a folder; constructing it touches nothing.

    A new one is written into a hidden folder beside the others and renamed by `commit`. Used by one thread at a time.

    Args:
        sequence_id: its id. If somebody else publishes this id first, `commit` takes the next free one; nothing is ever
            overwritten.
        checkpoint_dir: the folder that holds all checkpoints; it must exist when a stream is opened.
        after_commit: called once, after the checkpoint was published.
        staging_dir: where it is written until then, on the same file system; gone if this writer was replaced. Default:
            `checkpoint_dir`.

    Attributes:
        sequence_id: the id; final after `commit`. Higher is newer. Gaps are normal.
    """

    def __init__(
        self,
        sequence_id: int,
        checkpoint_dir: str | os.PathLike[str],
        *,
        after_commit: Callable[[], None] | None = None,
        staging_dir: Path | None = None,
    ) -> None:
        self.sequence_id = int(sequence_id)
        self._parent = Path(checkpoint_dir).absolute()
        self._staging_dir = staging_dir or self._parent
        self._after_commit = after_commit
        self._staging: Path | None = None
        self._streams: dict[str, OutputStream] = {}
        self._status: Literal["new", "committed", "discarded"] = "committed" if _is_occupied(self.path) else "new"

    def __repr__(self) -> str:
        return f"FileSystemCheckpoint({self.sequence_id}, {str(self._parent)!r})"

    @property
    def path(self) -> Path:
        """The folder that holds the checkpoint, or will hold it after `commit`."""
        return self._parent / str(self.sequence_id)

    @property
    def is_new(self) -> bool:
        """Whether it can still be written: neither found on the disk, nor committed, nor discarded."""
        return self._status == "new"

    def damage(self) -> str | None:
        """Tells why the stored checkpoint is not complete; None if it is, as far as names and sizes can tell.

        Raises:
            CheckpointError: it cannot be looked at.
        """
        return find_damage(self.path)

    def open_output_stream(self, key: str) -> BinaryIO:
        """Opens a new stream for writing; it accepts what a file accepts, and closing it makes its bytes durable.

        Args:
            key: a file name: not empty, no slash, no dot in front, not `manifest.json`.

        Raises:
            ValueError: the key is none, or was used before in this checkpoint.
            CheckpointError: the checkpoint is committed or discarded, or the file cannot be created. Also raised by the
                stream's own methods, for example when the disk is full.
        """
        self._require_new("written")
        if not key or key.startswith(".") or "/" in key or "\0" in key or key == MANIFEST_NAME:
            raise ValueError(f"{key!r} is no key for a stream: use a file name without slashes that starts with no dot")
        if key in self._streams:
            raise ValueError(f"the stream {key!r} was opened for writing before; use another key, or a new checkpoint")
        if self._staging is None:
            with explained("create a folder for the checkpoint", self._parent), self._fenced():
                self._staging = make_staging_folder(self._staging_dir)
        stream = OutputStream(self._staging / key)
        self._streams[key] = stream
        return stream

    def open_input_stream(self, key: str) -> BinaryIO:
        """Opens a stream for reading after its digest was compared with the manifest (one pass over the file).

        Args:
            key: the stream's key.

        Raises:
            CorruptCheckpointError: the stream is not, or cannot be proven to be, what was saved.
            CheckpointError: not committed, no such stream, or not readable.
        """
        if self._status != "committed":
            raise CheckpointError(f"the checkpoint {self.path} was not committed, so there is nothing to read")
        return open_verified(self.path, key)

    def commit(self) -> None:
        """Makes everything durable and publishes it under `sequence_id`, or under the next free id.

        Streams that are still open are closed.

        Raises:
            FencedError: another process of the run has taken over meanwhile; see `take_over` of the manager.
            CheckpointError: nothing was written, a stream has failed, or the file system refused. What was written is
                then removed, and nothing is published (except where the message says that it was).
        """
        self._require_new("committed")
        if self._staging is None:
            raise CheckpointError(f"nothing was written into the checkpoint {self.path}: open a stream before commit()")
        try:
            with explained("publish the checkpoint", self.path, Call.RENAME_FOLDER), self._fenced():
                self._write_manifest(self._staging)
                self._publish(self._staging)
        except BaseException:
            self.discard()
            raise
        self._staging = None
        self._status = "committed"
        REAL_DISK.sync_folder(self._parent)
        if self._after_commit is not None:
            self._after_commit()

    def discard(self) -> None:
        """Removes what was written and not committed; a failure to remove is logged and not raised."""
        if self._status == "committed":
            return
        self._status = "discarded"
        for stream in self._streams.values():
            stream.abandon()
        if self._staging is not None:
            remove_folder(self._staging)
            self._staging = None

    def _require_new(self, action: str) -> None:
        if self._status != "new":
            raise CheckpointError(
                f"the checkpoint {self.path} is {self._status} and cannot be {action}; take a new one from "
                "create_checkpoint()"
            )

    @contextmanager
    def _fenced(self) -> Iterator[None]:
        """Says so where the system only says that a folder is gone."""
        try:
            yield
        except OSError as error:
            if self._staging_dir.exists():
                raise
            raise FencedError(
                f"this writer was replaced while it saved: another process of its run has taken over {self._parent}; "
                "its checkpoint is not published, and those that were saved since stay the newest"
            ) from error

    def _write_manifest(self, staging: Path) -> None:
        for stream in self._streams.values():
            stream.close()
            if stream.failure is not None:
                raise stream.failure
        manifest = encode_streams({key: stream.record for key, stream in self._streams.items()})
        with (staging / MANIFEST_NAME).open("xb") as file:
            file.write(manifest)
            file.flush()
            with explained("write the checkpoint", self.path, Call.FSYNC):
                os.fsync(file.fileno())
        REAL_DISK.sync_folder(staging)

    def _publish(self, staging: Path) -> None:
        while True:
            try:
                # A rename replaces an empty folder at most, and a published one is never empty.
                staging.rename(self.path)
                return
            except OSError as error:
                if error.errno not in _TAKEN_ERRNOS:
                    raise
            taken_id = self.sequence_id
            self.sequence_id = max(_highest_id(self._parent), taken_id) + 1
            log.info("another writer has published %d in %s; taking %d", taken_id, self._parent, self.sequence_id)


class FileSystemCheckpointManager(CheckpointManager):
    """Keeps checkpoints in the folder `checkpoint_dir`, which is created if it is missing.

    Constructing it proves that the folder can be written, and removes what killed writers have left in it. Used by one
    thread at a time; any number of processes, on any number of hosts, may have a manager for the same folder.

    Args:
        checkpoint_dir: the folder.
        keep: how many of the newest complete checkpoints to keep; the others are deleted after each commit. None keeps
            all. Damaged ones are neither counted nor deleted.

    Attributes:
        place: `checkpoint_dir`.

    Raises:
        ValueError: `checkpoint_dir` is empty, or `keep` is less than 1.
        CheckpointError: the folder cannot be created or written, or holds only what something else has saved.
    """

    def __init__(self, checkpoint_dir: str | os.PathLike[str], *, keep: int | None = None) -> None:
        if not os.fspath(checkpoint_dir):
            raise ValueError("checkpoint_dir is empty: name the folder that shall hold the checkpoints")
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}: give at least 1, or None to keep all checkpoints")
        self._dir = Path(checkpoint_dir).absolute()
        self.place = str(self._dir)
        self._keep = keep
        self._last_created_id = -1
        self._staging_dir: Path | None = None
        with explained("prepare the folder for checkpoints", self._dir):
            _make_durable_folder(self._dir)
            require_own_folder(self._dir, Kind.STREAMS)
            now_s = _write_probe(self._dir)
            for folder in (self._dir, *staging_dirs(self._dir)):
                delete_stale(folder, now_s)

    def __repr__(self) -> str:
        return f"FileSystemCheckpointManager({str(self._dir)!r}, keep={self._keep})"

    def take_over(self, run_id: str) -> None:
        """See `CheckpointManager`: staged checkpoints of the processes before are removed, so they cannot be published.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        self._staging_dir = take_over(self._dir, run_id)

    def create_checkpoint(self) -> FileSystemCheckpoint:
        """Returns a new checkpoint with an id above every other one, committed or not; the first id is 0.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        for sequence_id in itertools.count(max(_highest_id(self._dir), self._last_created_id) + 1):
            checkpoint = FileSystemCheckpoint(
                sequence_id, self._dir, after_commit=self._delete_oldest, staging_dir=self._staging_dir
            )
            if checkpoint.is_new:  # else another writer was faster in this very moment
                break
        self._last_created_id = checkpoint.sequence_id
        return checkpoint

    def get_checkpoint(self, sequence_id: int) -> FileSystemCheckpoint | None:
        """Returns the checkpoint with this id; None if there is none. Reading a damaged one says what is wrong."""
        checkpoint = FileSystemCheckpoint(sequence_id, self._dir)
        return None if checkpoint.is_new else checkpoint

    def get_latest_checkpoint(self) -> FileSystemCheckpoint | None:
        """Returns the newest complete checkpoint; None if there is none.

        Names and sizes are looked at here, digests when a stream is opened. Use `load_latest` to fall back to an older
        one in that case too.
        """
        return next((checkpoint for checkpoint in self.list_candidates() if checkpoint.damage() is None), None)

    def list_checkpoints(self) -> list[FileSystemCheckpoint]:
        """Returns the complete checkpoints, newest first; those of torchelastic 0.1 too."""
        return [checkpoint for checkpoint in self.list_candidates() if checkpoint.damage() is None]

    def list_candidates(self) -> list[FileSystemCheckpoint]:
        """Returns the checkpoints, newest first, whether complete or damaged."""
        checkpoints = (FileSystemCheckpoint(sequence_id, self._dir) for sequence_id in _ids(self._dir))
        return [one for one in checkpoints if not one.is_new]

    def _delete_oldest(self) -> None:
        if self._keep is None:
            return
        try:
            superfluous = self.list_checkpoints()[self._keep :]
        except CheckpointError as error:
            # The new checkpoint is durable: training must not fail because an old one stays.
            log.warning("could not look for old checkpoints to delete: %s", error)
            return
        for checkpoint in reversed(superfluous):
            remove_folder(checkpoint.path)


def _ids(checkpoint_dir: Path) -> list[int]:
    """Every id that a name in the folder claims, highest first."""
    with explained("list the checkpoints", checkpoint_dir):
        names = [path.name for path in checkpoint_dir.iterdir()]
    return sorted((int(name) for name in names if name.isdecimal() and name == str(int(name))), reverse=True)


def _highest_id(checkpoint_dir: Path) -> int:
    return max(_ids(checkpoint_dir), default=-1)


def _is_occupied(folder: Path) -> bool:
    """Whether something was ever written there; 0.1 created empty folders for checkpoints that it never wrote."""
    with explained("look at the checkpoint", folder):
        try:
            return any(folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return False


def _make_durable_folder(folder: Path) -> None:
    """Creates the folder and its parents, so that no power failure takes them away with the checkpoints in them."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        REAL_DISK.sync_folder(path.parent)


def _write_probe(folder: Path) -> float:
    """Proves that checkpoints can be published in the folder; returns the time by the file system's own clock."""
    probe = make_staging_folder(folder)
    try:
        with (probe / "probe").open("xb") as file, explained("write a checkpoint", folder, Call.FSYNC):
            file.write(b"probe")
            os.fsync(file.fileno())
        with explained("publish a checkpoint", folder, Call.RENAME_FOLDER):
            probe = probe.rename(new_staging_path(folder))  # some mounts of object stores cannot do this
        REAL_DISK.sync_folder(folder)
        return (probe / "probe").stat().st_mtime
    finally:
        remove_folder(probe)
