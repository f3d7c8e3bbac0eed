"""How a state becomes what a shard holds, and back: plain values and tensors, or a pickle where that is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.local.base_state_dict import TensorAwareStateDict
from torchelastic.checkpoint.local.basic_state_dict import BasicTensorAwareStateDict
from torchelastic.checkpoint.shards import unflatten
from torchelastic.checkpoint.shards.header import Header
from torchelastic.checkpoint.shards.layout import RecurringLayout

_CLASS, _DEVICES = "state_class", "devices"


def encode(state: TensorAwareStateDict, layout: RecurringLayout) -> tuple[Header, list[torch.Tensor]]:
    """Takes a state apart; copies no tensor, and leaves the state as it was.

    Args:
        state: not hollow.
        layout: of this state, if it is saved again and again; else a new one.

    Returns:
        The layout of the shard, with what `decode` needs to know, and the tensors in the order of its entries.

    Raises:
        TypeError: it holds something else, or cannot be stored; names the remedy.
        RuntimeError: it is hollow.
    """
    if not isinstance(state, TensorAwareStateDict):
        raise TypeError(
            f"a {type(state).__qualname__} was given to be saved: wrap a state dict in BasicTensorAwareStateDict first"
        )
    if state.is_hollow:
        raise RuntimeError("the tensors of this state were taken out: insert_tensors() before it is saved")
    meta = {_CLASS: state.class_name(), _DEVICES: _encode_devices([tensor.device for tensor in state.tensors])}
    return layout.lay_out(state.to_tree(), meta)


def decode(header: Header, tensors: Mapping[str, torch.Tensor], *, allow_pickles: bool) -> TensorAwareStateDict:
    """The inverse of `encode`; the tensors stay on the CPU until `restore_tensor_device`.

    Args:
        header: of the shard.
        tensors: of the shard, by name, checked.
        allow_pickles: run the pickles that are in it.

    Raises:
        CheckpointError: its class is not defined here, or it holds pickles and they are not allowed.
        CorruptCheckpointError: it makes no sense.
    """
    name = header.meta.get(_CLASS)
    state_class = TensorAwareStateDict.class_named(str(name))
    if state_class is None:
        raise CheckpointError(f"the saved state is a {name}, which is not defined in this process: import it first")
    tree = unflatten(header.structure, tensors, allow_pickles=allow_pickles)
    return state_class.from_tree(tree, _devices_here(_decode_devices(header.meta.get(_DEVICES, []))))


def plain_basic(tree: Any) -> Any:
    """A tree as `BasicTensorAwareStateDict` stores it, for a template to read into."""
    return tree.to_tree() if isinstance(tree, BasicTensorAwareStateDict) else tree


def _encode_devices(devices: Sequence[torch.device]) -> list[list[Any]]:
    """Runs of equal devices; nearly always one."""
    return [[str(device), len(list(run))] for device, run in groupby(devices)]


def _decode_devices(runs: Sequence[Sequence[Any]]) -> list[torch.device]:
    try:
        return [torch.device(name) for name, count in runs for _ in range(int(count))]
    except (RuntimeError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"the devices of the saved state make no sense: {error}") from error


def _devices_here(devices: Sequence[torch.device]) -> list[torch.device]:
    """The same; a state that was on one GPU goes to this process's own, whichever number that had there."""
    if len({device for device in devices if device.type != "cpu"}) > 1:
        return list(devices)
    return [device if device.type == "cpu" else torch.device(device.type) for device in devices]
