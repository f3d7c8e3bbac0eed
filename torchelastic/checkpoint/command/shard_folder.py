"""Checkpoints of several shards with a manifest, one folder each; see `torchelastic.checkpoint.store`.

Tiers, `BCPState` and `LocalCheckpointManager` write them; of the last one each session has a folder of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.command.errors import CheckpointCommandError
from torchelastic.checkpoint.command.format import FoundCheckpoint, still_there
from torchelastic.checkpoint.command.shards import ShardFormat, described_part, opened_shards
from torchelastic.checkpoint.errors import CheckpointError, explained
from torchelastic.checkpoint.kinds import LOCAL_STATE, Kind, kind_in
from torchelastic.checkpoint.shards.loading import read_tree
from torchelastic.checkpoint.store.inventory import describe_cut, info_of
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME, Manifest
from torchelastic.checkpoint.store.reading import names_in, read_manifest, sizes_in
from torchelastic.checkpoint.store.save_id import SaveId, shard_file_name
from torchelastic.checkpoint.store.writing import remove_checkpoint


class FolderOfShards(ShardFormat):
    """Folders of shards."""

    kind = "shards"

    def find(self, path: Path) -> list[FoundCheckpoint]:
        """One folder of shards, or all that are in a folder, local ones of all sessions there."""
        if not path.is_dir():
            return []
        if SaveId.find(path.name) is not None or _has_manifest(path):
            found = [path]
        else:
            found = checkpoints_in(path) + _sessions_in(path)
        return still_there((one for one in found if kind_in(one) is not Kind.MEMORY), self._look_at)

    def load(self, found: FoundCheckpoint, *, allow_pickles: bool) -> Any:
        """Put together from all shards; of local checkpoints if they are parts, and not each a state of its own."""
        with opened_shards(found) as shards:
            is_local = any(shard.header.meta.get("kind") == LOCAL_STATE for shard in shards)
            are_parts = any(entry.is_shard for shard in shards for entry in shard.header.entries)
            if is_local and len(shards) > 1 and not are_parts:
                raise CheckpointCommandError(
                    f"in {found.name} each of {len(shards)} ranks has saved a state of its own: give the shard of one "
                    f"rank, such as {found.shards[0]}"
                )
            return read_tree(shards, allow_pickles=allow_pickles)

    def remove(self, found: FoundCheckpoint) -> None:
        """Hidden first, then removed; a reader that has it open can go on."""
        remove_checkpoint(found.path.parent, SaveId.parse(found.path.name))

    def _look_at(self, folder: Path) -> FoundCheckpoint:
        with explained("look at the checkpoint", folder):
            saved_s = folder.stat().st_mtime
        sizes, name = sizes_in(folder), SaveId.find(folder.name)
        manifest, world_size, part, damage = None, None, None, None
        here: list[str] = []
        facts: dict[str, Any] = {}
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            damage = str(error)
            if name is not None and MANIFEST_NAME not in sizes and kind_in(folder) is Kind.LOCAL:
                # killed before it was finalized: it counts where all ranks have written it, as for its manager
                info = info_of(name, folder, error, sizes, whole=False)
                world_size, damage = info.world_size, None
                part = described_part(info.shards, world_size)
                here = [shard_file_name(rank, world_size) for rank in sorted(info.shards)]
        else:
            part, damage = _what_is_here(folder, manifest, sizes)
            name, saved_s, facts = manifest.name, manifest.saved_s or saved_s, {"run": manifest.run_id}
            world_size = manifest.world_size
            here = [record.file for record in manifest.shards if record.file in sizes]
        if name is not None:
            facts |= {"fencing token": f"epoch {name.epoch}, round {name.round}", "generation": name.generation}
        return FoundCheckpoint(
            format=self,
            path=folder,
            name=folder.name,
            step=name.step if name is not None else None,
            world_size=world_size,
            saved_s=saved_s,
            size_bytes=manifest.size_bytes if manifest else sum(size or 0 for size in sizes.values()),
            damage=damage,
            partial=part,
            shards=tuple(folder / file for file in here),
            manifest=manifest,
            facts=facts,
            metrics=manifest.metrics if manifest else {},
        )


def checkpoints_in(path: Path) -> list[Path]:
    """The folders of shards in a folder, newest first."""
    names = sorted(filter(None, map(SaveId.find, names_in(path))), reverse=True)
    return [path / name.folder_name for name in names]


def _sessions_in(path: Path) -> list[Path]:
    """The local checkpoints of all sessions that have a folder in this one."""
    names = [name for name in sorted(names_in(path)) if not name.startswith(".") and SaveId.find(name) is None]
    sessions = [path / name for name in names if (path / name).is_dir()]
    return [one for session in sessions for one in checkpoints_in(session) if kind_in(one) is Kind.LOCAL]


def _what_is_here(folder: Path, manifest: Manifest, sizes: dict[str, int | None]) -> tuple[str | None, str | None]:
    """What is not here, and may be elsewhere (in a tier of which each host has its own); and what is damaged."""
    here, cut = manifest.found_in(sizes)
    if cut:
        return None, describe_cut(folder, cut[0], sizes)
    if not here:
        return None, f"none of its {manifest.world_size} shards is in {folder}"
    return described_part((record.rank for record in here), manifest.world_size), None


def _has_manifest(folder: Path) -> bool:
    """Whether there is a manifest of shards, whatever the folder is called; one of streams is of another format."""
    try:
        document = json.loads((folder / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and "shards" in document
