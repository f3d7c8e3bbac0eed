"""How Lightning's strategies lay out a checkpoint over the ranks, and how a sharded one (FSDP, FSDP2) is loaded.

Strategies are recognised by the names of their classes, whichever package they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
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
from torchelastic.torch_internals.gradients import ignored_by_ddp
from torchelastic.torch_internals.sharding import is_sharded

_SHARDING = ("FSDPStrategy", "ModelParallelStrategy")


class Layout(Enum):
    """What the ranks hold."""

    #: Rank 0 has everything that Lightning would save; the others may differ.
    OF_RANK_0 = "rank 0"
    #: All ranks have the same parameters and optimizers.
    REPLICATED = "replicated"
    #: Each has its part of parameters and optimizers.
    SHARDED = "sharded"


def layout_of(strategy: Any) -> Layout:
    """How the checkpoints of a strategy are laid out.

    Raises:
        TypeError: it saves checkpoints in a way of its own (DeepSpeed, XLA, Megatron).
        ValueError: it shards, and is set to gather everything on rank 0 for a checkpoint.
    """
    family = type(strategy).__mro__
    names = [one.__name__ for one in family]
    if any(name in names for name in _SHARDING):
        if getattr(strategy, "_state_dict_type", "sharded") != "sharded":
            raise ValueError("checkpoints in memory are saved in parts: use FSDPStrategy(state_dict_type='sharded')")
        if not getattr(strategy, "_save_distributed_checkpoint", True):
            raise ValueError(
                "checkpoints in memory are saved in parts: use ModelParallelStrategy(save_distributed_checkpoint=True)"
            )
        return Layout.SHARDED
    base = next((one for one in family if one.__name__ == "Strategy"), None)
    if base is None or type(strategy).save_checkpoint is not base.__dict__["save_checkpoint"]:
        raise TypeError(
            f"{type(strategy).__name__} saves checkpoints in a way of its own: checkpoints in memory work with "
            "strategies that use Lightning's (single device, DDP) and with FSDPStrategy and ModelParallelStrategy"
        )
    # ranks that average their models only now and then differ in between
    averages = getattr(strategy, "_model_averaging_period", None) is not None
    return Layout.REPLICATED if "DDPStrategy" in names and not averages else Layout.OF_RANK_0


def names_on_all_ranks(strategy: Any, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of the model's and of sharded tensors that `torch.distributed.checkpoint` may take from any rank.

    Args:
        strategy: with its model.
        layout: of the strategy.
        tensors: of the checkpoint.
    """
    if layout is Layout.SHARDED:
        return {name for name, tensor in tensors.items() if is_sharded(tensor)}
    module = strategy.lightning_module
    if layout is Layout.OF_RANK_0 or module is None:
        return set()
    ignored = ignored_by_ddp(module)
    return {f"{MODEL}/{name}" for name, _ in module.named_parameters() if name not in ignored} & set(tensors)


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
    parts = tier.load(
        checkpoint_id, lambda name: name == VALUES or not name.startswith((f"{MODEL}/", f"{OPTIMIZERS}/"))
    )
    rest = put_together(parts, allow_pickles=allow_pickles)
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
