"""Taking a state apart that was taken apart before: only what has changed is encoded anew.

`flatten` costs some ten microseconds per tensor, on the training thread. A state keeps its form from save to save, so
here it is walked beside the structure of last time: tensors are collected and compared with what is known of them
(shape, strides, dtype, device, and which are the same memory), plain values are encoded again. Nothing of the state is
kept in between, so a tensor that was replaced by another one is simply found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchelastic.checkpoint.format.tensor_parts import asks_for_gradients
from torchelastic.checkpoint.format.tree import Flat, Plain, encode_plain, flatten, tensor_names
from torchelastic.torch_internals.tensors import metadata_of

_PLAIN = (bool, int, float, str, type(None))
_TENSORS = (torch.Tensor, torch.nn.Parameter)

#: What must be equal for a tensor to have the same recipe as last time: shape, strides, dtype, device.
_Form = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
_Known = tuple[int, _Form, bool, bool]


@dataclass(frozen=True)
class CachedTree:
    """What is remembered of a state: no tensor of it.

    Attributes:
        structure: the plain part, with the tensors' names.
        leaves: by the identity of a tensor's node in the structure, its place in the list of tensors, its form, and
            whether it is a parameter and has gradients.
        forms: of all tensors, by place.
    """

    structure: Plain
    leaves: dict[int, _Known]
    forms: tuple[_Form, ...]

    @property
    def size(self) -> int:
        """How many tensors there are."""
        return len(self.forms)


class _ChangedError(Exception):
    """The state has another form than last time."""


def cached_tree_of(flat: Flat) -> CachedTree | None:
    """What to remember of a state that was taken apart; None if it holds tensors that are encoded anew each time."""
    forms = tuple(_form(named.tensor) for named in flat.tensors)
    places = {named.name: place for place, named in enumerate(flat.tensors)}
    leaves: dict[int, _Known] = {}
    _collect_leaves(flat.structure, {name: (place, forms[place]) for name, place in places.items()}, leaves)
    if len(leaves) < len(forms) or any(named.tensor.is_conj() or named.tensor.is_neg() for named in flat.tensors):
        return None
    return CachedTree(flat.structure, leaves, forms)


def flatten_again(
    tree: Any, cached: CachedTree, *, allow_pickles: bool | None = False
) -> tuple[Plain, Sequence[torch.Tensor]] | None:
    """Takes a state apart that has the same form as last time.

    Args:
        tree: the state.
        cached: of last time.
        allow_pickles: as for `flatten`.

    Returns:
        The structure of now, and the tensors in the order of last time; None if the form is another: use `flatten`.
    """
    walk = _Walk(cached, allow_pickles)
    try:
        structure = walk.encode(cached.structure, tree)
    except _ChangedError:
        return None
    return (structure, walk.tensors) if walk.is_complete() else None


def _form(tensor: torch.Tensor) -> _Form:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _collect_leaves(node: Plain, forms: dict[str, tuple[int, _Form]], leaves: dict[int, _Known]) -> None:
    """The plain strided tensors that lie directly in dicts, lists and tuples; a tensor in two places is one node."""
    if isinstance(node, list):
        for item in node:
            _collect_leaves(item, forms, leaves)
    elif isinstance(node, dict):
        (kind, value), *_ = node.items()
        if kind in ("dict", "ordered"):
            _collect_leaves([item for _, item in value], forms, leaves)
        elif kind == "tuple":
            _collect_leaves(value, forms, leaves)
        elif kind == "leaf" and value["kind"] == "strided":
            flags = value.get("parameter", False), value.get("requires_grad", False)
            leaves[id(node)] = (*forms[value["names"]["data"]], *flags)


class _Walk:
    """One walk. What is not known here is left to `flatten`, part by part."""

    def __init__(self, cached: CachedTree, allow_pickles: bool | None) -> None:
        self._leaves = cached.leaves
        self._allow_pickles = allow_pickles
        self._form_of = cached.forms
        # numbers alone: as many tuples would set the garbage collector off, which costs more than all the rest
        self._at: dict[int, int] = {}
        self._also_at: dict[int, list[int]] = {}
        self._found = 0
        self.tensors: list[Any] = [None] * cached.size

    def is_complete(self) -> bool:
        """Whether each tensor was found."""
        return self._found == len(self.tensors)

    def encode(self, node: Plain, value: Any) -> Plain:
        kind = type(value)
        if kind in _TENSORS:
            return self._leaf(node, value)
        if type(node) in _PLAIN:
            if kind in (int, str, float):
                return encode_plain(value)
            if value is None or kind is bool:
                return value
        elif kind in (dict, OrderedDict):
            return self._dict(node, value, "dict" if kind is dict else "ordered")
        elif kind is list and type(node) is list and len(node) == len(value):
            return self._items(node, value)
        elif kind is tuple and _is("tuple", node) and len(node["tuple"]) == len(value):
            items = self._items(node["tuple"], value)
            return node if items is node["tuple"] else {"tuple": items}
        return self._anew(node, value)

    def _dict(self, node: Plain, value: dict[Any, Any], name: str) -> Plain:
        if not _is(name, node) or len(node[name]) != len(value):
            return self._anew(node, value)
        pairs: list[Any] = []
        about = self._metadata(node, value) if name == "ordered" else {}
        changed = about.get("metadata") is not node.get("metadata")
        for pair, (key, item) in zip(node[name], value.items(), strict=True):
            if pair[0] != key or type(pair[0]) is not type(key):
                return self._anew(node, value)
            encoded = self._leaf(pair[1], item) if type(item) in _TENSORS else self.encode(pair[1], item)
            if encoded is pair[1]:
                pairs.append(pair)
            else:
                changed = True
                pairs.append([key, encoded])
        # an earlier save may still be writing the old list: it is left as it is
        return {name: pairs, **about} if changed else node

    def _metadata(self, node: Plain, value: Any) -> dict[str, Plain]:
        metadata = metadata_of(value)
        return {} if metadata is None else {"metadata": self.encode(node.get("metadata"), metadata)}

    def _items(self, nodes: list[Plain], values: Sequence[Any]) -> list[Plain]:
        items = [self.encode(node, value) for node, value in zip(nodes, values, strict=True)]
        return items if any(new is not old for new, old in zip(items, nodes, strict=True)) else nodes

    def _leaf(self, node: Plain, value: torch.Tensor) -> Plain:
        """Asks a tensor for as little as will do: each question costs some 0.2 us, and there are thousands."""
        known = self._leaves.get(id(node))
        if known is None:
            raise _ChangedError
        place, form, is_parameter, requires_grad = known
        try:
            now, address = (value.shape, value.stride(), value.dtype, value.device), value.data_ptr()
        except RuntimeError as error:  # it is not strided any more
            raise _ChangedError from error
        if now != form or (value.requires_grad and asks_for_gradients(value)) is not requires_grad:
            raise _ChangedError
        if (type(value) is torch.nn.Parameter) is not is_parameter:
            raise _ChangedError
        before, self.tensors[place] = self.tensors[place], value
        if before is None:
            self._found += 1
            if not address:
                if value.numel():
                    raise _ChangedError  # its memory was freed; what is empty has none, and shares none
            elif (first := self._at.setdefault(address, place)) != place:
                self._require_another(address, first, place)
        elif before.data_ptr() != address or value.is_conj() or value.is_neg():
            raise _ChangedError  # one tensor in two places has become two
        return node

    def _require_another(self, address: int, first: int, place: int) -> None:
        """Two tensors have not become one: they see the same memory, in different ways."""
        others = self._also_at.setdefault(address, [first])
        if any(self._form_of[other] == self._form_of[place] for other in others):
            raise _ChangedError
        others.append(place)

    def _anew(self, node: Plain, value: Any) -> Plain:
        """A part without tensors, then and now."""
        if tensor_names(node):
            raise _ChangedError
        try:
            flat = flatten(value, allow_pickles=self._allow_pickles)
        except (TypeError, ValueError) as error:
            raise _ChangedError from error  # whoever takes the whole state apart names the place in it
        if flat.tensors:
            raise _ChangedError
        return flat.structure


def _is(kind: str, node: Plain) -> bool:
    return type(node) is dict and kind in node
