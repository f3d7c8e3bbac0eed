"""One rank evaluates, or writes, inside a step while the others wait in a collective: that is no hang.

The time-out of collectives is what the user grants such work. A real hang afterwards is noticed as soon as before.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import Job, run_standalone
from torchelastic.testing.faults import Fault

TIMEOUT_S = 120.0
#: Without signs of work a worker is ended after two bounds, of 3 s each, and some 6 s.
WORK_S = 16.0
#: A hang is noticed after one bound and a half, and who hangs is waited for that long once more, and 5 s.
HANG_S = 30.0
#: Steps take 10 ms; some have been measured by then.
STEP = 12
HANGS_AT = 24


def assert_nobody_was_disturbed(job: Job, before: int) -> None:
    """No worker was ended, and no step repeated, before a step."""
    assert {event["round"] for event in job.of("committed") if event["step"] < before} == {1}
    undone = [event for event in job.of("rolled_back") if event["step"] < before]
    assert not undone, job.output()[-4000:]


@pytest.mark.long
@pytest.mark.parametrize(
    ("verb", "section"),
    [
        ("compute", {}),
        pytest.param("pause", {"slow_section_at": STEP}, id="sleep in a slow section"),
    ],
)
def test_work_of_one_rank_disturbs_nobody_and_a_hang_after_it_is_noticed_as_soon_as_ever(
    jobs: MakeJob, verb: str, section: dict[str, int]
) -> None:
    work = Fault(verb, "step", rank=0, step=STEP, seconds=WORK_S)
    hang = Fault("spin", "step", rank=1, step=HANGS_AT)
    job = jobs([work, hang], timeout_ms=int(1000 * TIMEOUT_S), wait_for_newcomer_at=[28], full_world=2, **section)
    run_standalone(job, nproc=2)
    assert job.plan.struck() == [0, 1], job.output()[-3000:]
    job.check_identity(finishers=2)
    assert job.of("committed", step=STEP)[0]["t"] - job.plan.struck_at_s(0) >= WORK_S
    assert_nobody_was_disturbed(job, HANGS_AT)
    assert job.of("committed", step=HANGS_AT)[0]["t"] - job.plan.struck_at_s(1) < HANG_S
    assert len(job.of("started")) == 3, "the one that hung was ended and started again, and nobody else"
    waited_for = "a rank in a slow section" if section else "rank 0, which works in elastic_job.py"
    assert re.search(rf"no step for \S+ s: this worker waits for {waited_for}", job.output())


@pytest.mark.long
def test_a_worker_that_is_ended_because_it_sleeps_teaches_all_that_a_step_may_take_so_long(jobs: MakeJob) -> None:
    sleeps = [
        Fault("pause", "step", rank=0, step=STEP, seconds=WORK_S),
        Fault("pause", "step", rank=0, step=HANGS_AT, seconds=WORK_S, incarnation=None),
    ]
    job = jobs(sleeps, timeout_ms=int(1000 * TIMEOUT_S), wait_for_newcomer_at=[16], full_world=2)
    run_standalone(job, nproc=2)
    assert job.plan.struck() == [0, 1], job.output()[-3000:]
    job.check_identity(finishers=2)
    (learned_s,) = re.findall(r"ended while its process still ran.*a step may take (\d+) s from now on", job.output())
    assert int(learned_s) > WORK_S
    assert job.of("committed", step=HANGS_AT)[0]["t"] - job.plan.struck_at_s(1) >= WORK_S
    assert len(job.of("started")) == 3, "at the second time nobody was ended"


SLEEPS = """
import subprocess, sys
import torch, torchelastic
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
coordinator = torchelastic.CoordinatorP2P("gloo", process_group_timeout=120_000)
def train_step(state):
    if state.step == 30:
        raise StopIteration
    if state.step == 20 and coordinator.rank == 0:
        print("sleeps", flush=True)
        subprocess.run(["sleep", "12"], check=True)
    state.optimizer.zero_grad()
    state.model(torch.ones(2, 4)).mean().backward()
    state.optimizer.step()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torchelastic.train(coordinator, train_step, torchelastic.ModelState(model, optimizer))
print("starts", flush=True)
"""


@pytest.mark.long
def test_a_time_out_that_the_user_has_chosen_is_kept_and_what_is_guessed_is_in_the_status(tmp_path: Path) -> None:
    """Nothing else is chosen: the rank waits for a process that sleeps, four bounds long, and nobody is disturbed."""
    script, said = tmp_path / "train.py", ""
    script.write_text(SLEEPS)
    launcher = [sys.executable, "-m", "torchelastic.launch"]
    command = [*launcher, "run", "--standalone", "--nproc-per-node=2", "--min-workers=2", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            said += line
            if "may hang: idle" in line:
                break
        address = re.search(r"--rdzv-endpoint (\S+) --rdzv-id (\S+)", said)
        assert address is not None, said
        status = [*launcher, "status", "--rdzv-endpoint", address[1], "--rdzv-id", address[2]]
        shown = subprocess.run(status, capture_output=True, text=True, timeout=60, check=False).stdout
        said += job.communicate(timeout=90)[0]
    assert job.returncode == 0, said
    assert re.search(r"may hang: idle \d+ s of 120 s, a guess", shown), shown
    assert said.count("starts") == 2
    assert "undone" not in said
    assert "aborted" not in said
