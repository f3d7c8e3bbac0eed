"""One process, a clock that moves when it is told to, and the state file in a folder of the test's own."""

from __future__ import annotations

import json
import logging
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.lifetime import STOPPED_EARLY, Alone, Deadline, IterManager, nearest, time_limit_s
from torchelastic.lifetime.deadline import MLP_VARIABLE
from torchelastic.lifetime.progress import Screen
from torchelastic.testing.clock import FakeClock

START_S = 1000.0


class Job:
    """A loop, as the seed has it, that stops when it is told to."""

    def __init__(self, folder: Path, deadline: Deadline | float | None, **options: Any) -> None:
        self.clock = FakeClock(START_S)
        if isinstance(deadline, float):
            deadline = time_limit_s(deadline, began_s=START_S)
        self.manager = IterManager(
            velastic_dir=folder, deadline=nearest([deadline]), clock=self.clock, **{"redundant_time": 0, **options}
        )
        self.saved_at: list[int] = []
        self.saved_s: list[float] = []

    def run(self, step_s: Sequence[float] | float, steps: int = 1000, save_s: float = 2.0) -> None:
        times = iter([step_s] * steps if isinstance(step_s, float) else step_s)
        for took_s in times:
            self.manager.iter()
            if self.manager.should_save_ckpt():
                with self.manager.saving():
                    self.clock.advance(save_s)
                self.saved_at.append(self.manager.iter_count)
                self.saved_s.append(self.clock() - START_S)
            if self.manager.should_stop:
                return
            self.clock.advance(took_s)


