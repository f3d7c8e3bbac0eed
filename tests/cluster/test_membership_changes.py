"""Workers that come, leave and come back, spares, checkpoints between runs: nothing is lost or done twice."""

from __future__ import annotations

import signal
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.harness import Job, run_standalone
from tests.waiting import wait_until
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.testing.faults import Fault

MakeJob = Callable[..., Job]


def rounds(job: Job) -> list[int]:
    return sorted({event["round"] for event in job.of("synced")})


def host(etcd: EtcdServer, run_id: str) -> list[str]:
    """One of up to three hosts of a run that starts with whoever is there."""
    return [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--nnodes=1:3", "--last-call=0.5"]


@pytest.mark.long
def test_hosts_join_in_mid_run_and_leave_and_come_back(jobs: MakeJob, etcd: EtcdServer, run_id: str) -> None:
    # at which of the steps after 60 it is agreed that one leaves, depends on the load of the machine
    alone_at = [6, *range(62, 150)]
    job = jobs(wait_for_newcomer_at=alone_at, full_world=2, gates=[60], agreement="as usual", epochs=15)
    stays = job.start(*host(etcd, run_id), nproc=1)
    job.wait_for_step(5)
    leaves = job.start(*host(etcd, run_id), nproc=1)
    job.wait_for("held", step=60, count=2)
    leaves.send_signal(signal.SIGTERM)
    wait_until(lambda: "asked to leave" in job.output_of(0), 20, "the others are asked to stop")
    job.open_gate(60)
    assert leaves.wait(30) == 128 + signal.SIGTERM
    assert not job.of("rolled_back")
    job.wait_for("synced", world=1, count=2)
    comes_back = job.start(*host(etcd, run_id), nproc=1)
    assert stays.wait(60) == 0, job.output()[-4000:]
    assert comes_back.wait(60) == 0, job.output()[-4000:]
    job.check_identity(finishers=2)
    worlds = {event["round"]: event["world"] for event in job.of("synced")}
    assert [worlds[number] for number in rounds(job)] == [1, 2, 1, 2]


@pytest.mark.long
def test_a_launcher_with_other_numbers_than_the_one_that_leads_says_which_and_trains(
    jobs: MakeJob, etcd: EtcdServer, run_id: str
) -> None:
    job = jobs(full_world=2, wait_for_newcomer_at=[5])
    job.start(*host(etcd, run_id), nproc=1)
    job.wait_for_step(4)
    job.start(*host(etcd, run_id), "--nnodes=2:4", "--orphan-timeout=60", nproc=1)
    assert job.wait() == [0, 0]
    said = "this host was started with min_workers=2, max_workers=4, orphan_timeout=60, and "
    assert job.output_of(1).count(said) == 1
    assert ", which decides for the run, with min_workers=1, max_workers=3, orphan_timeout=300: " in job.output_of(1)
    assert "this host was started with" not in job.output_of(0)
    job.check_identity(finishers=2)


@pytest.mark.long
def test_spares_wait_and_step_in_and_end_well_with_the_run(jobs: MakeJob) -> None:
    kill = Fault("kill", "backward", rank=1, step=20)
    job = jobs([kill], gates=[10, 35])
    job.start("--standalone", "--max-workers=2", nproc=3)
    # all three have asked, and nobody was disturbed by the one that is over
    job.wait_for("asking", count=3)
    job.wait_for("held", count=2, step=10)
    job.open_gate(10)
    # the killed one is there again, as the spare now, before the run may end
    job.wait_for("asking", count=5, timeout_s=60)  # three at the start, one survivor, one that came again
    job.open_gate(35)
    assert job.wait() == [0], job.output()[-4000:]
    assert job.plan.struck() == [0]
    job.check_identity(finishers=2)
    assert rounds(job) == [1, 2], "one round to begin with, one for the kill, none for spares"
    (spare,) = job.of("finished", rank=-1)
    assert spare["pid"] == job.of("started")[-1]["pid"]
    assert len(job.of("finished")) == 3
    # the first spare took the place at once, without having to start
    assert {event["step"] for event in job.of("drawn", round=2)} == set(range(20, 40))


@pytest.mark.slow
def test_a_worker_that_comes_when_the_run_is_over_ends_well(jobs: MakeJob) -> None:
    kill = Fault("kill", "backward", rank=1, step=37)
    job = run_standalone(jobs([kill]), nproc=2)
    assert job.plan.struck() == [0]
    job.check_identity(finishers=1)
    (late,) = job.of("finished", rank=-1)
    assert late["pid"] == job.of("started")[-1]["pid"]


@pytest.mark.long
def test_a_slow_checkpoint_makes_no_round_and_a_torn_one_is_passed_over(jobs: MakeJob, tmp_path: Path) -> None:
    """First run: a save that takes three times the time-out of collectives, then all are killed. Second run: resume."""
    folder = tmp_path / "checkpoints"
    timeout_s = 1.5
    pause = Fault("pause", "save", step=10, seconds=3 * timeout_s)
    job = jobs([pause], checkpoint_dir=folder, timeout_ms=int(1000 * timeout_s), gates=[22])
    agent = job.start("--standalone", nproc=2)
    job.wait_for("held", count=2, step=22)
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    assert job.plan.struck() == [0]
    assert rounds(job) == [1], "the slow checkpoint cost a round"
    assert not job.of("rolled_back")
    assert [event["step"] for event in job.of("saved")] == [5, 10, 15, 20]
    checkpoints = sorted(folder.glob("[0-9]*"), key=lambda path: int(path.name))
    assert len(checkpoints) == 4

    torn = checkpoints[-1] / "default"
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    job.open_gate(22)
    job.agents.clear()
    run_standalone(job, nproc=2)
    (loaded,) = job.of("loaded")
    assert loaded["step"] == 15, "the newest that is whole"
    assert str(checkpoints[-1]) in job.output(), "the torn one is named"
    job.check_identity(finishers=2)


@pytest.mark.long
def test_workers_wait_for_an_etcd_that_starts_later(jobs: MakeJob, run_id: str) -> None:
    job = jobs(epochs=1)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        nobody.settimeout(30)
        port = nobody.getsockname()[1]
        job.start(f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={run_id}", nproc=1)
        for _ in range(3):  # the agent has tried, and tries again: etcd is late
            nobody.accept()[0].close()
    with EtcdServer(port=port):
        assert job.wait() == [0], job.output()[-4000:]
        job.check_identity(finishers=1)


@pytest.mark.long
def test_metrics_of_workers_and_of_the_rendezvous_are_served_while_the_run_goes_on(jobs: MakeJob) -> None:
    job = jobs(metrics="prometheus", gates=[30])
    job.start("--standalone", "--metrics-port=0", nproc=1)
    job.wait_for("held", step=30)
    (address,) = [line.split()[-1] for line in job.output().splitlines() if "metrics at http://" in line]
    assert address.startswith("http://127.0.0.1:")

    def scrape() -> str | None:
        with urllib.request.urlopen(address, timeout=5) as answer:
            text = str(answer.read().decode())
        return text if "train_step" in text else None

    text = wait_until(scrape, 10, "durations of train steps among the metrics")
    job.open_gate(30)
    assert job.wait() == [0]
    lines = [line for line in text.splitlines() if line.startswith("torchelastic_")]
    assert any("round" in line and line.endswith(" 1.0") for line in lines), text
    assert any("train_step" in line and 'local_rank="0"' in line for line in lines), text
