from __future__ import annotations

from torchelastic.checkpoint.local.choice import Holding, Survey, folders_of, to_prune
from torchelastic.checkpoint.local.names import LocalSave, Shard
from torchelastic.checkpoint.policy import KeepAll, KeepLast

OLD, NEW = LocalSave(1, 10, 2, "a" * 8), LocalSave(2, 5, 2, "b" * 8)


def report(*shards: Shard, folder: int = 0) -> list[tuple[Shard, int, float]]:
    return [(shard, folder, 100.0 * shard.save.generation) for shard in shards]


def test_a_save_is_complete_when_somebody_holds_every_part_of_the_world_that_saved_it() -> None:
    survey = Survey.of([report(OLD.shard(0), NEW.shard(0)), report(OLD.shard(1))])
    assert survey.complete() == [OLD]
    assert survey.incomplete() == {NEW: [1]}
    both = Survey.of([report(OLD.shard(0), OLD.shard(1), NEW.shard(0), NEW.shard(1))])
    assert both.complete() == [NEW, OLD]
    assert both.newest_generation == 2
    assert Survey().complete() == []
    assert Survey().newest_generation == -1


def test_two_saves_of_one_generation_are_not_mixed_up() -> None:
    one, other = LocalSave(2, 5, 2, "b" * 8), LocalSave(2, 5, 2, "c" * 8)
    assert Survey.of([report(one.shard(0)), report(other.shard(1))]).complete() == []


def test_the_own_copy_is_read_first_then_the_host_then_the_others_in_turn() -> None:
    shard = OLD.shard(0)
    roots = ["a", "a", "b", "c"]
    survey = Survey.of([report(shard), report(shard, folder=1), report(shard, folder=2), report(shard, folder=3)])
    assert [place.rank for place in survey.places(shard, 1, roots)] == [1, 0, 2, 3]
    assert [place.rank for place in survey.places(shard, 2, roots)] == [2, 3, 0, 1]
    assert survey.places(OLD.shard(1), 0, roots) == []
    left_over = Survey.of([report(shard, folder=7), report(shard, folder=1)])
    assert left_over.places(shard, 1, roots) == [Holding(1, 1), Holding(0, 7)]


def test_who_lost_the_copies_that_it_keeps_for_others_makes_them_again() -> None:
    cliques, roots = [[0, 1], [0, 1]], ["a", "b"]
    whole = report(OLD.shard(0), OLD.shard(1))
    assert Survey.of([whole, whole]).lost_copies(OLD, roots, cliques) == {}
    assert Survey.of([whole, []]).lost_copies(OLD, roots, cliques) == {1: [OLD.shard(0)]}, "its own one it has loaded"
    assert Survey.of([[], whole]).lost_copies(OLD, roots, cliques) == {0: [OLD.shard(1)]}
    assert Survey.of([whole, []]).lost_copies(OLD, ["a", "a"], cliques) == {}, "both on one host, where one copy lies"
    assert Survey.of([whole, []]).lost_copies(OLD, roots, [[0], [1]]) == {}, "nobody keeps copies"
    alone = Survey.of([whole]).lost_copies(OLD, ["a"], [[]])
    assert alone == {}
    three = Survey.of([whole, [], []]).lost_copies(OLD, ["a", "b", "c"], [[0, 1], [1, 2], [2, 0]])
    assert three == {1: [OLD.shard(0)], 2: [OLD.shard(1)]}


def test_folders_of_former_ranks_belong_to_the_first_rank_of_the_host() -> None:
    roots = ["a", "a", "b"]
    assert folders_of(0, roots, [0, 1, 2, 5]) == [0, 2, 5]
    assert folders_of(1, roots, [0, 1, 2, 5]) == [1]
    assert folders_of(2, roots, [2, 1]) == [2, 1]


def test_what_the_policy_does_not_want_goes_and_so_does_what_was_never_finished() -> None:
    torn, coming = LocalSave(0, 7, 2, "c" * 8), LocalSave(3, 6, 2, "d" * 8)
    held = [torn, OLD, NEW, coming]
    complete = {OLD: 100.0, NEW: 200.0}
    assert to_prune(KeepLast(1), complete, held, ()) == {torn, OLD}
    assert to_prune(KeepLast(2), complete, held, ()) == {torn}
    assert to_prune(KeepAll(), complete, held, {torn}) == set()
    assert to_prune(KeepLast(1), {}, held, ()) == set(), "nothing goes before something is complete"


def test_a_clock_that_was_set_back_and_a_rollback_delete_nothing_wrong() -> None:
    assert to_prune(KeepLast(1), {OLD: 200.0, NEW: 100.0}, [OLD, NEW], ()) == {OLD}
