"""`train(lifetime=)` in real jobs: a run stops before its deadline, and goes on later as if it had not been stopped."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import ROOT, Job, RunRecords, run_standalone
from torchelastic.lifetime import STOPPED_EARLY
from torchelastic.rendezvous.server import EtcdServer

WORLD = 2
#: Only the lives with a deadline are slow: what a step computes does not depend on how long it takes.
OPTIONS: dict[str, Any] = {"seed": 5, "epochs": 8, "checkpoint_every": 10_000, "lifetime": 2.0}
SLOW_MS, QUICK_MS = 150.0, 1.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The weights at the end of the same run without a deadline, and without checkpoints."""
    job = Job(tmp_path_factory.mktemp("undisturbed"), seed=5, epochs=8, step_ms=QUICK_MS)
    try:
        return run_standalone(job, nproc=WORLD).check_identity(finishers=WORLD)
    finally:
        job.stop()


def in_seconds(seconds: float) -> str:
    return f"{time.time() + seconds:.3f}"


def the_stop(job: Job, count: int) -> int:
    """After which step all of them have stopped; nothing was undone, and nobody was started again."""
    stops = job.of("stopped")
    assert len(stops) == count, job.output()[-4000:]
    (step,) = {event["step"] for event in stops}
    assert not job.of("rolled_back")
    assert {event["restart"] for event in job.of("started")} == {0}
    committed = max(event["step"] for event in job.of("committed"))
    assert step == committed + 1, "the last step that was done is the one that is saved"
    return int(step)


def goes_on(job: Job, step: int, undisturbed: torch.Tensor, *launcher: str) -> None:
    """Start it again, without a deadline: it goes on from that step, to the weights of the undisturbed run."""
    job.agents.clear()
    job.job_options["step_ms"] = QUICK_MS
    job.start(*launcher, nproc=WORLD)
    assert job.wait() == [0], job.output()[-4000:]
    assert [event["step"] for event in job.of("loaded")] == [step]
    assert torch.equal(job.check_identity(finishers=WORLD), undisturbed)


