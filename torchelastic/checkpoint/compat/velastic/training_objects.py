"""A model and its optimizers as a tree whose names do not depend on how they are wrapped, and back.

    {"model": {"parameters": {name: tensor}, "others": {name: buffer or extra state}, "buffers": .., "flags": ..,
               "versions": ..},
     "optimizers": [{"state": {parameter: {key: value}}, "param_groups": [{"params": [parameter, ..], key: value}]}],
     "about_optimizers": [{"built": groups, "whole": {parameter: [key, ..]}}]}

`inventory.stored_module` says what is in "buffers", "flags" and "versions". "about_optimizers" has the groups that the
script had made, if the run has changed them, and which tensors of the form of a sharded parameter are not sharded. What
was saved before these were kept has "parameters", "others", "state" and "param_groups" alone.

Optimizer state goes by the names of parameters, not by their numbers. Nothing here steps an optimizer to find out what
its state looks like: that is read from the checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import xxhash
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchelastic.checkpoint.compat.velastic.optimizer_trees import OptimizerTrees, Own, as_live, is_ours, room
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.tensor_parts import contiguous, memory_of
from torchelastic.inventory.module_state import load_into, parted, state_of
from torchelastic.inventory.names import named_modules
from torchelastic.inventory.optimizer_values import OWN_FORM
from torchelastic.inventory.stored_module import (
    allowed_in,
    buffers_beside,
    forms_of,
    is_extra_state,
    put_buffers_beside,
    put_flags_beside,
    state_faults,
    stored_beside,
    with_reshaped,
    with_versions,
)
from torchelastic.torch_internals.module_names import COMPILED
from torchelastic.torch_internals.tensors import tree_map_only

FRAMEWORKS = ("ddp", "fsdp", "fsdp2")

OptimizerOrSeveral = (
    torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer] | None
)


def state_dict_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of this module's head in the form that models and optimizers take: see `BCPState.state_dict`. Pure.

    >>> state_dict_of({"model": {"parameters": {"w": 1}, "others": {"mean": 2}}, "optimizers": []})
    {'model': {'w': 1, 'mean': 2}, 'optimizer': []}
    """
    model = {**tree["model"]["parameters"], **tree["model"]["others"]}
    optimizers = [one.get(OWN_FORM, one) for one in tree["optimizers"]]
    return {"model": with_versions(model, tree["model"].get("versions")), "optimizer": optimizers}


