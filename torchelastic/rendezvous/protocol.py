"""Who is in, with which rank: the whole decision, as a pure function.

`advance(view, event, now_s)` returns the new view and what the leader has to do. No clock, socket, log or random number
is in here, so that a simulator can drive exactly what runs in production. Times are seconds of any one monotonic clock.

The rules (docs/rendezvous.md says what follows from them for a user):

* At most `max_workers` are on the roster, and a multiple of `multiple_of`; who is over, a survivor maybe
  (`roster_choice.py`), waits as a spare and is no reason to stop anybody. Newcomers are one where they make the roster
  larger. While others train, a spare's state gets old: where it is the best all the same, a checkpoint is wanted too.
* The first round closes at `max_workers` at once, else `last_call_s` after the latest arrival, from `min_workers` on.
* A re-form waits for every live member of the last round and never for the last call; a live member that does not get
  ready within the patience of those who are is left out and named as evicted.
* Rank 0 holds the best state there is. After that, survivors keep their relative order, then comes the order of
  arrival; ranks of one host stay adjacent.
* A member that wants to leave the run leaves at an agreed step: the next round is formed without it, and when that is
  done, or cannot be done because those who stay are too few, it goes. Only where no other has a state as good as its
  own is it a member of one more round, which then stops for it again.
* A member whose step has failed in a round that had become smaller, and did not in the one before, asks for as many as
  there were: it waits for them as for `min_workers`.
* Where members have failed for good, and those that are left or may come back are too few, the round is called
  hopeless: nobody waits for others who will not come. What is lost without having failed may be made good by any host.
* The first member that is done closes the run for all; who lost its last step to a failure at that moment receives
  it from those who are done, in one more round, before the run is closed; there `min_workers` does not count.
* A group commits a step only with all of its members. So it is over for good as soon as one of them has asked for the
  next round or is known to have ended. Of a group that nobody has left and whose hosts are only silent, all may be cut
  off from the store and train on: without one of its members a new one is formed only after `orphan_timeout_s`.
* After the store lost its data, or was silent, or the leader lost its own lease, a missing key proves nothing: for
  `ttl_s`, and for as long as an agent may need to come back, nobody counts as lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchelastic.rendezvous.member_id import started_again
from torchelastic.rendezvous.records import Member, Round, RoundState, StateStatus, rank_members
from torchelastic.rendezvous.roster_choice import choose
from torchelastic.rendezvous.view import Event, Settings, View, absorb, is_done, is_waiting, may_be_behind
from torchelastic.text import counted, shortlist

#: How many tombstones are cleared away with one decision: etcd takes 128 operations in a transaction by default.
MAX_FORGOTTEN = 100


@dataclass(frozen=True)
class Publish:
    """Write this round, provided that we still lead, and clear the tombstones of `forgotten` away with it."""

    round: Round
    forgotten: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wake:
    """Come back with a Tick at this time: nothing to do before unless an event arrives."""

    at_s: float


Action = Publish | Wake


def advance(view: View, event: Event, now_s: float) -> tuple[View, tuple[Action, ...]]:
    """Take one event in and decide.

    Args:
        view: what was known before.
        event: what happened.
        now_s: the time of the leader's monotonic clock.

    Returns:
        What is known now, and at most one action. Publishing does not change the view: when the write has succeeded
        the caller feeds `RoundPublished` back; when it failed, nothing was decided.
    """
    view = absorb(view, event, now_s)
    for rule in RULES[view.round.state]:
        actions = rule.decide(view, now_s)
        if actions:
            return view, actions
    return view, ()


# --- the rules, in the order in which they are asked ----------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        when: it wants something, in words.
        decide: what it wants, of (view, now_s); nothing: the next rule is asked.
        leads_to: the states in which a round may be that it publishes; a RUNNING one is always a new round.
    """

    when: str
    decide: Callable[[View, float], tuple[Action, ...]]
    leads_to: tuple[RoundState, ...] = ()


def _wait_for_all_who_register_again(view: View, now_s: float) -> tuple[Action, ...]:
    """The store has lost its data: nothing is decided before every agent, with what it remembers, could come back."""
    return (Wake(view.trusted_from_s),) if view.round.restored and now_s < view.trusted_from_s else ()


