"""Leadership of a run: what a host knows and does while it is the one that decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from torchelastic.rendezvous.dead_agents import MAX_WRITES
from torchelastic.rendezvous.protocol import Publish, advance
from torchelastic.rendezvous.records import Keys, Member, RecordError, RoundState, decode_member
from torchelastic.rendezvous.requests import OpenWatch, get, list_prefix, txn
from torchelastic.rendezvous.round_document import RoundDocument
from torchelastic.rendezvous.store import Compare, Delete, KeyValue, Put, Target
from torchelastic.rendezvous.view import (
    COME_BACK_S,
    Event,
    MembersChanged,
    RoundPublished,
    Settings,
    Tick,
    View,
    absorb,
)

log = logging.getLogger(__name__)


class Leadership:
    """See the module's docstring.

    Args:
        keys: the run's keys.
        agent_id: of this host's agent: the value of the leader's key while it is the leader.
        settings: of the run.
        document: the round, which only the leader writes.
        clock: monotonic seconds.
    """

    def __init__(
        self, keys: Keys, agent_id: str, settings: Settings, document: RoundDocument, clock: Callable[[], float]
    ) -> None:
        self.is_held = False
        #: when to decide again although nothing has happened; None: not before something happens
        self.wake_at_s: float | None = None
        self._keys, self._settings, self._document, self._clock = keys, settings, document, clock
        self._name = agent_id.encode()
        self._since_revision = 0
        self._view = View(settings)

    async def campaign(self, lease_id: int, *, was_lost: bool) -> None:
        """Become the leader if nobody is. `lease_id` is this host's; `was_lost` as for `take`. Raises StoreError."""
        nobody_leads = Compare(self._keys.leader, Target.CREATE_REVISION, 0)
        result = await txn((nobody_leads,), (Put(self._keys.leader, self._name, lease_id),))
        if result.succeeded:
            await self.take(result.revision, was_lost=was_lost)

    async def unseat(self, kv: KeyValue) -> None:
        """The leader's key hangs on nobody's lease, so no agent wrote it, and it would stay for ever."""
        log.error("ignored: %s was written by somebody who is no agent: it is removed", kv.key)
        await self._remove(kv)

    async def resign(self) -> None:
        """Leave the leader's key to another host, if this one has it. Raises StoreError."""
        self.leave()
        kv = await get(self._keys.leader)
        if kv is not None and kv.value == self._name:
            await self._remove(kv)
            log.warning("this agent stops leading run %s", self._keys.root)

    async def _remove(self, leader: KeyValue) -> None:
        """Every agent is notified that it is gone, and stands for election."""
        unchanged = Compare(leader.key, Target.MOD_REVISION, leader.mod_revision)
        await txn((unchanged,), (Delete(leader.key),))

    async def take(self, since_revision: int, *, was_lost: bool) -> None:
        """Learn all, and follow the members.

        Args:
            since_revision: at which this host's leader key was created.
            was_lost: whether this host's own lease had been lost before.
        """
        await self._document.read()
        listing = await list_prefix(self._keys.members)
        await OpenWatch(self._keys.members, listing.revision + 1)
        self.is_held, self._since_revision = True, since_revision
        self._view = View(self._settings)
        self.handle(MembersChanged(tuple(read_members(listing.items))))
        self.handle(RoundPublished(self._document.round, proves_no_loss=was_lost))
        log.info("this agent leads run %s", self._keys.root)

    def doubt(self) -> None:
        """For a time to live, or as long as an agent may need to come back, a missing key proves nothing."""
        if self.is_held:
            # never earlier than before: the same bound, from a later time on
            self._view = replace(self._view, trusted_from_s=self._clock() + max(self._settings.ttl_s, COME_BACK_S))

    def leave(self) -> None:
        """Decide nothing any more."""
        self.is_held, self.wake_at_s = False, None

    def is_held_by(self, leader: KeyValue) -> bool:
        """Whether the leader's key is that of this term."""
        return self.is_held and (leader.create_revision, leader.value) == (self._since_revision, self._name)

    def handle(self, event: Event) -> None:
        """Tell the protocol; what it wants done is asked for in `decide`, once for everything that has happened."""
        if self.is_held:
            self._view = absorb(self._view, event, self._clock())

    async def decide(self, word: bytes) -> None:
        """Do what the protocol says until it is content; `word` is the store's incarnation."""
        self.wake_at_s = None
        while self.is_held:
            self._view, actions = advance(self._view, Tick(), self._clock())
            if not actions:
                return
            (action,) = actions
            if not isinstance(action, Publish):
                self.wake_at_s = action.at_s
                return
            await self._publish(action, word)

    async def _publish(self, publish: Publish, word: bytes) -> None:
        """Write the round if nobody else leads by now and the round is the one that the decision was made on."""
        # a store that has lost its data counts from 1 again: another host's key may have been created at this revision
        still_leader = (
            Compare(self._keys.leader, Target.CREATE_REVISION, self._since_revision),
            Compare(self._keys.leader, Target.VALUE, self._name),
        )
        cleared = [Delete(self._keys.member(name)) for name in publish.forgotten]
        vanishing: dict[str, bytes] = {}
        if publish.round.state is RoundState.CLOSED:
            vanishing = {self._keys.incarnation: word} if word else {}
            vanishing |= {kv.key: kv.value for kv in (await self._records_of_agents())[: MAX_WRITES - len(cleared)]}
        await self._document.write(publish.round, still_leader, cleared, vanishing)
        log.info("round %d is %s: %s", publish.round.number, publish.round.state.value, publish.round.because)

    async def _records_of_agents(self) -> list[KeyValue]:
        """Agents that live delete their own: those that have ended without a word come first."""
        living = {kv.key.removeprefix(self._keys.agents) for kv in (await list_prefix(self._keys.agents)).items}
        records = (await list_prefix(self._keys.processes)).items
        return sorted(records, key=lambda kv: kv.key.removeprefix(self._keys.processes) in living)


def read_members(items: Sequence[KeyValue]) -> list[Member]:
    """The members among some keys; what is none is reported and ignored."""
    members = []
    for kv in items:
        try:
            members.append(decode_member(kv.key, kv.value, kv.create_revision))
        except RecordError as error:
            log.error("ignored: %s", error)
    return members
