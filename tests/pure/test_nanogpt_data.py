"""Which sequences an iteration is trained on, and what `prepare.py` writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.nanogpt import prepare
from examples.nanogpt.data import SPLITS, Corpus, DataError, starts, write_corpus

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


def test_each_target_is_the_token_after_its_input(corpus: Corpus) -> None:
    inputs, targets = corpus.sequences("train", range(6), 10, seed=1, stream="train")
    assert inputs.shape == targets.shape == (6, 10)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for row, last in zip(inputs.tolist(), targets[:, -1].tolist(), strict=True):
        assert corpus.vocabulary.decode([*row, last]) in TEXT


def test_a_text_too_short_for_its_sequences_is_refused(corpus: Corpus) -> None:
    corpus.require_length(88)
    with pytest.raises(DataError, match=r"val.bin has 90 tokens, too few .* block_size=89"):
        corpus.require_length(89)


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
