"""Starts elastic jobs as real processes, and reads what they did: the verbs and the assertions of the cluster tests."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from tests.cluster.elastic_job import make_dataset, make_model
from tests.cluster.forked_workers import server_address
from tests.hosts import Host
from tests.waiting import wait_until
from torchelastic.data import ElasticBatchSampler
from torchelastic.data.order import epoch_order
from torchelastic.processes import dies_with_parent
from torchelastic.rendezvous.records import Keys
from torchelastic.rendezvous.url import DEFAULT_PREFIX
from torchelastic.testing.faults import Fault, FaultPlan

if TYPE_CHECKING:
    from typing_extensions import Self

JOB = Path(__file__).with_name("elastic_job.py")
ROOT = Path(__file__).parents[2]

Event = dict[str, Any]


class Job:
    """One run, possibly of several hosts (agents) that share `folder`."""

    script = JOB
    #: In place of the script: for a job that imports parts of others, started in the checkout.
    module: str | None = None
    #: What the jobs compute on: see the option `--device` of pytest.
    device = "cpu"
    #: Whether a server forks the workers, which costs a tenth of starting them: see `forked_workers`, and the option
    #: `--forked-workers` of pytest. What users do, and what CI does with all that is long, is to start them.
    forked = False

    def __init__(self, folder: Path, faults: Sequence[Fault] = (), **job_options: Any) -> None:
        self.folder = folder
        self.plan = FaultPlan.write(folder, faults)
        self.job_options = job_options
        self.agents: list[subprocess.Popen[bytes]] = []

    # --- verbs ------------------------------------------------------------------------------------

    def start(
        self, *launcher: str, nproc: int = 3, host: Host | None = None, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start one agent with its workers, on a host of a lab or here; its output goes to a file in the folder."""
        number = len(self.agents)
        command = [*self._launcher(), "-v", f"--nproc-per-node={nproc}", *launcher]
        command += [*self._program(), *self.job_arguments()]
        if host is not None:
            command = host.command(command)
        self.agents.append(self._popen(command, f"agent-{number}.txt", environment))
        return self.agents[-1]

    def start_alone(
        self, init_method: str, name: str, host: Host | None = None, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start one worker without the launcher, on a host of a lab or here."""
        command = [sys.executable, *self._program(), *self.job_arguments(), f"--init-method={init_method}"]
        if host is not None:
            command = host.command(command)
        self.agents.append(self._popen(command, f"{name}.txt", environment))
        return self.agents[-1]

    def _launcher(self) -> list[str]:
        """`torchelastic run`, the real one or the one that differs in how its workers are started alone."""
        if not self.forked or self.device != "cpu":
            return [sys.executable, "-m", "torchelastic.launch", "run"]
        return [sys.executable, "-m", "tests.cluster.forking_launcher", server_address(), "run"]

    def _program(self) -> list[str]:
        return [str(self.script)] if self.module is None else ["-m", self.module]

    def job_arguments(self) -> list[str]:
        options = {"out": self.folder, **self.job_options}
        if self.device != "cpu":
            options["device"] = self.device
        named = {name.replace("_", "-"): value for name, value in options.items()}
        arguments: list[str] = []
        for name, value in named.items():
            if isinstance(value, (list, tuple)):
                arguments += [f"--{name}", *map(str, value)]
            else:
                arguments.append(f"--{name}" if value is True else f"--{name}={value}")
        return arguments

    def start_launcher(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start one agent with exactly these arguments, job or none."""
        command = [*self._launcher(), *arguments]
        self.agents.append(self._popen(command, f"agent-{len(self.agents)}.txt", environment))
        return self.agents[-1]

    def page(self) -> tuple[str, str]:
        """Where the newest agent's live page is, and the token that opens it."""
        said = r"live page: (\S+) \(its token is in (.+)\)"
        url, file = wait_until(lambda: re.findall(said, self.output()), 30, "the page's address is printed")[-1]
        return url, Path(file).read_text().strip()

    def open_gate(self, step: int) -> None:
        """Let the workers go on that wait in a step of the job's option `gates`."""
        (self.folder / f"gate-{step}").touch()

    def kill_worker(self, worker: int, number: int = signal.SIGKILL) -> int:
        """Signal the present process of a worker; returns its pid."""
        pid = int(self.of("started", worker=worker)[-1]["pid"])
        os.kill(pid, number)
        return pid

    def wait(self, timeout_s: float = 150.0) -> list[int]:
        """Wait for all agents; returns their exit codes. On failure the output says why."""
        codes = []
        for agent in self.agents:
            try:
                codes.append(agent.wait(timeout_s))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"did not end within {timeout_s:g} s:\n{self.output()[-6000:]}") from None
        return codes

    @classmethod
    def finished(
        cls, folder: Path, faults: Sequence[Fault], *launcher: str, nproc: int = 3, **job_options: Any
    ) -> Self:
        """A job of one host that has run to its end, with exit code 0, and in which every fault has struck."""
        job = cls(folder, faults, **job_options)
        try:
            job.start("--standalone", *launcher, nproc=nproc)
            assert job.wait() == [0], job.output()[-6000:]
        finally:
            job.stop()
        assert job.plan.struck() == list(range(len(faults))), f"not every fault struck:\n{job.output()[-3000:]}"
        return job

    def stop(self) -> None:
        """End whatever is left; for the end of a test."""
        for agent in self.agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGKILL)  # its workers and its etcd die with it
                agent.wait()

    def _popen(self, command: list[str], log: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        variables = {key: value for key, value in os.environ.items() if key != "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"}
        # torch's TCPStore asks DNS for the name of every address that it connects to, and waits
        variables.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        with (self.folder / log).open("wb") as file:
            return subprocess.Popen(
                dies_with_parent(command),
                stdout=file, stderr=subprocess.STDOUT, env={**variables, **environment}, cwd=ROOT,
            )  # fmt: skip

    # --- what happened ----------------------------------------------------------------------------

    def output_of(self, number: int) -> str:
        """What one agent and its workers have written so far."""
        return (self.folder / f"agent-{number}.txt").read_text(errors="replace")

    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.txt")))

    def events(self) -> list[Event]:
        """All events of all processes, by time; a line that is not complete yet is left out."""
        events: list[Event] = []
        for path in self.folder.glob("events-*.jsonl"):
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    events.append(json.loads(line))
        return sorted(events, key=lambda event: float(event["t"]))

    def of(self, event: str, **fields: Any) -> list[Event]:
        return [e for e in self.events() if e["e"] == event and all(e.get(k) == v for k, v in fields.items())]

    def wait_for_step(self, step: int, timeout_s: float = 60.0) -> None:
        def reached() -> bool:
            return any(event["step"] >= step for event in self.of("committed"))

        wait_until(reached, timeout_s, f"step {step} committed; {self.output()[-3000:]}")

    def wait_for(self, event: str, count: int = 1, timeout_s: float = 60.0, **fields: Any) -> list[Event]:
        found: list[Event] = wait_until(
            lambda: (lambda events: events if len(events) >= count else None)(self.of(event, **fields)),
            timeout_s,
            f"{count} x {event} {fields}; {self.output()[-3000:]}",
        )
        return found

    def rounds(self) -> dict[int, int]:
        """The world size of each round in which somebody was synchronized, by number."""
        return {event["round"]: event["world"] for event in sorted(self.of("synced"), key=lambda e: int(e["round"]))}

    # --- identity ---------------------------------------------------------------------------------

    def final_weights(self) -> list[torch.Tensor]:
        paths = sorted(self.folder.glob("weights-*.pt"))
        return [torch.load(path, weights_only=True) for path in paths]

    def check_identity(self, finishers: int | None = None) -> torch.Tensor:
        """Every finisher ends with the same weights, those of an undisturbed run.

        Every index of an epoch counts once.
        """
        finals = self.final_weights()
        assert finals, self.output()[-3000:]
        if finishers is not None:
            assert len(finals) == finishers, f"{len(finals)} of {finishers} have ended: {self.output()[-3000:]}"
        for other in finals[1:]:
            assert torch.equal(finals[0], other), "workers end with different weights"
        are_others = self.job_options.get("dropout") or self.job_options.get("batchnorm")
        if not are_others and self.job_options.get("salvage") != "drop":
            # with those no other split of the batch has the same numbers; drop changes the batches
            torch.testing.assert_close(finals[0], self.reference_weights(), rtol=1e-9, atol=1e-12)
        self.check_ledger()
        assert {tuple(event["foreign"]) for event in self.of("finished")} == {()}, (
            "a trainer imported the agent's modules"
        )
        return finals[0]

    def check_ledger(self) -> None:
        """What was drawn for each step in the round that committed it last is exactly that step's global batch."""
        if self.job_options.get("salvage") == "drop":
            self.check_each_sample_once()
            return
        sampler = self._sampler()
        steps = sampler.batches_per_epoch * sampler.epochs
        committed: dict[int, int] = {}
        for event in self.of("committed"):
            committed[event["step"]] = max(event["round"], committed.get(event["step"], 0))
        assert sorted(committed) == list(range(steps)), f"steps committed: {sorted(committed)}"
        drawn: dict[tuple[int, int], dict[int, Event]] = defaultdict(dict)
        for event in self.of("drawn"):
            drawn[event["step"], event["round"]][event["rank"]] = event
        for step, round_number in committed.items():
            shares = drawn[step, round_number]
            world = next(iter(shares.values()))["world"]
            assert sorted(shares) == list(range(world)), f"step {step}, round {round_number}: ranks {sorted(shares)}"
            epoch, number = divmod(step, sampler.batches_per_epoch)
            assert {(share["epoch"], share["number"]) for share in shares.values()} == {(epoch, number)}
            indices = [index for rank in range(world) for index in shares[rank]["indices"] + shares[rank]["carried"]]
            expected = batch_indices(sampler, epoch, number)
            if any(share["carried"] for share in shares.values()):  # who computes the rest depends on who was lost
                indices, expected = sorted(indices), sorted(expected)
            assert indices == expected, f"step {step}: samples lost or repeated"

    def check_each_sample_once(self) -> None:
        """Whatever the batches were: each epoch's indices have counted once each, in steps without a gap."""
        sampler = self._sampler()
        committed: dict[int, int] = {}
        for event in self.of("committed"):
            committed[event["step"]] = max(event["round"], committed.get(event["step"], 0))
        assert sorted(committed) == list(range(len(committed))), f"steps committed: {sorted(committed)}"
        counted: dict[int, list[int]] = defaultdict(list)
        for event in self.of("drawn"):
            if committed.get(event["step"]) == event["round"]:
                counted[event["epoch"]] += event["indices"] + event["carried"]
        assert {epoch: sorted(indices) for epoch, indices in counted.items()} == {
            epoch: list(range(sampler.dataset_size)) for epoch in range(sampler.epochs)
        }, "samples lost or repeated"

    def reference_weights(self) -> torch.Tensor:
        """One process, no elasticity, the same global batches; the source of a first round is its rank 0."""
        first = min(self.of("synced", rank=0), key=lambda event: float(event["t"]))
        model = make_model(int(self.job_options.get("seed", first["worker"] + 2)), 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        sampler = self._sampler()
        inputs, targets = make_dataset(sampler.dataset_size).tensors
        for epoch in range(sampler.epochs):
            for number in range(sampler.batches_per_epoch):
                chosen = batch_indices(sampler, epoch, number)
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs[chosen]), targets[chosen])
                loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
                optimizer.step()
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

    def _sampler(self) -> ElasticBatchSampler:
        samples, batch = int(self.job_options.get("samples", 120)), int(self.job_options.get("batch", 12))
        return ElasticBatchSampler(samples, batch, epochs=int(self.job_options.get("epochs", 4)), seed=3)


