"""SIGUSR1 to the launcher: it goes on, and so do the workers; those that handle it are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until
from torchelastic.agent.signals import catches, forward

SCRIPT = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["LOCAL_RANK"]
if rank == "0":
    signal.signal(signal.SIGUSR1, lambda *_: (folder / "told").touch())
(folder / f"ready-{rank}").touch()
end = time.monotonic() + 60
while not (folder / "end").exists() and time.monotonic() < end:
    time.sleep(0.02)
(folder / f"ended-{rank}").touch()
"""


def test_a_notice_to_the_launcher_reaches_the_workers_that_handle_it_and_ends_nobody(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torchelastic.launch", "run", "--standalone", "--nproc-per-node=2", str(script)]
    with subprocess.Popen([*command, str(tmp_path)], stderr=subprocess.PIPE, text=True) as launcher:
        try:
            wait_until(
                lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)), 30.0, "the workers are ready"
            )
            launcher.send_signal(signal.SIGUSR1)
            wait_until(lambda: (tmp_path / "told").exists(), 30.0, "the worker is told")
            (tmp_path / "end").touch()
            _, said = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, said
    assert (tmp_path / "ended-0").exists()
    assert (tmp_path / "ended-1").exists(), "the worker without a handler lives on"
    assert "SIGUSR1 came: passed on to 1 worker(s) that handle it" in said


@pytest.mark.parametrize(("mask", "is_caught"), [("0000000000000200", True), ("0000000000000800", False), ("0", False)])
def test_the_mask_says_whether_a_signal_is_handled(mask: str, is_caught: bool) -> None:
    assert catches(f"SigIgn:\t0000000000000200\nSigCgt:\t{mask}\n", signal.SIGUSR1) is is_caught


def test_processes_that_are_gone_or_would_die_are_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        assert forward(signal.SIGUSR1, [sleeper.pid]) == []
        assert sleeper.poll() is None
        sleeper.kill()
    assert forward(signal.SIGUSR1, [sleeper.pid]) == []
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert forward(signal.SIGUSR1, [os.getpid()]) == [os.getpid()]
    finally:
        signal.signal(signal.SIGUSR1, before)
