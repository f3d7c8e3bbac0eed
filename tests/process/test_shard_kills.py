"""A writer that is killed, stopped or refused at every call to the disk: what was complete stays complete."""

from __future__ import annotations

import errno
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.format.header import lay_out
from torchelastic.checkpoint.format.pool import SlotPool, remove_left_overs
from torchelastic.checkpoint.shards import flatten, load_tree, save_tree
from torchelastic.testing import FaultyDisk, pause_at, short_write_at

WAIT_S = 20.0


def state(number: int) -> dict[str, Any]:
    return {"w": torch.full((500,), float(number)), "n": number, "e": torch.empty(0)}


def number_in(path: Path) -> int:
    """Which state is stored there; all of it."""
    loaded = load_tree(path)
    assert torch.equal(loaded["w"], torch.full((500,), float(loaded["n"])))
    return int(loaded["n"])


def shards_in(folder: Path) -> dict[str, int]:
    return {path.name: number_in(path) for path in folder.iterdir() if not path.name.startswith(".")}


def hidden_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def save_a_file(folder: Path, disk: Disk) -> None:
    save_tree(folder / "new", state(2), disk=disk)


def save_in_slots(folder: Path, disk: Disk) -> None:
    """Two saves with a pool, the second one in place of the older shard."""
    pool = SlotPool(folder, disk=disk)
    for number in (2, 3, 4):
        flat = flatten(state(number))
        header = lay_out(flat, {})
        stage = pool.take(header)
        stage.copy([named.tensor for named in flat.tensors])
        stage = pool.seal(stage, header)
        pool.publish(stage, folder / f"slot-{number}")
        if number > 2:
            pool.delete(folder / f"slot-{number - 1}")
    pool.close()


def in_child(work: Callable[[], None]) -> int:
    """Forks, since importing torch anew would cost two seconds per case; returns the number of the process."""
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # those of the parent are not here
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def ended(pid: int, flags: int = 0) -> int:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG | flags)
        if found:
            return status
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child did not end within {WAIT_S} s")


def calls_of(work: Callable[[Path, Disk], None], folder: Path) -> list[str]:
    folder.mkdir()
    disk = FaultyDisk()
    work(folder, disk)
    assert len(disk.calls) > 5, disk.calls
    return disk.calls


@pytest.fixture(params=[save_a_file, save_in_slots])
def work(request: pytest.FixtureRequest) -> Callable[[Path, Disk], None]:
    chosen: Callable[[Path, Disk], None] = request.param
    return chosen


def folders(tmp_path: Path, count: int) -> Iterator[tuple[int, Path]]:
    """A folder per call that is to fail, with an older shard in it."""
    for number in range(count):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_tree(folder / "old", state(1))
        yield number, folder


def test_short_writes_lose_nothing(tmp_path: Path) -> None:
    count = calls_of(save_a_file, tmp_path / "trial").count("write_some")
    disk = FaultyDisk(*(short_write_at(number) for number in range(2, 2 + count)))  # behind create and write
    folder = tmp_path / "short"
    folder.mkdir()
    save_a_file(folder, disk)
    disk.require_struck()
    assert shards_in(folder) == {"new": 2}
    assert (folder / "new").read_bytes() == (tmp_path / "trial" / "new").read_bytes()


def test_a_stopped_writer_is_left_alone_and_goes_on(work: Callable[[Path, Disk], None], tmp_path: Path) -> None:
    calls = calls_of(work, tmp_path / "trial")
    for number, folder in folders(tmp_path, len(calls)):
        pid = in_child(lambda: work(folder, FaultyDisk(pause_at(number))))  # noqa: B023 - called at once
        assert os.WIFSTOPPED(ended(pid, os.WUNTRACED)), calls[number]
        assert remove_left_overs(folder) == 0, f"took the file of a living writer before {calls[number]}"
        os.kill(pid, signal.SIGCONT)
        assert ended(pid) == 0, calls[number]
        assert len(shards_in(folder)) == 2
        assert not hidden_in(folder)


def test_a_file_that_is_taken_for_a_left_over_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its creation and its lock a new file looks like one whose writer is dead."""
    real_open = os.open
    removed: list[int] = []

    def open_and_lose(path: Any, flags: int, mode: int = 0o777) -> int:
        descriptor = real_open(path, flags, mode)
        if flags & os.O_EXCL and len(removed) < 3:
            monkeypatch.setattr(os, "open", real_open)
            removed.append(remove_left_overs(tmp_path))
            monkeypatch.setattr(os, "open", open_and_lose)
        return descriptor

    monkeypatch.setattr(os, "open", open_and_lose)
    save_a_file(tmp_path, Disk())
    assert removed == [1, 1, 1]
    assert shards_in(tmp_path) == {"new": 2}


def test_a_disk_without_locks_works_and_reuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    save_a_file(tmp_path, Disk())
    assert shards_in(tmp_path) == {"new": 2}
    disk = FaultyDisk()
    save_in_slots(tmp_path, disk)
    assert disk.calls.count("create") == 3
    assert shards_in(tmp_path) == {"new": 2, "slot-4": 4}
    (tmp_path / ".tmp-1-dead").touch()
    assert remove_left_overs(tmp_path) == 0
