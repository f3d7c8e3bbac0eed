"""One process, a clock that moves when it is told to, and the state file in a folder of the test's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pure.managed_loops import START_S, Job
from torchelastic.lifetime import STOPPED_EARLY, IterManager, nearest, time_limit_s


@pytest.fixture(autouse=True)
def no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Managers that look for deadlines do not touch what the process does on signals."""
    monkeypatch.setenv("TORCHELASTIC_DEADLINE_SIGNALS", "none")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / ".velastic"


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
    assert job.manager.save_times_s == {"checkpoint": (30.0,) * 4}


def test_a_save_that_fails_teaches_nothing(folder: Path) -> None:
    job = Job(folder, None)
    with pytest.raises(OSError, match="full"), job.manager.saving():
        raise OSError("full")
    assert job.manager.save_times_s == {"checkpoint": ()}


def test_it_does_not_stop_before_anything_was_trained(folder: Path) -> None:
    """A job that is restarted with too little time gets on by one iteration each time."""
    job = Job(folder, 3.0)
    job.run(1.0)
    assert job.saved_at == [2]
    assert job.manager.decision is not None
    assert not job.manager.decision.fits


class Moving:
    """A deadline that is told later, and moves."""

    name, reason = "moving", "a test"

    def __init__(self) -> None:
        self.at_s: float | None = None

    def remaining_s(self, now_s: float) -> float | None:
        return None if self.at_s is None else self.at_s - now_s


def test_how_long_a_save_takes_is_learned_by_a_trial_once_in_the_life_of_the_job(folder: Path) -> None:
    """Saves take 60 s, and nobody has said so: the guess of a few seconds would lose one life after the other."""
    first = Job(folder, 400.0)
    first.run(1.0, save_s=60.0)
    assert (first.went_on_at, len(first.saved_at)) == ([2], 1)
    assert 300.0 < first.saved_s[0] <= 400.0, "1.5 times the 60 s are left for it"
    second = Job(folder, 400.0)
    second.run(1.0, save_s=60.0)
    assert (second.went_on_at, len(second.saved_at)) == ([], 1), "the life before has told"
    assert 300.0 < second.saved_s[0] <= 400.0


def test_a_durable_tier_that_nobody_has_measured_is_not_taken_for_a_quick_one(folder: Path) -> None:
    job = Job(folder, 30.0, tiers=("durable", "local disk", "memory"))
    job.run(1.0, save_s=8.0)
    decision = job.manager.decision
    assert decision is not None
    assert decision.tier == "local disk", "10 s are guessed for it, and 60 for the durable one"


class Sigterm(Moving):
    """A notice that does not say how much time is left: 30 s are a guess."""

    def unsure_since_s(self) -> float | None:
        return None if self.at_s is None else self.at_s - 30.0


def test_at_a_notice_that_does_not_say_when_it_saves_at_once_and_goes_on_and_saves_again(folder: Path) -> None:
    notice = Sigterm()
    job = Job(folder, notice)
    job.manager.save_took(0.3)
    job.run(0.1, steps=200)
    came_s = job.clock()
    notice.at_s = came_s + 30.0
    job.run(0.1, steps=2, save_s=0.3)
    assert job.went_on_at, "within one iteration"
    assert job.clock() - came_s < 1.0
    assert not job.manager.should_stop
    assert "nobody has said how much time is left" in str(job.manager.decision)
    job.run(0.1, save_s=0.3)
    assert (len(job.went_on_at), len(job.saved_at)) == (1, 1)
    assert 28.0 < job.saved_s[0] + START_S - came_s <= 30.0


def test_a_save_on_trial_does_not_answer_a_notice_that_comes_after_it(folder: Path) -> None:
    notice = Sigterm()
    job = Job(folder, nearest([time_limit_s(600.0, began_s=START_S), notice]))
    job.run(0.1, steps=30, save_s=0.3)
    assert job.went_on_at == [2], "to measure a save"
    came_s = job.clock()
    notice.at_s = came_s + 30.0
    job.run(0.1, steps=2, save_s=0.3)
    assert job.went_on_at == [2, 31], "docker stop gives 10 s: what was trained since the trial would be lost"
    job.run(0.1, steps=100, save_s=0.3)
    assert job.went_on_at == [2, 31], "once"


