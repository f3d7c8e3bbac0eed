"""Which checkpoint is restored: complete, newest, and the same on every rank."""

from __future__ import annotations

import json
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.store import SaveId, TierEntry
from torchelastic.checkpoint.store.selection import Candidate, Inventory, Read, candidates
from torchelastic.checkpoint.store.tier import agree_epoch

TIERS = ("memory", "disk", "durable")


def name_of(number: int) -> SaveId:
    return SaveId(1, number // 3, number % 3, step=100 - number)


@st.composite
def entries(draw: st.DrawFn) -> TierEntry:
    number = draw(st.integers(0, 5))
    world_size = 1 + number % 4  # as many ranks as that group had
    ranks = draw(st.sets(st.integers(0, world_size - 1)))
    return TierEntry(name_of(number), world_size, tuple(sorted(ranks)), draw(st.booleans()))


groups = st.lists(st.dictionaries(st.sampled_from(TIERS), st.lists(entries(), max_size=5)), max_size=5)


def readable(group: list[dict[str, list[TierEntry]]], name: SaveId) -> set[Read]:
    return {
        Read(shard_rank, rank, tier)
        for rank, inventory in enumerate(group)
        for tier, found in inventory.items()
        for entry in found
        if entry.name == name
        for shard_rank in entry.ranks
    }


@given(groups)
def test_only_what_is_complete_and_committed_is_chosen_and_all_of_that(group: list[dict[str, list[TierEntry]]]) -> None:
    chosen = candidates(group, TIERS)
    expected = []
    for number in range(6):
        shards = {read.shard_rank for read in readable(group, name_of(number))}
        listed = [e for inv in group for found in inv.values() for e in found if e.name == name_of(number)]
        if len(shards) == 1 + number % 4 and any(entry.is_committed for entry in listed):
            expected.append(name_of(number))
    assert [candidate.name for candidate in chosen] == sorted(expected, reverse=True)


@given(groups)
def test_each_shard_is_read_once_by_somebody_who_can(group: list[dict[str, list[TierEntry]]]) -> None:
    for candidate in candidates(group, TIERS):
        possible = readable(group, candidate.name)
        assert [read.shard_rank for read in candidate.reads] == list(range(candidate.world_size))
        for read in candidate.reads:
            every_way = {read, *candidate.alternatives[read.shard_rank]}
            assert every_way == {way for way in possible if way.shard_rank == read.shard_rank}
            assert TIERS.index(read.tier) == min(TIERS.index(way.tier) for way in every_way)
        assert {read.reader for read in candidate.reads} <= set(range(len(group)))


@given(groups, st.randoms(use_true_random=False))
def test_the_order_of_what_is_listed_changes_nothing(
    group: list[dict[str, list[TierEntry]]], chance: random.Random
) -> None:
    shuffled = []
    for inventory in group:
        tiers = [(tier, chance.sample(found, len(found))) for tier, found in inventory.items()]
        shuffled.append(dict(chance.sample(tiers, len(tiers))))
    assert candidates(shuffled, TIERS) == candidates(group, TIERS)


@given(groups, st.randoms(use_true_random=False))
def test_who_has_which_rank_changes_only_who_reads(
    group: list[dict[str, list[TierEntry]]], chance: random.Random
) -> None:
    def what(candidate: Candidate) -> tuple[SaveId, list[tuple[int, str]]]:
        return candidate.name, [(read.shard_rank, read.tier) for read in candidate.reads]

    permuted = chance.sample(group, len(group))
    assert [what(candidate) for candidate in candidates(permuted, TIERS)] == [
        what(candidate) for candidate in candidates(group, TIERS)
    ]


@given(entries())
def test_an_entry_survives_being_sent(entry: TierEntry) -> None:
    assert TierEntry.from_plain(json.loads(json.dumps(entry.as_plain()))) == entry


def on_hosts(*held: tuple[int, ...], world_size: int) -> list[Inventory]:
    return [{"memory": [TierEntry(name_of(3), world_size, ranks)]} for ranks in held]


def test_ranks_read_their_own_shard_where_they_can() -> None:
    (candidate,) = candidates(on_hosts((0, 1), (0, 1), (2, 3), (2, 3), world_size=4), TIERS)
    assert [read.reader for read in candidate.reads] == [0, 1, 2, 3]


def test_many_shards_are_spread_evenly_over_few_readers() -> None:
    (candidate,) = candidates(on_hosts(*[tuple(range(10))] * 3, world_size=10), TIERS)
    assert sorted(Counter(read.reader for read in candidate.reads).values()) == [3, 3, 4]


def test_a_replica_in_memory_goes_before_the_disk_and_the_disk_is_the_next_choice() -> None:
    name = name_of(3)
    lost = {"disk": [TierEntry(name, 2, (0, 1))]}
    holder = {"memory": [TierEntry(name, 2, (0, 1))], "disk": [TierEntry(name, 2, (0, 1))]}
    (candidate,) = candidates([lost, holder], TIERS)
    assert candidate.reads == (Read(0, 1, "memory"), Read(1, 1, "memory"))
    assert [read.tier for read in candidate.alternatives[0]] == ["disk", "disk"]


def test_shards_of_one_checkpoint_may_come_from_several_tiers() -> None:
    name = name_of(3)
    group = [{"memory": [TierEntry(name, 2, (0,))]}, {"durable": [TierEntry(name, 2, (0, 1))]}]
    (candidate,) = candidates(group, TIERS)
    assert candidate.reads == (Read(0, 0, "memory"), Read(1, 1, "durable"))


def test_tiers_that_nobody_asked_for_do_not_count() -> None:
    assert candidates([{"other": [TierEntry(name_of(1), 1, (0,))]}], TIERS) == []


@given(st.none() | st.integers(0, 50), st.lists(st.integers(0, 50)))
def test_an_agreed_epoch_is_above_what_a_new_job_finds_and_never_goes_back(
    current: int | None, known: list[int]
) -> None:
    epoch = agree_epoch(current, known)
    if current is None:
        assert all(epoch > other for other in known)
        assert epoch >= 1
    else:
        assert epoch == max([current, *known])
