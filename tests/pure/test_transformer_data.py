"""The order of documents and the packing of tokens in examples/transformer_slurm."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.transformer_slurm.make_dataset import main as make_dataset
from examples.transformer_slurm.make_dataset import write_parquet
from examples.transformer_slurm.parquet_text import (
    DatasetError,
    DocumentOrder,
    ParquetText,
    TokenStream,
    for_other_ranks,
)
from examples.transformer_slurm.tokenization import TextTokenizer, first_texts, read_tokenizer, train_tokenizer

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


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[tuple[int, int]]:
        one = DocumentOrder(GROUPS, seed, epoch)
        return [one.place(number) for number in range(len(one))]

    assert order(4, 2) == order(4, 2)
    assert len({tuple(order(*numbers)) for numbers in [(4, 0), (4, 1), (5, 0), (5, 1)]}) == 4


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


@pytest.mark.parametrize("encoded_as", ["string", "large_string", "dictionary"])
def test_text_is_read_however_it_is_stored(encoded_as: str, tmp_path: Path) -> None:
    kinds = {
        "string": pa.string(),
        "large_string": pa.large_string(),
        "dictionary": pa.dictionary(pa.int32(), pa.string()),
    }
    column = pa.array(["one", None, "two"]).cast(kinds[encoded_as])
    pq.write_table(pa.table({"id": [1, 2, 3], "body": column}), tmp_path / "t.parquet")
    texts = ParquetText(tmp_path / "t.parquet", "body")
    assert [texts.text(0, row) for row in range(3)] == ["one", "", "two"]


def test_a_missing_column_is_named_beside_those_that_exist(tmp_path: Path) -> None:
    pq.write_table(pa.table({"content": ["a"], "url": ["b"]}), tmp_path / "t.parquet")
    with pytest.raises(DatasetError, match=r"no column 'text'; it has 'content', 'url': say --text-column"):
        ParquetText(tmp_path / "t.parquet")


@pytest.mark.parametrize("content", [b"no parquet at all", b"PAR1" + bytes(40) + b"PAR1"], ids=["text", "torn"])
def test_what_is_no_parquet_file_is_refused_with_a_remedy(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=r"is no parquet file \(.*make_dataset"):
        ParquetText(path)
    with pytest.raises(DatasetError, match="no such file; make one"):
        ParquetText(tmp_path / "nothing.parquet")


def test_numbers_are_no_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "t.parquet")
    with pytest.raises(DatasetError, match="holds int64, not text"):
        ParquetText(tmp_path / "t.parquet")


def test_a_row_group_that_is_damaged_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "t.parquet", [str(number) * 50 for number in range(40)], rows_per_group=20)
    data = bytearray((tmp_path / "t.parquet").read_bytes())
    data[4:200] = bytes(196)
    (tmp_path / "t.parquet").write_bytes(data)
    with pytest.raises(DatasetError, match="cannot be read in row group 0"):
        ParquetText(tmp_path / "t.parquet").text(0, 0)


def test_fewer_documents_than_ranks_are_refused(tmp_path: Path) -> None:
    texts = texts_in(tmp_path, ["a", "b"])
    with pytest.raises(DatasetError, match="has 2 rows, and each of 3 ranks"):
        TokenStream(texts, encode, seed=0, world_size=3)


def test_an_epoch_without_any_text_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    stream = TokenStream(texts_in(tmp_path, ["", "", "", ""]), encode, seed=0)
    with pytest.raises(DatasetError, match="no text for rank 0"):
        stream.batch(1, 4)


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


def test_a_tokenizer_may_be_given_as_its_folder_but_not_as_a_name(tmp_path: Path) -> None:
    train_tokenizer(texts_in(tmp_path, ["abc"]), 260, tmp_path / "tokenizer.json")
    assert read_tokenizer(tmp_path) == read_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(DatasetError, match="Nothing is downloaded"):
        read_tokenizer(Path("unsloth/Mistral-Nemo-Base-2407-bnb-4bit"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DatasetError, match="no file of the `tokenizers` package"):
        read_tokenizer(tmp_path)


def test_a_tokenizer_is_trained_on_so_many_characters_only(tmp_path: Path) -> None:
    texts = texts_in(tmp_path, ["abcd", "", "efgh", "ijkl"])
    assert list(first_texts(texts, 6)) == ["abcd", "ef"]
    with pytest.raises(DatasetError, match="no text at all"):
        list(first_texts(texts_in(tmp_path, ["", ""]), 6))


def test_a_data_set_is_made_from_files_in_an_order_that_is_the_same_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"b.txt": "two", "a.txt": "one", "c.md": "other", "d.txt": "  \n"}.items():
        (tmp_path / name).write_text(text)
    target = tmp_path / "new" / "t.parquet"
    assert make_dataset([str(target), str(tmp_path), "--pattern", "*.txt"]) == 0
    texts = ParquetText(target)
    assert [texts.text(0, row) for row in range(texts.rows_of_groups[0])] == ["one", "two"]
    assert "2 documents" in capsys.readouterr().out
    assert make_dataset([str(target), str(tmp_path / "nowhere")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert list(target.parent.iterdir()) == [target]
