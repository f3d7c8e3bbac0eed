"""What a tier is: a place where every rank can put its sealed shard, and from which a checkpoint can be read again.

A save, on each rank and off the training thread: `put` on every tier that takes part; when all ranks have put, `commit`
(on a shared tier rank 0 only, on a private one every rank); then `prune`. Tiers talk to no other rank and wait for
none: whoever calls them agrees on the name, gathers the records, and makes the manifest.

A job that starts agrees on its epoch before the first `prepare`: `agree_epoch` over what `known_epoch` says on all
ranks; then rank 0 calls `claim` on each shared tier, and what comes back (never less) is the epoch of all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from torchelastic.checkpoint.errors import CheckpointError, FencedError
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.format.stage import Stage
from torchelastic.checkpoint.policy import KeepPolicy, SavePolicy
from torchelastic.checkpoint.store.inventory import CheckpointInfo
from torchelastic.checkpoint.store.kinds import Kind
from torchelastic.checkpoint.store.manifest import Manifest, ShardRecord
from torchelastic.checkpoint.store.reading import record_of
from torchelastic.checkpoint.store.rewinds import Rewind
from torchelastic.checkpoint.store.save_id import SaveId, shard_file_name


@dataclass(frozen=True)
class TierContext:
    """Who writes, from now on.

    Attributes:
        run_id: of the run; jobs that go on with each other's checkpoints share it.
        epoch: of the job; see `agree_epoch`.
        round: of the group of workers.
        rank: of this process in the group.
        world_size: of the group.
    """

    run_id: str
    epoch: int
    round: int
    rank: int
    world_size: int

    @property
    def token(self) -> tuple[int, int]:
        """Epoch and round, as the fence orders writers."""
        return (self.epoch, self.round)


@dataclass(frozen=True)
class SealedShard:
    """What one rank has to store of one checkpoint.

    Attributes:
        name: which checkpoint it is.
        rank: whose shard it is.
        world_size: how many ranks write this checkpoint.
        data: the bytes of the whole shard: of `Stage.slot.view()` as many as `Stage.seal` returned. Unchanged until the
            `put` of every tier has returned.
        stage: where these bytes lie; None where they are not in a stage. A tier that gave it away stores it as it is.
    """

    name: SaveId
    rank: int
    world_size: int
    data: memoryview
    stage: Stage | None = None

    @property
    def record(self) -> ShardRecord:
        """How the manifest describes it. Raises: CorruptCheckpointError if the data is no whole sealed shard."""
        return record_of(self.data, self.rank, shard_file_name(self.rank, self.world_size))


@dataclass(frozen=True)
class TierEntry:
    """What one rank can read of one checkpoint in one tier.

    Attributes:
        name: which checkpoint it is.
        world_size: how many shards it has in all.
        ranks: whose shards can be read here, ascending.
        is_committed: whether the manifest is here. A checkpoint counts if that is so anywhere.
        damage: why something that should be here cannot be read; None if nothing is known of that. What is in `ranks`
            is readable all the same.
        place: the name of the tier, among several.
    """

    name: SaveId
    world_size: int
    ranks: tuple[int, ...]
    is_committed: bool = True
    damage: str | None = None
    place: str = ""

    @classmethod
    def of(cls, info: CheckpointInfo) -> TierEntry:
        """What is known of a checkpoint in one place."""
        ranks = tuple(sorted(info.shards))
        return cls(info.name, info.world_size, ranks, info.manifest is not None, info.damage)

    def as_plain(self) -> dict[str, Any]:
        """What JSON can hold, for sending; `from_plain` is the inverse."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> TierEntry:
        """Raises: msgspec.ValidationError if it is nothing that `as_plain` returns."""
        return msgspec.convert(plain, cls)


