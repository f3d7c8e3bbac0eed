"""An optimizer's state and its groups by the names of the model's parameters, and not by their positions.

Torch numbers the parameters of an optimizer in the order in which the script has given them. Ranks may give them in
another one (`set(...)`, a dict by address), and a script may add groups in the run: by their names each state comes to
its parameter all the same, and a worker that joins gets the groups. Parameters that are not the model's are named by
their place. An optimizer that saves itself in a form of its own is left as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchelastic.errors import UnfitStateError
from torchelastic.text import shortlist
from torchelastic.torch_internals.tensors import tree_flatten, tree_unflatten

#: Parameters of the model, by name.
Named = Mapping[str, torch.nn.Parameter]

#: The names of the parameters of each group of an optimizer.
GroupNames = list[list[str]]

#: In what `named_state` gives: the `state_dict` of an optimizer that has a form of its own.
OWN_FORM = "own_form"
#: The state of what is no parameter.
_OTHERS = "others"
_NAMED = 5


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    """Its `state_dict`, also where it has state of a parameter that is in no group any more: that is left out."""
    with _without_orphans(optimizer):
        return optimizer.state_dict()


def named_state(optimizer: torch.optim.Optimizer, parameters: Named) -> Any:
    """Its `state_dict` with names in the place of numbers; the tensors are not copied."""
    state = state_of(optimizer)
    if not _is_usual(state, optimizer):
        return {OWN_FORM: state}
    names = members_of(optimizer, parameters)
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
    return [name for group in members_of(optimizer, parameters) for name in group]


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
    own = members_of(optimizer, parameters)
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


def stored_faults(
    state: Mapping[str, Any],
    built: GroupNames | None,
    optimizer: torch.optim.Optimizer,
    parameters: Named,
    built_here: GroupNames,
) -> list[str]:
    """Why an optimizer cannot have a named state of a checkpoint; changes nothing.

    Args:
        state: what `named_state` gave there.
        built: the groups that the script had made there, if the run has changed them since.
        optimizer: ours.
        parameters: of our model.
        built_here: the groups that the script has made here.
    """
    kind, own = type(optimizer).__name__, members_of(optimizer, parameters)
    if OWN_FORM in state or OWN_FORM in named_state(optimizer, {}):
        if OWN_FORM in state and OWN_FORM in named_state(optimizer, {}):
            return []
        return [f"the state_dict of this {kind} is of another form than the saved one"]
    saved = [group["params"] for group in state["param_groups"]]
    known = parameters.keys() | {name for group in own for name in group}
    unknown = [name for group in saved for name in group if name not in known]
    if unknown:
        return [f"{shortlist(unknown)} is in the saved groups of the {kind}, and there is no such parameter here"]
    theirs = [groups for groups in (saved, built) if groups is not None]
    if not any(_are_alike(groups, mine) for groups in theirs for mine in (own, built_here)):
        sizes = f"{[len(group) for group in saved]} and {[len(group) for group in own]} parameters"
        return [f"the groups of this {kind} hold other parameters than they did ({sizes})"]
    groups = [*state["param_groups"][: len(own)], *optimizer.param_groups[len(saved) :]]  # others come, or go
    return optimizer_faults([without_members(group) for group in groups], optimizer)


def load_named_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], parameters: Named) -> list[str]:
    """Have a named state of a checkpoint, of parameters of the same types; `stored_faults` found none.

    Returns:
        What the user is to learn, one sentence each.
    """
    if OWN_FORM in state:
        optimizer.load_state_dict(state[OWN_FORM])
        return []
    saved, own = [group["params"] for group in state["param_groups"]], members_of(optimizer, parameters)
    put_groups(state, optimizer, parameters)
    numbered = numbered_state(state)
    optimizer.load_state_dict(numbered)
    put_types_back(optimizer, numbered)
    if _are_alike(saved, own):
        return []
    return [
        f"the parameter groups of {type(optimizer).__name__} are those that the run had when this was saved, and not "
        "as the script has made them now: add_param_group or the like has changed them"
    ]


def _are_alike(groups: GroupNames, others: GroupNames) -> bool:
    return [sorted(group) for group in groups] == [sorted(group) for group in others]


def without_members(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group."""
    return {name: value for name, value in group.items() if name != "params"}


def numbered_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A named state as torch's `load_state_dict` takes it, for an optimizer with these groups; see `put_groups`."""
    numbers: dict[str, int] = {}
    for group in state["param_groups"]:
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
    return {
        **{key: value for key, value in state.items() if key != _OTHERS},
        "state": {numbers[name]: value for name, value in state["state"].items()} | dict(state.get(_OTHERS, {})),
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def optimizer_faults(saved: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> list[str]:
    """In what saved parameter groups differ from those of an optimizer, in words; changes nothing.

    Args:
        saved: the groups of its `state_dict`, with their parameters or without.
        optimizer: the one that is there.
    """
    kind, number = type(optimizer).__name__, len(optimizer.param_groups)
    if len(saved) != number:
        return [f"that state has {len(saved)} parameter group(s), and this {kind} has {number}"]
    before = [len(group["params"]) for group in saved if "params" in group]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if before and before != sizes:
        return [f"that state's parameter groups hold {before} parameters, and those of this {kind} hold {sizes}"]
    for group, own, loaded in zip(saved, optimizer.param_groups, _once_loaded(saved, optimizer), strict=True):
        # torch adds to the defaults while it loads, and to the groups it does not
        lacking = sorted((optimizer.defaults.keys() & own.keys()) - loaded.keys())
        if lacking:
            others = sorted(group.keys() - optimizer.param_groups[0].keys())
            has = f", and have {shortlist([repr(name) for name in others], _NAMED)}" if others else ""
            return [
                f"that state's parameter groups lack {shortlist([repr(name) for name in lacking], _NAMED)}, which this "
                f"{kind} needs{has}: it is of another kind of optimizer"
            ]
    return []


def put_types_back(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Torch has cast what it loaded to the types of the parameters: digits are lost of a float32 sum beside bfloat16.

    Args:
        optimizer: with the same parameters, of the same types, as where it was saved.
        saved: its `state_dict` that was loaded.
    """
    numbers = [number for group in saved.get("param_groups", ()) for number in group.get("params", ())]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        loaded, kept = optimizer.state.get(parameter, {}), saved.get("state", {}).get(number, {})
        for name in loaded.keys() & kept.keys():
            (now, form), (before, saved_form) = tree_flatten(loaded[name]), tree_flatten(kept[name])
            if form == saved_form:  # lists and dicts of tensors, too
                loaded[name] = tree_unflatten([_of_type(*pair) for pair in zip(now, before, strict=True)], form)


def _of_type(cast: Any, value: Any) -> Any:
    are_tensors = isinstance(value, torch.Tensor) and isinstance(cast, torch.Tensor)
    return value.to(cast.device) if are_tensors and cast.dtype != value.dtype else cast


def _once_loaded(saved: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the groups would be: an optimizer fills in what an older release of it had not."""
    probe: torch.optim.Optimizer = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)
    probe.__setstate__({"state": defaultdict(dict), "param_groups": [{**group, "params": []} for group in saved]})
    return probe.param_groups


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


def members_of(optimizer: torch.optim.Optimizer, parameters: Named) -> GroupNames:
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
        for group, names in zip(optimizer.param_groups, members_of(optimizer, parameters), strict=True)
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
