"""A stream in real runs: kills at each phase of a step, and random histories; each sample once, and the same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.cluster.harness import Job
from tests.cluster.stream_job import BATCH, EPOCHS, LENGTHS, SAMPLES_PER_SHARD, Shards
from tests.waiting import wait_until
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.testing.faults import Fault

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

HISTORIES = 8
STEPS = EPOCHS * -(-max(LENGTHS) // (BATCH // len(LENGTHS)))


class StreamJob(Job):
    """A run, or several one after the other, of the stream job."""

    module = "tests.cluster.stream_job"

    def run_standalone(self, nproc: int) -> None:
        """Run it to its end on this host alone."""
        self.start("--standalone", nproc=nproc)
        assert self.wait(240) == [0], self.output()[-4000:]  # a killed worker imports torch again

    def final(self) -> torch.Tensor:
        finals = self.final_weights()
        assert finals, self.output()[-3000:]
        for other in finals[1:]:
            assert torch.equal(finals[0], other), "workers end with different weights"
        return finals[0]

    def counted(self) -> dict[int, dict[int, list[int]]]:
        """By epoch and step the samples of those attempts that were committed last."""
        committed: dict[int, tuple[int, int]] = {}
        for event in self.of("committed"):
            attempt = event["run"], event["round"]
            committed[event["step"]] = max(attempt, committed.get(event["step"], (0, 0)))
        assert sorted(committed) == list(range(len(committed))), f"steps committed: {sorted(committed)}"
        drawn: dict[tuple[int, tuple[int, int]], dict[int, Any]] = defaultdict(dict)
        for event in self.of("drawn"):
            drawn[event["step"], (event["run"], event["round"])][event["rank"]] = event
        counted: dict[int, dict[int, list[int]]] = defaultdict(dict)
        for step, attempt in sorted(committed.items()):
            ranks = drawn[step, attempt]
            world = next(iter(ranks.values()))["world"]
            assert sorted(ranks) == list(range(world)), f"step {step}, {attempt}: ranks {sorted(ranks)}"
            numbers = [number for event in ranks.values() for number in event["numbers"]]
            (epoch,) = {event["epoch"] for event in ranks.values()}
            numbers += [number for event in ranks.values() for number in carried(epoch, event["carried"])]
            assert {event["total"] for event in ranks.values()} == {len(numbers)}, f"step {step}"
            if not any(event["carried"] for event in ranks.values()):
                assert all(e["weight"] == len(e["numbers"]) / len(numbers) for e in ranks.values()), f"step {step}"
            counted[epoch][step] = sorted(numbers)
        return counted

    def check(self) -> None:
        """Each epoch's samples have counted once each."""
        everything = [SAMPLES_PER_SHARD * shard + place for shard, n in enumerate(LENGTHS) for place in range(n)]
        counted = self.counted()
        assert sorted(counted) == list(range(EPOCHS))
        for epoch, steps in counted.items():
            assert sorted(number for numbers in steps.values() for number in numbers) == everything, f"epoch {epoch}"
        assert {event["seen"] for event in self.of("finished") if event["rank"] >= 0} == {EPOCHS * len(everything)}


def carried(epoch: int, pieces: Sequence[Sequence[int]]) -> list[int]:
    """The samples whose gradients came from a failed attempt: what the source gives at those places."""
    found = []
    for shard, first, count in pieces:
        samples = list(Shards(placed=False, epoch=epoch)(shard, len(LENGTHS), 0))
        found += [number for number, _, _ in samples[first : first + count]]
    return found


MakeJob = Callable[..., StreamJob]


@pytest.fixture
def stream_jobs(tmp_path: Path) -> Iterator[MakeJob]:
    made: list[StreamJob] = []

    def make(faults: Sequence[Fault] = (), **options: Any) -> StreamJob:
        made.append(StreamJob(tmp_path / f"job-{len(made)}", faults, **options))
        return made[-1]

    yield make
    for job in made:
        job.stop()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> StreamJob:
    """A single worker whom nothing happened."""
    job = StreamJob(tmp_path_factory.mktemp("alone"), step_ms=0)
    job.run_standalone(nproc=1)
    job.check()
    return job


