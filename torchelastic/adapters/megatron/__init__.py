"""Checkpoints in memory for Megatron-LM: strategies for `megatron.core.dist_checkpointing`; see docs/megatron.md.

    strategy = MegatronAsyncSaveStrategy(storage_writer=MemoryStorageWriter(...))
    request = save_local_aware_megatron_checkpoint(state, step_container, strategy)     # all ranks
    AsyncCallsQueue().schedule_async_request(request)                                   # Megatron's own queue

Needs the package megatron-core: `pip install 'torchelastic[megatron]'`.
"""

from __future__ import annotations

try:
    import megatron.core.dist_checkpointing  # noqa: F401 - whether it is there
except ImportError as error:
    raise ImportError(
        "torchelastic.adapters.megatron needs megatron-core, which cannot be imported: "
        f"pip install 'torchelastic[megatron]' ({error})"
    ) from error

from torchelastic.adapters.megatron.common import MegatronCommonLoadStrategy, save_local_aware_megatron_checkpoint
from torchelastic.adapters.megatron.loading import MegatronLoadStrategy
from torchelastic.adapters.megatron.saving import MegatronAsyncSaveStrategy

__all__ = [
    "MegatronAsyncSaveStrategy",
    "MegatronCommonLoadStrategy",
    "MegatronLoadStrategy",
    "save_local_aware_megatron_checkpoint",
]
