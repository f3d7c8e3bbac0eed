"""The attributes of an object, as they were: which value each had, and what was in those that can change.

Copied are lists, dicts, sets and the like with all that is in them, and tensors and arrays of at most `SMALL_BYTES`.
A value of another class stays as it is: what it has inside is not looked at.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)

#: Tensors and arrays with more bytes than this are not copied before each step.
SMALL_BYTES = 64 * 1024
#: As many values are copied of one container, with what is in it: about 30 us.
MOST_VALUES = 1000

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, deque)
_OTHERS = (set, bytearray)
#: The classes of values that can change in place and are copied. Subclasses may do anything when they are changed.
CHANGEABLE = frozenset({*_MAPPINGS, *_SEQUENCES, *_OTHERS, torch.Tensor, torch.nn.Parameter, np.ndarray})

Restore = Callable[[], object]
_MISSING = object()


class TooLargeError(Exception):
    """A value is not copied before each step."""


def kept_value(value: Any) -> list[Restore]:
    """What has to be called, in this order, so that a value is again what it is now.

    Args:
        value: of a class in `CHANGEABLE`.

    Raises:
        TooLargeError: it is too large to be copied before each step.
    """
    restores: list[Restore] = []
    _keep(value, restores, [MOST_VALUES])
    return restores


def _keep(value: Any, restores: list[Restore], left: list[int]) -> None:
    kind = type(value)
    if kind in _MAPPINGS:
        before: Any = dict(value)
        inside: Iterable[Any] = before.values()
        restores.append(lambda: put_mapping(value, before))
    elif kind in _SEQUENCES:
        before = inside = list(value)
        restores.append(lambda: _put_sequence(value, before))
    elif kind is set:
        before, inside = set(value), ()
        restores.append(lambda: (value.clear(), value.update(before)))
    elif kind is bytearray:
        before, inside = bytes(value), ()
        restores.append(lambda: value.__setitem__(slice(None), before))
    else:
        _keep_numbers(value, restores)
        return
    left[0] -= len(value)
    if left[0] < 0:
        raise TooLargeError
    for inner in inside:
        if type(inner) in CHANGEABLE:
            _keep(inner, restores, left)


def _keep_numbers(value: Any, restores: list[Restore]) -> None:
    if isinstance(value, torch.nn.Parameter):
        return  # a weight: not a matter of attributes
    if value.nbytes > SMALL_BYTES:
        raise TooLargeError
    if isinstance(value, torch.Tensor):
        if value.is_inference():
            return  # cannot be changed in a train step
        copied = value.detach().clone()
        restores.append(lambda: put_tensor(value, copied))
    else:
        before = value.copy()
        restores.append(lambda: np.copyto(value, before))


def put_mapping(mapping: MutableMapping[Any, Any], before: Mapping[Any, Any]) -> None:
    """Has the same objects in it as before, in the same order; nothing is done where that is so."""
    if len(mapping) == len(before) and all(
        key is other and value is before[other] for (key, value), other in zip(mapping.items(), before, strict=True)
    ):
        return
    mapping.clear()
    mapping.update(before)


def _put_sequence(sequence: Any, before: list[Any]) -> None:
    sequence.clear()
    sequence.extend(before)


@torch.no_grad()
def put_tensor(tensor: torch.Tensor, before: torch.Tensor) -> None:
    """Has the shape, the type and the bytes that a copy of it has."""
    if (tensor.shape, tensor.dtype, tensor.device) == (before.shape, before.dtype, before.device):
        try:
            tensor.copy_(before)
            return
        except RuntimeError:  # several of its elements are one in memory, or it is of inference mode
            if torch.equal(tensor, before):
                return
    tensor.data = before.clone()  # not `resize_`: memory that is shared with numpy cannot be resized


def attributes_of(owner: object, name: str) -> list[Restore]:
    """What puts back the attributes of an object that is no module; what is too large is told once, and stays.

    Args:
        owner: it has a `__dict__`.
        name: how a message calls it.
    """
    values = vars(owner)
    before = dict(values)
    restores: list[Restore] = [lambda: put_mapping(values, before)]
    for attribute, value in before.items():
        if type(value) in CHANGEABLE:
            restores += kept_or_logged(value, f"{name}.{attribute}")
    return restores


_logged: set[str] = set()


def kept_or_logged(value: Any, name: str) -> list[Restore]:
    """As `kept_value`; for what is too large nothing, and the log says so once."""
    try:
        return kept_value(value)
    except TooLargeError:
        if name not in _logged:
            _logged.add(name)
            log.warning(
                "%s is too large to be copied before each step: what a failed step has changed in it stays. Keep it "
                "in an object with state_dict and load_state_dict in ModelState's `extra`, or make it a buffer", name,
            )  # fmt: skip
        return []
