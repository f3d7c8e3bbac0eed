"""A recovery's phases add up to its length, also where a second failure comes in between."""

from __future__ import annotations

import pytest

from torchelastic.p2p.recovery_time import PHASES, RecoveryTimer
from torchelastic.testing.clock import FakeClock


def test_phases_add_up_from_the_failure_to_the_step() -> None:
    clock = FakeClock()
    timer = RecoveryTimer(clock)
    timer.noticed()
    recovery = None
    for number, phase in enumerate(PHASES):
        clock.advance(0.001 * (number + 1))
        recovery = timer.reached(phase)
    assert recovery is not None
    assert [recovery.phases_ms[phase] for phase in PHASES] == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert recovery.total_ms == pytest.approx(10.0)
    assert "10.0 ms" in str(recovery)


def test_a_second_failure_on_the_way_belongs_to_the_first() -> None:
    clock = FakeClock()
    timer = RecoveryTimer(clock)
    timer.noticed()
    for phase in ("agree", "re_form"):
        clock.advance(0.01)
        timer.reached(phase)
    timer.noticed()
    recovery = None
    for phase in PHASES:
        clock.advance(0.01)
        recovery = timer.reached(phase)
    assert recovery is not None
    assert recovery.total_ms == pytest.approx(60.0), "counted from the first failure"
    assert recovery.phases_ms["agree"] == pytest.approx(30.0)
