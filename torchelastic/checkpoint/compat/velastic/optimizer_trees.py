"""Optimizers as trees by the names of parameters, and back, where parameters may be sharded over the ranks.

A tensor that an optimizer keeps for a sharded parameter is sharded like it, or it is plain: a count of steps, which is
equal on all ranks, or something of the rank's own part of the parameter, which is not. Which it is is seen by comparing
the ranks. Plain ones that differ are each rank's own; they fit the same number of ranks alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from torchelastic.checkpoint.format.tensor_parts import ShardOf, contiguous, encode_leaf, memory_of
from torchelastic.inventory.names import named_parameters
from torchelastic.inventory.optimizer_values import (
    OWN_FORM,
    Named,
    load_named_state,
    members_of,
    named_state,
    stored_faults,
)
from torchelastic.text import shortlist
from torchelastic.torch_internals.tensors import tree_flatten, tree_map, tree_map_only

#: Values that optimizers keep, for each optimizer: by parameter and by key.
Own = Sequence[Mapping[str, Mapping[str, Any]]]


class OptimizerTrees:
    """The optimizers of one model; on the training thread.

    Args:
        model: the innermost module.
        optimizers: of its parameters, as the script has just built them.
    """

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model, self.objects = model, optimizers
        self._built_groups = [members_of(one, named_parameters(model)) for one in optimizers]

    def trees(self) -> list[dict[str, Any]]:
        """The state of each; its tensors are the live ones.

        Raises:
            ValueError: an optimizer has a parameter that is not in the model.
            TypeError: an optimizer keeps something that is sharded unlike its parameter.
        """
        live = named_parameters(self._model)
        self._require_known(live)
        return [_tree(one, live) for one in self.objects]

    def about(self) -> list[dict[str, Any]]:
        """What has to be known of each besides: see the head of `training_objects`."""
        live = named_parameters(self._model)
        groups = [members_of(one, live) for one in self.objects]
        return [
            {"built": None if built == now else built, "whole": _whole_in(one, live)}
            for one, built, now in zip(self.objects, self._built_groups, groups, strict=True)
        ]

    # --- what is each rank's own --------------------------------------------------------------------------------------

    def plain_digests(self) -> dict[str, str]:
        """Of each value beside a sharded parameter that is not sharded itself, by its place, to be compared."""
        return {_label(*place): _digest(value) for place, value in self._plain_values()}

    def _plain_values(self) -> Iterator[tuple[tuple[int, str, Any], Any]]:
        names = {id(parameter): name for name, parameter in named_parameters(self._model).items()}
        for number, optimizer in enumerate(self.objects):
            for parameter, state in optimizer.state.items():
                if isinstance(parameter, DTensor) and isinstance(state, Mapping) and id(parameter) in names:
                    for key, value in state.items():
                        if not any(isinstance(leaf, DTensor) for leaf in tree_flatten(value)[0]):
                            yield (number, names[id(parameter)], key), value

    def take_apart(self, trees: Sequence[dict[str, Any]], places: Collection[str]) -> Own:
        """Takes the values at some places out of what `trees` gave, where they are; returns them."""
        own: list[dict[str, dict[str, Any]]] = [{} for _ in trees]
        for number, tree in enumerate(trees if places else ()):
            for name, state in tree.get("state", {}).items():
                for key in [key for key in state if _label(number, name, key) in places]:
                    own[number].setdefault(name, {})[key] = state.pop(key)
        return own

    # --- loading ------------------------------------------------------------------------------------------------------

    def faults(self, saved: Mapping[str, Any]) -> list[str]:
        """Why saved optimizers do not fit those here, in words; changes nothing.

        Args:
            saved: the whole tree.
        """
        trees, live = saved["optimizers"], named_parameters(self._model)
        self._require_known(live)
        if len(trees) != len(self.objects):
            return [f"{len(trees)} optimizer(s) were saved, and there are {len(self.objects)}"]
        about = saved.get("about_optimizers", [{"built": None}] * len(trees))
        return [
            f"optimizer {number}: {fault}"
            for number, (one, of_one, optimizer) in enumerate(zip(trees, about, self.objects, strict=True))
            for fault in stored_faults(one, of_one["built"], optimizer, live, self._built_groups[number])
        ]

    def template(self, saved: Mapping[str, Any], live: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
        """Memory for what this rank reads; see `TrainingObjects.template`."""
        plain = partial(room, parameter=None)
        templates = []
        for number, optimizer in enumerate(saved["optimizers"]):
            whole = _whole_of(saved, number)
            state = {
                name: {
                    key: tree_map_only(
                        torch.Tensor, plain if key in whole.get(name, ()) else partial(room, parameter=live[name]), kept
                    )
                    for key, kept in values.items()
                }
                for name, values in optimizer.get("state", {}).items()
            }
            rest = {key: tree_map_only(torch.Tensor, plain, kept) for key, kept in optimizer.items() if key != "state"}
            templates.append({**rest, "state": state} if "state" in optimizer else rest)
        return templates

    def apply(
        self,
        loaded: Sequence[Mapping[str, Any]],
        saved: Mapping[str, Any],
        live: Mapping[str, torch.Tensor],
        own: Own | None,
    ) -> list[str]:
        """Puts what was read by a `template` into the optimizers; keeps what it was given.

        Args:
            loaded: the template, filled.
            saved: the whole tree, with placeholders.
            live: the model's parameters.
            own: what was this rank's alone.

        Returns:
            What the user is to learn, one sentence each.
        """
        notes: list[str] = []
        for number, (optimizer, read) in enumerate(zip(self.objects, loaded, strict=True)):
            whole, looks = _whole_of(saved, number), saved["optimizers"][number].get("state", {})
            state: dict[str, dict[str, Any]] = {
                name: {
                    key: value
                    if key in whole.get(name, ())
                    else tree_map(partial(as_live, parameter=live[name]), value, looks[name][key])
                    for key, value in kept.items()
                }
                for name, kept in read.get("state", {}).items()
            }
            for name, values in own[number].items() if own else ():
                state.setdefault(name, {}).update(values)
            named = {**read, "state": state} if "state" in read else read
            notes += load_named_state(optimizer, named, named_parameters(self._model))
        return notes

    def _require_known(self, live: Named) -> None:
        """Raises ValueError if a parameter of an optimizer is not in the model."""
        for optimizer in self.objects:
            groups = members_of(optimizer, live)
            foreign = [place for place, group in enumerate(groups) for name in group if name not in live]
            if foreign:
                raise ValueError(
                    f"the optimizer {type(optimizer).__name__} has {len(foreign)} parameter(s) that are not in the "
                    f"model (the first in group {foreign[0]}), so they would not be saved: put them into one "
                    "torch.nn.Module with the model, and give that"
                )


def _tree(optimizer: torch.optim.Optimizer, live: Named) -> dict[str, Any]:
    state: dict[str, Any] = named_state(optimizer, live)
    if OWN_FORM in state:
        if any(isinstance(leaf, DTensor) for leaf in tree_flatten(state)[0]):
            raise TypeError(
                f"{type(optimizer).__name__} has a state_dict of its own form with DTensors in it, which is not "
                "supported: save it by torch.distributed.checkpoint"
            )
        return state
    if not state["others"]:
        del state["others"]
    return {**state, "state": {name: _checked(name, live, kept) for name, kept in state["state"].items()}}


def _whole_in(optimizer: torch.optim.Optimizer, live: Named) -> dict[str, list[str]]:
    """Plain tensors of the form of a sharded parameter, which would be taken for sharded ones."""
    found: dict[str, list[str]] = {}
    for name, parameter in live.items():
        for key, value in optimizer.state.get(parameter, {}).items() if isinstance(parameter, DTensor) else ():
            is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if is_plain and value.shape == parameter.shape:
                found.setdefault(name, []).append(key)
    return found


def own_faults(own: Own, saved_ranks: int, ranks: int) -> list[str]:
    """Why another number of ranks cannot have what was each rank's own, in words. Pure.

    >>> own_faults([{"0.weight": {"scale": 1.0}}], 2, 3)
    ["'scale' of 0.weight was another one on each of the 2 ranks that saved it, and there are 3"]
    """
    places = [f"{key!r} of {name}" for state in own for name, values in state.items() for key in values]
    if not places or saved_ranks == ranks:
        return []
    was = "was another one" if len(places) == 1 else "were others"
    return [f"{shortlist(places)} {was} on each of the {saved_ranks} ranks that saved it, and there are {ranks}"]


def room(value: Any, parameter: torch.Tensor | None) -> Any:
    """Memory for a tensor; for what is as large as a sharded parameter, for the part of this rank."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(parameter, DTensor) and parameter.shape == value.shape:
        (part,) = encode_leaf(parameter, "parameter").parts
        return ShardOf(torch.empty(part.region.sizes, dtype=value.dtype), part.shape, part.region.offsets)
    return torch.empty(value.shape, dtype=value.dtype)


