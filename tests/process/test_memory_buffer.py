"""Objects in memory as files: growing, sealed, checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.memory import CheckpointContainerId, CheckpointObjectId
from torchelastic.checkpoint.memory.buffer_io import BufferIO
from torchelastic.checkpoint.memory.container import Container


@pytest.fixture
def container(memory_folder: Path) -> Container:
    return Container(memory_folder / "job-7")


def object_id(container: Container, name: str = "object") -> CheckpointObjectId:
    return CheckpointObjectId.from_container(CheckpointContainerId(str(container.folder_of(3))), name)


def written(container: Container, size_bytes: int = 100) -> BufferIO:
    return BufferIO(object_id(container), container, size_bytes)


def test_it_grows_beyond_what_was_expected(container: Container) -> None:
    content = torch.randint(0, 255, (5_000_000,), dtype=torch.uint8).numpy().tobytes()
    with written(container, 10) as buffer:
        for begin in range(0, len(content), 700_000):
            buffer.write(content[begin : begin + 700_000])
    assert BufferIO(object_id(container)).read() == content
    assert (
        len([path for path in container.root.rglob("*") if path.is_file()]) <= 6
    )  # the fence, its locks, the object, free slots


def test_resize_cuts_and_close_may_keep_all_the_room(container: Container) -> None:
    buffer = written(container, 8)
    buffer.write(b"abcdefgh")
    buffer.resize(4)
    assert buffer.tell() == 4
    buffer.close()
    assert BufferIO(object_id(container)).read() == b"abcd"
    with pytest.raises(ValueError, match="is closed"):
        buffer.resize(8)
    buffer = written(container, 8)
    buffer.write(b"ab")
    buffer.close(truncate=False)
    assert len(BufferIO(object_id(container)).read()) == 8


def test_a_damaged_object_is_not_read(container: Container) -> None:
    with written(container) as buffer:
        buffer.write(b"precious" * 100)
    path = Path(str(object_id(container)))
    data = bytearray(path.read_bytes())
    data[data.index(b"precious")] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        BufferIO(object_id(container))


def test_sizes_and_positions_that_make_no_sense_are_named(container: Container) -> None:
    with written(container, 8) as buffer:
        buffer.write(b"abcd")
        for ask in (buffer.next_buffer_slice, buffer.resize):
            with pytest.raises(ValueError, match="give 0 or more"):
                ask(-1)
        with pytest.raises(ValueError, match="whence is 7"):
            buffer.seek(0, 7)
        assert buffer.tell() == 4
    assert BufferIO(object_id(container)).read() == b"abcd"
