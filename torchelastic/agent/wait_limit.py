"""Workers that wait for a group longer than the run allows are told so, with what to change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from torchelastic.agent.events import Event, MemberWaits, Publish, RoundChanged, WaitTimedOut
from torchelastic.rendezvous.records import NO_ROUND, RoundState
from torchelastic.rendezvous.url import RendezvousUrl
from torchelastic.rendezvous.worker_rules import wait_left_s


class WaitLimit:
    """Use it on the agent's event loop. A spare waits as long as the others train.

    Args:
        url: of the run.
        publish: is told who has waited too long.
        waiting_since_s: since when a member waits, by the monotonic clock; None: it does not.
    """

    def __init__(self, url: RendezvousUrl, publish: Publish, waiting_since_s: Callable[[str], float | None]) -> None:
        self._url, self._publish, self._waiting_since_s = url, publish, waiting_since_s
        self._round = NO_ROUND
        self._trained_until_s = 0.0  # when somebody did last, as far as is known; infinite: now

    def on_event(self, event: Event) -> None:
        """Take note of rounds, and of members that wait."""
        match event:
            case RoundChanged(round_):
                trains = round_.state in (RoundState.RUNNING, RoundState.GATHERING)
                self._round = round_
                self._trained_until_s = float("inf") if trains else min(self._trained_until_s, time.monotonic())
            case MemberWaits(member_id):
                self._check_later(member_id, self._url.timeout_s)

    def _check_later(self, member_id: str, after_s: float) -> None:
        since_s = self._waiting_since_s(member_id)
        asyncio.get_running_loop().call_later(after_s, self._check, member_id, since_s)

    def _check(self, member_id: str, since_s: float | None) -> None:
        if since_s is None or self._waiting_since_s(member_id) != since_s:
            return  # it got its group; it may be waiting for another one by now
        left_s = wait_left_s(since_s, self._trained_until_s, time.monotonic(), self._url.timeout_s)
        if left_s > 0:
            self._check_later(member_id, left_s)
        else:
            self._publish(WaitTimedOut(member_id, self._too_few()))

    def _too_few(self) -> str:
        url = self._url
        return (
            f"run {url.run_id!r}: fewer than {url.settings.least} workers came within {url.timeout_s:g} s: "
            f"start more, lower min_workers, or raise timeout "
            f"(etcd at {url.endpoints_text}; {self._round.because})"
        )
