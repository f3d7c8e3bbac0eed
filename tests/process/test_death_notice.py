"""A process's death is heard of before the kernel has torn it down; a life is never taken for a death."""

from __future__ import annotations

import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.process.small_tmpfs import small_tmpfs
from torchelastic.processes.death_notice import leave_notice, notice_path, take_notice, wait_for_death

SCRIPT = """
import os, sys, time
from torchelastic.processes.death_notice import leave_notice, notice_path
assert leave_notice(notice_path(sys.argv[1], os.getpid()))
child = os.fork()
if child == 0:
    os._exit(0)  # a data loader, say: its end is not that of the process
os.waitpid(child, 0)
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[2] == "main thread":
    import ctypes, platform, threading
    threading.Thread(target=time.sleep, args=(600,)).start()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit(2): of this thread alone
"""


class Watched:
    """A process that has left a notice, and a thread that waits for its death."""

    def __init__(self, folder: Path, then: str = "whole") -> None:
        socket = str(folder / "agent.sock")
        command = [sys.executable, "-c", SCRIPT, socket, then]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.path = notice_path(socket, self.process.pid)
        mutex = take_notice(self.path)
        assert mutex is not None
        self.heard: queue.SimpleQueue[tuple[bool, float]] = queue.SimpleQueue()
        threading.Thread(target=lambda: self.heard.put((wait_for_death(mutex), time.monotonic())), daemon=True).start()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    one = Watched(tmp_path)
    yield one
    one.process.kill()
    one.process.wait()


def test_a_kill_is_heard_of(watched: Watched) -> None:
    watched.process.kill()
    assert watched.heard.get(timeout=20)[0]
    assert not watched.path.exists(), "a file was left behind"


def test_a_process_that_ends_by_itself_is_heard_of(watched: Watched) -> None:
    watched.process.communicate("\n", timeout=20)
    assert watched.heard.get(timeout=20)[0]


def test_nothing_is_heard_of_while_it_lives_and_its_children_end(watched: Watched) -> None:
    with pytest.raises(queue.Empty):
        watched.heard.get(timeout=0.5)
    assert watched.process.poll() is None


def test_it_is_heard_of_while_the_kernel_has_not_told_of_the_processs_end(tmp_path: Path) -> None:
    # its main thread has ended and another one goes on, so the kernel cannot have told: as in a long tearing-down
    one = Watched(tmp_path, then="main thread")
    descriptor = os.pidfd_open(one.process.pid)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert one.process.stdin is not None
    one.process.stdin.write("\n")
    one.process.stdin.flush()
    try:
        assert one.heard.get(timeout=20)[0]
        assert not poll.poll(0), "the process has ended, so this shows nothing"
    finally:
        one.process.kill()
        one.process.wait()
        os.close(descriptor)


def test_only_the_main_thread_stands_for_its_process(tmp_path: Path) -> None:
    left: list[bool] = []
    thread = threading.Thread(target=lambda: left.append(leave_notice(tmp_path / "notice")))
    thread.start()
    thread.join()
    assert left == [False]
    assert not (tmp_path / "notice").exists()


@pytest.mark.parametrize("content", [None, b"", b"x"])
def test_what_cannot_be_used_is_passed_over(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "notice"
    if content is not None:
        path.write_bytes(content)
    assert take_notice(path) is None
    assert not path.exists()


def test_where_the_folder_is_full_a_process_lives_on_without_a_notice(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "full", 2**16) as folder:
        with suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        script = "import sys; from pathlib import Path; from torchelastic.processes.death_notice import leave_notice\n"
        script += "print(leave_notice(Path(sys.argv[1])))"
        done = subprocess.run([sys.executable, "-c", script, folder / "notice"], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
