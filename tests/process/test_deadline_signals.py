"""Signals as notices: what was handled before stays handled, children and second signals are as ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.process.deadline_clocks import PATIENCE_S, Clocks
from tests.process.sigterm_cases import ENDED_BY_SIGTERM, exit_code_of
from torchelastic.lifetime import nearest
from torchelastic.lifetime.deadline import unsure_since_s
from torchelastic.lifetime.sources import SignalNotices, SlurmDeadline, close_all, detect

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


@pytest.fixture(autouse=True)
def actions_of_before() -> Iterator[None]:
    """Each test begins as a new process does, whatever tests of other files have left."""
    before = {number: signal.getsignal(number) for number in (TERM, USR1, INT)}
    for number in (TERM, USR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(INT, signal.default_int_handler)
    yield
    for number, action in before.items():
        signal.signal(number, action)


def test_a_signal_is_a_deadline_after_its_grace(clocks: Clocks, caplog: pytest.LogCaptureFixture) -> None:
    notices = SignalNotices({TERM: 30.0, USR1: 60.0}, clock=clocks.clock)
    assert notices.remaining_s(clocks.now_s) is None
    signal.raise_signal(USR1)
    assert not caplog.records  # not in the handler
    clocks.pass_s(10.0)
    assert notices.remaining_s(clocks.now_s) == 50.0
    signal.raise_signal(TERM)
    assert notices.remaining_s(clocks.now_s) == 30.0
    assert notices.reason == "SIGTERM, 30 s of grace"
    assert "signal: SIGUSR1, 60 s of grace" in caplog.text
    notices.close()


def test_a_handler_below_that_would_end_the_process_as_by_default_does_not(clocks: Clocks) -> None:
    """Such as that of a coordinator whose run is over."""

    def by_default(number: int, _: object) -> None:
        os.kill(os.getpid(), number)

    signal.signal(TERM, by_default)
    notices = SignalNotices({TERM: 30.0}, clock=clocks.clock)
    signal.raise_signal(TERM)
    assert notices.remaining_s(clocks.now_s) == 30.0
    notices.close()
    assert signal.getsignal(TERM) is by_default


def test_closing_restores_what_was_there_and_keeps_what_was_said(clocks: Clocks) -> None:
    def mine(*_: object) -> None:
        pass

    signal.signal(USR1, mine)
    signal.signal(TERM, signal.SIG_IGN)
    notices = SignalNotices({TERM: 30.0, USR1: 60.0}, clock=clocks.clock)
    signal.raise_signal(TERM)
    notices.close()
    notices.close()
    assert signal.getsignal(USR1) is mine
    assert signal.getsignal(TERM) is signal.SIG_IGN
    assert notices.remaining_s(clocks.now_s) == 30.0


def test_a_handler_that_was_put_on_top_stays_and_may_call_on(clocks: Clocks) -> None:
    came: list[str] = []
    signal.signal(USR1, lambda *_: came.append("below"))
    notices = SignalNotices({USR1: 60.0}, clock=clocks.clock)
    ours = signal.getsignal(USR1)
    assert callable(ours)

    def above(number: int, frame: object) -> None:
        came.append("above")
        ours(number, frame)  # type: ignore[arg-type]

    signal.signal(USR1, above)
    notices.close()
    assert signal.getsignal(USR1) is above
    signal.raise_signal(USR1)
    assert came == ["above", "below"]
    assert notices.remaining_s(clocks.now_s) is None  # it was closed


def test_the_handler_of_before_is_called_with_every_signal(clocks: Clocks) -> None:
    came: list[int] = []
    signal.signal(USR1, lambda number, _: came.append(number))
    notices = SignalNotices({USR1: 60.0}, clock=clocks.clock)
    signal.raise_signal(USR1)
    signal.raise_signal(USR1)
    assert came == [USR1, USR1]
    notices.close()


def test_two_at_once_are_one_and_a_second_one_later_ends_the_process() -> None:
    def at_once() -> None:
        clocks = Clocks()
        notices = SignalNotices({TERM: 30.0}, clock=clocks.clock)
        signal.raise_signal(TERM)
        clocks.pass_s(4.0)
        signal.raise_signal(TERM)  # the scheduler's, and the same passed on by the launcher
        assert notices.remaining_s(clocks.now_s) == 26.0

    def later() -> None:
        clocks = Clocks()
        SignalNotices({TERM: 30.0}, clock=clocks.clock)
        signal.raise_signal(TERM)
        clocks.pass_s(6.0)
        signal.raise_signal(TERM)
        time.sleep(PATIENCE_S)

    assert exit_code_of(at_once) == 0
    assert exit_code_of(later) == ENDED_BY_SIGTERM


def test_the_first_interrupt_is_a_notice_and_the_second_interrupts(clocks: Clocks) -> None:
    notices = SignalNotices({INT: 30.0}, clock=clocks.clock)
    signal.raise_signal(INT)
    assert notices.remaining_s(clocks.now_s) == 30.0
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(INT)


def test_on_another_thread_nothing_is_installed_and_it_is_said(clocks: Clocks) -> None:
    before = signal.getsignal(TERM)
    errors: list[str] = []

    def run() -> None:
        try:
            SignalNotices({TERM: 30.0})
        except ValueError as error:
            errors.append(str(error))
        assert detect({}, machine=str) == []

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE_S)
    assert errors == ["signals are handled on the main thread: make SignalNotices there"]
    assert signal.getsignal(TERM) is before


# --- the signal of a scheduler ----------------------------------------------------------------------------------------


def test_usr1_asks_the_scheduler_anew_and_believes_it(clocks: Clocks) -> None:
    """Preempted: the end of the job was far, and is near now."""
    end_s = clocks.wall_s + 7200.0
    job = SlurmDeadline("42", runner=lambda *_: f"42 {end_s:.0f}", clock=clocks.clock, wall_clock=clocks.wall_clock)
    asked: list[float] = []
    job.when_asked_again(asked.append)
    job.poll()
    notices = SignalNotices({USR1: 60.0}, scheduler=job, clock=clocks.clock)
    signal.raise_signal(USR1)
    end_s = clocks.wall_s + 120.0
    assert notices.remaining_s(clocks.now_s) == 60.0  # as long as nothing better is known
    assert notices.remaining_s(clocks.now_s) == 60.0
    assert len(asked) == 1
    job.poll()
    assert notices.remaining_s(clocks.now_s) is None
    assert job.remaining_s(clocks.now_s) == 120.0
    end_s = clocks.wall_s + 86400.0  # `scontrol update`: nothing is left of the signal
    job.poll()
    clocks.pass_s(100.0)
    assert notices.remaining_s(clocks.now_s) is None
    signal.raise_signal(USR1)  # but another one is another one
    assert notices.remaining_s(clocks.now_s) == 60.0
    notices.close()


# --- which are taken --------------------------------------------------------------------------------------------------


def taken(**variables: str) -> dict[str, float]:
    """By signal, what is left after it; none is raised."""
    deadlines = detect(variables, machine=str, runner=lambda *_: "")
    found = [deadline for deadline in deadlines if isinstance(deadline, SignalNotices)]
    names = {number.name: grace_s for notices in found for number, grace_s in notices.graces_s.items()}
    close_all(deadlines)
    return names


def test_sigterm_is_a_notice_where_it_would_end_the_process() -> None:
    assert taken() == {"SIGTERM": 30.0}
    assert taken(TORCHELASTIC_AGENT_SOCKET="/run/agent") == {"SIGTERM": 30.0}, "that of a coordinator's own agent"
    assert taken(TORCHELASTIC_TERM_GRACE_S="120") == {"SIGTERM": 120.0}
    assert signal.getsignal(TERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("variables", "is_guess"),
    [
        ({}, True),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90"}, True),
        ({"TORCHELASTIC_TERM_GRACE_S": "30"}, False),
        ({"TORCHELASTIC_DEADLINE_SIGNALS": "SIGTERM"}, True),
        ({"TORCHELASTIC_DEADLINE_SIGNALS": "SIGTERM=30"}, False),
    ],
)
def test_a_grace_that_nobody_has_told_is_a_guess(variables: dict[str, str], is_guess: bool) -> None:
    deadlines = detect(variables, machine=str, runner=lambda *_: "")
    try:
        together = nearest(deadlines)
        assert unsure_since_s(together) is None, "no signal came"
        before_s = time.monotonic()
        signal.raise_signal(TERM)
        assert together.remaining_s(time.monotonic()) is not None
        since_s = unsure_since_s(together)
        assert (since_s is not None) is is_guess
        assert since_s is None or before_s <= since_s <= time.monotonic()
    finally:
        close_all(deadlines)


def test_sigterm_is_left_to_whoever_has_a_handler_and_else_taken_also_under_the_launcher() -> None:
    """A coordinator that drains is such a handler, made before or after: see `test_sigterm_together`."""
    launched = {"TORCHELASTIC_INIT_METHOD": "etcd://h:1/r", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "20"}
    assert taken(**launched) == {"SIGTERM": 20.0}
    signal.signal(TERM, lambda *_: None)
    assert taken(**launched) == {}
    assert taken() == {}
    signal.signal(TERM, signal.SIG_IGN)
    assert taken() == {}


@pytest.mark.parametrize(("number", "ended"), [("SIGUSR1", 75), ("SIGTERM", -15)])
def test_a_late_notice_does_not_kill_a_process_that_is_ending(number: str, ended: int) -> None:
    """The interpreter gives handlers of Python back to the system before it is gone; SIGTERM then ends it as ever."""
    script = f"""
import os, signal, sys
from torchelastic.lifetime.sources import SignalNotices
class Late:
    def __del__(self, kill=os.kill, own=os.getpid()):
        kill(own, signal_number)
signal_number = int(signal.{number})
notices = SignalNotices({{signal.SIGUSR1: 60.0, signal.SIGTERM: 30.0}})
sys.modules["kept to the last"] = kept = Late()
import builtins; builtins.kept_too = kept
sys.exit(75)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == ended, done.stderr
