"""What the ledger costs: microseconds per step on the training thread, and the agent's share.

    python -m benchmarks.ledger [--steps 100000] [--runs 5]

* step_us: what the training thread pays for each committed step, its counts published to an agent that reads them
  every second meanwhile. Target: 10. `percent_of_20_ms`: of a step of 20 ms. Target: 0.5.
* step_cpu_us: the same in processor time of that thread, which other processes on a busy machine do not add to.
* unpublished_us: step_us without an agent.
* worst_us: the longest single call of the run, which the machine's other work is part of.
* save_us: a save in between, with its event, beyond the save itself.
* poll_us: what the agent pays for one look at one worker, once a second; `journal_us`: for one event, on its thread.
* floor_us: two clock readings and an addition, which nothing that counts time can go below.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.environment import print_result, summary
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.journal import Head, JournalWriter
from torchelastic.observe.ledger.keeper import LedgerKeeper
from torchelastic.observe.ledger.ledger_events import Save
from torchelastic.observe.ledger.meter import Meter

TARGETS = {"step_us": 10, "percent_of_20_ms": 0.5}
STEP_US = 20_000
POLL_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # that events come faster than they are read, here
    with tempfile.TemporaryDirectory() as folder:
        runs = [one_run(Path(folder) / str(number), options.steps) for number in range(options.runs)]
    figures = {name: summary([run[name] for run in runs], 3) for name in runs[0]}
    percent = round(100 * figures["step_us"]["median"] / STEP_US, 4)
    print_result("ledger", steps=options.steps, **figures, percent_of_20_ms=percent, targets=TARGETS)


def one_run(folder: Path, steps: int) -> dict[str, float]:
    """All figures once, in microseconds."""
    folder.mkdir()
    head = Head("benchmark", "host", time.monotonic_ns(), time.time_ns())
    keeper = LedgerKeeper(folder / "agent", "host", JournalWriter(folder / "ledger", "ledger-host-0", head))
    meter, alone = Meter(time.monotonic_ns()), Meter(time.monotonic_ns())
    for one in (meter, alone):
        one.entered(1, 0, 1)
        one.synchronized(0)
    meter.publish(str(folder / "agent"))
    keeper.started(os.getpid(), "0.0")
    over = threading.Event()
    agent = threading.Thread(target=_poll, args=(keeper, over))
    agent.start()
    result = {
        "floor_us": mean_us(_floor, steps),
        "unpublished_us": mean_us(alone.step_committed, steps),
        "step_us": mean_us(meter.step_committed, steps),
        "step_cpu_us": mean_us(meter.step_committed, steps, time.thread_time_ns),
        "worst_us": worst_us(meter.step_committed, steps),
        "save_us": mean_us(lambda: _save(meter), steps // 10),
    }
    over.set()
    agent.join()
    result["poll_us"] = mean_us(keeper.poll, 1_000)
    event, book = Save(at_ns=0, worker="host/0.0", step=1, stall_ns=1), HostLedger()
    journal = JournalWriter(folder / "alone", "ledger-host-1", head)
    result["journal_us"] = mean_us(lambda: journal.write(event, book), 10_000)
    journal.close()
    keeper.close()
    return result


def mean_us(call: Callable[[], object], times: int, clock_ns: Callable[[], int] = time.perf_counter_ns) -> float:
    for _ in range(100):
        call()
    began_ns = clock_ns()
    for _ in range(times):
        call()
    return (clock_ns() - began_ns) / times / 1_000


def worst_us(call: Callable[[], object], times: int) -> float:
    worst_ns = 0
    for _ in range(times):
        began_ns = time.perf_counter_ns()
        call()
        worst_ns = max(worst_ns, time.perf_counter_ns() - began_ns)
    return worst_ns / 1_000


def _floor() -> int:
    return time.monotonic_ns() - time.monotonic_ns()


def _save(meter: Meter) -> None:
    with meter.saving("memory"):
        pass


def _poll(keeper: LedgerKeeper, over: threading.Event) -> None:
    while not over.wait(POLL_S):
        keeper.poll()


if __name__ == "__main__":
    main()
