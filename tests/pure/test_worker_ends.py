"""What the end of a worker was to its run: to be asked to leave is not to have left."""

from __future__ import annotations

import signal

import pytest

from torchelastic.agent.causes import Ended, end_of
from torchelastic.observe.ledger.counters import Counters

STARTING = Counters.begun(0)
IN_A_STEP = STARTING.entered(10, 1, 0, 2).synchronized(20, 0).commits(30)
DONE = IN_A_STEP.left(40, IN_A_STEP.account.IDLE)
KILLED, TERMINATED, CRASHED = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV


@pytest.mark.parametrize(
    ("exit_code", "tally", "expected"),
    [
        (0, DONE, Ended.LEFT),
        (3, IN_A_STEP, Ended.LEFT),
        (None, None, Ended.LEFT),
        (KILLED, IN_A_STEP, Ended.LOST),
        (TERMINATED, IN_A_STEP, Ended.LOST),
        (KILLED, None, Ended.LOST),
        (KILLED, DONE, Ended.LEFT),
        (CRASHED, DONE, Ended.LEFT),
    ],
)
def test_who_was_asked_to_leave_has_left_unless_a_signal_ended_it_before_its_last_step(
    exit_code: int | None, tally: Counters | None, expected: Ended
) -> None:
    assert end_of(exit_code, tally, was_asked=True, has_joined=True) is expected


def test_who_was_ended_before_it_had_asked_for_a_group_neither_left_nor_was_lost() -> None:
    assert end_of(KILLED, STARTING, was_asked=True, has_joined=False) is Ended.NOT_NEEDED
    assert end_of(0, STARTING, was_asked=True, has_joined=False) is Ended.LEFT


@pytest.mark.parametrize(("exit_code", "expected"), [(0, Ended.FINISHED), (1, Ended.LOST), (KILLED, Ended.LOST)])
def test_who_was_not_asked_has_finished_with_code_0_and_was_lost_with_any_other(
    exit_code: int, expected: Ended
) -> None:
    assert end_of(exit_code, DONE, was_asked=False, has_joined=True) is expected
