"""What false alarms teach a worker: its time-outs, without a clock. The numbers are those that runs have shown."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from torchelastic.p2p.hangs import (
    DEFAULT_TIMEOUT_MS,
    AbortedStep,
    Act,
    HangPolicy,
    Lesson,
    Place,
    ThreadSample,
    Timeouts,
)
from torchelastic.p2p.late_step import LateStep

DEFAULT_S, CHOSEN_S = DEFAULT_TIMEOUT_MS / 1000, 11.0
POLICY = HangPolicy(factor=10.0, floor_s=3.0)

NOTHING = Lesson(was_long_step=False, has_only_waited=False, is_mistaken_end=False, is_longer_timeout=False)
LONG = replace(NOTHING, was_long_step=True)

#: Who was lost: (nobody, only such as made no progress in time).
ALL_BACK, SLOW_LOST, DEAD_LOST = (True, True), (False, True), (False, False)


@pytest.mark.parametrize(
    ("step", "lost", "lesson", "timeout_s"),
    [
        # nobody was seen to run or to work
        (AbortedStep(), ALL_BACK, LONG, DEFAULT_S),
        (AbortedStep(), SLOW_LOST, NOTHING, DEFAULT_S),
        (AbortedStep(), DEAD_LOST, NOTHING, DEFAULT_S),
        (AbortedStep(has_timed_out=True), ALL_BACK, LONG, DEFAULT_S),
        (AbortedStep(has_timed_out=True), SLOW_LOST, NOTHING, DEFAULT_S),
        # a rank was in a slow section
        (AbortedStep(others_were_busy=True), ALL_BACK, LONG, DEFAULT_S),
        (AbortedStep(others_were_busy=True), SLOW_LOST, NOTHING, DEFAULT_S),
        (AbortedStep(True, False, True), ALL_BACK, replace(LONG, is_longer_timeout=True), 100.0),
        (AbortedStep(True, False, True), SLOW_LOST, NOTHING, DEFAULT_S),
        # a rank slept in its own code
        (AbortedStep(another_ran=True), ALL_BACK, LONG, DEFAULT_S),
        (AbortedStep(another_ran=True), SLOW_LOST, replace(LONG, is_mistaken_end=True), DEFAULT_S),
        (AbortedStep(another_ran=True), DEAD_LOST, NOTHING, DEFAULT_S),
        (AbortedStep(True, True), ALL_BACK, replace(LONG, has_only_waited=True, is_longer_timeout=True), 100.0),
        (AbortedStep(True, True), SLOW_LOST, replace(LONG, is_mistaken_end=True), DEFAULT_S),
        (AbortedStep(True, True), DEAD_LOST, NOTHING, DEFAULT_S),
        # a rank worked
        (AbortedStep(False, True, True), ALL_BACK, LONG, DEFAULT_S),
        (AbortedStep(True, True, True), ALL_BACK, replace(LONG, is_longer_timeout=True), 100.0),
        (AbortedStep(True, True, True), SLOW_LOST, Lesson(True, False, True, True), 100.0),
        (AbortedStep(True, True, True), DEAD_LOST, NOTHING, DEFAULT_S),
    ],
)
def test_a_step_that_was_given_up_for_no_hang_widens_what_was_too_short(
    step: AbortedStep, lost: tuple[bool, bool], lesson: Lesson, timeout_s: float
) -> None:
    for chosen_s, later_s, grows in ((DEFAULT_S, timeout_s, lesson.is_longer_timeout), (CHOSEN_S, CHOSEN_S, False)):
        timeouts = Timeouts(POLICY, chosen_s)
        timeouts.step_aborted(step)
        learned = timeouts.learn(nobody_was_lost=lost[0], only_missed_progress=lost[1])
        assert learned == replace(lesson, is_longer_timeout=grows)
        assert timeouts.timeout_s == later_s
        again = timeouts.learn(nobody_was_lost=lost[0], only_missed_progress=lost[1])
        assert again == replace(NOTHING, was_long_step=lost[0]), "each step is counted once"
        assert timeouts.timeout_s == later_s


def test_a_time_out_grows_by_the_factor_of_the_policy_and_no_further_than_half_an_hour() -> None:
    timeouts = Timeouts(POLICY, DEFAULT_S)
    grown_s = []
    for _ in range(4):
        timeouts.step_aborted(AbortedStep(has_timed_out=True, others_were_busy=True))
        timeouts.learn(nobody_was_lost=True, only_missed_progress=True)
        grown_s.append(timeouts.timeout_s)
    assert grown_s == [100.0, 1000.0, 1800.0, 1800.0]
    assert timeouts.bound_s(None) == 1800.0
    assert timeouts.bound_s(4.0) == 40.0


@pytest.mark.parametrize(
    ("timeout_s", "bounds_s"),
    [(2.0, [2.0, 2.0, 2.0]), (DEFAULT_S, [3.0, 6.0, 10.0, 10.0]), (600.0, [3.0, 6.0, 12.0, 24.0, 48.0])],
)
def test_silence_that_was_none_doubles_its_bound_up_to_the_time_out(timeout_s: float, bounds_s: list[float]) -> None:
    timeouts = Timeouts(POLICY, timeout_s)
    for bound_s in bounds_s:
        assert timeouts.silence_bound_s == bound_s
        timeouts.learn(nobody_was_lost=True, only_missed_progress=True)
        assert timeouts.silence_bound_s == bound_s, "nothing was given up for it"
        timeouts.phase_aborted()
        timeouts.learn(nobody_was_lost=False, only_missed_progress=False)
        assert timeouts.silence_bound_s == bound_s, "it was no false alarm"
        timeouts.phase_aborted()
        timeouts.learn(nobody_was_lost=True, only_missed_progress=True)


def test_a_member_that_may_be_at_work_is_waited_for_a_minute_or_the_time_out() -> None:
    assert Timeouts(POLICY, DEFAULT_S).patience_s(5.0, others_are_busy=False) == 5.0
    assert Timeouts(POLICY, DEFAULT_S).patience_s(5.0, others_are_busy=True) == 60.0
    assert Timeouts(POLICY, 600.0).patience_s(5.0, others_are_busy=True) == 600.0


# --- the samples of a late step ---------------------------------------------------------------------------------------

WAITS = ThreadSample(10.0, Place.COLLECTIVE, ("code", 7), cpu_s=1.0)


def test_a_late_step_knows_for_how_long_its_thread_has_not_moved_and_not_worked() -> None:
    late = LateStep(began_s=8.0)
    assert (late.began_s, late.works, late.unchanged_s(9.0), late.idle_s(9.0)) == (8.0, False, 0.0, math.inf)
    late.add(WAITS)
    late.add(replace(WAITS, at_s=12.0))
    assert (late.works, late.unchanged_s(12.0), late.idle_s(12.0)) == (False, 2.0, math.inf)
    late.add(replace(WAITS, at_s=13.0, cpu_s=1.5))
    assert (late.works, late.unchanged_s(13.0), late.idle_s(13.0)) == (True, 0.0, 0.0)
    late.add(replace(WAITS, at_s=16.0, cpu_s=1.5))
    assert (late.works, late.unchanged_s(16.0), late.idle_s(16.0)) == (False, 3.0, 3.0)


def test_each_thing_is_done_once_in_a_step_and_none_after_one_that_goes_further() -> None:
    late = LateStep(began_s=8.0)
    acts = (Act.NOTHING, Act.WAIT, Act.WAIT, Act.CUT, Act.REPORT, Act.CUT, Act.END)
    assert [late.goes_further(act) for act in acts] == [False, True, False, True, False, False, True]
