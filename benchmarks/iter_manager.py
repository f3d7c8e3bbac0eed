"""What a call of `IterManager.iter()` costs the training loop, in a process that is alone.

    python -m benchmarks.iter_manager [--runs 5] [--calls 100000] [--step-ms 0,1,10]

The floor is a call of an empty method. With steps (a sleep each) the calls are timed one by one, so that those that
work out statistics count with their full weight. Prints one JSON line per length of a step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

from benchmarks.environment import print_result, summary
from torchelastic.lifetime import IterManager, nearest, time_limit_s

#: For how long steps with a sleep are measured, in each run.
MEASURED_S = 2.0


class Empty:
    """The floor."""

    def iter(self) -> None:
        """Does nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--step-ms", default="0,1,10")
    options = parser.parse_args()
    for step_ms in map(float, options.step_ms.split(",")):
        calls = options.calls if not step_ms else max(2, int(MEASURED_S * 1e3 / step_ms))
        pairs = [
            (mean_us(Empty().iter, calls, step_ms), mean_us(manager().iter, calls, step_ms))
            for _ in range(options.runs)
        ]
        print_result(
            "iter_manager",
            step_ms=step_ms,
            calls=calls,
            empty_us=summary([floor for floor, _ in pairs]),
            iter_us=summary([ours for _, ours in pairs]),
            added_us=summary([ours - floor for floor, ours in pairs]),
        )


def manager() -> IterManager:
    """One with a deadline that is far away, in a folder of its own."""
    return IterManager(
        velastic_dir=tempfile.mkdtemp(), deadline=nearest([time_limit_s(24 * 3600.0, began_s=time.monotonic())])
    )


def mean_us(call: Callable[[], object], calls: int, step_ms: float) -> float:
    """Microseconds per call."""
    taken_s = 0.0
    if not step_ms:
        began_s = time.perf_counter()
        for _ in range(calls):
            call()
        return 1e6 * (time.perf_counter() - began_s) / calls
    for _ in range(calls):
        time.sleep(step_ms / 1e3)
        began_s = time.perf_counter()
        call()
        taken_s += time.perf_counter() - began_s
    return 1e6 * taken_s / calls


if __name__ == "__main__":
    main()
