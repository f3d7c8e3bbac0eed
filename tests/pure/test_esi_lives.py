"""A life of a job on a short-lived instance: how it has ended, what it has cost, and what now."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from torchelastic.launch.esi_lives import (
    Attempt,
    How,
    Verdict,
    report_document,
    table,
    what_next,
)
from torchelastic.lifetime.progress_file import Steps
from torchelastic.lifetime.requeue import STOPPED_EARLY as REQUEUE_CODE

HALF, ALL = Steps(committed_step=5, total_steps=10), Steps(committed_step=10, total_steps=10)


def ended(exit_code: int, *, timed_out: bool = False, killed: int = 0) -> Attempt:
    return Attempt(exit_code, used_s=1.0, left_s=0.0 if timed_out else 4.0, timed_out=timed_out, killed=killed)


#: One of each kind.
STOPPED, FAILED, FINISHED = ended(REQUEUE_CODE), ended(1), ended(0)
ENDED, KILLED = ended(0, timed_out=True), ended(-signal.SIGKILL, timed_out=True, killed=1)


@pytest.mark.parametrize(
    ("attempt", "told", "how"),
    [
        (ended(0), Steps(), How.FINISHED),
        (ended(0), ALL, How.FINISHED),
        (ended(0), HALF, How.STOPPED),
        (ended(0), Steps(committed_step=5), How.FINISHED),
        (ended(0, killed=2), Steps(), How.FINISHED),
        (ended(REQUEUE_CODE), ALL, How.STOPPED),
        (ended(1), Steps(), How.FAILED),
        (ended(1), ALL, How.FAILED),
        (ended(1), HALF, How.FAILED),
        (ended(1), replace(HALF, saved_step=HALF.committed_step), How.STOPPED),
        (ended(-signal.SIGKILL), replace(HALF, saved_step=HALF.committed_step), How.FAILED),
        (ended(-signal.SIGKILL), Steps(), How.FAILED),
        (ended(-signal.SIGTERM), Steps(), How.FAILED),
        (ended(127), Steps(), How.UNRUNNABLE),
        (ended(126), Steps(), How.UNRUNNABLE),
        (ended(0, timed_out=True), Steps(), How.ENDED),
        (ended(0, timed_out=True), HALF, How.ENDED),
        (ended(0, timed_out=True), ALL, How.FINISHED),
        (ended(1, timed_out=True), ALL, How.ENDED),
        (ended(REQUEUE_CODE, timed_out=True), Steps(), How.ENDED),
        (ended(127, timed_out=True), Steps(), How.ENDED),
        (ended(-signal.SIGTERM, timed_out=True), Steps(), How.ENDED),
        (ended(-signal.SIGTERM, timed_out=True, killed=1), Steps(), How.KILLED),
        (ended(0, timed_out=True, killed=1), HALF, How.KILLED),
    ],
)
def test_how_a_life_has_ended(attempt: Attempt, told: Steps, how: How) -> None:
    assert replace(attempt, told=told).how is how


def test_the_exit_code_that_asks_for_another_life_is_a_choice() -> None:
    assert Attempt(3, 1.0, requeue_codes=(3, 4)).how is How.STOPPED
    assert Attempt(REQUEUE_CODE, 1.0, requeue_codes=(3, 4)).how is How.FAILED


@pytest.mark.parametrize("attempt", [STOPPED, ENDED, KILLED, FAILED])
def test_a_job_is_started_again_until_its_restarts_are_used_up(attempt: Attempt) -> None:
    assert what_next([attempt], 2) == Verdict(True, 0, "restart 1 of at most 2")
    assert what_next([attempt] * 2, 2).goes_on
    assert what_next([attempt] * 3, 2) == Verdict(False, 1, "not finished after 2 restarts: that is --max-restarts")


def test_a_job_that_has_finished_is_not_started_again_even_in_its_last_life() -> None:
    assert what_next([KILLED, KILLED, FINISHED], 2) == Verdict(False, 0, "finished in attempt 3")


def test_a_command_that_cannot_be_run_is_not_tried_again() -> None:
    assert what_next([ended(127)], 2) == Verdict(False, 1, "the command cannot be run (exit code 127)")


def test_failures_in_a_row_end_it_and_a_life_that_has_not_failed_breaks_the_row() -> None:
    failed = ended(-signal.SIGSEGV)
    assert what_next([failed, failed]).goes_on
    assert what_next([failed, failed, KILLED, failed, failed]).goes_on
    assert what_next([KILLED, failed, failed, failed]) == Verdict(False, 1, "failed 3 times in a row (SIGSEGV)")
    assert what_next([failed] * 50, 100).goes_on


def test_steps_are_lost_from_where_the_next_life_went_on() -> None:
    attempts = [
        replace(KILLED, told=Steps(0, committed_step=12, saved_step=10)),
        replace(KILLED, told=Steps(8, committed_step=20, saved_step=20)),  # what was saved last was torn
        replace(FINISHED, told=Steps(20, committed_step=30, saved_step=20)),
    ]
    report = report_document(attempts, DONE)
    assert [one["steps_lost"] for one in report["lives"]] == [4, 0, 0]
    assert (report["used_s"], report["given_up_s"], report["steps_lost"]) == (3.0, 0.0, 4)


def test_where_the_next_life_says_nothing_the_last_save_counts() -> None:
    attempts = [
        replace(KILLED, told=told)
        for told in (
            Steps(committed_step=12, saved_step=10),
            Steps(),
            Steps(committed_step=12),
            Steps(saved_step=12),
            Steps(committed_step=9, saved_step=11),
        )
    ]
    report = report_document(attempts, DONE)
    assert [one["steps_lost"] for one in report["lives"]] == [2, None, None, None, 0]
    assert report["steps_lost"] == 2
    assert report_document(attempts[1:2], DONE)["steps_lost"] is None


# --- the report -----------------------------------------------------------------------------------

ATTEMPTS = (
    Attempt(-9, 150.04, 0.0, True, 3, Steps(0, 12, 10, 20)),
    Attempt(0, 60.0, 60.0, told=Steps(10, 20, 10, 20)),
)
DONE = Verdict(False, 0, "finished in attempt 2")


def test_the_table_has_a_line_per_attempt_and_the_sums() -> None:
    assert table(report_document(ATTEMPTS, DONE)).splitlines() == [
        "attempt  ended     exit     used s  unused s  from step  to step  saved  steps lost",
        "1        killed    SIGKILL   150.0       0.0          0       12     10           2",
        "2        finished  0          60.0       0.0         10       20     10           0",
        "all                          210.0       0.0                                      2",
    ]
    failed = table(report_document([FAILED], DONE)).splitlines()[1]
    assert failed.split()[-4:] == ["?", "?", "?", "?"]


def test_a_life_in_words() -> None:
    assert str(ATTEMPTS[0]) == (
        "killed (SIGKILL) after 150.0 s, SIGKILL to 3 processes that did not end in the grace, "
        "resumed step 0, committed step 12, saved step 10, total steps 20"
    )
    assert str(Attempt(75, 3.0, 2.0, killed=1)) == (
        "stopped early (exit code 75) after 3.0 s, 2.0 s unused, SIGKILL to 1 process that did not end with the command"
    )
    assert str(Attempt(0, 3.0, 2.0)) == "finished (exit code 0) after 3.0 s"
