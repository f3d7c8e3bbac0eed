"""Finding checkpoints in a folder, and reading them; whatever is not what was written is named."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.policy import KeptCheckpoint
from torchelastic.checkpoint.shards.header import PREAMBLE_BYTES, decode_preamble
from torchelastic.checkpoint.shards.loading import read_into, read_tree
from torchelastic.checkpoint.shards.reading import ShardReader
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME, Manifest, ShardRecord, decode_manifest
from torchelastic.checkpoint.store.save_id import SaveId


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo(KeptCheckpoint):
    """A checkpoint in a folder, as far as names, sizes and the manifest tell.

    Attributes:
        name: which checkpoint it is.
        folder: where it is.
        manifest: None if it is damaged or missing; then `saved_s`, `size_bytes` and `metrics` are empty too.
        damage: why it is not complete; None if it is. That its bytes are what was written, only `verify` can tell.
    """

    name: SaveId
    folder: Path
    manifest: Manifest | None
    damage: str | None = None


def list_checkpoints(root: Path) -> list[CheckpointInfo]:
    """All published checkpoints in a folder, newest first, damaged ones too; empty if there is no such folder.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    names = sorted(filter(None, map(SaveId.find, names_in(root))), reverse=True)
    return [_look_at(root / name.folder_name, name) for name in names]


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks the manifest of a checkpoint.

    Raises:
        CorruptCheckpointError: it is missing, damaged, or of another checkpoint.
        CheckpointError: it cannot be read.
    """
    path = folder / MANIFEST_NAME
    try:
        with explained("read the manifest of a checkpoint", path):
            data = path.read_bytes()
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise CorruptCheckpointError(f"the checkpoint {folder} has no manifest: it is not complete") from error
        raise
    try:
        manifest = decode_manifest(data)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"the checkpoint {folder} cannot be used: {error}") from error
    name = SaveId.find(folder.name)
    if name is not None and name != manifest.name:
        raise CorruptCheckpointError(f"the checkpoint {folder} has the manifest of {manifest.name}")
    return manifest


def record_of(data: memoryview, rank: int, file: str) -> ShardRecord:
    """Describes the sealed shard that begins with these bytes, by what its first 64 say.

    Raises:
        CorruptCheckpointError: they are no shard's, or not all of it.
    """
    preamble = decode_preamble(bytes(data[:PREAMBLE_BYTES]))
    size_bytes = preamble.data_offset_bytes + preamble.data_bytes
    if data.nbytes < size_bytes:
        raise CorruptCheckpointError(f"the shard of rank {rank} has {data.nbytes} bytes of {size_bytes}: it was cut")
    return ShardRecord(rank, file, size_bytes, preamble.header_digest.hex())


def open_checkpoint(folder: str | os.PathLike[str], ranks: Collection[int] | None = None) -> OpenCheckpoint:
    """Opens the shards of a checkpoint for reading; every shard is compared with the manifest.

    Args:
        folder: of one checkpoint.
        ranks: whose shards; None: all, which `read_tree` and `read_into` need unless every rank saved everything.

    Raises:
        CorruptCheckpointError: the manifest is missing or damaged, or a shard is missing, damaged or another one.
        CheckpointError: something cannot be read.
        ValueError: there is no shard of such a rank.
    """
    path = Path(folder)
    manifest = read_manifest(path)
    unknown = sorted(set(ranks or ()) - set(range(manifest.world_size)))
    if unknown:
        raise ValueError(f"{path} has shards of the ranks 0 to {manifest.world_size - 1}, and none of {unknown}")
    with ExitStack() as opened:
        shards = [
            opened.enter_context(open_shard(path, record))
            for record in manifest.shards
            if ranks is None or record.rank in ranks
        ]
        opened.pop_all()
    return OpenCheckpoint(path, manifest, shards)


class OpenCheckpoint:
    """A checkpoint that is being read; use it with `with`, from one thread. `open_checkpoint` makes it.

    Attributes:
        folder: where it is.
        manifest: what it consists of.
        shards: open readers, in the order of the ranks.
    """

    def __init__(self, folder: Path, manifest: Manifest, shards: Sequence[ShardReader]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.shards = list(shards)

    def read_tree(self, *, allow_pickles: bool = False) -> Any:
        """The whole state on the CPU; see `shards.read_tree`."""
        return read_tree(self.shards, allow_pickles=allow_pickles)

    def read_into(self, template: Any, *, strict: bool = True, allow_pickles: bool = False) -> Any:
        """Copies the saved tensors into those of a state that exists; see `shards.read_into`."""
        return read_into(self.shards, template, strict=strict, allow_pickles=allow_pickles)

    def verify(self) -> None:
        """Compares every byte with its checksum. Raises: CorruptCheckpointError; names the shard and the tensor."""
        for shard in self.shards:
            shard.verify()

    def close(self) -> None:
        """Closes the shards; closing again does nothing."""
        for shard in self.shards:
            shard.close()

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_shard(folder: Path, record: ShardRecord) -> ShardReader:
    """Opens one shard and compares it with its record; errors as `open_checkpoint`."""
    try:
        reader = ShardReader(folder / record.file)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise CorruptCheckpointError(
                f"{folder / record.file}, the shard of rank {record.rank}, is missing"
            ) from error
        raise
    try:
        with reader.view() as view:
            found = record_of(view, record.rank, record.file)
        require_same(folder, found, record)
    except BaseException:
        reader.close()
        raise
    return reader


def require_same(folder: Path, found: ShardRecord, record: ShardRecord) -> None:
    """Compares what a shard says about itself with its record. Raises: CorruptCheckpointError."""
    if found != record:
        raise CorruptCheckpointError(
            f"{folder / record.file} is not what rank {record.rank} has written: it has {found.size_bytes} bytes and "
            f"the header {found.header_digest}, and should have {record.size_bytes} and {record.header_digest}"
        )


def names_in(root: Path) -> list[str]:
    """What is in a folder; nothing if there is no such folder. Raises: CheckpointError."""
    try:
        with explained("list the checkpoints", root):
            return [path.name for path in root.iterdir()]
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise


def _look_at(folder: Path, name: SaveId) -> CheckpointInfo:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return CheckpointInfo(step=name.step, saved_s=0.0, name=name, folder=folder, manifest=None, damage=str(error))
    return CheckpointInfo(
        step=name.step,
        saved_s=manifest.saved_s,
        metrics=manifest.metrics,
        size_bytes=manifest.size_bytes,
        name=name,
        folder=folder,
        manifest=manifest,
        damage=_missing_or_cut(folder, manifest),
    )


def _missing_or_cut(folder: Path, manifest: Manifest) -> str | None:
    for record in manifest.shards:
        path = folder / record.file
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            return f"{path}, the shard of rank {record.rank}, is missing ({os.strerror(error.errno or 0)})"
        if size_bytes < record.size_bytes:
            return f"{path}, the shard of rank {record.rank}, has {size_bytes} bytes of {record.size_bytes}: it was cut"
    return None
