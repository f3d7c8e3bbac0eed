"""Text from a parquet file as batches of tokens: read lazily, in an order that follows from numbers alone.

Documents are packed: each is followed by the end-of-text token, the documents of a rank form one stream, and the stream
is cut into sequences, so that a long document fills several and a short one shares its sequence with its neighbours. (A
token may attend to the document before; nothing is padded, nothing is thrown away.) Each token is predicted once: the
last one of a sequence is the first one of the next.

In each epoch the row groups are in another order, and so are the rows in each; both follow from (seed, epoch). The
document with number k of an epoch goes to rank k modulo the number of ranks. So four numbers say where a rank is.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from torchelastic.data.order import epoch_order, mixed_seed

MAKE_ONE = "python -m examples.transformer_slurm.make_dataset text.parquet"


class DatasetError(ValueError):
    """The data set cannot be used; says why, and what to do."""


@dataclass(frozen=True, order=True)
class Position:
    """Where a rank is in its stream.

    Attributes:
        epoch: from 0 up.
        begin: the number in the epoch of the first document that this number of ranks has dealt out.
        turn: how many documents this rank has had since then.
        offset: which token of the document at hand the next sequence begins with.
    """

    epoch: int = 0
    begin: int = 0
    turn: int = 0
    offset: int = 0

    def document(self, rank: int, world_size: int) -> int:
        """The number of the document at hand in the epoch."""
        return self.begin + rank + world_size * self.turn


def for_other_ranks(positions: Sequence[Position]) -> Position:
    """Where any number of other ranks go on, so that no document is read twice. Pure.

    It is behind the furthest document that a rank has begun. Of the epoch are lost: the rest of the documents that were
    at hand, and those that slower ranks would have had before it.

    Args:
        positions: of all ranks that saved, by rank.

    >>> for_other_ranks([Position(epoch=2, turn=7, offset=5), Position(epoch=2, turn=6)])
    Position(epoch=2, begin=15, turn=0, offset=0)
    """
    world_size = len(positions)
    epoch = max(position.epoch for position in positions)
    furthest = max(p.document(rank, world_size) for rank, p in enumerate(positions) if p.epoch == epoch)
    return Position(epoch, furthest + 1)


class ParquetText:
    """The text column of a parquet file. Only one row group is in memory; opening reads the footer alone.

    Args:
        path: the file.
        column: its name.

    Raises:
        DatasetError: it is no parquet file, has no such column, or it holds no text.
    """

    def __init__(self, path: Path, column: str = "text") -> None:
        if not path.is_file():
            raise DatasetError(f"--dataset {path}: no such file; make one with `{MAKE_ONE}`")
        try:
            self._file = pq.ParquetFile(path)
        except (pa.ArrowInvalid, OSError) as error:
            why = " ".join(str(error).split())
            raise DatasetError(f"--dataset {path} is no parquet file ({why}); make one with `{MAKE_ONE}`") from error
        schema = self._file.schema_arrow
        if column not in schema.names:
            raise DatasetError(
                f"{path} has no column {column!r}; it has {', '.join(map(repr, schema.names))}: say --text-column"
            )
        kind = schema.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DatasetError(f"the column {column!r} of {path} holds {kind}, not text: say --text-column")
        metadata = self._file.metadata
        self.path, self.column = path, column
        self.rows_of_groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._group, self._texts = -1, None

    @property
    def fingerprint(self) -> str:
        """Equal for files with equal contents; other files have another one, as good as always."""
        metadata = self._file.metadata
        size_bytes = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
        return f"{self.column}: {metadata.num_rows} rows in {metadata.num_row_groups} groups, {size_bytes} bytes"

    def text(self, group: int, row: int) -> str:
        """One document; "" where the file has none."""
        if group != self._group:
            try:
                self._texts = self._file.read_row_group(group, columns=[self.column]).column(0)
            except (pa.ArrowInvalid, OSError) as error:
                raise DatasetError(f"{self.path} cannot be read in row group {group}: {error}") from error
            self._group = group
        return self._texts[row].as_py() or ""  # type: ignore[index]  # a group was read


class DocumentOrder:
    """Where the documents of one epoch are, by their number in it. Pure.

    Args:
        rows_of_groups: how many rows each row group of the file has.
        seed: of the run.
        epoch: from 0 up.
    """

    def __init__(self, rows_of_groups: Sequence[int], seed: int, epoch: int) -> None:
        self._rows, self._seed, self._epoch = rows_of_groups, seed, epoch
        self._groups = epoch_order(len(rows_of_groups), seed, epoch, shuffle=True).tolist()
        self._ends = list(itertools.accumulate(rows_of_groups[group] for group in self._groups))
        self._group, self._order = -1, torch.empty(0)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def place(self, number: int) -> tuple[int, int]:
        """Row group and row in it. Raises IndexError: the epoch has no such document."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        turn = bisect_right(self._ends, number)
        group = self._groups[turn]
        if group != self._group:
            seed = mixed_seed(self._seed, group + 1)
            self._group, self._order = group, epoch_order(self._rows[group], seed, self._epoch, shuffle=True)
        return group, int(self._order[number - (self._ends[turn] - self._rows[group])])


