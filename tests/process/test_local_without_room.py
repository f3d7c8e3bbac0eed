"""A folder of local checkpoints without room, or removed, costs none in durable storage. Real tmpfs: root may mount."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.process import tiered_work as work
from tests.process.local_ranks import Crew, succeeded
from tests.process.small_tmpfs import small_tmpfs
from torchelastic.checkpoint import DurableTier, KeepLast
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager

MIB = 2**20
CREW_SIZE = 2


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs that is too small for two states."""
    with small_tmpfs(tmp_path / "shm", 3 * MIB) as folder:
        yield folder


def state(step: int, mib: float = 2.0) -> BasicTensorAwareStateDict:
    return BasicTensorAwareStateDict({"w": torch.full((int(mib * MIB) // 4,), float(step))})


def durable(tmp_path: Path) -> DurableTier:
    return DurableTier(f"file://{tmp_path}/durable", KeepLast(20))


def loaded(manager: LocalCheckpointManager) -> tuple[float, int]:
    got, ckpt_id = manager.load()
    return float(got.to_tree()["w"].unique().item()), ckpt_id.iteration


@pytest.mark.parametrize("is_async", [False, True])
def test_what_the_folder_has_no_room_for_is_in_durable_storage_and_comes_back(
    shm: Path, tmp_path: Path, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    manager, queue = LocalCheckpointManager(shm / "job", durable=durable(tmp_path)), AsyncCallsQueue()
    for step in (1, 2, 3, 4):
        request = manager.save(state(step, mib=4.0), step, is_async=is_async)
        if request is not None:
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
        assert manager.wait_for_durable(30)
    queue.close()
    (line,) = [text for text in caplog.messages if "goes to durable storage alone" in text]
    for words in ("step-000000001", "has to allocate 4", "MiB on the tmpfs", "--shm-size", str(shm)):
        assert words in line
    assert len(manager.failures) == 4
    assert list(shm.rglob("*.shard")) == []
    manager.close()
    again = LocalCheckpointManager(shm / "job", durable=durable(tmp_path))
    assert again.find_latest() == 4
    assert loaded(again) == (4.0, 4)
    again.close()


def test_the_folder_takes_part_again_when_it_has_room(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "shm", 8 * MIB) as folder:
        manager = LocalCheckpointManager(folder / "job", durable=durable(tmp_path))
        manager.save(state(1), 1)
        filler = folder / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(folder).free))
        for step in (2, 3):
            manager.save(state(step, mib=3.0), step)
            assert manager.wait_for_durable(30)
        assert len(manager.failures) == 2
        assert manager.latest_iteration == 1
        filler.unlink()
        for step in (4, 5, 6):
            manager.save(state(step), step)
            assert manager.wait_for_durable(30)
        assert manager.latest_iteration == 6
        assert [path.name[:14] for path in (folder / "job").glob("step-*")] == ["step-000000006"]
        assert loaded(manager) == (6.0, 6)
        manager.close()


def test_without_durable_storage_the_error_says_what_is_needed(shm: Path) -> None:
    manager = LocalCheckpointManager(shm / "job")
    with pytest.raises(CheckpointError, match=r"has to allocate 4.*MiB on the tmpfs.*--shm-size"):
        manager.save(state(1, mib=4.0), 1)
    manager.save(state(2, mib=1.0), 2)
    assert loaded(manager) == (2.0, 2)
    manager.close()


@pytest.mark.parametrize("full_rank", [0, 1])
def test_one_host_without_room_costs_the_local_checkpoint_and_not_the_durable_one(
    crew: Crew, tmp_path: Path, full_rank: int
) -> None:
    with small_tmpfs(tmp_path / f"host-{full_rank}", MIB // 32):
        answers = succeeded(crew.run(work.save_locally_where_one_host_has_no_room, str(tmp_path), ranks=2))
    for rank, answer in enumerate(answers):
        assert answer["latest"] == 2
        assert answer["own"] == 2.0 + rank / 2
        assert answer["here"] == []
        assert len(answer["failures"]) == 2
        assert all("no room for a shard in memory" in failure for failure in answer["failures"])
