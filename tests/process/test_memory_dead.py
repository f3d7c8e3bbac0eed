"""Where the container of a job is and whose, which jobs are dead, and what happens when one starts meanwhile."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.process.memory_jobs import EMPTY, content, dead_job, entered, is_held, living_job, tmpfs_folder
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.memory import job, job_container
from torchelastic.checkpoint.store.fence import ENTER_TIMEOUT_S, Fence, OwnedError
from torchelastic.checkpoint.store.host_memory.dead_jobs import JOB_FILE, find_dead, remove_dead
from torchelastic.checkpoint.store.owner import FENCE_NAME, read_fence
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


def test_a_fork_of_a_dead_rank_does_not_have_the_container(root: Path) -> None:
    fence = Fence(root / "7", owner_lock=JOB_FILE)
    fence.enter("")
    reading, writing = os.pipe()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:  # as a worker of a data loader
        try:
            os.close(writing)
            os.write(tell, b"!")
            os.read(reading, 1)
        finally:
            os._exit(0)
    os.close(reading)
    assert os.read(told, 1) == b"!"
    assert find_dead(root) == []
    fence.release()  # the parent is gone
    assert [dead.base for dead in find_dead(root)] == [root / "7"]
    for descriptor in (writing, told, tell):
        os.close(descriptor)
    os.waitpid(child, 0)


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


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_job_that_opened_the_lock_of_a_container_that_then_goes_begins_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch, is_made_anew: bool
) -> None:
    base = dead_job(root / "7", "job7")
    (dead,) = find_dead(root)
    another = Fence(base, owner_lock=JOB_FILE)
    removed: list[bool] = []

    def late(descriptor: int, operation: int) -> bool:
        monkeypatch.setattr("torchelastic.checkpoint.store.owner.lock_file", lock_file)
        removed.append(remove_dead(dead))
        if is_made_anew:
            another.enter("job7")
        return lock_file(descriptor, operation)

    monkeypatch.setattr("torchelastic.checkpoint.store.owner.lock_file", late)
    with entered(base, "job7"):
        another.release()
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
from torchelastic.checkpoint.store.host_memory.dead_jobs import find_dead, remove_dead
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


# --- where ------------------------------------------------------------------------------------------------------------


def test_a_job_finds_its_container_again_and_another_job_gets_another(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MEMORY_ROOT", str(root))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job/7")
    first = job_container()
    assert str(first) == f"{root}/torchelastic-{os.geteuid()}/job=2F7"
    assert job_container() == first
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job/8")
    assert job_container() != first
    assert job_container("job/7", root) == first
    assert (root / f"torchelastic-{os.geteuid()}").stat().st_mode & 0o777 == 0o700


def test_a_disk_is_never_taken_silently(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(job, "is_in_memory", lambda path: False)
    with pytest.raises(CheckpointError, match=r"/dev/shm is not in memory.*set TORCHELASTIC_MEMORY_ROOT"):
        job_container("job7")
    assert str(job_container("job7", tmp_path)).startswith(str(tmp_path))
    assert "is on a disk" in caplog.text


def test_a_root_that_cannot_be_used_is_named(root: Path) -> None:
    with pytest.raises(ValueError, match="absolute"):
        job_container("job7", "shm")
    (root / "file").touch()
    for path in (root / "missing", root / "file"):
        with pytest.raises(CheckpointError, match="no folder that this user can write: set TORCHELASTIC_MEMORY_ROOT"):
            job_container("job7", path)


@pytest.mark.parametrize("made_up", [str(uuid.UUID(int=7, version=4)), "standalone-0123abcd"])
def test_a_run_id_that_a_launcher_makes_up_at_each_start_is_warned_of(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, made_up: str
) -> None:
    job_container(made_up, root)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    job_container(root=root)
    assert caplog.text == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", made_up)
    assert job_container(root=root).name == made_up
    assert "a restart would not find its memory" in caplog.text


@pytest.mark.parametrize("trap", ["link", "file", "open", "foreign"])
def test_the_folder_of_the_user_is_not_taken_from_others(root: Path, trap: str) -> None:
    folder = root / f"torchelastic-{os.geteuid()}"
    if trap == "link":
        (root / "theirs").mkdir()
        folder.symlink_to(root / "theirs")
    elif trap == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o770 if trap == "open" else 0o700)
    if trap == "foreign":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, 4711, 4711)
    with pytest.raises(CheckpointError, match="others may write" if trap == "open" else "no folder of this user"):
        job_container("job7", root)


# --- whose ------------------------------------------------------------------------------------------------------------


def test_all_ranks_of_a_job_enter_one_container_at_once(root: Path) -> None:
    with ExitStack() as ranks, ThreadPoolExecutor(8) as pool:
        members = [*pool.map(lambda _: entered(root / "7", "job7"), range(8))]
        assert [*pool.map(ranks.enter_context, members)] == ["job7"] * 8
        assert content(root / "7") == EMPTY
        assert is_held(root / "7")
    assert not is_held(root / "7")


@pytest.mark.parametrize(("first", "second", "whose"), [("", "job7", ""), ("job7", "", "job7"), ("", "", "")])
def test_a_container_or_a_job_without_a_run_id_is_never_refused(
    root: Path, first: str, second: str, whose: str
) -> None:
    with entered(root / "7", first), entered(root / "7", second) as run_id:
        assert run_id == whose


def test_a_container_is_refused_while_another_job_lives_there(root: Path) -> None:
    naps: list[float] = []
    with living_job(root / "7", "job7") as other:
        fence = Fence(root / "7", owner_lock=JOB_FILE, sleep=naps.append, monotonic=lambda: sum(naps))
        with pytest.raises(OwnedError, match=rf"run 'job7' \(entered, process {other.pid} .*which is alive"):
            fence.enter("job8")
        assert sum(naps) >= ENTER_TIMEOUT_S
        assert read_fence(root / "7").run_id == "job7"
        other.kill()
        other.wait(BOUND_S)
        assert not is_held(root / "7"), "whoever was refused holds nothing"


def test_a_container_of_a_dead_job_is_taken_over_by_all_ranks(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = dead_job(root / "7", "job7")
    before = content(base)
    with ExitStack() as ranks, ThreadPoolExecutor(4) as pool:
        members = [entered(base, "job8") for _ in range(4)]
        assert [*pool.map(ranks.enter_context, members)] == ["job8"] * 4
        assert content(base) == before, "the checkpoints stay"
        assert caplog.text.count("was of run 'job7', which has ended") == 1
        assert is_held(base)
    assert not is_held(base)


def test_a_container_whose_fence_is_damaged_is_entered_and_mended(root: Path) -> None:
    base = dead_job(root / "7", "job7")
    (base / FENCE_NAME).write_text("mine")
    assert [dead.run_id for dead in find_dead(root)] == [None]
    with entered(base, "job8"):
        assert read_fence(base).run_id == "job8"


@pytest.mark.parametrize("trap", ["folder", "link"])
def test_a_lock_that_is_no_file_is_an_error_and_no_wait(root: Path, trap: str) -> None:
    path = root / JOB_FILE
    if trap == "folder":
        path.mkdir()
    else:
        (root / "other").touch()
        path.symlink_to(root / "other")
    began_s = time.monotonic()
    with pytest.raises(CheckpointError, match=r"\.job"):
        Fence(root, owner_lock=JOB_FILE).enter("job7")
    assert time.monotonic() - began_s < ENTER_TIMEOUT_S
    assert find_dead(root) == []
