"""A job that somebody has cancelled, or requeued, is not requeued: what is asked before. The real one: tests/slurm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.process.deadline_clocks import Clocks
from torchelastic.lifetime import Requeue, requeue_job
from torchelastic.lifetime.requeue import who_ends_it
from torchelastic.lifetime.sources.slurm import SlurmCommandError, SlurmDeadline, is_being_ended

ARRAY = {"SLURM_JOB_ID": "45", "SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
CANCELLED = "COMPLETING          None                2                   \n"


class Controller:
    """Answers squeue, and agrees to whatever scontrol asks."""

    def __init__(self, answer: str | None) -> None:
        self.answer, self.asked = answer, list[str]()

    def __call__(self, command: Sequence[str], _variables: Mapping[str, str], _timeout_s: float) -> str:
        self.asked.append(" ".join(command))
        if command[0] == "scontrol":
            return ""
        if self.answer is None:
            raise SlurmCommandError("Unable to contact slurm controller")
        return self.answer


def test_a_cancelled_job_is_left_alone() -> None:
    controller = Controller(CANCELLED)
    answer = requeue_job(environment=ARRAY, runner=controller)
    assert answer == Requeue(False, "job 42_3: somebody has cancelled it")
    assert controller.asked == ["squeue --noheader --jobs 42_3 --Format State,Reason,RestartCnt"]


@pytest.mark.parametrize("answer", ["RUNNING None 2", "COMPLETING TimeLimit 2", "", "garbage", "A B C", None])
def test_any_other_is_requeued_also_if_squeue_does_not_answer(answer: str | None) -> None:
    controller = Controller(answer)
    assert requeue_job(environment=ARRAY, runner=controller).asked
    assert controller.asked[-1] == "scontrol requeue 42_3"


def test_one_that_the_scheduler_has_requeued_needs_no_other() -> None:
    assert who_ends_it("COMPLETING None 3", 2) == "somebody has requeued it already"
    assert who_ends_it("COMPLETING None 2", 2) == "somebody has cancelled it"
    assert who_ends_it("CANCELLED None 2", 2) == "somebody has cancelled it"


def test_the_end_of_a_cancelled_job_is_not_that_of_its_processes() -> None:
    """squeue calls the moment of the cancellation its end; they have their grace, which SIGTERM announces."""
    clocks = Clocks()
    answers = [f"42 {clocks.wall_clock() + 600:.0f} RUNNING", f"42 {clocks.wall_clock() - 1:.0f} COMPLETING"]
    job = SlurmDeadline("42", runner=lambda *_: answers.pop(0), clock=clocks.clock, wall_clock=clocks.wall_clock)
    for _ in range(2):
        following_s = job.poll()
        assert following_s is not None
        assert job.remaining_s(clocks.clock()) == pytest.approx(600.0, abs=1.0)
    assert not answers


def test_only_the_own_line_counts() -> None:
    assert is_being_ended("41 1795262400 RUNNING\n42 1795262400 COMPLETING\n", "42")
    assert not is_being_ended("41 1795262400 COMPLETING\n42 1795262400 RUNNING\n", "42")
    assert not is_being_ended("", "42")
    assert not is_being_ended("\n42 COMPLETING", "42")
