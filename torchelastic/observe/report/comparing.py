"""Two runs side by side. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.host_ledger import share
from torchelastic.observe.report.model import Report

#: Of what a number is.
Unit = Literal["share", "s", "count"]
#: A difference that is smaller is no better and no worse.
_SAME = 1e-3


@dataclass(frozen=True)
class Compared:
    """One number of both.

    Attributes:
        name: of it.
        unit: of it.
        this, other: of the two runs; None: there is none.
        more_is_better: None: neither.
    """

    name: str
    unit: Unit
    this: float | None
    other: float | None
    more_is_better: bool | None = None

    @property
    def is_better(self) -> bool | None:
        """Whether this run is better than the other one; None: they are alike, or that cannot be said."""
        if self.this is None or self.other is None or self.more_is_better is None:
            return None
        if abs(self.this - self.other) <= _SAME * max(abs(self.this), abs(self.other)):
            return None
        return (self.this > self.other) is self.more_is_better


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    Attributes:
        other: the report of the other run.
        rows: their numbers.
    """

    other: Report
    rows: tuple[Compared, ...]


def compared(this: Report, other: Report) -> Comparison:
    """What can be compared of two runs."""
    return Comparison(other, (*_figures(this, other), *_counts(this, other), *_accounts(this, other)))


def _figures(this: Report, other: Report) -> Iterator[Compared]:
    for one, two in zip(this.figures, other.figures, strict=True):
        if one.is_share:
            yield Compared(one.name, "share", one.value, two.value, True)
            yield Compared(f"{one.name}, of the attainable", "share", one.of_attainable, two.of_attainable, True)
        else:
            is_same_work = abs(this.steps - other.steps) <= _SAME * max(this.steps, other.steps)
            yield Compared("whole job", "s", one.value, two.value, False if is_same_work else None)


def _counts(this: Report, other: Report) -> Iterator[Compared]:
    one, two = this.seen, other.seen
    yield Compared("steps, newest", "count", this.steps, other.steps)
    yield Compared("workers, on average", "count", one.mean_workers, two.mean_workers)
    yield Compared("seconds of a step", "s", one.step_s or None, two.step_s or None, False)
    yield Compared("failures of the group", "count", one.failures, two.failures, False)
    yield Compared("workers lost", "count", one.lost, two.lost, False)
    yield Compared("failure to next committed step, mean", "s", _mean_down_s(this), _mean_down_s(other), False)
    yield Compared("stall of a save, mean", "s", one.save_s or None, two.save_s or None, False)


def _accounts(this: Report, other: Report) -> Iterator[Compared]:
    for account in Account:
        better = {Account.PRODUCTIVE: True, Account.IDLE: None}.get(account, False)
        shares = share(this.seen.amounts, account), share(other.seen.amounts, account)
        yield Compared(f"time in {account.label}", "share", *shares, better)


def _mean_down_s(report: Report) -> float | None:
    return sum(report.downs_ns) / len(report.downs_ns) / 1e9 if report.downs_ns else None