def test_at_such_a_notice_the_tier_is_one_that_fits_into_the_shortest_grace_there_is(folder: Path) -> None:
    notice = Sigterm()
    job = Job(folder, notice, tiers=("durable", "memory"))
    job.manager.save_took(12.0, "durable")
    job.manager.save_took(0.5, "memory")
    job.run(0.1, steps=200)
    notice.at_s = job.clock() + 30.0
    job.run(0.1, steps=2, save_s=0.5)
    assert len(job.manager.save_times_s["memory"]) == 2, "docker stop gives 10 s: too little for 18 s"


def test_if_there_is_no_time_for_another_save_it_stops_after_that_one(folder: Path) -> None:
    notice = Sigterm()
    job = Job(folder, notice)
    job.manager.save_took(12.0)
    job.run(0.1, steps=200)
    notice.at_s = job.clock() + 30.0
    job.run(0.1, steps=5, save_s=12.0)
    assert (job.went_on_at, len(job.saved_at)) == ([], 1)


def test_a_deadline_that_comes_late_is_heard_of(folder: Path) -> None:
    notice = Moving()
    job = Job(folder, notice, save_ckpt_time=10)
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


def test_the_end_of_the_run_is_no_error_but_going_on_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(folder, None, total_iters=3)
    for _ in range(4):  # nanoGPT does one more than max_iters
        job.manager.iter()
        job.clock.advance(1.0)
    assert "total_iters" not in caplog.text
    for _ in range(5):
        job.manager.iter()
        job.clock.advance(1.0)
    said = "iteration 5 begins, and total_iters is 3: end the loop there, or give the iterations of all attempts"
    assert caplog.text.count(said) == caplog.text.count("total_iters is 3") == 1
    assert job.manager.remaining_time == 0.0


# the rest


def test_the_exit_code_asks_for_another_life_if_it_was_told_to_stop(folder: Path) -> None:
    job = Job(folder, 20.0)
    assert job.manager.exit_code == 0
    job.run(1.0)
    assert job.manager.exit_code == STOPPED_EARLY == 75
    job.manager.close()
    assert job.manager.exit_code == STOPPED_EARLY


# the deadlines of the process


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
    assert len(job.manager.save_times_s["memory"]) == 2, "the save was into the memory tier"
    with pytest.raises(ValueError, match="no tier 'tape'"):
        job.manager.save_took(1.0, "tape")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"confidence": 1.0}, "confidence is"),
        ({"save_ckpt_time": -1}, "save_ckpt_time is -1"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"tiers": ()}, "tiers is"),
        ({"tiers": "durable"}, "tiers is"),
        ({"redundant_time": float("nan")}, "redundant_time"),
    ],
)
def test_an_argument_out_of_its_range_is_named(folder: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        IterManager(velastic_dir=folder, **options)


@pytest.mark.parametrize("options", [{"total_iters": None}, {"total_iters": "5"}, {"redundant_time": "5"}])
def test_an_argument_of_another_type_is_named(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(options))} is .*: give"):
        IterManager(velastic_dir=folder, **options)


def test_the_start_time_is_that_of_the_present_iteration(folder: Path) -> None:
    job = Job(folder, None)
    assert job.manager.start_time is None
    for done_s in (0.0, 3.0):
        job.manager.iter()
        assert job.manager.start_time == START_S + done_s
        job.clock.advance(3.0)


def test_the_summary_leaves_out_what_is_not_known(folder: Path) -> None:
    assert Job(folder, None).manager.summary().splitlines() == [
        "iterations: 0, 0 s each, the longest 0 s, set apart at the start: none s",
        "saves to 'checkpoint': 0, the longest 0 s",
        "deadline: none",
    ]
    job = Job(folder, None, total_iters=100)
    job.run(1.0, steps=40)
    assert "rest of the run: 0:01:01" in job.manager.summary()


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, tempfile; from torchelastic.lifetime import IterManager\n"
        "m = IterManager(velastic_dir=tempfile.mkdtemp()); m.iter(); m.iter(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
