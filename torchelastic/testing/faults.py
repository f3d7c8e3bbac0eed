"""Faults as verbs, keyed to worker, phase and step, for the tests of anything that must survive them.

A plan is made by the test and read by the workers. Each fault happens once in a run (or `times`), whoever restarts, and
leaves a file before it strikes, so that the test can assert that it happened.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        verb: "kill" (SIGKILL), "hang" (SIGSTOP), "spin" (never return, in Python), "raise" (RuntimeError), "crash"
            (ValueError), "exit" (exit code 3), "pause" (sleep for `seconds`), "compute" (be busy in Python for
            `seconds`).
        phase: where the worker says it is, by `FaultPlan.reach`.
        worker: LOCAL_RANK of the one it strikes; None: whoever comes first.
        rank: its rank in the present group; None: any.
        step: committed steps at which it strikes; None: at any.
        incarnation: TORCHELASTIC_RESTART_COUNT of the one it strikes; None: any.
        seconds: for "pause" and "compute".
        times: how often it happens in a run, on all workers together.
    """

    verb: str
    phase: str
    worker: int | None = None
    rank: int | None = None
    step: int | None = None
    incarnation: int | None = 0
    seconds: float = 0.0
    times: int = 1


class FaultPlan:
    """The faults of one run, in a folder that all its workers share.

    Args:
        folder: where the plan is and where struck faults are noted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / "plan.json"
        self._faults = [Fault(**fields) for fields in json.loads(path.read_text())] if path.exists() else []
        self._worker = int(os.environ.get("LOCAL_RANK", "0"))
        self._incarnation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    @classmethod
    def write(cls, folder: Path, faults: Sequence[Fault]) -> FaultPlan:
        """Lay a plan down; for the test, before the run starts."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(json.dumps([asdict(fault) for fault in faults]))
        return cls(folder)

    def reach(self, phase: str, step: int | None = None, rank: int | None = None) -> None:
        """A worker says where it is, and its rank if it has one; strikes if the plan says so."""
        for number, fault in enumerate(self._faults):
            if fault.phase != phase or fault.incarnation not in (None, self._incarnation):
                continue
            if fault.worker not in (None, self._worker) or fault.step not in (None, step):
                continue
            if fault.rank not in (None, rank):
                continue
            if any(self._claim(number, count) for count in range(fault.times)):
                _VERBS[fault.verb](fault)

    def struck(self) -> list[int]:
        """The numbers of the faults that have happened, in the plan's order."""
        names = (path.name.removeprefix("struck-") for path in self._folder.glob("struck-*"))
        return sorted({int(name.partition(".")[0]) for name in names})

    def struck_at_s(self, number: int) -> float:
        """When a fault first struck, on the monotonic clock of this machine."""
        return float((self._folder / f"struck-{number}.0").read_text())

    def _claim(self, number: int, count: int) -> bool:
        name = f"struck-{number}.{count}"
        try:
            descriptor = os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.write(descriptor, str(time.monotonic()).encode())
        os.close(descriptor)
        return True


def _raise_retryable(fault: Fault) -> None:
    raise RuntimeError(f"injected: {fault}")


def _raise_fatal(fault: Fault) -> None:
    raise ValueError(f"injected: {fault}")


def _spin(_fault: Fault) -> None:
    while True:
        time.sleep(0.01)


def _compute(fault: Fault) -> None:
    ends_s = time.monotonic() + fault.seconds
    while time.monotonic() < ends_s:
        sum(number * number for number in range(1000))


_VERBS: dict[str, Callable[[Fault], object]] = {
    "kill": lambda _fault: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda _fault: os.kill(os.getpid(), signal.SIGSTOP),
    "spin": _spin,
    "raise": _raise_retryable,
    "crash": _raise_fatal,
    "exit": lambda _fault: sys.exit(3),
    "compute": _compute,
    "pause": lambda fault: time.sleep(fault.seconds),
}
