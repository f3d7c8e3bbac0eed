"""This host's part in the run, on a real store: carries out what `torchelastic.rendezvous.host` asks for.

Two asyncio tasks, one for the session with the store and one for the signs of life; what blocks runs on threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential

from torchelastic.agent.host_events import Event, MemberDeclared, MemberWithdrawn
from torchelastic.agent.predecessors import POLL_S, Predecessors, describe
from torchelastic.agent.tasks import keep_running
from torchelastic.processes.identity import Process
from torchelastic.rendezvous.host import Host
from torchelastic.rendezvous.records import AgentRecord, Keys, Round, RoundState
from torchelastic.rendezvous.requests import Ask, EndWatches, Failed, Message, OpenWatch, Receive, Request, Sleep
from torchelastic.rendezvous.store import CoordinationStore, StoreError, StoreEvent, StoreUnavailableError, Watch
from torchelastic.rendezvous.view import Settings
from torchelastic.version import __version__

log = logging.getLogger(__name__)

#: How long the last words may take, when this host leaves.
LEAVE_TIMEOUT_S = 2.0


class Membership:
    """See the module's docstring. Construct and use it on one event loop.

    Args:
        store: where the run's documents stand; its calls may block, its callbacks may come from any thread.
        keys: the run's keys.
        settings: for the case that this agent leads.
        host: this host's name.
        agent_id: unique for each agent process.
        on_round: called on the event loop with every change of the round.
        on_contact: called on the event loop with the time of each sign of life that the store has answered.
        on_reach: called on the event loop when the store does not answer any more (False), or does again (True).
        on_drain: called on the event loop with a member of this host that somebody wants to leave the run; returns
            whether it is this agent's.
        processes: of all members of this host that there have been.
        owner_pid: of a private agent: the process that it serves.
        clock: seconds that never go backwards.

    Attributes:
        host: what this host says and knows of the run.
    """

    def __init__(
        self,
        store: CoordinationStore,
        keys: Keys,
        settings: Settings,
        *,
        host: str,
        agent_id: str,
        on_round: Callable[[Round], None],
        on_contact: Callable[[float], None] = lambda _sent_s: None,
        on_reach: Callable[[bool], None] = lambda _in_reach: None,
        on_drain: Callable[[str], bool] = lambda _member_id: False,
        processes: Mapping[str, Process] | None = None,
        owner_pid: int | None = None,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._clock = store, clock
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        is_another = lambda key, _process: not key.endswith(f"/{agent_id}")  # noqa: E731 - one line
        self._predecessors = Predecessors(store, keys, host, is_one=is_another, owner_pid=owner_pid)
        self.host = Host(
            keys,
            settings,
            name=host,
            agent_id=agent_id,
            incarnation=uuid.uuid4().hex,
            about=AgentRecord(os.getpid(), {**settings.agreed, "version": __version__}),
            describe=partial(describe, {} if processes is None else processes),
            clock=clock,
            jitter=random.random,
            post=self._inbox.put_nowait,
            on_round=on_round,
            on_contact=on_contact,
            on_reach=on_reach,
            on_drain=on_drain,
            on_progress=self._on_progress,
        )
        self._session = 0
        self._written = asyncio.Condition()
        self._watches: list[Watch] = []
        # one thread for what must stay in order, one for the signs of life, which must never wait behind it
        self._writer = ThreadPoolExecutor(1, "store")
        self._heart = ThreadPoolExecutor(1, "lease")
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False

    async def start(self, connect_timeout_s: float) -> None:
        """Find the store and take part. Raises StoreError when it stays out of reach for `connect_timeout_s`."""
        self._loop = asyncio.get_running_loop()
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(StoreUnavailableError),
            stop=stop_after_delay(connect_timeout_s),
            wait=wait_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )
        await retrying(self._look)
        await self._blocking(lambda _store: self._predecessors.look())
        await self._declare_predecessors_dead()
        self._tasks = [
            asyncio.create_task(keep_running("reporting earlier agents of this host", self._keep_declaring)),
            asyncio.create_task(
                keep_running(
                    "the session with etcd",
                    lambda: self._drive(self.host.run(), self._writer),
                    lambda: self._drive(self.host.abort(), self._writer),
                )
            ),
            asyncio.create_task(
                keep_running("keeping the lease alive", lambda: self._drive(self.host.beat(), self._heart))
            ),
        ]

    def on_event(self, event: Event) -> None:
        """Declare and withdraw members of this host."""
        match event:
            case MemberDeclared(member):
                self.host.declare(member)
            case MemberWithdrawn(member_id, for_good):
                self.host.withdraw(member_id, for_good=for_good)

    async def until_closed(self) -> None:
        """Wait until the run is closed."""
        async with self._written:
            await self._written.wait_for(lambda: self.host.round.state is RoundState.CLOSED)

    async def until_written(self) -> None:
        """Wait until the store holds everything that was declared and withdrawn."""
        async with self._written:
            await self._written.wait_for(lambda: self.host.is_written)

    async def stop(self) -> None:
        """Leave: say that this host's members have ended, and revoke the lease. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await asyncio.wait_for(self._leave(), LEAVE_TIMEOUT_S)
        except (StoreError, asyncio.TimeoutError) as error:
            log.info("could not release the lease (%s): it ends by itself", str(error) or "no answer in time")
        self._store.close()
        self._writer.shutdown(wait=False)
        self._heart.shutdown(wait=False)

    async def _keep_declaring(self) -> None:
        """A process that was killed may take seconds to end, with much memory or a GPU."""
        while not self._predecessors.is_empty:
            await asyncio.sleep(POLL_S)
            await self._declare_predecessors_dead()

    async def _declare_predecessors_dead(self) -> None:
        for predecessor in await self._blocking(lambda _store: self._predecessors.ended()):
            self.host.declare_dead(predecessor)

    async def _look(self) -> None:
        await self._drive(self.host.look(), self._writer)

    async def _leave(self) -> None:
        await self._end_watches()
        await self._drive(self.host.leave(), self._writer)

    # --- carrying requests out ----------------------------------------------------------------------------------------

    async def _drive(self, coroutine: Coroutine[Any, Any, Any], executor: Executor) -> None:
        """Run one of the host's coroutines: do what it asks for, tell it the answer or the error."""
        answer: Any = None
        error: StoreError | None = None
        try:
            while True:
                request = coroutine.send(answer) if error is None else coroutine.throw(error)
                try:
                    answer, error = await self._carry_out(request, executor), None
                except StoreError as failure:
                    error = failure
        except StopIteration:
            return
        finally:
            coroutine.close()

    async def _carry_out(self, request: Request[Any], executor: Executor) -> Any:
        if isinstance(request, Ask):
            return await self._loop.run_in_executor(executor, request.call, self._store)
        if isinstance(request, Receive):
            return await self._receive(request.until_s)
        if isinstance(request, OpenWatch):
            return await self._open_watch(request)
        if isinstance(request, EndWatches):
            return await self._end_watches()
        assert isinstance(request, Sleep), request
        return await asyncio.sleep(request.seconds)

    async def _receive(self, until_s: float | None) -> Sequence[Message]:
        timeout_s = None if until_s is None else max(0.0, until_s - self._clock())
        try:
            messages = [await asyncio.wait_for(self._inbox.get(), timeout_s)]
        except asyncio.TimeoutError:
            return ()
        while not self._inbox.empty():
            messages.append(self._inbox.get_nowait())
        return messages

    async def _open_watch(self, request: OpenWatch) -> None:
        session, loop, inbox = self._session, self._loop, self._inbox

        def post(message: Message) -> None:
            if session == self._session:  # on the event loop: what comes later than the end of its session is dropped
                inbox.put_nowait(message)

        def on_events(events: Sequence[StoreEvent]) -> None:
            loop.call_soon_threadsafe(post, events)

        def on_error(error: StoreError) -> None:
            loop.call_soon_threadsafe(post, Failed(error))

        self._watches.append(
            await self._blocking(lambda store: store.watch(request.prefix, request.start_revision, on_events, on_error))
        )

    async def _end_watches(self) -> None:
        self._session += 1
        watches, self._watches = self._watches, []
        for watch in watches:
            await self._blocking(lambda _store, watch=watch: watch.cancel())  # type: ignore[misc]  # bound at once
        while not self._inbox.empty():
            self._inbox.get_nowait()

    async def _blocking(self, call: Callable[[CoordinationStore], Any]) -> Any:
        return await self._loop.run_in_executor(self._writer, call, self._store)

    def _on_progress(self) -> None:
        self._loop.create_task(self._notify())

    async def _notify(self) -> None:
        async with self._written:
            self._written.notify_all()
