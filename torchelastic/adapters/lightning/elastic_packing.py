"""Nested values as one text and a few tensors: copied before each step, so they have to be quick to copy."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None))
#: What stands in the text for a tensor: its place in the list, or among the numbers.
_TENSOR, _NUMBER = "#tensor", "#number"
_NOTHING = object()


def packed(values: Any) -> dict[str, Any]:
    """Plain values, tensors and containers of them; whatever else is in them is left out.

    Tensors of one number stay where they are, in one tensor of them all: nothing waits for a GPU.
    """
    numbers: list[torch.Tensor] = []
    tensors: list[torch.Tensor] = []
    text = json.dumps(_packed(values, numbers, tensors))
    together = torch.stack([one.to(torch.float64) for one in numbers]) if numbers else torch.zeros(0)
    return {"text": text, "numbers": together, "tensors": tensors}


def unpacked(found: Mapping[str, Any], device: torch.device | None = None) -> Any:
    """The inverse; tuples are lists.

    Args:
        found: what `packed` gave.
        device: of the tensors; None: where they are.
    """

    def put(value: dict[str, Any]) -> Any:
        if _TENSOR in value:
            return found["tensors"][value[_TENSOR]].to(device)
        if _NUMBER not in value:
            return value
        place, name, shape = value[_NUMBER]
        return found["numbers"][place].to(device).to(getattr(torch, name)).reshape(shape)

    return json.loads(found["text"], object_hook=put)


def _packed(value: Any, numbers: list[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        detached = value.detach()
        if (
            detached.numel() == 1
            and not detached.is_complex()
            and (not numbers or numbers[0].device == detached.device)
        ):
            numbers.append(detached.reshape(()))
            return {_NUMBER: [len(numbers) - 1, str(detached.dtype).rpartition(".")[2], list(detached.shape)]}
        tensors.append(detached)
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, enum.Enum):
        return _packed(value.value, numbers, tensors)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        pairs = ((name, _packed(one, numbers, tensors)) for name, one in value.items() if isinstance(name, str))
        return {name: one for name, one in pairs if one is not _NOTHING}
    if isinstance(value, (list, tuple)):
        items = (_packed(one, numbers, tensors) for one in value)
        return [one for one in items if one is not _NOTHING]
    return _NOTHING
