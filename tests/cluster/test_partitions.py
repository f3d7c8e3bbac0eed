"""Hosts with networks of their own, some of which fail: who is left goes on soon, and no work is lost or done twice.

Each host is a set of network namespaces with one agent and one worker; see `tests.hosts`. Needs root.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.conftest import MakeJob, MakeLab
from tests.cluster.harness import ROOT, Job, RunRecords
from tests.hosts import ETCD, Lab
from tests.waiting import wait_until
from torchelastic.testing.faults import Fault

#: The shortest time to live that etcd grants.
TTL_S = 2.0
#: Beyond it: until etcd has seen the lease expire, a round is made and the step done again.
RECOVERY_S = 3.0
#: How soon a host that is back must be in a group again: its agent looks for etcd every 6 s at the least.
RETURN_S = 20.0
#: What a save of a group that has ended may still take (the job's grace of 2 s), and the one after it.
SAVES_S = 7.0
NAMES = ("a", "b", "c")
RUN_ID = "partitioned"


class Hosts:
    """Hosts of one run with room for so many, `count` of them in step 5 of the first round, held by a gate."""

    def __init__(self, job: Job, lab: Lab, *options: str, ttl_s: float, count: int, room: int) -> None:
        self.job, self.lab = job, lab
        self.records = RunRecords(lab.etcd.endpoint, RUN_ID, lab[ETCD].entered)
        rendezvous = (f"--rdzv-endpoint={lab.etcd.endpoint}", f"--rdzv-id={RUN_ID}")
        self.options = (*rendezvous, f"--nnodes=1:{room}", f"--ttl={ttl_s:g}", *options)
        for name in NAMES[:count]:
            self.start(name)
        job.wait_for("held", step=5, count=count)
        assert len(self.records.members()) == count

    def start(self, name: str) -> None:
        """Start a host's agent."""
        self.job.start(*self.options, nproc=1, host=self.lab[name], JOB_HOST=name)

    @property
    def leader(self) -> str:
        """The name of the host whose agent leads."""
        return self.records.leader().partition("-")[0]

    @property
    def follower(self) -> str:
        """The name of one whose agent does not."""
        return next(name for name in NAMES if name != self.leader)

    def worker_of(self, name: str) -> int:
        """The process of a host's worker."""
        (pid,) = {int(event["pid"]) for event in self.job.of("started")} & set(self.lab[name].pids())
        return pid

    def host_of_rank(self, rank: int, round_number: int) -> str:
        """The name of the host that a rank of a round is on."""
        (pid,) = {int(event["pid"]) for event in self.job.of("formed", round=round_number, rank=rank)}
        return next(name for name in NAMES if pid in self.lab[name].pids())

    def wait_for_another_group(self, since_s: float) -> None:
        """The others must have trained a step in another round within the bound."""
        within_s = TTL_S + RECOVERY_S
        first = min(float(event["t"]) for event in self.job.wait_for("committed", round=2, timeout_s=within_s + 20))
        assert first - since_s < within_s, f"the others trained again after {first - since_s:.1f} s"

    def wait_for_return(self, worker: int, since_s: float) -> None:
        """A worker must have trained a step in the next group within the bound."""
        (returned, *_) = self.job.wait_for("committed", round=3, pid=worker)
        assert returned["t"] - since_s < RETURN_S, f"it trained again after {returned['t'] - since_s:.1f} s"

    def assert_all_ended_level(self, rounds: dict[int, int] | None = None) -> None:
        """Everybody must have finished in the process that it began in; in these rounds (number and world size)."""
        assert self.job.wait(60) == [0, 0, 0], self.job.output()[-4000:]
        self.job.check_identity(finishers=3)
        assert rounds is None or self.job.rounds() == rounds
        assert len(self.job.of("started")) == 3, "a worker was started again"


@pytest.fixture
def make_hosts(jobs: MakeJob, labs: MakeLab) -> Callable[..., Hosts]:
    """Hosts under way: make_hosts(*options of the launcher, ttl_s=, count=, room=, **options of the job)."""

    def make(*launcher: str, ttl_s: float = TTL_S, count: int = 3, room: int = 3, **options: Any) -> Hosts:
        job, lab = jobs(**{"gates": [5], **options}), labs(*NAMES)
        return Hosts(job, lab, *launcher, ttl_s=ttl_s, count=count, room=room)

    return make


# --- the lab itself ---------------------------------------------------------------------------------------------------


