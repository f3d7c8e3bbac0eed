"""Tiers in folders of which each host has its own; its ranks share that.

Each shard counts as soon as it has its name, and the manifest follows: the hosts' folders together are the checkpoint,
so no single rename could publish it.

    <root>/step-000000123.e1.r5.g7/shard-00002-of-00008.shard
                                   shard-00003-of-00008.shard
                                   manifest.json     as on every other host
"""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.format.pool import remove_left_overs as remove_hidden_files
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.format.shard_writing import write_whole
from torchelastic.checkpoint.policy import KeepPolicy, SavePolicy
from torchelastic.checkpoint.store.fence import OWNER_LOCK_NAME, Fence
from torchelastic.checkpoint.store.inventory import CheckpointInfo, prunable_checkpoints
from torchelastic.checkpoint.store.kinds import is_foreign, require_own_folder
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME, Manifest
from torchelastic.checkpoint.store.reading import list_checkpoints, names_in, open_in, read_manifest, sizes_in
from torchelastic.checkpoint.store.removing import Removals
from torchelastic.checkpoint.store.rewinds import Rewind
from torchelastic.checkpoint.store.save_id import SaveId, parse_shard_file_name
from torchelastic.checkpoint.store.tier import Tier, TierContext, TierEntry
from torchelastic.checkpoint.store.writing import (
    is_usable,
    make_place,
    remove_folder,
    remove_left_overs,
    require_stored,
    write_manifest,
)

log = logging.getLogger(__name__)


