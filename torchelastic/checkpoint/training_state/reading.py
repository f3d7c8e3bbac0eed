"""Reading a checkpoint for one rank into fresh memory, all of it verified; nothing of the training is touched here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.shards.loading import read_into
from torchelastic.checkpoint.shards.reading import ShardReader
from torchelastic.checkpoint.training_state.objects import TrainingObjects
from torchelastic.checkpoint.training_state.shard import placeholders, read_own, require_kind


@dataclass(frozen=True)
class Loaded:
    """What one rank has read.

    Attributes:
        saved_world_size: how many ranks saved it.
        shapes: the shared tree with placeholders.
        shared: the shared tree as this rank needs it.
        own: what was the own of rank `own_rank`.
        own_rank: see `own_rank_of`.
    """

    saved_world_size: int
    shapes: Mapping[str, Any]
    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    own_rank: int


def own_rank_of(rank: int, saved_world_size: int) -> int:
    """Whose extra state a rank gets: its own, or that of rank modulo the number of ranks that saved. Pure.

    >>> [own_rank_of(rank, saved_world_size=2) for rank in range(4)]
    [0, 1, 0, 1]
    """
    return rank % saved_world_size


def read(shards: Sequence[ShardReader], objects: TrainingObjects, rank: int, *, allow_pickles: bool) -> Loaded:
    """Reads what a rank needs of a checkpoint; model and optimizers are not touched.

    Args:
        shards: all of them, by the ranks that wrote them.
        objects: what is to be loaded.
        rank: of this process.
        allow_pickles: see `shards.unflatten`.

    Raises:
        CorruptCheckpointError: it is damaged.
        CheckpointError: it does not fit model and optimizers, or cannot be read.
    """
    for shard in shards:
        require_kind(shard)
    own_rank = own_rank_of(rank, len(shards))
    own = read_own(shards[own_rank], allow_pickles=allow_pickles)
    entries = {entry.name: (entry.dtype, entry.shape) for shard in shards for entry in shard.header.entries}
    saved = placeholders(shards[0], entries, allow_pickles=allow_pickles)
    try:
        shapes = {**saved, "model": {"others": own.get("others", {}), **saved["model"]}}
        objects.require_fitting(shapes)
        shared = read_into(shards, objects.template(saved), strict=False, allow_pickles=allow_pickles)
        model = {"others": own.get("others", {}), **shared["model"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{shards[0].path} does not hold what a training state consists of: {error!r}"
        ) from error
    return Loaded(len(shards), shapes, {**shared, "model": model}, own, own_rank)
