"""What one worker counts of itself while it runs; every count is closed up to its last change. Pure.

The time of a step is *pending* until its outcome is known: productive when it commits, replayed when it is
undone or when the process ends first. So a step that did not last is never productive.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from torchelastic.observe.ledger.accounts import NOTHING, Account, Amounts, plus


class Counters(msgspec.Struct, frozen=True):
    """One worker's counts. All times are nanoseconds of the host's monotonic clock.

    A Struct, since every step makes some of them: their copies cost a tenth of a dataclass's.

    Attributes:
        started_ns: when the process began.
        since_ns: up to here everything is counted.
        account: what has been going on since then.
        pending_ns: of a step whose end is not known yet.
        totals: by account, without what is pending.
        step: the number of steps that the state has seen; -1 where it is not known.
        committed: steps of this process that were committed.
        undone: attempts that were not.
        round: number of the round; -1 before the first.
        rank: in it.
        world_size: of it.
    """

    started_ns: int
    since_ns: int
    account: Account = Account.START_UP
    pending_ns: int = 0
    totals: Amounts = NOTHING
    step: int = -1
    committed: int = 0
    undone: int = 0
    round: int = -1
    rank: int = -1
    world_size: int = 0

    @staticmethod
    def begun(started_ns: int) -> Counters:
        """Of a process that begins."""
        return Counters(started_ns, started_ns)

    def switched(self, at_ns: int, account: Account) -> Counters:
        """Something else goes on from now; a step that is under way stays under way (a save, a wait for data)."""
        return replace(self._closed(at_ns), account=account)

    def left(self, at_ns: int, account: Account) -> Counters:
        """Training has stopped in order, between two steps: all that is pending was productive."""
        return replace(self._closed(at_ns)._settled(Account.PRODUCTIVE), account=account)

    def entered(self, at_ns: int, round_: int, rank: int, world_size: int) -> Counters:
        """A group is formed."""
        return replace(self.switched(at_ns, Account.RESTORE), round=round_, rank=rank, world_size=world_size)

    def synchronized(self, at_ns: int, step: int) -> Counters:
        """The state is in sync with the group's; steps begin."""
        return replace(self.switched(at_ns, Account.PRODUCTIVE), step=step)

    def commits(self, at_ns: int) -> Counters:
        """A step counts, and the next one begins."""
        done = self._closed(at_ns)._settled(Account.PRODUCTIVE)
        return replace(
            done, account=Account.PRODUCTIVE, committed=done.committed + 1, step=done.step + (done.step >= 0)
        )

    def skips(self, at_ns: int) -> Counters:
        """The step that was under way is left out: the state is behind it, and what it cost has trained nothing."""
        done = self._closed(at_ns)._settled(Account.REPLAYED)
        return replace(done, account=Account.PRODUCTIVE, undone=done.undone + 1, step=done.step + (done.step >= 0))

    def undoes(self, at_ns: int) -> Counters:
        """The step that was under way does not count. Where none was, only what goes on changes."""
        closed = self._closed(at_ns)
        if closed.account is not Account.PRODUCTIVE and not closed.pending_ns:
            return replace(closed, account=Account.RE_FORM)
        return replace(closed._settled(Account.REPLAYED), account=Account.RE_FORM, undone=closed.undone + 1)

    def waited_for_data(self, at_ns: int, waited_ns: int) -> Counters:
        """So much of the step that is under way was a wait for a batch; never more than is pending."""
        closed = self._closed(at_ns)
        waited_ns = max(0, min(waited_ns, closed.pending_ns))
        totals = plus(closed.totals, Account.DATA_WAIT, waited_ns)
        return replace(closed, totals=totals, pending_ns=closed.pending_ns - waited_ns)

    def ended(self, at_ns: int) -> Counters:
        """The process is gone: a step that was under way is lost. An end before the last change is taken as then."""
        closed = self._closed(max(at_ns, self.since_ns))
        if closed.account is not Account.PRODUCTIVE and not closed.pending_ns:
            return closed
        return replace(closed._settled(Account.REPLAYED), undone=closed.undone + 1)

    def amounts(self, at_ns: int) -> Amounts:
        """By account up to some time, later than the last change; what is pending counts as productive for now."""
        closed = self._closed(max(at_ns, self.since_ns))
        return plus(closed.totals, Account.PRODUCTIVE, closed.pending_ns)

    def why_wrong(self) -> str:
        """Why these cannot be the counts of a worker; empty: they can."""
        if len(self.totals) != len(Account) or min(*self.totals, self.pending_ns, self.committed, self.undone) < 0:
            return "a count is negative or missing"
        if sum(self.totals) + self.pending_ns != self.since_ns - self.started_ns:
            return f"the accounts sum to {sum(self.totals) + self.pending_ns} ns of {self.since_ns - self.started_ns}"
        return ""

    def _closed(self, at_ns: int) -> Counters:
        if at_ns < self.since_ns:
            raise ValueError(f"{at_ns} ns is before the last change at {self.since_ns} ns: give monotonic times")
        passed_ns = at_ns - self.since_ns
        if self.account is Account.PRODUCTIVE:
            return replace(self, since_ns=at_ns, pending_ns=self.pending_ns + passed_ns)
        return replace(self, since_ns=at_ns, totals=plus(self.totals, self.account, passed_ns))

    def _settled(self, account: Account) -> Counters:
        return replace(self, totals=plus(self.totals, account, self.pending_ns), pending_ns=0)


def is_later(new: Counters, old: Counters) -> bool:
    """Whether one can be what the other has become."""
    grown = all(after >= before for after, before in zip(new.totals, old.totals, strict=True))
    return grown and new.started_ns == old.started_ns and new.since_ns >= old.since_ns
