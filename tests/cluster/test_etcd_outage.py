"""etcd goes away and comes back while workers train: they do not notice."""

from __future__ import annotations

from collections.abc import Callable

from tests.cluster.harness import Job
from torchelastic.rendezvous.server import EtcdServer

MakeJob = Callable[..., Job]


def test_training_goes_on_at_its_pace_while_etcd_is_down_and_ends_well_when_it_is_back(jobs: MakeJob) -> None:
    with EtcdServer() as etcd:
        job = jobs(step_ms=50)
        job.start(f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=outage", nproc=2)
        job.wait_for_step(5)
        etcd.kill()
        job.wait_for_step(20)
        etcd.restart()
        assert job.wait() == [0], job.output()[-4000:]
        job.check_identity(finishers=2)
        assert {event["round"] for event in job.of("synced")} == {1}, "the outage cost a round"
        assert "etcd is out of reach" in job.output()
        assert "etcd is back" in job.output()
