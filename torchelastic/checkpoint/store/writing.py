"""What appears in a folder of checkpoints, and what goes: hidden before and after, so nobody sees a part of it."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.disk import HIDDEN, REAL_DISK, Disk
from torchelastic.checkpoint.format.pool import remove_left_overs as remove_hidden_files
from torchelastic.checkpoint.format.shard_writing import write_whole
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME, Manifest, ShardRecord, encode_manifest
from torchelastic.checkpoint.store.owner import locked
from torchelastic.checkpoint.store.reading import names_in, record_in, require_same
from torchelastic.checkpoint.store.save_id import STAGING_PREFIX, SaveId

log = logging.getLogger(__name__)

#: For how long another process of this host is waited for that does the same.
SETTING_ASIDE_S = 60.0
_GONE_PREFIX = f"{STAGING_PREFIX}gone-"


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


def remove_left_overs(
    root: Path, older_than: tuple[int, int] | None = None, disk: Disk = REAL_DISK, *, before: SaveId | None = None
) -> int:
    """Removes what killed processes have left in a folder of checkpoints; returns how many things.

    Args:
        root: the folder; may be missing.
        older_than: an epoch and a round, as the fence has them: hidden folders of older writers are removed, which can
            never be published then. None: these stay.
        disk: what touches files.
        before: a save; the hidden folders of all that came before it are removed, too: they are over. None: these stay.

    Raises:
        CheckpointError: the disk refuses; what can be removed is.
    """
    removed, failures = remove_hidden_files(root, disk), list[CheckpointError]()
    for name in names_in(root):
        staged = SaveId.find_staged(name)
        is_old = staged is not None and older_than is not None and staged.token < older_than
        is_over = staged is not None and before is not None and staged < before
        try:
            if name.startswith(_GONE_PREFIX):
                disk.remove_folder(root / name)
            elif is_old or is_over:
                remove_folder(root, name, disk)
            else:
                continue
            removed += 1
        except CheckpointError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return removed


def make_place(folder: Path, disk: Disk = REAL_DISK) -> None:
    """Makes the folder of a checkpoint; what lies there and cannot be used gets another name, with a warning.

    A link to a disk that is not mounted, the folder of another user, a file: nothing of it is lost.

    Raises:
        CheckpointError: the disk refuses.
    """
    if os.path.lexists(folder) and not is_usable(folder):
        with locked(folder.parent / f"{HIDDEN}place", SETTING_ASIDE_S, disk=disk):
            if os.path.lexists(folder) and not is_usable(folder):
                aside = folder.with_name(f"unusable-{folder.name}-{secrets.token_hex(4)}")
                disk.rename(folder, aside)
                log.warning("%s cannot be used: it is called %s from now on", folder, aside.name)
            disk.make_folder(folder)
    disk.make_folder(folder)


def is_usable(folder: Path) -> bool:
    """Whether something can be read, put and removed in a folder."""
    return folder.is_dir() and os.access(folder, os.R_OK | os.W_OK | os.X_OK)


def remove_whatever(path: Path, disk: Disk = REAL_DISK) -> None:
    """Removes what lies where a shard belongs and is none: a file, a link, a folder. Raises: CheckpointError."""
    if os.path.isdir(path) and not path.is_symlink():  # noqa: PTH112 - that of Path raises where it may not look
        disk.remove_folder(path)
    else:
        disk.remove(path)


def publish_folder(root: Path, name: SaveId, disk: Disk = REAL_DISK) -> None:
    """The hidden folder of a checkpoint, with its manifest, becomes the checkpoint. Called by one rank.

    By one rename; where the file system has none for folders, file by file, the manifest last: without that a reader
    takes the folder for no checkpoint. The hidden folder stays until then, so that whoever finds both, and no manifest,
    knows that the checkpoint was not published: see `remove_folder`.

    Raises:
        CheckpointError: the disk refuses, or the hidden folder was removed by somebody else.
    """
    staging, target = root / name.staging_name, root / name.folder_name
    if disk.rename_folder(staging, target):
        return
    disk.rename_files(staging, target, last=MANIFEST_NAME)
    try:
        disk.remove_folder(staging)
    except CheckpointError:
        pass  # it is published; the next writer removes what is left


def remove_folder(root: Path, name: str, disk: Disk = REAL_DISK) -> None:
    """Removes the folder of a checkpoint, or the hidden one in which it is written; it may be gone. Called by any rank.

    Raises:
        CheckpointError: the disk refuses.
    """
    gone = root / f"{_GONE_PREFIX}{secrets.token_hex(8)}"
    try:
        is_hidden = disk.rename_folder(root / name, gone)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return  # somebody else was faster
        raise
    if is_hidden:
        disk.remove_folder(gone)
    elif (root / name).exists():
        _remove_file_by_file(root, name, disk)


def _remove_file_by_file(root: Path, name: str, disk: Disk) -> None:
    """Where folders cannot be renamed: first the manifest, which makes a checkpoint; the hidden folder goes last.

    As long as there are both folders, and no manifest in the other, it is known that both are to go; see
    `publish_folder`.
    """
    staged = SaveId.find_staged(name)
    save = staged or SaveId.find(name)
    if save is None:
        disk.remove_folder(root / name)
        return
    staging, target = root / save.staging_name, root / save.folder_name
    if staged is None:
        disk.make_folder(staging)
        disk.remove(target / MANIFEST_NAME)
    else:
        disk.remove(staging / MANIFEST_NAME)  # nobody can publish it any more
        for file in names_in(staging):
            remove_whatever(staging / file, disk)
    if not (target / MANIFEST_NAME).exists():
        disk.remove_folder(target)
    disk.remove_folder(staging)
