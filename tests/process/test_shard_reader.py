"""Reading a shard: into tensors that exist, in pieces, by several threads, and never unchecked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.few_examples import examples
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.batches import CHUNK_BYTES
from torchelastic.checkpoint.format.partial import FIRST_BYTES, GAP_BYTES, PartialCopy, Ranges
from torchelastic.checkpoint.shards import ShardReader, save_tree

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


# --- a shard that lies elsewhere --------------------------------------------------------------------------------------


def far_away(copy: PartialCopy) -> ShardReader:
    return ShardReader(copy.path, "far away", copy)


class Elsewhere:
    """Where a shard is; what of it was asked for."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.sent_bytes = 0

    def fetch(self, ranges: Ranges) -> bytes:
        sent = b"".join(self.content[begin:end] for begin, end in ranges)
        self.sent_bytes += len(sent)
        return sent


@pytest.mark.parametrize("on_disk", [False, True])
def test_of_a_shard_that_lies_elsewhere_only_that_comes_which_is_read(
    path: Path, tmp_path: Path, on_disk: bool
) -> None:
    holder, before = Elsewhere(path.read_bytes()), len(list(tmp_path.iterdir()))
    with far_away(PartialCopy(holder.fetch, tmp_path if on_disk else None)) as shard:
        assert torch.equal(shard.read_one("last"), TENSORS["last"])
        assert torch.equal(shard.read(names=["half"])["half"], TENSORS["half"])
        assert holder.sent_bytes <= FIRST_BYTES + TENSORS["last"].nbytes
        assert is_all(shard.read())
        shard.verify()
        assert is_all(shard.map())
        assert bytes(shard.view()) == holder.content
        assert holder.sent_bytes <= len(holder.content)
    assert len(list(tmp_path.iterdir())) == before


@settings(max_examples=examples(25))
@given(st.lists(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**5)), max_size=5), max_size=6))
def test_whatever_is_read_in_whatever_order_comes_once(reads: list[list[tuple[int, int]]]) -> None:
    holder = Elsewhere(b"".join(number.to_bytes(4, "big") for number in range(300_000)))
    copy = PartialCopy(holder.fetch)
    for lengths in reads:
        ranges = sorted((begin, begin + length) for begin, length in lengths)
        copy.bring(ranges)
        content = copy.path.read_bytes()
        assert all(content[begin:end] == holder.content[begin:end] for begin, end in ranges)
    assert holder.sent_bytes == sum(end - begin for begin, end in copy._here) <= len(holder.content)
    os.close(copy.descriptor)


def test_thousands_of_parts_come_in_few_requests_and_only_once() -> None:
    requests: list[int] = []

    def fetch(ranges: Ranges) -> bytes:
        requests.append(len(ranges))
        return bytes(sum(end - begin for begin, end in ranges))

    copy = PartialCopy(fetch)
    parts = [(number * 2 * GAP_BYTES, number * 2 * GAP_BYTES + 5) for number in range(3999)]
    for _ in range(2):
        copy.bring(parts)
    assert requests == [1000, 1000, 1000, 999]
    os.close(copy.descriptor)


def test_a_shard_that_lies_elsewhere_is_checked_where_it_is_read(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-len(content) // 2] ^= 1  # in the middle of the long one
    holder = Elsewhere(bytes(content))
    with far_away(PartialCopy(holder.fetch)) as shard:
        shard.read(names=["small", "last"])
        assert shard.failure is None
        with pytest.raises(CorruptCheckpointError, match="far away is damaged: the checksum of its tensor 'long'"):
            shard.read(names=["long"])
        assert isinstance(shard.failure, CorruptCheckpointError)


def test_a_holder_that_is_gone_or_has_less_than_it_said_is_an_error_of_the_shard(path: Path) -> None:
    holder = Elsewhere(path.read_bytes())

    def broken(ranges: Ranges) -> bytes:
        if ranges[0][0]:
            raise CheckpointError("the host is gone")
        return holder.fetch(ranges)

    with far_away(PartialCopy(broken)) as shard:
        with pytest.raises(CheckpointError, match="the host is gone"):
            shard.read()
        assert str(shard.failure) == "the host is gone"
    with far_away(PartialCopy(holder.fetch)) as shard:
        holder.content = holder.content[:-1]
        with pytest.raises(CorruptCheckpointError, match="the shard far away cannot be used: it was cut"):
            shard.read()
    with pytest.raises(CorruptCheckpointError, match="the shard far away cannot be used: it does not begin like"):
        far_away(PartialCopy(lambda _: b"no shard"))
