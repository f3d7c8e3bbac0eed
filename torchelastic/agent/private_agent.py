"""The agent of one process that was started without a launcher: serves it, and ends with it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from torchelastic.agent.agent import Agent, AgentOptions, Outcome
from torchelastic.agent.host_events import Event, RoundChanged
from torchelastic.agent.tasks import first_of, keep_running, within
from torchelastic.processes.lifeline import process_end
from torchelastic.rendezvous.store import CoordinationStore

if TYPE_CHECKING:
    from torchelastic.agent.status_publisher import StatusPublisher

#: Once nothing can be done for the owner, it is waited for so long: it says why.
OWNER_ENDS_S = 5.0
#: The status of this host is published once there is a group, or so much later: nobody waits for it.
STATUS_AFTER_S = 5.0


class PrivateAgent(Agent):
    """See `Agent`.

    Args:
        options: see `AgentOptions`.
        store: a connection to the run's etcd, owned by the agent from now on.
        owner_pid: the process that it serves and ends with.
    """

    def __init__(self, options: AgentOptions, store: CoordinationStore, owner_pid: int) -> None:
        super().__init__(options, store, owner_pid)
        self._owner = owner_pid
        self._has_group = asyncio.Event()
        self._status: StatusPublisher | None = None
        self._publishing: asyncio.Task[None] | None = None

    async def _fail(self, message: str) -> Outcome:
        """The owner says what it was."""
        self.connections.fail_all("unavailable", message)
        await within(OWNER_ENDS_S, process_end(self._owner))
        await self.connections.stop()
        return Outcome(1)

    def _build(self) -> None:
        super()._build()
        self._events.subscribe(self.on_event)

    def on_event(self, event: Event) -> None:
        """There is a group, and the status changes with all that happens."""
        if isinstance(event, RoundChanged) and event.round.roster:
            self._has_group.set()
        if self._status is not None:
            self._status.on_event(event)

    def _begin(self) -> None:
        self._publishing = asyncio.ensure_future(keep_running("beginning to publish the status", self._publish))

    async def _publish(self) -> None:
        """Publish the status, of which the parts are loaded when nobody waits any more for a group."""
        await within(STATUS_AFTER_S, self._has_group.wait())
        make = await asyncio.get_running_loop().run_in_executor(None, _status_publisher)
        self._status = make(
            self._store, self._keys, host=self._host, incarnation=self._incarnation, membership=self.membership
        )
        self._status.on_event(RoundChanged(self.membership.host.round))
        self._status.start()

    async def _serve(self) -> Outcome:
        await first_of(self._owner_is_over(), self._draining.wait(), self._interrupted.wait())
        if self._draining.is_set():
            self.connections.leave_all()
            patience = asyncio.sleep(self.options.term_grace_s)
            await first_of(self._owner_is_over(), self._interrupted.wait(), patience)
        self.connections.process_gone(self._owner)
        await self._leave_in_order(self.options.url.settings.ttl_s)
        return Outcome(0)

    async def _owner_is_over(self) -> None:
        await first_of(process_end(self._owner), self.connections.emptied.wait())

    async def _stop(self) -> None:
        if self._publishing is not None:
            self._publishing.cancel()
        if self._status is not None:
            self._status.stop()
        await super()._stop()


def _status_publisher() -> type[StatusPublisher]:
    """Load it: it takes a third as long as all that the owner waits for."""
    from torchelastic.agent.status_publisher import StatusPublisher

    return StatusPublisher