def test_a_lab_whose_owner_is_killed_leaves_nothing_behind(labs: MakeLab, tmp_path: Path) -> None:
    labs()  # or skip
    text = """
        import subprocess, time
        from tests.hosts import ETCD, Lab
        with Lab(["a"]) as lab:
            subprocess.Popen(lab["a"].command(["sleep", "60"]))
            while not (lab["a"].pids() and lab[ETCD].pids()):
                time.sleep(0.01)
            print(*(host.network.readlink() for host in (lab["a"], lab[ETCD])), flush=True)
            time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(text)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert owner.stdout is not None
    networks = {Path(word.decode()) for word in owner.stdout.readline().split()}

    def inhabitants() -> list[int]:
        return [pid for pid in psutil.pids() if network_of(pid) in networks]

    assert len(inhabitants()) == 4, "in each the process that holds it, and one more"
    owner.kill()
    owner.wait()
    wait_until(lambda: not inhabitants(), 5, "the lab is gone")


def network_of(pid: int) -> Path | None:
    """The network namespace of a process; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/ns/net").readlink()
    except OSError:
        return None


# --- a host falls silent ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("leads", [False, True], ids=["follower", "leader"])
def test_when_a_hosts_link_goes_down_the_others_train_again_within_the_bound_and_it_joins_when_it_is_back(
    make_hosts: Callable[..., Hosts], leads: bool
) -> None:
    hosts = make_hosts(wait_for_newcomer_at=[20])
    job, lab, name = hosts.job, hosts.lab, hosts.leader if leads else hosts.follower
    worker = hosts.worker_of(name)
    lab.link_down(name)
    down_s = time.monotonic()
    job.open_gate(5)
    hosts.wait_for_another_group(down_s)
    assert len(hosts.records.members()) == 2, "its lease did not expire"
    assert not lab.reaches(ETCD, name)
    lab.link_up(name)
    hosts.wait_for_return(worker, time.monotonic())
    hosts.assert_all_ended_level({1: 3, 2: 2, 3: 3})


@pytest.mark.long
def test_checkpoints_go_on_when_the_host_of_rank_0_falls_silent_while_one_is_written(
    make_hosts: Callable[..., Hosts], tmpfs: Path
) -> None:
    """The notes of that checkpoint are in a store on that host, and nothing closes the connections to it."""
    until_it_is_silent = Fault("pause", "put-memory", step=5, seconds=3.0, times=3)
    hosts = make_hosts(
        faults=[until_it_is_silent], tiers=[f"memory={tmpfs}/{{host}}"], replicas=1, checkpoint_every=5,
        wait_for_newcomer_at=[18], epochs=3,
    )  # fmt: skip
    job, lab = hosts.job, hosts.lab
    name = hosts.host_of_rank(0, round_number=1)
    worker = hosts.worker_of(name)
    wait_until(lambda: len(list(job.folder.glob("struck-0.*"))) == 3, 20, "all hosts write a checkpoint")
    lab.link_down(name)
    down_s = time.monotonic()
    job.open_gate(5)
    hosts.wait_for_another_group(down_s)
    saved = job.wait_for("commit-memory", step=10, count=2)
    assert {event["pid"] for event in saved}.isdisjoint({worker})
    assert max(event["t"] for event in saved) - down_s < TTL_S + RECOVERY_S + SAVES_S
    lab.link_up(name)
    hosts.wait_for_return(worker, time.monotonic())
    hosts.assert_all_ended_level({1: 3, 2: 2, 3: 3})
    assert not job.of("loaded"), "a checkpoint was loaded over the state of a survivor"
    last = job.of("commit-memory")[-3:]
    assert len({event["pid"] for event in last}) == 3, "all take part again"


@pytest.mark.long
def test_a_link_that_is_down_for_less_than_the_time_to_live_costs_only_that_time(
    make_hosts: Callable[..., Hosts],
) -> None:
    ttl_s, down_for_s = 6.0, 1.5  # a sign of life every 2 s: from any moment on, 4 s are left
    hosts = make_hosts(ttl_s=ttl_s, count=2, room=2)
    job, lab, name = hosts.job, hosts.lab, hosts.follower
    lab.link_down(name)
    down_s = time.monotonic()
    job.open_gate(5)
    job.wait_for("drawn", step=5, count=2)
    wait_until(lambda: time.monotonic() > down_s + down_for_s, 10, f"{down_for_s} s")
    assert not lab.reaches(ETCD, name, timeout_s=0.1)
    up_s = time.monotonic()
    lab.link_up(name)
    assert job.wait(60) == [0, 0], job.output()[-4000:]
    assert not [event for event in job.of("committed") if down_s < event["t"] < up_s], "trained without it"
    assert not job.of("rolled_back")
    assert job.rounds() == {1: 2}
    job.check_identity(finishers=2)