class FolderTier(Tier):
    """A tier in a folder; see `Tier` for the methods, and `DiskTier` for a folder that all hosts share.

    Args:
        folder: of this run alone.
        keep: which checkpoints stay.
        every: how rarely it takes part; None: in each save.
        name: for logs and metrics.
        is_shared: whether all hosts see the same folder.
        disk: what touches files.

    Attributes:
        root: the folder.
    """

    #: See `Fence`.
    _owner_lock = OWNER_LOCK_NAME

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: KeepPolicy,
        every: SavePolicy | None,
        *,
        name: str,
        is_shared: bool,
        disk: Disk,
    ) -> None:
        if not os.fspath(folder):
            raise ValueError(
                f"the folder of the {name} tier is empty: name the folder that shall hold the checkpoints (for memory, "
                "one below /dev/shm)"
            )
        self.root = self._root = Path(folder).absolute()
        self.name = name
        self.is_shared = is_shared
        self.keep = keep
        self.every = every
        self.where = str(self._root)
        self._disk = disk
        self._fence = Fence(self._root, disk, owner_lock=self._owner_lock)
        self._context: TierContext | None = None
        self._known: set[SaveId] = set()  # certainly of the own kind
        self._noted: set[str] = set()
        self._removals = Removals()

    def require_own(self) -> None:
        """See `Tier`."""
        require_own_folder(self._root, self.kind)

    def require_free(self, run_id: str) -> None:
        """See `Tier`."""
        self._fence.require_free(run_id)

    def known_epoch(self, run_id: str) -> int:
        """See `Tier`; a folder of this host, which no job claims, is held from now on."""
        if not self.is_shared:
            self._fence.enter(run_id)
        return self._fence.known_epoch(run_id)

    def prepare(self, context: TierContext) -> None:
        """See `Tier`."""
        self._context = context
        self._fence.join(context.epoch, context.run_id)
        remove_left_overs(self._root, context.token, self._disk)
        for info in list_checkpoints(self._root):
            remove_hidden_files(info.folder, self._disk)

    def _hold_again(self) -> None:
        """Somebody may have removed the folder with all that was in it, or it had no room: joins it once more."""
        if self._context is not None and not self._fence.is_held:
            self.prepare(self._context)

    def commit(self, manifest: Manifest) -> None:
        """See `Tier`: what lies here must be what the manifest says, and this rank's shard must lie here.

        A writer that was paused behind the look at the fence may still publish; it counts as older than its successors.
        """
        self._fence.check(*manifest.name.token)
        folder = self._folder_of(manifest.name)
        sizes = sizes_in(folder)
        for record in manifest.shards:
            if record.file in sizes:
                require_stored(folder, record)
            elif self._context is not None and record.rank == self._context.rank:
                raise CorruptCheckpointError(
                    f"{folder} cannot be committed: the shard of rank {record.rank} is not there"
                )
        self.adopt(manifest)

    def manifest_of(self, name: SaveId) -> Manifest | None:
        """That of a checkpoint; None if it is not committed here, or cannot be read. From any thread."""
        try:
            return read_manifest(self._root / name.folder_name)
        except CheckpointError:
            return None

    def adopt(self, manifest: Manifest) -> None:
        """Commits what was fetched here of a checkpoint that others have committed: the fence is not asked.

        Raises:
            CheckpointError: the place cannot be written.
        """
        write_manifest(self._folder_of(manifest.name), manifest, self._disk)
        self._disk.sync_folder(self._root)

    def abandon(self, name: SaveId) -> None:
        """See `Tier`: removes this rank's shard."""
        for path, rank in self._shards(name):
            if self._context is not None and rank == self._context.rank:
                self._delete_file(path)
        self._remove_if_empty(name)

    def inventory(self) -> list[TierEntry]:
        """See `Tier`."""
        return [
            TierEntry.of(info)
            for info in self._own_checkpoints()
            if info.manifest is not None or info.shards or info.damage
        ]

    def noted_inventory(self) -> list[TierEntry]:
        """`inventory`; a warning names, once, what names, sizes and the manifest show to be damaged."""
        entries = self.inventory()
        for damage in [entry.damage for entry in entries if entry.damage is not None]:
            if damage not in self._noted:
                log.warning("%s", damage)
                self._noted.add(damage)
        return entries

    def rewinds(self) -> list[Rewind]:
        """See `Tier`."""
        return Rewind.all_in(names_in(self._root))

    def rewind(self, step: int, owner: str) -> Rewind:
        """See `Tier`."""
        rewind = Rewind(self._fence.raise_alone(owner), step)
        self.keep_rewind(rewind)
        return rewind

    def keep_rewind(self, rewind: Rewind) -> None:
        """See `Tier`."""
        write_whole(self._root / rewind.file_name, [memoryview(rewind.data)], self._disk)

    def open(self, name: SaveId, shard_rank: int) -> ShardReader:
        """See `Tier`."""
        return open_in(self._root, name, shard_rank)

    def prune(self) -> list[SaveId]:
        """See `Tier`; damaged ones are neither counted nor removed, and a reader that has one open can go on.

        Where each host has its own folder, what was never committed and is older than what was goes, too. There, of a
        checkpoint of this group each rank removes only what it has put, since the memory of it is used again by the
        process that has put it. What older groups have left, anyone removes. The folder of another user stays, and one
        that cannot be removed keeps no other from being removed. The hidden folders of older saves, which have failed
        or could not be removed before, go too.

        Raises:
            CheckpointError: the first that could not be removed.
        """
        infos = self._own_checkpoints()
        committed = [info for info in infos if info.manifest is not None and info.damage is None]
        if not committed:
            return []
        unwanted = {info.name for info in prunable_checkpoints(self.keep, infos, self.all_rewinds())}
        if not self.is_shared:
            uncommitted = (info for info in infos if info.manifest is None and info.name < committed[0].name)
            unwanted |= {info.name for info in uncommitted if is_usable(info.folder)}
        self._delete(unwanted)
        before = committed[0].name if self.is_shared else None  # elsewhere none is written so
        remove_left_overs(self._root, disk=self._disk, before=before)
        self.keep_rewinds()
        return sorted(unwanted)

    def _delete(self, names: Iterable[SaveId]) -> None:
        """Removes checkpoints, whichever they are, as far as that is this rank's; see `prune`."""
        self._removals.run(names, self._delete_one)

    def _delete_one(self, name: SaveId) -> None:
        self._delete_manifest(name)  # first: other ranks may hold some of its shards, and without the others it is none
        for path, rank in self._shards(name):
            if self._may_remove(name, rank, path):
                self._delete_file(path)
        self._remove_if_empty(name)

    def _delete_manifest(self, name: SaveId) -> None:
        self._disk.remove(self._root / name.folder_name / MANIFEST_NAME)

    def close(self) -> None:
        """See `Tier`."""
        self._fence.release()

    def _folder_of(self, name: SaveId) -> Path:
        """Where the shards of a checkpoint lie; created if it is missing."""
        folder = self._root / name.folder_name
        make_place(folder, self._disk)
        return folder

    def _own_checkpoints(self) -> list[CheckpointInfo]:
        """Those of the own kind, newest first; others name their folders alike."""
        infos = list_checkpoints(self._root, whole=self.is_shared)
        self._known &= {info.name for info in infos}
        return [info for info in infos if self._is_own(info)]

    def _is_own(self, info: CheckpointInfo) -> bool:
        """As `is_foreign`, which reads the header of a shard: a long one, and each save would wait for it."""
        if info.name not in self._known:
            if is_foreign(info.folder, self.kind):
                return False
            if info.shards:
                self._known.add(info.name)
        return True

    def _may_remove(self, name: SaveId, rank: int, path: Path) -> bool:  # noqa: ARG002 - `MemoryTier` looks at it
        return self._context is None or name.token < self._context.token or rank == self._context.rank

    @abstractmethod
    def _delete_file(self, path: Path) -> None:
        """Removes the file of one shard."""

    def _shards(self, name: SaveId) -> list[tuple[Path, int]]:
        """The shards of a checkpoint that are here, and whose they are."""
        folder = self._root / name.folder_name
        parsed = ((file, parse_shard_file_name(file)) for file in sizes_in(folder))
        return [(folder / file, number[0]) for file, number in parsed if number is not None]

    def _remove_if_empty(self, name: SaveId) -> None:
        if not self._shards(name):
            remove_folder(self._root, name.folder_name, self._disk)
