"""Taking the same state apart again and again: what has not changed since the last save is not worked out anew.

Between two saves of a training run the values of tensors change, a few numbers too, and nothing else. So the second
save only has to see that all tensors are where they were (about a microsecond each) and to encode the numbers that
differ; names, places and layout are those of the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from torchelastic.checkpoint.shards.header import Entry, Header, lay_out
from torchelastic.checkpoint.shards.tree import Plain, flatten

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_CONTAINERS = (dict, OrderedDict, list, tuple)
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


class Unknown(Exception):  # noqa: N818 - no error: the state has another form than last time
    """The state cannot be matched with the one before."""


@dataclass
class _Node:
    """A container as it was: what lies where in it, and how it was encoded."""

    keys: list[object]
    types: list[type]
    values: list[object]  # plain values where they are, None elsewhere
    tensors_at: list[int] = field(default_factory=list)
    children: list[tuple[int, _Node]] = field(default_factory=list)
    plain_at: list[int] = field(default_factory=list)
    encoded: Plain = None


class RecurringLayout:
    """Lays out a state for saving; used by one thread, one object per state that is saved repeatedly.

    It keeps no tensor alive.
    """

    def __init__(self) -> None:
        self._root: _Node | None = None
        self._signatures: list[object] = []
        self._order: list[int] = []
        self._entries: tuple[Entry, ...] = ()

    def lay_out(
        self, tree: Any, meta: Mapping[str, Any], *, allow_pickles: bool = False
    ) -> tuple[Header, list[torch.Tensor]]:
        """Returns the layout of a state and the tensors to copy, in the order of its entries.

        While the state keeps its form, the entries are the same object each time, so that `Stage.fits` is quick.

        Args:
            tree: the state; nothing in it is changed or copied.
            meta: see `Header`.
            allow_pickles: see `flatten`.

        Raises:
            TypeError, ValueError: as `flatten`.
        """
        if self._root is not None:
            try:
                return self._again(self._root, tree, meta)
            except Unknown:
                self._root = None
        flat = flatten(tree, allow_pickles=allow_pickles)
        header = lay_out(flat, meta)
        self._entries = header.entries
        self._remember(tree, flat.structure)
        return header, [named.tensor for named in flat.tensors]

    def _remember(self, tree: Any, structure: Plain) -> None:
        tensors: list[torch.Tensor] = []
        try:
            root = _node_of(tree, structure, tensors)
        except Unknown:
            return  # it holds something that is cheap to save, but not to compare
        signatures = [_signature(tensor) for tensor in tensors]
        first_at = {signature: index for index, signature in reversed(list(enumerate(signatures)))}
        order = sorted(first_at.values())  # a tensor that is in two places is stored once, where it comes first
        if len(order) == len(self._entries):
            self._root, self._signatures, self._order = root, signatures, order

    def _again(self, root: _Node, tree: Any, meta: Mapping[str, Any]) -> tuple[Header, list[torch.Tensor]]:
        tensors: list[torch.Tensor] = []
        structure = _encoded_again(tree, root, tensors)
        if [_signature(tensor) for tensor in tensors] != self._signatures:
            raise Unknown
        header = Header(structure, self._entries, MappingProxyType(dict(meta)))
        return header, [tensors[index] for index in self._order]


def _signature(tensor: torch.Tensor) -> object:
    """Where a tensor is, and what: equal signatures mean the same bytes with the same meaning."""
    place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    return (*place, tensor.is_conj(), tensor.is_neg()) if tensor.is_complex() or tensor.is_neg() else place


def _node_of(value: Any, encoded: Plain, tensors: list[torch.Tensor]) -> _Node:
    kind = type(value)
    if kind not in _CONTAINERS:
        raise Unknown
    is_dict = kind in (dict, OrderedDict)
    items = list(value.values()) if is_dict else list(value)
    keys = list(value) if is_dict else []
    if not all(type(key) in (str, int) for key in keys):
        raise Unknown
    node = _Node(keys, [kind, *map(type, items)], [None] * len(items), encoded=encoded)
    for index, item in enumerate(items):
        if type(item) in _TENSORS:
            if item.layout is not torch.strided or item.is_quantized or not item.numel():
                raise Unknown
            node.tensors_at.append(index)
            tensors.append(item)
        elif type(item) in _PLAIN:
            node.plain_at.append(index)
            node.values[index] = item
        else:
            node.children.append((index, _node_of(item, _item_of(encoded, index), tensors)))
    return node


def _encoded_again(value: Any, node: _Node, tensors: list[torch.Tensor]) -> Plain:
    """How the container is encoded now; the same object as before where nothing in it has changed.

    The encoding of before may still be in use by a save in the background, so it is never changed, only replaced.
    """
    kind = type(value)
    if kind is not node.types[0]:
        raise Unknown
    items = list(value.values()) if kind in (dict, OrderedDict) else list(value)
    if [kind, *map(type, items)] != node.types or (node.keys and list(value) != node.keys):
        raise Unknown
    changed = {}
    order: list[tuple[int, _Node | None]] = [(index, None) for index in node.tensors_at]
    if node.children:
        order = sorted([*order, *node.children], key=lambda pair: pair[0])
    for index, child in order:
        if child is None:
            tensors.append(items[index])
            continue
        before = child.encoded
        after = _encoded_again(items[index], child, tensors)
        if after is not before:
            changed[index] = after
    for index in node.plain_at:
        item = items[index]
        if item is not node.values[index] and (item != node.values[index] or item == 0):  # 0.0 equals -0.0
            changed[index] = flatten(item).structure
            node.values[index] = item
    if changed:
        node.encoded = _replaced(node.encoded, changed)
    return node.encoded


def _item_of(encoded: Plain, index: int) -> Plain:
    if isinstance(encoded, list):
        return encoded[index]
    (kind, items), *_ = encoded.items()
    return items[index] if kind == "tuple" else items[index][1]


def _replaced(encoded: Plain, changed: Mapping[int, Plain]) -> Plain:
    if isinstance(encoded, list):
        return [changed.get(index, item) for index, item in enumerate(encoded)]
    (kind, items), *_ = encoded.items()
    if kind == "tuple":
        return {kind: [changed.get(index, item) for index, item in enumerate(items)]}
    return {kind: [[pair[0], changed.get(index, pair[1])] for index, pair in enumerate(items)]}
