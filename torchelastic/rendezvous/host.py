"""One host's part in a run: keeps its members in the store, follows the round, and leads when it is its turn.

Only decisions and requests are in here (see `requests.py`); the rules of who is in are in `protocol.py`. When the store
is out of reach nothing is forgotten: a session with the store fails as a whole, and the next one begins by finding out
what is true now.

What a session relies on:

* Every write of this host's members also compares and renews the host's own key. A write whose answer was lost may yet
  arrive, but then the key is another one, and it has no effect: writes happen in order and once, or not at all.
* A round is written only by whoever holds the leader's key (its create revision and value are compared) and only over
  the very round that the decision was made on (its mod revision is compared).
* A round in the store that is older than the one this host knows means that the store has lost data: it is put back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from torchelastic.rendezvous.dead_agents import MAX_WRITES, Predecessor, declare_dead
from torchelastic.rendezvous.leadership import Leadership, read_members
from torchelastic.rendezvous.own_records import OwnRecords
from torchelastic.rendezvous.records import MAX_TEXT, AgentRecord, Keys, Member, RecordError, Round
from torchelastic.rendezvous.requests import (
    Changed,
    EndWatches,
    Failed,
    Message,
    OpenWatch,
    Receive,
    Sleep,
    get,
    grant_lease,
    keep_alive,
    list_prefix,
    revoke_lease,
    txn,
)
from torchelastic.rendezvous.round_document import RoundDocument, StartOverError
from torchelastic.rendezvous.store import (
    Compare,
    Delete,
    EventKind,
    KeyValue,
    LeaseLostError,
    Put,
    StoreAccessError,
    StoreError,
    StoreEvent,
    Target,
)
from torchelastic.rendezvous.view import MembersChanged, RoundPublished, Settings
from torchelastic.text import escaped

log = logging.getLogger(__name__)

#: Between two sessions: the first pause, and the longest; twice as long each time, give or take a half.
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
#: A session that lasted this long was a good one.
GOOD_SESSION_S = 5.0
#: What it means for the run that a host does not reach the store.
FROZEN = "membership is frozen, training goes on as long as no worker is lost"


class Host:
    """See the module's docstring. Not thread-safe: everything happens on one event loop.

    `run` and `beat` are to be run side by side, their requests carried out in order, each.

    Args:
        keys: the run's keys.
        settings: for the case that this host leads; its `ttl_s` is also the lease's.
        name: this host's name.
        agent_id: unique for each agent process.
        about: the value of the agent's key: which process it is, and what it was started with.
        describe: the content of the record that outlives this agent, of its lease and of its living members, so that
            somebody on its host can tell later whether their processes have ended.
        incarnation: a random word; that of the first agent in an empty store names the store's life.
        clock: monotonic seconds.
        jitter: random numbers in [0, 1), to spread what many hosts would else do at the same moment.
        post: puts a message into the inbox that `Receive` empties.
        on_round: called with every change of the round.
        on_contact: called with the time at which a sign of life was sent that has kept this host's members registered.
        on_reach: called when the store does not answer any more (False), and when it does again (True).
        on_drain: called with a member that somebody wants to leave the run; returns whether it is this agent's.
        on_progress: called whenever this host has written what it had to and is about to wait.
    """

    def __init__(
        self,
        keys: Keys,
        settings: Settings,
        *,
        name: str,
        agent_id: str,
        incarnation: str,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        post: Callable[[Message], None],
        on_round: Callable[[Round], None],
        about: AgentRecord | None = None,
        describe: Callable[[int, Collection[str]], bytes] = lambda _lease_id, _members: b"{}",
        on_contact: Callable[[float], None] = lambda _sent_s: None,
        on_reach: Callable[[bool], None] = lambda _in_reach: None,
        on_drain: Callable[[str], bool] = lambda _member_id: False,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._outliving_key = f"{keys.processes}{name}/{agent_id}"
        self._records = OwnRecords(keys, self._outliving_key, describe)
        self._document = RoundDocument(keys, self._on_change)
        self._leadership = Leadership(keys, agent_id, settings, self._document, clock)
        self._drain, self._on_drain = keys.drain_of_host(name), on_drain
        self._keys, self._settings, self._agent_id = keys, settings, agent_id
        self._own_key, self._new_incarnation = f"{keys.agents}{name}/{agent_id}", incarnation
        self._about = about or AgentRecord()
        self._clock, self._jitter, self._post = clock, jitter, post
        self._on_round, self._on_contact, self._on_progress = on_round, on_contact, on_progress
        self._on_reach = on_reach
        self._predecessors: list[Predecessor] = []
        self._incarnation = ""
        self.in_reach = True  # whether the store answers, as far as is known
        self._was_lost = False
        self._told, self._wrote_s, self._answered_s = 0, clock(), clock()
        self._session, self._in_session = 0, False
        self.lease = 0  # of what this host writes; 0: it has no session with the store at the moment
        self._lease_id, self._own_revision = 0, 0
        self._old_leases: list[int] = []
        self._lease_ttl_s = settings.ttl_s
        self._said_of_leader = ""

    # --- what the workers of this host do -----------------------------------------------------------------------------

    def declare(self, member: Member) -> None:
        """Write or rewrite the record of a member of this host."""
        self._records.declare(member)
        self._post(Changed())

    def withdraw(self, member_id: str, *, for_good: bool = False) -> None:
        """A member of this host has ended: a fact. `for_good`: it is not started again. Unknown ids are ignored."""
        if self._records.withdraw(member_id, for_good=for_good):
            self._post(Changed())

    def declare_dead(self, predecessor: Predecessor) -> None:
        """An agent of this host is known to have ended, and members of it: say so in its place."""
        self._predecessors.append(predecessor)
        self._post(Changed())

    @property
    def round(self) -> Round:
        """The newest round that this host knows."""
        return self._document.round

    @property
    def leads(self) -> bool:
        """Whether this host decides for the run."""
        return self._leadership.is_held

    @property
    def members(self) -> tuple[Member, ...]:
        """The living members of this host, as declared."""
        return tuple(self._records.members.values())

    @property
    def is_written(self) -> bool:
        """Whether the store holds everything that was declared and withdrawn."""
        return self._records.is_written

    # --- the coroutines -----------------------------------------------------------------------------------------------

    async def look(self) -> Round:
        """Read the round without taking part. Raises StoreError."""
        await self._document.read()
        return self.round

    async def run(self) -> None:
        """One session with the store after the other, for ever.

        An error that is none of the store's ends it: a bug. Then do `abort`, and run it again.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = self._clock()
            try:
                await self._live_through_a_session()
            except LeaseLostError as error:
                log.warning("the lease of this host is gone (%s): registering again", error)
                self._lease_id, self._was_lost = 0, True
            except StartOverError as error:
                log.info("starting over: %s", error)
            except StoreAccessError as error:
                log.warning("etcd refuses this agent (%s): %s", error, FROZEN)
            except StoreError as error:
                self._reaches_store(False, error)
            await self._end_session()
            pause_s = FIRST_PAUSE_S if self._clock() - began_s > GOOD_SESSION_S else min(2 * pause_s, LONGEST_PAUSE_S)
            await Sleep(pause_s * (0.5 + self._jitter()))

    async def abort(self) -> None:
        """After `run` has failed: end its session, and let another host lead the run meanwhile. Raises StoreError.

        The members of this host stay registered: `beat` goes on, and so does their training.
        """
        await self._end_session()
        await self._leadership.resign()

    async def beat(self) -> None:
        """Show signs of life, three times in each time to live."""
        while True:
            await Sleep(self._lease_ttl_s / 3)
            # also while a session begins: at a bad line that takes longer than the lease
            session, lease_id, sent_s = self._session, self._lease_id, self._clock()
            if not lease_id:
                continue
            try:
                await keep_alive(lease_id)
            except StoreError as error:
                if session == self._session and self._in_session:
                    self._post(Failed(error))
            else:
                self._on_store_answer()
                if session == self._session and self._in_session:
                    # the lease lives, and so did the members' keys since the last sign of life. Where they had gone, a
                    # leader may have replaced them at the very moment at which they came back: by now we would know
                    self._was_lost = False
                    self._on_contact(sent_s)

    async def leave(self) -> None:
        """After `run` was ended: tell the others that the members of this host have ended, and give the lease back."""
        for member in () if self.round.is_over else self.members:
            self._records.withdraw(member.member_id)
        if self._in_session:
            await self._flush()
            await txn((), (Delete(self._outliving_key),))  # what is left of it is known
        if self._lease_id:
            await revoke_lease(self._lease_id)

    # --- one session --------------------------------------------------------------------------------------------------

    async def _end_session(self) -> None:
        self._in_session, self.lease = False, 0
        self._leadership.leave()
        await EndWatches()

    def _reaches_store(self, in_reach: bool, error: StoreError | None = None) -> None:
        """Said once at each outage: the attempts go on every second, however long it takes."""
        if in_reach == self.in_reach:
            return
        self.in_reach = in_reach
        log.warning("etcd is back") if in_reach else log.warning("etcd is out of reach (%s): %s", error, FROZEN)
        self._on_reach(in_reach)

    async def _live_through_a_session(self) -> None:
        self._session += 1
        sent_s = self._clock()
        await self._enter()
        await self._follow()
        await self._flush()
        while self._old_leases:
            await revoke_lease(self._old_leases[-1])
            self._old_leases.pop()
        self._reaches_store(True)
        self._in_session, self.lease = True, self._lease_id
        if not self._was_lost:
            self._on_contact(sent_s)
        while True:
            await self._declare_all_dead()
            await self._flush()
            await self._leadership.decide(self._incarnation.encode())
            self._on_progress()
            await self._take_messages()

    async def _enter(self) -> None:
        """Have a lease, and a key of one's own, which no late write of an earlier session can know the revision of."""
        if self._lease_id:
            await keep_alive(self._lease_id)
        else:
            lease = await grant_lease(self._settings.ttl_s)
            self._lease_id, self._lease_ttl_s = lease.lease_id, lease.ttl_s
            self._records.lease_lost()
        try:
            await self._write(self._records.outliving_write(self._lease_id, anew=True))
        except StartOverError:
            # an earlier write had an effect after all, or the key went with its lease, or the store went back in time
            kv = await get(self._own_key)
            if kv is None:
                # the lease lives: a copy of the data from before its first use was put back, without our members
                self._records.data_lost(self.round)
                self._was_lost = True
            elif kv.mod_revision < self._own_revision:
                await self._move_to_a_new_lease()
            self._own_revision = 0 if kv is None else kv.mod_revision
            await self._write(self._records.outliving_write(self._lease_id, anew=True))
        await self._recognize_store()

    async def _move_to_a_new_lease(self) -> None:
        """An older copy of the data was put back: members that have ended since are in it, on our lease.

        What lives is written to a new one before the old one is ended.
        """
        log.warning("etcd has gone back to an older copy of its data: registering again, training goes on")
        self._old_leases.append(self._lease_id)
        lease = await grant_lease(self._settings.ttl_s)
        self._lease_id = lease.lease_id
        self._records.data_lost(self.round)

    async def _recognize_store(self) -> None:
        """Name this life of the store, or notice that it is not the one that we knew."""
        kv = await get(self._keys.incarnation)
        if kv is None:
            nobody_has = Compare(self._keys.incarnation, Target.CREATE_REVISION, 0)
            # another one each time: who has named the store before must notice, too, that it has lost its data
            word = f"{self._new_incarnation}.{self._session}".encode()
            if not (await txn((nobody_has,), (Put(self._keys.incarnation, word),))).succeeded:
                raise StartOverError("another agent has named the store at this moment")
        else:
            word = kv.value
        if self._incarnation and word.decode(errors="replace") != self._incarnation:
            log.warning("etcd has lost its data: registering again, training goes on")
            self._records.data_lost(self.round)
        self._incarnation = word.decode(errors="replace")

    async def _follow(self) -> None:
        """Read and watch the round and the leader; stand for leader if there is none."""
        revision = await self._document.read()
        await OpenWatch(self._keys.round, revision + 1)
        leaders = await list_prefix(self._keys.leader)
        await OpenWatch(self._keys.leader, leaders.revision + 1)
        requests = await list_prefix(self._drain)
        for kv in requests.items:
            self._take_drain_request(kv)
        await OpenWatch(self._drain, requests.revision + 1)
        await self._declare_all_dead()  # before anybody decides here: it may be what a decision waits for
        leader = next((kv for kv in leaders.items if kv.key == self._keys.leader), None)
        if leader is None:
            await self._leadership.campaign(self._lease_id, was_lost=self._was_lost)
        elif not leader.lease_id:
            await self._leadership.unseat(leader)
        elif leader.value == self._agent_id.encode():
            await self._leadership.take(leader.create_revision, was_lost=self._was_lost)
        else:
            await self._compare_with(leader)

    async def _compare_with(self, leader: KeyValue) -> None:
        """Another host decides, by what it was started with: say what is different here, once."""
        name = leader.value[:MAX_TEXT].decode(errors="replace")
        kv = await get(f"{self._keys.agents}{name.rpartition('-')[0]}/{name}")
        try:
            there = {} if kv is None else AgentRecord.decode(kv.key, kv.value).started_with
        except RecordError as error:
            log.error("ignored: %s", error)
            return
        here = self._about.started_with
        names = [one for one, value in here.items() if there.get(one, value) != value]
        mine, others = (", ".join(f"{one}={started[one]}" for one in names) for started in (here, there))
        text = escaped(f"{mine}, and {name}, which decides for the run, with {others}")
        if names and text != self._said_of_leader:
            log.warning("this host was started with %s: start every host of a run with the same", text)
            self._said_of_leader = text

    async def _take_messages(self) -> None:
        """Wait for something to happen, then take in all that has happened."""
        present: dict[str, Member] = {}
        gone: list[str] = []
        for message in await Receive(self._leadership.wake_at_s):
            if isinstance(message, Failed):
                raise message.error
            if not isinstance(message, Changed):
                for event in message:
                    await self._take_event(event, present, gone)
        if gone:
            self._on_store_answer()
        if present or gone:
            self._leadership.handle(MembersChanged(tuple(present.values()), tuple(gone)))

    async def _take_event(self, event: StoreEvent, present: dict[str, Member], gone: list[str]) -> None:
        """Act on a change of the round or the leader; collect those of the members."""
        kv, is_put = event.kv, event.kind is EventKind.PUT
        if is_put and kv.key == self._keys.round:
            self._document.take(kv)
        elif kv.key == self._keys.leader:
            await self._take_leader(kv, is_put)
        elif is_put and kv.key.startswith(self._drain):
            self._take_drain_request(kv)
        elif kv.key.startswith(self._keys.members):
            name = kv.key.removeprefix(self._keys.members)
            if is_put:
                present.update((member.member_id, member) for member in read_members([kv]))
                gone[:] = [other for other in gone if other != name]
            else:
                # a tombstone that is cleared away within the same batch was a fact all the same
                if name in present and not present[name].departed:
                    del present[name]
                gone.append(name)

    def _take_drain_request(self, kv: KeyValue) -> None:
        """Somebody wants a member to leave the run, maybe one of another agent; each session takes it up anew."""
        if self._on_drain(kv.key.removeprefix(self._drain)):
            self._records.carried_out(kv.key)

    async def _take_leader(self, kv: KeyValue, is_put: bool) -> None:
        if self.leads and not (is_put and self._leadership.is_held_by(kv)):
            raise StartOverError("another agent leads by now")
        if not is_put:
            await self._leadership.campaign(self._lease_id, was_lost=self._was_lost)
        elif not kv.lease_id:
            await self._leadership.unseat(kv)
        elif not self.leads and kv.value == self._agent_id.encode():
            await self._leadership.take(kv.create_revision, was_lost=self._was_lost)
        elif not self.leads:
            await self._compare_with(kv)

    def _on_change(self, round_: Round) -> None:
        if round_.number > self._told and any(member.member_id in round_.members for member in self.members):
            # whoever led has seen what we wrote last
            self._was_lost = False
            self._on_contact(self._wrote_s)
        self._told = round_.number
        self._records.forget_the_dead(round_)
        self._leadership.handle(RoundPublished(round_))
        self._on_round(round_)

    # --- writing ------------------------------------------------------------------------------------------------------

    async def _flush(self) -> None:
        """Write what has changed on this host, in as few transactions as possible."""
        while not self.is_written:
            records = self._records.unwritten(MAX_WRITES)
            writes = [self._records.write_of(key, self.round, self._lease_id) for key in records]
            await self._write([*writes, *self._records.outliving_write(self._lease_id)])
            self._records.written(records)

    async def _write(self, writes: Sequence[Put | Delete]) -> None:
        """Write in the name of this host: once, in order, or not at all."""
        nothing_since = Compare(self._own_key, Target.MOD_REVISION, self._own_revision)
        sent_s = self._clock()
        result = await txn((nothing_since,), (Put(self._own_key, self._about.encode(), self._lease_id), *writes))
        if not result.succeeded:
            raise StartOverError("the key of this host is not as it was left")
        self._own_revision, self._wrote_s = result.revision, sent_s
        self._on_store_answer()

    def _on_store_answer(self) -> None:
        """It has answered. Whose lease ended while it was silent for everybody need not be lost.

        With signs of life every third of a lease, one can only end so if the silence was two thirds long.
        """
        now_s = self._clock()
        if now_s - self._answered_s > 0.6 * self._lease_ttl_s:
            self._leadership.doubt()
        self._answered_s = now_s

    async def _declare_all_dead(self) -> None:
        while self._predecessors:
            await declare_dead(self._keys, self._predecessors[0])
            del self._predecessors[0]
