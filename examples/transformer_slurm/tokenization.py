"""The tokenizer: a local file of the `tokenizers` package, or one that is trained on the data set itself."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.transformer_slurm.parquet_text import DatasetError, ParquetText

FILE_NAME = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
#: What other vocabularies call the token behind a document.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
#: More characters than this do not make the merges better, and take memory and time.
TRAINED_ON_CHARACTERS = 16 * 2**20


class TextTokenizer:
    """Turns documents into tokens.

    Args:
        text: what a file of the `tokenizers` package holds.

    Attributes:
        vocabulary: how many tokens there are.
        end: the token behind each document; None if the vocabulary has none.
        digest: tells this tokenizer from any other.
    """

    def __init__(self, text: str) -> None:
        self._tokenizer = tokenizer = Tokenizer.from_str(text)
        self.vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
        ids = (tokenizer.token_to_id(name) for name in _END_NAMES)
        self.end = next((number for number in ids if number is not None), None)
        self.digest = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """The tokens of a document and the one behind it; nothing for an empty one."""
        if not text:
            return []
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens if self.end is None else [*tokens, self.end]

    def decode(self, tokens: list[int]) -> str:
        """Back to text."""
        return str(self._tokenizer.decode(tokens))


def read_tokenizer(path: Path) -> str:
    """What a file holds, or `tokenizer.json` in a folder; a tokenizer can be made of it.

    Raises:
        DatasetError: there is none, or it is something else.
    """
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise DatasetError(
            f"--tokenizer-name-or-path {path}: no such local file, or folder with a {FILE_NAME}. Nothing is "
            "downloaded: fetch it before, or leave the option out, and one is trained on the data set"
        )
    try:
        text = file.read_text(encoding="utf-8")
        TextTokenizer(text)
    except Exception as error:
        raise DatasetError(f"{file} is no file of the `tokenizers` package: {error}") from error
    return text


def train_tokenizer(texts: ParquetText, vocabulary: int, target: Path) -> None:
    """Trains byte-pair merges (arXiv:1508.07909) over bytes on the first documents; the file appears complete or not.

    Raises:
        DatasetError: the file cannot be written, or the data set has no text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(first_texts(texts, TRAINED_ON_CHARACTERS), trainer)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(tokenizer.to_str(), encoding="utf-8")
        scratch.replace(target)
    except OSError as error:
        raise DatasetError(f"the tokenizer cannot be stored in {target}: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def first_texts(texts: ParquetText, characters: int) -> Iterator[str]:
    """The documents in the order of the file, until there are so many characters; the last one may be cut.

    Raises:
        DatasetError: there is no text at all.
    """
    left = characters
    for group, rows in enumerate(texts.rows_of_groups):
        for row in range(rows):
            text = texts.text(group, row)
            if left <= 0:
                return
            if text:
                yield text[:left]
                left -= len(text)
    if left == characters:
        raise DatasetError(f"the column {texts.column!r} of {texts.path} holds no text at all")
