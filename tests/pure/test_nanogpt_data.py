"""Which sequences an iteration is trained on, and what `prepare.py` writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.nanogpt import prepare
from examples.nanogpt.data import SPLITS, Corpus, DataError, Vocabulary, starts, write_corpus

TEXT = "the quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    write_corpus(tmp_path / "fox", TEXT, source="a test")
    return Corpus(tmp_path / "fox")


# The order


def splitmix64(state: int) -> int:
    """One output of SplitMix64 with plain integers: the reference."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_starts_are_those_of_splitmix64_whatever_release_of_numpy_runs() -> None:
    assert [splitmix64(number * 0x9E3779B97F4A7C15 % 2**64) for number in range(2)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
    ], "the published first outputs for the seed 0"
    found = starts(7, "train", [0, 1, 5, 2**40], 1_000_003)
    base = int.from_bytes(__import__("hashlib").blake2b(b"7/train", digest_size=8).digest(), "little")
    expected = [splitmix64((base + number * 0x9E3779B97F4A7C15) % 2**64) % 1_000_003 for number in (0, 1, 5, 2**40)]
    assert found.tolist() == expected


# The files


def test_a_text_comes_back_from_its_tokens() -> None:
    vocabulary = Vocabulary.of(TEXT)
    assert vocabulary.characters == "".join(sorted(set(TEXT)))
    assert vocabulary.decode(vocabulary.encode(TEXT).tolist()) == TEXT


def test_each_target_is_the_token_after_its_input(corpus: Corpus) -> None:
    inputs, targets = corpus.sequences("train", range(6), 10, seed=1, stream="train")
    assert inputs.shape == targets.shape == (6, 10)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for row, last in zip(inputs.tolist(), targets[:, -1].tolist(), strict=True):
        assert corpus.vocabulary.decode([*row, last]) in TEXT


def test_the_end_of_the_text_is_for_validation(corpus: Corpus) -> None:
    assert corpus.size("train") + corpus.size("val") == len(TEXT)
    assert corpus.size("val") == 90
    inputs, _ = corpus.sequences("val", range(200), 88, seed=0, stream="any")
    assert {corpus.vocabulary.decode(row) for row in inputs.tolist()} == {TEXT[810:898], TEXT[811:899]}


def test_a_text_too_short_for_its_sequences_is_refused(corpus: Corpus) -> None:
    corpus.require_length(88)
    with pytest.raises(DataError, match=r"val.bin has 90 tokens, too few .* block_size=89"):
        corpus.require_length(89)


def test_without_data_it_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"run `python prepare.py --name nothing`"):
        Corpus(tmp_path / "nothing")


def test_a_token_file_that_was_cut_is_refused(corpus: Corpus) -> None:
    path = corpus.folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train.bin has 809 tokens, and meta.json says 810"):
        Corpus(corpus.folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "other"}'])
def test_a_strange_meta_file_is_refused(corpus: Corpus, content: str) -> None:
    (corpus.folder / "meta.json").write_text(content)
    with pytest.raises(DataError, match=r"meta.json"):
        Corpus(corpus.folder)


def test_a_character_that_is_not_in_the_vocabulary_is_named(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="'!' is not in the vocabulary"):
        corpus.vocabulary.encode("fox!")


@pytest.mark.parametrize("characters", ["", "aa"])
def test_a_vocabulary_has_each_character_once(characters: str) -> None:
    with pytest.raises(ValueError, match="each once"):
        Vocabulary(characters)


# prepare.py


def test_prepare_takes_text_files_in_their_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("b", "bbb" * 20), ("a", "aaa" * 20)):
        (tmp_path / name).write_text(text)
    words = [str(tmp_path / "b"), str(tmp_path / "a"), "--name", "two", "--data_dir", str(tmp_path / "data")]
    assert prepare.main([*words, "--max_characters", "100"]) == 0
    folder = tmp_path / "data" / "two"
    parts = [np.fromfile(folder / f"{split}.bin", "<u2") for split in SPLITS]
    assert np.concatenate(parts).tolist() == [1] * 60 + [0] * 40
    assert "90 tokens to train, 10 to validate, 2 different characters" in capsys.readouterr().out
    assert json.loads((folder / "meta.json").read_text())["vocabulary"] == "ab"


def test_the_default_text_is_the_standard_library_in_a_fixed_order(tmp_path: Path) -> None:
    files = prepare.library_sources()
    assert files == sorted(files, key=lambda path: path.as_posix())
    assert {"argparse.py", "abc.py"} <= {path.name for path in files}
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)
    words = ["--name", "std", "--max_characters", "20000"]
    for place in ("one", "two"):
        prepare.main([*words, "--data_dir", str(tmp_path / place)])
    for name in ("meta.json", "train.bin", "val.bin"):
        one, two = ((tmp_path / place / "std" / name).read_bytes() for place in ("one", "two"))
        assert one == two
        assert one


def test_prepare_refuses_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prepare.main([str(tmp_path / "gone.txt"), "--data_dir", str(tmp_path)])
    assert "gone.txt" in capsys.readouterr().err
