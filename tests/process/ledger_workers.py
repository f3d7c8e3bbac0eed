"""Processes for the ledger's tests: workers that count without torch, and a writer of a journal.

python -m tests.process.ledger_workers commit SOCKET     level at step 0, then steps without an end
python -m tests.process.ledger_workers save SOCKET       a save after every step, without an end
python -m tests.process.ledger_workers journal FOLDER    events without an end, one line on the screen for each
python -m tests.process.ledger_workers full FOLDER       a journal on a disk with room for 20 kB
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.journal import Head, JournalWriter
from torchelastic.observe.ledger.ledger_events import Straggler
from torchelastic.observe.ledger.meter import this_worker
from torchelastic.processes import dies_with_parent

ROOT = Path(__file__).parents[2]
HEAD = Head("run", "host", 1_000, 2_000_000, 3)


@contextmanager
def started(what: str, where: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun what it is to do; it is killed at the end if it still lives."""
    command = [sys.executable, "-m", "tests.process.ledger_workers", what, str(where)]
    process = subprocess.Popen(dies_with_parent(command), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), "it has not begun"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def killed(process: subprocess.Popen[str]) -> None:
    """SIGKILL, and wait until it is over."""
    process.send_signal(signal.SIGKILL)
    process.wait()


def _train(socket_path: str, *, saves: bool) -> None:
    meter = this_worker()
    meter.publish(socket_path)
    meter.group_wanted()
    meter.entered(1, 0, 1)
    meter.synchronized(0)
    print("begun", flush=True)
    while True:
        meter.step_committed()
        if saves:
            with meter.saving("memory"):
                pass


def _journal(folder: Path) -> None:
    writer = JournalWriter(folder, "ledger-test", HEAD, max_bytes=8192, keep=1000)
    book = HostLedger()
    for step in range(10**9):
        event = Straggler(at_ns=time.monotonic_ns(), worker="host/0.0", step=step)
        writer.write(event, book)
        book = book.after(event)
        print(step, flush=True)


def _full(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    writer = JournalWriter(folder, "ledger-test", HEAD)
    for step in range(1_000):
        writer.write(Straggler(at_ns=step, worker="host/0.0", step=step), HostLedger())
    writer.close()
    print(writer.failed, flush=True)


if __name__ == "__main__":
    what, where = sys.argv[1:]
    assert "torch" not in sys.modules, "the ledger needs no torch"
    assert os.getppid() > 0
    if what in ("commit", "save"):
        _train(where, saves=what == "save")
    (_journal if what == "journal" else _full)(Path(where))
