"""Where the container of a job is, and whose."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.process.memory_jobs import EMPTY, content, dead_job, entered, is_held, living_job, tmpfs_folder
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.memory import job, job_container
from torchelastic.checkpoint.memory.dead_jobs import JOB_FILE, find_dead
from torchelastic.checkpoint.store.fence import ENTER_TIMEOUT_S, Fence, OwnedError
from torchelastic.checkpoint.store.owner import FENCE_NAME, read_fence

BOUND_S = 20.0


@pytest.fixture
def root(no_job: None) -> Iterator[Path]:
    with tmpfs_folder() as folder:
        yield folder


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
