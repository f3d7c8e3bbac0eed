"""deploy/slurm/elastic.sbatch on a SLURM whose nodes are hosts of their own: nodes are lost and added, jobs requeued.

Needs root, the packages of SLURM and network namespaces; `make test-slurm`.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import PATIENCE_S, POLL_S
from tests.slurm.elastic import SCRIPT, ElasticJob
from tests.slurm.hosts import SlurmHosts, running_hosts, why_no_hosts
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(500)]

MakeElasticJob = Callable[..., ElasticJob]


@pytest.fixture(scope="module")
def all_hosts() -> Iterator[SlurmHosts]:
    """A SLURM of three hosts."""
    if impossible := why_no_hosts():
        pytest.skip(impossible)
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # munge insists that others may pass
        with running_hosts(Path(folder), 3) as running:
            yield running


@pytest.fixture
def hosts(all_hosts: SlurmHosts) -> Iterator[SlurmHosts]:
    """The same, all of them idle at the beginning of a test."""
    all_hosts.bring_back()
    yield all_hosts
    all_hosts.cancel_all()


@pytest.fixture
def elastic(hosts: SlurmHosts, tmp_path: Path) -> MakeElasticJob:
    """Makes a job: elastic(*words of the launcher, **options of the training)."""

    def make(*launcher: str, **options: Any) -> ElasticJob:
        return ElasticJob(hosts, tmp_path, *launcher, **options)

    return make


def wait_until_told(job: ElasticJob) -> None:
    """Wait until both agents have SIGTERM, and let their workers leave; SLURM may have ended the etcd meanwhile."""
    wait_until(lambda: job.output().count("SIGTERM") >= 2, PATIENCE_S, "the nodes are told", job.output)
    wait_until(job.is_asked_to_stop, PATIENCE_S, "the workers are asked to stop", job.output, every_s=POLL_S)


def assert_each_step_once(job: ElasticJob) -> None:
    """Two workers must have trained each step, in whatever run, and no step again."""
    assert set(Counter(event["step"] for event in job.of("committed")).values()) == {2}


@pytest.mark.long
def test_a_node_is_lost_and_one_is_added_in_mid_run_and_no_sample_is_lost_or_repeated(
    elastic: MakeElasticJob, hosts: SlurmHosts
) -> None:
    job = elastic(gates=[5, 15])
    first = job.submit(["n1", "n2"])  # room for two: one is lost, another takes its place
    job.wait_for("held", step=5, count=2, timeout_s=90)
    hosts.lose("n2")
    job.open_gate(5)
    job.wait_for("held", step=15, round=2, timeout_s=60)
    second = job.submit(["n3"], JOIN=first)
    job.wait_for("asking", count=4, timeout_s=90)
    job.open_gate(15)
    job.wait_for("finished", count=2)
    job.check_identity(finishers=2)
    assert job.rounds() == {1: 2, 2: 1, 3: 2}
    job.wait_for_end(second)  # the first one waits until SLURM has seen that a node is lost


def test_nodes_that_are_to_join_a_job_which_is_not_there_end_with_one_line(tmp_path: Path) -> None:
    job = {"JOIN": "4711", "RUNS": str(tmp_path), "SLURM_JOB_ID": "4712", "SLURM_NNODES": "1"}
    done = subprocess.run(["bash", SCRIPT, "train.py"], env={**os.environ, **job}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"JOIN=4711: there is no run of that job in {tmp_path}/job-4711; give its id")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_slurm_takes_a_node_away_an_agent_is_killed_and_the_job_is_completed_by_the_one_that_is_left(
    elastic: MakeElasticJob, hosts: SlurmHosts
) -> None:
    job = elastic(gates=[5, 15, 25])
    first = job.submit(["n1", "n2", "n3"])
    job.wait_for("held", step=5, count=3, timeout_s=90)
    hosts.lose("n2")
    job.open_gate(5)
    job.wait_for("held", step=15, round=2, count=2)
    hosts.wait_until_down("n2")
    assert hosts.state(first) == "RUNNING"
    assert hosts.facts(first)["NodeList"] == "n[1,3]"
    job.open_gate(15)
    job.wait_for("held", step=25, round=2, count=2)
    hosts.kill_agent("n3")
    job.open_gate(25)
    job.wait_for_end()
    job.check_identity(finishers=1)
    assert job.rounds() == {1: 3, 2: 2, 3: 1}
    assert "Exited with exit code" in job.output() or "Killed" in job.output(), "srun has seen a failure"


@pytest.mark.slow
def test_before_the_limit_the_nodes_leave_and_the_requeued_job_goes_on_with_the_next_step(
    elastic: MakeElasticJob, hosts: SlurmHosts, tmp_path: Path
) -> None:
    job = elastic(gates=[5], checkpoint_dir=tmp_path / "saved", checkpoint_every=10_000)
    first = job.submit(["n1", "n2"])
    job.wait_for("held", step=5, count=2, timeout_s=90)
    hosts.update(first, EndTime="now+100")  # less than the 120 s of --signal
    wait_until_told(job)
    job.open_gate(5)
    job.wait_for_end(restarts=1)
    job.check_identity(finishers=2)
    assert_each_step_once(job)
    assert len(job.of("started")) == 4


@pytest.mark.slow
def test_when_the_first_node_is_lost_with_the_etcd_the_job_is_requeued_and_goes_on_from_the_checkpoint(
    elastic: MakeElasticJob, hosts: SlurmHosts, tmp_path: Path
) -> None:
    job = elastic(gates=[8], checkpoint_dir=tmp_path / "saved", checkpoint_every=5)
    first = job.submit(["n1", "n2"])
    job.wait_for("held", step=8, count=2, timeout_s=90)
    hosts.lose("n1")
    hosts.wait_until_down("n1")
    hosts.wait_until(first, "PENDING", restarts=1)
    job.open_gate(8)
    hosts.bring_back()
    job.wait_for_end(restarts=1)
    job.check_identity(finishers=2)
    assert {event["step"] for event in job.of("loaded")} == {5}


@pytest.mark.slow
def test_with_an_etcd_elsewhere_the_others_go_on_without_the_first_node(
    elastic: MakeElasticJob, hosts: SlurmHosts
) -> None:
    job = elastic(gates=[5])
    first = job.submit(["n1", "n2"], TORCHELASTIC_ETCD=hosts.lab.etcd.endpoint)
    job.wait_for("held", step=5, count=2, timeout_s=90)
    hosts.lose("n1")
    job.open_gate(5)
    job.wait_for("finished")
    job.check_identity(finishers=1)
    assert job.rounds() == {1: 2, 2: 1}
    hosts.wait_until(first, "PENDING", restarts=1)
    hosts.bring_back()
    job.wait_for_end(restarts=1)
    assert "is finished" in job.output()
    assert len(job.of("started")) == 2, "nobody trains again"


@pytest.mark.slow
def test_a_cancelled_job_saves_and_another_one_goes_on_in_its_run(
    elastic: MakeElasticJob, hosts: SlurmHosts, tmp_path: Path
) -> None:
    job = elastic(gates=[5], checkpoint_dir=tmp_path / "saved", checkpoint_every=10_000)
    first = job.submit(["n1", "n2"])
    job.wait_for("held", step=5, count=2, timeout_s=90)
    hosts.cancel(first)
    wait_until_told(job)
    job.open_gate(5)
    job.wait_for("saved")
    wait_until(lambda: hosts.is_gone(first), PATIENCE_S, "the job is gone", job.output, every_s=POLL_S)
    assert hosts.state(first) == "CANCELLED"
    assert hosts.restarts(first) == 0
    second = job.submit(["n1", "n2"])
    job.wait_for_end(second)
    job.check_identity(finishers=2)
    assert_each_step_once(job)


@pytest.mark.slow
def test_a_preempted_job_makes_room_and_goes_on_with_the_next_step(
    elastic: MakeElasticJob, hosts: SlurmHosts, tmp_path: Path
) -> None:
    job = elastic(gates=[5], checkpoint_dir=tmp_path / "saved", checkpoint_every=10_000)
    first = job.submit(["n1", "n2"])
    job.wait_for("held", step=5, count=2, timeout_s=90)
    urgent = hosts.submit("sleep 1", "--partition=urgent", "--nodelist=n1,n2", "--ntasks-per-node=8")
    wait_until_told(job)
    job.open_gate(5)
    hosts.wait_until(urgent, "COMPLETED")
    job.wait_for_end(first, restarts=1)
    job.check_identity(finishers=2)
    assert_each_step_once(job)
