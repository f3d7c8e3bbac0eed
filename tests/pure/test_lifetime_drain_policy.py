"""Who leaves before a deadline, and when all stop: the rule alone."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.few_examples import examples
from torchelastic.lifetime.decision import SaveTarget
from torchelastic.lifetime.drain_policy import (
    TOGETHER_S,
    end_of_run,
    leave_lead_s,
    near_below_s,
    plan_stop,
    who_requeues,
)
from torchelastic.lifetime.iteration_times import guess
from torchelastic.lifetime.sample import Sample

INF = math.inf
left_s = st.one_of(st.just(INF), st.floats(-100.0, 5000.0))
ranks_left_s = st.lists(left_s, min_size=1, max_size=12)


def sample(step_s: float = 1.0, save_s: float = 3.0, remaining_s: float = INF) -> Sample:
    tiers = (SaveTarget("durable", guess(save_s, "measured")),)
    return Sample(remaining_s, step_s, guess(step_s, "measured"), step_s, 1, tiers, count=10, lived=10)


@given(ranks_left_s, st.integers(0, 15))
def test_enough_stay_after_those_who_leave_early_and_all_of_them_have_clearly_more_time(
    remaining_s: list[float], min_workers: int
) -> None:
    end_s, early = end_of_run(remaining_s, min_workers)
    staying = [seconds for rank, seconds in enumerate(remaining_s) if rank not in early]
    assert len(staying) >= min(max(1, min_workers), len(remaining_s))
    assert end_s == min(staying)
    assert all(remaining_s[rank] < end_s for rank in early)


@given(ranks_left_s, st.integers(1, 15))
def test_the_run_ends_when_one_more_member_would_be_one_too_many(remaining_s: list[float], min_workers: int) -> None:
    end_s, _ = end_of_run(remaining_s, min_workers)
    alive_then = sum(seconds > end_s + TOGETHER_S for seconds in remaining_s)
    assert alive_then < min(min_workers, len(remaining_s)) or end_s == INF
    if end_s != INF:
        alive_before = sum(seconds >= end_s for seconds in remaining_s)
        assert alive_before >= min(min_workers, len(remaining_s))


@pytest.mark.parametrize("remaining_s", [[], [1.0, math.nan]])
def test_times_that_are_none_are_refused(remaining_s: list[float]) -> None:
    with pytest.raises(ValueError, match="give the seconds that each rank has left"):
        end_of_run(remaining_s, 1)


def test_all_stop_at_the_last_step_after_which_a_save_fits() -> None:
    # a step of 1 s, a save of 3 s, 5 s in reserve
    goes_on = plan_stop([9.5, 9.1], sample(), min_workers=2, reserve_s=5.0)
    assert not goes_on.stops
    stops = plan_stop([9.5, 8.9], sample(), min_workers=2, reserve_s=5.0)
    assert stops.stops
    assert stops.decision.fits
    assert stops.end_s == 8.9
    assert stops.leaving == frozenset()


def test_one_leaves_as_soon_as_it_takes_to_leave_and_the_others_go_on() -> None:
    lead_s = leave_lead_s(1.0, 5.0)
    before = plan_stop([lead_s + 0.5, INF, INF], sample(), min_workers=2, reserve_s=5.0)
    assert (before.stops, before.leaving) == (False, frozenset())
    now = plan_stop([lead_s - 0.5, INF, INF], sample(), min_workers=2, reserve_s=5.0)
    assert (now.stops, now.leaving) == (False, frozenset({0}))


def test_the_end_of_all_goes_before_the_leaving_of_one() -> None:
    """Saves take so long that all have to stop before it is time for the first to leave."""
    going = plan_stop([70.0, 101.0, 102.0], sample(save_s=120.0), min_workers=1, reserve_s=5.0)
    assert going.stops
    assert going.leaving == frozenset()


def test_who_would_be_gone_in_the_middle_of_the_others_save_leaves_before_it() -> None:
    """The save of the others takes a minute, and the first two have 20 s."""
    remaining_s = [20.0, 300.0, 70.0, 20.0]
    going = plan_stop(remaining_s, sample(save_s=60.0), min_workers=2, reserve_s=5.0)
    assert (going.stops, going.leaving) == (False, frozenset({0, 3}))
    without = plan_stop([295.0, 65.0], sample(save_s=60.0), min_workers=2, reserve_s=5.0)
    assert without.stops
    they_do_not_go = plan_stop([10.0, 290.0, 60.0, 10.0], sample(save_s=60.0), min_workers=2, reserve_s=5.0)
    assert they_do_not_go.stops, "the others cannot wait for ever"


def test_steps_are_skipped_while_there_is_nothing_to_decide_and_never_in_the_last_ones() -> None:
    far = plan_stop([50.0, 50.0], sample(step_s=0.01), min_workers=1, reserve_s=5.0)
    assert far.decide_again_in == 50, "not longer than half a second: there may be a new notice"
    near = plan_stop([8.03, 8.03], sample(step_s=0.01), min_workers=1, reserve_s=5.0)
    assert near.decide_again_in <= 1
    one_leaves_soon = plan_stop(
        [leave_lead_s(0.01, 5.0) + 0.05, INF], sample(step_s=0.01), min_workers=1, reserve_s=5.0
    )
    assert one_leaves_soon.decide_again_in <= 2


def test_each_job_is_requeued_by_one_rank_and_only_if_all_of_it_goes() -> None:
    jobs = ["1", "2", "1", "2", "", "3"]
    assert who_requeues(jobs, range(6)) == frozenset({0, 1, 5})
    assert who_requeues(jobs, {1, 3, 4}) == frozenset({1})
    assert who_requeues(jobs, {0, 1, 4}) == frozenset()


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 10**9))
def test_whatever_the_deadlines_nobody_is_there_at_its_own_and_the_run_is_saved_in_time(seed: int) -> None:
    """Groups as they shrink, step by step: whoever is asked to leave is gone three steps later."""
    chance = random.Random(seed)
    step_s, save_s, reserve_s = chance.choice([0.1, 1.0, 4.0]), chance.choice([0.5, 10.0, 60.0]), 5.0
    min_workers = chance.randint(1, 4)
    known = sample(step_s, save_s)
    first_s = near_below_s(known, reserve_s)
    deadlines_s = {name: first_s + chance.choice([0.0, chance.uniform(0.0, 300.0), INF]) for name in range(4)}
    now_s, leave_after = 0.0, dict[int, int]()
    for step in range(100_000):
        now_s += chance.uniform(0.5, 1.0) * step_s
        present = [name for name in deadlines_s if leave_after.get(name, step) >= step]
        remaining_s = [deadlines_s[name] - now_s for name in present]
        assert min(remaining_s) > 0.0, "somebody is killed"
        going = plan_stop(remaining_s, known, min_workers=min_workers, reserve_s=reserve_s)
        if going.stops:
            assert save_s + reserve_s <= going.end_s == min(remaining_s), "all that are left are saved in time"
            return
        for rank in going.leaving:
            leave_after.setdefault(present[rank], step + 3)
        if going.end_s == INF and not [name for name in present if deadlines_s[name] != INF]:
            assert len(present) >= min(min_workers, 4)
            return
    raise AssertionError("it goes on for ever")


def test_a_rank_that_does_not_know_when_it_ends_leaves_at_once_if_the_others_can_go_on() -> None:
    """SIGTERM: 30 s are a guess, and docker gives 10."""
    going = plan_stop([30.0, INF, INF], sample(), min_workers=2, reserve_s=5.0, at_once_s=[10.0, INF, INF])
    assert (going.leaving, going.stops, going.decision.saves) == (frozenset({0}), False, False)
    sure = plan_stop([30.0, INF, INF], sample(), min_workers=2, reserve_s=5.0)
    assert sure.leaving == frozenset()


def test_where_the_run_cannot_go_on_without_such_a_rank_all_save_at_once_and_go_on_if_there_is_time() -> None:
    going = plan_stop([30.0, INF], sample(), min_workers=2, reserve_s=5.0, at_once_s=[10.0, INF])
    assert (going.leaving, going.stops, going.decision.action) == (frozenset(), False, "save and go on")
    short = plan_stop([30.0, INF], sample(save_s=13.0), min_workers=2, reserve_s=5.0, at_once_s=[10.0, INF])
    assert (short.stops, short.decision.action) == (True, "save and stop"), "there is no time for a second save"
    assert not short.decision.fits, "it is tried all the same"
