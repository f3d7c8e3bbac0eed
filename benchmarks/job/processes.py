"""Processes of a benchmark, and that none of them outlives it."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import FrameType, TracebackType

import psutil

from torchelastic.processes import dies_with_parent

#: How long a process may take to end after SIGKILL: the kernel gives its memory back first.
END_S = 10.0


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_on_signals() -> None:
    """Have SIGTERM and Ctrl-C end this process by SystemExit, so that every `with` block cleans up.

    Call it in the main thread. The exit code is then 128 + the signal's number: 143, 130.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _exit)


def _exit(number: int, _frame: FrameType | None) -> None:
    for other in STOP_SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # a second one would interrupt the clean-up
    sys.exit(128 + number)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a child and all its descendants, and wait until they are gone (those of others at most `END_S`).

    Does nothing if the child has been reaped already.
    """
    if process.poll() is not None:
        return
    root = psutil.Process(process.pid)
    tree = [root, *root.children(recursive=True)]
    for member in tree:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(tree[1:], timeout=END_S)


class Load:
    """Processes that each keep a core busy with a loop of plain Python, at normal priority, for the block's length.

    They end with the block, and also when this process is killed. Enter it in the main thread.

    Args:
        processes: how many; 0: none.
    """

    def __init__(self, processes: int) -> None:
        self._count = processes
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def __enter__(self) -> Load:
        command = dies_with_parent([sys.executable, "-I", "-S", "-c", "while True: pass"])
        for _ in range(self._count):
            # a session of its own: Ctrl-C at the terminal is for the benchmark, which ends it
            self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
