"""Manifests: written when all shards are what their records say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.shards.disk import REAL_DISK, Disk
from torchelastic.checkpoint.shards.writing import write_whole
from torchelastic.checkpoint.store.fence import Fence
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME, Manifest, ShardRecord, encode_manifest
from torchelastic.checkpoint.store.pruning import abandon
from torchelastic.checkpoint.store.reading import record_in, require_same


def publish_manifest(
    root: Path, manifest: Manifest, *, fence: Fence | None, beside: Mapping[Path, bytes], disk: Disk = REAL_DISK
) -> None:
    """Publishes a checkpoint whose shards have their names already: its manifest appears last. Called by one process.

    Args:
        root: the folder that holds all checkpoints.
        manifest: of the checkpoint.
        fence: says whether this writer was replaced meanwhile; None: nobody is fenced off.
        beside: what further files of `root` are to hold from then on, whatever they hold now.
        disk: what touches files.

    Raises:
        FencedError: other writers have taken over; the manifest does not appear.
        CheckpointError: the disk refuses.
    """
    name = manifest.name
    staging = root / name.staging_name
    abandon(root, name, disk)  # a process that was killed may have begun it
    try:
        disk.make_folder(staging)
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
    """Writes the manifest into a folder that holds shards already. Raises: CheckpointError."""
    write_whole(folder / MANIFEST_NAME, [memoryview(encode_manifest(manifest))], disk)
