"""Where the container of a job is, and whose."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.memory_jobs import content, dead_job, is_held, living_job, tmpfs_folder
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.memory import job, job_container
from torchelastic.checkpoint.memory.job import claim
from torchelastic.checkpoint.memory.owner import JOB_FILE, Claim, JobRecord, find_dead, put_claim
from torchelastic.checkpoint.shards.disk import REAL_DISK

BOUND_S = 20.0


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "TORCHELASTIC_MEMORY_ROOT"):
        monkeypatch.delenv(name, raising=False)
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


def test_a_job_without_identity_gets_no_container(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--rdzv-id"):
        job_container(root=root)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ValueError, match="--rdzv-id"):
        job_container(root=root)
    assert list(root.iterdir()) == []


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


def test_all_ranks_of_a_job_claim_one_container_at_once(root: Path) -> None:
    claims: list[Claim] = []
    barrier = threading.Barrier(8)

    def rank() -> None:
        barrier.wait(BOUND_S)
        claims.append(claim(root / "7", "job7"))

    threads = [threading.Thread(target=rank) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert len(claims) == 8
    assert len({claimed.record for claimed in claims}) == 1, "all hold the same file"
    assert content(root / "7") == [JOB_FILE]
    for claimed in claims:
        assert is_held(root / "7")
        claimed.close()
    assert not is_held(root / "7")


def test_a_container_of_another_job_is_refused_dead_or_alive(root: Path) -> None:
    base = dead_job(root / "7", "job7")
    before = content(base)
    with pytest.raises(CheckpointError, match=r"belongs to job 'job7', and this is job 'job8'.*job_container.*--dead"):
        claim(base, "job8")
    with claim(base, "job7"), pytest.raises(CheckpointError, match="belongs to job 'job7'"):
        claim(base, "job8")
    assert content(base) == before
    assert not is_held(base), "whoever was refused holds nothing"


def test_a_chosen_path_is_refused_while_another_job_lives_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job8")
    naps: list[float] = []
    with living_job(root / "7", "job7"), pytest.raises(CheckpointError, match="job 'job7', which is alive"):
        claim(root / "7", sleep=naps.append)
    assert len(naps) == job.CLAIM_ATTEMPTS
    assert json.loads((root / "7" / JOB_FILE).read_bytes())["run_id"] == "job7"


def test_a_chosen_path_of_a_dead_job_is_taken_over_by_all_ranks(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base = dead_job(root / "7", "job7")
    before = content(base)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job8")
    claims: list[Claim] = []
    threads = [threading.Thread(target=lambda: claims.append(claim(base))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert [claimed.record.run_id for claimed in claims] == ["job8"] * 4
    assert content(base) == before, "the checkpoints stay"
    assert caplog.text.count("was of job 'job7', which is dead") == 1
    for claimed in claims:
        assert is_held(base)
        claimed.close()
    assert not is_held(base)


@pytest.mark.parametrize("trap", ["text", "folder", "pipe", "link", "foreign"])
def test_a_file_that_is_no_claim_is_an_error_and_no_wait(root: Path, trap: str) -> None:
    path = root / JOB_FILE
    if trap == "text":
        path.write_text("mine")
    elif trap == "folder":
        path.mkdir()
    elif trap == "pipe":
        os.mkfifo(path)
    elif trap == "link":
        (root / "other").write_text("{}")
        path.symlink_to(root / "other")
    elif os.geteuid() == 0:
        put_claim(root, JobRecord("job7", "", 0.0), REAL_DISK, instead=False)
        os.chown(path, 4711, 4711)
    else:
        pytest.skip("only root can give a file away")
    with pytest.raises(CheckpointError, match=r"\.job"):
        claim(root, "job7")
    assert find_dead(root) == []
