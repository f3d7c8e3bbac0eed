"""Scripts that leave their `steps()` loop, and scripts that train twice, under the real launcher."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import Job

#: 12 steps; worker 0 leaves at step 8 in WAY. A peer is told by a file in the folder OUT.
LOOP = """
import itertools, os, pathlib, signal, time, torch, torchelastic

torch.set_num_threads(1)
torch.manual_seed(0)
OUT, WAY, STOPS = pathlib.Path({folder!r}), {way!r}, {stops!r}
worker, life = int(os.environ["LOCAL_RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = torch.nn.Linear(2, 1)
state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.01))

def body(step):
    with step:
        if state.step == 3 and worker == 1 and life == 0 and {kill!r}:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step == 12:
            raise StopIteration
        state.optimizer.zero_grad()
        state.model(torch.ones(1, 2)).square().sum().backward()
        state.optimizer.step()
    leaves = step.committed and state.step == 8 and worker == 0 and life == 0
    if leaves and STOPS:
        step.stop_training()
    return leaves

loop = torchelastic.steps(torchelastic.CoordinatorP2P("gloo"), state)
if WAY == "islice" and worker == 0:
    for step in itertools.islice(loop, 8):
        body(step)
    del loop, step
elif WAY == "close":
    for step in loop:
        if body(step):
            loop.close()
else:
    for step in loop:
        if body(step):
            if WAY == "error":
                raise ValueError("outside the block")
            break
    if WAY == "break":
        del loop
print("worker", worker, "left the loop at step", state.step, flush=True)
(OUT / f"out-{{worker}}").touch()
deadline_s = time.monotonic() + 8  # less than any hang would take to be noticed
while not (OUT / f"out-{{1 - worker}}").exists() and WAY != "error":
    assert time.monotonic() < deadline_s, "the other worker is held up"
    time.sleep(0.05)
"""


def start(jobs: MakeJob, folder: Path, text: str, *arguments: str) -> Job:
    script = folder / "train.py"
    script.write_text(text)
    job = jobs()
    job.start_launcher("--standalone", "--nproc-per-node=2", *arguments, str(script))
    return job


def lefts(job: Job) -> set[tuple[int, int]]:
    """(worker, step) of each that has come out of its loop."""
    return {(int(a), int(b)) for a, b in re.findall(r"worker (\d) left the loop at step (\d+)", job.output())}


@pytest.mark.long
@pytest.mark.parametrize("way", ["break", pytest.param("kept", marks=pytest.mark.slow), "islice", "close"])
def test_stop_training_on_one_worker_ends_the_run_for_all_however_it_leaves(
    jobs: MakeJob, tmp_path: Path, way: str
) -> None:
    # with islice a worker takes eight steps, whatever becomes of them: none may be lost there
    kill = way != "islice"
    text = LOOP.format(folder=str(tmp_path), way=way, stops=True, kill=kill)
    job = start(jobs, tmp_path, text, "--min-workers=2")
    assert job.wait() == [0], job.output()[-3000:]
    assert ("killed by SIGKILL" in job.output()) == kill
    assert lefts(job) == {(0, 8), (1, 8)}
    assert "left its steps() loop" not in job.output()


@pytest.mark.long
@pytest.mark.parametrize("way", ["break", *(pytest.param(way, marks=pytest.mark.long) for way in ("islice", "close"))])
def test_a_worker_that_leaves_without_it_is_out_and_the_others_finish(jobs: MakeJob, tmp_path: Path, way: str) -> None:
    text = LOOP.format(folder=str(tmp_path), way=way, stops=False, kill=False)
    job = start(jobs, tmp_path, text, "--min-workers=1")
    assert job.wait() == [0], job.output()[-3000:]
    assert lefts(job) == {(0, 8), (1, 12)}
    assert job.output().count("left its steps() loop, which does not end the run") == 1
    assert "hung" not in job.output()


@pytest.mark.long
def test_an_error_outside_the_block_costs_this_worker_only_and_it_is_started_again(
    jobs: MakeJob, tmp_path: Path
) -> None:
    text = LOOP.format(folder=str(tmp_path), way="error", stops=False, kill=False)
    job = start(jobs, tmp_path, text, "--min-workers=2")
    assert job.wait() == [0], job.output()[-3000:]
    assert "ValueError: outside the block" in job.output()
    assert lefts(job) == {(0, 12), (1, 12)}


#: Worker 0 raises at step 4, and then its script does not end before the other worker has finished.
FAILS = """
import os, pathlib, time, torch, torchelastic

