"""SIGTERM where both a coordinator (leaves its group) and a deadline (saves and stops) are there, in either order."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.process.deadline_clocks import PATIENCE_S, Clocks
from tests.process.sigterm_cases import ENDED_BY_SIGTERM, Rendezvous, exit_code_of
from torchelastic.lifetime import IterManager, Nearest, detect, nearest
from torchelastic.lifetime.sources.detection import SIGNALS_VARIABLE
from torchelastic.lifetime.sources.signals import SignalNotices
from torchelastic.p2p.termination import leave_on_sigterm

TERM = signal.SIGTERM
NAMED = {SIGNALS_VARIABLE: "SIGTERM=30"}
#: What both are given.
Both = tuple["Counted", Nearest, Clocks]


class Counted(Rendezvous):
    """Counts how often somebody wants to leave."""

    def __init__(self, *, can_leave: bool = True) -> None:
        super().__init__(can_leave=can_leave)
        self.times = 0

    def leave(self) -> None:
        self.times += 1
        super().leave()


def both(order: str, variables: dict[str, str] | None = None, *, can_leave: bool = True) -> Both:
    rendezvous, clocks, found = Counted(can_leave=can_leave), Clocks(), []
    for first in order.split(", "):
        if first == "coordinator":
            leave_on_sigterm(rendezvous)
        else:
            found = detect(variables or {}, machine=str, clock=clocks.clock, wall_clock=clocks.wall_clock)
    return rendezvous, nearest(found), clocks


orders = pytest.mark.parametrize("order", ["coordinator, deadline", "deadline, coordinator"])


@orders
def test_it_leaves_its_group_once_and_the_others_are_not_stopped_by_a_deadline(order: str) -> None:
    def once() -> None:
        rendezvous, deadline, clocks = both(order)
        signal.raise_signal(TERM)
        assert rendezvous.left.wait(PATIENCE_S)
        assert deadline.remaining_s(clocks.now_s) is None
        assert rendezvous.times == 1

    def twice() -> None:
        once()
        signal.raise_signal(TERM)
        time.sleep(PATIENCE_S)

    assert exit_code_of(once) == 0
    assert exit_code_of(twice) == ENDED_BY_SIGTERM


def test_with_nobody_to_ask_it_is_a_notice_and_a_second_one_ends_the_process() -> None:
    """Before the first group, or after the last: there only is the deadline."""

    def process(pass_s: float) -> None:
        rendezvous, deadline, clocks = both("deadline, coordinator", can_leave=False)
        signal.raise_signal(TERM)
        assert deadline.remaining_s(clocks.now_s) == 30.0
        clocks.pass_s(1.0)
        rendezvous._can_leave = True  # the first group is there now: what is a notice stays one
        signal.raise_signal(TERM)
        assert deadline.remaining_s(clocks.now_s) == 29.0
        assert not rendezvous.left.is_set()
        clocks.pass_s(pass_s)
        signal.raise_signal(TERM)

    assert exit_code_of(lambda: process(3.0)) == 0, "a launcher's and a scheduler's are one notice"
    assert exit_code_of(lambda: process(5.0)) == ENDED_BY_SIGTERM


@orders
def test_a_forked_child_ends_as_ever(order: str) -> None:
    def process() -> None:
        both(order, NAMED)
        child = os.fork()
        if child == 0:
            os._exit(0 if signal.getsignal(TERM) is signal.SIG_DFL else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    assert exit_code_of(process) == 0


def test_a_handler_of_the_users_below_a_notice_keeps_the_coordinator_away() -> None:
    def process() -> None:
        came: list[int] = []
        signal.signal(TERM, lambda number, _: came.append(number))
        rendezvous, deadline, clocks = both("deadline, coordinator", NAMED)
        signal.raise_signal(TERM)
        assert came == [TERM]
        assert deadline.remaining_s(clocks.now_s) == 30.0
        assert not rendezvous.left.is_set()

    assert exit_code_of(process) == 0


@pytest.mark.parametrize("end", ["close", "cleanup"])
def test_a_manager_takes_the_signal_and_gives_it_back_at_its_end(end: str, tmp_path: Path) -> None:
    def process() -> None:
        before = signal.getsignal(TERM)
        manager = IterManager(velastic_dir=tmp_path)
        assert signal.getsignal(TERM) != before
        for _ in range(2):
            getattr(manager, end)()
        assert signal.getsignal(TERM) is before

    assert exit_code_of(process) == 0


def test_closing_on_another_thread_is_no_error_and_the_next_signal_ends_the_process() -> None:
    def process() -> None:
        notices, errors = SignalNotices({TERM: 30.0}), list[object]()
        threading.excepthook = errors.append
        thread = threading.Thread(target=notices.close)
        thread.start()
        thread.join(PATIENCE_S)
        assert not errors
        signal.raise_signal(TERM)
        time.sleep(PATIENCE_S)

    assert exit_code_of(process) == ENDED_BY_SIGTERM
