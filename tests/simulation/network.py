"""The way between a simulated host and the store: it delays, loses, repeats, and can be cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.simulation.engine import Engine
from tests.simulation.store import SimulatedStore
from torchelastic.rendezvous.requests import Ask, OpenWatch
from torchelastic.rendezvous.store import StoreError, StoreEvent, StoreUnavailableError, Watch

Reply = Callable[[Any, StoreError | None], None]


@dataclass
class Weather:
    """What the network does to requests and answers; the same for all hosts.

    Attributes:
        delay_s: of one message, drawn evenly from this range.
        request_loss: share of the requests that never arrive.
        answer_loss: share of those that are done, and whose answer never arrives.
        lateness: share of those that are done only after the caller has given up.
        duplicates: share of those that are done twice, the second time later.
        timeout_s: after so long a caller gives up.
        service_s: for which the store is busy with one request; it does one after the other.
    """

    delay_s: tuple[float, float] = (0.0002, 0.001)
    request_loss: float = 0.0
    answer_loss: float = 0.0
    lateness: float = 0.0
    duplicates: float = 0.0
    timeout_s: float = 5.0
    service_s: float = 0.0


class Link:
    """The connection of one host.

    Args:
        engine: time and chance.
        store: the other end.
        weather: shared with the other hosts.
        deliver: runs something at this end, as soon as this end runs at all.
    """

    def __init__(self, engine: Engine, store: SimulatedStore, weather: Weather, deliver: Callable[..., None]) -> None:
        self.is_up = True
        self.requests = 0
        self.events = 0
        self.bytes = 0
        self._engine, self._store, self._weather, self._deliver = engine, store, weather, deliver
        self._watches: list[Watch] = []
        self._session = 0
        self._last_event_s = 0.0

    def request(self, ask: Ask[Any], reply: Reply) -> None:
        """Carry a request to the store and the answer back, if the weather lets them."""
        self.requests += 1
        chance, weather = self._engine.chance.random, self._weather
        if not self.is_up or (weather.request_loss and chance() < weather.request_loss):
            self._give_up(reply)
            return
        if weather.lateness and chance() < weather.lateness:
            self._engine.after(weather.timeout_s * (1 + chance()), self._do, ask, None, self._store.restored)
            self._give_up(reply)
            return
        if weather.duplicates and chance() < weather.duplicates:
            self._engine.after(self._delay_s() + 2 * chance(), self._do, ask, None, self._store.restored)
        do = self._queue if weather.service_s else self._do
        self._engine.after(self._delay_s(), do, ask, reply, self._store.restored)

    def open_watch(
        self, request: OpenWatch, post: Callable[[Any], None], failed: Callable[[StoreError], None]
    ) -> Ask[None]:
        """A request that opens a watch whose events come through this link, in order, until `end_watches`."""
        session = self._session

        def on_events(events: Sequence[StoreEvent]) -> None:
            if self.is_up and session == self._session:
                self.events += len(events)
                self.bytes += sum(len(event.kv.value) for event in events)
                # one stream: what was sent first arrives first
                self._last_event_s = max(self._last_event_s, self._engine.now_s + self._delay_s())
                self._engine.after(self._last_event_s - self._engine.now_s, self._arrive, session, post, events)

        def on_error(error: StoreError) -> None:
            self._engine.after(self._delay_s(), self._arrive, session, failed, error)

        def call(_store: object) -> None:
            if session == self._session:
                self._watches.append(self._store.watch(request.prefix, request.start_revision, on_events, on_error))

        return Ask("watch", call)

    def end_watches(self) -> None:
        """Nothing that was sent so far arrives any more."""
        self._session += 1
        self._last_event_s = 0.0
        for watch in self._watches:
            watch.cancel()
        self._watches.clear()

    def cut(self, failed: Callable[[StoreError], None]) -> None:
        """From now on nothing goes through; the broken watches are noticed by their pings, seconds later."""
        self.is_up = False
        if self._watches:
            error = StoreUnavailableError("no answer to a ping")
            self._engine.after(5.0 + 10.0 * self._engine.chance.random(), self._arrive, self._session, failed, error)

    def heal(self) -> None:
        """What is sent from now on arrives."""
        self.is_up = True

    def break_stream(self, failed: Callable[[StoreError], None]) -> None:
        """The watches end: a connection was reset."""
        if self._watches:
            self._engine.after(0.0, self._arrive, self._session, failed, StoreUnavailableError("connection reset"))

    def _queue(self, ask: Ask[Any], reply: Reply | None, sent_to: int) -> None:
        """At the store's end, where others may be before us."""
        now_s, store = self._engine.now_s, self._store
        store.busy_until_s = max(now_s, store.busy_until_s) + self._weather.service_s
        self._engine.after(store.busy_until_s - now_s, self._do, ask, reply, sent_to)

    def _do(self, ask: Ask[Any], reply: Reply | None, sent_to: int) -> None:
        """At the store's end."""
        if not self.is_up or sent_to != self._store.restored:  # its connection has ended
            if reply is not None:
                self._give_up(reply)
            return
        hung_s = self._store.hung_until_s - self._engine.now_s
        if hung_s > 0.0:
            in_time = hung_s < self._weather.timeout_s
            self._engine.after(hung_s, self._do, ask, reply if in_time else None, sent_to)
            if reply is not None and not in_time:
                self._give_up(reply)
            return
        answer, error = None, None
        try:
            answer = ask.call(self._store)
        except StoreError as failure:
            error = failure
        if reply is None:
            return
        if self._weather.answer_loss and self._engine.chance.random() < self._weather.answer_loss:
            self._give_up(reply)
        else:
            self._engine.after(self._delay_s(), self._deliver, reply, answer, error)

    def _give_up(self, reply: Reply) -> None:
        error = StoreUnavailableError("no answer in time")
        self._engine.after(self._weather.timeout_s, self._deliver, reply, None, error)

    def _arrive(self, session: int, call: Callable[[Any], None], what: object) -> None:
        if session == self._session:
            self._deliver(call, what)

    def _delay_s(self) -> float:
        low, high = self._weather.delay_s
        return low + (high - low) * self._engine.chance.random()
