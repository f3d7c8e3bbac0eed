"""What the training thread of a worker calls to have its time counted: some microseconds per step, no system call.

The rules are those of `Counters`. Without an agent it counts and publishes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from torchelastic.log_lines import Position, set_up_worker_log
from torchelastic.loop_observer import LoopObserver
from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.counters import Counters
from torchelastic.observe.ledger.ledger_events import (
    ComputesWrong,
    Failure,
    FirstStep,
    Join,
    LedgerEvent,
    MayHang,
    ReForm,
    Restore,
    Save,
    Skipped,
    Straggler,
    short,
    to_dict,
)
from torchelastic.observe.ledger.shared_counts import PageWriter, page_paths
from torchelastic.processes.family import above
from torchelastic.processes.identity import process_started_ns

if TYPE_CHECKING:
    from torchelastic.coordinator import GroupMembership
    from torchelastic.state import State

log = logging.getLogger(__name__)

#: In the environment of a worker whose agent keeps a ledger: the agent's process and the path of its socket.
LEDGER_VARIABLE = "TORCHELASTIC_LEDGER"
#: Set by a worker whose counts an agent sees, for what it starts: the agent's process and its own.
_PUBLISHED_VARIABLE = "TORCHELASTIC_LEDGER_OF"


class Meter(LoopObserver):
    """The counts of this process. Every method is for the training thread.

    Args:
        started_ns: when the process began; see `torchelastic.processes.identity.process_started_ns`.
        clock_ns: monotonic nanoseconds.
    """

    __slots__ = ("_clock_ns", "_counts", "_has_entered", "_is_fresh", "_page")

    def __init__(self, started_ns: int, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._counts = Counters.begun(min(started_ns, clock_ns()))
        self._has_entered = False
        self._is_fresh: bool | None = None
        self._page: PageWriter | None = None

    @property
    def is_published(self) -> bool:
        """Whether an agent can see the counts."""
        return self._page is not None

    def publish_to_parent(self) -> None:
        """From now on the agent that has started this process sees the counts, if one has that keeps a ledger.

        A wrapper script may stand between the two. A process that a worker has started is no worker.
        """
        agent_pid, _, socket_path = os.environ.get(LEDGER_VARIABLE, "").partition(":")
        to_agent, _, worker_pid = os.environ.get(_PUBLISHED_VARIABLE, "").partition(":")
        is_workers_child = to_agent == agent_pid and worker_pid != str(os.getpid())
        if agent_pid.isdecimal() and not is_workers_child and int(agent_pid) in (os.getppid(), *above(os.getpid())):
            os.environ[_PUBLISHED_VARIABLE] = f"{agent_pid}:{os.getpid()}"
            self.publish(socket_path)

    def publish(self, socket_path: str) -> None:
        """From now on the agent that listens there sees the counts. Does nothing the second time, or where it cannot.

        Args:
            socket_path: of the agent; empty: there is none.
        """
        if self._page is not None or not socket_path:
            return
        pid = os.getpid()
        for path in page_paths(socket_path, pid):
            try:
                self._page = PageWriter(path, pid)
                break
            except (OSError, AttributeError) as error:  # no posix_fallocate (macOS)
                log.info("the agent cannot see how this worker's time is spent at %s: %s", path, error)
        if self._page is None:
            return
        os.register_at_fork(after_in_child=self._forget)  # the page is the parent's
        self._page.write_counts(self._counts)

    def tally(self) -> Counters:
        """The counts."""
        return self._counts

    def position(self) -> Position:
        """Rank, round and step of the worker. From any thread."""
        counts = self._counts
        return Position(counts.rank, counts.round, counts.step)

    def set_up_log(self) -> None:
        """Have torchelastic's log lines of this process show it; see `torchelastic.log_lines.set_up_worker_log`."""
        set_up_worker_log(self.position)

    # --- what happens to the worker -----------------------------------------------------------------------------------

    def group_wanted(self) -> None:
        """It asks for a group: waits to be admitted, or, where it was in one before, for the next one."""
        self._leave(Account.RE_FORM if self._has_entered else Account.IDLE)

    def waits_as_spare(self) -> None:
        """It asks for a group and has none while others train: it waits as a spare, and this is no recovery."""
        if self._counts.account is Account.RE_FORM:
            self._become(replace(self._counts.left(self._clock_ns(), Account.IDLE), rank=-1))

    @property
    def is_spare(self) -> bool:
        """Whether it was in a group before, and has waited as a spare since."""
        return self._has_entered and self._counts.account is Account.IDLE

    def group_formed(self, membership: GroupMembership, rank: int, world_size: int) -> None:
        """See `LoopObserver`."""
        peers, self._is_fresh = membership.peers(), membership.nobody_has_progress()
        self.entered(-1 if peers is None else peers.round_number, rank, world_size)

    def entered(self, round_: int, rank: int, world_size: int) -> None:
        """The group is formed."""
        now_ns = self._clock_ns()
        self._become(self._counts.entered(now_ns, round_, rank, world_size))
        is_first, self._has_entered = not self._has_entered, True
        self._note(Join(at_ns=now_ns, world_size=world_size, is_first=is_first))

    def in_sync(self, state: State) -> None:
        """See `LoopObserver`."""
        steps = [getattr(state, name, None) for name in ("step", "end_step")]
        step, end_step = (value if type(value) is int else -1 for value in steps)
        source = "peer" if self._is_fresh is False else "checkpoint" if self._is_fresh and step > 0 else ""
        self.synchronized(step, source, end_step)

    def synchronized(self, step: int, source: str = "", end_step: int = -1) -> None:
        """The state is that of the group: `step` steps, or -1 where that is not known; steps begin.

        Args:
            step: see above.
            source: "peer" or "checkpoint", where this is known.
            end_step: the number of steps of the whole run; -1: not known.
        """
        before, now_ns = self._counts, self._clock_ns()
        self._become(before.synchronized(now_ns, step))
        self._note(
            Restore(
                at_ns=now_ns,
                took_ns=now_ns - before.since_ns if before.account is Account.RESTORE else 0,
                from_step=before.step,
                productive_ns=self._counts.totals[Account.PRODUCTIVE],
                source=source,
                end_step=end_step,
            )
        )

    def step_committed(self) -> None:
        """A step counts, and the next one begins. The one method that is called for every step."""
        now_ns = self._clock_ns()
        self._become(self._counts.commits(now_ns))
        if self._counts.committed == 1:
            self._note(FirstStep(at_ns=now_ns))

    def step_skipped(self, reason: str, samples: int) -> None:
        """See `LoopObserver`: the state is one step further, and what the step has cost trained nothing."""
        now_ns = self._clock_ns()
        self._become(self._counts.skips(now_ns))
        self._note(Skipped(at_ns=now_ns, samples=samples, cause=short(reason)))

    def step_undone(self, cause: str = "", *, is_undone: bool = True) -> None:
        """The step that was under way does not count; a new group is wanted. Where none was, only the latter.

        Args:
            cause: what it failed of.
            is_undone: whether the state goes back to its snapshot.
        """
        before, now_ns = self._counts, self._clock_ns()
        after = before.undoes(now_ns)
        self._become(after)
        if after.undone > before.undone:  # a step was under way
            lost_ns = after.totals[Account.REPLAYED] - before.totals[Account.REPLAYED]
            began_ns, cause = now_ns - lost_ns, short(cause)
            self._note(Failure(at_ns=now_ns, began_ns=began_ns, replayed_ns=lost_ns, cause=cause, is_undone=is_undone))

    def over(self) -> None:
        """There will be no further step."""
        self._leave(Account.IDLE)

    training_done = over

    @contextlib.contextmanager
    def spent_on(self, account: Account) -> Iterator[None]:
        """What goes on inside belongs to another account; a step that is under way stays under way."""
        before = self._counts.account
        self._become(self._counts.switched(self._clock_ns(), account))
        try:
            yield
        finally:
            if self._counts.account is account:  # else something has happened that decides what goes on from here
                self._become(self._counts.switched(self._clock_ns(), before))

    @contextlib.contextmanager
    def saving(self, tier: str = "") -> Iterator[None]:
        """Training is stopped for a save."""
        began_ns = self._clock_ns()
        with self.spent_on(Account.SAVE_STALL):
            yield
        at_ns, productive_ns = self._counts.since_ns, self._counts.totals[Account.PRODUCTIVE]
        self._note(Save(at_ns=at_ns, stall_ns=at_ns - began_ns, productive_ns=productive_ns, tier=tier))

    def waited_for_data(self, waited_ns: int) -> None:
        """So much of the time since the last call of anything was a wait for a batch that has just come."""
        self._counts = self._counts.waited_for_data(self._clock_ns(), waited_ns)

    # --- what is only noted -------------------------------------------------------------------------------------------

    def re_formed(self, phases_ns: dict[str, int], cause: str = "") -> None:
        """The first step after a failure has committed."""
        now = self._counts
        self._note(ReForm(at_ns=now.since_ns, phases_ns=phases_ns, world_size=now.world_size, cause=short(cause)))

    def straggles(self, relative_percent: float) -> None:
        """This worker is slower than the others."""
        self._note(Straggler(at_ns=self._clock_ns(), relative_percent=relative_percent))

    def computes_wrong(self, why: str) -> None:
        """This worker was found to compute wrong, and leaves the run."""
        self._note(ComputesWrong(at_ns=self._clock_ns(), cause=short(why)))

    def may_hang(self, for_s: float, bound_s: float, where: str) -> None:
        """This worker does nothing that is seen as work, in its own code; from any thread."""
        event = MayHang(at_ns=self._clock_ns(), for_s=round(for_s, 1), bound_s=round(bound_s, 1), cause=short(where))
        self._note(event)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _become(self, counts: Counters) -> None:
        self._counts = counts
        if self._page is not None:
            self._page.write_counts(counts)

    def _leave(self, account: Account) -> None:
        self._become(self._counts.left(self._clock_ns(), account))

    def _note(self, event: LedgerEvent) -> None:
        if self._page is not None:
            now = self._counts
            self._page.write_event(to_dict(event) | {"rank": now.rank, "round": now.round, "step": now.step})

    def _forget(self) -> None:
        self._page = None


_this_worker: Meter | None = None


def this_worker() -> Meter:
    """The meter of this process, made at the first call; what has passed since the process began is start-up."""
    global _this_worker
    if _this_worker is None:
        _this_worker = Meter(process_started_ns(os.getpid()))
    return _this_worker
