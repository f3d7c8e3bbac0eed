"""The membership rules, one at a time: a view, an event, a time; what is decided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.invariants import check_invariants
from torchelastic.rendezvous.protocol import Publish, Wake, advance
from torchelastic.rendezvous.records import Member, Round, RoundState, StateStatus, rank_members
from torchelastic.rendezvous.view import MembersChanged, RoundPublished, Settings, Tick, View


def member(name: str, *, host: str = "h", ready_for: int = 1, arrival: int = 0, **fields: object) -> Member:
    base = Member(name, host, store_address=f"{host}:1{name}", ready_for=ready_for, arrival=arrival)
    return replace(base, **fields)  # type: ignore[arg-type]  # a dict of fields


class Leader:
    """Drives the protocol as an agent does, with a clock of its own."""

    def __init__(self, minimum: int, maximum: int, last_call_s: float = 30.0) -> None:
        self.now_s = 0.0
        self.view = View(Settings(minimum, maximum, last_call_s=last_call_s, admission_delay_s=0.1))
        self.wake_at_s: float | None = None

    def hear(self, *present: Member, gone: tuple[str, ...] = ()) -> Leader:
        self._feed(MembersChanged(present, gone))
        return self

    def wait(self, seconds: float) -> Leader:
        self.now_s += seconds
        self._feed(Tick())
        return self

    def _feed(self, event: MembersChanged | Tick) -> None:
        self.view, actions = advance(self.view, event, self.now_s)
        self.wake_at_s = None
        while actions:
            (action,) = actions
            if isinstance(action, Wake):
                self.wake_at_s = action.at_s
                return
            assert isinstance(action, Publish)
            forgotten = action.forgotten
            self.view, actions = advance(self.view, RoundPublished(action.round), self.now_s)
            check_invariants(self.view)
            if forgotten and not actions:  # what was cleared away with it is seen to go
                self.view, actions = advance(self.view, MembersChanged(gone=forgotten), self.now_s)

    @property
    def round(self) -> Round:
        return self.view.round


def running(*names: str, minimum: int = 1, maximum: int = 4) -> Leader:
    """A leader whose round 1 runs with these members, ranks in this order, all whole at step 5."""
    leader = Leader(minimum, maximum)
    leader.hear(*(member(name, arrival=number + 1) for number, name in enumerate(names)))
    leader.wait(30.0)
    assert leader.round.roster == names
    return leader


def at_step(leader: Leader, name: str, step: int, *, failed: bool = True, number: int = 2) -> Member:
    return replace(
        leader.view.members[name], ready_for=number, step=step, state_status=StateStatus.COMPLETE, failed=failed
    )


def ended(name: str) -> Member:
    """The record of a member whose process is known to have ended."""
    return member(name, departed=True)


def test_the_first_round_closes_at_once_when_the_maximum_is_there() -> None:
    leader = Leader(2, 3).hear(member("a", arrival=1), member("b", arrival=2))
    assert leader.round.number == 0
    leader.hear(member("c", arrival=3))
    assert (leader.round.number, leader.round.state, leader.round.roster) == (1, RoundState.RUNNING, ("a", "b", "c"))


def test_between_minimum_and_maximum_the_last_call_runs_from_the_latest_arrival() -> None:
    leader = Leader(2, 4, last_call_s=10.0).hear(member("a", arrival=1), member("b", arrival=2))
    assert leader.wake_at_s == 10.0
    leader.wait(9.0).hear(member("c", arrival=3)).wait(9.0)
    assert leader.round.number == 0
    leader.wait(1.0)
    assert leader.round.roster == ("a", "b", "c")


def test_below_the_minimum_nothing_is_formed_however_long_it_takes() -> None:
    leader = Leader(2, 4).hear(member("a")).wait(1e6)
    assert leader.round.number == 0


def test_a_lost_member_breaks_the_round_at_once() -> None:
    leader = running("a", "b", "c").hear(gone=("b",))
    assert (leader.round.number, leader.round.state) == (1, RoundState.BROKEN)
    assert "b" in leader.round.because


def test_survivors_do_not_wait_for_the_last_call_and_keep_their_order() -> None:
    leader = running("a", "b", "c").hear(gone=("a",))
    leader.hear(at_step(leader, "c", 5))
    assert leader.round.number == 1, "b lives and is waited for"
    leader.hear(at_step(leader, "b", 5))
    assert leader.round.roster == ("b", "c")
    assert (leader.round.number, leader.round.stale) == (2, ())


def test_the_member_with_the_most_committed_steps_becomes_rank_0_and_the_others_are_stale() -> None:
    leader = running("a", "b", "c").hear(gone=("a",))
    leader.hear(at_step(leader, "b", 4), at_step(leader, "c", 5))
    assert leader.round.roster == ("c", "b")
    assert (leader.round.step, leader.round.stale) == (5, (1,))


def test_a_newcomer_never_becomes_the_source_while_a_survivor_has_the_state() -> None:
    leader = running("a", "b").hear(gone=("a",))
    leader.hear(member("new", arrival=0), at_step(leader, "b", 3))
    assert leader.round.roster[0] == "b"
    assert leader.round.stale == (1,)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (StateStatus.COMPLETE, StateStatus.UNCOMMITTED),
        (StateStatus.UNCOMMITTED, StateStatus.INITIAL),
        (StateStatus.INITIAL, StateStatus.PARTIAL),
    ],
)
def test_state_statuses_rank_before_steps(better: StateStatus, worse: StateStatus) -> None:
    ranked = rank_members([member("x", state_status=worse, step=9), member("y", state_status=better, step=8)])
    assert [m.member_id for m in ranked] == ["y", "x"]


def test_where_all_had_stepped_uncommitted_the_step_counts_as_done() -> None:
    leader = running("a", "b").hear(gone=("a",))
    leader.hear(replace(at_step(leader, "b", 7), state_status=StateStatus.UNCOMMITTED))
    assert (leader.round.step, leader.round.state_status) == (8, StateStatus.UNCOMMITTED)


def test_ranks_of_one_host_are_adjacent() -> None:
    members = [member(name, host=host) for name, host in (("a", "h1"), ("b", "h2"), ("c", "h1"), ("d", "h2"))]
    assert [m.member_id for m in rank_members(members)] == ["a", "c", "b", "d"]


def test_newcomers_are_admitted_together_after_a_short_delay() -> None:
    leader = running("a", "b").hear(member("c", arrival=7))
    assert leader.round.state is RoundState.RUNNING
    leader.wait(0.05).hear(member("d", arrival=8)).wait(0.05)
    assert leader.round.state is RoundState.RUNNING
    leader.wait(0.05)
    assert (leader.round.state, leader.round.waiting) == (RoundState.GATHERING, 2)


def test_a_trickle_of_newcomers_does_not_put_the_first_off_for_ever() -> None:
    leader = running("a", maximum=100)
    for number in range(14):
        leader.hear(member(f"n{number}", arrival=10 + number)).wait(0.09)
    assert leader.round.state is RoundState.GATHERING


def test_members_that_stop_for_newcomers_form_the_next_round_without_breaking_this_one() -> None:
    leader = running("a", "b").hear(member("c", arrival=9)).wait(0.2)
    leader.hear(at_step(leader, "a", 5, failed=False))
    assert leader.round.state is RoundState.GATHERING
    leader.hear(at_step(leader, "b", 5, failed=False))
    assert leader.round.roster == ("a", "b", "c")


def test_a_failure_while_gathering_breaks_the_round_so_that_all_hear_of_it() -> None:
    leader = running("a", "b").hear(member("c", arrival=9)).wait(0.2)
    leader.hear(at_step(leader, "a", 5, failed=True))
    assert leader.round.state is RoundState.BROKEN


def test_the_next_round_says_whose_processes_have_ended_and_not_who_is_only_silent() -> None:
    leader = running("a", "b", "c")
    leader.hear(ended("c"))
    leader.hear(gone=("b",))
    leader.hear(at_step(leader, "a", 5))
    assert (leader.round.number, leader.round.roster) == (2, ("a",))
    assert leader.round.lost == ("c",)


def test_spares_over_the_maximum_raise_no_re_form_and_replace_the_lost() -> None:
    leader = running("a", "b", maximum=2).hear(member("spare", arrival=9)).wait(60.0)
    assert (leader.round.state, leader.round.waiting) == (RoundState.RUNNING, 0)
    leader.hear(gone=("a",)).hear(at_step(leader, "b", 5))
    assert leader.round.roster == ("b", "spare")


def test_a_live_member_that_never_gets_ready_is_left_out_and_named() -> None:
    leader = running("a", "b", "c").hear(gone=("c",))
    leader.hear(at_step(leader, "a", 5))
    assert leader.wake_at_s == leader.now_s + 15.0
    leader.wait(14.9)
    assert leader.round.number == 1
    leader.wait(0.1)
    assert (leader.round.roster, leader.round.evicted) == (("a",), ("b",))


def test_an_evicted_member_is_no_newcomer_until_it_asks_again() -> None:
    leader = running("a", "b", "c").hear(gone=("c",))
    leader.hear(at_step(leader, "a", 5)).wait(15.0).wait(60.0)
    assert (leader.round.number, leader.round.roster, leader.round.evicted) == (2, ("a",), ("b",))
    leader.hear(member("d", arrival=30)).wait(1.0).hear(at_step(leader, "a", 6, failed=False, number=3))
    assert (leader.round.number, leader.round.roster, leader.round.evicted) == (3, ("a", "d"), ("b",))
    leader.hear(at_step(leader, "b", 5, number=4)).wait(1.0)
    assert leader.round.state is RoundState.GATHERING


def test_too_few_without_the_hung_one_still_has_it_ended() -> None:
    leader = running("a", "b", "c", minimum=3)
    leader.hear(gone=("c",)).hear(at_step(leader, "a", 5)).wait(15.0)
    assert (leader.round.state, leader.round.evicted) == (RoundState.BROKEN, ("b",))
    leader.hear(gone=("b",)).hear(member("b2", arrival=20), member("c2", arrival=21))
    assert leader.round.roster == ("a", "b2", "c2")


def test_newcomers_form_afresh_when_all_of_the_last_roster_are_known_to_have_ended() -> None:
    leader = running("x", "y").hear(ended("x"), ended("y")).hear(member("a", arrival=50))
    assert leader.round.state is RoundState.BROKEN
    leader.wait(30.0)
    assert (leader.round.number, leader.round.roster) == (2, ("a",))


def done(leader: Leader, name: str, step: int) -> Member:
    number = max(1, leader.round.number)
    return replace(leader.view.members[name], done=number, step=step, state_status=StateStatus.COMPLETE)


def test_the_first_that_is_done_closes_the_run_when_all_are() -> None:
    leader = running("a", "b")
    leader.hear(done(leader, "a", 40))
    assert (leader.round.state, leader.round.step) == (RoundState.CLOSING, 40)
    leader.hear(done(leader, "b", 40))
    assert leader.round.state is RoundState.CLOSED


def test_a_closed_run_stays_closed_whoever_comes() -> None:
    leader = running("a")
    leader.hear(done(leader, "a", 40)).hear(member("late", arrival=99)).wait(100.0).hear(gone=("a",))
    assert leader.round.state is RoundState.CLOSED


def test_who_dies_while_the_run_closes_is_not_waited_for() -> None:
    leader = running("a", "b")
    leader.hear(done(leader, "a", 40)).hear(gone=("b",))
    assert leader.round.state is RoundState.CLOSED


def test_who_lost_the_last_step_is_brought_level_before_the_run_is_closed() -> None:
    leader = running("a", "b", "c")
    leader.hear(done(leader, "a", 40), gone=("c",))
    leader.hear(at_step(leader, "b", 39))
    assert (leader.round.number, leader.round.roster, leader.round.stale) == (2, ("a", "b"), (1,))
    assert leader.round.state is not RoundState.CLOSING, "being done was for round 1"
    leader.hear(done(leader, "a", 40), done(leader, "b", 40))
    assert leader.view.round.state == RoundState.CLOSED


def test_too_few_to_train_on_are_enough_to_hand_the_last_step_to_who_lost_it() -> None:
    leader = running("a", "b", "c", minimum=3)
    leader.hear(done(leader, "b", 40), ended("c"))
    leader.hear(at_step(leader, "a", 39))
    assert (leader.round.number, leader.round.roster) == (2, ("b", "a")), "else all wait, until they give up"
    leader.hear(done(leader, "a", 40), done(leader, "b", 40))
    assert leader.round.state is RoundState.CLOSED


def test_who_only_rolled_back_a_step_that_nobody_finished_is_not_behind() -> None:
    leader = running("a", "b")
    leader.hear(done(leader, "a", 40)).hear(at_step(leader, "b", 40))
    assert (leader.round.number, leader.round.state) == (1, RoundState.CLOSING)


def test_a_run_can_be_closed_before_it_has_begun() -> None:
    leader = Leader(2, 2).hear(replace(member("a"), done=1))
    assert leader.round.state is RoundState.CLOSED


def test_newcomers_wait_for_a_group_that_may_be_cut_off_and_still_train() -> None:
    leader = running("x", "y", maximum=2).hear(gone=("x", "y"))
    leader.hear(member("a", arrival=50), member("b", arrival=51))
    assert "orphan_timeout=300 s" in leader.round.because
    assert leader.wake_at_s == leader.now_s + 300.0
    leader.wait(299.0)
    assert leader.round.number == 1
    leader.wait(1.0)
    assert leader.round.roster == ("a", "b")


def test_one_member_that_is_known_to_have_ended_is_enough_to_replace_a_silent_group_at_once() -> None:
    leader = running("x", "y", maximum=2).hear(ended("x"), gone=("y",))
    leader.hear(member("a", arrival=50), member("b", arrival=51))
    assert leader.round.roster == ("a", "b"), "y cannot commit a step without x"


def test_where_all_that_live_hang_and_somebody_could_take_over_they_are_ended_after_their_own_patience() -> None:
    leader = running("x", "y").hear(ended("y"))
    leader.wait(100.0)
    assert leader.round.number == 1, "nobody waits for x"
    leader = running("x", "y").hear(ended("y")).hear(member("y2", arrival=50))
    assert leader.wake_at_s == leader.now_s + 15.0
    leader.wait(15.0)
    assert (leader.round.roster, leader.round.evicted) == (("y2",), ("x",))


def test_a_group_that_may_train_for_ever_without_the_store_is_never_replaced() -> None:
    leader = running("x")
    leader.view = replace(leader.view, settings=replace(leader.view.settings, orphan_timeout_s=float("inf")))
    leader.hear(gone=("x",)).hear(member("a", arrival=50)).wait(1e9)
    assert (leader.round.number, leader.wake_at_s) == (1, None)


def test_one_member_that_has_left_the_last_group_is_enough_to_go_on_at_once() -> None:
    leader = running("x", "y", "z").hear(gone=("y", "z"))
    leader.hear(at_step(leader, "x", 5))
    assert leader.round.roster == ("x",), "the others cannot commit a step without x"


def test_what_is_known_of_the_dead_survives_a_change_of_the_leader() -> None:
    before = running("x", "y", maximum=2).hear(ended("x"))
    assert before.round.departed == ("x",)
    leader = Leader(1, 2)
    leader.view, _ = advance(leader.view, RoundPublished(before.round), 0.0)
    leader.hear(ended("y")).hear(member("a", arrival=50), member("b", arrival=51))
    assert leader.round.roster == ("a", "b")


def test_tombstones_are_cleared_away_one_round_later_and_with_the_end() -> None:
    leader = running("x", "y").hear(replace(ended("x"), gave_up=True))
    leader.hear(at_step(leader, "y", 5))
    assert (leader.round.number, leader.view.gave_up) == (2, frozenset({"x"})), "somebody in round 2 may wait for x"
    leader.hear(at_step(leader, "y", 6, number=3))
    assert (leader.round.number, leader.view.tombstones, leader.view.gave_up) == (3, frozenset(), frozenset())
    leader = running("x").hear(ended("old"))
    leader.view, actions = advance(leader.view, MembersChanged((done(leader, "x", 9),)), leader.now_s)
    assert isinstance(actions[0], Publish)
    _, actions = advance(leader.view, RoundPublished(actions[0].round), leader.now_s)
    assert isinstance(actions[0], Publish)
    assert (actions[0].round.state, actions[0].forgotten) == (RoundState.CLOSED, ("old",))


def test_a_round_that_was_put_back_proves_nothing_about_who_is_missing_for_one_time_to_live() -> None:
    leader = Leader(1, 4)
    leader.hear(member("x"), member("newcomer", arrival=3))
    restored = replace(running("x", "y").round, restored=True, edition=9)
    leader.view, _ = advance(leader.view, RoundPublished(restored), leader.now_s)
    leader.wait(9.9)
    assert (leader.round.state, leader.wake_at_s) == (RoundState.RUNNING, 10.0), "neither broken nor stopped"
    leader.wait(0.2)
    assert (leader.round.state, leader.round.edition, leader.round.restored) == (RoundState.BROKEN, 10, False)


def test_a_leader_whose_own_lease_was_lost_takes_nobody_for_lost_before_they_could_come_back() -> None:
    leader = Leader(1, 4)
    leader.hear(member("x"))
    event = RoundPublished(running("x", "y").round, proves_no_loss=True)
    leader.view, _ = advance(leader.view, event, leader.now_s)
    leader.wait(9.9)
    assert (leader.round.state, leader.wake_at_s) == (RoundState.RUNNING, 10.0)
    leader.wait(0.2)
    assert leader.round.state is RoundState.BROKEN


def test_a_member_that_is_known_to_have_ended_is_not_waited_for_where_others_may_only_be_silent() -> None:
    leader = Leader(1, 4)
    leader.hear(member("x"), member("y"))
    event = RoundPublished(running("x", "y", "z").round, proves_no_loss=True)
    leader.view, _ = advance(leader.view, event, leader.now_s)
    leader.wait(1.0)
    assert leader.round.state is RoundState.RUNNING, "z may come back"
    leader.hear(ended("y"))
    assert (leader.round.state, leader.round.because) == (RoundState.BROKEN, "lost y")
    leader.hear(at_step(leader, "x", 5))
    assert leader.round.number == 1, "z may still come back"
    leader.wait(9.0)
    assert leader.round.roster == ("x",)


def test_members_that_register_again_in_time_are_not_lost() -> None:
    leader = Leader(1, 2)
    leader.hear(member("x"))
    restored = replace(running("x", "y").round, restored=True)
    leader.view, _ = advance(leader.view, RoundPublished(restored), leader.now_s)
    leader.hear(member("y")).wait(20.0)
    assert (leader.round.number, leader.round.state) == (1, RoundState.RUNNING)


def test_a_text_for_people_does_not_list_thousands_of_names() -> None:
    names = tuple(f"m{number:05d}" for number in range(5000))
    leader = running(*names, maximum=5000).hear(gone=names[10:])
    assert "m00010, m00011, m00012 and 4987 more" in leader.round.because


# --- leaving ---------------------------------------------------------------------------------------------------------


def failed_for_good(name: str) -> Member:
    """The record of a member that has ended, and that its host does not start again."""
    return replace(ended(name), gave_up=True)


def test_who_waits_for_members_that_failed_for_good_is_told_as_soon_as_too_few_are_left() -> None:
    leader = running("a", "b", "c", minimum=2).hear(ended("b"), ended("c"))
    leader.hear(at_step(leader, "a", 5))
    assert not leader.round.hopeless, "they may be started again"
    leader.hear(failed_for_good("b"))
    assert not leader.round.hopeless, "c may come back, and a and c are enough"
    leader.hear(failed_for_good("c"))
    assert leader.round.hopeless
    assert leader.round.because == "b, c failed for good; the others are fewer than min_workers=2"
    edition = leader.round.edition
    assert leader.wait(100.0).round.edition == edition, "said once"


def test_enough_that_are_left_go_on_without_those_that_failed_for_good() -> None:
    leader = running("a", "b", "c", minimum=2).hear(failed_for_good("c"))
    leader.hear(at_step(leader, "a", 5), at_step(leader, "b", 5))
    assert (leader.round.roster, leader.round.hopeless) == (("a", "b"), False)


def test_a_host_that_is_only_silent_may_come_back_however_many_have_failed_for_good() -> None:
    leader = running("a", "b", "c", minimum=2)
    leader.hear(failed_for_good("c"), gone=("b",))
    leader.hear(at_step(leader, "a", 5))
    assert not leader.wait(60.0).round.hopeless


def test_there_is_hope_again_when_others_come_in_time() -> None:
    leader = running("a", "b", minimum=2).hear(failed_for_good("b"))
    assert leader.round.hopeless, "whether a has asked for the next round or not"
    leader.hear(member("d", arrival=9))
    assert (leader.round.hopeless, leader.round.because) == (False, "more workers have come")
    leader.hear(at_step(leader, "a", 5))
    assert (leader.round.roster, leader.round.hopeless) == (("a", "d"), False)


def test_nobody_gives_up_before_waiting_workers_could_register_again_after_all_leases_were_lost() -> None:
    leader = Leader(2, 4)
    leader.hear(at_step(running("x", "y"), "x", 5))
    event = RoundPublished(replace(running("x", "y").round, state=RoundState.BROKEN), proves_no_loss=True)
    leader.view, _ = advance(leader.view, event, leader.now_s)
    leader.hear(failed_for_good("y"))
    assert not leader.wait(9.9).round.hopeless, "a worker that waited for a place may register again"
    leader.hear(member("w", arrival=9)).wait(1.0)
    assert (leader.round.roster, leader.round.hopeless) == (("x", "w"), False)


def test_who_was_started_again_counts_once_where_the_others_failed_for_good() -> None:
    first, second = "h-0-aaaaaaaa1", "h-1-aaaaaaaa2"
    leader = running(first, second, minimum=2).hear(ended(first), ended(second))
    leader.hear(member("h-0-aaaaaaaa3", arrival=8))
    assert not leader.round.hopeless, "the second one may be started again, too"
    leader.hear(failed_for_good(second))
    assert leader.round.hopeless, "it would wait for itself"
    leader.hear(member("i-0-bbbbbbbb1", arrival=9)).wait(30.0)
    assert (leader.round.roster, leader.round.hopeless) == (("h-0-aaaaaaaa3", "i-0-bbbbbbbb1"), False)


def test_newcomers_of_another_launcher_wait_for_more_where_all_failed_for_good() -> None:
    leader = running("h-0-aaaaaaaa1", "h-1-aaaaaaaa2", minimum=2)
    leader.hear(failed_for_good("h-0-aaaaaaaa1"), failed_for_good("h-1-aaaaaaaa2"))
    leader.hear(member("h-0-cccccccc1", arrival=8))
    assert not leader.wait(100.0).round.hopeless


def test_who_leaves_a_hopeless_round_is_let_go() -> None:
    leader = running("a", "b", "c", minimum=3).hear(failed_for_good("c"))
    leader.hear(at_step(leader, "a", 5), at_step(leader, "b", 5))
    assert leader.round.hopeless
    for name in ("a", "b"):
        leader.hear(leaves(leader, name))
        assert name in leader.round.leaving
        assert leader.round.hopeless, "the other one is still to hear of it"
        edition = leader.round.edition
        assert leader.wait(100.0).round.edition == edition, "and the two rules do not undo each other"


def leaves(leader: Leader, name: str) -> Member:
    return replace(leader.view.members[name], leaving=True)


def stop_in_order(leader: Leader, *names: str) -> Leader:
    """These members stop at the agreed step, number 6, and ask for the next round."""
    number = leader.round.number + 1
    return leader.hear(*(at_step(leader, name, 6, failed=False, number=number) for name in names))


def test_a_member_that_wants_to_leave_is_waited_for_and_left_out_of_the_next_round() -> None:
    leader = running("a", "b", "c")
    leader.hear(leaves(leader, "b"))
    assert (leader.round.state, leader.round.leaving) == (RoundState.GATHERING, ("b",))
    assert "b asked to leave" in leader.round.because
    stop_in_order(leader, "a", "c")
    assert leader.round.number == 1, "b has yet to reach the step"
    stop_in_order(leader, "b")
    assert (leader.round.number, leader.round.roster, leader.round.leaving) == (2, ("a", "c"), ())
    leader.hear(ended("b"))
    assert leader.round.state is RoundState.RUNNING


def test_the_first_rank_may_leave_too() -> None:
    leader = running("a", "b", "c")
    leader.hear(leaves(leader, "a"))
    stop_in_order(leader, "a", "b", "c")
    assert (leader.round.roster, leader.round.step, leader.round.stale) == (("b", "c"), 6, ())


def test_a_second_one_that_wants_to_leave_leaves_at_the_same_step() -> None:
    leader = running("a", "b", "c")
    leader.hear(leaves(leader, "b")).hear(leaves(leader, "a"))
    assert (leader.round.state, leader.round.leaving) == (RoundState.GATHERING, ("a", "b"))
    stop_in_order(leader, "a", "b", "c")
    assert leader.round.roster == ("c",)


def test_one_that_has_stopped_and_then_wants_to_leave_costs_no_edition() -> None:
    leader = running("a", "b", "c")
    leader.hear(leaves(leader, "b"))
    stop_in_order(leader, "a", "b")
    edition = leader.round.edition
    leader.hear(leaves(leader, "a"))
    assert leader.round.edition == edition
    stop_in_order(leader, "c")
    assert leader.round.roster == ("c",)


def test_a_spare_takes_the_place_in_the_same_round_and_one_that_leaves_does_not() -> None:
    leader = running("a", "b", maximum=2).hear(member("spare", arrival=7), member("goes", arrival=6, leaving=True))
    leader.hear(leaves(leader, "a"))
    assert leader.round.waiting == 1
    stop_in_order(leader, "a", "b")
    assert (leader.round.number, leader.round.roster) == (2, ("b", "spare"))


def test_a_newcomer_that_is_asked_to_leave_stops_nobody() -> None:
    leader = running("a").hear(member("c", arrival=7, leaving=True)).wait(10.0)
    assert leader.round.state is RoundState.RUNNING


def test_a_member_that_dies_on_its_way_out_breaks_the_round() -> None:
    leader = running("a", "b", "c")
    leader.hear(leaves(leader, "b")).hear(ended("b"))
    assert (leader.round.state, leader.round.leaving) == (RoundState.BROKEN, ())
    leader.hear(at_step(leader, "a", 5), at_step(leader, "c", 5))
    assert leader.round.roster == ("a", "c")


def test_a_member_that_leaves_while_another_dies_is_left_out() -> None:
    leader = running("a", "b", "c")
    leader.hear(leaves(leader, "b")).hear(ended("c"))
    leader.hear(replace(at_step(leader, "a", 5)), replace(at_step(leader, "b", 5)))
    assert leader.round.roster == ("a",)


def test_who_leaves_with_the_only_best_state_hands_it_on_in_one_more_round() -> None:
    leader = running("a", "b", "c")
    leader.hear(leaves(leader, "b")).hear(ended("c"))
    leader.hear(at_step(leader, "a", 5), at_step(leader, "b", 6))
    assert (leader.round.number, leader.round.roster, leader.round.stale) == (2, ("b", "a"), (1,))
    assert (leader.round.state, leader.round.leaving) == (RoundState.GATHERING, ("b",)), "and stops for it again"
    leader.hear(at_step(leader, "a", 7, failed=False, number=3), at_step(leader, "b", 7, failed=False, number=3))
    assert leader.round.roster == ("a",)


def test_newcomers_are_given_the_state_by_a_group_of_which_all_leave() -> None:
    leader = running("a", "b", maximum=2).hear(member("c", arrival=7), member("d", arrival=8))
    leader.hear(leaves(leader, "a"), leaves(leader, "b"))
    stop_in_order(leader, "a", "b")
    assert (leader.round.roster, leader.round.stale) == (("a", "c"), (1,))
    assert leader.round.leaving == ("a",)


def test_below_the_minimum_who_leaves_is_free_to_go_and_the_others_wait_for_newcomers() -> None:
    leader = running("a", "b", "c", minimum=3)
    leader.hear(leaves(leader, "b"))
    stop_in_order(leader, "a", "b", "c")
    assert (leader.round.number, leader.round.state, leader.round.leaving) == (1, RoundState.BROKEN, ("b",))
    assert "fewer than min_workers=3" in leader.round.because
    leader.hear(ended("b")).wait(1e6)
    assert leader.round.number == 1
    leader.hear(member("d", arrival=9))
    assert leader.round.roster == ("a", "c", "d")


def test_who_was_told_to_go_is_no_source_for_a_newcomer_that_comes_at_that_moment() -> None:
    leader = running("a")
    leader.hear(leaves(leader, "a"))
    stop_in_order(leader, "a")
    assert leader.round.leaving == ("a",)
    leader.hear(member("d", arrival=9))
    assert leader.round.roster == ("d",)


def test_when_all_leave_the_one_with_the_best_state_is_named_first_and_the_run_is_not_closed() -> None:
    leader = running("a", "b")
    leader.hear(leaves(leader, "a"), leaves(leader, "b"))
    leader.hear(at_step(leader, "a", 5), at_step(leader, "b", 6))
    assert (leader.round.state, leader.round.leaving) == (RoundState.BROKEN, ("b", "a"))
    leader.hear(ended("a"), ended("b")).hear(member("x", arrival=9)).wait(30.0)
    assert (leader.round.number, leader.round.roster) == (2, ("x",))


def test_who_leaves_while_somebody_finishes_finishes_too() -> None:
    leader = running("a", "b")
    leader.hear(leaves(leader, "a")).hear(replace(leader.view.members["b"], done=1, step=9))
    assert (leader.round.state, leader.round.leaving) == (RoundState.CLOSING, ())
    leader.hear(replace(leader.view.members["a"], done=1, step=9))
    assert leader.round.state is RoundState.CLOSED
