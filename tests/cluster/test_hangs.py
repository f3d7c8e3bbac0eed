"""Workers that live and make no progress, with a time-out of collectives far beyond the steps: the bound adapts.

Noticed, named and removed within the bound; the others go on, and the result is that of an undisturbed run.
"""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from tests.cluster.conftest import MakeJob, MakeLab
from tests.cluster.harness import Job, run_standalone
from tests.waiting import wait_until
from torchelastic.p2p.watchdog import EXIT_CODE
from torchelastic.testing.faults import Fault

#: Of collectives. Without a bound that adapts nobody goes on before twice that.
TIMEOUT_S = 120.0
#: The bound is one second, or ten times the slowest step on a busy machine.
NOTICED_S = 20.0
#: Steps take 10 ms; some have been measured by then.
STEP = 12
ADAPTIVE: dict[str, Any] = {"timeout_ms": int(1000 * TIMEOUT_S), "hang_floor_s": 1.0}


def waited_s(job: Job, step: int) -> float:
    """From the first fault until somebody has committed the step."""
    return float(job.of("committed", step=step)[0]["t"]) - job.plan.struck_at_s(0)


@pytest.mark.long
@pytest.mark.daily
@pytest.mark.parametrize(
    ("verb", "rank", "stack"),
    [
        ("hang", 0, "in reach"),  # stopped, and the group's store with it
        pytest.param("spin", 1, "in _spin", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_hangs_is_removed_by_the_measure_of_its_steps_and_named_with_its_stack(
    jobs: MakeJob, verb: str, rank: int, stack: str
) -> None:
    fault = Fault(verb, "step", rank=rank, step=STEP)
    job = jobs([fault], **ADAPTIVE, wait_for_newcomer_at=[16], full_world=2)
    run_standalone(job, nproc=2)
    assert job.plan.struck() == [0], job.output()[-3000:]
    job.check_identity(finishers=2)
    assert waited_s(job, STEP) < TIMEOUT_S / 2, "nobody noticed before the time-out of collectives"
    output = job.output()
    noticed = re.search(r"no step for (\S+) s .* this worker waits for others", output)
    assert noticed is not None
    assert float(noticed[1]) < NOTICED_S
    assert "this worker waits for others in elastic_job.py" in output
    assert stack in output, "the stack of the one that hung was not dumped"
    assert "made no progress in time (guess)" in output, "the cause of the recovery"
    assert len(job.of("started")) == 3, "it was ended and started again, once"


@pytest.mark.long
def test_where_all_hang_in_user_code_each_says_where_and_ends_if_the_policy_says_so(jobs: MakeJob) -> None:
    faults = [Fault("spin", "step", rank=rank, step=STEP) for rank in (0, 1)]
    job = jobs(faults, **ADAPTIVE, end_after_s=2.0, seed=5)
    run_standalone(job, nproc=2)
    assert job.plan.struck() == [0, 1], job.output()[-3000:]
    job.check_identity(finishers=2)
    output = job.output()
    assert not re.search(r"waits for others in .*the group is aborted", output), "nobody waited for anybody"
    for worker in (0, 1):
        reports = re.findall(rf"\[worker {worker}\] .*this worker is in user code, in (.*); its stacks", output)
        assert 1 <= len(reports) <= 2, "once when it was late, once before it was ended"
        assert all(re.match(r"elastic_job.py:\d+ train_step > faults.py:\d+ ", where) for where in reports)
    assert output.count("in _spin") >= 2
    for worker in (0, 1):
        assert len(re.findall(rf"worker {worker} \(pid \d+\): exit code {EXIT_CODE}", output)) == 1
    assert len(job.of("started")) == 4


@pytest.mark.long
def test_a_rank_that_skips_a_collective_is_named_and_nobody_is_ended(jobs: MakeJob) -> None:
    job = jobs(**ADAPTIVE, skip_at=STEP)
    run_standalone(job)
    assert (job.folder / "skipped").exists()
    job.check_identity(finishers=3)
    lines = [line for line in job.output().splitlines() if "when the group was aborted" in line]
    assert len(lines) == 1, job.output()[-4000:]
    assert re.search(
        rf"rank 1 was in elastic_job.py:\d+ train_step.* \(step {STEP + 1}\), "
        rf"ranks 0, 2 in elastic_job.py:\d+ meet \(step {STEP}\)",
        lines[0],
    ), lines[0]
    assert len(job.of("started")) == 3
    assert sorted({event["round"] for event in job.of("synced")}) == [1, 2]


@pytest.mark.slow
def test_hosts_that_lose_each_others_packets_notice_it_and_go_on_when_that_is_mended(
    jobs: MakeJob, labs: MakeLab
) -> None:
    lab = labs("a", "b")
    job = jobs(**ADAPTIVE, gates=[STEP])
    for name in ("a", "b"):
        job.start(f"--rdzv-endpoint={lab.etcd.endpoint}", "--rdzv-id=lossy", "--nnodes=2", nproc=1, host=lab[name])
    job.wait_for("held", step=STEP, count=2)
    lab.cut("a", "b")  # neither is told; etcd sees both
    assert not lab.reaches("a", "b", timeout_s=0.2)
    job.open_gate(STEP)
    opened_s = time.monotonic()
    wait_until(lambda: job.output().count("waits for others in elastic_job.py") >= 2, NOTICED_S, "both notice it")
    assert time.monotonic() - opened_s < NOTICED_S
    lab.heal("a", "b")
    assert job.wait() == [0, 0], job.output()[-4000:]
    job.check_identity(finishers=2)
    assert len(job.of("started")) == 2, "nobody was ended"


@pytest.mark.long
def test_a_straggler_leaves_by_itself_where_the_policy_says_so(jobs: MakeJob) -> None:
    job = jobs(slow_worker=1, remove_stragglers=True)
    run_standalone(job, "--nnodes=1")
    job.check_identity(finishers=2)
    assert re.search(
        r"rank \d is a straggler: it runs at 50 % of the best \(0.5 against 1 per second\), 2 time", job.output()
    )
    assert not job.of("rolled_back"), "it left at an agreed step"
    assert {event["worker"] for event in job.of("committed", step=39)} == {0, 2}
    assert len(job.of("started")) == 3, "it was not started again"
