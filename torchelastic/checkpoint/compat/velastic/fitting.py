"""Whether a saved model and its optimizers are those that are there now: compares, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.text import shortlist

#: Shape and dtype of a tensor; None for a value that is no tensor.
Form = tuple[tuple[int, ...], str] | None
#: The names of the parameters of each group of an optimizer.
GroupNames = list[list[str]]

_NAMED = 5


def require_fitting(saved: Mapping[str, Form], live: Mapping[str, Form], optimizer_faults: Sequence[str]) -> None:
    """Compares what was saved with what is there now.

    Args:
        saved: what the checkpoint has of the model, by name.
        live: what the model has.
        optimizer_faults: what is found of the optimizers.

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
    faults += optimizer_faults
    if faults:
        raise CheckpointError(
            f"the checkpoint does not fit: {'; '.join(faults)}. Nothing was loaded; build model and optimizer as they "
            "were, or give another ckpt_path"
        )


def member_faults(number: int, before: GroupNames, now: GroupNames) -> list[str]:
    """In what the members of an optimizer's groups differ, in words.

    Args:
        number: of the optimizer.
        before: those of before.
        now: those that are there.

    >>> member_faults(0, [["b", "a"]], [["a", "b"]]), member_faults(0, [["a"], ["b"]], [["a"]])
    ([], ['the groups of optimizer 0 hold other parameters than they did ([1, 1] and [1] parameters)'])
    """
    if [sorted(group) for group in before] == [sorted(group) for group in now]:
        return []
    sizes = f"{[len(group) for group in before]} and {[len(group) for group in now]} parameters"
    return [f"the groups of optimizer {number} hold other parameters than they did ({sizes})"]


def _words(form: Form) -> str:
    return "a plain value" if form is None else f"a {form[1].removeprefix('torch.')} of shape {form[0]}"
