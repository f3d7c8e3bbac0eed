"""A copy of a shard that lies elsewhere: only the bytes that somebody reads come here."""

from __future__ import annotations

import bisect
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained, is_full
from torchelastic.checkpoint.format.header import PREAMBLE_BYTES, decode_preamble
from torchelastic.text import bytes_text

#: Where parts of a shard begin and end, in bytes, ascending.
Ranges = Sequence[tuple[int, int]]
#: Returns the bytes of these parts, joined; fewer where the shard ends before. Raises: CheckpointError.
Fetch = Callable[[Ranges], "bytes | bytearray"]

#: So much is asked for first; most headers are shorter.
FIRST_BYTES = 64 * 2**10
#: One request brings so much at most: on its way it is in memory once more.
MOST_BYTES = 64 * 2**20
#: And so many parts; they have to fit into one message.
MOST_PARTS = 1000
#: What lies between two parts is brought with them where it is less: one more part would cost as much.
GAP_BYTES = 64 * 2**10


class PartialCopy:
    """A file without a name, as long as the shard, with holes where nothing was asked for; used by one thread.

    Args:
        fetch: asks for bytes of the shard, from wherever it is.
        folder: on whose file system it is; None: in memory.
        remedy: what whoever reads can do where that has no room.

    Attributes:
        descriptor: of the file, for reading and writing; whoever reads it closes it.
        path: under which this process can open it.

    Raises:
        CheckpointError: it cannot be created.
    """

    def __init__(self, fetch: Fetch, folder: Path | None = None, remedy: str = "free some of it") -> None:
        self._fetch = fetch
        self._remedy = remedy
        self._wanted_bytes = FIRST_BYTES
        self._place = Path("memory") if folder is None else folder
        self._here: list[tuple[int, int]] = []  # ascending; no two overlap
        with explained("make room for a copy of a shard", self._place):
            made = os.memfd_create("torchelastic-shard") if folder is None else _unnamed_file(folder)
        self.descriptor = made
        self.path = Path(f"/proc/self/fd/{made}")

    def bring_header(self) -> None:
        """Fetches the header, and gives the file the shard's length. Raises as `bring`."""
        first = self._fetch([(0, FIRST_BYTES)])
        self._keep(0, first)
        preamble = decode_preamble(bytes(first[:PREAMBLE_BYTES]))
        with explained("make room for a copy of a shard", self._place):
            os.ftruncate(self.descriptor, preamble.data_offset_bytes + preamble.data_bytes)
        self.bring([(PREAMBLE_BYTES, PREAMBLE_BYTES + preamble.header_bytes)])

    def bring(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetches what is not here yet.

        Args:
            ranges: where each begins and ends, ascending.

        Raises:
            CorruptCheckpointError: the shard ends before, or is not what its holder has stored.
            CheckpointError: it cannot be had, or there is no room for it.
        """
        missing = [part for begin, end in _joined(ranges) for part in _missing(begin, end, self._here)]
        self._wanted_bytes = sum(end - begin for begin, end in (*self._here, *missing))
        for request in _requests(missing):
            came, wanted_bytes = self._fetch(request), sum(end - begin for begin, end in request)
            if len(came) != wanted_bytes:
                raise CorruptCheckpointError(f"it was cut: {len(came)} of {wanted_bytes} bytes came")
            position, content = 0, memoryview(came)
            for begin, end in request:
                self._keep(begin, content[position : position + end - begin])
                position += end - begin

    def _keep(self, begin: int, content: bytes | bytearray | memoryview) -> None:
        rest = memoryview(content)
        try:
            with explained("keep a copy of a shard", self._place):
                while rest:
                    rest = rest[os.pwrite(self.descriptor, rest, begin + len(content) - len(rest)) :]
        except CheckpointError as error:
            if is_full(error):
                raise self._no_room(error) from error
            raise
        if content:
            bisect.insort(self._here, (begin, begin + len(content)))

    def _no_room(self, error: CheckpointError) -> CheckpointError:
        here_bytes = sum(end - begin for begin, end in self._here)
        return CheckpointError(
            error.errno,
            f"there is no room for a copy of a shard while it is read: {os.strerror(error.errno or 0)} after "
            f"{bytes_text(here_bytes)} of {bytes_text(self._wanted_bytes)}: {self._remedy}",
            str(self._place),
        )


def _unnamed_file(folder: Path) -> int:
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same in fewer ranges: those with little between them become one.

    >>> _joined([(0, 64), (64, 100), (10**6, 10**6 + 1)])
    [(0, 100), (1000000, 1000001)]
    """
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and begin - joined[-1][1] <= GAP_BYTES:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _missing(begin: int, end: int, here: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of a range that are not here; a shard may come in thousands of pieces.

    >>> list(_missing(5, 30, [(0, 10), (20, 25)]))
    [(10, 20), (25, 30)]
    """
    index = max(0, bisect.bisect_right(here, (begin, begin)) - 1)
    while begin < end and index < len(here) and here[index][0] < end:
        if here[index][0] > begin:
            yield begin, here[index][0]
        begin = max(begin, here[index][1])
        index += 1
    if begin < end:
        yield begin, end


def _requests(parts: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The same parts, long ones cut, as many together as one request may have."""
    request: list[tuple[int, int]] = []
    size_bytes = 0
    for begin, end in parts:
        for at in range(begin, end, MOST_BYTES):
            piece = at, min(at + MOST_BYTES, end)
            if request and (size_bytes + piece[1] - at > MOST_BYTES or len(request) == MOST_PARTS):
                yield request
                request, size_bytes = [], 0
            request.append(piece)
            size_bytes += piece[1] - at
    if request:
        yield request
