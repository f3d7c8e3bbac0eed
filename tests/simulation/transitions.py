"""Each way in which membership changes, step by step, and again with a fault between any two steps.

A transition is run once undisturbed on a network with equal delays; that gives its round trips. Then it is run again
for every request that any agent has made in it, and at that very request something happens: the agent is killed or
paused, the request or its answer is lost, the store stops or loses its data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.agent import SimulatedAgent
from tests.simulation.network import Weather
from tests.simulation.scenario import require_liveness
from tests.simulation.training import Pace
from tests.simulation.world import KEYS, Place, World
from torchelastic.rendezvous.view import Settings

#: One way; both ways are a round trip.
DELAY_S = 0.001


@dataclass(frozen=True)
class Transition:
    """One way in which membership changes.

    Attributes:
        name: as a sentence's object.
        begin: what sets it off; everything before is undisturbed.
        is_done: whether it has come to its end.
        hosts_before: how many hosts train when it begins.
        max_workers: of the run.
        total_steps: of the run.
    """

    name: str
    begin: Callable[[World], object]
    is_done: Callable[[World], bool]
    hosts_before: int = 3
    max_workers: int = 3
    total_steps: int = 10**9


def _places_up(world: World) -> list[Place]:
    return [place for place in world.places if place.agent is not None]


def _leader(world: World) -> Place:
    return next(p for p in _places_up(world) if p.agent is not None and p.agent.agent_id == world.invariants.leader)


def _follower(world: World) -> Place:
    return next(p for p in _places_up(world) if p.agent is not None and p.agent.agent_id != world.invariants.leader)


def _boot_all(world: World) -> None:
    for place in world.places:
        world.boot(place)


def _kill_a_worker(world: World) -> None:
    place = _follower(world)
    world.kill_worker(place, place.workers[0])


def _request_drain_of_the_leader(world: World) -> None:
    world.request_drain(_leader(world).workers[0])


def _drain_all(world: World) -> None:
    for place in _places_up(world):
        world.drain_worker(place, place.workers[0])


def _is_empty(world: World) -> bool:
    return not any(world.workers)


def _drain_a_worker(world: World) -> None:
    place = _follower(world)
    world.drain_worker(place, place.workers[0])


def _is_running(size: int, number: int) -> Callable[[World], bool]:
    def is_done(world: World) -> bool:
        groups = [worker.group for worker in world.workers if worker.group is not None]
        formed = [group for group in groups if group.is_formed and not group.is_broken]
        return len(formed) == size and all(group.round.number >= number for group in formed)

    return is_done


def _all_registered(world: World) -> bool:
    """Every member stands in the store again, and the round too."""
    names = {key.removeprefix(KEYS.members) for key in world.store.tree.keys if key.startswith(KEYS.members)}
    return all(worker.name in names for worker in world.workers) and world.invariants.latest.number > 0


def _all_over(world: World) -> bool:
    return world.is_over()


TRANSITIONS: tuple[Transition, ...] = (
    Transition("the first round", _boot_all, _is_running(3, 1), hosts_before=0),
    Transition("a re-form after a worker was killed", _kill_a_worker, _is_running(2, 2)),
    Transition(
        "a re-form after a host has crashed", lambda w: w.crash(_follower(w), is_known=False), _is_running(2, 2)
    ),
    Transition("a drain", _drain_a_worker, _is_running(2, 2)),
    Transition("a drain that is asked for in the store", _request_drain_of_the_leader, _is_running(2, 2)),
    Transition("a drain of all", _drain_all, _is_empty),
    Transition("a change of the leader", lambda w: w.crash(_leader(w), is_known=False), _is_running(2, 2)),
    Transition("an admission", lambda w: w.boot(w.places[2]), _is_running(3, 2), hosts_before=2),
    Transition("a return after lost data", World.lose_data, _all_registered),
    Transition("the end of the run", lambda _world: None, _all_over, total_steps=20),
)

#: What happens at the chosen request: before it leaves, or after it had its effect.
Interruption = Callable[[World, SimulatedAgent], None]


def _place_of(world: World, agent: SimulatedAgent) -> Place:
    return next(place for place in world.places if place.agent is agent)


def _crash(world: World, agent: SimulatedAgent) -> None:
    place = _place_of(world, agent)
    world.crash(place, is_known=False)
    world.engine.after(1.0, world.boot, place)


def _crash_after(world: World, agent: SimulatedAgent) -> None:
    """The request arrives; nobody is left to hear the answer."""
    world.engine.after(1.5 * DELAY_S, lambda: _crash(world, agent) if agent.is_alive else None)


def _pause(world: World, agent: SimulatedAgent) -> None:
    place = _place_of(world, agent)
    world.pause(place)
    world.engine.after(3 * world.settings.ttl_s, world.resume, place)


def _lose_request(world: World, agent: SimulatedAgent) -> None:
    agent.link.is_up = False
    world.engine.after(0.5 * DELAY_S, agent.link.heal)


def _lose_answer(world: World, agent: SimulatedAgent) -> None:
    del agent
    world.weather.answer_loss = 1.0
    world.engine.after(1.5 * DELAY_S, setattr, world.weather, "answer_loss", 0.0)


def _delay(world: World, agent: SimulatedAgent) -> None:
    del agent
    world.weather.lateness = 1.0
    world.engine.after(0.5 * DELAY_S, setattr, world.weather, "lateness", 0.0)


def _stop_store(world: World, agent: SimulatedAgent) -> None:
    del agent
    world.stop_store()
    world.engine.after(3 * world.settings.ttl_s, world.start_store)


def _lose_data(world: World, agent: SimulatedAgent) -> None:
    del agent
    world.lose_data()


INTERRUPTIONS: dict[str, Interruption] = {
    "crash before": _crash,
    "crash after": _crash_after,
    "pause": _pause,
    "lost request": _lose_request,
    "lost answer": _lose_answer,
    "late request": _delay,
    "store stopped": _stop_store,
    "data lost": _lose_data,
}


def prepare(transition: Transition, seed: int = 0, *, traced: bool = False) -> World:
    """A world in which the transition is about to begin."""
    settings = Settings(1, transition.max_workers, last_call_s=1.0, ttl_s=2.0, orphan_timeout_s=5.0)
    world = World(
        seed,
        settings,
        hosts=3,
        pace=Pace(step_s=0.05, collective_timeout_s=3.0, total_steps=transition.total_steps),
        weather=Weather(delay_s=(DELAY_S, DELAY_S), timeout_s=1.0),
        traced=traced,
    )
    world.restart_delay_s = world.rest_s = 30.0  # whoever has gone stays away until the transition is over
    for place in world.places[: transition.hosts_before]:
        world.boot(place)
    if transition.hosts_before:
        run_while(world, lambda: not _is_running(transition.hosts_before, 1)(world))
    return world


def run_while(world: World, condition: Callable[[], bool], at_most_s: float = 60.0) -> None:
    """Let one event after the other happen while the condition holds; raises AssertionError after so long."""
    deadline_s = world.engine.now_s + at_most_s
    while condition():
        world.engine.run_until(math.inf, at_most=1)
        world.invariants.require(world.engine.now_s < deadline_s, f"not within {at_most_s:g} s")


def undisturbed(transition: Transition) -> tuple[int, float]:
    """How many requests all agents make in it, and how many seconds it takes."""
    world = prepare(transition)
    before, began_s = world.requests, world.engine.now_s
    transition.begin(world)
    run_while(world, lambda: not transition.is_done(world))
    return world.requests - before, world.engine.now_s - began_s


def interrupted(transition: Transition, kind: str, at_request: int, *, traced: bool = False) -> bool:
    """Run a transition with a fault at its n-th request (from 1), and then to liveness; whether the fault happened."""
    world = prepare(transition, seed=at_request, traced=traced)
    first = world.requests
    struck: list[int] = []

    def on_request(number: int, agent: SimulatedAgent) -> None:
        if number == first + at_request and not struck:
            struck.append(number)
            INTERRUPTIONS[kind](world, agent)

    world.on_request = on_request
    transition.begin(world)
    world.engine.run_until(world.engine.now_s + 10.0)
    world.on_request = None
    require_liveness(world)
    return bool(struck)
