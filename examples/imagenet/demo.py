"""`make demo`: three workers train a ResNet, one is killed half way, and the run ends as if nothing had happened.

The exit code is 0 only if the final accuracy is reached and no image was lost or trained twice.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from examples.imagenet.audit import SampleLedger, groups_formed, recovery_s, sample_ledger
from examples.imagenet.digits import TRAIN_IMAGES, write_digits
from examples.imagenet.events import Event, EventReader, read_events
from examples.imagenet.options import HANDWRITTEN_DIGITS

REPOSITORY_ROOT = Path(__file__).parents[2]
WANTED_ACCURACY = 0.95
POLL_INTERVAL_S = 0.05
STOP_GRACE_S = 10.0


@dataclass(frozen=True)
class Kill:
    """What was done to which worker.

    Attributes:
        pid: the victim.
        rank: its rank at that moment.
        step: committed steps at that moment.
        at_s: CLOCK_MONOTONIC.
    """

    pid: int
    rank: int
    step: int
    at_s: float


@dataclass(frozen=True)
class Outcome:
    """What the demo found.

    Attributes:
        accuracy: top-1 at the end, 0..1; None if the run did not get there.
        ledger: what the final model was trained on.
        groups: groups that trained, the first one included.
        recovery_s: from the kill to the next committed step; None if there was none.
        rejoined: whether a worker that was started after the kill took part again.
        seconds: of the whole run, start of the interpreters included.
    """

    accuracy: float | None
    ledger: SampleLedger
    groups: int
    recovery_s: float | None
    rejoined: bool
    seconds: float

    def complaints(self, *, wanted_steps: int) -> list[str]:
        """Why this is no success; empty if it is one."""
        found: list[str] = []
        if self.accuracy is None:
            found.append("the run did not end with a report")
        elif self.accuracy < WANTED_ACCURACY:
            found.append(f"accuracy {100 * self.accuracy:.1f} % is below {100 * WANTED_ACCURACY:.0f} %")
        if self.ledger.steps != wanted_steps:
            found.append(f"{self.ledger.steps} steps instead of {wanted_steps}")
        if self.ledger.lost:
            found.append(f"{self.ledger.lost} images lost")
        if self.ledger.repeated:
            found.append(f"{self.ledger.repeated} images trained twice")
        if self.recovery_s is None:
            found.append("no step was committed after the kill")
        return found


def half_way(steps_per_epoch: int, epochs: int) -> int:
    """The middle of the middle epoch: there every worker is inside a step, and not measuring the accuracy."""
    return epochs // 2 * steps_per_epoch + steps_per_epoch // 2


def choose_victim(events: Sequence[Event], *, at_step: int, rank: int | None) -> Event | None:
    """The last commit of the worker to kill, once ``at_step`` steps are committed; None before that.

    Args:
        events: so far, in order of time.
        at_step: committed steps to wait for.
        rank: of the worker in the present group; None is the highest.
    """
    commits = [event for event in events if event.kind == "commit"]
    if not commits or commits[-1].step + 1 < at_step:
        return None
    members = {event.rank: event for event in commits if event.group == commits[-1].group}
    return members.get(max(members) if rank is None else rank)


def command_line(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """What a person would type, spelled out."""
    # fmt: off
    return [
        sys.executable, "-m", "torchelastic.launch", "run",
        "--standalone", "--nnodes", "1", "--nproc-per-node", str(arguments.workers),
        "--min-workers", "1", "--max-restarts", "3", "--log-dir", str(folder / "logs"),
        "-m", "examples.imagenet.main",
        "--data", "digits", "--digits-dir", str(arguments.runs / "digits"), "--epochs", str(arguments.epochs),
        "--seed", str(arguments.seed), "--events-dir", str(folder / "events"),
        "--checkpoint-dir", str(folder / "checkpoints"), "--output", str(folder / "report.json"), "--no-progress",
    ]
    # fmt: on


def worker_environment() -> dict[str, str]:
    """The workers find the repository, and each takes one core: three that take all of them wait for each other."""
    search_path = os.pathsep.join(filter(None, [str(REPOSITORY_ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"}


class Demo:
    """Starts the run, watches its events, kills one worker, and waits for the end.

    Args:
        arguments: the command line.
        console: where to write.
    """

    def __init__(self, arguments: argparse.Namespace, console: Console) -> None:
        self.arguments = arguments
        self.console = console
        self.folder: Path = arguments.runs / datetime.now().strftime("demo-%Y%m%d-%H%M%S")
        steps_per_epoch = math.ceil(TRAIN_IMAGES / HANDWRITTEN_DIGITS.batch_size)
        self.steps = arguments.epochs * steps_per_epoch
        self.kill_at_step = half_way(steps_per_epoch, arguments.epochs)
        self.kill: Kill | None = None
        self.seen: list[Event] = []
        self._groups_shown: set[int] = set()

    def run(self) -> Outcome:
        """The whole run; always leaves no process behind."""
        started_s = time.monotonic()
        write_digits(self.arguments.runs / "digits")
        self.folder.mkdir(parents=True)
        with (self.folder / "launcher.log").open("wb") as log:
            launcher = subprocess.Popen(
                command_line(self.arguments, self.folder),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=worker_environment(),
                start_new_session=True,  # Ctrl-C comes to us; we pass it on once
            )
            try:
                self._watch(launcher, started_s + self.arguments.timeout)
            finally:
                _stop(launcher)
        return self._outcome(launcher.returncode, time.monotonic() - started_s)

    def _watch(self, launcher: subprocess.Popen[bytes], deadline_s: float) -> None:
        reader = EventReader(self.folder / "events")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("starting the workers", total=self.steps)
            while launcher.poll() is None:
                if time.monotonic() > deadline_s:
                    self.console.print(f"[red]not done after {self.arguments.timeout:.0f} s: giving up[/]")
                    return
                for event in reader.poll():
                    self._take(event)
                if self.seen:
                    progress.update(
                        task,
                        description=f"{self.seen[-1].world_size} workers training",
                        completed=max((event.step + 1 for event in self.seen if event.kind == "commit"), default=0),
                    )
                self._kill_half_way()
                time.sleep(POLL_INTERVAL_S)
            for event in reader.poll():
                self._take(event)

    def _take(self, event: Event) -> None:
        self.seen.append(event)
        if event.kind == "formed" and event.group not in self._groups_shown:
            self._groups_shown.add(event.group)
            since_kill = f", {1000 * (event.time_s - self.kill.at_s):.0f} ms after the kill" if self.kill else ""
            self.console.print(f"a group of {event.world_size} is ready at step {event.step}{since_kill}")
        if event.kind == "validated" and event.rank == 0 and event.accuracy is not None:
            self.console.print(f"epoch {event.epoch}: {100 * event.accuracy:.1f} % of the validation images")

    def _kill_half_way(self) -> None:
        if self.kill is not None:
            return
        victim = choose_victim(self.seen, at_step=self.kill_at_step, rank=self.arguments.kill_rank)
        if victim is None:
            return
        os.kill(victim.pid, signal.SIGKILL)
        self.kill = Kill(victim.pid, victim.rank, victim.step + 1, time.monotonic())
        self.console.print(
            f"[bold red]kill -9[/] {victim.pid}: worker {victim.rank} of {victim.world_size}, "
            f"after step {victim.step + 1} of {self.steps}"
        )

    def _outcome(self, exit_code: int, seconds: float) -> Outcome:
        events = read_events(self.folder / "events")
        report = self.folder / "report.json"
        accuracy = json.loads(report.read_text())["top1"] if exit_code == 0 and report.exists() else None
        before = {event.pid for event in events if self.kill is None or event.time_s <= self.kill.at_s}
        return Outcome(
            accuracy=accuracy,
            ledger=sample_ledger(events, images=TRAIN_IMAGES, epochs=self.arguments.epochs),
            groups=len(groups_formed(events)),
            recovery_s=None if self.kill is None else recovery_s(events, self.kill.pid, self.kill.at_s),
            rejoined=any(event.kind == "commit" and event.pid not in before for event in events),
            seconds=seconds,
        )


def result_table(outcome: Outcome) -> Table:
    """The outcome for a person."""
    table = Table(show_header=False)
    accuracy = "-" if outcome.accuracy is None else f"{100 * outcome.accuracy:.1f} %"
    recovery = "-" if outcome.recovery_s is None else f"{1000 * outcome.recovery_s:.0f} ms"
    table.add_row("accuracy on 360 images never trained on", accuracy)
    table.add_row("steps committed", str(outcome.ledger.steps))
    table.add_row("from kill -9 to the next committed step", recovery)
    table.add_row("times the group was formed anew", str(max(outcome.groups - 1, 0)))
    table.add_row("the killed worker's successor took part", "yes" if outcome.rejoined else "no")
    table.add_row("images trained, all epochs", str(outcome.ledger.trained))
    table.add_row("images lost", str(outcome.ledger.lost))
    table.add_row("images trained twice", str(outcome.ledger.repeated))
    table.add_row("time, from nothing to this table", f"{outcome.seconds:.0f} s")
    return table


def write_page(folder: Path) -> Path | None:
    """What every second of the run went to, as a page, by the command that a person would type; None: it failed."""
    page = folder / "report.html"
    words = ["report", str(folder / "logs"), "--loss", str(folder / "events"), "--output", str(page)]
    command = [sys.executable, "-m", "torchelastic.launch", *words]
    done = subprocess.run(command, env=worker_environment(), stdout=subprocess.DEVNULL, check=False)
    return page if done.returncode == 0 else None


def _stop(launcher: subprocess.Popen[bytes]) -> None:
    if launcher.poll() is not None:
        return
    launcher.send_signal(signal.SIGTERM)
    try:
        launcher.wait(STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.imagenet.demo", description=__doc__)
    parser.add_argument("--workers", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--epochs", type=int, default=HANDWRITTEN_DIGITS.epochs, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="[%(default)s]")
    parser.add_argument("--kill-rank", type=int, metavar="RANK", help="whom to kill [the highest rank]")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="data and reports [%(default)s]")
    parser.add_argument("--timeout", type=float, default=235.0, metavar="SECONDS", help="[%(default)s]")
    parsed = parser.parse_args(arguments)
    if parsed.workers < 2:
        parser.error("--workers must be at least 2: one of them is killed")
    if parsed.kill_rank is not None and not 0 <= parsed.kill_rank < parsed.workers:
        parser.error(f"--kill-rank must be between 0 and {parsed.workers - 1}")
    if parsed.epochs < 1:
        parser.error("--epochs must be at least 1")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parsed = _arguments(arguments)
    console = Console(highlight=False)
    demo = Demo(parsed, console)
    console.print(f"{parsed.workers} workers train a ResNet-18 on handwritten digits; one will be killed half way")
    outcome = demo.run()
    console.print(result_table(outcome))
    console.print(
        f"report: {demo.folder / 'report.json'} (beside it the logs and each worker's events)", soft_wrap=True
    )
    page = write_page(demo.folder)
    complaints = outcome.complaints(wanted_steps=demo.steps)
    if page is None:
        complaints.append("no page about where the time went")
    else:
        console.print(f"where every second went: [bold]{page.absolute().as_uri()}[/]", soft_wrap=True)
    for complaint in complaints:
        console.print(f"[red]failed:[/] {complaint}; see {demo.folder / 'launcher.log'}", soft_wrap=True)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
