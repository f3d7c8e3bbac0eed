"""Kubernetes: the preStop hook tells by a file; the SIGTERM after it is a matter of `signals`.

From the Kubernetes documentation, "Pod Lifecycle": the grace period (`terminationGracePeriodSeconds`, 30 s by default)
begins with the preStop hook, and SIGTERM to process 1 of the container follows when the hook has ended; SIGKILL comes
when the period is over. A pod cannot see its own grace period, so it is told by an environment variable.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from torchelastic.lifetime.sources.notice import Notice, Notices

log = logging.getLogger(__name__)

#: What Kubernetes gives if the pod says nothing.
GRACE_S = 30.0


def pre_stop_notice(
    source: str, path: str, age_s: float, grace_s: float, now_s: float, *, is_sure: bool = True
) -> Notice | None:
    """What a preStop file says; None if it is older than the grace: it is left from an earlier container of the pod.

    Args:
        source: for the notice.
        path: of the file, for the reason.
        age_s: since the hook has touched it.
        grace_s: from the hook to SIGKILL.
        now_s: the present in monotonic seconds.
        is_sure: whether the pod has said that this is its grace.
    """
    age_s = max(0.0, age_s)  # a clock that is set back
    if age_s >= grace_s:
        return None
    said = "of grace" if is_sure else "of grace are a guess: the pod has not said how many there are"
    reason = f"preStop has touched {path}, {grace_s:g} s {said}"
    return Notice(source, "interruption", now_s + grace_s - age_s, reason, None if is_sure else now_s - age_s)


class PreStopFile(Notices):
    """The pod ends: its preStop hook has touched a file. `poll` looks for it; have a `Poller` call that.

    Args:
        path: of the file, on a volume that the hook and this process share (the container's own file system will do).
        grace_s: the pod's `terminationGracePeriodSeconds`.
        interval_s: between two looks.
        clock: monotonic seconds; that of the deadline.
        wall_clock: Unix seconds.
        is_sure: whether the pod has said that this is its grace; pods on spot nodes may have less.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        grace_s: float = GRACE_S,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        is_sure: bool = True,
    ) -> None:
        super().__init__("Kubernetes preStop", f"{path} was not touched")
        self._path, self._grace_s, self._interval_s = Path(path), grace_s, interval_s
        self._clock, self._wall_clock, self._is_sure = clock, wall_clock, is_sure
        self._seen_ns: int | None = None

    def poll(self) -> float:
        """Look once. See `poller.Poll`."""
        try:
            touched_ns = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            self._seen_ns = None
            self.tell([])
            return self._interval_s
        except OSError as error:
            log.debug("%s: %s", self._path, error)
            return self._interval_s
        if touched_ns != self._seen_ns:
            self._seen_ns = touched_ns
            age_s = self._wall_clock() - touched_ns / 1e9
            notice = pre_stop_notice(
                self.name, str(self._path), age_s, self._grace_s, self._clock(), is_sure=self._is_sure
            )
            if notice is None:
                log.warning("%s is %.0f s old: ignored, it is left from an earlier container", self._path, age_s)
            self.tell([] if notice is None else [notice])
        return self._interval_s
