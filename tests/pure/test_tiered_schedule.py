"""When the train loop saves, by a policy and a clock that obeys the test; and which tiers take part."""

from __future__ import annotations

from typing import Any

import pytest

from torchelastic.checkpoint.engine.schedule import SaveSchedule, TierSchedules
from torchelastic.checkpoint.policy import (
    EverySeconds,
    EverySteps,
    OnEnd,
    OnSignal,
    SaveDecision,
    SaveMoment,
    SavePolicy,
)
from torchelastic.testing.clock import FakeClock


class Spy(SavePolicy):
    """Never due, and remembers the moments."""

    def __init__(self) -> None:
        self.moments: list[SaveMoment] = []

    def decide(self, moment: SaveMoment) -> SaveDecision:
        self.moments.append(moment)
        return SaveDecision(False, "spying")


def decide(schedule: SaveSchedule, step: int, **told: bool) -> SaveDecision:
    options: dict[str, Any] = {"wanted": False, "saving": False, "is_full": False, "stop_requested": False, **told}
    return schedule.decide(step, **options)


def test_without_a_policy_only_what_is_asked_for_is_saved() -> None:
    schedule = SaveSchedule(None, FakeClock())
    assert not decide(schedule, 1)
    assert decide(schedule, 1, wanted=True)


def test_a_policy_is_told_what_happened_by_the_clock() -> None:
    clock, spy = FakeClock(100.0), Spy()
    schedule = SaveSchedule(spy, clock)
    schedule.enter_group(0)
    clock.advance(2.0)
    schedule.step_ended()
    decide(schedule, 1, saving=True, stop_requested=True)
    schedule.began(1)
    clock.advance(30.0)  # the save itself: it is not the step's time
    schedule.resumes()
    clock.advance(2.0)
    schedule.step_ended()
    schedule.failed("process")
    schedule.saved("disk", stall_s=1.0, durable_s=3.0)
    decide(schedule, 2)
    first, second = spy.moments
    assert (first.step, first.now_s, first.began_s, first.last_saved_step) == (1, 102.0, 100.0, None)
    assert (first.saving, first.stop_requested, first.step_s) == (True, True, 2.0)
    assert (second.last_saved_step, second.last_saved_s, second.step_s) == (1, 102.0, 2.0)
    assert second.failures.failures_of(None) == 1
    assert second.failures.seconds == 34.0
    cost = second.costs.of("disk")
    assert cost is not None
    assert (cost.stall_s, cost.durable_s) == (1.0, 3.0)


def test_what_was_restored_counts_as_saved() -> None:
    clock = FakeClock()
    schedule = SaveSchedule(EverySteps(10), clock)
    schedule.began(10)
    assert not decide(schedule, 11)
    assert decide(schedule, 20)


def test_a_policy_is_put_off_while_a_save_would_have_to_wait_and_heard_after() -> None:
    schedule = SaveSchedule(EverySteps(10) | OnSignal(), FakeClock())
    put_off = decide(schedule, 10, is_full=True, saving=True)
    assert not put_off
    assert "all slots are busy" in put_off.because
    assert decide(schedule, 11), "it is made up for"
    assert decide(schedule, 11, is_full=True, stop_requested=True), "there may be no later step"
    assert decide(schedule, 11, is_full=True, wanted=True)


def test_a_save_is_due_at_the_end_if_it_was_put_off_or_the_policy_says_so() -> None:
    schedule = SaveSchedule(EverySteps(10), FakeClock())
    assert (decide(schedule, 9).save, schedule.is_due_at_end) == (False, False)
    assert (decide(schedule, 10, is_full=True).save, schedule.is_due_at_end) == (False, True)
    assert (decide(schedule, 11).save, schedule.is_due_at_end) == (True, True)
    schedule.began(11)
    assert (decide(schedule, 11).save, schedule.is_due_at_end) == (False, False)
    schedule = SaveSchedule(EverySteps(10) | OnEnd(), FakeClock())
    assert (decide(schedule, 3).save, schedule.is_due_at_end) == (False, True)
    assert (decide(schedule, 4).save, schedule.is_due_at_end) == (False, True)
    assert decide(schedule, 10)
    schedule.began(10)
    assert not schedule.is_due_at_end
    assert (decide(SaveSchedule(None, FakeClock()), 3).save, schedule.is_due_at_end) == (False, False)


def test_each_tier_takes_part_as_often_as_its_own_policy_says() -> None:
    clock = FakeClock()
    schedules = TierSchedules({"memory": None, "disk": EverySteps(10), "durable": EverySeconds(60.0)}, clock)
    seen = {}
    for step in (5, 10, 12, 20, 24):
        clock.advance(20.0)
        seen[step] = schedules.due(step)
        assert schedules.due(step) == seen[step], "it was only asked"
        schedules.began(step, seen[step])
    assert seen == {
        5: ["memory"],
        10: ["memory", "disk"],
        12: ["memory", "durable"],
        20: ["memory", "disk"],
        24: ["memory"],
    }
    assert schedules.due(25, everywhere=True) == ["memory", "disk", "durable"]
    schedules.begin(30)
    assert schedules.due(31) == ["memory"], "a restored step is saved already"


def test_a_policy_needs_a_manager_to_save_with() -> None:
    import torchelastic
    from tests.pure.test_train_loop import Counter, ScriptedCoordinator, count_to

    with pytest.raises(ValueError, match="set_checkpoint_manager"):
        torchelastic.train(ScriptedCoordinator(), count_to(1), Counter(), checkpoint=EverySteps(1))
    with pytest.raises(TypeError, match="CheckpointManager, or a SavePolicy"):
        torchelastic.train(ScriptedCoordinator(), count_to(1), Counter(), checkpoint="somewhere")  # type: ignore[arg-type]  # what the test is about


def test_a_policy_decides_for_a_manager_of_0_1(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchelastic
    from tests.pure.test_train_loop import MemoryManager, SavedCounter, ScriptedCoordinator, count_to
    from torchelastic.checkpoint import checkpoint_manager

    class Quiet(SavedCounter):
        def should_save_checkpoint(self, rank: int) -> bool:
            return self.count == 5

    manager = MemoryManager()
    monkeypatch.setattr(checkpoint_manager, "_manager", manager)
    torchelastic.train(ScriptedCoordinator(), count_to(7), Quiet(), checkpoint=EverySteps(3))
    assert [checkpoint.stream.getvalue() for checkpoint in manager.saved] == [b"3", b"5", b"6"]
    torchelastic.train(ScriptedCoordinator(), count_to(8), SavedCounter(), checkpoint=EverySteps(3) | OnEnd())
    assert [checkpoint.stream.getvalue() for checkpoint in manager.saved[3:]] == [b"8"]


def test_a_step_that_nobody_saw_begin_has_no_duration() -> None:
    clock = FakeClock()
    schedule = SaveSchedule(EverySteps(10), clock)
    schedule.step_ended()
    clock.advance(2.0)
    schedule.step_ended()
    assert decide(schedule, 10).save
