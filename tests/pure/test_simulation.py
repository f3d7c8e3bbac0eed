"""The production decisions through whole simulated runs: every promise holds after every event, and all train again.

The seeds are fixed, so that a red build is about the change; `make soak` looks for new ones.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.few_examples import examples, some_daily
from tests.simulation.engine import Engine
from tests.simulation.invariants import InvariantError, Invariants
from tests.simulation.scale import first_round_and_re_form
from tests.simulation.scenario import (
    VERBS,
    random_world,
    require_liveness,
    run_random,
    strike_with_everything,
)
from tests.simulation.training import Pace
from tests.simulation.transitions import (
    DELAY_S,
    INTERRUPTIONS,
    TRANSITIONS,
    Transition,
    interrupted,
    prepare,
    run_while,
    undisturbed,
)
from tests.simulation.world import KEYS, World
from torchelastic.rendezvous.records import NO_ROUND, Member, Round, RoundState, encode_member, encode_round
from torchelastic.rendezvous.store import EventKind, KeyValue, StoreEvent
from torchelastic.rendezvous.view import Settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def without_warnings_about_our_own_faults() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.long
def test_a_million_events_with_all_faults_break_no_promise() -> None:
    command = [sys.executable, "-m", "tests.simulation", "--seed=1", "--events=1000000"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    print(done.stdout)  # the seed, and what happened
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["events"] >= 1_000_000
    assert set(report["faults"]) == set(VERBS), "a fault that never happened proves nothing"
    assert min(report["faults"].values()) > 100
    assert min(report["rounds"], report["commits"]) > 1000


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_each_fault_alone_breaks_no_promise(verb: str) -> None:
    struck = sum(run_random(seed, hosts=3, nproc=2, events=3000, verbs=(verb,)).verbs.get(verb, 0) for seed in range(5))
    assert struck > 0


@pytest.mark.parametrize(
    "verbs",
    [
        ("lose, delay and repeat messages", "kill a worker"),  # a late record of one that has ended
        ("back the store up", "restore the backup", "kill a worker"),  # ghosts of those that have ended since
        pytest.param(("cut a host off from the store", "crash a host", "kill a worker"), marks=pytest.mark.long),
        pytest.param(("stop a host in order", "stop the store", "crash a host"), marks=pytest.mark.long),
    ],
    ids=" + ".join,
)
def test_faults_that_make_each_other_worse_break_no_promise(verbs: tuple[str, ...]) -> None:
    struck: Counter[str] = Counter()
    for seed in range(20):
        struck.update(run_random(seed, hosts=2, nproc=2, events=3000, verbs=verbs).verbs)
    assert set(struck) == set(verbs)


DRAINS = ("drain a worker", "drain a host", "ask in the store for a drain")


@pytest.mark.long
def test_drains_alone_break_no_round_and_cost_no_step() -> None:
    left = 0
    for seed in range(40):
        report = run_random(seed, hosts=3, nproc=2, events=3000, verbs=DRAINS)
        left += report.left
        assert (report.broken, report.repeated) == (0, 0), f"seed {seed}: {report}"
    assert left > 200


def test_a_run_is_given_up_where_too_few_may_come_back_and_goes_on_when_enough_have_come() -> None:
    # that all train in the end is what each run ends with
    verbs = ("a worker fails for good", "kill a worker")
    assert sum(run_random(seed, hosts=3, nproc=2, events=3000, verbs=verbs).hopeless for seed in range(40)) > 2


def test_survivors_that_do_not_fit_wait_and_are_taken_in_again() -> None:
    # with an invariant for each round that nobody waits who could train; that all train in the end, each run ends with
    verbs = ("kill a worker", "crash a host", "a worker fails for good")
    assert sum(run_random(seed, hosts=3, nproc=2, events=3000, verbs=verbs).spared for seed in range(40)) > 40


def test_equal_seeds_give_equal_histories() -> None:
    first, second = (run_random(7, events=3000, traced=True) for _ in range(2))
    assert first == second
    assert first != run_random(8, events=3000)


steps = st.lists(st.tuples(st.sampled_from(sorted(VERBS)), st.floats(0.0, 20.0), st.integers(0, 99)), max_size=12)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 50), st.integers(1, 3), st.integers(1, 2), steps)
@example(4, 1, 2, [("hang a worker for good", 0.0, 0), ("ask in the store for a drain", 1.0, 0)])
def test_any_short_history_breaks_no_promise(
    seed: int, hosts: int, nproc: int, history: list[tuple[str, float, int]]
) -> None:
    world = random_world(seed, hosts=hosts, nproc=nproc, traced=True)
    for place in world.places:
        world.boot(place)
    for verb, pause_s, chance in history:
        world.engine.run_until(world.engine.now_s + pause_s)
        world.engine.chance.seed(chance)
        VERBS[verb][1](world)
    require_liveness(world)


@pytest.mark.parametrize("kind", some_daily(sorted(INTERRUPTIONS), sorted(INTERRUPTIONS)[::2].__contains__))
@pytest.mark.parametrize("transition", TRANSITIONS, ids=lambda transition: transition.name)
def test_a_fault_between_any_two_steps_of_a_transition_breaks_no_promise(transition: Transition, kind: str) -> None:
    count, _ = undisturbed(transition)
    assert count > 0
    for number in range(1, count + 1):
        assert interrupted(transition, kind, number, traced=True), f"no fault at request {number} of {count}"


def transition(name: str) -> Transition:
    return next(one for one in TRANSITIONS if name in one.name)


def test_a_lost_worker_costs_four_round_trips_and_five_requests() -> None:
    """It is gone, the round is broken, the others ask, the next one runs: each is said to the store and heard of."""
    requests, seconds = undisturbed(transition("worker was killed"))
    form_s = Pace().form_s
    assert seconds == pytest.approx(4 * 2 * DELAY_S + form_s)
    assert requests == 5


def test_a_drained_worker_costs_the_rest_of_a_step_and_three_round_trips_and_seven_requests() -> None:
    """It says so, the others are asked to stop, all three ask, the next round runs; then it goes."""
    requests, seconds = undisturbed(transition("a drain"))
    assert requests == 7
    step_s, form_s = 0.05, Pace().form_s
    assert seconds <= 3 * 2 * DELAY_S + 2 * step_s + form_s


def test_a_group_of_which_all_leave_is_over_and_its_run_is_not() -> None:
    world = prepare(transition("a drain of all"), traced=True)
    transition("a drain of all").begin(world)
    run_while(world, lambda: any(world.workers))
    assert world.invariants.latest.state is RoundState.BROKEN
    assert world.invariants.latest.number == 1
    assert (world.invariants.broken, world.invariants.left) == (0, 3)
    require_liveness(world)


def test_newcomers_get_the_state_from_a_group_of_which_all_leave() -> None:
    world = World(4, Settings(2, 2, last_call_s=0.5, ttl_s=2.0), hosts=4, pace=Pace(step_s=0.1))
    for place in world.places[:2]:
        world.boot(place)
    run_while(world, lambda: not trained(world, 1))
    for place in world.places[2:]:
        world.boot(place)  # spares
    world.engine.run_until(world.engine.now_s + 2.0)
    step = world.invariants.highest_step
    for place in world.places[:2]:
        world.drain_worker(place, place.workers[0])
    run_while(world, lambda: world.invariants.left < 2)
    run_while(world, lambda: not trained(world, 2))
    assert world.invariants.latest.step > step
    assert {worker.member.host for worker in world.workers} == {"host2", "host3"}
    assert (world.invariants.broken, world.invariants.repeated) == (0, 0)


def test_a_crashed_host_costs_its_time_to_live_and_a_few_round_trips_also_where_it_led() -> None:
    ttl_s, lease_tick_s, form_s = 2.0, 0.5, Pace().form_s
    for name, round_trips in (("host has crashed", 4), ("change of the leader", 12)):
        _, seconds = undisturbed(transition(name))
        assert seconds <= ttl_s + lease_tick_s + form_s + round_trips * 2 * DELAY_S


# --- single promises, each with the history that would break it ----------------------------------------------------


def trained(world: World, number: int) -> bool:
    """Whether all living workers train in round `number` or a later one."""
    groups = {id(worker.group): worker.group for worker in world.workers if worker.group is not None}
    (group,) = groups.values() if len(groups) == 1 else (None,)
    return group is not None and group.is_formed and group.round.number >= number


def test_a_store_that_loses_its_data_costs_neither_a_round_nor_a_step() -> None:
    world = prepare(transition("lost data"), traced=True)
    world.engine.run_until(world.engine.now_s + 5.0)
    commits = world.invariants.commits
    world.lose_data()
    world.engine.run_until(world.engine.now_s + 10.0)
    assert world.invariants.latest.number == 1
    assert world.invariants.latest.restored
    assert world.invariants.commits - commits >= 3 * 190, "10 s of steps of 0.05 s, on three workers"
    victim = world.places[0]
    world.kill_worker(victim, victim.workers[0])
    run_while(world, lambda: world.invariants.latest.number == 1)


def test_an_outage_longer_than_the_lease_costs_neither_a_round_nor_a_step() -> None:
    world = prepare(transition("lost data"), traced=True)
    world.stop_store()
    commits = world.invariants.commits
    # longer than the time to live (2 s), shorter than the time for which a group may be without contact (5 s)
    world.engine.run_until(world.engine.now_s + 2.5)
    world.start_store()
    world.engine.run_until(world.engine.now_s + 10.0)
    assert world.invariants.latest.number == 1
    assert world.invariants.commits - commits >= 3 * 240


def test_leases_that_expire_while_nobody_reaches_the_store_cost_neither_a_round_nor_a_step() -> None:
    world = World(5, Settings(1, 3, last_call_s=0.5, ttl_s=2.0, orphan_timeout_s=60.0), hosts=3, pace=Pace(step_s=0.1))
    for place in world.places:
        world.boot(place)
    run_while(world, lambda: not trained(world, 1))
    number, leases = world.invariants.latest.number, set(world.store.tree.leases)
    world.cut_all()
    world.engine.run_until(world.engine.now_s + 8.0)
    assert not leases & set(world.store.tree.leases), "they did expire"
    commits = world.invariants.commits
    world.heal_all()
    world.engine.run_until(world.engine.now_s + 20.0)
    assert world.invariants.latest.number == number
    assert world.invariants.commits - commits >= 3 * 190
    assert len([key for key in world.store.tree.keys if key.startswith(KEYS.members)]) == 3


def test_a_store_that_hangs_until_some_leases_have_expired_costs_neither_a_round_nor_a_step() -> None:
    expired = 0
    for moment in range(20):
        world = World(
            moment, Settings(1, 3, last_call_s=0.5, ttl_s=6.0, orphan_timeout_s=60.0), hosts=3, pace=Pace(step_s=0.1)
        )
        for place in world.places:
            world.boot(place)
        run_while(world, lambda world=world: not trained(world, 1))  # type: ignore[misc]  # bound at once
        number = world.invariants.latest.number
        world.engine.run_until(world.engine.now_s + 3.0 + 0.1 * moment)
        leases = set(world.store.tree.leases)
        world.hang_store(4.6)
        world.engine.run_until(world.engine.now_s + 30.0)
        expired += len(leases - set(world.store.tree.leases))
        assert world.invariants.latest.number == number, f"at moment {moment}"
    assert expired > 0, "no lease has expired"


def test_an_outage_beyond_the_orphan_timeout_pauses_training_and_loses_no_step() -> None:
    world = prepare(transition("lost data"), traced=True)
    world.stop_store()
    stopped_s = world.engine.now_s
    world.engine.run_until(stopped_s + 60.0)
    assert stopped_s + 2.5 < world.invariants.last_commit_s < stopped_s + 5.0
    step = world.invariants.highest_step
    world.start_store()
    run_while(world, lambda: not trained(world, 2))
    assert {worker.step for worker in world.workers} == {step}


def cut_off(world: World) -> None:
    for place in world.places[:3]:
        world.cut(place)


def test_newcomers_replace_a_group_that_is_cut_off_only_after_it_has_stopped() -> None:
    world = World(3, Settings(1, 3, last_call_s=0.5, ttl_s=2.0, orphan_timeout_s=20.0), hosts=6, pace=Pace(step_s=0.1))
    for place in world.places[:3]:
        world.boot(place)
    run_while(world, lambda: not trained(world, 1))
    cut_off(world)
    cut_s = world.engine.now_s
    for place in world.places[3:]:
        world.boot(place)
    old = world.invariants.latest.roster
    run_while(world, lambda: world.invariants.latest.roster == old, at_most_s=120.0)
    formed_s, last_commit_s = world.engine.now_s, world.invariants.last_commit_s
    assert formed_s >= cut_s + 20.0
    assert cut_s + 10.0 < last_commit_s < cut_s + 20.0, "it trained on, and stopped in time"
    for place in world.places:
        world.heal(place)
    require_liveness(world)


def test_newcomers_need_not_wait_for_a_group_whose_members_are_known_to_have_ended() -> None:
    world = prepare(transition("lost data"), traced=True)
    for place in world.places:
        world.stop(place)
    world.engine.run_until(world.engine.now_s + 30.0)
    assert not any(place.agent for place in world.places)
    assert world.invariants.latest.departed == (), "no leader was left to write it down"
    began_s = world.engine.now_s
    for place in world.places:
        world.boot(place)
    run_while(world, lambda: not trained(world, 2))
    assert world.engine.now_s - began_s < 2.0, "the last call, and no orphan time-out"


def test_a_successor_on_the_same_host_need_not_wait_for_the_lease_of_its_predecessor() -> None:
    world = prepare(transition("lost data"), traced=True)
    leader = next(p for p in world.places if p.agent and p.agent.agent_id == world.invariants.leader)
    world.crash(leader, is_known=True)
    world.boot(leader)
    began_s = world.engine.now_s
    run_while(world, lambda: world.invariants.latest.number == 1)
    assert world.engine.now_s - began_s < 0.5, "the time to live is 2 s"


def test_a_run_that_was_killed_as_a_whole_and_whose_leases_are_over_is_restarted_without_waiting() -> None:
    world = prepare(transition("lost data"), traced=True)
    for place in world.places:
        world.crash(place, is_known=place is world.places[1])
    world.engine.run_until(world.engine.now_s + 30.0)
    assert not any(key.startswith((KEYS.members, KEYS.agents, KEYS.leader)) for key in world.store.tree.keys)
    began_s = world.engine.now_s
    for place in world.places:
        world.boot(place)
    run_while(world, lambda: not trained(world, 2))
    assert world.engine.now_s - began_s < 2.0, "the last call, and no orphan time-out: one proof is enough"


def test_without_any_proof_the_wait_is_named_at_once_and_lasts_the_orphan_timeout() -> None:
    world = prepare(transition("lost data"), traced=True)
    for place in world.places:
        world.crash(place, is_known=False)
    world.engine.run_until(world.engine.now_s + 30.0)
    began_s = world.engine.now_s
    for place in world.places:
        world.boot(place)
    run_while(world, lambda: not world.invariants.latest.orphaned)
    assert world.engine.now_s - began_s < 0.1
    assert "orphan_timeout=5 s" in world.invariants.latest.because
    run_while(world, lambda: not trained(world, 2))
    assert 5.0 < world.engine.now_s - began_s < 7.0
    assert not world.invariants.latest.orphaned


def test_a_group_that_was_about_to_re_form_when_it_was_killed_names_the_wait_too() -> None:
    world = prepare(transition("lost data"), traced=True)
    for worker in world.workers:
        if worker.group is not None:
            worker.group.fails_next_step = True
    run_while(world, lambda: world.invariants.latest.state is not RoundState.BROKEN)
    for place in world.places:
        world.crash(place, is_known=False)
    world.engine.run_until(world.engine.now_s + 30.0)
    for place in world.places:
        world.boot(place)
    run_while(world, lambda: not world.invariants.latest.orphaned)
    assert world.invariants.latest.because.startswith("lost ")


def test_of_a_run_that_is_over_no_record_of_an_agent_is_left_for_longer_than_its_round() -> None:
    world = prepare(transition("the end of the run"), traced=True)
    world.crash(world.places[2], is_known=False)
    run_while(world, lambda: not world.is_over())
    for place in world.places[:2]:
        world.stop(place)
    run_while(world, lambda: any(place.agent for place in world.places))
    left = [kv for key, kv in world.store.tree.keys.items() if key.startswith(KEYS.processes)]
    assert [kv.lease_id for kv in left] == [world.store.tree.keys[KEYS.round].lease_id], "that of the host that crashed"


@pytest.mark.long
def test_a_large_group_survives_every_fault() -> None:
    report = strike_with_everything(11, hosts=64, nproc=4)
    assert report.rounds > len(VERBS) / 2


# --- what a round costs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [2, 16, 128, pytest.param(1024, marks=pytest.mark.long)])
def test_a_member_puts_once_and_hears_of_two_changes_however_many_there_are(members: int) -> None:
    first, again = first_round_and_re_form(members + 1, 1)
    # broken and running; each of the others asks once, the lost one's agent says so, the leader decides twice
    assert (again.requests, again.other_events) == (members + 3, 2)
    assert again.leader_events <= members + 4
    assert first.other_events <= 2
    assert first.requests <= 15 * (members + 1), "once in the life of an agent"


def test_the_round_of_ten_thousand_hosts_with_the_longest_names_fits_into_one_value() -> None:
    # as agents name their members: at most 40 characters of the host's name
    roster = tuple(f"{'h' * 40}-0-{number:08x}1" for number in range(10_000))
    everything = Round(1, RoundState.BROKEN, roster, "h:1", stale=tuple(range(1, 10_000)), departed=roster[:5000])
    assert len(encode_round(everything)) < 1.5 * 1024 * 1024


# --- the checks themselves -------------------------------------------------------------------------------------------

BASE = Round(1, RoundState.RUNNING, ("a", "b"), "h:1", edition=1)
BROKEN = replace(BASE, state=RoundState.BROKEN, edition=2)


def put(key: str, value: bytes, lease_id: int = 0) -> tuple[StoreEvent, ...]:
    return (StoreEvent(EventKind.PUT, KeyValue(key, value, 1, 1, 1, lease_id)),)


def checks_after(*rounds: Round, multiple_of: int = 1) -> Invariants:
    checks = Invariants(Engine(1), KEYS, Settings(1, 2, multiple_of=multiple_of))
    checks.changed(put(KEYS.leader, b"leader"))
    checks.writer = "leader"
    for round_ in rounds:
        checks.changed(put(KEYS.round, encode_round(round_), lease_id=int(round_.state is RoundState.CLOSED)))
    return checks


def test_a_good_history_passes_the_checks() -> None:
    broken = replace(BASE, state=RoundState.BROKEN, edition=2)
    assert checks_after(BASE, broken, replace(BASE, number=2, edition=3)).rounds == 3


@pytest.mark.parametrize(
    ("rounds", "promise"),
    [
        ((replace(BASE, roster=("a", "b", "c")),), "a roster of 3"),
        ((replace(BASE, roster=()),), "a roster of 0"),
        ((replace(BASE, stale=(0,)),), "rank 0 must be a source"),
        ((BASE, replace(BASE, number=2, edition=2)), "follows RUNNING"),
        ((BASE, replace(BASE, state=RoundState.BROKEN, edition=2), replace(BASE, edition=3)), "a second time"),
        ((replace(BASE, state=RoundState.CLOSING),), "begins CLOSING"),
        ((BASE, replace(BASE, state=RoundState.BROKEN, roster=("b", "a"), edition=2)), "changed its roster"),
        ((replace(BASE, number=3),), "round 3 follows 0"),
        ((BASE, replace(BASE, state=RoundState.BROKEN)), "edition 1 follows 1"),
        ((BASE, replace(BASE, state=RoundState.CLOSED, edition=2)), "follows"),
        (
            (
                BASE,
                replace(BASE, state=RoundState.CLOSING, edition=2),
                replace(BASE, state=RoundState.CLOSED, edition=3),
                replace(BASE, number=2, edition=4),
            ),
            "follows CLOSED",
        ),
    ],
)
def test_a_bad_history_does_not_pass_the_checks(rounds: tuple[Round, ...], promise: str) -> None:
    with pytest.raises(InvariantError, match=promise):
        checks_after(*rounds)


@pytest.mark.parametrize(
    ("rounds", "promise"),
    [
        ((replace(BASE, roster=("a",)),), "a roster of 1, no multiple of 2"),
        ((replace(BASE, spared=("c",)),), "were not in round 0"),
        ((BASE, BROKEN, replace(BASE, number=2, edition=3, spared=("a",))), "train and are spared"),
        ((BASE, BROKEN, replace(BASE, number=2, roster=("c", "d"), edition=3, spared=("a", "b"))), ""),
    ],
)
def test_rosters_of_sizes_that_cannot_be_used_and_spares_that_could_train_do_not_pass_the_checks(
    rounds: tuple[Round, ...], promise: str
) -> None:
    if not promise:
        assert checks_after(*rounds, multiple_of=2).spared == 2
        return
    with pytest.raises(InvariantError, match=promise):
        checks_after(*rounds, multiple_of=2)


def test_a_survivor_that_is_spared_although_it_fits_does_not_pass_the_checks() -> None:
    with pytest.raises(InvariantError, match="wait, and 2 could train"):
        checks_after(BASE, BROKEN, replace(BASE, number=2, roster=("a",), edition=3, spared=("b",)))


def test_a_decision_of_a_replaced_leader_does_not_pass_the_checks() -> None:
    checks = checks_after(BASE)
    checks.changed(put(KEYS.leader, b"another"))
    with pytest.raises(InvariantError, match="leader decided while another led"):
        checks.changed(put(KEYS.round, encode_round(replace(BASE, state=RoundState.BROKEN, edition=2))))


def _ghost(checks: Invariants, member: Member) -> None:
    checks.ended(type("Dead", (), {"name": "a"})())  # only its name is asked for
    checks.changed(put(KEYS.member("a"), encode_member(replace(member, departed=True))))
    checks.changed(put(KEYS.member("a"), encode_member(member)))


def _buried_alive(checks: Invariants, member: Member) -> None:
    checks.changed(put(KEYS.member("a"), encode_member(replace(member, departed=True))))


def _older_record(checks: Invariants, member: Member) -> None:
    checks.changed(put(KEYS.member("a"), encode_member(member)))
    checks.changed(put(KEYS.member("a"), encode_member(replace(member, ready_for=1))))


@pytest.mark.parametrize("history", [_ghost, _buried_alive, _older_record])
def test_records_that_cannot_be_do_not_pass_the_checks(history: Callable[[Invariants, Member], None]) -> None:
    checks = checks_after(BASE)
    assert checks.latest is not NO_ROUND
    with pytest.raises(InvariantError):
        history(checks, Member("a", "h", ready_for=2))
