"""The train loop's side of a deadline, on one rank, with a clock of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.pure.worlds_of_one import Counter, InMemory, World
from torchelastic.checkpoint.loop_checkpoints import LoopCheckpoints
from torchelastic.errors import NonRetryableException
from torchelastic.lifetime import STOPPED_EARLY, DeadlineAt, Lifetime, StoppedEarly, nearest
from torchelastic.lifetime.loop_lifetime import LoopLifetime
from torchelastic.lifetime.sources import Notice, Notices
from torchelastic.testing.clock import FakeClock


class Run:
    """The loop of one rank, by hand, on a clock of its own; `deadline_s` from its beginning."""

    def __init__(self, deadline_s: float | None, manager: InMemory | None = None, **settings: Any) -> None:
        self.clock, self.world, self.state = FakeClock(), World(), Counter()
        self.manager = manager
        if manager is not None:
            manager.clock = self.clock
        at = None if deadline_s is None else DeadlineAt("test", self.clock() + deadline_s, "told")
        self.ends_s = self.clock() + (deadline_s or 0.0)
        checkpoints = LoopCheckpoints(self.world, manager, self.clock)
        self.checkpoints = checkpoints
        chosen = Lifetime(**{"reserve_s": 5.0, "deadline": nearest([at]), **settings})
        self.lifetime = LoopLifetime(self.world, checkpoints, chosen, clock=self.clock, environment={})
        checkpoints.enter_group(self.state, 0)
        for one in (checkpoints, self.lifetime):
            one.in_sync(self.state)

    def steps(self, durations_s: Iterator[float]) -> StoppedEarly:
        """Trains until it is stopped."""
        for step_s in durations_s:
            self.clock.advance(step_s)
            self.state.step += 1
            self.checkpoints.step_committed()
            try:
                self.lifetime.after_step(self.state)
            except StoppedEarly as stop:
                return stop
        raise AssertionError("it was never stopped")


def always(step_s: float, count: int = 10_000) -> Iterator[float]:
    return iter([step_s] * count)


def test_it_stops_at_the_last_step_after_which_a_save_and_the_reserve_fit() -> None:
    run = Run(100.0, InMemory(save_s=4.0))
    stop = run.steps(always(1.0))
    # a step of 1 s, a save of 4 s and the reserve of 5 s, of which the margins of the two are a part: 10 s
    assert run.manager is not None
    assert run.manager.steps == [1, stop.step], "one on trial, and the last"
    assert stop.step == 100 - 4 - 9
    assert (stop.code, stop.saved_in, stop.others_go_on) == (STOPPED_EARLY, ("durable",), False)
    assert "stopped after step 87, 5.0 s before the deadline; saved in durable" in str(stop)
    assert run.world.calls == ["stop early"]


def test_the_next_life_goes_on_from_that_step() -> None:
    manager = InMemory(save_s=1.0)
    stop = Run(60.0, manager).steps(always(1.0))
    again = Run(None, manager)
    assert (again.state.step, again.checkpoints.step) == (stop.step, stop.step)


def test_a_save_that_fails_is_tried_again_while_there_is_time() -> None:
    run = Run(60.0, InMemory(save_s=1.0))
    assert run.manager is not None
    run.manager.failing = 3  # the one on trial, the one that measures, and the first try of the last one
    stop = run.steps(always(1.0))
    assert run.manager.steps == [stop.step]


def test_a_step_that_cannot_be_saved_is_no_early_stop_but_a_failure() -> None:
    run = Run(60.0, InMemory(save_s=1.0, failing=1000))
    with pytest.raises(NonRetryableException, match=r"stopped after step \d+, .* could not be saved"):
        run.steps(always(1.0))
    assert run.world.calls == ["stop early"], "who is left is not started again by the launcher"


@pytest.mark.long
def test_steps_that_become_a_hundred_times_as_long_near_the_deadline_are_noticed_by_the_clock() -> None:
    """5 ms, then 0.5 s each: whoever counts steps until the next decision finds the deadline over."""
    for quick in range(2000, 3800, 50):
        run = Run(25.0, InMemory(save_s=0.1), unknown_save_s=1.0, reserve_s=1.0)
        stop = run.steps(iter([0.005] * quick + [0.5] * 100))
        assert run.clock() <= run.ends_s, (quick, str(stop))
        assert run.manager is not None
        assert run.manager.steps[-1] == stop.step


def test_a_notice_that_does_not_say_when_is_answered_by_a_save_at_once_and_training_goes_on() -> None:
    notices = Notices("signal", "none came")
    run = Run(None, InMemory(save_s=0.3), deadline=notices)
    with pytest.raises(AssertionError, match="never stopped"):
        run.steps(always(0.1, 100))
    came_s = run.clock()
    notices.tell([Notice("signal", "signal", came_s + 30.0, "SIGTERM", unsure_since_s=came_s)])
    with pytest.raises(AssertionError, match="never stopped"):
        run.steps(always(0.1, 10))
    assert run.manager is not None
    assert run.manager.steps[0] <= 102, "at once"
    saves = len(run.manager.steps)
    stop = run.steps(always(0.1))
    assert (run.manager.steps[-1], len(run.manager.steps)) == (stop.step, saves + 1), "once, and at the end"
    assert came_s + 20.0 < run.clock() <= came_s + 30.0
