"""Two hosts on one machine train the imagenet example; one is powered off in mid-run and comes back.

    sudo .venv/bin/python deploy/hosts/two_hosts.py

Each host is a set of network namespaces with its own name and address, etcd is on a third one, and on each host runs
the command of docs/launching.md. Needs root (for the namespaces) and `ip`, `nsenter` and `unshare`; nothing is left
behind however this ends, but for the folder with logs and the report. The exit code is 0 only if no image was lost or
trained twice, and the host that was away has trained before and after.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the example is in the repository, and in no package

from examples.imagenet.digits import TRAIN_IMAGES, write_digits  # noqa: E402 - as above
from examples.imagenet.events import Event, EventReader  # noqa: E402 - as above
from examples.imagenet.options import HANDWRITTEN_DIGITS  # noqa: E402 - as above
from tests.hosts import Lab, why_impossible  # noqa: E402 - as above

HOSTS = ("host-a", "host-b")
#: Committed steps before the power goes, and without the host before it is back.
STEPS_TOGETHER, STEPS_ALONE = 10, 5


class TwoHosts:
    """The run, step by step. Use it in the main thread.

    Args:
        arguments: the command line.
        lab: with both hosts.
        say: tells a person what happens.
    """

    def __init__(self, arguments: argparse.Namespace, lab: Lab, say: Callable[[str], None]) -> None:
        self.arguments, self.lab, self.say = arguments, lab, say
        self.folder: Path = arguments.folder
        self.goes = str(arguments.off)
        (self.stays,) = (name for name in HOSTS if name != self.goes)
        self.deadline_s = time.monotonic() + arguments.timeout
        self.events: list[Event] = []
        self._reader = EventReader(self.folder / "events")

    def run(self) -> list[str]:
        """All of it. Returns what went wrong, in words; empty if nothing did."""
        stays, goes = self.start(self.stays), self.start(self.goes)
        self.wait_until(lambda: self.committed(2) >= STEPS_TOGETHER, "both train", stays, goes)
        self.say(f"{self.goes} is powered off after {self.committed(2)} steps of {self.steps}")
        self.lab.power_off(self.goes)
        goes.wait()
        self.wait_until(lambda: self.committed(1) >= STEPS_ALONE, f"{self.stays} trains alone", stays)
        self.say(f"{self.stays} trains alone; {self.goes} is back, and the same command is started there")
        self.lab.link_up(self.goes)
        behind = self.committed(2)
        goes = self.start(self.goes)
        self.wait_until(lambda: self.committed(2) > behind or stays.poll() is not None, "both train again", goes)
        self.say(f"both train again; {self.last_step} steps of {self.steps} are done")
        codes = [agent.wait(max(1.0, self.deadline_s - time.monotonic())) for agent in (stays, goes)]
        return [*([f"exit codes {codes}"] if any(codes) else []), *self.complaints(behind)]

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return int(self.arguments.epochs) * math.ceil(TRAIN_IMAGES / HANDWRITTEN_DIGITS.batch_size)

    @property
    def last_step(self) -> int:
        """How many steps are committed."""
        return max((event.step + 1 for event in self.seen() if event.kind == "commit"), default=0)

    def command(self, name: str) -> list[str]:
        """What a person types on each of the hosts; only the folder for logs has the host's name in it."""
        # fmt: off
        return [
            sys.executable, "-m", "torchelastic.launch", "run",
            "--rdzv-endpoint", self.lab.etcd.endpoint, "--rdzv-id", "two-hosts", "--nnodes", "1:2",
            "--ttl", "2", "--iface", "10.77.0.0/24", "--log-dir", str(self.folder / name),
            "-m", "examples.imagenet.main", "--data", "digits", "--digits-dir", str(self.arguments.digits),
            "--epochs", str(self.arguments.epochs), "--events-dir", str(self.folder / "events"),
            "--output", str(self.folder / "result.json"), "--no-progress",
        ]
        # fmt: on

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Run the command on a host; its output goes to a file."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        # there is no DNS in the namespaces, and torch asks for the name of each address
        environment.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        with (self.folder / f"{name}.txt").open("ab") as log:
            command = self.lab[name].command(self.command(name))
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)

    def seen(self) -> list[Event]:
        """What the workers have done so far."""
        self.events += self._reader.poll()
        return self.events

    def committed(self, world_size: int) -> int:
        """How many steps groups of this size have committed."""
        return len({(e.group, e.step) for e in self.seen() if e.kind == "commit" and e.world_size == world_size})

    def wait_until(self, condition: Callable[[], bool], what: str, *agents: subprocess.Popen[bytes]) -> None:
        """Wait for a condition. Raises SystemExit if the time is over, or an agent ends before."""
        while not condition():
            if time.monotonic() > self.deadline_s:
                raise SystemExit(f"not within {self.arguments.timeout:g} s: {what}; see {self.folder}/*.txt")
            if any(agent.poll() is not None for agent in agents):
                raise SystemExit(f"an agent has ended before this: {what}; see {self.folder}/*.txt")
            time.sleep(0.05)

    def complaints(self, behind: int) -> list[str]:
        """What is wrong with the result."""
        file = self.folder / "result.json"
        if not file.exists():
            return ["the run did not end with a result"]
        result = json.loads(file.read_text())
        wanted = {"steps": self.steps, "trained": self.arguments.epochs * TRAIN_IMAGES, "lost": 0, "repeated": 0}
        found = [] if result["ledger"] == wanted else [f"the images: {result['ledger']}, not {wanted}"]
        if self.committed(2) == behind:
            found.append(f"{self.goes} has not trained again")
        return found


def report(folder: Path) -> dict[str, Any]:
    """`torchelastic report` over the journals of both hosts: writes the page, and returns the same as values."""
    journals = [str(folder / name) for name in HOSTS]
    command = [sys.executable, "-m", "torchelastic.launch", "report", *journals]
    for more in (["-o", str(folder / "report.html")], ["--json", "-o", str(folder / "report.json")]):
        subprocess.run([*command, *more], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    content: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return content


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - what this program is for


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / time.strftime("two-hosts-%Y%m%d-%H%M%S"))
    parser.add_argument("--digits", type=Path, default=ROOT / "runs" / "digits", help="where the images are")
    parser.add_argument("--epochs", type=int, default=HANDWRITTEN_DIGITS.epochs)
    parser.add_argument("--off", choices=HOSTS, default=HOSTS[1], help="which one is powered off")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S")
    options = parser.parse_args(arguments)
    impossible = why_impossible()
    if impossible:
        _print(f"two_hosts: {impossible}")
        return 1
    options.folder.mkdir(parents=True)
    write_digits(options.digits)
    with Lab(HOSTS) as lab:
        where = ", ".join(f"{name} is {lab[name].address}" for name in HOSTS)
        _print(f"{where}, etcd is {lab.etcd.endpoint}")
        wrong = TwoHosts(options, lab, _print).run()
    for mark in report(options.folder)["marks"]:
        _print(f"the report: {mark['at_ns'] / 1e9:6.1f} s  {mark['text']}")
    for complaint in wrong:
        _print(f"wrong: {complaint}")
    _print(f"{'failed' if wrong else 'done'}: see report.html and host-*.txt in {options.folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
