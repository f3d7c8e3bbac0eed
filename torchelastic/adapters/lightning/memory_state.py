"""A checkpoint of Lightning as tensors with names, which `torch.distributed.checkpoint` can store, and back.

What is no tensor is stored as JSON in one tensor of bytes, so that nothing is ever unpickled. Names are paths as in a
JSON pointer (`state_dict/layer.weight`); see `torchelastic.checkpoint.format.tree`. Pure.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchelastic.adapters.values import from_json_tensor, json_tensor
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.tree import flatten, unflatten
from torchelastic.torch_internals.tensors import metadata_of, set_metadata

#: The tensor with everything that is no tensor.
VALUES = "lightning"
#: Its length is a multiple of this, so that a counter with one digit more does not change the layout.
VALUES_BLOCK_BYTES = 4096

MODEL, OPTIMIZERS = "state_dict", "optimizer_states"
#: What a module has beside its `state_dict`, see `inventory.stored_module`; not Lightning's.
BESIDE = "torchelastic_beside"
#: What only `load_from_checkpoint` needs, and not a run that goes on: a part of it that cannot be stored is left out.
OPTIONAL = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_type", "datamodule_hparams_type")


@dataclass(frozen=True)
class Parts:
    """A checkpoint, taken apart.

    Attributes:
        tensors: by name; not copied.
        left_out: where values were that cannot be stored and are not needed to go on.
    """

    tensors: dict[str, torch.Tensor]
    skipped: tuple[str, ...] = ()


def take_apart(checkpoint: Mapping[str, Any], *, is_sharded: bool, allow_pickles: bool = False) -> Parts:
    """A checkpoint of `trainer.dump_checkpoint` as named tensors; changes nothing in it.

    Args:
        checkpoint: the checkpoint.
        is_sharded: each rank has a part of the tensors of model and optimizers (DTensor), and loads them in place.
        allow_pickles: store objects that are neither plain values nor tensors as pickles.

    Raises:
        TypeError: it holds something that cannot be stored; names where and what to do.
    """
    rest, tensors = dict(checkpoint), dict[str, torch.Tensor]()
    if is_sharded:
        for key in (MODEL, OPTIMIZERS):
            if key in rest:
                rest[key] = without_tensors(rest[key], key, tensors)
    skipped: list[str] = []
    for key in OPTIONAL:
        if key in rest and not allow_pickles:
            part = _storable_part(rest.pop(key), key, skipped)
            rest.update({} if part is _NOTHING else {key: part})
    try:
        flat = flatten(as_plain(rest), allow_pickles=allow_pickles)
    except TypeError as error:
        raise TypeError(
            f"the checkpoint cannot be saved in memory: {str(error).partition(':')[0]}. Have the state_dict or "
            "on_save_checkpoint that it comes from give plain values and tensors, or give the wrapper "
            "allow_pickles=True; durable checkpoints are not affected"
        ) from error
    tensors[VALUES] = json_tensor(flat.structure, VALUES_BLOCK_BYTES)
    tensors.update({part.name: part.tensor for part in flat.tensors})
    return Parts(tensors, tuple(skipped))


def put_together(tensors: Mapping[str, torch.Tensor], *, allow_pickles: bool = False) -> dict[str, Any]:
    """The inverse of `take_apart`; of a sharded checkpoint, all but the tensors of model and optimizers.

    Raises:
        CheckpointError: it holds pickles, and they are not allowed; or it is no checkpoint of Lightning.
        CorruptCheckpointError: what is stored is damaged.
    """
    if VALUES not in tensors:
        raise CheckpointError(
            "this checkpoint in memory was not saved by a trainer of Lightning: load it with what saved it, or give "
            "the trainer a container of its own"
        )
    structure = from_json_tensor(tensors[VALUES], "the values of Lightning")
    checkpoint = unflatten(structure, tensors, allow_pickles=allow_pickles)
    if not isinstance(checkpoint, dict):
        raise CorruptCheckpointError("the checkpoint in memory is no dict")
    return checkpoint


def share_of(rank: int, tensors: Mapping[str, Any], everywhere: Set[str]) -> dict[str, Any]:
    """The tensors that one rank saves: rank 0 all, the others those `everywhere`: equal on all ranks, or sharded.

    Lightning's own checkpoints are those of rank 0: ranks may differ in the running mean of a batch norm, say.
    """
    return dict(tensors) if rank == 0 else {name: tensor for name, tensor in tensors.items() if name in everywhere}


def names_of_optimizers(tensors: Mapping[str, Any]) -> set[str]:
    """The names of the tensors in optimizers' states."""
    return {name for name in tensors if name.startswith(f"{OPTIMIZERS}/")}


def as_plain(value: Any) -> Any:
    """The same with plain types in place of their subclasses: dicts (AttributeDict), strings and numbers (enums)."""
    if isinstance(value, dict):
        items = ((as_plain(key), as_plain(item)) for key, item in value.items())
        if not isinstance(value, OrderedDict):
            return dict(items)
        ordered = OrderedDict(items)
        if (versions := metadata_of(value)) is not None:
            set_metadata(ordered, as_plain(versions))
        return ordered
    if type(value) in (list, tuple):
        return type(value)(as_plain(item) for item in value)
    if isinstance(value, np.generic) and not isinstance(value, str):
        return value  # a np.float64 is a float
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and type(value) is not bool:
        return int(value)
    return float(value) if isinstance(value, float) else value


def without_tensors(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The same with None in place of tensors, which are put into `tensors` by name."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return None
    if isinstance(value, Mapping):
        return {key: without_tensors(item, f"{name}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_tensors(item, f"{name}/{index}", tensors) for index, item in enumerate(value)]
    return value


def with_tensors(value: Any, name: str, tensors: Mapping[str, Any]) -> Any:
    """The inverse of `without_tensors`: the same with tensors by name, where there are such.

    >>> with_tensors({"a": None, "b": [1, None]}, "x", {"x/b/1": "a tensor"})
    {'a': None, 'b': [1, 'a tensor']}
    """
    if name in tensors:
        return tensors[name]
    if isinstance(value, Mapping):
        return {key: with_tensors(item, f"{name}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_tensors(item, f"{name}/{index}", tensors) for index, item in enumerate(value)]
    return value


#: In place of what cannot be stored.
_NOTHING = object()


def _storable_part(value: Any, path: str, skipped: list[str]) -> Any:
    """What of hyper-parameters can be stored; the places of the rest are added to `skipped`."""
    if type(value).__module__.partition(".")[0] == "omegaconf":
        value = sys.modules["omegaconf"].OmegaConf.to_container(value)  # it is there: the value is one of its own
    if isinstance(value, dict):
        items = {key: _storable_part(item, f"{path}/{key}", skipped) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not _NOTHING}
    try:
        flatten(as_plain(value))
    except (TypeError, ValueError):
        skipped.append(path)
        return _NOTHING
    return value
