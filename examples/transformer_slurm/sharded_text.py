"""The same text as an `ElasticStream`, for `--stream-shards`: any number of ranks goes on where others have stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from examples.transformer_slurm.parquet_text import DatasetError, ParquetText
from torchelastic.data import ElasticStream, mapped, packed, parquet, repeated, shuffled

#: Documents that are shuffled together; so many of each shard are in memory.
SHUFFLED = 1000


@dataclass(frozen=True)
class Text:
    """Takes the text out of a row; "" where the file has none."""

    column: str

    def __call__(self, row: dict[str, Any]) -> str:
        """The document."""
        return row[self.column] or ""


class ShardedText:
    """The sequences of one rank: its part of every batch, which is the same for any number of ranks.

    The file is dealt to shards, each of which goes through its documents again and again, in another order each time.
    Each shard gives as many sequences to each step, so that all ranks have equal shares.

    Args:
        texts: the data set.
        encode: turns a document into tokens, the end-of-text token included.
        seed: of the order.
        shards: how many, for the whole run.
        sequences: of each rank in a step.
        length: tokens of a sequence that are predicted.
        rank: of this process.
        world_size: how many share the data set.
        place: where to begin; None: at the beginning.

    Raises:
        DatasetError: the numbers do not divide evenly, or the file has fewer row groups than shards.
    """

    def __init__(
        self,
        texts: ParquetText,
        encode: Callable[[str], list[int]],
        *,
        seed: int,
        shards: int,
        sequences: int,
        length: int,
        rank: int = 0,
        world_size: int = 1,
        place: Mapping[str, object] | None = None,
    ) -> None:
        if shards % world_size or sequences * world_size % shards:
            raise DatasetError(
                f"--stream-shards {shards}: {world_size} rank(s) must divide it, and it must divide the "
                f"{sequences * world_size} sequences of a step (--batch-size {sequences} for each rank)"
            )
        if len(texts.rows_of_groups) < shards:
            raise DatasetError(
                f"{texts.path} has {len(texts.rows_of_groups)} row groups, and each of {shards} shards needs one at "
                "least: give fewer --stream-shards, or write the file with smaller row groups"
            )
        documents = mapped(parquet(texts.path, [texts.column]), Text(texts.column))
        endless = repeated(shuffled(documents, SHUFFLED, seed))
        self._stream = ElasticStream(
            packed(endless, length + 1, encode), shards, global_batch_size=sequences * world_size, epochs=None
        )
        if place is not None:
            try:
                self._stream.load_state_dict(place)
            except ValueError as error:
                raise DatasetError(f"--stream-shards {shards} does not fit the checkpoint: {error}") from error
        self._stream.set_world(rank, world_size)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next sequences and the tokens that follow theirs: int64 of shape (sequences, length). Collective."""
        rows = next(self._stream)
        self._stream.commit()
        return rows[:, :-1], rows[:, 1:]

    def place(self) -> dict[str, int | str]:
        """Where all ranks are: what a checkpoint holds."""
        return self._stream.state_dict()
