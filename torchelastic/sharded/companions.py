"""The companions of a `ShardedState` with what `build` has made: as they go to other ranks, and to checkpoints."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from torchelastic.checkpoint.format.tensor_parts import contiguous, dtype_name, dtype_named, memory_of
from torchelastic.checkpoint.format.tree import flatten, unflatten
from torchelastic.model.companions import Companions
from torchelastic.model.transfer import UnsendableError
from torchelastic.sharded.built import Built

#: The structure of a tree, the names, types and shapes of its tensors, and their bytes.
_Written = tuple[Any, list[tuple[str, str, tuple[int, ...]]], bytes]


def companions_tree(own: Companions, built: Built) -> dict[str, Any]:
    """All that goes with the parts, as plain values and tensors, which are not copied."""
    return {
        **own.state_dict(built.trained),
        "buffers": dict(built.model.named_buffers()),
        "settings": built.optimizers.settings(),
        "values": built.plain_values(),
    }


def checkpoint_tree(own: Companions, built: Built) -> dict[str, Any]:
    """The whole state in the form of `ModelState`'s, with DTensors; the tensors are not copied."""
    whole = {"module": built.model.state_dict(), "optimizer": built.optimizers.state_dict()}
    return {**whole, **own.state_dict(built.trained)}


def load_companions(own: Companions, tree: dict[str, Any], built: Built, *, with_random: bool, is_stored: bool) -> None:
    """The inverse of `companions_tree`, into what was built for a new group; its `values` are loaded by `Built`.

    Args:
        own: what is overwritten.
        tree: of this rank or of another one.
        built: for the new group.
        with_random: see `Companions.load_state_dict`.
        is_stored: the same.
    """
    with torch.no_grad():
        for name, buffer in built.model.named_buffers():
            if name in tree["buffers"]:
                buffer.copy_(tree["buffers"][name])
    own.load_state_dict(tree, built.trained, with_random=with_random, is_stored=is_stored)
    built.optimizers.load_settings(tree["settings"])


def to_bytes(tree: dict[str, Any]) -> bytes:
    """A tree of what a checkpoint can hold, written; the inverse of `from_bytes`.

    Raises:
        UnsendableError: there is something else in it; names it.
    """
    try:
        flat = flatten(tree, allow_pickles=None)
    except (TypeError, ValueError) as error:
        raise UnsendableError(f"what goes with a sharded state cannot be given to other workers: {error}") from error
    forms = [(part.name, dtype_name(part.tensor.dtype), tuple(part.tensor.shape)) for part in flat.tensors]
    data = b"".join(memory_of(contiguous(part.tensor)) for part in flat.tensors)
    return msgspec.msgpack.encode((flat.structure, forms, data))


def from_bytes(data: bytes) -> dict[str, Any]:
    """The inverse of `to_bytes`. Raises CheckpointError: a class in it is not defined in this process."""
    structure, forms, content = msgspec.msgpack.decode(data, type=_Written)
    begin, tensors = 0, dict[str, torch.Tensor]()
    for name, dtype, shape in forms:
        tensors[name] = tensor = torch.empty(shape, dtype=dtype_named(dtype))
        memory_of(tensor)[:] = content[begin : begin + tensor.nbytes]
        begin += tensor.nbytes
    tree: dict[str, Any] = unflatten(structure, tensors, allow_pickles=None)
    return tree
