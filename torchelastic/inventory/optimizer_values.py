"""An optimizer's state and its groups by the names of the model's parameters, and not by their positions.

Torch numbers the parameters of an optimizer in the order in which the script has given them. Ranks may give them in
another one (`set(...)`, a dict by address), and a script may add groups in the run: by their names each state comes to
its parameter all the same, and a worker that joins gets the groups. Parameters that are not the model's are named by
their place. An optimizer that saves itself in a form of its own is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchelastic.errors import UnfitStateError
from torchelastic.text import shortlist

#: Parameters of the model, by name.
Named = Mapping[str, torch.nn.Parameter]

#: In what `named_state` gives: the `state_dict` of an optimizer that has a form of its own.
OWN_FORM = "own_form"
#: The state of what is no parameter.
_OTHERS = "others"


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    """Its `state_dict`, also where it has state of a parameter that is in no group any more: that is left out."""
    with _without_orphans(optimizer):
        return optimizer.state_dict()


def named_state(optimizer: torch.optim.Optimizer, parameters: Named) -> Any:
    """Its `state_dict` with names in the place of numbers; the tensors are not copied."""
    state = state_of(optimizer)
    if not _is_usual(state, optimizer):
        return {OWN_FORM: state}
    names = group_names(optimizer, parameters)
    by_number = {
        number: name
        for group, of_group in zip(state["param_groups"], names, strict=True)
        for number, name in zip(group["params"], of_group, strict=True)
    }
    return _with_names(state, by_number, names)


def stored_names(state: Any, optimizer: torch.optim.Optimizer, parameters: Named) -> list[str] | None:
    """The name of each number in an optimizer's `state_dict`; None where it saves itself in a form of its own."""
    if not _is_usual(state, optimizer):
        return None
    return [name for group in group_names(optimizer, parameters) for name in group]


def state_from_stored(state: Any, names: Sequence[str] | None) -> Any:
    """What `named_state` gave there.

    Args:
        state: the `state_dict` there.
        names: what `stored_names` gave.

    Raises:
        UnfitStateError: they do not belong together.
    """
    if names is None:
        return {OWN_FORM: state}
    by_number = dict(enumerate(names))
    try:
        of_groups = [[by_number[number] for number in group["params"]] for group in state["param_groups"]]
        return _with_names(state, by_number, of_groups)
    except (AttributeError, KeyError, TypeError) as error:
        raise UnfitStateError(
            "the optimizer's state in the checkpoint and the names of its parameters there do not belong together"
        ) from error


def _with_names(
    state: Mapping[str, Any], by_number: Mapping[int, str], names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    return {
        **state,
        "state": {by_number[key]: value for key, value in state["state"].items() if key in by_number},
        _OTHERS: {key: value for key, value in state["state"].items() if key not in by_number},
        "param_groups": [
            {**group, "params": list(of_group)} for group, of_group in zip(state["param_groups"], names, strict=True)
        ],
    }


def group_faults(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, parameters: Named, *, may_lose: bool
) -> list[str]:
    """Why the groups of an optimizer cannot be made like those of a named state, in words; changes nothing.

    Args:
        state: what `named_state` gave there, with names.
        optimizer: the one that is there.
        parameters: of the model that is there.
        may_lose: whether this one may have groups and parameters that the other has not: it was in sync before.
    """
    kind = type(optimizer).__name__
    theirs = [group["params"] for group in state["param_groups"]]
    own = group_names(optimizer, parameters)
    known = parameters.keys() | {name for group in own for name in group}
    unknown = [name for group in theirs for name in group if name not in known]
    if unknown:
        return [f"{shortlist(unknown)} is in that one's parameter groups, and there is no such parameter here"]
    if may_lose:
        return []
    if len(own) > len(theirs):
        return [f"that state has {len(theirs)} parameter group(s), and this {kind} has {len(own)}"]
    for number, (here, there) in enumerate(zip(own, theirs[: len(own)], strict=True)):
        lost = sorted(set(here) - set(there))
        if lost:
            return [f"parameter group {number} of this {kind} holds {shortlist(lost)}, and that one's does not"]
    return []


def put_groups(state: Mapping[str, Any], optimizer: torch.optim.Optimizer, parameters: Named) -> None:
    """Have groups like those of a named state, with the same parameters in the same order; `group_faults` found none.

    Their hyperparameters come with the state.
    """
    named = {**_others(optimizer, parameters), **parameters}
    groups = [[named[name] for name in group["params"]] for group in state["param_groups"]]
    own = optimizer.param_groups
    for group, members in zip(own, groups, strict=False):
        group["params"][:] = members
    del own[len(groups) :]
    for group, members in zip(state["param_groups"][len(own) :], groups[len(own) :], strict=True):
        names = group.get("param_names")
        settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        given = members if names is None else list(zip(names, members, strict=True))
        optimizer.add_param_group({"params": given, **settings})


def numbered_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A named state as torch's `load_state_dict` takes it, for an optimizer with these groups; see `put_groups`."""
    numbers: dict[str, int] = {}
    for group in state["param_groups"]:
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
    return {
        **{key: value for key, value in state.items() if key != _OTHERS},
        "state": {numbers[name]: value for name, value in state["state"].items()} | dict(state[_OTHERS]),
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def _is_usual(state: Any, optimizer: torch.optim.Optimizer) -> bool:
    if (
        not isinstance(state, Mapping)
        or not isinstance(state.get("state"), Mapping)
        or {_OTHERS, OWN_FORM} & state.keys()
    ):
        return False
    groups = state.get("param_groups")
    if not isinstance(groups, Sequence) or len(groups) != len(optimizer.param_groups):
        return False
    return all(
        isinstance(group, Mapping) and len(group.get("params", ())) == len(own["params"])
        for group, own in zip(groups, optimizer.param_groups, strict=True)
    )


def group_names(optimizer: torch.optim.Optimizer, parameters: Named) -> list[list[str]]:
    """The names of the parameters of each group."""
    known = {id(parameter): name for name, parameter in parameters.items()}
    names: list[list[str]] = []
    for number, group in enumerate(optimizer.param_groups):
        others = 0
        names.append([])
        for parameter in group["params"]:
            name = known.get(id(parameter))
            if name is None:
                name, others = f"parameter {others} of group {number} that is not the model's", others + 1
            names[-1].append(name)
    return names


def _others(optimizer: torch.optim.Optimizer, parameters: Named) -> dict[str, Any]:
    """Those that are not the model's, by name."""
    return {
        name: parameter
        for group, names in zip(optimizer.param_groups, group_names(optimizer, parameters), strict=True)
        for parameter, name in zip(group["params"], names, strict=True)
        if name not in parameters
    }


@contextmanager
def _without_orphans(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Meanwhile it has no state of parameters that are in none of its groups: torch fails on these."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    orphans = [key for key in optimizer.state if isinstance(key, torch.Tensor) and id(key) not in held]
    kept = [(key, optimizer.state.pop(key)) for key in orphans]
    try:
        yield
    finally:
        optimizer.state.update(kept)
