"""Reading a shard: into tensors that exist, in pieces, by several threads, and never unchecked."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from torchelastic.checkpoint.shards import ShardReader, save_tree
from torchelastic.checkpoint.shards.batches import CHUNK_BYTES

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
