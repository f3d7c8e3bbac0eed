"""What the leader of a run knows, and how an event changes it.

Everything that the rules in `protocol.py` ask for again and again (who is missing, who is ready) is kept up to date
here member by member, so that an event costs what it changes, also with 10,000 members.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchelastic.rendezvous.records import NO_ROUND, Member, Round, RoundState

#: An agent that lost sight of the store tries again at least this often: a call without an answer takes 5 s, and the
#: longest pause between two sessions is 1.5 s.
COME_BACK_S = 8.0


@dataclass(frozen=True)
class Settings:
    """What the user asked for; the same on every host of a run.

    Attributes:
        min_workers: no roster is smaller.
        max_workers: no roster is larger.
        last_call_s: how long a first round waits for more after each arrival.
        admission_delay_s: how long a running group waits for further newcomers before it is asked to stop for them.
        ttl_s: how long a host may be silent.
        orphan_timeout_s: how long a group may train without contact to the store; infinite: as long as it likes.
        multiple_of: the size of every roster is a multiple of it; who is over waits as a spare.
    """

    min_workers: int
    max_workers: int
    last_call_s: float = 30.0
    admission_delay_s: float = 0.1
    ttl_s: float = 10.0
    orphan_timeout_s: float = 300.0
    multiple_of: int = 1

    @property
    def smallest(self) -> int:
        """The size of the smallest roster.

        >>> Settings(3, 9, multiple_of=2).smallest
        4
        """
        return -(-self.min_workers // self.multiple_of) * self.multiple_of

    @property
    def largest(self) -> int:
        """The size of the largest roster."""
        return self.whole(self.max_workers)

    def whole(self, count: int) -> int:
        """How many of so many members fit on one roster, if they are not too few.

        >>> [Settings(3, 9, multiple_of=2).whole(count) for count in (3, 4, 5, 20)]
        [2, 4, 4, 8]
        """
        return min(count, self.max_workers) // self.multiple_of * self.multiple_of

    def usable(self, count: int) -> int:
        """The size of the roster of so many members; 0: they are too few for one.

        >>> [Settings(3, 9, multiple_of=2).usable(count) for count in (3, 4, 5, 20)]
        [0, 4, 4, 8]
        """
        size = self.whole(count)
        return size if size >= self.min_workers else 0

    @property
    def agreed(self) -> dict[str, str]:
        """What every host has to be started with alike: the leader's decides, and a host cut off goes by its own.

        >>> Settings(3, 9).agreed
        {'min_workers': '3', 'max_workers': '9', 'multiple_of': '1', 'orphan_timeout': '300'}
        """
        counts = {name: str(getattr(self, name)) for name in ("min_workers", "max_workers", "multiple_of")}
        return {**counts, "orphan_timeout": f"{self.orphan_timeout_s:g}"}

    @property
    def least(self) -> str:
        """What a group needs, for messages.

        >>> Settings(3, 9, multiple_of=2).least
        'min_workers=3 with multiple_of=2'
        """
        multiple = "" if self.multiple_of == 1 else f" with multiple_of={self.multiple_of}"
        return f"min_workers={self.min_workers}{multiple}"


@dataclass(frozen=True)
class View:
    """All that the leader knows.

    Attributes:
        settings: see `Settings`.
        members: by member id.
        round: what the store holds.
        waiting_since_s: when the leader first saw a member wait that is not on the roster.
        tombstones: members whose record in the store says that they have ended.
        gave_up: of the tombstones, those whose hosts do not start them again.
        departed: those of the roster that are known to have ended.
        roster: the members of the round, as a set.
        absent: who is on the roster and not in the store.
        ready: who is on the roster and has asked for the next round.
        leaving: who is on the roster and wants to leave the run.
        done: who has finished.
        ready_since_s: when the first member of the roster asked for the next round; None while none has.
        broken_since_s: when the leader first saw the round broken; None while it is not.
        orphaned_since_s: when the leader first saw nobody of the roster there; None while somebody is.
        trusted_from_s: before that time it proves nothing that a member is not there.
    """

    settings: Settings
    members: Mapping[str, Member] = field(default_factory=dict)
    round: Round = NO_ROUND
    waiting_since_s: Mapping[str, float] = field(default_factory=dict)
    tombstones: frozenset[str] = frozenset()
    gave_up: frozenset[str] = frozenset()
    departed: frozenset[str] = frozenset()
    roster: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    ready: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()
    ready_since_s: float | None = None
    broken_since_s: float | None = None
    orphaned_since_s: float | None = None
    trusted_from_s: float = -math.inf

    @property
    def is_orphaned(self) -> bool:
        """Whether nobody of the roster is there, and all of them may still train, cut off from the store."""
        return bool(self.roster) and self.absent == self.roster and not self.departed


@dataclass(frozen=True)
class MembersChanged:
    """Some members wrote their record, the keys of some are gone. A batch, so that N arrivals cost one decision."""

    present: tuple[Member, ...] = ()
    gone: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundPublished:
    """The store holds this round now, whoever wrote it.

    Attributes:
        round: the round.
        proves_no_loss: the leader had lost its own lease, and others who were cut off with it may have lost theirs:
            not there proves nothing before they have had the time to come back.
    """

    round: Round
    proves_no_loss: bool = False


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = MembersChanged | RoundPublished | Tick


def is_waiting(member: Member, round_: Round) -> bool:
    """Whether the member wants a round that does not exist yet, or one that it is not on.

    What an evicted member asked for before it was evicted was granted then: only what it asks for afterwards counts.
    """
    if is_done(member, round_) or member.ready_for <= member.done or member.leaving:
        return False  # it has finished, and has not asked since
    if member.member_id in round_.members:
        return member.ready_for > round_.number
    return member.member_id not in round_.evicted or member.ready_for >= round_.number


def may_be_behind(member: Member, round_: Round) -> bool:
    """Whether it has waited while others had the round that it asked for, and may have committed steps in it."""
    return member.member_id not in round_.members and 0 < member.ready_for <= round_.number


def is_done(member: Member, round_: Round) -> bool:
    """Whether the member has finished in the present round (or wants the run closed before there is any)."""
    return member.done > 0 and member.done >= round_.number


def absorb(view: View, event: Event, now_s: float) -> View:
    """What is known after the event, at `now_s` of the leader's monotonic clock."""
    if isinstance(event, MembersChanged):
        view = _with_members(view, event, now_s)
    elif isinstance(event, RoundPublished):
        view = _with_round(view, event.round, now_s, is_trusted=not (event.proves_no_loss or event.round.restored))
    else:
        return view
    return replace(
        view,
        ready_since_s=_since(view.ready_since_s, bool(view.ready), now_s),
        broken_since_s=_since(view.broken_since_s, view.round.state is RoundState.BROKEN, now_s),
        orphaned_since_s=_since(view.orphaned_since_s, len(view.absent) == len(view.round.roster), now_s),
    )


