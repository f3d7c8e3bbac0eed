"""Contract: who is killed after a save has lost nothing of it, whatever the next world size, and with copies a host."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.contracts.group_facades import GROUPS, WITH_COPIES, resume, save, save_and_die
from tests.few_examples import some_daily
from tests.process.forked_ranks import run_ranks, values

SAVED = 7
#: What may be lost of the four hosts of a job without a shared place: none, or one where each shard has a copy.
AT_LEAST = {"training, private disk": 4, **dict.fromkeys(WITH_COPIES, 3)}
CASES = [(name, *ranks) for name in GROUPS for ranks in ((2, 4), (4, AT_LEAST.get(name, 2)), (1, 1), (4, 4))]
#: The hosts that are lost of three; of one and of two, one each is of every day.
LOST, DAILY = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], [(1,), (0, 2)]


@pytest.mark.parametrize(("name", "before", "after"), some_daily(CASES, lambda case: case[1] != case[2]))
def test_what_was_saved_before_all_were_killed_is_resumed(name: str, before: int, after: int, tmp_path: Path) -> None:
    killed = run_ranks(save_and_die, name, tmp_path, SAVED, ranks=before)
    assert [one.was_killed for one in killed] == [True] * before
    found = values(run_ranks(resume, name, tmp_path, before, ranks=after))
    assert [one.get("value") for one in found] == [SAVED] * after, found


@pytest.mark.parametrize("lost", some_daily([(hosts,) for hosts in LOST], lambda case: case[0] in DAILY))
@pytest.mark.parametrize("name", WITH_COPIES)
def test_one_lost_host_costs_nothing_and_two_are_told_on_all_ranks(
    name: str, lost: tuple[int, ...], tmp_path: Path
) -> None:
    values(run_ranks(save, name, tmp_path, SAVED, ranks=3))
    for host in lost:
        shutil.rmtree(tmp_path / f"host-{host}")
    found = values(run_ranks(resume, name, tmp_path, 3, ranks=3))
    steps = {one.get("value") for one in found}
    assert len(steps) == 1, found
    if len(lost) == 1:
        assert steps == {SAVED}, found
    elif steps != {SAVED}:  # the one that is left may have all of it
        assert steps == {None}, "an error, or nothing with a warning"
        told = [*(one.get("error", "") for one in found), *(text for one in found for text in one["warnings"])]
        assert any("the shards of rank(s) " in text for text in told), found


@pytest.mark.parametrize("name", WITH_COPIES)
def test_the_copies_that_were_lost_with_a_host_are_made_again_when_the_job_resumes(name: str, tmp_path: Path) -> None:
    values(run_ranks(save, name, tmp_path, SAVED, ranks=2))
    for host in (1, 0):
        shutil.rmtree(tmp_path / f"host-{host}")
        found = values(run_ranks(resume, name, tmp_path, 2, ranks=2))
        assert [one.get("value") for one in found] == [SAVED] * 2, "the other host was lost before there was a save"
