"""What a round costs with thousands of members: requests, events, bytes, and time with a real server's latencies."""

from __future__ import annotations

from dataclasses import dataclass

from tests.simulation.network import Weather
from tests.simulation.training import Pace
from tests.simulation.world import KEYS, World
from torchelastic.rendezvous.view import Settings


@dataclass(frozen=True)
class Latencies:
    """Of an installation; the defaults are assumptions near the floors that `python -m benchmarks.rendezvous` prints.

    Attributes:
        one_way_s: of a message between a host and the store.
        service_s: for which the store is busy with one request.
        event_cost_s: for which an agent is busy with one event.
    """

    one_way_s: float = 0.0004
    service_s: float = 0.00008
    event_cost_s: float = 0.00004


@dataclass(frozen=True)
class Cost:
    """What one round has cost.

    Attributes:
        members: how many workers took part.
        hosts: on how many hosts.
        seconds: from what set it off until the last member has heard of its group.
        requests: of all agents, signs of life left out.
        leader_events: changes that the leader has heard of.
        other_events: the most that any other agent has heard of.
        largest_value_bytes: of all that was written.
        bytes_delivered: to all watchers.
    """

    members: int
    hosts: int
    seconds: float
    requests: int
    leader_events: int
    other_events: int
    largest_value_bytes: int
    bytes_delivered: int


def first_round_and_re_form(members: int, nproc: int, latencies: Latencies | None = None) -> tuple[Cost, Cost]:
    """Bring a group of so many members about, then kill one worker and let the others form the next.

    Args:
        members: how many; a multiple of `nproc`.
        nproc: workers of each host.
        latencies: see there.
    """
    latencies = latencies or Latencies()
    world = World(
        1,
        Settings(2, members, last_call_s=1e6, ttl_s=60.0),
        hosts=members // nproc,
        nproc=nproc,
        # nobody takes a step, or gives anybody up, while we look
        pace=Pace(step_s=1e9, collective_timeout_s=1e8),
        weather=Weather(
            delay_s=(latencies.one_way_s, latencies.one_way_s), timeout_s=1e6, service_s=latencies.service_s
        ),
    )
    world.restarts = False
    for place in world.places:
        world.boot(place)
        assert place.agent is not None
        place.agent.event_cost_s = latencies.event_cost_s
    first = _cost_until_running(world, members, 1)
    victim = next(place for place in world.places if place.agent and place.agent.agent_id != world.invariants.leader)
    world.kill_worker(victim, victim.workers[0])
    return first, _cost_until_running(world, members - 1, 2)


def _cost_until_running(world: World, members: int, number: int) -> Cost:
    agents = [place.agent for place in world.places if place.agent is not None]
    began_s, calls = world.engine.now_s, dict(world.store.calls)
    events = {agent.agent_id: agent.link.events for agent in agents}
    delivered = sum(agent.link.bytes for agent in agents)
    living = list(world.workers)
    while not all(worker.known.number == number and worker.name in worker.known.members for worker in living):
        before = world.engine.events
        world.engine.run_until(world.engine.now_s + 10.0, at_most=max(10, members // 10))
        world.invariants.require(world.engine.events > before or world.engine.now_s < began_s + 600, "no round came")
    heard = {agent.agent_id: agent.link.events - events[agent.agent_id] for agent in agents}
    leader = heard.pop(world.invariants.leader)
    return Cost(
        members,
        len(agents),
        max(place.heard_s for place in world.places) - began_s,
        sum(n - calls.get(name, 0) for name, n in world.store.calls.items() if name != "keep_alive"),
        leader,
        max(heard.values(), default=0),
        len(world.store.tree.keys[KEYS.round].value),
        sum(agent.link.bytes for agent in agents) - delivered,
    )
