"""How soon the death of a process is heard of: by its robust lock, and by what the kernel tells its parent.

    python -m benchmarks.death [--runs 7] [--megabytes 0,400]

A process that holds a lock (`torchelastic.processes.death_notice`) and so much memory is killed by SIGKILL; one thread
waits for the lock, another one for the process's pidfd.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import print_result, summary
from torchelastic.processes.death_notice import notice_path, take_notice, wait_for_death

VICTIM = """
import os, sys, time
from torchelastic.processes.death_notice import leave_notice, notice_path
assert leave_notice(notice_path(sys.argv[1], os.getpid()))
memory = bytearray(int(sys.argv[2]) << 20)
for place in range(0, len(memory), 4096):
    memory[place] = 1
print("ready", flush=True)
time.sleep(600)
"""


def kill_one(folder: Path, megabytes: int) -> dict[str, float]:
    """Milliseconds from SIGKILL until the lock, and until the pidfd, tells of it."""
    socket = str(folder / "agent")
    command = [sys.executable, "-c", VICTIM, socket, str(megabytes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    mutex = take_notice(notice_path(socket, process.pid))
    assert mutex is not None
    told_s: dict[str, float] = {}
    descriptor = os.pidfd_open(process.pid)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)

    def by_lock() -> None:
        assert wait_for_death(mutex)
        told_s["lock_ms"] = time.monotonic()

    def by_pidfd() -> None:
        poll.poll()
        told_s["pidfd_ms"] = time.monotonic()

    threads = [threading.Thread(target=target) for target in (by_lock, by_pidfd)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)  # both wait by now
    killed_s = time.monotonic()
    process.kill()
    for thread in threads:
        thread.join()
    process.wait()
    os.close(descriptor)
    return {name: 1000 * (at_s - killed_s) for name, at_s in told_s.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--megabytes", default="0,400")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in map(int, options.megabytes.split(",")):
            kills = [kill_one(Path(folder), megabytes) for _ in range(options.runs)]
            by_name = {name: [kill[name] for kill in kills] for name in kills[0]}
            ratio = statistics.median(by_name["pidfd_ms"]) / statistics.median(by_name["lock_ms"])
            sums = {name: summary(values) for name, values in by_name.items()}
            figures[f"{megabytes}_megabytes"] = {**sums, "pidfd_to_lock": round(ratio, 1)}
    print_result("death", **figures)


if __name__ == "__main__":
    main()
