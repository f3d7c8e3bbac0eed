from __future__ import annotations

from torchelastic.checkpoint.local.choice import LocalCandidate, elsewhere, lost_copies, nearness
from torchelastic.checkpoint.restore_plan import Held, ShardSource, candidates, plan_reads
from torchelastic.checkpoint.store.save_id import SaveId, ShardId

OLD = SaveId(1, 1, 1, 10, "a" * 8)
SHARDS = [ShardId(OLD, rank, 2) for rank in range(2)]


def found(*held: list[ShardId]) -> LocalCandidate:
    """Per rank, which shards of the save are on its host."""
    listed = [[Held(OLD, range(2), [one.rank]) for one in each] for each in held]
    (candidate,) = candidates(listed)
    return candidate


def test_two_saves_of_one_generation_are_not_mixed_up() -> None:
    one, other = SaveId(1, 1, 2, 5, "b" * 8), SaveId(1, 1, 2, 5, "c" * 8)
    both = candidates([[Held(one, range(2), [0])], [Held(other, range(2), [1])]])
    assert [candidate.is_complete for candidate in both] == [False, False]


def test_a_copy_on_the_own_host_is_read_first_then_those_of_the_others_in_turn() -> None:
    sources = [ShardSource(0), ShardSource(1), ShardSource(2), ShardSource(3)]
    distance = nearness(["a", "a", "b", "c"])

    def order(reader: int) -> list[int]:
        return [source.rank for source in plan_reads({0: sources}, {reader: [0]}, distance=distance)[reader][0]]

    assert (order(1), order(2)) == ([0, 1, 2, 3], [2, 3, 0, 1])


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


def test_a_host_has_one_copy_however_many_of_its_ranks_are_in_the_clique() -> None:
    roots = ["a", "a", "b", "b"]
    assert elsewhere(roots, [[1, 2], [], [0, 3], [2]]) == ((2,), (), (0,), ())
    assert lost_copies(found(SHARDS, [], [], []), roots, [[2, 3], [3], [], []]) == {2: [SHARDS[0]], 3: [SHARDS[1]]}