def process_tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def resume(pids: Iterable[int]) -> float:
    """SIGCONT these processes, which must still be stopped; returns the time."""
    for pid in pids:
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED, f"{pid} was not stopped all the time"
        os.kill(pid, signal.SIGCONT)
    return time.monotonic()


@dataclass(frozen=True)
class Stored:
    """A key as the store holds it, or held it."""

    key: str
    value: str
    create_revision: int
    mod_revision: int


class RunRecords:
    """What stands in etcd under a run's prefix, and what stood there: read over HTTP, beside the product's own client.

    Args:
        endpoint: HOST:PORT of etcd.
        run_id: the run's name.
        enter: to be done around each request, as `Host.entered`; for an etcd in a lab.
    """

    def __init__(
        self, endpoint: str, run_id: str, enter: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.keys = Keys(f"{DEFAULT_PREFIX}/{run_id}")
        self._url, self._enter = f"http://{endpoint}/v3/kv/range", enter

    def members(self) -> list[str]:
        """The ids of the members that are registered at this moment."""
        stored, _ = self._range(self.keys.members, self.keys.members[:-1] + chr(ord("/") + 1))
        return [one.key.removeprefix(self.keys.members) for one in stored]

    def leader(self) -> str:
        """The agent that leads at this moment, empty if none does."""
        stored, _ = self._range(self.keys.leader)
        return stored[0].value if stored else ""

    def revision(self) -> int:
        """The store's present revision."""
        return self._range(self.keys.leader)[1]

    def history(self, key: str, since: int = 1) -> list[Stored]:
        """Every value that a key has had from a revision on, oldest first; none from before a compaction of the store.

        Another test may have compacted a store that tests share, before this run began.
        """
        found: list[Stored] = []
        revision = now = self.revision()
        while revision >= max(since, 1):
            try:
                stored, _ = self._range(key, revision=revision)
            except urllib.error.HTTPError as error:
                if revision == now or error.code != 400:
                    raise
                break
            found += stored
            revision = (stored[0].mod_revision if stored else revision) - 1
        return [one for one in reversed(found) if one.mod_revision >= since]

    def rounds(self, since: int = 1) -> list[tuple[int, str]]:
        """Number and state of every round that was written from a revision on."""
        documents = (json.loads(one.value) for one in self.history(self.keys.round, since))
        return [(document["number"], document["state"]) for document in documents]

    def terms(self, since: int = 1) -> list[Stored]:
        """Who has led from a revision on, until the run was closed (whoever is last to leave may lead once more)."""
        closed = [one for one in self.history(self.keys.round, since) if json.loads(one.value)["state"] == "closed"]
        until = closed[0].mod_revision if closed else self.revision()
        return [one for one in self.history(self.keys.leader, since) if one.create_revision <= until]

    def _range(self, key: str, end: str = "", revision: int = 0) -> tuple[list[Stored], int]:
        question = {"key": _base64(key), "range_end": _base64(end), "revision": revision}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a web proxy
        with self._enter(), opener.open(self._url, json.dumps(question).encode(), timeout=5) as answer:
            document = json.load(answer)
        stored = [
            Stored(
                base64.b64decode(kv["key"]).decode(),
                base64.b64decode(kv["value"]).decode(),
                int(kv["create_revision"]),
                int(kv["mod_revision"]),
            )
            for kv in document.get("kvs", ())
        ]
        return stored, int(document["header"]["revision"])


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def rounds_published(output: str) -> list[tuple[int, str]]:
    """Number and state of every round that an agent says to have written, from its output."""
    return [(int(number), state) for number, state in re.findall(r"round (\d+) is (\w+): ", output)]


def run_standalone(job: Job, *launcher: str, nproc: int = 3) -> Job:
    """Run a job to its end on this host alone; the launcher must say that it was completed."""
    job.start("--standalone", *launcher, nproc=nproc)
    assert job.wait() == [0], job.output()[-4000:]
    return job


def batch_indices(sampler: ElasticBatchSampler, epoch: int, number: int) -> list[int]:
    """The dataset indices of one global batch, in order."""
    order = epoch_order(sampler.dataset_size, sampler.seed, epoch, shuffle=True).tolist()
    return list(order[number * sampler.global_batch_size : (number + 1) * sampler.global_batch_size])
