"""What a round means for one worker: the decisions on its side, as pure functions.

The worker's client, the agent's connections and the simulator's workers all ask here.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import asdict

from torchelastic.processes.exit_codes import signalled
from torchelastic.rendezvous.member_id import MemberId
from torchelastic.rendezvous.records import MAX_SECONDS, JoinRequest, Member, Round, RoundState, StateStatus
from torchelastic.rendezvous.view import is_done

#: Shares of the time for which a group may train without contact to the store: when it leaves at the end of a step, and
#: when it must not commit the step any more that it is in. The rest is for clocks that run at different speeds.
LEAVE_SHARE = 0.7
COMMIT_SHARE = 0.8
#: A worker is late with its first request for a group after so many seconds, or so many times the slowest start-up.
LATE_START_FLOOR_S = 60.0
LATE_START_FACTOR = 5.0


@dataclass(frozen=True)
class Contact:
    """How long a worker may go on without a sign of the store, in `boot_time_s` of its host.

    A new group without any member of this one is formed `orphan_timeout_s` after its hosts were taken for lost, which
    is a time to live after their last answered signs of life at the earliest; so the two never commit at once.

    Attributes:
        leave_at_s: from then on it leaves its group at the end of a step.
        commit_until_s: from then on no step is committed.
    """

    leave_at_s: float = math.inf
    commit_until_s: float = math.inf

    @classmethod
    def at(cls, sent_s: float, orphan_timeout_s: float) -> Contact:
        """After a sign of life was sent at `sent_s`, and answered."""
        return cls(sent_s + LEAVE_SHARE * orphan_timeout_s, sent_s + COMMIT_SHARE * orphan_timeout_s)


def asks(member: Member, known: Round | None, request: JoinRequest) -> Member:
    """The record of a member that wants the round after the newest that is known."""
    brought = {**asdict(request), "patience_s": min(request.patience_s, MAX_SECONDS)}
    return replace(member, ready_for=(0 if known is None else known.number) + 1, **brought)


def asks_again(member: Member, now: Round) -> Member | None:
    """For a member that waits: its record if it has to ask anew, else None.

    The round that it had asked for came, with the member on its roster, and broke before this host heard of it.
    """
    missed = member.member_id in now.members and 0 < member.ready_for <= now.number
    return replace(member, ready_for=now.number + 1, failed=True) if missed and not _runs(now) else None


def finishes(member: Member, known: Round | None, step: int) -> Member:
    """The record of a member that is done, with this many committed steps."""
    return replace(
        member, done=max(1, 0 if known is None else known.number), step=step, state_status=StateStatus.COMPLETE
    )


def may_go(member: Member, known: Round | None) -> bool:
    """Whether a member that is to leave, and waits for a round, may go now without costing the others one.

    Who is not on the roster may, unless a new one is just being put together. Who is on it is waited for: it goes when
    the next one is there without it, or when there is none and the leader lets it go.
    """
    if known is None or member.member_id not in known.members:
        return known is None or known.state is not RoundState.GATHERING
    return known.state is RoundState.BROKEN and member.member_id in known.leaving


def decides_alone(known: Round, own: Sequence[Member], waiting: Collection[str]) -> Round | None:
    """What a host tells its own members, all of which are to leave, while it does not reach the store; None: no news.

    As the leader would: those that wait are free to go, and for those that have finished the run is over. Where nobody
    of the roster is elsewhere, those that train stop at an agreed step, and the first goes as the one with the best
    state (see `Round.leaving`). Else they train on: the others would have to wait for the store.

    Args:
        known: what they were told before.
        own: the living members of this host.
        waiting: which of them wait for a group.
    """
    members = [member for member in own if member.member_id in known.members]
    if known.state is RoundState.CLOSED or not members or not all(member.leaving for member in members):
        return None
    here = [member for member in members if not is_done(member, known)]
    if not here:
        return replace(known, state=RoundState.CLOSED)
    if known.is_over:
        return None
    incarnations = {MemberId.of(member.member_id).incarnation for member in here}
    elsewhere = [name for name in known.roster if MemberId.of(name).incarnation not in incarnations]
    if any(member.member_id not in waiting for member in here):
        if elsewhere or known.state is not RoundState.RUNNING:
            return None
        return replace(known, state=RoundState.GATHERING, leaving=tuple(member.member_id for member in here))
    best_first = sorted(here, key=lambda member: member.progress, reverse=True)
    return replace(known, state=RoundState.BROKEN, leaving=(*elsewhere, *(member.member_id for member in best_first)))


def wait_left_s(since_s: float, trained_until_s: float, now_s: float, timeout_s: float) -> float:
    """How long a worker may still wait for a group before the run's time-out; 0 or less: it is over.

    That of a spare begins when the others stop training, and does not run while they train.

    Args:
        since_s: when it asked.
        trained_until_s: when others trained last; infinite: they do now.
        now_s: all by one clock.
        timeout_s: of the run.
    """
    return timeout_s - max(0.0, now_s - max(since_s, trained_until_s))


def is_granted(round_: Round, member_id: str, after: int) -> bool:
    """Whether this is a group for a member whose last one was round `after` (0: it has had none)."""
    return round_.number > after and _runs(round_) and member_id in round_.members


def is_over_for(round_: Round, member_id: str, step: int) -> bool:
    """Whether the run is over for a member with this many committed steps.

    One that lost its last step while others finished is synchronized first, in one more round.
    """
    behind = member_id in round_.members and step < round_.step
    return round_.state is RoundState.CLOSED or (round_.state is RoundState.CLOSING and not behind)


def is_replaced(joined: Round, now: Round) -> bool:
    """Whether the group of `joined` is no more: broken, or another one has taken its place."""
    if now.number == joined.number and now.roster != joined.roster:
        return True  # a store that had lost its data gave the number out again
    return now.number > joined.number or (now.number == joined.number and now.state is RoundState.BROKEN)


def is_left_behind(member: Member, round_: Round) -> bool:
    """Whether others train without a member that was to leave, and that has not asked for a group since: it may hang.

    A member that is not to leave waits as a spare, whether it knows of it or not: it is evicted when it is its turn.
    """
    is_out = _runs(round_) and member.member_id not in round_.members
    return member.leaving and is_out and 0 < member.ready_for <= round_.number and not is_done(member, round_)


class AfterLoss(enum.Enum):
    """What becomes of the workers of a host when one of them has failed."""

    #: The others go on without it.
    NOT_RESTARTED = enum.auto()
    #: It is started again, the others go on.
    ONE_AGAIN = enum.auto()
    #: All are ended; restarts permitting, all are started again.
    ALL_END = enum.auto()


def after_loss(
    exit_code: int,
    *,
    has_asked: bool,
    is_plain_group: bool,
    run_is_over: bool,
    restarts_left: int,
    fails_for_good: bool = False,
) -> AfterLoss:
    """What a failed worker means for those of its host.

    A group whose members found each other by the environment, as under torchrun, is none without one of them.

    A script that fails with an error before it first asks for a group (a typo, a missing file) fails the next time too:
    that is reported now, not after k restarts. So does one whose step has failed with the same error again and again. A
    signal (the out-of-memory killer, a crash in native code) is no error of the script, so it may go better next time.

    Args:
        exit_code: as subprocess has it (negative: a signal).
        has_asked: whether the process had asked for a group.
        is_plain_group: whether the workers have initialised such a group, and none has asked the agent for one.
        run_is_over: whether the run is closed or closing.
        restarts_left: of this worker alone.
        fails_for_good: whether it has said that its error would come again in another process.
    """
    if is_plain_group:
        return AfterLoss.ALL_END
    may_help = signalled(exit_code) if not has_asked else exit_code < 0 or not fails_for_good
    return AfterLoss.ONE_AGAIN if may_help and not run_is_over and restarts_left > 0 else AfterLoss.NOT_RESTARTED


def late_start_s(slowest_start_s: float) -> float:
    """Seconds after its start at which a worker that has not asked for a group yet is late.

    Args:
        slowest_start_s: the slowest start-up of the workers of this host that did ask; 0: none has asked yet.
    """
    return max(LATE_START_FLOOR_S, LATE_START_FACTOR * slowest_start_s)


def _runs(round_: Round) -> bool:
    return round_.state in (RoundState.RUNNING, RoundState.GATHERING)
