"""A wrapped command ends with its parent, and is otherwise just the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping

import psutil
import pytest

from tests.waiting import is_gone, wait_until
from torchelastic.processes import dies_with_parent

PATIENCE_S = 60.0
FOREVER = ["sleep", "600"]


def output(argv: list[str], env: Mapping[str, str] | None = None) -> str:
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout


def test_the_command_dies_when_its_parent_is_killed() -> None:
    script = (
        "import subprocess, time\n"
        "from torchelastic.processes import dies_with_parent\n"
        f"child = subprocess.Popen(dies_with_parent({FOREVER}), stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_until(lambda: psutil.Process(pid).name() == "sleep", what="the wrapper becomes the command")
    parent.kill()
    parent.wait()
    wait_until(lambda: is_gone(pid), what="the command dies")


@pytest.mark.parametrize("is_gone_before", [False, True])
def test_a_process_may_end_with_another_one_that_did_not_start_it(is_gone_before: bool) -> None:
    script = (
        "import sys, threading, time\n"
        "from torchelastic.processes.lifeline import end_with\n"
        "sys.stdin.read(1)\n"
        "threading.Thread(target=end_with, args=(int(sys.argv[1]),)).start()\n"  # it need not live on
        "print('lives', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(FOREVER) as other:
        command = [sys.executable, "-c", script, str(other.pid)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            if is_gone_before:
                other.kill()
                other.wait(PATIENCE_S)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("!")
            process.stdin.flush()
            if not is_gone_before:
                assert process.stdout.readline() == "lives\n"
                assert process.poll() is None
                other.kill()
            assert process.wait(PATIENCE_S) == -9


def test_the_command_dies_with_the_thread_that_started_it() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        started.append(subprocess.Popen(dies_with_parent(FOREVER)))
        wait_until(lambda: psutil.Process(started[0].pid).name() == "sleep", what="the wrapper becomes the command")

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert started[0].wait(PATIENCE_S) == -9


@pytest.mark.parametrize("env", [{"LANG": "C"}, {"LC_CTYPE": "C.UTF-8", "PYTHONPATH": "/x", "A": "ü=\n1"}, {}])
def test_the_command_has_the_environment_that_it_was_given(env: dict[str, str]) -> None:
    command = ["/usr/bin/env", "-0"]
    assert sorted(output(dies_with_parent(command), env).split("\0")) == sorted(output(command, env).split("\0"))


def test_the_command_has_the_signal_dispositions_of_one_started_directly() -> None:
    # with its path, so that Python 3.13 starts both by posix_spawn, where glibc ignores two signals of its own
    command = [str(shutil.which("grep")), "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status"]
    assert output(dies_with_parent(command)) == output(command)


def test_the_command_gets_its_arguments_descriptors_and_input_unchanged() -> None:
    arguments = ["", "two words", "-c", "--", "'\"$x", "ü"]
    show = [sys.executable, "-c", "import sys; print(sys.argv[1:], sys.stdin.read())", *arguments]
    given = subprocess.run(dies_with_parent(show), input="in", capture_output=True, text=True, timeout=PATIENCE_S)
    assert given.stdout == f"{arguments} in\n"
    reader, writer = os.pipe()
    subprocess.run(
        dies_with_parent(["sh", "-c", f"echo passed > /proc/self/fd/{writer}"]), pass_fds=[writer], check=True
    )
    os.close(writer)
    assert os.read(reader, 100) == b"passed\n"
    os.close(reader)


@pytest.mark.parametrize(("command", "status"), [("no-such-command", 127), ("/etc/hostname", 126)])
def test_a_command_that_cannot_run_is_named_on_stderr(command: str, status: int) -> None:
    done = subprocess.run(dies_with_parent([command]), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == status
    assert done.stderr.startswith(f"cannot run {command}: ")
    assert len(done.stderr.splitlines()) == 1
