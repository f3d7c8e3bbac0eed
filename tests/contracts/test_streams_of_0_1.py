"""What torchelastic 0.1 has saved, without a manifest: a whole stream is loaded; a torn one, and the next older is."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from torchelastic.checkpoint import CorruptCheckpointError, FileSystemCheckpointManager
from torchelastic.checkpoint.api import load_latest

_WEIGHT = torch.arange(600, dtype=torch.float32)


class _Job:
    """A state as programs of 0.1 have it: it loads whatever it has pickled."""

    def __init__(self, epoch: int = 0, extra: object = None) -> None:
        self.content: dict[str, Any] = {
            "model": OrderedDict(weight=_WEIGHT.view(20, 30), tied=_WEIGHT, mask=torch.ones(7, dtype=torch.bool)),
            "optimizer": [{"momentum": torch.full((33,), 0.5).half(), "bits": torch.zeros(3).bfloat16()}],
            "epoch": epoch,
            "extra": extra,
        }

    def stream(self, *, as_zip: bool) -> bytes:
        stream = io.BytesIO()
        torch.save(self.content, stream, _use_new_zipfile_serialization=as_zip)
        return stream.getvalue()

    def save(self, _stream: BinaryIO, /) -> None:
        raise AssertionError("nothing is saved here")

    def load(self, stream: BinaryIO, /) -> None:
        self.content = torch.load(stream, weights_only=False)


def _write(folder: Path, stream: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "default").write_bytes(stream)


def _resumed_epoch(folder: Path) -> int:
    job = _Job()
    assert load_latest(FileSystemCheckpointManager(folder), job) is not None
    assert torch.equal(job.content["model"]["tied"], _WEIGHT)
    return int(job.content["epoch"])


@pytest.mark.parametrize("as_zip", [True, False])
@pytest.mark.parametrize("extra", [None, torch.nn.Linear(3, 4)], ids=["plain", "with an object"])
def test_a_whole_stream_is_loaded(tmp_path: Path, as_zip: bool, extra: object) -> None:
    _write(tmp_path / "6", _Job(6).stream(as_zip=as_zip))
    _write(tmp_path / "7", _Job(7, extra).stream(as_zip=as_zip))
    (tmp_path / "8").mkdir()  # 0.1 made folders for checkpoints that it never wrote
    manager = FileSystemCheckpointManager(tmp_path)
    assert [checkpoint.sequence_id for checkpoint in manager.list_checkpoints()] == [7, 6]
    assert _resumed_epoch(tmp_path) == 7
    assert manager.create_checkpoint().sequence_id == 9


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_torn_stream_and_the_next_older_one_is_taken(tmp_path: Path, as_zip: bool) -> None:
    whole = _Job(7).stream(as_zip=as_zip)
    _write(tmp_path / "6", _Job(6).stream(as_zip=as_zip))
    tensors_begin = whole.find(_WEIGHT.numpy().tobytes())
    for length in (0, 1, 40, *range(tensors_begin, len(whole), 101), len(whole) - 1):
        _write(tmp_path / "7", whole[:length])
        assert [one.sequence_id for one in FileSystemCheckpointManager(tmp_path).list_checkpoints()] == [6], length
        assert _resumed_epoch(tmp_path) == 6, f"cut at {length} of {len(whole)}"


def test_a_changed_tensor_in_a_zip_archive_and_the_next_older_one_is_taken(tmp_path: Path) -> None:
    changed = bytearray(_Job(7).stream(as_zip=True))
    changed[changed.find(_WEIGHT.numpy().tobytes()) + 100] ^= 1
    _write(tmp_path / "6", _Job(6).stream(as_zip=True))
    _write(tmp_path / "7", bytes(changed))
    assert _resumed_epoch(tmp_path) == 6


@pytest.mark.parametrize("stream", [b"any other bytes", b"\x80\x02}."], ids=["text", "a pickle"])
def test_a_stream_of_something_else_is_named(tmp_path: Path, stream: bytes) -> None:
    _write(tmp_path / "7", stream)
    with pytest.raises(CorruptCheckpointError, match=r"/7 is damaged: it has no manifest"):
        load_latest(FileSystemCheckpointManager(tmp_path), _Job())


class _Bomb:
    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("as_zip", [True, False])
def test_looking_for_the_newest_stream_runs_nothing_of_it(tmp_path: Path, as_zip: bool) -> None:
    _write(tmp_path / "7", _Job(7, _Bomb(tmp_path / "executed")).stream(as_zip=as_zip))
    latest = FileSystemCheckpointManager(tmp_path).get_latest_checkpoint()
    assert latest is not None
    latest.open_input_stream("default").close()
    assert not (tmp_path / "executed").exists()
