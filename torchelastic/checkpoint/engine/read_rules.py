"""What becomes of a checkpoint's shards: which rank wants which of them, and what it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchelastic.checkpoint.format.header import Entry
from torchelastic.checkpoint.format.loading import read_tree
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.format.tree import tensor_names, unflatten


class ReadRule(Protocol):
    """What a restore is for."""

    @property
    def is_on_every_rank(self) -> bool:
        """Whether every rank reads what it wants; else rank 0 alone reads shared places."""

    @property
    def at_most(self) -> int | None:
        """Committed steps of the newest checkpoint that is taken; None: of any number."""

    def wanted(self, shards: Sequence[int], world_size: int) -> Mapping[int, Sequence[int]] | None:
        """Which shards each rank wants; None: each shard stays with a rank that can read it. Pure.

        Args:
            shards: all of the checkpoint, by the ranks that wrote them, ascending.
            world_size: how many ranks restore.
        """

    def take(self, shards: Sequence[ShardReader]) -> Any:
        """Reads those that this rank wanted, ascending; changes nothing else.

        Raises:
            CorruptCheckpointError: one is damaged: another copy of it is tried.
            CheckpointError: this is no state that could be loaded here; raised on every rank.
        """


@dataclass(frozen=True)
class WholeOnRank0:
    """The tree of the whole state, on rank 0, which gives it to the others in the sync."""

    allow_pickles: bool = False
    at_most: int | None = None
    is_on_every_rank = False

    def wanted(self, shards: Sequence[int], world_size: int) -> Mapping[int, Sequence[int]] | None:  # noqa: ARG002
        """See `ReadRule`."""
        return {0: shards}

    def take(self, shards: Sequence[ShardReader]) -> Any:
        """See `ReadRule`."""
        return read_tree(shards, allow_pickles=self.allow_pickles)


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
class PartsWhereTheyAre:
    """For a state of which no rank can hold the whole: each shard stays with a rank that reads it.

    `take` returns the tree and the parts. The tree is None but on the rank that has read the first shard; in place of
    tensors of which that shard holds a part at most it has empty ones on the meta device.
    """

    allow_pickles: bool = False
    at_most: int | None = None
    is_on_every_rank = True

    def wanted(self, shards: Sequence[int], world_size: int) -> None:
        """See `ReadRule`."""

    def take(self, shards: Sequence[ShardReader]) -> tuple[Any, tuple[StoredParts, ...]]:
        """See `ReadRule`."""
        tree, parts = None, []
        for shard in shards:
            parts.append(StoredParts({entry.name: entry for entry in shard.header.entries}, shard.read()))
            if shard.header.structure is not None and tree is None:
                tree = self._tree_around(shard.header.structure, parts[-1])
        return tree, tuple(parts)

    def _tree_around(self, structure: Any, parts: StoredParts) -> Any:
        tensors = {name: torch.empty(0, device="meta") for name in tensor_names(structure)}
        for name, entry in parts.entries.items():
            is_whole = entry.region.sizes == entry.shape
            tensors[name] = parts.tensors[name] if is_whole else torch.empty(entry.shape, device="meta")
        return unflatten(structure, tensors, allow_pickles=self.allow_pickles, in_place=tensors)


@dataclass(frozen=True)
class AllOnEachRank:
    """Every rank can read in all shards, and reads what it needs.

    Attributes:
        read: see `ReadRule.take`.
    """

    read: Callable[[Sequence[ShardReader]], Any]
    is_on_every_rank = True
    at_most = None

    def wanted(self, shards: Sequence[int], world_size: int) -> Mapping[int, Sequence[int]] | None:
        """See `ReadRule`."""
        return dict.fromkeys(range(world_size), shards)

    def take(self, shards: Sequence[ShardReader]) -> Any:
        """See `ReadRule`."""
        return self.read(shards)
