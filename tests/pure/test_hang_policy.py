"""When a step that does not end is taken for a hang: the decisions, without a clock."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from torchelastic.p2p.hangs import (
    WARM_UP_STEPS,
    Act,
    HangPolicy,
    Place,
    Suspicion,
    ThreadSample,
    has_worked,
    idle_bound_s,
    unchanged_since_s,
)
from torchelastic.p2p.step_clock import StepClock
from torchelastic.testing.clock import FakeClock

POLICY = HangPolicy(factor=10.0, floor_s=3.0)


# --- the bound --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slowest_s", "timeout_s", "bound_s"),
    [
        (None, 60.0, 60.0),  # nothing is known yet
        (0.01, 60.0, 3.0),  # the floor
        (0.5, 60.0, 5.0),  # the measured steps
        (30.0, 60.0, 60.0),  # an evaluation that was seen once; never beyond the time-out
        (0.01, 1.0, 1.0),  # a time-out below the floor
    ],
)
def test_the_bound_adapts_to_the_slowest_step_between_floor_and_time_out(
    slowest_s: float | None, timeout_s: float, bound_s: float
) -> None:
    assert POLICY.bound_s(slowest_s, timeout_s) == bound_s


@pytest.mark.parametrize("wrong", [{"factor": 0.5}, {"floor_s": 0.0}, {"end_after_s": 0.0}, {"factor": float("nan")}])
def test_a_policy_that_makes_no_sense_says_which_argument(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HangPolicy(**wrong)


# --- the act ----------------------------------------------------------------------------------------------------------

WAITS = Suspicion(step_s=5.0, unchanged_s=3.0, place=Place.COLLECTIVE, bound_s=5.0, timeout_s=60.0, is_warm=True)
RUNS = replace(WAITS, place=Place.USER_CODE)


@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize("bound_s", [5.0, 60.0])
def test_a_collective_that_does_not_time_out_by_itself_is_given_up_after_its_time(
    is_warm: bool, bound_s: float
) -> None:
    """NCCL's, also where nobody knows yet how long steps take."""
    waits = replace(WAITS, step_s=70.0, bound_s=bound_s, is_warm=is_warm, idle_s=0.0, times_out_itself=False)
    assert replace(waits, unchanged_s=59.0).act(POLICY) is not Act.CUT
    assert replace(waits, unchanged_s=60.0).act(POLICY) is Act.CUT
    assert replace(waits, unchanged_s=60.0, times_out_itself=True).act(POLICY) is not Act.CUT
    assert replace(waits, unchanged_s=60.0, place=Place.USER_CODE).act(POLICY) is not Act.CUT


def test_who_waits_for_a_gpu_with_a_busy_processor_stays_at_one_point() -> None:
    first = ThreadSample(10.0, Place.COLLECTIVE, ("a",), 1.0, may_spin=True)
    later = replace(first, at_s=11.0, cpu_s=2.0)
    assert unchanged_since_s(10.0, first, later) == 10.0
    assert unchanged_since_s(10.0, first, replace(later, may_spin=False)) == 11.0


def test_a_collective_is_left_to_its_own_time_out_where_the_bound_is_no_shorter() -> None:
    assert replace(WAITS, bound_s=60.0, step_s=100.0, unchanged_s=50.0).act(POLICY) is Act.NOTHING


def test_the_first_steps_of_a_round_trip_nothing() -> None:
    assert replace(WAITS, is_warm=False, step_s=50.0, unchanged_s=50.0).act(POLICY) is Act.NOTHING
    assert replace(RUNS, is_warm=False, step_s=599.0).act(POLICY) is Act.NOTHING
    assert replace(RUNS, is_warm=False, step_s=600.0).act(POLICY) is Act.REPORT, "but for ever is too long"


