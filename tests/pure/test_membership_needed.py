"""Members whose step fails in a roster that has become smaller ask for as many as there were, and wait for them."""

from __future__ import annotations

from dataclasses import replace

from tests.pure.test_membership_protocol import Leader, at_step, ended, leaves, member, running
from torchelastic.rendezvous.records import Member, RoundState, decode_member, encode_member


def alone_in_need() -> Leader:
    """A leader whose round 2 had only a, of a and b; a has asked for at least two."""
    leader = running("a", "b").hear(ended("b"))
    leader.hear(at_step(leader, "a", 5))
    assert leader.round.roster == ("a",)
    return leader.hear(needs(leader, "a", 2))


def needs(leader: Leader, name: str, count: int) -> Member:
    return replace(at_step(leader, name, 5, number=leader.round.number + 1), needed=count)


def test_it_waits_for_as_many_as_it_asks_for_though_fewer_are_enough_for_the_run() -> None:
    leader = alone_in_need()
    assert (leader.round.number, leader.round.state) == (2, RoundState.BROKEN)
    assert leader.round.because == "a asked for a new round of at least 2 members"
    assert leader.wait(1e6).round.number == 2
    leader.hear(member("c", arrival=9))
    assert (leader.round.number, leader.round.roster) == (3, ("a", "c"))


def test_what_it_asks_for_is_over_with_its_next_request() -> None:
    leader = alone_in_need().hear(member("c", arrival=9)).hear(ended("c"))
    leader.hear(replace(at_step(leader, "a", 5, number=4), needed=0))
    assert leader.round.roster == ("a",)


def test_nobody_waits_for_more_than_the_run_takes() -> None:
    leader = running("a", maximum=1)
    leader.hear(needs(leader, "a", 2))
    assert leader.round.number == 2


def test_it_does_not_wait_for_one_that_has_failed_for_good() -> None:
    leader = alone_in_need()
    assert not leader.round.hopeless, "b may be started again"
    leader.hear(replace(ended("b"), gave_up=True))
    assert leader.round.hopeless
    assert leader.round.because == "b failed for good; the others are fewer than min_workers=2"
    leader.hear(member("c", arrival=9))
    assert (leader.round.hopeless, leader.round.roster) == (False, ("a", "c"))


def test_nor_for_one_of_which_that_was_known_when_the_smaller_round_began() -> None:
    leader = running("a", "b").hear(replace(ended("b"), gave_up=True))
    leader.hear(at_step(leader, "a", 5))
    assert leader.round.roster == ("a",)
    leader.hear(needs(leader, "a", 2))
    assert leader.round.hopeless
    assert leader.round.because == "b failed for good; the others are fewer than min_workers=2"


def test_it_may_leave_while_it_waits() -> None:
    leader = alone_in_need()
    leader.hear(leaves(leader, "a"))
    assert leader.round.released == {"a"}


def test_the_record_of_others_is_as_it_was() -> None:
    assert b"needed" not in encode_member(member("a"))
    wants = member("a", needed=3)
    assert decode_member("m/a", encode_member(wants), 0) == wants
