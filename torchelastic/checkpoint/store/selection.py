"""Pure: which checkpoint a group restores, and which rank reads which shard from where.

Every rank computes the same from the same inventories, so nobody has to be asked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.store.tier import TierEntry

#: What one rank can read: what `Tier.inventory` returned, by the tier's name.
Inventory = Mapping[str, Sequence[TierEntry]]


@dataclass(frozen=True, order=True)
class Read:
    """One shard on its way.

    Attributes:
        shard_rank: whose shard it is, counted in the group that wrote it.
        reader: the rank that reads it from the tier, counted in the group that restores.
        tier: the name of the tier.
    """

    shard_rank: int
    reader: int
    tier: str


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that is complete, and how to read it.

    Attributes:
        name: which checkpoint it is.
        world_size: how many shards it has.
        reads: one per shard, in the order of the shards.
        alternatives: by shard, where else it can be read, best first; for when a read finds damage.
    """

    name: SaveId
    world_size: int
    reads: tuple[Read, ...]
    alternatives: Mapping[int, tuple[Read, ...]]


def candidates(inventories: Sequence[Inventory], tier_order: Sequence[str]) -> list[Candidate]:
    """All checkpoints that the group can restore, the newest first: take the first, and the next if it proves damaged.

    A checkpoint counts if somebody has its manifest, and each of its shards can be read by somebody, from whatever
    tier. A shard is read from the
    first tier that has it: by the rank of its own number if that can read it there, else by one with little to read.

    Args:
        inventories: by rank; all ranks of the group that restores.
        tier_order: names of the tiers, freshest and fastest first; others are passed over.

    Returns:
        Complete ones only, newest first (by epoch, round and generation); empty if there is none.
    """
    committed: set[SaveId] = set()
    sources: dict[tuple[SaveId, int], dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for rank, inventory in enumerate(inventories):
        for order, tier in enumerate(tier_order):
            for entry in inventory.get(tier, ()):
                if entry.is_committed:
                    committed.add(entry.name)
                for shard_rank in set(entry.ranks):
                    if 0 <= shard_rank < entry.world_size:
                        sources[entry.name, entry.world_size][shard_rank].append((order, rank))
    complete = [
        (name, world_size)
        for (name, world_size), shards in sources.items()
        if len(shards) == world_size and name in committed
    ]
    return [_planned(name, size, sources[name, size], tier_order) for name, size in sorted(complete, reverse=True)]


def _planned(
    name: SaveId, world_size: int, sources: Mapping[int, Sequence[tuple[int, int]]], tier_order: Sequence[str]
) -> Candidate:
    loads: dict[int, int] = defaultdict(int)
    chosen: dict[int, Read] = {}
    alternatives: dict[int, tuple[Read, ...]] = {}
    # What few can read comes first: the others can then even things out.
    for shard_rank in sorted(sources, key=lambda shard: (len(sources[shard]), shard)):
        ordered = sorted(
            sources[shard_rank],
            key=lambda source: (source[0], source[1] != shard_rank, loads[source[1]], source[1]),
        )
        reads = [Read(shard_rank, rank, tier_order[order]) for order, rank in ordered]
        loads[reads[0].reader] += 1
        chosen[shard_rank], alternatives[shard_rank] = reads[0], tuple(reads[1:])
    return Candidate(name, world_size, tuple(chosen[shard] for shard in range(world_size)), alternatives)
