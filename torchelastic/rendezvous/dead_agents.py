"""The members of an agent that has ended without a word: somebody else on its host reports that they have ended.

An agent's records are on its lease, and gone with it. What outlives the lease is one key, `processes/<host>/<agent>`:
which processes the agent and its members are. Whoever runs on the same host, under the same boot, can tell from it that
they have ended, now or a day later, and says so in the agent's place.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from torchelastic.rendezvous.records import (
    Keys,
    Member,
    RecordError,
    Round,
    RoundState,
    decode_member,
    decode_round,
    encode_member,
)
from torchelastic.rendezvous.requests import get, revoke_lease, txn
from torchelastic.rendezvous.store import Compare, Delete, KeyValue, Put, Target

log = logging.getLogger(__name__)

#: Writes in one transaction; etcd takes 128 operations by default (--max-txn-ops).
MAX_WRITES = 100


@dataclass(frozen=True)
class Predecessor:
    """An agent that is known to have ended.

    Attributes:
        record: its record, as the store holds it.
        host: its host's name.
        lease_id: of what it wrote.
        ended: its members whose processes are known to have ended.
        all_ended: whether these are all that it had: nothing of it is left then.
    """

    record: KeyValue
    host: str
    lease_id: int
    ended: tuple[str, ...]
    all_ended: bool


async def declare_dead(keys: Keys, predecessor: Predecessor) -> int:
    """Write tombstones for those members; if they are all, end the agent's lease and leadership, and forget it.

    What is written is a fact. It is written only while the record exists, so that a write which arrives late, or that
    somebody else on the host has done at the same moment, leaves nothing behind.

    Args:
        keys: of the run.
        predecessor: what is known.

    Returns:
        How many members were reported.

    Raises:
        StoreError: the store did not answer; do it again.
    """
    stored = await get(keys.round)
    round_ = _round_in(stored)
    is_as_read = Compare(predecessor.record.key, Target.MOD_REVISION, predecessor.record.mod_revision)
    tombstones: list[Put] = []
    for name in predecessor.ended if round_ is None or round_.state is not RoundState.CLOSED else ():
        tombstone = _tombstone(name, predecessor.host, await get(keys.member(name)), round_)
        if tombstone is not None:
            tombstones.append(Put(keys.member(name), encode_member(tombstone)))
    reported = 0
    for start in range(0, len(tombstones), MAX_WRITES):
        chunk = tombstones[start : start + MAX_WRITES]
        reported += len(chunk) if (await txn((is_as_read,), chunk)).succeeded else 0
    if reported:
        log.warning("an earlier agent of this host was killed or crashed: its %d workers count as lost", reported)
    if predecessor.all_ended:
        await revoke_lease(predecessor.lease_id)
        await txn((is_as_read,), (Delete(predecessor.record.key),))
    return reported


def _round_in(stored: KeyValue | None) -> Round | None:
    try:
        return None if stored is None else decode_round(stored.key, stored.value)
    except RecordError:
        return None  # whoever follows the round reports it


def _tombstone(name: str, host: str, stored: KeyValue | None, round_: Round | None) -> Member | None:
    """What is to be written of a member that has ended; None: it is known already, or of no interest any more."""
    if stored is None:
        is_of_interest = round_ is not None and name in round_.members and name not in round_.departed
        return Member(name, host, departed=True) if is_of_interest else None
    try:
        member = decode_member(stored.key, stored.value, stored.create_revision)
    except RecordError:
        return Member(name, host, departed=True)
    return None if member.departed else replace(member, departed=True)
