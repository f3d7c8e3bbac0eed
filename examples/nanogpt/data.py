"""Texts as numbers on disk, and which part of them an iteration is trained on.

What `prepare.py` writes into a folder:

    meta.json    format, vocabulary (one string, a character's place in it is its token), numbers of tokens, source
    train.bin    tokens, two bytes each, little endian
    val.bin

Where a sequence begins is a pure function of (seed, stream, number of the sequence in the run): nothing about the data
has to be saved, and it is the same for any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FORMAT = "characters 1"
SPLITS = ("train", "val")
TOKEN = np.dtype("<u2")
MAX_VOCABULARY = 1 << 16
_META = "meta.json"

# SplitMix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014), figures 13 and 17.
# Spelled out, because numpy keeps its streams only within a release, and a run may resume on a host with another one.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class DataError(Exception):
    """There is no data, or it is not what `prepare.py` writes; says what to do."""


@dataclass(frozen=True)
class Vocabulary:
    """The characters that there are; a character's place is its token.

    Args:
        characters: each once.

    Raises:
        ValueError: there are none, too many, or one is there twice.
    """

    characters: str

    def __post_init__(self) -> None:
        if not 0 < len(set(self.characters)) == len(self.characters) <= MAX_VOCABULARY:
            raise ValueError(
                f"a vocabulary of {len(self.characters)} characters, {len(set(self.characters))} of them different: "
                f"give 1 to {MAX_VOCABULARY}, each once"
            )

    @classmethod
    def of(cls, text: str) -> Vocabulary:
        """The characters of a text, in the order of their code points."""
        return cls("".join(sorted(set(text))))

    def encode(self, text: str) -> npt.NDArray[np.uint16]:
        """Tokens of a text. Raises ValueError: it has a character that is not in the vocabulary; names it."""
        token_of = {character: token for token, character in enumerate(self.characters)}
        unknown = sorted(set(text) - token_of.keys())
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not in the vocabulary of {len(self.characters)} characters")
        return np.fromiter((token_of[character] for character in text), TOKEN, count=len(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return "".join(self.characters[token] for token in tokens)


def starts(seed: int, stream: str, numbers: Sequence[int], room: int) -> npt.NDArray[np.int64]:
    """Where the sequences with these numbers begin. Pure.

    Args:
        seed: of the run.
        stream: "train", or what else draws from the same data; streams are independent.
        numbers: of the sequences in the stream, from 0.
        room: so many beginnings there are; the results lie in 0 to room - 1.
    """
    base = int.from_bytes(hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest(), "little")
    with np.errstate(over="ignore"):
        mixed = np.uint64(base) + (np.asarray(numbers, np.uint64) + np.uint64(1)) * _GAMMA
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
        mixed ^= mixed >> np.uint64(31)
    begins: npt.NDArray[np.int64] = (mixed % np.uint64(room)).astype(np.int64)
    return begins


class Corpus:
    """What `prepare.py` has written; the tokens stay on the disk.

    Args:
        folder: where.

    Raises:
        DataError: it is not there, or something else; says what to do.

    Attributes:
        vocabulary: of the text.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        meta = _read_meta(folder)
        self.vocabulary = Vocabulary(str(meta["vocabulary"]))
        self._tokens = {split: _read_tokens(folder / f"{split}.bin", meta) for split in SPLITS}

    def size(self, split: str) -> int:
        """Tokens of "train" or "val"."""
        return len(self._tokens[split])

    def require_length(self, block_size: int) -> None:
        """Raises DataError if a part is too short for sequences of `block_size` tokens and the one after them."""
        for split in SPLITS:
            if self.size(split) < block_size + 2:
                raise DataError(
                    f"{self.folder / split}.bin has {self.size(split)} tokens, too few for sequences of "
                    f"block_size={block_size}: prepare more text, or give a smaller --block_size"
                )

    def sequences(
        self, split: str, numbers: Sequence[int], block_size: int, *, seed: int, stream: str
    ) -> tuple[Tensor, Tensor]:
        """The sequences with these numbers, and what follows each of their tokens.

        Args:
            split: "train" or "val".
            numbers: as for `starts`.
            block_size: tokens of a sequence.
            seed: of the run.
            stream: as for `starts`.

        Returns:
            Two int64 tensors of shape (len(numbers), block_size).
        """
        tokens = self._tokens[split]
        begins = starts(seed, stream, numbers, len(tokens) - block_size)
        windows = np.stack([tokens[begin : begin + block_size + 1] for begin in begins.tolist()]).astype(np.int64)
        whole = torch.from_numpy(windows)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def write_corpus(folder: Path, text: str, *, source: str, val_fraction: float = 0.1) -> Vocabulary:
    """Writes a text as a corpus: the end of it is for validation. `meta.json` comes last, so half a corpus is none.

    Args:
        folder: where to.
        text: all of it.
        source: a few words on where it is from.
        val_fraction: how much of it is for validation, 0..1.

    Raises:
        ValueError: the text is empty, or has too many different characters.
    """
    vocabulary = Vocabulary.of(text)
    tokens = vocabulary.encode(text)
    border = round(len(tokens) * (1 - val_fraction))
    parts = {"train": tokens[:border], "val": tokens[border:]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _META).unlink(missing_ok=True)
    for split, part in parts.items():
        _replace(folder / f"{split}.bin", part.tobytes())
    meta = {
        "format": FORMAT,
        "vocabulary": vocabulary.characters,
        "tokens": {split: len(part) for split, part in parts.items()},
        "source": source,
    }
    _replace(folder / _META, (json.dumps(meta, indent=1) + "\n").encode())
    return vocabulary


def _replace(path: Path, data: bytes) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(data)
    scratch.replace(path)


def _read_meta(folder: Path) -> Mapping[str, object]:
    path = folder / _META
    how = f"run `python prepare.py --name {folder.name}`"
    try:
        meta = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"there is no data in {folder}: {how}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): {how} again") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or not isinstance(meta.get("tokens"), dict):
        raise DataError(f"{path} is not of the format {FORMAT!r} (nanoGPT's own files are not read): {how} again")
    return meta


def _read_tokens(path: Path, meta: Mapping[str, object]) -> npt.NDArray[np.uint16]:
    counts = meta["tokens"]
    expected = counts.get(path.stem) if isinstance(counts, dict) else None
    found = path.stat().st_size // TOKEN.itemsize if path.exists() else None
    if found != expected:
        raise DataError(f"{path} has {found} tokens, and {_META} says {expected}: run prepare.py again")
    if not found:
        return np.empty(0, TOKEN)  # nothing can be mapped of an empty file
    return np.memmap(path, TOKEN, mode="r")
