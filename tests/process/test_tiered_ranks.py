"""Real gloo groups save together and restore with other numbers of ranks, in files that are really there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.process import tiered_work as work
from tests.process.local_ranks import Crew, succeeded

CREW_SIZE = 4


@pytest.fixture
def saved(crew: Crew, tmp_path: Path) -> list[Any]:
    """By four ranks, on one host with a disk."""
    answers = succeeded(crew.run(work.save, "memory disk", str(tmp_path), ranks=4))
    assert [answer["failures"] for answer in answers] == [[]] * 4
    return answers


@pytest.mark.parametrize(("kinds", "ranks"), [("memory", 2), ("disk", 1)])
def test_what_four_have_saved_any_number_restores_bit_for_bit(
    crew: Crew, saved: list[Any], tmp_path: Path, kinds: str, ranks: int
) -> None:
    answers = succeeded(crew.run(work.restore, kinds, str(tmp_path), ranks=ranks))
    assert [answer["step"] for answer in answers] == [3] * ranks
    assert answers[0]["digest"] == saved[0]["digest"]
    assert [answer["failures"] for answer in answers] == [[]] * ranks
    assert answers[0]["newest"].startswith("step-000000050.e2.r5.g1"), "a new job has a higher epoch"


def test_a_host_that_is_gone_is_replaced_by_its_replica(crew: Crew, tmp_path: Path) -> None:
    saved = succeeded(crew.run(work.save, "hosts", str(tmp_path), 3, 1, ranks=4))
    assert [answer["failures"] for answer in saved] == [[]] * 4
    for rank in range(4):
        names = [path.name for path in (tmp_path / f"host-{rank}").glob("step-*3.*/shard*")]
        assert len(names) == 2, names
    shutil.rmtree(tmp_path / "host-1")
    answers = succeeded(crew.run(work.restore, "hosts", str(tmp_path), ranks=4))
    assert [answer["step"] for answer in answers] == [3] * 4
    assert answers[0]["digest"] == saved[0]["digest"]


def test_a_host_that_joins_with_checkpoints_of_an_earlier_job_keeps_those_of_this_one(
    crew: Crew, tmp_path: Path
) -> None:
    assert succeeded(crew.run(work.save_with_a_host_of_an_earlier_job, str(tmp_path), ranks=2)) == [2, 2]


def test_shards_of_two_jobs_are_never_put_together(crew: Crew, tmp_path: Path) -> None:
    answers = succeeded(crew.run(work.restore_of_two_jobs, str(tmp_path), ranks=2))
    assert answers == ["CorruptCheckpointError"] * 2


def test_replicas_that_a_former_group_still_sends_are_refused(crew: Crew, tmp_path: Path) -> None:
    told = succeeded(crew.run(work.push_what_the_group_before_has_begun, str(tmp_path), ranks=2))
    assert told == [["OutdatedRoundError", "taken"]] * 2


def test_a_place_that_hangs_on_one_host_stops_no_training_there(crew: Crew, tmp_path: Path) -> None:
    answers = succeeded(crew.run(work.save_where_the_disk_of_rank_1_hangs, str(tmp_path), ranks=2))
    assert [answer["failures"] for answer in answers] == [[]] * 2
    assert max(answer["stall_s"] for answer in answers) < 5.0
    assert answers[0]["on_disk"] == answers[1]["on_disk"]
    assert answers[0]["on_disk"][0] == 5, "of the saves that came meanwhile the newest has waited for the place"


def test_of_what_is_left_out_where_saves_come_too_fast_nothing_is_stored(crew: Crew, tmp_path: Path) -> None:
    answers = succeeded(crew.run(work.save_where_rank_0_is_slower, str(tmp_path), ranks=2))
    assert [answer["failures"] for answer in answers] == [[]] * 2
    steps = answers[0]["on_disk"]
    assert steps[0] == 8, "the last one"
    assert len(steps) < 8
    assert answers[0]["folders"] == len(steps)


@pytest.mark.parametrize("full_rank", [0, 2])
def test_a_rank_whose_disk_is_full_stops_that_checkpoint_for_all_and_no_other(
    crew: Crew, tmp_path: Path, full_rank: int
) -> None:
    answers = succeeded(crew.run(work.save_where_one_disk_is_full, str(tmp_path), full_rank, ranks=4))
    for answer in answers:
        (failure,) = answer["failures"]
        assert "the disk is full" in failure
        assert sorted(answer["steps"]) == [1, 3]
        assert answer["left"] == []


def test_a_rank_without_room_for_a_save_that_has_grown_is_not_waited_for(crew: Crew, tmp_path: Path) -> None:
    answers = succeeded(crew.run(work.save_what_outgrows_its_slot_where_memory_is_full, str(tmp_path), ranks=2))
    for answer in answers:
        assert answer["waits"] == [False] * 3
        assert answer["complete"] == [3]
    assert ["no room" in failure for failure in answers[0]["failures"]] == [True]


def test_a_save_that_a_rank_never_joins_is_given_up_when_the_group_changes(crew: Crew, tmp_path: Path) -> None:
    answers = succeeded(crew.run(work.save_where_one_rank_does_not, str(tmp_path), ranks=2))
    assert "the group has ended before rank 1" in answers[0]["failures"][0]
    assert answers[1]["failures"] == []
    assert [answer["complete"][0] for answer in answers] == [3, 3]


def test_a_rank_that_was_silent_during_one_save_takes_part_in_the_next(crew: Crew, tmp_path: Path) -> None:
    answers = succeeded(crew.run(work.save_again_after_rank_1_was_silent, str(tmp_path), ranks=2))
    assert ["rank 1 gives no sign of life any more" in failure for failure in answers[0]["failures"]] == [True]
    assert [answer["complete"] for answer in answers] == [[2]] * 2


def test_a_save_of_which_rank_0_could_not_tell_all_holds_nobody_up(crew: Crew, tmp_path: Path) -> None:
    answers = succeeded(crew.run(work.save_that_rank_0_tells_to_some, str(tmp_path), ranks=2))
    assert answers == [{"waits": False, "complete": [2]}] * 2


def test_a_state_without_a_tree_is_saved_by_rank_0_and_comes_back(crew: Crew, tmp_path: Path) -> None:
    answers = succeeded(crew.run(work.save_and_restore_a_plain_state, str(tmp_path), ranks=2))
    assert answers == [(4, True), (4, False)], "the sync brings the others level"