def test_who_is_in_user_code_is_reported_and_cuts_nobody_and_ends_only_if_the_policy_says_so() -> None:
    assert RUNS.act(POLICY) is Act.REPORT
    assert replace(RUNS, step_s=1e6).act(POLICY) is Act.REPORT
    ending = replace(POLICY, end_after_s=100.0)
    assert replace(RUNS, step_s=99.0).act(ending) is Act.REPORT
    assert replace(RUNS, step_s=100.0).act(ending) is Act.END
    assert replace(WAITS, step_s=100.0).act(ending) is Act.CUT, "who waits for others is not the one that hangs"


# --- work is no hang -------------------------------------------------------------------------------------------------


def test_who_waits_for_one_that_works_does_not_give_the_group_up_before_collectives_time_out_by_themselves() -> None:
    for_work = replace(WAITS, idle_s=1.0)
    assert for_work.act(POLICY) is Act.WAIT
    assert replace(for_work, step_s=59.0, unchanged_s=58.0).act(POLICY) is Act.WAIT
    assert replace(for_work, step_s=61.0, unchanged_s=58.0).act(POLICY) is Act.WAIT, "the collective began later"
    assert replace(for_work, idle_s=idle_bound_s(5.0)).act(POLICY) is Act.CUT, "it has stood still for too long"
    assert replace(for_work, step_s=4.9).act(POLICY) is Act.NOTHING


def test_who_works_is_not_reported_before_the_time_out_and_ends_if_the_policy_says_so() -> None:
    works = replace(RUNS, idle_s=1.0)
    assert works.act(POLICY) is Act.NOTHING
    assert replace(works, step_s=60.0).act(POLICY) is Act.REPORT
    assert works.act(replace(POLICY, end_after_s=4.0)) is Act.END, "that bound is the user's own"


STANDS = ThreadSample(10.0, Place.USER_CODE, ("code", 7), cpu_s=1.0, io_bytes=100)


@pytest.mark.parametrize("change", [{"point": ("code", 8)}, {"cpu_s": 1.5}, {"io_bytes": 101}, {"queued_s": 0.5}])
def test_a_stack_that_changes_a_busy_processor_a_wait_for_one_and_a_file_that_grows_are_work(
    change: dict[str, Any],
) -> None:
    assert not has_worked(None, STANDS)
    assert not has_worked(STANDS, replace(STANDS, at_s=11.0, cpu_s=1.1))
    assert has_worked(STANDS, replace(STANDS, at_s=11.0, **change))


def test_a_loop_that_waits_in_a_collective_is_no_work_and_a_long_backward_pass_is() -> None:
    waits = replace(STANDS, place=Place.COLLECTIVE)
    assert not has_worked(waits, replace(waits, at_s=11.0, point=("code", 8)))
    assert not has_worked(STANDS, replace(waits, at_s=11.0, point=("code", 8))), "it has come to the collective"
    assert not has_worked(waits, replace(waits, at_s=11.0, queued_s=0.9)), "a loop that waits is in the queue, too"
    assert has_worked(waits, replace(waits, at_s=11.0, cpu_s=1.5))


# --- standing still ---------------------------------------------------------------------------------------------------


def test_one_that_is_seen_at_the_same_point_without_computing_has_stood_since_the_first_look() -> None:
    looks = [ThreadSample(at_s, Place.COLLECTIVE, ("code", 7), cpu_s=1.0 + 0.01 * at_s) for at_s in (10.0, 11.0, 12.0)]
    since_s = unchanged_since_s(None, None, looks[0])
    for earlier, later in pairwise(looks):
        since_s = unchanged_since_s(since_s, earlier, later)
    assert since_s == 10.0


@pytest.mark.parametrize("change", [{"point": ("code", 8)}, {"cpu_s": 1.5}])
def test_one_that_has_moved_or_computed_meanwhile_has_not(change: dict[str, Any]) -> None:
    earlier = ThreadSample(10.0, Place.COLLECTIVE, ("code", 7), cpu_s=1.0)
    later = replace(earlier, at_s=11.0, **change)
    assert unchanged_since_s(10.0, earlier, later) == 11.0


# --- the clock of steps -----------------------------------------------------------------------------------------------


