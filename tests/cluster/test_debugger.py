"""`breakpoint()` in a script of a launcher at a terminal: its single worker reads what is typed there."""

from __future__ import annotations

import signal

import pytest

from tests.cluster.conftest import AtTerminal
from tests.cluster.shell import Shell

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


def launched(at_terminal: AtTerminal, nproc: int) -> Shell:
    return at_terminal("run", "--max-restarts=0", f"--nproc-per-node={nproc}", "train.py", text=SCRIPT)


@pytest.mark.long
def test_breakpoint_works_in_the_only_worker_of_a_launcher_at_a_terminal(at_terminal: AtTerminal) -> None:
    shell = launched(at_terminal, nproc=1)
    for step in (2, 4):
        shell.until("[worker 0] (Pdb) ")
        shell.type("p 'the step is', state.step\n")
        shell.until(f"[worker 0] ('the step is', {step})")
        shell.until("[worker 0] (Pdb) ")
        shell.type("c\n")
    shell.until("[worker 0] trained 6")
    assert shell.end() == 0, shell.said


@pytest.mark.long
def test_ctrl_c_at_a_breakpoint_ends_the_launcher(at_terminal: AtTerminal) -> None:
    shell = launched(at_terminal, nproc=1)
    shell.until("[worker 0] (Pdb) ")
    shell.type("\x03")
    shell.until("stopped by SIGINT")
    assert shell.end() == 128 + signal.SIGINT


@pytest.mark.long
def test_of_several_workers_none_reads_from_the_terminal(at_terminal: AtTerminal) -> None:
    shell = launched(at_terminal, nproc=2)
    shell.until("BdbQuit")  # the debugger is at the end of its input at once
    assert shell.end() == 1
