"""Text files: a sample is a line, or what a line of JSON means."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchelastic.data.sources.files import FileIterator, Files, OpenFile, found

#: Which of how many parts of a file, cut by bytes.
_Part = tuple[int, int]


@dataclass(frozen=True)
class lines:
    """The lines of text files, without their ends: a source of `str`.

    With at least as many files as shards, file f is in shard f % num_shards. With fewer files every shard has a part of
    each file: part s of n are the lines that begin in bytes size * s // n to size * (s + 1) // n - 1, so it is found
    without reading what is before. Position: file and byte.

    Args:
        files: paths, URLs (s3://, gs://, ... through fsspec) or glob patterns, one or several; UTF-8, not compressed.

    Raises:
        SourceError: (when opened or read) no file matches, a line is not UTF-8, or a file is not what it was when the
            position was taken.
    """

    files: Files

    def __call__(self, shard: int, num_shards: int, position: Any, /) -> Iterator[str]:
        """Opens a shard; see `Source`."""
        return _opened(self.files, shard, num_shards, position, _texts)


@dataclass(frozen=True)
class jsonl:
    """JSON Lines: a source of what each line means, mostly `dict`; blank lines are passed over.

    Files are dealt to the shards as those of `lines`.

    Args:
        files: as for `lines`.

    Raises:
        SourceError: as for `lines`; also if a line is not JSON.
    """

    files: Files

    def __call__(self, shard: int, num_shards: int, position: Any, /) -> Iterator[Any]:
        """Opens a shard; see `Source`."""
        return _opened(self.files, shard, num_shards, position, _values)


def _opened(files: Files, shard: int, num_shards: int, position: Any, read: Any) -> FileIterator[Any, _Part]:
    names = found(files, position)
    if len(names) >= num_shards:
        parts = [(number, (0, 1)) for number in range(shard, len(names), num_shards)]
    else:
        parts = [(number, (shard, num_shards)) for number in range(len(names))]
    return FileIterator(names, parts, position, read)


def _raw(file: OpenFile, part: _Part, at: int | None) -> Iterator[tuple[bytes, int]]:
    """The lines that begin in a part of a file, each with the byte at which it begins."""
    number, parts = part
    begin, end = file.size * number // parts, file.size * (number + 1) // parts
    if at is not None:
        file.stream.seek(at)
        begin = at
    elif begin > 0:  # go to the first line that begins here; the line around the cut is the part's before
        file.stream.seek(begin - 1)
        begin += len(file.stream.readline()) - 1
    while begin < end and (line := file.stream.readline()):
        yield line, begin
        begin += len(line)


def _texts(file: OpenFile, part: _Part, at: int | None) -> Iterator[tuple[str, int]]:
    for line, begin in _raw(file, part, at):
        try:
            text = line.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise file.error(begin, f"the line is not UTF-8 ({error.reason}): {line[:80]!r}") from None
        yield text, begin + len(line)


def _values(file: OpenFile, part: _Part, at: int | None) -> Iterator[tuple[Any, int]]:
    for line, begin in _raw(file, part, at):
        if not line.isspace():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise file.error(begin, f"the line is not JSON ({error}): {line[:80]!r}") from None
            yield value, begin + len(line)
