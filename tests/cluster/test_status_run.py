"""`torchelastic status`, `events` and `top` about a real run on two agents, in which a worker is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import ROOT
from tests.waiting import wait_until
from torchelastic.rendezvous.server import EtcdServer


class Watcher:
    """The commands, about one run."""

    def __init__(self, etcd: EtcdServer, run_id: str) -> None:
        self._run = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}"]

    def start(self, command: str, *options: str, output: Path | None = None) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if k != "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"}
        line = [sys.executable, "-m", "torchelastic.launch", command, *self._run, *options]
        stdout = subprocess.PIPE if output is None else output.open("wb")
        return subprocess.Popen(line, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)

    def ask(self, command: str, *options: str) -> str:
        process = self.start(command, *options)
        said, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
        return said

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.ask("status", "--json"))
        return told


def check_sums(status: dict[str, Any]) -> None:
    """Every worker's accounts sum to its life, and those of the run to all lives."""
    for worker in status["workers"]:
        [host] = [
            host for host in status["hosts"] if worker["worker"].startswith(f"{host['host']}-{host['incarnation']}")
        ]
        alive_s = host["at_s"] - worker["began_s"]
        # a status that was being written while it was asked for counts as written then
        assert abs(sum(worker["amounts_ns"].values()) / 1e9 - alive_s) < 0.5
    seen = status["seen"]
    assert sum(seen["amounts_ns"].values()) == seen["worker_ns"] > 0


@pytest.mark.long
def test_status_shows_the_members_and_events_the_kill_of_a_worker(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, tmp_path: Path
) -> None:
    job, watcher = jobs(gates=[10, 20], wait_for_newcomer_at=[15], full_world=3), Watcher(etcd, run_id)
    at = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--min-workers=1", "--max-workers=3"]
    job.start(*at, "--last-call=60", f"--log-dir={tmp_path / 'logs'}", nproc=2)
    job.start(*at, "--last-call=60", nproc=1)
    job.wait_for("held", count=3, step=10)

    status = watcher.status()
    assert (status["round"]["number"], status["round"]["state"]) == (1, "running")
    assert status["round"]["since_s"] > 0
    assert (status["world_size"], status["step"], status["silent"]) == (3, 10, [])
    assert [member["rank"] for member in status["members"]] == [0, 1, 2]
    assert [(worker["rank"], worker["step"], worker["account"]) for worker in status["workers"]] == [
        (rank, 10, "productive") for rank in range(3)
    ]
    started = {event["pid"] for event in job.of("started")}
    assert {worker["pid"] for worker in status["workers"]} == started
    assert len(status["hosts"]) == 2
    assert status["figures"]["goodput"]["value"] > 0
    check_sums(status)

    output = tmp_path / "events.jsonl"
    following = watcher.start("events", "--follow", "--json", output=output)
    wait_until(lambda: '"kind": "join"' in output.read_text(), 30, "what has happened before is told")
    killed = job.kill_worker(1)
    job.open_gate(10)
    job.wait_for("held", count=3, step=20)
    wait_until(lambda: '"kind": "end"' in output.read_text(), 30, f"the kill is told: {output.read_text()}")
    [end] = [event for event in map(json.loads, output.read_text().splitlines()) if event["kind"] == "end"]
    assert end["text"] == "lost, signal 9: killed by SIGKILL"

    status = watcher.status()
    assert status["seen"]["lost"] == 1
    assert status["seen"]["failures"] == 1
    assert killed not in {worker["pid"] for worker in status["workers"]}
    assert [worker.get("restarts", 0) for worker in status["workers"]].count(1) == 1
    check_sums(status)
    screen = watcher.ask("top")
    assert f"run {run_id}" in screen
    assert "world size 3" in " ".join(screen.split())
    assert "goodput" in screen
    assert "lost, signal 9" in screen

    job.open_gate(20)
    assert job.wait() == [0, 0], job.output()[-4000:]
    assert following.wait(30) == 0, "it ends with the run"
    journals = events_of_journals(tmp_path / "logs")
    assert [event["kind"] for event in journals if event["kind"] == "end"] == ["end"] * 3
    assert watcher.status()["round"]["state"] == "closed"


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [(), pytest.param(("--follow", "--json"), marks=pytest.mark.long)], ids=["once", "following"]
)
def test_events_of_a_run_whose_hosts_have_left_says_where_they_are(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    job, watcher, logs = jobs(epochs=1), Watcher(etcd, run_id), tmp_path / "logs"
    job.start(f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", f"--log-dir={logs}", nproc=1)
    assert job.wait() == [0], job.output()
    process = watcher.start("events", *options)
    said, note = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")
    assert f"no host takes part in run '{run_id}' any more" in note
    assert "give --journal DIR" in note
    assert [event["kind"] for event in events_of_journals(logs)][-1] == "end"


def events_of_journals(folder: Path) -> list[dict[str, Any]]:
    line = [sys.executable, "-m", "torchelastic.launch", "events", "--json", "--journal", str(folder)]
    told = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    return [json.loads(event) for event in told.splitlines()]


PUBLISHES = """
import sys, time
from pathlib import Path
from torchelastic import metrics

metrics.configure(metrics.PrometheusMetricHandler())
while not Path(sys.argv[1]).exists():
    metrics.publish_metric("job", "loss", 0.25)
    time.sleep(0.05)
"""


def test_a_worker_that_is_in_no_group_yet_is_told_with_the_loss_that_it_publishes(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, tmp_path: Path
) -> None:
    job, watcher, gate = jobs(), Watcher(etcd, run_id), tmp_path / "gate"
    script = tmp_path / "publishes.py"
    script.write_text(PUBLISHES)
    job.start_launcher(f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", str(script), str(gate))

    def told() -> dict[str, Any] | None:
        process = watcher.start("status", "--json")
        said, _ = process.communicate(timeout=60)
        status: dict[str, Any] = json.loads(said) if process.returncode == 0 else {"workers": []}
        return status if any(worker["values"] for worker in status["workers"]) else None

    status = wait_until(told, 30, f"the loss is told: {job.output()}")
    [worker] = status["workers"]
    assert (worker["values"], worker["account"], worker["rank"], worker["step"]) == ({"loss": 0.25}, "start_up", -1, -1)
    assert [event["text"] for event in status["events"]] == ["started"]
    check_sums(status)
    gate.touch()
    assert job.wait() == [0], job.output()


@pytest.mark.slow
def test_an_agent_that_is_stopped_becomes_silent_and_the_command_still_ends(
    jobs: MakeJob, etcd: EtcdServer, run_id: str
) -> None:
    job, watcher = jobs(gates=[10]), Watcher(etcd, run_id)
    at = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--min-workers=1", "--max-workers=2"]
    job.start(*at, "--last-call=60", "--ttl=60", nproc=1)
    stopped = job.start(*at, "--last-call=60", "--ttl=60", nproc=1)
    job.wait_for("held", count=2, step=10)
    assert watcher.status()["silent"] == []
    stopped.send_signal(signal.SIGSTOP)
    try:
        status = wait_until(lambda: (told := watcher.status())["silent"] and told, 30, "it is silent")
    finally:
        stopped.send_signal(signal.SIGCONT)
    assert len(status["silent"]) == len(status["hosts"]) == 1
    assert [worker["rank"] for worker in status["workers"]] != []
    job.open_gate(10)
    assert job.wait() == [0, 0], job.output()[-4000:]
