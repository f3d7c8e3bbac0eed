"""Which copies are planned, against brute force: never a byte too many, and enough for every loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from torchelastic.checkpoint.replication.placement import Copy, by_domain, missing_copies

Held = dict[int, dict[str, int]]


def received_bytes(copies: list[Copy[str]]) -> dict[int, int]:
    receivers = {copy.receiver for copy in copies}
    return {rank: sum(copy.size_bytes for copy in copies if copy.receiver == rank) for rank in receivers}


def is_covered(held: Held, domains: Sequence[str], losses: int) -> bool:
    """Whether every shard is left whichever hosts are lost; tries them all."""
    hosts = by_domain(domains)
    shards = {shard for each in held.values() for shard in each}
    for lost in combinations(hosts, min(losses, len(hosts) - 1)):
        left = {rank for host in hosts if host not in lost for rank in hosts[host]}
        if shards != {shard for rank in left for shard in held.get(rank, {})}:
            return False
    return True


def after(held: Held, copies: list[Copy[str]]) -> Held:
    found = {rank: dict(shards) for rank, shards in held.items()}
    for copy in copies:
        found.setdefault(copy.receiver, {})[copy.shard] = copy.size_bytes
    return found


def test_who_holds_nothing_may_receive_and_senders_take_turns() -> None:
    held = {0: {"x": 5, "y": 5}, 1: {"x": 5, "y": 5}}
    copies = missing_copies(held, "abc", losses=2)
    assert [(copy.receiver, copy.shard) for copy in copies] == [(2, "x"), (2, "y")]
    assert {copy.sender for copy in copies} == {0, 1}


def test_a_large_world_shares_the_receiving() -> None:
    domains = [f"host{rank // 8:03}" for rank in range(512)]
    held = {rank: {f"shard{rank:03}": 1000 + rank} for rank in range(512)}
    copies = missing_copies(held, domains, losses=2)
    total_bytes = sum(copy.size_bytes for copy in copies)
    assert total_bytes == 2 * sum(1000 + rank for rank in range(512))
    assert max(received_bytes(copies).values()) < 1.6 * total_bytes / 512
    assert is_covered(after(held, copies), domains, 1)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Held, Sequence[str], int]:
    hosts = draw(st.sampled_from(["ab", "abc", "aab", "aabb", "abcd", "aabc"]))
    losses = draw(st.integers(0, len(set(hosts)) - 1))
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    held: Held = {rank: {} for rank in range(len(hosts))}
    for number, size in enumerate(sizes):
        for rank in draw(st.sets(st.integers(0, len(hosts) - 1), min_size=1)):
            held[rank][f"shard{number}"] = size
    return held, hosts, losses


def every_outcome(held: Held, domains: Sequence[str], losses: int) -> list[tuple[int, int]]:
    """(bytes, the most that one rank receives) of every set of copies that covers the losses."""
    sizes = {shard: size for shards in held.values() for shard, size in shards.items()}
    options = []
    for shard in sorted(sizes):
        alone = {rank: {shard: 1} for rank in range(len(domains)) if shard in held[rank]}
        free = [rank for rank in range(len(domains)) if rank not in alone]
        sets = [chosen for count in range(len(free) + 1) for chosen in combinations(free, count)]
        fine = [one for one in sets if is_covered(alone | {rank: {shard: 1} for rank in one}, domains, losses)]
        options.append([(shard, chosen) for chosen in fine])
    found = []
    for choice in product(*options):
        received = dict.fromkeys(range(len(domains)), 0)
        for shard, ranks in choice:
            for rank in ranks:
                received[rank] += sizes[shard]
        found.append((sum(received.values()), max(received.values())))
    return found


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_every_loss_is_covered_with_the_fewest_bytes_and_nobody_receives_twice_as_much_as_needed(
    world: tuple[Held, Sequence[str], int],
) -> None:
    held, domains, losses = world
    copies = missing_copies(held, domains, losses=losses)
    assert is_covered(after(held, copies), domains, losses)
    for copy in copies:
        assert copy.shard in held[copy.sender]
        assert copy.shard not in held[copy.receiver]
    least_bytes, least_peak = min(every_outcome(held, domains, losses))
    assert sum(copy.size_bytes for copy in copies) == least_bytes
    assert max(received_bytes(copies).values(), default=0) <= 2 * least_peak
