"""Writing a checkpoint together, and publishing it once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.shards.disk import REAL_DISK, Disk
from torchelastic.checkpoint.shards.pool import remove_left_overs as remove_hidden_files
from torchelastic.checkpoint.shards.writing import write_whole
from torchelastic.checkpoint.store.fence import Fence
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME, Manifest, ShardRecord, encode_manifest
from torchelastic.checkpoint.store.pruning import abandon
from torchelastic.checkpoint.store.reading import record_in, record_of, require_same
from torchelastic.checkpoint.store.save_id import SaveId, shard_file_name

#: How much one system call writes, so that a shard of many GB is written in calls that can be interrupted.
WRITE_BYTES = 64 * 2**20


def begin(root: Path, name: SaveId, disk: Disk = REAL_DISK) -> Path:
    """Creates the hidden folder of a new checkpoint, or finds the one that another rank has created.

    Args:
        root: the folder that holds all checkpoints; created if it is missing.
        name: agreed by all ranks.
        disk: what touches files.

    Raises:
        CheckpointError: the folder cannot be created.
    """
    staging = root / name.staging_name
    disk.make_folder(staging)
    return staging


def write_shard(staging: Path, rank: int, world_size: int, data: memoryview, disk: Disk = REAL_DISK) -> ShardRecord:
    """Writes one rank's sealed shard into the hidden folder; it is on the disk when this returns. Called by each rank.

    Args:
        staging: what `begin` returned.
        rank: whose shard it is.
        world_size: how many ranks write.
        data: the complete bytes of a shard, as `Stage.seal` leaves them; not longer.
        disk: what touches files.

    Raises:
        CorruptCheckpointError: these bytes are no shard.
        CheckpointError: the disk refuses, or the folder is gone (the checkpoint was abandoned, or its writers were
            replaced).
    """
    record = record_of(data, rank, shard_file_name(rank, world_size))
    pieces = [data[begin : begin + WRITE_BYTES] for begin in range(0, record.size_bytes, WRITE_BYTES)]
    write_whole(staging / record.file, pieces, disk)
    return record


def commit(root: Path, manifest: Manifest, *, fence: Fence | None = None, disk: Disk = REAL_DISK) -> Path:
    """Publishes a checkpoint whose shards are all written: manifest, fence, one rename. Called by one rank.

    Args:
        root: the folder that holds all checkpoints.
        manifest: of what `write_shard` returned on each rank.
        fence: says whether this writer was replaced meanwhile; None where nobody else can write.
        disk: what touches files.

    Returns:
        The published folder.

    Raises:
        FencedError: other writers have taken over; nothing is published.
        CorruptCheckpointError: a shard is missing, or not what its rank wrote; nothing is published.
        CheckpointError: the disk refuses, or a checkpoint of this name is there.
    """
    name = manifest.name
    staging, target = root / name.staging_name, root / name.folder_name
    if target.exists():
        raise CheckpointError(
            f"the checkpoint {target} exists already, and nothing is overwritten: count generation up"
        )
    if fence is not None:
        fence.check(*name.token)
    for record in manifest.shards:
        require_stored(staging, record)
    try:
        write_manifest(staging, manifest, disk)
        remove_hidden_files(staging, disk)
        if fence is not None:
            fence.check(*name.token)
        # From here the fence may still rise. Whoever raises it takes older staging folders away, so the rename fails.
        disk.rename(staging, target)
    except CheckpointError:
        if fence is not None and not target.exists():
            fence.check(*name.token)  # the folder was taken away: say why
        raise
    disk.sync_folder(root)
    return target


def publish_manifest(
    root: Path, manifest: Manifest, *, fence: Fence | None, beside: Mapping[Path, bytes], disk: Disk = REAL_DISK
) -> None:
    """Publishes a checkpoint whose shards have their names already: its manifest appears last. Called by one process.

    Args:
        root: the folder that holds all checkpoints.
        manifest: of the checkpoint.
        fence: as for `commit`; None: nobody is fenced off.
        beside: what further files of `root` are to hold from then on, whatever they hold now.
        disk: what touches files.

    Raises:
        FencedError: other writers have taken over; the manifest does not appear.
        CheckpointError: the disk refuses.
    """
    name = manifest.name
    abandon(root, name, disk)  # a process that was killed may have begun it
    try:
        staging = begin(root, name, disk)
        for path, content in beside.items():
            write_whole(staging / path.name, [memoryview(content)], disk)
        write_manifest(staging, manifest, disk)
        if fence is not None:
            fence.check(*name.token)
        # From here the fence may still rise; whoever raises it takes older hidden folders away, so the renames fail.
        for path in beside:
            disk.rename(staging / path.name, path)
        disk.rename(staging / MANIFEST_NAME, root / name.folder_name / MANIFEST_NAME)
    except CheckpointError:
        if fence is not None:
            fence.check(*name.token)
        raise
    finally:
        abandon(root, name, disk)


def require_stored(folder: Path, record: ShardRecord) -> None:
    """Compares the first bytes and the length of a shard that another rank may have written with its record.

    Raises:
        CorruptCheckpointError: it is missing or damaged, or another one.
    """
    try:
        found = record_in(folder / record.file, record.rank)
    except CheckpointError as error:
        raise CorruptCheckpointError(
            f"the checkpoint in {folder} cannot be published: the shard of rank {record.rank}, {record.file}, is "
            f"missing or damaged ({error})"
        ) from error
    require_same(folder, found, record)


def write_manifest(folder: Path, manifest: Manifest, disk: Disk = REAL_DISK) -> None:
    """Writes the manifest into a folder that holds shards already; `commit` does it, too. Raises: CheckpointError."""
    write_whole(folder / MANIFEST_NAME, [memoryview(encode_manifest(manifest))], disk)
