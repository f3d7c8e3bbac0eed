"""A simulated agent process: runs the production `Host` of its host, and the host's simulated workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from tests.simulation.engine import Engine
from tests.simulation.network import Link, Weather
from tests.simulation.store import SimulatedStore
from torchelastic.rendezvous.host import Host
from torchelastic.rendezvous.records import Keys, Round
from torchelastic.rendezvous.requests import Ask, EndWatches, Failed, Message, OpenWatch, Receive, Sleep
from torchelastic.rendezvous.store import StoreError
from torchelastic.rendezvous.view import Settings
from torchelastic.rendezvous.worker_rules import Contact


def describe(lease_id: int, members: Collection[str]) -> bytes:
    """The record that outlives a simulated agent: who its members are, which the world knows all else of."""
    return json.dumps({"lease": lease_id, "members": list(members)}).encode()


class Task:
    """One of a host's coroutines on its way."""

    def __init__(
        self, agent: SimulatedAgent, coroutine: Coroutine[Any, Any, None], at_end: Callable[[], None] = lambda: None
    ) -> None:
        self._agent, self._coroutine, self._at_end = agent, coroutine, at_end
        self.is_cancelled = False

    def resume(self, answer: object, error: StoreError | None = None) -> None:
        """Go on with the answer to the last request, to the next one."""
        if not self._agent.is_alive or self.is_cancelled:
            self._coroutine.close()
            return
        try:
            request = self._coroutine.send(answer) if error is None else self._coroutine.throw(error)
        except (StopIteration, StoreError):
            self._at_end()
        else:
            self._agent.carry_out(request, self)


class SimulatedAgent:
    """See the module's docstring.

    Args:
        engine: time and chance.
        store: the run's store.
        weather: of the network.
        keys: of the run.
        settings: of the run.
        host: the host's name.
        agent_id: unique for each process.
        clock_rate: how much faster than the engine's time its clock runs.
        clock_offset_s: what its clock shows at the beginning.
        on_round: called with each change of the round.
        on_contact: called with how long the workers may go on.
        on_drain: called with a member that somebody wants to leave the run; returns whether it is this agent's.
    """

    def __init__(
        self,
        engine: Engine,
        store: SimulatedStore,
        weather: Weather,
        keys: Keys,
        settings: Settings,
        *,
        host: str,
        agent_id: str,
        clock_rate: float,
        clock_offset_s: float,
        on_round: Callable[[Round], None],
        on_contact: Callable[[Contact], None],
        on_drain: Callable[[str], bool],
    ) -> None:
        self.agent_id, self.host_name = agent_id, host
        self.is_alive = True
        self.is_paused = False
        self.event_cost_s = 0.0
        self.link = Link(engine, store, weather, self.deliver)
        self._engine, self._rate, self._offset_s = engine, clock_rate, clock_offset_s
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._inbox: list[Message] = []
        self._receiver: tuple[Task, int] | None = None
        self._tasks: list[Task] = []
        self._receives = 0
        self._is_rousing = False
        self._busy_until_s = 0.0
        self.host = Host(
            keys,
            settings,
            name=host,
            agent_id=agent_id,
            incarnation=agent_id,
            clock=self.clock,
            jitter=engine.chance.random,
            post=self._post,
            on_round=on_round,
            on_contact=lambda sent_s: on_contact(Contact.at(sent_s, settings.orphan_timeout_s)),
            on_drain=on_drain,
            describe=describe,
        )

    def start(self) -> None:
        """Begin both coroutines."""
        self._tasks = [Task(self, self.host.run()), Task(self, self.host.beat())]
        for task in self._tasks:
            task.resume(None)

    def leave(self, at_end: Callable[[], None]) -> None:
        """End in order, as on SIGTERM: say that the members have ended, give the lease back."""
        for task in self._tasks:
            task.is_cancelled = True
        self.link.end_watches()
        Task(self, self.host.leave(), at_end).resume(None)

    def clock(self) -> float:
        """Seconds of this host's own clock."""
        return self._offset_s + self._rate * self._engine.now_s

    # --- faults -------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """As SIGKILL does: nothing more is done; what is on its way to the store still arrives."""
        self.is_alive = False
        self.link.end_watches()

    def pause(self) -> None:
        """As SIGSTOP does."""
        self.is_paused = True

    def resume(self) -> None:
        """As SIGCONT does: what has come in the meantime is dealt with now."""
        self.is_paused = False
        backlog, self._backlog = self._backlog, []
        for call, args in backlog:
            self.deliver(call, *args)

    def cut(self) -> None:
        """Cut this host off from the store."""
        self.link.cut(self._failed)

    def break_stream(self) -> None:
        """End its watches, as a reset connection does."""
        self.link.break_stream(self._failed)

    # --- carrying requests out ----------------------------------------------------------------------------------------

    def deliver(self, call: Callable[..., None], *args: Any) -> None:
        """Run something in this process, now or when it runs again."""
        if not self.is_alive:
            return
        if self.is_paused:
            self._backlog.append((call, args))
        else:
            call(*args)

    def carry_out(self, request: object, task: Task) -> None:
        """Do what one of the coroutines asks for."""
        if isinstance(request, Ask):
            self.link.request(request, task.resume)
        elif isinstance(request, Receive):
            self._receive(request, task)
        elif isinstance(request, Sleep):
            self._engine.after(request.seconds / self._rate, self.deliver, task.resume, None)
        elif isinstance(request, OpenWatch):
            self.link.request(self.link.open_watch(request, self._post, self._failed), task.resume)
        else:
            assert isinstance(request, EndWatches), request
            self.link.end_watches()
            self._inbox.clear()
            task.resume(None)

    def _receive(self, request: Receive, task: Task) -> None:
        self._receives += 1
        self._receiver = (task, self._receives)
        if self._inbox:
            self._hand_over(self._receives)
        elif request.until_s is not None:
            seconds = max(0.0, request.until_s - self.clock()) / self._rate
            self._engine.after(seconds + 1e-6, self.deliver, self._hand_over, self._receives)

    def _post(self, message: Message) -> None:
        self._inbox.append(message)
        if self._receiver is not None and not self._is_rousing:
            # not at once: the poster is in the middle of something
            self._is_rousing = True
            self._engine.after(max(0.0, self._busy_until_s - self._engine.now_s), self.deliver, self._rouse)

    def _rouse(self) -> None:
        self._is_rousing = False
        if self._receiver is not None and self._inbox:
            self._hand_over(self._receiver[1])

    def _failed(self, error: StoreError) -> None:
        self._post(Failed(error))

    def _hand_over(self, number: int) -> None:
        """Give the receiver with this number all that is there, if it still waits."""
        if self._receiver is None or self._receiver[1] != number:
            return
        task, self._receiver = self._receiver[0], None
        messages, self._inbox = self._inbox, []
        if self.event_cost_s:
            count = sum(len(message) for message in messages if isinstance(message, Sequence))
            self._busy_until_s = self._engine.now_s + self.event_cost_s * count
        task.resume(messages)
