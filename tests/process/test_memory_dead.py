"""Which jobs are dead, and what happens when one starts while what it has left is removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.memory_jobs import EMPTY, content, dead_job, entered, is_held, living_job, tmpfs_folder
from torchelastic.checkpoint.memory.dead_jobs import JOB_FILE, find_dead, remove_dead
from torchelastic.checkpoint.shards.disk import Disk
from torchelastic.checkpoint.store.fence import Fence
from torchelastic.processes.file_locks import lock_file

BOUND_S = 20.0


@pytest.fixture
def root(no_job: None) -> Iterator[Path]:
    with tmpfs_folder() as folder:
        yield folder


# --- alive or dead ----------------------------------------------------------------------------------------------------


def test_a_killed_job_is_dead_at_once_and_a_living_one_is_not(root: Path) -> None:
    with living_job(root / "user" / "7", "job7") as process:
        (root / "user" / "7" / "slot").write_bytes(b"x" * 2**20)
        assert find_dead(root) == []
        process.send_signal(signal.SIGSTOP)
        assert find_dead(root) == [], "a stopped process lives"
        process.kill()
        process.wait(BOUND_S)
        (dead,) = find_dead(root)
    assert (dead.base, dead.run_id) == (root / "user" / "7", "job7")
    assert dead.size_bytes >= 2**20
    assert dead.changed_s >= dead.created_s > 0
    assert [one.base for one in find_dead(root / "user" / "7")] == [dead.base], "a container itself may be given"


def test_a_fork_of_a_dead_rank_still_has_the_container(root: Path) -> None:
    fence = Fence(root / "7", owner_lock=JOB_FILE)
    fence.enter("")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # as a worker of a data loader
        try:
            os.close(writing)
            os.read(reading, 1)
        finally:
            os._exit(0)
    os.close(reading)
    fence.release()  # the parent is gone
    assert find_dead(root) == []
    os.close(writing)
    os.waitpid(child, 0)
    assert [dead.base for dead in find_dead(root)] == [root / "7"]


def test_a_container_in_which_somebody_reads_or_writes_without_entering_it_is_not_dead(root: Path) -> None:
    base = dead_job(root / "7")
    (dead,) = find_dead(root)
    for name, operation in (
        (".tmp-1-slot", fcntl.LOCK_EX),
        ("step-000000020.e1.r0.g0.5f0c1a2b/shard-00000-of-00002.shard", 1),
    ):
        with (base / name).open("rb") as file:
            fcntl.flock(file, operation)
            assert find_dead(root) == []
            assert not remove_dead(dead)
    assert remove_dead(dead)


def test_what_lies_on_a_disk_or_belongs_to_something_else_is_not_called_dead(root: Path, tmp_path: Path) -> None:
    if not str(tmp_path).startswith("/dev/shm"):
        dead_job(tmp_path / "7")
        assert find_dead(tmp_path) == []
    tier = Fence(root / "8")  # of a MemoryTier, say
    tier.claim("job8", "rank 0")
    tier.release()
    assert find_dead(root) == []


# --- removing, while a job starts -------------------------------------------------------------------------------------


def test_a_job_that_came_back_after_the_listing_keeps_its_container(root: Path) -> None:
    base = dead_job(root / "7", "job7")
    (dead,) = find_dead(root)
    before = content(base)
    with entered(base, "job7"):
        assert not remove_dead(dead)
    assert content(base) == before
    with entered(base, "job7"):
        (base / "slot").write_bytes(b"z" * 4096)
    assert not remove_dead(dead), "it was in use since it was listed"
    assert remove_dead(find_dead(root)[0])


class Meanwhile(Disk):
    """Does something before a method is called the first time."""

    def __init__(self, method: str, action: Callable[[], object]) -> None:
        self.method, self.action, self.done = method, action, False

    def _reach(self, method: str) -> None:
        if method == self.method and not self.done:
            self.done = True
            self.action()

    def rename(self, source: Path, target: Path) -> None:
        self._reach("rename")
        super().rename(source, target)

    def remove_folder(self, path: Path) -> None:
        self._reach("remove_folder")
        super().remove_folder(path)

    def create(self, path: Path) -> int:
        self._reach("create")
        return super().create(path)


class Starting:
    """A job that starts in another thread; `tried` when its first attempt has failed."""

    def __init__(self, base: Path) -> None:
        self.tried = threading.Event()
        self.fence = Fence(base, owner_lock=JOB_FILE, sleep=self._nap)
        self.thread = threading.Thread(target=self.fence.enter, args=("job7",))

    def _nap(self, pause_s: float) -> None:
        self.tried.set()
        time.sleep(pause_s)

    def start(self) -> None:
        self.thread.start()
        assert self.tried.wait(BOUND_S), "it got the lock that somebody else holds"

    def finish(self) -> Fence:
        self.thread.join(BOUND_S)
        assert not self.thread.is_alive()
        return self.fence


def test_a_job_that_starts_just_before_the_container_is_hidden_gets_a_new_one(root: Path) -> None:
    base = dead_job(root / "7", "job7")
    starting = Starting(base)
    assert remove_dead(find_dead(root)[0], disk=Meanwhile("rename", starting.start))
    fence = starting.finish()
    assert content(base) == EMPTY
    assert is_held(base)
    assert sorted(path.name for path in root.iterdir()) == ["7"]
    fence.release()


def test_a_job_that_starts_while_the_hidden_container_is_removed_keeps_its_new_one(root: Path) -> None:
    base = dead_job(root / "7", "job7")
    fence = Fence(base, owner_lock=JOB_FILE)

    def start() -> None:
        fence.enter("job7")
        (base / "slot").touch()

    assert remove_dead(find_dead(root)[0], disk=Meanwhile("remove_folder", start))
    assert content(base) == [*EMPTY, "slot"]
    assert is_held(base)
    fence.release()


def test_a_job_that_opened_the_lock_of_a_container_that_then_goes_begins_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = dead_job(root / "7", "job7")
    (dead,) = find_dead(root)
    removed: list[bool] = []

    def late(descriptor: int, operation: int) -> bool:
        monkeypatch.setattr("torchelastic.checkpoint.store.owner.lock_file", lock_file)
        removed.append(remove_dead(dead))
        return lock_file(descriptor, operation)

    monkeypatch.setattr("torchelastic.checkpoint.store.owner.lock_file", late)
    with entered(base, "job7"):
        assert removed == [True]
        assert content(base) == EMPTY
        assert is_held(base)


@pytest.mark.parametrize("method", ["create", "rename"])
def test_a_container_that_goes_while_it_is_entered_first_is_made_again(root: Path, method: str) -> None:
    disk = Meanwhile(method, lambda: shutil.rmtree(root / "7"))
    with entered(root / "7", "job7", disk=disk):
        assert disk.done
        assert content(root / "7") == EMPTY


def test_a_container_that_is_new_since_its_lock_was_opened_is_not_called_dead(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = dead_job(root / "7", "job7")
    (dead,) = find_dead(root)
    fence = Fence(base, owner_lock=JOB_FILE)

    def late(descriptor: int, operation: int) -> bool:
        monkeypatch.setattr("torchelastic.processes.file_locks.lock_file", lock_file)
        assert remove_dead(dead)
        fence.enter("job7")
        return lock_file(descriptor, operation)  # of the one that is gone: nobody else has it

    monkeypatch.setattr("torchelastic.processes.file_locks.lock_file", late)
    assert find_dead(root) == []
    assert is_held(base)
    fence.release()


_KILLED_REMOVER = """
import sys
from pathlib import Path
from torchelastic.checkpoint.memory.dead_jobs import find_dead, remove_dead
from torchelastic.testing.disk_faults import FaultyDisk, kill_at
remove_dead(find_dead(Path(sys.argv[1]))[0], disk=FaultyDisk(kill_at(int(sys.argv[2]))))
"""


@pytest.mark.parametrize("call", [0, 2])
def test_a_remover_that_is_killed_leaves_what_the_next_one_removes(root: Path, call: int) -> None:
    base = dead_job(root / "7", "job7")
    done = subprocess.run([sys.executable, "-c", _KILLED_REMOVER, str(root), str(call)], timeout=BOUND_S, check=False)
    assert done.returncode == -signal.SIGKILL
    assert base.exists() == (call == 0), "hidden before anything of it goes"
    with entered(base, "job7"):
        assert content(base) == (EMPTY if call else sorted([*EMPTY, ".tmp-1-slot", *content(base)[4:]]))
        left = find_dead(root)
        assert [dead.is_half_removed for dead in left] == [True] * (call > 0)
        assert [dead.run_id for dead in left] == ["job7"] * (call > 0)
        assert all(remove_dead(dead) for dead in left)
        assert list(root.iterdir()) == [base]


_REMOVER = """
import sys
from pathlib import Path
from torchelastic.checkpoint.memory.dead_jobs import find_dead, remove_dead
print("ready", flush=True)
removed = 0
while not Path(sys.argv[2]).exists():
    removed += sum(remove_dead(dead) for dead in find_dead(Path(sys.argv[1])))
print(removed)
"""


def test_jobs_that_start_again_and_again_beside_a_remover_always_have_their_container(root: Path) -> None:
    jobs, stop = root / "jobs", root / "stop"
    jobs.mkdir()
    command = [sys.executable, "-c", _REMOVER, str(jobs), str(stop)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as remover:
        assert remover.stdout is not None
        assert remover.stdout.readline() == "ready\n"
        try:
            intact = sum(starts_and_stays(jobs / "7", number) for number in range(400))
        finally:
            stop.touch()
        removed = int(remover.communicate(timeout=BOUND_S)[0])
    assert intact == 400
    assert removed > 0, "the remover never met a dead one: nothing was tried"


def starts_and_stays(base: Path, number: int) -> bool:
    with entered(base, "job7"):
        slot = base / f"slot-{number}"
        slot.touch()
        return is_held(base) and slot.exists()
