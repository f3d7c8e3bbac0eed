"""Reading a shard of a list of files: which files there are, and a place in one of them."""

from __future__ import annotations

import functools
import glob
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchelastic.data.sources.api import SourceError, fields
from torchelastic.text import escaped, without_credentials, without_secrets

T = TypeVar("T")
Part = TypeVar("Part")

#: A name or glob pattern or several of them: paths, or URLs of any kind that fsspec knows.
Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

logger = logging.getLogger(__name__)

#: Where storage fails, a file is asked for again after these pauses, for ten minutes in all.
OUTAGE_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, *([30.0] * 19))
_BUFFER_BYTES = 1 << 17
_COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".lz4")


@dataclass(frozen=True)
class OpenFile:
    """A file that is being read.

    Attributes:
        name: path or URL, as it may be logged.
        stream: its bytes.
        size: in bytes.
    """

    name: str
    stream: BufferedReader
    size: int

    def error(self, byte: int, what: str) -> SourceError:
        """Something is wrong with it at a byte."""
        return SourceError(f"{self.name}, byte {byte}: {escaped(what)}")


def found(files: Files, position: Any) -> tuple[str, ...]:
    """The names of the files: patterns in their order, the matches of each sorted.

    Args:
        files: names and patterns.
        position: where reading goes on. If not 0 they were found before, and storage that fails is asked again.

    Raises:
        SourceError: a pattern has no match, a file is named twice, or is compressed.
    """
    patterns = [files] if isinstance(files, str | os.PathLike) else files
    names = [name for pattern in patterns for name in _matches(os.fspath(pattern), position != 0)]
    if not names:
        raise SourceError("the list of files is empty")
    if len(set(names)) < len(names):
        twice = without_credentials(next(name for name in names if names.count(name) > 1))
        raise SourceError(f"{twice} is named twice: each file is read once, so let only one pattern match it")
    for name in names:
        if name.lower().endswith(_COMPRESSED):
            what = "is compressed, and nothing can begin in the middle of it: decompress it first"
            raise SourceError(f"{without_credentials(name)} {what}")
    return tuple(names)


def _matches(pattern: str, is_known: bool) -> list[str]:
    is_url = "://" in pattern
    if not re.search(r"[*?\[]", pattern) or (not is_url and Path(pattern).exists()):
        return [pattern]
    if is_url:
        import fsspec  # type: ignore[import-untyped]

        system, path = fsspec.core.url_to_fs(pattern)
        entries, pauses = None, _pauses(pattern, is_known)
        while entries is None:
            try:
                entries = system.glob(path, detail=True)
            except Exception as error:  # noqa: BLE001 - each protocol's package has its own errors
                _wait_out(pattern, error, pauses)
        names = [system.unstrip_protocol(name) for name, entry in entries.items() if entry["type"] == "file"]
    else:
        names = [name for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]  # noqa: PTH207 - `**`
    if not names:
        raise SourceError(f"no file matches {without_credentials(pattern)}")
    return sorted(names)


def _pauses(name: str, is_known: bool) -> Iterator[float]:
    """Between tries to read something; none of what is no URL, or was never read."""
    return iter(OUTAGE_PAUSES_S if is_known and "://" in name else ())


def _wait_out(name: str, error: Exception, pauses: Iterator[float]) -> None:
    """Waits before the next try, and says so; raises the error if that was the last one.

    Not tenacity: its attempts swallow the end of a generator, and count from the first try and not the first failure.
    """
    pause_s = next(pauses, None)
    if pause_s is None:
        raise error
    text = "%s cannot be read at present, and is asked for again in %g s: %s"
    logger.warning(text, without_credentials(name), pause_s, without_secrets(error, name))
    time.sleep(pause_s)


@functools.cache
def say_shards_are_empty(what: str, count: int, num_shards: int) -> None:
    """Logs it, once in a process; to be called for the first shard that has nothing."""
    logger.warning(
        "there are %d %s for %d logical shards, so %d shards are empty: make more of them, or fewer logical shards",
        count, what, num_shards, num_shards - count,
    )  # fmt: skip


