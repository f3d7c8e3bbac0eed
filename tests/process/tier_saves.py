"""Saves with one tier as all ranks of a small group would make them, in one process; and disks that fail at a call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchelastic.checkpoint.format.header import Header, place
from torchelastic.checkpoint.format.pool import SlotPool
from torchelastic.checkpoint.format.regions import Extent, Region, split_replicated
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.format.stage import Stage
from torchelastic.checkpoint.format.tree import NamedTensor
from torchelastic.checkpoint.shards import flatten, read_tree
from torchelastic.checkpoint.store import Manifest, MemoryTier, SaveId, SealedShard, Tier, TierContext
from torchelastic.checkpoint.store.save_id import ShardId
from torchelastic.checkpoint.store.tier import agree_epoch

RUN = "run"
LENGTH = 5000


def state_at(step: int) -> dict[str, Any]:
    """A state that proves which step it is of, in every element."""
    return {"step": step, "weights": torch.arange(LENGTH, dtype=torch.float64) + step, "bias": torch.tensor(step)}


def require_whole(tree: Any) -> int:
    """The step of a state that was read; fails if it is not what `state_at` makes."""
    step = int(tree["step"])
    expected = state_at(step)
    assert tree.keys() == expected.keys()
    assert torch.equal(tree["weights"], expected["weights"])
    assert torch.equal(tree["bias"], expected["bias"])
    return step


def name_at(step: int, *, epoch: int = 1, round_number: int = 1) -> SaveId:
    return SaveId(epoch, round_number, step, step)


def sealed(
    name: SaveId,
    rank: int = 0,
    world_size: int = 1,
    take: Callable[[Header], Stage] | None = None,
    state: dict[str, Any] | None = None,
) -> SealedShard:
    """One rank's shard of the state (of a step), in a stage of its own or in one that a tier gives away."""
    flat = flatten(state_at(name.step) if state is None else state)
    extents = [Extent(named.name, named.shape, named.tensor.element_size()) for named in flat.tensors]
    regions = split_replicated(extents, world_size)[rank]
    parts = []
    for named in flat.tensors:
        region = regions.get(named.name)
        if region is not None:
            part = named.tensor[region.within(Region.whole(named.shape))]
            parts.append(NamedTensor(named.name, part, named.shape, region))
    header = Header(flat.structure if rank == 0 else None, place(parts), ShardId(name, rank, world_size).stated)
    stage = (take or SlotPool(None).take)(header)
    stage.copy([part.tensor for part in parts])
    length = stage.seal(header)
    return SealedShard(name, rank, world_size, stage.slot.view()[:length], stage)


def context_of(
    tier: Tier, rank: int = 0, world_size: int = 1, *, epoch: int | None = None, round_number: int = 1
) -> TierContext:
    """Claims a tier, as a job of one rank does when it starts, unless the epoch is given."""
    if epoch is None:
        epoch = tier.claim(RUN, "a test", agree_epoch(None, [tier.known_epoch(RUN)]))
    return TierContext(RUN, epoch, round_number, rank, world_size)


def save(tiers: list[Tier], name: SaveId, *, metrics: dict[str, float] | None = None, saved_s: float = 0.0) -> None:
    """What all ranks do for one checkpoint, tiers[r] being that of rank r: they put, they commit, they prune."""
    world_size = len(tiers)
    records = []
    for rank, tier in enumerate(tiers):
        take = tier.stage if isinstance(tier, MemoryTier) else None
        records.append(tier.put(sealed(name, rank, world_size, take)))
    manifest = Manifest(name, RUN, world_size, tuple(records), {"loss": 1.0}, saved_s)
    committing = tiers[:1] if tiers[0].is_shared else tiers
    for tier in committing:
        tier.commit(manifest)
    for tier in committing:
        tier.prune()


def staging_folder(root: Path, name: SaveId) -> Path:
    """What a writer that was killed has begun."""
    folder = root / name.staging_name
    folder.mkdir(parents=True)
    return folder


def restore(tier: Tier) -> int | None:
    """The step of the newest checkpoint of which this tier has all; None if there is none."""
    for entry in tier.inventory():
        if entry.is_committed and len(entry.ranks) == entry.world_size:
            shards: list[ShardReader] = [tier.open(entry.name, rank) for rank in entry.ranks]
            try:
                return require_whole(read_tree(shards))
            finally:
                for shard in shards:
                    shard.close()
    return None


def hidden_in(folder: Path) -> list[str]:
    """What a reader passes over, anywhere in a folder; the fence's own files are left out."""
    return sorted(path.name for path in folder.rglob(".*") if path.name.startswith(".tmp-"))
