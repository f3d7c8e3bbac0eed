"""Contract: a job that is killed while it fetches or saves a copy leaves nothing that the next start cannot use."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.copies_ranks import (
    NEWER,
    OLDER,
    lengths_of,
    resume_and_be_killed,
    resume_and_save,
    save_and_be_killed,
    save_steps,
)
from tests.contracts.damages import Stored, copied
from tests.contracts.faults import numbers
from tests.few_examples import some_daily
from tests.process.forked_ranks import run_ranks, values

NAMES = ("local", "memory", "training, memory")
DAMAGES = ("cut", "gone")
FETCHES = [(name, damage) for name in NAMES for damage in DAMAGES]
VICTIM, LATER = 1, 8
RANDOM_KILLS = 200


def calls(full: bool) -> Iterator[int]:
    """Which calls are tried: each, or in the run of every day every seventh."""
    return numbers() if full else (number for number in numbers() if number % 7 == 1)


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "damage"), some_daily(FETCHES, ("local", "cut").__eq__))
def test_a_rank_that_is_killed_while_it_fetches_loses_nothing(
    name: str, damage: str, full: bool, tmp_path: Path
) -> None:
    values(run_ranks(save_steps, name, tmp_path / "saved", 1, [OLDER, NEWER], ranks=2))
    stored = Stored.newest(tmp_path / "saved")
    lengths, own = lengths_of(tmp_path / "saved", stored), stored.shards[VICTIM][0]
    killed = 0
    for number in calls(full):
        root = tmp_path / "now"
        copied(tmp_path / "saved", root)
        (root / own).write_bytes((root / own).read_bytes()[: lengths[str(own)] - 1])
        if damage == "gone":
            (root / own).unlink()
        ended = run_ranks(resume_and_be_killed, name, root, 2, VICTIM, number, ranks=2)
        told = values(run_ranks(resume_and_save, name, root, 2, LATER, ranks=2))
        assert told == [[NEWER, LATER]] * 2, (number, told)
        killed += ended[VICTIM].was_killed
        if not ended[VICTIM].was_killed:
            assert [one.value for one in ended] == [False, False], ended
            break
    assert killed >= (8 if full else 2), "it fetched without a call to the disk?"


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
@pytest.mark.parametrize("name", some_daily(NAMES, "training, memory".__eq__))
def test_a_rank_that_is_killed_while_it_saves_with_copies_loses_nothing(
    name: str, victim: int, full: bool, tmp_path: Path
) -> None:
    values(run_ranks(save_steps, name, tmp_path / "saved", 1, [OLDER], ranks=2))
    found = []
    for number in calls(full):
        root = tmp_path / "now"
        copied(tmp_path / "saved", root)
        ended = run_ranks(save_and_be_killed, name, root, 1, victim, number, ranks=2)
        told = values(run_ranks(resume_and_save, name, root, 2, LATER, ranks=2))
        assert told in ([[OLDER, LATER]] * 2, [[NEWER, LATER]] * 2), (number, told)
        found.append(told[0][0])
        if not ended[victim].was_killed:
            break
    assert (found[0], found[-1]) == (OLDER, NEWER)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", ["fetch", "save"])
def test_two_hundred_kills_at_random_calls(what: str, tmp_path: Path) -> None:
    chosen, killed, most = random.Random(0), 0, dict.fromkeys(NAMES, 40)
    for name in NAMES:
        steps = [OLDER, NEWER] if what == "fetch" else [OLDER]
        values(run_ranks(save_steps, name, tmp_path / name, 1, steps, ranks=2))
    stored = {name: Stored.newest(tmp_path / name) for name in NAMES}
    right = [[[step, LATER]] * 2 for step in ((NEWER,) if what == "fetch" else (OLDER, NEWER))]
    while killed < RANDOM_KILLS:
        name, victim, root = chosen.choice(NAMES), chosen.randrange(2), tmp_path / "now"
        number = chosen.randint(1, most[name])
        copied(tmp_path / name, root)
        if what == "fetch":
            own = root / stored[name].shards[victim][0]
            own.write_bytes(own.read_bytes()[: chosen.randrange(100)])
            ended = run_ranks(resume_and_be_killed, name, root, 2, victim, number, ranks=2)
        else:
            ended = run_ranks(save_and_be_killed, name, root, 1, victim, number, ranks=2)
        told = values(run_ranks(resume_and_save, name, root, 2, LATER, ranks=2))
        assert told in right, (name, victim, number, told)
        killed += ended[victim].was_killed
        if not ended[victim].was_killed:
            most[name] = max(4, number - 1)  # it has not so many calls
