"""A run whose every process was killed goes on from each tier, and ends as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import Job, run_standalone
from tests.waiting import is_gone, wait_until
from torchelastic.checkpoint.engine.tiered_manager import SILENT_S
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.testing.faults import Fault

WORLD = 2
#: Saved are the steps 5, 10, ...; the run is killed in step 13, so 10 is to be found.
OPTIONS: dict[str, Any] = {"seed": 5, "checkpoint_every": 5, "epochs": 2}
KILLED_IN, FOUND = 13, 10
LAST_STEP = 20


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The weights at the end of the same run without an interruption, and without checkpoints."""
    job = Job(tmp_path_factory.mktemp("undisturbed"), seed=5, epochs=2)
    try:
        return run_standalone(job, nproc=WORLD).check_identity(finishers=WORLD)
    finally:
        job.stop()


def kill_all(job: Job) -> None:
    """The agent dies, and with it its workers and its etcd."""
    pids = [int(event["pid"]) for event in job.of("started")]
    job.stop()
    wait_until(lambda: all(map(is_gone, pids)), 10, f"{pids} have ended")
    job.agents.clear()


@pytest.mark.long
def test_a_killed_run_goes_on_from_its_tier_to_the_same_bits(
    jobs: MakeJob, tmpfs: Path, undisturbed: torch.Tensor
) -> None:
    job = jobs(gates=[KILLED_IN], tiers=[f"memory={tmpfs / 'tier'}"], **OPTIONS)
    job.start("--standalone", nproc=WORLD)
    job.wait_for("held", count=WORLD, step=KILLED_IN)
    job.wait_for("commit-memory", step=FOUND)
    kill_all(job)
    job.open_gate(KILLED_IN)
    run_standalone(job, nproc=WORLD)
    assert [event["step"] for event in job.of("loaded")] == [FOUND]
    assert torch.equal(job.check_identity(finishers=WORLD), undisturbed)


