"""Files with deadlines: the end of an elastic instance, and what a pod's preStop hook has touched.

From the Kubernetes documentation, "Pod Lifecycle": the grace period (`terminationGracePeriodSeconds`, 30 s by default)
begins with the preStop hook, and SIGTERM to process 1 of the container follows when the hook has ended (see `signals`);
SIGKILL comes when the period is over. A pod cannot see its own grace period, so an environment variable holds it.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torchelastic.lifetime.deadline import unix_seconds
from torchelastic.lifetime.grace import TERM_GRACE_S
from torchelastic.lifetime.sources.notice import Clocks, Notice, Notices

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing.Unpack from Python 3.11 on; torch requires the package

log = logging.getLogger(__name__)

#: A file that changes while it is watched may name a moment that is just over, but not one so long ago.
STALE_S = 3600.0
#: Seconds between two checks of a file.
_INTERVAL_S = 1.0


def parse_termination(text: str, *, path: str, wall_s: float, stale_s: float) -> float | None:
    """Unix seconds from the content of a termination file; None if it is blank, or over for more than `stale_s`.

    Raises:
        ValueError: it holds something else; names the path.
    """
    if not text.strip():
        return None
    remedy = "write Unix seconds into it (`date +%s` prints those of now), or leave it empty"
    seconds = unix_seconds(f"{path} holds", text, remedy)
    return None if seconds < wall_s - stale_s else seconds


def pre_stop_notice(
    source: str, path: str, age_s: float, grace_s: float, now_s: float, *, is_sure: bool = True
) -> Notice | None:
    """The notice of a preStop file; None if it is older than the grace: it is left from an earlier container.

    Args:
        source: of the notice.
        path: of the file, for the reason.
        age_s: since the hook has touched it.
        grace_s: from the hook to SIGKILL.
        now_s: the present in monotonic seconds.
        is_sure: whether the grace was given, and is no guess.
    """
    age_s = max(0.0, age_s)  # a clock that is set back
    if age_s >= grace_s:
        return None
    of_grace = "of grace" if is_sure else "of grace are a guess: the pod has not said how many there are"
    reason = f"preStop has touched {path}, {grace_s:g} s {of_grace}"
    return Notice(source, "interruption", now_s + grace_s - age_s, reason, None if is_sure else now_s - age_s)


class WatchedFile(Notices):
    """A deadline from a file, which may come, change and go. `poll` checks it; have a `Poller` call that.

    Arguments as for `Notices`, the path, and `notice.Clocks`.
    """

    def __init__(
        self,
        name: str,
        idle: str,
        path: str | Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(name, idle)
        self._path, self._clock, self._wall_clock = Path(path), clock, wall_clock
        self._seen: tuple[int, int, int] | None = None
        self._touched_s = 0.0

    def poll(self) -> float:
        """Check once. See `poller.Poll`."""
        try:
            status = self._path.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen != self._seen:
                self._touched_s = status.st_mtime_ns / 1e9
                notice = self._read()
                self._seen = seen
                self.tell([] if notice is None else [notice])
        except FileNotFoundError:
            self._seen = None
            self.tell([])
        except OSError as error:
            log.debug("%s: %s", self._path, error)
        except ValueError as error:
            self._seen = seen
            log.warning("%s; what was known before still counts", error)
        return _INTERVAL_S

    @abstractmethod
    def _read(self) -> Notice | None:
        """The notice in the file; None: there is none. Raises OSError; ValueError: it is invalid."""


class TerminationFile(WatchedFile):
    """The end of this instance, as Unix seconds in a file; read again whenever the file changes.

    No file, or an empty one, means that no end is known. Replace it by rename, so that nobody reads half of it.

    Args:
        path: of the file; checked every second.
        clocks: see `notice.Clocks`.
    """

    def __init__(self, path: str | Path, **clocks: Unpack[Clocks]) -> None:
        super().__init__("elastic instance", f"{path} names no end of this instance", path, **clocks)
        self._stale_s = 0.0  # what is over when this process begins is left from an earlier attempt

    def poll(self) -> float:
        """See `WatchedFile`; a file that was not there the first time is one that has changed since."""
        following_s = super().poll()
        self._stale_s = STALE_S
        return following_s

    def _read(self) -> Notice | None:
        text = self._path.read_text(errors="replace")
        now_s, wall_s = self._clock(), self._wall_clock()
        end_s = parse_termination(text, path=str(self._path), wall_s=wall_s, stale_s=self._stale_s)
        if end_s is not None:
            return Notice(self.name, "end", now_s + end_s - wall_s, f"{self._path} says {text.strip()}")
        if text.strip():
            log.warning("%s says %s, which is over: ignored", self._path, text.strip())
        return None


class PreStopFile(WatchedFile):
    """The end of a pod, whose preStop hook has touched a file.

    Args:
        path: of the file, on a volume that the hook and this process share (the container's own file system will do);
            checked every second.
        grace_s: the pod's `terminationGracePeriodSeconds`.
        is_sure: whether the grace was given, and is no guess; pods on spot nodes may have less.
        clocks: see `notice.Clocks`.
    """

    def __init__(
        self, path: str | Path, *, grace_s: float = TERM_GRACE_S, is_sure: bool = True, **clocks: Unpack[Clocks]
    ) -> None:
        super().__init__("Kubernetes preStop", f"{path} was not touched", path, **clocks)
        self._grace_s, self._is_sure = grace_s, is_sure

    def _read(self) -> Notice | None:
        age_s = self._wall_clock() - self._touched_s
        notice = pre_stop_notice(self.name, str(self._path), age_s, self._grace_s, self._clock(), is_sure=self._is_sure)
        if notice is None:
            log.warning("%s is %.0f s old: ignored, it is left from an earlier container", self._path, age_s)
        return notice
