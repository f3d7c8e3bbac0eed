"""Workers that fail or hang before they ask for their first group, and workers that fail after the last step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import run_standalone
from torchelastic.testing.faults import Fault

# --- before the first group -------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("verb", "stack"), [("hang", "in reach"), ("spin", "in _spin")])
def test_a_worker_that_hangs_before_it_asks_for_a_group_is_ended_after_the_run_has_finished(
    jobs: MakeJob, verb: str, stack: str
) -> None:
    job = jobs([Fault(verb, "start", worker=1)], epochs=1)
    job.start("--standalone", "--last-call=0.5", "--term-grace=1", nproc=2)
    assert job.wait() == [0], job.output()[-3000:]
    assert job.plan.struck() == [0]
    job.check_identity(finishers=1)
    output, (hung,) = job.output(), job.of("started", worker=1)
    name = rf"worker 1 \(pid {hung['pid']}\)"
    assert re.search(rf"the run has finished, and {name} has not asked for a group: waiting 1 s for it", output)
    assert len(re.findall(rf"{name} did not end within 1 s .*its stacks follow in its log", output)) == 1
    assert stack in output, "the stacks of the worker that hung are missing"
    assert output.splitlines()[-1] == "the run is finished; worker 1 was not needed and was ended", "and no stack"
    assert not re.search("worker 1 failed|worker 1.*(lost|left the run in order)", output), "neither failed nor left"


@pytest.mark.long
def test_a_worker_killed_by_a_signal_before_it_asks_for_a_group_is_started_again(jobs: MakeJob) -> None:
    job = jobs([Fault("kill", "start", worker=1)], epochs=1)
    run_standalone(job, "--min-workers=2", nproc=2)
    assert job.plan.struck() == [0]
    job.check_identity(finishers=2)
    assert [event["restart"] for event in job.of("started", worker=1)] == [0, 1]


@pytest.mark.long
def test_a_worker_killed_at_every_start_is_given_up_after_max_restarts(jobs: MakeJob) -> None:
    job = jobs([Fault("kill", "start", incarnation=None, times=10)])
    job.start("--standalone", "--max-restarts=1", nproc=1)
    assert job.wait() == [1]
    assert [event["restart"] for event in job.of("started")] == [0, 1]
    assert job.output().rstrip().splitlines()[-1].startswith("worker 0 failed: killed by SIGKILL")


# --- after the last step ----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("verb", "how"),
    [
        ("crash", "exit code 1"),
        pytest.param("exit", "exit code 3", marks=pytest.mark.slow),
        ("kill", "killed by SIGKILL"),
    ],
)
def test_a_worker_that_fails_after_training_makes_the_launcher_fail_with_its_error(
    jobs: MakeJob, verb: str, how: str
) -> None:
    # the run survives the first loss: it is not what the launcher fails of
    faults = [Fault("kill", "backward", worker=2, step=5), Fault(verb, "end", rank=1)]
    job = jobs(faults, epochs=1)
    job.start("--standalone", "--max-restarts=0")
    assert job.wait() == [1], job.output()[-3000:]
    assert job.plan.struck() == [0, 1]
    job.check_identity(finishers=2)
    (finished,) = job.of("finished", rank=1)
    first = f"worker {finished['worker']} failed: {how} after it had finished training"
    last_words = job.output()[job.output().rindex(first) :]
    assert ("ValueError: injected" in last_words) == (verb == "crash")
    assert "worker 2" not in last_words


LOST_FIRST = """
import os, pathlib, signal, time, torch, torchelastic

begun = pathlib.Path(__file__).with_name("begun")
model = torch.nn.Linear(2, 1)
state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1))
coordinator = torchelastic.CoordinatorP2P("gloo")


def train_step(state):
    if state.step == 1:
        if coordinator.rank == LOST:
            begun.touch()
            time.sleep(0.3)  # the other one has finished by then, and waits
            os.kill(os.getpid(), signal.SIGKILL)
        while not begun.exists():  # else it would not begin this step any more
            time.sleep(0.01)
        raise StopIteration
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()


torchelastic.train(coordinator, train_step, state)
print("RANK", coordinator.rank)
"""


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
def test_the_launcher_fails_if_rank_0_is_lost_while_the_others_finish(jobs: MakeJob, tmp_path: Path, lost: int) -> None:
    job, script = jobs(), tmp_path / "script.py"
    script.write_text(LOST_FIRST.replace("LOST", str(lost)))
    job.start_launcher("--standalone", "--nproc-per-node=2", str(script))
    assert job.wait() == [1 - lost], job.output()[-3000:]
    assert f"RANK {1 - lost}" in job.output(), "the other one has finished"
    last_line = job.output().rstrip().splitlines()[-1]
    assert ("killed by SIGKILL as rank 0 while the others finished" in last_line) == (lost == 0)
