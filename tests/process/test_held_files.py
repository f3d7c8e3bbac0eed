"""What a process has locked is not held by its forks, which may outlive it: and who holds a lock, by name."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.format.pool import SlotPool, remove_left_overs
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.format.shard_writing import save_tree, write_whole
from torchelastic.checkpoint.format.slot import Slot
from torchelastic.processes import lock_holders
from torchelastic.processes.file_locks import lock_of_nobody
from torchelastic.processes.held_files import HeldFile
from torchelastic.processes.lock_holders import holders_of
from torchelastic.processes.own_folder import LOCK, OwnFolder


@contextmanager
def forked() -> Iterator[int]:
    """A child that lives meanwhile, as a worker of a data loader does."""
    reading, writing = os.pipe()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.write(tell, b"!")
        os.read(reading, 1)
        os._exit(0)
    assert os.read(told, 1) == b"!"
    try:
        yield child
    finally:
        os.close(writing)
        os.waitpid(child, 0)
        for descriptor in (reading, told, tell):
            os.close(descriptor)


def slot_in(folder: Path) -> Callable[[], object]:
    slot = Slot(4096, folder / ".tmp-1-slot")
    return slot.close


def folder_in(folder: Path) -> Callable[[], object]:
    (folder / "own").mkdir()
    own = OwnFolder(folder / "own")
    return own._file.close  # as its end does, which removes nothing


def file_in(folder: Path) -> Callable[[], object]:
    held = HeldFile(os.open(folder / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC))
    fcntl.flock(held.descriptor, fcntl.LOCK_EX)
    return held.close


@pytest.mark.parametrize(
    ("hold", "name"),
    [(slot_in, ".tmp-1-slot"), (folder_in, f"own/{LOCK}"), (file_in, "file")],
    ids=["slot", "folder", "file"],
)
def test_a_fork_does_not_hold_on_what_its_parent_has_let_go(
    tmp_path: Path, hold: Callable[[Path], Callable[[], object]], name: str
) -> None:
    let_go = hold(tmp_path)
    with forked():
        with lock_of_nobody(tmp_path / name) as is_free:
            assert is_free is False, "the parent holds it on"
        let_go()
        with lock_of_nobody(tmp_path / name) as is_free:
            assert is_free


def test_what_a_killed_process_has_hidden_is_removed_while_its_forks_live(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path)
    close = slot_in(tmp_path)
    with forked():
        close()  # the parent is gone
        assert remove_left_overs(tmp_path) == 1
    pool.close()


def test_a_fork_in_the_middle_of_a_write_keeps_no_reader_out(tmp_path: Path) -> None:
    with ExitStack() as forks:

        class Forking(Disk):
            def sync(self, descriptor: int, path: Path) -> None:
                super().sync(descriptor, path)
                forks.enter_context(forked())

        for number in range(2):
            path = tmp_path / f"shard-{number}"
            if number:
                write_whole(path, [memoryview(b"content")], Forking())
            else:
                save_tree(path, {"n": 1}, disk=Forking())
                with ShardReader(path) as shard:
                    assert shard.header.structure is not None
            with lock_of_nobody(path) as is_free:
                assert is_free


def test_a_closed_file_is_closed_once_and_never_another_one_with_its_number(tmp_path: Path) -> None:
    held = HeldFile(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT))
    number = held.descriptor
    held.close()
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    assert other == number
    held.close()
    os.fstat(other)
    os.close(other)


HOLD = (
    "import fcntl, os, sys\n"
    "d = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); fcntl.flock(d, fcntl.LOCK_SH)\n"
    "child = os.fork()\n"
    "if child: print(child, flush=True)\n"
    "else: sys.stdin.read()"
)


def test_who_holds_a_lock_is_named_also_where_who_took_it_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    assert holders_of(path) == []
    command = [sys.executable, "-c", HOLD, str(path), "secret\n\x1b[2J"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as taker:
        assert taker.stdout is not None
        assert taker.stdin is not None
        child = int(taker.stdout.readline())
        taker.wait(60)
        try:
            (holder,) = holders_of(path)
            assert holder.pid == child, "and not the one that /proc/locks has"
            assert str(holder).startswith(f"process {child} ({sys.executable} -c import fcntl")
            assert "\x1b" not in str(holder)
            with path.open() as opened:
                assert [one.pid for one in holders_of(path)] == [child], "who only has it open does not hold it"
                fcntl.flock(opened, fcntl.LOCK_SH)
                assert [one.pid for one in holders_of(path)] == sorted([child, os.getpid()])
        finally:
            taker.stdin.close()


@pytest.mark.parametrize(("lives", "expected"), [(True, [os.getpid()]), (False, [])], ids=["alive", "dead"])
def test_of_descriptors_that_are_not_shown_the_table_of_locks_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool, expected: Sequence[int]
) -> None:
    path = tmp_path / "lock"
    path.touch()
    pid = os.getpid() if lives else 2**22 + 1  # more than the kernel gives
    proc = tmp_path / "proc"
    (proc / "7").mkdir(parents=True)  # another user's
    lines = f"1: POSIX  ADVISORY  WRITE 1 fe:00:{path.stat().st_ino} 0 EOF\n"
    lines += (
        f"2: FLOCK  ADVISORY  READ {pid} fe:00:{path.stat().st_ino} 0 EOF\n3: FLOCK ADVISORY READ 1 fe:00:1 0 EOF\n"
    )
    (proc / "locks").write_text(lines)
    monkeypatch.setattr(lock_holders, "_PROC", proc)
    assert [one.pid for one in holders_of(path)] == expected
