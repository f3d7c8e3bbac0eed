"""The accounts on which a worker's time is spent, and how they are shown. Every second belongs to exactly one. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

#: Whole nanoseconds, so that sums are exact.
Nanoseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Account(enum.IntEnum):
    """What a worker's time went to. The numbers are part of the format of pages and journals: they never change."""

    #: Steps that have committed, and the time between them: loading that is not waited for, snapshots, agreements.
    PRODUCTIVE = 0
    #: Training stood still for a save. What a save does in the background while steps go on is not counted.
    SAVE_STALL = 1
    #: Steps that did not last: undone by a failure, lost with their process, or newer than the checkpoint gone back to.
    REPLAYED = 2
    #: From a failure until this worker noticed it.
    DETECT = 3
    #: From there (or from an agreed stop) until the next process group is formed: roll back, rendezvous, connections.
    RE_FORM = 4
    #: From there until the state is current: checkpoint and sync, at the first group too.
    RESTORE = 5
    #: Waits for the next batch.
    DATA_WAIT = 6
    #: Has no part in the run's work: not in a group yet, a spare, the run is over, or declared as a wait for others.
    IDLE = 7
    #: From the start of the process until it first asks for a group: imports, model, data. Not idle, since it is what a
    #: restart costs, and no re-form, since a newcomer starts while the others train.
    START_UP = 8

    @property
    def label(self) -> str:
        """For people, metrics and journals.

        >>> Account.SAVE_STALL.label
        'save_stall'
        """
        return self.name.lower()


#: One number per account, by `Account`.
Amounts = Annotated[tuple[Nanoseconds, ...], Meta(min_length=len(Account), max_length=len(Account))]

NOTHING: Amounts = (0,) * len(Account)


def plus(amounts: Amounts, account: Account, ns: int) -> Amounts:
    """The amounts with one of them changed."""
    return (*amounts[:account], amounts[account] + ns, *amounts[account + 1 :])


def added(one: Amounts, other: Amounts) -> Amounts:
    """Account by account."""
    return tuple(a + b for a, b in zip(one, other, strict=True))


def by_label(amounts: Sequence[int]) -> dict[str, int]:
    """The amounts with their names.

    >>> by_label(plus(NOTHING, Account.IDLE, 5))["idle"]
    5
    """
    return {account.label: amounts[account] for account in Account}


@dataclass(frozen=True)
class AccountStyle:
    """How an account is shown, in a terminal, on the live page and in a report.

    Attributes:
        letter: its sign where there are no colours.
        terminal: its colour in a terminal, as rich names it.
        light, dark: its colour on a light and on a dark page, as CSS has it; the same hue.
    """

    letter: str
    terminal: str
    light: str
    dark: str


STYLES: dict[Account, AccountStyle] = {
    Account.PRODUCTIVE: AccountStyle("P", "green", "#43a56d", "#2f9159"),
    Account.SAVE_STALL: AccountStyle("S", "blue", "#3f82c9", "#4a8fd6"),
    Account.REPLAYED: AccountStyle("X", "red", "#cf3f3a", "#e0514b"),
    Account.DETECT: AccountStyle("D", "bright_red", "#ef8b4e", "#e58442"),
    Account.RE_FORM: AccountStyle("F", "magenta", "#8b5cc0", "#9d72d3"),
    Account.RESTORE: AccountStyle("R", "bright_magenta", "#d583c4", "#c474b4"),
    Account.DATA_WAIT: AccountStyle("W", "yellow", "#e4bd45", "#c6a233"),
    Account.IDLE: AccountStyle("I", "bright_black", "#bcc4cc", "#4d565f"),
    Account.START_UP: AccountStyle("U", "cyan", "#64bccb", "#34899a"),
}
