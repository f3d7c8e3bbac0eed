"""Tensors with flattened ranges, which megatron-core had before 0.16: split among ranks by ranges of their elements.

They are stored with the shape of the grid that saved them; for another grid, Megatron's own mapping asks for what is
there. Where Megatron has no such tensors, nothing is done here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values

try:
    from megatron.core.dist_checkpointing.strategies import resharding
except ImportError:
    resharding = None

#: Whether this version of Megatron has such tensors.
HAS_FLATTENED_RANGES = resharding is not None

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


def as_stored(sharded_state_dict: Any, read_metadata: Callable[[], Metadata]) -> tuple[Any, Callable[[Any], Any]]:
    """The same state with flattened tensors asked for as they are stored.

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