@pytest.mark.slow
def test_a_run_with_fifteen_seconds_saves_stops_with_75_and_goes_on_under_its_id(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, tmp_path: Path, undisturbed: torch.Tensor
) -> None:
    job = jobs(checkpoint_dir=tmp_path / "checkpoints", step_ms=SLOW_MS, **OPTIONS)
    where = (f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--min-workers=1", "--last-call=60")
    job.start(*where, nproc=WORLD, MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP=in_seconds(15.0))
    assert job.wait() == [STOPPED_EARLY], job.output()[-4000:]
    step = the_stop(job, WORLD)
    assert {tuple(event["saved_in"]) for event in job.of("stopped")} == {("durable",)}
    assert "stopped before a deadline, not finished: start it again" in job.output()
    assert not {state for _, state in RunRecords(etcd.endpoint, run_id).rounds()} & {"closing", "closed"}
    assert not job.final_weights(), "what comes after train() in the script was not run"
    goes_on(job, step, undisturbed, *where)


@pytest.mark.long
def test_a_notice_in_the_middle_of_the_run_is_met_with_a_save_in_every_tier(
    jobs: MakeJob, tmp_path: Path, undisturbed: torch.Tensor
) -> None:
    """The end is written into the file that the workers watch, while they train."""
    end = tmp_path / "end"
    tiers = [f"local={tmp_path / 'local'}", f"disk={tmp_path / 'disk'}"]
    job = jobs(tiers=tiers, step_ms=SLOW_MS, **OPTIONS)
    job.start("--standalone", nproc=WORLD, TORCHELASTIC_TERMINATION_FILE=str(end))
    job.wait_for_step(3)
    (tmp_path / "new").write_text(in_seconds(6.0))
    (tmp_path / "new").rename(end)
    assert job.wait() == [STOPPED_EARLY], job.output()[-4000:]
    step = the_stop(job, WORLD)
    assert {tuple(sorted(event["saved_in"])) for event in job.of("stopped")} == {("disk", "local")}
    goes_on(job, step, undisturbed, "--standalone")


@pytest.mark.long
def test_a_host_whose_deadline_is_near_leaves_and_the_others_go_on(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    job = jobs(gates=[40], step_ms=50.0, seed=5, epochs=5, lifetime=1.0, checkpoint_dir=tmp_path / "checkpoints")
    where = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--nnodes=1:2", "--last-call=60"]
    where += ["--min-workers=1", "--max-workers=3"]
    stays = job.start(*where, nproc=1)
    goes = job.start(*where, nproc=2, TORCHELASTIC_TERMINATION_FILE=str(end))
    job.wait_for_step(3)
    (tmp_path / "new").write_text(in_seconds(8.0))
    (tmp_path / "new").rename(end)
    assert goes.wait(60) == STOPPED_EARLY, job.output()[-4000:]
    job.open_gate(40)
    assert stays.wait(60) == 0, job.output()[-4000:]
    job.check_identity(finishers=1)
    assert not job.of("rolled_back"), "nobody waited for a time-out, and no step was undone"
    stops = job.of("stopped")
    assert [(event["others_go_on"], event["saved_in"]) for event in stops] == [(True, [])] * 2
    assert len({event["step"] for event in stops}) == 1
    assert set(job.rounds().values()) == {3, 1}


@pytest.mark.slow
def test_a_deadline_without_which_too_few_are_left_stops_all_of_them(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, tmp_path: Path, undisturbed: torch.Tensor
) -> None:
    """The host without a deadline stops too, at the same step."""
    end = tmp_path / "end"
    job = jobs(checkpoint_dir=tmp_path / "checkpoints", step_ms=SLOW_MS, **OPTIONS)
    where = (f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--nnodes=2", "--min-workers=2")
    job.start(*where, nproc=1)
    job.start(*where, nproc=1, TORCHELASTIC_TERMINATION_FILE=str(end))
    job.wait_for_step(3)
    (tmp_path / "new").write_text(in_seconds(6.0))
    (tmp_path / "new").rename(end)
    assert job.wait() == [STOPPED_EARLY] * 2, job.output()[-4000:]
    step = the_stop(job, 2)
    goes_on(job, step, undisturbed, f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--min-workers=2")


@pytest.mark.slow
def test_sigterm_to_the_launcher_loses_nothing_either(jobs: MakeJob, tmp_path: Path, undisturbed: torch.Tensor) -> None:
    job = jobs(checkpoint_dir=tmp_path / "checkpoints", step_ms=SLOW_MS, **OPTIONS)
    job.start("--standalone", nproc=WORLD)
    job.wait_for_step(5)
    job.agents[0].send_signal(signal.SIGTERM)
    assert job.wait() == [128 + signal.SIGTERM], job.output()[-4000:]
    (saved,) = job.of("saved")
    goes_on(job, int(saved["step"]), undisturbed, "--standalone")


@pytest.mark.slow
def test_a_spare_does_not_stay_when_the_group_of_its_host_stops(jobs: MakeJob, tmp_path: Path) -> None:
    end = tmp_path / "end"
    job = jobs(checkpoint_dir=tmp_path / "checkpoints", step_ms=SLOW_MS, **OPTIONS)
    job.start("--standalone", "--max-workers=1", nproc=2, TORCHELASTIC_TERMINATION_FILE=str(end))
    job.wait_for("asking", count=2)
    job.wait_for_step(2)
    (tmp_path / "new").write_text(in_seconds(5.0))
    (tmp_path / "new").rename(end)
    assert job.wait() == [STOPPED_EARLY], job.output()[-4000:]
    the_stop(job, 1)
    assert [event["rank"] for event in job.of("finished")] == [-1], "the spare has nothing to show"
    assert {event["world"] for event in job.of("formed")} == {1}


def test_a_script_that_exits_with_75_by_itself_is_not_started_again(jobs: MakeJob, tmp_path: Path) -> None:
    """For example one that goes by an IterManager alone, and never asks for a group."""
    script = tmp_path / "exits.py"
    script.write_text(
        "import os, sys, pathlib\n"
        "with open(sys.argv[1], 'a') as file: file.write('x')\n"
        "sys.exit(75 if os.environ['LOCAL_RANK'] == '0' else 0)\n"
    )
    job = jobs()
    job.start_launcher("--standalone", "--nproc-per-node=2", str(script), str(tmp_path / "lives"))
    assert job.wait() == [STOPPED_EARLY]
    assert (tmp_path / "lives").read_text() == "xx"


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_simulate_esi_around_the_launcher_loses_no_step(jobs: MakeJob, tmp_path: Path) -> None:
    """A minute of steps does not fit into one life, which has 25 s besides what this machine needs to start a run."""
    # the end of a run that is finished has to fit into the reserve too, however busy this machine is
    options: dict[str, Any] = {"seed": 5, "epochs": 12, "checkpoint_every": 10_000, "lifetime": 6.0}
    quick: dict[str, Any] = {"seed": 5, "epochs": 12, "step_ms": QUICK_MS}
    began_s = time.monotonic()
    undisturbed = run_standalone(jobs(**quick), nproc=WORLD).check_identity(finishers=WORLD)
    life_s = time.monotonic() - began_s + 25.0
    job = jobs(checkpoint_dir=tmp_path / "checkpoints", step_ms=500.0, **options)
    launcher = [sys.executable, "-m", "torchelastic.launch"]
    command = [*launcher, "run", "--standalone", f"--nproc-per-node={WORLD}", str(job.script), *job.job_arguments()]
    simulator = [*launcher, "simulate-esi", "--cmd", shlex.join(command), f"--timeout={life_s:.0f}", "--json"]
    done = subprocess.run(simulator, cwd=ROOT, capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["finished"]
    assert report["steps_lost"] == 0
    assert len(report["lives"]) >= 2
    assert torch.equal(job.check_identity(finishers=WORLD), undisturbed)
    assert not job.of("rolled_back")
