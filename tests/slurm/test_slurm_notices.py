"""Signals that SLURM sends: before the end, by scancel, and to make room for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm
from tests.slurm.jobs import Job, assert_same

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(500)]
#: Seconds that a job of these tests takes for what it has after SIGTERM; SLURM gives more, see `cluster`.
GRACE = {"TORCHELASTIC_TERM_GRACE_S": "6"}


@pytest.mark.long
def test_a_cancelled_job_saves_and_is_not_started_again_and_the_next_one_goes_on_from_there(
    slurm: Slurm, uninterrupted: Job, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path)
    job.submit(ends_in_s=None, variables=GRACE)
    job.wait_for_steps(5)
    slurm.cancel(job.job_id)
    job.wait_until("CANCELLED")
    job.wait_until_gone()
    output = job.output()
    assert "deadline: signal (SIGTERM, 6 s of grace)" in output
    assert "too late" not in output
    assert "somebody has cancelled it" in output
    assert slurm.state(job.job_id) == "CANCELLED"
    assert slurm.restarts(job.job_id) == 0
    following = Job(slurm, tmp_path)
    following.submit(ends_in_s=None, pause_s=0.0)
    following.wait_until("COMPLETED")
    assert_same(following, uninterrupted)


@pytest.mark.slow
def test_usr1_before_the_end_does_not_stop_a_job_whose_end_is_known(
    slurm: Slurm, uninterrupted: Job, tmp_path: Path
) -> None:
    """The script asks for the requeue, by the exit code."""
    job = Job(slurm, tmp_path)
    again = "if [ $code = 75 ]; then scontrol requeue $SLURM_JOB_ID; fi"
    # SLURM looks every 30 s whether it is time for the signal
    alone = {"TORCHELASTIC_DEADLINE_SIGNALS": "SIGUSR1=1"}
    job.submit("--signal=USR1@40", ends_in_s=45, by="", then=again, variables=alone)
    job.wait_until("COMPLETED", restarts=1)
    assert slurm.restarts(job.job_id) == 1
    assert_same(job, uninterrupted)
    before, stop, after = job.output().partition("save and stop")
    assert stop
    assert "received SIGUSR1" in before
    assert "deadline: SLURM (squeue says" in after.splitlines()[0]
    assert "run 0 ended with 75" in after


@pytest.mark.slow
def test_a_preempted_job_saves_makes_room_and_ends_with_the_same_weights(
    slurm: Slurm, uninterrupted: Job, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path)
    job.submit(ends_in_s=None, variables=GRACE)
    job.wait_for_steps(5)
    urgent = slurm.submit("sleep 2", "--partition=urgent", "--nodes=2", "--ntasks-per-node=8")
    assert slurm.wait_until(urgent, "RUNNING", "COMPLETED") in ("RUNNING", "COMPLETED")
    slurm.wait_until(urgent, "COMPLETED")
    job.wait_until("COMPLETED", restarts=1)
    assert slurm.restarts(job.job_id) == 1
    assert job.runs() == {0, 1}
    assert_same(job, uninterrupted)
