"""A launcher is killed with its workers, and what they have started lives on: the next one of that run sees to it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waiting import is_gone, wait_until

#: Starts something that a kill of the launcher does not end, and trains until it is told not to.
SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path
print("run", os.environ["TORCHELASTIC_RUN_ID"], flush=True)
own = sys.argv[1]
if not Path(own).exists():
    other = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    left = subprocess.Popen(["sleep", "600"], process_group=0, **other)
    Path(own).write_text(str(left.pid))
    if len(sys.argv) == 2:
        time.sleep(600)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """Starts a launcher of --standalone in a folder, for the script with arguments."""
    folder = tempfile.mkdtemp(prefix="k-")  # short: a Unix socket's path has 107 bytes
    monkeypatch.setenv("TMPDIR", folder)
    (tmp_path / "script.py").write_text(SCRIPT)
    started: list[subprocess.Popen[str]] = []

    def begin(
        *arguments: str, cwd: Path = tmp_path, options: tuple[str, ...] = ("--standalone",)
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torchelastic.launch", "run", *options, "--page=off"]
        command += [str(tmp_path / "script.py"), *arguments]
        process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()
    for left in tmp_path.glob("left*"):
        try:
            os.kill(int(left.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            pass
    shutil.rmtree(folder)


def pid_in(path: Path) -> int:
    return wait_until(lambda: path.exists() and int(path.read_text() or 0), 60, "the script has started it")


def run_in(said: str) -> str:
    found = re.search(r"run (standalone-\w+)$", said, re.MULTILINE)
    assert found is not None, said
    return found[1]


@pytest.mark.long
def test_the_same_command_goes_on_with_the_run_and_ends_what_was_left(start: Start, tmp_path: Path) -> None:
    own = tmp_path / "left"
    first = start(str(own))
    left = pid_in(own)
    first.kill()
    said, _ = first.communicate(timeout=60)
    run_id = run_in(said)
    assert not is_gone(left), "it has a process group of its own, and no launcher"
    (tmp_path / "elsewhere").mkdir()
    for others in (start(str(own), "another"), start(str(own), cwd=tmp_path / "elsewhere")):
        said, _ = others.communicate(timeout=60)
        assert others.returncode == 0, said
        assert run_in(said) != run_id
        assert not is_gone(left), "it is none of that run's"
    again = start(str(own))
    said, _ = again.communicate(timeout=60)
    assert again.returncode == 0, said
    assert run_in(said) == run_id
    assert f"sleep 600 (process {left}); that is ended" in said
    assert is_gone(left)
    once_more = start(str(own))
    said, _ = once_more.communicate(timeout=60)
    assert run_in(said) != run_id, "the one before has ended in order"


@pytest.mark.long
def test_what_a_worker_has_left_that_ended_in_order_goes_on(start: Start, tmp_path: Path) -> None:
    own = tmp_path / "left"
    first = start(str(own), "ends")
    assert first.wait(60) == 0
    left = pid_in(own)
    again = start(str(own), "ends")
    said, _ = again.communicate(timeout=60)
    assert again.returncode == 0, said
    assert not is_gone(left)
