"""How Lightning's strategies lay out a checkpoint over the ranks, and how a sharded one (FSDP, FSDP2) is loaded.

Strategies are recognised by the names of their classes, whichever package they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
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
from torch.distributed.tensor import DTensor, distribute_tensor

from torchelastic.adapters.lightning.memory_state import (
    BESIDE,
    MODEL,
    OPTIMIZERS,
    VALUES,
    put_together,
    with_tensors,
    without_tensors,
)
from torchelastic.adapters.memory_tier import StorageTier
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.inventory.names import named_modules, named_parameters
from torchelastic.inventory.stored_module import with_versions
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


def load_sharded(
    tier: StorageTier,
    checkpoint_id: str,
    strategy: Any,
    *,
    allow_pickles: bool,
    prepare: Callable[[dict[str, Any], Callable[[Set[str]], dict[str, torch.Tensor]]], None],
) -> dict[str, Any]:
    """Loads a checkpoint into a strategy that is set up; on all ranks, whose number may differ from that at the save.

    Args:
        tier: where it lies.
        checkpoint_id: its container.
        strategy: with its model, and with its optimizers if they are to be loaded.
        allow_pickles: run the pickles that are in it.
        prepare: takes what there is beside model and optimizers, and what reads whole tensors by their names; called
            before the model is loaded.

    Returns:
        What is left for Lightning to load; without model and optimizers, as after its own sharded checkpoints.

    Raises:
        CheckpointError: it cannot be read, or its optimizers are not those of the strategy.
    """
    optimizers = [getattr(one, "_optimizer", one) for one in strategy.optimizers]
    stored: set[str] = set()

    def is_of_neither(name: str) -> bool:
        stored.add(name)
        return name == VALUES or not name.startswith((f"{MODEL}/", f"{OPTIMIZERS}/"))

    rest = put_together(tier.load(checkpoint_id, is_of_neither), allow_pickles=allow_pickles)
    saved = rest.pop(OPTIMIZERS, None)
    if optimizers and (saved is None or len(saved) != len(optimizers)):
        raise CheckpointError(
            f"{checkpoint_id} holds the state of {len(saved or ())} optimizers, and the module has {len(optimizers)}: "
            "have configure_optimizers return as many as when it was saved"
        )
    prepare(rest, lambda names: tier.load(checkpoint_id, names.__contains__))
    is_strict = bool(strategy.lightning_module.strict_loading)
    _load_model(tier, checkpoint_id, strategy.model, rest.get(BESIDE, {}).get("versions"), is_strict=is_strict)
    if optimizers:
        names = {name for name in stored if name.startswith(f"{OPTIMIZERS}/")}
        _load_optimizers(tier, checkpoint_id, strategy.model, optimizers, saved, names)
    return {key: value for key, value in rest.items() if key not in (MODEL, BESIDE)}


def _load_model(
    tier: StorageTier, checkpoint_id: str, model: torch.nn.Module, versions: Any, *, is_strict: bool
) -> None:
    options = StateDictOptions(cpu_offload=True, strict=is_strict)
    state, tensors = get_model_state_dict(model, options=options), dict[str, torch.Tensor]()
    without_tensors(state, MODEL, tensors)
    tier.load_into(checkpoint_id, tensors, may_be_missing=not is_strict)
    versioned: Any = with_versions(state, versions, [name for name, _ in named_modules(model)])
    set_model_state_dict(model, versioned, options=options)


def _load_optimizers(
    tier: StorageTier,
    checkpoint_id: str,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    saved: Sequence[Any],
    names: Set[str],
) -> None:
    """Exactly what was saved: a parameter that no optimizer had stepped for had no state, and has none then.

    Torch steps an optimizer without state once, to have memory for all that there might be.
    """
    options, tensors = StateDictOptions(cpu_offload=True, strict=False), dict[str, torch.Tensor]()
    for number, optimizer in enumerate(optimizers):
        state = get_optimizer_state_dict(model, optimizer, options=options)
        without_tensors(state, f"{OPTIMIZERS}/{number}", tensors)
    present = {name: tensors[name] for name in sorted(names & tensors.keys())}
    tier.load_into(checkpoint_id, present)
    unknown = names - present.keys()
    if unknown:
        present |= _like_parameters(model, tier.load(checkpoint_id, unknown.__contains__))
    for number, (optimizer, values) in enumerate(zip(optimizers, saved, strict=True)):
        loaded = with_tensors(values, f"{OPTIMIZERS}/{number}", present)
        set_optimizer_state_dict(model, optimizer, loaded, options=options)


def _like_parameters(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """State that no first step makes, by name: what has the shape of a sharded parameter is sharded like it."""
    parameters = named_parameters(model)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        parameter = parameters.get(name.rpartition("/")[0].rpartition("/")[2])
        if isinstance(parameter, DTensor) and parameter.shape == tensor.shape:
            placed = tensor.to(parameter.device)
            found[name] = distribute_tensor(placed, parameter.device_mesh, parameter.placements)
        else:
            found[name] = tensor
    return found
