"""Pure: whether a saved model and its optimizers are those that are there now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.text import shortlist

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
) -> None:
    """Compares what was saved with what is there now.

    Args:
        saved: what the checkpoint has of the model, by name.
        live: what the model has.
        saved_groups: of the optimizers in the checkpoint.
        groups: of the optimizers that are there.

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
        faults += _group_faults(saved_groups, groups)
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


def _words(form: Form) -> str:
    return "a plain value" if form is None else f"a {form[1].removeprefix('torch.')} of shape {form[0]}"
