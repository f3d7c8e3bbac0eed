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

from tests.process.memory_jobs import content, dead_job, is_held, living_job, tmpfs_folder
from torchelastic.checkpoint.memory.job import claim
from torchelastic.checkpoint.memory.owner import (
    JOB_FILE,
    Claim,
    JobRecord,
    find_dead,
    open_claim,
    put_claim,
    remove_dead,
)
from torchelastic.checkpoint.shards.disk import REAL_DISK, Disk
from torchelastic.processes.file_locks import lock_file

BOUND_S = 20.0


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "TORCHELASTIC_MEMORY_ROOT"):
        monkeypatch.delenv(name, raising=False)
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
    claimed = claim(root / "7")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # as a worker of a data loader
        try:
            os.close(writing)
            os.read(reading, 1)
        finally:
            os._exit(0)
    os.close(reading)
    claimed.close()  # the parent is gone
    assert find_dead(root) == []
    os.close(writing)
    os.waitpid(child, 0)
    assert [dead.base for dead in find_dead(root)] == [root / "7"]


def test_a_container_in_which_somebody_reads_or_writes_without_a_claim_is_not_dead(root: Path) -> None:
    base = dead_job(root / "7")
    (dead,) = find_dead(root)
    for name, operation in (
        (".tmp-1-slot", fcntl.LOCK_EX),
        ("step-20_ckpt/step-000000020.e1.r0.g0.5f0c1a2b.shard-00000-of-00001.shard", 1),
    ):
        with (base / name).open("rb") as file:
            fcntl.flock(file, operation)
            assert find_dead(root) == []
            assert not remove_dead(dead)
    assert remove_dead(dead)


def test_what_was_left_on_a_disk_or_before_a_reboot_is_not_called_dead(root: Path, tmp_path: Path) -> None:
    if not str(tmp_path).startswith("/dev/shm"):
        dead_job(tmp_path / "7")
        assert find_dead(tmp_path) == []
    (root / "8").mkdir()
    made = put_claim(root / "8", JobRecord("job8", "another boot", 0.0), REAL_DISK, instead=False)
    assert made is not None
    made.close()
    assert find_dead(root) == []


# --- removing, while a job starts -------------------------------------------------------------------------------------


def test_a_job_that_came_back_after_the_listing_keeps_its_container(root: Path) -> None:
    base = dead_job(root / "7", "job7")
    (dead,) = find_dead(root)
    before = content(base)
    with claim(base, "job7"):
        assert not remove_dead(dead)
    assert content(base) == before
    with claim(base, "job7"):
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

    def publish(self, source: Path, target: Path) -> None:
        self._reach("publish")
        super().publish(source, target)

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
        self.claims: list[Claim] = []
        self.base = base
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.claims.append(claim(self.base, "job7", sleep=self._nap))

    def _nap(self, pause_s: float) -> None:
        self.tried.set()
        time.sleep(pause_s)

    def start(self) -> None:
        self.thread.start()
        assert self.tried.wait(BOUND_S), "it got the lock that somebody else holds"

    def finish(self) -> Claim:
        self.thread.join(BOUND_S)
        (claimed,) = self.claims
        return claimed


def test_a_job_that_starts_just_before_the_container_is_hidden_gets_a_new_one(root: Path) -> None:
    base = dead_job(root / "7", "job7")
    starting = Starting(base)
    assert remove_dead(find_dead(root)[0], disk=Meanwhile("rename", starting.start))
    with starting.finish():
        assert content(base) == [JOB_FILE]
        assert is_held(base)
        assert sorted(path.name for path in root.iterdir()) == ["7"]


def test_a_job_that_starts_while_the_hidden_container_is_removed_keeps_its_new_one(root: Path) -> None:
    base = dead_job(root / "7", "job7")
    claims: list[Claim] = []

    def start() -> None:
        claims.append(claim(base, "job7"))
        (base / "slot").touch()

    assert remove_dead(find_dead(root)[0], disk=Meanwhile("remove_folder", start))
    assert content(base) == [JOB_FILE, "slot"]
    assert claims[0].base == base
    assert is_held(base)
    claims[0].close()


def test_a_job_that_opened_the_claim_of_a_container_that_then_goes_begins_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = dead_job(root / "7", "job7")
    (dead,) = find_dead(root)
    removed: list[bool] = []

    def late(descriptor: int, operation: int) -> bool:
        monkeypatch.setattr("torchelastic.checkpoint.memory.owner.lock_file", lock_file)
        removed.append(remove_dead(dead))
        return lock_file(descriptor, operation)

    monkeypatch.setattr("torchelastic.checkpoint.memory.owner.lock_file", late)
    with claim(base, "job7"):
        assert removed == [True]
        assert content(base) == [JOB_FILE]
        assert is_held(base)


@pytest.mark.parametrize("method", ["create", "publish"])
def test_a_container_that_goes_while_it_is_claimed_first_is_made_again(root: Path, method: str) -> None:
    disk = Meanwhile(method, lambda: shutil.rmtree(root / "7"))
    with claim(root / "7", "job7", disk=disk):
        assert disk.done
        assert content(root / "7") == [JOB_FILE]


def test_a_container_that_is_new_since_its_claim_was_opened_is_not_called_dead(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = dead_job(root / "7", "job7")
    (dead,) = find_dead(root)
    claims: list[Claim] = []

    def late(descriptor: int, operation: int) -> bool:
        monkeypatch.setattr("torchelastic.checkpoint.memory.owner.lock_file", lock_file)
        assert remove_dead(dead)
        claims.append(claim(base, "job7"))
        return lock_file(descriptor, operation)  # of the one that is gone: nobody else has it

    monkeypatch.setattr("torchelastic.checkpoint.memory.owner.lock_file", late)
    assert find_dead(root) == []
    assert claims[0].base == base
    assert is_held(base)
    claims[0].close()


_KILLED_REMOVER = """
import sys
from pathlib import Path
from torchelastic.checkpoint.memory.owner import find_dead, remove_dead
from torchelastic.testing.disk_faults import FaultyDisk, kill_at
remove_dead(find_dead(Path(sys.argv[1]))[0], disk=FaultyDisk(kill_at(int(sys.argv[2]))))
"""


@pytest.mark.parametrize("call", [0, 2])
def test_a_remover_that_is_killed_leaves_what_the_next_one_removes(root: Path, call: int) -> None:
    base = dead_job(root / "7", "job7")
    done = subprocess.run([sys.executable, "-c", _KILLED_REMOVER, str(root), str(call)], timeout=BOUND_S, check=False)
    assert done.returncode == -signal.SIGKILL
    assert base.exists() == (call == 0), "hidden before anything of it goes"
    with claim(base, "job7"):
        assert content(base) == ([JOB_FILE] if call else sorted([JOB_FILE, ".tmp-1-slot", *content(base)[2:]]))
        left = find_dead(root)
        assert [dead.is_half_removed for dead in left] == [True] * (call > 0)
        assert [dead.run_id for dead in left] == ["job7"] * (call > 0)
        assert all(remove_dead(dead) for dead in left)
        assert list(root.iterdir()) == [base]


_REMOVER = """
import sys
from pathlib import Path
from torchelastic.checkpoint.memory.owner import find_dead, remove_dead
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
    with claim(base, "job7"):
        slot = base / f"slot-{number}"
        slot.touch()
        found = open_claim(base)
        assert found is not None
        with found:
            return found.is_current and slot.exists()
