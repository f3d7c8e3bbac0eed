"""`--log-dir` on a disk that takes nothing more, and in a folder that two launchers share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.small_tmpfs import small_tmpfs
from tests.waiting import wait_until
from torchelastic.agent.worker_log import WorkerLogs

SIZE_BYTES = 2**17
REMEDY = "free space there, or give another --log-dir"
#: More than a pipe and the disk take together: who is not read blocks.
LINES = 20_000
TALKS = f"for n in range({LINES}): print('line', n, 'x' * 60)"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "disk", SIZE_BYTES) as folder:
        yield folder


def launch(folder: Path, *options: str, script: str = TALKS) -> subprocess.Popen[str]:
    """Start `torchelastic run` with this script."""
    path = folder / "train.py"
    path.write_text(script)
    command = [sys.executable, "-m", "torchelastic.launch", "run", "--standalone", *options, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_workers_go_on_when_the_disk_of_their_logs_is_full_and_the_launcher_says_it_once(
    disk: Path, tmp_path: Path
) -> None:
    launcher = launch(tmp_path, "--nproc-per-node=2", f"--log-dir={disk}")
    try:
        shown, said = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, said[-3000:]
    assert os.statvfs(disk).f_bavail == 0, "the disk was not full"
    for worker in range(2):
        assert re.findall(rf"\[worker {worker}\] line (\d+) ", shown) == [str(n) for n in range(LINES)]
    (line,) = [line for line in said.splitlines() if "cannot be written to --log-dir" in line]
    assert f"{disk}: No space left on device" in line
    assert REMEDY in line
    texts = [(disk / f"worker_{worker}.0.log").read_text() for worker in range(2)]
    assert max(texts).startswith("line 0 "), "what the disk took is there"


def test_a_file_says_how_much_it_misses_once_the_disk_has_room_again(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filler = disk / "filler"
    filler.write_bytes(b"-" * (SIZE_BYTES - 2**14))
    logs = WorkerLogs(disk)
    file = logs.opened(0, 0)
    file.write(b"before\n")
    file.write(b"x" * SIZE_BYTES)
    wait_until(lambda: file.path, 10, "the file is there")
    assert file.path is not None
    wait_until(lambda: caplog.records, 10, "the disk is full")
    taken = file.path.stat().st_size
    filler.unlink()
    file.write(b"after\n")
    file.close()
    logs.join(10)
    file.write(b"of a process that outlived the worker\n")
    missing = len(b"before\n") + SIZE_BYTES - taken
    note = b"\n[torchelastic: %d bytes could not be written here]\n" % missing
    assert file.path.read_bytes() == b"before\n" + b"x" * (taken - 7) + note + b"after\n"
    assert [record.levelname for record in caplog.records] == ["ERROR"], "once"


@pytest.mark.parametrize("name", ["open", "write"])
def test_nobody_waits_for_a_disk_that_does_not_answer_and_the_file_says_how_much_it_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    answers, call = threading.Event(), getattr(os, name)
    monkeypatch.setattr(os, name, lambda *arguments: answers.wait(30) and call(*arguments))
    logs = WorkerLogs(tmp_path)
    file = logs.opened(0, 0)
    began_s = time.monotonic()
    for _ in range(50):
        file.write(b"x" * 2**17)
    file.close()
    logs.join(0.1)
    assert time.monotonic() - began_s < 10
    assert not sum(path.stat().st_size for path in tmp_path.iterdir()), "the disk does not answer"
    answers.set()
    logs.join(10)
    assert file.path is not None
    text = file.path.read_bytes()
    (missing,) = re.findall(rb"\n\[torchelastic: (\d+) bytes could not be written here\]\n$", text)
    assert text.count(b"x") + int(missing) == 50 * 2**17


def test_a_folder_that_cannot_be_made_is_named_and_the_workers_run(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "--log-dir=/proc/torchelastic-logs", script="print('trains')")
    shown, said = launcher.communicate(timeout=60)
    assert (launcher.returncode, shown) == (0, "[worker 0] trains\n"), said[-3000:]
    assert said.count(REMEDY) == 1


def test_two_launchers_with_one_folder_each_write_files_of_their_own(tmp_path: Path) -> None:
    for number in range(2):
        script = f"import sys; print('launcher {number}'); sys.exit({number})"
        launcher = launch(tmp_path, "--nproc-per-node=2", f"--log-dir={tmp_path / 'logs'}", script=script)
        _, said = launcher.communicate(timeout=60)
        assert launcher.returncode == number, said[-3000:]
    first = [tmp_path / "logs" / f"worker_{worker}.0.log" for worker in range(2)]
    second = set((tmp_path / "logs").glob("worker_*.log")) - set(first)
    assert [path.read_text() for path in first] == ["launcher 0\n"] * 2
    assert [path.read_text() for path in second] == ["launcher 1\n"] * 2
    assert f"{first[0]} exists, of another host or of an earlier start" in said
    failed = re.findall(r"worker \d failed: exit code 1, log (.+)", said)
    assert failed
    assert {Path(path) for path in failed} <= second
