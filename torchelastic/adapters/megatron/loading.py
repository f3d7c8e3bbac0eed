"""How Megatron loads from memory, with as many ranks as saved it or with another number."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import (
    LoadShardedStrategy,
    StrategyAction,
    register_default_strategy,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch

from torchelastic.adapters.megatron.saving import BACKEND, VERSION
from torchelastic.checkpoint.memory import MemoryStorageReader

try:
    from megatron.core.dist_checkpointing.strategies import resharding
except ImportError:
    resharding = None

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from torchelastic.checkpoint.memory import DefaultCheckpointLoader
    from torchelastic.checkpoint.replication import ReplicationManager


#: Whether this version of Megatron has tensors with flattened ranges: before 0.16.
HAS_FLATTENED_RANGES = resharding is not None


class MegatronLoadStrategy(LoadShardedStrategy):  # type: ignore[misc] # Megatron has no types
    """Loads sharded state from memory, for `megatron.core.dist_checkpointing.load`.

    Each rank reads what its own tensors need, whatever ranks saved it. What this host lacks is fetched from others.

    Args:
        replication_manager: initialised with the loader's object manager.
        checkpoint_loader: finds checkpoints and their parts.
        backend: in metadata.json; the same as for the save strategy.
        version: the highest version of that which is read.
        allow_pickles: run what pickled sharded objects say. Without, they may hold plain values, tensors and the
            classes that were given to `torch.serialization.add_safe_globals` (Megatron gives it its own).
    """

    def __init__(
        self,
        replication_manager: ReplicationManager | None,
        checkpoint_loader: DefaultCheckpointLoader,
        *,
        backend: str = BACKEND,
        version: int = VERSION,
        allow_pickles: bool = False,
    ) -> None:
        super().__init__()
        self.replication_manager = replication_manager
        self.checkpoint_loader = checkpoint_loader
        self._backend, self._version = backend, version
        self._allow_pickles = allow_pickles

    def register(self) -> None:
        """Makes this what Megatron takes for such checkpoints when it is given no strategy, in this process.

        `dist_checkpointing.load_common_state_dict` and `load_content_metadata` take none, and need it.
        """
        register_default_strategy(StrategyAction.LOAD_SHARDED, self._backend, self._version, self)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Yes."""
        return True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raises: CheckpointingException: another kind of strategy has saved the checkpoint."""
        if loaded_backend != self._backend:
            raise CheckpointingException(
                f"the checkpoint was saved with backend {loaded_backend!r}, and this strategy loads {self._backend!r}: "
                "load it with the strategy for that backend, or name the backend when you make this one"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raises: CheckpointingException: a newer release has saved the checkpoint."""
        if loaded_version > self._version:
            raise CheckpointingException(
                f"the checkpoint has version {loaded_version} of {self._backend!r}, and this strategy reads up to "
                f"{self._version}: load it with the release that saved it"
            )

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> Any:
        """The state with its data. Called on all ranks, from the thread that trains.

        Args:
            sharded_state_dict: of sharded tensors (with data to be filled, or without) and sharded objects.
            checkpoint_dir: what `get_latest_complete_checkpoint` returned.

        Raises:
            CheckpointException: of `torch.distributed.checkpoint`, on all ranks: something is missing, has another
                global shape, is damaged, or holds classes that are not allowed; it names it.
        """
        sharded_state_dict, restored = as_stored(sharded_state_dict, lambda: self._metadata(checkpoint_dir))
        tensors = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
        planner = MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[one for one in tensors if not one.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={one.key: one for one in tensors if one.allow_shape_mismatch},
        )
        by_key, paths, renamed = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = mcore_to_pyt_state_dict(by_key, True)
        load_with_torch(state, storage_reader=self._reader(checkpoint_dir), planner=planner)
        loaded = _replace_sharded_keys_with_state_dict_keys(
            {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}, paths, renamed
        )
        _restore_dict_types(loaded, sharded_state_dict)
        return restored(loaded)

    def load_tensors_metadata(
        self, checkpoint_dir: str | os.PathLike[str], metadata: Metadata | None = None
    ) -> dict[str, Any]:
        """All tensors of the checkpoint by key, whole and without data.

        Args:
            checkpoint_dir: of a complete checkpoint.
            metadata: of the checkpoint, if it was read already.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        metadata = self._metadata(checkpoint_dir) if metadata is None else metadata
        # not by Megatron's own: that of 0.16 fails with torch 2.14 and later, which describe a tensor by more
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            ).without_data()
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """All tensors and objects of the checkpoint by key, without data. Raises: as `load_tensors_metadata`."""
        metadata = self._metadata(checkpoint_dir)
        objects = [
            ShardedObject.empty_from_unique_key(key)
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, BytesStorageMetadata)
        ]
        return {**{one.unique_key: one for one in objects}, **self.load_tensors_metadata(checkpoint_dir, metadata)}

    def _reader(self, checkpoint_dir: str | os.PathLike[str]) -> MemoryStorageReader:
        path = os.fspath(checkpoint_dir)
        return MemoryStorageReader(
            path=path, checkpoint_loader=self.checkpoint_loader, allow_pickles=self._allow_pickles
        )

    def _metadata(self, checkpoint_dir: str | os.PathLike[str]) -> Metadata:
        return self._reader(checkpoint_dir).read_metadata()


def as_stored(sharded_state_dict: Any, read_metadata: Callable[[], Metadata]) -> tuple[Any, Callable[[Any], Any]]:
    """The same state, where tensors with flattened ranges (split among ranks by ranges of elements) are as stored.

    They are stored with the shape of the grid that saved them; for another grid, Megatron's own mapping requests that.

    Args:
        sharded_state_dict: to be loaded.
        read_metadata: of the checkpoint; called if there are such tensors.

    Returns:
        The state to load instead, and what makes of it, once loaded, the one that was asked for.

    Raises:
        CheckpointingException: the checkpoint has no such tensor.
    """
    flattened = [
        tensor
        for tensor in nested_values(sharded_state_dict)
        if resharding is not None and resharding.is_nd_flattened_tensor(tensor)
    ]
    if not flattened:
        return sharded_state_dict, lambda loaded: loaded
    metadata = read_metadata()
    known = getattr(metadata, "mcore_data", None) or {}
    stored = {}
    for tensor in flattened:
        shape = (known.get(tensor.key) or {}).get("nd_reformulated_orig_global_shape")
        if shape is None:
            raise CheckpointingException(
                f"{tensor.key!r} was not saved as a tensor with a flattened range: load it with the sharding of the "
                "optimizer that saved it"
            )
        size: Any = getattr(metadata.state_dict_metadata[tensor.key], "size", None)
        stored[tensor.key] = resharding.TensorReformulationMetadata(tuple(shape), size)
    asked, restoring = resharding.apply_nd_flattened_tensors_reformulation(sharded_state_dict, stored)
    return asked, lambda loaded: resharding.restore_nd_flattened_tensors_formulation(loaded, restoring)
