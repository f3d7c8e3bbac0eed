"""`torch.save` in the background: what is in the file, when it appears, and what is left when it does not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchelastic.checkpoint.async_ckpt import AsyncCheckpointError, TorchAsyncCheckpoint
from torchelastic.checkpoint.async_ckpt.torch_checkpoint import save_and_rename
from torchelastic.checkpoint.staging import Owner, encode_staging_name, this_process


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
    me = this_process()
    dead = Owner(me.host, me.scope, 4_000_000)  # above any pid_max in use here: there is no such process
    elsewhere = Owner("other", "0" * 12, 4_000_000)
    left = {owner: tmp_path / encode_staging_name(owner, "0" * 16) for owner in (me, dead, elsewhere)}
    for path in left.values():
        path.touch()
    save_and_rename({"x": 1}, tmp_path / "a.pt")
    assert not left[dead].exists()
    assert left[me].exists(), "a living process of this host may be writing it"
    assert left[elsewhere].exists(), "who can tell whether it lives on another host"


def test_files_appear_with_the_users_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_and_rename({"x": 1}, tmp_path / "a.pt")
    finally:
        os.umask(before)
    assert (tmp_path / "a.pt").stat().st_mode & 0o777 == 0o640
