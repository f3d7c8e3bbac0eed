"""The same model and the same kill under torchrun and torchft, each as its own documentation sets it up.

* torchrun, restart: one agent, four workers, `--max-restarts`; one worker is killed, all are started again from a
  checkpoint. With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which some restarts never come to an end.
* torchrun, shrink: four agents with `--nnodes 3:4`; one agent and its worker are killed, three go on.
* torchft: a lighthouse and four replicas of one process; one is killed, three go on.

Measured alike: from the signal until the last member of the next group has committed a step.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.environment import summary
from benchmarks.job.events import EventReader
from benchmarks.job.processes import end_tree

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0
WARM_STEPS = 15


def measure_peers(options: argparse.Namespace, ours_ms: float) -> dict[str, Any]:
    """All peers that were asked for; where one cannot be measured, why."""
    python = options.peers_python or Path(sys.executable)
    results: dict[str, Any] = {}
    for name in options.peers.split(","):
        for way, measure in WAYS[name].items():
            if not has_module(python, name):
                results[way] = {
                    "not_measured": f"{python} has no {name}: python -m venv FOLDER && FOLDER/bin/pip install "
                    "torch==2.13.0 torchft (a CPU build of torch), then --peers-python FOLDER/bin/python"
                }
                continue
            times_ms, why = measured_ms(measure, python, options)
            results[way] = {"kill_to_committed_ms": summary(times_ms)} if times_ms else {}
            if times_ms:
                results[way]["times_ours"] = round(summary(times_ms)["median"] / ours_ms, 1)
            if why:
                results[way]["gave_up"] = why
    return results


def has_module(python: Path, name: str) -> bool:
    module = {"torchrun": "torch.distributed.run"}.get(name, name)
    return subprocess.run([str(python), "-c", f"import {module}"], capture_output=True).returncode == 0


def measured_ms(
    measure: Callable[[Peer], Iterator[float]], python: Path, options: argparse.Namespace
) -> tuple[list[float], str]:
    """From kill to committed, `options.peer_runs` times, and why there are fewer (empty: there are not).

    Args:
        measure: yields one time after the other; it is begun again, with a new peer, where it has no more.
        python: the interpreter of the peer's processes.
        options: model, step_ms, workers and peer_runs.
    """
    times_ms: list[float] = []
    while len(times_ms) < options.peer_runs:
        before = len(times_ms)
        with tempfile.TemporaryDirectory() as folder, Peer(Path(folder), python, options) as peer:
            try:
                for time_ms in measure(peer):
                    times_ms.append(time_ms)
                    if len(times_ms) == options.peer_runs:
                        break
            except TimeoutError as error:
                return times_ms, str(error)
        assert len(times_ms) > before
    return times_ms, ""


class Peer:
    """Processes of one job of a peer, and what its workers wrote down."""

    def __init__(self, folder: Path, python: Path, options: argparse.Namespace) -> None:
        self.folder, self.python, self.workers = folder, python, int(options.workers)
        self.arguments = [str(folder), options.model, str(options.step_ms)]
        self.read = EventReader(folder)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            end_tree(process)

    def start(self, *command: str | Path, **environment: str) -> subprocess.Popen[bytes]:
        variables = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        variables |= {"PYTHONPATH": str(ROOT), **environment}
        with (self.folder / f"output-{len(self._processes)}.txt").open("wb") as file:
            process = subprocess.Popen(
                list(map(str, command)), stdout=file, stderr=subprocess.STDOUT, env=variables, cwd=self.folder
            )
        self._processes.append(process)
        return process

    def wait_for_steps(self, members: int, steps: int, since_s: float, world: int, but: set[int]) -> float:
        """Wait until so many processes have committed so many steps in a world of this size; when the last one has.

        Args:
            members: processes.
            steps: of each.
            since_s: from then on.
            world: as the steps themselves say it.
            but: pids that do not count.

        Raises:
            TimeoutError: not within `LIMIT_S`.
        """
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            times: dict[int, list[float]] = {}
            for event in self.read.of("committed", since_s=since_s, world=world):
                if event["pid"] not in but:
                    times.setdefault(event["pid"], []).append(event["t"])
            done = [own[steps - 1] for own in times.values() if len(own) >= steps]
            if len(done) >= members:
                return max(done)
            time.sleep(0.02)
        raise TimeoutError(f"no step of {members} members in a world of {world} within {LIMIT_S:g} s")

    def pids(self) -> set[int]:
        return {event["pid"] for event in self.read.of("committed")}


def restart(peer: Peer, module: str = "benchmarks.recovery.peer_torchrun") -> Iterator[float]:
    """torchrun, one agent: kills rank 0, 1, .. in turn.

    Args:
        peer: whose arguments the workers get.
        module: the program of the workers.
    """
    torchrun: list[str | Path] = [
        peer.python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(peer.workers),
    ]
    torchrun += ["--max-restarts", "1000", "-m", module, *peer.arguments]
    peer.start(*torchrun, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    killed_s, before, number = 0.0, set[int](), 0
    while True:
        peer.wait_for_steps(peer.workers, WARM_STEPS, killed_s, peer.workers, before)
        newest = [event for event in peer.read.of("committed", since_s=killed_s) if event["pid"] not in before]
        victim = next(event["pid"] for event in newest if event["rank"] == number % peer.workers)
        before, number = peer.pids(), number + 1
        killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        yield 1000 * (peer.wait_for_steps(peer.workers, 1, killed_s, peer.workers, before) - killed_s)


def _shrink(peer: Peer) -> Iterator[float]:
    """torchrun, one agent for each worker: the last one is lost with its worker."""
    with free_port() as port:
        pass
    agents = []
    for number in range(peer.workers):
        torchrun: list[str | Path] = [
            peer.python,
            "-m",
            "torch.distributed.run",
            f"--nnodes={peer.workers - 1}:{peer.workers}",
        ]
        torchrun += ["--nproc-per-node=1", "--max-restarts=10", "--rdzv-backend=c10d", "--rdzv-id=peers"]
        torchrun += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
        torchrun += [f"--rdzv-conf=is_host={str(number == 0).lower()}", "-m", "benchmarks.recovery.peer_torchrun"]
        agents.append(peer.start(*torchrun, *peer.arguments, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"))
    peer.wait_for_steps(peer.workers, WARM_STEPS, 0.0, peer.workers, set())
    before = peer.pids()
    killed_s = time.monotonic()
    end_tree(agents[-1])
    yield 1000 * (peer.wait_for_steps(peer.workers - 1, 1, killed_s, peer.workers - 1, before) - killed_s)


def _torchft(peer: Peer) -> Iterator[float]:
    """As many replicas as workers, of one process each."""

    def commands(name: str) -> list[list[str | Path]]:
        return [[peer.python, "-m", "benchmarks.recovery.peer_torchft", *peer.arguments, name]]

    yield from lose_replicas(peer, peer.workers, commands)


def lose_replicas(peer: Peer, replicas: int, commands: Callable[[str], list[list[str | Path]]]) -> Iterator[float]:
    """torchft: a replica is killed; then another one comes, and the one that has lived longest is killed next.

    Args:
        peer: whose processes these are.
        replicas: at a time.
        commands: the processes of a replica, given its name.
    """
    with free_port() as port:
        pass
    lighthouse: list[str | Path] = [
        peer.python.with_name("torchft_lighthouse"),
        "--bind",
        f"127.0.0.1:{port}",
        "--min_replicas",
        "1",
    ]
    lighthouse += ["--join_timeout_ms", "10000"]
    peer.start(*lighthouse)
    numbers = iter(range(1000))

    def start_replica() -> list[subprocess.Popen[bytes]]:
        environment = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
        return [peer.start(*command, **environment) for command in commands(f"replica-{next(numbers)}")]

    started = [start_replica() for _ in range(replicas)]
    size = len(started[0])
    began_s = 0.0
    while True:
        peer.wait_for_steps(replicas * size, WARM_STEPS, began_s, replicas, set())
        killed_s = time.monotonic()
        victims = started.pop(0)
        for victim in victims:
            end_tree(victim)
        dead = {victim.pid for victim in victims}
        left = replicas - 1
        yield 1000 * (peer.wait_for_steps(left * size, 1, killed_s, left, dead) - killed_s)
        started.append(start_replica())
        began_s = time.monotonic()


@contextmanager
def free_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


WAYS: dict[str, dict[str, Callable[[Peer], Iterator[float]]]] = {
    "torchrun": {"torchrun_restart": restart, "torchrun_shrink": _shrink},
    "torchft": {"torchft": _torchft},
}
