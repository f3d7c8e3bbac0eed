"""Which ranks keep copies of each other's shards, by rank numbers alone. Pure.

`placement.py` has the choice that knows hosts and racks; this one is compatible with NVRx.
"""

from __future__ import annotations


def parse_group_sequence(replication_jump: int, replication_factor: int, world_size: int) -> list[list[int]]:
    """Cuts the world into cliques of `replication_factor` ranks that are `replication_jump` apart.

    Ranks of equal remainder modulo the jump are walked in order and cut into runs (the rule of NVIDIA's NVRx,
    `local.replication.group_utils`): with 32 ranks, jump 8 and factor 2 the cliques are 0-8, 1-9, .. 7-15, 16-24, ..
    With as many ranks per host as the jump, the members of a clique are on different hosts.

    Args:
        replication_jump: distance between two members of a clique; the number of ranks on a host, for example.
        replication_factor: how many ranks hold each shard; 1 replicates nothing.
        world_size: number of ranks.

    Returns:
        The cliques, sorted by their first rank; each rank is in exactly one.

    Raises:
        ValueError: a number is below 1, or the world is no multiple of jump times factor.
    """
    for name, value in (
        ("replication_jump", replication_jump),
        ("replication_factor", replication_factor),
        ("world_size", world_size),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    block = replication_jump * replication_factor
    if world_size % block:
        raise ValueError(
            f"world_size {world_size} is no multiple of replication_jump {replication_jump} times replication_factor "
            f"{replication_factor} = {block}; run with a multiple of {block} ranks, choose a smaller jump or factor, "
            f"or place by failure domains (FailureDomains.cliques_across), which takes any number"
        )
    return sorted(
        list(range(first, first + block, replication_jump))
        for start in range(0, world_size, block)
        for first in range(start, start + replication_jump)
    )


def holders_of(rank: int, replication_jump: int, replication_factor: int, world_size: int) -> list[int]:
    """The ranks that hold the shard of one, itself included, also where the world cannot be cut into cliques.

    Then each rank gives copies to those that are one jump, two jumps, .. behind it, around the world: each still holds
    as many shards as in a clique. So a job that has lost a rank goes on.

    Args:
        rank: whose shard it is.
        replication_jump: see `parse_group_sequence`.
        replication_factor: see `parse_group_sequence`; fewer where the world is smaller.
        world_size: number of ranks.

    Raises:
        ValueError: a number is below 1.

    >>> [holders_of(rank, 1, 2, world_size=4) for rank in range(4)]
    [[0, 1], [0, 1], [2, 3], [2, 3]]
    >>> [holders_of(rank, 1, 2, world_size=3) for rank in range(3)]
    [[0, 1], [1, 2], [0, 2]]
    """
    if min(replication_jump, replication_factor, world_size) >= 1 and world_size % (
        replication_jump * replication_factor
    ):
        return sorted({(rank + number * replication_jump) % world_size for number in range(replication_factor)})
    cliques = parse_group_sequence(replication_jump, replication_factor, world_size)
    return next(ranks for ranks in cliques if rank in ranks)
