"""Whether a saved model and its optimizers are those that are there now: compares, and changes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.text import shortlist
from torchelastic.torch_internals.tensors import tree_flatten, tree_unflatten

#: Shape and dtype of a tensor; None for a value that is no tensor.
Form = tuple[tuple[int, ...], str] | None
#: The names of the parameters of each group of an optimizer.
GroupNames = list[list[str]]

_NAMED = 5


def require_fitting(
    saved: Mapping[str, Form],
    live: Mapping[str, Form],
    saved_groups: Sequence[GroupNames],
    groups: Sequence[GroupNames],
    settings_faults: Sequence[str] = (),
) -> None:
    """Compares what was saved with what is there now.

    Args:
        saved: what the checkpoint has of the model, by name.
        live: what the model has.
        saved_groups: of the optimizers in the checkpoint.
        groups: of the optimizers that are there.
        settings_faults: what `optimizer_faults` has found.

    Raises:
        CheckpointError: names, shapes, dtypes or groups differ; names them.
    """
    faults = []
    for who, lacking in (("checkpoint", live.keys() - saved.keys()), ("model", saved.keys() - live.keys())):
        if lacking:
            faults.append(f"the {who} lacks {shortlist([repr(name) for name in sorted(lacking)], _NAMED)}")
    different = [name for name in saved if name in live and saved[name] != live[name]]
    faults += [f"{name!r} was {_words(saved[name])} and is {_words(live[name])}" for name in different[:_NAMED]]
    if len(different) > _NAMED:
        faults.append(f"{len(different) - _NAMED} more differ")
    if len(saved_groups) != len(groups):
        faults.append(f"{len(saved_groups)} optimizer(s) were saved, and there are {len(groups)}")
    else:
        faults += _group_faults(saved_groups, groups) or settings_faults
    if faults:
        raise CheckpointError(
            f"the checkpoint does not fit: {'; '.join(faults)}. Nothing was loaded; build model and optimizer as they "
            "were, or give another ckpt_path"
        )


def _group_faults(saved_groups: Sequence[GroupNames], groups: Sequence[GroupNames]) -> list[str]:
    faults = []
    for number, (before, now) in enumerate(zip(saved_groups, groups, strict=True)):
        if [sorted(group) for group in before] != [sorted(group) for group in now]:
            sizes = f"{[len(group) for group in before]} and {[len(group) for group in now]} parameters"
            faults.append(f"the groups of optimizer {number} hold other parameters than they did ({sizes})")
    return faults


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


def _words(form: Form) -> str:
    return "a plain value" if form is None else f"a {form[1].removeprefix('torch.')} of shape {form[0]}"
