"""How a group finds the newest checkpoint that it can put together, and brings each shard to the ranks that want it.

All ranks say what they can read and compute the same plan. Who has a shard that another rank wants and cannot read
itself sends its bytes. Who gets it checks and reads; where a shard proves damaged, all agree on another copy of it or
on an older checkpoint.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from typing import Any

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.restore import StoredCandidate, newest_readable
from torchelastic.checkpoint.restore_plan import ShardSource, candidates, plan_reads
from torchelastic.checkpoint.shards.reading import ShardReader
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.store.tier import Tier, TierEntry
from torchelastic.checkpoint.tiered.reading import Reading
from torchelastic.group.peers import Peers

log = logging.getLogger(__name__)

#: How many damaged checkpoints an error names.
_SHOWN = 5


@dataclass(frozen=True, order=True)
class Read:
    """One shard on its way.

    Attributes:
        shard_rank: whose shard it is, counted in the group that wrote it.
        reader: the rank that reads it from the tier, counted in the group that restores.
        tier: the name of the tier.
        target: the rank that wants it.
    """

    shard_rank: int
    reader: int
    tier: str
    target: int


@dataclass(frozen=True)
class Restored:
    """What was found.

    Attributes:
        name: which checkpoint it is.
        tiers: where its shards were read.
        kind: what the writer said that it is.
        content: what `Reading.take` made of the shards that this rank wanted; None if it wanted none.
    """

    name: SaveId
    tiers: tuple[str, ...]
    kind: str | None
    content: Any


@dataclass(frozen=True)
class FailedRead:
    """A read that has failed.

    Attributes:
        read: which.
        is_damage: whether what is stored is not what was written; else it cannot be read (a permission, for example).
        why: in words.
    """

    read: Read
    is_damage: bool
    why: str

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> FailedRead:
        """Out of what another rank has sent."""
        shard_rank, reader, tier, target, is_damage, why = plain
        return cls(Read(int(shard_rank), int(reader), str(tier), int(target)), bool(is_damage), str(why))


class Restoring:
    """One restore; every rank of a group has one and calls `run`, on the training thread.

    Args:
        tiers: freshest first, the same on all ranks.
        peers: the group.
        reading: who wants which shard, and what becomes of them.
        on_damage: called with each checkpoint that is passed over, in words; on every rank alike. None: rank 0 logs it.
    """

    def __init__(
        self, tiers: Sequence[Tier], peers: Peers, reading: Reading, on_damage: Callable[[str], None] | None = None
    ) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._peers = peers
        self._reading = reading
        self._on_damage = self._log_damage if on_damage is None else on_damage
        self._damages: list[str] = []

    def run(self) -> Restored | None:
        """Find the newest checkpoint that is intact.

        Returns:
            The same on all ranks, but for the content; None if there is no checkpoint at all.

        Raises:
            CorruptCheckpointError: there are checkpoints, and none is complete and intact; on every rank.
            CheckpointError: something cannot be read for another reason; on every rank.
            RuntimeError: a peer is lost.
        """
        inventories, unreadable = self._exchange()
        found = candidates([[entry.held(tier) for tier, entry in inventory] for inventory in inventories])
        self._note_incomplete([entry for inventory in inventories for _, entry in inventory], found)
        complete = (candidate for candidate in found if candidate.is_complete)
        restored = newest_readable(complete, self.restore_one, lambda _, damage: self._damage(str(damage)))
        if restored is not None:
            return restored
        if self._damages:
            more = f"; and {len(self._damages) - _SHOWN} more" if len(self._damages) > _SHOWN else ""
            raise CorruptCheckpointError(
                f"no checkpoint can be loaded, and nothing was changed: {'; '.join(self._damages[:_SHOWN])}{more}. "
                f"Restore one of them from a copy; to start from scratch, move away what lies in {self._places()}"
            )
        if unreadable:
            raise CheckpointError(f"it cannot be told whether there is a checkpoint: {'; '.join(unreadable)}")
        return None

    def _exchange(self) -> tuple[list[list[tuple[str, TierEntry]]], list[str]]:
        """What each rank can read in which tier, and what cannot be told."""
        mine: list[list[Any]] = []
        unreadable = []
        for name, tier in self._tiers.items():
            if tier.is_shared and self._peers.rank != 0:
                continue  # rank 0 reads it for all
            try:
                mine += [[name, entry.as_plain()] for entry in tier.inventory()]
            except CheckpointError as error:
                unreadable.append(f"rank {self._peers.rank}, {name} tier: {error}")
        self._peers.barrier()
        said = self._peers.all_gather([mine, unreadable])
        inventories = [[(str(name), TierEntry.from_plain(plain)) for name, plain in entries] for entries, _ in said]
        if self._reading.is_on_every_rank:  # rank 0 has only looked for all: each reads what it wants
            shared = [(name, entry) for name, entry in inventories[0] if self._tiers[name].is_shared]
            inventories[1:] = [[*inventory, *shared] for inventory in inventories[1:]]
        return inventories, [text for _, texts in said for text in texts]

    def _note_incomplete(self, entries: Sequence[TierEntry], found: Sequence[StoredCandidate]) -> None:
        """What was published once and cannot be put together any more is damage, as far as this group can tell."""
        for candidate in found:
            why = [entry.damage for entry in entries if entry.name == candidate.save and entry.damage]
            if candidate.is_committed and candidate.missing:
                missing = ", ".join(map(str, candidate.missing))
                self._damage(
                    "".join([f"{candidate.save} lacks the shards of rank(s) {missing}", *map(": {}".format, why)])
                )
            elif why and not candidate.is_committed:
                self._damage(f"{candidate.save}: {'; '.join(why)}")

    def _damage(self, text: str) -> None:
        self._damages.append(text)
        self._on_damage(text)

    def _log_damage(self, text: str) -> None:
        if self._peers.rank == 0:
            log.warning("%s; trying what else there is", text)

    # --- one checkpoint -----------------------------------------------------------------------------------------------

    def restore_one(self, candidate: StoredCandidate) -> Restored:
        """Read this checkpoint, from whatever copies are intact. Raises as `run`."""
        faults: list[FailedRead] = []
        while True:
            reads = self._reads(candidate, faults)
            with ExitStack() as stack:
                opened, new_faults = self._open(candidate, reads, stack)
                if not new_faults:
                    restored, new_faults = self._take(candidate, reads, self._bring(reads, opened, stack))
                    if restored is not None:
                        return restored
            for fault in new_faults:
                log.warning("%s: %s", candidate.save, fault.why)
            faults += new_faults

    def _reads(self, candidate: StoredCandidate, faults: Sequence[FailedRead]) -> list[Read]:
        """Who reads each shard from where, in the order of the shards, passing over what has failed."""
        bad = {(fault.read.shard_rank, ShardSource(fault.read.reader, fault.read.tier)) for fault in faults}
        # what is damaged in a shared place is so for whoever reads it
        shared = {(fault.read.shard_rank, fault.read.tier) for fault in faults if self._is_shared_damage(fault)}
        left = {
            shard: [each for each in sources if (shard, each) not in bad and (shard, each.place) not in shared]
            for shard, sources in candidate.sources.items()
        }
        if not all(left.values()):
            why = "; ".join(fault.why for fault in faults)
            if not all(fault.is_damage for fault in faults):
                raise CheckpointError(f"the checkpoint {candidate.save} cannot be read: {why}")
            raise CorruptCheckpointError(f"{candidate.save} is damaged: {why}")
        order = list(self._tiers)

        def distance(reader: int, _: int, source: ShardSource) -> tuple[int, bool]:
            return order.index(source.place), source.rank != reader

        wanted = self._reading.wanted(list(left), self._peers.world_size)
        # what stays with whoever reads it is best read by the rank of its own number
        plan = plan_reads(left, {shard: [shard] for shard in left} if wanted is None else wanted, distance=distance)
        return sorted(
            Read(shard, best.rank, best.place, best.rank if wanted is None else target)
            for target, each in plan.items()
            for shard, (best, *_) in each.items()
        )

    def _is_shared_damage(self, fault: FailedRead) -> bool:
        return fault.is_damage and self._tiers[fault.read.tier].is_shared

    def _open(
        self, candidate: StoredCandidate, reads: Sequence[Read], stack: ExitStack
    ) -> tuple[dict[tuple[int, str], ShardReader], list[FailedRead]]:
        """What this rank reads, for itself or for others, by shard and tier."""
        opened: dict[tuple[int, str], ShardReader] = {}
        faults = []
        for read in reads:
            key = (read.shard_rank, read.tier)
            if read.reader != self._peers.rank or key in opened:
                continue
            try:
                opened[key] = stack.enter_context(self._tiers[read.tier].open(candidate.save, read.shard_rank))
            except CheckpointError as error:
                faults.append(FailedRead(read, isinstance(error, CorruptCheckpointError), str(error)))
        return opened, self._told(candidate, faults)[0]

    def _bring(
        self, reads: Sequence[Read], opened: dict[tuple[int, str], ShardReader], stack: ExitStack
    ) -> dict[Read, ShardReader]:
        """The shards that this rank wants, in the order of the reads, which is the same on all ranks."""
        shards = {}
        for read in reads:
            is_wanted = read.target == self._peers.rank
            if read.reader == self._peers.rank:
                shard = opened[read.shard_rank, read.tier]
                if is_wanted:
                    shards[read] = shard
                    continue
                with shard.view() as view:
                    self._peers.send(memoryview(view.nbytes.to_bytes(8, "little")), read.target)
                    self._peers.send(view, read.target)
            elif is_wanted:
                shards[read] = self._receive(read, stack)
        return shards

    def _receive(self, read: Read, stack: ExitStack) -> ShardReader:
        """A shard in anonymous memory, which is read like a file."""
        length = bytearray(8)
        self._peers.receive(memoryview(length), read.reader)
        size_bytes = int.from_bytes(length, "little")
        descriptor = os.memfd_create("torchelastic-shard")
        stack.callback(os.close, descriptor)
        os.ftruncate(descriptor, size_bytes)
        with mmap.mmap(descriptor, size_bytes) as memory, memoryview(memory) as view:
            self._peers.receive(view, read.reader)
        return stack.enter_context(ShardReader(f"/proc/self/fd/{descriptor}"))

    def _take(
        self, candidate: StoredCandidate, reads: Sequence[Read], shards: dict[Read, ShardReader]
    ) -> tuple[Restored | None, list[FailedRead]]:
        content, kind, faults, why = None, None, [], ""
        try:
            if shards:
                stated = (shard for shard in shards.values() if shard.header.structure is not None)
                kind = next((str(shard.header.meta.get("kind", "")) for shard in stated), None)
                content = self._reading.take(list(shards.values()))
        except CorruptCheckpointError as error:
            faults = _damaged(shards)
            why = "" if faults else str(error)
        except CheckpointError as error:
            why = f"rank {self._peers.rank}: {error}"
        told, kind = self._told(candidate, faults, why, kind)
        return None if told else Restored(candidate.save, _tiers_of(reads), kind, content), told

    def _told(
        self, candidate: StoredCandidate, faults: Sequence[FailedRead], why: str = "", kind: str | None = None
    ) -> tuple[list[FailedRead], str | None]:
        """What has failed on any rank, and the kind that one has read; raises on all of them if one says why."""
        self._peers.barrier()  # a download may take its time
        told = self._peers.all_gather([_plain(faults), why, kind])
        reasons = [text for _, text, _ in told if text]
        if reasons:
            raise CheckpointError(f"the checkpoint {candidate.save} cannot be put together: {'; '.join(reasons)}")
        all_faults = [FailedRead.from_plain(each) for plain, *_ in told for each in plain]
        return all_faults, next((each for *_, each in told if each is not None), None)

    def _places(self) -> str:
        return ", ".join(tier.where for tier in self._tiers.values())


def _damaged(shards: dict[Read, ShardReader]) -> list[FailedRead]:
    """Which of the shards it is; for the rare case that one is."""
    faults = []
    for read, shard in shards.items():
        try:
            shard.verify()
        except CorruptCheckpointError as error:
            text = f"shard {read.shard_rank} in the {read.tier} tier of rank {read.reader}: {error}"
            faults.append(FailedRead(read, True, text))
    return faults


def _tiers_of(reads: Sequence[Read]) -> tuple[str, ...]:
    return tuple(sorted({read.tier for read in reads}))


def _plain(faults: Sequence[FailedRead]) -> list[list[Any]]:
    """What JSON can hold; `FailedRead.from_plain` is the inverse, one by one."""
    return [[*astuple(fault.read), fault.is_damage, fault.why] for fault in faults]
