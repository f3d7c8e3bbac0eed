"""Parquet files: a sample is a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchelastic.data.sources.api import SourceError
from torchelastic.data.sources.files import FileIterator, Files, OpenFile, found, opened_file, say_shards_are_empty

#: Row groups of a file; None: all of them.
_Part = Sequence[int] | None

#: So many rows become Python objects at a time.
_ROWS_AT_A_TIME = 256


@dataclass(frozen=True)
class parquet:
    """The rows of parquet files: a source of `dict`, by column, with values as pyarrow's `to_pylist` makes them.

    With at least as many files as shards, file f is in shard f % num_shards. With fewer files the row groups are dealt
    one by one: g, counted through all files, is in shard g % num_shards. A row group is read at once. Position: file,
    row group and row.

    Args:
        files: as for `lines`.
        columns: which to read; None for all.

    Raises:
        ImportError: (when opened) pyarrow is not installed.
        SourceError: (when opened or read) no file matches, a file is no parquet file, or it is not what it was when the
            position was taken.
    """

    files: Files
    columns: Sequence[str] | None = None

    def __call__(self, shard: int, num_shards: int, position: Any, /) -> Iterator[dict[str, Any]]:
        """Opens a shard; see `Source`."""
        names = found(self.files, position)
        parts: list[tuple[int, _Part]] = [(number, None) for number in range(shard, len(names), num_shards)]
        if len(names) < num_shards:
            parts = self._row_groups(names, shard, num_shards)
        return FileIterator(names, parts, position, self._rows)

    def _row_groups(self, names: Sequence[str], shard: int, num_shards: int) -> list[tuple[int, _Part]]:
        parts, count = list[tuple[int, _Part]](), 0
        for number, name in enumerate(names):
            with opened_file(name) as file:
                here = _parquet_file(file).num_row_groups
            parts.append((number, [group for group in range(here) if (count + group) % num_shards == shard]))
            count += here
        if shard == count:
            say_shards_are_empty("row groups", count, num_shards)
        return parts

    def _rows(self, file: OpenFile, part: _Part, at: list[int] | None) -> Iterator[tuple[dict[str, Any], list[int]]]:
        content = _parquet_file(file)
        columns = None if self.columns is None else list(self.columns)
        first, begin = (0, 0) if at is None else at
        for group in range(content.num_row_groups) if part is None else part:
            if group < first:
                continue
            try:
                table = content.read_row_group(group, columns=columns)
            except (ValueError, OSError) as error:
                raise SourceError(f"{file.name}, row group {group} cannot be read: {error}") from None
            if columns is not None and set(columns) - set(table.column_names):
                raise SourceError(f"{file.name} has no column {sorted(set(columns) - set(table.column_names))[0]!r}")
            row = begin if group == first else 0
            for batch in table.slice(row).to_batches(max_chunksize=_ROWS_AT_A_TIME):
                for sample in batch.to_pylist():
                    row += 1
                    yield sample, [group, row]


def _parquet_file(file: OpenFile) -> Any:
    try:
        from pyarrow import parquet as library
    except ImportError as error:
        raise ImportError(f"{error}; parquet files need pyarrow: pip install pyarrow") from error
    try:
        return library.ParquetFile(file.stream)
    except (ValueError, OSError) as error:
        raise SourceError(f"{file.name} is no parquet file, or is cut off: {error}") from None
