"""Workers of this host that do not ask for a group: they start; or were to leave, and the others went on without them.

Those that are late are named, those that hang are ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from torchelastic.agent.supervisor import Supervisor
from torchelastic.agent.worker import Worker
from torchelastic.rendezvous.records import Member, Round, RoundState
from torchelastic.rendezvous.worker_rules import is_left_behind, late_start_s

log = logging.getLogger(__name__)

#: Between two checks.
CHECK_S = 0.5


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
