"""What a checkpoint calls the tensors of a sharded model's optimizers, and what it has of them beside tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torchelastic.checkpoint.engine.read_rules import StoredParts
from torchelastic.errors import NonRetryableException
from torchelastic.inventory.names import plain_name
from torchelastic.model.stored_form import OF_EACH_RANK, names_in_order
from torchelastic.sharded.built import Built
from torchelastic.sharded.plain_tensors import OPTIMIZER, PARAMETERS

#: Of each optimizer, the names of the numbers in its state; without one of it, they are as built here (form 1).
Names = Mapping[int, Sequence[str]]


def names_in_shard(part: StoredParts, built: Built) -> dict[int, list[str]]:
    """Of each optimizer, the names of the numbers in its state, as a shard says; empty: it is of form 1."""
    prefix, among = f"{OF_EACH_RANK}order/", sorted(built.parameters)
    orders = {name: rows[0] for name, rows in part.tensors.items() if name.startswith(prefix)}
    return {int(name.removeprefix(prefix)): names_in_order(order, among) for name, order in orders.items()}


def names_in_tree(tree: Mapping[str, Any], built: Built) -> dict[int, list[str]]:
    """The same, as a whole tree says."""
    stored = built.optimizers.states_in(tree["parameters"]) if "parameters" in tree else []
    return {number: of_one for number, of_one in enumerate(stored) if of_one is not None}


def name_of_stored(stored: str, built: Built, names: Names) -> str | None:
    """Our name of a tensor in a checkpoint; None: it is no parameter's and no optimizer's.

    Args:
        stored: its name there.
        built: what is here.
        names: see `Names`.

    Raises:
        NonRetryableException: the checkpoint is of other optimizers.
    """
    kind, _, rest = stored.partition("/")
    if kind == "module":
        return PARAMETERS + plain_name(rest) if plain_name(rest) in built.parameters else None
    place = _place_in(stored, built)
    if place is None:
        return None
    number, parameter, key = place
    return f"{OPTIMIZER}{number}/{_optimized_name(built, number, parameter, names)}/{key}"


def names_of_saved(stored: Iterable[str], built: Built) -> dict[str, str | None]:
    """The same for tensors in the tree that is saved now, each of an optimizer's state or None."""
    places, optimized = {name: _place_in(name, built) for name in stored}, built.optimized
    return {
        name: None if found is None else f"{OPTIMIZER}{found[0]}/{optimized[found[0]][found[1]][0]}/{found[2]}"
        for name, found in places.items()
    }


def plain_values_in(state: Any, built: Built, names: Names) -> dict[str, Any]:
    """The plain values in the optimizers' saved state (`Optimizers.state_dict`), by our names; see `name_of_stored`."""
    return {
        f"{OPTIMIZER}{number}/{_optimized_name(built, number, int(place), names)}/{key}": value
        for number, one in enumerate(built.optimizers.states_in(state))
        for place, kept in one["state"].items()
        for key, value in kept.items()
        if not isinstance(value, torch.Tensor)
    }


def settings_in(state: Any, built: Built, names: Names, built_there: Any) -> list[list[dict[str, Any]]]:
    """The hyperparameters in the optimizers' saved state, as `Optimizers.settings` gives them.

    Args:
        state: the optimizers' (`Optimizers.state_dict`).
        built: what is here.
        names: see `Names`.
        built_there: the names in each group as the script had built it that has saved; None: nobody knows.

    Returns:
        With names as "params" where the groups are to be as they were saved, and not as they are built.

    Raises:
        NonRetryableException: its groups have other parameters than those here.
    """
    saved = [one["param_groups"] for one in built.optimizers.states_in(state)]
    if names and built_there == built.form.groups:  # what the run has changed since comes from the checkpoint
        return [
            [{**group, "params": [names[number][place] for place in group["params"]]} for group in groups]
            for number, groups in enumerate(saved)
        ]
    for optimizer, groups in zip(built.optimizers.objects, saved, strict=True):
        before, now = ([len(each["params"]) for each in some] for some in (groups, optimizer.param_groups))
        if before != now and len(before) == len(now):
            raise NonRetryableException(
                f"the parameter groups of the checkpoint's {type(optimizer).__name__} hold {before} parameters, and "
                f"those that build(mesh) has made hold {now}: build the optimizer as it was when it was saved"
            )
    return [[{key: value for key, value in group.items() if key != "params"} for group in one] for one in saved]


def _place_in(stored: str, built: Built) -> tuple[int, int, str] | None:
    """Number of the optimizer, place of the parameter and key of the value; None: it is of no parameter's state."""
    kind, *optimizer = stored.split("/")
    if kind != "optimizer" or len(optimizer) < 3 or optimizer[-3] != "state" or not optimizer[-2].isdigit():
        return None
    *path, _, place, key = optimizer
    names, name = list(built.optimizers.names), "/".join(path)
    return names.index(name) if name in names else int(name.strip("~'")), int(place), key


def _optimized_name(built: Built, number: int, place: int, names_of: Names) -> str:
    """The name of an optimizer's parameter, by its place there."""
    names = names_of.get(number, built.names_as_built[number])
    if place >= len(names):
        raise NonRetryableException(
            f"the checkpoint's optimizer has a parameter number {place}, and the one that build(mesh) has made has "
            f"{len(names)} parameters: build the one that was saved, with the groups that add_param_group had added"
        )
    if names[place] not in built.parameters:
        raise NonRetryableException(
            f"the checkpoint's optimizer has a parameter {names[place]!r}, which the model that build(mesh) has made "
            "does not have: build the one that was saved"
        )
    return names[place]