@pytest.mark.long
def test_a_kill_in_the_middle_of_a_save_leaves_the_older_checkpoint(
    jobs: MakeJob, tmpfs: Path, undisturbed: torch.Tensor
) -> None:
    """One rank dies before its shard is stored; the other has stored its own, which must not count."""
    kill = Fault("kill", "put-memory", worker=1, step=FOUND)
    job = jobs([kill], gates=[KILLED_IN], tiers=[f"memory={tmpfs / 'tier'}"], **OPTIONS)
    job.start("--standalone", "--max-restarts=0", nproc=WORLD)
    job.wait_for("commit-memory", step=FOUND - 5, count=WORLD)
    wait_until(lambda: job.plan.struck() == [0], 60, "the kill")
    kill_all(job)
    job.open_gate(KILLED_IN)
    run_standalone(job, nproc=WORLD)
    assert [event["step"] for event in job.of("loaded")] == [FOUND - 5]
    assert torch.equal(job.check_identity(finishers=WORLD), undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_is_killed_in_the_last_save_of_a_run_is_not_waited_for_and_one_that_is_slow_is(
    jobs: MakeJob, tmpfs: Path, lost: int
) -> None:
    hangs = Fault("spin", "put-memory", rank=lost, step=LAST_STEP)
    job = jobs([hangs], tiers=[f"memory={tmpfs / 'tier'}"], seed=5, checkpoint_every=5, epochs=2)
    launcher = job.start("--standalone", nproc=WORLD)
    wait_until(lambda: "is closed: " in job.output(), 60, "the end of the run")
    time.sleep(SILENT_S + 5.0)
    assert not job.of("finished"), "the save that is under way in the background was not waited for"
    os.kill(job.of("committed", step=LAST_STEP - 1, rank=lost)[0]["pid"], signal.SIGKILL)
    killed_s = time.monotonic()
    assert launcher.wait(60) == 1
    assert time.monotonic() - killed_s < SILENT_S + 20.0
    assert len(job.of("finished")) == 1


@pytest.mark.long
def test_a_run_that_is_told_to_stop_saves_everywhere_before_it_goes(jobs: MakeJob, tmpfs: Path, tmp_path: Path) -> None:
    job = jobs(
        gates=[KILLED_IN], tiers=[f"memory={tmpfs / 'tier'}", f"disk={tmp_path / 'tier'}"], policy="on signal",
        seed=5, epochs=2, checkpoint_every=1000,
    )  # fmt: skip
    job.start("--standalone", nproc=WORLD)
    job.wait_for("held", count=WORLD, step=KILLED_IN)
    job.agents[0].send_signal(signal.SIGTERM)
    wait_until(lambda: "leave" in job.output() or "SIGTERM" in job.output(), 20, "the agent has heard it")
    job.open_gate(KILLED_IN)
    job.wait()
    job.agents.clear()
    stopped_at = max(event["step"] for event in job.of("finished"))
    assert job.of("commit-disk", step=stopped_at), job.output()[-4000:]
    run_standalone(job, nproc=WORLD)
    assert [event["step"] for event in job.of("loaded")] == [stopped_at]
    job.check_identity(finishers=WORLD)


@pytest.mark.long
def test_a_host_whose_memory_is_gone_is_replaced_by_its_replica_and_has_one_again_before_the_next_save(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, tmpfs: Path, undisturbed: torch.Tensor
) -> None:
    """Two agents stand for two hosts; each has a folder in memory of its own."""
    again = KILLED_IN + 1
    job = jobs(gates=[KILLED_IN, again], tiers=[f"memory={tmpfs}/{{host}}"], replicas=1, **OPTIONS)

    def start(run: str) -> None:
        where = (f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run}", "--nnodes=2", "--min-workers=2")
        for host in ("a", "b"):
            job.start(*where, nproc=1, JOB_HOST=host)

    start(run_id)
    job.wait_for("commit-memory", count=WORLD, step=FOUND)
    for lost, step in (("b", KILLED_IN), ("a", again)):
        job.wait_for("held", count=WORLD, step=step)
        kill_all(job)
        shutil.rmtree(tmpfs / lost)
        job.open_gate(step)
        start(f"{run_id}-{step}")
    assert job.wait() == [0, 0], job.output()[-4000:]
    assert [event["step"] for event in job.of("loaded")] == [FOUND, FOUND]
    assert torch.equal(job.check_identity(finishers=WORLD), undisturbed)


@pytest.mark.long
@pytest.mark.daily
def test_survivors_go_on_from_their_own_memory_and_save_in_the_next_group(
    jobs: MakeJob, tmpfs: Path, undisturbed: torch.Tensor
) -> None:
    kill = Fault("kill", "backward", rank=1, step=7)
    job = jobs([kill], tiers=[f"memory={tmpfs / 'tier'}"], wait_for_newcomer_at=[8], full_world=WORLD, **OPTIONS)
    run_standalone(job, nproc=WORLD)
    assert job.plan.struck() == [0]
    assert not job.of("loaded"), "a checkpoint was loaded over the state of a survivor"
    last = job.of("commit-memory")[-WORLD:]
    assert [event["step"] for event in last] == [20, 20], "both take part again"
    assert len({event["pid"] for event in last}) == WORLD
    job.check_identity(finishers=WORLD)


@pytest.mark.long
@pytest.mark.parametrize("tier", ["durable", pytest.param("disk", marks=pytest.mark.slow)])
def test_survivors_and_who_joins_them_train_on_while_the_storage_of_all_hosts_does_not_answer(
    jobs: MakeJob, tmp_path: Path, undisturbed: torch.Tensor, tier: str
) -> None:
    place = tmp_path / "tier"
    kill = Fault("kill", "backward", rank=1, step=7)
    where = place.as_uri() if tier == "durable" else place
    job = jobs([kill], tiers=[f"{tier}={where}"], gates=[6], wait_for_newcomer_at=[8], full_world=WORLD, **OPTIONS)
    job.start("--standalone", nproc=WORLD)
    job.wait_for("held", count=WORLD, step=6)
    job.wait_for(f"commit-{tier}", step=5)
    place.rename(tmp_path / "away")
    place.symlink_to(place)  # each call that goes there fails: too many levels of symbolic links
    job.open_gate(6)
    assert job.wait() == [0], job.output()[-4000:]
    assert job.plan.struck() == [0]
    assert f"preparing the {tier} tier failed; training goes on" in job.output()
    assert [event["step"] for event in job.of(f"commit-{tier}")] == [5]
    assert not job.of("loaded")
    job.check_identity(finishers=WORLD)


@pytest.mark.long
def test_a_worker_whose_own_place_cannot_be_used_joins_in_vain_and_the_others_train_on(
    jobs: MakeJob, tmp_path: Path, undisturbed: torch.Tensor
) -> None:
    place, away = tmp_path / "tier", tmp_path / "away"
    kill = Fault("kill", "backward", rank=1, step=7)
    job = jobs([kill], tiers=[f"local={place}"], gates=[6], wait_for_newcomer_at=[8, 12], full_world=WORLD, **OPTIONS)
    job.start("--standalone", nproc=WORLD)
    job.wait_for("held", count=WORLD, step=6)
    job.wait_for("commit-local", step=5)
    place.rename(away)
    place.symlink_to(place)
    job.open_gate(6)
    wait_until(lambda: "a worker that joins cannot use its tiers" in job.output(), 60, "the survivor has heard it")
    place.unlink()
    away.rename(place)
    assert job.wait() == [0], job.output()[-4000:]
    assert job.plan.struck() == [0]
    assert not job.of("loaded")
    assert [event["step"] for event in job.of("commit-local")][-WORLD:] == [LAST_STEP] * WORLD
    job.check_identity(finishers=WORLD)


@pytest.mark.long
def test_a_run_that_is_told_to_stop_is_saved_in_memory_while_durable_storage_does_not_answer(
    jobs: MakeJob, tmpfs: Path, tmp_path: Path, undisturbed: torch.Tensor
) -> None:
    hang = Fault("spin", "put-durable", rank=0, step=5)
    tiers = [f"memory={tmpfs / 'tier'}", f"durable={(tmp_path / 'tier').as_uri()}"]
    job = jobs([hang], gates=[KILLED_IN], tiers=tiers, policy="on signal", **OPTIONS)
    job.start("--standalone", nproc=WORLD)
    job.wait_for("held", count=WORLD, step=KILLED_IN)
    assert job.plan.struck() == [0]
    job.agents[0].send_signal(signal.SIGTERM)
    wait_until(lambda: "leave" in job.output() or "SIGTERM" in job.output(), 20, "the agent has heard it")
    job.open_gate(KILLED_IN)
    saved = job.wait_for("commit-memory", step=KILLED_IN + 1, count=WORLD)
    assert saved, job.output()[-4000:]
    kill_all(job)
    run_standalone(job, nproc=WORLD)
    (loaded,) = job.of("loaded")
    assert loaded["step"] > KILLED_IN, "or the one behind it, if that was quick enough"
    assert torch.equal(job.check_identity(finishers=WORLD), undisturbed)
