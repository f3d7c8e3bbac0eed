"""Starts a job under one agent, hands out its tickets, kills its workers and reads what they wrote down."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.job import tickets
from benchmarks.job.events import Event, EventReader


@dataclass
class Kill:
    """One SIGKILL; times on the monotonic clock.

    Attributes:
        pid: of the victim.
        rank: of the victim in its last group.
        ranks: of all members of that group, by pid.
        killed_s: just before the signal.
        ended_s: when the kernel has told (pidfd) that the process is gone; infinite until then.
    """

    pid: int
    rank: int
    ranks: dict[int, int]
    killed_s: float = 0.0
    ended_s: float = float("inf")


class Job:
    """One run on this host.

    Args:
        folder: for events and tickets; empty.
        workers: of a full group.
        spares: further processes, which have imported everything and wait for a ticket to join.
        alone: have one worker do the work of all.
        **options: of `benchmarks.job`, in Python's spelling.
    """

    def __init__(self, folder: Path, *, workers: int = 4, spares: int = 0, alone: bool = False, **options: Any) -> None:
        self.folder, self.workers, self.spares = folder, 1 if alone else workers, spares
        self.read = EventReader(folder)
        self._issued = {"import": 0, "join": 0}
        command = [sys.executable, "-m", "torchelastic.launch", "run", "-v", "--standalone", "--max-restarts", "100000"]
        command += ["--nproc-per-node", str(self.workers + spares), "--max-workers", str(self.workers)]
        command += ["-m", "benchmarks.job", "--folder", str(folder), "--workers", str(workers)]
        for name, value in options.items():
            if value is True:
                command.append(f"--{name.replace('_', '-')}")
            elif value is not None and value is not False:
                command.append(f"--{name.replace('_', '-')}={value}")
        environment = {k: v for k, v in os.environ.items() if k != "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"}
        # torch's TCPStore asks DNS for the name of every address that it connects to: a lost answer would cost 5 s
        environment.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        with (folder / "agent.txt").open("wb") as file:
            self.agent = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.agent.poll() is None:
            self.agent.kill()  # its workers and its etcd die with it
            self.agent.wait()

    def allow(self, kind: str, count: int) -> None:
        """Hand out tickets."""
        tickets.issue(self.folder, kind, self._issued[kind], count)
        self._issued[kind] += count

    def wait_until(self, condition: Callable[[], Any], what: str, timeout_s: float = 180.0) -> Any:
        """Wait for a condition; ends the benchmark with the job's last words if it does not come true."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > deadline_s or self.agent.poll() not in (None, 0):
                raise SystemExit(f"not within {timeout_s:g} s: {what}\n{self.last_words()}")
            time.sleep(0.02)

    def last_words(self) -> str:
        return (self.folder / "agent.txt").read_text(errors="replace")[-4000:]

    # --- the group --------------------------------------------------------------------------------

    def start(self) -> None:
        """Form the first full group, with all spares warm."""
        self.warm_up()
        self.allow("join", self.workers)

    def warm_up(self) -> None:
        """Have all processes import, also those that wait before it, and wait until all have."""
        self.allow_imports()
        self.wait_until(lambda: len(self._warm()) >= self.workers + self.spares, "all workers have imported")

    def allow_imports(self) -> None:
        """Have every process import that waits before it."""
        under_way = self._issued["import"] - len(self.read.of("warm"))
        self.allow("import", max(0, self.workers + self.spares - len(self._warm()) - under_way))

    def warm_spares(self) -> int:
        """How many processes wait for a ticket to join."""
        return len(self._warm() - {event["pid"] for event in self.read.of("joins")})

    def wait_full(self, steps: int) -> int:
        """Wait until the newest group is full and every rank has committed so many steps in it; returns its round."""
        return int(self.wait_until(lambda: self.full_group(steps), f"a group of {self.workers}"))

    def full_group(self, steps: int, world: int | None = None) -> int:
        """The newest group's round if it has so many members (default: full) and these steps are done; else 0."""
        world = world or self.workers
        newest = max((event["round"] for event in self.read.of("formed")), default=0)
        done: dict[int, int] = {}
        for event in self.read.of("committed", round=newest, world=world):
            done[event["rank"]] = event["number"] + 1
        return newest if len(done) == world and min(done.values()) >= steps else 0

    def kill(self, rank: int) -> Kill:
        """SIGKILL a member of the newest group; a thread notes when its process is gone."""
        newest = max(event["round"] for event in self.read.of("committed"))
        ranks = {event["pid"]: int(event["rank"]) for event in self.read.of("committed", round=newest)}
        pid = next(pid for pid, number in ranks.items() if number == rank)
        descriptor = os.pidfd_open(pid)
        kill = Kill(pid, rank, ranks)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        ready = threading.Event()

        def watch() -> None:
            ready.set()
            poll.poll()
            kill.ended_s = time.monotonic()
            os.close(descriptor)

        threading.Thread(target=watch, daemon=True).start()
        ready.wait()
        kill.killed_s = time.monotonic()
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return kill

    def wait_recovered(self, kill: Kill) -> list[Event]:
        """One event of each survivor of a kill, in the order in which they committed their next step."""

        def recovered() -> list[Event]:
            events = self.read.of("recovered", since_s=kill.killed_s)
            return events if len({event["pid"] for event in events}) >= self.workers - 1 else []

        events: list[Event] = self.wait_until(recovered, f"a recovery from the loss of rank {kill.rank}", 90)
        self.wait_until(lambda: kill.ended_s < float("inf"), "the end of the killed process")
        return events

    def _warm(self) -> set[int]:
        """Processes that are alive and have imported everything."""
        return {event["pid"] for event in self.read.of("warm") if _is_alive(event["pid"])}


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
