"""Loads a checkpoint of which each rank has its part (FSDP, FSDP2) into the model and the optimizers of a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from torchelastic.adapters.lightning.memory_state import (
    MODEL,
    OPTIMIZERS,
    VALUES,
    merged,
    put_together,
    without_tensors,
)
from torchelastic.adapters.memory_tier import StorageTier
from torchelastic.checkpoint.errors import CheckpointError


def load_sharded(tier: StorageTier, checkpoint_id: str, strategy: Any, *, allow_pickles: bool) -> dict[str, Any]:
    """Loads a checkpoint into a strategy that is set up; on all ranks, whose number may differ from that at the save.

    Args:
        tier: where it lies.
        checkpoint_id: its container.
        strategy: with its model, and with its optimizers if they are to be loaded.
        allow_pickles: run the pickles that are in it.

    Returns:
        What is left for Lightning to load; without model and optimizers, as after its own sharded checkpoints.

    Raises:
        CheckpointError: it cannot be read, or its optimizers are not those of the strategy.
    """
    options = StateDictOptions(cpu_offload=True, strict=bool(strategy.lightning_module.strict_loading))
    optimizers = [getattr(one, "_optimizer", one) for one in strategy.optimizers]
    targets: dict[str, Any] = {MODEL: get_model_state_dict(strategy.model, options=options)}
    if optimizers:
        targets[OPTIMIZERS] = [get_optimizer_state_dict(strategy.model, one, options=options) for one in optimizers]
    tensors: dict[str, torch.Tensor] = {}
    for key, tree in targets.items():
        without_tensors(tree, key, tensors)
    rest = _rest(tier, checkpoint_id, allow_pickles=allow_pickles)
    saved = rest.pop(OPTIMIZERS, None)
    if optimizers and (saved is None or len(saved) != len(optimizers)):
        raise CheckpointError(
            f"{checkpoint_id} holds the state of {len(saved or ())} optimizers, and the module has {len(optimizers)}: "
            "have configure_optimizers return as many as when it was saved"
        )
    tier.load_into(checkpoint_id, tensors, may_be_missing=not options.strict)
    set_model_state_dict(strategy.model, targets[MODEL], options=options)
    for optimizer, target, values in zip(optimizers, targets.get(OPTIMIZERS, ()), saved or (), strict=False):
        state: Mapping[str, Any] = merged(target, values)
        set_optimizer_state_dict(strategy.model, optimizer, dict(state), options=options)
    rest.pop(MODEL, None)
    return rest


def _rest(tier: StorageTier, checkpoint_id: str, *, allow_pickles: bool) -> dict[str, Any]:
    parts = tier.load(
        checkpoint_id, lambda name: name == VALUES or not name.startswith((f"{MODEL}/", f"{OPTIMIZERS}/"))
    )
    return put_together(parts, allow_pickles=allow_pickles)
