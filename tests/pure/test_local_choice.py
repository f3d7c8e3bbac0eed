from __future__ import annotations

from torchelastic.checkpoint.local.choice import LocalCandidate, folders_of, lost_copies, nearness, to_prune
from torchelastic.checkpoint.policy import KeepAll, KeepLast
from torchelastic.checkpoint.restore_plan import Held, ShardSource, candidates, plan_reads
from torchelastic.checkpoint.store.save_id import SaveId, ShardId

OLD, NEW = SaveId(0, 0, 1, 10, "a" * 8), SaveId(0, 0, 2, 5, "b" * 8)
SHARDS = [ShardId(OLD, rank, 2) for rank in range(2)]


def found(*held: list[ShardId]) -> LocalCandidate:
    """Per rank, which shards of the old save it has in its own folder."""
    whole = range(2)
    listed = [[Held(OLD, whole, [one.rank], str(rank)) for one in each] for rank, each in enumerate(held)]
    (candidate,) = candidates(listed)
    return candidate


def test_two_saves_of_one_generation_are_not_mixed_up() -> None:
    one, other = SaveId(0, 0, 2, 5, "b" * 8), SaveId(0, 0, 2, 5, "c" * 8)
    both = candidates([[Held(one, range(2), [0])], [Held(other, range(2), [1])]])
    assert [candidate.is_complete for candidate in both] == [False, False]


def test_the_own_copy_is_read_first_then_the_host_then_the_others_in_turn() -> None:
    sources = [ShardSource(0, "0"), ShardSource(1, "1"), ShardSource(2, "2"), ShardSource(3, "3")]
    distance = nearness(["a", "a", "b", "c"])

    def order(reader: int, sources: list[ShardSource]) -> list[ShardSource]:
        return list(plan_reads({0: sources}, {reader: [0]}, distance=distance)[reader][0])

    assert [source.rank for source in order(1, sources)] == [1, 0, 2, 3]
    assert [source.rank for source in order(2, sources)] == [2, 3, 0, 1]
    assert order(1, [ShardSource(0, "7"), ShardSource(1, "1")]) == [ShardSource(1, "1"), ShardSource(0, "7")]


def test_who_lost_the_copies_that_it_keeps_for_others_makes_them_again() -> None:
    partners, roots = [[1], [0]], ["a", "b"]
    whole = SHARDS
    assert lost_copies(found(whole, whole), roots, partners) == {}
    assert lost_copies(found(whole, []), roots, partners) == {1: [SHARDS[0]]}, "its own one it has loaded"
    assert lost_copies(found([], whole), roots, partners) == {0: [SHARDS[1]]}
    assert lost_copies(found(whole, []), ["a", "a"], partners) == {}, "both on one host, where one copy lies"
    assert lost_copies(found(whole, []), roots, [[], []]) == {}, "nobody keeps copies"
    assert lost_copies(found(whole), ["a"], [[]]) == {}
    three = lost_copies(found(whole, [], []), ["a", "b", "c"], [[1], [2], [0]])
    assert three == {1: [SHARDS[0]], 2: [SHARDS[1]]}


def test_folders_of_former_ranks_belong_to_the_first_rank_of_the_host() -> None:
    roots = ["a", "a", "b"]
    assert folders_of(0, roots, [0, 1, 2, 5]) == [0, 2, 5]
    assert folders_of(1, roots, [0, 1, 2, 5]) == [1]
    assert folders_of(2, roots, [2, 1]) == [2, 1]


def test_what_the_policy_does_not_want_goes_and_so_does_what_was_never_finished() -> None:
    torn, coming = SaveId(0, 0, 0, 7, "c" * 8), SaveId(0, 0, 3, 6, "d" * 8)
    held = [torn, OLD, NEW, coming]
    complete = {OLD: 100.0, NEW: 200.0}
    assert to_prune(KeepLast(1), complete, held, ()) == {torn, OLD}
    assert to_prune(KeepLast(2), complete, held, ()) == {torn}
    assert to_prune(KeepAll(), complete, held, {torn}) == set()
    assert to_prune(KeepLast(1), {}, held, ()) == set(), "nothing goes before something is complete"


def test_a_clock_that_was_set_back_and_a_rollback_delete_nothing_wrong() -> None:
    assert to_prune(KeepLast(1), {OLD: 200.0, NEW: 100.0}, [OLD, NEW], ()) == {OLD}