class Tier(ABC):
    """A place for checkpoints. Every rank has an object of it; one thread at a time calls it.

    Only `open` is also called by threads that give shards to other ranks, while the group restores.

    Attributes:
        name: for logs and metrics: "memory", "disk", "durable"; unique among the tiers of a manager.
        is_shared: whether all hosts see the same content. If not, each host has its own, and its ranks share that.
        keep: which checkpoints `prune` leaves.
        every: how rarely this tier takes part; None: in each save.
        where: the place, for people; without credentials.
        kind: of the checkpoints that are saved here; others are neither loaded nor removed. Its manager sets it.
        seen_rewinds: of all places of the run, when this process looked for checkpoints; None: it has not.
    """

    name: str
    is_shared: bool
    keep: KeepPolicy
    every: SavePolicy | None
    where: str
    kind: Kind = Kind.TIERED
    seen_rewinds: Sequence[Rewind] | None = None

    def require_own(self) -> None:  # noqa: B027 - a tier of another package may have no way to tell
        """Refuses a place that holds only what something else than tiers has saved; a warning names it beside own ones.

        Every rank calls it when it starts, before `known_epoch`.

        Raises:
            ForeignCheckpointsError: names what is there, whose it is, and what to do.
            CheckpointError: the place cannot be read.
        """

    def require_free(self, run_id: str) -> None:  # noqa: B027 - a place without locks has no way to tell
        """Refuses a place in which another run is alive; for who takes it only at the first save, and trains before.

        Args:
            run_id: of the run.

        Raises:
            OwnedError: another run that is alive has it, and does not end soon.
        """

    @abstractmethod
    def known_epoch(self, run_id: str) -> int:
        """The least epoch that the group must have so that nothing that is here counts as newer; see `agree_epoch`.

        Every rank calls it when it starts, once, before `prepare`.

        Raises:
            OwnedError: it is private, and another run that is alive has it.
            CheckpointError: it cannot be read, or not be used.
        """

    def claim(self, run_id: str, owner: str, at_least: int) -> int:  # noqa: ARG002 - a private place is not claimed
        """Takes a shared place for a new job, so that writers of earlier jobs publish nothing any more.

        Rank 0 calls it once, when the group has no epoch yet.

        Args:
            run_id: of the run.
            owner: names this process, for the errors that others get.
            at_least: what the group has agreed on.

        Returns:
            The epoch that the job must take: `at_least`, or more.

        Raises:
            OwnedError: another run that is alive has it.
            CheckpointError: the place cannot be written.
        """
        return at_least

    @abstractmethod
    def prepare(self, context: TierContext) -> None:
        """A group of workers begins: creates what is missing, and removes what dead writers have left.

        Every rank calls it after each agreement on epoch and round, before it puts anything. What older groups have put
        and not committed may be gone then.

        Raises:
            FencedError: a newer group, or another job, has the place.
            OwnedError: another run that is alive has it.
            CheckpointError: it cannot be written.
        """

    @abstractmethod
    def put(self, shard: SealedShard) -> ShardRecord:
        """Stores this rank's shard; when it returns, the shard is as durable as this tier is. Called by every rank.

        Returns:
            What the manifest is to say about it.

        Raises:
            CheckpointError: it cannot be stored; nothing of it is counted.
        """

    @abstractmethod
    def commit(self, manifest: Manifest) -> None:
        """Makes a checkpoint count, once all ranks have put: rank 0 calls it on a shared tier, else every rank.

        Raises:
            FencedError: the group was replaced; nothing is published.
            CheckpointError: a shard is missing, or the place cannot be written; nothing is published.
        """

    @abstractmethod
    def abandon(self, name: SaveId) -> None:
        """Removes what this rank has put of a checkpoint that will not be committed; does nothing if that is nothing.

        Every rank may call it; on a shared tier it may remove what all have put.

        Raises:
            CheckpointError: it cannot be removed.
        """

    @abstractmethod
    def inventory(self) -> list[TierEntry]:
        """What can be read here from this host, newest first, by names and sizes; checksums are compared by readers.

        Raises:
            CheckpointError: the place cannot be read.
        """

    @abstractmethod
    def open(self, name: SaveId, shard_rank: int) -> ShardReader:
        """Opens one shard for reading; compared with the manifest where there is one.

        Raises:
            CorruptCheckpointError: it is missing, or not what was stored.
            CheckpointError: it cannot be read.
        """

    def rewinds(self) -> list[Rewind]:
        """Which saves do not count any more, here or in any other place of the run. Called with `inventory`.

        Raises:
            CheckpointError: the place cannot be read.
        """
        return []  # a tier of another package may not know of it

    def keep_rewind(self, rewind: Rewind) -> None:  # noqa: B027 - a tier of another package may not know of it
        """Stores that a run was rewound. Raises: CheckpointError: it cannot be written."""

    def all_rewinds(self) -> list[Rewind]:
        """Those of this place and of the others: what does not count is removed everywhere. Raises as `rewinds`."""
        return sorted({*self.rewinds(), *(self.seen_rewinds or ())})

    def keep_rewinds(self) -> None:
        """Stores here those of other places, which may be lost; when `prune` has made room. Raises: CheckpointError."""
        if self.seen_rewinds:
            for rewind in sorted(set(self.seen_rewinds).difference(self.rewinds())):
                self.keep_rewind(rewind)

    def require_not_rewound(self) -> None:
        """Refuses a job that has looked for checkpoints before the run was rewound: it may go on from what is out.

        Called when the place is taken, from where on no run is rewound.

        Raises:
            FencedError: it was rewound meanwhile.
            CheckpointError: the place cannot be read.
        """
        new = sorted(set(self.rewinds()).difference(self.seen_rewinds)) if self.seen_rewinds is not None else []
        if new:
            raise FencedError(
                f"{self.where} was rewound ({new[-1].file_name}) after this job had resumed: nothing of it is saved. "
                "End it, and start it again"
            )

    def rewind(self, step: int, owner: str) -> Rewind:
        """What is saved by now and has more steps does not count any more; called while no job of the run lives.

        A writer that lives all the same, where nobody can tell, is refused from now on.

        Args:
            step: the most steps of a save that counts.
            owner: names this process, for the errors that others get.

        Raises:
            OwnedError: a run that is alive has the place.
            CheckpointError: it cannot be written.
        """
        raise CheckpointError(
            f"{self.where} cannot be rewound ({owner}, to step {step}): {type(self).__name__} has no way"
        )

    @abstractmethod
    def prune(self) -> list[SaveId]:
        """Removes the committed checkpoints that `keep` does not want; returns which. Called as `commit`, after it.

        No `put` may be running: the memory of what is removed is used for the next save.

        Raises:
            CheckpointError: something cannot be removed.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives locks and memory back; what is stored stays. Doing it again does nothing."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.where!r})"


def agree_epoch(current: int | None, known: Iterable[int]) -> int:
    """The epoch of a group; pure, every rank computes the same.

    Args:
        current: the epoch that members of the group have agreed on before; None if none of them has one.
        known: what `Tier.known_epoch` returned: of all tiers, on all ranks that are new to the group. Who joins may
            bring what another job of the run has saved in this epoch, in later rounds: then it is one above all that.

    >>> agree_epoch(None, [0, 3]), agree_epoch(4, [0, 3]), agree_epoch(4, [4]), agree_epoch(4, [9])
    (4, 4, 5, 10)
    """
    highest = max(known, default=0)
    return highest + 1 if current is None or highest >= current else current