@pytest.mark.parametrize(
    ("phases", "options"),
    [
        (["step", "collective-1", "drawn"], {}),
        (["backward", "optimizer", "tail"], {"positions": "numbers"}),
        (["backward", "drawn"], {"salvage": "recompute", "num_workers": 2}),
        (["read", "sync"], {"salvage": "recompute"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "-".join(map(str, value.values())) or "discard",
)
def test_a_kill_at_each_phase_of_a_step_ends_with_the_bits_of_one_worker(
    stream_jobs: MakeJob, alone: StreamJob, phases: list[str], options: dict[str, Any]
) -> None:
    at = [6, 17, 31]
    faults = [
        # the iterator knows neither step nor rank, and is read while a step is held for a newcomer by nobody
        Fault("kill", phase, worker=number % 3, step=None if phase in ("read", "sync") else step)
        for number, (phase, step) in enumerate(zip(phases, at, strict=False))
    ]
    job = stream_jobs(faults, wait_for_newcomer_at=[12, 25], full_world=3, **options)
    job.run_standalone(nproc=3)
    assert job.plan.struck() == list(range(len(faults))), job.output()[-3000:]
    job.check()
    assert job.counted() == alone.counted(), "the batches do not depend on who is there"
    assert torch.equal(job.final(), alone.final())


def test_samples_of_a_lost_worker_that_are_dropped_come_later_in_the_epoch(stream_jobs: MakeJob) -> None:
    faults = [Fault("kill", "backward", rank=1, step=5)]
    job = stream_jobs(faults, salvage="drop", shards="data only")
    job.run_standalone(nproc=3)
    assert job.plan.struck() == [0]
    job.check()
    assert "count later in the epoch" in job.output()
    assert len(job.counted()[0][5]) == 4, "rank 1 had two of the six"


def test_without_logical_shards_ranks_count_by_their_samples_and_the_idle_ones_not_at_all(
    stream_jobs: MakeJob,
) -> None:
    job = stream_jobs(shards="data only", step_ms=0)
    job.run_standalone(nproc=3)
    job.check()
    ends = [event for event in job.of("drawn") if not event["numbers"]]
    assert ends, "near the end of an epoch a rank had none"
    assert {(event["weight"], event["padding"]) for event in ends} == {(0.0, 2)}


# --- random histories ----------------------------------------------------------------------------------------------


class History:
    """What happens to a run: hosts of one worker each, at gates that all ranks have come to."""

    def __init__(self, seed: int, make: MakeJob, etcd: EtcdServer, run_id: str, folder: Path) -> None:
        self.random = random.Random(seed)
        self.gates = sorted(self.random.sample(range(1, STEPS - 2), 5))
        self.options: dict[str, Any] = {
            "salvage": self.random.choice(["discard", "recompute"]),
            "positions": self.random.choice(["places", "numbers"]),
            "num_workers": self.random.choice([0, 0, 2]),
        }
        self.job = make(gates=self.gates, checkpoint_dir=folder / "checkpoints", step_ms=10, **self.options)
        self.run, self.etcd, self.run_id = 0, etcd, run_id
        self.hosts: list[subprocess.Popen[bytes]] = []
        self.killed: set[int] = set()
        self.told = [f"seed {seed}", str(self.options), f"gates {self.gates}"]

    def start_host(self) -> None:
        self.hosts.append(
            self.job.start(
                f"--rdzv-endpoint={self.etcd.endpoint}", f"--rdzv-id={self.run_id}-{self.run}", "--nnodes=1:4",
                "--last-call=0.3", nproc=1,
            )
        )  # fmt: skip

    def start_hosts(self, count: int) -> None:
        known = {event["pid"] for event in self.job.of("asking")}
        for _ in range(count):
            self.start_host()
        wait_until(lambda: len({e["pid"] for e in self.job.of("asking")} - known) >= count, 90, "newcomers have asked")

    def happen(self, gate: int) -> None:
        """One thing, just after this gate is opened, or just before."""
        self.job.wait_for("held", step=gate, run=self.run, timeout_s=90)
        possible = ["join"] if len(self.hosts) < 4 else []
        possible += ["stop"] if self.run == 0 else []
        possible += ["kill worker", "kill host", "drain"] if len(self.hosts) > 1 else ["kill worker"]
        what = self.random.choice(possible)
        host = self.random.randrange(len(self.hosts))
        delay_s = self.random.random() * 0.15
        self.told.append(f"gate {gate}: {what} (host {host} of {len(self.hosts)}) after {delay_s:.3f} s")
        if what == "join":
            self.start_hosts(1)
        self.job.open_gate(gate)
        time.sleep(delay_s)
        if what == "kill worker":
            self.kill_worker(self.hosts[host])
        elif what == "kill host":
            self.hosts.pop(host).kill()
        elif what == "drain":
            self.hosts.pop(host).send_signal(signal.SIGTERM)
        elif what == "stop":
            for each in self.hosts:
                each.kill()
                each.wait()
            self.run += 1
            self.job.job_options["run"] = self.run
            self.hosts = []
            count = self.random.randint(1, 4)
            self.told.append(f"resume with {count}")
            self.start_hosts(count)

    def kill_worker(self, host: subprocess.Popen[bytes]) -> None:
        """The one that runs on this host, or that comes in its place if it was killed just before."""

        def alive() -> list[int]:
            if host.poll() is not None:
                return []
            here = {child.pid for child in psutil.Process(host.pid).children(recursive=True)} - self.killed
            return [event["pid"] for event in self.job.of("started") if event["pid"] in here]

        wait_until(lambda: alive() or host.poll() is not None, 90, "a worker to kill")
        if not alive():
            assert self.job.of("finished", run=self.run), "nobody was there to be killed, and the run was not over"
        for pid in alive()[-1:]:
            self.killed.add(pid)
            os.kill(pid, signal.SIGKILL)

    def play(self) -> None:
        self.start_hosts(self.random.randint(1, 4))
        for gate in self.gates:
            self.happen(gate)
        codes = [host.wait(120) for host in self.hosts]
        assert codes == [0] * len(codes), self.job.output()[-4000:]
        groups = {(event["run"], event["round"]) for event in self.job.of("drawn")}
        assert len(groups) > 1, "nothing that has happened disturbed the run"
        self.job.check()


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed < 4 else pytest.mark.slow) for seed in range(HISTORIES)]
)
def test_a_random_history_counts_each_sample_once_and_ends_with_the_bits_of_one_worker(
    stream_jobs: MakeJob, alone: StreamJob, etcd: EtcdServer, run_id: str, tmp_path: Path, seed: int
) -> None:
    history = History(seed, stream_jobs, etcd, run_id, tmp_path)
    try:
        history.play()
        assert history.job.counted() == alone.counted(), "the batches do not depend on who is there"
        assert torch.equal(history.job.final(), alone.final())
    finally:
        print("\n".join(history.told))
