"""Writing a state as one shard file in one go: into a hidden file, onto the disk, then under its name."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchelastic.checkpoint.errors import CheckpointError, explained
from torchelastic.checkpoint.format.batches import checksum_of, over_batches
from torchelastic.checkpoint.format.disk import HIDDEN, REAL_DISK, Disk
from torchelastic.checkpoint.format.header import (
    PREAMBLE_BYTES,
    Header,
    data_offset_bytes,
    encode_header,
    encode_preamble,
    lay_out,
)
from torchelastic.checkpoint.format.tensor_parts import contiguous, memory_of
from torchelastic.checkpoint.format.tree import Flat, flatten
from torchelastic.file_systems import Call
from torchelastic.processes.file_locks import lock_file
from torchelastic.processes.held_files import HeldFile


def hidden_path(folder: Path) -> Path:
    """A name for a file that is not published yet; nobody else gets the same."""
    return folder / f"{HIDDEN}{os.getpid()}-{secrets.token_hex(4)}"


def save_tree(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    meta: Mapping[str, Any] | None = None,
    allow_pickles: bool = False,
    disk: Disk = REAL_DISK,
) -> Header:
    """Writes a state as one file, which appears when all of it is on the disk, or not at all.

    Args:
        path: the file; it must not exist.
        tree: see `flatten`.
        meta: what the header is to say besides; JSON can hold it.
        allow_pickles: see `flatten`.
        disk: what touches files.

    Returns:
        The header that was written.

    Raises:
        TypeError: the state holds something that is not saved; see `flatten`.
        CheckpointError: the file exists, or the disk refuses. Nothing is left behind.
    """
    flat = flatten(tree, allow_pickles=allow_pickles)
    return write_shard(Path(path).absolute(), flat, meta or {}, disk=disk)


def write_shard(path: Path, flat: Flat, meta: Mapping[str, Any], *, disk: Disk = REAL_DISK) -> Header:
    """Writes tensors straight from where they are, without a copy of them all; arguments and errors as `save_tree`."""
    sources = [contiguous(named.tensor) for named in flat.tensors]
    header = lay_out(flat, meta)
    header = header.with_checksums(
        over_batches(header.entries, lambda batch: [checksum_of(memory_of(sources[index])) for index in batch])
    )
    with _hidden_file(path.parent, disk) as file:
        _write_all(file.descriptor, header, sources, file.path, disk)
        disk.sync(file.descriptor, file.path)
        share_lock(file.descriptor, file.path)
        file.give_name(lambda: disk.publish(file.path, path))
    disk.sync_folder(path.parent)
    return header


def write_whole(path: Path, pieces: Sequence[memoryview], disk: Disk) -> None:
    """Writes a file that appears, in place of another one of its name, when all of it is on the disk.

    Raises:
        CheckpointError: the disk refuses. Nothing is left behind.
    """
    with _hidden_file(path.parent, disk) as file:
        disk.write(file.descriptor, pieces, file.path)
        disk.sync(file.descriptor, file.path)
        file.give_name(lambda: disk.rename(file.path, path))
    disk.sync_folder(path.parent)


@dataclass(eq=False)
class _HiddenFile:
    """A file that has no name yet; open, and locked, as long as its writer lives."""

    path: Path
    disk: Disk
    file: HeldFile

    @property
    def descriptor(self) -> int:
        """To write it by; -1: it is closed."""
        return self.file.descriptor

    def give_name(self, give: Callable[[], None]) -> None:
        """Calls `give`, which renames it, or links it; again with the file closed, where that cannot be done before."""
        if self.disk.abilities(self.path.parent).has(Call.RENAME_OPEN):
            try:
                give()
            except CheckpointError as error:
                if not Call.RENAME_OPEN.is_absent_by(error.errno):
                    raise
                self.close()
                give()
                self.disk.note_lack(Call.RENAME_OPEN, self.path.parent, error)
        else:
            self.close()
            give()

    def close(self) -> None:
        """Closes it, again or not."""
        self.file.close()


@contextmanager
def _hidden_file(folder: Path, disk: Disk) -> Iterator[_HiddenFile]:
    """A new file, which is removed where anything fails before it has its name."""
    hidden = hidden_path(folder)
    # a held one: else what is forked meanwhile would keep readers of the file out
    file = _HiddenFile(hidden, disk, HeldFile(disk.create(hidden)))
    try:
        yield file
    except BaseException:
        try:
            disk.remove(hidden)
        except CheckpointError:
            pass  # the first error is the one to see; the next manager of this folder removes what is hidden
        raise
    finally:
        file.close()


def share_lock(descriptor: int, path: Path) -> None:
    """Before a file is published: lets readers in, and still tells `pool.remove_left_overs` that the writer lives."""
    with explained("lock the checkpoint", path):
        lock_file(descriptor, fcntl.LOCK_SH)


def _write_all(descriptor: int, header: Header, sources: list[torch.Tensor], path: Path, disk: Disk) -> None:
    encoded = encode_header(header)
    data_offset = data_offset_bytes(len(encoded))
    gap = data_offset - PREAMBLE_BYTES - len(encoded)
    buffers = [memoryview(bytes(PREAMBLE_BYTES) + encoded + bytes(gap))]
    position = 0
    for entry, source in zip(header.entries, sources, strict=True):
        buffers += [memoryview(bytes(entry.offset_bytes - position)), memory_of(source)]
        position = entry.offset_bytes + entry.size_bytes
    disk.write(descriptor, buffers, path)
    disk.write_at(descriptor, encode_preamble(encoded, data_offset, header.data_bytes), 0, path)
