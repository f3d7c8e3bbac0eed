"""What must hold after every event of a simulated run, checked where something changes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tests.simulation.engine import Engine
from tests.simulation.training import Group, Worker
from tests.simulation.tree import Tree
from torchelastic.rendezvous.protocol import RULES
from torchelastic.rendezvous.records import (
    NO_ROUND,
    Keys,
    Member,
    Round,
    RoundState,
    StateStatus,
    decode_member,
    decode_round,
)
from torchelastic.rendezvous.store import EventKind, StoreEvent
from torchelastic.rendezvous.view import Settings, View

#: Which state may follow which, as the protocol's own table says; a running round is always a new one.
MAY_FOLLOW: dict[RoundState, frozenset[RoundState]] = {
    state: frozenset(target for rule in rules for target in rule.leads_to) for state, rules in RULES.items()
}


class InvariantError(AssertionError):
    """A promise of the protocol was broken; the message ends with the seed and the last lines of the trace."""


class Invariants:
    """Sees every change of the store and everything that workers do; raises InvariantError.

    Args:
        engine: for the seed and the trace.
        keys: of the run.
        settings: of the run.
    """

    def __init__(self, engine: Engine, keys: Keys, settings: Settings) -> None:
        self.rounds = 0
        self.commits = 0
        self.last_commit_s = 0.0
        self.highest_step = 0
        self.latest = NO_ROUND
        #: how often a round broke that had committed a step, other than because others had left in order
        self.broken = 0
        #: how often a step was committed that an earlier round had committed
        self.repeated = 0
        #: how often the leader said that those who are left wait in vain
        self.hopeless = 0
        #: how many members have left the run in order
        self.left = 0
        #: how often a survivor had to wait as a spare
        self.spared = 0
        #: who holds the leader's key in the store
        self.leader = ""
        self._asked_to_stop = frozenset[str]()
        #: who is writing at this moment; set by whoever carries a request out
        self.writer = ""
        self._engine, self._keys, self._settings = engine, keys, settings
        #: by lineage: the number of the newest round that has committed a step
        self._committing: dict[int, int] = {}
        #: by lineage: the highest step that was committed, and in which round
        self._highest: dict[int, tuple[int, int]] = {}
        self._records: dict[str, Member] = {}
        #: by member: since when its record has been there
        self._since_s: dict[str, float] = {}
        #: by agent: the members that the record names which outlives it
        self._named: dict[str, frozenset[str]] = {}
        self._buried: set[str] = set()
        self._ended: set[str] = set()
        #: A store that has lost its data may begin a second history, until an agent that remembers puts the first one
        #: back. Groups of two lineages may commit at once, for that moment: docs/rendezvous.md says so.
        self._lineage = self._lineages = 0
        self._lineage_of: dict[tuple[int, tuple[str, ...]], int] = {}
        self._newest: dict[int, tuple[int, int]] = {}

    def require(self, holds: object, promise: str) -> None:
        """Raise if something does not hold."""
        if not holds:
            lines = "\n".join(self._engine.trace or ("(run it again with tracing for the last events)",))
            raise InvariantError(
                f"{promise}\n{lines}\nseed {self._engine.seed}, event {self._engine.events}, "
                f"{self._engine.now_s:.4f} s simulated"
            )

    # --- the store ----------------------------------------------------------------------------------------------------

    def lost_data(self, tree: Tree) -> None:
        """The store has other data now: none, or an older copy."""
        self._lineages += 1
        self._lineage = self._lineages
        self._asked_to_stop = frozenset()  # no leader can know of it any more
        stored, leader = tree.keys.get(self._keys.round), tree.keys.get(self._keys.leader)
        self.latest = NO_ROUND if stored is None else decode_round(stored.key, stored.value)
        self.leader = "" if leader is None else leader.value.decode()
        kept = [kv for key, kv in tree.keys.items() if key.startswith(self._keys.processes)]
        self._named = {kv.key.rpartition("/")[2]: frozenset(json.loads(kv.value)["members"]) for kv in kept}
        self._records = {
            key.removeprefix(self._keys.members): decode_member(key, kv.value, kv.create_revision)
            for key, kv in tree.keys.items()
            if key.startswith(self._keys.members)
        }
        self._since_s = {name: since_s for name, since_s in self._since_s.items() if name in self._records}

    def changed(self, events: Sequence[StoreEvent]) -> None:
        """A revision of the store."""
        for event in events:
            key = event.kv.key
            if key == self._keys.round:
                if event.kind is EventKind.PUT:
                    self._round_written(decode_round(key, event.kv.value), event.kv.lease_id)
            elif key == self._keys.leader:
                self.leader = event.kv.value.decode() if event.kind is EventKind.PUT else ""
                self._engine.note("leader:", self.leader or "nobody")
        for event in events:  # the records that outlive agents first: what is written with them counts as named
            if event.kv.key.startswith(self._keys.processes):
                names = json.loads(event.kv.value)["members"] if event.kind is EventKind.PUT else ()
                self._named[event.kv.key.rpartition("/")[2]] = frozenset(names)
        for event in events:
            if event.kv.key.startswith(self._keys.members):
                self._member_written(event)

    def _round_written(self, now: Round, lease_id: int) -> None:
        before, self.latest = self.latest, now
        self._engine.note("round", now.number, now.edition, now.state.value, now.roster, now.because)
        if now.restored:
            self._lineage = self._lineage_of[now.number, now.roster]
            if now.age < self._newest[self._lineage]:  # nobody is left who remembers more
                self._lineages += 1
                self._lineage = self._lineages
            self.require(now.age > before.age, f"{now} was put back over {before}")
            return
        self.rounds += 1
        has_committed = self._committing.get(self._lineage) == now.number
        self.broken += has_committed and now.state is RoundState.BROKEN and not now.leaving
        self.require(self.writer == self.leader, f"{self.writer} decided while {self.leader or 'nobody'} led")
        self.require(len(set(now.roster)) == len(now.roster), f"a member has two ranks: {now.roster}")
        self.require(0 not in now.stale, "rank 0 must be a source")
        self.require(now.state in MAY_FOLLOW[before.state], f"{now.state.name} follows {before.state.name}")
        self.require(now.edition == before.edition + 1, f"edition {now.edition} follows {before.edition}")
        if now.hopeless:
            self.hopeless += 1
            # what has come a moment ago the leader may not have seen yet: it takes its word back when it does
            before_s = self._engine.now_s - self._settings.ttl_s
            here = {name for name, m in self._records.items() if not (m.departed or m.leaving)}
            seen = [name for name in here if self._since_s.get(name, 0.0) < before_s]
            self.require(not self._settings.usable(len(seen)), f"{seen} are here, and the run is aborted")
        self._asked_to_stop |= frozenset(now.leaving)
        if now.number == before.number:
            self.require(now.roster == before.roster, f"round {now.number} has changed its roster")
            self.require(now.state is not RoundState.RUNNING, f"round {now.number} runs a second time")
        else:
            self.require(now.number == before.number + 1, f"round {now.number} follows {before.number}")
            self.require(now.state is RoundState.RUNNING, f"round {now.number} begins {now.state.name}")
            size, settings = len(now.roster), self._settings
            least = 2 if before.state is RoundState.CLOSING else settings.min_workers  # nobody trains in it
            self.require(least <= size <= settings.max_workers, f"a roster of {size}")
            self.require(size % settings.multiple_of == 0, f"a roster of {size}, no multiple of {settings.multiple_of}")
            self._require_that_nobody_is_spared_in_vain(before, now)
            self._require_only_the_source_leaves(now)
            if before.leaving and before.state is RoundState.BROKEN and now.state_status is StateStatus.INITIAL:
                self._highest.pop(self._lineage, None)  # all who had the state have left: it begins anew
        self._lineage_of[now.number, now.roster] = self._lineage
        self._newest[self._lineage] = now.age
        self.require((now.state is RoundState.CLOSED) == bool(lease_id), "exactly a closed round is on a lease")

    def _require_that_nobody_is_spared_in_vain(self, before: Round, now: Round) -> None:
        """Survivors wait as spares only where with all of them the size would be none."""
        self.require(before.members.issuperset(now.spared), f"{now.spared} were not in round {before.number}")
        self.require(now.members.isdisjoint(now.spared), f"{now.spared} train and are spared")
        more = self._settings.whole(len(now.roster) + len(now.spared))
        self.require(more == len(now.roster), f"{now.spared} wait, and {more} could train")
        self.spared += len(now.spared)

    def _require_only_the_source_leaves(self, now: Round) -> None:
        """Who wanted to leave, as the leader knew, is in no new round, but for rank 0: its state is needed."""
        known = [name for name in now.roster[1:] if name in self._asked_to_stop]
        self.require(not known, f"{known} have left and are in round {now.number}")
        self._asked_to_stop = frozenset()

    def _member_written(self, event: StoreEvent) -> None:
        name = event.kv.key.removeprefix(self._keys.members)
        if event.kind is EventKind.DELETE:
            self._records.pop(name, None)
            self._since_s.pop(name, None)
            return
        now = decode_member(event.kv.key, event.kv.value, event.kv.create_revision)
        before = self._records.get(name)
        if now.departed:
            self.require(name in self._ended, f"{name} was declared dead and lives")
            self._buried.add(name)
        else:
            self.require(name not in self._buried, f"{name} was written after its tombstone")
            # not of a closed run, with whose round these records vanish
            is_named = name in self._named.get(self.writer, ()) or self.latest.state is RoundState.CLOSED
            self.require(is_named, f"{self.writer} has registered {name}, and no record of it outlives the lease")
            if before is not None:
                self.require(now.ready_for >= before.ready_for, f"{name}: an older record has come after a newer one")
        self._records[name] = now
        self._since_s.setdefault(name, self._engine.now_s)

    # --- the workers --------------------------------------------------------------------------------------------------

    def ended(self, worker: Worker) -> None:
        """A worker's process has ended."""
        self._ended.add(worker.name)
        self._engine.note(worker.name, "ends")

    def joined(self, worker: Worker, round_: Round) -> None:
        """A worker has entered a group."""
        self.require(worker.name in round_.members, f"{worker.name} trains in a round that it is not on the roster of")
        self.require(worker.member.ready_for > 0, f"{worker.name} was put in a round that it did not ask for")

    def formed(self, group: Group) -> None:
        """All members are in the group: the source must have the most."""
        self._engine.note("group of round", group.round.number, "formed at step", group.step)
        group.lineage = self._lineage_of[group.round.number, group.round.roster]
        best = max(worker.step for worker in group.members.values())
        source = group.members[group.round.roster[0]].step
        self.require(source == best, f"the source of round {group.round.number} has step {source}, another one {best}")
        self.require(group.step == best, f"round {group.round.number} begins at {group.step}: its source has {best}")

    def committed(self, worker: Worker, group: Group, step: int) -> None:
        """A worker has committed a step: at most one group of a run may do so."""
        round_ = group.round
        self.commits += 1
        self.last_commit_s = self._engine.now_s
        self.highest_step = max(self.highest_step, step)
        newest = self._committing.get(group.lineage, 0)
        if round_.number < newest:
            self.require(
                False, f"{worker.name} commits step {step} in round {round_.number} after round {newest} has committed"
            )
        self._committing[group.lineage] = round_.number
        highest, in_round = self._highest.get(group.lineage, (0, 0))
        self.repeated += step <= highest and in_round != round_.number
        if step > highest:
            self._highest[group.lineage] = (step, round_.number)


def check_invariants(view: View) -> None:
    """Raise AssertionError if a round breaks a promise; asked after every event."""
    round_, settings = view.round, view.settings
    assert len(set(round_.roster)) == len(round_.roster), f"a member has two ranks: {round_.roster}"
    assert len(round_.roster) <= settings.max_workers, f"{len(round_.roster)} > max {settings.max_workers}"
    if round_.number > 0:
        is_handing_on = any(member.done for member in view.members.values())  # the last step, and nobody trains
        least = min(2, settings.min_workers) if is_handing_on else settings.min_workers
        assert len(round_.roster) >= least, f"{len(round_.roster)} < min {settings.min_workers}"
        assert len(round_.roster) % settings.multiple_of == 0, f"{len(round_.roster)} is no multiple"
        assert round_.store_address, "a round without a store address"
        assert 0 not in round_.stale, "rank 0 must be a source"
