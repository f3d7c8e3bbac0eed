"""Pure: what of a checkpoint is in one place, by names, sizes and the manifest; and what of it all should go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.policy.keeping import KeepPolicy, KeptCheckpoint, prunable, rising_s
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME, Manifest
from torchelastic.checkpoint.store.rewinds import Rewind, counts
from torchelastic.checkpoint.store.save_id import SaveId, parse_shard_file_name


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo(KeptCheckpoint):
    """A checkpoint in one place, as far as names, sizes and the manifest tell.

    Attributes:
        name: which checkpoint it is.
        folder: where it is.
        manifest: None if it is damaged or missing; then `saved_s`, `size_bytes` and `metrics` are empty too.
        damage: why it is not what it should be here; None if it is. That its bytes are what was written, only `verify`
            can tell.
        shards: how long each shard is that is whole here, by rank.
        world_size: how many shards it has in all.
    """

    name: SaveId
    folder: Path
    manifest: Manifest | None
    damage: str | None = None
    shards: Mapping[int, int] = field(default_factory=dict)
    world_size: int = 1


def info_of(
    name: SaveId,
    folder: Path,
    manifest: Manifest | CheckpointError,
    sizes: Mapping[str, int | None],
    *,
    whole: bool,
    shown: str | None = None,
) -> CheckpointInfo:
    """Describes a checkpoint.

    Args:
        name: which it is.
        folder: where it is.
        manifest: or why there is none.
        sizes: of the files that are there.
        whole: whether all of it should be there. Else a missing shard is somewhere else, and one without a manifest is
            not committed yet.
        shown: how the damage names the folder, where that is no path; None: as it is.
    """
    if isinstance(manifest, CheckpointError):
        world_size, shards = _shards_by_name(sizes)
        damage = str(manifest) if whole or MANIFEST_NAME in sizes else None
        return CheckpointInfo(
            step=name.step,
            saved_s=0.0,
            name=name,
            folder=folder,
            manifest=None,
            damage=damage,
            shards=shards,
            world_size=world_size,
        )
    found, _ = manifest.found_in(sizes)
    return CheckpointInfo(
        step=name.step,
        saved_s=manifest.saved_s,
        metrics=manifest.metrics,
        size_bytes=manifest.size_bytes,
        name=name,
        folder=folder,
        manifest=manifest,
        damage=_damage(shown or str(folder), manifest, sizes, whole=whole),
        shards={record.rank: record.size_bytes for record in found},
        world_size=manifest.world_size,
    )


def _shards_by_name(sizes: Mapping[str, int | None]) -> tuple[int, dict[int, int]]:
    """How many shards there are in all, as most of their names say, and how long those are that are here, by rank."""
    parsed = {file: number for file in sizes if (number := parse_shard_file_name(file)) is not None}
    if not parsed:
        return 1, {}
    world_size = Counter(size for _, size in parsed.values()).most_common(1)[0][0]
    return world_size, {rank: sizes[file] or 0 for file, (rank, size) in parsed.items() if size == world_size}


def _damage(folder: str, manifest: Manifest, sizes: Mapping[str, int | None], *, whole: bool) -> str | None:
    _, cut = manifest.found_in(sizes)
    for record in cut:
        return (
            f"{folder}/{record.file}, the shard of rank {record.rank}, has {sizes[record.file] or 0} bytes of "
            f"{record.size_bytes}: it was cut"
        )
    missing = [record for record in manifest.shards if record.file not in sizes]
    if whole and missing:
        return f"{folder}/{missing[0].file}, the shard of rank {missing[0].rank}, is missing"
    return None


def prunable_checkpoints(
    policy: KeepPolicy, checkpoints: Sequence[CheckpointInfo], rewinds: Sequence[Rewind] = ()
) -> list[CheckpointInfo]:
    """What a policy does not want of what is complete, oldest first; never the newest.

    What is damaged or not committed is neither counted nor removed; a checkpoint counts as saved after
    those that are older by name (`rising_s`). What does not count after a rewind is no longer wanted once the run has
    saved something newer.
    """
    whole = [info for info in checkpoints if info.manifest is not None and info.damage is None]
    complete = sorted((info for info in whole if counts(info.name, rewinds)), key=lambda info: info.name)
    times_s = rising_s(info.saved_s for info in complete)
    ordered = [replace(info, saved_s=saved_s) for info, saved_s in zip(complete, times_s, strict=True)]
    newest = complete[-1].name if complete else None
    gone = [info for info in whole if not counts(info.name, rewinds) and not info.pinned]
    rewound = sorted((info for info in gone if newest is not None and info.name < newest), key=lambda info: info.name)
    return [*rewound, *prunable(policy, ordered)]
