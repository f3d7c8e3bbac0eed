"""A whole simulated run: store, hosts, workers, and the faults that befall them, as verbs."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from tests.simulation.agent import SimulatedAgent
from tests.simulation.engine import Engine
from tests.simulation.invariants import Invariants
from tests.simulation.network import Weather
from tests.simulation.store import SimulatedStore
from tests.simulation.training import Group, Pace, Worker, fresh_member
from tests.simulation.tree import Tree
from torchelastic.rendezvous.dead_agents import Predecessor
from torchelastic.rendezvous.records import Keys, Round, RoundState
from torchelastic.rendezvous.view import Settings
from torchelastic.rendezvous.worker_rules import Contact, is_left_behind

KEYS = Keys("/torchelastic/simulated")
#: How long a request to leave stands in the store if no agent carries it out.
DRAIN_TTL_S = 20.0


@dataclass
class Place:
    """One host: its present agent process and workers; others follow when they end.

    Attributes:
        name: of the host.
        nproc: how many workers its agent runs.
        agent: the present one; None while the host is down.
        workers: those of the present agent.
        predecessor: an agent that ended without a word, and whose successor knows.
        rate: of its clock.
        heard_s: when its agent last heard of a change of the round.
    """

    name: str
    nproc: int
    agent: SimulatedAgent | None = None
    workers: list[Worker] = field(default_factory=list)
    predecessors: list[str] = field(default_factory=list)
    rate: float = 1.0
    heard_s: float = 0.0


class World:
    """See the module's docstring.

    Args:
        seed: of all chance.
        settings: of the run.
        hosts: how many hosts there are; none is up before `boot`.
        nproc: workers of each host.
        pace: of the training.
        weather: of the network.
        traced: keep the last lines of what happens for a failure's message.
    """

    def __init__(
        self,
        seed: int,
        settings: Settings,
        *,
        hosts: int,
        nproc: int = 1,
        pace: Pace | None = None,
        weather: Weather | None = None,
        traced: bool = False,
    ) -> None:
        self.engine = Engine(seed, traced=traced)
        self.settings = settings
        self.pace, self.weather = pace or Pace(), weather or Weather()
        self.invariants = Invariants(self.engine, KEYS, settings)
        self.store = SimulatedStore(self.engine, self.invariants.changed)
        self.places = [Place(f"host{number}", nproc) for number in range(hosts)]
        self.restart_delay_s = 0.5
        #: until a worker takes the place of one that has left
        self.rest_s = 5.0
        self.restarts = True
        self.requests = 0
        #: called before each request with its number, so that a fault can be put between any two steps
        self.on_request: Callable[[int, SimulatedAgent], None] | None = None
        self._count = itertools.count(1)
        self._groups: dict[tuple[int, tuple[str, ...]], Group] = {}
        self._cut_data: set[frozenset[str]] = set()
        self._backup: Tree | None = None

    # --- hosts and workers --------------------------------------------------------------------------------------------

    def boot(self, place: Place) -> None:
        """Start an agent with its workers on a host that is down."""
        if place.agent is not None:
            return
        agent = SimulatedAgent(
            self.engine,
            self.store,
            self.weather,
            KEYS,
            self.settings,
            host=place.name,
            agent_id=f"{place.name}-a{next(self._count)}",
            clock_rate=place.rate,
            clock_offset_s=1000.0 * self.engine.chance.random(),
            on_round=lambda round_: self._on_round(place, agent, round_),
            on_contact=lambda contact: self._on_contact(place, agent, contact),
            on_drain=lambda name: self._on_drain(place, agent, name),
        )
        self._observe(agent)
        place.agent, place.workers = agent, []
        for predecessor in place.predecessors:
            stored = self.store.tree.keys.get(f"{KEYS.processes}{place.name}/{predecessor}")
            if stored is not None:
                record = json.loads(stored.value)
                ended = tuple(record["members"])
                agent.host.declare_dead(Predecessor(stored, place.name, record["lease"], ended, all_ended=True))
        place.predecessors.clear()
        self.engine.note(place.name, "boots", agent.agent_id)
        agent.start()
        for _ in range(place.nproc):
            self._start_worker(place)

    def _observe(self, agent: SimulatedAgent) -> None:
        """Let the invariants know who writes, and whoever wants to strike between two requests."""
        carry_out = agent.link.request

        def request(ask, reply):  # type: ignore[no-untyped-def]  # as Link.request
            self.requests += 1
            if self.on_request is not None:
                self.on_request(self.requests, agent)
            call = ask.call

            def attributed(store):  # type: ignore[no-untyped-def]  # as Ask.call
                self.invariants.writer = agent.agent_id
                return call(store)

            ask.call = attributed
            carry_out(ask, reply)

        agent.link.request = request  # type: ignore[method-assign]

    def _start_worker(self, place: Place) -> None:
        agent = place.agent
        if agent is None or agent.host.round.is_over:
            return
        worker = Worker(
            self.engine,
            self.pace,
            self.invariants,
            self.group_of,
            fresh_member(f"{place.name}-w{next(self._count)}", place.name),
            agent.host.declare,
            agent.clock,
            lambda worker: self._gone(place, agent, worker),
        )
        worker.known = agent.host.round
        place.workers.append(worker)
        # its start takes a moment
        self.engine.after(0.1 + 0.2 * self.engine.chance.random(), agent.deliver, self._ask_first, worker)

    def _ask_first(self, worker: Worker) -> None:
        worker.ask(failed=False)

    def group_of(self, round_: Round) -> Group:
        """The group of a round; the same object for all of its members."""
        key = (round_.number, round_.roster)
        if key not in self._groups:
            if len(self._groups) > 50:
                self._groups.pop(next(iter(self._groups)))
            self._groups[key] = Group(self.engine, self.pace, self.invariants, round_, self._connected)
        return self._groups[key]

    def _connected(self, one: str, other: str) -> bool:
        return not self._cut_data or frozenset((one, other)) not in self._cut_data

    def _on_round(self, place: Place, agent: SimulatedAgent, round_: Round) -> None:
        if place.agent is not agent:
            return
        place.heard_s = self.engine.now_s
        for worker in tuple(place.workers):
            if worker.name in round_.evicted and worker.is_alive and not round_.is_over:
                self.kill_worker(place, worker)
            else:
                worker.hear(round_)
                if is_left_behind(worker.member, round_):  # as the agent's `IdleWorkers` does
                    self.engine.after(worker.member.patience_s, agent.deliver, self._end_if_left_behind, place, worker)
        if round_.hopeless and any(worker.name in round_.members for worker in place.workers):
            # as its launcher does, with exit code 1; after a while somebody gives the command again
            self.engine.after(0.0, self.stop, place)
            self.engine.after(self.rest_s, self.boot, place)

    def _end_if_left_behind(self, place: Place, worker: Worker) -> None:
        if is_left_behind(worker.member, worker.known):
            self.kill_worker(place, worker)

    def _on_contact(self, place: Place, agent: SimulatedAgent, contact: Contact) -> None:
        if place.agent is agent and not math.isinf(contact.commit_until_s):
            for worker in place.workers:
                if contact.leave_at_s > worker.contact.leave_at_s or math.isinf(worker.contact.leave_at_s):
                    worker.contact = contact

    def _on_drain(self, place: Place, agent: SimulatedAgent, name: str) -> bool:
        found = [worker for worker in place.workers if place.agent is agent and worker.name == name]
        for worker in found:
            worker.leave()
        return bool(found)

    def _gone(self, place: Place, agent: SimulatedAgent, worker: Worker) -> None:
        """A worker has left the run: its agent does not start it again, but after a while somebody else does."""
        worker.die()
        place.workers.remove(worker)
        agent.host.withdraw(worker.name)
        self.invariants.left += 1
        if self.restarts:
            self.engine.after(self.rest_s, agent.deliver, self._start_worker, place)

    @property
    def workers(self) -> Iterator[Worker]:
        """All living workers of all hosts that are up."""
        return (w for place in self.places if place.agent is not None for w in place.workers if w.is_alive)

    # --- what people ask for ------------------------------------------------------------------------------------------

    def drain_worker(self, place: Place, worker: Worker) -> None:
        """Let a worker leave the run, as SIGTERM to it does."""
        if place.agent is not None:
            place.agent.deliver(worker.leave)

    def request_drain(self, worker: Worker) -> None:
        """Ask in the store that a worker leaves, as `torchelastic drain` does; nothing while it is down."""
        if self.store.running:
            self.engine.note("somebody asks", worker.name, "to leave")
            lease = self.store.grant_lease(DRAIN_TTL_S)
            self.store.put(KEYS.drain_of(worker.member), b"{}", lease.lease_id)

    # --- faults -------------------------------------------------------------------------------------------------------

    def kill_worker(self, place: Place, worker: Worker, *, for_good: bool = False) -> None:
        """End one worker's process; its agent starts another one, or `for_good` after a while somebody else does."""
        agent = place.agent
        if agent is None or not worker.is_alive:
            return
        worker.die()
        place.workers.remove(worker)
        agent.deliver(partial(agent.host.withdraw, worker.name, for_good=for_good))
        if self.restarts:
            delay_s = self.rest_s if for_good else self.restart_delay_s
            self.engine.after(delay_s, agent.deliver, self._start_worker, place)

    def hang_worker(self, worker: Worker) -> None:
        """It lives and does nothing any more."""
        self.engine.note(worker.name, "hangs")
        worker.is_hung = True

    def wake_worker(self, worker: Worker) -> None:
        """It goes on, and hears what it has missed."""
        worker.is_hung = False
        worker.go_on()

    def crash(self, place: Place, *, is_known: bool) -> None:
        """End the agent and all workers of a host at once, without a word.

        Args:
            place: the host.
            is_known: whether the agent that is started there next can tell that this one has ended.
        """
        agent = place.agent
        if agent is None:
            return
        self.engine.note(place.name, "crashes")
        agent.kill()
        place.agent = None
        for worker in place.workers:
            worker.die()
        place.workers = []
        if is_known:
            place.predecessors.append(agent.agent_id)

    def stop(self, place: Place) -> None:
        """End the workers and the agent of a host in order, as a launcher does on SIGTERM."""
        agent = place.agent
        if agent is None or agent.is_paused:
            return
        self.engine.note(place.name, "is stopped in order")
        for worker in place.workers:
            worker.die()
        place.workers = []
        agent.leave(at_end=lambda: self.crash(place, is_known=False) if place.agent is agent else None)

    def pause(self, place: Place) -> None:
        """Stop agent and workers of a host, as SIGSTOP does."""
        if place.agent is not None:
            self.engine.note(place.name, "is paused")
            place.agent.pause()
            for worker in place.workers:
                worker.is_stopped = True

    def resume(self, place: Place) -> None:
        """Let a host go on."""
        if place.agent is not None:
            self.engine.note(place.name, "goes on")
            place.agent.resume()
            for worker in tuple(place.workers):
                worker.is_stopped = False
                worker.go_on()

    def cut(self, place: Place) -> None:
        """Cut a host off from the store; the data network goes on."""
        if place.agent is not None:
            self.engine.note(place.name, "is cut off from the store")
            place.agent.cut()

    def cut_all(self) -> None:
        """Nobody reaches the store, which goes on: leases expire."""
        for place in self.places:
            self.cut(place)

    def heal_all(self) -> None:
        """Everybody reaches it again."""
        for place in self.places:
            self.heal(place)

    def heal(self, place: Place) -> None:
        """The store can be reached again from there."""
        if place.agent is not None:
            place.agent.link.heal()

    def break_stream(self, place: Place) -> None:
        """The watches of a host end, as by a connection that is reset."""
        if place.agent is not None:
            place.agent.break_stream()

    def cut_data(self, one: Place, other: Place) -> None:
        """Two hosts do not reach each other any more."""
        self.engine.note(one.name, "and", other.name, "are cut off from each other")
        self._cut_data.add(frozenset((one.name, other.name)))

    def heal_data(self) -> None:
        """All hosts reach each other again."""
        self._cut_data.clear()

    def stop_store(self) -> None:
        """As if etcd died."""
        self.engine.note("the store stops")
        self.store.stop()

    def start_store(self) -> None:
        """As if it came back with its data."""
        self.engine.note("the store is back")
        self.store.start()

    def hang_store(self, seconds: float) -> None:
        """As if its machine stood still for a while."""
        self.engine.note("the store hangs for", seconds)
        self.store.hang(seconds)

    def lose_data(self) -> None:
        """As if it came back empty."""
        self.engine.note("the store loses its data")
        empty = Tree()
        self.invariants.lost_data(empty)
        self.store.restore(empty)

    def back_up(self) -> None:
        """Make a copy that `restore_backup` puts back."""
        self._backup = self.store.backup()

    def restore_backup(self) -> None:
        """As if an operator had put an older copy of the data back; nothing without one."""
        if self._backup is not None:
            self.engine.note("an older copy of the store's data is put back")
            self.invariants.lost_data(self._backup)
            self.store.restore(self._backup)
            self._backup = None

    # --- the end ------------------------------------------------------------------------------------------------------

    def mend(self) -> None:
        """No more faults: everything runs and reaches everything."""
        self.weather.request_loss = self.weather.answer_loss = self.weather.lateness = self.weather.duplicates = 0.0
        self.heal_data()
        self.start_store()
        for place in self.places:
            self.heal(place)
            self.resume(place)
            self.boot(place)
        for worker in tuple(self.workers):
            if worker.is_hung and worker.member.ready_for == 0:  # nobody waits for one that has never asked
                self.wake_worker(worker)

    def is_over(self) -> bool:
        """Whether the run was closed and every worker has heard of it."""
        closed = (
            place.agent is not None and place.agent.host.round.state is RoundState.CLOSED for place in self.places
        )
        return any(closed) and all(worker.is_over for worker in self.workers)

    def is_settled(self) -> bool:
        """Whether everybody who may train does, in one group, or the run is over for all."""
        living = list(self.workers)
        chosen = [worker for worker in living if worker.name in self.invariants.latest.roster]
        if all(worker.is_hung for worker in chosen):  # nobody is left who could notice
            for worker in chosen:
                self.wake_worker(worker)
        if self.invariants.latest.is_over:
            for worker in living:  # nobody ends a worker that hangs when the run is over: it may be saving its results
                self.wake_worker(worker)
            return self.invariants.latest.state is RoundState.CLOSED and all(worker.is_over for worker in living)
        wanted = self.settings.usable(len(living))
        if not wanted:
            return not any(worker.group is not None and worker.group.is_formed for worker in living)
        # who hangs as a spare, or since its group was replaced, is ended when it is its turn
        groups = {id(worker.group): worker.group for worker in living if worker.group is not None and worker.runs}
        if len(groups) != 1:
            return False
        (group,) = groups.values()
        return group.is_formed and not group.is_broken and len(group.members) == len(group.round.roster) == wanted