def _wait_for_the_silent(view: View, now_s: float) -> tuple[Action, ...]:
    """Members are not there who may yet come back."""
    return (Wake(view.trusted_from_s),) if now_s < view.trusted_from_s and view.absent - view.departed else ()


def _finish(view: View, _now_s: float) -> tuple[Action, ...]:
    """Somebody is done: nobody starts another step."""
    if not view.done:
        return ()
    first = min(view.done)
    step = max(view.members[name].step for name in view.done)
    because = f"{first} has finished"  # its steps are those since the run has begun here, a checkpoint may have more
    return (Publish(_amended(view, state=RoundState.CLOSING, step=step, waiting=0, because=because)),)


def _close(view: View, _now_s: float) -> tuple[Action, ...]:
    """Everybody on the roster who lives is done: the run is over."""
    if view.roster <= view.absent | view.done:
        return (Publish(_amended(view, state=RoundState.CLOSED), forgotten=_forgotten(view.tombstones)),)
    return ()


def _level_at_the_end(view: View, _now_s: float) -> tuple[Action, ...]:
    """Somebody lost the last step to a failure while others finished: one more round, so that all end level."""
    live = _live(view)
    done = [member for member in live if is_done(member, view.round)]
    ready = [member for member in live if not is_done(member, view.round) and _is_ready(view, member)]
    behind = [member for member in ready if done and member.progress < max(other.progress for other in done)]
    size = view.settings.whole(len(live))  # too few to train may be enough: nobody does in it
    if not behind or len(done) + len(ready) < len(live) or not size:
        return ()
    # where not all fit, one that is in sync with the source loses nothing by staying behind
    chosen = set([*dict.fromkeys(m.member_id for m in (rank_members(live)[0], *behind, *live))][:size])
    return (_next_round(view, [member for member in live if member.member_id in chosen], ()),)


def _break_on_loss(view: View, now_s: float) -> tuple[Action, ...]:
    """A member of the roster is gone: tell the others, who may not have noticed."""
    gone = view.absent if now_s >= view.trusted_from_s else view.absent & view.departed
    if not gone:
        return ()
    if view.is_orphaned:
        return _say_that_it_is_orphaned(view, now_s)
    return _broken(view, f"lost {shortlist([name for name in view.round.roster if name in gone])}")


def _say_that_it_is_orphaned(view: View, _now_s: float) -> tuple[Action, ...]:
    """Nobody of the group is there, and none is known to have ended: name the wait, and how to shorten it."""
    if not view.is_orphaned or view.round.orphaned:
        return ()
    names, timeout_s = shortlist(view.round.roster), view.settings.orphan_timeout_s
    because = (
        f"lost {names}, all of round {view.round.number}, with no proof that they ended: they may be cut off, and "
        f"still train. New workers wait orphan_timeout={timeout_s:g} s, or until a host of theirs reports their end; "
        f"if you know that they have ended, start all launchers again with a lower --orphan-timeout"
    )
    return _broken(view, because, orphaned=True)


def _break_on_request(view: View, _now_s: float) -> tuple[Action, ...]:
    """A member left the running round without having been asked to."""
    if not view.ready:
        return ()
    needs = _needs(view)
    of = "" if needs is view.settings else f" of at least {counted(needs.smallest, 'member')}"
    return _broken(view, f"{shortlist(sorted(view.ready))} asked for a new round{of}")


def _break_on_failure(view: View, _now_s: float) -> tuple[Action, ...]:
    """While all were asked to stop at an agreed step, one of them failed instead."""
    failed = sorted(name for name in view.ready if view.members[name].failed)
    return _broken(view, f"{shortlist(failed)} failed") if failed else ()


def _admit(view: View, now_s: float) -> tuple[Action, ...]:
    """Newcomers wait and there is room: ask the roster to stop, once the newcomers of this moment are all here."""
    waiting = _joining(view, len(view.round.roster))
    if not waiting:
        return ()
    delay_s = view.settings.admission_delay_s
    # bounded: a trickle of newcomers must not put the first of them off for ever
    at_s = min(max(view.waiting_since_s.values()) + delay_s, min(view.waiting_since_s.values()) + 10 * delay_s)
    if now_s < at_s:
        return (Wake(at_s),)
    because = f"{waiting} waiting to join"
    return (Publish(_amended(view, state=RoundState.GATHERING, waiting=waiting, because=because)),)


