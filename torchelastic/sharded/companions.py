"""The companions of a `ShardedState` with what `build` has made: as they go to other ranks, and to checkpoints."""

from __future__ import annotations

import io
from typing import Any

import torch

from torchelastic.checkpoint.format.tree import flatten, unflatten
from torchelastic.model.companions import Companions
from torchelastic.sharded.built import Built


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
    """A tree of what a checkpoint can hold, written; the inverse of `from_bytes`."""
    stream, flat = io.BytesIO(), flatten(tree, allow_pickles=True)
    torch.save((flat.structure, {part.name: part.tensor for part in flat.tensors}), stream)
    return stream.getvalue()


def from_bytes(data: bytes) -> dict[str, Any]:
    """The inverse of `to_bytes`. Raises CheckpointError for anything but plain values and tensors."""
    tree: dict[str, Any] = unflatten(*torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    return tree
