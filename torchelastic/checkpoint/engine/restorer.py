"""Restorer: which checkpoint the ranks of a group restore, and from which copy each shard comes.

All ranks say what they can read; the newest checkpoint that can be put together is tried first. A copy that is damaged,
or has vanished since, is skipped: another copy of that shard is read, then the next older checkpoint. Where copies are,
each kind of checkpoint says itself (`ShardAccess`); what is planned is in `store/restore_plan.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

from torchelastic.checkpoint.engine.durable_copies import DurableCopies
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.partial import Fetch, PartialCopy
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.store.reading import stated
from torchelastic.checkpoint.store.restore_plan import Candidate, ShardSource
from torchelastic.checkpoint.store.save_id import SaveId, ShardId
from torchelastic.checkpoint.store.tier import TierEntry

log = logging.getLogger(__name__)

#: Has each rank do something, and returns what each of them returned; see `RankGroup.run_on_all`.
RunOnAll = Callable[[str, Callable[[], Any]], list[Any]]

Got = TypeVar("Got")

#: How many damaged checkpoints an error names.
_SHOWN = 5


class Restorer:
    """One restore, as one rank sees it; every rank of the group has one. On the thread that trains.

    Args:
        rank: of this process.
        run_on_all: of the group.
        copies: in durable storage, beside what the ranks have; None: there are none.

    Attributes:
        durable: what `look` has found there; every rank can read it.
        faults: checkpoints that are known to be of no use, and why; more may be put there before `newest`.
    """

    def __init__(self, rank: int, run_on_all: RunOnAll, copies: DurableCopies | None = None) -> None:
        self._rank, self._run_on_all, self._copies = rank, run_on_all, copies
        self.durable: list[TierEntry] = []
        self._silence: str | None = None  # why nobody knows what is there
        self.faults: dict[SaveId, str] = {}

    def look(
        self, call: str, mine: Callable[[], tuple[Sequence[TierEntry], Any]]
    ) -> tuple[list[list[TierEntry]], list[Any]]:
        """Has all ranks say what they can read, and rank 0 what is in durable storage. Collective.

        Args:
            call: for errors.
            mine: what this rank can read, and what it says besides; JSON can hold that.

        Returns:
            What each rank has said.
        """

        def answer() -> list[Any]:
            entries, besides = mine()
            durable, silence = self._copies.inventory() if self._copies and self._rank == 0 else ([], None)
            return [*([one.as_plain() for one in each] for each in (entries, durable)), silence, besides]

        told = self._run_on_all(call, answer)
        _, durable, self._silence, _ = told[0]
        self.durable = list(map(TierEntry.from_plain, durable))
        return [list(map(TierEntry.from_plain, entries)) for entries, *_ in told], [besides for *_, besides in told]

    def newest(
        self, found: Iterable[Candidate], read: Callable[[Candidate], Got], report: Callable[[str], None]
    ) -> tuple[Candidate, Got] | None:
        """The first checkpoint that can be read, and what `read` returned for it; None if there is none.

        Args:
            found: newest first; what was never completed is skipped, with a text.
            read: reads one. If several ranks read together, it raises on all of them alike.
            report: is called with a text for each that is of no use, and how many steps that costs; on all ranks alike.

        Raises:
            CorruptCheckpointError: there is none, and what was completed in durable storage is damaged: nobody starts
                from scratch then without a word.
            CheckpointError: there is none, and durable storage does not answer: it is unknown whether there is one.
        """
        skipped: list[SaveId] = []
        for candidate in found:
            if candidate.save in self.faults:
                continue
            fault = candidate.fault
            if candidate.is_complete:
                try:
                    got = read(candidate)
                except CorruptCheckpointError as error:
                    fault = f"{candidate.save} is damaged: {error}"
                else:
                    for text in [*_price(skipped, candidate.save), *candidate.remarks]:
                        report(text)
                    if self._copies is not None:
                        self._copies.restored(candidate.save.step)
                    return candidate, got
            elif not candidate.is_committed and not fault:
                skipped.append(candidate.save)  # no fault: the first save of a run may have been stopped here
                report(f"{candidate.save} has no manifest: it counts as never completed; looking for an older one")
            if fault:
                skipped.append(candidate.save)
                self.faults[candidate.save] = fault
                report(f"{fault}; looking for an older one")
        if self._silence is not None:
            raise CheckpointError(f"no host has a checkpoint, and durable storage does not answer: {self._silence}")
        lost = [one.name for one in self.durable if one.name in self.faults and (one.is_committed or one.damage)]
        if lost:
            raise CorruptCheckpointError(
                f"no checkpoint can be loaded, from any host or durable storage: {'; '.join(self.faults.values())}. "
                f"Restore one of them from a copy; to start from scratch, move {max(lost)} and the others away from "
                "there"
            )
        return None

    def because(self) -> str:
        """Why there is no checkpoint to restore, newest first; of a few, for people."""
        more = f"; and {len(self.faults) - _SHOWN} more" if len(self.faults) > _SHOWN else ""
        return "; ".join(list(self.faults.values())[:_SHOWN]) + more


def _price(skipped: Sequence[SaveId], chosen: SaveId) -> list[str]:
    if not skipped:
        return []
    steps = max(0, skipped[0].step - chosen.step)  # none after a rollback
    return [f"{chosen} is restored, since {skipped[0]} cannot be put together: {steps} step(s) are trained again"]


def shards_of(candidate: Candidate) -> list[ShardId]:
    """All that a save consists of, by the ranks that wrote them."""
    return [ShardId(candidate.save, rank, candidate.world_size) for rank in range(candidate.world_size)]


# --- the copies of shards ---------------------------------------------------------------------------------------------


class ShardAccess(Protocol):
    """How one rank reads copies of shards, wherever they are."""

    def open_at(self, shard: ShardId, source: ShardSource) -> ShardReader:
        """Opens a copy. Raises: CheckpointError: it is damaged, or cannot be read now."""

    def skip(self, shard: ShardId, sources: list[ShardSource], error: CheckpointError) -> tuple[str, bool]:
        """Removes the first source, and others that are no better; returns why, and whether that is damage."""


def read_good_copies(
    sources: Mapping[ShardId, list[ShardSource]],
    access: ShardAccess,
    take: Callable[[Mapping[ShardId, ShardReader]], Got],
) -> Got:
    """What `take` returns for shards that it reads together, each from the first good copy of it.

    Args:
        sources: of each shard, best first; where they were read when this returns, that is the first.
        access: to them.
        take: reads; if it raises because a reader did, that copy is skipped, and all is read again.

    Raises:
        CorruptCheckpointError: a shard has no good copy, and all that were skipped are damaged.
        CheckpointError: it has none that can be read now; or `take` raised it and no reader did.
    """
    faults: list[tuple[str, bool]] = []

    def opened(shard: ShardId, stack: ExitStack) -> ShardReader:
        while sources[shard]:
            try:
                return stack.enter_context(access.open_at(shard, sources[shard][0]))
            except CheckpointError as error:
                faults.append(access.skip(shard, sources[shard], error))
        kind = CorruptCheckpointError if all(is_damage for _, is_damage in faults) else CheckpointError
        raise kind("; ".join(text for text, _ in faults) or f"nobody has the shard {shard}")

    while True:
        with ExitStack() as stack:
            readers = {shard: opened(shard, stack) for shard in sources}
            try:
                return take(readers)
            except CheckpointError:
                failures = {shard: reader.failure for shard, reader in readers.items() if reader.failure is not None}
                if not failures:
                    raise
        faults += [access.skip(shard, sources[shard], failure) for shard, failure in failures.items()]


def open_remote(shard: ShardId, fetch: Fetch) -> ShardReader:
    """Opens a shard of another rank; the parts that are read are fetched into memory, which the reader frees.

    Args:
        shard: which.
        fetch: asks its holder; see `ReplicaClient.read`.

    Raises:
        CheckpointError: what `fetch` raises, or it is no shard, or another one.
    """
    where = f"the copy of {shard}"
    copy = PartialCopy(fetch)
    return stated(ShardReader(copy.path, where, copy), shard, where)