@contextmanager
def opened_file(name: str) -> Iterator[OpenFile]:
    """Opens a file for reading, through fsspec if it is a URL.

    Raises:
        SourceError: it is not there.
    """
    try:
        if "://" in name:
            import fsspec

            raw = fsspec.open(name, "rb").open()
        else:
            raw = Path(name).open("rb", buffering=0)  # noqa: SIM115 - closed with the reader around it
    except FileNotFoundError:
        what = "is not there: bring it back, or leave it out and start the epoch anew"
        raise SourceError(f"{without_credentials(name)} {what}") from None
    with BufferedReader(raw, _BUFFER_BYTES) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        yield OpenFile(without_credentials(name), stream, size)


class FileIterator(Iterator[T], Generic[T, Part]):
    """The samples of one shard: parts of files, one after the other.

    Its position is the number of a file in the list, a place in the file, and what shows that both mean what they did:
    the file's name and size, and a checksum of all names. Folders are not part of it: data may move as a whole.

    Args:
        names: all files of the source.
        parts: what this shard has: the number of a file, and which part of the file.
        position: 0, or what `state_dict` has returned.
        read: the samples of a part from a place on (None: its beginning), each with the place behind it.
    """

    def __init__(
        self,
        names: Sequence[str],
        parts: Sequence[tuple[int, Part]],
        position: Any,
        read: Callable[[OpenFile, Part, Any], Iterator[tuple[T, Any]]],
    ) -> None:
        self._names, self._parts, self._read = names, parts, read
        self._last_names = [name.rpartition("/")[2] for name in names]
        self._checksum = f"{zlib.crc32(chr(0).join(self._last_names).encode(errors='surrogateescape')):08x}"
        self._position = position
        self._place: tuple[int, int, Any] | None = None
        self._samples = self._from(*self._checked(position))

    def __next__(self) -> T:
        return next(self._samples)

    def state_dict(self) -> Any:
        """The position behind the newest sample."""
        if self._place is None:
            return self._position
        number, size, at = self._place
        return {
            "file": number, "name": self._last_names[number], "size": size, "at": at, "files": self._checksum
        }  # fmt: skip

    def _from(self, first: int, size_then: int | None, at: Any) -> Iterator[T]:
        for number, part in self._parts:
            if number == first:
                yield from self._of_file(number, part, size_then, at)
            elif number > first:
                yield from self._of_file(number, part, None, None)

    def _of_file(self, number: int, part: Part, size_then: int | None, at: Any) -> Iterator[T]:
        """What is behind a place in a file; storage that fails after it was read once is asked again for a while."""
        name = self._names[number]
        pauses = _pauses(name, self.state_dict() != 0)
        while True:
            try:
                with opened_file(name) as file:
                    if size_then is not None:
                        self._require_size(file, size_then, at)
                    size_then = file.size
                    for sample, behind in self._read(file, part, at):
                        self._place, at = (number, file.size, behind), behind
                        pauses = _pauses(name, is_known=True)
                        yield sample
                return
            except SourceError:
                raise
            except Exception as error:  # noqa: BLE001 - each protocol's package has its own errors
                _wait_out(name, error, pauses)

    def _checked(self, position: Any) -> tuple[int, int | None, Any]:
        if position == 0:
            return -1, None, None
        number, name, size, at, checksum = fields(position, "file", "name", "size", "at", "files")
        if checksum != self._checksum:
            what = "is gone" if name not in self._last_names else "was in another list of files"
            raise SourceError(
                f"{name}, at {at}: the position was taken there, and this file {what} ({len(self._names)} files now): "
                "bring back the files as they were, or start the epoch anew"
            )
        return number, size, at

    def _require_size(self, file: OpenFile, size_then: int, at: Any) -> None:
        if file.size != size_then:
            raise SourceError(
                f"{file.name}, at {at}: the position was taken there when the file had {size_then} bytes, and it has "
                f"{'shrunk' if file.size < size_then else 'grown'} to {file.size}: bring back the file as it was, or "
                "start the epoch anew"
            )
