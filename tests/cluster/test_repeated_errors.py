"""Errors that come again at each attempt, and states that cannot be rolled back: what is said of them is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import Job
from torchelastic.network.ports import unused_ports
from torchelastic.rendezvous.server import EtcdServer

#: A script whose step counts its attempts in files of the current worker's own: {body} is the step.
SCRIPT = """
import os, pathlib, sys
import torch, torch.distributed as dist, torchelastic
from torchelastic.p2p import CoordinatorP2P

FOLDER = pathlib.Path(__file__).parent
RANK_OF_START = os.environ["LOCAL_RANK"]


def note(text):
    with (FOLDER / "notes").open("a") as file:
        file.write(text + "\\n")


class Mine(torchelastic.State):
    def __init__(self):
        self.steps = self.updates = 0

    def sync(self):
        pass

{hooks}

def train_step(state):
{body}


note("started")
state = torchelastic.train(CoordinatorP2P("gloo"), train_step, Mine())
note(f"finished steps={{state.steps}} updates={{state.updates}}")
"""

ROLLS_BACK = """
    def snapshot(self):
        return self.steps

    def apply(self, snapshot):
        self.steps = snapshot
"""


def run(job: Job, folder: Path, *options: str, nproc: int = 1, body: str, hooks: str = ROLLS_BACK) -> list[str]:
    """Run the script to its end; returns what its workers have noted."""
    indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
    (folder / "train.py").write_text(SCRIPT.format(hooks=hooks, body=indented))
    job.start_launcher("--standalone", f"--nproc-per-node={nproc}", *options, str(folder / "train.py"))
    job.wait()
    return (folder / "notes").read_text().splitlines()


def exit_codes(job: Job) -> list[int | None]:
    return [agent.poll() for agent in job.agents]


# --- the same error at each attempt -----------------------------------------------------------------------------------


def test_the_same_error_at_the_same_step_ends_the_worker_at_the_third_attempt(jobs: MakeJob, tmp_path: Path) -> None:
    job = jobs()
    body = """
note("attempt")
if state.steps == 3:
    torch.ones(2, 3) @ torch.ones(2, 3)
state.steps += 1
"""
    notes = run(job, tmp_path, body=body)
    assert exit_codes(job) == [1]
    assert notes == ["started"] + ["attempt"] * 6, "three good steps, then three attempts at the fourth; no restart"
    output = job.output()
    assert "the same error 3 times at one step" in output
    ending = output[output.rindex("worker 0 failed: exit code 1") :].rstrip().splitlines()
    assert ending[1] == "Traceback (most recent call last):"
    assert ending[-1].startswith("RuntimeError: ")  # torch 2.15 names the operation, "mm: ", before the rest
    assert "mat1 and mat2 shapes cannot be multiplied" in ending[-1]
    assert ending.count("Traceback (most recent call last):") == 1, "the error, once, and not a chain of errors"
    assert len(output.splitlines()) < 80


@pytest.mark.long
def test_an_error_that_the_step_calls_non_retryable_ends_the_run_at_once_and_is_shown(
    jobs: MakeJob, tmp_path: Path
) -> None:
    job = jobs()
    body = """
state.steps += 1
if state.steps == 3:
    raise torchelastic.NonRetryableException("the data set is empty")
"""
    notes = run(job, tmp_path, nproc=2, body=body)
    assert exit_codes(job) == [1]
    assert notes == ["started"] * 2, "no new process would find another data set"
    assert "NonRetryableException: the data set is empty" in job.output()[job.output().rindex(" failed: exit code 1") :]


@pytest.mark.long
def test_who_lost_a_peer_to_a_repeated_error_goes_on_without_it(jobs: MakeJob, tmp_path: Path) -> None:
    job = jobs()
    body = """
if RANK_OF_START == "1" and state.steps == 2:
    raise RuntimeError("this place of the host is broken")
dist.all_reduce(torch.ones(1)) if dist.is_initialized() and dist.get_world_size() > 1 else None
state.steps += 1
if state.steps == 6:
    raise StopIteration
"""
    notes = run(job, tmp_path, "--min-workers=1", nproc=2, body=body)
    assert notes.count("started") == 2, "the one that fails for good is not started again"
    assert sum(note.startswith("finished steps=6") for note in notes) == 1, (
        "the errors of its lost peer are not its own"
    )
    assert exit_codes(job) == [0]


@pytest.mark.long
def test_a_run_that_repeated_errors_leave_with_too_few_workers_does_not_wait_for_others(
    jobs: MakeJob, tmp_path: Path
) -> None:
    job = jobs()
    body = """
if RANK_OF_START == "1" and state.steps == 2:
    raise RuntimeError("this place of the host is broken")
dist.all_reduce(torch.ones(1))
state.steps += 1
"""
    notes = run(job, tmp_path, "--min-workers=2", "--term-grace=5", nproc=2, body=body)
    assert exit_codes(job) == [1]
    assert notes.count("started") == 2
    ending = job.output()[job.output().rindex("worker 1 failed: exit code 1") :]
    assert "RuntimeError: this place of the host is broken" in ending


@pytest.mark.long
@pytest.mark.parametrize(
    "why", ["the same error each time", pytest.param("killed until its restarts are used up", marks=pytest.mark.long)]
)
def test_the_other_hosts_of_such_a_run_end_too_and_name_the_host_whose_launcher_says_why(
    jobs: MakeJob, tmp_path: Path, why: str
) -> None:
    job = jobs()
    fails = 'raise RuntimeError("this host is broken")' if "error" in why else "os.kill(os.getpid(), 9)"
    body = """
