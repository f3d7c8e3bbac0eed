"""An object in memory as a file: written and grown like one, sealed as a shard when it is closed, checked when read."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torchelastic.checkpoint.compat.flashpoint.container import Container
from torchelastic.checkpoint.compat.flashpoint.ids import CheckpointObjectId
from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.format.batches import checksum_of
from torchelastic.checkpoint.format.header import Entry, Header
from torchelastic.checkpoint.format.shard_reader import ShardReader

ENTRY = "data"
MOST_SIGNATURE_BYTES = 8
_GROWTH = 1.1
_LEAST_GROWTH_BYTES = 1 << 20


class BufferIO:
    """One object of a checkpoint, open for writing or for reading; by one thread at a time.

    Make one through `CheckpointObjectManager`. What is written nobody sees until it is closed; what is read is compared
    with its checksum first.

    Args:
        object_id: in the container of a step.
        container: of the job, for a new object that is written; None: the object that is there is read.
        size_bytes: how much is expected; it grows if more is written.

    Attributes:
        object_id: the object.

    Raises:
        ValueError: the size is negative.
        CorruptCheckpointError: what is there is damaged, or no object that was written like this.
        CheckpointError: it is not there, or there is no room.
    """

    def __init__(self, object_id: CheckpointObjectId, container: Container | None = None, size_bytes: int = 0) -> None:
        if size_bytes < 0:
            raise ValueError(f"the size of {object_id} is {size_bytes}: give 0 or more bytes")
        self.object_id = object_id
        self._path = Path(str(object_id))
        self._container = container
        self._position = 0
        self._length = 0
        self._signature = b""
        self._content: memoryview | None = None
        self._keep: Any = None  # what the content lies in
        if container is not None:
            self._reserve(container, size_bytes)
            return
        with ShardReader(self._path) as shard:
            if [entry.name for entry in shard.header.entries] != [ENTRY]:
                raise CorruptCheckpointError(f"{object_id} is a shard of tensors: read it with ShardReader")
            self._keep = shard.map()[ENTRY]
            self._signature = bytes.fromhex(str(shard.header.meta.get("signature", "")))
        self._content = memoryview(self._keep.numpy()).toreadonly()
        self._length = self._content.nbytes

    @property
    def is_readonly(self) -> bool:
        """Whether it was opened for reading."""
        return self._container is None

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._content is None

    @property
    def format_signature(self) -> bytes:
        """What says how the content is to be read; empty if nothing was set."""
        return self._signature

    def set_format_signature(self, signature: bytes) -> None:
        """Says how the content is to be read. Raises: ValueError if that is longer than 8 bytes."""
        self._require_writable()
        if len(signature) > MOST_SIGNATURE_BYTES:
            raise ValueError(f"the signature {signature!r} is longer than {MOST_SIGNATURE_BYTES} bytes")
        self._signature = bytes(signature)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Writes at the position, and grows where that is needed; returns how many bytes were written."""
        source = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        self.next_buffer_slice(source.nbytes)[:] = source
        return source.nbytes

    def next_buffer_slice(self, size: int) -> memoryview:
        """The next bytes to write into, of which the position is behind afterwards; valid until the object grows.

        Raises:
            ValueError: the size is negative.
        """
        self._require_writable()
        if size < 0:
            raise ValueError(f"{size} bytes of {self.object_id}: give 0 or more")
        end = self._position + size
        if end > self._open_content().nbytes:
            self.resize(max(int(self._open_content().nbytes * _GROWTH), end + _LEAST_GROWTH_BYTES))
        view = self._open_content()[self._position : end]
        self._position = end
        self._length = max(self._length, end)
        return view

    def resize(self, new_size: int) -> None:
        """Makes room for so many bytes, or cuts what is behind them.

        Raises:
            ValueError: the size is negative.
            CheckpointError: there is no room.
        """
        container = self._require_writable()
        if new_size < 0:
            raise ValueError(f"the size of {self.object_id} is {new_size}: give 0 or more bytes")
        if new_size > self._open_content().nbytes:
            old, stage = self._open_content()[: self._length], self._keep
            self._reserve(container, new_size)
            self._open_content()[: self._length] = old
            old.release()
            container.pool.release(stage)
        self._length = min(self._length, new_size)
        self._position = min(self._position, new_size)

    def read(self, size: int = -1) -> bytes:
        """The next bytes; all that follow if the size is negative."""
        rest = self._open_content()[self._position : self._length]
        data = bytes(rest if size < 0 else rest[:size])
        self._position += len(data)
        return data

    def readinto(self, b: bytearray | memoryview) -> int:
        """Fills a buffer with the next bytes; returns how many there were."""
        target = memoryview(b).cast("B")
        source = self._open_content()[self._position : min(self._length, self._position + target.nbytes)]
        target[: source.nbytes] = source
        self._position += source.nbytes
        return source.nbytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves the position within what was written. Raises: ValueError if it would be outside."""
        self._open_content()
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}
        if whence not in bases:
            raise ValueError(f"whence is {whence}: give one of {', '.join(map(str, bases))}")
        base = bases[whence]
        if not 0 <= base + offset <= self._length:
            raise ValueError(f"{base + offset} is outside of the {self._length} bytes of {self.object_id}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def flush(self) -> None:
        """Nothing to do: it is memory."""

    def close(self, truncate: bool = True) -> None:
        """Seals what was written and gives it its name; closing again does nothing.

        Args:
            truncate: false: the object has all the bytes that there is room for.

        Raises:
            CheckpointError: it cannot be published.
        """
        content, self._content = self._content, None
        if content is None or self._container is None:
            self._keep = None
            return
        stage, self._keep = self._keep, None
        length = self._length if truncate else content.nbytes
        header = _header(length, {"signature": self._signature.hex()})
        digest = checksum_of(content[:length])
        content.release()
        if self._path.exists():
            self._container.remove_object(self._path)  # it is written anew
        self._container.publish(stage, header.with_checksums([digest]), self._path)

    def abandon(self) -> None:
        """Throws away what was written; nothing gets a name."""
        content, self._content = self._content, None
        if content is not None and self._container is not None:
            self._container.pool.release(self._keep)
        self._keep = None

    def __enter__(self) -> BufferIO:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def _reserve(self, container: Container, size_bytes: int) -> None:
        stage = container.pool.take(_header(size_bytes, {"signature": "00" * MOST_SIGNATURE_BYTES}))
        stage.invalidate()
        self._keep = stage
        self._content = stage.slot.view()[stage.data_offset : stage.data_offset + size_bytes]

    def _open_content(self) -> memoryview:
        if self._content is None:
            raise ValueError(f"{self.object_id} is closed")
        return self._content

    def _require_writable(self) -> Container:
        if self._container is None:
            raise io.UnsupportedOperation(f"{self.object_id} was opened for reading")
        return self._container


def _header(size_bytes: int, meta: Mapping[str, Any]) -> Header:
    return Header(None, (Entry.of_bytes(ENTRY, size_bytes),), meta)
