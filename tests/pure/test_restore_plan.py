"""Which checkpoint is restored (complete, newest, the same on every rank), and who gets which shard from whom."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.store.restore_plan import ShardSource, candidates, nearness, plan_reads
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.store.tier import TierEntry, agree_epoch

Found = list[list[TierEntry]]
SAVES = [SaveId(1, 0, generation, step=generation) for generation in range(6)]


def ranks_of(save: SaveId) -> range:
    return range(1 + save.step % 4)  # as many shards as that group had ranks


@st.composite
def holdings(draw: st.DrawFn) -> TierEntry:
    save, place = draw(st.sampled_from(SAVES)), draw(st.sampled_from(["memory", "disk"]))
    ranks = draw(st.sets(st.sampled_from(ranks_of(save))))
    return TierEntry(save, len(ranks_of(save)), tuple(ranks), draw(st.booleans()), place=place)


groups = st.lists(st.lists(holdings(), max_size=6), max_size=5)


def readable(group: Found, save: SaveId) -> set[tuple[int, ShardSource]]:
    return {
        (shard, ShardSource(rank, one.place))
        for rank, each in enumerate(group)
        for one in each
        if one.name == save
        for shard in one.ranks
    }


@given(groups)
def test_what_is_committed_and_whole_is_complete_and_the_rest_says_what_it_lacks(group: Found) -> None:
    found = candidates(group)
    listed = {one.name for each in group for one in each}
    assert [candidate.save for candidate in found] == sorted(listed, reverse=True)
    for candidate in found:
        sources = readable(group, candidate.save)
        there = {shard for shard, _ in sources}
        assert candidate.missing == [shard for shard in ranks_of(candidate.save) if shard not in there]
        committed = any(one.is_committed for each in group for one in each if one.name == candidate.save)
        assert candidate.is_complete == (committed and not candidate.missing)
        assert {(shard, one) for shard, each in candidate.sources.items() for one in each} == sources


def test_what_was_completed_once_and_cannot_be_restored_says_why() -> None:
    def fault(*held: TierEntry) -> str:
        (found,) = candidates([[each] for each in held])
        return found.fault

    def here(*ranks: int, damage: str | None = None, is_committed: bool = True) -> TierEntry:
        return TierEntry(save, 2, ranks, is_committed, damage)

    save, cut = SAVES[5], "a file was cut"
    assert fault(here(0, 1)) == ""
    assert fault(here(0, 1, damage=cut)) == "", "another copy is whole"
    assert fault(here(0), here()) == f"{save} lacks the shards of rank(s) 1"
    assert fault(*[here(0, damage=cut)] * 2) == f"{save} lacks the shards of rank(s) 1: {cut}"
    assert fault(here(0, is_committed=False)) == "", "it was never completed"
    assert fault(here(0, is_committed=False, damage=cut)) == f"{save}: {cut}"


@given(groups, st.randoms(use_true_random=False))
def test_the_order_of_what_is_listed_changes_nothing(group: Found, chance: random.Random) -> None:
    assert candidates([chance.sample(each, len(each)) for each in group]) == candidates(group)


# --- from whom --------------------------------------------------------------------------------------------------------


@given(groups, st.dictionaries(st.integers(0, 5), st.sets(st.integers(0, 3))))
def test_each_reader_is_told_every_source_of_what_it_wants_its_own_first(
    group: Found, wanted: dict[int, set[int]]
) -> None:
    for candidate in candidates(group):
        plan = plan_reads(candidate.sources, wanted)
        assert plan.keys() == wanted.keys()
        for reader, shards in plan.items():
            assert shards.keys() == wanted[reader]
            for shard, sources in shards.items():
                assert len(sources) == len(set(sources))
                assert set(sources) == set(candidate.sources.get(shard, ()))
                if reader in {source.rank for source in sources}:
                    assert sources[0].rank == reader


# --- tiers ------------------------------------------------------------------------------------------------------------


@given(st.none() | st.integers(1, 50), st.lists(st.integers(0, 50)))
def test_an_agreed_epoch_is_above_what_a_new_job_finds_and_never_goes_back(
    current: int | None, known: list[int]
) -> None:
    epoch = agree_epoch(current, known)
    assert all(epoch > other for other in known)
    assert epoch >= (current or 1)
    if current and all(other < current for other in known):
        assert epoch == current


def test_the_own_folder_is_nearest_then_another_ranks_and_then_a_place_of_all() -> None:
    distance = nearness(["a", "a", "b"])
    sources = [ShardSource(0, "durable"), ShardSource(2), ShardSource(1)]
    assert [str(source) for source in sorted(sources, key=lambda one: distance(0, one))] == [
        "rank 1",
        "rank 2",
        "durable",
    ]
