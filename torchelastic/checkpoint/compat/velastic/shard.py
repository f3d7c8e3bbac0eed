"""What one rank writes, its share of what all ranks hold together and what is its own, and what one rank reads of it.

The structure of the shared tree is in the header of rank 0's shard. What is a rank's own (its extra state, its random
numbers, buffers that nobody keeps equal) is in its shard, the structure of it in the header's `meta`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import structs

from torchelastic.checkpoint.compat.velastic.optimizer_trees import own_faults
from torchelastic.checkpoint.compat.velastic.training_objects import TrainingObjects, state_dict_of
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.header import ALIGNMENT_BYTES, Header, align, place
from torchelastic.checkpoint.format.layout import RecurringLayout
from torchelastic.checkpoint.format.loading import read_into, read_tree
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.format.tree import flatten, tensor_names, unflatten
from torchelastic.checkpoint.store.kinds import TRAINING_STATE as KIND

#: Of what is in a shard; 1 has no flags, versions and buffers beside the `state_dict`, and is read.
VERSION = 2
_READ = (1, 2)
_REPLICATED = ("model/parameters/", "optimizers/")


class ShardMaker:
    """Lays out one rank's shard again and again; used on the training thread.

    Args:
        allow_pickles: see `shards.flatten`.
    """

    def __init__(self, *, allow_pickles: bool) -> None:
        self._allow_pickles = allow_pickles
        self._layout = RecurringLayout(allow_pickles=allow_pickles)

    def lay_out(
        self,
        meta: Mapping[str, Any],
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
        rank: int,
        world_size: int,
        *,
        is_replicated: bool,
    ) -> tuple[Header, Sequence[torch.Tensor]]:
        """The shard of now: its header without checksums, and the tensors to copy in the entries' order.

        Args:
            meta: what its header states besides.
            shared: the tree of `TrainingObjects`.
            own: what only this rank holds.
            rank: of the group that saves.
            world_size: its size.
            is_replicated: whether all ranks hold the same parameters and optimizer states, so that they are split.

        Raises:
            TypeError: something in it cannot be saved; names it.
        """

        def alike(names: Sequence[str]) -> list[str]:
            return [name for name in names if is_replicated and name.startswith(_REPLICATED)]

        common, sources = self._layout.lay_out(dict(shared), {}, replicated=alike, rank=rank, world_size=world_size)
        flat = flatten({"own": {f"rank{rank}": dict(own)}}, allow_pickles=self._allow_pickles)
        if parts := [named.name for named in flat.tensors if named.is_shard]:
            raise TypeError(f"{parts[0]!r} is a part of a tensor (a DTensor): save its full_tensor() or to_local()")
        begin = align(common.data_bytes, ALIGNMENT_BYTES)
        own_entries = [structs.replace(e, offset_bytes=e.offset_bytes + begin) for e in place(flat.tensors)]
        devices = {named.name: named.tensor.device.type for named in flat.tensors if named.tensor.device.type != "cpu"}
        stated = {"kind": KIND, "version": VERSION, "rank": rank, "own": flat.structure, "devices": devices}
        header = Header(common.structure, (*common.entries, *own_entries), {**meta, **stated})
        return header, [*sources, *(named.tensor for named in flat.tensors)]


def require_kind(shard: ShardReader) -> None:
    """Raises CheckpointError if a shard is no part of a training state of this version."""
    kind, version = shard.header.meta.get("kind"), shard.header.meta.get("version")
    if kind != KIND or version not in _READ:
        raise CheckpointError(
            f"{shard.path} is no part of a training state of version {VERSION} or before (it says {kind!r}, "
            f"{version!r}): it was saved by something else, or by a newer release; give another ckpt_path, or install "
            "the release that has saved it"
        )


def read_own(shard: ShardReader, *, allow_pickles: bool) -> dict[str, Any]:
    """Reads what was the own of the rank that wrote a shard, checked; tensors go back to the kind of their device.

    Raises:
        CorruptCheckpointError: the shard is damaged.
        CheckpointError: it holds pickles, and they are not allowed.
    """
    structure, devices = shard.header.meta["own"], shard.header.meta["devices"]
    try:
        tensors = shard.read(names=tensor_names(structure))
        for name, device in devices.items():
            tensors[name] = _moved(tensors[name], device)
        tree = unflatten(structure, tensors, allow_pickles=allow_pickles, in_place=frozenset(devices))
        (own,) = tree["own"].values()
        return dict(own)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(f"{shard.path}: what belongs to its rank is damaged: {error!r}") from error


def placeholders(shard: ShardReader, entries: Mapping[str, tuple[str, tuple[int, ...]]], *, allow_pickles: bool) -> Any:
    """The shared tree with tensors that have shape and dtype, and one element of memory.

    Args:
        shard: of rank 0.
        entries: dtype and shape of each tensor of the checkpoint.
        allow_pickles: see `shards.unflatten`.
    """
    names = tensor_names(shard.header.structure)
    if missing := sorted(names - entries.keys()):
        raise CorruptCheckpointError(f"{shard.path} speaks of the tensor {missing[0]!r}, which no shard has")
    tensors = {name: torch.zeros((), dtype=getattr(torch, entries[name][0])).expand(entries[name][1]) for name in names}
    return unflatten(shard.header.structure, tensors, allow_pickles=allow_pickles, in_place=names)


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if device == "cuda" and not torch.cuda.is_available():
        return tensor  # saved with a GPU, resumed without one
    return tensor.to(device)


@dataclass(frozen=True)
class Loaded:
    """What one rank has read.

    Attributes:
        saved_world_size: how many ranks saved it.
        shapes: the shared tree with placeholders.
        shared: the shared tree as this rank needs it.
        own: what was the own of rank `own_rank`, but for buffers, which are in `shared`.
        own_rank: the own one, or modulo the number of ranks that saved.
    """

    saved_world_size: int
    shapes: Mapping[str, Any]
    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    own_rank: int


def read(
    shards: Sequence[ShardReader], objects: TrainingObjects, rank: int, ranks: int, *, allow_pickles: bool
) -> Loaded:
    """Reads what a rank needs of a checkpoint; model and optimizers are not touched.

    Args:
        shards: all of them, by the ranks that wrote them.
        objects: what is to be loaded.
        rank: of this process.
        ranks: how many there are.
        allow_pickles: see `shards.unflatten`.

    Raises:
        CorruptCheckpointError: it is damaged.
        CheckpointError: it does not fit model and optimizers, or cannot be read.
    """
    for shard in shards:
        require_kind(shard)
    own_rank = rank % len(shards)
    own = read_own(shards[own_rank], allow_pickles=allow_pickles)
    entries = {entry.name: (entry.dtype, entry.shape) for shard in shards for entry in shard.header.entries}
    saved = placeholders(shards[0], entries, allow_pickles=allow_pickles)
    try:
        for fault in own_faults(own.get("optimizers", ()), len(shards), ranks):
            raise CheckpointError(
                f"the checkpoint does not fit: {fault}. Nothing was loaded; start as many ranks as have saved it"
            )
        shapes = {**saved, "model": _with_own(saved["model"], own)}
        objects.require_fitting(shapes)
        shared = read_into(shards, objects.template(saved), strict=False, allow_pickles=allow_pickles)
        model = _with_own(shared["model"], own)
    except (KeyError, TypeError, AttributeError) as error:
        raise _strange(shards[0], error) from error
    return Loaded(len(shards), shapes, {**shared, "model": model}, own, own_rank)


def _with_own(model: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What all ranks hold of a model, with what is a rank's own in it."""
    buffers = {"buffers": own["buffers"]} if "buffers" in own else {}
    return {**model, "others": {**model.get("others", {}), **own.get("others", {})}, **buffers}


def read_state_dict(shards: Sequence[ShardReader], *, allow_pickles: bool) -> dict[str, Any]:
    """Model and optimizers as `BCPState.state_dict` has them, whole; buffers that were each rank's own are rank 0's.

    Args:
        shards: all of them, by the ranks that wrote them.
        allow_pickles: see `shards.unflatten`.

    Raises:
        CorruptCheckpointError: it is damaged.
        CheckpointError: it cannot be read.
    """
    for shard in shards:
        require_kind(shard)
    try:
        tree = read_tree(shards, allow_pickles=allow_pickles)
        own = read_own(shards[0], allow_pickles=allow_pickles)
        return state_dict_of({**tree, "model": _with_own(tree["model"], own)})
    except (KeyError, TypeError) as error:
        raise _strange(shards[0], error) from error


def _strange(shard: ShardReader, error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{shard.path} does not hold what a training state consists of: {error!r}")
