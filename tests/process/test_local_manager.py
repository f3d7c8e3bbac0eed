"""One process, real files."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.contracts.damages import bad_disk, repair_disk, wear_out
from torchelastic.checkpoint.async_ckpt import AsyncCheckpointError, AsyncRequest
from torchelastic.checkpoint.compat.nvrx.local.host_folder import HostFolder
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.local import (
    BaseCheckpointManager,
    BasicTensorAwareStateDict,
    CkptID,
    LocalCheckpointManager,
    TensorAwareStateDict,
)
from torchelastic.checkpoint.store.save_id import SaveId, ShardId


def state(value: float, size: int = 100) -> BasicTensorAwareStateDict:
    return BasicTensorAwareStateDict({"w": torch.full((size,), value), "step": int(value)})


def value_of(manager: LocalCheckpointManager) -> float:
    loaded, ckpt_id = manager.load()
    tree = loaded.to_tree()
    assert tree["step"] == ckpt_id.iteration
    return float(tree["w"].unique().item())


def names(manager: LocalCheckpointManager) -> list[str]:
    """Of the saves that are here."""
    return sorted(path.name for path in manager.local_ckpt_dir.iterdir() if not path.name.startswith("."))


def hidden(manager: LocalCheckpointManager) -> list[str]:
    """The slots."""
    return sorted(path.name for path in manager.local_ckpt_dir.glob(".tmp-*"))


def iterations(manager: LocalCheckpointManager) -> list[int]:
    return sorted(int(name[5:14]) for name in names(manager))


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LocalCheckpointManager]:
    made = LocalCheckpointManager(tmp_path, timeout_s=20)
    yield made
    made.close()


# Alone, without a process group


def test_what_was_loaded_from_memory_is_nobody_elses(tmp_path: Path) -> None:
    """On tmpfs the loaded tensors are the file: neither their changes nor the next saves may be seen in the other."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        manager = LocalCheckpointManager(folder)
        manager.save(state(1), 1)
        loaded, _ = manager.load()
        assert isinstance(loaded, BasicTensorAwareStateDict)
        again, _ = manager.load()
        loaded.state_dict["w"] += 10
        (file,) = names(manager)
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if file in line]
        assert any(" rw-p " in line for line in maps), "it is mapped, for this reader alone"
        assert value_of(manager) == 1
        for iteration in (2, 3, 4):
            manager.save(state(iteration), iteration)
        assert isinstance(again, BasicTensorAwareStateDict)
        assert torch.equal(again.state_dict["w"], torch.full((100,), 1.0))
        assert torch.equal(loaded.state_dict["w"], torch.full((100,), 11.0))
        manager.close()


# A manager of your own


class InMemory(BaseCheckpointManager):
    """A manager of somebody's own: the five methods say where the parts lie."""

    def __init__(self) -> None:
        super().__init__("session")
        self.parts: dict[ShardId, TensorAwareStateDict] = {}

    def _my_ckpt_ids(self) -> list[ShardId]:
        return list(self.parts)

    def _load(self, shard: ShardId) -> TensorAwareStateDict:
        return self.parts[shard]

    def _save(self, prepared: Any, shard: ShardId, *, is_async: bool) -> AsyncRequest:
        return AsyncRequest(self.parts.__setitem__, (shard, prepared), [])

    def _cleanup(self, save: SaveId) -> None:
        self.parts = {shard: part for shard, part in self.parts.items() if shard.name == save}

    def _cleanup_failed_save(self, save: SaveId) -> None:
        self.parts.pop(ShardId(save, 0, 1), None)


def test_where_the_parts_lie_is_the_business_of_a_subclass() -> None:
    manager = InMemory()
    assert manager.find_latest() == -1
    first, second = state(1), state(2)
    manager.save(first, 1)
    request = manager.save(second, 2, is_async=True)
    assert manager.load()[0] is first
    assert request is not None
    request.execute_sync()
    assert (manager.load()[0], manager.load()[1], len(manager.parts)) == (second, CkptID(2, 0, "session"), 1)


# What goes wrong


@pytest.mark.parametrize(
    ("is_finalized", "why"),
    [(True, "is not what rank 0 has written"), (False, "holds another shard than its name says")],
)
def test_a_file_that_says_of_itself_that_it_is_another_one_is_passed_over_and_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_finalized: bool, why: str
) -> None:
    manager = LocalCheckpointManager(tmp_path, keep=2)
    for iteration in (5, 6):
        manager.save(state(iteration), iteration)
    manager.close()
    older, newer = (manager.local_ckpt_dir / name / "shard-00000-of-00001.shard" for name in names(manager))
    newer.write_bytes(older.read_bytes())
    if not is_finalized:
        newer.with_name("manifest.json").unlink()
    assert manager.find_latest() == 5
    assert why in caplog.text
    manager.save(state(7), 7)
    assert iterations(manager) == [5, 7]


def test_a_disk_that_goes_bad_while_a_template_is_filled_costs_that_checkpoint_and_not_the_older_one(
    tmp_path: Path,
) -> None:
    manager = LocalCheckpointManager(tmp_path, keep=2)
    for iteration in (5, 6):
        manager.save(state(iteration), iteration)
    worn, template, good_until_opened = manager.local_ckpt_dir / names(manager)[-1], state(0).to_tree(), HostFolder.open

    def open_and_wear_out(folder: HostFolder, name: SaveId, rank: int) -> ShardReader:
        reader = good_until_opened(folder, name, rank)
        if name.step == 6:
            wear_out(worn / "shard-00000-of-00001.shard")
        return reader

    with mock.patch.object(HostFolder, "open", open_and_wear_out), bad_disk() as met:
        tree, ckpt_id = manager.load_resharded(template)
    repair_disk()
    assert met.count, "nobody read there"
    assert (ckpt_id.iteration, tree["step"], float(tree["w"].unique().item())) == (5, 5, 5.0)
    manager.close()


@pytest.mark.parametrize("what", ["the files", "the folder"])
def test_a_manager_goes_on_after_somebody_has_removed_its_files(tmp_path: Path, what: str) -> None:
    manager = LocalCheckpointManager(tmp_path / "root", keep=2)
    for iteration in (1, 2, 3):
        manager.save(state(iteration), iteration)
    shutil.rmtree(manager.local_ckpt_dir)
    if what == "the files":
        manager.local_ckpt_dir.mkdir()
    manager.save(state(4), 4)
    assert (value_of(manager), iterations(manager)) == (4.0, [4])
    manager.save(state(5), 5)
    assert iterations(manager) == [4, 5]


def test_a_request_that_nobody_runs_is_given_up(
    manager: LocalCheckpointManager, caplog: pytest.LogCaptureFixture
) -> None:
    forgotten = manager.save(state(1), 1, is_async=True)
    for iteration in (2, 3, 4):
        manager.save(state(iteration), iteration)
    assert re.search(r"step-000000001\.e1\.r1\.g0\.\w+ was begun and never finished", caplog.text)
    assert forgotten is not None
    with pytest.raises(AsyncCheckpointError):
        forgotten.execute_sync()  # too late, and it must not do any harm
    assert (value_of(manager), iterations(manager)) == (4.0, [4])
    manager.close()
    assert hidden(manager) == []
