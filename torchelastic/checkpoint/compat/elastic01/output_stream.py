"""A file that knows the digest of what was written into it, and that is on the disk when it is closed."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from torchelastic.checkpoint.errors import CheckpointError, explained
from torchelastic.checkpoint.store.manifest import StreamRecord
from torchelastic.file_systems import Call

if TYPE_CHECKING:
    from typing_extensions import Buffer

_CHUNK_BYTES = 1 << 20


def sha256_of_file(file: BinaryIO) -> str:
    """The SHA-256, in hexadecimal, of everything from the file's position to its end."""
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    while count := file.readinto(chunk):  # type: ignore[attr-defined]  # typeshed's BinaryIO lacks readinto
        digest.update(chunk[:count])
    return digest.hexdigest()


class OutputStream(io.BufferedWriter):
    """A new file for one stream of a checkpoint; `close` makes it durable and fills in `record`.

    The digest is computed while data passes by. Who moves the position, shortens the file or asks for the descriptor
    can put bytes where this object does not see them; then the digest is computed from the file when it is closed.

    Args:
        path: the file to create; it must not exist.

    Attributes:
        failure: the first thing that went wrong with the file. Kept because torch.save hides it behind a RuntimeError
            of its own, and because a stream that has failed once must never be committed.
    """

    def __init__(self, path: Path) -> None:
        with explained("create a stream of the checkpoint", path):
            self._file = io.FileIO(path, "x")
        super().__init__(self._file, _CHUNK_BYTES)
        self.failure: CheckpointError | None = None
        self._path = path
        self._digest = hashlib.sha256()
        self._digested_bytes = 0
        self._all_seen = True
        self._record: StreamRecord | None = None

    @property
    def record(self) -> StreamRecord:
        """What the file holds. Raises: ValueError before the stream was closed."""
        if self._record is None:
            raise ValueError(f"the stream {self._path} was not closed, or could not be")
        return self._record

    def write(self, data: Buffer, /) -> int:
        """Appends bytes. Raises: CheckpointError if the file system does not take them."""
        with self._keeping_failure():
            count = super().write(data)
        if self._all_seen:
            self._digest.update(data)
            self._digested_bytes += count
        return count

    def seek(self, target: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves the position, as in any file."""
        self._all_seen = False
        with self._keeping_failure():
            return super().seek(target, whence)

    def truncate(self, size: int | None = None, /) -> int:
        """Shortens or extends the file, as in any file."""
        self._all_seen = False
        with self._keeping_failure():
            return super().truncate(size)

    def fileno(self) -> int:
        """The descriptor; torch.save writes to it directly in its format of before 1.6."""
        self._all_seen = False
        return super().fileno()

    def flush(self) -> None:
        """Hands what is buffered to the operating system. Raises: CheckpointError if that fails."""
        with self._keeping_failure():
            super().flush()

    def detach(self) -> io.RawIOBase:
        """Not possible: the file would be closed without a record."""
        raise io.UnsupportedOperation("a stream of a checkpoint cannot be detached from its file")

    def close(self) -> None:
        """Writes everything to the disk and fills in `record`; closing again does nothing.

        Raises:
            CheckpointError: what was written could not be made durable, or `failure` from before.
        """
        if self.closed:
            return
        try:
            if self.failure is not None:
                raise self.failure
            with self._keeping_failure():
                super().flush()
                with explained("write the checkpoint", self._path, Call.FSYNC):
                    os.fsync(self._file.fileno())
                self._record = self._measure()
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Closes the file without making anything durable, and without failing."""
        try:
            self._file.close()
        except OSError:
            pass  # nobody wants this file any more

    def _measure(self) -> StreamRecord:
        size_bytes = os.fstat(self._file.fileno()).st_size
        if self._all_seen and size_bytes == self._digested_bytes:
            return StreamRecord(size_bytes, self._digest.hexdigest())
        with self._path.open("rb") as file:
            return StreamRecord(size_bytes, sha256_of_file(file))

    @contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        try:
            with explained("write the checkpoint", self._path):
                yield
        except CheckpointError as error:
            self.failure = self.failure or error
            raise
