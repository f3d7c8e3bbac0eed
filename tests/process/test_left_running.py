"""What the children of a killed process have left running is found by their folder, and by nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchelastic.launch.killed_launchers import end_what_was_left
from torchelastic.launch.run_address import leave_address
from torchelastic.processes.left_running import Sessions, end_all, left_running
from torchelastic.processes.own_folder import OwnFolder, make_folder
from torchelastic.rendezvous.url import RendezvousUrl, parse_url


@contextmanager
def child(folder: Path, *, of: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """The first process of a session, which is noted in a folder and has the name of one in its environment."""
    environment = {**os.environ, "A_SOCKET": f"{of or folder}/agent"}
    with subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True) as process:
        try:
            Sessions(folder).begun(process.pid)
            yield process
        finally:
            process.kill()


def test_it_is_found_and_ended(tmp_path: Path) -> None:
    assert left_running(tmp_path) == []
    with child(tmp_path) as first, child(tmp_path) as second, child(tmp_path / "x", of=tmp_path):
        found = left_running(tmp_path)
        assert {process.pid for process in found} == {first.pid, second.pid}
        Sessions(tmp_path).ended_in_order(second.pid)
        (left,) = left_running(tmp_path)
        assert left.pid == first.pid
        end_all([left], 60.0)
        assert left.has_ended
        assert first.wait(60) == -9
        assert second.poll() is None
    assert left_running(tmp_path) == []


TIDY = """
import multiprocessing, os, sys, time
from multiprocessing import resource_tracker, shared_memory
block = shared_memory.SharedMemory(create=True, size=4096)
print(block.name, resource_tracker._resource_tracker._pid, flush=True)
time.sleep(600)
"""


def test_what_is_ended_leaves_no_shared_memory_of_python(tmp_path: Path) -> None:
    environment = {**os.environ, "A_SOCKET": f"{tmp_path}/agent"}
    command = [sys.executable, "-c", TIDY]
    with subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        name, tracker = process.stdout.readline().split()
        assert Path("/dev/shm", name).exists()
        Sessions(tmp_path).begun(process.pid)
        left = left_running(tmp_path)
        assert {one.pid for one in left} == {process.pid, int(tracker)}
        end_all(left, 60.0)
        assert all(one.has_ended for one in left)
        assert not Path("/dev/shm", name).exists()


def test_a_session_whose_number_another_one_has_is_left_alone(tmp_path: Path) -> None:
    with child(tmp_path, of=tmp_path.with_name("another")):
        assert left_running(tmp_path) == []


def test_a_dead_process_s_folder_stays_as_long_as_what_it_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = OwnFolder(make_folder("te-"))
    with child(before.path) as left:
        before._file.close()  # as a kill does
        make_folder("te-")
        assert before.path.exists()
        left.kill()
        left.wait(60)
        make_folder("te-")
        assert not before.path.exists()


def url_of(run_id: str, endpoint: str) -> RendezvousUrl:
    return parse_url(f"etcd://{endpoint}/{run_id}?min_workers=1")


@pytest.mark.parametrize(
    ("run", "is_ended"),
    [
        (url_of("mine", "a:1,b:1"), True),
        (url_of("mine", "b:1,c:1"), True),
        (url_of("mine", "c:1"), False),
        (url_of("other", "a:1"), False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_launcher_of_a_run_ends_what_those_of_the_same_run_have_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    run: RendezvousUrl,
    is_ended: bool,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = OwnFolder(make_folder("te-"))
    leave_address(before.path, url_of("mine", "a:1,b:1"))
    with child(before.path) as left:
        end_what_was_left(run)
        assert left.poll() is None, "that launcher lives"
        before._file.close()  # as a kill does
        end_what_was_left(run)
        if is_ended:
            assert left.wait(60) == -9
            assert "the launcher of run 'mine' was killed here, and its workers have left running" in caplog.text
            assert f"sleep 600 (process {left.pid})" in caplog.text
        else:
            assert left.poll() is None
    assert before.path.exists() != is_ended
