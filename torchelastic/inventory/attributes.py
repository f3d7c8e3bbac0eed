"""The attributes of an object, as they were: which value each had, and what was in those that can change.

Copied are lists, dicts, sets and the like with all that is in them, and tensors and arrays of at most `SMALL_BYTES`.
A value of another class stays as it is: what it has inside is not looked at.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)

#: Tensors and arrays with more bytes than this are not copied before each step.
SMALL_BYTES = 64 * 1024
#: As much is copied of one container, with what is in it: about 30 us.
MOST_VALUES, MOST_BYTES = 1000, 4 * SMALL_BYTES

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, deque)
_OTHERS = (set, bytearray)
#: The classes of values that can change in place and are copied. Subclasses may do anything when they are changed.
CHANGEABLE = frozenset({*_MAPPINGS, *_SEQUENCES, *_OTHERS, torch.Tensor, torch.nn.Parameter, np.ndarray})

Restore = Callable[[], object]
_IS_TOO_LARGE = "is too large to be copied before each step"


class NotCopiedError(Exception):
    """A value is not copied before each step; the message says why, after "it"."""


def kept_value(value: Any, *, is_limited: bool = True) -> list[Restore]:
    """What has to be called, in this order, so that a value is again what it is now.

    Args:
        value: of a class in `CHANGEABLE`.
        is_limited: whether what is large is refused.

    Raises:
        NotCopiedError: it is not copied before each step.
    """
    copier = _Copier(is_limited=is_limited)
    copier.copy(value)
    return copier.restores


class _Copier:
    """Copies one value with all that is in it, each thing once.

    Attributes:
        restores: what puts all of it back.
    """

    def __init__(self, *, is_limited: bool) -> None:
        self.restores: list[Restore] = []
        self._seen: set[int] = set()
        self._is_limited = is_limited
        self._values_left, self._bytes_left = MOST_VALUES, MOST_BYTES

    def copy(self, value: Any) -> None:
        """See `kept_value`. A value may contain itself."""
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if id(one) not in self._seen:
                self._seen.add(id(one))
                waiting += [inner for inner in self._copied(one) if type(inner) in CHANGEABLE]

    def _copied(self, value: Any) -> Iterable[Any]:
        """Copies one thing; returns what is in it."""
        kind = type(value)
        if kind in _MAPPINGS:
            before: Any = dict(value)
            self.restores.append(lambda: put_mapping(value, before))
            inside: Iterable[Any] = before.values()
        elif kind in _SEQUENCES:
            before = inside = list(value)
            self.restores.append(lambda: _put_sequence(value, before))
        elif kind is set:
            before, inside = set(value), ()
            self.restores.append(lambda: (value.clear(), value.update(before)))
        elif kind is bytearray:
            before, inside = bytes(value), ()
            self.restores.append(lambda: value.__setitem__(slice(None), before))
        else:
            self._copy_numbers(value)
            return ()
        self._values_left -= len(value)
        if self._values_left < 0 and self._is_limited:
            raise NotCopiedError(_IS_TOO_LARGE)
        return inside

    def _copy_numbers(self, value: Any) -> None:
        is_array = isinstance(value, np.ndarray)
        if isinstance(value, torch.nn.Parameter) or not (
            value.flags.writeable if is_array else not value.is_inference()
        ):
            return  # a weight, which is no matter of attributes; or what no train step can change
        if not is_array and value.grad_fn is not None:
            return  # the result of a forward pass, such as the weight of an old weight_norm: the next one makes it anew
        if not is_array and (value.layout is not torch.strided or value.is_nested or value.is_quantized):
            raise NotCopiedError("is a tensor of a kind that is not copied")
        self._bytes_left -= value.nbytes
        if (value.nbytes > SMALL_BYTES or self._bytes_left < 0) and self._is_limited:
            raise NotCopiedError(_IS_TOO_LARGE)
        if is_array:
            before = value.copy()
            self.restores.append(lambda: np.copyto(value, before))
        else:
            copied = value.detach().clone()
            self.restores.append(lambda: put_tensor(value, copied))


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
    is_nested = tensor.is_nested and tensor.layout is torch.strided  # such a one has no shape
    if is_nested or (tensor.shape, tensor.dtype, tensor.device) == (before.shape, before.dtype, before.device):
        try:
            tensor.copy_(before)
            return
        except (RuntimeError, NotImplementedError):  # several of its elements are one in memory, or it is of inference
            if before.layout is torch.strided and not is_nested and torch.equal(tensor, before):
                return
    tensor.data = before.clone()  # not `resize_`: memory that is shared with numpy cannot be resized


def attributes_of(owner: object, name: str, *, kept_otherwise: Collection[str] = ()) -> list[Restore]:
    """What puts back the attributes of an object that is no module; what is too large is told once, and stays.

    Args:
        owner: it has a `__dict__`.
        name: how a message calls it.
        kept_otherwise: attributes of which only the object is put back, and not what is in it.
    """
    values = vars(owner)
    before = dict(values)
    restores: list[Restore] = [lambda: put_mapping(values, before)]
    for attribute, value in before.items():
        if type(value) in CHANGEABLE and attribute not in kept_otherwise:
            restores += kept_or_logged(value, f"{name}.{attribute}")
    return restores


_logged: set[str] = set()


def kept_or_logged(value: Any, name: str) -> list[Restore]:
    """As `kept_value`; for what is too large nothing, and the log says so once."""
    try:
        return kept_value(value)
    except NotCopiedError as error:
        if name not in _logged:
            _logged.add(name)
            log.warning(
                "%s %s: what a failed step has changed in it stays. Keep it in an object with state_dict and "
                "load_state_dict in ModelState's `extra`, or make it a buffer", name, error,
            )  # fmt: skip
        return []
