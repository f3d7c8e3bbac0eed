"""A model and its optimizers as a tree whose names do not depend on how they are wrapped, and back.

    {"model": {"parameters": {name: tensor}, "others": {name: buffer or value}},
     "optimizers": [{"state": {parameter: {key: value}}, "param_groups": [{"params": [parameter, ..], key: value}]}]}

Optimizer state goes by the names of parameters, not by their numbers. Nothing here steps an optimizer to find out what
its state looks like: that is read from the checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import xxhash
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchelastic.checkpoint.compat.velastic.fitting import (
    Form,
    GroupNames,
    optimizer_faults,
    put_types_back,
    require_fitting,
)
from torchelastic.checkpoint.format.tensor_parts import ShardOf, contiguous, encode_leaf, memory_of
from torchelastic.inventory.names import plain_name
from torchelastic.torch_internals.module_names import COMPILED
from torchelastic.torch_internals.tensors import tree_map, tree_map_only

FRAMEWORKS = ("ddp", "fsdp", "fsdp2")

OptimizerOrSeveral = (
    torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer] | None
)


def state_dict_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of this module's head in the form that models and optimizers take: see `BCPState.state_dict`. Pure.

    >>> state_dict_of({"model": {"parameters": {"w": 1}, "others": {"mean": 2}}, "optimizers": []})
    {'model': {'w': 1, 'mean': 2}, 'optimizer': []}
    """
    return {"model": {**tree["model"]["parameters"], **tree["model"]["others"]}, "optimizer": tree["optimizers"]}


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

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the parameters."""
        return any(isinstance(parameter, DTensor) for parameter in self.model.parameters())

    @property
    def is_kept_equal(self) -> bool:
        """Whether DDP keeps what the ranks hold equal, so that nobody has to compare it."""
        return self._ddp is not None

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
        parameters, others = self._model_state()
        return {
            "model": {"parameters": {name: value for name, value in parameters.items() if _is_ours(value)}, **others},
            "optimizers": [self._optimizer_state(number) for number in range(len(self.optimizers))],
        }

    def require_fitting(self, saved: Mapping[str, Any]) -> None:
        """Compares names, shapes and dtypes of a saved tree with those here.

        Args:
            saved: a tree as `tree` returns it, with or without contents.

        Raises:
            CheckpointError: they differ; names them.
        """
        parameters, others = self._model_state()
        live = {name: _form(value) for name, value in {**parameters, **others["others"]}.items()}
        kept = {**saved["model"]["parameters"], **saved["model"]["others"]}
        settings_faults = [
            f"optimizer {number}: {fault}"
            for number, (one, optimizer) in enumerate(zip(saved["optimizers"], self.optimizers, strict=False))
            for fault in optimizer_faults(one["param_groups"], optimizer)
        ]
        forms = {name: _form(value) for name, value in kept.items()}
        require_fitting(forms, live, _groups(saved), self._group_names(), settings_faults)

    def template(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Memory for what this rank reads of a saved tree: of parameters, and what an optimizer has for each, its part.

        Args:
            saved: a tree as `tree` returns it, with placeholders in the place of tensors.
        """
        live, _ = self._model_state()
        model, room = saved["model"], partial(_room, parameter=None)
        parameters = {name: _room(value, live[name]) for name, value in model["parameters"].items()}
        optimizers = [
            {
                "state": {
                    name: tree_map_only(torch.Tensor, partial(_room, parameter=live[name]), state)
                    for name, state in optimizer["state"].items()
                },
                "param_groups": tree_map_only(torch.Tensor, room, optimizer["param_groups"]),
            }
            for optimizer in saved["optimizers"]
        ]
        others = tree_map_only(torch.Tensor, room, model["others"]) if "others" in model else {}
        return {"model": {"parameters": parameters, "others": others}, "optimizers": optimizers}

    def apply(self, loaded: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Puts what was read by a `template` into model and optimizers; keeps what it was given.

        Args:
            loaded: the template, filled.
            saved: as given to `template`.
        """
        live, _ = self._model_state()
        whole = saved["model"]["parameters"]
        values = {
            **{name: _as_live(value, whole[name], live[name]) for name, value in loaded["model"]["parameters"].items()},
            **loaded["model"]["others"],
        }
        raw_names = {plain_name(name): name for name in self.model.state_dict()}
        self.model.load_state_dict({raw_names[name]: value for name, value in values.items()})
        names = self._group_names()
        for number, optimizer in enumerate(self.optimizers):
            read, looks = loaded["optimizers"][number], saved["optimizers"][number]["state"]
            state = {
                name: tree_map(partial(_as_live, parameter=live[name]), kept, looks[name])
                for name, kept in read["state"].items()
            }
            _apply_to(optimizer, names[number], state, read["param_groups"])

    def digest(self) -> str:
        """xxh3_64 of all parameters and optimizer states that this rank holds, to be compared with other ranks'."""
        digest = xxhash.xxh3_64()
        tree = self.tree()
        states = [state for optimizer in tree["optimizers"] for state in optimizer["state"].values()]
        for values in (tree["model"]["parameters"], *states):
            for name, value in values.items():
                digest.update(name.encode())
                if isinstance(value, torch.Tensor):
                    tensor = contiguous(value)
                    digest.update(memory_of(tensor))
        return digest.hexdigest()

    def _model_state(self) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
        names = {plain_name(name) for name, _ in self.model.named_parameters(remove_duplicate=False)}
        parameters: dict[str, torch.Tensor] = {}
        others: dict[str, Any] = {}
        for name, value in self.model.state_dict().items():
            (parameters if plain_name(name) in names else others)[plain_name(name)] = value
        return parameters, {"others": others}

    def _optimizer_state(self, number: int) -> dict[str, Any]:
        state = self.optimizers[number].state_dict()
        live = dict(self._named_parameters())
        names = [name for group in self._group_names()[number] for name in group]
        return {
            "state": {names[index]: _checked(names[index], live, kept) for index, kept in state["state"].items()},
            "param_groups": [
                {**group, "params": group_names}
                for group, group_names in zip(state["param_groups"], self._group_names()[number], strict=True)
            ],
        }

    def _named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((plain_name(name), parameter) for name, parameter in self.model.named_parameters())

    def _group_names(self) -> list[GroupNames]:
        """For each optimizer, the names of the parameters of each of its groups."""
        names = {id(parameter): name for name, parameter in self._named_parameters()}
        found: list[GroupNames] = []
        for optimizer in self.optimizers:
            foreign = [
                place
                for place, group in enumerate(optimizer.param_groups)
                for parameter in group["params"]
                if id(parameter) not in names
            ]
            if foreign:
                raise ValueError(
                    f"the optimizer {type(optimizer).__name__} has {len(foreign)} parameter(s) that are not in the "
                    f"model (the first in group {foreign[0]}), so they would not be saved: put them into one "
                    "torch.nn.Module with the model, and give that"
                )
            found.append([[names[id(p)] for p in group["params"]] for group in optimizer.param_groups])
        return found


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


def _is_ours(value: Any) -> bool:
    """Whether this rank saves its part; of ranks that hold equal parts (HSDP) only the first does."""
    if not isinstance(value, DTensor):
        return True
    coordinate: Sequence[int] = value.device_mesh.get_coordinate() or []
    is_shard = any(placement.is_shard() for placement in value.placements)
    return not is_shard or all(
        placement.is_shard() or place == 0 for placement, place in zip(value.placements, coordinate, strict=True)
    )


def _checked(name: str, live: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in state.items():
        if isinstance(value, DTensor) and value.shape != live[name].shape:
            raise TypeError(
                f"the optimizer keeps {key!r} of the parameter {name!r} as a DTensor of another shape, which is not "
                "supported: save it by torch.distributed.checkpoint"
            )
    return {key: value for key, value in state.items() if _is_ours(value)}


def _form(value: Any) -> Form:
    return (tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else None


def _groups(saved: Mapping[str, Any]) -> list[GroupNames]:
    return [[group["params"] for group in optimizer["param_groups"]] for optimizer in saved["optimizers"]]


def _room(value: Any, parameter: torch.Tensor | None) -> Any:
    """Memory for a tensor; for what is as large as a sharded parameter, for the part of this rank."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(parameter, DTensor) and parameter.shape == value.shape:
        (part,) = encode_leaf(parameter, "parameter").parts
        return ShardOf(torch.empty(part.region.sizes, dtype=value.dtype), part.shape, part.region.offsets)
    return torch.empty(value.shape, dtype=value.dtype)


def _as_live(value: Any, whole: Any, parameter: torch.Tensor) -> Any:
    """What was read, as a DTensor where the parameter is one and `_room` made room for a part like it."""
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or whole.shape != parameter.shape:
        return value
    return DTensor.from_local(
        value.to(parameter.to_local().device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _apply_to(
    optimizer: torch.optim.Optimizer,
    groups: GroupNames,
    state_of: Mapping[str, dict[str, Any]],
    saved_groups: Sequence[Mapping[str, Any]],
) -> None:
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    state = {numbers[name]: kept for name, kept in state_of.items()}
    param_groups = [
        {**kept, "params": [numbers[name] for name in group]} for kept, group in zip(saved_groups, groups, strict=True)
    ]
    loaded = {"state": state, "param_groups": param_groups}
    optimizer.load_state_dict(loaded)
    put_types_back(optimizer, loaded)
