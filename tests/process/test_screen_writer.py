"""What the launcher writes to its screen: nobody waits for it, and the files of the workers have every byte."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from tests.process.supervised import failures_into
from tests.waiting import wait_until
from torchelastic.agent.causes import FailedWorker, report_of
from torchelastic.agent.screen_writer import ScreenWriter
from torchelastic.agent.supervisor import Supervisor
from torchelastic.agent.terminal import Terminal

PATIENCE_S = 60.0


def lost(lines: int) -> str:
    return f"{lines} lost"


@contextmanager
def a_pipe() -> Iterator[tuple[int, TextIO]]:
    """A pipe: the end to read from, and the one to write to, as standard output is."""
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w", encoding="ascii") as stream:
        yield read_end, stream
    os.close(read_end)


def read_until(read_end: int, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        part = os.read(read_end, 2**16)
        assert part, data[-100:]
        data += part
    return data


def within_patience(work: Callable[[], object]) -> None:
    """Do it, on a thread, so that a hang fails the test."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it waits for somebody who does not read"


# --- the writer -------------------------------------------------------------------------------------------------------


def test_what_is_written_comes_in_order_and_is_there_after_the_end() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    writer = ScreenWriter(stdout, stderr, lost)
    for number in range(1000):
        writer.write("stdout", f"{number}\n")
    print("to the other one", file=writer.file("stderr"))
    writer.close()
    assert stdout.getvalue().split() == [str(number) for number in range(1000)]
    assert stderr.getvalue() == "to the other one\n"


def test_a_screen_that_takes_nothing_holds_nobody_up_and_is_told_what_it_has_missed() -> None:
    line = "x" * 99 + "\n"
    with a_pipe() as (read_end, stream):
        writer = ScreenWriter(stream, stream, lost, most_waiting=200_000)

        def write_many() -> None:
            for _ in range(10_000):
                writer.write("stdout", line)

        within_patience(write_many)
        told = read_until(read_end, b" lost\n").decode()
        writer.write("stdout", "once more: ü\n")
        within_patience(writer.close)
        told += os.read(read_end, 2**16).decode()
    shown = told.count(line)
    assert 1 <= shown < 10_000
    assert told == line * shown + f"{10_000 - shown} lost\nonce more: \\xfc\n"


def test_a_screen_that_is_gone_is_given_up_and_the_other_one_goes_on() -> None:
    stderr = io.StringIO()
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w", encoding="utf-8") as stream:
        writer = ScreenWriter(stream, stderr, lost)
        for number in range(3):
            writer.write("stdout", "nobody reads\n")
            writer.write("stderr", f"{number}\n")
        within_patience(writer.close)
    assert stderr.getvalue() == "0\n1\n2\n"


# --- workers ----------------------------------------------------------------------------------------------------------


def run_workers(script: str, nproc: int, terminal: Terminal, log_dir: Path | None = None) -> list[FailedWorker]:
    """Run them to their end, each once; returns what has failed, in the order in which that was known."""
    failures: list[FailedWorker] = []

    async def run() -> None:
        supervisor = Supervisor(
            [sys.executable, "-u", "-c", script],
            nproc,
            environment=dict(os.environ),
            max_restarts=0,
            log_dir=log_dir,
            run_is_over=lambda: False,
            publish=failures_into(failures),
            terminal=terminal,
        )
        supervisor.start()
        try:
            await asyncio.wait_for(supervisor.all_over.wait(), PATIENCE_S)
        finally:
            await supervisor.stop(1.0)

    asyncio.run(run())
    return failures


def test_workers_do_not_wait_for_a_screen_that_takes_nothing_and_their_files_are_whole(tmp_path: Path) -> None:
    script = "for n in range(20_000): print(n, 'x' * 100)"
    with a_pipe() as (_, stream):
        writer = ScreenWriter(stream, stream, lost, most_waiting=100_000)
        assert run_workers(script, 1, Terminal(writer.write), tmp_path) == []
    expected = "".join(f"{n} {'x' * 100}\n" for n in range(20_000))
    file = tmp_path / "worker_0.0.log"
    assert wait_until(lambda: file.read_text() == expected), "the agent does not wait for the disk"


def test_screen_and_file_have_every_line_also_the_last_before_a_kill(tmp_path: Path) -> None:
    script = """
import os, sys
for _ in range(500):
    print("careful", file=sys.stderr)
os.kill(os.getpid(), 9)
"""
    shown: list[str] = []
    (killed,) = run_workers(script, 1, Terminal(lambda _stream, text: shown.append(text)), tmp_path)
    assert wait_until(lambda: (tmp_path / "worker_0.0.log").read_text() == "careful\n" * 500)
    assert "".join(shown) == "[worker 0] careful\n" * 500
    assert (killed.exit_code, killed.lines[-1]) == (-9, "careful")


CULPRIT_ENDS_LAST = """
import atexit, os, sys, time
from pathlib import Path

def wait_for(name):
    while not Path({folder!r}, name).exists():
        time.sleep(0.01)

if os.environ["LOCAL_RANK"] == "1":
    atexit.register(wait_for, "the other one has ended")
    atexit.register(Path({folder!r}, "it has raised").touch)
    raise ValueError("boom")
wait_for("it has raised")
raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")
"""


def test_the_worker_that_raised_first_is_the_culprit_though_it_ends_last(tmp_path: Path) -> None:
    class OnEnd(Terminal):
        def ended(self, worker: int) -> None:
            (tmp_path / "the other one has ended").touch()
            super().ended(worker)

    failures = run_workers(
        CULPRIT_ENDS_LAST.format(folder=str(tmp_path)), 2, OnEnd(lambda _stream, _text: None), tmp_path / "logs"
    )
    assert [failed.worker for failed in failures] == [0, 1]
    report = report_of(failures)
    assert report is not None
    first, *_, raised, other = report.text().splitlines()
    assert first == f"worker 1 failed: exit code 1, log {tmp_path / 'logs' / 'worker_1.0.log'}"
    assert raised == "ValueError: boom"
    assert other == "then worker 0 failed: exit code 1: RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1"
    assert failures[1].at_s < failures[0].at_s, "its traceback came first"