if "broken" in sys.argv and state.steps == 2:
    FAILS
dist.all_reduce(torch.ones(1))
state.steps += 1
"""
    body = "\n".join(f"    {line}" for line in body.replace("FAILS", fails).strip().splitlines())
    (tmp_path / "train.py").write_text(SCRIPT.format(hooks=ROLLS_BACK, body=body))
    with EtcdServer(port=unused_ports("127.0.0.1")[0]) as etcd:
        words = (f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=ends", "--nnodes=2", "--max-restarts=1")
        for host in ("sound", "broken"):
            job.start_launcher(*words, str(tmp_path / "train.py"), host)
        codes = job.wait()  # and not for --rdzv-timeout, 600 s
    assert codes == [1, 1]
    sound, broken = ((job.folder / f"agent-{number}.txt").read_text() for number in (0, 1))
    assert "failed for good; the others are fewer than min_workers=2: the run ends" in sound
    (cause,) = [line for line in sound.splitlines() if line.startswith("first, ")]
    assert "of another launcher has ended (fact)" in cause
    assert "see that launcher's output" in cause
    ending = broken[broken.rindex("worker 0 failed: ") :]
    assert ("RuntimeError: this host is broken" if "error" in why else "killed by SIGKILL") in ending


@pytest.mark.long
def test_who_was_started_again_does_not_wait_alone_for_a_worker_that_failed_for_good(
    jobs: MakeJob, tmp_path: Path
) -> None:
    """Worker 1 is killed, then both at once: it has used up its starts, and worker 0 has not."""
    job = jobs()
    body = """
was_killed, dies = FOLDER / "was_killed", torch.zeros(1)
if RANK_OF_START == "1" and state.steps == 2:
    if not was_killed.exists():
        was_killed.touch()
        os.kill(os.getpid(), 9)
    dies += 1
dist.all_reduce(dies)
if dies.item():
    note("both")
    os.kill(os.getpid(), 9)
state.steps += 1
"""
    body = "\n".join(f"    {line}" for line in body.strip().splitlines())
    (tmp_path / "train.py").write_text(SCRIPT.format(hooks=ROLLS_BACK, body=body))
    with EtcdServer(port=unused_ports("127.0.0.1")[0]) as etcd:
        words = (f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=alone", "--nnodes=1:2", "--nproc-per-node=2")
        job.start_launcher(*words, "--max-restarts=1", "--last-call=1", str(tmp_path / "train.py"))
        codes = job.wait()  # and not for --rdzv-timeout, 600 s
    assert codes == [1]
    assert (tmp_path / "notes").read_text().splitlines().count("both") == 2
    assert "failed for good; the others are fewer than min_workers=2: the run ends" in job.output()


# --- hooks that cannot be called --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("hooks", "complaint"),
    [
        (
            "    def sync(self, group):\n        pass",
            "TypeError: Mine.sync(group) must be written as sync(self), or ",
        ),
        ("    def snapshot(self, step):\n        return 1", "TypeError: Mine.snapshot(step) must be written as "),
        (
            ROLLS_BACK.replace("apply(self, snapshot)", "apply(self)").replace("= snapshot", "= 0"),
            "TypeError: Mine.apply() must be written as apply(self, snapshot)",
        ),
    ],
    ids=["sync", "snapshot", "apply"],
)
def test_a_hook_that_cannot_be_called_is_named_before_anything_is_trained_and_not_started_again(
    jobs: MakeJob, tmp_path: Path, hooks: str, complaint: str
) -> None:
    job = jobs()
    notes = run(job, tmp_path, body='note("trained")\nraise StopIteration', hooks=hooks)
    assert exit_codes(job) == [1]
    assert notes == ["started"]
    assert job.output().rstrip().splitlines()[-1].startswith(complaint)


# --- states without a snapshot ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_what_a_state_without_a_snapshot_does_not_undo_is_said_and_never_the_contrary(
    jobs: MakeJob, tmp_path: Path
) -> None:
    job = jobs()
    body = """
state.updates += 1
if state.updates == 3:
    raise RuntimeError("once")
state.steps += 1
if state.steps == 5:
    note(f"updates={state.updates}")
    raise StopIteration
"""
    notes = run(job, tmp_path, body=body, hooks="")
    assert exit_codes(job) == [0]
    assert notes[1] == "updates=6", "six updates for five steps: the failed one was not undone"
    output = job.output()
    at_start, at_failure = output.index("Mine.snapshot() returns None"), output.index("failure 1 in a row")
    assert at_start < at_failure
    assert "a step that fails is not undone" in output[at_start:at_failure]
    assert "RuntimeError: once; what the step had changed was not undone" in output[at_failure:]
    assert "was undone" not in output
    assert "after -1" not in output
