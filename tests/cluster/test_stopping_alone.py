"""Scripts that are started by themselves, with a coordinator and an IterManager: what SIGTERM does to one of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import Job
from tests.few_examples import some_daily
from tests.waiting import wait_until
from torchelastic.rendezvous.server import EtcdServer

#: The gate of the job, and its last step.
GATE, STEPS = 10, 40


class Stopping(Job):
    module = "tests.cluster.stopping_job"

    def wait_for_request(self) -> None:
        """Until a worker has said that it was told to go."""
        said = "SIGTERM: this worker leaves the run"
        wait_until(lambda: said in self.output(), 20, f"a worker asks to leave: {self.output()[-3000:]}")


def in_either_order(**options: Any) -> pytest.MarkDecorator:
    orders = some_daily([{"first": first, **options} for first in ("coordinator", "deadline")], is_daily)
    return pytest.mark.parametrize("job", orders, ids=lambda options: options["first"], indirect=True)


def is_daily(options: dict[str, Any]) -> bool:
    return bool(options["first"] == "coordinator")


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stopping]:
    job = Stopping(tmp_path, **request.param)
    try:
        yield job
    finally:
        job.stop()


@pytest.mark.long
@in_either_order(world=2)
def test_on_sigterm_one_leaves_at_a_step_and_the_other_trains_on(job: Stopping, etcd: EtcdServer, run_id: str) -> None:
    url = f"etcd://{etcd.endpoint}/{run_id}?min_workers=1&max_workers=2&last_call_timeout=30"
    leaves, stays = (job.start_alone(url, name) for name in ("leaves", "stays"))
    job.wait_for("held", count=2, world=2)
    leaves.send_signal(signal.SIGTERM)
    assert job.wait() == [0, 0], job.output()[-4000:]
    (left,) = job.of("finished", pid=leaves.pid)
    assert left["rank"] == -1
    assert GATE < left["step"] <= GATE + 2, "told in one step, and read in the next"
    assert job.output().count("drained; the others go on") == 1
    (stayed,) = job.of("finished", pid=stays.pid)
    assert stayed["step"] == STEPS
    assert not job.of("told to save"), "the run goes on, so there was no deadline for it"


@in_either_order(world=1, hangs=True)
def test_a_second_sigterm_ends_it_at_once(job: Stopping, etcd: EtcdServer, run_id: str) -> None:
    script = job.start_alone(f"etcd://{etcd.endpoint}/{run_id}?min_workers=1&max_workers=1", "alone")
    job.wait_for("held")
    script.send_signal(signal.SIGTERM)
    job.wait_for_request()
    script.send_signal(signal.SIGTERM)
    assert job.wait() == [-signal.SIGTERM]
