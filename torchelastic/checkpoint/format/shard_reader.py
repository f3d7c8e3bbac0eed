"""Reading a shard; nothing is handed out before its checksum was compared.

A slot on tmpfs is used again after its checkpoint was removed. So a reader holds a shared lock (flock) while it reads,
and the owner of the slot leaves a file alone that somebody has locked; what is checked is what was copied.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import stat
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.format.batches import CHUNK_BYTES, checksum_of, checksums_in, over_batches
from torchelastic.checkpoint.format.header import (
    ALIGNMENT_BYTES,
    PREAMBLE_BYTES,
    Entry,
    Header,
    decode_header,
    decode_preamble,
)
from torchelastic.checkpoint.format.mapped_files import MappedFile, note_mapped
from torchelastic.checkpoint.format.partial import PartialCopy
from torchelastic.checkpoint.format.tensor_parts import dtype_named, memory_of
from torchelastic.checkpoint.format.tree import unflatten
from torchelastic.processes.file_locks import lock_file


class ShardReader:
    """An open shard; use it with `with`, from one thread.

    Args:
        path: the file.
        shown: what errors call it, where the file is a copy of what is somewhere else; None: its path.
        copy: the shard is somewhere else, and the parts that are read are fetched into this. It is new, replaces
            `path`, and is closed with this object, also where this raises. None: all of the shard is in the file.

    Attributes:
        path: the file.
        shown: what errors call it.
        header: what it says about itself; compared with its digest.
        header_digest: this digest, in hexadecimal.
        failure: why it could not be read, if it could not; None: nothing of that is known.

    Raises:
        CorruptCheckpointError: it is no finished shard, or it was damaged.
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], shown: str | None = None, copy: PartialCopy | None = None) -> None:
        self.path = Path(path) if copy is None else copy.path
        self.shown = shown or str(self.path)
        self.failure: CheckpointError | None = None
        self._copy = copy
        if copy is not None:
            self._descriptor = copy.descriptor
        else:
            with explained("read the checkpoint", self.path):
                # O_NONBLOCK: opening a pipe by mistake must not wait for its writer
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._map: mmap.mmap | None = None
        self._mapped: list[MappedFile] = []
        try:
            with explained("read the checkpoint", self.path):
                self._lock()
                if self._copy is not None:
                    self._copy.bring_header()
                self.header, self._data_offset, self.size_bytes = self._read_header()
            self._index = {entry.name: index for index, entry in enumerate(self.header.entries)}
        except CorruptCheckpointError as error:
            os.close(self._descriptor)
            raise CorruptCheckpointError(f"the shard {self.shown} cannot be used: {error}") from error
        except BaseException:
            os.close(self._descriptor)
            raise

    def _lock(self) -> None:
        """Keeps the owner of a slot from writing into it; if it was quicker, the checkpoint is gone."""
        try:
            lock_file(self._descriptor, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(self._descriptor), self.path.stat()):
                return
        except (BlockingIOError, FileNotFoundError):
            pass
        raise CheckpointError(f"the checkpoint {self.path} was removed by its owner while it was opened")

    def _read_header(self) -> tuple[Header, int, int]:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptCheckpointError("it is not a file")
        preamble = decode_preamble(os.pread(self._descriptor, PREAMBLE_BYTES, 0))
        end = preamble.shard_bytes(status.st_size)
        encoded = bytearray(min(preamble.header_bytes, status.st_size))
        self._read_into([memoryview(encoded)], PREAMBLE_BYTES)
        self.header_digest = preamble.header_digest.hex()
        return decode_header(bytes(encoded), preamble), preamble.data_offset_bytes, end

    def bring(self, names: Iterable[str]) -> None:
        """Fetches these tensors together, as far as they are not here; see `PartialCopy`."""
        if self._copy is not None:
            self._bring([self.header.entries[index] for index in sorted(self._index[name] for name in names)])

    def read(
        self,
        into: Mapping[str, torch.Tensor] | None = None,
        *,
        names: Container[str] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Copies tensors out of the file and checks them.

        Args:
            into: contiguous CPU tensors to copy into, by name, of the stored dtype and shape (of the stored part); the
                others are created. They hold anything if this raises.
            names: which tensors; all if not given.

        Returns:
            The tensors by name; each holds the part that its entry names.

        Raises:
            CorruptCheckpointError: a tensor is not what was written; names it.
            ValueError: a tensor in `into` does not fit.
        """
        given = into or {}
        entries = [entry for entry in self.header.entries if names is None or entry.name in names]
        self._bring(entries)
        targets = [_target(entry, given.get(entry.name)) for entry in entries]
        buffers = [memory_of(target) for target in targets]  # here, not on the threads: it needs the interpreter's lock
        found = over_batches(
            entries,
            lambda batch: self._copy_out(entries[batch.start : batch.stop], buffers[batch.start : batch.stop]),
        )
        for entry, checksum in zip(entries, found, strict=True):
            self._compare(entry, checksum)
        return {entry.name: target for entry, target in zip(entries, targets, strict=True)}

    def map(self) -> dict[str, torch.Tensor]:
        """Checks all tensors, and returns them as they lie in the file, without a copy: for files on tmpfs.

        Fresh memory costs more than the copy into it; this costs one pass of the checksum. The tensors may be changed
        (the kernel then copies the page): the file does not change with them. As long as one of them lives the file
        stays locked, so that a slot is not used again; what is removed meanwhile stays readable, and keeps its room:
        see `mapped_files`. Whoever cuts the file short without asking for the lock kills the reader (SIGBUS): use
        `read` where others may write.

        Raises:
            CorruptCheckpointError: a tensor is not what was written; names it.
        """
        self._bring(self.header.entries)
        with explained("read the checkpoint", self.path):
            mapped = mmap.mmap(
                self._descriptor, self.size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        entries, begin = self.header.entries, self._data_offset
        checksums = checksums_in(memoryview(mapped), entries, begin)
        for entry, checksum in zip(entries, checksums, strict=True):
            self._compare(entry, checksum)
        with explained("read the checkpoint", self.path):
            self._mapped.append(note_mapped(mapped, self._descriptor))
        return {entry.name: _mapped(mapped, begin + entry.offset_bytes, entry) for entry in entries}

    def read_one(self, name: str) -> torch.Tensor:
        """Copies one tensor out of the file and checks it. Raises: KeyError if the shard has none of that name."""
        entry = self.header.entries[self._index[name]]
        self._bring([entry])
        target = _target(entry, None)
        (checksum,) = self._copy_out([entry], [memory_of(target)])
        self._compare(entry, checksum)
        return target

    def verify(self, *, names: Container[str] | None = None) -> None:
        """Compares all tensors, or those of these names, with their checksums. Raises: CorruptCheckpointError."""
        entries = [entry for entry in self.header.entries if names is None or entry.name in names]
        self._bring(entries)
        found = over_batches(entries, lambda batch: self._hash(entries[batch.start : batch.stop]))
        for entry, checksum in zip(entries, found, strict=True):
            self._compare(entry, checksum)

    def view(self) -> memoryview:
        """The whole shard as bytes, without a copy, for sending; release it before `close`."""
        if self._copy is not None:
            self._copy.bring([(0, self.size_bytes)])
        if self._map is None:
            with explained("read the checkpoint", self.path):
                self._map = mmap.mmap(self._descriptor, self.size_bytes, prot=mmap.PROT_READ)
        return memoryview(self._map)[: self.size_bytes]

    def close(self) -> None:
        """Lets the file go; closing again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        for mapped in self._mapped:
            mapped.is_read = False
        self._map = None  # a view of it that is still in use keeps it

    def _bring(self, entries: Iterable[Entry]) -> None:
        if self._copy is None:
            return
        begins = ((self._data_offset + entry.offset_bytes, entry.size_bytes) for entry in entries)
        with self._keeping_failure():
            try:
                self._copy.bring((begin, begin + size_bytes) for begin, size_bytes in begins)
            except CorruptCheckpointError as error:
                raise CorruptCheckpointError(f"the shard {self.shown} cannot be used: {error}") from error

    @contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self.failure = error
            raise

    def _hash(self, entries: Sequence[Entry]) -> list[str]:
        """Checksums of neighbours, read through a small buffer (a map would cost a page fault per page)."""
        if len(entries) == 1:
            return [self._copy_long(entries[0], None)]
        scratch = memoryview(bytearray(sum(entry.size_bytes for entry in entries)))
        ends = list(itertools.accumulate(entry.size_bytes for entry in entries))
        return self._copy_out(entries, [scratch[begin:end] for begin, end in itertools.pairwise([0, *ends])])

    def _copy_out(self, entries: Sequence[Entry], buffers: Sequence[memoryview]) -> list[str]:
        """Reads straight into the tensors, and hashes what has arrived while it is in the processor's cache."""
        if len(entries) == 1:
            return [self._copy_long(entries[0], buffers[0])]
        begin = position = entries[0].offset_bytes
        pieces: list[memoryview] = []
        for entry, buffer in zip(entries, buffers, strict=True):
            if entry.offset_bytes - position >= ALIGNMENT_BYTES:  # not all of the neighbours were asked for
                self._read_into(pieces, self._data_offset + begin)
                pieces, begin = [], entry.offset_bytes
            elif entry.offset_bytes > position:
                pieces.append(memoryview(bytearray(entry.offset_bytes - position)))
            pieces.append(buffer)
            position = entry.offset_bytes + entry.size_bytes
        self._read_into(pieces, self._data_offset + begin)
        return [checksum_of(buffer) for buffer in buffers]

    def _copy_long(self, entry: Entry, buffer: memoryview | None) -> str:
        """One tensor in chunks, into a buffer of its length, or only for its checksum."""
        digest = xxhash.xxh3_64()
        scratch = memoryview(bytearray(0 if buffer is not None else min(CHUNK_BYTES, entry.size_bytes)))
        for begin in range(0, entry.size_bytes, CHUNK_BYTES):
            end = min(begin + CHUNK_BYTES, entry.size_bytes)
            chunk = buffer[begin:end] if buffer is not None else scratch[: end - begin]
            self._read_into([chunk], self._data_offset + entry.offset_bytes + begin)
            digest.update(chunk)
        return f"{digest.intdigest():016x}"

    def _read_into(self, pieces: Sequence[memoryview], begin: int) -> None:
        pieces = [piece for piece in pieces if piece.nbytes]
        while pieces:
            with self._keeping_failure(), explained("read the checkpoint", self.path):
                got = self._read_some(pieces, begin)
                if got == 0:
                    raise CorruptCheckpointError(f"the shard {self.shown} was cut while it was read")
            begin += got
            while pieces and got >= pieces[0].nbytes:
                got -= pieces.pop(0).nbytes
            if got:  # a short read: go on behind it
                pieces[0] = pieces[0][got:]

    def _read_some(self, pieces: list[memoryview], begin: int) -> int:
        """One system call; returns how many bytes arrived."""
        return os.preadv(self._descriptor, pieces, begin)

    def _compare(self, entry: Entry, checksum: str) -> None:
        if checksum != entry.checksum:
            self.failure = CorruptCheckpointError(
                f"the shard {self.shown} is damaged: the checksum of its tensor {entry.name!r} does not match"
            )
            raise self.failure

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def load_tree(path: str | os.PathLike[str], *, allow_pickles: bool = False) -> Any:
    """Reads the state that `save_tree` wrote, checked; on the CPU.

    Args:
        path: the file.
        allow_pickles: see `unflatten`.

    Raises:
        CorruptCheckpointError: the file is not what was written.
        CheckpointError: it cannot be read, holds pickles that are not allowed, or only a part of the state.
    """
    with ShardReader(path) as shard:
        require_whole(shard.header.entries, str(path))
        return unflatten(shard.header.structure, shard.read(), allow_pickles=allow_pickles)


def require_whole(entries: Iterable[Entry], place: str) -> None:
    """Raises CheckpointError if a shard holds only parts of its tensors, so that others are needed to read it."""
    for entry in entries:
        if entry.region.sizes != entry.shape:
            raise CheckpointError(
                f"{place} holds only a part of {entry.name!r} ({entry.region} of {entry.shape}): read the whole "
                "checkpoint"
            )


def _mapped(memory: mmap.mmap, begin: int, entry: Entry) -> torch.Tensor:
    """A tensor that is a piece of a map, and keeps it alive."""
    dtype = dtype_named(entry.dtype)
    if not entry.size_bytes:
        return torch.empty(entry.region.sizes, dtype=dtype)
    row = torch.frombuffer(memory, dtype=dtype, count=entry.region.numel, offset=begin)
    return row if len(entry.region.sizes) == 1 else row.view(entry.region.sizes)


def _target(entry: Entry, given: torch.Tensor | None) -> torch.Tensor:
    dtype = dtype_named(entry.dtype)
    if given is None:
        return torch.empty(entry.region.sizes, dtype=dtype)
    if given.dtype != dtype or given.shape != entry.region.sizes or not is_plain_memory(given):
        raise ValueError(
            f"{entry.name!r} is a {entry.dtype} of shape {entry.region.sizes} in the checkpoint, and a {given.dtype} "
            f"of shape {tuple(given.shape)} was given for it: it must be the same, contiguous and on the CPU"
        )
    return given.detach()


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether its bytes can be written one after the other, without torch."""
    is_strided = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return is_strided and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
