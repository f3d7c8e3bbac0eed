"""The accounts: what a worker's second can have been spent on. Every one belongs to exactly one of them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

#: Whole nanoseconds, so that sums are exact.
Nanoseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Account(enum.IntEnum):
    """What a worker's time went to. The numbers are part of the format of pages and journals: they never change."""

    #: Steps that have committed, and what lies between them: loading that is not waited for, snapshots, agreements.
    PRODUCTIVE = 0
    #: Training stood still for a save. What a save does in the background while steps go on is not counted.
    SAVE_STALL = 1
    #: Steps that did not last: undone by a failure, lost with their process, or newer than the checkpoint gone back to.
    REPLAYED = 2
    #: From a failure until this worker noticed it.
    DETECT = 3
    #: From there (or from an agreed stop) until the next process group stands: roll back, rendezvous, connections.
    RE_FORM = 4
    #: From there until the state is level: checkpoint and sync, at the first group too.
    RESTORE = 5
    #: Waits for the next batch.
    DATA_WAIT = 6
    #: Has no part in the run's work: not in a group yet, a spare, the run is over, or told to be a wait for others.
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
