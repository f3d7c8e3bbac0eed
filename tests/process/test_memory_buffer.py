"""Objects in memory as files: growing, sealed, checked."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.memory import CheckpointContainerId, CheckpointObjectId
from torchelastic.checkpoint.memory.buffer_io import BufferIO
from torchelastic.checkpoint.memory.container import Container
from torchelastic.checkpoint.shards import save_tree


@pytest.fixture
def container(memory_folder: Path) -> Container:
    return Container(memory_folder / "job-7")


def object_id(container: Container, name: str = "object") -> CheckpointObjectId:
    return CheckpointObjectId.from_container(CheckpointContainerId(str(container.folder_of(3))), name)


def written(container: Container, size_bytes: int = 100) -> BufferIO:
    return BufferIO.create(object_id(container), container, 3, size_bytes)


def test_what_was_written_is_read(container: Container) -> None:
    with written(container) as buffer:
        assert buffer.write(b"hello ") == 6
        assert buffer.write(memoryview(bytearray(b"world"))) == 5
        buffer.set_format_signature(b"TEST")
        assert (buffer.tell(), buffer.is_readonly, buffer.closed) == (11, False, False)
    found = BufferIO.open(object_id(container))
    assert (found.read(5), found.read(), found.read()) == (b"hello", b" world", b"")
    assert (found.format_signature, found.is_readonly) == (b"TEST", True)
    assert found.seek(-5, io.SEEK_END) == 6
    target = bytearray(10)
    assert found.readinto(target) == 5
    assert bytes(target[:5]) == b"world"


def test_it_grows_beyond_what_was_expected(container: Container) -> None:
    content = torch.randint(0, 255, (5_000_000,), dtype=torch.uint8).numpy().tobytes()
    with written(container, 10) as buffer:
        for begin in range(0, len(content), 700_000):
            buffer.write(content[begin : begin + 700_000])
    assert BufferIO.open(object_id(container)).read() == content
    assert len([path for path in container.root.rglob("*") if path.is_file()]) <= 4  # .job, the object, free slots


def test_nobody_sees_an_object_before_it_is_closed(container: Container) -> None:
    buffer = written(container)
    buffer.write(b"half")
    with pytest.raises(CheckpointError):
        BufferIO.open(object_id(container))
    buffer.abandon()
    assert not container.folder_of(3).exists()


def test_an_error_while_writing_leaves_nothing(container: Container) -> None:
    buffer = written(container)
    with pytest.raises(ValueError, match="outside"), buffer:
        buffer.seek(1)
    assert not container.folder_of(3).exists()


def test_an_object_is_written_anew(container: Container) -> None:
    for text in (b"first", b"second"):
        with written(container) as buffer:
            buffer.write(text)
    assert BufferIO.open(object_id(container)).read() == b"second"


def test_a_slice_of_memory_can_be_filled_in_place(container: Container) -> None:
    with written(container, 0) as buffer:
        buffer.next_buffer_slice(3)[:] = b"abc"
        buffer.next_buffer_slice(2)[:] = b"de"
        buffer.seek(1)
        buffer.write(b"X")
    assert BufferIO.open(object_id(container)).read() == b"aXcde"


def test_resize_cuts_and_close_may_keep_all_the_room(container: Container) -> None:
    buffer = written(container, 8)
    buffer.write(b"abcdefgh")
    buffer.resize(4)
    assert buffer.tell() == 4
    buffer.close()
    assert BufferIO.open(object_id(container)).read() == b"abcd"
    with pytest.raises(ValueError, match="is closed"):
        buffer.resize(8)
    buffer = written(container, 8)
    buffer.write(b"ab")
    buffer.close(truncate=False)
    assert len(BufferIO.open(object_id(container)).read()) == 8


def test_a_damaged_object_is_not_read(container: Container) -> None:
    with written(container) as buffer:
        buffer.write(b"precious" * 100)
    path = Path(str(object_id(container)))
    data = bytearray(path.read_bytes())
    data[data.index(b"precious")] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        BufferIO.open(object_id(container))


def test_a_shard_of_tensors_is_no_object(container: Container) -> None:
    container.folder_of(3).mkdir()
    save_tree(container.folder_of(3) / "object", {"weight": torch.ones(3)})
    with pytest.raises(CorruptCheckpointError, match="shard of tensors"):
        BufferIO.open(object_id(container))


def test_wrong_uses_are_named(container: Container) -> None:
    with pytest.raises(ValueError, match="give 0 or more bytes"):
        written(container, -1)
    with written(container) as buffer:
        with pytest.raises(ValueError, match="longer than 8 bytes"):
            buffer.set_format_signature(b"123456789")
        with pytest.raises(ValueError, match="outside"):
            buffer.seek(1)
    with pytest.raises(ValueError, match="is closed"):
        buffer.write(b"x")
    with pytest.raises(io.UnsupportedOperation, match="for reading"):
        BufferIO.open(object_id(container)).write(b"x")
