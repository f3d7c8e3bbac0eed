"""SIGTERM to a worker: the first asks to leave, the second ends it; nobody else's handler and no child is touched."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.process.sigterm_cases import ENDED_BY_SIGTERM, Rendezvous, exit_code_of
from torchelastic.p2p.termination import leave_on_sigterm

PATIENCE_S = 60.0


def term(pid: int = 0) -> None:
    os.kill(pid or os.getpid(), signal.SIGTERM)


def test_the_first_sigterm_asks_to_leave_and_the_second_ends_the_process() -> None:
    def once() -> None:
        rendezvous = Rendezvous(can_leave=True)
        leave_on_sigterm(rendezvous)
        term()
        assert rendezvous.left.wait(PATIENCE_S)

    def twice() -> None:
        once()
        term()
        time.sleep(PATIENCE_S)

    assert exit_code_of(once) == 0
    assert exit_code_of(twice) == ENDED_BY_SIGTERM


def test_that_this_worker_leaves_is_said_once_it_is_so() -> None:
    """Else whoever reads it, and lets the step end, may see one more."""

    def process() -> None:
        rendezvous, said = Rendezvous(can_leave=True), threading.Event()

        class Screen(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if rendezvous.left.is_set() and "leaves the run at the end of a step" in record.getMessage():
                    said.set()

        logging.getLogger("torchelastic").addHandler(Screen())
        leave_on_sigterm(rendezvous)
        term()
        assert said.wait(10.0)

    assert exit_code_of(process) == 0


def test_before_there_is_anybody_to_ask_sigterm_ends_the_process() -> None:
    def process() -> None:
        leave_on_sigterm(Rendezvous(can_leave=False))
        term()
        time.sleep(PATIENCE_S)

    assert exit_code_of(process) == ENDED_BY_SIGTERM


def test_a_second_run_in_one_process_leaves_its_own_rendezvous() -> None:
    def process() -> None:
        first, second = Rendezvous(can_leave=True), Rendezvous(can_leave=True)
        leave_on_sigterm(first)
        leave_on_sigterm(second)
        term()
        assert second.left.wait(PATIENCE_S)
        assert not first.left.is_set()

    assert exit_code_of(process) == 0


@pytest.mark.parametrize("present", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "a handler"])
def test_what_the_user_does_on_sigterm_stays(present: Callable[..., None]) -> None:
    def process() -> None:
        signal.signal(signal.SIGTERM, present)
        rendezvous = Rendezvous(can_leave=True)
        leave_on_sigterm(rendezvous)
        assert signal.getsignal(signal.SIGTERM) is present
        term()
        assert not rendezvous.left.is_set()

    assert exit_code_of(process) == 0


def test_on_another_thread_nothing_is_installed() -> None:
    def process() -> None:
        thread = threading.Thread(target=leave_on_sigterm, args=(Rendezvous(can_leave=True),))
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    assert exit_code_of(process) == 0


def test_a_forked_child_such_as_a_data_loader_ends_on_sigterm_as_ever() -> None:
    def process() -> None:
        rendezvous = Rendezvous(can_leave=True)
        leave_on_sigterm(rendezvous)
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(into, b"x")
            time.sleep(PATIENCE_S)
            os._exit(0)
        os.read(out, 1)  # what is sent in the middle of a fork, Python itself drops
        term(child)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ENDED_BY_SIGTERM
        assert not rendezvous.left.is_set()

    assert exit_code_of(process) == 0
