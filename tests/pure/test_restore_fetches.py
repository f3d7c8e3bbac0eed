"""Who asks whom for a shard, what lies where then, and which copies are made again; against brute force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.few_examples import examples
from torchelastic.checkpoint.replicas.placement import partners
from torchelastic.checkpoint.store.restore_plan import (
    ShardSource,
    candidates,
    kept,
    lost_copies,
    nearness,
    plan_reads,
    sources_elsewhere,
)
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.store.tier import TierEntry


def sources_of(held: Mapping[int, set[int]]) -> dict[int, set[ShardSource]]:
    return {shard: {ShardSource(rank) for rank in ranks} for shard, ranks in held.items()}


def test_a_copy_on_the_own_host_is_read_first_then_those_of_the_others_in_turn() -> None:
    sources, folders = {0: [ShardSource(rank) for rank in range(4)]}, "aabc"

    def order(reader: int) -> list[int]:
        plan = plan_reads(sources, {reader: [0]}, distance=nearness(folders))
        return [source.rank for source in plan[reader][0]]

    assert (order(1), order(2)) == ([0, 1, 2, 3], [2, 3, 0, 1])
    assert [source.rank for source in sources_elsewhere(sources, 0, 1, folders)] == [2, 3]
    assert [source.rank for source in sources_elsewhere(sources, 0, 2, folders)] == [3, 0, 1]


def test_what_a_rank_fetches_all_ranks_of_its_folder_can_read() -> None:
    there = kept(sources_of({0: {0}, 1: {2}}), {0: [0, 1], 2: [1]}, "aab")
    assert there == sources_of({0: {0, 1}, 1: {0, 1, 2}})


def test_who_lost_the_copies_that_it_keeps_for_others_makes_them_again() -> None:
    def lost(
        held: list[list[int]], roots: str, partners: list[list[int]], hosts: str | None = None
    ) -> dict[int, list[int]]:
        (found,) = candidates([[TierEntry(SaveId(1, 0, 0, 1), 2, tuple(shards))] for shards in held])
        return lost_copies(found.sources, roots, hosts or roots, partners)

    assert lost([[0, 1], [0, 1]], "ab", [[1], [0]]) == {}
    assert lost([[0, 1], []], "ab", [[1], [0]]) == {1: [0]}, "its own one it has loaded"
    assert lost([[], [0, 1]], "ab", [[1], [0]]) == {0: [1]}
    assert lost([[0, 1], []], "aa", [[1], [0]]) == {}, "both on one host, where one copy lies"
    assert lost([[0, 1], []], "ab", [[], []]) == {}, "nobody keeps copies"
    assert lost([[0, 1]], "a", []) == {}
    assert lost([[0, 1], [], []], "abc", [[1], [2], [0]]) == {1: [0], 2: [1]}
    assert lost([[0, 1], [], [], []], "aabb", [[2, 3], [3], [], []]) == {2: [0], 3: [1]}, "one copy for each host"
    assert lost([[0], [0], []], "abc", [[2], [], []]) == {}, "two hosts have it, whoever they are"
    assert lost([[0], [0], []], "abc", [[2], [], []], hosts="rrs") == {2: [0]}, "two folders that are lost together"


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[int, set[int]], Sequence[str], int]:
    hosts = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=6))
    shards = draw(st.integers(1, 7))
    holders = st.sets(st.integers(0, len(hosts) - 1), min_size=1)
    return {shard: draw(holders) for shard in range(shards)}, hosts, draw(st.integers(0, 3))


@settings(max_examples=examples(200), deadline=None)
@given(worlds())
def test_when_each_rank_has_its_own_and_the_copies_are_made_any_hosts_may_be_lost(
    world: tuple[dict[int, set[int]], Sequence[str], int],
) -> None:
    held, hosts, copies = world
    ranks = len(hosts)
    wanted = {rank: [shard for shard in held if shard % ranks == rank] for rank in range(ranks)}
    there = kept(sources_of(held), wanted, hosts)
    for rank, shards in wanted.items():
        assert all(ShardSource(rank) in there[shard] for shard in shards)
    lost = lost_copies(there, hosts, hosts, [partners(hosts, rank, copies) for rank in range(ranks)])
    after = {shard: {hosts[source.rank] for source in sources} for shard, sources in there.items()}
    for keeper, shards in lost.items():
        for shard in shards:
            assert hosts[keeper] not in after[shard], "nothing is fetched twice"
            after[shard].add(hosts[keeper])
    names = set(hosts)
    for gone in combinations(names, min(copies, len(names) - 1)):
        assert all(there - set(gone) for there in after.values()), gone