def warm(clock: FakeClock, step_s: float = 0.1) -> StepClock:
    steps = StepClock(clock)
    steps.new_round()
    steps.begin()
    for _ in range(WARM_UP_STEPS):
        clock.advance(40.0)  # they compile
        steps.ended()
    clock.advance(step_s)
    steps.ended()
    return steps


def test_a_step_that_was_long_because_somebody_worked_is_not_measured_unless_it_is_given_up_all_the_same() -> None:
    clock = FakeClock()
    steps = warm(clock)
    assert steps.began_s is not None
    steps.excuse(steps.began_s)
    clock.advance(30.0)
    steps.ended()
    assert steps.slowest_s == pytest.approx(0.1)
    clock.advance(0.2)
    steps.ended()
    assert steps.slowest_s == pytest.approx(0.2), "the next one is"
    assert steps.began_s is not None
    steps.excuse(steps.began_s)
    clock.advance(30.0)
    steps.failed()
    steps.counts_failure(nobody_was_lost=True)
    assert steps.slowest_s == pytest.approx(30.0)


def test_a_new_round_warms_up_again_and_keeps_what_was_measured() -> None:
    clock = FakeClock()
    steps = warm(clock)
    assert steps.is_warm
    steps.new_round()
    assert not steps.is_warm
    assert steps.slowest_s == pytest.approx(0.1)
    steps.begin()
    for _ in range(WARM_UP_STEPS):
        assert not steps.is_warm
        clock.advance(9.0)
        steps.ended()
    assert steps.is_warm
    assert steps.slowest_s == pytest.approx(0.1)


def test_a_rest_is_no_part_of_a_step() -> None:
    clock = FakeClock()
    steps = warm(clock)
    steps.rest()
    clock.advance(500.0)
    steps.begin()
    clock.advance(0.05)
    steps.ended()
    assert steps.slowest_s == pytest.approx(0.1)


@pytest.mark.parametrize(("nobody_was_lost", "slowest_s"), [(True, 4.0), (False, 0.1)])
def test_a_false_alarm_is_measured_as_a_long_step_and_a_right_one_is_not(
    nobody_was_lost: bool, slowest_s: float
) -> None:
    clock = FakeClock()
    steps = warm(clock)
    clock.advance(4.0)
    steps.failed()
    assert steps.began_s is None
    steps.counts_failure(nobody_was_lost)
    assert steps.slowest_s == pytest.approx(slowest_s)
    steps.counts_failure(nobody_was_lost=True)
    assert steps.slowest_s == pytest.approx(slowest_s), "it counts once"


# --- what a worker has started ------------------------------------------------------------------------------------


SAMPLE = ThreadSample(10.0, Place.USER_CODE, ("wait",), 1.0, children={7: (5.0, 1000)})


@pytest.mark.parametrize(
    ("children", "works"),
    [
        ({7: (5.5, 1000)}, True),  # computes
        ({7: (5.0, 1000 + 2**20)}, True),  # reads or writes
        ({7: (5.01, 1000 + 4096)}, False),  # a service that is idle
        ({7: (5.0, 1000), 8: (99.0, 2**30)}, False),  # is new: nothing is known of it yet
        ({}, False),
    ],
)
def test_a_process_that_works_is_work_of_who_waits_for_it(children: dict[int, tuple[float, int]], works: bool) -> None:
    later = replace(SAMPLE, at_s=11.0, children=children)
    assert has_worked(SAMPLE, later) is works
    assert not has_worked(replace(SAMPLE, place=Place.COLLECTIVE), replace(later, place=Place.COLLECTIVE))


def test_a_hang_is_guessed_of_who_is_in_its_own_code_and_was_not_seen_at_work() -> None:
    quiet = replace(RUNS, step_s=2.5, unchanged_s=1.0, has_not_worked=True)
    assert quiet.is_guessed_soon
    for change in ({"step_s": 2.4}, {"is_warm": False}, {"has_not_worked": False}, {"place": Place.COLLECTIVE}):
        assert not replace(quiet, **change).is_guessed_soon
