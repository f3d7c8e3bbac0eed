"""The one document of a run as one host knows it: read, followed, written by the leader, put back if it was lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torchelastic.rendezvous.records import NO_ROUND, Keys, RecordError, Round, RoundState, decode_round, encode_round
from torchelastic.rendezvous.requests import grant_lease, list_prefix, txn
from torchelastic.rendezvous.store import Compare, Delete, KeyValue, Put, StoreError, Target

log = logging.getLogger(__name__)

#: A closed run's documents are kept this long, to turn late-comers away, and then the store is clean again.
CLOSED_TTL_S = 7200.0


class StartOverError(StoreError):
    """What this session with the store believed is not true any more: begin a new one."""


class RoundDocument:
    """See the module's docstring.

    Args:
        keys: the run's keys.
        on_change: called with every round that is new here.
    """

    def __init__(self, keys: Keys, on_change: Callable[[Round], None]) -> None:
        self.round = NO_ROUND
        self._keys, self._on_change = keys, on_change
        self._revision = 0

    async def read(self) -> int:
        """Take in what the store holds, or put back what it has lost; returns the store's revision."""
        listing = await list_prefix(self._keys.round)
        kv = next((kv for kv in listing.items if kv.key == self._keys.round), None)
        self._revision = 0 if kv is None else kv.mod_revision
        stored = NO_ROUND if kv is None else _decoded(kv)
        if stored is not None and stored.age >= self.round.age:
            if stored != self.round:
                self._set(stored)
        elif self.round.age > NO_ROUND.age:
            log.warning("etcd has lost round %d: it is put back", self.round.number)
            return await self.write(replace(self.round, restored=True))
        return listing.revision

    def take(self, kv: KeyValue) -> None:
        """The key has changed. Raises StartOverError if the new round is older than the one that is known."""
        if kv.mod_revision <= self._revision:
            return  # our own write
        self._revision = kv.mod_revision
        round_ = _decoded(kv)
        if round_ is not None and round_.age < self.round.age:
            raise StartOverError(f"round {round_.number} has come after round {self.round.number}")
        if round_ is not None:
            self._set(round_)

    async def write(
        self,
        round_: Round,
        compares: Sequence[Compare] = (),
        writes: Sequence[Put | Delete] = (),
        vanishing: Mapping[str, bytes] = MappingProxyType({}),
    ) -> int:
        """Write a round over the one that was read last; returns the store's revision.

        Args:
            round_: the new round.
            compares: what else has to be true.
            writes: what else is written with it.
            vanishing: keys and values that are to vanish together with a closed round.

        Raises:
            StartOverError: the store holds another round by now, or a comparison failed; nothing was written.
        """
        lease_id = 0
        if round_.state is RoundState.CLOSED:
            lease_id = (await grant_lease(CLOSED_TTL_S)).lease_id
            writes = [*writes, *(Put(key, value, lease_id) for key, value in vanishing.items())]
        unchanged = Compare(self._keys.round, Target.MOD_REVISION, self._revision)
        put = Put(self._keys.round, encode_round(round_), lease_id)
        result = await txn((*compares, unchanged), (put, *writes))
        if not result.succeeded:
            raise StartOverError(f"round {round_.number} was not written: the leader or the round has changed")
        self._revision = result.revision
        self._set(round_)
        return result.revision

    def _set(self, round_: Round) -> None:
        if round_.orphaned and not self.round.orphaned:
            log.warning("waiting: %s", round_.because)
        self.round = round_
        self._on_change(round_)


def _decoded(kv: KeyValue) -> Round | None:
    """The round of its key; what is none is reported and ignored."""
    try:
        return decode_round(kv.key, kv.value)
    except RecordError as error:
        log.error("ignored: %s", error)
        return None
