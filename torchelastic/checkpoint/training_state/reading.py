"""Reading a checkpoint for one rank into fresh memory, all of it verified; nothing of the training is touched here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.kinds import Kind, require_own_folder
from torchelastic.checkpoint.shards.loading import read_into
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME
from torchelastic.checkpoint.store.reading import list_checkpoints, names_in, open_checkpoint
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.checkpoint.training_state.objects import TrainingObjects
from torchelastic.checkpoint.training_state.shard import placeholders, read_own, require_kind


@dataclass(frozen=True)
class FoundFolders:
    """What lies in a folder.

    Attributes:
        folders: of the checkpoints that look complete, newest first.
        damaged: of those that do not, newest first, with the reason.
        unfinished: those whose saving never ended.
    """

    folders: list[str]
    damaged: dict[str, str]
    unfinished: list[str]


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


def find(path: Path) -> FoundFolders:
    """Looks for checkpoints: in a folder of them, or the one that the folder is.

    Raises:
        ForeignCheckpointsError: something else has saved all that is there.
        CheckpointError: the folder cannot be read.
    """
    if (path / MANIFEST_NAME).exists():
        return FoundFolders([str(path)], {}, [])
    require_own_folder(path, Kind.TRAINING_STATE)
    infos = list_checkpoints(path, kind=Kind.TRAINING_STATE)
    unfinished = sorted(staged.folder_name for name in names_in(path) if (staged := SaveId.find_staged(name)))
    return FoundFolders(
        [str(info.folder) for info in infos if info.damage is None],
        {str(info.folder): info.damage for info in infos if info.damage is not None},
        unfinished,
    )


def read(folder: Path, objects: TrainingObjects, rank: int, *, allow_pickles: bool) -> Loaded:
    """Reads what a rank needs of a checkpoint; model and optimizers are not touched.

    Raises:
        CorruptCheckpointError: it is damaged, or incomplete.
        CheckpointError: it does not fit model and optimizers, or cannot be read.
    """
    with open_checkpoint(folder) as checkpoint:
        for shard in checkpoint.shards:
            require_kind(shard)
        world_size = checkpoint.manifest.world_size
        own_rank = own_rank_of(rank, world_size)
        own = read_own(checkpoint.shards[own_rank], allow_pickles=allow_pickles)
        entries = {
            entry.name: (entry.dtype, entry.shape) for shard in checkpoint.shards for entry in shard.header.entries
        }
        saved = placeholders(checkpoint.shards[0], entries, allow_pickles=allow_pickles)
        try:
            shapes = {**saved, "model": {"others": own.get("others", {}), **saved["model"]}}
            objects.require_fitting(shapes)
            shared = read_into(checkpoint.shards, objects.template(saved), strict=False, allow_pickles=allow_pickles)
            model = {"others": own.get("others", {}), **shared["model"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"{folder} does not hold what a training state consists of: {error!r}"
            ) from error
        return Loaded(world_size, shapes, {**shared, "model": model}, own, own_rank)
