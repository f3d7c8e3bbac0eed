"""One life of one worker, from the start of its process to its end: what it counted, and what was learned later."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torchelastic.ledger.accounts import Account, Amounts, plus
from torchelastic.ledger.events import Counted, End, Restore, Save
from torchelastic.ledger.marks import Marks
from torchelastic.ledger.tally import Tally, is_later


@dataclass(frozen=True)
class Life:
    """See the module's docstring. A value: every method returns a new one.

    Attributes:
        worker: unique in the run.
        started_ns: when its process began, as the host knows it; never later than as the worker knows it.
        tally: what it has counted.
        marks: productive time by step, what was lost later taken off.
        lost_ns: productive time of steps that were lost after they had been committed: it is replayed time.
        detected_ns: replayed time in which the failure had happened and was not noticed yet: it is time to detect.
        level_ns: when it was last brought level with a group.
        ended_ns: when its process ended; None: it lives.
        exit_code: as subprocess has it; None: it lives, or that is not known.
        cause: why it ended.
    """

    worker: str
    started_ns: int
    tally: Tally
    marks: Marks = field(default_factory=Marks)
    lost_ns: int = 0
    detected_ns: int = 0
    level_ns: int = 0
    ended_ns: int | None = None
    exit_code: int | None = None
    cause: str = ""

    @staticmethod
    def begun(worker: str, started_ns: int) -> Life:
        """Of a process that has begun."""
        return Life(worker, started_ns, Tally.begun(started_ns))

    def wall_ns(self, now_ns: int) -> int:
        """How long it has lasted."""
        return self.until_ns(now_ns) - self.started_ns

    def until_ns(self, now_ns: int) -> int:
        """Its end, or now; never before the last that is known of it."""
        return max(now_ns, self.tally.since_ns) if self.ended_ns is None else self.ended_ns

    def amounts(self, now_ns: int) -> Amounts:
        """Its time by account, which sums to `wall_ns` exactly; none is negative."""
        counted = plus(
            self.tally.amounts(self.until_ns(now_ns)), Account.START_UP, self.tally.started_ns - self.started_ns
        )
        # what was learned later may be of time that this tally, being older, has not counted yet
        lost_ns = min(self.lost_ns, counted[Account.PRODUCTIVE])
        amounts = plus(plus(counted, Account.PRODUCTIVE, -lost_ns), Account.REPLAYED, lost_ns)
        detected_ns = min(self.detected_ns, amounts[Account.REPLAYED])
        return plus(plus(amounts, Account.REPLAYED, -detected_ns), Account.DETECT, detected_ns)

    # --- what is learned ----------------------------------------------------------------------------------------------

    def began(self, at_ns: int) -> Life:
        """The host knows when the process began. Nothing changes where that is later than what the worker says."""
        return replace(self, started_ns=min(at_ns, self.started_ns)) if self.ended_ns is None else self

    def counted(self, event: Counted) -> Life:
        """The worker has counted more. What is older than what is known is left out."""
        tally = event.tally
        if self.ended_ns is not None or (tally.started_ns == self.tally.started_ns and not is_later(tally, self.tally)):
            return self
        if tally.started_ns != self.tally.started_ns and self.tally.since_ns != self.tally.started_ns:
            return self  # two that say to be one: the first stands
        marks = self.marks.with_mark(tally.step, self._kept_ns(tally.totals[Account.PRODUCTIVE]))
        return replace(self, started_ns=min(self.started_ns, tally.started_ns), tally=tally, marks=marks)

    def ends(self, event: End) -> Life:
        """The process is gone."""
        if self.ended_ns is not None:
            return self
        tally = self.tally.ended(event.at_ns)
        return replace(
            self, tally=tally, ended_ns=tally.since_ns, exit_code=event.exit_code, cause=event.cause or self.cause
        )

    def restored(self, event: Restore) -> Life:
        """It was brought level: at an older step than its own, the steps in between are lost."""
        kept_ns = self._kept_ns(event.productive_ns)
        noted = replace(self, marks=self.marks.with_mark(event.from_step, kept_ns), level_ns=event.at_ns)
        back = noted.goes_back_to(event.step)
        return replace(back, marks=back.marks.with_mark(event.step, back._kept_ns(event.productive_ns)))

    def saved(self, event: Save) -> Life:
        """A checkpoint was taken: what was productive by then is known for the case that it is gone back to."""
        if self.ended_ns is not None or event.productive_ns < 0:
            return self
        return replace(self, marks=self.marks.with_mark(event.step, self._kept_ns(event.productive_ns)))

    def goes_back_to(self, step: int) -> Life:
        """Whatever it has done beyond that step is lost. A negative step is not known: nothing is."""
        if not 0 <= step < self.marks.last_step:
            return self
        lost_ns = self.marks.productive_ns_at(self.marks.last_step) - self.marks.productive_ns_at(step)
        return replace(self, marks=self.marks.back_to(step), lost_ns=self.lost_ns + lost_ns)

    def _kept_ns(self, productive_ns: int) -> int:
        return max(0, productive_ns - self.lost_ns)