def _let_leave(view: View, _now_s: float) -> tuple[Action, ...]:
    """Members want to leave: ask the roster to stop. Whoever has stopped already does not have to be asked."""
    if not view.leaving - view.ready - set(view.round.leaving):
        return ()
    leaving = tuple(name for name in view.round.roster if name in view.leaving)
    waiting = _joining(view, len(view.round.roster) - len(leaving))
    because = f"{shortlist(leaving)} asked to leave"
    change = {"state": RoundState.GATHERING, "waiting": waiting, "leaving": leaving, "because": because}
    return (Publish(_amended(view, **change)),)


def _form(view: View, now_s: float) -> tuple[Action, ...]:
    """Put the next roster together as soon as nobody is left to wait for."""
    wait_until_s = _wait_until_s(view)
    if wait_until_s == math.inf:
        return ()
    if now_s < wait_until_s:
        return (Wake(wait_until_s),)
    live = _live(view)
    unready = [member for member in live if not _is_ready(view, member)]
    staying, newcomers = _staying(view), _newcomers(view)
    if not _needs(view).usable(len(staying) + len(newcomers)):
        return _evict(view, unready)
    members = _with_the_last_source(view, staying, newcomers) + newcomers
    chosen = choose(members, view.settings.usable(len(members)), view.settings.multiple_of, view.round.roster)
    return (_next_round(view, chosen, unready),)


def _with_the_last_source(view: View, staying: list[Member], newcomers: list[Member]) -> list[Member]:
    """Those who stay, and one that leaves if it alone has the best state: it hands it on in one more round."""
    names = (view.leaving & view.ready) - view.round.released
    if not names:
        return staying
    best = max((view.members[name] for name in view.round.roster if name in names), key=lambda member: member.progress)
    if best.progress <= max([member.progress for member in (*staying, *newcomers)], default=(StateStatus.INITIAL, 0)):
        return staying
    kept = {best.member_id, *(member.member_id for member in staying)}
    return [member for member in _live(view) if member.member_id in kept]


def _release(view: View, _now_s: float) -> tuple[Action, ...]:
    """Nobody is left to wait for, and those who stay are too few: whoever wants to leave is free to go."""
    names = view.leaving & view.ready
    if not names or len(view.absent) + len(view.ready) < len(view.roster):
        return ()
    needs = _needs(view)
    if needs.usable(len(_staying(view)) + len(view.waiting_since_s)):
        return ()
    going = [view.members[name] for name in view.round.roster if name in names]
    if names <= view.round.released:
        return ()
    ordered = tuple(member.member_id for member in sorted(going, key=lambda member: member.progress, reverse=True))
    because = f"{shortlist(ordered)} left; fewer than {needs.least} are here"
    change = {"state": RoundState.BROKEN, "waiting": 0, "leaving": ordered, "hopeless": view.round.hopeless}
    return (Publish(_amended(view, **change, because=because)),)


def _declare_hopeless(view: View, now_s: float) -> tuple[Action, ...]:
    """Those that are left wait for members that their hosts do not start again: say so, and take it back if it changes.

    A loss that nobody has called one for good may be made good: by its own host, or by another one in its place. After
    leases were lost with the leader's own, it is not said before workers that wait for a place could register again.
    """
    needs, earlier = _needs(view), set[str]()
    if needs is not view.settings:  # those that are waited for were lost before this round
        earlier = set(view.round.lost)
    lost = [name for name in (*view.round.roster, *sorted(earlier)) if name in view.gave_up]
    again = started_again(view.waiting_since_s, view.absent | earlier) if lost else frozenset()
    may_come = len((view.absent | earlier) - view.gave_up) + len(view.waiting_since_s) - len(again)  # each counts once
    here = [member for member in _live(view) if not member.leaving]
    is_hopeless = bool(lost and (here or again)) and not needs.usable(len(here) + may_come)
    if is_hopeless == view.round.hopeless or (lost and not here and not again):
        return ()
    if is_hopeless and now_s < view.trusted_from_s:
        return (Wake(view.trusted_from_s),)
    because = f"{shortlist(lost)} failed for good; the others are fewer than {needs.least}"
    because = because if is_hopeless else "more workers have come"
    return (Publish(_amended(view, leaving=view.round.leaving, because=because, hopeless=is_hopeless)),)


