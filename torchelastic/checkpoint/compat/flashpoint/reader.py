"""Loading through torch.distributed.checkpoint: what the plan asks for goes from tmpfs straight into the tensors."""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pickle import UnpicklingError

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torchelastic.checkpoint.compat.flashpoint.commit import StoredItem
from torchelastic.checkpoint.compat.flashpoint.ids import CheckpointContainerId
from torchelastic.checkpoint.compat.flashpoint.loader import CheckpointLoader
from torchelastic.checkpoint.compat.flashpoint.pickles import load_safely
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.shard_reader import ShardReader, is_plain_memory
from torchelastic.checkpoint.format.tensor_parts import copyable, dtype_named, memory_of
from torchelastic.torch_internals.checkpoints import set_in_state
from torchelastic.torch_internals.tensors import save_small

#: Values of which nothing but torch's outer format differs.
_PLAIN = frozenset({bool, bytes, float, int, str, type(None)})


class MemoryStorageReader(StorageReader):
    """Reads a checkpoint in memory for `torch.distributed.checkpoint.load`, checked; any planner, any number of ranks.

    What is not on this host is fetched from one that has it. Every tensor's checksum is compared. As ever with DCP the
    tensors are overwritten in place: where this raises, some of them may hold the checkpoint's values already.

    Args:
        path: the container of the checkpoint; `load(checkpoint_id=...)` overrides it.
        checkpoint_loader: finds and fetches the shards.
        allow_pickles: run pickles that hold more than torch's `weights_only` accepts. Only for checkpoints that you
            wrote yourself.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | CheckpointContainerId | None = None,
        checkpoint_loader: CheckpointLoader | None = None,
        *,
        allow_pickles: bool = False,
    ) -> None:
        super().__init__()
        if checkpoint_loader is None:
            raise TypeError("MemoryStorageReader needs checkpoint_loader, for example a DefaultCheckpointLoader")
        self._loader = checkpoint_loader
        self._allow_pickles = allow_pickles
        self._id = CheckpointContainerId(path) if path is not None else None
        self._storage: Mapping[MetadataIndex, StoredItem] = {}

    @property
    def checkpoint_id(self) -> str | None:
        """The container that is read; None until it is known."""
        return str(self._id) if self._id is not None else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId | None = None) -> None:
        """Called by DCP: another checkpoint is to be read, or the same one again."""
        if checkpoint_id is not None:
            self._id = CheckpointContainerId(checkpoint_id)
        self._storage = {}

    def read_metadata(self) -> Metadata:
        """Called by DCP on all ranks.

        Raises:
            CheckpointError: the checkpoint is not complete, or its commit cannot be read.
        """
        metadata: Metadata = self._loader.read_metadata(self._require_id())
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # noqa: ARG002 - DCP's signature
        """Called by DCP on all ranks. Raises: ValueError if the metadata are those of another storage."""
        storage = metadata.storage_data or {}
        if any(not isinstance(item, StoredItem) for item in storage.values()):
            raise ValueError("these metadata were not made by a MemoryStorageWriter: load with the reader that fits")
        self._storage = storage

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Called by DCP; changes nothing."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Called by DCP on the coordinator; changes nothing."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Called by DCP on all ranks; returns when everything is read.

        Raises:
            CorruptCheckpointError: a tensor is damaged here and on every other host that has it; names it.
            CheckpointError: a shard is nowhere to be had, or holds pickles that are not allowed.
        """
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._stored(item).file].append(item)
        for file, items in by_file.items():
            self._read_file(file, items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this could be the container of a checkpoint."""
        try:
            CheckpointContainerId(checkpoint_id)
        except ValueError:
            return False
        return True

    def _require_id(self) -> CheckpointContainerId:
        if self._id is None:
            raise ValueError("give MemoryStorageReader a path, or dcp.load a checkpoint_id")
        return self._id

    def _stored(self, item: ReadItem) -> StoredItem:
        try:
            return self._storage[item.storage_index]
        except KeyError:
            raise CheckpointError(
                f"{item.storage_index.fqn!r} is in the plan, and in no shard of {self._id}: its commit and the planner "
                "do not belong together"
            ) from None

    def _read_file(self, file: str, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        try:
            with self._loader.open(self._require_id(), file) as shard:
                self._read_items(shard, items, planner)
        except CheckpointError as error:
            if not isinstance(error, CorruptCheckpointError) and error.errno is None:
                raise  # another copy would be no better
            with self._loader.repair(self._require_id(), file) as shard:
                self._read_items(shard, items, planner)

    def _read_items(self, shard: ShardReader, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        entries = {entry.name: entry for entry in shard.header.entries}
        pickled = {self._stored(item).entry: item for item in items if item.type == LoadItemType.BYTE_IO}
        straight: dict[str, torch.Tensor] = {}
        commits: list[tuple[ReadItem, torch.Tensor]] = []
        for item in items:
            name = self._stored(item).entry
            if name not in entries:
                raise CorruptCheckpointError(f"the shard {shard.path} has no {name!r}, which its commit promises")
            if name in pickled:
                continue
            target = planner.resolve_tensor(item).detach()
            entry = entries[name]
            is_whole = tuple(item.lengths) == tuple(entry.region.sizes)
            fits = target.dtype == dtype_named(entry.dtype) and tuple(target.shape) == tuple(entry.region.sizes)
            if is_whole and fits and is_plain_memory(target) and name not in straight:
                straight[name] = target
            else:
                bounds = zip(item.storage_offsets, item.lengths, strict=True)
                part = shard.read_one(name)[tuple(slice(offset, offset + length) for offset, length in bounds)]
                if target.shape != part.shape:
                    raise ValueError(
                        f"{item.storage_index.fqn!r} has {tuple(part.shape)} in the plan, and a tensor of "
                        f"{tuple(target.shape)} was given for it"
                    )
                copyable(target).copy_(copyable(part))
            commits.append((item, target))
        found = shard.read(straight, names={*straight, *pickled})
        for name, item in pickled.items():
            self._load_bytes(planner, item, io.BytesIO(memory_of(found[name])), name)
        for item, target in commits:
            planner.commit_tensor(item, target)

    def _load_bytes(self, planner: LoadPlanner, item: ReadItem, content: io.BytesIO, name: str) -> None:
        """Gives a planner nothing but what `weights_only` accepts: it runs what it is given unrestricted."""
        if self._allow_pickles:
            planner.load_bytes(item, content)
            return
        try:
            value = load_safely(content)
        except (UnpicklingError, RuntimeError, ValueError, EOFError) as error:
            raise CheckpointError(
                f"{name!r} in {self._id} is a pickle that may run code: save plain values instead, or, if you wrote "
                "the checkpoint yourself, give MemoryStorageReader allow_pickles=True"
            ) from error
        if type(planner).load_bytes is DefaultLoadPlanner.load_bytes:
            # what that method does with the value; to encode it only for that takes as long as all the rest
            assert isinstance(planner, DefaultLoadPlanner)
            fqn = item.dest_index.fqn
            if not planner.flatten_state_dict:
                planner.state_dict[fqn] = value
                return
            if set_in_state(planner.original_state_dict, planner.mappings[fqn], value):
                return
        encoded = io.BytesIO()
        save_small(value, encoded, in_an_archive=type(value) not in _PLAIN)
        encoded.seek(0)
        planner.load_bytes(item, encoded)