# --- etcd is out of reach ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("leads", [False, True], ids=["follower", "leader"])
def test_a_host_that_only_etcd_loses_sight_of_is_replaced_and_joins_again_with_nothing_lost(
    make_hosts: Callable[..., Hosts], leads: bool
) -> None:
    hosts = make_hosts(epochs=10, step_ms=50, wait_for_newcomer_at=[80])
    job, lab, name = hosts.job, hosts.lab, hosts.leader if leads else hosts.follower
    (other, *_) = (one for one in NAMES if one != name)
    worker = hosts.worker_of(name)
    lab.cut(name, ETCD)
    cut_s = time.monotonic()
    job.open_gate(5)
    hosts.wait_for_another_group(cut_s)
    assert len(hosts.records.members()) == 2, "its lease did not expire"
    assert not lab.reaches(name, ETCD)
    assert lab.reaches(name, other)
    assert [event for event in job.of("committed", round=1, pid=worker) if event["t"] > cut_s + 0.5], "it trained on"
    lab.heal(name, ETCD)
    hosts.wait_for_return(worker, time.monotonic())
    hosts.assert_all_ended_level({1: 3, 2: 2, 3: 3})


# fails: the first agent back takes all others, and its own workers, for lost, and breaks the round
@pytest.mark.slow
def test_an_etcd_that_is_cut_off_until_all_leases_have_expired_costs_no_round(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(epochs=15, step_ms=50, gates=[5, 120])
    job, lab = hosts.job, hosts.lab
    lab.link_down(ETCD)
    cut_s = time.monotonic()
    job.open_gate(5)
    wait_until(lambda: not hosts.records.members() and not hosts.records.leader(), 10, "all leases expire")
    expired_s = time.monotonic()
    job.wait_for("held", step=120, count=3)
    assert not any(lab.reaches(name, ETCD, timeout_s=0.2) for name in NAMES)
    assert [event for event in job.of("committed") if event["t"] > expired_s], "it ended too soon to prove anything"
    steps = [event["t"] for event in job.of("committed") if event["t"] > cut_s and event["rank"] == 0]
    assert max(later - earlier for earlier, later in pairwise(steps)) < 1.0, "training stood still"
    lab.link_up(ETCD)
    wait_until(lambda: len(hosts.records.members()) == 3, RETURN_S, "all are registered again")
    job.open_gate(120)
    hosts.assert_all_ended_level({1: 3})
    assert not job.of("rolled_back")
    assert hosts.records.rounds() == [(1, "running"), (1, "closing"), (1, "closed")]


@pytest.mark.slow
def test_without_etcd_for_too_long_training_pauses_with_its_state_and_goes_on_when_it_is_back(
    make_hosts: Callable[..., Hosts],
) -> None:
    orphan_timeout_s = 8.0
    hosts = make_hosts(
        f"--orphan-timeout={orphan_timeout_s:g}", epochs=20, step_ms=50, wait_for_newcomer_at=[180], samples=120
    )
    job, lab = hosts.job, hosts.lab
    lab.link_down(ETCD)
    cut_s = time.monotonic()
    job.open_gate(5)
    wait_until(lambda: not hosts.records.members(), 10, "all leases expire")
    job.wait_for("asking", count=6, timeout_s=orphan_timeout_s + 5)  # once for round 1, and once because of the pause
    paused_s = time.monotonic()
    last = job.of("committed")[-1]
    assert last["t"] - cut_s > TTL_S, "it stopped too soon"
    assert last["t"] - cut_s < orphan_timeout_s, "a step was committed when another group might have begun"
    assert job.output().count("training pauses, its state intact") >= 1
    wait_until(lambda: time.monotonic() > max(paused_s + 1.0, cut_s + orphan_timeout_s), 10, "the time-out")
    assert job.of("committed")[-1] == last, "a step was committed in the pause"
    lab.link_up(ETCD)
    up_s = time.monotonic()
    (again, *_) = job.wait_for("synced", round=2)
    assert again["t"] - up_s < RETURN_S
    assert again["step"] == last["step"] + 1, "a step was lost"
    hosts.assert_all_ended_level()


# --- a group that is cut off from etcd's side -------------------------------------------------------------------------


@pytest.mark.slow
def test_while_a_group_that_is_cut_off_may_still_train_newcomers_form_none_of_their_own(
    make_hosts: Callable[..., Hosts],
) -> None:
    last_call_s = 2.0
    hosts = make_hosts(f"--last-call={last_call_s:g}", count=2, epochs=20, step_ms=50, wait_for_newcomer_at=[190])
    job, lab = hosts.job, hosts.lab
    cut_from_etcd(lab, "a", "b")
    hosts.start("c")
    job.wait_for("asking", count=3)
    wait_until(lambda: len(hosts.records.members()) == 1, 10, "only the newcomer is registered")
    job.open_gate(5)
    trains_s = time.monotonic()
    wait_until(lambda: time.monotonic() > trains_s + last_call_s + 3.0, 20, "the last call, and 3 s more")
    assert job.rounds() == {1: 2}, "it has formed a group of its own"
    assert time.monotonic() - job.of("committed", round=1)[-1]["t"] < 1.0, "the group did not train all the time"
    assert "they may be cut off, and still train" in job.output_of(2)
    for name in ("a", "b"):
        lab.heal(name, ETCD)
    healed_s = time.monotonic()
    job.wait_for("synced", world=3, count=3)
    assert job.of("synced", world=3)[0]["t"] - healed_s < RETURN_S
    hosts.assert_all_ended_level()
    assert not job.of("synced", step=0, round=2)


@pytest.mark.slow
def test_a_group_that_is_cut_off_commits_its_last_step_before_a_successor_is_formed_without_it(
    make_hosts: Callable[..., Hosts],
) -> None:
    orphan_timeout_s = 8.0
    options = (f"--orphan-timeout={orphan_timeout_s:g}", "--last-call=1")
    hosts = make_hosts(*options, count=2, epochs=40, step_ms=50, wait_for_newcomer_at=[390])
    job, lab = hosts.job, hosts.lab
    cut_from_etcd(lab, "a", "b")
    cut_s = time.monotonic()
    job.open_gate(5)
    hosts.start("c")
    (successor, *_) = job.wait_for("synced", round=2, timeout_s=60)
    assert (successor["world"], successor["step"]) == (1, 0), "nobody of the group is in it: it begins anew"
    last = job.of("committed", round=1)[-1]
    assert cut_s + TTL_S < last["t"] < successor["t"], "two groups at once"
    job.wait_for("committed", round=2)
    for name in ("a", "b"):
        lab.heal(name, ETCD)
    healed_s = time.monotonic()
    job.wait_for("synced", world=3, count=3)
    assert job.of("synced", world=3)[0]["t"] - healed_s < RETURN_S
    assert max(event["step"] for event in job.of("synced", world=3)) >= last["step"] + 1, "what they had done is lost"
    hosts.assert_all_ended_level()


def cut_from_etcd(lab: Lab, one: str, other: str) -> None:
    """Part two hosts from etcd, not from each other."""
    for name in (one, other):
        lab.cut(name, ETCD)
    assert not lab.reaches(one, ETCD, timeout_s=0.2)
    assert not lab.reaches(other, ETCD, timeout_s=0.2)
    assert lab.reaches(one, other)


# --- a bad network ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_on_a_slow_network_that_loses_packets_the_run_ends_as_on_a_good_one(jobs: MakeJob, labs: MakeLab) -> None:
    lab = labs("a", "b", wires=("a", "b"))
    for name in ("a", "b"):
        lab.delay_and_loss(name, 10.0, 0.02)  # from a to b and back: 40 ms, and 8 % of all exchanges lose a packet
    began_s = time.monotonic()
    assert lab.reaches("a", "b", timeout_s=20.0)
    assert time.monotonic() - began_s > 0.04
    job = jobs()
    for name in ("a", "b"):
        job.start(f"--rdzv-endpoint={lab.etcd.endpoint}", f"--rdzv-id={RUN_ID}", "--nnodes=2", nproc=1, host=lab[name])
    assert job.wait() == [0, 0], job.output()[-4000:]
    for name in ("a", "b"):
        passed, lost = lab.delay_and_loss(name, 0.0, 0.0)
        assert passed > 100
        assert lost > 0
    job.check_identity(finishers=2)
    assert set(job.rounds().values()) == {2}
