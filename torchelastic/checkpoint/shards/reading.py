"""Reading a shard; nothing is handed out before its checksum was compared.

A slot on tmpfs is used again after its checkpoint was removed. So a reader holds a shared lock (flock) while it reads,
and the owner of the slot leaves a file alone that somebody has locked; what is checked is what was copied.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.shards.batches import CHUNK_BYTES, DEFAULT_THREADS, over_batches
from torchelastic.checkpoint.shards.header import (
    PREAMBLE_BYTES,
    Entry,
    Header,
    decode_header,
    decode_preamble,
)
from torchelastic.checkpoint.shards.tensors import dtype_named, memory_of
from torchelastic.checkpoint.shards.tree import unflatten


class ShardReader:
    """An open shard; use it with `with`, from one thread.

    Args:
        path: the file.

    Attributes:
        path: the file.
        header: what it says about itself; compared with its digest.

    Raises:
        CorruptCheckpointError: it is no finished shard, or it was damaged.
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with explained("read the checkpoint", self.path):
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._lock()
            self._map = self._map_file()
            self.header, self._data_offset, self.size_bytes = self._read_header()
        except CorruptCheckpointError as error:
            os.close(self._descriptor)
            raise CorruptCheckpointError(f"the shard {self.path} cannot be used: {error}") from error
        except BaseException:
            os.close(self._descriptor)
            raise

    def _lock(self) -> None:
        """Keeps the owner of a slot from writing into it; if it was quicker, the checkpoint is gone."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(self._descriptor), self.path.stat()):
                return
        except (BlockingIOError, FileNotFoundError):
            pass
        raise CheckpointError(f"the checkpoint {self.path} was removed by its owner while it was opened")

    def _map_file(self) -> mmap.mmap:
        size_bytes = os.fstat(self._descriptor).st_size
        if size_bytes < PREAMBLE_BYTES:
            raise CorruptCheckpointError(f"it has only {size_bytes} bytes")
        with explained("read the checkpoint", self.path):
            return mmap.mmap(self._descriptor, size_bytes, prot=mmap.PROT_READ)

    def _read_header(self) -> tuple[Header, int, int]:
        preamble = decode_preamble(self._map[:PREAMBLE_BYTES])
        end = preamble.data_offset_bytes + preamble.data_bytes
        if len(self._map) < end:
            raise CorruptCheckpointError(f"it has {len(self._map)} bytes of {end}: it was cut")
        header = decode_header(self._map[PREAMBLE_BYTES : PREAMBLE_BYTES + preamble.header_bytes], preamble)
        return header, preamble.data_offset_bytes, end

    def read(
        self, into: Mapping[str, torch.Tensor] | None = None, *, threads: int = DEFAULT_THREADS
    ) -> dict[str, torch.Tensor]:
        """Copies all tensors out of the file and checks them.

        Args:
            into: contiguous CPU tensors to copy into, by name, of the stored dtype and shape (of the stored part); the
                others are created. They hold anything if this raises.
            threads: how many copy.

        Returns:
            The tensors by name; each holds the part that its entry names.

        Raises:
            CorruptCheckpointError: a tensor is not what was written; names it.
            ValueError: a tensor in `into` does not fit.
        """
        targets = [_target(entry, (into or {}).get(entry.name)) for entry in self.header.entries]
        found = over_batches(self.header.entries, lambda batch: self._copy_out(batch, targets), threads)
        for entry, checksum in zip(self.header.entries, found, strict=True):
            self._compare(entry, checksum)
        return {entry.name: target for entry, target in zip(self.header.entries, targets, strict=True)}

    def read_one(self, name: str) -> torch.Tensor:
        """Copies one tensor out of the file and checks it. Raises: KeyError if the shard has none of that name."""
        entry = next((entry for entry in self.header.entries if entry.name == name), None)
        if entry is None:
            raise KeyError(name)
        index, target = self.header.entries.index(entry), _target(entry, None)
        (checksum,) = self._copy_out(range(index, index + 1), {index: target})
        self._compare(entry, checksum)
        return target

    def verify(self, *, threads: int = DEFAULT_THREADS) -> None:
        """Compares every tensor with its checksum, copying nothing. Raises: CorruptCheckpointError."""
        found = over_batches(
            self.header.entries, lambda batch: [self._hash(self.header.entries[index]) for index in batch], threads
        )
        for entry, checksum in zip(self.header.entries, found, strict=True):
            self._compare(entry, checksum)

    def view(self) -> memoryview:
        """The whole shard as bytes, without a copy, for sending; release it before `close`."""
        return memoryview(self._map)[: self.size_bytes]

    def close(self) -> None:
        """Lets the file go; closing again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            try:
                self._map.close()
            except BufferError:
                pass  # a view of it is still in use, and goes with its user

    def _bytes_of(self, entry: Entry) -> memoryview:
        begin = self._data_offset + entry.offset_bytes
        return memoryview(self._map)[begin : begin + entry.size_bytes]

    def _hash(self, entry: Entry) -> str:
        return f"{xxhash.xxh3_64_intdigest(self._bytes_of(entry)):016x}"

    def _copy_out(self, batch: range, targets: Mapping[int, torch.Tensor] | Sequence[torch.Tensor]) -> list[str]:
        """Reads straight into the tensors (a map would cost a page fault per page), and hashes what has arrived."""
        buffers = [memory_of(targets[index]) for index in batch]
        if len(batch) == 1:
            return [self._copy_long(self.header.entries[batch[0]], buffers[0])]
        entries = [self.header.entries[index] for index in batch]
        pieces, position = [], entries[0].offset_bytes
        for entry, buffer in zip(entries, buffers, strict=True):
            if entry.size_bytes:
                pieces += [memoryview(bytearray(entry.offset_bytes - position)), buffer]
                position = entry.offset_bytes + entry.size_bytes
        self._read_into([piece for piece in pieces if piece.nbytes], self._data_offset + entries[0].offset_bytes)
        return [f"{xxhash.xxh3_64_intdigest(buffer):016x}" for buffer in buffers]

    def _copy_long(self, entry: Entry, buffer: memoryview) -> str:
        digest = xxhash.xxh3_64()
        for begin in range(0, entry.size_bytes, CHUNK_BYTES):
            chunk = buffer[begin : begin + CHUNK_BYTES]
            self._read_into([chunk], self._data_offset + entry.offset_bytes + begin)
            digest.update(chunk)
        return f"{digest.intdigest():016x}"

    def _read_into(self, pieces: list[memoryview], begin: int) -> None:
        wanted = sum(piece.nbytes for piece in pieces)
        with explained("read the checkpoint", self.path):
            got = os.preadv(self._descriptor, pieces, begin) if wanted else 0
        if got == wanted:
            return
        if got == 0:
            raise CorruptCheckpointError(f"the shard {self.path} was cut while it was read")
        while pieces and got >= pieces[0].nbytes:  # a short read: go on behind it
            got, begin, pieces = got - pieces[0].nbytes, begin + pieces[0].nbytes, pieces[1:]
        self._read_into([pieces[0][got:], *pieces[1:]], begin + got)

    def _compare(self, entry: Entry, checksum: str) -> None:
        if checksum != entry.checksum:
            raise CorruptCheckpointError(
                f"the shard {self.path} is damaged: the checksum of its tensor {entry.name!r} does not match"
            )

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
        if entry.box.sizes != entry.shape:
            raise CheckpointError(
                f"{place} holds only a part of {entry.name!r} ({entry.box} of {entry.shape}): read the whole checkpoint"
            )


def _target(entry: Entry, given: torch.Tensor | None) -> torch.Tensor:
    dtype = dtype_named(entry.dtype)
    if given is None:
        return torch.empty(entry.size_bytes, dtype=torch.uint8).view(dtype).view(entry.box.sizes)
    if given.dtype != dtype or tuple(given.shape) != entry.box.sizes or not given.is_contiguous():
        raise ValueError(
            f"{entry.name!r} is a contiguous {entry.dtype} of shape {entry.box.sizes} in the checkpoint, and a "
            f"{given.dtype} of shape {tuple(given.shape)} was given for it"
        )
    return given.detach()
