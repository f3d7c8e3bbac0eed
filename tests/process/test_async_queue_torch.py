"""`torch.save` in the background: what is in the file, when it appears, and what is left when it does not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchelastic.checkpoint.async_ckpt import AsyncCheckpointError, TorchAsyncCheckpoint
from torchelastic.checkpoint.async_ckpt.torch_checkpoint import save_and_rename
from torchelastic.checkpoint.staging import new_staging_path


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[TorchAsyncCheckpoint]:
    one = TorchAsyncCheckpoint()
    yield one
    one.close()


@pytest.mark.long
def test_the_file_holds_the_state_of_the_moment_of_the_call(checkpoint: TorchAsyncCheckpoint, tmp_path: Path) -> None:
    weight = torch.zeros(1000)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(weight.clone())])
    step = [1]
    state = {"weight": weight, "row": weight[:10], "optimizer": optimizer.state_dict(), "step": step}
    checkpoint.async_save(state, tmp_path / "a.pt")
    weight += 1
    step[0] = 2
    checkpoint.async_save(state, f=str(tmp_path / "b.pt"), pickle_protocol=2)
    checkpoint.finalize_async_save(blocking=True)
    for name, value, number in (("a.pt", 0, 1), ("b.pt", 1, 2)):
        saved = torch.load(tmp_path / name, weights_only=True)
        assert torch.equal(saved["weight"], torch.full((1000,), float(value)))
        assert saved["step"] == [number]
        assert saved["row"].untyped_storage().data_ptr() == saved["weight"].untyped_storage().data_ptr()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt"]


@pytest.mark.long
def test_a_failed_save_is_told_and_the_next_one_works(checkpoint: TorchAsyncCheckpoint, tmp_path: Path) -> None:
    checkpoint.async_save({"x": torch.ones(1)}, tmp_path / "missing" / "a.pt")
    with pytest.raises(AsyncCheckpointError, match=r"CheckpointError: .*could not save a checkpoint: No such file"):
        checkpoint.finalize_async_save(blocking=True)
    checkpoint.async_save({"x": torch.ones(1)}, tmp_path / "a.pt")
    checkpoint.finalize_async_save(blocking=True, terminate=True)
    assert torch.load(tmp_path / "a.pt", weights_only=True) == {"x": torch.ones(1)}


class Unsavable:
    def __reduce__(self) -> str:
        raise ValueError("cannot be saved")


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    save_and_rename({"x": 1}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="cannot be saved"):
        save_and_rename({"x": Unsavable()}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True) == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_what_a_killed_writer_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    mine = new_staging_path(tmp_path)
    pid, _, scope, _ = mine.name.removeprefix(".tmp-").split("-", 3)
    dead = tmp_path / mine.name.replace(pid, "4000000", 1)  # above any pid_max in use here: there is no such process
    elsewhere = tmp_path / dead.name.replace(scope, "0" * 12)
    for path in (mine, dead, elsewhere):
        path.touch()
    save_and_rename({"x": 1}, tmp_path / "a.pt")
    assert not dead.exists()
    assert mine.exists(), "a living process of this host may be writing it"
    assert elsewhere.exists(), "who can tell whether it lives on another host"


def test_files_appear_with_the_users_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_and_rename({"x": 1}, tmp_path / "a.pt")
    finally:
        os.umask(before)
    assert (tmp_path / "a.pt").stat().st_mode & 0o777 == 0o640