def _since(since_s: float | None, is_so: bool, now_s: float) -> float | None:
    return (now_s if since_s is None else since_s) if is_so else None


def _with_members(view: View, event: MembersChanged, now_s: float) -> View:
    """Take changed members in. Looks at those alone: at 10,000 members nothing may be counted anew for each."""
    members, waiting_since_s = dict(view.members), dict(view.waiting_since_s)
    absent, ready, leaving, done = set[str](), set[str](), set[str](), set[str]()
    ended = {member.member_id for member in event.present if member.departed}
    gave_up = {member.member_id for member in event.present if member.departed and member.gave_up}
    members.update({member.member_id: member for member in event.present})
    for name in (*event.gone, *ended):
        members.pop(name, None)
    changed = {*event.gone, *(member.member_id for member in event.present)}
    for name in changed:
        now = members.get(name)
        on_roster = name in view.roster
        _set(absent, name, on_roster and now is None)
        _set(ready, name, on_roster and now is not None and now.ready_for > view.round.number)
        _set(leaving, name, on_roster and now is not None and now.leaving)
        _set(done, name, now is not None and is_done(now, view.round))
        if now is not None and not on_roster and is_waiting(now, view.round):
            waiting_since_s.setdefault(name, now_s)
        else:
            waiting_since_s.pop(name, None)
    return replace(
        view,
        members=members,
        waiting_since_s=waiting_since_s,
        tombstones=(view.tombstones | ended) - frozenset(event.gone),
        gave_up=(view.gave_up | gave_up) - frozenset(event.gone) if gave_up or view.gave_up else view.gave_up,
        departed=view.departed | (view.roster & ended),
        absent=_with(view.absent, changed, absent),
        ready=_with(view.ready, changed, ready),
        leaving=_with(view.leaving, changed, leaving),
        done=_with(view.done, changed, done),
    )


def _set(names: set[str], name: str, is_in: bool) -> None:
    names.add(name) if is_in else names.discard(name)


def _with(names: frozenset[str], changed: set[str], now_in: set[str]) -> frozenset[str]:
    """The names, of `changed` only those that are `now_in`; not copied where nothing is different."""
    out = (names & changed) - now_in
    names = names - out if out else names
    return names if now_in <= names else names | now_in


def _with_round(view: View, round_: Round, now_s: float, *, is_trusted: bool) -> View:
    members, roster = view.members, round_.members
    return replace(
        view,
        round=round_,
        roster=roster,
        # what the round says of its roster holds also for a leader that has never seen the tombstones
        departed=((view.departed | view.tombstones) & roster) | frozenset(round_.departed),
        absent=roster - members.keys(),
        ready=frozenset(n for n in roster if n in members and members[n].ready_for > round_.number),
        leaving=frozenset(n for n in roster if n in members and members[n].leaving),
        done=frozenset(n for n, member in members.items() if is_done(member, round_)),
        waiting_since_s={
            name: view.waiting_since_s.get(name, now_s)
            for name, member in members.items()
            if name not in roster and is_waiting(member, round_)
        },
        trusted_from_s=view.trusted_from_s if is_trusted else now_s + max(view.settings.ttl_s, COME_BACK_S),
    )
