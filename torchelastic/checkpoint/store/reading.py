"""Finding checkpoints in a folder, and reading them; whatever is not what was written is named."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.format.header import PREAMBLE_BYTES, decode_preamble
from torchelastic.checkpoint.format.loading import read_into, read_tree
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.store.inventory import CheckpointInfo, info_of
from torchelastic.checkpoint.store.kinds import Kind, is_foreign
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME, Manifest, ShardRecord, decode_manifest
from torchelastic.checkpoint.store.save_id import SaveId, ShardId, parse_shard_file_name


class _NoManifestError(CorruptCheckpointError):
    """A checkpoint is not complete; or was not, a moment ago."""


def list_checkpoints(root: Path, *, kind: Kind | None = None, whole: bool = True) -> list[CheckpointInfo]:
    """All checkpoints in a folder, newest first; empty if there is no such folder.

    Those that are damaged, and one that is being saved, are there too: their `damage` says so.

    Args:
        root: the folder.
        kind: leave out what is certainly of another kind; None: of any kind.
        whole: whether all of a checkpoint should be here; not so where each host has a folder of its own.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    there = names_in(root)
    names = sorted(filter(None, map(SaveId.find, there)), reverse=True)
    hidden = set(filter(None, map(SaveId.find_staged, there)))
    folders = [(root / name.folder_name, name) for name in names]
    if hidden:  # published or removed file by file, see `writing.publish_folder`; or killed on the way
        folders = [
            (folder, name) for folder, name in folders if name not in hidden or (folder / MANIFEST_NAME).exists()
        ]
    return [
        _look_at(folder, name, whole=whole) for folder, name in folders if kind is None or not is_foreign(folder, kind)
    ]


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
            raise _NoManifestError(f"the checkpoint {folder} has no manifest: it is not complete") from error
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
    return _described(bytes(data[:PREAMBLE_BYTES]), data.nbytes, rank, file)


def record_in(path: Path, rank: int) -> ShardRecord:
    """Describes the shard in a file in the same way.

    Raises:
        CorruptCheckpointError: it is none, or not all of it.
        CheckpointError: it cannot be read; `errno` is ENOENT if there is no such file.
    """
    with explained("read a shard", path), path.open("rb") as file:
        return _described(file.read(PREAMBLE_BYTES), os.fstat(file.fileno()).st_size, rank, path.name)


def is_whole(path: Path, rank: int) -> bool:
    """Whether a shard lies there that is as long as its manifest says; where that cannot be read, as it says itself.

    A look at 64 bytes: whether the rest is what was written only a reader finds out. What cannot be read is not whole.

    Args:
        path: where it should lie.
        rank: who wrote it.
    """
    found = _as_it_says(path, rank)
    if found is None:
        return False
    try:
        records = read_manifest(path.parent).shards
    except CheckpointError:
        return True
    return all(found == record for record in records if record.rank == rank)


def _as_it_says(path: Path, rank: int) -> ShardRecord | None:
    """A shard by what it says about itself; None if it is none, or not all of it, or cannot be read."""
    try:
        return record_in(path, rank) if path.is_file() else None  # opening a pipe would wait for its writer
    except OSError:
        return None


def _described(preamble_bytes: bytes, stored_bytes: int, rank: int, file: str) -> ShardRecord:
    preamble = decode_preamble(preamble_bytes)
    return ShardRecord(rank, file, preamble.shard_bytes(stored_bytes), preamble.header_digest.hex())


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


def open_in(root: Path, name: SaveId, rank: int) -> ShardReader:
    """Opens one shard of a checkpoint that may not be committed here: then its own checksums have to do.

    Raises:
        CorruptCheckpointError: it is missing, or not what was stored.
        CheckpointError: it cannot be read.
    """
    folder = root / name.folder_name
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        for file in sizes_in(folder):
            parsed = parse_shard_file_name(file)
            if parsed is not None and parsed[0] == rank:
                return open_stated(folder / file, ShardId(name, *parsed), str(folder / file))
        raise CorruptCheckpointError(f"the shard of rank {rank} is not in {folder}") from None
    if rank >= manifest.world_size:
        raise CorruptCheckpointError(f"{folder} has {manifest.world_size} shards, and none of rank {rank}")
    return open_shard(folder, manifest.shards[rank])


