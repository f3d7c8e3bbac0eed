"""Who is in, with which rank: the whole decision, as a pure function.

`advance(view, event, now_s)` returns the new view and what the leader has to do. No clock, socket, log or random number
is in here, so that a simulator can drive exactly what runs in production. Times are seconds of any one monotonic clock.

The rules (DESIGN, section 4; docs/rendezvous.md says them with their reasons):

* At most `max_workers` are on the roster; who is over waits as a spare and is no reason to stop anybody.
* The first round closes at `max_workers` at once, else `last_call_s` after the latest arrival, from `min_workers` on.
* A re-form waits for every live member of the last round and never for the last call; a live member that does not get
  ready within the patience of those who are is left out and named as evicted.
* Rank 0 holds the best state there is. After that, survivors keep their relative order, then comes the order of
  arrival; ranks of one host stay adjacent.
* The first member that is done closes the run for all; who lost its last step to a failure at that moment is brought
  level by those who are done, in one more round, before the run is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchelastic.rendezvous.records import NO_ROUND, Member, Round, RoundState, Standing


@dataclass(frozen=True)
class Settings:
    """What the user asked for; the same on every host of a run.

    Attributes:
        min_workers: no roster is smaller.
        max_workers: no roster is larger.
        last_call_s: how long a first round waits for more after each arrival.
        admission_delay_s: how long a running group waits for further newcomers before it is asked to stop for them.
    """

    min_workers: int
    max_workers: int
    last_call_s: float = 30.0
    admission_delay_s: float = 0.1


@dataclass(frozen=True)
class View:
    """All that the leader knows.

    Attributes:
        settings: see `Settings`.
        members: by member id.
        round: what the store holds.
        waiting_since_s: when the leader first saw a member wait that is not on the roster.
        ready_since_s: when the first member of the roster asked for the next round; None while none has.
    """

    settings: Settings
    members: Mapping[str, Member] = field(default_factory=dict)
    round: Round = NO_ROUND
    waiting_since_s: Mapping[str, float] = field(default_factory=dict)
    ready_since_s: float | None = None


@dataclass(frozen=True)
class MembersChanged:
    """Some members wrote their record, some are gone. A batch, so that N arrivals cost one decision."""

    present: tuple[Member, ...] = ()
    gone: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundPublished:
    """The store holds this round now, whoever wrote it."""

    round: Round


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = MembersChanged | RoundPublished | Tick


@dataclass(frozen=True)
class Publish:
    """Write this round, provided that we still lead."""

    round: Round


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
    view = _absorb(view, event, now_s)
    for rule in RULES[view.round.state]:
        actions = rule(view, now_s)
        if actions:
            return view, actions
    return view, ()


def is_waiting(member: Member, round_: Round) -> bool:
    """Whether the member wants a round that does not exist yet, or one that it is not on.

    What an evicted member asked for before it was evicted was granted then: only what it asks for afterwards counts.
    """
    if is_done(member, round_) or member.ready_for == 0:
        return False
    if member.member_id in round_.roster:
        return member.ready_for > round_.number
    return member.member_id not in round_.evicted or member.ready_for >= round_.number


def is_done(member: Member, round_: Round) -> bool:
    """Whether the member has finished in the present round (or wants the run closed before there is any)."""
    return member.done > 0 and member.done >= round_.number


# --- taking events in ---------------------------------------------------------------------------------------------


def _absorb(view: View, event: Event, now_s: float) -> View:
    members, round_ = view.members, view.round
    if isinstance(event, MembersChanged):
        members = {**members, **{member.member_id: member for member in event.present}}
        for member_id in event.gone:
            members.pop(member_id, None)
    elif isinstance(event, RoundPublished):
        round_ = event.round
    on_roster = frozenset(round_.roster)
    waiting = {
        member_id: view.waiting_since_s.get(member_id, now_s)
        for member_id, member in members.items()
        if member_id not in on_roster and is_waiting(member, round_)
    }
    anybody_ready = any(
        member_id in members and members[member_id].ready_for > round_.number for member_id in round_.roster
    )
    ready_since_s = (view.ready_since_s if view.ready_since_s is not None else now_s) if anybody_ready else None
    return View(view.settings, members, round_, waiting, ready_since_s)


# --- the rules, in the order in which they are asked ----------------------------------------------------------------

Rule = Callable[[View, float], tuple[Action, ...]]


def _finish(view: View, _now_s: float) -> tuple[Action, ...]:
    """Somebody is done: nobody starts another step."""
    done = [member for member in view.members.values() if is_done(member, view.round)]
    if not done:
        return ()
    step = max(member.step for member in done)
    because = f"{done[0].member_id} finished after {step} steps"
    closing = replace(view.round, state=RoundState.CLOSING, step=step, waiting=0, because=because)
    return (Publish(closing),)


def _close(view: View, _now_s: float) -> tuple[Action, ...]:
    """Everybody on the roster who lives is done: the run is over."""
    if all(is_done(member, view.round) for member in _live(view)):
        return (Publish(replace(view.round, state=RoundState.CLOSED)),)
    return ()


def _level_at_the_end(view: View, _now_s: float) -> tuple[Action, ...]:
    """Somebody lost the last step to a failure while others finished: one more round, so that all end level."""
    live = _live(view)
    done = [member for member in live if is_done(member, view.round)]
    ready = [member for member in live if not is_done(member, view.round) and _is_ready(view, member)]
    behind = [member for member in ready if done and member.worth < max(other.worth for other in done)]
    if not behind or len(done) + len(ready) < len(live) or len(live) < view.settings.min_workers:
        return ()
    return (Publish(_next_round(view, live, ())),)


def _break_on_loss(view: View, _now_s: float) -> tuple[Action, ...]:
    """A member of the roster is gone: tell the others, who may not have noticed."""
    lost = [member_id for member_id in view.round.roster if member_id not in view.members]
    return _broken(view, f"lost {', '.join(lost)}") if lost else ()


def _break_on_request(view: View, _now_s: float) -> tuple[Action, ...]:
    """A member left the running round without having been asked to."""
    asking = [member.member_id for member in _live(view) if _is_ready(view, member)]
    return _broken(view, f"{asking[0]} asked for a new round") if asking else ()


def _break_on_failure(view: View, _now_s: float) -> tuple[Action, ...]:
    """While all were asked to stop at an agreed step, one of them failed instead."""
    failed = [member.member_id for member in _live(view) if _is_ready(view, member) and member.failed]
    return _broken(view, f"{failed[0]} failed") if failed else ()


def _admit(view: View, now_s: float) -> tuple[Action, ...]:
    """Newcomers wait and there is room: ask the roster to stop, once the newcomers of this moment are all here."""
    room = view.settings.max_workers - len(view.round.roster)
    if room <= 0 or not view.waiting_since_s:
        return ()
    delay_s = view.settings.admission_delay_s
    # bounded: a trickle of newcomers must not put the first of them off for ever
    at_s = min(max(view.waiting_since_s.values()) + delay_s, min(view.waiting_since_s.values()) + 10 * delay_s)
    if now_s < at_s:
        return (Wake(at_s),)
    waiting = min(room, len(view.waiting_since_s))
    because = f"{waiting} waiting to join"
    return (Publish(replace(view.round, state=RoundState.GATHERING, waiting=waiting, because=because)),)


def _form(view: View, now_s: float) -> tuple[Action, ...]:
    """Put the next roster together as soon as nobody is left to wait for."""
    live = _live(view)
    ready = [member for member in live if _is_ready(view, member)]
    absent = [member for member in live if not _is_ready(view, member)]
    wait_until_s = _wait_until_s(view, ready, absent)
    if wait_until_s is None:
        return ()
    if now_s < wait_until_s:
        return (Wake(wait_until_s),)
    chosen = (ready + _newcomers(view))[: view.settings.max_workers]
    if len(chosen) < view.settings.min_workers:
        return _evict(view, absent)
    return (Publish(_next_round(view, chosen, absent)),)


def _evict(view: View, absent: Sequence[Member]) -> tuple[Action, ...]:
    """Too few without those that hang.

    Have them ended all the same, so that they can be started again and come back.
    """
    evicted = tuple(member.member_id for member in absent)
    if not evicted or evicted == view.round.evicted:
        return ()
    because = f"{', '.join(evicted)} did not get ready in time"
    return (Publish(replace(view.round, state=RoundState.BROKEN, waiting=0, evicted=evicted, because=because)),)


def _wait_until_s(view: View, ready: Sequence[Member], absent: Sequence[Member]) -> float | None:
    """The time at which a roster may be formed of who is there; None: only an event can help."""
    if absent:
        if view.ready_since_s is None:
            return None
        return view.ready_since_s + max(member.patience_s for member in ready)
    if ready or not view.waiting_since_s:
        return float("-inf") if ready else None
    waiting = len(view.waiting_since_s)
    if waiting >= view.settings.max_workers:
        return float("-inf")
    if waiting < view.settings.min_workers:
        return None
    return max(view.waiting_since_s.values()) + view.settings.last_call_s


RULES: Mapping[RoundState, tuple[Rule, ...]] = {
    RoundState.RUNNING: (_finish, _break_on_loss, _break_on_request, _admit),
    RoundState.GATHERING: (_finish, _break_on_loss, _break_on_failure, _form),
    RoundState.BROKEN: (_finish, _form),
    RoundState.CLOSING: (_close, _level_at_the_end),
    RoundState.CLOSED: (),
}


# --- helpers --------------------------------------------------------------------------------------------------------


def _live(view: View) -> list[Member]:
    """The members of the roster that are still there, in the order of their ranks."""
    return [view.members[member_id] for member_id in view.round.roster if member_id in view.members]


def _is_ready(view: View, member: Member) -> bool:
    return member.ready_for > view.round.number


def _newcomers(view: View) -> list[Member]:
    return sorted(
        (view.members[member_id] for member_id in view.waiting_since_s), key=lambda m: (m.arrival, m.member_id)
    )


def _broken(view: View, because: str) -> tuple[Action, ...]:
    return (Publish(replace(view.round, state=RoundState.BROKEN, waiting=0, because=because)),)


def _next_round(view: View, chosen: Sequence[Member], absent: Sequence[Member]) -> Round:
    ranked = rank_members(chosen)
    source = ranked[0]
    # who was evicted before and has not asked again is still no newcomer
    silent = [view.members[name] for name in view.round.evicted if name in view.members]
    evicted = [*absent, *(m for m in silent if m not in absent and not is_waiting(m, view.round))]
    return Round(
        number=view.round.number + 1,
        state=RoundState.RUNNING,
        roster=tuple(member.member_id for member in ranked),
        store_address=source.store_address,
        # the step that nobody committed but whose weights are all that is left counts as done
        step=source.step + (1 if source.standing is Standing.UNCOMMITTED else 0),
        standing=source.standing,
        stale=tuple(rank for rank, member in enumerate(ranked) if member.worth < source.worth),
        evicted=tuple(member.member_id for member in evicted),
        because=f"{len(ranked)} members, source {source.member_id} at step {source.step}",
    )


def rank_members(members: Sequence[Member]) -> list[Member]:
    """Order members by rank: the first of those with the best state leads, the rest keep the given order, by host."""
    best = max(member.worth for member in members)
    first = next(member for member in members if member.worth == best)
    by_host: dict[str, list[Member]] = {first.host: [first]}
    for member in members:
        if member is not first:
            by_host.setdefault(member.host, []).append(member)
    return [member for group in by_host.values() for member in group]


def check_invariants(view: View) -> None:
    """Raise AssertionError if a round breaks a promise.

    Cheap enough for production, and asked after every event in tests.
    """
    round_, settings = view.round, view.settings
    assert len(set(round_.roster)) == len(round_.roster), f"a member has two ranks: {round_.roster}"
    assert len(round_.roster) <= settings.max_workers, f"{len(round_.roster)} > max {settings.max_workers}"
    if round_.number > 0:
        assert len(round_.roster) >= settings.min_workers, f"{len(round_.roster)} < min {settings.min_workers}"
        assert round_.store_address, "a round without a store address"
        assert 0 not in round_.stale, "rank 0 must be a source"