class TokenStream:
    """The sequences of one rank.

    Args:
        texts: the data set.
        encode: turns a document into tokens, the end-of-text token included.
        seed: of the order.
        rank: of this process.
        world_size: how many share the data set.
        position: where to begin.

    Raises:
        DatasetError: there are fewer documents than ranks.
    """

    def __init__(
        self,
        texts: ParquetText,
        encode: Callable[[str], list[int]],
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        position: Position | None = None,
    ) -> None:
        if sum(texts.rows_of_groups) < world_size:
            raise DatasetError(
                f"{texts.path} has {sum(texts.rows_of_groups)} rows, and each of {world_size} ranks needs one at least"
            )
        self._texts, self._encode, self._seed = texts, encode, seed
        self._rank, self._world_size = rank, world_size
        self.position = Position() if position is None else position
        self._order = DocumentOrder(texts.rows_of_groups, seed, self.position.epoch)
        self._ahead: list[int] | None = None  # tokens from the position on, as far as they were read

    def batch(self, sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The next sequences: tokens and the tokens that follow them, int64 of shape (sequences, length).

        Raises:
            DatasetError: a whole epoch has no text for this rank, or the file cannot be read.
        """
        rows = torch.tensor([self._sequence(length) for _ in range(sequences)])
        return rows[:, :-1], rows[:, 1:]

    def _sequence(self, length: int) -> list[int]:
        """`length` + 1 tokens; the position goes on by `length` of them."""
        position, first = self.position, self._ahead
        buffer = self._document(position)[position.offset :] if first is None else first
        at_hand, empty_since = len(buffer), position
        while len(buffer) < length + 1:
            position = self._following(position)
            more = self._document(position)
            if more:
                empty_since = position
            elif position.epoch > empty_since.epoch + 1:
                raise DatasetError(
                    f"{self._texts.path}: no text for rank {self._rank} in all of epoch {position.epoch - 1}"
                )
            buffer = buffer + more
            position, at_hand = replace(position, offset=0), len(more)
        sequence, self._ahead = buffer[: length + 1], buffer[length:]
        # what is left lies in the document that was read last: without it there was not enough
        done = len(buffer) - length
        self.position = replace(position, offset=position.offset + at_hand - done)
        return sequence

    def _document(self, position: Position) -> list[int]:
        number = position.document(self._rank, self._world_size)
        if number >= len(self._order):
            return []
        return self._encode(self._texts.text(*self._order.place(number)))

    def _following(self, position: Position) -> Position:
        after = replace(position, turn=position.turn + 1, offset=0)
        if after.document(self._rank, self._world_size) < len(self._order):
            return after
        self._order = DocumentOrder(self._texts.rows_of_groups, self._seed, position.epoch + 1)
        return Position(position.epoch + 1)


def as_plain(position: Position) -> dict[str, int]:
    """What a checkpoint holds; `from_plain` is the inverse."""
    return asdict(position)


def from_plain(values: Mapping[str, int]) -> Position:
    """Raises TypeError: these are not the numbers of a position."""
    return Position(**values)
