"""A job that hits its limit: it saves in time, is started again, and ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm
from tests.slurm.jobs import Job, assert_same

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(500)]


@pytest.mark.long
def test_a_job_that_reaches_its_limit_requeues_itself_and_ends_with_the_same_weights(
    slurm: Slurm, uninterrupted: Job, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path)
    job.submit()
    job.wait_until("COMPLETED", restarts=1)
    assert slurm.restarts(job.job_id) == 1
    assert job.runs() == {0, 1}
    assert_same(job, uninterrupted)
    assert "run 1 ended with 0" in job.output()


@pytest.mark.slow
def test_two_nodes_and_a_limit_of_a_minute(slurm: Slurm, uninterrupted: Job, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path)
    job.submit("--nodes=2", "--time=1", ends_in_s=None)
    job.wait_for_steps(1)
    facts = slurm.facts(job.job_id)
    assert (facts["NodeList"], facts["TimeLimit"]) == ("n[1-2]", "00:01:00")
    job.wait_until("COMPLETED", restarts=1)
    assert slurm.restarts(job.job_id) == 1
    assert_same(job, uninterrupted)


@pytest.mark.slow
def test_each_task_of_an_array_has_its_own_end_and_only_those_that_stopped_early_start_again(
    slurm: Slurm, tmp_path: Path
) -> None:
    array = Job(slurm, tmp_path)
    # the second is left alone; the others end 6 s and 12 s after their first step
    ends_in_s = "$((SLURM_ARRAY_TASK_ID == 1 ? 600 : 6 + 3 * SLURM_ARRAY_TASK_ID))"
    pause_s = "$((SLURM_ARRAY_TASK_ID != 1)).0"
    array.submit("--array=0-2", "--ntasks=1", ends_in_s=ends_in_s, pause_s=pause_s)
    tasks = [Job(slurm, tmp_path / str(task), f"{array.job_id}_{task}") for task in range(3)]
    restarts = []
    for task, expected in zip(tasks, (1, 0, 1), strict=True):
        task.wait_until("COMPLETED", restarts=expected)
    for task in tasks:
        task.wait_until("COMPLETED")  # nobody has requeued one that had completed
        restarts.append(slurm.restarts(task.job_id))
    assert restarts == [1, 0, 1]
    for task in tasks:
        assert_same(task, tasks[1], ranks=1)