@pytest.fixture(autouse=True)
def no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Managers that look for deadlines do not touch what the process does on signals."""
    monkeypatch.setenv("TORCHELASTIC_DEADLINE_SIGNALS", "none")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / ".velastic"


def state_in(folder: Path) -> Any:
    return json.loads((folder / "manager_state.json").read_text())


def test_without_a_deadline_it_measures_and_says_nothing(folder: Path) -> None:
    job = Job(folder, None, total_iters=200)
    job.run(0.5, steps=101)
    manager = job.manager
    assert (manager.iter_count, manager.avg_iter_time, manager.max_iter_time) == (101, 0.5, 0.5)
    assert manager.remaining_time == pytest.approx(50.0)
    assert manager.forecast(7).seconds == pytest.approx(3.5)
    assert (job.saved_at, manager.should_stop, manager.decision) == ([], False, None)
    assert not folder.exists(), "no file, no folder per iteration"


@pytest.mark.parametrize("step_s", [0.001, 0.02, 0.3, 1.0, 7.0])
def test_it_saves_once_at_the_last_safe_step_and_stops(folder: Path, step_s: float) -> None:
    job = Job(folder, 100.0, save_ckpt_time=10)
    job.run(step_s, steps=200_000, save_s=8.0)
    assert len(job.saved_at) == 1
    assert job.manager.should_stop
    began_s = job.saved_s[0] - 8.0
    # 1.5 times the longest, while fewer than 199 iterations are known
    assert 90.0 - 2.5 * step_s - 1e-6 <= began_s <= 90.0
    assert job.manager.given_up_s == pytest.approx(100.0 - job.saved_s[0])
    assert not job.manager.should_save_ckpt(), "once per deadline"


def test_a_save_that_was_measured_is_believed_and_not_the_guess(folder: Path) -> None:
    job = Job(folder, 100.0)
    job.manager.save_took(2.0)
    job.run(1.0, save_s=2.0)
    assert job.saved_s[0] > 95.0, "3 s for the save, and not the 10 of the guess"


def test_what_the_user_reserves_for_the_save_is_kept_whatever_was_measured(folder: Path) -> None:
    job = Job(folder, 100.0, save_ckpt_time=30)
    for _ in range(5):
        job.manager.save_took(1.0)
    job.run(1.0)
    assert 67.0 < job.saved_s[0] <= 72.0


def test_a_save_is_no_part_of_the_iteration(folder: Path) -> None:
    job = Job(folder, None)
    for iteration in range(40):
        job.manager.iter()
        job.clock.advance(0.5)
        if iteration % 10 == 9:
            with job.manager.saving():
                job.clock.advance(30.0)
    assert (job.manager.avg_iter_time, job.manager.max_iter_time) == (0.5, 0.5)
    assert {tier: (n, longest) for tier, n, longest in job.manager.summary().saves} == {"checkpoint": (4, 30.0)}


def test_a_save_that_nobody_measures_is_the_time_until_the_next_iteration(folder: Path) -> None:
    job = Job(folder, 60.0)
    while not job.manager.should_save_ckpt():
        job.clock.advance(1.0)
        job.manager.iter()
    job.clock.advance(4.0 + 1.0)
    job.manager.iter()
    assert job.manager.summary().saves == (("checkpoint", 1, 4.0),)
    assert job.manager.max_iter_time == 1.0


def test_a_save_that_fails_teaches_nothing(folder: Path) -> None:
    job = Job(folder, None)
    with pytest.raises(OSError, match="full"), job.manager.saving():
        raise OSError("full")
    assert job.manager.summary().saves == (("checkpoint", 0, 0.0),)


def test_it_does_not_stop_before_anything_was_trained(folder: Path) -> None:
    """A job that is restarted with too little time gets on by one iteration each time."""
    job = Job(folder, 3.0)
    job.run(1.0)
    assert job.saved_at == [2]
    assert job.manager.decision is not None
    assert not job.manager.decision.fits


def test_compiling_does_not_count(folder: Path) -> None:
    job = Job(folder, 300.0, use_torch_compile=True)
    job.run([60.0, 30.0, 20.0, *[1.0] * 500])
    assert job.manager.max_iter_time == 1.0
    assert job.saved_s[0] > 285.0
    assert job.manager.summary().first_iters_s == (60.0, 30.0, 20.0)


def test_one_slow_iteration_does_not_raise_the_margin_for_ever(folder: Path) -> None:
    job = Job(folder, 2000.0)
    job.run([*[1.0] * 100, 100.0, *[1.0] * 2000])
    assert job.saved_s[0] > 1985.0


class Moving:
    """A deadline that is told later, and moves."""

    name, reason = "moving", "a test"

    def __init__(self) -> None:
        self.at_s: float | None = None

    def remaining_s(self, now_s: float) -> float | None:
        return None if self.at_s is None else self.at_s - now_s


def test_a_deadline_that_comes_late_is_heard_of(folder: Path) -> None:
    notice = Moving()
    job = Job(folder, notice)
    job.run(0.01, steps=3000)
    notice.at_s = job.clock() + 30.0
    job.run(0.01, steps=30_000)
    assert len(job.saved_at) == 1
    assert 18.0 < job.saved_s[0] - 30.0 - 2.0 <= 20.0


def test_after_a_deadline_that_moves_away_there_is_another_save(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    notice = Moving()
    notice.at_s = START_S + 50.0
    job = Job(folder, notice)
    job.run(1.0)
    notice.at_s += 100.0
    job.manager.iter()
    assert not job.manager.should_stop
    assert "the deadline has moved away" in caplog.text
    job.run(1.0)
    assert len(job.saved_at) == 2
    assert 140.0 < job.saved_s[1] <= 150.0


def test_the_decision_names_the_tier(folder: Path) -> None:
    job = Job(folder, 8.0, tiers=("durable", "memory"))
    job.manager.save_took(20.0, "durable")
    job.manager.save_took(2.0, "memory")
    job.run(1.0)
    decision = job.manager.decision
    assert decision is not None
    assert (decision.tier, decision.is_downgrade) == ("memory", True)
    assert job.manager.summary().saves[1][1] == 2, "the save was into the memory tier"
    with pytest.raises(ValueError, match="no tier 'tape'"):
        job.manager.save_took(1.0, "tape")


def test_who_goes_on_all_the_same_is_told_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(folder, 20.0)
    answers = []
    for _ in range(40):
        job.manager.iter()
        answers.append(job.manager.should_save_ckpt())
        job.clock.advance(1.0)
    assert sum(answers) == 1
    said = f"iteration {answers.index(True) + 3} begins after the save before the deadline: what is trained now will"
    assert caplog.text.count(said) == caplog.text.count("will be lost") == 1


def test_one_iteration_more_may_be_the_last_of_a_loop_and_is_not_complained_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(folder, 20.0)
    job.run(1.0)
    job.manager.iter()
    assert job.saved_at
    assert "will be lost" not in caplog.text


def test_the_end_of_the_run_is_no_error_but_going_on_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(folder, None, total_iters=3)
    for _ in range(4):  # nanoGPT does one more than max_iters
        job.manager.iter()
        job.clock.advance(1.0)
    assert "total_iters" not in caplog.text
    for _ in range(5):
        job.manager.iter()
        job.clock.advance(1.0)
    said = "iteration 5 begins, and total_iters is 3: end the loop there, or give the iterations of all lives"
    assert caplog.text.count(said) == caplog.text.count("total_iters is 3") == 1
    assert job.manager.remaining_time == 0.0


# from life to life


def test_the_next_life_counts_on_and_knows_how_long_a_save_takes(folder: Path) -> None:
    first = Job(folder, 30.0, total_iters=500)
    first.run(1.0, save_s=2.0)
    assert state_in(folder)["completed_iters"] == first.saved_at[0] - 1
    second = Job(folder, 40.0, total_iters=500, redundant_time=0)
    second.run(1.0, save_s=2.0)
    assert second.manager.iter_count == first.saved_at[0] - 1 + len(second.manager.iter_times) + 2
    assert second.saved_s[0] > 36.0, "a save takes 2 s, so 3 s are left for it"


def test_new_arguments_count_and_not_those_of_the_life_before(folder: Path) -> None:
    Job(folder, 30.0, total_iters=500, redundant_time=7).run(1.0)
    second = Job(folder, 60.0, total_iters=900, redundant_time=1)
    second.run(1.0)
    assert second.manager.total_iters == 900
    assert 54.0 < second.saved_s[0] < 60.0


def test_a_count_that_the_checkpoint_says_goes_before_the_file(folder: Path) -> None:
    Job(folder, 30.0).run(1.0)
    second = Job(folder, None)
    second.manager.iter_count = 12
    second.run(1.0, steps=3)
    assert second.manager.iter_count == 15


def test_the_file_is_for_others_too(folder: Path) -> None:
    job = Job(folder, None, total_iters=50, save_ckpt_time=4)
    job.run(0.5, steps=11)
    job.manager.save_manager_state(save_bin=True)
    assert state_in(folder) == {
        "schema": 1,
        "avg_iter_time": 0.5,
        "total_iters": 50,
        "iter_count": 11,
        "remaining_time": 20.0,
        "save_ckpt_time": 4.0,
        "completed_iters": 10,
        "iter_bound_s": 0.75,
        "world_size": 1,
        "save_times_s": {"checkpoint": []},
    }
    assert sorted(path.name for path in folder.iterdir()) == ["manager_state.json"], "and nothing is pickled"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"schema": 99}', '{"schema": true}', "\x80\x04", "[" * 100_000, "NaN"],
    ids=["empty", "torn", "list", "bare", "newer", "bool", "pickle", "deep", "nan"],
)
def test_a_file_that_is_something_else_is_named_and_costs_the_count_only(
    folder: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    (folder / "manager_state.json").write_text(text, encoding="latin-1")
    with pytest.raises(CorruptCheckpointError, match=r"manager_state\.json holds no state"):
        Job(folder, None).manager.load_manager_state()
    job = Job(folder, None)
    job.run(1.0, steps=2)
    assert job.manager.iter_count == 2
    assert "remove it, and the iterations are counted anew" in caplog.text


@pytest.mark.parametrize("name", ["completed_iters", "iter_count", "save_times_s", "iter_bound_s", "avg_iter_time"])
@pytest.mark.parametrize("value", [None, -5, "7", float("inf"), {"checkpoint": 3}, {"checkpoint": [-1.0]}])
def test_a_field_of_the_wrong_sort_is_no_state(folder: Path, name: str, value: object) -> None:
    job = Job(folder, None)
    job.manager.save_manager_state()
    (folder / "manager_state.json").write_text(json.dumps({**state_in(folder), name: value}))
    with pytest.raises(CorruptCheckpointError, match=name):
        job.manager.load_manager_state()


def test_cleanup_removes_the_file_and_never_a_checkpoint(folder: Path) -> None:
    job = Job(folder, None)
    job.manager.save_manager_state()
    (folder / "checkpoint").mkdir()
    job.manager.cleanup()
    job.manager.cleanup()
    assert [path.name for path in folder.iterdir()] == ["checkpoint"]
    (folder / "checkpoint").rmdir()
    job.manager.cleanup()
    assert not folder.exists()


@pytest.mark.parametrize(("total_iters", "stays"), [(500, True), (-1, True), (3, False)])
def test_cleanup_after_a_stop_keeps_what_the_next_life_needs_unless_the_run_is_over(
    folder: Path, total_iters: int, stays: bool
) -> None:
    job = Job(folder, 20.0, total_iters=total_iters)
    job.run(1.0)
    assert job.manager.should_stop
    job.manager.cleanup()
    assert (folder / "manager_state.json").exists() is stays


def test_a_folder_that_cannot_be_written_is_an_error_on_request_and_a_warning_at_the_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    job = Job(tmp_path / "file" / "below", 20.0)
    job.run(1.0)
    assert len(job.saved_at) == 1
    assert "will count its iterations anew" in caplog.text
    with pytest.raises(CheckpointError, match="a file is where a folder should be"):
        job.manager.save_manager_state()


def test_a_save_before_the_first_iteration_does_not_overwrite_what_the_life_before_left(folder: Path) -> None:
    first = Job(folder, 30.0)
    first.run(1.0, save_s=2.0)
    second = Job(folder, None)
    second.manager.save_took(3.0)
    second.run(1.0, steps=1)
    assert second.manager.iter_count == first.saved_at[0]
    assert second.manager.summary().saves == (("checkpoint", 2, 3.0),)


# the rest


def test_the_loop_of_the_seed_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With velastic's arguments and names, and no `should_stop`: it trains on, and is asked to save once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MLP_VARIABLE, str(time.time() + 15.2))
    max_iters, use_compile = 20, False
    saves: list[int] = []

    def save_checkpoint() -> None:
        saves.append(iter_mngr.iter_count)

    iter_mngr = IterManager(total_iters=max_iters, use_torch_compile=use_compile)
    iter_num = 0
    while True:
        iter_mngr.iter()
        if iter_mngr.should_save_ckpt():
            save_checkpoint()
        time.sleep(0.02)
        iter_num += 1
        if iter_num > max_iters:
            break
    assert len(saves) == 1
    assert (tmp_path / ".velastic" / "manager_state.json").exists()
    assert iter_mngr.avg_iter_time <= iter_mngr.max_iter_time


def test_the_exit_code_asks_for_another_life_if_it_was_told_to_stop(folder: Path) -> None:
    job = Job(folder, 20.0)
    assert job.manager.exit_code == 0
    job.run(1.0)
    assert job.manager.exit_code == STOPPED_EARLY == 75
    job.manager.close()
    assert job.manager.exit_code == STOPPED_EARLY


def test_of_a_deadline_that_is_given_nothing_is_closed(folder: Path) -> None:
    class Closable(Moving):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    deadline = Closable()
    manager = IterManager(velastic_dir=folder, deadline=deadline)
    manager.close()
    manager.close()
    assert not deadline.is_closed


def test_who_goes_on_after_close_is_told_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(folder, 100.0)
    job.run(1.0, steps=3)
    job.manager.close()
    assert "close()" not in caplog.text
    job.run(1.0, steps=5)
    assert caplog.text.count("iteration 4 begins after close(): no deadline is heard of any more") == 1
    assert caplog.text.count("after close()") == 1


# what whoever has started the job is told


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "progress.json"
    monkeypatch.setenv("TORCHELASTIC_PROGRESS_FILE", str(path))
    return path


def test_it_tells_what_was_done_now_and_then(folder: Path, told: Path) -> None:
    job = Job(folder, None, total_iters=500)
    job.manager.iter()
    assert json.loads(told.read_text()) == {"resumed_step": 0, "committed_step": 0}
    job.run(0.01, steps=200)
    document = json.loads(told.read_text())
    assert 200 - 2 * 50 <= document["committed_step"] <= 200, "about every half second"
    assert document == {"resumed_step": 0, "committed_step": document["committed_step"]}
    assert [path.name for path in told.parent.iterdir()] == [told.name], "nothing half written is left"


def test_it_tells_a_save_and_that_it_is_not_the_end(folder: Path, told: Path) -> None:
    job = Job(folder, 20.0, total_iters=500)
    job.run(1.0)
    (at,) = job.saved_at
    expected = {"resumed_step": 0, "committed_step": at - 1, "saved_step": at - 1, "total_steps": 500}
    assert json.loads(told.read_text()) == expected
    job.manager.close()
    assert json.loads(told.read_text()) == expected
    second = Job(folder, None, total_iters=500)
    second.run(0.7, steps=3)
    assert json.loads(told.read_text()) == {"resumed_step": at - 1, "committed_step": at + 1}


def test_who_reads_while_it_is_told_has_the_word_before_whole(folder: Path, told: Path) -> None:
    job = Job(folder, None)
    job.run(1.0, steps=2)
    with told.open() as reader:
        job.run(1.0, steps=2)
        assert json.loads(reader.read())["committed_step"] == 1
    assert json.loads(told.read_text())["committed_step"] == 3


def test_a_save_that_fails_is_not_told(folder: Path, told: Path) -> None:
    job = Job(folder, None)
    job.run(1.0, steps=3)
    with pytest.raises(OSError, match="full"), job.manager.saving():
        raise OSError("full")
    job.run(1.0, steps=3)
    assert "saved_step" not in json.loads(told.read_text())


def test_a_save_in_the_background_holds_what_was_trained_when_it_was_asked_for(folder: Path, told: Path) -> None:
    job = Job(folder, 20.0)
    while not job.manager.should_save_ckpt():
        job.clock.advance(1.0)
        job.manager.iter()
    asked = job.manager.iter_count - 1
    assert "saved_step" not in json.loads(told.read_text()), "it is not durable yet"
    job.manager.save_took(1.0)
    assert json.loads(told.read_text())["saved_step"] == asked


@pytest.mark.parametrize(("steps", "done"), [(10, 10), (9, 8)])
def test_at_the_end_of_a_loop_it_tells_whether_that_was_all(folder: Path, told: Path, steps: int, done: int) -> None:
    """There is no `iter()` after the last iteration; in another one the loop may have been left in the middle."""
    job = Job(folder, None, total_iters=10)
    job.run(1.0, steps=steps)
    assert "total_steps" not in json.loads(told.read_text()), "an exit with 0 would be the word of the script"
    job.manager.close()
    assert json.loads(told.read_text()) == {"resumed_step": 0, "committed_step": done, "total_steps": 10}


def test_who_says_that_the_run_is_over_is_believed(folder: Path, told: Path) -> None:
    """It has converged, for example."""
    job = Job(folder, None, total_iters=10)
    job.run(1.0, steps=5)
    job.manager.close()
    job.manager.cleanup()
    assert json.loads(told.read_text()) == {"resumed_step": 0, "committed_step": 4}


def test_who_was_told_to_stop_cannot_say_that_the_run_is_over(folder: Path, told: Path) -> None:
    job = Job(folder, 20.0, total_iters=500)
    job.run(1.0)
    job.manager.cleanup()
    assert json.loads(told.read_text())["total_steps"] == 500


def test_a_loop_that_ends_by_its_own_count_is_complete(folder: Path, told: Path) -> None:
    """nanoGPT begins one iteration more than there are."""
    job = Job(folder, None, total_iters=10)
    job.run(1.0, steps=11)
    assert json.loads(told.read_text()) == {"resumed_step": 0, "committed_step": 10, "total_steps": 10}


def test_without_the_variable_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    job = Job(folder, None)
    job.run(1.0, steps=10)
    job.manager.close()
    assert list(tmp_path.iterdir()) == []


def test_a_progress_file_that_cannot_be_written_is_a_warning_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_PROGRESS_FILE", str(tmp_path / "nowhere" / "progress"))
    job = Job(folder, 20.0)
    job.run(1.0)
    assert len(job.saved_at) == 1
    assert caplog.text.count("the progress of this job is not told: TORCHELASTIC_PROGRESS_FILE=") == 1


def test_only_the_first_rank_tells(folder: Path, told: Path) -> None:
    class Second(Alone):
        is_first, world_size = False, 2

    job = Job(folder, 20.0, agree=Second())
    job.run(1.0)
    job.manager.close()
    assert job.saved_at
    assert not told.exists()


# the deadlines of the process


def test_the_variables_are_looked_for_without_being_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MLP_VARIABLE, "99999999999")
    manager = IterManager(velastic_dir=folder)
    assert MLP_VARIABLE in manager.summary().deadline
    manager.close()
    monkeypatch.setenv(MLP_VARIABLE, "soon")
    with pytest.raises(ValueError, match=MLP_VARIABLE):
        IterManager(velastic_dir=folder)


def test_a_date_in_the_past_is_no_deadline_and_it_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(MLP_VARIABLE, "1600000000")
    manager = IterManager(velastic_dir=folder)
    for _ in range(3):
        manager.iter()
    assert not manager.should_stop
    assert f"{MLP_VARIABLE}=1600000000 is" in caplog.text
    assert "in the past: ignored" in caplog.text
    manager.close()


def test_a_save_slower_than_the_time_left_is_made_to_the_tier_below_and_it_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(folder, 8.0, tiers=("durable", "memory"))
    job.manager.save_took(20.0, "durable")
    job.manager.save_took(2.0, "memory")
    job.run(1.0)
    assert "too late for 'durable', which takes at most 30 s" in caplog.text
    assert job.manager.given_up_s is not None
    assert job.manager.given_up_s >= 0.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"confidence": 1.0}, "confidence is"),
        ({"save_ckpt_time": -1}, "save_ckpt_time is -1"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"predict_freq": 0}, "predict_freq is 0"),
        ({"tiers": ()}, "tiers is"),
        ({"tiers": "durable"}, "tiers is"),
        ({"redundant_time": float("nan")}, "redundant_time"),
    ],
)
def test_an_argument_out_of_its_range_is_named(folder: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        IterManager(velastic_dir=folder, **options)


def test_a_wrong_argument_leaves_no_source_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_DEADLINE_SIGNALS")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="confidence"):
        IterManager(velastic_dir=folder, confidence=2.0)
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_is_no_deadline_is_refused(folder: Path) -> None:
    with pytest.raises(TypeError, match="it needs `name`"):
        IterManager(velastic_dir=folder, deadline=120.0)  # type: ignore[arg-type]


def test_it_draws_no_random_number(folder: Path) -> None:
    random.seed(5)
    before = random.getstate()
    Job(folder, 30.0).run(0.1)
    assert random.getstate() == before


def test_the_summary_is_for_people(folder: Path) -> None:
    job = Job(folder, 60.0, total_iters=100)
    job.run(1.0)
    text = str(job.manager.summary())
    assert re.search(r"iterations: \d+ of 100, 1 s each, the longest 1 s, set apart at the start: 1 s", text)
    assert "saves to 'checkpoint': 1, the longest 2 s" in text
    assert re.search(r"deadline: time limit \(time_limit_s=60\), in \d+\.\d s", text)
    assert "decision: save and stop: " in text
    assert "s were left when the save was done" in text


class Terminal:
    """Something that says it is a terminal, and keeps what is written."""

    def __init__(self, is_terminal: bool) -> None:
        self.text, self._is_terminal = "", is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("has_rich", [True, False])
def test_only_a_terminal_gets_a_line_and_not_too_often(has_rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal, file = Terminal(True), Terminal(False)
    for stream in (terminal, file):
        screen = Screen(stream)  # type: ignore[arg-type]
        for now_s in (10.0, 10.1, 10.6):
            screen.show(f"iteration at {now_s}", now_s)
    assert file.text == ""
    assert ["10.0" in terminal.text, "10.1" in terminal.text, "10.6" in terminal.text] == [True, False, True]


def test_the_first_rank_shows_its_progress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    Job(folder, 100.0, total_iters=50).run(1.0, steps=20)
    assert re.search(r"iteration \d+ of 50 \(\d+ %\), 1 s each, ETA 0:00:\d\d, deadline in 0:01:\d\d", terminal.text)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, tempfile; from torchelastic.lifetime import IterManager\n"
        "m = IterManager(velastic_dir=tempfile.mkdtemp()); m.iter(); m.iter(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_log_says_why(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Job(folder, 60.0).run(1.0)
    assert "save and stop: " in caplog.text
    assert "no save to 'checkpoint' was measured yet: a guess" in caplog.text
    assert "deadline: time limit (time_limit_s=60)" in caplog.text
    assert "the save took 2.0 s and was done" in caplog.text
