"""What an error that would end a worker means, where its group is not the one that has trained before. Pure.

A group in which no step has succeeded yet may differ from the last one in which one has: workers are new in it, or some
are missing. An error that comes then, and that the group before did not have, may be theirs: it must not end those who
hold the state of the run, since what they hold cannot be had again.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

from torchelastic.rendezvous.records import NO_ROUND, Round, StateStatus


class Reshaped(enum.Enum):
    """How a group differs from the last one in which a step has succeeded."""

    #: Workers are in it that were not in that one.
    NEW_MEMBERS = enum.auto()
    #: All of its workers were in that one, and some of those are missing.
    SMALLER = enum.auto()


class AfterError(enum.Enum):
    """What becomes of a step, or of a sync, that has failed."""

    #: It is undone, and comes again in a new group.
    AGAIN = enum.auto()
    #: It is undone, and comes again in a group without the newcomers.
    WITHOUT_NEWCOMERS = enum.auto()
    #: It is undone, and comes again as soon as there are as many workers as before.
    WITH_AS_MANY = enum.auto()
    #: The error is raised.
    RAISED = enum.auto()


@dataclass(frozen=True)
class GroupChange:
    """The present group, as seen by one of its ranks, against the last one in which a step has succeeded.

    Attributes:
        newcomers: ranks of those that were not in that one; in a sync: of those that lack the state.
        former_size: of that one.
        world_size: of the present one.
    """

    newcomers: tuple[int, ...]
    former_size: int
    world_size: int

    @property
    def kind(self) -> Reshaped | None:
        """In which way it differs; None: it does not.

        >>> GroupChange((1,), 2, 2).kind, GroupChange((), 2, 1).kind, GroupChange((), 2, 2).kind
        (<Reshaped.NEW_MEMBERS: 1>, <Reshaped.SMALLER: 2>, None)
        """
        if self.newcomers:
            return Reshaped.NEW_MEMBERS
        return Reshaped.SMALLER if self.world_size < self.former_size else None


@dataclass(frozen=True)
class Dismissal:
    """Why the others of a group go on without a worker that was new in it.

    Attributes:
        error: theirs, in one line.
        is_for_good: whether no other process is to be started in its place.
    """

    error: str
    is_for_good: bool


def group_change(former: Round, joined: Round, rank: int, *, in_sync: bool) -> GroupChange | None:
    """How a group differs from the last one in which a step has succeeded.

    Args:
        former: the round of that one, as this worker knows it; `NO_ROUND`: it knows none.
        joined: that of the present one.
        rank: of this worker in it.
        in_sync: whether its states are being brought in sync, so that it matters who lacks the source's.

    Returns:
        None: this worker does not hold a state from before, or a step has succeeded in the present group.
    """
    holds = former is not NO_ROUND and rank not in joined.stale
    if not holds or former.number == joined.number or joined.state_status < StateStatus.UNCOMMITTED:
        return None
    new = tuple(number for number, name in enumerate(joined.roster) if name not in former.members)
    return GroupChange(joined.stale if in_sync else new, len(former.roster), len(joined.roster))


def may_be_dismissed(former: Round, joined: Round, rank: int) -> bool:
    """Whether others of a group may go on without this worker: they hold a state, and it did not when the group formed.

    Args:
        former: the last round in which a step has succeeded, as this worker knows it; `NO_ROUND`: it knows none.
        joined: that of the group.
        rank: of this worker in it.
    """
    lacks_state = former is NO_ROUND or rank in joined.stale
    return rank > 0 and lacks_state and joined.state_status >= StateStatus.UNCOMMITTED


def after_error(
    change: GroupChange | None, *, is_over: bool, may_be_theirs: bool, seen_in: Collection[Reshaped]
) -> AfterError:
    """What becomes of a step, or of a sync, that has failed.

    An error that comes in a group with new members and in one without them is nobody's but the step's.

    Args:
        change: see `group_change`.
        is_over: whether it would be raised in a group that has not changed.
        may_be_theirs: whether what has changed can be its reason, and the step can be undone.
        seen_in: kinds of groups in which the same error has come since the last step that succeeded.
    """
    if not is_over:
        return AfterError.AGAIN
    kind = None if change is None or not may_be_theirs else change.kind
    if kind is None or any(other is not kind for other in seen_in):
        return AfterError.RAISED
    return AfterError.WITHOUT_NEWCOMERS if kind is Reshaped.NEW_MEMBERS else AfterError.WITH_AS_MANY


def can_go_on_without(change: GroupChange, min_workers: int) -> bool:
    """Whether a group without the newcomers is large enough, so that none of them has to come back.

    >>> can_go_on_without(GroupChange((1,), 1, 2), 1), can_go_on_without(GroupChange((1,), 2, 2), 2)
    (True, False)
    """
    return change.world_size - len(change.newcomers) >= min_workers
