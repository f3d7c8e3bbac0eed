"""What `LocalCheckpointManager` keeps on one host: shards of several ranks, each with its save in its name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.command.errors import CheckpointCommandError
from torchelastic.checkpoint.command.format import FoundCheckpoint, still_there
from torchelastic.checkpoint.command.shards import (
    SUFFIX,
    ShardFormat,
    copies_of,
    described_part,
    opened_shards,
    stated_in,
)
from torchelastic.checkpoint.errors import explained
from torchelastic.checkpoint.memory.ids import CheckpointContainerId
from torchelastic.checkpoint.shards.disk import REAL_DISK
from torchelastic.checkpoint.shards.loading import read_tree
from torchelastic.checkpoint.store.save_id import SaveId, find_shard

#: Folders below the root: the session, and in it one folder per rank.
_DEPTH = 2


class LocalShards(ShardFormat):
    """Saves of which some or all shards are on this host."""

    kind = "local"

    def find(self, path: Path) -> list[FoundCheckpoint]:
        """The saves in a root, in the folder of a session, or in that of a rank."""
        if not path.is_dir():
            return []
        copies: dict[tuple[SaveId, int], dict[int, list[Path]]] = defaultdict(lambda: defaultdict(list))
        for file in _files(path, _DEPTH):
            shard = find_shard(file.name)
            if shard is not None:
                copies[shard.name, shard.world_size][shard.rank].append(file)
        newest_first = {
            next(iter(files.values()))[0]: (*save, files) for save, files in sorted(copies.items(), reverse=True)
        }
        return still_there(newest_first, lambda path: self._found(*newest_first[path]))

    def load(self, found: FoundCheckpoint, *, allow_pickles: bool) -> Any:
        """Put together from all ranks, if they have saved parts; else each has saved a state of its own."""
        with opened_shards(found) as shards:
            if found.world_size == 1 or any(entry.is_shard for shard in shards for entry in shard.header.entries):
                return read_tree(shards, allow_pickles=allow_pickles)
        raise CheckpointCommandError(
            f"in {found.name} each of {found.world_size} ranks has saved a state of its own: give the shard of one "
            f"rank, such as {found.shards[0]}"
        )

    def remove(self, found: FoundCheckpoint) -> None:
        """File by file; a save that lacks shards is not loaded any more."""
        for path in found.shards:
            REAL_DISK.remove(path)

    def _found(self, save: SaveId, world_size: int, files: dict[int, list[Path]]) -> FoundCheckpoint:
        paths = tuple(path for rank in sorted(files) for path in files[rank])
        with explained("look at the checkpoint", paths[0]):
            statuses = [path.stat() for path in paths]
        session, damage = "", None
        saved_s = max(status.st_mtime for status in statuses)
        for copies in copies_of(paths):
            meta, error = stated_in(copies)
            session, damage = str(meta.get("session", session)), error or damage
            saved_s = float(meta.get("saved_s", saved_s))
        here = ", ".join(map(str, sorted(files)))
        return FoundCheckpoint(
            format=self,
            path=paths[0],
            name=f"{session}: {save}" if session else str(save),
            step=save.step,
            world_size=world_size,
            saved_s=saved_s,
            size_bytes=sum(status.st_size for status in statuses),
            damage=damage,
            partial=described_part(files, world_size),
            shards=paths,
            facts={"session": session, "generation": save.generation, "ranks here": here},
        )


def _files(folder: Path, depth: int) -> Iterator[Path]:
    if CheckpointContainerId.parse_version_container_step(folder.name) is not None:
        return  # checkpoints in memory name their shards alike, each step in its container
    with explained("list the checkpoints", folder):
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):
                continue
            if depth and path.is_dir():
                yield from _files(path, depth - 1)
            elif path.suffix == SUFFIX:
                yield path
