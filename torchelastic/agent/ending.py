"""What the end of a worker's process was to its run. Pure."""

from __future__ import annotations

import enum

from torchelastic.ledger.accounts import Account
from torchelastic.ledger.counters import Counters


class Ended(enum.Enum):
    """See the module's docstring."""

    #: It has finished.
    FINISHED = enum.auto()
    #: It left the run in order, as it was asked to.
    LEFT = enum.auto()
    #: The others lost it.
    LOST = enum.auto()
    #: It was ended before it had asked for a group: nobody needed it any more.
    NOT_NEEDED = enum.auto()


def end_of(exit_code: int | None, tally: Counters | None, *, was_asked: bool, has_joined: bool) -> Ended:
    """What an end was.

    To be asked to leave is not to have left: a worker that a signal ended in a step was lost, whoever sent it.

    Args:
        exit_code: as subprocess has it (negative: a signal); None: not known.
        tally: what the worker has counted; None: nothing is known.
        was_asked: whether it was asked to leave the run, or stopped before a deadline.
        has_joined: whether it has ever asked for a group.
    """
    if not was_asked:
        return Ended.FINISHED if exit_code == 0 else Ended.LOST
    if exit_code is None or exit_code >= 0:
        return Ended.LEFT
    if not has_joined:
        return Ended.NOT_NEEDED
    # after its last step it has left; what ended it then (a slow exit, a crash of the interpreter) cost nobody a step
    return Ended.LEFT if tally is not None and tally.account is Account.IDLE else Ended.LOST
