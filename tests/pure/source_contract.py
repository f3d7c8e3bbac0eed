"""What holds of each source: its shards are the data, each sample once, and it goes on from any place."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torchelastic.data import Source, mapped, mixed, packed, repeated, shuffled
from torchelastic.data.sources.api import opened

T = TypeVar("T")

Document = list[int]
PAD = -1


@dataclass(frozen=True)
class Documents:
    """A source as a user may write one: a generator function, whose position is the number of samples."""

    documents: Sequence[Document]

    def __call__(self, shard: int, num_shards: int, position: Any, /) -> Iterator[Document]:
        yield from self.documents[shard::num_shards][position:]


class Living(Documents):
    """The same with positions that are the iterator's own dict, which changes as it goes on."""

    def __call__(self, shard: int, num_shards: int, position: Any, /) -> Iterator[Document]:
        return _LivingIterator(self.documents[shard::num_shards], position or {"drawn": 0})


class _LivingIterator(Iterator[Document]):
    def __init__(self, documents: Sequence[Document], state: dict[str, int]) -> None:
        self._documents, self._state = documents, state

    def __next__(self) -> Document:
        if self._state["drawn"] == len(self._documents):
            raise StopIteration
        self._state["drawn"] += 1
        return self._documents[self._state["drawn"] - 1]

    def state_dict(self) -> dict[str, int]:
        return self._state


def twice(document: Document) -> Document:
    return [*plain(document), *plain(document)]


def plain(sample: Any) -> Any:
    """A sample that can be compared: sequences that were packed are tensors."""
    return sample.tolist() if isinstance(sample, torch.Tensor) else sample


def rest_of(samples: Iterator[Any]) -> list[Any]:
    return [plain(sample) for sample in samples]


def tokens_of(source: Any) -> Counter[int]:
    """How often each token of `Documents` is to come, whatever is around them."""
    if isinstance(source, mixed):
        return sum((tokens_of(one) for one in source.sources.values()), Counter())
    if isinstance(source, repeated):
        assert source.times is not None
        return Counter({token: often * source.times for token, often in tokens_of(source.source).items()})
    if isinstance(source, mapped):
        return Counter({token: often * 2 for token, often in tokens_of(source.source).items()})
    if isinstance(source, shuffled | packed):
        return tokens_of(source.source)
    return Counter(token for document in source.documents for token in document)


def through_json(position: Any) -> Any:
    return json.loads(json.dumps(position))


def shard_samples(source: Source[T], shard: int, num_shards: int) -> list[T]:
    """A shard; each of its places, and those found on the way from there, leads to exactly the rest."""
    whole = rest_of(source(shard, num_shards, 0))
    assert rest_of(pickle.loads(pickle.dumps(source))(shard, num_shards, 0)) == whole
    first = opened(source, shard, num_shards, 0)
    for drawn in range(len(whole) + 1):
        position = through_json(first.state_dict())
        again = opened(source, shard, num_shards, position)
        assert rest_of(opened(source, shard, num_shards, through_json(again.state_dict()))) == whole[drawn:]
        rest = rest_of(again)
        assert rest == whole[drawn:]
        at_end = through_json(again.state_dict())
        assert rest_of(opened(source, shard, num_shards, at_end)) == []
        if rest:
            second = opened(source, shard, num_shards, position)
            assert plain(next(second)) == rest[0]
            assert rest_of(opened(source, shard, num_shards, through_json(second.state_dict()))) == rest[1:]
            assert plain(next(first)) == rest[0]
    assert rest_of(first) == []
    return whole


def all_samples(source: Source[T], num_shards: int) -> list[T]:
    """The samples of all shards, each shard looked at as above."""
    return [sample for shard in range(num_shards) for sample in shard_samples(source, shard, num_shards)]
