"""Many small tensors as the bytes of all, one behind the other, and what each was: to be written at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from torchelastic.inventory.copies import CopyMemory, bytes_of

#: Name, dtype, shape and strides.
_Form = tuple[str, str, tuple[int, ...], tuple[int, ...]]


class TensorPacker:
    """Packs the tensors of one owner, time after time. On one thread."""

    def __init__(self) -> None:
        self._memory = CopyMemory()
        self._of: Sequence[torch.Tensor] = ()
        self._names: list[str] = []
        self._form = msgspec.msgpack.encode([])

    def packed(self, named: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
        """Plain values and few tensors, valid until this is called again; the inverse of `unpacked`.

        Args:
            named: the tensors; None stays None. One in two places is packed once.
        """
        first: dict[int, str] = {}
        again = {
            name: first[id(value)]
            for name, value in named.items()
            if value is not None and first.setdefault(id(value), name) != name
        }
        first_of = {name: value for name, value in named.items() if value is not None and name not in again}
        copies = self._memory.of(list(first_of.values()))
        tensors, memory = copies.settled
        names = [first[id(one)] for one in tensors]
        if tensors is not self._of or names != self._names:
            form = [(name, _text(one.dtype), one.shape, one.stride()) for name, one in zip(names, tensors, strict=True)]
            self._of, self._names, self._form = tensors, names, msgspec.msgpack.encode(form)
        others = {first[id(one)]: copied for one, copied in copies.loose}
        packed = {*names, *others}
        return {
            "form": self._form,
            "bytes": [one.cpu() for one in memory],
            "others": others | {name: value for name, value in first_of.items() if name not in packed},  # empty ones
            "again": again,
            "none": [name for name, value in named.items() if value is None],
        }


def as_packed(named: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
    """What `unpacked` takes, with the tensors as they are."""
    return {"form": msgspec.msgpack.encode([]), "bytes": [], "others": dict(named), "again": {}, "none": []}


def unpacked(packed: Mapping[str, Any]) -> dict[str, torch.Tensor | None]:
    """By name, in memory of their own, on the CPU.

    Args:
        packed: what `TensorPacker.packed` gave.
    """
    found: dict[str, torch.Tensor | None] = {**packed["others"], **dict.fromkeys(packed["none"])}
    data, begin = torch.cat([torch.empty(0, dtype=torch.uint8), *packed["bytes"]]), 0
    for name, dtype, shape, stride in msgspec.msgpack.decode(packed["form"], type=list[_Form]):
        made = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype))
        bytes_of(made).copy_(data[begin : begin + made.nbytes])
        begin += made.nbytes
        found[name] = made
    return found | {name: found[other] for name, other in packed["again"].items()}


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
