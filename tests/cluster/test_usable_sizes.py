"""Groups of usable sizes only (`--multiple-of`): a survivor without a partner waits, and is taken in again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.harness import Job
from tests.cluster.test_status_run import Watcher
from tests.waiting import wait_until
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.testing.faults import Fault

MakeJob = Callable[..., Job]


@pytest.mark.long
@pytest.mark.daily
def test_of_four_of_which_one_is_killed_two_go_on_one_waits_and_four_train_again(
    jobs: MakeJob, etcd: EtcdServer, run_id: str
) -> None:
    kill = Fault("kill", "backward", rank=1, step=12)
    job = jobs([kill], gates=[16], wait_for_newcomer_at=[20], full_world=4)
    at = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--nnodes=1", "--last-call=60"]
    job.start(*at, "--min-workers=2", "--multiple-of=2", nproc=4)
    job.wait_for("held", count=2, step=16)
    training = {event["pid"] for event in job.of("held", step=16)}
    killed = job.of("drawn", step=12, rank=1, round=1)[0]["pid"]
    (spare,) = {event["pid"] for event in job.of("started", restart=0)} - training - {killed}
    # also when the killed one is back: there is no step at which the two could stop
    job.wait_for("asking", count=8, timeout_s=60)  # four at the start, three survivors, one that came again
    watcher = Watcher(etcd, run_id)
    seen = {worker["pid"]: worker for worker in watcher.status()["workers"]}
    assert (seen[spare]["rank"], seen[spare]["account"]) == (-1, "idle"), "it waits, and is not about to recover"
    assert sorted(seen[pid]["rank"] for pid in training) == [0, 1]
    job.open_gate(16)

    assert job.wait() == [0], job.output()[-4000:]
    assert job.plan.struck() == [0]
    job.check_identity(finishers=4)
    assert job.rounds() == {1: 4, 2: 2, 3: 4}
    assert {event["pid"] for event in job.of("drawn", round=2)} == training
    # when exactly the two stop for the others depends on the load of the machine
    together_from = min(event["step"] for event in job.of("drawn", round=3))
    assert 17 <= together_from <= 21
    assert {event["step"] for event in job.of("drawn", pid=spare, round=3)} == set(range(together_from, 40))
    assert len(job.of("started")) == 5, "the killed one was started again, and nobody else"
    output = job.output()
    assert "did not get ready" not in output
    assert "as if its host were silent" not in output, "who waits is no loss"


@pytest.mark.long
def test_a_survivor_that_waits_to_the_end_ends_well(jobs: MakeJob, etcd: EtcdServer, run_id: str) -> None:
    kill = Fault("kill", "backward", rank=0, step=30)
    job = jobs([kill])
    at = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--max-restarts=0"]
    job.start(*at, "--min-workers=2", "--multiple-of=2", nproc=4)
    assert job.wait() == [0], job.output()[-4000:]
    job.check_identity(finishers=2)
    assert job.rounds() == {1: 4, 2: 2}
    (spare,) = job.of("finished", rank=-1)
    assert spare["pid"] in {event["pid"] for event in job.of("drawn", round=1)}
    assert wait_until(lambda: "its state is no result" in job.output(), 5, "it says that it has no result")
