"""The last lines of what this host's workers have written to `--log-dir`."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

#: Of one log so much is sent at once, at most.
MOST_BYTES = 32_768


@dataclass(frozen=True)
class Tail:
    """The end of a log.

    Attributes:
        content: whole lines, but for a first one that is too long.
        version: another one as soon as there is more.
    """

    content: bytes
    version: str


class Logs:
    """The logs of this host's workers. Any thread.

    Args:
        paths: gives those that there are: by name (`0.1`: the second process in place 0), oldest first.
    """

    def __init__(self, paths: Callable[[], Mapping[str, Path]] = dict) -> None:
        self._paths = paths

    def names(self) -> tuple[str, ...]:
        """What there is."""
        return tuple(self._paths())

    def tail(self, name: str, lines: int) -> Tail | None:
        """The last lines of a log; None: there is none of that name, or it is no plain file."""
        path = self._paths().get(name)
        if path is None:
            return None
        try:
            # a worker may write in that folder, too: no link is followed, no pipe is waited for
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                return None
            file.seek(max(0, found.st_size - MOST_BYTES))
            content = file.read(MOST_BYTES)
        return Tail(last_lines(content, lines), f'"{found.st_ino:x}-{found.st_size:x}-{lines:x}"')


def last_lines(content: bytes, lines: int) -> bytes:
    r"""The last so many lines.

    >>> last_lines(b"a\nb\nc", 2), last_lines(b"a\nb\n", 1)
    (b'b\nc', b'b\n')
    """
    at = len(content) - (1 if content.endswith(b"\n") else 0)
    for _ in range(lines):
        at = content.rfind(b"\n", 0, at)
        if at < 0:
            return content
    return content[at + 1 :]