torch.set_num_threads(1)
FILE = pathlib.Path({folder!r}) / "the other has finished"
worker, life = int(os.environ["LOCAL_RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = torch.nn.Linear(2, 1)
state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.01))

def train_step(state):
    if state.step == 4 and worker == 0 and life == 0:
        raise {error}
    if state.step == 12:
        raise StopIteration
    state.optimizer.zero_grad()
    state.model(torch.ones(1, 2)).square().sum().backward()
    state.optimizer.step()

try:
    torchelastic.train(torchelastic.CoordinatorP2P("gloo"), train_step, state)
    FILE.touch()
finally:
    deadline_s = time.monotonic() + 6  # less than any hang would take to be noticed
    while not FILE.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    print("worker", worker, "life", life, "ends; the other has finished:", FILE.exists(), flush=True)
"""


@pytest.mark.parametrize("error", ["ValueError('on purpose')", pytest.param("SystemExit(3)", marks=pytest.mark.long)])
def test_nobody_waits_for_what_a_script_does_after_an_error(jobs: MakeJob, tmp_path: Path, error: str) -> None:
    job = start(jobs, tmp_path, FAILS.format(folder=str(tmp_path), error=error), "--min-workers=1")
    job.wait()
    assert "worker 0 life 0 ends; the other has finished: True" in job.output(), job.output()[-3000:]


# --- a second train() -------------------------------------------------------------------------------------------------

TWICE = """
import torch, torchelastic

torch.set_num_threads(1)

def one(coordinator, n):
    model = torch.nn.Linear(2, 1)
    state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.01))
    def step(state):
        if state.step == n:
            raise StopIteration
        state.optimizer.zero_grad()
        state.model(torch.ones(1, 2)).square().sum().backward()
        state.optimizer.step()
    torchelastic.train(coordinator, step, state)
    print("trained", state.step, flush=True)

coordinator = torchelastic.CoordinatorP2P("gloo")
one(coordinator, 5)
if {is_new!r}:
    coordinator = torchelastic.CoordinatorP2P("gloo")
one(coordinator, 7)
"""


@pytest.mark.long
@pytest.mark.parametrize("is_new", [True, False], ids=["new coordinator", "same coordinator"])
def test_a_second_train_under_the_launcher_is_refused_with_the_remedy(
    jobs: MakeJob, tmp_path: Path, is_new: bool
) -> None:
    job = start(jobs, tmp_path, TWICE.format(is_new=is_new))
    assert job.wait() == [1], job.output()[-3000:]
    assert job.output().count("trained 5") == 2
    assert "trained 0" not in job.output()
    assert "trained 7" not in job.output()
    assert "NonRetryableException: " in job.output()
    assert "each start of `torchelastic run` trains one run: put both phases into one train()" in job.output()


@pytest.mark.long
@pytest.mark.parametrize("is_new", [True, False], ids=["new coordinator", "same coordinator"])
def test_a_process_that_trains_alone_may_train_again_with_a_new_coordinator(tmp_path: Path, is_new: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWICE.format(is_new=is_new)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "trained 5" in done.stdout, done.stderr
    assert ("trained 7" in done.stdout) == is_new
    assert done.returncode == (0 if is_new else 1)
    if not is_new:
        assert "creates another CoordinatorP2P() for its next train()" in done.stderr.splitlines()[-1]
