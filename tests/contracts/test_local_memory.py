"""Contract: a manager of local checkpoints needs room for one more than it keeps, resumed or not; and gives it back."""

from __future__ import annotations

import errno
import gc
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.contracts import local_ranks
from tests.process.forked_ranks import run_ranks, values
from tests.process.small_tmpfs import small_tmpfs
from torchelastic.checkpoint import CheckpointError
from torchelastic.checkpoint.async_ckpt import AsyncRequest
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from torchelastic.testing import FaultyDisk, fail_at

MIB = local_ranks.MIB
STATE_MIB = 5


@pytest.mark.parametrize(("keep", "first"), [(1, 3), (2, 1), (2, 3)])
def test_a_resumed_manager_needs_no_more_room_than_a_fresh_one(tmp_path: Path, keep: int, first: int) -> None:
    """Also where it comes to keep more checkpoints than there are at its start."""
    with small_tmpfs(tmp_path / "memory", STATE_MIB * MIB * (5 * keep + 7) // 5) as folder:  # keep + 1.4
        for steps in ([*range(first)], [3, 4, 5, 6], [7, 8, 9, 10]):  # fresh, then resumed
            size_bytes = (STATE_MIB * MIB * 95) // 100
            (ended,) = values(run_ranks(local_ranks.resume_and_save, folder, size_bytes, steps, keep))
            assert ended == ["saved"] * len(steps)


def test_an_optimizer_that_keeps_what_it_is_given_takes_no_more_room_on_tmpfs(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "memory", 256 * MIB) as folder:
        lives = [values(run_ranks(local_ranks.train_and_save, folder, 5))[0] for _ in range(3)]
    (fresh, _), *resumed = lives
    assert all(max(taken) <= max(fresh) for taken, _ in resumed), [taken for taken, _ in lives]
    ((_, undisturbed),) = values(run_ranks(local_ranks.train_and_save, tmp_path / "undisturbed", 15))
    assert resumed[-1][1] == undisturbed, "and nothing else has changed"


@pytest.mark.parametrize("ranks", [1, 2])
def test_managers_that_are_dropped_without_close_leave_nothing(tmp_path: Path, ranks: int) -> None:
    count = 6
    for seen in values(run_ranks(local_ranks.drop_managers, tmp_path, count, ranks=ranks)):
        for what, numbers in seen.items():
            assert max(numbers[2:]) <= numbers[1], f"{what} grow: {numbers}"


def test_quick_asynchronous_saves_do_not_take_ever_more_room(tmp_path: Path) -> None:
    (most,) = values(run_ranks(local_ranks.save_quickly, tmp_path, 20))
    assert most <= 5, "kept, two that are written, one that is begun, and headers"


class FailsWhenTold(Disk):
    """A disk of which a call fails as long as that is wanted."""

    def __init__(self, call: str) -> None:
        self._call, self.fails = getattr(super(), call), False
        setattr(self, call, self._maybe)

    def _maybe(self, *arguments: object) -> object:
        if self.fails:
            raise CheckpointError(errno.EIO, os.strerror(errno.EIO))
        return self._call(*arguments)


@pytest.mark.parametrize("call", ["sync", "publish", "sync_folder"])
def test_saves_that_fail_take_no_more_room_each_time(tmp_path: Path, call: str) -> None:
    """Without the garbage collector: the slot of a failed save goes when it has failed."""
    disk, taken = FailsWhenTold(call), []
    with small_tmpfs(tmp_path / "memory", 64 * MIB) as folder:
        manager = LocalCheckpointManager(folder, disk=disk)
        gc.collect()
        gc.disable()
        try:
            for step in range(8):
                disk.fails = step % 2 == 1
                with pytest.raises(CheckpointError, match="Input/output") if disk.fails else nullcontext():
                    manager.save(BasicTensorAwareStateDict({"weights": torch.zeros(MIB)}), step)
                taken.append(shutil.disk_usage(folder).used // MIB)
        finally:
            gc.enable()
        manager.close()
    assert max(taken) < 3 * 4, f"more than two slots of 4 MiB: {taken}"


def begun(folder: Path, disk: FaultyDisk) -> tuple[LocalCheckpointManager, AsyncRequest]:
    """A save of which nothing but the background's part is left."""
    manager = LocalCheckpointManager(folder, disk=disk)
    request = manager.save(BasicTensorAwareStateDict({"weights": torch.zeros(1000)}), 7, is_async=True)
    assert request is not None
    return manager, request


@pytest.mark.parametrize("call", ["sync", "sync_folder"])
def test_what_a_write_in_the_background_has_begun_goes_when_it_fails_and_the_next_save_counts(
    tmp_path: Path, call: str
) -> None:
    """Before and after it has its name; without another call of the manager, which may never come."""
    disk = FaultyDisk()
    manager, request = begun(tmp_path / "undisturbed", disk)
    number = len(disk.calls)
    request.work()
    manager.close()
    number += disk.calls[number:].index(call)
    manager, request = begun(tmp_path / "disturbed", FaultyDisk(fail_at(number, errno.EIO)))
    with pytest.raises(CheckpointError, match="Input/output error"):
        request.execute_sync()
    assert [*(tmp_path / "disturbed").rglob("*.shard"), *(tmp_path / "disturbed").rglob(".tmp-*")] == []
    assert manager.find_latest() == -1
    manager.save(BasicTensorAwareStateDict({"weights": torch.ones(1000)}), 8)
    assert manager.load()[1].iteration == 8
    manager.close()
