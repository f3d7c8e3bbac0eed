"""Who computes what a second time, and who is wrong, by what came out."""

from __future__ import annotations

import pytest

from torchelastic.model.compute_check.choice import CheckPlace, choose, third
from torchelastic.model.compute_check.options import ComputeCheck, is_due
from torchelastic.model.compute_check.verdict import (
    CheckOutcome,
    CheckVerdict,
    judge_repeats,
    judge_replicas,
    judge_shard,
)

HOSTS = [CheckPlace(1, 1, (0, 1)), CheckPlace(1, 1, (2,)), CheckPlace(1, 2, (3,)), CheckPlace(1, 3, (4, 5))]


def test_all_pairs_of_different_hosts_and_all_shards_come_by_in_turn() -> None:
    tasks = [choose(HOSTS, number) for number in range(40)]
    seen = {(task.owner, task.witness) for task in tasks if task}
    wanted = {(a, b) for a in range(4) for b in range(4) if HOSTS[a].host != HOSTS[b].host}
    assert seen == wanted
    assert {task.shard for task in tasks if task} == {0, 1, 2, 3, 4, 5}
    first = [choose(HOSTS, number) for number in range(4)]
    assert {rank for task in first if task for rank in task[1:]} == {0, 1, 2, 3}, "each soon"


def test_only_workers_of_one_kind_are_compared_and_who_has_no_match_with_itself() -> None:
    places = [CheckPlace(1, 1, (0,)), CheckPlace(2, 2, (1,)), CheckPlace(1, 3, (2,))]
    seen = {task[1:] for task in (choose(places, number) for number in range(9)) if task}
    assert seen == {(0, 2), (2, 0), (1, 1)}


def test_a_rank_without_shards_is_a_witness_and_nobody_with_shards_means_no_check() -> None:
    places = [CheckPlace(1, 1, (0,)), CheckPlace(1, 2, ())]
    assert {choose(places, number)[1:] for number in range(3)} == {(0, 1)}  # type: ignore[index]
    assert choose([CheckPlace(1, 1, ())], 0) is None


def test_the_third_is_of_a_third_host_where_there_is_one() -> None:
    task = choose(HOSTS, 0)
    assert task is not None
    assert task[1:] == (1, 2)
    assert third(HOSTS, task) == 3
    assert third([CheckPlace(2, 1, ()), CheckPlace(1, 1, (0,)), CheckPlace(1, 1, ())], task) is None, "of another kind"


@pytest.mark.parametrize(
    ("first", "again", "has_agreed", "verdict"),
    [
        ({0: 5, 1: 5}, {0: 5, 1: 5}, False, CheckVerdict(CheckOutcome.AGREED)),
        ({0: 5, 1: 6}, {0: 5, 1: 6, 2: 5}, False, CheckVerdict(CheckOutcome.WRONG, (1,))),  # always
        ({0: 5, 1: 6}, {0: 5, 1: 6, 2: 6}, False, CheckVerdict(CheckOutcome.WRONG, (0,))),
        ({0: 5, 1: 6}, {0: 5, 1: 5, 2: 5}, True, CheckVerdict(CheckOutcome.WRONG, (1,))),  # once
        ({0: 5, 1: 6}, {0: 5, 1: 9, 2: 5}, True, CheckVerdict(CheckOutcome.WRONG, (1,))),  # otherwise each time
        ({0: 5, 1: 6}, {0: 5, 1: 6, 2: 7}, False, CheckVerdict(CheckOutcome.NOT_REPEATABLE, (0, 1, 2))),
        ({0: 5, 1: 6}, {0: 5, 1: 6, 2: 7}, True, CheckVerdict(CheckOutcome.NOT_REPEATABLE, (0, 1, 2))),
        ({0: 5, 1: 6}, {0: 7, 1: 8, 2: 9}, False, CheckVerdict(CheckOutcome.NOT_REPEATABLE, (0, 1, 2))),
        ({0: 5, 1: 6}, {0: 5, 1: 6}, True, CheckVerdict(CheckOutcome.DOUBT, (0, 1))),
        ({0: 5, 1: 6}, {0: 5, 1: 6}, False, CheckVerdict(CheckOutcome.DOUBT, (0, 1))),
        ({0: 5, 1: 6}, {0: 5, 1: 5}, False, CheckVerdict(CheckOutcome.WRONG, (1,))),  # once
        ({0: 5, 1: 6}, {0: 5, 1: 7}, True, CheckVerdict(CheckOutcome.WRONG, (1,))),
        ({0: 5, 1: 6}, {0: 5, 1: 7}, False, CheckVerdict(CheckOutcome.NOT_REPEATABLE, (0, 1))),
        ({0: 5, 1: 6}, {0: 7, 1: 8}, False, CheckVerdict(CheckOutcome.NOT_REPEATABLE, (0, 1))),
        ({0: 5}, {0: 5}, False, CheckVerdict(CheckOutcome.AGREED)),
        ({0: 5}, {0: 6}, False, CheckVerdict(CheckOutcome.NOT_REPEATABLE, (0,))),
        ({0: 5}, {0: 6}, True, CheckVerdict(CheckOutcome.DOUBT, (0,))),
    ],
)
def test_of_a_shard(first: dict[int, int], again: dict[int, int], has_agreed: bool, verdict: CheckVerdict) -> None:
    assert judge_shard(first, again, has_agreed=has_agreed) == verdict


