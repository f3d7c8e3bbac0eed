"""Reading a shard: into tensors that exist, in pieces, by several threads, and never unchecked."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.shards import ShardOf, ShardReader, load_tree, save_tree
from torchelastic.checkpoint.shards.batches import CHUNK_BYTES, MAX_PER_BATCH, batched

TENSORS = {
    "small": torch.arange(7.0),
    "empty": torch.empty(0, 2),
    "scalar": torch.tensor(3),
    "bytes": torch.arange(255, dtype=torch.uint8),
    "half": torch.randn(3, 5).to(torch.bfloat16),
    "long": torch.randn(CHUNK_BYTES // 2 + 13),  # two chunks and a bit
    "last": torch.ones(2),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_tree(tmp_path / "shard", TENSORS)
    return tmp_path / "shard"


@pytest.fixture
def shard(path: Path) -> Iterator[ShardReader]:
    with ShardReader(path) as reader:
        yield reader


class ShortReads(ShardReader):
    """As a busy network file system: every call gives a part of what was asked for."""

    at_most = 3

    def _read_some(self, pieces: list[memoryview], begin: int) -> int:
        left, shorter = self.at_most, []
        for piece in pieces:
            shorter.append(piece[:left])
            left -= shorter[-1].nbytes
        return super()._read_some([piece for piece in shorter if piece.nbytes], begin)


def is_all(tensors: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == TENSORS.keys() and all(
        torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )


@pytest.mark.parametrize("threads", [1, 4])
def test_everything_is_mapped(path: Path, threads: int) -> None:
    with ShardReader(path) as shard:
        mapped = shard.map(threads=threads)
    assert is_all(mapped)  # the reader is closed, and the map is not


def test_what_is_mapped_may_be_changed_and_the_file_does_not_change(path: Path) -> None:
    before = path.read_bytes()
    with ShardReader(path) as shard:
        mapped = shard.map()
    for tensor in mapped.values():
        tensor.add_(1)
    assert torch.equal(mapped["small"], TENSORS["small"] + 1)
    assert path.read_bytes() == before


def test_a_mapped_tensor_has_a_memory_of_its_own_length(path: Path) -> None:
    with ShardReader(path) as shard:
        mapped = shard.map()
    assert mapped["small"].untyped_storage().nbytes() == 28


@pytest.mark.parametrize("name", [name for name, tensor in TENSORS.items() if tensor.numel()])
def test_a_damaged_tensor_is_not_mapped(path: Path, name: str) -> None:
    damage(path, name)
    with ShardReader(path) as shard, pytest.raises(CorruptCheckpointError, match=f"tensor '{name}' does not match"):
        shard.map()


@pytest.mark.parametrize("threads", [1, 4])
def test_everything_is_read(shard: ShardReader, threads: int) -> None:
    assert is_all(shard.read(threads=threads))
    assert is_all(shard.read(threads=threads)), "a second time"
    shard.verify(threads=threads)


def test_tensors_that_exist_are_read_into(shard: ShardReader) -> None:
    into = {name: torch.full_like(tensor, 9) for name, tensor in TENSORS.items() if name != "half"}
    places = {name: tensor.data_ptr() for name, tensor in into.items()}
    read = shard.read({**into, "of nobody": torch.zeros(1)})
    assert is_all(read)
    for name, tensor in into.items():
        assert read[name].data_ptr() == places[name]
        assert torch.equal(tensor, TENSORS[name])


def test_parameters_and_parts_of_tensors_are_read_into(shard: ShardReader) -> None:
    parameter, larger = torch.nn.Parameter(torch.zeros(7)), torch.zeros(5, 2)
    shard.read({"small": parameter, "last": larger[3]})
    assert torch.equal(parameter.detach(), TENSORS["small"])
    assert torch.equal(larger.sum(1), torch.tensor([0.0, 0, 0, 2, 0]))


@pytest.mark.parametrize(
    "given",
    [
        torch.zeros(6),
        torch.zeros(7, 1),
        torch.zeros(7, dtype=torch.float64),
        torch.zeros(7, dtype=torch.int32),
        torch.zeros(14)[::2],
        torch._neg_view(torch.zeros(7)),
        torch.zeros(7).to_sparse(),
        torch.zeros(7, device="meta"),
    ],
    ids=["shorter", "shape", "longer items", "items", "gaps", "negated", "sparse", "meta"],
)
def test_a_tensor_that_does_not_fit_is_refused_before_anything_is_read(shard: ShardReader, given: torch.Tensor) -> None:
    other = torch.zeros(2)
    with pytest.raises(ValueError, match="'small' is a float32 of shape"):
        shard.read({"last": other, "small": given})
    assert torch.equal(other, torch.zeros(2))


@pytest.mark.parametrize("names", [set(), {"long"}, {"small", "last"}, {"small", "bytes", "empty"}, {"of nobody"}])
def test_only_what_is_asked_for_is_read(shard: ShardReader, names: set[str]) -> None:
    read = shard.read(names=names)
    assert read.keys() == names & TENSORS.keys()
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in read.items())


def test_one_tensor_is_read(shard: ShardReader) -> None:
    assert all(torch.equal(shard.read_one(name), tensor) for name, tensor in TENSORS.items())
    with pytest.raises(KeyError, match="of nobody"):
        shard.read_one("of nobody")


@pytest.mark.parametrize("at_most", [1, 3, 64, 5000])
def test_reads_that_come_in_pieces_lose_nothing(path: Path, at_most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShortReads, "at_most", at_most)
    with ShortReads(path) as reader:
        names = TENSORS.keys() - ({"long"} if at_most < 64 else set())
        read = reader.read(names=names)
        assert all(torch.equal(read[name], TENSORS[name]) for name in names)
        reader.verify(names=names)


def test_many_threads_read_one_reader(shard: ShardReader) -> None:
    def read(number: int) -> bool:
        if number % 3 == 0:
            shard.verify()
        return is_all(shard.read()) if number % 3 else torch.equal(shard.read_one("long"), TENSORS["long"])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(60)))


def damage(path: Path, name: str) -> None:
    with ShardReader(path) as reader:
        entry = next(entry for entry in reader.header.entries if entry.name == name)
        place = reader.size_bytes - reader.header.data_bytes + entry.offset_bytes + entry.size_bytes - 1
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("name", ["small", "scalar", "bytes", "long", "last"])
def test_a_damaged_tensor_is_named_and_the_others_can_be_read(path: Path, name: str) -> None:
    damage(path, name)
    expected = f"checksum of its tensor '{name}' does not match"
    with ShardReader(path) as reader:
        with pytest.raises(CorruptCheckpointError, match=expected):
            reader.read()
        with pytest.raises(CorruptCheckpointError, match=expected):
            reader.read_one(name)
        with pytest.raises(CorruptCheckpointError, match=expected):
            reader.verify()
        others = TENSORS.keys() - {name}
        reader.verify(names=others)
        assert reader.read(names=others).keys() == others


def test_a_view_is_the_file_and_outlives_the_reader(path: Path) -> None:
    with ShardReader(path) as reader:
        view = reader.view()
        assert len(view) == reader.size_bytes
    assert bytes(view) == path.read_bytes()
    reader.close()


def test_a_shard_of_parts_cannot_be_loaded_by_itself(tmp_path: Path) -> None:
    save_tree(tmp_path / "part", {"w": ShardOf(torch.zeros(2), (4,), (2,))})
    with pytest.raises(CheckpointError, match=r"holds only a part of 'w'.*read the whole checkpoint"):
        load_tree(tmp_path / "part")


class Sized:
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [CHUNK_BYTES * 3],
        [1] * (2 * MAX_PER_BATCH + 1),
        [CHUNK_BYTES // 2 + 1] * 5,
        [0, CHUNK_BYTES * 2, 0, 1, CHUNK_BYTES, 5],
    ],
    ids=["none", "empty", "one long", "many", "halves", "mixed"],
)
def test_batches_hold_everything_once_and_in_order(sizes: list[int]) -> None:
    entries: list[Any] = [Sized(size) for size in sizes]
    runs = batched(entries)
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    for run in runs:
        assert len(run) <= MAX_PER_BATCH
        assert len(run) == 1 or sum(sizes[index] for index in run) <= CHUNK_BYTES
