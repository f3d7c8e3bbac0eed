"""Starts a job under one agent, hands out its tickets, kills its workers and reads what they wrote down."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.job import tickets
from benchmarks.job.events import Event, EventReader
from benchmarks.job.processes import end_tree
from torchelastic.processes import dies_with_parent

#: How long anything but a recovery may take: imports on busy cores after restart delays of 30 s, a full group.
WAIT_S = 300.0
#: How long a recovery is waited for. It bounds the run, not the result: one that takes longer is reported as censored.
RECOVERY_LIMIT_S = 900.0


class NotReachedError(SystemExit):
    """The job did not reach a condition; uncaught it ends the benchmark with the reason and the agent's last lines.

    Args:
        reason: what was waited for, and why that ended.
        agent_log: the end of the agent's output.
    """

    def __init__(self, reason: str, agent_log: str) -> None:
        super().__init__(f"{reason}\n{agent_log}")
        self.reason, self.agent_log = reason, agent_log


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

    @property
    def survivors(self) -> list[int]:
        """Pids of the other members of its last group."""
        return [pid for pid in self.ranks if pid != self.pid]


class Job:
    """One run on this host. Its processes end with the `with` block, and also when this process is killed.

    Make it in the main thread, which has to outlive it.

    Args:
        folder: for events, tickets and the agent's output (agent.txt); empty.
        workers: of a full group.
        spares: further processes, which have imported everything and wait for a ticket to join.
        alone: have one worker do the work of all.
        module: the program of the workers.
        **options: of that program, in Python's spelling.
    """

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 4,
        spares: int = 0,
        alone: bool = False,
        module: str = "benchmarks.job",
        **options: Any,
    ) -> None:
        self.folder, self.workers, self.spares = folder, 1 if alone else workers, spares
        self.read = EventReader(folder)
        self._issued = {"import": 0, "join": 0}
        self.agent_log = folder / "agent.txt"
        command = [sys.executable, "-m", "torchelastic.launch", "run", "-v", "--standalone", "--max-restarts", "100000"]
        command += ["--nproc-per-node", str(self.workers + spares), "--max-workers", str(self.workers)]
        command += ["-m", module, "--folder", str(folder), "--workers", str(workers)]
        for name, value in options.items():
            if value is True:
                command.append(f"--{name.replace('_', '-')}")
            elif value is not None and value is not False:
                command.append(f"--{name.replace('_', '-')}={value}")
        environment = {k: v for k, v in os.environ.items() if k != "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"}
        # torch's TCPStore asks DNS for the name of every address that it connects to: a lost answer would cost 5 s
        environment.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        environment["TMPDIR"] = str(folder)  # what is left of an agent that was killed goes with the folder
        with self.agent_log.open("wb") as file:
            # a session of its own: Ctrl-C at the terminal is for the benchmark, which ends the agent
            self.agent = subprocess.Popen(
                dies_with_parent(command),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_tree(self.agent)

    def allow(self, kind: str, count: int) -> None:
        """Hand out tickets."""
        tickets.issue(self.folder, kind, self._issued[kind], count)
        self._issued[kind] += count

    def wait_until(self, condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
        """Wait for a condition to come true, and return its value.

        Args:
            condition: called every 20 ms.
            what: for the message.
            timeout_s: how long to wait.

        Raises:
            NotReachedError: it did not come true in time, or the agent has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            exit_code = self.agent.poll()  # before the condition, which sees all that was done until the end
            value = condition()
            if value:
                return value
            if exit_code is not None:
                raise self.not_reached(f"the agent ended with exit code {exit_code} before: {what}")
            if time.monotonic() > deadline_s:
                raise self.not_reached(f"not within {timeout_s:g} s: {what}")
            time.sleep(0.02)

    def not_reached(self, reason: str) -> NotReachedError:
        """The error for this reason, with the end of the agent's output."""
        return NotReachedError(reason, self.agent_log.read_text(errors="replace")[-4000:])

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
        formed = self.read.of("formed")
        newest = max((event["round"] for event in formed), default=0)
        since_s = next((event["t"] for event in formed if event["round"] == newest), 0.0)
        done: dict[int, int] = {}
        for event in self.read.of("committed", since_s, round=newest, world=world):
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

    def wait_recovered(self, kill: Kill, meanwhile: Callable[[], None] = lambda: None) -> list[Event]:
        """One event of each survivor of a kill, in the order in which they committed their next step.

        A survivor that ends before it has recovered is not waited for.

        Args:
            kill: that has just been made.
            meanwhile: called every 20 ms.

        Raises:
            NotReachedError: the agent or all survivors have ended, or `RECOVERY_LIMIT_S` have passed.
        """
        what = f"a recovery from the loss of rank {kill.rank}"

        def recovered() -> list[Event]:
            meanwhile()
            alive = [pid for pid in kill.survivors if is_alive(pid)]  # before the events, which a dead one has left
            events = recoveries(self.read.of("recovered", since_s=kill.killed_s), kill.survivors, alive)
            if not alive and not events:
                raise self.not_reached(f"all survivors ended before: {what}")
            return events

        events: list[Event] = self.wait_until(recovered, what, RECOVERY_LIMIT_S)
        self.wait_until(lambda: kill.ended_s < float("inf"), "the end of the killed process")
        return events

    def _warm(self) -> set[int]:
        """Processes that are alive and have imported everything."""
        return {event["pid"] for event in self.read.of("warm") if is_alive(event["pid"])}


def recoveries(events: Sequence[Event], survivors: Collection[int], alive: Collection[int]) -> list[Event]:
    """The first event of each survivor, once every survivor that is alive has one; else empty.

    Args:
        events: "recovered" ones since a kill, by time.
        survivors: pids of the group's other members.
        alive: those of them that have not ended.
    """
    first: dict[int, Event] = {}
    for event in events:
        if event["pid"] in survivors:
            first.setdefault(event["pid"], event)
    return list(first.values()) if first.keys() >= set(alive) else []


def is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