@pytest.mark.parametrize(
    ("first", "again", "has_agreed", "verdict"),
    [
        ("000", "000", False, CheckVerdict(CheckOutcome.AGREED)),
        ("010", "000", False, CheckVerdict(CheckOutcome.WRONG, (1,))),
        ("010", "010", True, CheckVerdict(CheckOutcome.WRONG, (1,))),
        ("010", "010", False, CheckVerdict(CheckOutcome.NOT_REPEATABLE, (1,))),
        ("010", "110", True, CheckVerdict(CheckOutcome.NOT_REPEATABLE, (0, 1))),
        ("111", "111", False, CheckVerdict(CheckOutcome.NOT_REPEATABLE, (0, 1, 2))),
        ("110", "000", True, CheckVerdict(CheckOutcome.DOUBT, (0, 1))),
        ("01", "00", True, CheckVerdict(CheckOutcome.WRONG, (1,))),
        ("11", "11", True, CheckVerdict(CheckOutcome.DOUBT, (0, 1))),
        ("1", "0", True, CheckVerdict(CheckOutcome.DOUBT, (0,))),
        ("1", "1", False, CheckVerdict(CheckOutcome.NOT_REPEATABLE, (0,))),
    ],
)
def test_of_steps_computed_twice(first: str, again: str, has_agreed: bool, verdict: CheckVerdict) -> None:
    pairs = ([each == "1" for each in text] for text in (first, again))
    assert judge_repeats(*pairs, has_agreed=has_agreed) == verdict


def test_of_replicas() -> None:
    assert judge_replicas([3, 3, 3, 3]) == CheckVerdict(CheckOutcome.AGREED)
    assert judge_replicas([3, 3, 4, 3]) == CheckVerdict(CheckOutcome.WRONG, (2,))
    assert judge_replicas([3, 3, 4, 4]) == CheckVerdict(CheckOutcome.DOUBT, (0, 1, 2, 3))
    assert judge_replicas([3, 4, 5]) == CheckVerdict(CheckOutcome.DOUBT, (0, 1, 2))


@pytest.mark.parametrize(("workers", "shards"), [(1, None), (4, 16), (8, 8), (3, 8)])
def test_by_default_what_checks_compute_is_below_half_a_percent(workers: int, shards: int | None) -> None:
    cost_steps = 1.0 if shards is None else 1 / -(-shards // workers)
    interval = ComputeCheck().interval_steps(cost_steps)
    checks = sum(is_due(step, interval) for step in range(interval, 101 * interval))
    assert checks == 100
    assert 0.003 < cost_steps * checks / (100 * interval) < 0.005
