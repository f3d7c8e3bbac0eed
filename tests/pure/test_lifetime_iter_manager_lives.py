"""What an `IterManager` leaves for the next life of the job, and what it tells whoever has started it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pure.managed_loops import Job
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.lifetime import STOPPED_EARLY


@pytest.fixture(autouse=True)
def no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Managers that look for deadlines do not touch what the process does on signals."""
    monkeypatch.setenv("TORCHELASTIC_DEADLINE_SIGNALS", "none")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / ".velastic"


def state_in(folder: Path) -> Any:
    return json.loads((folder / "manager_state.json").read_text())


# from life to life


def test_the_next_life_counts_on_and_knows_how_long_a_save_takes(folder: Path) -> None:
    first = Job(folder, 30.0, total_iters=500)
    first.run(1.0, save_s=2.0)
    assert state_in(folder)["completed_iters"] == first.saved_at[0] - 1
    second = Job(folder, 40.0, total_iters=500, redundant_time=0)
    second.run(1.0, save_s=2.0)
    assert second.manager.iter_count == first.saved_at[0] - 1 + len(second.manager.iter_times) + 2
    assert second.saved_s[0] > 36.0, "a save takes 2 s, so 3 s are left for it"


def test_saves_that_have_become_slower_cost_one_life_and_not_all(folder: Path) -> None:
    """It is killed in the last save: who starts it again has a file that says how little time that was."""
    Job(folder, 100.0, redundant_time=5).run(0.5, save_s=2.0)
    killed = Job(folder, 100.0, redundant_time=5)
    killed.run_into_save(0.5)
    job = Job(folder, 100.0, redundant_time=5)
    job.run(0.5, save_s=20.0)
    assert job.saved_s[0] <= 100.0
    assert job.manager.save_times_s == {"checkpoint": (2.0, 2.0, 20.0)}, "what was measured, and no guess"
    after = Job(folder, 100.0, redundant_time=5)
    after.run(0.5, save_s=20.0)
    assert 85.0 < after.saved_s[0] <= 100.0, "the guess is forgotten"


def test_a_last_save_that_fails_is_not_taken_for_one_that_was_killed(folder: Path) -> None:
    Job(folder, 100.0).run(0.5, save_s=2.0)
    failed = Job(folder, 100.0)
    failed.run_into_save(0.5, OSError("full"))
    job = Job(folder, 100.0)
    job.run(0.5, save_s=2.0)
    assert job.saved_s[0] > 95.0


def test_a_file_of_an_earlier_version_has_no_iterations(folder: Path) -> None:
    first = Job(folder, 30.0)
    first.run(1.0)
    state = state_in(folder)
    del state["iter_times_s"], state["unfinished_save_s"]
    (folder / "manager_state.json").write_text(json.dumps(state))
    second = Job(folder, None)
    assert second.manager.load_manager_state()
    second.run(1.0, steps=1)
    assert second.manager.iter_count == first.saved_at[0]


def test_a_count_that_the_checkpoint_says_goes_before_the_file(folder: Path) -> None:
    Job(folder, 30.0).run(1.0)
    second = Job(folder, None)
    second.manager.iter_count = 12
    second.run(1.0, steps=3)
    assert second.manager.iter_count == 15


@pytest.mark.parametrize("compiles", [True, False])
def test_a_life_that_is_little_longer_than_its_compilation_trains_on(folder: Path, compiles: bool) -> None:
    """All that is known is an iteration of 60 s, and 40 s are left: all is saved, and one more is tried."""
    saved_at = 0
    for life in (1, 2, 3):
        job = Job(folder, 100.0, use_torch_compile=compiles)
        job.run([60.0, *[0.5] * 1000])
        assert job.saved_at[0] > saved_at + 60
        saved_at = job.saved_at[0]
        assert job.manager.given_up_s is not None
        assert 0.0 < job.manager.given_up_s < 3.0
        assert len(job.went_on_at) == (life == 1), "the next life knows how long iterations are"


def evaluating(iteration: int) -> float:
    """Seconds of an iteration of a job that evaluates in every 90th."""
    return 30.0 if iteration and iteration % 90 == 0 else 1.0


def test_a_job_that_is_killed_in_an_iteration_that_nobody_could_foresee_gets_on_in_the_next_life(folder: Path) -> None:
    """Each life of 100 s would end in the first evaluation, with nothing saved, for ever."""
    saved, ends = 0, []
    for _ in range(4):
        job = Job(folder, 100.0)
        job.manager.iter_count = saved  # as the checkpoint says
        saved, is_killed = job.run_until_killed(evaluating, saved, life_s=100.0)
        ends.append((saved, is_killed))
    assert [is_killed for _, is_killed in ends] == [True, True, False, False]
    assert ends[0][0] <= 1, "the save on trial alone"
    assert 70 < ends[1][0] < 90, "saved before the time at which the iteration had begun in which it was killed"
    assert ends[3][0] > ends[2][0] > 90
    assert state_in(folder)["unfinished_iter_s"] == 0.0, "it stopped in time"


def test_what_is_noted_between_saves_does_not_count_what_is_not_saved(folder: Path) -> None:
    first = Job(folder, 100.0, save_ckpt_time=2)
    first.run(1.0, steps=80)  # and is killed
    state = state_in(folder)
    assert (state["completed_iters"], state["iter_times_s"]) == (0, [])
    assert 20.0 <= state["unfinished_iter_s"] < 30.0
    second = Job(folder, 100.0, save_ckpt_time=2)
    second.run(1.0)
    assert second.saved_at == [second.manager.iter_count], "it may be a loop that stops at its first save"
    assert 40 < second.manager.iter_count < 60
    third = Job(folder, 100.0, save_ckpt_time=2)
    third.run(1.0)
    assert third.saved_s[0] > 95.0, "once"


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
        "world_size": 1,
        "save_times_s": {"checkpoint": []},
        "iter_times_s": [0.5] * 9,
        "is_step_tried": False,
        "unfinished_save_s": {},
        "unfinished_iter_s": 0.0,
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


def test_a_stop_in_the_last_iteration_leaves_it_to_the_next_life(folder: Path) -> None:
    """What was saved there is what was trained before it; and `exit_code` asks for that life."""
    short = Job(folder / "short", 20.0)
    short.run(1.0)
    job = Job(folder / "job", 20.0, total_iters=short.manager.iter_count)
    job.run(1.0)
    job.manager.cleanup()
    assert job.manager.exit_code == STOPPED_EARLY
    after = Job(folder / "job", None, total_iters=short.manager.iter_count)
    after.run(1.0, steps=1)
    assert after.manager.iter_count == short.manager.iter_count


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


# what whoever has started the job is told


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "progress.json"
    monkeypatch.setenv("TORCHELASTIC_PROGRESS_FILE", str(path))
    return path


def test_who_reads_while_it_is_told_has_the_word_before_whole(folder: Path, told: Path) -> None:
    job = Job(folder, None)
    job.run(1.0, steps=2)
    with told.open() as reader:
        job.run(1.0, steps=2)
        assert json.loads(reader.read())["committed_step"] == 1
    assert json.loads(told.read_text())["committed_step"] == 3


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


def test_a_progress_file_that_cannot_be_written_is_a_warning_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_PROGRESS_FILE", str(tmp_path / "nowhere" / "progress"))
    job = Job(folder, 20.0)
    job.run(1.0)
    assert len(job.saved_at) == 1
    assert caplog.text.count("the progress of this job is not reported: TORCHELASTIC_PROGRESS_FILE=") == 1