def _evict(view: View, unready: Sequence[Member]) -> tuple[Action, ...]:
    """Too few without those that hang.

    Have them ended all the same, so that they can be started again and come back.
    """
    evicted = _all_evicted(view, unready)
    if not unready or evicted == view.round.evicted:
        return ()
    because = f"{shortlist(evicted)} did not get ready in time"
    return (Publish(_amended(view, state=RoundState.BROKEN, waiting=0, evicted=evicted, because=because)),)


def _wait_until_s(view: View) -> float:
    """The time at which a roster may be formed of who is there; infinite: only an event can help."""
    if len(view.absent) + len(view.ready) < len(view.roster):  # somebody lives and is not ready
        return _patience_ends_s(view)
    if view.ready:
        return -math.inf
    waiting = len(view.waiting_since_s)
    if not view.settings.usable(waiting):
        return math.inf
    if waiting >= view.settings.largest:
        return _last_group_ended_s(view)
    return max(max(view.waiting_since_s.values()) + view.settings.last_call_s, _last_group_ended_s(view))


def _patience_ends_s(view: View) -> float:
    """Until when a member that lives and is not ready is waited for: as long as those who wait for it have said."""
    if view.ready_since_s is not None:
        return view.ready_since_s + max(view.members[name].patience_s for name in view.ready)
    if view.broken_since_s is not None and view.waiting_since_s:  # all that live hang, and somebody could take over
        return view.broken_since_s + max(member.patience_s for member in _live(view))
    return math.inf


def _last_group_ended_s(view: View) -> float:
    """From when on the last group cannot commit any more, if nobody of it has asked for the next one."""
    if view.departed or not view.roster or view.orphaned_since_s is None:
        return -math.inf
    return view.orphaned_since_s + view.settings.orphan_timeout_s


#: The protocol as a table: in each state these rules are asked, in this order; the first that wants something decides.
#: The diagram in CONTRIBUTING.md is made from it, and the simulator holds every history to it.
RULES: Mapping[RoundState, tuple[Rule, ...]] = {
    RoundState.RUNNING: (
        Rule("the store has lost data: wait", _wait_for_all_who_register_again),
        Rule("somebody is done", _finish, (RoundState.CLOSING,)),
        Rule("a member is lost", _break_on_loss, (RoundState.BROKEN,)),
        Rule("a member asks for the next round", _break_on_request, (RoundState.BROKEN,)),
        Rule("a member is silent that may come back: wait", _wait_for_the_silent),
        Rule("a member wants to leave", _let_leave, (RoundState.GATHERING,)),
        Rule("newcomers wait, and there is room", _admit, (RoundState.GATHERING,)),
    ),
    RoundState.GATHERING: (
        Rule("the store has lost data: wait", _wait_for_all_who_register_again),
        Rule("somebody is done", _finish, (RoundState.CLOSING,)),
        Rule("a member is lost", _break_on_loss, (RoundState.BROKEN,)),
        Rule("a member failed", _break_on_failure, (RoundState.BROKEN,)),
        Rule("a member is silent that may come back: wait", _wait_for_the_silent),
        Rule("another member wants to leave", _let_leave, (RoundState.GATHERING,)),
        Rule("all that live are ready", _form, (RoundState.RUNNING, RoundState.BROKEN)),
        Rule("without those who leave too few are here", _release, (RoundState.BROKEN,)),
    ),
    RoundState.BROKEN: (
        Rule("the store has lost data: wait", _wait_for_all_who_register_again),
        Rule("somebody is done", _finish, (RoundState.CLOSING,)),
        Rule("a member is silent that may come back: wait", _wait_for_the_silent),
        Rule("all are gone and may still train", _say_that_it_is_orphaned, (RoundState.BROKEN,)),
        Rule("without those who failed for good too few are left", _declare_hopeless, (RoundState.BROKEN,)),
        Rule("all that live are ready", _form, (RoundState.RUNNING, RoundState.BROKEN)),
        Rule("without those who leave too few are here", _release, (RoundState.BROKEN,)),
    ),
    RoundState.CLOSING: (
        Rule("all that live are done", _close, (RoundState.CLOSED,)),
        Rule("somebody lost the last step", _level_at_the_end, (RoundState.RUNNING,)),
    ),
    RoundState.CLOSED: (),
}


