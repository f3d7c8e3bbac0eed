"""Which checkpoint can be recovered, who fetches what, and which copies are made again: for all that ranks report."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.memory.choice import (
    RecoveryPlan,
    Roster,
    listed_in,
    recovery_plan,
    verification_share,
)
from torchelastic.checkpoint.memory.ids import shard_of
from torchelastic.checkpoint.store.save_id import SaveId, ShardId
from torchelastic.checkpoint.store.tier import TierEntry


def commit_of(ranks: int, generation: int = 3, step: int = 20) -> ShardId:
    """The commit of a save by so many ranks: the shard behind theirs."""
    return shard_of(SaveId(1, 0, generation, step, "00000007"), ranks, ranks)


def entry_of(commit: ShardId, *shards: int, is_committed: bool = True) -> TierEntry:
    """What other ranks are told of a folder with these shards, and maybe the manifest."""
    return TierEntry(commit.name, commit.world_size, shards, is_committed)


def roster_of(hosts: str) -> Roster:
    """A letter per rank; each host has one folder."""
    return Roster(tuple(hosts), tuple(f"folder-{host}" for host in hosts))


def held(commit: ShardId, shards: Mapping[str, str], commits: str) -> dict[str, dict[int, int]]:
    """By folder: the ranks whose shards each host has, as digits, and which hosts have the commit."""
    found: dict[str, dict[int, int]] = {}
    for host, ranks in shards.items():
        found[f"folder-{host}"] = {int(rank): 100 + int(rank) for rank in ranks}
        if host in commits:
            found[f"folder-{host}"][commit.rank] = 10
    return found


def fetched(plan: RecoveryPlan) -> dict[tuple[int, int], tuple[int, ...]]:
    """By receiver and shard."""
    return {(fetch.receiver, fetch.shard.rank): fetch.holders for fetch in plan.fetches}


def after(plan: RecoveryPlan, verified: Mapping[str, Mapping[int, int]], roster: Roster) -> dict[str, set[int]]:
    """Which shards each folder has when everything was fetched and all replicas were made."""
    found = {folder: set(verified.get(folder, {})) for folder in roster.sharers}
    for fetch in (*plan.fetches, *plan.replicas):
        for holder in fetch.holders:
            assert fetch.shard.rank in found[roster.folders[holder]]
            assert roster.folders[holder] != roster.folders[fetch.receiver]
        found[roster.folders[fetch.receiver]].add(fetch.shard.rank)
    return found


# --- which ------------------------------------------------------------------------------------------------------------


def test_candidates_are_ordered_by_generation_and_not_by_step() -> None:
    older, newer = commit_of(2, generation=3, step=50), commit_of(2, generation=4, step=20)
    listings = {
        "folder-a": [entry_of(older)],
        "folder-b": [entry_of(older), entry_of(newer)],
    }
    assert [candidate.save for candidate in listed_in(listings, roster_of("ab"))] == [newer.name, older.name]


def test_saves_of_the_same_step_are_told_apart() -> None:
    before, again = commit_of(2, generation=3), commit_of(2, generation=4)
    listings = {
        "folder-a": [entry_of(before, 0, 1, 2), entry_of(again, 0, is_committed=False)],
        "folder-b": [entry_of(again, 1)],
    }
    first, second = listed_in(listings, roster_of("ab"))
    assert (first.save, second.save) == (again.name, before.name)
    assert {shard: [source.rank for source in each] for shard, each in first.sources.items()} == {0: [0], 1: [1]}
    assert {shard: [source.rank for source in each] for shard, each in second.sources.items()} == {
        0: [0],
        1: [0],
        2: [0],
    }


def test_a_save_without_a_commit_is_no_checkpoint_and_one_without_a_shard_not_complete() -> None:
    begun, lost = commit_of(2, generation=4), commit_of(3)
    listings = {"folder-a": [entry_of(begun, 0, 1, is_committed=False), entry_of(lost, 0)]}
    (listed,) = listed_in(listings, roster_of("a"))
    assert (listed.save, listed.missing, listed.is_complete) == (lost.name, [1, 2, 3], False)


@pytest.mark.parametrize(("shards", "commits", "lost"), [({"a": "0", "b": "0"}, "ab", 1), ({"a": "01"}, "", 2)])
def test_without_one_object_there_is_no_plan(shards: dict[str, str], commits: str, lost: int) -> None:
    candidate = commit_of(2)
    with pytest.raises(CorruptCheckpointError, match=f"nobody has a good copy of shard {lost} of {candidate.name}"):
        recovery_plan(candidate, held(candidate, shards, commits), roster_of("ab"))


# --- who fetches ------------------------------------------------------------------------------------------------------


def test_with_everything_in_place_nothing_is_fetched_and_nothing_copied() -> None:
    candidate = commit_of(2)
    plan = recovery_plan(candidate, held(candidate, {"a": "01", "b": "01"}, "ab"), roster_of("ab"))
    assert (plan.fetches, plan.replicas) == ((), ())
    assert set(plan.holders.values()) == {(0, 1)}


def test_a_replaced_host_fetches_the_commit_and_the_shards_of_its_ranks_and_nothing_else() -> None:
    candidate = commit_of(3)
    plan = recovery_plan(candidate, held(candidate, {"a": "02", "b": "", "c": "12"}, "ac"), roster_of("abc"))
    assert fetched(plan) == {(1, 1): (2,), (1, 3): (0, 2)}
    assert plan.firsts == (0, 1, 2)


def test_the_first_rank_of_a_folder_fetches_its_commit_and_each_rank_its_own_shard() -> None:
    candidate = commit_of(4)
    plan = recovery_plan(candidate, held(candidate, {"a": "0123", "b": ""}, "a"), roster_of("aabb"))
    assert set(fetched(plan)) == {(2, 2), (3, 3), (2, 4)}
    assert plan.firsts == (0, 2)


def test_two_that_fetch_are_served_by_two_holders() -> None:
    candidate = commit_of(4)
    plan = recovery_plan(candidate, held(candidate, {"a": "23", "b": "0123", "c": ""}, "abc"), roster_of("abcc"))
    found = fetched(plan)
    assert {found[2, 2][0], found[3, 3][0]} == {0, 1}
    assert all(set(holders) == {0, 1} for (rank, _), holders in found.items() if rank in (2, 3))


def test_new_ranks_fetch_only_the_commit_and_shards_of_ranks_that_are_gone_stay_where_they_are() -> None:
    grown = commit_of(2)
    assert set(fetched(recovery_plan(grown, held(grown, {"a": "01", "b": "01"}, "ab"), roster_of("abc")))) == {(2, 2)}
    shrunk = commit_of(3)
    plan = recovery_plan(shrunk, held(shrunk, {"a": "02", "b": "12"}, "ab"), roster_of("ab"))
    assert fetched(plan) == {}


# --- replicas ---------------------------------------------------------------------------------------------------------


def test_after_the_loss_of_a_host_its_replicas_are_made_again_elsewhere() -> None:
    candidate, roster = commit_of(2), roster_of("ab")
    verified = held(candidate, {"a": "01", "b": ""}, "a")
    plan = recovery_plan(candidate, verified, roster)
    assert [(copy.receiver, copy.shard.rank, copy.holders) for copy in plan.replicas] == [(1, 0, (0,))]


def test_a_single_host_and_no_copies_wanted_are_no_reason_to_fail() -> None:
    candidate = commit_of(2)
    alone = recovery_plan(candidate, held(candidate, {"a": "01"}, "a"), roster_of("aa"))
    assert alone.replicas == ()
    none = recovery_plan(candidate, held(candidate, {"a": "01", "b": "1"}, "ab"), roster_of("ab"), copies=0)
    assert none.replicas == ()


def test_two_folders_that_are_lost_together_do_not_count_as_two_hosts() -> None:
    candidate = commit_of(3)
    roster = Roster(("rack-1", "rack-1", "rack-2"), ("folder-a", "folder-b", "folder-c"))
    verified = held(candidate, {"a": "012", "b": "012", "c": "2"}, "abc")
    plan = recovery_plan(candidate, verified, roster)
    assert {(copy.receiver, copy.shard.rank) for copy in plan.replicas} == {(2, 0), (2, 1)}


@st.composite
def situations(draw: st.DrawFn) -> tuple[ShardId, dict[str, dict[int, int]], Roster, int]:
    hosts = "".join(draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=6)))
    world_size = draw(st.integers(1, 6))
    candidate = commit_of(world_size)
    digits = [str(rank) for rank in range(world_size)]
    there = sorted(set(hosts))
    shards = {host: "".join(draw(st.lists(st.sampled_from(digits), unique=True))) for host in there}
    commits = "".join(draw(st.lists(st.sampled_from(there), unique=True)))
    return candidate, held(candidate, shards, commits), roster_of(hosts), draw(st.integers(0, 3))


@given(situations())
def test_any_plan_brings_what_is_needed_and_then_survives_the_loss_of_any_hosts_it_can(
    situation: tuple[ShardId, dict[str, dict[int, int]], Roster, int],
) -> None:
    candidate, verified, roster, copies = situation
    there = {shard for shards in verified.values() for shard in shards}
    if {*range(candidate.world_size)} - there:
        with pytest.raises(CorruptCheckpointError):
            recovery_plan(candidate, verified, roster, copies)
        return
    plan = recovery_plan(candidate, verified, roster, copies)
    before = {folder: set(verified.get(folder, {})) for folder in roster.sharers}
    found = after(plan, verified, roster)
    wanted = min(copies + 1, len(set(roster.hosts)))
    for shard in range(candidate.world_size):
        assert len({folder for folder, shards in found.items() if shard in shards}) >= wanted
    for folder, ranks in roster.sharers.items():
        needed = {*(rank for rank in ranks if rank < candidate.rank), candidate.rank}
        assert needed <= found[folder]
        brought = {fetch.shard.rank for fetch in plan.fetches if roster.folders[fetch.receiver] == folder}
        assert brought == needed - before[folder]


# --- verifying --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(1, 5))
def test_the_ranks_of_a_host_verify_everything_once_and_none_more_than_its_part(world_size: int, sharers: int) -> None:
    candidate, other = commit_of(world_size), commit_of(world_size, generation=4)
    entries = [entry_of(other, 0), entry_of(candidate, *range(world_size + 1))]
    ranks = list(range(3, 3 + sharers))
    shares = [verification_share(entries, candidate.name, ranks, rank) for rank in ranks]
    assert sorted(shard for share in shares for shard in share) == list(range(world_size + 1))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