def open_stated(path: Path, shard: ShardId, where: str) -> ShardReader:
    """Opens a shard of which no manifest tells; it has to state its name itself.

    Raises:
        CorruptCheckpointError: it is damaged, or another shard.
        CheckpointError: it cannot be read.
    """
    return stated(ShardReader(path), shard, where)


def stated(reader: ShardReader, shard: ShardId, where: str) -> ShardReader:
    """The reader, if it reads this shard; else it is closed. Raises: CorruptCheckpointError: it is another shard."""
    try:
        require_shard(shard, reader.header.meta, where)
    except BaseException:
        reader.close()
        raise
    return reader


def open_shard(folder: Path, record: ShardRecord) -> ShardReader:
    """Opens one shard and compares it with its record; errors as `open_checkpoint`."""
    try:
        return recorded(ShardReader(folder / record.file), folder, record)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise CorruptCheckpointError(
                f"{folder}/{record.file}, the shard of rank {record.rank}, is missing"
            ) from error
        raise


def recorded(reader: ShardReader, folder: Path | str, record: ShardRecord) -> ShardReader:
    """The reader, if what it reads is what the record says; else it is closed. Raises: CorruptCheckpointError."""
    try:
        require_same(folder, ShardRecord(record.rank, record.file, reader.size_bytes, reader.header_digest), record)
    except BaseException:
        reader.close()
        raise
    return reader


def require_same(folder: Path | str, found: ShardRecord, record: ShardRecord) -> None:
    """Compares what a shard says about itself with its record. Raises: CorruptCheckpointError."""
    if found != record:
        raise CorruptCheckpointError(
            f"{folder}/{record.file} is not what rank {record.rank} has written: it has {found.size_bytes} bytes and "
            f"the header {found.header_digest}, and should have {record.size_bytes} and {record.header_digest}"
        )


def require_shard(shard: ShardId, meta: Mapping[str, Any], where: str) -> None:
    """Compares what a header states with the name under which the shard lies, where no manifest tells it.

    Args:
        shard: the name.
        meta: of the header.
        where: the file, for the error.

    Raises:
        CorruptCheckpointError: it is another shard.
    """
    found = {key: meta.get(key) for key in shard.stated}
    if found != shard.stated:
        raise CorruptCheckpointError(
            f"{where} holds another shard than its name says, that of rank {found['rank']} of {found['checkpoint']}: "
            "it was renamed or replaced"
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


def sizes_in(folder: Path) -> dict[str, int | None]:
    """How long the files in a folder are, by name; nothing if there is no such folder. Raises: CheckpointError."""
    sizes: dict[str, int | None] = {}
    with explained("list the shards of a checkpoint", folder), suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):  # removed while we look
                if entry.is_file():
                    sizes[entry.name] = entry.stat().st_size
    return sizes


def _look_at(folder: Path, name: SaveId, *, whole: bool, may_come: bool = True) -> CheckpointInfo:
    if not folder.is_dir() and os.path.lexists(folder):
        return _unusable(folder, name, f"{folder} is no folder")
    try:  # errors are kept in no variable: they keep this frame and all below it
        manifest = read_manifest(folder)
    except CheckpointError as error:
        try:
            sizes = sizes_in(folder)
            if may_come and MANIFEST_NAME in sizes and isinstance(error, _NoManifestError):
                return _look_at(folder, name, whole=whole, may_come=False)  # it was published at this moment
            return info_of(name, folder, error, _without_cut(folder, sizes), whole=whole)
        except CheckpointError as unlisted:  # one folder that cannot be read hides no other
            return _unusable(folder, name, str(unlisted))
    try:
        return info_of(name, folder, manifest, sizes_in(folder), whole=whole)
    except CheckpointError as error:
        return _unusable(folder, name, str(error))


def _unusable(folder: Path, name: SaveId, why: str) -> CheckpointInfo:
    return CheckpointInfo(step=name.step, saved_s=0.0, name=name, folder=folder, manifest=None, damage=why)


def _without_cut(folder: Path, sizes: Mapping[str, int | None]) -> dict[str, int | None]:
    """What is whole as far as the shards themselves say: no manifest does."""
    parsed = {file: parse_shard_file_name(file) for file in sizes}
    cut = [file for file, one in parsed.items() if one is not None and _as_it_says(folder / file, one[0]) is None]
    return {file: size for file, size in sizes.items() if file not in cut}
