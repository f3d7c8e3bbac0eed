"""The common state of a Megatron checkpoint: what is no sharded tensor or object, on every host."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import _CONTENT_METADATA_KEY
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy

from torchelastic.adapters.megatron.saving import MegatronAsyncSaveStrategy
from torchelastic.adapters.values import mapped


def save_local_aware_megatron_checkpoint(
    checkpoint: dict[str, Any],
    checkpoint_dir: str | os.PathLike[str],
    save_strategy: Any,
    async_save: bool = True,
    *,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
) -> AsyncRequest | None:
    """Does what `megatron.core.dist_checkpointing.save` does, with the common state on every host.

    Called on all ranks, from the thread that trains. Common state and sharded state have the values of this moment.

    Args:
        checkpoint: nested dicts and lists with sharded tensors, objects and factories; the rest is common state, which
            is the same on all ranks. Its containers are not changed.
        checkpoint_dir: the container of the step: `step-<N>_ckpt` in the container of the job.
        save_strategy: a `MegatronAsyncSaveStrategy`, or a wrapper of Megatron's around one.
        async_save: return what remains to be done; else do it.
        validate_access_integrity: check that each shard is written by exactly one rank. It is Megatron's check, and
            needs a collective.
        preprocess_common_before_consistancy_check: for Megatron's check of the common state.
        content_metadata: what `dist_checkpointing.load_content_metadata` returns.

    Returns:
        With `async_save`, a request for one of Megatron's queues; a valid one also if the save is left out.

    Raises:
        TypeError: the strategy is another one.
        Exception: the state cannot be saved; raised on all ranks.
    """
    strategy = _ours(save_strategy)
    state = mapped(checkpoint)
    if content_metadata is not None:
        state[_CONTENT_METADATA_KEY] = content_metadata
    check = preprocess_common_before_consistancy_check
    sharded, common = strategy.ranks.own(  # Megatron's check raises on rank 0 only: the others would wait for ever
        f"prepare {Path(checkpoint_dir).name}", lambda: save_preprocess(state, validate_access_integrity, check)
    )
    if strategy.ranks.is_coordinator:
        content = io.BytesIO()
        torch.save(common, content)
        strategy.attach(COMMON_STATE_FNAME, content.getvalue())
    if async_save:
        return save_strategy.async_save(sharded, checkpoint_dir)
    save_strategy.save(sharded, checkpoint_dir)
    return None


def _ours(save_strategy: Any) -> MegatronAsyncSaveStrategy:
    strategy = save_strategy
    while strategy is not None and not isinstance(strategy, MegatronAsyncSaveStrategy):
        strategy = getattr(strategy, "base_strategy", None)  # as Megatron's FullyParallelSaveStrategyWrapper has it
    if strategy is None:
        raise TypeError(
            f"save_strategy is a {type(save_strategy).__name__}: give a MegatronAsyncSaveStrategy, or a wrapper of "
            "Megatron's around one"
        )
    return strategy


class MegatronCommonLoadStrategy(TorchCommonLoadStrategy):  # type: ignore[misc] # Megatron has no types
    """Loads the common state without running code of its file, whatever is set in the environment.

    Plain values, tensors and the classes given to `torch.serialization.add_safe_globals`, among them Megatron's own.
    """

    def load_common(self, checkpoint_dir: str | os.PathLike[str]) -> Any:
        """The common state.

        Raises:
            CheckpointingException: there is none, or it holds classes that are not allowed.
        """
        path = Path(checkpoint_dir) / COMMON_STATE_FNAME
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise CheckpointingException(
                f"there is no common state, {path} does not exist: give the folder of a complete checkpoint"
            ) from error
        except pickle.UnpicklingError as error:
            raise CheckpointingException(
                f"{path} cannot be loaded without running code in it: name its classes with "
                "torch.serialization.add_safe_globals, or, if you trust whoever can write there, load the common state "
                f"with a strategy of your own ({error})"
            ) from error
