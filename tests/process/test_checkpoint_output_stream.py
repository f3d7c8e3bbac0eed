from __future__ import annotations

import errno
import gc
import hashlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchelastic.checkpoint import CheckpointError
from torchelastic.checkpoint.output_stream import OutputStream
from torchelastic.checkpoint.store.manifest import StreamRecord


def record_of(path: Path) -> StreamRecord:
    data = path.read_bytes()
    return StreamRecord(len(data), hashlib.sha256(data).hexdigest())


def test_going_back_and_writing_again_gives_the_digest_of_the_file(tmp_path: Path) -> None:
    with OutputStream(tmp_path / "s") as stream:
        stream.write(b"length unknown, data")
        stream.seek(0)
        stream.write(b"length 0004")
    assert stream.record == record_of(tmp_path / "s")
    assert (tmp_path / "s").read_bytes() == b"length 0004own, data"


@pytest.mark.parametrize("as_zip", [True, False])
def test_torch_save_and_load_accept_the_streams(tmp_path: Path, as_zip: bool) -> None:
    # The older format writes storages through the descriptor, where the stream does not see them.
    weight = torch.randn(300, 400)
    with OutputStream(tmp_path / "s") as stream:
        torch.save({"weight": weight, "step": 3}, stream, _use_new_zipfile_serialization=as_zip)
    assert stream.record == record_of(tmp_path / "s")
    loaded = torch.load(tmp_path / "s", weights_only=True)
    assert torch.equal(loaded["weight"], weight)


def test_an_abandoned_stream_never_has_a_record(tmp_path: Path) -> None:
    stream = OutputStream(tmp_path / "s")
    stream.write(b"x")
    stream.abandon()
    stream.close()
    assert stream.closed
    with pytest.raises(ValueError, match="was not closed"):
        _ = stream.record


@pytest.mark.filterwarnings("error")
def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"precious")
    with pytest.raises(CheckpointError, match="could not create a stream"):
        OutputStream(tmp_path / "s")
    gc.collect()
    assert (tmp_path / "s").read_bytes() == b"precious"


def test_a_refused_write_is_explained_and_remembered(tmp_path: Path, file_size_limit: None) -> None:
    stream = OutputStream(tmp_path / "s")
    with pytest.raises(CheckpointError, match=r"could not write the checkpoint: File too large \(raise the") as info:
        stream.write(bytes(4 << 20))
    assert (info.value.errno, info.value.filename) == (errno.EFBIG, str(tmp_path / "s"))
    with pytest.raises(CheckpointError):
        stream.write(bytes(4 << 20))
    with pytest.raises(CheckpointError) as at_close:
        stream.close()
    assert at_close.value is info.value is stream.failure
    assert stream.closed
    with pytest.raises(ValueError, match="could not be"):
        _ = stream.record


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