class TrainingObjects:
    """What a `BCPState` saves of the training; used on the training thread.

    Args:
        model: plain, wrapped in DDP, or sharded by `fully_shard`; compiled or not.
        optimizer: one, several, or None.
        framework: one of `FRAMEWORKS`.

    Raises:
        ValueError: the framework is unknown or not that of the model, or the model or an optimizer cannot be saved.
    """

    def __init__(self, model: torch.nn.Module, optimizer: OptimizerOrSeveral, framework: str) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ValueError(
                f"model is of type {type(model).__name__}: give the torch.nn.Module itself, not its state dict"
            )
        self.optimizers = _as_list(optimizer)
        self._ddp = next((layer for layer in _layers(model) if isinstance(layer, DistributedDataParallel)), None)
        self.model = list(_layers(model))[-1]
        _check(self.model, self._ddp, framework)
        self._built_forms = forms_of(self.model)
        self._optimizer_trees = OptimizerTrees(self.model, self.optimizers)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the parameters."""
        return any(isinstance(parameter, DTensor) for parameter in self.model.parameters())

    @property
    def is_kept_equal(self) -> bool:
        """Whether DDP keeps what the ranks hold equal, so that nobody has to compare it."""
        return self._ddp is not None

    def extra_states(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """Of what a tree has as "others", that which no DDP keeps equal: what `get_extra_state` of modules gave."""
        return {name: value for name, value in others.items() if is_extra_state(name)}

    @property
    def has_own_buffers(self) -> bool:
        """Whether the buffers may differ from rank to rank, so that each rank saves its own."""
        return self._ddp is None or not self._ddp.broadcast_buffers

    def tree(self) -> dict[str, Any]:
        """The tree of this module's head; its tensors are the live ones.

        Raises:
            ValueError: an optimizer has a parameter that is not in the model.
            TypeError: an optimizer keeps something that is sharded unlike its parameter.
        """
        state = state_of(self.model)
        parameters, others = parted(self.model, state)
        return {
            "model": {
                "parameters": {name: value for name, value in parameters.items() if is_ours(value)},
                "others": others,
                "buffers": buffers_beside(self.model, self._built_forms, state.keys()),
                **stored_beside(self.model, state),
            },
            "optimizers": self._optimizer_trees.trees(),
            "about_optimizers": self._optimizer_trees.about(),
        }

    def require_fitting(self, saved: Mapping[str, Any]) -> None:
        """Compares names, shapes and dtypes of a saved tree with those here.

        Args:
            saved: a tree as `tree` returns it, with or without contents.

        Raises:
            CheckpointError: they differ; names them.
        """
        model = saved["model"]
        reshaped = with_reshaped(self.model, self._built_forms, model.get("buffers"))["reshaped"]
        faults = state_faults(self.model, model["parameters"], model["others"], reshaped)
        faults += self._optimizer_trees.faults(saved)
        if faults:
            raise CheckpointError(
                f"the checkpoint does not fit: {'; '.join(faults)}. Nothing was loaded; build model and optimizer as "
                "they were, or give another ckpt_path"
            )

    def template(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Memory for what this rank reads of a saved tree: of parameters, and what an optimizer has for each, its part.

        Args:
            saved: a tree as `tree` returns it, with placeholders in the place of tensors.
        """
        live, _ = parted(self.model, state_of(self.model))
        model, plain = saved["model"], partial(room, parameter=None)
        others = {key: tree_map_only(torch.Tensor, plain, model[key]) for key in ("others", "buffers") if key in model}
        return {
            "model": {"parameters": {name: room(value, live[name]) for name, value in model["parameters"].items()}}
            | others,
            "optimizers": self._optimizer_trees.template(saved, live),
        }

    def apply(self, loaded: Mapping[str, Any], saved: Mapping[str, Any], own: Own | None = None) -> list[str]:
        """Puts what was read by a `template` into model and optimizers; keeps what it was given.

        Args:
            loaded: the template, filled.
            saved: as given to `template`.
            own: what optimizers had on this rank alone.

        Returns:
            What the user is to learn, one sentence each.
        """
        live, _ = parted(self.model, state_of(self.model))
        model, whole, notes = loaded["model"], saved["model"]["parameters"], list[str]()
        values = {
            **{name: as_live(value, whole[name], live[name]) for name, value in model["parameters"].items()},
            **model["others"],
        }
        buffers = with_reshaped(self.model, self._built_forms, model.get("buffers"))
        notes += put_buffers_beside(self.model, buffers, model["others"])
        modules = [name for name, _ in named_modules(self.model)]
        load_into(self.model, with_versions(values, saved["model"].get("versions"), modules))
        notes += self._optimizer_trees.apply(loaded["optimizers"], saved, live, own)
        if "flags" in saved["model"]:
            notes += put_flags_beside(self.model, saved["model"], allowed_in(self._ddp))
        return notes

    def digest(self) -> str:
        """xxh3_64 of all parameters and optimizer states that this rank holds, to be compared with other ranks'."""
        digest = xxhash.xxh3_64()
        parameters, _ = parted(self.model, state_of(self.model))
        trees = self._optimizer_trees.trees()
        states = [state for optimizer in trees for state in optimizer.get("state", {}).values()]
        for values in (parameters, *states):
            for name, value in values.items():
                digest.update(name.encode())
                if isinstance(value, torch.Tensor):
                    tensor = contiguous(value)
                    digest.update(memory_of(tensor))
        return digest.hexdigest()

    def plain_digests(self) -> dict[str, str]:
        """See `OptimizerTrees.plain_digests`."""
        return self._optimizer_trees.plain_digests()

    def take_apart(self, tree: Mapping[str, Any], places: Collection[str]) -> Own:
        """See `OptimizerTrees.take_apart`; of a tree that `tree` gave."""
        return self._optimizer_trees.take_apart(tree["optimizers"], places)


def _layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The model and what it wraps, from outside to inside."""
    while True:
        yield model
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, COMPILED, None), torch.nn.Module):
            model = inner
        else:
            return


def _as_list(optimizer: OptimizerOrSeveral) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    if isinstance(optimizer, torch.optim.Optimizer):
        several = [optimizer]
    else:
        several = list(optimizer.values() if isinstance(optimizer, Mapping) else optimizer)
    for one in several:
        if not isinstance(one, torch.optim.Optimizer):
            raise ValueError(
                f"optimizer is of type {type(one).__name__}: give the torch.optim.Optimizer, or several of them"
            )
        if _is_zero_redundancy(one):
            raise ValueError("ZeroRedundancyOptimizer cannot be saved by all ranks together: use FSDP2 (fully_shard)")
    return several


def _is_zero_redundancy(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is a ZeroRedundancyOptimizer; there is none where nobody has imported it, which takes a second."""
    imported = sys.modules.get("torch.distributed.optim")
    return imported is not None and isinstance(optimizer, imported.ZeroRedundancyOptimizer)


def _check(model: torch.nn.Module, ddp: DistributedDataParallel | None, framework: str) -> None:
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework={framework!r} is not one of {', '.join(FRAMEWORKS)}")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "the model is wrapped by FullyShardedDataParallel (FSDP1), whose state dict ends the process on CPUs "
            "(torch 2.13, SIGSEGV), so it is not supported: use torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    sharded = len(plain) < len(list(model.parameters()))
    if sharded and plain:
        raise ValueError(
            f"some parameters are DTensors, and {plain[0]!r} is not: ranks may hold different ones; shard it"
        )
    if sharded and framework == "ddp":
        raise ValueError("framework='ddp', but parameters of the model are DTensors: say framework='fsdp2'")
    if not sharded and framework != "ddp":
        raise ValueError(
            f"framework={framework!r}, but no parameter of the model is a DTensor: call fully_shard(model) before, or "
            "say framework='ddp' (which is right for a plain model, too)"
        )
    ignored = sorted(getattr(ddp, "parameters_to_ignore", None) or ())
    if any(name in ignored for name, _ in model.named_parameters()):
        raise ValueError(
            f"DDP ignores parameters ({ignored[0]!r}), so ranks may hold different ones: have it ignore none of them"
        )
