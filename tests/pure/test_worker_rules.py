"""What a round means for one worker."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from torchelastic.rendezvous.records import NO_ROUND, JoinRequest, Member, Round, RoundState, StateStatus
from torchelastic.rendezvous.worker_rules import (
    AfterLoss,
    Contact,
    after_loss,
    asks,
    asks_again,
    decides_alone,
    finishes,
    is_granted,
    is_over_for,
    is_replaced,
    late_start_s,
    may_go,
    wait_left_s,
)


def may_restart(exit_code: int, **known: Any) -> bool:
    return after_loss(exit_code, is_plain_group=False, restarts_left=1, **known) is AfterLoss.ONE_AGAIN


FIVE = Round(5, RoundState.RUNNING, ("a", "b"), "h:1", step=40)


def asking(known: Round | None) -> Member:
    return asks(Member("a", "h"), known, JoinRequest("h:2", 7, StateStatus.COMPLETE, True, 9.0))


def test_a_worker_asks_for_the_round_after_the_newest_that_its_agent_knows() -> None:
    assert asking(None).ready_for == 1
    assert asking(FIVE) == Member("a", "h", "h:2", 6, 7, StateStatus.COMPLETE, True, patience_s=9.0)


@pytest.mark.parametrize("state", [RoundState.BROKEN, RoundState.CLOSING])
def test_a_member_whose_round_broke_before_it_heard_of_it_asks_again(state: RoundState) -> None:
    missed = replace(FIVE, number=6, state=state)
    again = asks_again(asking(FIVE), missed)
    assert again is not None
    assert (again.ready_for, again.failed) == (7, True)
    assert asks_again(again, missed) is None, "once"


@pytest.mark.parametrize(
    "now",
    [
        replace(FIVE, number=6),
        replace(FIVE, number=6, state=RoundState.GATHERING),
        replace(FIVE, number=6, state=RoundState.BROKEN, roster=("b",)),
        replace(FIVE, state=RoundState.BROKEN),
        NO_ROUND,
    ],
)
def test_a_member_does_not_ask_again_without_need(now: Round) -> None:
    assert asks_again(asking(FIVE), now) is None


def test_a_member_that_never_asked_does_not_ask_again() -> None:
    assert asks_again(Member("a", "h"), replace(FIVE, state=RoundState.BROKEN)) is None


def test_being_done_is_said_of_the_present_round() -> None:
    assert finishes(Member("a", "h"), FIVE, 50).done == 5
    assert finishes(Member("a", "h"), None, 50).done == 1


def test_a_group_is_granted_to_those_on_its_roster_and_only_a_new_one() -> None:
    assert is_granted(FIVE, "a", after=4)
    assert is_granted(replace(FIVE, state=RoundState.GATHERING), "a", after=4)
    assert not is_granted(FIVE, "a", after=5)
    assert not is_granted(FIVE, "c", after=4)
    assert not is_granted(replace(FIVE, state=RoundState.BROKEN), "a", after=4)


def test_a_run_is_over_for_all_but_those_who_lost_the_last_step() -> None:
    closing = replace(FIVE, state=RoundState.CLOSING)
    assert is_over_for(closing, "a", step=40)
    assert not is_over_for(closing, "a", step=39)
    assert is_over_for(closing, "spare", step=0)
    assert is_over_for(replace(FIVE, state=RoundState.CLOSED), "a", step=39)
    assert not is_over_for(FIVE, "a", step=40)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (FIVE, False),
        (replace(FIVE, state=RoundState.GATHERING), False),
        (replace(FIVE, state=RoundState.BROKEN), True),
        (replace(FIVE, number=6), True),
        (replace(FIVE, number=6, state=RoundState.GATHERING), True),
        (replace(FIVE, number=4, state=RoundState.BROKEN), False),
        (replace(FIVE, roster=("a", "c")), True),  # a store that had lost its data gave the number out again
    ],
)
def test_a_group_is_replaced_when_it_broke_or_another_one_took_its_place(now: Round, *, expected: bool) -> None:
    assert is_replaced(FIVE, now) is expected


def test_a_worker_leaves_before_it_must_not_commit_and_both_before_it_can_be_replaced() -> None:
    contact = Contact.at(100.0, orphan_timeout_s=300.0)
    assert 100.0 < contact.leave_at_s < contact.commit_until_s < 400.0
    assert Contact.at(100.0, math.inf) == Contact()


@pytest.mark.parametrize(
    ("known", "may"),
    [
        (None, True),
        (NO_ROUND, True),
        (replace(FIVE, roster=("x",)), True),
        (replace(FIVE, roster=("x",), state=RoundState.BROKEN), True),
        (replace(FIVE, roster=("x",), state=RoundState.GATHERING), False),  # it may just be taken in
        (FIVE, False),
        (replace(FIVE, state=RoundState.GATHERING, leaving=("a",)), False),
        (replace(FIVE, state=RoundState.BROKEN), False),
        (replace(FIVE, state=RoundState.BROKEN, leaving=("b",)), False),
        (replace(FIVE, state=RoundState.BROKEN, leaving=("a", "b")), True),
    ],
)
def test_who_leaves_and_waits_for_a_round_goes_when_that_costs_the_others_none(known: Round | None, may: bool) -> None:
    assert may_go(replace(asking(known), leaving=True), known) == may


# --- while the store does not answer ----------------------------------------------------------------------------------

#: Of two workers of this host, and one of another.
OWN, OTHER = ("h-0-aaaaaaaa1", "h-1-aaaaaaaa2"), "g-0-bbbbbbbb1"
ALL_HERE = Round(5, RoundState.RUNNING, OWN, "h:1")
ONE_ELSEWHERE = replace(ALL_HERE, roster=(OWN[0], OTHER, OWN[1]))


def own(*steps: int, leaving: bool = True, done: int = 0) -> list[Member]:
    return [
        Member(name, "h", step=step, state_status=StateStatus.COMPLETE, leaving=leaving, done=done)
        for name, step in zip(OWN, steps, strict=False)
    ]


@pytest.mark.parametrize(
    ("known", "members", "waiting", "expected"),
    [
        (ALL_HERE, own(7, 8), (), (RoundState.GATHERING, OWN)),
        (ONE_ELSEWHERE, own(7, 8), OWN[:1], None),  # it would have to wait
        (replace(ALL_HERE, state=RoundState.GATHERING), own(7, 8), (), None),  # they have been told
        (ALL_HERE, own(7, 8), OWN, (RoundState.BROKEN, OWN[::-1])),  # the best first: it saves
        (replace(ALL_HERE, state=RoundState.BROKEN), own(7), OWN, (RoundState.BROKEN, OWN[:1])),  # the other was lost
        (ONE_ELSEWHERE, own(7, 8), OWN, (RoundState.BROKEN, (OTHER, *OWN[::-1]))),  # it waits anyway
        (ALL_HERE, [*own(7), *own(7, 8, leaving=False)[1:]], OWN, None),  # one stays
        (ALL_HERE, own(7, 8, done=5), (), (RoundState.CLOSED, ())),  # they need not wait for the run's end
        (replace(ALL_HERE, state=RoundState.CLOSED), own(7, 8, done=5), (), None),
        (replace(ALL_HERE, state=RoundState.CLOSING), own(7), OWN, None),
        (replace(ALL_HERE, roster=(OTHER,)), own(7), OWN, None),  # who is in no group goes anyway
    ],
)
def test_a_host_that_is_to_leave_and_does_not_reach_the_store_lets_its_members_go_itself(
    known: Round, members: list[Member], waiting: tuple[str, ...], expected: tuple[RoundState, tuple[str, ...]] | None
) -> None:
    told = decides_alone(known, members, waiting)
    assert (told and (told.state, told.leaving)) == expected
    if told is not None and told.state is RoundState.BROKEN:
        assert all(may_go(member, told) for member in members)


@pytest.mark.parametrize(
    ("exit_code", "has_asked", "may"),
    [
        (1, True, True),
        (-9, True, True),
        (1, False, False),  # a typo would fail again and again
        (-9, False, True),  # a signal says nothing of the script
        (-11, False, True),
    ],
)
def test_a_failed_worker_is_started_again_unless_its_script_fails_before_it_asks(
    exit_code: int, *, has_asked: bool, may: bool
) -> None:
    assert may_restart(exit_code, has_asked=has_asked, run_is_over=False) is may
    assert not may_restart(exit_code, has_asked=has_asked, run_is_over=True)


@pytest.mark.parametrize("exit_code", [1, -9])
@pytest.mark.parametrize("restarts_left", [0, 1])
def test_of_a_group_that_met_by_the_environment_all_end_with_one(exit_code: int, restarts_left: int) -> None:
    lost: dict[str, Any] = {"has_asked": False, "run_is_over": False, "restarts_left": restarts_left}
    assert after_loss(exit_code, is_plain_group=True, **lost) is AfterLoss.ALL_END
    alone = AfterLoss.ONE_AGAIN if exit_code < 0 and restarts_left else AfterLoss.NOT_RESTARTED
    assert after_loss(exit_code, is_plain_group=False, **lost) is alone


def test_a_start_is_late_by_the_measure_of_the_others_on_its_host() -> None:
    assert [late_start_s(slowest_s) for slowest_s in (0.0, 12.0, 30.0)] == [60.0, 60.0, 150.0]


def test_who_has_failed_for_good_is_not_started_again_unless_a_signal_ended_it_after_all() -> None:
    assert not may_restart(1, has_asked=True, fails_for_good=True, run_is_over=False)
    assert may_restart(-9, has_asked=True, fails_for_good=True, run_is_over=False)
    assert may_restart(1, has_asked=True, fails_for_good=False, run_is_over=False)


@pytest.mark.parametrize(
    ("since_s", "trained_until_s", "now_s", "left_s"),
    [
        (100.0, 0.0, 100.0, 60.0),
        (100.0, 0.0, 160.0, 0.0),  # nobody has trained: its own time counts
        (100.0, 50.0, 130.0, 30.0),
        (100.0, math.inf, 9000.0, 60.0),  # a spare, as long as it takes
        (100.0, 8990.0, 9000.0, 50.0),  # the others have just lost one
        (100.0, 8990.0, 9060.0, -10.0),
    ],
)
def test_the_time_of_a_spare_begins_when_the_others_stop(
    since_s: float, trained_until_s: float, now_s: float, left_s: float
) -> None:
    assert wait_left_s(since_s, trained_until_s, now_s, timeout_s=60.0) == left_s
