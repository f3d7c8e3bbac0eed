"""This host's part in the run: keeps its members in the store, follows the round, and leads when it is its turn.

One asyncio task does everything in order; what blocks runs on a thread. Whether this agent leads or not, the rules
are in `torchelastic.rendezvous.protocol`: here are only the effects. When the store is out of reach nothing is
forgotten: the task starts over, with the lease it had if that is still good, and writes what could not be written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential

from torchelastic.rendezvous.protocol import (
    Event,
    MembersChanged,
    Publish,
    RoundPublished,
    Settings,
    Tick,
    View,
    advance,
)
from torchelastic.rendezvous.records import (
    NO_ROUND,
    Keys,
    Member,
    RecordError,
    Round,
    RoundState,
    decode_member,
    decode_round,
    encode_member,
    encode_round,
)
from torchelastic.rendezvous.store import (
    Compare,
    CoordinationStore,
    Delete,
    EventKind,
    KeyValue,
    LeaseLostError,
    Put,
    StoreError,
    StoreEvent,
    StoreUnavailableError,
    Target,
    Watch,
)

log = logging.getLogger(__name__)

#: A closed run's document is kept this long, to turn late-comers away, and then the store is clean again.
CLOSED_TTL_S = 7200.0

T = TypeVar("T")


class _DeposedError(StoreError):
    """Another agent leads by now."""


@dataclass(frozen=True)
class _Failed:
    """A watch or the lease failed: the session has to start over."""

    error: StoreError


@dataclass(frozen=True)
class _Changed:
    """Something to write, or time to look again."""


class Membership:
    """See the module's docstring. Construct and use it on one event loop.

    Args:
        store: where the run's documents stand; its calls may block, its callbacks may come from any thread.
        keys: the run's keys.
        settings: for the case that this agent leads.
        agent_id: unique for each agent process.
        ttl_s: how long this host may be silent before its members count as lost.
        on_round: called on the event loop with every change of the round.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: CoordinationStore,
        keys: Keys,
        settings: Settings,
        *,
        agent_id: str,
        ttl_s: float,
        on_round: Callable[[Round], None],
        clock: Callable[[], float],
    ) -> None:
        self.round = NO_ROUND
        self.leads = False
        self._store, self._keys, self._settings = store, keys, settings
        self._agent_id, self._ttl_s, self._on_round, self._clock = agent_id, ttl_s, on_round, clock
        self._members: dict[str, Member] = {}
        self._dirty: set[str] = set()
        self._lease_id = 0
        self._lease_ttl_s = ttl_s
        self._round_revision = 0
        self._leadership_revision = 0
        self._view = View(settings)
        self._wake_at_s: float | None = None
        self._inbox: asyncio.Queue[Sequence[StoreEvent] | _Failed | _Changed] = asyncio.Queue()
        self._written = asyncio.Condition()
        self._watches: list[Watch] = []
        # one thread for what must stay in order, one for the sign of life, which must never wait behind it
        self._writer = ThreadPoolExecutor(1, "store")
        self._heart = ThreadPoolExecutor(1, "lease")
        self._task: asyncio.Task[None] | None = None
        self._in_reach = True
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
        await retrying(self._read_round)
        self._task = asyncio.create_task(self._run())

    def declare(self, member: Member) -> None:
        """Write or rewrite the record of a member of this host."""
        self._members[member.member_id] = member
        self._mark_dirty(member.member_id)

    def withdraw(self, member_id: str) -> None:
        """A member of this host is gone: a fact, so everybody is to hear of it at once. Unknown ids are ignored."""
        if self._members.pop(member_id, None) is not None:
            self._mark_dirty(member_id)

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of this host, as declared."""
        return tuple(self._members.values())

    async def until_closed(self) -> None:
        """Wait until the run is closed."""
        async with self._written:
            await self._written.wait_for(lambda: self.round.state is RoundState.CLOSED)

    async def until_written(self) -> None:
        """Wait until the store holds everything that was declared and withdrawn."""
        async with self._written:
            await self._written.wait_for(lambda: not self._dirty)

    async def stop(self) -> None:
        """Leave: revoke the lease, so that nothing of this host is left in the store. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._end_watches()
            if self._lease_id:
                await asyncio.wait_for(self._blocking(self._store.revoke_lease, self._lease_id), 2.0)
        except (StoreError, asyncio.TimeoutError) as error:
            log.info("could not give the lease back (%s): it ends by itself", error)
        self._store.close()
        self._writer.shutdown(wait=False)
        self._heart.shutdown(wait=False)

    # --- one session with the store after the other -------------------------------------------------------------------

    async def _run(self) -> None:
        pause_s = 0.05
        while True:
            began_s = self._clock()
            try:
                await self._session()
            except LeaseLostError as error:
                log.warning("the lease of this host is gone (%s): registering again", error)
                self._lease_id = 0
            except _DeposedError as error:
                log.info("another agent leads by now: %s", error)
            except StoreError as error:
                # once at each outage: the attempts go on every second, however long it takes
                level = logging.WARNING if self._in_reach else logging.DEBUG
                log.log(level, "etcd is out of reach (%s): membership is frozen, training goes on", error)
                self._in_reach = False
            await self._end_watches()
            self.leads = False
            pause_s = 0.05 if self._clock() - began_s > 5.0 else min(2 * pause_s, 1.0)
            await asyncio.sleep(pause_s)

    async def _session(self) -> None:
        self._inbox = asyncio.Queue()
        await self._ensure_lease()
        heart = asyncio.create_task(self._beat())
        try:
            await self._follow()
            if not self._in_reach:
                log.warning("etcd is back")
            self._in_reach = True
            while True:
                await self._flush()
                await self._lead()
                async with self._written:
                    self._written.notify_all()
                await self._take_messages()
        finally:
            heart.cancel()

    async def _ensure_lease(self) -> None:
        if self._lease_id:
            await self._blocking(self._store.keep_alive, self._lease_id)
            return
        lease = await self._blocking(self._store.grant_lease, self._ttl_s)
        self._lease_id, self._lease_ttl_s = lease.lease_id, lease.ttl_s
        self._dirty.update(self._members)

    async def _beat(self) -> None:
        """Show signs of life, three times in each time to live."""
        while True:
            await asyncio.sleep(self._lease_ttl_s / 3)
            try:
                await self._loop.run_in_executor(self._heart, self._store.keep_alive, self._lease_id)
            except StoreError as error:
                self._inbox.put_nowait(_Failed(error))
                return

    async def _follow(self) -> None:
        """Read and watch the round and the leader; stand for leader if there is none."""
        await self._read_round()
        leader = await self._blocking(self._store.get, self._keys.leader)
        revision = (await self._blocking(self._store.list_prefix, self._keys.leader)).revision
        for key in (self._keys.round, self._keys.leader):
            await self._watch(key, revision + 1)
        # both are read once more: a change between the first reading and the watches must not be missed
        await self._read_round()
        leader = await self._blocking(self._store.get, self._keys.leader)
        if leader is None:
            await self._campaign()
        elif leader.value == self._agent_id.encode():
            await self._take_office(leader.create_revision)

    async def _read_round(self) -> None:
        kv = await self._blocking(self._store.get, self._keys.round)
        if kv is None:
            self._round_revision = 0
        else:
            self._take_round(kv)

    async def _watch(self, prefix: str, start_revision: int) -> None:
        inbox, loop = self._inbox, self._loop

        def on_events(events: Sequence[StoreEvent]) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, events)

        def on_error(error: StoreError) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, _Failed(error))

        self._watches.append(await self._blocking(self._store.watch, prefix, start_revision, on_events, on_error))

    async def _end_watches(self) -> None:
        watches, self._watches = self._watches, []
        for watch in watches:
            await self._blocking(watch.cancel)

    async def _take_messages(self) -> None:
        """Wait for something to happen, then take in all that has happened."""
        timeout_s = None if self._wake_at_s is None else max(0.0, self._wake_at_s - self._clock())
        try:
            messages = [await asyncio.wait_for(self._inbox.get(), timeout_s)]
        except asyncio.TimeoutError:
            self._wake_at_s = None
            self._feed(Tick())
            return
        while not self._inbox.empty():
            messages.append(self._inbox.get_nowait())
        for message in messages:
            if isinstance(message, _Failed):
                raise message.error
            if not isinstance(message, _Changed):
                await self._take_events(message)

    async def _take_events(self, events: Sequence[StoreEvent]) -> None:
        present: list[Member] = []
        gone: list[str] = []
        for event in events:
            kv = event.kv
            if kv.key == self._keys.round and event.kind is EventKind.PUT:
                self._take_round(kv)
            elif kv.key == self._keys.leader and event.kind is EventKind.DELETE:
                await self._campaign()
            elif kv.key.startswith(self._keys.members):
                if event.kind is EventKind.DELETE:
                    gone.append(kv.key.removeprefix(self._keys.members))
                    present = [member for member in present if member.member_id != gone[-1]]
                else:
                    present.extend(_read_members([kv]))
        if present or gone:
            self._feed(MembersChanged(tuple(present), tuple(gone)))

    # --- writing ----------------------------------------------------------------------------------

    async def _flush(self) -> None:
        """Write what has changed on this host, all in one transaction."""
        while self._dirty:
            dirty = frozenset(self._dirty)
            writes = [self._write_of(member_id) for member_id in sorted(dirty)]
            values = {member_id: self._members.get(member_id) for member_id in dirty}
            await self._blocking(self._store.txn, (), writes)
            self._dirty -= {member_id for member_id in dirty if self._members.get(member_id) == values[member_id]}

    def _write_of(self, member_id: str) -> Put | Delete:
        key, member = self._keys.member(member_id), self._members.get(member_id)
        return Delete(key) if member is None else Put(key, encode_member(member), self._lease_id)

    def _mark_dirty(self, member_id: str) -> None:
        self._dirty.add(member_id)
        self._inbox.put_nowait(_Changed())

    # --- leading ----------------------------------------------------------------------------------

    async def _campaign(self) -> None:
        """Become the leader if nobody is."""
        nobody_leads = Compare(self._keys.leader, Target.CREATE_REVISION, 0)
        put = Put(self._keys.leader, self._agent_id.encode(), self._lease_id)
        result = await self._blocking(self._store.txn, (nobody_leads,), (put,))
        if result.succeeded:
            await self._take_office(result.revision)
        else:
            self.leads = False

    async def _take_office(self, leadership_revision: int) -> None:
        await self._read_round()
        listing = await self._blocking(self._store.list_prefix, self._keys.members)
        await self._watch(self._keys.members, listing.revision + 1)
        self.leads, self._leadership_revision = True, leadership_revision
        self._view = View(self._settings)
        self._feed(RoundPublished(self.round))
        self._feed(MembersChanged(tuple(_read_members(listing.items))))
        log.info("this agent leads run %s", self._keys.root)

    def _feed(self, event: Event) -> None:
        """Tell the protocol; what it wants done is asked for in `_lead`, once for everything that has happened."""
        if self.leads:
            self._view, _ = advance(self._view, event, self._clock())

    async def _lead(self) -> None:
        """Do what the protocol says until it is content."""
        self._wake_at_s = None
        while self.leads:
            self._view, actions = advance(self._view, Tick(), self._clock())
            if not actions:
                return
            (action,) = actions
            if not isinstance(action, Publish):
                self._wake_at_s = action.at_s
                return
            await self._publish(action.round)

    async def _publish(self, round_: Round) -> None:
        """Write the round if nobody else leads by now and the round is the one that the decision was made on."""
        still_leader = Compare(self._keys.leader, Target.CREATE_REVISION, self._leadership_revision)
        unchanged = Compare(self._keys.round, Target.MOD_REVISION, self._round_revision)
        lease_id = 0
        if round_.state is RoundState.CLOSED:
            lease_id = (await self._blocking(self._store.grant_lease, CLOSED_TTL_S)).lease_id
        put = Put(self._keys.round, encode_round(round_), lease_id)
        result = await self._blocking(self._store.txn, (still_leader, unchanged), (put,))
        if not result.succeeded:
            raise _DeposedError(f"round {round_.number} was not published")
        log.info("round %d is %s: %s", round_.number, round_.state.value, round_.because)
        self._set_round(round_, result.revision)

    def _take_round(self, kv: KeyValue) -> None:
        if kv.mod_revision <= self._round_revision:
            return  # our own write, or an event that the reading has overtaken
        try:
            self._set_round(decode_round(kv.key, kv.value), kv.mod_revision)
        except RecordError as error:
            log.error("ignored: %s", error)

    def _set_round(self, round_: Round, revision: int) -> None:
        self.round, self._round_revision = round_, revision
        self._feed(RoundPublished(round_))
        self._on_round(round_)

    async def _blocking(self, call: Callable[..., T], *args: Any) -> T:
        return await self._loop.run_in_executor(self._writer, partial(call, *args))


def _read_members(items: Sequence[KeyValue]) -> list[Member]:
    """The members among some keys; what is none is reported and ignored."""
    members = []
    for kv in items:
        try:
            members.append(decode_member(kv.key, kv.value, kv.create_revision))
        except RecordError as error:
            log.error("ignored: %s", error)
    return members
