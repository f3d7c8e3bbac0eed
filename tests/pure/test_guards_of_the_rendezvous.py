"""What keeps the rendezvous from taking somebody for lost, or for alive, who is not: one history for each guard.

Each fails where its guard is removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.memory_store import MemoryStore
from tests.pure.test_corners_of_the_rendezvous import KEYS, Stage
from tests.pure.test_membership_protocol import Leader, at_step, ended, member, running
from tests.pure.test_simulation import trained, transition
from tests.simulation import world as simulated
from tests.simulation.training import Pace
from tests.simulation.transitions import prepare, run_while
from tests.simulation.world import World
from torchelastic.rendezvous.dead_agents import Predecessor
from torchelastic.rendezvous.protocol import advance
from torchelastic.rendezvous.records import Member, Round, RoundState, decode_member, encode_member, encode_round
from torchelastic.rendezvous.requests import EndWatches, Receive, Sleep
from torchelastic.rendezvous.store import EventKind, KeyValue, LeaseLostError, StoreEvent, StoreUnavailableError
from torchelastic.rendezvous.view import RoundPublished, Settings, View, absorb


@pytest.fixture(autouse=True)
def without_warnings_about_our_own_faults() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def stored_round(stage: Stage) -> Round:
    """The newest round that the host knows, which is what the store holds."""
    return stage.host.round


def leading(stage: Stage) -> Stage:
    """It leads a running round of x and y, both there."""
    stage.store.put(KEYS.round, encode_round(Round(1, RoundState.RUNNING, ("x", "y"), "h:1", edition=1)))
    for name in ("x", "y"):
        stage.store.put(KEYS.member(name), encode_member(Member(name, "h", "h:1", ready_for=1)))
    assert isinstance(stage.go(), Receive)
    assert stage.host.leads
    return stage


# --- the store was silent, or the leader was cut off: a missing key proves nothing ------------------------------------


@pytest.mark.parametrize(("ttl_s", "patience_s"), [(10.0, 10.0), (2.0, 8.0)])
def test_whose_lease_ended_while_the_store_was_silent_is_not_lost_before_it_could_come_back(
    ttl_s: float, patience_s: float
) -> None:
    stage = leading(Stage(ttl_s))
    stage.now_s = 0.7 * ttl_s
    waits = stage.hears(EventKind.DELETE, KEYS.member("x"))
    assert stored_round(stage).state is RoundState.RUNNING
    assert isinstance(waits, Receive)
    assert waits.until_s == stage.now_s + patience_s


def test_whose_lease_ended_while_the_store_answered_is_lost_at_once() -> None:
    stage = leading(Stage())
    stage.now_s = 1.0
    stage.hears(EventKind.DELETE, KEYS.member("x"))
    assert stored_round(stage).state is RoundState.BROKEN


@pytest.mark.parametrize(("ttl_s", "patience_s"), [(10.0, 10.0), (2.0, 8.0)])
def test_an_agent_has_the_time_to_come_back_that_it_needs_also_with_a_short_lease(
    ttl_s: float, patience_s: float
) -> None:
    view = View(Settings(1, 4, ttl_s=ttl_s))
    event = RoundPublished(Round(1, RoundState.RUNNING, ("x",), "h:1"), proves_no_loss=True)
    assert absorb(view, event, 100.0).trusted_from_s == 100.0 + patience_s


def lost_its_lease(stage: Stage) -> Stage:
    """Its lease is gone, and so may be those of others who were cut off with it: x and y are not there."""
    stage.store.put(KEYS.round, encode_round(Round(1, RoundState.RUNNING, ("x", "y"), "h:1", edition=1)))
    stage.refusal = LeaseLostError("it has ended")
    assert isinstance(stage.go(), EndWatches)
    assert isinstance(stage.go(), Sleep)
    return stage


def test_a_leader_that_lost_its_lease_and_the_answer_that_made_it_lead_again_takes_nobody_for_lost() -> None:
    stage = lost_its_lease(Stage())
    stage.lost_answer = StoreUnavailableError("no answer")
    assert isinstance(stage.go(), EndWatches)
    assert stage.store.get(KEYS.leader) is not None, "the request had its effect"
    assert isinstance(stage.go(), Sleep)
    assert isinstance(stage.go(), Receive)
    assert stage.host.leads
    assert stored_round(stage).state is RoundState.RUNNING


def test_a_leader_that_lost_its_lease_and_learns_by_the_watch_that_it_leads_takes_nobody_for_lost() -> None:
    stage = lost_its_lease(Stage())
    stage.store.put(KEYS.leader, b"another", stage.store.grant_lease(10.0).lease_id)
    assert isinstance(stage.go(), Receive)
    assert not stage.host.leads
    assert isinstance(stage.hears(EventKind.PUT, KEYS.leader, b"a", 5), Receive)
    assert stage.host.leads
    assert stored_round(stage).state is RoundState.RUNNING


def test_whose_lease_was_lost_may_go_on_only_when_the_new_one_is_known_to_live() -> None:
    stage = lost_its_lease(Stage())
    stage.now_s = 3.0
    assert isinstance(stage.go(), Receive)
    assert stage.contacts == [], "its members were away: another group may have taken their place"
    other = Stage()
    other.now_s = 3.0
    other.go()
    assert other.contacts == [3.0], "nothing was lost"


# --- the store has lost its data --------------------------------------------------------------------------------------


def test_while_others_have_yet_to_register_again_nothing_is_decided() -> None:
    before = running("x", "y")
    leader = Leader(1, 4)
    leader.hear(member("x"), member("y"))
    leader.view, _ = advance(leader.view, RoundPublished(replace(before.round, restored=True)), leader.now_s)
    leader.hear(at_step(leader, "x", 5))
    assert (leader.round.state, leader.wake_at_s) == (RoundState.RUNNING, 10.0)
    leader.wait(10.0)
    assert leader.round.state is RoundState.BROKEN, "x asks for the next round"


def members_in_store(world: World) -> set[str]:
    prefix = simulated.KEYS.members
    return {key.removeprefix(prefix) for key in world.store.tree.keys if key.startswith(prefix)}


def test_an_older_copy_of_the_data_costs_no_round_and_brings_nobody_back_to_life() -> None:
    world = prepare(transition("lost data"), traced=True)
    world.back_up()
    victim = world.places[0]
    world.kill_worker(victim, victim.workers[0])
    run_while(world, lambda: not trained(world, 3))
    number, living = world.invariants.latest.number, {worker.name for worker in world.workers}
    assert living != set(world.invariants.latest.departed)
    world.restore_backup()
    world.engine.run_until(world.engine.now_s + 1.0)  # half a time to live
    assert members_in_store(world) == living
    world.engine.run_until(world.engine.now_s + 10.0)
    assert members_in_store(world) == living
    assert (world.invariants.latest.number, trained(world, number)) == (number, True)


def test_an_older_copy_of_the_data_in_which_a_host_had_a_lease_and_no_record_yet_gets_its_members_again() -> None:
    world = World(2, Settings(1, 1, last_call_s=0.0, ttl_s=2.0), hosts=1, pace=Pace(step_s=0.1))
    world.boot(world.places[0])
    run_while(world, lambda: not trained(world, 1))
    world.cut(world.places[0])
    run_while(world, lambda: bool(members_in_store(world)))

    def back_up_between_lease_and_records(_number: int, _agent: object) -> None:
        if world.store.tree.leases and not any(lease.keys for lease in world.store.tree.leases.values()):
            world.back_up()
            world.on_request = None

    world.on_request = back_up_between_lease_and_records
    world.heal(world.places[0])
    world.engine.run_until(world.engine.now_s + 10.0)
    assert world.on_request is None, "there was such a moment"
    number, living = world.invariants.latest.number, {worker.name for worker in world.workers}
    world.restore_backup()
    assert not members_in_store(world)
    world.engine.run_until(world.engine.now_s + 1.0)
    assert members_in_store(world) == living
    world.engine.run_until(world.engine.now_s + 10.0)
    assert (world.invariants.latest.number, trained(world, number)) == (number, True)


@pytest.mark.parametrize("names_it_twice", [False, True], ids=["another host names the store", "the same host again"])
def test_that_a_process_has_ended_is_known_also_after_the_store_has_lost_its_data(names_it_twice: bool) -> None:
    """Else its place would stay free for the orphan time-out, as if it might be cut off and train on."""
    world = World(2, Settings(1, 1, last_call_s=0.5, ttl_s=2.0, orphan_timeout_s=60.0), hosts=2, pace=Pace(step_s=0.1))
    world.restarts = False
    first, other = world.places
    world.boot(first)
    run_while(world, lambda: not trained(world, 1))  # it has named the store, too
    world.boot(other)  # with a spare
    world.cut(first)
    run_while(world, lambda: not world.invariants.leader.startswith(other.name))
    world.heal(first)
    world.engine.run_until(world.engine.now_s + 20.0)
    assert world.invariants.leader.startswith(other.name)
    number, victim = world.invariants.latest.number, first.workers[0]
    assert world.invariants.latest.roster == (victim.name,)
    # nobody but `first` knows that its worker has ended; then the store loses that, too
    world.cut(other)
    world.kill_worker(first, victim)
    world.engine.run_until(world.engine.now_s + 0.05)
    assert world.invariants.latest.state is RoundState.RUNNING
    if not names_it_twice:
        world.cut(first)
        world.heal(other)
    world.lose_data()
    world.engine.run_until(world.engine.now_s + 0.5)
    world.heal_all()
    lost_s = world.engine.now_s
    run_while(world, lambda: world.invariants.latest.number == number, at_most_s=120.0)
    assert world.engine.now_s - lost_s < 15.0, "the spare takes over as soon as all could register again"


# --- the dead ---------------------------------------------------------------------------------------------------------


def test_what_the_round_says_of_the_dead_is_enough_for_a_leader_that_has_seen_nothing_of_it() -> None:
    before = running("x", "y", maximum=2).hear(ended("x"))
    leader = Leader(1, 2)
    leader.view, _ = advance(leader.view, RoundPublished(before.round), 0.0)
    leader.hear(member("a", arrival=50), member("b", arrival=51))
    assert leader.round.roster == ("a", "b"), "without x the group commits nothing, so y need not be waited for"


def test_that_a_process_has_ended_counts_also_where_its_record_is_cleared_away_in_the_same_moment() -> None:
    stage = leading(Stage())
    stage.now_s = 9.0  # the store was silent: who is only missing may come back
    record = encode_member(Member("x", "h", "h:1", ready_for=1, departed=True))
    says = KeyValue(KEYS.member("x"), record, 900, 1000, 2)
    cleared = replace(says, value=b"", mod_revision=1001)
    stage.go([[StoreEvent(EventKind.PUT, says), StoreEvent(EventKind.DELETE, cleared)]])
    assert (stored_round(stage).state, stored_round(stage).departed) == (RoundState.BROKEN, ("x",))


def test_whoever_ends_after_the_run_was_closed_leaves_nothing_in_the_store() -> None:
    stage = Stage()
    stage.host.declare(Member("m", "h", "h:1", ready_for=1))
    stage.store.put(KEYS.round, encode_round(Round(1, RoundState.CLOSED, ("m",), "h:1", edition=1)))
    stage.go()
    assert stage.store.get(KEYS.member("m")) is not None
    stage.host.withdraw("m")
    stage.go([stage.posted[-1]])
    assert stage.store.get(KEYS.member("m")) is None, "its tombstone is on no lease, so it would stay for ever"


def _withdrawn(stage: Stage) -> None:
    """A worker of this agent ends."""
    stage.host.declare(Member("m", "h", "h:1", ready_for=1))
    stage.go()
    stage.host.withdraw("m")
    stage.go([stage.posted[-1]])


def _buried(stage: Stage) -> None:
    """The agent that this one follows has ended without a word, and with it its worker."""
    lease_id = stage.store.grant_lease(10.0).lease_id
    stage.store.put(f"{KEYS.processes}h/before", b"{}")
    stage.store.put(KEYS.member("m"), encode_member(Member("m", "h", "h:1", ready_for=1)), lease_id)
    record = stage.store.get(f"{KEYS.processes}h/before")
    assert record is not None
    stage.host.declare_dead(Predecessor(record, "h", lease_id, ("m",), all_ended=True))
    stage.go()


@pytest.mark.parametrize("ends", [_withdrawn, _buried])
def test_that_a_process_has_ended_outlives_the_agent_that_says_so(ends: Callable[[Stage], None]) -> None:
    stage = Stage()
    stage.store.put(KEYS.round, encode_round(Round(1, RoundState.RUNNING, ("m", "y"), "h:1", edition=1)))
    stage.store.put(KEYS.member("y"), encode_member(Member("y", "i", "h:1", ready_for=1)))
    ends(stage)
    stage.store.revoke_lease(stage.host.lease)
    record = stage.store.get(KEYS.member("m"))
    assert record is not None, "whoever starts the run again would take it for cut off, and wait"
    assert decode_member(record.key, record.value, 0).departed


# --- a store that has lost its data counts its revisions from 1 again -------------------------------------------------


def _in_another_life_of_the_store(stage: Stage) -> bytes:
    """Leader and round have the same revisions as before, and another agent has written them; gives the round."""
    leader, round_ = stage.store.get(KEYS.leader), stage.store.get(KEYS.round)
    assert leader is not None
    assert round_ is not None
    stage.store = MemoryStore(clock=lambda: 0.0)
    lease_id = stage.store.grant_lease(10.0).lease_id
    other = encode_round(Round(1, RoundState.RUNNING, ("v", "w"), "i:1", edition=1))
    while stage.store.list_prefix("/").revision < round_.mod_revision - 1:
        stage.store.put("/padding", b"")
    assert stage.store.put(KEYS.round, other) == round_.mod_revision
    while stage.store.list_prefix("/").revision < leader.create_revision - 1:
        stage.store.put("/padding", b"")
    assert stage.store.put(KEYS.leader, b"b", lease_id) == leader.create_revision
    return other


def test_who_led_before_the_store_lost_its_data_writes_no_round_over_that_of_the_new_leader() -> None:
    stage = leading(Stage())
    written = _in_another_life_of_the_store(stage)
    stage.hears(EventKind.PUT, KEYS.member("x"), encode_member(Member("x", "h", "h:1", ready_for=1, departed=True)))
    round_ = stage.store.get(KEYS.round)
    assert round_ is not None
    assert round_.value == written


def test_who_led_before_the_store_lost_its_data_hears_that_another_leads() -> None:
    stage = leading(Stage())
    leader = stage.store.get(KEYS.leader)
    assert leader is not None
    _in_another_life_of_the_store(stage)
    stage.hears(EventKind.PUT, KEYS.leader, b"b", lease_id=1, revision=leader.create_revision)
    assert not stage.host.leads
