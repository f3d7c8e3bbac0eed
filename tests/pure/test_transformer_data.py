"""The order of documents and the packing of tokens in examples/transformer_slurm."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from examples.transformer_slurm.make_dataset import write_parquet
from examples.transformer_slurm.parquet_text import (
    DocumentOrder,
    ParquetText,
    TokenStream,
    for_other_ranks,
)
from examples.transformer_slurm.tokenization import TextTokenizer, read_tokenizer, train_tokenizer

END = 0
GROUPS = [5, 1, 7, 3]


def encode(text: str) -> list[int]:
    """One token per character, and one behind."""
    return [*map(ord, text), END] if text else []


def texts_in(folder: Path, documents: list[str], rows_per_group: int = 3) -> ParquetText:
    write_parquet(folder / "text.parquet", documents, rows_per_group=rows_per_group)
    return ParquetText(folder / "text.parquet")


def documents(count: int = 11) -> list[str]:
    """Different in every token; the longest fill several sequences."""
    return ["".join(chr(100 * (number + 1) + place) for place in range((13 * number) % 29)) for number in range(count)]


def sequences(stream: TokenStream, count: int, length: int = 7) -> list[list[int]]:
    return [stream.batch(1, length)[0][0].tolist() for _ in range(count)]


def test_an_epoch_has_every_document_once_and_group_by_group() -> None:
    order = DocumentOrder(GROUPS, seed=4, epoch=0)
    places = [order.place(number) for number in range(len(order))]
    assert sorted(places) == [(group, row) for group, rows in enumerate(GROUPS) for row in range(rows)]
    groups = [group for group, _ in places]
    assert sum(one != other for one, other in itertools.pairwise(groups)) == len(GROUPS) - 1


def test_every_token_of_an_epoch_is_trained_on_once(tmp_path: Path) -> None:
    texts = texts_in(tmp_path, documents())
    order = DocumentOrder(texts.rows_of_groups, 3, 0)
    epoch = [token for number in range(len(order)) for token in encode(texts.text(*order.place(number)))]
    inputs = [token for one in sequences(TokenStream(texts, encode, seed=3), len(epoch) // 7) for token in one]
    assert inputs == epoch[: len(inputs)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stream_goes_on_from_each_of_its_positions(rank: int, tmp_path: Path) -> None:
    texts = texts_in(tmp_path, documents())
    undisturbed = TokenStream(texts, encode, seed=1, rank=rank, world_size=2)
    expected = sequences(undisturbed, 40)
    assert undisturbed.position.epoch >= 2
    stream = TokenStream(texts, encode, seed=1, rank=rank, world_size=2)
    for done in range(38):
        again = TokenStream(texts, encode, seed=1, rank=rank, world_size=2, position=stream.position)
        assert sequences(again, 3) == expected[done : done + 3]
        sequences(stream, 1)


def test_ranks_share_the_documents_of_an_epoch(tmp_path: Path) -> None:
    texts = texts_in(tmp_path, documents())
    read: list[set[int]] = []
    for rank in range(3):
        stream = TokenStream(texts, encode, seed=1, rank=rank, world_size=3)
        tokens: set[int] = set()
        while stream.position.epoch == 0:
            before = stream.position
            tokens |= set(stream.batch(1, 1)[0][0].tolist()) if before.epoch == 0 else set()
        read.append(tokens - {END})
    assert not read[0] & read[1]
    assert not read[1] & read[2]
    assert set.union(*read) == {token for text in documents() for token in map(ord, text)}


def test_with_other_ranks_no_document_is_read_twice(tmp_path: Path) -> None:
    texts = texts_in(tmp_path, documents())
    streams = [TokenStream(texts, encode, seed=1, rank=rank, world_size=2) for rank in range(2)]
    seen = {token for stream in streams for one in sequences(stream, 4) for token in one} - {END}
    begin = for_other_ranks([stream.position for stream in streams])
    assert 0 < begin.begin < len(documents())
    after: set[int] = set()
    for rank in range(3):
        stream = TokenStream(texts, encode, seed=1, rank=rank, world_size=3, position=begin)
        while stream.position.epoch == 0 and stream.position.document(rank, 3) < len(documents()):
            after |= set(stream.batch(1, 1)[0][0].tolist())
    assert after - {END}
    assert not seen & after


def test_a_trained_tokenizer_is_the_same_each_time_and_gives_the_text_back(tmp_path: Path) -> None:
    texts = texts_in(tmp_path, ["def f(x):\n    return x\n" * 9, "café and 日本語", "def g(y): return f(y)"] * 4)
    for name in ("a.json", "b.json"):
        train_tokenizer(texts, 300, tmp_path / name)
    one, other = (TextTokenizer(read_tokenizer(tmp_path / name)) for name in ("a.json", "b.json"))
    assert one.digest == other.digest
    tokens = one.encode("café:\n    return")
    assert tokens[-1] == one.end
    assert one.decode(tokens[:-1]) == "café:\n    return"
    assert len(one.encode("def f(x):\n    return x\n")) < 20
    assert max(tokens) < one.vocabulary <= 300
    assert one.encode("") == []
