from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint import CorruptCheckpointError, FileSystemCheckpointManager
from torchelastic.checkpoint.legacy import damage_of_legacy_file

# What a snapshot of 0.1 may hold: nested containers, tensors of several types, two of which share one storage.
_WEIGHT = torch.arange(600, dtype=torch.float32)
SNAPSHOT = {
    "model": OrderedDict(weight=_WEIGHT.view(20, 30), tied=_WEIGHT, mask=torch.ones(7, dtype=torch.bool)),
    "optimizer": [{"momentum": torch.randn(33).half(), "step": torch.tensor(4), "bits": torch.zeros(3).bfloat16()}],
    "shape": torch.Size([3, 4]),
    "dtype": torch.float64,
    "seen": {1, 2, 3},
    "random": np.random.default_rng(0).bit_generator.state,
}


def saved(snapshot: object = SNAPSHOT, *, as_zip: bool) -> bytes:
    stream = io.BytesIO()
    torch.save(snapshot, stream, _use_new_zipfile_serialization=as_zip)
    return stream.getvalue()


def damage(data: bytes) -> str | None:
    return damage_of_legacy_file(io.BytesIO(data), read_all=True)


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_whole_file_of_torch_save_is_complete(as_zip: bool) -> None:
    assert damage(saved(as_zip=as_zip)) is None


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_saved_module_is_complete(as_zip: bool) -> None:
    assert damage(saved(torch.nn.Linear(3, 4), as_zip=as_zip)) is None


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_file_cut_anywhere_is_incomplete(as_zip: bool) -> None:
    data = saved(as_zip=as_zip)
    for length in [*range(0, len(data), 61), len(data) - 1]:
        assert damage(data[:length]) is not None, f"cut at {length} of {len(data)}"


def test_a_changed_byte_in_a_tensor_of_a_zip_archive_is_noticed() -> None:
    data = bytearray(saved(as_zip=True))
    data[data.find(_WEIGHT.numpy().tobytes()) + 100] ^= 1
    assert "checksum" in (damage(bytes(data)) or "")


class _Bomb:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.target,)


def test_looking_at_a_file_runs_nothing_of_it(tmp_path: Path) -> None:
    target = tmp_path / "executed"
    assert damage(saved({"bomb": _Bomb(str(target))}, as_zip=False)) is None
    assert damage(pickle.dumps(_Bomb(str(target)))) is not None
    assert not target.exists()


@given(st.binary(max_size=200))
def test_bytes_of_anything_else_are_incomplete(data: bytes) -> None:
    assert damage(data) is not None


def write_legacy(folder: Path, data: bytes) -> None:
    folder.mkdir(parents=True)
    (folder / "default").write_bytes(data)


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_checkpoint_of_0_1_is_listed_and_read(tmp_path: Path, as_zip: bool) -> None:
    data = saved(as_zip=as_zip)
    write_legacy(tmp_path / "7", data)
    checkpoint = FileSystemCheckpointManager(tmp_path).get_latest_checkpoint()
    assert checkpoint is not None
    assert checkpoint.sequence_id == 7
    with checkpoint.open_input_stream("default") as stream:
        assert stream.read() == data


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_torn_checkpoint_of_0_1_is_not_listed_and_says_why(tmp_path: Path, as_zip: bool) -> None:
    write_legacy(tmp_path / "6", saved(as_zip=as_zip))
    write_legacy(tmp_path / "7", saved(as_zip=as_zip)[:-9])
    manager = FileSystemCheckpointManager(tmp_path)
    assert [checkpoint.sequence_id for checkpoint in manager.list_checkpoints()] == [6]
    torn = manager.get_checkpoint(7)
    assert torn is not None
    with pytest.raises(CorruptCheckpointError, match=r"/7 is damaged: it has no manifest"):
        torn.open_input_stream("default")


def test_an_empty_folder_of_0_1_is_no_checkpoint_and_its_id_is_not_used_again(tmp_path: Path) -> None:
    (tmp_path / "4").mkdir()
    manager = FileSystemCheckpointManager(tmp_path)
    assert manager.list_candidates() == []
    assert manager.get_checkpoint(4) is None
    assert manager.create_checkpoint().sequence_id == 5
