"""Groups of usable sizes only: who is chosen where not all fit, and what becomes of the others."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.few_examples import examples
from tests.pure.test_membership_protocol import Leader, at_step, done, ended, failed_for_good, member
from torchelastic.rendezvous.records import Member, RoundState, StateProgress, StateStatus
from torchelastic.rendezvous.roster_choice import choose

# --- who is chosen ---------------------------------------------------------------------------------------------------


def names(members: list[Member]) -> str:
    return " ".join(one.member_id for one in members)


def there(text: str, worse: str = "") -> list[Member]:
    """Members by names such as a0, of host a; whole at step 5, the `worse` ones fresh."""
    whole = [member(name, host=name[0], state_status=StateStatus.COMPLETE, step=5) for name in text.split()]
    return [Member(one.member_id, one.host) if one.member_id in worse.split() else one for one in whole]


@pytest.mark.parametrize(
    ("members", "size", "multiple_of", "expected"),
    [
        ("a0 b0 b1", 2, 2, "b0 b1"),  # a has lost one: it would be half a replica
        ("a0 a1 b0", 2, 2, "a0 a1"),
        ("a0 a1 a2 b0 b1 b2", 4, 2, "a0 a1 b0 b1"),
        ("a0 a1 a2 b0", 4, 2, "a0 a1 a2 b0"),
        ("a0 b0 c0", 2, 2, "a0 b0"),  # hosts smaller than the multiple: the first ones
        ("a0 b0 b1 c0", 4, 2, "a0 b0 b1 c0"),
        ("c0 a0 a1 b0 b1 d0 d1", 4, 4, "a0 a1 b0 b1"),  # c is left out: with it one of b's or d's would have to be
        ("a0 a1 a2 b0 b1 b2 c0 c1 c2", 6, 3, "a0 a1 a2 b0 b1 b2"),
        ("a0 a1 a2 b0 b1 b2", 4, 4, "a0 a1 a2 b0"),  # none fill it: one host in part
        ("a0 a1 b0 b1", 3, 1, "a0 a1 b0"),
        ("a0 a1 a2 a3", 2, 2, "a0 a1"),
    ],
)
def test_whole_hosts_come_first_and_then_the_order(members: str, size: int, multiple_of: int, expected: str) -> None:
    assert names(choose(there(members), size, multiple_of)) == expected


@pytest.mark.parametrize(
    ("members", "last", "size", "expected"),
    [
        ("a0 a2 a3", "a0 a1 a2 a3", 2, "a2 a3"),  # a0 and a2 would hold the same half of a sharded model
        ("a0 a2 b0 b1 b2", "a0 a1 a2 b0 b1 b2", 4, "a2 b0 b1 b2"),  # neighbours of two hosts
        ("a0 a3", "a0 a1 a2 a3", 2, "a0 a3"),
        ("a0 a2 a3 a4", "a0 a1 a2 a3", 4, "a0 a2 a3 a4"),
    ],
)
def test_neighbours_of_the_last_roster_stay_together(members: str, last: str, size: int, expected: str) -> None:
    assert names(choose(there(members), size, 2, last.split())) == expected


@pytest.mark.parametrize(
    ("members", "fresh", "size", "multiple_of", "expected"),
    [
        ("a0 b0 b1", "b0 b1", 2, 2, "a0 b0"),  # nobody of the whole host has anything
        ("a0 b0 b1 a1", "a1", 2, 2, "b0 b1"),  # survivors before a newcomer that makes its host whole
        ("a0 a1 b0 b1", "a0 a1", 2, 2, "b0 b1"),
        ("a0 b0 c0", "a0 b0", 2, 2, "a0 c0"),
        ("a0 b0", "a0", 1, 1, "b0"),
        ("a0 c0 c1 d0 d1", "c0 c1 d0", 2, 2, "d0 d1"),  # of two such, the one whose host is whole
        ("a0 b0 b1 b2 c0", "b0 b1 b2 c0", 2, 2, "a0 c0"),  # and beside it nobody of a host that would be broken for it
    ],
)
def test_one_with_the_best_state_is_in(members: str, fresh: str, size: int, multiple_of: int, expected: str) -> None:
    assert names(choose(there(members, fresh), size, multiple_of)) == expected


@st.composite
def choices(draw: st.DrawFn) -> tuple[list[Member], int, int]:
    hosts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=16))
    members = [
        Member(f"m{n}", f"h{host}", step=draw(st.integers(0, 2)), state_status=draw(st.sampled_from(StateStatus)))
        for n, host in enumerate(hosts)
    ]
    multiple_of = draw(st.integers(1, len(members)))
    return members, draw(st.integers(1, len(members) // multiple_of)) * multiple_of, multiple_of


@settings(max_examples=examples(400), deadline=None)
@given(choices())
def test_a_choice_has_its_size_its_order_and_the_best_state_and_breaks_no_host_without_need(
    given_: tuple[list[Member], int, int],
) -> None:
    members, size, multiple_of = given_
    chosen = choose(members, size, multiple_of)
    assert len(chosen) == size
    assert [one for one in members if one in chosen] == chosen, "in their order, each once"
    best = max(one.progress for one in members)
    assert any(one.progress == best for one in chosen)
    assert choose(members, size, multiple_of) == chosen
    assert choose(chosen, size, multiple_of) == chosen, "stable: those who were chosen stay"
    there_by_host, taken = Counter(one.host for one in members), Counter(one.host for one in chosen)
    broken = [host for host, count in taken.items() if count % multiple_of and count < there_by_host[host]]
    assert len(broken) <= 1, f"taken in part: {broken}"
    if multiple_of == 1:
        first = members[:size]
        assert chosen == first or not any(one.progress == best for one in first)


@settings(max_examples=examples(200), deadline=None)
@given(choices())
def test_no_choice_of_equals_breaks_fewer_hosts(given_: tuple[list[Member], int, int]) -> None:
    """Where all have the same state: whether whole hosts, or parts of `multiple_of`, can make the size up."""
    members, size, multiple_of = given_
    equal = [dataclasses.replace(one, step=0, state_status=StateStatus.INITIAL) for one in members]
    there_by_host = Counter(one.host for one in equal)
    wholes = sum(count // multiple_of for count in there_by_host.values())
    sums = {0}
    for count in there_by_host.values():
        sums |= {known + count % multiple_of for known in sums}
    taken = Counter(one.host for one in choose(equal, size, multiple_of))
    is_broken = any(count % multiple_of and count < there_by_host[host] for host, count in taken.items())
    room = max(0, size - wholes * multiple_of)
    assert is_broken == (room not in sums)


# --- the rounds ------------------------------------------------------------------------------------------------------


def of_pairs(text: str, minimum: int = 2, maximum: int = 8, multiple_of: int = 2) -> Leader:
    """A leader whose first round runs, with members by names such as a0, of host a, in the order of their ranks."""
    leader = Leader(minimum, maximum)
    leader.view = replace(leader.view, settings=replace(leader.view.settings, multiple_of=multiple_of))
    leader.hear(*(member(name, host=name[0], arrival=n + 1) for n, name in enumerate(text.split())))
    return leader.wait(30.0)


def asked(leader: Leader, text: str, step: int = 5) -> Leader:
    number = leader.round.number + 1
    return leader.hear(*(at_step(leader, name, step, number=number) for name in text.split()))


def roster(leader: Leader) -> str:
    return " ".join(leader.round.roster)


def test_the_first_round_takes_the_largest_multiple_and_the_last_call_runs_below_the_largest_size() -> None:
    leader = of_pairs("a0 a1 b0 b1 c0")
    assert (leader.now_s, roster(leader)) == (30.0, "a0 a1 b0 b1")
    leader = of_pairs("a0 a1 b0 b1", maximum=5)
    assert leader.round.number == 1
    leader = Leader(2, 5)
    leader.view = replace(leader.view, settings=replace(leader.view.settings, multiple_of=2))
    leader.hear(*(member(f"m{n}", arrival=n) for n in range(4)))
    assert len(leader.round.roster) == 4, "no larger one is possible: nobody waits for the last call"


@pytest.mark.parametrize(("here", "size"), [(1, 0), (2, 0), (3, 0), (4, 4), (5, 4), (7, 6), (9, 8)])
def test_a_group_has_a_multiple_between_the_minimum_and_the_maximum_or_there_is_none(here: int, size: int) -> None:
    leader = of_pairs(" ".join(f"h{n}" for n in range(here)), minimum=3, maximum=9)
    assert len(leader.round.roster) == size


def test_after_a_loss_the_survivor_that_does_not_fit_waits_and_comes_back_with_a_partner() -> None:
    leader = of_pairs("a0 a1 b0 b1").hear(ended("a1"))
    asked(leader, "a0 b0 b1")
    assert (roster(leader), leader.round.state) == ("b0 b1", RoundState.RUNNING)
    assert (leader.round.spared, leader.round.evicted, leader.round.stale) == (("a0",), (), ())
    leader.wait(1000.0)
    assert (leader.round.number, leader.round.state) == (2, RoundState.RUNNING), "it disturbs nobody"
    leader.hear(member("a2", host="a", arrival=20)).wait(0.1)
    assert (leader.round.state, leader.round.waiting) == (RoundState.GATHERING, 2)
    asked(leader, "b0 b1", step=9)
    assert roster(leader) == "b0 b1 a0 a2"
    assert (leader.round.step, leader.round.stale, leader.round.spared) == (9, (2, 3), ())


def test_too_few_for_one_group_wait_and_are_hopeless_where_nobody_comes_back() -> None:
    leader = of_pairs("a0 a1", minimum=1).hear(ended("a1"))
    asked(leader, "a0").wait(1000.0)
    assert (leader.round.number, leader.round.state, leader.round.hopeless) == (1, RoundState.BROKEN, False)
    leader.hear(failed_for_good("a1"))
    assert leader.round.hopeless
    assert leader.round.because == "a1 failed for good; the others are fewer than min_workers=1 with multiple_of=2"
    leader.hear(member("c0", arrival=9))
    assert (leader.round.hopeless, roster(leader)) == (False, "a0 c0")


def test_one_of_four_that_leaves_costs_its_partner_the_place_and_one_of_two_is_let_go() -> None:
    leader = of_pairs("a0 a1 b0 b1", minimum=1)
    leader.hear(replace(leader.view.members["a1"], leaving=True))
    assert (leader.round.state, leader.round.waiting) == (RoundState.GATHERING, 0)
    leader.hear(*(at_step(leader, name, 5, failed=False) for name in ("a0", "a1", "b0", "b1")))
    assert (roster(leader), leader.round.spared) == ("b0 b1", ("a0",))
    leader.hear(gone=("a0", "a1"))
    leader.hear(replace(leader.view.members["b0"], leaving=True))
    leader.hear(*(at_step(leader, name, 5, failed=False, number=3) for name in ("b0", "b1")))
    assert (leader.round.state, leader.round.leaving) == (RoundState.BROKEN, ("b0",))
    assert leader.round.because == "b0 left; fewer than min_workers=1 with multiple_of=2 are here"


# --- the state of a spare, which gets old ----------------------------------------------------------------------------


def with_a_spare() -> Leader:
    """Round 2 runs with b0 and b1 from step 5 on; a0 has waited since."""
    return asked(of_pairs("a0 a1 b0 b1").hear(ended("a1")), "a0 b0 b1")


def test_the_old_state_of_a_spare_is_no_source_beside_a_newer_one_that_was_not_committed() -> None:
    leader = with_a_spare().hear(member("a2", host="a", arrival=20), ended("b1"))
    leader.hear(replace(at_step(leader, "b0", 700, number=3), state_status=StateStatus.UNCOMMITTED))
    assert leader.round.roster[0] == "b0"
    assert (leader.round.step, leader.round.state_status) == (701, StateStatus.UNCOMMITTED)


def test_the_old_state_of_a_spare_is_the_best_there_is_but_a_checkpoint_is_asked_for() -> None:
    leader = with_a_spare().hear(ended("b0"), ended("b1"), member("b2", host="b", arrival=20))
    leader.wait(30.0)
    assert (roster(leader), leader.round.step, leader.round.state_status) == ("a0 b2", 5, StateStatus.INITIAL)
    leader = with_a_spare().hear(ended("b0"))
    leader.hear(at_step(leader, "b1", 6, number=3))
    assert (roster(leader), leader.round.state_status) == ("b1 a0", StateStatus.COMPLETE), "b1 was there all the time"


def test_what_members_tell_each_other_is_ordered_alike() -> None:
    all_progress = [
        StateProgress.of(StateStatus.PARTIAL, 900),
        StateProgress.of(StateStatus.INITIAL, 0),
        StateProgress.of(StateStatus.COMPLETE, 5),
        StateProgress.of(StateStatus.UNCOMMITTED, 700),
        StateProgress.of(StateStatus.COMPLETE, 700),
    ]
    assert all(one < other for one, other in itertools.pairwise(all_progress))


def test_who_leaves_is_kept_for_its_state_only_where_nobody_who_waits_has_a_better_one() -> None:
    for step, expected in ((17, "c0"), (3, "a0 c0")):
        leader = of_pairs("a0 a1", minimum=1, multiple_of=1)
        leader.hear(ended("a1"), member("c0", host="c", arrival=9, step=step, state_status=StateStatus.COMPLETE))
        leader.hear(replace(at_step(leader, "a0", 4), leaving=True))
        assert roster(leader) == expected


# --- the end ---------------------------------------------------------------------------------------------------------


def test_at_the_end_who_is_behind_is_brought_level_and_one_that_is_done_stays_out_of_it() -> None:
    leader = of_pairs("a0 a1 b0 b1").hear(ended("b1"))
    leader.hear(done(leader, "a0", 40), done(leader, "a1", 40))
    leader.hear(at_step(leader, "b0", 39))
    assert (leader.round.number, roster(leader), leader.round.stale) == (2, "a0 b0", (1,))
    leader.hear(member("c0", host="c", arrival=20)).wait(100.0)
    assert leader.round.state is RoundState.RUNNING, "a1 has finished: it is no partner for c0"
    leader.hear(done(leader, "a0", 40), done(leader, "b0", 40))
    assert leader.view.round.state == RoundState.CLOSED
