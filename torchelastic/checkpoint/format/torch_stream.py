"""A state as one stream of `torch.save`, which `torch.load(weights_only=True)` reads: by this module, or by anybody.

Weights and whatever else torch reads by itself are as they are, by their names. A part of a dict that torch would
refuse when it is read (a date, a path, the state of an 8-bit optimizer) is taken apart by `flatten`, and so marked in
its place. What `flatten` does not know either is refused when it is saved, by name.
"""

from __future__ import annotations

import _codecs
import copy
import io
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
import torch

from torchelastic.checkpoint.format.places import place_text, token
from torchelastic.checkpoint.format.tree import flatten, unflatten
from torchelastic.errors import UnsavableError
from torchelastic.torch_internals.tensors import tree_flatten, tree_map_only

#: The key of what stands in the place of a part that was taken apart, and the form of it.
MARK, FORM = "torchelastic tree", 1
_NO_DATA = torch.empty(0)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def write(tree: Any, stream: BinaryIO) -> None:
    """Write a state. Raises TypeError, ValueError for what `read` could not give back, as `flatten`."""
    torch.save(readable(tree), stream)


def read(stream: BinaryIO) -> Any:
    """What `write` wrote, or `torch.save` alone, on the CPU; executes no pickled code.

    Raises:
        pickle.UnpicklingError: it holds what torch does not read without running it.
        CheckpointError: a class in it is not defined in this process.
    """
    with torch.serialization.safe_globals(_numpy_globals()):
        tree = torch.load(stream, map_location="cpu", weights_only=True)
    return put_together(tree)


def check(tree: Any) -> None:
    """Raises UnsavableError for what `write` would refuse; nothing is written."""
    try:
        readable(tree)
    except (TypeError, ValueError) as error:
        raise UnsavableError(str(error)) from error


def readable(tree: Any, path: tuple[Any, ...] = ()) -> Any:
    """The same with marked parts in place of those that torch would refuse when it reads them; tensors are not copied.

    Args:
        tree: a state, or a part of one.
        path: the keys that lead to it.

    Raises:
        TypeError, ValueError: see `flatten`.
    """
    if _is_read_by_torch(tree):
        return tree
    if type(tree) in (dict, OrderedDict) and all(type(key) in (str, int) for key in tree):
        changed = copy.copy(tree)  # with what a module attaches to its state dict
        changed.update({key: readable(value, (*path, key)) for key, value in tree.items()})
        if _is_read_by_torch(changed):
            return changed
    within = tree
    for key in reversed(path):
        within = {key: within}  # so that a message has the whole place
    flat = flatten(within, allow_pickles=None)
    return {
        MARK: FORM,
        "path": list(path),
        "structure": flat.structure,
        "tensors": {part.name: part.tensor for part in flat.tensors},
    }


def unreadable(tree: Any) -> list[str]:
    """The places of what torch would refuse when it reads it. Raises as `readable`."""
    return list(_marked(readable(tree)))


def _marked(tree: Any) -> Iterator[str]:
    if type(tree) in (dict, OrderedDict):
        if MARK in tree:
            yield place_text([token(key) for key in tree["path"]])
        else:
            for value in tree.values():
                yield from _marked(value)


def put_together(tree: Any) -> Any:
    """A state with what `readable` has marked as it was; dicts are changed in place. Raises as `read`."""
    if type(tree) not in (dict, OrderedDict):
        return tree
    if MARK in tree:
        found = unflatten(tree["structure"], tree["tensors"], allow_pickles=None)
        for key in tree["path"]:
            found = found[key]
        return found
    for key, value in tree.items():
        if type(value) in (dict, OrderedDict):
            tree[key] = put_together(value)
    return tree


def _is_read_by_torch(tree: Any) -> bool:
    try:
        leaves, _ = tree_flatten(tree)
        if any(isinstance(leaf, torch.Tensor) and type(leaf) not in _PLAIN for leaf in leaves):
            return False
        stream = io.BytesIO()
        torch.save(tree_map_only(torch.Tensor, lambda _: _NO_DATA, tree), stream)
        stream.seek(0)
        with torch.serialization.safe_globals(_numpy_globals()):
            torch.load(stream, weights_only=True)
    except Exception:  # noqa: BLE001 - of pickling and unpickling objects of any kind
        return False
    return True


def _numpy_globals() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """What `torch.load(weights_only=True)` has to know to read numpy's numbers, texts and arrays of them.

    A learning rate that the user has computed with numpy is one, for example.
    """
    kinds = {type(np.dtype(code)) for code in (*np.typecodes["AllInteger"], *np.typecodes["AllFloat"], *"?US")}
    makers: tuple[Any, Any] = (np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0])
    return [np.ndarray, np.dtype, *makers, _codecs.encode, *kinds]
