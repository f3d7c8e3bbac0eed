"""`breakpoint()` in a script of a launcher at a terminal: its single worker reads what is typed there."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch, torchelastic

torch.set_num_threads(1)
model = torch.nn.Linear(2, 1)
state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.01))

def train_step(state):
    if state.step == 6:
        raise StopIteration
    if state.step in (2, 4):
        breakpoint()

torchelastic.train(torchelastic.CoordinatorP2P("gloo"), train_step, state)
print("trained", state.step)
"""


class Shell:
    """A program in the foreground of a terminal of its own."""

    def __init__(self, *words: str, folder: Path) -> None:
        self.said = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execv(sys.executable, [sys.executable, *words])

    def until(self, text: str, timeout_s: float = 60.0) -> None:
        """Read until the terminal shows a text after what was read before."""
        begin, deadline_s = len(self.said), time.monotonic() + timeout_s
        while text not in self.said[begin:]:
            assert time.monotonic() < deadline_s, f"no {text!r} in {self.said[begin:]!r}"
            readable, _, _ = select.select([self._terminal], [], [], 0.2)
            if readable:
                self.said += os.read(self._terminal, 4096).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def end(self) -> int:
        """Its exit code."""
        deadline_s = time.monotonic() + 60
        while True:
            try:
                readable, _, _ = select.select([self._terminal], [], [], 0.2)
                if readable:
                    self.said += os.read(self._terminal, 4096).decode(errors="replace")
            except OSError:  # the terminal's other end is closed
                break
            assert time.monotonic() < deadline_s, self.said
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def shells() -> Iterator[list[Shell]]:
    started: list[Shell] = []
    yield started
    for shell in started:
        try:
            os.kill(shell.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has ended, as it should


def launched(folder: Path, nproc: int) -> Shell:
    (folder / "train.py").write_text(SCRIPT)
    words = ["-m", "torchelastic.launch", "run", "--max-restarts=0", f"--nproc-per-node={nproc}", "train.py"]
    return Shell(*words, folder=folder)


@pytest.mark.long
def test_breakpoint_works_in_the_only_worker_of_a_launcher_at_a_terminal(tmp_path: Path, shells: list[Shell]) -> None:
    shell = launched(tmp_path, nproc=1)
    shells.append(shell)
    for step in (2, 4):
        shell.until("[worker 0] (Pdb) ")
        shell.type("p 'the step is', state.step\n")
        shell.until(f"[worker 0] ('the step is', {step})")
        shell.until("[worker 0] (Pdb) ")
        shell.type("c\n")
    shell.until("[worker 0] trained 6")
    assert shell.end() == 0, shell.said
    shells.clear()


@pytest.mark.long
def test_ctrl_c_at_a_breakpoint_ends_the_launcher(tmp_path: Path, shells: list[Shell]) -> None:
    shell = launched(tmp_path, nproc=1)
    shells.append(shell)
    shell.until("[worker 0] (Pdb) ")
    shell.type("\x03")
    shell.until("stopped by SIGINT")
    assert shell.end() == 128 + signal.SIGINT
    shells.clear()


@pytest.mark.long
def test_of_several_workers_none_reads_from_the_terminal(tmp_path: Path, shells: list[Shell]) -> None:
    shell = launched(tmp_path, nproc=2)
    shells.append(shell)
    shell.until("BdbQuit")  # the debugger is at the end of its input at once
    assert shell.end() == 1
    shells.clear()
