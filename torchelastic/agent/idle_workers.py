"""Workers of this host that are in no group: how long one may wait for it, and those that do not ask for any.

The latter are starting; or they were to leave, and the others went on without them. Those that are late are named,
those that hang are ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from torchelastic.agent.host_events import (
    Event,
    MemberDeclared,
    MemberWaits,
    Publish,
    RoundChanged,
    StoreReach,
    WaitTimedOut,
)
from torchelastic.agent.supervisor import Supervisor
from torchelastic.agent.worker import Worker
from torchelastic.rendezvous.records import NO_ROUND, Member, Round, RoundState
from torchelastic.rendezvous.url import RendezvousUrl
from torchelastic.rendezvous.worker_rules import is_left_behind, late_start_s, wait_left_s

log = logging.getLogger(__name__)

#: Between two checks.
CHECK_S = 0.5
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


class IdleWorkers:
    """Use it on the agent's event loop.

    While the run goes on nobody that starts is ended: imports and the preparation of data may take long. Once it has
    finished, a group is there for nobody any more, and the launcher must not wait for ever for who hangs on the way to
    one. Who was to leave and hangs is ended as soon as it would have noticed that the others went on: no round waits
    for it any more, so no round names it as evicted either.

    Args:
        supervisor: of this host's workers.
        members: what the connected workers have last said of themselves, by their processes.
        round_: the newest round that this host knows.
        grace_s: how long a worker is waited for after the end of the run, in seconds.
        clock: monotonic seconds, as of `Worker.started_s`.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        members: Callable[[], Mapping[int, Member]],
        round_: Callable[[], Round],
        grace_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervisor, self._members, self._round = supervisor, members, round_
        self._grace_s, self._clock = grace_s, clock
        self._over_s: float | None = None
        self._left_behind_since_s: dict[str, float] = {}
        self._said: set[tuple[str, int, int]] = set()

    async def run(self) -> None:
        """Check for ever; cancel it to end it. After an error it may be run again."""
        while True:
            self.check()
            await asyncio.sleep(CHECK_S)

    def check(self) -> None:
        """Name those that start late; end those that hang where nobody waits for them any more."""
        now_s, round_ = self._clock(), self._round()
        if round_.is_over and self._over_s is None:
            self._over_s = now_s
        for pid, member in self._members().items():
            self._end_if_left_behind(pid, member, now_s, round_)
        for worker in self._supervisor.starting:
            if self._over_s is None:
                self._name_if_late(worker, now_s - worker.started_s, round_)
            elif self._is_first("waits", worker):
                log.warning(
                    "the run has finished, and %s has not asked for a group: waiting %g s for it to end (--term-grace)",
                    _name(worker), self._grace_s,
                )  # fmt: skip
            elif now_s - max(self._over_s, worker.started_s) >= self._grace_s and self._is_first("ends", worker):
                why = f"did not end within {self._grace_s:g} s after the run had finished, so it is ended"
                self._supervisor.end_idle(worker, why)

    def _name_if_late(self, worker: Worker, waiting_s: float, round_: Round) -> None:
        if self._supervisor.is_plain_group:
            return  # it needs none
        if waiting_s < late_start_s(self._supervisor.slowest_start_s) or not self._is_first("late", worker):
            return
        trains = round_.state in (RoundState.RUNNING, RoundState.GATHERING)
        log.warning(
            "%s has not asked for a group after %.0f s; %s. If it hangs, `kill -ABRT` with this pid writes its stacks "
            "to its log and ends it, and it is started again (--max-restarts)",
            _name(worker), waiting_s, "the others train without it" if trains else "no group is training yet",
        )  # fmt: skip

    def _end_if_left_behind(self, pid: int, member: Member, now_s: float, round_: Round) -> None:
        if not is_left_behind(member, round_):
            self._left_behind_since_s.pop(member.member_id, None)
            return
        since_s = self._left_behind_since_s.setdefault(member.member_id, now_s)
        workers = [worker for worker in self._supervisor.workers if worker.process and worker.has(pid)]
        for worker in workers if now_s - since_s >= member.patience_s else ():
            if self._is_first("left", worker):
                why = f"was to leave, and does nothing {member.patience_s:g} s after the others went on, so it is ended"
                self._supervisor.end_idle(worker, why)

    def _is_first(self, what: str, worker: Worker) -> bool:
        """Whether this was not said of this process of a worker before."""
        key = (what, worker.local_rank, worker.restarts)
        is_new = key not in self._said
        self._said.add(key)
        return is_new


def _name(worker: Worker) -> str:
    pid = "" if worker.process is None else f" (pid {worker.process.pid})"
    return f"worker {worker.local_rank}{pid}"
