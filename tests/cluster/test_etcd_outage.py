"""etcd goes away while workers train, with its data or without, and comes back: they do not notice, or pause intact."""

from __future__ import annotations

import re
import signal
import statistics
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import Event, Job, resume
from tests.waiting import pause, wait_until
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.rendezvous.view import COME_BACK_S

#: The shortest time to live that a URL takes.
TTL_S = 2.0
#: Until an agent has found out that etcd is back: pauses between two sessions grow up to 1.5 s, and a busy machine.
BACK_S = 10.0
RUN_ID = "outage"


def start(job: Job, etcd: EtcdServer, *options: str, nproc: int = 3) -> None:
    job.start(
        f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={RUN_ID}", f"--ttl={TTL_S:g}", "--min-workers=1", *options,
        nproc=nproc,
    )  # fmt: skip


def commits(job: Job, worker: int = 0) -> list[Event]:
    return job.of("committed", worker=worker)


def step_s(events: list[Event], since_s: float, until_s: float) -> float:
    """The median time from one committed step to the next."""
    times = [event["t"] for event in events if since_s <= event["t"] <= until_s]
    assert len(times) > 10, f"{len(times)} steps in {until_s - since_s:.1f} s"
    return float(statistics.median(after - before for before, after in pairwise(times)))


def replace_a_worker(job: Job) -> None:
    """A worker is killed: the others go on, and a new one comes in, which the job waits for."""
    before = job.rounds()
    number = max(before)
    killed_s = time.monotonic()
    job.kill_worker(1)
    assert job.wait() == [0], job.output()[-4000:]
    job.check_identity(finishers=3)
    # for a while after a loss of etcd's data the others wait, and the new one may be there before they go on
    later = {number: world for number, world in job.rounds().items() if number not in before}
    assert later in ({number + 1: 2, number + 2: 3}, {number + 1: 3})
    again_s = min(event["t"] for event in job.of("committed", round=number + 1)) - killed_s
    assert again_s < COME_BACK_S + BACK_S, f"they went on after {again_s:.0f} s"


def assert_no_step_was_lost(job: Job, until_s: float = float("inf")) -> None:
    """Up to that time there was one round, and nothing was undone in it."""
    assert {event["round"] for event in job.of("committed") if event["t"] < until_s} == {1}, "it cost a round"
    assert not [event for event in job.of("rolled_back") if event["t"] < until_s], "it cost a step"


@pytest.mark.slow
def test_while_etcd_is_down_for_longer_than_the_ttl_training_keeps_its_pace_and_later_a_lost_worker_is_replaced(
    own_etcd: EtcdServer, jobs: MakeJob
) -> None:
    job = jobs(step_ms=40, epochs=20, wait_for_newcomer_at=[195])
    start(job, own_etcd)
    job.wait_for_step(15)
    own_etcd.kill()
    down_s = time.monotonic()
    time.sleep(2 * TTL_S)
    back_s = time.monotonic()
    own_etcd.restart()
    wait_until(lambda: "etcd is back" in job.output(), BACK_S, "the agent has found it")
    found_s = time.monotonic()
    before, during = step_s(commits(job), 0.0, down_s), step_s(commits(job), down_s, back_s)
    assert during < 1.3 * before, f"a step took {1000 * during:.0f} ms without etcd, {1000 * before:.0f} ms with it"
    assert_no_step_was_lost(job, found_s)
    assert "etcd is out of reach" in job.output()
    replace_a_worker(job)


@pytest.mark.long
@pytest.mark.parametrize("is_lost", [True, False], ids=["a worker was lost", "all train"])
def test_sigterm_while_etcd_is_away_saves_the_state_and_waits_for_nobody(
    own_etcd: EtcdServer, jobs: MakeJob, tmp_path: Path, *, is_lost: bool
) -> None:
    job = jobs(step_ms=20, epochs=200, checkpoint_dir=tmp_path / "checkpoints", checkpoint_every=100000)
    agent = job.start_launcher(
        f"--rdzv-endpoint={own_etcd.endpoint}", f"--rdzv-id={RUN_ID}", "--min-workers=1", "--nproc-per-node=2",
        "--term-grace=60", "--max-restarts=0", str(job.script), *job.job_arguments(),
    )  # fmt: skip
    job.wait_for_step(10)
    own_etcd.kill()
    wait_until(lambda: "etcd is out of reach" in job.output(), BACK_S, "the agent has noticed")
    if is_lost:
        job.kill_worker(1)
        said = rf"the run waits for etcd at {own_etcd.endpoint} since \d\d:\d\d:\d\d: until it is back, no group"
        wait_until(lambda: re.search(said, job.output()), BACK_S, "the run says what it waits for")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(20) == 128 + signal.SIGTERM
    steps = 1 + max(event["step"] for event in job.of("committed"))
    assert [event["step"] for event in job.of("saved")] == [steps]
    assert job.output().count("the run waits for etcd") == is_lost


@pytest.mark.long
@pytest.mark.daily
def test_sigterm_to_who_has_finished_while_etcd_is_away_lets_the_script_go_on_and_end(
    own_etcd: EtcdServer, jobs: MakeJob
) -> None:
    job = jobs(epochs=2, gates=[10])
    start(job, own_etcd, "--term-grace=60", nproc=2)
    job.wait_for("held", count=2, step=10)
    own_etcd.kill()
    wait_until(lambda: "etcd is out of reach" in job.output(), BACK_S, "the agent has noticed")
    job.open_gate(10)
    wait_until(lambda: "the run waits for etcd" in job.output(), 20, "its end waits for etcd")
    job.agents[0].send_signal(signal.SIGTERM)
    assert job.agents[0].wait(20) == 128 + signal.SIGTERM
    job.check_identity(finishers=2)


# --- longer than orphan_timeout ---------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "ttl_s",
    [
        pytest.param(30.0, id="leases live on"),
        pytest.param(TTL_S, id="leases end", marks=pytest.mark.slow),
    ],
)
def test_a_group_without_contact_to_etcd_commits_nothing_after_orphan_timeout_and_goes_on_within_10_s_of_its_return(
    own_etcd: EtcdServer, jobs: MakeJob, ttl_s: float
) -> None:
    orphan_timeout_s = 3.0
    job = jobs(step_ms=40, epochs=12)
    start(job, own_etcd, f"--orphan-timeout={orphan_timeout_s:g}", f"--ttl={ttl_s:g}", nproc=2)
    job.wait_for_step(10)
    cut_s = pause([own_etcd.pid])
    time.sleep(1.5 * orphan_timeout_s)
    back_s = time.monotonic()
    in_between = [event["t"] - cut_s for event in job.of("committed") if cut_s < event["t"] < back_s]
    assert in_between, "training stopped at once"
    assert max(in_between) < orphan_timeout_s, "a step was committed when others may have formed a group already"
    assert not job.of("finished"), "there was nothing left to commit"
    assert all(agent.poll() is None for agent in job.agents)
    assert len(job.of("started")) == 2, "somebody was ended"
    resume([own_etcd.pid])
    wait_until(lambda: [e for e in job.of("committed") if e["t"] > back_s], BACK_S, "training goes on")
    assert job.wait() == [0], job.output()[-4000:]
    job.check_identity(finishers=2)
    assert len(job.of("started")) == 2
    assert not job.of("loaded")
