"""`make test`: the tests of every day, lint and types beside them, and what all of it has cost in CPU seconds.

    python -m tests.daily [OPTIONS] -- [WORDS OF PYTEST]

What lint and types say is shown in one piece each when the tests have ended.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from torchelastic.processes import dies_with_parent

#: Beside the tests; what these find out stays the same whoever runs them.
CHECKS = {
    "lint": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "."],
    "types": ["mypy"],
}
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
#: What tests have left behind ends by itself when its pytest has ended.
_ORPHANS_S = 10.0


def verdict(codes: Mapping[str, int], cpu_s: float, wall_s: float, limit_cpu_s: float | None) -> tuple[int, list[str]]:
    """The exit status and the last lines of a run. Pure.

    Args:
        codes: the exit status of each part, by its name.
        cpu_s: what all of it has cost.
        wall_s: how long it took.
        limit_cpu_s: what it may cost; None: anything.

    >>> verdict({"tests": 0, "types": 0}, 431.4, 250.0, 600.0)
    (0, ['431 CPU seconds in 4:10'])
    >>> verdict({"tests": 0, "types": 1}, 650.2, 250.0, 600.0)
    (1, ['650 CPU seconds in 4:10', 'failed: types (exit status 1)', 'over 600 CPU seconds: mark the dearest as long'])
    """
    failed = [f"{name} (exit status {code})" for name, code in codes.items() if code]
    said = [f"{cpu_s:.0f} CPU seconds in {int(wall_s) // 60}:{int(wall_s) % 60:02d}"]
    said += [f"failed: {', '.join(failed)}"] if failed else []
    is_dear = limit_cpu_s is not None and cpu_s > limit_cpu_s
    said += [f"over {limit_cpu_s:.0f} CPU seconds: mark the dearest as long"] if is_dear else []
    return int(bool(failed) or is_dear), said


class Day:
    """The processes of a run; it adopts what they leave behind, so that nothing is missing from what they cost."""

    def __init__(self) -> None:
        self._running: dict[int, str] = {}
        self.codes: dict[str, int] = {}
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def start(self, name: str, command: Sequence[str], output: IO[bytes] | None = None) -> None:
        stderr = None if output is None else subprocess.STDOUT
        started = subprocess.Popen(dies_with_parent(command), stdout=output, stderr=stderr)
        self._running[started.pid] = name

    def wait(self) -> None:
        """Until all that was started has ended, and for a while for what that has left behind."""
        while self._running:
            pid, status = os.waitpid(-1, 0)
            if pid in self._running:
                self.codes[self._running.pop(pid)] = os.waitstatus_to_exitcode(status)
        until_s = time.monotonic() + _ORPHANS_S
        while time.monotonic() < until_s:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.05)
            except ChildProcessError:
                return


def _cpu_s() -> float:
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.daily")
    parser.add_argument("--limit-cpu-s", type=float, help="fail if the run costs more CPU seconds")
    parser.add_argument("--retry-failed", action="store_true", help="run once more, alone, what has failed")
    parser.add_argument("pytest", nargs="*")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C ends all that run there; this waits
    began_s, day, binaries = time.monotonic(), Day(), Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        outputs = {name: Path(folder, name) for name in CHECKS}
        for name, (program, *words) in CHECKS.items():
            with outputs[name].open("wb") as output:
                day.start(name, [str(binaries / program), *words], output)
        day.start("tests", [sys.executable, "-m", "pytest", *options.pytest])
        day.wait()
        for name, path in outputs.items():
            print(f"--- {name}\n{path.read_text(errors='replace').rstrip()}", flush=True)
    cpu_s, wall_s = _cpu_s(), time.monotonic() - began_s
    if day.codes["tests"] == 1 and options.retry_failed:
        print("--- what has failed, once more", flush=True)
        day.start("tests", [sys.executable, "-m", "pytest", "--last-failed", "--last-failed-no-failures", "none"])
        day.wait()
    status, said = verdict(day.codes, cpu_s, wall_s, options.limit_cpu_s)
    print("\n".join(said), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
