"""Life after life, until the job has finished or may not be started again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from torchelastic.launch.simulation_of_instances.instance import (
    LIFE_VARIABLE,
    Host,
    Instance,
    termination_text,
    write_whole,
)
from torchelastic.launch.simulation_of_instances.keeper import Interrupted
from torchelastic.launch.simulation_of_instances.lives import (
    How,
    Life,
    Limits,
    Verdict,
    describe_exit,
    judge,
    what_next,
)
from torchelastic.launch.simulation_of_instances.process_tree import end_all
from torchelastic.launch.simulation_of_instances.progress_file import MANAGER_FILE, Told
from torchelastic.lifetime.deadline import MLP_VARIABLE
from torchelastic.lifetime.progress_file import PROGRESS_VARIABLE
from torchelastic.lifetime.sources.detection import GRACE_VARIABLE, TERMINATION_FILE_VARIABLE


@dataclass(frozen=True)
class Order:
    """What is simulated.

    Attributes:
        command: for the shell.
        timeout_s: seconds of a life, up to SIGTERM.
        grace_s: seconds from SIGTERM to SIGKILL.
        pause_s: seconds from the end of a life to the next.
        limits: when to give up.
        requeue_codes: see `lives.judge`.
        velastic_dir: where the job has velastic's `manager_state.json`, if it has one.
    """

    command: str
    timeout_s: float
    grace_s: float
    pause_s: float
    limits: Limits
    requeue_codes: tuple[int, ...]
    velastic_dir: Path


@dataclass(frozen=True)
class Outcome:
    """All lives, and why there are no more."""

    lives: tuple[Life, ...]
    verdict: Verdict


def live_on(
    live: Callable[[int], Life],
    limits: Limits,
    *,
    pause_s: float,
    sleep: Callable[[float], None],
    note: Callable[[Outcome], None],
) -> Outcome:
    """Starts life after life. If a signal interrupts one, the lives before it are what is reported.

    Args:
        live: the life with this number (1, 2, ..), from its start to its end.
        limits: when to give up.
        pause_s: between two lives.
        sleep: waits for so many seconds.
        note: called after each life.
    """
    lives: list[Life] = []
    try:
        while True:
            lives.append(live(len(lives) + 1))
            verdict = what_next(lives, limits)
            note(Outcome(tuple(lives), verdict))
            if not verdict.goes_on:
                return Outcome(tuple(lives), verdict)
            if pause_s > 0.0:
                sleep(pause_s)
    except Interrupted as interrupted:
        whole = f"{len(lives)} whole {'life' if len(lives) == 1 else 'lives'}"
        reason = f"interrupted by {describe_exit(-interrupted.number)} after {whole}"
        return Outcome(tuple(lives), Verdict(False, interrupted.exit_code, reason))


class Simulation:
    """The real thing: processes, files and signals. In the inner process, on its main thread.

    Args:
        order: what is simulated.
        environment: the job's, to which ours is added.
        folder: for the files that the job is told of.
        clock: monotonic seconds.
        wall_clock: Unix seconds.
        sleep: waits for so many seconds.
        say: a line for people.
    """

    def __init__(
        self,
        order: Order,
        environment: Mapping[str, str],
        folder: Path,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        sleep: Callable[[float], None],
        say: Callable[[str], None],
    ) -> None:
        self._order, self._say = order, say
        self._environment = {GRACE_VARIABLE: f"{order.grace_s:g}", **environment}  # what the user has said stays
        self._termination_path, self._progress_path = folder / "termination-time", folder / "progress.json"
        self._told = Told(self._progress_path, order.velastic_dir / MANAGER_FILE)
        self._host = Host(clock, wall_clock, sleep, self._say_of_life, self._told.look)
        self._instance = Instance(order.command, order.timeout_s, order.grace_s, self._host)
        self._number = 0

    def run(self, note: Callable[[Outcome], None]) -> Outcome:
        """All lives; nothing of them is left when this returns or raises.

        Raises:
            SurvivorsError: something could not be ended.
            OSError: the job could not be started, or one of our files not be written.
        """
        try:
            pause_s = self._order.pause_s
            return live_on(self._live, self._order.limits, pause_s=pause_s, sleep=self._host.sleep, note=note)
        finally:
            end_all(clock=self._host.clock, sleep=self._host.sleep)

    def _live(self, number: int) -> Life:
        self._number = number
        self._told.begin()
        end_unix_s = self._host.wall_clock() + self._order.timeout_s
        text = termination_text(end_unix_s)
        write_whole(self._termination_path, f"{text}\n")
        self._say_of_life(f"starts, until {datetime.fromtimestamp(end_unix_s).astimezone():%Y-%m-%d %H:%M:%S %z}")
        ending = self._instance.live(
            self._environment
            | {
                MLP_VARIABLE: text,
                TERMINATION_FILE_VARIABLE: str(self._termination_path),
                PROGRESS_VARIABLE: str(self._progress_path),
                LIFE_VARIABLE: str(number),
            }
        )
        told = self._told.progress
        life = Life(judge(ending, told, self._order.requeue_codes), ending, told)
        self._say_of_life(in_words(life))
        if self._told.fault:
            self._say_of_life(f"its progress file is left out: {self._told.fault}")
        return life

    def _say_of_life(self, text: str) -> None:
        self._say(f"life {self._number}: {text}")


def in_words(life: Life) -> str:
    """One line on a life that has ended."""
    ending = life.ending
    parts = [f"{life.how.value} ({describe_exit(ending.exit_code)}) after {ending.used_s:.1f} s"]
    if ending.given_up_s and life.how is not How.FINISHED:
        parts.append(f"{ending.given_up_s:.1f} s given up")
    if ending.killed:
        what = "in the grace" if ending.timed_out else "with the command"
        parts.append(f"SIGKILL to {ending.killed} process{'es' if ending.killed > 1 else ''} that did not end {what}")
    parts += [
        f"{name.replace('_', ' ')} {value}"
        for name, value in dataclasses.asdict(life.told).items()
        if value is not None
    ]
    return ", ".join(parts)
