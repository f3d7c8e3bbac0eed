"""An elastic instance: when it ends stands in a file, which may change, or in an environment variable.

The variable is read by `detection`; this is the file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from torchelastic.lifetime.sources.notice import NonsenseError, Notice, Notices

log = logging.getLogger(__name__)

#: A file that changes while it is watched may name a moment that is just over, but not one so long ago.
STALE_S = 3600.0
#: Unix seconds beyond this are milliseconds: it is the year 5138.
_MILLISECONDS_FROM = 1e11


def parse_termination(text: str, *, path: str, wall_s: float, stale_s: float) -> float | None:
    """Unix seconds from the content of a termination file; None if it is blank, or over for too long.

    Args:
        text: the content: one number.
        path: of the file, for the error.
        wall_s: the present in Unix seconds.
        stale_s: what is over for longer than this has not come: it is left from an earlier life.

    Raises:
        NonsenseError: it holds something else.
    """
    remedy = "write Unix seconds into it (`date +%s` prints those of now), or leave it empty"
    if not text.strip():
        return None
    try:
        seconds = float(text)
    except ValueError:
        raise NonsenseError(f"{path} holds {text[:60]!r}, which is no number: {remedy}") from None
    if not 0.0 <= seconds < _MILLISECONDS_FROM:  # also not NaN
        raise NonsenseError(f"{path} holds {text[:60]!r}, which is no date in Unix seconds: {remedy}")
    return None if seconds < wall_s - stale_s else seconds


class TerminationFile(Notices):
    """The end of this instance, as Unix seconds in a file; read again whenever the file changes.

    The file may come and go: none, or an empty one, means that no end is known. Replace it by rename, so that nobody
    reads half of it. `poll` looks at it; have a `Poller` call that.

    Args:
        path: of the file.
        interval_s: between two looks.
        clock: monotonic seconds; that of the deadline.
        wall_clock: Unix seconds.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__("elastic instance", f"{path} names no end of this instance")
        self._path, self._interval_s = Path(path), interval_s
        self._clock, self._wall_clock = clock, wall_clock
        self._stale_s = 0.0  # what is over when this process begins is left from its last life
        self._seen: tuple[int, int, int] | None = None

    def poll(self) -> float:
        """Look once. See `poller.Poll`."""
        try:
            status = self._path.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            text = "" if seen == self._seen else self._path.read_text(errors="replace")
        except FileNotFoundError:
            self._seen = None
            self.tell([])
        except OSError as error:
            log.debug("%s: %s", self._path, error)
        else:
            if seen != self._seen:
                self._seen = seen
                self._read(text)
        return self._interval_s

    def _read(self, text: str) -> None:
        now_s, wall_s = self._clock(), self._wall_clock()
        stale_s, self._stale_s = self._stale_s, STALE_S
        try:
            end_s = parse_termination(text, path=str(self._path), wall_s=wall_s, stale_s=stale_s)
        except NonsenseError as error:
            log.warning("%s; what was known before counts on", error)
            return
        if end_s is None:
            if text.strip():
                log.warning("%s says %s, which is over: ignored", self._path, text.strip())
            self.tell([])
        else:
            reason = f"{self._path} says {text.strip()}"
            self.tell([Notice(self.name, "end", now_s + end_s - wall_s, reason)])