# --- helpers --------------------------------------------------------------------------------------------------------


def _live(view: View) -> list[Member]:
    """The members of the roster that are still there, in the order of their ranks."""
    return [view.members[member_id] for member_id in view.round.roster if member_id in view.members]


def _is_ready(view: View, member: Member) -> bool:
    return member.ready_for > view.round.number


def _staying(view: View) -> list[Member]:
    """The members of the roster that have asked for the next round and want to be on it."""
    return [member for member in _live(view) if _is_ready(view, member) and not member.leaving]


def _needs(view: View) -> Settings:
    """What the next roster needs, by the settings and by those of the last one that have asked for it."""
    needed = min(max((member.needed for member in _staying(view)), default=0), view.settings.largest)
    return view.settings if needed <= view.settings.min_workers else replace(view.settings, min_workers=needed)


def _joining(view: View, staying: int) -> int:
    """How many of those who wait a roster would take in on which so many stay."""
    return max(0, view.settings.whole(staying + len(view.waiting_since_s)) - staying)


def _newcomers(view: View) -> list[Member]:
    # a spare's state may be complete and of long ago: one of now counts more, though its last step was not committed
    uncommitted = StateStatus.UNCOMMITTED
    now = max((member.step for member in _live(view) if member.state_status is uncommitted), default=-1)
    members = sorted(map(view.members.__getitem__, view.waiting_since_s), key=lambda m: (m.arrival, m.member_id))
    return [replace(m, state_status=min(m.state_status, uncommitted)) if m.step < now else m for m in members]


def _amended(view: View, **changes: Any) -> Round:
    """The present round with changes, as its next edition."""
    departed = tuple(name for name in view.round.roster if name in view.departed)
    changes = {"leaving": (), "orphaned": False, "hopeless": False, **changes}
    return replace(view.round, edition=view.round.edition + 1, departed=departed, restored=False, **changes)


def _broken(view: View, because: str, *, orphaned: bool = False) -> tuple[Action, ...]:
    return (Publish(_amended(view, state=RoundState.BROKEN, waiting=0, because=because, orphaned=orphaned)),)


def _forgotten(tombstones: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(tombstones)[:MAX_FORGOTTEN])


def _all_evicted(view: View, unready: Sequence[Member]) -> tuple[str, ...]:
    """Who is to be ended, with those evicted before that have not asked again: they are still no newcomers."""
    before = [view.members[name] for name in view.round.evicted if name in view.members]
    silent = [member for member in before if member not in unready and not is_waiting(member, view.round)]
    return tuple(member.member_id for member in (*unready, *silent))


def _next_round(view: View, chosen: Sequence[Member], unready: Sequence[Member]) -> Publish:
    ranked = rank_members(chosen)
    source = view.members[ranked[0].member_id]
    is_old = may_be_behind(source, view.round)
    names = {member.member_id for member in (*ranked, *unready)}
    round_ = Round(
        number=view.round.number + 1,
        state=RoundState.RUNNING,
        roster=tuple(member.member_id for member in ranked),
        store_address=source.store_address,
        # the step that nobody committed but whose weights are all that is left counts as done
        step=source.step + (1 if source.state_status is StateStatus.UNCOMMITTED else 0),
        state_status=min(source.state_status, StateStatus.INITIAL) if is_old else source.state_status,
        stale=tuple(rank for rank, member in enumerate(ranked) if member.progress < ranked[0].progress),
        evicted=_all_evicted(view, unready),
        because=f"{counted(len(ranked), 'member')}, source {source.member_id} at step {source.step}",
        edition=view.round.edition + 1,
        lost=tuple(name for name in view.round.roster if name in view.departed)[:MAX_FORGOTTEN],
        spared=tuple(m.member_id for m in _live(view) if m.member_id not in names and not m.leaving)[:MAX_FORGOTTEN],
    )
    # Of those that this round has lost the tombstones stay for as long as somebody may wait for them: that they are not
    # started again may be in there already, or be written at this moment.
    return Publish(round_, forgotten=_forgotten(view.tombstones - view.roster))