def as_live(value: Any, whole: Any, parameter: torch.Tensor) -> Any:
    """What was read, as a DTensor where the parameter is one and `room` made room for a part like it."""
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


def is_ours(value: Any) -> bool:
    """Whether this rank saves its part; of ranks that hold equal parts (HSDP) only the first does."""
    if not isinstance(value, DTensor):
        return True
    coordinate: Sequence[int] = value.device_mesh.get_coordinate() or []
    is_shard = any(placement.is_shard() for placement in value.placements)
    return not is_shard or all(
        placement.is_shard() or place == 0 for placement, place in zip(value.placements, coordinate, strict=True)
    )


def differing(digests: Sequence[Mapping[str, str]]) -> set[str]:
    """The places at which not all ranks have the same. Pure.

    >>> sorted(differing([{"a": "1", "b": "1"}, {"a": "1", "b": "2"}, {"a": "1", "b": "1", "c": "1"}]))
    ['b', 'c']
    """
    places = {place for each in digests for place in each}
    return {place for place in places if len({each.get(place) for each in digests}) > 1}


def _label(number: int, name: str, key: Any) -> str:
    return f"{number}/{name}/{key!r}"


def _whole_of(saved: Mapping[str, Any], number: int) -> Mapping[str, Collection[str]]:
    about = saved.get("about_optimizers")
    return {} if about is None else about[number]["whole"]


def _checked(name: str, live: Mapping[str, torch.Tensor], state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state
    for key, value in state.items():
        if isinstance(value, DTensor) and (name not in live or value.shape != live[name].shape):
            raise TypeError(
                f"the optimizer keeps {key!r} of the parameter {name!r} as a DTensor of another shape, which is not "
                "supported: save it by torch.distributed.checkpoint"
            )
    return {key: value for key, value in state.items() if is_ours(value)}


def _digest(value: Any) -> str:
    digest = xxhash.xxh3_64()
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            tensor = contiguous(leaf)
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(memory_of(tensor))
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
