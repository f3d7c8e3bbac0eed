"""The folder of a job in memory: what is complete, what replaces what, and who removes whose memory.

What faults and replaced writers leave is a matter of the contracts. Further down, objects as files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from tests.process.fork_server import living
from torchelastic.checkpoint.compat.flashpoint.buffer_io import BufferIO
from torchelastic.checkpoint.compat.flashpoint.commit import Commit
from torchelastic.checkpoint.compat.flashpoint.container import Container, read_commit
from torchelastic.checkpoint.compat.flashpoint.ids import meta_of_shard, shard_of
from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.format.header import lay_out
from torchelastic.checkpoint.format.tree import flatten
from torchelastic.checkpoint.memory import CheckpointContainerId, CheckpointObjectId
from torchelastic.checkpoint.store.manifest import ShardRecord
from torchelastic.checkpoint.store.reading import record_in
from torchelastic.checkpoint.store.save_id import SaveId, ShardId


def save(container: Container, step: int, rank: int = 0, generation: int | None = None) -> ShardId:
    """One rank's share of a save by two ranks."""
    shard = shard_of(SaveId(1, 0, step if generation is None else generation, step, "00000007"), rank, 2)
    header = lay_out(flatten({"weight": torch.zeros(1000)}), meta_of_shard(shard))
    stage = container.pool.take(header)
    checksums = stage.copy_and_hash([torch.zeros(1000)])
    container.publish(stage, header.with_checksums(checksums), container.path_of(shard))
    return shard


def commit_of(container: Container, shard: ShardId) -> Commit:
    """The commit of a save of which one shard, or two, are here."""
    records = []
    for rank in range(2):
        path = container.path_of(shard_of(shard.name, rank, 2))
        is_here = path.exists()
        records.append(record_in(path, rank) if is_here else ShardRecord(rank, path.name, 4096, "0" * 32))
    return Commit(shard.name, tuple(records), Metadata({}, storage_data={}), {"common.pt": b"all of it"})


def commit(container: Container, shard: ShardId) -> Commit:
    made = commit_of(container, shard)
    container.write_commit(made)
    return made


def found(container: Container, step: int) -> Commit:
    """The commit by which a step is complete."""
    save = container.save_of(step)
    assert save is not None
    return read_commit(container.root / save.folder_name)


def committed(container: Container) -> list[int]:
    return [one.name.step for one in container.inventory() if one.is_committed]


@pytest.fixture
def base(memory_folder: Path) -> Path:
    return memory_folder / "job-7"


def test_the_attached_files_of_a_step_are_those_of_its_newest_save(base: Path) -> None:
    container = Container(base)
    older, newer = (save(container, 1, generation=generation) for generation in (1, 2))
    for shard, content in ((newer, b"new"), (older, b"old")):
        container.write_commit(replace(commit_of(container, shard), extras={"common.pt": content}))
    assert (container.folder_of(1) / "common.pt").read_bytes() == b"new"


def saved_by_another(base: Path) -> Container:
    container = Container(base)
    save(container, 1, rank=1, generation=1)
    return container


def test_another_living_process_keeps_its_shards_and_a_dead_one_loses_them(base: Path) -> None:
    with living(saved_by_another, base) as writer:
        container = Container(base)
        theirs = shard_of(SaveId(1, 0, 1, 1, "00000007"), 1, 2)
        save(container, 1)
        commit(container, theirs)
        commit(container, save(container, 2))
        assert container.tidy() == []
        assert container.newest() == SaveId(1, 0, 2, 2, "00000007")
        assert [*container.path_of(theirs).parent.glob("shard-*")] == [container.path_of(theirs)]
        writer.kill()
        writer.wait(60)
        assert container.tidy() == [1]


@pytest.mark.parametrize("name", ["a b", "x" * 129, "ä"])
def test_a_folder_that_cannot_be_named_to_other_hosts_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="names the job to the other hosts"):
        Container(tmp_path / name)


# --- objects as files: growing, sealed, checked -----------------------------------------------------------------------


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
