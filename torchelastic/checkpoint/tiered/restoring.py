"""How a group finds the newest checkpoint that it can put together, and brings all of it to rank 0.

All ranks say what they can read and compute the same plan. Who has a shard that rank 0 cannot read itself sends its
bytes. Rank 0 checks and reads; where a shard proves damaged, all agree on another copy of it or on an older checkpoint.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from typing import Any

import torch

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.restore import newest_readable
from torchelastic.checkpoint.restore_plan import Candidate, ShardSource, candidates, plan_reads
from torchelastic.checkpoint.shards.header import Entry
from torchelastic.checkpoint.shards.loading import read_tree
from torchelastic.checkpoint.shards.reading import ShardReader
from torchelastic.checkpoint.shards.tree import tensor_names, unflatten
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.store.tier import Tier, TierEntry
from torchelastic.group.peers import Peers

log = logging.getLogger(__name__)

TierCandidate = Candidate[SaveId, int]


@dataclass(frozen=True, order=True)
class Read:
    """One shard on its way.

    Attributes:
        shard_rank: whose shard it is, counted in the group that wrote it.
        reader: the rank that reads it from the tier, counted in the group that restores.
        tier: the name of the tier.
    """

    shard_rank: int
    reader: int
    tier: str


@dataclass(frozen=True)
class StoredParts:
    """The tensors of one shard, or the parts of tensors that it holds.

    Attributes:
        entries: by name: of which tensor, and which part.
        tensors: by name.
    """

    entries: Mapping[str, Entry]
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Restored:
    """What was found.

    Attributes:
        name: which checkpoint it is.
        tiers: where its shards were read.
        kind: what the writer said that it is; None on the other ranks, but where parts were wanted.
        tree: the state; None on the other ranks. Where parts were wanted: on the rank that has read the first shard,
            with empty tensors on the meta device in place of those of which that shard holds a part at most.
        parts: where they were wanted: what this rank has read.
    """

    name: SaveId
    tiers: tuple[str, ...]
    kind: str | None
    tree: Any
    parts: tuple[StoredParts, ...] = ()


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
        shard_rank, reader, tier, is_damage, why = plain
        return cls(Read(int(shard_rank), int(reader), str(tier)), bool(is_damage), str(why))


class Restoring:
    """One restore; every rank of a group has one and calls `run`, on the training thread.

    Args:
        tiers: freshest first, the same on all ranks.
        peers: the group.
        allow_pickles: see `flatten`.
        as_parts: leave the shards with the ranks that read them, instead of bringing all to rank 0: for a state of
            which no rank can hold the whole.
    """

    def __init__(
        self, tiers: Sequence[Tier], peers: Peers, *, allow_pickles: bool = False, as_parts: bool = False
    ) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._peers = peers
        self._allow_pickles, self._as_parts = allow_pickles, as_parts
        self._damages: list[str] = []

    def run(self) -> Restored | None:
        """Find the newest checkpoint that is intact.

        Returns:
            The same on all ranks, but for the tree; None if there is no checkpoint at all.

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
            raise CorruptCheckpointError(
                f"no checkpoint can be loaded: {'; '.join(self._damages)}. Restore one of them from a copy; to start "
                f"from scratch instead, move away what lies in {self._places()}"
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
        if self._as_parts:  # rank 0 has only looked for all: each reads its share
            shared = [(name, entry) for name, entry in inventories[0] if self._tiers[name].is_shared]
            inventories[1:] = [[*inventory, *shared] for inventory in inventories[1:]]
        return inventories, [text for _, texts in said for text in texts]

    def _note_incomplete(self, entries: Sequence[TierEntry], found: Sequence[TierCandidate]) -> None:
        """What was published once and cannot be put together any more is damage, as far as this group can tell."""
        for candidate in found:
            if candidate.is_committed and candidate.missing:
                why = [entry.damage for entry in entries if entry.name == candidate.save and entry.damage]
                missing = ", ".join(map(str, candidate.missing))
                self._damage(
                    "".join([f"{candidate.save} lacks the shards of rank(s) {missing}", *map(": {}".format, why)])
                )

    def _damage(self, text: str) -> None:
        self._damages.append(text)
        if self._peers.rank == 0:
            log.warning("%s; trying what else there is", text)

    # --- one checkpoint -----------------------------------------------------------------------------------------------

    def restore_one(self, candidate: TierCandidate) -> Restored:
        """Read this checkpoint, from whatever copies are intact. Raises as `run`."""
        faults: list[FailedRead] = []
        while True:
            reads = self._reads(candidate, faults)
            with ExitStack() as stack:
                opened, new_faults = self._open(candidate, reads, stack)
                if not new_faults:
                    if self._as_parts:
                        restored, new_faults = self._read_parts(candidate, reads, opened)
                    else:
                        restored, new_faults = self._read(candidate, reads, self._bring(reads, opened, stack))
                    if restored is not None:
                        return restored
            for fault in new_faults:
                log.warning("%s: %s", candidate.save, fault.why)
            faults += new_faults

    def _reads(self, candidate: TierCandidate, faults: Sequence[FailedRead]) -> list[Read]:
        """Who reads each shard from where, in the order of the shards, passing over what has failed."""
        bad = {(fault.read.shard_rank, ShardSource(fault.read.reader, fault.read.tier)) for fault in faults}
        left = {
            shard: [source for source in sources if (shard, source) not in bad]
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

        # what stays with whoever reads it is best read by the rank of its own number
        wanted = {shard: [shard] for shard in left} if self._as_parts else {0: list(left)}
        plan = plan_reads(left, wanted, distance=distance)
        return sorted(
            Read(shard, best.rank, best.place) for each in plan.values() for shard, (best, *_) in each.items()
        )

    def _open(
        self, candidate: TierCandidate, reads: Sequence[Read], stack: ExitStack
    ) -> tuple[dict[Read, ShardReader], list[FailedRead]]:
        opened: dict[Read, ShardReader] = {}
        faults = []
        for read in reads:
            if read.reader != self._peers.rank:
                continue
            try:
                opened[read] = stack.enter_context(self._tiers[read.tier].open(candidate.save, read.shard_rank))
            except CheckpointError as error:
                faults.append(FailedRead(read, isinstance(error, CorruptCheckpointError), str(error)))
        return opened, self._told(candidate, faults)[0]

    def _bring(self, reads: Sequence[Read], opened: dict[Read, ShardReader], stack: ExitStack) -> list[ShardReader]:
        """All shards on rank 0, in the order of the reads; on the others nothing."""
        shards = []
        for read in reads:
            if read.reader == 0:
                shards += [opened[read]] if self._peers.rank == 0 else []
            elif read.reader == self._peers.rank:
                with opened[read].view() as view:
                    self._peers.send(memoryview(view.nbytes.to_bytes(8, "little")), 0)
                    self._peers.send(view, 0)
            elif self._peers.rank == 0:
                shards.append(self._receive(read, stack))
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

    def _read(
        self, candidate: TierCandidate, reads: Sequence[Read], shards: Sequence[ShardReader]
    ) -> tuple[Restored | None, list[FailedRead]]:
        kind, tree, faults, why = None, None, [], ""
        if self._peers.rank == 0:
            try:
                kind = str(shards[0].header.meta.get("kind", ""))
                tree = read_tree(shards, allow_pickles=self._allow_pickles)
            except CorruptCheckpointError as error:
                faults = _damaged(reads, shards)
                why = "" if faults else str(error)
            except CheckpointError as error:
                why = str(error)
        told, _ = self._told(candidate, faults, why)
        return None if told else Restored(candidate.save, _tiers_of(reads), kind, tree), told

    def _read_parts(
        self, candidate: TierCandidate, reads: Sequence[Read], opened: dict[Read, ShardReader]
    ) -> tuple[Restored | None, list[FailedRead]]:
        kind, tree, faults, why, parts = None, None, [], "", []
        for read, shard in opened.items():
            try:
                parts.append(StoredParts({entry.name: entry for entry in shard.header.entries}, shard.read()))
                if shard.header.structure is not None and tree is None:
                    kind = str(shard.header.meta.get("kind", ""))
                    tree = _tree_around(shard.header.structure, parts[-1], allow_pickles=self._allow_pickles)
            except CorruptCheckpointError as error:
                faults.append(FailedRead(read, True, f"shard {read.shard_rank} in the {read.tier} tier: {error}"))
            except CheckpointError as error:
                why = str(error)
        told, kind = self._told(candidate, faults, why, kind)
        return None if told else Restored(candidate.save, _tiers_of(reads), kind, tree, tuple(parts)), told

    def _told(
        self, candidate: TierCandidate, faults: Sequence[FailedRead], why: str = "", kind: str | None = None
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


def _tree_around(structure: Any, parts: StoredParts, *, allow_pickles: bool) -> Any:
    """The state, with the tensors that these parts hold whole, and empty ones for the others."""
    tensors = {name: torch.empty(0, device="meta") for name in tensor_names(structure)}
    for name, entry in parts.entries.items():
        is_whole = entry.box.sizes == entry.shape
        tensors[name] = parts.tensors[name] if is_whole else torch.empty(entry.shape, device="meta")
    return unflatten(structure, tensors, allow_pickles=allow_pickles, in_place=tensors)


def _damaged(reads: Sequence[Read], shards: Sequence[ShardReader]) -> list[FailedRead]:
    """Which of the shards it is; for the rare case that one is."""
    faults = []
    for read, shard in zip(reads, shards, strict=True):
        try:
            shard.verify()
        except CorruptCheckpointError as error:
            faults.append(
                FailedRead(
                    read, True, f"shard {read.shard_rank} in the {read.tier} tier of rank {read.reader}: {error}"
                )
            )
    return faults


def _tiers_of(reads: Sequence[Read]) -> tuple[str, ...]:
    return tuple(sorted({read.tier for read in reads}))


def _plain(faults: Sequence[FailedRead]) -> list[list[Any]]:
    """What JSON can hold; `FailedRead.from_plain` is the inverse, one by one."""
    return [[*astuple(fault.read), fault.is_damage, fault.why] for fault in faults]
