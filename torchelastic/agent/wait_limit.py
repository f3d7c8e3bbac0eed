"""How long a worker may wait for a group, and what is said of it meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from torchelastic.agent.host_events import (
    Event,
    MemberDeclared,
    MemberWaits,
    Publish,
    RoundChanged,
    StoreReach,
    WaitTimedOut,
)
from torchelastic.rendezvous.records import NO_ROUND, RoundState
from torchelastic.rendezvous.url import RendezvousUrl
from torchelastic.rendezvous.worker_rules import wait_left_s

log = logging.getLogger(__name__)

#: Who has waited for a group so much longer than the last call says so.
SAY_AFTER_S = 30.0


class WaitLimit:
    """Use it on the agent's event loop. A spare waits as long as the others train.

    Args:
        url: of the run.
        publish: is called with who has waited too long.
        waiting_since_s: since when a member waits, by the monotonic clock; None: it does not.
        store_wait_since_s: since when this host's training waits for etcd, likewise.
        kept_out: names hosts that may not take part, for people; empty: there are none.
    """

    def __init__(
        self,
        url: RendezvousUrl,
        publish: Publish,
        waiting_since_s: Callable[[str], float | None],
        store_wait_since_s: Callable[[], float | None],
        kept_out: Callable[[], str] = str,
    ) -> None:
        self._url, self._publish = url, publish
        self._waiting_since_s, self._store_wait_since_s = waiting_since_s, store_wait_since_s
        self._kept_out = kept_out
        self._said_store = self._said_wait = False
        self._round = NO_ROUND
        self._trained_until_s = 0.0  # when somebody did last, as far as is known; infinite: now

    def on_event(self, event: Event) -> None:
        """Take note of rounds, and of members that wait; say it, once at each outage, where all wait for etcd."""
        match event:
            case RoundChanged(round_):
                trains = round_.state in (RoundState.RUNNING, RoundState.GATHERING)
                self._round = round_
                self._trained_until_s = float("inf") if trains else min(self._trained_until_s, time.monotonic())
                self._said_wait = self._said_wait and not trains
            case MemberWaits(member_id):
                since_s, after_s = self._waiting_since_s(member_id), self._url.last_call_timeout_s + SAY_AFTER_S
                asyncio.get_running_loop().call_later(after_s, self._say_wait, member_id, since_s, after_s)
                self._check_later(member_id, self._url.timeout_s)
            case StoreReach() | MemberDeclared():
                waits = self.waits_for_store()
                if waits and not self._said_store:
                    log.warning("%s: until it is back, no group is formed, and no run ends", waits)
                self._said_store = bool(waits)

    def waits_for_store(self) -> str:
        """That this host's training waits for etcd, where, and since when, for people; empty: it does not."""
        since_s = self._store_wait_since_s()
        if since_s is None:
            return ""
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - since_s)))
        return f"the run waits for etcd at {self._url.endpoints_text} since {clock}"

    def _say_wait(self, member_id: str, since_s: float | None, after_s: float) -> None:
        """Once until there is a group, and where nothing else says why there is none."""
        if since_s is None or self._waiting_since_s(member_id) != since_s or self._trained_until_s == float("inf"):
            return
        if not self._said_wait and not self._round.orphaned and not self.waits_for_store():
            self._said_wait = True
            because = f" ({self._round.because})" if self._round.because and self._round.number else ""
            log.warning(
                "%s has waited %g s for a group, which takes %s%s: it ends after %g s (--rdzv-timeout); "
                "`torchelastic status` lists who is here",
                member_id, after_s, self._url.settings.least, because, self._url.timeout_s,
            )  # fmt: skip

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
        url, waits = self._url, self.waits_for_store()
        if waits:
            return f"run {url.run_id!r}: {waits}, for longer than {url.timeout_s:g} s: bring it back, or raise timeout"
        known = "; ".join(filter(None, [self._round.because, self._kept_out()]))
        return (
            f"run {url.run_id!r}: fewer than {url.settings.least} workers came within {url.timeout_s:g} s: "
            f"start more, lower min_workers, or raise timeout "
            f"(etcd at {url.endpoints_text}; {known})"
        )
