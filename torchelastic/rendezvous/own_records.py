"""What one host says of its workers, and what of it is not in the store yet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from torchelastic.rendezvous.records import Keys, Member, Round, RoundState, encode_member
from torchelastic.rendezvous.store import Delete, Put


class OwnRecords:
    """The members of one host: those that live, and the tombstones of those that have ended.

    Args:
        keys: the run's keys.
        outliving_key: of the record that outlives this agent.
        describe: its content, of the agent's lease and of its living members.
    """

    def __init__(self, keys: Keys, outliving_key: str, describe: Callable[[int, Collection[str]], bytes]) -> None:
        self.members: dict[str, Member] = {}
        self._keys, self._outliving_key, self._describe = keys, outliving_key, describe
        self._ended: dict[str, Member] = {}
        self._dirty: set[str] = set()  # keys
        #: the members that the record names which outlives this agent; None: the store may hold another one
        self._named: frozenset[str] | None = None
        self._naming = frozenset[str]()

    def declare(self, member: Member) -> None:
        """The record of a member is to be written or rewritten."""
        self.members[member.member_id] = member
        self._dirty.add(self._keys.member(member.member_id))

    def carried_out(self, request: str) -> None:
        """What was asked for with this key is done, and nobody is to take it up again: it is to be removed."""
        self._dirty.add(request)

    def withdraw(self, member_id: str, *, for_good: bool = False) -> bool:
        """A member has ended: its tombstone is to be written. False: there is no such member.

        `for_good`: it is not started again; that may become known some time after its end.
        """
        member = self.members.pop(member_id, self._ended.get(member_id) if for_good else None)
        if member is None:
            return False
        self._ended[member_id] = replace(member, departed=True, gave_up=for_good)
        self._dirty.add(self._keys.member(member_id))
        return True

    @property
    def is_written(self) -> bool:
        """Whether the store holds everything that was declared and withdrawn."""
        return not self._dirty

    def lease_lost(self) -> None:
        """The records of the living have gone with their lease."""
        self._dirty.update(map(self._keys.member, self.members))
        self._named = None  # it says which lease that was

    def data_lost(self, round_: Round) -> None:
        """The store has lost everything; of the dead only those of the present roster matter."""
        self._named = None
        names = (*self.members, *(name for name in self._ended if name in round_.roster))
        self._dirty.update(map(self._keys.member, names))

    def forget_the_dead(self, round_: Round) -> None:
        """Who is not on the roster any more is cleared out of the store by the leader.

        Of those that the round has just lost it may still become known that they are not started again.
        """
        gone = [name for name in self._ended if name not in round_.members and name not in round_.lost]
        for name in [name for name in gone if self._keys.member(name) not in self._dirty]:
            del self._ended[name]

    def unwritten(self, at_most: int) -> Mapping[str, Member | None]:
        """Keys to write next, with their records; None: none is left of it. What a request has led to, before that."""
        return {key: self._record_of(key) for key in sorted(self._dirty, reverse=True)[:at_most]}

    def written(self, records: Mapping[str, Member | None]) -> None:
        """These were written; what has changed in the meantime stays to be written."""
        self._dirty -= {key for key, record in records.items() if self._record_of(key) == record}
        self._named = self._naming

    def write_of(self, key: str, round_: Round, lease_id: int) -> Put | Delete:
        """How a record is written."""
        record = self._record_of(key)
        if record is None or (record.departed and round_.state is RoundState.CLOSED):
            return Delete(key)
        # a tombstone outlives its host's lease: who starts the run again must not take the dead for cut off
        return Put(key, encode_member(record), 0 if record.departed else lease_id)

    def outliving_write(self, lease_id: int, *, anew: bool = False) -> tuple[Put, ...]:
        """What has to be written together with the records, so that they never stand there without it.

        One key, on no lease: once the lease has ended it is all that tells whether the members have. None where it
        names exactly the living members already, unless it is to be written anew: the store may hold older data by now.
        """
        self._named = None if anew else self._named
        self._naming = frozenset(self.members)
        if self._naming == self._named:
            return ()
        return (Put(self._outliving_key, self._describe(lease_id, sorted(self._naming))),)

    def _record_of(self, key: str) -> Member | None:
        name = key.removeprefix(self._keys.members)
        return self.members.get(name) or self._ended.get(name)
