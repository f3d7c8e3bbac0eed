from __future__ import annotations

import errno
import gc
import hashlib
import io
import os
import resource
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from torchelastic.checkpoint import CheckpointError
from torchelastic.checkpoint.output_stream import OutputStream
from torchelastic.checkpoint.store.manifest import StreamRecord


def record_of(path: Path) -> StreamRecord:
    data = path.read_bytes()
    return StreamRecord(len(data), hashlib.sha256(data).hexdigest())


def test_the_record_tells_what_is_in_the_file(tmp_path: Path) -> None:
    with OutputStream(tmp_path / "s") as stream:
        for size in (0, 1, 100, 3 << 20, 7):
            stream.write(bytes(range(256)) * (size // 256 + 1))
        stream.writelines([b"more", b"lines"])
    assert stream.record == record_of(tmp_path / "s")
    assert stream.record.size_bytes > 3 << 20


def test_buffers_of_any_layout_are_counted_in_bytes(tmp_path: Path) -> None:
    with OutputStream(tmp_path / "s") as stream:
        stream.write(array("d", [1.0, 2.0]))
        stream.write(memoryview(array("f", range(12))).cast("B").cast("f", (3, 4)))
        stream.write(np.zeros((0, 4), np.float32).data)
        stream.write(memoryview(b"abc"))
    assert stream.record == record_of(tmp_path / "s")
    assert stream.record.size_bytes == 16 + 48 + 3


def test_going_back_and_writing_again_gives_the_digest_of_the_file(tmp_path: Path) -> None:
    with OutputStream(tmp_path / "s") as stream:
        stream.write(b"length unknown, data")
        stream.seek(0)
        stream.write(b"length 0004")
    assert stream.record == record_of(tmp_path / "s")
    assert (tmp_path / "s").read_bytes() == b"length 0004own, data"


def test_filling_a_gap_gives_the_digest_of_the_file(tmp_path: Path) -> None:
    with OutputStream(tmp_path / "s") as stream:
        for start in (0, 10, 5):  # as many bytes as the file has, in another order
            stream.seek(start)
            stream.write(b"%05d" % start)
    assert stream.record == record_of(tmp_path / "s")
    assert (tmp_path / "s").read_bytes() == b"000000000500010"


def test_writing_through_the_descriptor_gives_the_digest_of_the_file(tmp_path: Path) -> None:
    with OutputStream(tmp_path / "s") as stream:
        stream.write(b"12345")
        stream.flush()
        os.pwrite(stream.fileno(), b"X", 2)
    assert stream.record == record_of(tmp_path / "s")
    assert (tmp_path / "s").read_bytes() == b"12X45"


def test_shortening_gives_the_digest_of_the_file(tmp_path: Path) -> None:
    with OutputStream(tmp_path / "s") as stream:
        stream.write(b"12345678")
        stream.truncate(3)
    assert stream.record == record_of(tmp_path / "s")
    assert stream.record.size_bytes == 3


def test_bytes_written_below_the_stream_are_noticed(tmp_path: Path) -> None:
    with OutputStream(tmp_path / "s") as stream:
        stream.raw.write(b"around")
    assert stream.record == record_of(tmp_path / "s")
    assert stream.record.size_bytes == 6


@pytest.mark.parametrize("as_zip", [True, False])
def test_torch_save_and_load_accept_the_streams(tmp_path: Path, as_zip: bool) -> None:
    # The older format writes storages through the descriptor, where the stream does not see them.
    weight = torch.randn(300, 400)
    with OutputStream(tmp_path / "s") as stream:
        torch.save({"weight": weight, "step": 3}, stream, _use_new_zipfile_serialization=as_zip)
    assert stream.record == record_of(tmp_path / "s")
    loaded = torch.load(tmp_path / "s", weights_only=True)
    assert torch.equal(loaded["weight"], weight)


def test_numpy_save_accepts_the_stream(tmp_path: Path) -> None:
    with OutputStream(tmp_path / "s") as stream:
        np.save(stream, np.arange(100_000))
    assert stream.record == record_of(tmp_path / "s")
    assert np.array_equal(np.load(tmp_path / "s"), np.arange(100_000))


def test_there_is_no_record_before_the_stream_is_closed(tmp_path: Path) -> None:
    stream = OutputStream(tmp_path / "s")
    stream.write(b"x")
    with pytest.raises(ValueError, match="was not closed"):
        _ = stream.record
    stream.close()
    stream.close()
    assert stream.record.size_bytes == 1


def test_an_abandoned_stream_never_has_a_record(tmp_path: Path) -> None:
    stream = OutputStream(tmp_path / "s")
    stream.write(b"x")
    stream.abandon()
    stream.close()
    assert stream.closed
    with pytest.raises(ValueError, match="was not closed"):
        _ = stream.record


def test_a_stream_cannot_be_detached_and_goes_on(tmp_path: Path) -> None:
    with OutputStream(tmp_path / "s") as stream:
        with pytest.raises(io.UnsupportedOperation):
            stream.detach()
        stream.write(b"still here")
    assert stream.failure is None
    assert stream.record.size_bytes == 10


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
