"""Whether another process of this host still lives: said only where it is certain."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from torchelastic.agent.predecessors import ProcessRecord, decode
from torchelastic.processes.identity import Process, this_place

WAITS = [sys.executable, "-c", "input()"]


def test_a_process_that_lives_has_not_ended_and_one_that_was_killed_has() -> None:
    with subprocess.Popen(WAITS, stdin=subprocess.PIPE) as other:
        process = Process.of(other.pid)
        assert not process.has_ended
        other.kill()
        other.wait()
    assert process.has_ended


def test_a_process_that_nobody_has_waited_for_yet_has_ended() -> None:
    with subprocess.Popen(WAITS, stdin=subprocess.PIPE) as other:
        process = Process.of(other.pid)
        other.kill()
        while not process.has_ended:  # a zombie by now; the test's time-out is the bound
            pass


def test_another_process_with_the_same_pid_is_not_the_one_that_was_meant() -> None:
    here = Process.of(os.getpid())
    assert not here.has_ended
    assert replace(here, started_ticks=1).has_ended


@pytest.mark.parametrize("pid", [2**22 + 1, 0, -1])
def test_of_a_process_that_was_never_found_nothing_is_said(pid: int) -> None:
    assert Process.of(pid).started_ticks == -1
    assert not Process.of(pid).has_ended


def test_a_process_that_proc_hides_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc mounted with hidepid shows only what is one's own."""

    def refuse(_pid: int, _number: int) -> None:
        raise PermissionError

    process = Process(2**22 + 1, started_ticks=7)
    assert process.has_ended
    monkeypatch.setattr(os, "kill", refuse)
    assert not process.has_ended


def test_a_record_is_read_as_it_was_written() -> None:
    record = ProcessRecord(
        this_place(), Process(7, 70), 2**62, {"host-0-ab1": Process(8, 80), "host-1-ab2": Process(9, -1)}
    )
    assert decode("key", record.encode()) == record
    assert record.is_of_this_place
