"""Checkpoints of several shards with a manifest, one folder each; see `torchelastic.checkpoint.store`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.command.format import Advance, Contents, Format, FoundCheckpoint, still_there
from torchelastic.checkpoint.command.shard_checks import contents_of, damages_of, described_part
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.store.inventory import describe_cut
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME, Manifest
from torchelastic.checkpoint.store.reading import list_checkpoints, open_checkpoint, open_shard, read_manifest, sizes_in
from torchelastic.checkpoint.store.save_id import SaveId


class FolderOfShards(Format):
    """Folders of shards."""

    kind = "shards"

    def find(self, path: Path) -> list[FoundCheckpoint]:
        """One folder of shards, or all that are in a folder."""
        if not path.is_dir():
            return []
        if SaveId.find(path.name) is not None or _has_manifest(path):
            return [self._look_at(path)]
        return still_there(
            (info.folder, partial(self._found, info.folder, info.name, info.manifest, info.damage))
            for info in list_checkpoints(path)
        )

    def contents(self, found: FoundCheckpoint) -> Contents:
        """Out of the headers of the shards that are here."""
        with ExitStack() as opened:
            manifest = read_manifest(found.path)
            records = [record for record in manifest.shards if found.path / record.file in found.shards]
            return contents_of([opened.enter_context(open_shard(found.path, record)) for record in records])

    def verify(self, found: FoundCheckpoint, advance: Advance) -> list[str]:
        """Compares the manifest, each header with it, and each tensor; goes on behind what is damaged."""
        try:
            manifest = read_manifest(found.path)
        except CorruptCheckpointError as error:
            return [str(error)]
        return damages_of([partial(open_shard, found.path, record) for record in manifest.shards], advance)

    def load(self, found: FoundCheckpoint, *, allow_pickles: bool) -> Any:
        """Put together from all shards."""
        with open_checkpoint(found.path) as opened:
            return opened.read_tree(allow_pickles=allow_pickles)

    def remove(self, found: FoundCheckpoint) -> None:
        """Hidden first, then removed; a reader that has it open can go on."""
        from torchelastic.checkpoint.store.pruning import remove_checkpoint

        name = SaveId.parse(found.path.name)
        remove_checkpoint(found.path.parent, name)

    def _look_at(self, folder: Path) -> FoundCheckpoint:
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            return self._found(folder, SaveId.find(folder.name), None, str(error))
        return self._found(folder, manifest.name, manifest, None)

    def _found(
        self, folder: Path, name: SaveId | None, manifest: Manifest | None, damage: str | None
    ) -> FoundCheckpoint:
        facts: dict[str, Any] = {}
        if name is not None:
            facts = {"fencing token": f"epoch {name.epoch}, round {name.round}", "generation": name.generation}
        if manifest is not None:
            facts = {"run": manifest.run_id, **facts}
        with explained("look at the checkpoint", folder):
            changed_s = folder.stat().st_mtime
        sizes = sizes_in(folder)
        partial, damage = _look_at_shards(folder, manifest, sizes) if manifest is not None else (None, damage)
        return FoundCheckpoint(
            format=self,
            path=folder,
            name=folder.name,
            step=name.step if name is not None else None,
            world_size=manifest.world_size if manifest else None,
            saved_s=manifest.saved_s if manifest and manifest.saved_s else changed_s,
            size_bytes=manifest.size_bytes if manifest else sum(size or 0 for size in sizes.values()),
            damage=damage,
            partial=partial,
            shards=tuple(folder / record.file for record in manifest.shards if record.file in sizes)
            if manifest
            else (),
            facts=facts,
            metrics=manifest.metrics if manifest else {},
        )


def _look_at_shards(folder: Path, manifest: Manifest, sizes: Mapping[str, int | None]) -> tuple[str | None, str | None]:
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
